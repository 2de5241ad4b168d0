"""What will be cut, before anything is: config and tensor headers in, a printable table out. Everything that
can be refused is refused here, before a byte of weight moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from surgery.architectures.linears import ModelLayout, LinearInfo, find_linears
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import check_float_dtype
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.registry import validate_config
from surgery.planning.attention_plan import AttentionTarget, find_attention_targets
from surgery.planning.recipe import ConversionRecipe, LinearSettings
from surgery.structures import STRUCTURES, StructureConfig


@dataclass(frozen=True)
class FusedSlice:
    """The rows of a fused linear that compute one role: role number `set_module_tensor` of `of`, `size` rows in all,
    one after the other (heads = 0) or `size // heads` rows in every head."""

    role: str
    place: int
    sizes: tuple[int, ...]
    heads: int = 0


@dataclass(frozen=True)
class LinearTarget:
    """One matrix to be replaced (or, in a split linear, kept dense): a whole linear or a part of a fused one.

    configs: the structures that may take its place, unresolved; () keeps it dense. keep: its share of the
    budget. first: the structure shown in the plan, fitted to an even spread.
    """

    linear: LinearInfo
    out: int
    keep: float
    configs: tuple[StructureConfig, ...]
    part: FusedSlice | None = None
    first: StructureConfig | None = None

    @property
    def name(self) -> str:
        return self.linear.path if self.part is None else f"{self.linear.path}:{self.part.role}"

    @property
    def in_(self) -> int:
        return self.linear.in_

    @property
    def numel(self) -> int:
        return self.out * self.in_

    @property
    def explicit(self) -> bool:
        """Whether the recipe fixes the rank, so that the budget has no say."""
        return any(getattr(config, "rank", None) is not None for config in self.configs)

    def budget(self) -> float:
        """Its numbers under an even spread."""
        return self.keep * self.numel if self.configs else self.numel


@dataclass(frozen=True)
class Plan:
    """cuts by linear path, in order of the walk; seats, attention to be given a mixer, by the layer's path; notes are
    said to the user."""

    source: str
    model_type: str
    recipe: ConversionRecipe
    body: ModelLayout
    cuts: dict[str, tuple[LinearTarget, ...]]
    notes: tuple[str, ...]
    seats: dict[str, AttentionTarget] = field(default_factory=dict)

    def of_layer(self, layer: str) -> dict[str, tuple[LinearTarget, ...]]:
        return {path: cuts for path, cuts in self.cuts.items() if cuts[0].linear.layer == layer}

    def replaced(self) -> list[LinearTarget]:
        return [cut for cuts in self.cuts.values() for cut in cuts if cut.configs]

    def totals(self) -> dict[str, int]:
        """Numbers stored and multiply-accumulates per token of the replaced weights, before and (under an
        even spread) after."""
        cuts = self.replaced()
        after = [STRUCTURES[c.first].params(c.first, c.out, c.in_) for c in cuts]
        return {"modules": len(cuts), "params_before": sum(c.numel for c in cuts), "params_after": sum(after)}


def make_plan(skeleton: MetaModel, recipe: ConversionRecipe) -> Plan:
    """SurgeryError where a pattern matches nothing, a structure cannot tile its matrix, or nothing is cut."""
    body = find_linears(skeleton.model)
    model_type = skeleton.config.model_type
    _check_patterns(recipe, body, model_type)
    notes = []
    if body.anatomy is None:
        notes.append(
            f"no anatomy for model_type {model_type!r}: every nn.Linear of its {len(body.layers)} layers is taken, by path; "
            "roles do not apply"
        )
    seats = find_attention_targets(skeleton, recipe, body)
    refitted = {seat.output for seat in seats.values()} if recipe.attention and recipe.attention.refits else set()
    if seats and recipe.attention and (hybrid := recipe.attention.hybrid) and hybrid.measured:
        notes.append(
            f"{hybrid.count(len(seats))} of these {len(seats)} layers keep their softmax, chosen on the calibration text"
        )
    if seats and recipe.attention and recipe.attention.cache is not None:
        notes.append(
            "ranks shown keep the same dimensions everywhere; with --calibration they are chosen layer by layer"
        )
    cuts: dict[str, tuple[LinearTarget, ...]] = {}
    for linear in body.linears:
        found = _linear_targets(linear, recipe, skeleton, body)
        if not found and linear.path in refitted:  # stays dense; its numbers move to suit the mixer before it
            found = (LinearTarget(linear, linear.out, 1.0, ()),)
        if found:
            _check_reachable(linear, body)
            check_float_dtype(skeleton.info(f"{linear.path}.weight"))
            cuts[linear.path] = found
    if not seats and not any(cut.configs for found in cuts.values() for cut in found):
        raise SurgeryError(
            "plan: the recipe replaces nothing; give a structure other than dense and keep below 1, or attention: a mixer"
        )
    if body.head in cuts and f"{body.head}.weight" in _tied_names(skeleton):
        notes.append(f"{body.head} is tied to the input embedding; replacing it unties them (the embedding stays)")
    return Plan(skeleton.source.name, model_type, recipe, body, cuts, tuple(notes), seats)


def _tied_names(skeleton: MetaModel) -> set[str]:
    """Of tied pairs stored once; where both are stored, they are two."""
    return {name for pair in skeleton.tied.items() if not set(pair) <= skeleton.keys.keys() for name in pair}


def matches_pattern(pattern: str, linear: LinearInfo, role: str) -> bool:
    return fnmatchcase(role, pattern) or fnmatchcase(linear.path, pattern)


def _linear_targets(linear: LinearInfo, recipe: ConversionRecipe, skeleton: MetaModel, body: ModelLayout) -> tuple[LinearTarget, ...]:
    """() where the linear stays as it is; several where a fused linear is split by role."""
    per_role = [_resolve_settings(linear, role, recipe, body) for role in linear.roles or ("",)]
    if all(s.structure == "dense" for s in per_role):
        return ()
    if len(per_role) == 1 or (all(s == per_role[0] for s in per_role) and per_role[0].fused == "whole"):
        return (_linear_target(linear, per_role[0], recipe, linear.out, None),)
    sizes, heads = fused_sizes(linear, skeleton.config)
    parts = [FusedSlice(role, i, sizes, heads) for i, role in enumerate(linear.roles)]
    return tuple(_linear_target(linear, s, recipe, sizes[p.place], p) for s, p in zip(per_role, parts))


def _resolve_settings(linear: LinearInfo, role: str, recipe: ConversionRecipe, body: ModelLayout) -> LinearSettings:
    unnamed = body.anatomy is not None and not linear.roles  # known family, no role: only by explicit rule
    index = None if unnamed else linear.index
    return recipe.settings(lambda pattern: matches_pattern(pattern, linear, role), index, linear.count)


def _linear_target(linear: LinearInfo, settings: LinearSettings, recipe: ConversionRecipe, out: int, part: FusedSlice | None) -> LinearTarget:
    if settings.structure == "dense":
        return LinearTarget(linear, out, 1.0, (), part)
    names = recipe.candidates if settings.structure == "auto" else (settings.structure,)
    configs = tuple(_structure_config(name, settings, auto=settings.structure == "auto") for name in names)
    fitted, reasons = [], []
    for config in configs:
        try:
            fitted.append(STRUCTURES[config].fit(config, out, linear.in_, settings.keep * out * linear.in_))
        except SurgeryError as error:
            reasons.append(str(error))
    if not fitted:
        raise SurgeryError(f"plan: {linear.path} ({' '.join(linear.roles)}): {reasons[0]}")
    kept = tuple(c for c in configs if any(type(f) is type(c) for f in fitted))
    return LinearTarget(linear, out, settings.keep, kept, part, fitted[0])


def _structure_config(name: str, settings: LinearSettings, auto: bool) -> StructureConfig:
    """The structure's config with what the recipe gives of its options; in auto, what does not apply is left."""
    config_type = STRUCTURES.config_type(name)
    options = {field.name for field in dataclasses.fields(config_type)}
    given = {k: getattr(settings, k) for k in ("blocks", "rank") if getattr(settings, k) is not None}
    if not auto:
        for key in given:
            if key not in options:
                raise SurgeryError(f"plan: structure {name!r} has no option {key!r}{suggestion(key, options)}")
        return validate_config(config_type, given)
    config = config_type()
    for key in given.keys() & options:
        with suppress(SurgeryError):
            validate_config(config_type, {key: given[key]})
            config = replace(config, **{key: given[key]})
    return config


