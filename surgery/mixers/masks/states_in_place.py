"""States S of several sequences in a server's cache, read and updated where they lie.

One product and one update for each state: on a CPU that takes less than half of the time of gathering the states,
computing all of them at once, and scattering them. What is small is computed for all states together by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_states(keys_AGXF: Tensor, states: Sequence[Tensor]) -> Tensor:
    """Return keys S (A, G, X, V) for A states S (G, F, V), in the dtype of the keys. Without gradients."""
    read_AGXV = keys_AGXF.new_empty(*keys_AGXF.shape[:3], states[0].shape[-1] if states else 0)
    for keys_GXF, state_GFV, read_GXV in zip(keys_AGXF.unbind(), states, read_AGXV.unbind()):
        torch.bmm(keys_GXF, state_GFV.to(keys_AGXF.dtype), out=read_GXV)
    return read_AGXV


def update_states(states: Sequence[Tensor], fade_AGF1: Tensor, write_AGF1: Tensor, token_AG1V: Tensor) -> None:
    """Set each of the A states S (G, F, V) to fade S + write token, in place. Without gradients. fade_AGF1: or (A, G, 1, 1)."""
    parts = zip(states, fade_AGF1.unbind(), write_AGF1.unbind(), token_AG1V.unbind())
    for state_GFV, fade_GF1, write_GF1, token_G1V in parts:
        after_GFV = state_GFV.to(token_AG1V.dtype)
        after_GFV.mul_(fade_GF1).addcmul_(write_GF1, token_G1V)
        if after_GFV is not state_GFV:
            state_GFV.copy_(after_GFV)
