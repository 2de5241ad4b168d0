"""Attention modules of a family without an Architecture, observed in a dry run of the model.

The model is built again from its config with placeholders for weights, so that no weight is read and little memory is
needed, and is called on a few tokens. Its attention modules look their attention function up in transformers' table and
find a function here, which records what arrives: queries, keys, values, the mask and the options. From that follow the
AttentionShape that a mixer needs, the output projection, and the property that forbids a mixer, if there is one. See
ALL_ATTENTION_FUNCTIONS in https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py

B batch, T tokens, D model width, H query heads, G key/value heads, K query/key dim, V value dim, R rotating dims, O
output size.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.linears import is_linear
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape

RECORDER = "surgery-dry-run"  # name of the attention function in transformers' tables
TOKENS = 8
ENCODER_TOKENS = 11  # differs from TOKENS, so that cross-attention is recognized by its number of keys
LONGEST = 2**18  # tokens for which masks are compared; a longer sliding window counts as none
CACHE_ARGUMENTS = ("past_key_values", "layer_past", "cache")  # of attention modules; "cache" since transformers 5.24
# Arguments of attention functions that mixers apply, or that change nothing in the result.
KNOWN_OPTIONS = {
    *(
        "dropout",
        "scaling",
        "sliding_window",
        "softcap",
        "is_causal",
        "position_ids",
        "deterministic",
        "cache_position",
    ),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "use_cache",
        "return_dict",
        "layer_head_mask",
    ),
    *("s_aux", "position_bias", "num_items_in_batch", "logits_to_keep", "position_embeddings"),
}
# Arguments of a forward that tell how attention code outside the interface changes the scores.
SCORE_ARGUMENTS = {
    "alibi": "it adds ALiBi biases to the scores",
    "rel_embeddings": "it adds scores of relative positions (disentangled attention)",
    "position_bias": "it adds a position bias to the scores",
    "relative_position_embeddings": "it adds scores of relative positions",
}


@dataclass(frozen=True)
class ObservedAttention:
    """What the dry run found of one self-attention module.

    shape: for a mixer; None if `refusal` is set. output: path of the first linear that reads the heads' outputs.
    refusal: the property that forbids a mixer, "" if nothing does.
    """

    shape: AttentionShape | None
    output: str
    refusal: str


@dataclass
class RecordedCall:
    """One call of an attention function. arguments: of the module's forward, by name; options: keyword arguments of the
    function.

    mask_function: of transformers, which made the mask; None if there is no mask, or the model made it. heads_BTO: what
    the function returned, with the heads joined.
    """

    path: str
    module: nn.Module
    q_BHTK: Tensor
    k_BGTK: Tensor
    v_BGTV: Tensor
    mask: Any
    options: dict[str, Any]
    arguments: dict[str, Any]
    mask_function: Callable[..., Any] | None
    heads_BTO: Tensor
    output: str = ""


# -- reasons without a run ----------------------------------------------------------------------------------------
def uses_attention_interface(module: nn.Module) -> bool:
    """Return whether the forward looks its attention function up in transformers' table, where a mixer can be
    inserted.
    """
    forwards = [inspect.unwrap(vars(cls)["forward"]) for cls in type(module).__mro__ if "forward" in vars(cls)]
    codes = [getattr(forward, "__code__", None) for forward in forwards]
    return any(code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)


def own_attention_reason(model: nn.Module) -> str:
    """Return why the attention of a model that does not use transformers' attention functions cannot be replaced."""
    config = getattr(model, "config", None)
    for module in model.modules():
        name = type(module).__name__
        if "attention" not in name.lower() or not any(isinstance(child, nn.Linear) for child in module.modules()):
            continue
        taken = set(inspect.signature(type(module).forward).parameters)
        used = [name for name in SCORE_ARGUMENTS if name in taken and getattr(config, name, True)]
        why = f"; {SCORE_ARGUMENTS[used[0]]}" if used else ""
        if any(isinstance(child, nn.Linear) for child in module.children()):
            return f"{name} computes attention in its own forward, without transformers' attention functions{why}"
    return f"{type(model).__name__} computes attention in its own forward, without transformers' attention functions"


