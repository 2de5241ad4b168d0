"""Mixer states in transformers' Cache: one cache layer for each attention module with a mixer.

    cache.layers[i] = MixerCacheLayer()      inserted before generate() starts, or at the first forward with the cache
    out_BHTV = cache.layers[i].advance(mixer, inputs)

In a static cache the layers beside it are slots for keys and values of tokens to come, which a mask must hide.
transformers makes no mask for a single token unless every layer says `is_compileable`, which is how it knows a static
cache. A layer of ours therefore says so beside static layers, and only there: in any other cache, a mask for each token
would be made for nothing. See Cache.is_compileable and create_causal_mask in
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/cache_utils.py
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/masking_utils.py

A layer holds the only reference to its state and donates it to the next call, which may overwrite it. Beam search
selects rows, which copies them. To remove tokens, an old state is needed: while past recording is on, no state is
donated, the layer holds a state and the inputs since then, and `crop` recomputes the state from the inputs that remain.
Of a prompt the last tokens are recorded, later calls whole. In assisted decoding, where every draft is followed by
`crop`, these are the tokens of one draft: the cost does not depend on the context.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, LinearAttentionLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from surgery.core.errors import SurgeryError
from surgery.mixers import Mixer, MixerInputs, MixerState
from surgery.mixers.common.kv_layout import drop_later_slots

# The argument of a model's forward that takes the cache, and the field of its output that returns it: past_key_values
# until transformers 5.23.
CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
RECURRENT_STATE = tuple(name for name in vars(LinearAttentionLayer()) if name != "record_past")  # its attributes
MAX_RECORDED = 64  # tokens that can always be removed while past recording is on, unless a draft is longer


class MixerCacheLayer(CacheLayerMixin):
    """The state of one layer's mixer.

    seen: number of tokens processed, padding included. decoder: the model that filled the layer, if it is known.
    beside_static: whether softmax layers of the same cache are static; static_length: columns of their masks over all
    tokens, 0 if they all have windows.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.keys = self.values = torch.empty(0)  # some forwards ask every layer how many keys it has (Mllama)
        self.state: MixerState | None = None
        self.seen = 0
        self.record_past = False
        self.max_recorded = MAX_RECORDED
        self.beside_static = False
        self.static_length = 0
        self._mixer: Mixer | None = None  # the model's mixer, set at every forward
        self._decoder: weakref.ref[nn.Module] | None = None
        self._base: MixerState | None = None
        self._since: list[MixerInputs] = []
        self._held = False

    @property
    def decoder(self) -> nn.Module | None:
        """The model that filled the layer; None before its first call, in a compiled call, and in a cache that was
        unpickled.
        """
        return None if self._decoder is None else self._decoder()

    # -- one call of the model ---------------------------------------------------------------------
    def advance(self, mixer: Mixer, inputs: MixerInputs) -> Tensor:
        """Mix the next tokens and move the state past them; return the output (B, H, T, V)."""
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
            out, self.state = mixer(inputs, state if self._held else state.donate())
            self._held = False
        self.seen += tokens
        return out

    def _advance_recording(self, mixer: Mixer, inputs: MixerInputs, state: MixerState) -> Tensor:
        """Mix the next tokens like `advance`, and keep what `crop` needs: of a prompt only its last tokens."""
        outs, tokens = [], inputs.q_BHTK.shape[2]
        head = tokens - self.max_recorded if self.seen == 0 else 0
        if head > 0:
            out, state = _mix_eager(mixer, slice_inputs(inputs, 0, head), state)
            outs.append(out)
            inputs, self._base, self._since = slice_inputs(inputs, head, tokens), state, []
        if self._base is None:
            self._base = state
        self._since.append(inputs)
        while self._num_recorded() - self._since[0].q_BHTK.shape[2] >= 2 * self.max_recorded:
            self._base = _next_state(mixer, self._since.pop(0), self._base)
        out, self.state = _mix_eager(mixer, inputs, state)
        return torch.cat([*outs, out], dim=2)

    def _num_recorded(self) -> int:
        return sum(inputs.q_BHTK.shape[2] for inputs in self._since)

    # -- interface of CacheLayerMixin ---------------------------------------------------------------------
    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether transformers must make masks as for a static cache.

        Its decoding step is not compiled: see MixerGenerationMixin.
        """
        return self.beside_static

    def get_seq_length(self) -> int:
        """Return the number of tokens processed."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns, offset) of masks: all tokens so far, or the length of static layers in the same cache."""
        return self.static_length or self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length is unlimited."""
        return -1

    def get_max_cache_shape(self) -> int:  # get_max_length before transformers 5.20
        """Return -1: the length is unlimited."""
        return -1

    @property
    def batch_size(self) -> int:
        """The number of rows. Raises AttributeError while the layer is empty."""
        if self.state is None:
            raise AttributeError("batch_size")
        return self.state.seen_B.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `advance` creates the state at the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise SurgeryError: a mixer's state cannot store keys and values."""
        raise SurgeryError(
            "this layer of the cache holds the state of a mixer, which cannot store keys and values: the cache "
            "belongs to the converted model, not to this one"
        )

    # -- removing tokens --------------------------------------------------------------------------------
    def activate_past_recording(self) -> None:
        """Record inputs from now on, so that `crop` can remove tokens."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n tokens. A positive n, as before transformers 5.20, is the number of tokens to keep.

        Raises SurgeryError if fewer tokens were recorded than are to be removed.
        """
        count = self.count_removed(tokens_to_remove)
        if count >= self.seen:
            self.reset()
        elif count > self._num_recorded():
            raise SurgeryError(
                f"a mixer's state cannot go back {count} tokens: it recorded {self._num_recorded()}. Call "
                "surgery.modeling.cache."
                "record_past(cache, model, tokens) before the tokens that may be removed (of a prompt the last "
                f"{self.max_recorded})"
            )
        elif count:
            self._replay(self._num_recorded() - count)
            self.seen -= count
        self._base, self._since = None, []

    def count_removed(self, tokens_to_remove: int) -> int:
        """Return how many tokens the argument of `crop` removes."""
        return -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)

    def _replay(self, remaining: int) -> None:
        """Recompute the state after the first `remaining` recorded tokens, in the original chunks."""
        assert self._mixer is not None and self._base is not None and self.state is not None
        state = self._base
        drop_later_slots(state, self.state)
        for inputs in self._since:
            tokens = min(remaining, inputs.q_BHTK.shape[2])
            if tokens:
                state = _next_state(self._mixer, slice_inputs(inputs, 0, tokens), state)
            remaining -= tokens
        self.state = state

    def hold(self) -> tuple[MixerState | None, int]:
        """Return what `go_back` takes. The next call does not overwrite the state."""
        self._held = True
        return self.state, self.seen

    def go_back(self, held: tuple[MixerState | None, int]) -> None:
        """Return to a held state; the states since then are dropped.

        It stays held, so that it can be returned to again.
        """
        state, seen = held
        if state is not None and self.state is not None and state is not self.state:
            drop_later_slots(state, self.state)
        self.state, self.seen, self._held = state, seen, True

    def reset(self) -> None:
        """Empty the layer."""
        self.state, self.seen, self.is_initialized = None, 0, False
        self._base, self._since = None, []

    # -- batch rows --------------------------------------------------------------------------------------
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the state, for beam search."""
        self._base, self._since = None, []
        if self.state is not None:
            self.state = self.state.rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices` (integers or a boolean mask)."""
        if self.state is not None:
            rows = torch.arange(self.batch_size, device=self.state.seen_B.device)
            self.reorder_cache(rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.state is not None:
            self.reorder_cache(
                torch.arange(self.batch_size, device=self.state.seen_B.device).repeat_interleave(repeats)
            )

    # -- devices ------------------------------------------------------------------------------------
    def offload(self) -> None:
        """Move the state to the CPU."""
        if self.state is not None:
            self.state = self.state.to("cpu")

    def prefetch(self) -> None:
        """Do nothing: `advance` moves the state itself, on the stream that reads it."""

    def nbytes(self) -> int:
        """Return the size of the state in bytes, without recorded inputs."""
        return 0 if self.state is None else self.state.nbytes()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mixer": None, "_decoder": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> MixerCacheLayer:
        """Copy the layer, but not the model."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(
            {k: v if k in ("_mixer", "_decoder") else copy.deepcopy(v, memo) for k, v in self.__dict__.items()}
        )
        return twin


class MixedCacheLayer(MixerCacheLayer, LinearAttentionLayer):  # type: ignore[override]
    """A mixer's layer that takes over the convolution and recurrent states of the library's layer `beside` (Falcon-H1:
    softmax attention and Mamba-2 in one layer).

    Tokens cannot be removed: a recurrent state of the library does not go back.
    """

    def __init__(self, beside: Any):
        CacheLayerMixin.__init__(self)
        MixerCacheLayer.__init__(self)
        for name in RECURRENT_STATE:
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
        held: list[Any] = []
        for states in (self.conv_states, self.recurrent_states):
            held += states.values() if isinstance(states, dict) else [states]  # a tensor before transformers 5.20
        return MixerCacheLayer.nbytes(self) + sum(t.nbytes for t in held if isinstance(t, Tensor))


def _mix_eager(mixer: Mixer, inputs: MixerInputs, state: MixerState) -> tuple[Tensor, MixerState]:
    out, after = mixer(inputs, state)
    assert after is not None
    return out, after


def _next_state(mixer: Mixer, inputs: MixerInputs, state: MixerState) -> MixerState:
    """Return the state after the inputs.

    Mixers with hooks (offloading, sharding) are called, because hooks act on calls only.
    """
    if hasattr(mixer, "_hf_hook") or mixer._forward_pre_hooks or mixer._forward_hooks:
        return _mix_eager(mixer, inputs, state)[1]
    return mixer.next_state(inputs, state)


def slice_inputs(inputs: MixerInputs, start: int, stop: int) -> MixerInputs:
    """Return tokens start:stop of a call's inputs, as inputs of a call of their own."""
    tokens, mask = inputs.q_BHTK.shape[2], inputs.mask_BHTS
    if (start, stop) == (0, tokens):
        return inputs
    selected = inputs.at_tokens(slice(start, stop))
    if mask is not None:  # keys: earlier tokens, and those of this call up to `stop`
        selected.mask_BHTS = mask[:, :, start:stop, : mask.shape[-1] - (tokens - stop)]
    return selected


# -- putting layers into caches --------------------------------------------------------------------
def is_paged_cache(value: Any) -> bool:
    """Return whether a value is a cache of continuous batching: one that gives the blocks of its pages to requests and
    takes them back.
    """
    return not isinstance(value, (Tensor, Cache)) and callable(getattr(value, "free_blocks", None))


def mixer_cache_layer(cache: Any, index: int) -> MixerCacheLayer:
    """Return layer `index` of the cache as a MixerCacheLayer, inserted if necessary.

    Raises SurgeryError for other cache types, and for a layer that already holds keys and values.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise SurgeryError(
            f"mixers cannot keep their state in a {type(cache).__name__}; use generate() without continuous batching, "
            "or a DynamicCache"
        )
    layer = library_layer(cache, index)
    if isinstance(layer, MixerCacheLayer):
        return layer
    if not hasattr(layer, "get_seq_length"):
        raise SurgeryError(
            f"layer {index} of this cache is a {type(layer).__name__} of a recurrent layer, and the model asks it for the "
            "state of a mixer: it belongs to another model"
        )
    if int(layer.get_seq_length()) > 0:
        raise SurgeryError(
            f"layer {index} of this cache holds keys and values of {int(layer.get_seq_length())} tokens, which a mixer "
            "cannot take over (another model's cache, or prefix tuning); start from an empty cache"
        )
    cache.layers[index] = ours = MixedCacheLayer(layer) if hasattr(layer, "recurrent_states") else MixerCacheLayer()
    ours.record_past = getattr(layer, "record_past", False)
    _find_static_layers(cache.layers)
    return ours


def library_layer(cache: Cache, index: int) -> Any:
    """Return layer `index` of a cache, which is made if the cache grows with its layers."""
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]


def _find_static_layers(layers: list[Any]) -> None:
    """Tell the mixers' layers of a cache which static layers are beside them.

    The last layer to be inserted tells them all.
    """
    ours = [layer for layer in layers if isinstance(layer, MixerCacheLayer)]
    static = [layer for layer in layers if hasattr(layer, "max_cache_len")]
    full = next((layer.max_cache_len for layer in static if not layer.is_sliding), 0)
    for layer in ours:
        layer.beside_static, layer.static_length = bool(static), full


def innermost_model(model: nn.Module, path: str) -> nn.Module:
    """Return the innermost transformers model around the attention at `path`: the decoder with its embeddings, without
    a head.
    """
    parts = path.split(".")
    around = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts) - 1, -1, -1))
    return next((module for module in around if isinstance(module, PreTrainedModel)), model)


def remember_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a decoder: tell the layers of its cache which model filled them."""
    if torch.compiler.is_compiling():
        return
    returned = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    cache = next((x for x in (*args, *kwargs.values(), *returned) if isinstance(x, Cache)), None)
    for layer in getattr(getattr(cache, "self_attention_cache", cache), "layers", ()):
        if isinstance(layer, MixerCacheLayer):
            layer._decoder = weakref.ref(decoder)


def hook_decoder(model: nn.Module, path: str) -> None:
    """Add `remember_decoder` to the decoder around the attention at `path`, once."""
    decoder = innermost_model(model, path)
    if remember_decoder not in decoder._forward_hooks.values():
        decoder.register_forward_hook(remember_decoder, with_kwargs=True)


def advance_offloading(cache: Any, index: int, device: torch.device) -> None:
    """Offload a layer and prefetch the next one, as an offloading cache does when it updates a layer."""
    cache.layers[index].offload()
    if device.type == "cuda":
        reading = torch.cuda.default_stream(device)
        reading.wait_stream(cache.prefetch_stream)
        cache.prefetch_stream.wait_stream(reading)
        cache.prefetch(index + 1, cache.only_non_sliding)


def mixer_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, attention module) of every attention module with a mixer."""
    return ((n, m) for n, m in model.named_modules() if isinstance(getattr(m, "mixer", None), Mixer))


def cached_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the attention modules with a mixer that have a layer in a cache: not those of an encoder."""
    return (module for _, module in mixer_modules(model) if module.mixer.shape.causal)


def record_past(cache: Cache, model: nn.Module, tokens: int = 0) -> None:
    """Turn on past recording in all layers, so that the cache can be cropped.

    tokens: how many tokens a crop may remove of a prompt, or of tokens that were fed one by one; at least MAX_RECORDED.
    """
    for module in cached_modules(model):
        layer = module.cache_layer(cache)
        layer.record_past, layer.max_recorded = True, max(tokens, MAX_RECORDED)
    if hasattr(cache, "activate_past_recording"):  # missing in transformers 5.10
        cache.activate_past_recording()
