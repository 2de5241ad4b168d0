"""Linformer: softmax attention over k projected keys and values (Wang et al. 2020), in T k instead of T^2.

    O = softmax(scaling Q (E K)^T) (F V)      E, F (k, S), learned or Gaussian

A projected key mixes all tokens, so that the attention is bidirectional, and S is fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.core.errors import SurgeryError


class Linformer(nn.Module):
    """Linformer attention of sequences of `length` tokens with k = `projected` keys. E and F are shared by all heads.

    The entries of E and F begin as N(0, 1 / k), so that E^T E is the identity on average. Raises SurgeryError for
    causal attention, and in `forward` for other lengths.
    """

    def __init__(self, length: int, projected: int, causal: bool = False):
        super().__init__()
        if causal:
            raise SurgeryError(
                "Linformer: a projected key mixes tokens that come after a query, so the attention cannot be causal; "
                "use a "
                "mixer such as ssd"
            )
        if not 1 <= projected <= length:
            raise SurgeryError(f"Linformer: projected keys must be 1 to {length}, the length (got {projected})")
        self.length = length
        self.key_projection = nn.Parameter(torch.randn(projected, length) * projected**-0.5)
        self.value_projection = nn.Parameter(torch.randn(projected, length) * projected**-0.5)

    def forward(self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, scaling: float) -> Tensor:
        """Return out_BHTV."""
        if k_BHSK.shape[-2] != self.length:
            raise SurgeryError(
                f"Linformer: sequences must have {self.length} tokens (got {k_BHSK.shape[-2]}); pad them, or train for "
                "that length"
            )
        keys_BHkK = self.key_projection.to(k_BHSK.dtype) @ k_BHSK
        values_BHkV = self.value_projection.to(v_BHSV.dtype) @ v_BHSV
        out_BHTV: Tensor = (scaling * q_BHTK @ keys_BHkK.mT).softmax(-1) @ values_BHkV
        return out_BHTV
