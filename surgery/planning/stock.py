"""The plan of a conversion into a stock Qwen3.5 text model, whose linear layers are Gated DeltaNet.

The stock class has one form of layer: norms before attention and MLP, an MLP of three linears without biases, QK norm
per head, a sigmoid gate on the heads' outputs. What fits it is found in two steps, before any weight is read: the names
and shapes of the source's tensors and its attention, then the logits of a small random model of the source's config
beside those of the stock model with its tensors.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surgery.architectures.dry_run import library_class, observe_attention
from surgery.checkpoint.meta_model import MetaModel, bare_model
from surgery.checkpoint.source import CheckpointSource
from surgery.checkpoint.stock_tensors import AttentionSizes, kept_layer, mapped_outside
from surgery.core.config import is_layer_selected
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape
from surgery.planning.recipe import ConversionRecipe, StockRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STOCK_CLASS = "Qwen3_5ForCausalLM"
OUTER = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
INNER = (
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
OPTIONAL = (*(f"self_attn.{name}_proj.bias" for name in "qkv"), "self_attn.q_norm.weight", "self_attn.k_norm.weight")
# Why a tensor has no place, by a part of its name. The first that occurs is given.
REASONS = {
    "post_feedforward_layernorm": "it has norms behind attention and MLP, and a Qwen3.5 layer has them in front only",
    "experts": "it has routed experts, and the dense Qwen3.5 class has one MLP in each layer",
    "mlp.gate.": "it has routed experts, and the dense Qwen3.5 class has one MLP in each layer",
    "linear_attn": "some of its layers are linear already. See docs/upgrade.md",
    "mixer": "some of its layers are linear already. See docs/upgrade.md",
    "vision": "it reads images, and the class reads text only",
    "visual": "it reads images, and the class reads text only",
    "o_proj.bias": "its output projection has a bias, which engines do not load for this class",
    "mlp": "its MLP is not gate_proj, up_proj and down_proj without biases",
}
TOLERANCE = 1e-4  # of the largest logit in float32, between the source and the stock model with softmax in all layers


@dataclass(frozen=True)
class StockPlan:
    """A conversion into a stock class. converted: numbers of the layers that become Gated DeltaNet. config: of the
    result. shape: of the attention. neutral_norm: whether the source has no QK norm, so that the stock one is made linear.
    """

    source: str
    model_type: str
    converted: tuple[int, ...]
    config: PreTrainedConfig
    shape: AttentionShape
    neutral_norm: bool
    dtype: torch.dtype

    @property
    def sizes(self) -> AttentionSizes:
        """The sizes of the kept attention."""
        s = self.shape
        return AttentionSizes(s.heads, s.groups, s.key, s.scaling, self.config.rms_norm_eps, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data. bytes: of one sequence's state in all linear layers (float32), and of the keys
        and values of one token in the layers that keep softmax.
        """
        config, layers = self.config, self.config.num_hidden_layers
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
        token = 2 * self.shape.groups * self.shape.key * self.dtype.itemsize
        return {
            "source": self.source,
            "model_type": self.model_type,
            "stock_class": STOCK_CLASS,
            "linear_layers": list(self.converted),
            "softmax_layers": [index for index in range(layers) if index not in self.converted],
            "state_bytes": state * len(self.converted),
            "token_bytes": {"before": token * layers, "after": token * (layers - len(self.converted))},
            "neutral_qk_norm": self.neutral_norm,
        }

    def lines(self) -> list[str]:
        """Return the plan in words."""
        data = self.to_dict()
        kept, token = data["softmax_layers"], data["token_bytes"]
        lines = [
            f"{self.source}: {self.model_type} -> {STOCK_CLASS} (transformers, vLLM, fla), served without surgery",
            f"{len(self.converted)} of {len(self.converted) + len(kept)} layers become Gated DeltaNet; softmax stays in layers "
            + ", ".join(map(str, kept)),
            f"cache of one sequence: {token['before']:,} -> {token['after']:,} bytes per token, and a state of "
            f"{data['state_bytes']:,} bytes",
        ]
        if self.neutral_norm:
            lines.append(
                "note: the source has no QK norm. That of the kept layers is made linear by tiny q_proj and k_proj with "
                "large norm weights: exact to rounding, but keep these four tensors of the kept layers frozen in training"
            )
        return lines


