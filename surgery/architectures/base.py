"""The description of a model family. Paths are relative to a layer; a tuple lists one path per sublayer, in order.

ARCHITECTURE = Architecture(model_types=("qwen3",), layers="layers", attention="self_attn", mlp="mlp",
                  query="q_proj", key="k_proj", value="v_proj", output="o_proj", ...)
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Literal

from surgery.core.plugins import REGISTERED, warn_of_broken_entry_points

ROLES = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "linear.qkv",
    "linear.gate",
    "linear.output",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
    "expert.gate",
    "expert.up",
    "expert.down",
    "head",
)


@dataclass(frozen=True)
class FusedLinear:
    """A linear that computes several roles.

    layout "stacked": the rows of the roles follow one another. "per_head": each head has the rows of all roles
    (GPT-NeoX).
    """

    path: str
    roles: tuple[str, ...]
    layout: Literal["stacked", "per_head"] = "stacked"


@dataclass(frozen=True)
class LinearSublayer:
    """A sublayer with linear attention of the model's own: Gated DeltaNet or Mamba-2.

    path: in a layer. qkv, gate, output: linears below it, "a|b" for alternatives, "" if absent: queries, keys and values
    (Mamba-2: the input projection, with everything that it computes), the gate of the output, the output projection.
    Linears that are not named, such as those of decays and step sizes, are replaced only by a rule that names them.
    """

    path: str
    qkv: str
    gate: str = ""
    output: str = "out_proj"


@dataclass(frozen=True)
class OutlineSpec:
    """The modules of a family's causal language model in transformers, from which `build_outline` makes an outline.

    The model has Llama's modules: model.embed_tokens, model.layers, model.norm and lm_head; in each layer self_attn and
    mlp with the linears q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj.

    model_type, model_class: key and class of the family in transformers. activation: config key of the MLP's
    activation.
    norms: the norms of a layer. head_norms: size of the weights of q_norm and k_norm, "head" for one head and "heads"
        for all heads; "" without these norms.
    qkv_bias, output_bias, mlp_bias: config key that turns on the biases, "always", or "" without biases.
    scale: config key whose value v scales the attention scores by v ** -0.5; "" for the head dimension.
    window: where the sliding window applies: "model" in every layer, "layers" in those that the config's layer_types
    name. nested_rope: whether rope_parameters has one entry for each layer type. required, optional: keys that
    config.json must and may have, besides those of every decoder.
    """

    model_type: str
    model_class: str
    norms: tuple[str, ...]
    activation: str = "hidden_act"
    head_norms: Literal["", "head", "heads"] = ""
    qkv_bias: str = ""
    output_bias: str = ""
    mlp_bias: str = ""
    scale: str = ""
    window: Literal["", "model", "layers"] = ""
    nested_rope: bool = False
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """The layout of a model family.

    layers: the last part of the path of each ModuleList of layers.
    attention, mlp: paths of the sublayers in a layer. query .. down: linears below them, "" if absent, "a|b" for
    alternatives.
    residual_attention, residual_mlp: per sublayer, the module whose input is the residual stream to which the output of
        the sublayer's last linear is added unchanged; () if a norm comes between.
    mlp_width: config key of the number of neurons of an MLP.
    head: path of the output projection in the model. qk_norm: whether queries and keys are normalized.
    softcap: config key of the soft cap on the logits.
    core: path, below the first attention sublayer, of the module that computes the scores; "" for the sublayer itself.
    head_dim: that module's attribute for the head dimension K. rotary: which dimensions of a head RoPE rotates
        together, "halves" (f, f + half) or "pairs" (2 f, 2 f + 1); "none" without RoPE. How many rotate is read from
        the config.
    grouped_heads: whether query heads may share key/value heads, whose number is then the config's num_key_value_heads;
        False if the family does not read that key, as transformers ignores it too.
    score_softcap: config key of the soft cap on attention scores. unmixable: why its attention cannot be replaced.
    observed_attention: whether a dry run finds the softmax attention for mixers instead of the fields above, as in a
        family without an Architecture: for layers of several kinds, or attention with computations of its own.
    linear: the layers with linear attention, in a family that has such.
    outline: the modules of transformers' class for `surgery plan`; None to import that class for every plan.
    """

    model_types: tuple[str, ...]
    layers: tuple[str, ...]
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    query: str = ""
    key: str = ""
    value: str = ""
    output: str = ""
    gate: str = ""
    up: str = ""
    down: str = ""
    fused: tuple[FusedLinear, ...] = ()
    residual_attention: tuple[str, ...] = ()
    residual_mlp: tuple[str, ...] = ()
    mlp_width: str = "intermediate_size"
    head: str = "lm_head"
    qk_norm: bool = False
    softcap: str = ""
    core: str = ""
    head_dim: str = "head_dim"
    rotary: Literal["halves", "pairs", "none"] = "halves"
    grouped_heads: bool = True
    score_softcap: str = ""
    unmixable: str = ""
    observed_attention: bool = False
    linear: LinearSublayer | None = None
    outline: OutlineSpec | None = None

    def linears(self) -> list[tuple[str, tuple[str, ...], FusedLinear | None, str]]:
        """Return (path in the layer, roles, fused linear or None, module that reads the residual stream or "") of each
        linear.
        """
        entries: list[tuple[str, tuple[str, ...], FusedLinear | None, str]] = []
        sublayers = (
            ("attention", self.attention, ("query", "key", "value", "output"), self.residual_attention),
            ("mlp", self.mlp, ("gate", "up", "down"), self.residual_mlp),
        )
        for kind, places, roles, residuals in sublayers:
            for i, sublayer in enumerate(places):
                last = residuals[i] if residuals else ""
                for fused in self.fused:
                    if fused.roles[0].startswith(kind):
                        entries.append((_join(sublayer, fused.path), fused.roles, fused, ""))
                for role in roles:
                    for path in filter(None, getattr(self, role).split("|")):
                        residual = last if role in ("output", "down") else ""
                        entries.append((_join(sublayer, path), (f"{kind}.{role}",), None, residual))
        residual = self.residual_attention[0] if self.residual_attention else ""
        if (native := self.linear) is not None:
            for role, paths in (("qkv", native.qkv), ("gate", native.gate), ("output", native.output)):
                for path in filter(None, paths.split("|")):
                    last = residual if role == "output" else ""
                    entries.append((_join(native.path, path), (f"linear.{role}",), None, last))
        return entries


def _join(*parts: str) -> str:
    return ".".join(name for name in parts if name)


_plugin_families: dict[str, Architecture] = {}


def add_family(architecture: Architecture) -> None:
    """Register a family of your own. It takes precedence over the built-in families."""
    _plugin_families.update(dict.fromkeys(architecture.model_types, architecture))
    REGISTERED.extend(f"family {model_type!r}" for model_type in architecture.model_types)


@cache
def _file_names() -> list[str]:
    return [info.name for info in pkgutil.iter_modules(importlib.import_module("surgery.architectures").__path__)]


@cache
def _read_file(name: str) -> Architecture | None:
    """Return the family that a file of this package describes, None if it describes none."""
    return getattr(importlib.import_module(f"surgery.architectures.{name}"), "ARCHITECTURE", None)


@cache
def _builtin_families() -> dict[str, Architecture]:
    families = [architecture for name in _file_names() if (architecture := _read_file(name)) is not None]
    return {model_type: architecture for architecture in families for model_type in architecture.model_types}


def get_architecture(model_type: str) -> Architecture | None:
    """Return the architecture of a model type, or None; without one, linears are matched by path alone.

    The file of that name is read first, and only if it describes another family, or is missing, all files. An unknown
    model type imports the installed plugins.
    """
    if model_type in _plugin_families:
        return _plugin_families[model_type]
    named = _read_file(model_type) if model_type in _file_names() else None
    if named is not None and model_type in named.model_types:
        return named
    if model_type not in _builtin_families():
        warn_of_broken_entry_points()
    return _plugin_families.get(model_type) or _builtin_families().get(model_type)


def known_families() -> list[str]:
    """Return the known model types, sorted."""
    return sorted({*_builtin_families(), *_plugin_families})
