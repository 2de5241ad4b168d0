"""What can be served from a converted checkpoint, decided from config.json and the tensor headers before anything is
allocated.

    table = check_config(config, "OUT")          the table, or SurgeryError for what vLLM would not run correctly
    check_files(folder, "OUT")                   the tensors are exactly those that config and table describe

This module does not import vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import QUANT_METHOD, is_dropped, is_pruned, read_mixers, read_table
from surgery.checkpoint.tensor_names import check_tensors
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, MixerConfig, mixer_config
from surgery.mixers.head_hybrid import HeadHybrid
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.masks.base import MASKS
from surgery.mixers.mlr import MLR
from surgery.mixers.sliding_window import GlobalWindow, Window
from surgery.mixers.softmax import Softmax, describe_softmax
from surgery.modeling.modules import build_module, shares_basis
from surgery.modeling.quantization_config import SurgeryConfig
from surgery.modeling.quantizer import replace_modules, split_named_experts

# Model classes of vLLM that keep the order of rows of Hugging Face's fused linears, tested token for token. Others are
# served through vLLM's Transformers backend, which runs transformers' own forward.
OWN_CLASSES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
TRANSFORMERS_CLASS = "TransformersForCausalLM"  # vLLM's Transformers backend
SOFTCAP = "final_logit_softcapping"  # in config.json: c of c tanh(logit / c)
LOGIT_FACTORS = {
    "logits_scaling": -1,
    "lm_head_multiplier": 1,
    "output_multiplier": 1,
}  # in config.json: powers of them
LENGTH_ROPES = ("dynamic", "longrope")  # RoPE whose frequencies transformers chooses by the longest sequence of a batch
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in config.json
BOUNDED_MASKS = ("ones", "decay", "gates", "hierarchical", "toeplitz_blocks", "block_diagonal")


@dataclass(frozen=True)
class ServedTable:
    """The table of a converted checkpoint. modules: linear entries by path. mixers: mixer configs by attention path."""

    modules: dict[str, dict[str, Any]]
    mixers: dict[str, MixerConfig]

    def own_class(self, config: Mapping[str, Any]) -> str | None:
        """Return vLLM's own model class for the checkpoint, None if the Transformers backend serves it."""
        served = [cls for cls in config["architectures"] if cls in OWN_CLASSES]
        return served[0] if served and not self.mixers else None


def logit_scale(config: Mapping[str, Any]) -> float:
    """Return what a model multiplies its logits by and vLLM's Transformers backend leaves out, from its config.json."""
    return math.prod(float(config.get(key) or 1) ** power for key, power in LOGIT_FACTORS.items())


def changes_logits(config: Mapping[str, Any]) -> bool:
    """Return whether a model caps or scales its logits in a way that vLLM's Transformers backend may leave out."""
    return bool(config.get(SOFTCAP)) or logit_scale(config) != 1


def rope_limit(config: Mapping[str, Any]) -> int | None:
    """Return up to which length a model's RoPE has the same frequencies for every sequence; None without a limit.

    Above it transformers chooses them by the longest sequence of a batch (dynamic NTK scaling, LongRoPE). vLLM's
    Transformers backend runs all requests as one batch, so that a long request would change the tokens of the others.
    """
    given = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    ropes = [rope for rope in given if isinstance(rope, Mapping)]
    ropes += [
        rope for outer in ropes for rope in outer.values() if isinstance(rope, Mapping)
    ]  # one for each layer type
    limits = []
    for rope in ropes:
        if rope.get("rope_type", rope.get("type")) not in LENGTH_ROPES:
            continue
        lengths = [source.get("original_max_position_embeddings") for source in (rope, config)]
        lengths.append(config.get("max_position_embeddings"))
        limits.append(min((n for n in lengths if isinstance(n, int)), default=0))
    return min(limits, default=None)


def check_rope(config: Mapping[str, Any], longest: int | None, name: str) -> None:
    """Raise SurgeryError if requests of `longest` tokens (None: of any length) could change one another's RoPE in vLLM's
    Transformers backend.
    """
    limit = rope_limit(config)
    if limit is not None and (longest is None or longest > limit):
        got = "the model's" if longest is None else longest
        raise SurgeryError(
            f"{name}: RoPE of the type dynamic or longrope changes with the longest of the requests that vLLM's "
            f"Transformers backend computes together, if they may have more than {limit} tokens (--max-model-len: {got}). "
            f"Use --max-model-len {limit}, or `transformers serve`"
        )


