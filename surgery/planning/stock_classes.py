"""The classes of transformers that a conversion can write, and what each has for a Llama-like source.

`Qwen3_5ForCausalLM` (Qwen3.5): Gated DeltaNet, and softmax attention with QK norm and an output gate.
`BailingHybridForCausalLM` (Ling 3.0): Kimi delta attention, with a gate per key channel, and latent attention (MLA). The
other classes with this layer do not fit: softmax layers of Kimi Linear have no RoPE, and it runs with at least one of
them; GLM-5.3 has sparse attention and several residual streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surgery.checkpoint.stock_latent import LATENT_EPS, latent_attention, latent_sizes, longrope
from surgery.checkpoint.stock_tensors import AttentionSizes, kept_layer, mapped_mlp, mapped_outside
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_GROUPS = 8  # of keys and values in latent attention, whose q_proj grows by this factor
COPIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("initializer_range", "rms_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id"),
)


def attention_sizes(shape: AttentionShape, eps: float, dtype: torch.dtype) -> AttentionSizes:
    """Return the sizes of kept attention."""
    s = shape
    return AttentionSizes(s.heads, s.groups, s.key, s.rotary, s.interleaved, s.scaling, eps, dtype)


class StockClass(ABC):
    """A class of transformers. name: of the class. layer: of its linear attention, in words. linear: name of the module
    in a layer. has_qk_norm: whether softmax attention has one.
    """

    name: str
    layer: str
    linear: str
    has_qk_norm: bool

    @abstractmethod
    def config(
        self, model: Any, shape: AttentionShape, converted: tuple[int, ...], *, dtype: torch.dtype, has_bias: bool
    ) -> PreTrainedConfig:
        """Return the config of the result. model: the source, maybe without weights; shape: of its attention."""

    @abstractmethod
    def build(self, config: Any) -> Any:
        """Return a model with random weights."""

    @abstractmethod
    def kept_layer(self, layer: Mapping[str, Tensor], sizes: AttentionSizes) -> dict[str, Tensor]:
        """Return the tensors of a layer that keeps softmax attention, by name in the layer."""

    @abstractmethod
    def mlp(self, layer: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the factors (D,) of the columns of what attention reads, and the tensors of norms and MLP."""

    @abstractmethod
    def outside(
        self, embedding: Tensor, norm_D: Tensor, head: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weight of the last norm and of the output embedding, None if it stays tied. head: None if tied."""

    @abstractmethod
    def wrong(self, shape: AttentionShape, config: Any, norm: int | None, has_bias: bool) -> dict[str, bool]:
        """Return reasons against attention of this shape in kept layers, with whether they hold. config: of the source.
        norm: dims of its QK norm, None without one. has_bias: of the projections.
        """

    def files(self, model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors by their names in a checkpoint, in `dtype`; a tied output embedding is left out."""
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        return {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name not in tied}

    @abstractmethod
    def tiny(self, neutral_norm: bool) -> tuple[str, ...]:
        """Return the names of the projections of kept attention whose values are so small that a norm is linear."""

    @abstractmethod
    def frozen(self, neutral_norm: bool) -> tuple[str, ...]:
        """Return the names of the modules of kept attention that no training may change: those of `tiny`, and the norms
        whose weights undo them.
        """

    @abstractmethod
    def note(self, neutral_norm: bool) -> str | None:
        """Return what training must leave frozen, None for nothing. neutral_norm: see `StockPlan`."""


class Qwen35(StockClass):
    """Qwen3.5."""

    name, layer, linear, has_qk_norm = "Qwen3_5ForCausalLM", "Gated DeltaNet", "linear_attn", True

    def config(
        self, model: Any, shape: AttentionShape, converted: tuple[int, ...], *, dtype: torch.dtype, has_bias: bool
    ) -> PreTrainedConfig:
        """Return the config of the result."""
        from transformers.models.qwen3_5 import Qwen3_5TextConfig

        config = model.config
        options: dict[str, Any] = {"qkv_bias": True} if has_bias else {}  # what vLLM reads in place of attention_bias
        stock: PreTrainedConfig = Qwen3_5TextConfig(
            **{name: getattr(config, name) for name in COPIED},
            **options,
            tie_word_embeddings=config.tie_word_embeddings,
            architectures=[self.name],
            attention_bias=has_bias,
            head_dim=shape.key,
            hidden_act="silu",
            layer_types=layer_types(config.num_hidden_layers, converted),
            linear_conv_kernel_dim=4,
            linear_key_head_dim=shape.key,
            linear_num_key_heads=shape.heads,
            linear_num_value_heads=shape.heads,
            linear_value_head_dim=shape.value,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.groups,
            rope_parameters={**config.rope_parameters, "partial_rotary_factor": shape.rotary / shape.key},
        )
        return stock

    def build(self, config: Any) -> Any:
        """Return a model with random weights."""
        from transformers.models.qwen3_5 import Qwen3_5ForCausalLM

        return Qwen3_5ForCausalLM(config)

    def kept_layer(self, layer: Mapping[str, Tensor], sizes: AttentionSizes) -> dict[str, Tensor]:
        """Return the tensors of a layer that keeps softmax attention."""
        return kept_layer(layer, sizes)

    def mlp(self, layer: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the factors of the columns of attention, and the tensors of norms and MLP."""
        return mapped_mlp(layer, dtype)

    def outside(
        self, embedding: Tensor, norm_D: Tensor, head: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weights of the last norm and of the output embedding."""
        return mapped_outside(embedding, norm_D, head, dtype)

    def wrong(self, shape: AttentionShape, config: Any, norm: int | None, has_bias: bool) -> dict[str, bool]:
        """Return reasons against attention of this shape, with whether they hold."""
        return {
            "its RoPE rotates neighbouring pairs of dims, and the class rotates halves": shape.interleaved,
            f"its QK norm spans all heads ({norm} dims), and the class norms each head ({shape.key} dims)": norm
            not in (None, shape.key),
        }

    def tiny(self, neutral_norm: bool) -> tuple[str, ...]:
        """Return the names of the projections of kept attention with small values."""
        return ("q_proj", "k_proj") if neutral_norm else ()

    def frozen(self, neutral_norm: bool) -> tuple[str, ...]:
        """Return the names of the modules of kept attention that no training may change."""
        return (*self.tiny(True), "q_norm", "k_norm") if neutral_norm else ()

    def note(self, neutral_norm: bool) -> str | None:
        """Return what training must leave frozen."""
        if not neutral_norm:
            return None
        return (
            "note: the source has no QK norm. That of the kept layers is made linear by tiny q_proj and k_proj with "
            "large norm weights: exact to rounding, but keep these four tensors of the kept layers frozen in training"
        )


class Ling3(StockClass):
    """Ling 3.0. Its norms multiply by their weight, and its output embedding is never tied."""

    name, layer, linear, has_qk_norm = "BailingHybridForCausalLM", "Kimi delta attention", "self_attn", False
    FLOAT32 = ("conv1d", "dt_bias", "A_log")  # which the class keeps in float32

    def config(
        self, model: Any, shape: AttentionShape, converted: tuple[int, ...], *, dtype: torch.dtype, has_bias: bool
    ) -> PreTrainedConfig:
        """Return the config of the result."""
        from transformers.models.bailing_hybrid import BailingHybridConfig

        config, sizes = model.config, attention_sizes(shape, LATENT_EPS, dtype)
        latent, rest, rotated = latent_sizes(sizes)
        with torch.device("cpu"):
            rope = type(model.model.rotary_emb)(config)
        stock: PreTrainedConfig = BailingHybridConfig(
            **{name: getattr(config, name) for name in COPIED},
            architectures=[self.name],
            first_k_dense_replace=config.num_hidden_layers,
            head_dim=shape.key,
            hidden_act="silu",
            kv_lora_rank=latent,
            layer_types=layer_types(config.num_hidden_layers, converted),
            mlp_layer_types=["dense"] * config.num_hidden_layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            num_mtp_layers=0,
            qk_nope_head_dim=rest,
            qk_rope_head_dim=rotated,
            rope_parameters=longrope(
                rope.inv_freq, float(rope.attention_scaling), sizes, config.max_position_embeddings
            ),
            rope_theta=1.0,
            tie_word_embeddings=False,
            v_head_dim=shape.value,
        )
        return stock

    def build(self, config: Any) -> Any:
        """Return a model with random weights."""
        from transformers.models.bailing_hybrid import BailingHybridForCausalLM

        return BailingHybridForCausalLM(config)

    def kept_layer(self, layer: Mapping[str, Tensor], sizes: AttentionSizes) -> dict[str, Tensor]:
        """Return the tensors of a layer that keeps softmax attention."""
        return self.mlp(layer, sizes.dtype)[1] | latent_attention(layer, sizes)

    def mlp(self, layer: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the factors of the columns of attention, and the tensors of norms and MLP."""
        same = {name: tensor for name, tensor in layer.items() if not name.startswith("self_attn.")}
        return torch.ones_like(layer["input_layernorm.weight"]), same

    def outside(
        self, embedding: Tensor, norm_D: Tensor, head: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weights of the last norm and of the output embedding."""
        return norm_D, embedding if head is None else head

    def wrong(self, shape: AttentionShape, config: Any, norm: int | None, has_bias: bool) -> dict[str, bool]:
        """Return reasons against attention of this shape, with whether they hold."""
        return {
            "it has a QK norm, and the latent attention of the class has none": norm is not None,
            "its q_proj has a bias, and that of the class has none": has_bias,
            "the frequencies of its RoPE depend on the length of the text": config.rope_parameters.get("rope_type")
            in ("dynamic", "longrope"),
            f"its kept layers have {shape.groups} groups of keys and values. The class shares one rotated key among all "
            f"heads, so that q_proj would grow by this factor (at most {MOST_GROUPS})": shape.groups > MOST_GROUPS,
        }

    def files(self, model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors by their names in a checkpoint."""
        from transformers.core_model_loading import revert_weight_conversion

        state = {
            name: tensor.float() if any(part in name for part in self.FLOAT32) else tensor.to(dtype)
            for name, tensor in model.state_dict().items()
        }
        files: dict[str, Tensor] = revert_weight_conversion(model, state)
        return {name: tensor.contiguous() for name, tensor in files.items()}

    def tiny(self, neutral_norm: bool) -> tuple[str, ...]:
        """Return the names of the projections of kept attention with small values."""
        return ("kv_a_proj_with_mqa",)

    def frozen(self, neutral_norm: bool) -> tuple[str, ...]:
        """Return the names of the modules of kept attention that no training may change."""
        return (*self.tiny(neutral_norm), "kv_a_layernorm")

    def note(self, neutral_norm: bool) -> str | None:
        """Return what training must leave frozen."""
        return (
            "note: the norm in the latent attention of the kept layers is made linear by tiny rows of kv_a_proj_with_mqa "
            "with large weights behind them: exact to rounding, but keep kv_a_proj_with_mqa and kv_a_layernorm frozen in "
            "training"
        )


def layer_types(count: int, converted: tuple[int, ...]) -> list[str]:
    """Return the types of all layers, as configs name them."""
    return ["linear_attention" if index in converted else "full_attention" for index in range(count)]


STOCK_CLASSES: dict[str, StockClass] = {"gated-deltanet": Qwen35(), "kda": Ling3()}


def tiny_modules(stock: Any) -> list[str]:
    """Return the paths of the projections whose values are so small that the norm behind them is linear.

    stock: entry of a report (surgery.checkpoint.report.StockReport); anything else has none.
    """
    return _kept_modules(stock, lambda stock_class, neutral: stock_class.tiny(neutral))


def frozen_modules(stock: Any) -> list[str]:
    """Return the paths of the modules that no training may change: these projections, and the norms behind them.

    stock: as in `tiny_modules`.
    """
    return _kept_modules(stock, lambda stock_class, neutral: stock_class.frozen(neutral))


def _kept_modules(stock: Any, names: Callable[[StockClass, bool], tuple[str, ...]]) -> list[str]:
    """Return the paths of the modules with these names in the layers that keep softmax."""
    if not isinstance(stock, dict):
        return []
    named = {stock_class.name: stock_class for stock_class in STOCK_CLASSES.values()}
    stock_class = named.get(stock.get("stock_class", ""))
    leaves = names(stock_class, bool(stock.get("neutral_qk_norm"))) if stock_class else ()
    return [f"model.layers.{index}.self_attn.{leaf}" for index in stock.get("softmax_layers", ()) for leaf in leaves]


def check_tiny_kept(name: str, report: Any, replaced: Iterable[str]) -> None:
    """Raise SurgeryError if a recipe replaces such projections: what a matrix of 1e-9 loses, the norm makes large.

    name: of the checkpoint; report: its surgery_report.json, None without one; replaced: paths of linears.
    """
    tiny = set(tiny_modules(report.get("stock") if isinstance(report, dict) else None))
    if wrong := [path for path in replaced if path in tiny]:
        raise SurgeryError(
            f"{name} is a conversion into a stock class, and the recipe replaces {wrong[0]}, whose values are tiny so that "
            "the norm behind it is linear (docs/stock.md). Convert the source of this checkpoint, or leave attention out: "
            "--set 'rules=[{match: \"attention.*\", structure: dense}]'"
        )
