"""Models of the papers' experiments: small Llama decoders whose attention is a mixer, initialized as by `surgery
pretrain`.

RecallModel      logits at the labelled positions only
ValuesModel      continuous inputs and outputs, as in the stages `regress` and `classify`
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.papers.training.values import ReadIn, make_read_out
from surgery.planning.recipe import validate_recipe
from surgery.training.pretrain.initialize import make_model, plan_new_model
from surgery.training.recipe import parse_healing_recipe


class NoMLP(nn.Module):
    """An MLP that adds nothing: MQAR is trained without one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros of the shape of x."""
        return torch.zeros_like(x)


class NormAndConvolution(nn.Module):
    """A layer's norm, followed by a causal convolution over `width` tokens in each channel, initially the identity."""

    def __init__(self, norm: nn.Module, channels: int, width: int):
        super().__init__()
        self.norm, self.width = norm, width
        self.weight_WC = nn.Parameter(torch.zeros(width, channels))
        with torch.no_grad():
            self.weight_WC[-1] = 1.0

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return the convolved rows (B, T, C)."""
        x_BTC = self.norm(x_BTC)
        padded = nn.functional.pad(x_BTC, (0, 0, self.width - 1, 0))
        length = x_BTC.shape[1]
        parts = [padded[:, i : i + length] * self.weight_WC[i] for i in range(self.width)]
        return torch.stack(parts).sum(0)


def make_decoder(
    attention: dict[str, Any] | None,
    *,
    width: int,
    layers: int,
    heads: int,
    length: int,
    vocabulary: int,
    seed: int,
    mlp: int = 0,
    convolution: int = 0,
    embedding_std: float = 1.0,
    structure: dict[str, Any] | None = None,
) -> Any:
    """Return an initialized Llama in float32. attention: keys of a recipe's `attention`, None: softmax with RoPE.

    structure: keys of a recipe for all linears but the head; None: dense. mlp: hidden units, 0: no MLP. convolution:
    width in tokens of a convolution before every mixer, 0: none.
    """
    from transformers import LlamaConfig

    config: Any = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp or 1,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    config._attn_implementation = "eager"  # CUDA graphs of stacked runs need it
    plan = None
    keys: dict[str, Any] = {**(structure or {"structure": "dense"})}
    if attention is not None:
        keys["attention"] = attention
    if structure or attention:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            plan = plan_new_model(Path(folder), validate_recipe(keys, "experiment"))
    model = make_model(config, plan, embedding_std, seed)
    for layer in model.model.layers:
        if not mlp:
            layer.mlp, layer.post_attention_layernorm = NoMLP(), nn.Identity()
        if convolution:
            layer.input_layernorm = NormAndConvolution(layer.input_layernorm, width, convolution)
    return model


class RecallModel(nn.Module):
    """A causal language model that returns logits (B, P, V) at given positions (B, P) only."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor, at_BP: Tensor, mask: Tensor) -> Tensor:
        """Return the logits. mask: the causal mask."""
        h_BTD = self.model.model(input_ids=ids_BT, attention_mask=mask, use_cache=False).last_hidden_state
        h_BPD = h_BTD.gather(1, at_BP.unsqueeze(-1).expand(-1, -1, h_BTD.shape[-1]))
        return self.model.lm_head(h_BPD)


class ValuesModel(nn.Module):
    """The body of a causal language model with a linear read-in and read-out of continuous values.

    positions: number of learned positions that are added to the inputs, for attention without RoPE; 0: none.
    """

    def __init__(self, model: Any, inputs: int, outputs: int, seed: int, positions: int = 0):
        super().__init__()
        width = model.config.hidden_size
        self.body = model.model
        self.body.embed_tokens = nn.Identity()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.read_in, self.read_out = ReadIn(inputs, width), make_read_out(width, outputs)
            self.position_TD = nn.Parameter(torch.randn(positions, width)) if positions else None

    def forward(self, values_BTI: Tensor, mask: Tensor) -> Tensor:
        """Return the outputs (B, T, O). mask: the causal mask."""
        x_BTD = self.read_in(values_BTI)
        x_BTD = x_BTD if self.position_TD is None else x_BTD + self.position_TD
        h_BTD = self.body(inputs_embeds=x_BTD, attention_mask=mask, use_cache=False).last_hidden_state
        return self.read_out(h_BTD)


def make_stage(
    steps: int, *, base_width: int, warmup: float = 0.05, weight_decay: float = 0.0, floor: float = 0.0
) -> Any:
    """Return a recipe stage at base rate 1 with muP rates, AdamW and a cosine schedule; tokens are counted in steps."""
    keys: dict[str, Any] = {"kind": "lm", "trains": ["all"], "rate": 1.0, "length": 8, "batch": 1, "tokens": 8 * steps}
    keys["optimiser"] = {"base_width": base_width, "weight_decay": weight_decay}
    keys["schedule"] = {"name": "cosine", "warmup": warmup, "floor": floor}
    return parse_healing_recipe({"stages": [keys]}).stages[0]