def is_converted(config: dict[str, Any]) -> bool:
    """Return whether config.json is of a checkpoint written by `surgery convert`."""
    table = config.get("quantization_config")
    return isinstance(table, dict) and table.get("quant_method") == QUANT_METHOD


def check_config(config: dict[str, Any], name: str) -> ServedTable:
    """Return the table of a config.json.

    Raise SurgeryError if it is damaged, or has an entry that vLLM would not serve correctly.
    """
    modules, mixers = read_table(config, name), read_mixers(config, name)
    SurgeryConfig(**config["quantization_config"])  # checks the format
    architectures = config.get("architectures")
    classes = architectures if isinstance(architectures, list) else []
    if not any(isinstance(c, str) and c.endswith(("ForCausalLM", "LMHeadModel")) for c in classes):
        raise SurgeryError(
            f"{name} is a {', '.join(map(str, classes)) or 'model without architectures'}; vLLM serves converted "
            "checkpoints of causal language "
            "models (..ForCausalLM) only. Load it with transformers"
        )
    if "GPTNeoXForCausalLM" in classes:
        raise SurgeryError(
            f"{name} is a GPTNeoXForCausalLM, whose head has the name embed_out: vLLM's Transformers backend knows "
            "lm_head only, and vLLM's own "
            "class has another order of fused rows. Use `transformers serve`, or `surgery serve`, which chooses it"
        )
    for path, entry in modules.items():
        if not path.isascii() or "" in path.split("."):
            raise SurgeryError(
                f"{name}: the surgery table in config.json has an entry with the path {path[:100]!r}; it is damaged"
            )
        if entry.get("transposed"):
            raise SurgeryError(
                f"{name}, {path}: vLLM's classes of models with transposed linears (GPT-2's Conv1D) expect other "
                "weights. Use "
                "`transformers serve`, or `surgery serve`, which chooses it"
            )
        if is_pruned(entry) and entry.get("bias") and not _is_of_attention(path):
            raise SurgeryError(
                f"{name}, {path}: the MLPs have different widths, and vLLM's linears have biases of one width only. "
                "Convert with width: uniform, or use `transformers serve`, or `surgery serve`, which chooses it"
            )
        if is_pruned(entry) and _is_of_attention(path):
            raise SurgeryError(
                f"{name}, {path}: the layers have different numbers of heads, which vLLM's classes have no place for. "
                "Convert with groups: uniform, or use `transformers serve`, or `surgery serve`, which chooses it"
            )
        if is_dropped(entry):
            raise SurgeryError(
                f"{name}, {path}: this layer has no MLP, or no attention, and vLLM's classes have both in every layer. Use "
                "`transformers serve`, or `surgery serve`, which chooses it, or give the layer zero weights by `surgery "
                "densify`"
            )
        if entry.get("structure") == "value_dims":
            raise SurgeryError(
                f"{name}, {path}: values with fewer dims are not served by vLLM's plugin. Use `transformers serve`, or "
                "`surgery serve`, which chooses it, or multiply them out by `surgery densify`"
            )
        if shares_basis(entry):
            raise SurgeryError(
                f"{name}, {path}: the experts of a layer share a basis, which vLLM's plugin does not serve. Use "
                "`transformers serve`, or "
                "`surgery serve`, which chooses it"
            )
        try:
            build_module(dict(entry))
        except SurgeryError as error:
            raise SurgeryError(f"{name}, {path}: {error}") from None
    if experts := next((key for key in EXPERT_COUNTS if (config.get(key) or 0) > 1), None):
        raise SurgeryError(
            f"{name} has experts ({experts}: {config[experts]}), whose tensors vLLM's Transformers backend does not find "
            "under their names in a converted checkpoint. Use `transformers serve`, or `surgery serve`, which chooses it"
        )
    return ServedTable(
        modules, {path: check_mixer(mixer_config(entry), f"{name}, {path}") for path, entry in mixers.items()}
    )


def _is_of_attention(path: str) -> bool:
    """Return whether a linear is of attention, by the name of the module that it lies in: self_attn, attention, attn."""
    return any(name in path.rpartition(".")[0].rpartition(".")[2].lower() for name in ("attn", "attention"))