# -- the model with placeholders -----------------------------------------------------------------------------------
class Placeholders:
    """Outputs of the model's linears in a dry run.

    mode: "tokens", different values for each token; "constant", the same for all tokens. scale: factor on all values.
    last: called with the path and the input of each linear.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.noise = torch.randn(1 << 16, generator=self.generator)
        self.mode, self.scale = "tokens", 1.0
        self.last: Callable[[str, Tensor], None] = lambda path, x: None

    def install(self, path: str, number: int, linear: Any) -> None:
        """Replace the forward of one linear."""
        out = linear.weight.shape[1 if type(linear).__name__ == "Conv1D" else 0]

        def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
            self.last(path, x)
            rows = 1 if self.mode == "constant" else x.shape[-2] if x.dim() > 1 else 1
            at = (number * 7919 + torch.arange(rows * out)) % len(self.noise)
            values = self.noise[at].view(rows, out) * self.scale
            return values.expand(*x.shape[:-1], out).clone()

        linear.forward = forward


def build_placeholder_model(cls: Any, config: Any) -> tuple[Any, Placeholders]:
    """Build a model of a class of transformers whose weights are placeholders: every element of a parameter is one
    number in memory.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = cls._from_config(config, dtype=torch.float32)
    placeholders = Placeholders()
    for number, (path, module) in enumerate(model.named_modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.ones((), device="cpu").expand(parameter.shape)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
        if is_linear(module):
            placeholders.install(path, number, module)
        elif "top_k_index" in inspect.signature(type(module).forward).parameters:
            module.forward = lambda hidden_states, *_, **__: (
                hidden_states
            )  # merged experts, whose products would take long
    return model.eval(), placeholders


def dry_run_inputs(model: Any) -> dict[str, Tensor]:
    """Return the keyword arguments of one call: token ids, images or sound.

    SurgeryError for models that read anything else.
    """
    config, name = model.config, model.main_input_name
    takes = inspect.signature(model.forward).parameters
    if name == "input_ids":
        ids_BT = _token_ids(config)
        if getattr(config, "is_encoder_decoder", False):
            return {"input_ids": ids_BT, "decoder_input_ids": ids_BT[:, :TOKENS]}
        picture = _picture(getattr(config, "vision_config", config)) if "pixel_values" in takes else None
        if picture is not None and not type(model).can_generate():  # CLIP and its kin compare a text with an image
            return {"input_ids": ids_BT[:, :TOKENS], "pixel_values": picture}
        return {"input_ids": ids_BT[:, :TOKENS]}
    if name == "pixel_values" and (picture := _picture(config)) is not None:
        return {name: picture}
    if (sound := _sound(config, name)) is not None:
        return {
            name: sound,
            **({"decoder_input_ids": _token_ids(config)[:, :TOKENS]} if "decoder_input_ids" in takes else {}),
        }
    raise SurgeryError(
        f"{type(model).__name__} cannot be given mixers: surgery has no description of this family, and a dry run "
        "needs a model that "
        f"reads input_ids, pixel_values, or sound of a length that its config tells (this one reads {name})"
    )


def _token_ids(config: Any) -> Tensor:
    """Return token ids for an encoder, (1, ENCODER_TOKENS)."""
    vocabulary = config.get_text_config().vocab_size
    first = 3 if vocabulary > TOKENS + 3 else 0
    return torch.arange(first, first + ENCODER_TOKENS)[None] % vocabulary


def _picture(config: Any) -> Tensor | None:
    """Return a black image (1, channels, height, width), or None if the config does not tell its size."""
    size = getattr(config, "image_size", None)
    if not size:
        return None
    size = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.zeros(1, getattr(config, "num_channels", 3), *size)


def _sound(config: Any, name: str) -> Tensor | None:
    """Return silence for an input of sound, or None: a spectrogram (1, bins, frames) or (1, frames, bins), or a
    waveform (1, samples).
    """
    bins, positions = (getattr(config, key, None) for key in ("num_mel_bins", "max_source_positions"))
    if name == "input_features" and bins and positions:  # Whisper: two frames a position
        return torch.zeros(1, bins, 2 * positions)
    if name == "input_values" and bins and getattr(config, "max_length", None):  # the audio spectrogram transformer
        return torch.zeros(1, config.max_length, bins)
    strides, kernels = (getattr(config, key, None) for key in ("conv_stride", "conv_kernel"))
    if name == "input_values" and strides and kernels:  # wav2vec 2.0 and its kin
        samples = TOKENS
        for stride, kernel in zip(reversed(strides), reversed(kernels)):
            samples = (samples - 1) * stride + kernel
        return torch.zeros(1, samples)
    return None


# -- the run ---------------------------------------------------------------------------------------------------
class DryRun:
    """Calls of attention functions, recorded while a placeholder model runs."""

    def __init__(self, model: Any, placeholders: Placeholders):
        self.model, self.placeholders = model, placeholders
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.attention = [module for module in model.modules() if uses_attention_interface(module)]
        self.calls: list[RecordedCall] = []
        self.arguments: dict[int, dict[str, Any]] = {}
        self.masks: dict[int, tuple[Tensor, Callable[..., Any]]] = {}  # by address
        self.patterns: dict[int, tuple[bool, int | None]] = {}  # of the masks, by address
        self.waiting: RecordedCall | None = None  # the last call, until a linear has read its output

    def run(self, call: Callable[[], Any], modules: Sequence[nn.Module] = ()) -> list[RecordedCall]:
        """Return the attention calls that happen during `call`, in order. modules: those that it calls, () for all."""
        self.calls = []
        hooked = modules or self.attention
        handles = [m.register_forward_pre_hook(self._note_arguments, with_kwargs=True) for m in hooked]
        self.placeholders.last = self._note_linear
        try:
            with recording(self):
                call()
        finally:
            for handle in handles:
                handle.remove()
        return self.calls

    def _note_arguments(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        self.arguments[id(module)] = {**dict(zip(names, args)), **kwargs}

    def _note_linear(self, path: str, x: Tensor) -> None:
        if self.waiting is not None:
            if x.shape[-1] == self.waiting.heads_BTO.shape[-1]:
                self.waiting.output = path
            self.waiting = None

    def make_mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """Mask function of the dry run: a whole mask in any case, remembered together with the function that defines
        it.
        """
        from transformers.masking_utils import causal_mask_function, sdpa_mask

        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: Tensor = sdpa_mask(*args, **kwargs)  # type: ignore[assignment]
        self.masks[mask.data_ptr()] = mask, kwargs.get("mask_function", causal_mask_function)
        return mask

    def mask_pattern(self, call: RecordedCall) -> tuple[bool, int | None]:
        """Return (whether attention is causal, size of the sliding window or None); layers that share a mask share the
        answer.
        """
        if call.mask_function is None:
            return _mask_pattern(call)
        address = call.mask.data_ptr()
        if address not in self.patterns:
            self.patterns[address] = _mask_pattern(call)
        return self.patterns[address]

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        """Attention function of the dry run: records the call and returns random outputs (B, T, H, V)."""
        out_BTHV = torch.randn(q.shape[0], q.shape[2], q.shape[1], v.shape[-1], generator=self.placeholders.generator)
        made_by = self.masks.get(mask.data_ptr(), (None, None))[1] if isinstance(mask, Tensor) else None
        call = RecordedCall(
            self.paths[id(module)], module, q, k, v, mask, options, self.arguments.get(id(module), {}), made_by, out_BTHV.flatten(2)
        )  # fmt: skip
        self.calls.append(call)
        self.waiting = call
        return out_BTHV, None


_active: list[DryRun] = []


@cache
def register_recorder() -> None:
    """Enter RECORDER into transformers' tables of attention functions and of mask functions."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(RECORDER, lambda *args, **kwargs: _active[-1].attend(*args, **kwargs))
    AttentionMaskInterface.register(RECORDER, lambda *args, **kwargs: _active[-1].make_mask(*args, **kwargs))


@contextmanager
def recording(run: DryRun) -> Iterator[None]:
    """Send calls of the attention function RECORDER, and its masks, to `run` inside the context."""
    _active.append(run)
    try:
        yield
    finally:
        _active.pop()


# -- results -------------------------------------------------------------------------------------------------
_results: OrderedDict[tuple[Any, str], dict[str, ObservedAttention]] = OrderedDict()


def observe_attention(model: Any) -> dict[str, ObservedAttention]:
    """Return what a dry run finds of each self-attention module of a transformers model, by path, in order of
    execution.

    Only the class and the config of the model are read: its weights may be anywhere, and its attention may be replaced
    already. Results are kept for the last models. Raises SurgeryError if the model cannot be built or run this way.
    """
    cls = library_class(model)
    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    key = cls, json.dumps(settings, sort_keys=True, default=str)
    if key not in _results:
        _results[key] = _observe(cls, model.config)
        while len(_results) > 8:
            _results.popitem(last=False)
    _results.move_to_end(key)
    return _results[key]


def library_class(model: Any) -> Any:
    """Return the class of transformers, or of remote code, that a model with mixers was before."""
    from transformers import PreTrainedModel

    for cls in type(model).__mro__:
        if issubclass(cls, PreTrainedModel) and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls:
            return cls
    return type(model)


def _observe(cls: Any, config: Any) -> dict[str, ObservedAttention]:
    register_recorder()
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._attn_implementation = RECORDER
    config._experts_implementation = "eager"
    default = torch.get_default_dtype()
    with torch.device("cpu"), torch.no_grad():  # callers may build models on meta
        try:
            torch.set_default_dtype(torch.float32)
            model, placeholders = build_placeholder_model(cls, config)
            inputs, run = dry_run_inputs(model), DryRun(model, placeholders)
            calls = run.run(lambda: _call_model(model, inputs))
            return _results_of(run, calls)
        except SurgeryError:
            raise
        except Exception as error:  # code of any family
            raise SurgeryError(
                f"{cls.__name__} cannot be given mixers: surgery has no description of this family, and its forward "
                "could not be run on "
                f"placeholder inputs and weights ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            ) from error
        finally:
            torch.set_default_dtype(default)


def _call_model(model: Any, inputs: dict[str, Tensor]) -> None:
    try:
        model(**inputs, use_cache=False)
    except TypeError:
        model(**inputs)  # encoders whose forward has no use_cache


def _results_of(run: DryRun, calls: list[RecordedCall]) -> dict[str, ObservedAttention]:
    results: dict[str, ObservedAttention] = {}
    calls = [call for call in calls if call.k_BGTK.shape[2] == call.q_BHTK.shape[2]]  # others are cross-attention
    times = {call.path: sum(other.path == call.path for other in calls) for call in calls}
    owners: dict[int, list[str]] = {}
    for call in calls:
        owners.setdefault(call.k_BGTK.data_ptr(), []).append(call.path)
    for call in calls:
        shared = [path for path in owners[call.k_BGTK.data_ptr()] if path != call.path]
        try:
            if times[call.path] > 1:
                raise SurgeryError(f"one pass of the model calls its attention function {times[call.path]} times")
            if (getattr(call.module, "layer_idx", None) or 0) < 0:
                raise SurgeryError("several layers share it, and each call names the layer whose cache it uses")
            if shared:
                raise SurgeryError(f"it shares its keys and values with {shared[0]}")
            results[call.path] = ObservedAttention(_shape_of(run, call), call.output, "")
        except SurgeryError as error:
            results[call.path] = ObservedAttention(None, call.output, str(error))
    return results


# -- the shape of one module ---------------------------------------------------------------------------------
def _shape_of(run: DryRun, call: RecordedCall) -> AttentionShape:
    """Return the shape of a recorded call. Raise SurgeryError with the property that forbids a mixer."""
    _check_options(call)
    _check_module(call)
    causal, window = run.mask_pattern(call)
    if causal and getattr(type(run.model), "can_generate", lambda: False)():
        _check_cache(call)
    turned = _again(run, call)
    plain = _again(run, call, rotated=False)
    rotary, interleaved = _rotation(call, turned, plain)
    if not rotary:
        _check_positions(run, call)
    doubled = _again(run, call, rotated=False, scale=2.0)
    linear = torch.allclose(doubled.q_BHTK, 2 * plain.q_BHTK, rtol=1e-3, atol=1e-4)
    scaling = call.options.get("scaling")
    return AttentionShape(
        dim=call.arguments["hidden_states"].shape[-1],
        heads=call.q_BHTK.shape[1],
        groups=call.k_BGTK.shape[1],
        key=call.q_BHTK.shape[-1],
        value=call.v_BGTV.shape[-1],
        scaling=call.q_BHTK.shape[-1] ** -0.5 if scaling is None else float(scaling),
        causal=causal,
        window=window,
        softcap=None if call.options.get("softcap") is None else float(call.options["softcap"]),
        rotary=rotary,
        interleaved=interleaved,
        norm=not linear,
    )


def _check_options(call: RecordedCall) -> None:
    if call.options.get("s_aux") is not None:
        raise SurgeryError("its softmax has a learned sink in each head (s_aux), which mixers do not compute")
    if call.options.get("position_bias") is not None:
        raise SurgeryError("it adds a learned position bias to the scores, which mixers do not compute")
    for name, value in call.options.items():
        if name not in KNOWN_OPTIONS and (isinstance(value, Tensor) or type(value) is float):
            raise SurgeryError(f"it passes {name!r} to its attention function, which mixers do not know")


def _check_module(call: RecordedCall) -> None:
    module, B = call.module, call.q_BHTK.shape[0]
    if not isinstance(call.arguments.get("hidden_states"), Tensor):
        raise SurgeryError("its forward has no argument hidden_states, from which mixers read their inputs")
    if not hasattr(module, "config"):
        raise SurgeryError("the module has no config, in which its attention function could be replaced")
    if call.arguments["hidden_states"].dim() != 3 or call.arguments["hidden_states"].shape[:2] != (
        B,
        call.q_BHTK.shape[2],
    ):
        raise SurgeryError(
            f"its hidden states of shape {tuple(call.arguments['hidden_states'].shape)} are rearranged before "
            "attention, to "
            f"{B} rows of {call.q_BHTK.shape[2]} tokens"
        )
    if not call.output:
        raise SurgeryError("the heads' outputs are not read by a linear, of which mixers need one")
    if call.q_BHTK.shape[1] % call.k_BGTK.shape[1]:
        raise SurgeryError(
            f"its {call.q_BHTK.shape[1]} query heads are not a multiple of its {call.k_BGTK.shape[1]} key heads"
        )


def _check_cache(call: RecordedCall) -> None:
    names = set(inspect.signature(type(call.module).forward).parameters)
    if not names & set(CACHE_ARGUMENTS):
        raise SurgeryError(f"its forward has no argument for the cache ({', '.join(CACHE_ARGUMENTS)})")
    if getattr(call.module, "layer_idx", None) is None:
        raise SurgeryError("the module has no layer_idx, its place in the cache")


def _mask_pattern(call: RecordedCall) -> tuple[bool, int | None]:
    """Return (whether attention is causal, size of the sliding window or None), from the mask or, without one, from the
    options.
    """
    if call.mask is None:
        causal = call.options.get("is_causal")
        causal = getattr(call.module, "is_causal", False) if causal is None else causal
        return bool(causal), call.options.get("sliding_window")
    if call.mask_function is None:
        return _made_mask_pattern(call.mask)
    one, s_S = torch.zeros((), dtype=torch.long), torch.arange(LONGEST)
    rows = [(t, _mask_row(call.mask_function, one, t, s_S)) for t in (LONGEST // 2, LONGEST // 2 + 7, 5)]
    causal = not bool(rows[0][1][LONGEST // 2 + 1 :].any())
    reach = int(rows[0][1][: LONGEST // 2 + 1].sum())  # of the query in the middle, itself included
    window = None if reach == LONGEST // 2 + 1 else reach
    for t, seen_S in rows:
        wanted_S = (t - s_S < window) if window is not None else torch.ones_like(seen_S)
        wanted_S = wanted_S & (s_S <= t if causal else (s_S - t < window if window is not None else wanted_S))
        if not torch.equal(seen_S, wanted_S):
            raise SurgeryError(
                "its mask is neither causal nor full, with or without a sliding window (chunked attention, for example)"
            )
    return causal, window


def _mask_row(function: Callable[..., Any], zero: Tensor, t: int, s_S: Tensor) -> Tensor:
    try:
        row: Tensor = function(zero, zero, torch.full_like(s_S, t), s_S)
        return row.to(torch.bool).expand(s_S.shape)
    except (IndexError, RuntimeError):
        raise SurgeryError("its mask depends on more than the distance of two tokens") from None


def _made_mask_pattern(mask: Any) -> tuple[bool, None]:
    """Return (whether a mask that the model made itself is causal, None). SurgeryError unless it is plain."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise SurgeryError(f"its mask is a {type(mask).__name__} that transformers' mask functions did not make")
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((seen | (mask < -1e4)).all()):
        raise SurgeryError("its mask adds a bias to the scores, which mixers do not compute")
    T = mask.shape[-1]
    for causal in (False, True):
        full = torch.ones(T, T, dtype=torch.bool)
        if bool((seen == (full.tril() if causal else full)).all()):
            return causal, None
    raise SurgeryError("its mask is neither causal nor full")


def _again(
    run: DryRun, call: RecordedCall, rotated: bool = True, mode: str = "tokens", scale: float = 1.0
) -> RecordedCall:
    """Return the attention call of the module alone, with other rotary tables (none: cos = 1, sin = 0) or other
    placeholders.
    """
    arguments = dict(call.arguments)
    rope: Any = arguments.get("position_embeddings")
    if not rotated and _is_rope(rope):
        arguments["position_embeddings"] = (torch.ones_like(rope[0]), torch.zeros_like(rope[1]))
    run.placeholders.mode, run.placeholders.scale = mode, scale
    try:
        return run.run(lambda: call.module(**arguments), [call.module])[0]
    finally:
        run.placeholders.mode, run.placeholders.scale = "tokens", 1.0


def _is_rope(rope: Any) -> bool:
    return isinstance(rope, (tuple, list)) and len(rope) == 2 and all(isinstance(t, Tensor) for t in rope)


def _rotation(call: RecordedCall, turned: RecordedCall, plain: RecordedCall) -> tuple[int, bool]:
    """Return (R, whether pairs are (2 f, 2 f + 1)), such that rotating the first R dims of the plain q and k gives the
    turned ones.
    """
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(_q_and_k(turned), _q_and_k(plain))]
    if all(same):
        return 0, False
    rope: Any = call.arguments.get("position_embeddings")
    if not _is_rope(rope):
        raise SurgeryError("it rotates queries and keys with tables of its own instead of position_embeddings")
    for tables, interleaved in _rope_tables(rope[0], rope[1], call.q_BHTK.shape[-1]):
        pairs = zip(_q_and_k(turned), _q_and_k(plain))
        if all(torch.allclose(after, rotate(before, *tables, interleaved), atol=1e-4) for after, before in pairs):
            return tables[0].shape[-1], interleaved
    raise SurgeryError(
        "it rotates queries and keys in a layout that mixers do not know: they know rotations of the first dims of a "
        "head, in pairs (f, f + half) "
        "or (2 f, 2 f + 1)"
    )


def _q_and_k(call: RecordedCall) -> tuple[Tensor, Tensor]:
    return call.q_BHTK, call.k_BGTK


def _rope_tables(cos: Tensor, sin: Tensor, dims: int) -> list[tuple[tuple[Tensor, Tensor], bool]]:
    """Return ((cos, sin) of shape (B, 1, T, R), interleaved) of every layout in use, [] if they are not (B, T, R) with
    R up to `dims`.

    Tables for pairs (2 f, 2 f + 1) repeat each angle, or are in the order of the other layout and are rearranged by the
    module.
    """
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[-1] > dims:
        return []
    plain = cos.unsqueeze(1), sin.unsqueeze(1)
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in plain)
    return [(plain, False), (plain, True), ((cos, sin), True)]


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x with its first R dims rotated by tables of shape (B, 1, T, R) (Su et al. 2021, RoFormer, eq. 34)."""
    head, rest = x_BHTK[..., : cos.shape[-1]], x_BHTK[..., cos.shape[-1] :]
    if interleaved:
        turned = torch.stack([-head[..., 1::2], head[..., ::2]], -1).flatten(-2)
    else:
        first, second = head.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    return torch.cat([head * cos + turned * sin, rest], -1)


def _check_positions(run: DryRun, call: RecordedCall) -> None:
    """Raise SurgeryError if queries or keys of equal tokens differ by position although nothing known rotates them."""
    for x_BHTK in _q_and_k(_again(run, call, mode="constant")):
        if not torch.allclose(x_BHTK, x_BHTK[:, :, :1].expand_as(x_BHTK), atol=1e-5):
            raise SurgeryError(
                "its queries or keys depend on the position in a way of their own, which mixers do not know"
            )
        if not bool(x_BHTK.std() > 0):
            raise SurgeryError("its queries or keys do not come from linears")
