"""Selection of the attention modules that a recipe replaces by mixers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from surgery.architectures.attention import attention_paths, attention_shape, output_path, shapes_without_mixer
from surgery.architectures.linears import ModelLayout
from surgery.architectures.towers import text_config
from surgery.checkpoint.outline import ModelDescription
from surgery.core.config import is_layer_selected
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerConfig
from surgery.mixers.head_hybrid import HeadHybrid, check_rotation
from surgery.mixers.softmax import Softmax
from surgery.planning.attention_recipe import HybridRecipe
from surgery.planning.recipe import ConversionRecipe

if TYPE_CHECKING:
    from surgery.planning.native import NativeTarget


@dataclass(frozen=True)
class AttentionTarget:
    """A self-attention module that will be replaced by a mixer.

    path, layer: paths of the module and of its layer. index, count: position among the layers with attention, and their
    number. output: path of the output projection. config: the mixer's config from the recipe, before fitting. fixed:
    mixer tensors chosen together with the config. softmax: options of softmax where a hybrid keeps it. cache: the share
    of the key cache for which measurements choose the ranks of MLR attention, None if they are given.
    """

    path: str
    layer: str
    index: int
    count: int
    output: str
    shape: AttentionShape
    config: MixerConfig
    fixed: dict[str, Any] = field(default_factory=dict)
    softmax: Softmax = field(default_factory=Softmax)
    cache: float | None = None


def find_attention_targets(
    meta_model: ModelDescription, recipe: ConversionRecipe, layout: ModelLayout
) -> tuple[dict[str, AttentionTarget], list[str]]:
    """Return the attention targets by path of their layer, in order, and notes for the user.

    Raises SurgeryError if the mixer does not support an attention module, or if no layer is selected.
    """
    settings = recipe.attention
    if settings is None:
        return {}, []
    paths, softmax, kept = attention_paths(meta_model.model), Softmax(), frozenset[int]()
    if settings.hybrid is not None:
        kept = frozenset(settings.hybrid.layers or ())
        positions = getattr(text_config(meta_model.model), "max_position_embeddings", None)
        softmax = settings.hybrid.kept_softmax(positions if isinstance(positions, int) else None)
    targets: dict[str, AttentionTarget] = {}
    for index, path in enumerate(paths):
        if not is_layer_selected(settings.layers, index, len(paths)):
            continue
        layer = next(name for name in layout.layers if path.startswith(f"{name}."))
        shape, output = attention_shape(meta_model.model, path), output_path(meta_model.model, path)
        if index in kept:  # its options may be in no rule: checked below, as those of the softmax that is kept
            targets[layer] = AttentionTarget(path, layer, index, len(paths), output, shape, softmax, softmax=softmax)
            continue
        config = settings.config_for(shape, index, len(paths))
        try:
            MIXERS[config].check_config(config, shape)
        except SurgeryError as error:
            raise SurgeryError(f"plan: {path}: {error}") from None
        cache, fixed = settings.cache_of(index, len(paths)), {}
        if cache is not None:
            from surgery.mixers.mlr import slowest_first

            # A default order, until allocate_score_dims has measured the dimensions on calibration text.
            fixed = {"order": [slowest_first(shape)] * shape.groups}
        targets[layer] = AttentionTarget(path, layer, index, len(paths), output, shape, config, fixed, softmax, cache)
    if not targets:
        raise SurgeryError(
            f'attention.layers: "{settings.layers}" selects none of the {len(paths)} layers with attention'
        )
    replaced = _without_softmax(targets, settings.hybrid)
    mixed = {layer: target for layer, target in replaced.items() if target.config is not target.softmax}
    if not mixed:
        raise SurgeryError("attention.hybrid keeps softmax in every selected layer; nothing would be replaced")
    for number, rule in enumerate(settings.rules):
        if not any(is_layer_selected(rule.layers, target.index, len(paths)) for target in mixed.values()):
            raise SurgeryError(
                f'attention.rules.{number}: layers "{rule.layers}" selects none of the layers that get a mixer, '
                f"{[target.index for target in mixed.values()]}"
            )
    return replaced, _softmax_notes(targets, settings.hybrid)


def _softmax_notes(targets: Mapping[str, AttentionTarget], hybrid: HybridRecipe | None) -> list[str]:
    """Return how many of the selected layers or heads keep softmax attention, if measurements choose them or if the
    recipe's share is rounded.
    """
    if hybrid is None or hybrid.softmax is None:
        return []
    units, count, where = "layers", len(targets), ""
    if hybrid.of_heads:
        units, where = "key/value heads", f" in {count} layers"
        count = sum(target.shape.groups for target in targets.values())
    kept, exact = hybrid.softmax_count(count), hybrid.softmax * count
    is_rounded = not math.isclose(kept, exact)
    if not (is_rounded or hybrid.is_measured):
        return []
    rounding = f" (softmax: {hybrid.softmax:g} of {count} is {exact:.4g}, rounded to {kept})" if is_rounded else ""
    choice = "chosen by measurements on the calibration text" if hybrid.is_measured else "evenly spaced"
    verb = "keeps" if kept == 1 else "keep"
    return [f"{kept} of these {count} {units}{where} {verb} softmax attention{rounding}, {choice}"]


def _without_softmax(targets: dict[str, AttentionTarget], hybrid: HybridRecipe | None) -> dict[str, AttentionTarget]:
    """Return the targets that get mixers, as far as that is known before any measurement."""
    if hybrid is None:
        return targets
    attention_targets = list(targets.values())
    for target in attention_targets:
        check_kept_softmax(target)
    # The choice of heads blends the mixer with softmax as it was, head by head.
    for target in attention_targets if hybrid.of_heads and hybrid.is_measured else ():
        check_rotation("attention.hybrid choose_by: measured", target.shape, Softmax(), target.config)
    if not hybrid.of_heads:
        softmax_indices = hybrid.fixed_layers(attention_targets)
        return keep_layers(targets, [layer for layer, target in targets.items() if target.index in softmax_indices])
    for target in attention_targets:
        check_has_heads(target)
    if hybrid.is_measured:
        return targets
    heads = hybrid.fixed_heads(attention_targets)
    return keep_heads(targets, {layer: heads[target.index] for layer, target in targets.items()})


def check_has_heads(target: AttentionTarget) -> None:
    """Raise SurgeryError if a layer has no key/value heads to choose from, or its mixer cannot stand beside softmax
    heads.
    """
    if target.shape.groups == 1:
        raise SurgeryError(
            f"plan: {target.path}: attention.hybrid unit: heads keeps softmax in some of a layer's key/value heads, "
            "and this layer has one, "
            f"which all its {target.shape.heads} query heads share (multi-query attention): softmax in any of them "
            "keeps the whole cache. "
            "Use unit: layers"
        )
    try:
        config = HeadHybrid((0,), target.config, target.softmax)
        MIXERS[config].check_config(config, target.shape)
    except SurgeryError as error:
        raise SurgeryError(f"plan: {target.path}: {error}") from None


def check_kept_softmax(target: AttentionTarget) -> None:
    """Raise SurgeryError if the options of kept softmax do not fit the attention."""
    try:
        MIXERS[target.softmax].check_config(target.softmax, target.shape)
    except SurgeryError as error:
        raise SurgeryError(f"plan: {target.path}: attention.hybrid: {error}") from None
    if target.softmax.rope == "drop" and not target.shape.rotary:
        raise SurgeryError(
            f"plan: {target.path}: attention.hybrid rope: drop takes away rotary embedding, and this attention has "
            "none. Use rope: keep"
        )


def keep_layers(targets: dict[str, AttentionTarget], layers: Sequence[str]) -> dict[str, AttentionTarget]:
    """Return the targets with softmax in some layers.

    Softmax without options is the model's own attention, which is no target.
    """
    mixer_targets = {}
    for layer, target in targets.items():
        if layer not in layers:
            mixer_targets[layer] = target
        elif not target.softmax.is_plain:
            mixer_targets[layer] = replace(target, config=target.softmax, fixed={}, cache=None)
    return mixer_targets


def keep_heads(targets: dict[str, AttentionTarget], heads: Mapping[str, Sequence[int]]) -> dict[str, AttentionTarget]:
    """Return the targets with softmax in some key/value heads, by path of their layer.

    A layer without such heads gets the mixer in all heads, and one with all of them is a softmax layer (see
    `keep_layers`).
    """
    mixer_targets = keep_layers(
        targets, [n for n, target in targets.items() if len(heads.get(n, ())) == target.shape.groups]
    )
    for layer, target in mixer_targets.items():
        softmax_heads = tuple(heads.get(layer, ()))
        if 0 < len(softmax_heads) < target.shape.groups:
            mixer_targets[layer] = replace(target, config=HeadHybrid(softmax_heads, target.config, target.softmax))
    return mixer_targets


def dropped_attention(layout: ModelLayout, targets: Iterable[AttentionTarget]) -> set[str]:
    """Return the paths of the projections that are dropped, because the mixers of their modules do not read them."""
    parts = tuple(
        f"{path}."
        for target in targets
        if not target.config.reads_projections
        for path in (target.path, target.output)  # BERT's output projection is not in the module
    )
    return {linear.path for linear in layout.linears if f"{linear.path}.".startswith(parts)}


def softmax_shapes(
    meta_model: ModelDescription, targets: Iterable[AttentionTarget | NativeTarget]
) -> tuple[AttentionShape, ...]:
    """Return the shapes of the softmax attention modules that are no targets, in order; none without targets."""
    mixers = {target.path: target.config for target in targets}
    return tuple(shapes_without_mixer(meta_model.model, mixers).values()) if mixers else ()