def fused_sizes(linear: LinearInfo, config: Any) -> tuple[tuple[int, ...], int]:
    """Rows of each role of a fused linear, and the number of heads they are interleaved by (0: stacked)."""
    config = config.get_text_config()
    assert linear.fused is not None
    if linear.roles[0].startswith("mlp"):
        return (linear.out // len(linear.roles),) * len(linear.roles), 0
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = linear.out // (heads + 2 * groups)
    if head_dim * (heads + 2 * groups) != linear.out:
        raise SurgeryError(
            f"plan: {linear.path} has {linear.out} rows, not a multiple of {heads} query + 2 x {groups} key/value heads; "
            "it can be replaced whole (fused: whole)"
        )
    sizes = (heads * head_dim, groups * head_dim, groups * head_dim)
    return sizes, heads if linear.fused.layout == "per_head" else 0


def _check_reachable(linear: LinearInfo, body: ModelLayout) -> None:
    if linear.index is None and linear.path != body.head:
        raise SurgeryError(
            f"plan: {linear.path} lies outside the layers; linears of the layers and the head ({body.head or 'none here'}) "
            "can be replaced"
        )


def _check_patterns(recipe: ConversionRecipe, body: ModelLayout, model_type: str) -> None:
    for rule in recipe.rules:
        pairs = ((linear, role) for linear in body.linears for role in linear.roles or ("",))
        if not any(matches_pattern(rule.match, linear, role) for linear, role in pairs):
            raise SurgeryError(
                f"plan: pattern {rule.match!r} matches no module of {model_type}; a module looks like "
                f"{body.linears[0].path!r}, the roles here are {', '.join(_roles(body)) or 'none'}"
            )


def _roles(body: ModelLayout) -> Iterable[str]:
    return dict.fromkeys(role for linear in body.linears for role in linear.roles)


def fit_config_to_budget(config: Any, cut: LinearTarget, budget: float) -> Any | None:
    """The config fitted into `budget` numbers, or None where it cannot be."""
    try:
        return STRUCTURES[config].fit(replace(config), cut.out, cut.in_, budget)
    except SurgeryError:
        return None
