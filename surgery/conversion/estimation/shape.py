"""The shape of a conversion: kinds of equal layers with their stages, the head, and the rows of the calibration
text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from surgery.architectures.attention import attention_paths, attention_shape
from surgery.architectures.linears import LinearInfo
from surgery.checkpoint.outline import ModelDescription
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.joined import JOINED_ROLES
from surgery.planning.targets import LinearTarget, Plan


@dataclass(frozen=True)
class StageShape:
    """Linears that read one input. count: equal stages of a layer, more than one for routed experts.

    share: fraction of the tokens that reach one of them. before: multiply-accumulates per token of the layer's linears
    that run before the stage. is_first: whether it reads what the layers below give, before any linear of its own
    layer.
    """

    targets: tuple[LinearTarget, ...]
    count: int
    share: float
    before: float
    is_first: bool
    is_expert: bool

    @property
    def in_(self) -> int:
        """The number of input features."""
        return self.targets[0].in_


@dataclass(frozen=True)
class LayerKind:
    """Layers of equal shapes. count: how many. params: parameters of one, all of them. macs: multiply-accumulates per
    token of its linears.

    widest: largest number of features of one linear, for
    activations; of routed experts those that one token passes. attention: shape of its softmax attention, or None;
    target: the mixer that replaces it. is_first: whether it is the first layer, where the original and the converted
    model read the same.
    """

    count: int
    params: int
    macs: float
    widest: float
    width: int
    stages: tuple[StageShape, ...]
    attention: AttentionShape | None
    target: AttentionTarget | None
    is_first: bool

    def targets(self) -> Iterator[tuple[LinearTarget, int]]:
        """Yield the replaced matrices, and how many of each a layer has."""
        for stage in self.stages:
            yield from ((target, stage.count) for target in stage.targets)


@dataclass(frozen=True)
class TextRows:
    """Rows of the calibration text: fit and held: numbers of rows of `length` tokens."""

    fit: int
    held: int
    length: int

    @classmethod
    def of(cls, tokens: int, length: int, holdout: float, generated: int = 0) -> TextRows:
        """Return the rows as `CalibrationSet.from_inputs` divides them, and rows to fit to of `generated` tokens."""
        length = min(length, tokens)
        rows = max(2, tokens // length)
        held = min(max(2 if rows >= 4 else 1, round(rows * holdout)), rows - 1)
        return cls(rows - held + generated // length, held, length)

    @property
    def fit_tokens(self) -> int:
        """Tokens to fit to."""
        return self.fit * self.length

    @property
    def held_tokens(self) -> int:
        """Held-out tokens."""
        return self.held * self.length

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.fit_tokens + self.held_tokens


@dataclass(frozen=True)
class ConversionShape:
    """What the estimate needs of a plan. head, head_params: the head's target, if it is replaced, and the elements of
    its weight.

    vocabulary: rows of the head, 0 without one. outside: parameters outside the layers. itemsize: bytes of a stored
    parameter.
    """

    plan: Plan
    kinds: tuple[LayerKind, ...]
    rows: TextRows | None
    width: int
    vocabulary: int
    head: LinearTarget | None
    outside: int
    itemsize: float

    @property
    def layers(self) -> int:
        """The number of layers."""
        return sum(kind.count for kind in self.kinds)

    @property
    def params(self) -> int:
        """Parameters of the model."""
        return self.plan.model_params


def conversion_shape(meta_model: ModelDescription, plan: Plan, calibrated: bool) -> ConversionShape:
    """Return the shape of the conversion that a plan describes. calibrated: whether there will be a calibration
    text.
    """
    recipe, layout = plan.recipe, plan.layout
    config: Any = (
        meta_model.config.get_text_config() if hasattr(meta_model.config, "get_text_config") else meta_model.config
    )
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 1024
    of_layer: dict[str, list[LinearInfo]] = {path: [] for path in layout.layers}
    for linear in layout.linears:
        of_layer.get(linear.layer, []).append(linear)
    params = dict.fromkeys(layout.layers, 0)
    sizes = {n: p.numel() for n, p in meta_model.model.named_parameters(remove_duplicate=False)}
    prefixes = {path.count(".") + 1 for path in layout.layers}
    for name, numel in sizes.items():
        for parts in prefixes:
            layer = ".".join(name.split(".")[:parts])
            if layer in params:
                params[layer] += numel
    attention = _attention_shapes(meta_model.model, params)
    kinds: dict[Any, LayerKind] = {}
    for i, layer in enumerate(layout.layers):
        kind = _layer_kind(
            plan, layer, of_layer[layer], params[layer], width, attention=attention.get(layer), is_first=i == 0
        )
        key = _signature(kind)
        kinds[key] = kind if key not in kinds else replace(kinds[key], count=kinds[key].count + 1)
    head = next((targets[0] for targets in plan.targets_in_layer("").values()), None)
    dims = next(((linear.out, linear.in_) for linear in layout.linears if linear.path == layout.head), (0, width))
    stored = [meta_model.tensor_info(name) for name in meta_model.keys]
    itemsize = sum(t.nbytes for t in stored) / max(1, sum(t.numel for t in stored)) if stored else 2.0
    rows = TextRows.of(recipe.tokens, recipe.length, recipe.holdout, recipe.generated_tokens) if calibrated else None
    inside = sum(params.values())
    return ConversionShape(
        plan, tuple(kinds.values()), rows, width, dims[0], head, plan.model_params - inside, itemsize
    )


def _attention_shapes(model: Any, params: dict[str, int]) -> dict[str, AttentionShape]:
    """Return the attention of each layer that has one which can be described."""
    shapes: dict[str, AttentionShape] = {}
    try:
        for path in attention_paths(model):
            layer = next((name for name in params if path.startswith(f"{name}.")), None)
            if layer is not None:
                shapes[layer] = attention_shape(model, path)
    except SurgeryError:
        return shapes
    return shapes


def _layer_kind(
    plan: Plan,
    layer: str,
    linears: list[LinearInfo],
    params: int,
    width: int,
    *,
    attention: AttentionShape | None,
    is_first: bool,
) -> LayerKind:
    macs = sum(linear.out * linear.in_ * linear.active for linear in linears)
    experts = [linear for linear in linears if linear.experts]
    widest = float(max((max(linear.out, linear.in_) for linear in linears if not linear.experts), default=width))
    if experts:  # k experts read each token
        selected = experts[0].active * (1 + max(linear.expert for linear in experts))
        widest = max(widest, selected * max(linear.out for linear in experts))
    return LayerKind(
        1, params, macs, widest, width, tuple(_stages(plan, layer, linears)), attention,
        plan.attention_targets.get(layer), is_first,
    )  # fmt: skip


def _stages(plan: Plan, layer: str, linears: list[LinearInfo]) -> Iterator[StageShape]:
    """Yield the stages of a layer in the order of its linears; equal stages of experts are one with a count."""
    groups: dict[Any, list[LinearInfo]] = {}
    before: dict[Any, float] = {}
    macs = 0.0
    for linear in linears:
        shared = next((i for i, roles in enumerate(JOINED_ROLES) if set(linear.roles) & set(roles)), None)
        inner = "expert.down" in linear.roles
        key: Any = (
            (linear.experts, inner, linear.expert)
            if linear.experts
            else linear.path
            if shared is None
            else (shared, linear.in_)
        )
        groups.setdefault(key, []).append(linear)
        before.setdefault(key, macs)
        macs += linear.out * linear.in_ * linear.active
    stages: dict[Any, StageShape] = {}
    for i, (key, members) in enumerate(groups.items()):
        targets = tuple(target for linear in members for target in plan.targets.get(linear.path, ()))
        if not targets:
            continue
        first = members[0]
        shapes = tuple((t.out, t.in_, str(t.configs), t.keep) for t in targets)
        same = (shapes, first.experts, "expert.down" in first.roles) if first.experts else key
        if first.experts and same in stages:
            stages[same] = replace(stages[same], count=stages[same].count + 1)
        else:
            stages[same] = StageShape(targets, 1, first.active, before[key], i == 0, bool(first.experts))
    yield from stages.values()


def _signature(kind: LayerKind) -> Any:
    stages = tuple(
        (s.count, s.share, tuple((t.out, t.in_, t.keep, str(t.configs), t.linear.residual) for t in s.targets))
        for s in kind.stages
    )
    mixer = None if kind.target is None else str(kind.target.config)
    return kind.params, kind.macs, stages, str(kind.attention), mixer, kind.is_first
