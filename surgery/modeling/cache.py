"""What mixers remember, behind transformers' Cache: one layer of it for each attention that has a mixer.

    cache.layers[i] = MixerLayer()      put there before generate() starts, or when a forward first meets the cache
    out_BHTV = cache.layers[i].advance(mixer, inputs)

States are values, so beams select rows of them, and going back is a matter of keeping an old one: while past is
recorded the layer holds a state and the inputs since, and `crop` mixes again those that stay.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from surgery.core.errors import SurgeryError
from surgery.mixers import Mixer, MixerInputs, MixerState

MAX_RECORDED = 64  # tokens that can always be taken back while past is recorded


class MixerCacheLayer(CacheLayerMixin):
    """The state of one layer's mixer, and how many tokens (padding included) it has been given."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: MixerState | None = None
        self.seen = 0
        self.record_past = False
        self.static_length = 0
        self._mixer: Mixer | None = None  # the model's own, met at every forward
        self._base: MixerState | None = None
        self._since: list[MixerInputs] = []

    # -- one call of the model ---------------------------------------------------------------------
    def advance(self, mixer: Mixer, inputs: MixerInputs) -> Tensor:
        """out_BHTV of the next tokens; the state moves past them."""
        batch, device = inputs.q_BHTK.shape[0], inputs.q_BHTK.device
        state = mixer.empty_state(batch, device) if self.state is None else self.state
        if state.seen_B.shape[0] != batch:
            raise SurgeryError(
                f"this cache was filled by a batch of {state.seen_B.shape[0]} rows and is now given {batch}; use a new "
                "cache, or cache.batch_repeat_interleave(n) for several continuations of one prompt"
            )
        if state.seen_B.device != device:
            state = state.to(device)
        self._mixer, self.is_initialized = mixer, True
        tokens = inputs.q_BHTK.shape[2]
        if self.record_past:
            out = self._advance_recording(mixer, inputs, state)
        else:
            self._base, self._since = None, []
            out, self.state = mixer(inputs, state)
        self.seen += tokens
        return out

    def _advance_recording(self, mixer: Mixer, inputs: MixerInputs, state: MixerState) -> Tensor:
        """The same, holding on to what going back needs: of a long piece only its last tokens."""
        outs, head = [], inputs.q_BHTK.shape[2] - MAX_RECORDED
        if head > 0:
            out, state = _mix_eager(mixer, slice_inputs(inputs, 0, head), state)
            outs.append(out)
            inputs, self._base, self._since = slice_inputs(inputs, head, head + MAX_RECORDED), state, []
        if self._base is None:
            self._base = state
        self._since.append(inputs)
        while self._recorded() - self._since[0].q_BHTK.shape[2] >= 2 * MAX_RECORDED:
            self._base = _mix_eager(mixer, self._since.pop(0), self._base)[1]
        out, self.state = _mix_eager(mixer, inputs, state)
        return torch.cat([*outs, out], dim=2)

    def _recorded(self) -> int:
        return sum(inputs.q_BHTK.shape[2] for inputs in self._since)

    # -- what the library asks ---------------------------------------------------------------------
    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the columns of masks: all tokens so far, or as many as static layers beside it have."""
        return self.static_length or self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # its name before transformers 5.20
        return -1

    @property
    def batch_size(self) -> int:
        if self.state is None:
            raise AttributeError("batch_size")
        return self.state.seen_B.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """States are made at the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise SurgeryError(
            "this layer of the cache holds the state of a mixer, which keys and values cannot be put into: the cache "
            "belongs to the converted model, not to this one"
        )

    # -- going back --------------------------------------------------------------------------------
    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -n tokens. A positive n, as before transformers 5.20, is how many tokens stay."""
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        if count >= self.seen:
            self.reset()
        elif count > self._recorded():
            raise SurgeryError(
                f"a mixer's state cannot go back {count} tokens: it recorded {self._recorded()}. Call surgery.modeling.cache."
                f"record_past(cache, model) before the tokens that may be taken back (at most {MAX_RECORDED} at once)"
            )
        elif count:
            self._replay(self._recorded() - count)
            self.seen -= count
        self._base, self._since = None, []

    def _replay(self, kept: int) -> None:
        """The state after the first `kept` of the recorded tokens, in the pieces they came in."""
        assert self._mixer is not None and self._base is not None
        state = self._base
        for inputs in self._since:
            tokens = min(kept, inputs.q_BHTK.shape[2])
            if tokens:
                state = _mix_eager(self._mixer, slice_inputs(inputs, 0, tokens), state)[1]
            kept -= tokens
        self.state = state

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized = None, 0, False
        self._base, self._since = None, []

    # -- rows --------------------------------------------------------------------------------------
    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._base, self._since = None, []
        if self.state is not None:
            self.state = self.state.rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            rows = torch.arange(self.batch_size, device=self.state.seen_B.device)
            self.reorder_cache(rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.reorder_cache(
                torch.arange(self.batch_size, device=self.state.seen_B.device).repeat_interleave(repeats)
            )

    # -- places ------------------------------------------------------------------------------------
    def offload(self) -> None:
        if self.state is not None:
            self.state = self.state.to("cpu")

    def prefetch(self) -> None:
        """Nothing: `advance` fetches the state itself, on the stream that reads it."""

    def nbytes(self) -> int:
        """Live bytes, without what is recorded."""
        return 0 if self.state is None else self.state.nbytes()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mixer": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> MixerCacheLayer:
        """The model is not copied with its cache."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({k: v if k == "_mixer" else copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return twin