def plan_stock(source: CheckpointSource, recipe: ConversionRecipe, trust_remote_code: bool = False) -> StockPlan:
    """Return the plan. Raises SurgeryError with the reason if the source does not fit the stock class."""
    assert recipe.stock is not None
    settings = recipe.stock
    model: Any = MetaModel(source, trust_remote_code).model if source.tensors else bare_model(source, trust_remote_code)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    _check_names(set(shapes), source.name)
    config: Any = model.config
    count = config.num_hidden_layers
    converted = tuple(
        index
        for index in range(count)
        if is_layer_selected(settings.layers, index, count) and (index + 1) % settings.interval
    )
    if not converted:
        raise _refusal(source.name, f'layers "{settings.layers}" and interval {settings.interval} convert no layer')
    if len(converted) == count:
        raise _refusal(
            source.name,
            "the class needs a layer with softmax attention. Set stock.interval to at most "
            f"{count}, the number of layers",
        )
    kept = _kept_shapes(model, converted, source.name)
    _check_kept(kept, config, shapes, source.name)
    has_bias = any(name.endswith("_proj.bias") for name in shapes)
    stock = stock_config(config, kept[0], settings, converted, has_bias)
    neutral = "model.layers.0.self_attn.q_norm.weight" not in shapes
    if neutral and source.dtype == torch.float16:
        raise _refusal(
            source.name, "float16 cannot hold the small q_proj that makes the QK norm linear. Give --dtype bfloat16"
        )
    plan = StockPlan(source.name, config.model_type, converted, stock, kept[0], neutral, source.dtype)
    _compare_small(model, plan)
    return plan


def stock_config(
    config: Any, shape: AttentionShape, settings: StockRecipe, converted: tuple[int, ...], has_bias: bool
) -> PreTrainedConfig:
    """Return the config of the stock model. config: of the source; shape: of its attention."""
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    options: dict[str, Any] = {"qkv_bias": True} if has_bias else {}  # what vLLM reads in place of attention_bias
    copied = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
        *("initializer_range", "rms_norm_eps", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
    )
    stock: PreTrainedConfig = Qwen3_5TextConfig(
        **{name: getattr(config, name) for name in copied},
        **options,
        architectures=[STOCK_CLASS],
        attention_bias=has_bias,
        head_dim=shape.key,
        hidden_act="silu",
        layer_types=[
            "linear_attention" if index in converted else "full_attention" for index in range(config.num_hidden_layers)
        ],
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


def _refusal(name: str, reason: str) -> SurgeryError:
    return SurgeryError(f"{name} cannot become a stock {STOCK_CLASS}: {reason}")


def _check_names(names: set[str], source: str) -> None:
    """Raise SurgeryError unless a model has the tensors of a layer of the stock class."""
    inner = {match[2] for name in names if (match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name))}
    outer = {name for name in names if not re.fullmatch(r"model\.layers\.\d+\..+", name)}
    strange = sorted((inner - {*INNER, *OPTIONAL}) | (outer - {*OUTER}))
    for part, reason in REASONS.items():
        if found := next((name for name in strange if part in name), None):
            raise _refusal(source, f"{reason} ({found})")
    if strange:
        raise _refusal(source, f"its tensor {strange[0]} has no place there")
    if lacking := [name for name in (*OUTER, *INNER) if name not in inner | outer]:
        raise _refusal(source, f"it has no {lacking[0]}")


def _kept_shapes(model: Any, converted: tuple[int, ...], source: str) -> list[AttentionShape]:
    """Return the shapes of the attention that is kept. Raises SurgeryError if any layer has none that can be read."""
    seen, kept = observe_attention(model), []
    for index in range(model.config.num_hidden_layers):
        attention = seen.get(f"model.layers.{index}.self_attn")
        if attention is None or attention.shape is None:
            raise _refusal(source, attention.refusal if attention else f"its layer {index} has no attention")
        if index not in converted:
            kept.append(attention.shape)
    return kept


