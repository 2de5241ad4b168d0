"""What will be cut, before anything is: config and tensor headers in, a printable table out. Everything that
can be refused is refused here, before a byte of weight moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from surgery.architectures.linears import Body, Linear, walk
from surgery.checkpoint.meta_model import Skeleton
from surgery.checkpoint.source import refuse_dtype
from surgery.core.errors import SurgeryError, nearest
from surgery.core.registry import typed
from surgery.planning.attention_plan import Seat, find_seats
from surgery.planning.recipe import Recipe, Settings
from surgery.structures import STRUCTURES, StructureConfig


@dataclass(frozen=True)
class Part:
    """The rows of a fused linear that compute one role: role number `place` of `of`, `size` rows in all,
    one after the other (heads = 0) or `size // heads` rows in every head."""

    role: str
    place: int
    sizes: tuple[int, ...]
    heads: int = 0


@dataclass(frozen=True)
class Cut:
    """One matrix to be replaced (or, in a split linear, kept dense): a whole linear or a part of a fused one.

    configs: the structures that may take its place, unresolved; () keeps it dense. keep: its share of the
    budget. first: the structure shown in the plan, fitted to an even spread.
    """

    linear: Linear
    out: int
    keep: float
    configs: tuple[StructureConfig, ...]
    part: Part | None = None
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
    recipe: Recipe
    body: Body
    cuts: dict[str, tuple[Cut, ...]]
    notes: tuple[str, ...]
    seats: dict[str, Seat] = field(default_factory=dict)

    def of_layer(self, layer: str) -> dict[str, tuple[Cut, ...]]:
        return {path: cuts for path, cuts in self.cuts.items() if cuts[0].linear.layer == layer}

    def replaced(self) -> list[Cut]:
        return [cut for cuts in self.cuts.values() for cut in cuts if cut.configs]

    def totals(self) -> dict[str, int]:
        """Numbers stored and multiply-accumulates per token of the replaced weights, before and (under an
        even spread) after."""
        cuts = self.replaced()
        after = [STRUCTURES[c.first].params(c.first, c.out, c.in_) for c in cuts]
        return {"modules": len(cuts), "params_before": sum(c.numel for c in cuts), "params_after": sum(after)}


def make_plan(skeleton: Skeleton, recipe: Recipe) -> Plan:
    """SurgeryError where a pattern matches nothing, a structure cannot tile its matrix, or nothing is cut."""
    body = walk(skeleton.model)
    model_type = skeleton.config.model_type
    _every_pattern_matches(recipe, body, model_type)
    notes = []
    if body.anatomy is None:
        notes.append(
            f"no anatomy for model_type {model_type!r}: every nn.Linear of its {len(body.layers)} layers is taken, by path; "
            "roles do not apply"
        )
    seats = find_seats(skeleton, recipe, body)
    refitted = {seat.output for seat in seats.values()} if recipe.attention and recipe.attention.refits else set()
    if seats and recipe.attention and (hybrid := recipe.attention.hybrid) and hybrid.measured:
        notes.append(
            f"{hybrid.count(len(seats))} of these {len(seats)} layers keep their softmax, chosen on the calibration text"
        )
    if seats and recipe.attention and recipe.attention.cache is not None:
        notes.append(
            "ranks shown keep the same dimensions everywhere; with --calibration they are chosen layer by layer"
        )
    cuts: dict[str, tuple[Cut, ...]] = {}
    for linear in body.linears:
        found = _cuts_of(linear, recipe, skeleton, body)
        if not found and linear.path in refitted:  # stays dense; its numbers move to suit the mixer before it
            found = (Cut(linear, linear.out, 1.0, ()),)
        if found:
            _refuse_unreachable(linear, body)
            refuse_dtype(skeleton.info(f"{linear.path}.weight"))
            cuts[linear.path] = found
    if not seats and not any(cut.configs for found in cuts.values() for cut in found):
        raise SurgeryError(
            "plan: the recipe replaces nothing; give a structure other than dense and keep below 1, or attention: a mixer"
        )
    if body.head in cuts and f"{body.head}.weight" in _tied_names(skeleton):
        notes.append(f"{body.head} is tied to the input embedding; replacing it unties them (the embedding stays)")
    return Plan(skeleton.source.name, model_type, recipe, body, cuts, tuple(notes), seats)


def _tied_names(skeleton: Skeleton) -> set[str]:
    """Of tied pairs stored once; where both are stored, they are two."""
    return {name for pair in skeleton.tied.items() if not set(pair) <= skeleton.keys.keys() for name in pair}


def matches(pattern: str, linear: Linear, role: str) -> bool:
    return fnmatchcase(role, pattern) or fnmatchcase(linear.path, pattern)


def _cuts_of(linear: Linear, recipe: Recipe, skeleton: Skeleton, body: Body) -> tuple[Cut, ...]:
    """() where the linear stays as it is; several where a fused linear is split by role."""
    per_role = [_settings(linear, role, recipe, body) for role in linear.roles or ("",)]
    if all(s.structure == "dense" for s in per_role):
        return ()
    if len(per_role) == 1 or (all(s == per_role[0] for s in per_role) and per_role[0].fused == "whole"):
        return (_cut(linear, per_role[0], recipe, linear.out, None),)
    sizes, heads = fused_sizes(linear, skeleton.config)
    parts = [Part(role, i, sizes, heads) for i, role in enumerate(linear.roles)]
    return tuple(_cut(linear, s, recipe, sizes[p.place], p) for s, p in zip(per_role, parts))


def _settings(linear: Linear, role: str, recipe: Recipe, body: Body) -> Settings:
    unnamed = body.anatomy is not None and not linear.roles  # known family, no role: only by explicit rule
    index = None if unnamed else linear.index
    return recipe.settings(lambda pattern: matches(pattern, linear, role), index, linear.count)


def _cut(linear: Linear, settings: Settings, recipe: Recipe, out: int, part: Part | None) -> Cut:
    if settings.structure == "dense":
        return Cut(linear, out, 1.0, (), part)
    names = recipe.candidates if settings.structure == "auto" else (settings.structure,)
    configs = tuple(_config(name, settings, auto=settings.structure == "auto") for name in names)
    fitted, reasons = [], []
    for config in configs:
        try:
            fitted.append(STRUCTURES[config].fit(config, out, linear.in_, settings.keep * out * linear.in_))
        except SurgeryError as error:
            reasons.append(str(error))
    if not fitted:
        raise SurgeryError(f"plan: {linear.path} ({' '.join(linear.roles)}): {reasons[0]}")
    kept = tuple(c for c in configs if any(type(f) is type(c) for f in fitted))
    return Cut(linear, out, settings.keep, kept, part, fitted[0])


def _config(name: str, settings: Settings, auto: bool) -> StructureConfig:
    """The structure's config with what the recipe gives of its options; in auto, what does not apply is left."""
    config_type = STRUCTURES.config_type(name)
    options = {field.name for field in dataclasses.fields(config_type)}
    given = {k: getattr(settings, k) for k in ("blocks", "rank") if getattr(settings, k) is not None}
    if not auto:
        for key in given:
            if key not in options:
                raise SurgeryError(f"plan: structure {name!r} has no option {key!r}{nearest(key, options)}")
        return typed(config_type, given)
    config = config_type()
    for key in given.keys() & options:
        with suppress(SurgeryError):
            typed(config_type, {key: given[key]})
            config = replace(config, **{key: given[key]})
    return config


