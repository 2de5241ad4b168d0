"""The cache layer of a native linear layer with level weights: the library's own layer, which keeps the state of the
convolution, with the mixer's state beside it.

The library's layer may hold keys and values too (Falcon-H1: softmax attention and Mamba-2 in one layer), and may be
static: the class here is a subclass of whichever it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from surgery.core.errors import SurgeryError
from surgery.modeling.cache import MixerCacheLayer, library_layer


class NativeCacheLayer:
    """Mixin of the library's cache layer. native: the state of the mixer."""

    native: MixerCacheLayer

    def update_recurrent_state(self, recurrent_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: `native` has the state after the tokens."""
        return recurrent_states

    def reset(self) -> None:
        """Empty the layer."""
        super().reset()  # type: ignore[misc]
        self.native.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of all states, for beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.native.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices` (integers or a boolean mask)."""
        if self.native.state is not None:
            device = self.native.state.seen_B.device
            self.reorder_cache(torch.arange(self.native.batch_size, device=device)[indices.to(device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.native.state is not None:
            rows = torch.arange(self.native.batch_size, device=self.native.state.seen_B.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    @property
    def is_croppable(self) -> bool:
        """Return True while past recording is on."""
        return self.native.record_past

    def activate_past_recording(self) -> None:
        """Record inputs from now on, so that `crop` can remove tokens."""
        super().activate_past_recording()  # type: ignore[misc]
        self.native.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n tokens, which were recorded."""
        count = self.native.count_removed(tokens_to_remove)
        if count >= self.native.seen:
            self.reset()
            return
        self.native.crop(-count)
        super().crop(-count)  # type: ignore[misc]

    def offload(self) -> None:
        """Move all states to the CPU."""
        super().offload()  # type: ignore[misc]
        self.native.offload()

    def nbytes(self) -> int:
        """Return the size of the mixer's state in bytes."""
        return self.native.nbytes()

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, base = type(self).__bases__
        return _new_layer, (base,), self.__dict__


@cache
def _layer_class(base: Any) -> Any:
    """Return the subclass of a library's cache layer that also holds a mixer's state."""
    return type(base.__name__, (NativeCacheLayer, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def _new_layer(base: Any) -> Any:
    cls = _layer_class(base)
    return cls.__new__(cls)


def native_cache_layer(past: Any, index: int) -> MixerCacheLayer:
    """Return the mixer's state in layer `index` of a cache, put beside the library's if it has none yet.

    Raises SurgeryError for other cache types, and for a layer that already holds a recurrent state.
    """
    if not isinstance(past, Cache):
        raise SurgeryError(
            f"level weights of native linear layers cannot keep their state in a {type(past).__name__}; use generate() "
            "without continuous batching, or a DynamicCache"
        )
    layer = library_layer(past, index)
    if isinstance(layer, NativeCacheLayer):
        return layer.native
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        raise SurgeryError(
            f"layer {index} of this cache is a {type(layer).__name__}, which has no place for the state of a "
            "convolution. Make the cache from the model's config: DynamicCache(config=model.config)"
        )
    if any(layer.has_previous_state.values()):
        raise SurgeryError(
            f"layer {index} of this cache holds a recurrent state of a layer without level weights (another model's "
            "cache); start from an empty cache"
        )
    past.layers[index] = ours = _new_layer(type(layer))
    vars(ours).update(vars(layer), native=MixerCacheLayer())
    ours.native.record_past = layer.record_past
    return ours.native
