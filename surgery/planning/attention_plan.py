"""Selection of the attention modules that a recipe replaces by mixers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surgery.architectures.attention import attention_paths, attention_shape, output_path
from surgery.architectures.linears import ModelLayout
from surgery.checkpoint.outline import ModelDescription
from surgery.core.config import is_layer_selected
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerConfig
from surgery.mixers.head_hybrid import HeadHybrid, check_rotation
from surgery.mixers.mlr import slowest_first
from surgery.mixers.softmax import Softmax
from surgery.planning.attention_recipe import HybridRecipe
from surgery.planning.recipe import ConversionRecipe


@dataclass(frozen=True)
class AttentionTarget:
    """A self-attention module that will be replaced by a mixer.

    path, layer: paths of the module and of its layer. index, count: position among the layers with attention, and their
    number. output: path of the output projection. config: the mixer's config from the recipe, before fitting. fixed: mixer
    tensors chosen together with the config.
    """

    path: str
    layer: str
    index: int
    count: int
    output: str
    shape: AttentionShape
    config: MixerConfig
    fixed: dict[str, Any] = field(default_factory=dict)


def find_attention_targets(
    meta_model: ModelDescription, recipe: ConversionRecipe, layout: ModelLayout
) -> dict[str, AttentionTarget]:
    """Return the attention targets by path of their layer, in order.

    Raises SurgeryError if the mixer does not support an attention module, or if no layer is selected.
    """
    settings = recipe.attention
    if settings is None:
        return {}
    paths = attention_paths(meta_model.model)
    targets: dict[str, AttentionTarget] = {}
    for index, path in enumerate(paths):
        if not is_layer_selected(settings.layers, index, len(paths)):
            continue
        layer = next(name for name in layout.layers if path.startswith(f"{name}."))
        shape = attention_shape(meta_model.model, path)
        config = settings.config_for(shape, index, len(paths))
        try:
            MIXERS[config].check_config(config, shape)
        except SurgeryError as error:
            raise SurgeryError(f"plan: {path}: {error}") from None
        # A default order, until allocate_score_dims has measured the dimensions on calibration text.
        fixed = {"order": [slowest_first(shape)] * shape.groups} if settings.cache is not None else {}
        output = output_path(meta_model.model, path)
        targets[layer] = AttentionTarget(path, layer, index, len(paths), output, shape, config, fixed)
    if not targets:
        raise SurgeryError(
            f'attention.layers: "{settings.layers}" selects none of the {len(paths)} layers with attention'
        )
    replaced = _without_softmax(targets, settings.hybrid)
    if not replaced:
        raise SurgeryError("attention.hybrid keeps softmax in every selected layer; nothing would be replaced")
    for number, rule in enumerate(settings.rules):
        if not any(is_layer_selected(rule.layers, target.index, len(paths)) for target in replaced.values()):
            raise SurgeryError(
                f'attention.rules.{number}: layers "{rule.layers}" selects none of the layers that get a mixer, '
                f"{[target.index for target in replaced.values()]}"
            )
    return replaced


def _without_softmax(targets: dict[str, AttentionTarget], hybrid: HybridRecipe | None) -> dict[str, AttentionTarget]:
    """Return the targets that get mixers, as far as that is known before any measurement."""
    if hybrid is None:
        return targets
    found = list(targets.values())
    for target in found if hybrid.is_gated else ():
        check_rotation("attention.hybrid by: gates", target.shape, Softmax(), target.config)
    if not hybrid.of_heads:
        kept = hybrid.fixed_layers(found)
        return {layer: target for layer, target in targets.items() if target.index not in kept}
    for target in found:
        check_has_heads(target)
    if hybrid.is_measured:
        return targets
    heads = hybrid.fixed_heads(found)
    return keep_heads(targets, {layer: heads[target.index] for layer, target in targets.items()})


def check_has_heads(target: AttentionTarget) -> None:
    """Raise SurgeryError if a layer has no key/value heads to choose from, or its mixer cannot stand beside softmax heads."""
    if target.shape.groups == 1:
        raise SurgeryError(
            f"plan: {target.path}: attention.hybrid of: heads keeps softmax in some of a layer's key/value heads, and this layer has one, "
            f"which all its {target.shape.heads} query heads share (multi-query attention): softmax in any of them keeps the whole cache. "
            "Use of: layers"
        )
    try:
        config = HeadHybrid((0,), target.config)
        MIXERS[config].check_config(config, target.shape)
    except SurgeryError as error:
        raise SurgeryError(f"plan: {target.path}: {error}") from None


def keep_heads(targets: dict[str, AttentionTarget], heads: Mapping[str, Sequence[int]]) -> dict[str, AttentionTarget]:
    """Return the targets with softmax in some key/value heads, by path of their layer.

    A layer without such heads gets the mixer in all heads, and one with all of them keeps its attention: it is no target.
    """
    found = {}
    for layer, target in targets.items():
        kept = tuple(heads.get(layer, ()))
        if len(kept) < target.shape.groups:
            found[layer] = replace(target, config=HeadHybrid(kept, target.config)) if kept else target
    return found


def softmax_shapes(meta_model: ModelDescription, targets: dict[str, AttentionTarget]) -> tuple[AttentionShape, ...]:
    """Return the shapes of the attention modules that are no targets, in order."""
    replaced = {target.path for target in targets.values()}
    paths = attention_paths(meta_model.model) if targets else []
    return tuple(attention_shape(meta_model.model, path) for path in paths if path not in replaced)