def fused_sizes(linear: Linear, config: Any) -> tuple[tuple[int, ...], int]:
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


def _refuse_unreachable(linear: Linear, body: Body) -> None:
    if linear.index is None and linear.path != body.head:
        raise SurgeryError(
            f"plan: {linear.path} lies outside the layers; linears of the layers and the head ({body.head or 'none here'}) "
            "can be replaced"
        )


def _every_pattern_matches(recipe: Recipe, body: Body, model_type: str) -> None:
    for rule in recipe.rules:
        pairs = ((linear, role) for linear in body.linears for role in linear.roles or ("",))
        if not any(matches(rule.match, linear, role) for linear, role in pairs):
            raise SurgeryError(
                f"plan: pattern {rule.match!r} matches no module of {model_type}; a module looks like "
                f"{body.linears[0].path!r}, the roles here are {', '.join(_roles(body)) or 'none'}"
            )


def _roles(body: Body) -> Iterable[str]:
    return dict.fromkeys(role for linear in body.linears for role in linear.roles)


def with_budget(config: Any, cut: Cut, budget: float) -> Any | None:
    """The config fitted into `budget` numbers, or None where it cannot be."""
    try:
        return STRUCTURES[config].fit(replace(config), cut.out, cut.in_, budget)
    except SurgeryError:
        return None
