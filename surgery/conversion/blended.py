"""Attention between softmax and a mixer, in trials: out[h] = g out_softmax[h] + (1 - g) out_mixer[h], with a gate g for
each key/value head.

The mixer has all heads of the layer. Gates of 0 and 1 give a hybrid by heads without another fit of its mixer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgery.mixers import AttentionShape, Mixer, MixerInputs, MixerState
from surgery.mixers.common.rope import rotate_inputs
from surgery.mixers.head_hybrid import check_rotation
from surgery.mixers.softmax import Softmax, SoftmaxAttention


class BlendedAttention(Mixer):
    """Softmax attention and a mixer, blended by key/value head. gate_G: weight of softmax in each of them.

    softmax: options of softmax attention, for heads that would keep it with other options than the model's.
    """

    def __init__(self, mixer: Mixer, gate_G: Tensor, softmax: Softmax | SoftmaxAttention | None = None):
        super().__init__(mixer.config, mixer.shape)
        config = softmax if softmax is not None else Softmax()
        self.softmax = config if isinstance(config, SoftmaxAttention) else SoftmaxAttention(config, mixer.shape)
        check_rotation("hybrid", mixer.shape, self.softmax.config, mixer.config)
        self.mixer, self.gate_G = mixer, gate_G
        self.rotated = self.softmax.rotated and mixer.rotated
        self.reads_mask = mixer.reads_mask
        self.counts_tokens = mixer.counts_tokens or self.softmax.counts_tokens

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, None): trials run whole sequences."""
        assert state is None
        out_BHTV, _ = self.mixer(self._inputs_of(self.mixer, inputs))
        softmax_BHTV, _ = self.softmax(self._inputs_of(self.softmax, inputs))
        gate_H11 = self.gate_G.repeat_interleave(self.shape.heads // self.shape.groups).to(out_BHTV)[:, None, None]
        return torch.lerp(out_BHTV, softmax_BHTV.to(out_BHTV.dtype), gate_H11), None

    def _inputs_of(self, mixer: Mixer, inputs: MixerInputs) -> MixerInputs:
        return rotate_inputs(inputs, self.shape, "hybrid") if mixer.rotated and not self.rotated else inputs


def gates_of(heads: Sequence[int], shape: AttentionShape, device: torch.device) -> Tensor:
    """Return gates of 1 for these key/value heads and 0 for all others, (G,)."""
    gate_G = torch.zeros(shape.groups, device=device)
    gate_G[list(heads)] = 1.0
    return gate_G
