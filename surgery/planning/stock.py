"""The plan of a conversion into a stock class of transformers (surgery.planning.stock_classes).

These classes have one form of layer: norms before attention and MLP, and an MLP of three linears without biases. What
fits a class is found in two steps, before any weight is read: the names and shapes of the source's tensors and its
attention, then the logits of a small random model of the source's config beside those of the stock model with its
tensors.
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
from surgery.checkpoint.stock_tensors import AttentionSizes
from surgery.core.config import is_layer_selected
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.stock_classes import STOCK_CLASSES, StockClass, attention_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OUTER = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
INNER = (
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
OPTIONAL = (*(f"self_attn.{name}_proj.bias" for name in "qkv"), "self_attn.q_norm.weight", "self_attn.k_norm.weight")
# Why a tensor has no place, by a part of its name. The first that occurs is given.
REASONS = {
    "post_feedforward_layernorm": "it has norms behind attention and MLP, and the class has them in front only",
    "experts": "it has routed experts, and a layer of the class has one MLP",
    "mlp.gate.": "it has routed experts, and a layer of the class has one MLP",
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
    """A conversion into a stock class. linear: key of STOCK_CLASSES. converted: numbers of the layers that become linear.
    config: of the result. shape: of the attention. neutral_norm: whether the source has no QK norm, so that that of
    the stock class is made linear.
    """

    linear: str
    source: str
    model_type: str
    converted: tuple[int, ...]
    config: PreTrainedConfig
    shape: AttentionShape
    neutral_norm: bool
    dtype: torch.dtype

    @property
    def stock_class(self) -> StockClass:
        """The class that is written."""
        return STOCK_CLASSES[self.linear]

    @property
    def sizes(self) -> AttentionSizes:
        """The sizes of the kept attention."""
        return attention_sizes(self.shape, self.config.rms_norm_eps, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data. bytes: of one sequence's state in all linear layers (float32), and of the keys
        and values of one token in the layers that keep softmax.
        """
        layers = self.config.num_hidden_layers
        state = self.shape.heads * self.shape.key * self.shape.value * 4
        token = 2 * self.shape.groups * self.shape.key * self.dtype.itemsize
        return {
            "source": self.source,
            "model_type": self.model_type,
            "stock_class": self.stock_class.name,
            "linear": self.stock_class.layer,
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
            f"{self.source}: {self.model_type} -> {data['stock_class']}, served without surgery",
            f"{len(self.converted)} of {len(self.converted) + len(kept)} layers become {data['linear']}; softmax stays in "
            f"layers {', '.join(map(str, kept))}",
            f"cache of one sequence: {token['before']:,} -> {token['after']:,} bytes per token, and a state of "
            f"{data['state_bytes']:,} bytes",
        ]
        if note := self.stock_class.note(self.neutral_norm):
            lines.append(note)
        return lines


def plan_stock(source: CheckpointSource, recipe: ConversionRecipe, trust_remote_code: bool = False) -> StockPlan:
    """Return the plan. Raises SurgeryError with the reason if the source does not fit the stock class."""
    assert recipe.stock is not None
    settings, stock_class = recipe.stock, STOCK_CLASSES[recipe.stock.linear]
    model: Any = MetaModel(source, trust_remote_code).model if source.tensors else bare_model(source, trust_remote_code)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    refuse = Refusal(source.name, stock_class.name)
    _check_names(set(shapes), refuse)
    config: Any = model.config
    count = config.num_hidden_layers
    converted = tuple(
        index
        for index in range(count)
        if is_layer_selected(settings.layers, index, count) and (index + 1) % settings.interval
    )
    if not converted:
        raise refuse(f'layers "{settings.layers}" and interval {settings.interval} convert no layer')
    if len(converted) == count:
        raise refuse(
            "the class needs a layer with softmax attention. Set stock.interval to at most "
            f"{count}, the number of layers",
        )
    kept = _kept_shapes(model, converted, refuse)
    has_bias = any(name.endswith("_proj.bias") for name in shapes)
    norm = shapes.get("model.layers.0.self_attn.q_norm.weight")
    others = stock_class.wrong(kept[0], config, norm[0] if norm else None, has_bias)
    _check_kept(kept, config, others, refuse)
    neutral = norm is None and stock_class.has_qk_norm
    if stock_class.tiny(neutral) and source.dtype == torch.float16:
        raise refuse("float16 cannot hold the small weights that make a norm linear. Give --dtype bfloat16")
    try:
        stock = stock_class.config(model, kept[0], converted, dtype=source.dtype, has_bias=has_bias)
    except ImportError:
        raise refuse("this version of transformers does not have the class. Install transformers 5.23") from None
    plan = StockPlan(settings.linear, source.name, config.model_type, converted, stock, kept[0], neutral, source.dtype)
    _compare_small(model, plan, refuse)
    return plan


