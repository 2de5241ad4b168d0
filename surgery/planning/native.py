"""Selection of the native linear layers that a recipe gives level weights."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.architectures.linears import ModelLayout
from surgery.architectures.native import native_paths, native_shape
from surgery.checkpoint.outline import ModelDescription
from surgery.core.config import is_layer_selected
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape
from surgery.mixers.native_config import Native
from surgery.planning.recipe import NativeRecipe


@dataclass(frozen=True)
class NativeTarget:
    """A native linear layer that will get level weights.

    path, layer: paths of the module and of its layer. shape: of the module. config: of the mixer.
    """

    path: str
    layer: str
    shape: AttentionShape
    config: Native


def find_native_targets(
    meta_model: ModelDescription, settings: NativeRecipe, layout: ModelLayout
) -> dict[str, NativeTarget]:
    """Return the targets by path of their layer, in order.

    Raises SurgeryError if the model has no native linear layers, or none is selected.
    """
    model, paths = meta_model.model, native_paths(meta_model.model)
    targets = {}
    for index, path in enumerate(paths):
        layer = next((name for name in layout.layers if path.startswith(f"{name}.")), None)
        if layer is not None and is_layer_selected(settings.layers, index, len(paths)):
            targets[layer] = NativeTarget(path, layer, native_shape(model, path), settings.config())
    if not targets:
        raise SurgeryError(f'native.layers: "{settings.layers}" selects none of the {len(paths)} native linear layers')
    return targets
