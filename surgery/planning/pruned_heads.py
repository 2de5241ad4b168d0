"""Attention whose heads are pruned (`structure: pruned` in a rule for attention.*), or that gets fewer value dims
(`structure: value_dims`): what it consists of, and what cannot be pruned.

Whole groups stay or go: a key/value head with the query heads that read it. A group is rows of query, key and value, and
columns of the output projection; the four are one target. transformers' modules divide the outputs of the projections
by the head dimension, so that they run with any number of groups. See surgery/structures/pruned.py, and value_dims.py for values and the output
projection, which are one target, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from surgery.architectures.attention import attention_paths, attention_shape, output_path
from surgery.architectures.base import Architecture
from surgery.architectures.linears import LinearInfo, ModelLayout
from surgery.architectures.towers import architecture_at
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape
from surgery.planning.pruned_mlps import Settings, check_one_share, check_same_settings, check_untied, is_pruned
from surgery.planning.recipe import LinearSettings
from surgery.structures.pruned import Pruned
from surgery.structures.value_dims import MULTIPLE, ValueDims

VALUE_ROLES = ("attention.value", "attention.output")
ATTENTION_ROLES = ("attention.query", "attention.key", "attention.value", "attention.output")


@dataclass(frozen=True)
class Attention:
    """The linears of one attention module. heads: query, key and value, or a fused one. sizes: their output rows, of
    which each group has an equal share. output: the linear that reads the heads. groups: key/value heads.
    """

    heads: tuple[LinearInfo, ...]
    sizes: tuple[tuple[int, ...], ...]
    output: LinearInfo
    groups: int

    @property
    def linears(self) -> tuple[LinearInfo, ...]:
        """All linears, in the order in which they run."""
        return (*self.heads, self.output)

    def config(self, settings: LinearSettings) -> Pruned:
        """Return the config of the output projection."""
        unit, groups = self.output.in_ // self.groups, settings.groups
        return Pruned(groups * unit if isinstance(groups, int) else groups, unit, unit)


def find_pruned_attention(
    layout: ModelLayout, settings: Settings, named: Mapping[str, str], mixed: Collection[str], model: Any
) -> list[Attention]:
    """Return the attention modules that a rule prunes.

    settings, named: as for `find_pruned_mlps`. mixed: layers whose attention gets a mixer.

    Raises SurgeryError for attention that is not known or does more with its heads than softmax attention, that has one
    group, that gets a mixer, or whose linears have different settings or share their weights.
    """
    chosen = [
        linear
        for linear in layout.linears
        if linear.path in named
        and set(linear.roles) & set(ATTENTION_ROLES)
        and is_pruned(settings.get(linear.path, ()))
    ]
    if not chosen:
        return []
    attentions = []
    shapes = _Shapes(layout, model)
    for layer in dict.fromkeys(linear.layer for linear in chosen):
        inside = [linear for linear in chosen if linear.layer == layer]
        architecture, shape = shapes.of_layer(inside[0], mixed)
        attention = _attention(layer, layout, architecture, shape)
        if outside := next((linear for linear in inside if linear not in attention.linears), None):
            raise SurgeryError(_refusal(outside, "it is of another attention than the layer's self-attention"))
        check_same_settings(attention.linears, settings, "heads of attention", "attention.*")
        check_untied(attention.linears, model, "its attention")
        core = f".{architecture.core}" if architecture.core else ""
        _check_norms(attention, model, f"{layer}.{architecture.attention[0]}{core}")
        attentions.append(attention)
    check_one_share([settings[a.output.path] for a in attentions], "groups", "attention")
    return attentions


@dataclass
class _Shapes:
    """The shapes of the self-attention of a model, by layer; found when one is asked for."""

    layout: ModelLayout
    model: Any
    paths: dict[str, str] | None = None

    def of_layer(self, linear: LinearInfo, mixed: Collection[str]) -> tuple[Architecture, AttentionShape]:
        """Return (architecture, shape) of the self-attention of a linear's layer.

        Raises SurgeryError if it is not known, or gets a mixer.
        """
        architecture, layer = architecture_at(self.model, linear.path), linear.layer
        if architecture is None or architecture.observed_attention:
            raise SurgeryError(_refusal(linear, "no architecture says which linears its heads have"))
        if architecture.unmixable:
            raise SurgeryError(_refusal(linear, architecture.unmixable))
        if self.paths is None:
            outputs = {output_path(self.model, path): path for path in attention_paths(self.model)}
            self.paths = {n.layer: outputs[n.path] for n in self.layout.linears if n.path in outputs}
        if layer not in self.paths:
            raise SurgeryError(_refusal(linear, "it is of another attention than the self-attention of text"))
        if layer in mixed:
            raise SurgeryError(
                f"plan: the attention of {layer} gets a mixer, and its heads are to be made smaller. Leave the layer out "
                "of one of the two, or convert twice, first without the mixer"
            )
        return architecture, attention_shape(self.model, self.paths[layer])


@dataclass(frozen=True)
class Values:
    """The linears of the values of one attention module: their projection, and the output projection that reads them.
    shape: of the attention.
    """

    value: LinearInfo
    output: LinearInfo
    shape: AttentionShape

    def config(self, settings: LinearSettings) -> ValueDims:
        """Return the config of both."""
        heads, width = self.shape.heads, settings.width
        multiple = (settings.multiple or MULTIPLE) * heads
        return ValueDims(width * heads if isinstance(width, int) else width, multiple, heads, self.shape.groups)


def find_values(
    layout: ModelLayout, settings: Settings, named: Mapping[str, str], mixed: Collection[str], model: Any
) -> tuple[list[Values], list[str]]:
    """Return the values of the attention modules that get fewer value dims, and notes for the user.

    settings: as for `find_pruned_mlps`. named: linears that a rule with `structure: value_dims` matches, with its
    pattern.

    Raises SurgeryError for linears that are named and are not of values, and for attention that is not known, has no
    linear of the values alone, gets a mixer, or whose two linears have different settings.
    """
    chosen = [n for n in layout.linears if any(one.structure == "value_dims" for one in settings.get(n.path, ()))]
    linears = [linear for linear in chosen if set(linear.roles) & set(VALUE_ROLES)]
    for linear in chosen:
        if linear.path in named and linear not in linears:
            raise SurgeryError(
                f"plan: pattern {named[linear.path]!r} matches {linear.path} ({', '.join(linear.roles) or 'no role'}), and "
                "structure value_dims makes values smaller. Match attention.value and attention.output, each in a rule"
            )
    if chosen and not linears:
        raise SurgeryError(
            "plan: structure value_dims finds no values of attention in this model. Choose another structure"
        )
    values = []
    shapes = _Shapes(layout, model)
    for layer in dict.fromkeys(linear.layer for linear in linears):
        inside = [linear for linear in linears if linear.layer == layer]
        architecture, shape = shapes.of_layer(inside[0], mixed)
        prefix = f"{layer}.{architecture.attention[0]}."
        value, output = (
            next((n for n in layout.linears if n.path.startswith(prefix) and n.roles == (role,)), None)
            for role in VALUE_ROLES
        )
        if value is None or output is None or {n.path for n in inside} - {value.path, output.path}:
            raise SurgeryError(_refusal(inside[0], "no linear of the layer's self-attention computes its values alone"))
        check_same_settings((value, output), settings, "value dims", "attention.value, and one for attention.output")
        check_untied((value, output), model, "its attention")
        if value.out != shape.groups * shape.value or output.in_ != shape.heads * shape.value:
            raise SurgeryError(
                _refusal(value, f"it has {value.out} rows for {shape.groups} heads of {shape.value} value dims")
            )
        if settings[output.path][0].groups is not None:
            raise SurgeryError(
                f"plan: structure 'value_dims' has no option 'groups' ({output.path}): all heads stay. Give width instead"
            )
        values.append(Values(value, output, shape))
    check_one_share([settings[one.output.path] for one in values], "width", "attention")
    roles = dict.fromkeys(
        role or "linears without a role" for n in chosen if n not in linears for role in n.roles or ("",)
    )
    return values, [f"structure value_dims: {', '.join(roles)} stay dense"] if roles else []


def _refusal(linear: LinearInfo, reason: str) -> str:
    return (
        f"plan: the attention of {linear.path} cannot lose heads or value dims: {reason}. Give it another structure, for "
        'example a rule {match: "attention.*", structure: low_rank}, or dense'
    )


def _attention(layer: str, layout: ModelLayout, architecture: Architecture, shape: AttentionShape) -> Attention:
    """Return the linears of the self-attention of a layer. Raises SurgeryError if its heads cannot be removed."""
    prefix = f"{layer}.{architecture.attention[0]}."
    linears = [n for n in layout.linears if n.path.startswith(prefix) and set(n.roles) & set(ATTENTION_ROLES)]
    output = next(n for n in linears if "attention.output" in n.roles)
    heads = tuple(n for n in linears if n is not output)
    for linear in heads:
        if linear.fused is not None and linear.fused.layout == "stacked":
            raise SurgeryError(
                _refusal(
                    linear,
                    "the rows of query, key and value in it are divided by numbers of heads in config.json, which are "
                    "the same for all layers",
                )
            )
    if shape.groups < 2:
        raise SurgeryError(
            _refusal(output, "it has one key/value head, which all of its query heads read (multi-query attention)")
        )
    rows = sum(linear.out for linear in heads)
    if output.in_ != shape.heads * shape.value or rows != shape.heads * shape.key + shape.groups * (
        shape.key + shape.value
    ):
        raise SurgeryError(
            _refusal(
                output,
                f"query, key and value have {rows} rows and it reads {output.in_} columns, which are not those of "
                f"{shape.heads} query and {shape.groups} key/value heads of {shape.key} dimensions",
            )
        )
    return Attention(heads, tuple((linear.out,) for linear in heads), output, shape.groups)


def _check_norms(attention: Attention, model: Any, core: str) -> None:
    """Raise SurgeryError if a parameter beside the linears has values for all heads, such as a norm of all queries. core:
    path of the module that computes the scores.
    """
    paths = {linear.path for linear in attention.linears}
    rows = {linear.out for linear in attention.heads} | {attention.output.in_}
    for name, parameter in model.get_submodule(core).named_parameters():
        owner = f"{core}.{name}".rpartition(".")[0]
        if owner not in paths and rows & set(parameter.shape):
            raise SurgeryError(
                _refusal(
                    attention.output,
                    f"{core}.{name} has values for all heads together, which would no longer be those of the "
                    "original without some of them",
                )
            )