def check_mixer(config: MixerConfig, where: str) -> MixerConfig:
    """Return the config of a mixer. Raise SurgeryError, with the reason, if vLLM cannot keep its state."""
    MIXERS[config]  # raises for unknown mixers
    if not config.replaces_attention:
        raise SurgeryError(
            f"{where}: this native linear layer has level weights, and vLLM's own Gated DeltaNet and Mamba-2 layers have "
            "one state for each sequence. Use `transformers serve`, or `surgery serve`, which chooses it"
        )
    if not config.reads_projections:
        raise SurgeryError(
            f"{where}: this layer has no attention, and vLLM's classes have attention in every layer. Use `transformers "
            "serve`, or `surgery serve`, which chooses it, or give the layer zero weights by `surgery densify`"
        )
    if isinstance(config, HeadHybrid):
        raise SurgeryError(
            f"{where}: this layer keeps softmax in key/value heads {list(config.softmax_heads)} and a state for the "
            "others, and vLLM has one kind of cache "
            "for a layer. Use `transformers serve`, or `surgery serve`, which chooses it; hybrids by whole layers (of: "
            "layers) are served"
        )
    if isinstance(config, Softmax):
        raise SurgeryError(
            f"{where}: this layer's softmax attention has other positions or scores than the model's own "
            f"({describe_softmax(config)}), which vLLM's "
            "attention does not compute. Use `transformers serve`, or `surgery serve`, which chooses it"
        )
    if isinstance(config, Window):
        if config.sinks:
            raise SurgeryError(
                f"{where}: this layer sees the first {config.sinks} tokens besides the last {config.window}, and vLLM's "
                "attention with a sliding window drops keys behind it (its own sinks are learned logits, not tokens). "
                "Convert with sinks: 0, or use `transformers serve`, or `surgery serve`, which chooses it"
            )
        return config
    if isinstance(config, (MLR, GlobalWindow)):
        raise SurgeryError(
            f"{where}: mixer {config.name!r} combines scores of {len(config.ranks)} levels, each with keys of its own for "
            "the tokens of its extent. vLLM lacks two things for it: a cache that keeps another number of tokens for each "
            "level of a layer, and a paged attention kernel that combines scores of several keys for a token. Use "
            "`transformers serve`, or `surgery serve`, which chooses it; `mixer: window` is served"
        )
    if not isinstance(config, LinearAttention):
        raise SurgeryError(
            f"{where}: mixer {config.name!r} scores hidden states by matrices of its own, whose features vLLM has neither "
            "a cache nor an attention kernel for. vLLM serves linear mixers and windows; "
            "use `transformers serve`, or `surgery serve`, which chooses it"
        )
    if config.near_tokens == "chunks":
        raise SurgeryError(
            f"{where}: near_tokens: chunks moves a whole block of tokens into the state at once, which vLLM's states "
            "are not laid out for. vLLM serves "
            "near_tokens: sliding; use `transformers serve`, or `surgery serve`, which chooses it"
        )
    mask = config.mask.name
    if mask not in BOUNDED_MASKS or not MASKS[config.mask].has_bounded_state:
        raise SurgeryError(
            f"{where}: the state of mask {mask!r} grows with the context, and vLLM allocates states of one size. "
            "Servable masks: "
            f"{', '.join(BOUNDED_MASKS)}. Use `transformers serve`, or for MHLA `surgery toeplitz`"
        )
    return config


def check_files(source: CheckpointSource) -> None:
    """Raise SurgeryError unless the files hold exactly the tensors that config.json and its table describe.

    vLLM itself does not notice a missing tensor of a quantized model, and drops unknown biases.
    """
    model = build_unconverted_model(source)
    table = SurgeryConfig(**source.config["quantization_config"])
    split_named_experts(model, source.tensors)
    replace_modules(model, table.modules, table.mixers)
    check_tensors(model, source.tensors, source.name, table.unused)


def check_checkpoint(name: str) -> ServedTable:
    """Check the config and the tensor headers of a local folder or a cached Hub id; return its table."""
    source = open_converted_checkpoint(name)
    table = check_config(source.config, source.name)
    check_files(source)
    return table