def _check_kept(kept: list[AttentionShape], config: Any, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raise SurgeryError if the attention of the kept layers has what the stock class has not."""
    first = kept[0]
    rope = getattr(config, "rope_parameters", None) or {}
    norm = shapes.get("model.layers.0.self_attn.q_norm.weight", (first.key,))
    wrong = {
        "its kept layers differ from each other": any(shape != first for shape in kept),
        f"its kept layers have a sliding window of {first.window} tokens, and the class reads all": first.window,
        "its scores have a softcap": first.softcap,
        "its attention is not causal": not first.causal,
        "its kept layers have no RoPE": not first.rotary,
        "its RoPE rotates neighbouring pairs of dims, and the class rotates halves": first.interleaved,
        f"its RoPE has several bases ({', '.join(rope)}), and the class has one": "rope_theta" not in rope,
        "its values have another size than its keys": first.value != first.key,
        f"its QK norm spans all heads ({norm[0]} dims), and the class norms each head ({first.key} dims)": norm
        != (first.key,),
        f"its MLP has the activation {config.hidden_act}, and the class has silu": config.hidden_act != "silu",
    }
    for reason, is_so in wrong.items():
        if is_so:
            raise _refusal(source, reason)


# -- comparison of a small random model ------------------------------------------------------------
@torch.no_grad()
def stock_tensors(tensors: Mapping[str, Tensor], plan: StockPlan, layers: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the tensors outside the layers, and those of `layers`, which keep softmax attention.

    tensors: of the source in float32 or float64. "lm_head.weight" is left out if it stays tied.
    """
    embedding = tensors["model.embed_tokens.weight"]
    head = None if plan.config.tie_word_embeddings else tensors["lm_head.weight"]
    norm_D, new_head = mapped_outside(embedding, tensors["model.norm.weight"], head, plan.dtype)
    mapped = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm_D}
    if new_head is not None:
        mapped["lm_head.weight"] = new_head
    for index in layers:
        prefix = f"model.layers.{index}."
        mapped |= {prefix + name: t for name, t in kept_layer(layer_tensors(tensors, index), plan.sizes).items()}
    return mapped


def layer_tensors(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return the tensors of a layer by their name in it."""
    prefix = f"model.layers.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _compare_small(model: nn.Module, plan: StockPlan) -> None:
    """Raise SurgeryError if the stock class computes something else with the tensors of a small random model of the
    source's config, all layers with softmax attention.
    """
    cls, small = library_class(model), _small_config(model.config, plan.shape)
    default = torch.get_default_dtype()
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            torch.set_default_dtype(torch.float32)
            original = cls(small).eval()
            for name, parameter in original.named_parameters():
                parameter.normal_(std=0.4).add_(1.0 if "norm" in name else 0.0)
            change = _change_of_logits(original, plan)
        except SurgeryError:
            raise
        except Exception as error:  # code of any family
            raise _refusal(
                plan.source,
                "a small model of its config could not be compared "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]})",
            ) from error
        finally:
            torch.set_default_dtype(default)
    if not change <= TOLERANCE:
        raise _refusal(
            plan.source,
            f"{cls.__name__} computes something else than the class with the same tensors: logits of a small "
            f"random model differ by {change:.1g} of the largest (limit {TOLERANCE:g})",
        )


def _small_config(config: Any, shape: AttentionShape) -> Any:
    """Return a copy of a config with few heads of 8 dims, and as many layers."""
    small = copy.deepcopy(config)
    heads = 2 if shape.heads == shape.groups else 4
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 24, "vocab_size": 64, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    for name, value in sizes.items():
        setattr(small, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    return small


def _change_of_logits(original: Any, plan: StockPlan) -> float:
    """Return the largest difference of the logits / the largest logit of a small model."""
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM

    seen = observe_attention(original)["model.layers.0.self_attn"].shape
    assert seen is not None
    every = tuple(range(original.config.num_hidden_layers))
    has_bias = any(name.endswith("_proj.bias") for name, _ in original.named_parameters())
    config: Any = stock_config(original.config, seen, StockRecipe(), (), has_bias)
    small = StockPlan("", "", (), config, seen, plan.neutral_norm, torch.float32)
    stock: Any = Qwen3_5ForCausalLM(config)
    stock.eval()
    load_tensors(stock, stock_tensors(original.state_dict(), small, every))
    ids = torch.arange(2 * 24).view(2, 24) * 7 % 61
    before, after = original(ids).logits, stock(ids).logits
    return math.inf if not after.isfinite().all() else float((after - before).abs().max() / before.abs().max())


def load_tensors(stock: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the stock model; a tied output embedding is untied if the tensors have one."""
    if "lm_head.weight" in tensors and stock.config.tie_word_embeddings:
        stock.config.tie_word_embeddings = False
        stock.lm_head.weight = nn.Parameter(stock.lm_head.weight.clone())
    parameters = dict(stock.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)