def _mix_eager(mixer: Mixer, inputs: MixerInputs, state: MixerState) -> tuple[Tensor, MixerState]:
    out, after = mixer(inputs, state)
    assert after is not None
    return out, after


def slice_inputs(inputs: MixerInputs, start: int, stop: int) -> MixerInputs:
    """Tokens start to stop of a call, as a call of its own after those before."""
    tokens, mask = inputs.q_BHTK.shape[2], inputs.mask_BHTS
    if (start, stop) == (0, tokens):
        return inputs
    return replace(
        inputs,
        q_BHTK=inputs.q_BHTK[:, :, start:stop],
        k_BGTK=inputs.k_BGTK[:, :, start:stop],
        v_BGTV=inputs.v_BGTV[:, :, start:stop],
        x_BTD=inputs.x_BTD[:, start:stop],
        valid_BT=None if inputs.valid_BT is None else inputs.valid_BT[:, start:stop],
        mask_BHTS=None if mask is None else mask[:, :, start:stop, : mask.shape[-1] - (tokens - stop)],
    )


# -- putting layers into caches --------------------------------------------------------------------
def mixer_cache_layer(cache: Any, index: int) -> MixerCacheLayer:
    """The cache's layer of that index as a MixerLayer, put there if it is not."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise SurgeryError(
            f"mixers cannot keep their state in a {type(cache).__name__}; use generate() without continuous batching, "
            "or a DynamicCache"
        )
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index]
    if isinstance(layer, MixerCacheLayer):
        return layer
    if int(layer.get_seq_length()) > 0:
        raise SurgeryError(
            f"layer {index} of this cache holds keys and values of {int(layer.get_seq_length())} tokens, which a mixer "
            "cannot take over (another model's cache, or prefix tuning); start from an empty cache"
        )
    cache.layers[index] = ours = MixerCacheLayer()
    ours.record_past = getattr(layer, "record_past", False)
    return ours


def advance_offloading(cache: Any, index: int, device: torch.device) -> None:
    """What an offloading cache does as it updates a layer: that one goes to the CPU, the next one's keys come back."""
    cache.layers[index].offload()
    if device.type == "cuda":
        reading = torch.cuda.default_stream(device)
        reading.wait_stream(cache.prefetch_stream)
        cache.prefetch_stream.wait_stream(reading)
        cache.prefetch(index + 1, cache.only_non_sliding)


def mixer_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, attention module) of every attention that has a mixer."""
    return ((n, m) for n, m in model.named_modules() if isinstance(getattr(m, "mixer", None), Mixer))


def record_past(cache: Cache, model: nn.Module) -> None:
    """From now on the cache can be cropped, whatever its layers."""
    for _, module in mixer_modules(model):
        mixer_cache_layer(cache, module.layer_idx).record_past = True
    if hasattr(cache, "activate_past_recording"):  # transformers 5.10 has none
        cache.activate_past_recording()
