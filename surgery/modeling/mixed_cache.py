"""The cache layer of a layer with two states: that of a mixer, and that of transformers for a recurrent part beside it
(Falcon-H1: softmax attention and Mamba-2 in one layer).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from surgery.core.errors import SurgeryError
from surgery.modeling.cache import MixerCacheLayer

STATE = tuple(name for name in vars(LinearAttentionLayer()) if name != "record_past")  # attributes of the library's


class MixedCacheLayer(MixerCacheLayer, LinearAttentionLayer):  # type: ignore[override]
    """A mixer's layer that takes over the convolution and recurrent states of the library's layer `beside`.

    Tokens cannot be removed: a recurrent state of the library does not go back.
    """

    def __init__(self, beside: Any):
        CacheLayerMixin.__init__(self)
        MixerCacheLayer.__init__(self)
        for name in STATE:
            setattr(self, name, getattr(beside, name))

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Return False."""
        return False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the states that are named; those of the mixer are created at the first tokens."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def activate_past_recording(self) -> None:
        """Raise SurgeryError, see `crop`."""
        self._refuse()

    def crop(self, tokens_to_remove: int) -> None:
        """Raise SurgeryError."""
        self._refuse()

    def hold(self) -> NoReturn:
        """Raise SurgeryError, see `crop`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise SurgeryError(
            "tokens cannot be removed from the cache of a layer that holds a recurrent state of transformers beside a "
            "mixer (Falcon-H1): generate without an assistant and without drafts"
        )

    def reset(self) -> None:
        """Empty the layer."""
        MixerCacheLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of both states, for beam search."""
        MixerCacheLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]

    def offload(self) -> None:
        """Move both states to the CPU."""
        MixerCacheLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        """Move the library's states back; the mixer moves its own."""
        LinearAttentionLayer.prefetch(self)

    def nbytes(self) -> int:
        """Return the size of both states in bytes."""
        held = [*self.conv_states.values(), *self.recurrent_states.values()]
        return MixerCacheLayer.nbytes(self) + sum(t.nbytes for t in held if isinstance(t, torch.Tensor))
