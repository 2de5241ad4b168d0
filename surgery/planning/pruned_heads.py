"""Attention whose heads are pruned (`structure: pruned` in a rule for attention.*): what it consists of, and what cannot
be pruned.

Whole groups stay or go: a key/value head with the query heads that read it. A group is rows of query, key and value, and
columns of the output projection; the four are one target. transformers' modules divide the outputs of the projections
by the head dimension, so that they run with any number of groups. See surgery/structures/pruned.py.
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
    found: dict[str, str] = {}  # layer -> path of its self-attention
    attentions = []
    for layer in dict.fromkeys(linear.layer for linear in chosen):
        inside = [linear for linear in chosen if linear.layer == layer]
        architecture = architecture_at(model, inside[0].path)
        if architecture is None or architecture.observed_attention:
            raise SurgeryError(_refusal(inside[0], "no architecture says which linears its heads have"))
        if architecture.unmixable:
            raise SurgeryError(_refusal(inside[0], architecture.unmixable))
        if not found:
            outputs = {output_path(model, path): path for path in attention_paths(model)}
            found = {linear.layer: outputs[linear.path] for linear in layout.linears if linear.path in outputs}
        if layer not in found:
            raise SurgeryError(_refusal(inside[0], "it is of another attention than the self-attention of text"))
        if layer in mixed:
            raise SurgeryError(
                f"plan: the attention of {layer} gets a mixer, and structure pruned would remove its heads. Leave the "
                "layer out of one of the two, or prune in a conversion before the one with the mixer"
            )
        attention = _attention(layer, layout, architecture, attention_shape(model, found[layer]))
        if outside := next((linear for linear in inside if linear not in attention.linears), None):
            raise SurgeryError(_refusal(outside, "it is of another attention than the layer's self-attention"))
        check_same_settings(attention.linears, settings, "heads of attention", "attention.*")
        check_untied(attention.linears, model, "its attention")
        core = f".{architecture.core}" if architecture.core else ""
        _check_norms(attention, model, f"{layer}.{architecture.attention[0]}{core}")
        attentions.append(attention)
    check_one_share([settings[a.output.path] for a in attentions], "groups", "attention")
    return attentions


def _refusal(linear: LinearInfo, reason: str) -> str:
    return (
        f"plan: structure pruned cannot remove heads from {linear.path}: {reason}. Give it another structure, for "
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
