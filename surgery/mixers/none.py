"""No attention: the output of the heads is 0, and no projection and no cache is stored.

    out_t = 0

He et al. 2024, "What Matters in Transformers? Not All Attention is Needed", drop the attention of the layers whose
output changes the hidden states least. The layer keeps its residual connection and its MLP, and of the attention module
what is no weight matrix: the bias of the output projection, if it has one, is still added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from surgery.mixers.base import MIXERS, AttentionShape, Mixer, MixerConfig, MixerCost, MixerInputs, MixerState


@dataclass(frozen=True)
class NoAttention(MixerConfig):
    """Config of a layer without attention."""

    name: ClassVar[str] = "none"
    reads_projections: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False


@MIXERS.register(NoAttention)
class NoAttentionMixer(Mixer):
    """A mixer without parameters whose output is 0. The state counts tokens only."""

    config: NoAttention
    reads_mask = True

    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        return MixerState(torch.zeros(batch, dtype=torch.long, device=device))

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (zeros (B, H, T, V), state after these tokens, or None without a state)."""
        out_BHTV = self.dense(inputs)
        if state is None:
            return out_BHTV, None
        tokens = out_BHTV.shape[2]
        count = tokens if inputs.valid_BT is None else inputs.valid_BT.sum(1)
        max_seen = None if state.max_seen is None else state.max_seen + tokens
        return out_BHTV, replace(state, seen_B=state.seen_B + count, max_seen=max_seen, donated=False)

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return zeros (B, H, T, V), as sums over no dims, so that all parameters have a gradient of 0: replicas of
        DistributedDataParallel wait for the gradient of each.
        """
        heads_BHT1 = inputs.q_BHTK[..., :0].sum(-1, keepdim=True)
        groups_B1T1 = sum(x_BGTX[..., :0].sum((1, 3), keepdim=True) for x_BGTX in (inputs.k_BGTK, inputs.v_BGTV))
        return (heads_BHT1 + groups_B1T1).repeat(1, 1, 1, self.shape.value)

    @classmethod
    def cost(cls, config: NoAttention, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters, which are all 0."""
        return MixerCost(0, 0, 0)