@dataclass(frozen=True)
class Refusal:
    """Makes errors about a source that does not fit a class."""

    source: str
    stock_class: str

    def __call__(self, reason: str) -> SurgeryError:
        """Return the error."""
        return SurgeryError(f"{self.source} cannot become a stock {self.stock_class}: {reason}")


def _check_names(names: set[str], refuse: Refusal) -> None:
    """Raise SurgeryError unless a model has the tensors of a layer of the stock class."""
    inner = {match[2] for name in names if (match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name))}
    outer = {name for name in names if not re.fullmatch(r"model\.layers\.\d+\..+", name)}
    strange = sorted((inner - {*INNER, *OPTIONAL}) | (outer - {*OUTER}))
    for part, reason in REASONS.items():
        if found := next((name for name in strange if part in name), None):
            raise refuse(f"{reason} ({found})")
    if strange:
        raise refuse(f"its tensor {strange[0]} has no place there")
    if lacking := [name for name in (*OUTER, *INNER) if name not in inner | outer]:
        raise refuse(f"it has no {lacking[0]}")


def _kept_shapes(model: Any, converted: tuple[int, ...], refuse: Refusal) -> list[AttentionShape]:
    """Return the shapes of the attention that is kept. Raises SurgeryError if any layer has none that can be read."""
    seen, kept = observe_attention(model), []
    for index in range(model.config.num_hidden_layers):
        attention = seen.get(f"model.layers.{index}.self_attn")
        if attention is None or attention.shape is None:
            raise refuse(attention.refusal if attention else f"its layer {index} has no attention")
        if index not in converted:
            kept.append(attention.shape)
    return kept


def _check_kept(kept: list[AttentionShape], config: Any, others: dict[str, bool], refuse: Refusal) -> None:
    """Raise SurgeryError if the attention of the kept layers has what the stock class has not. others: reasons of the
    class, with whether they hold.
    """
    first = kept[0]
    rope = getattr(config, "rope_parameters", None) or {}
    wrong = {
        "its kept layers differ from each other": any(shape != first for shape in kept),
        f"its kept layers have a sliding window of {first.window} tokens, and the class reads all": first.window,
        "its scores have a softcap": first.softcap,
        "its attention is not causal": not first.causal,
        "its kept layers have no RoPE": not first.rotary,
        f"its RoPE has several bases ({', '.join(rope)}), and the class has one": "rope_theta" not in rope,
        "its values have another size than its keys": first.value != first.key,
        f"its MLP has the activation {config.hidden_act}, and the class has silu": config.hidden_act != "silu",
        **others,
    }
    for reason, is_so in wrong.items():
        if is_so:
            raise refuse(reason)


# -- comparison of a small random model ------------------------------------------------------------
@torch.no_grad()
def stock_tensors(tensors: Mapping[str, Tensor], plan: StockPlan, layers: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the tensors outside the layers, and those of `layers`, which keep softmax attention.

    tensors: of the source in float32 or float64. "lm_head.weight" is left out if it stays tied.
    """
    embedding = tensors["model.embed_tokens.weight"]
    head = None if plan.config.tie_word_embeddings else tensors.get("lm_head.weight")
    norm_D, new_head = plan.stock_class.outside(embedding, tensors["model.norm.weight"], head, plan.dtype)
    mapped = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm_D}
    if new_head is not None:
        mapped["lm_head.weight"] = new_head
    for index in layers:
        prefix = f"model.layers.{index}."
        kept = plan.stock_class.kept_layer(layer_tensors(tensors, index), plan.sizes)
        mapped |= {prefix + name: tensor for name, tensor in kept.items()}
    return mapped


def layer_tensors(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return the tensors of a layer by their name in it."""
    prefix = f"model.layers.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _compare_small(model: nn.Module, plan: StockPlan, refuse: Refusal) -> None:
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
            raise refuse(
                "a small model of its config could not be compared "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]})",
            ) from error
        finally:
            torch.set_default_dtype(default)
    if not change <= TOLERANCE:
        raise refuse(
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
    seen = observe_attention(original)["model.layers.0.self_attn"].shape
    assert seen is not None
    every = tuple(range(original.config.num_hidden_layers))
    has_bias = any(name.endswith("_proj.bias") for name, _ in original.named_parameters())
    config: Any = plan.stock_class.config(original, seen, (), dtype=torch.float32, has_bias=has_bias)
    small = StockPlan(plan.linear, "", "", (), config, seen, plan.neutral_norm, torch.float32)
    stock = plan.stock_class.build(config)
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
