"""Native linear layers with level weights: Gated DeltaNet, Mamba-2 and Kimi delta attention of transformers, with
log-linear attention.

    install_native(model, {"model.layers.0.linear_attn": Native()})

The module becomes an instance of a subclass of its own class, with the mixer as submodule `mixer`. The library's
forward stays: projections, convolution, norm, gate and skip. The subclass runs a copy of its code in which the names of
the library's core functions stand for the functions here; the library's globals do not change. The mixer and its inputs
come with the call, as keyword argument `surgery`, which the forward hands on to its core.

Checked against
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/qwen3_next/modeling_qwen3_next.py
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/mamba2/modeling_mamba2.py
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from types import CellType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from surgery.architectures.attention import uses_attention_interface
from surgery.architectures.native import native_paths, native_shape
from surgery.core.errors import SurgeryError, suggestion
from surgery.mixers.base import AttentionShape
from surgery.mixers.common.linear_features import l2_normalize
from surgery.mixers.common.packed_documents import (
    PackedDocuments,
    document_borders,
    has_one_document_per_row,
    mask_to_bool,
)
from surgery.mixers.native import NativeInputs, NativeMixer
from surgery.mixers.native_config import Native
from surgery.modeling.attention import (
    MixerModelMixin,
    copied_table,
    mixin_class,
    reduce_mixin,
    split_attention_mask,
)
from surgery.modeling.cache import MixerCacheLayer, innermost_model
from surgery.modeling.native_cache import native_cache_layer
from surgery.modeling.padding_positions import argument_names

# Arguments that say where the documents of a packed row begin.
PACKED_ARGUMENTS = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")
DOCUMENTS = "surgery_documents"  # argument with which a decoder passes them to its layers


@dataclass
class NativeCall:
    """What the core of one call needs beside its arguments. layer: the mixer's part of the cache layer, or None."""

    mixer: NativeMixer
    x_BTD: Tensor
    valid_BT: Tensor | None
    layer: MixerCacheLayer | None

    def run(self, inputs: NativeInputs) -> Tensor:
        """Return the output (B, T, G, V)."""
        out_BHTV = self.mixer(inputs)[0] if self.layer is None else self.layer.advance(self.mixer, inputs)
        return out_BHTV.transpose(1, 2).contiguous()


# -- core functions --------------------------------------------------------------------------------
def gated_delta_core(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, surgery: NativeCall, **_: Any
) -> tuple[Tensor, None]:
    """Return (output (B, T, G, V), None) of log-linear Gated DeltaNet; takes the arguments of the library's functions."""
    wide = torch.promote_types(value.dtype, torch.float32)
    q_BTGK, k_BTGK = (l2_normalize(x.to(wide)) for x in (query, key))
    inputs = NativeInputs(
        q_BHTK=q_BTGK.transpose(1, 2) * key.shape[-1] ** -0.5,
        k_BGTK=k_BTGK.transpose(1, 2),
        v_BGTV=value.to(wide).transpose(1, 2),
        x_BTD=surgery.x_BTD,
        valid_BT=surgery.valid_BT,
        gate_BTG=g.to(wide),
        beta_BGT=beta.to(wide).mT,
    )
    return surgery.run(inputs).to(query.dtype), None


def mamba2_core(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    surgery: NativeCall,
    **_: Any,
) -> Tensor | tuple[Tensor, None]:
    """Return the output (B, T, G, V) of log-linear Mamba-2, and None for the state that the library would keep.

    Takes the arguments of the library's function.
    """
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    dt_BTG = dt.clamp(dt_limit[0], dt_limit[1]).to(wide)
    x_BTGV = hidden_states.to(wide)
    inputs = NativeInputs(
        q_BHTK=C.to(wide).transpose(1, 2),
        k_BGTK=B.to(wide).transpose(1, 2),
        v_BGTV=(x_BTGV * dt_BTG.unsqueeze(-1)).transpose(1, 2),
        x_BTD=surgery.x_BTD,
        valid_BT=surgery.valid_BT,
        gate_BTG=A.to(wide) * dt_BTG,
    )
    out_BTGV = surgery.run(inputs)
    if D is not None:
        out_BTGV = out_BTGV + D.to(wide).unsqueeze(-1) * x_BTGV
    return (out_BTGV, None) if return_final_states else out_BTGV


def kimi_delta_core(
    query: Tensor, key: Tensor, value: Tensor, *, surgery: NativeCall, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Return (output (B, T, G, V), an empty state) of log-linear Kimi delta attention: `gated_delta_core` with gates
    (B, T, G, K). The library converts the state before a cache layer takes it.
    """
    out_BTGV, _ = gated_delta_core(query, key, value, surgery=surgery, **arguments)
    return out_BTGV, out_BTGV.new_zeros(())


def no_fused_layer(*_: Any, **__: Any) -> None:
    """Return None, as the library's function does without kernels: the layer then calls its core."""


def no_step(*_: Any, **__: Any) -> Any:
    """Raise SurgeryError: the cache layer of a mixer holds no recurrent state of the library, so no step reads one."""
    raise SurgeryError(
        "this native linear layer has level weights and was asked for a step from the library's own recurrent state, "
        f"which transformers {transformers.__version__} takes in a way that surgery does not know. Generate with a version "
        "that surgery was tested with (README.md), or with use_cache=False"
    )


CORES: dict[str, Any] = {
    "torch_chunk_gated_delta_rule": gated_delta_core,
    "torch_recurrent_gated_delta_rule": no_step,
    "chunk_kimi_delta_attention": kimi_delta_core,
    "recurrent_kimi_delta_attention": no_step,
    "mamba2_chunk_scan": mamba2_core,
    "mamba2_selective_state_update": no_step,
    "mamba2_split_conv1d_scan_combined": no_fused_layer,
}


@cache
def forward_with_cores(forward: Any) -> Any:
    """Return a copy of a forward, with its decorators, in which the names of CORES stand for the functions here."""
    if not hasattr(forward, "__wrapped__"):
        names = CORES.keys() & set(forward.__code__.co_names)
        bound = {**forward.__globals__, **{name: CORES[name] for name in names}}
        copied = FunctionType(forward.__code__, bound, forward.__name__, forward.__defaults__, forward.__closure__)
        copied.__kwdefaults__ = forward.__kwdefaults__
        return copied
    inner = forward.__wrapped__
    cells = forward.__closure__ or ()
    if not any(cell.cell_contents is inner for cell in cells):
        raise SurgeryError(
            f"{forward.__qualname__} is decorated in a way that cannot be copied, so its core cannot be replaced. Use a "
            "version of transformers that surgery was tested with (README.md)"
        )
    copied_inner = forward_with_cores(inner)
    copies = tuple(CellType(copied_inner) if cell.cell_contents is inner else cell for cell in cells)
    wrapper = FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, copies)
    return functools.update_wrapper(wrapper, copied_inner)


# -- modules ---------------------------------------------------------------------------------------
class CacheWithoutRecurrentStates:
    """A cache of which a forward sees no recurrent states, so that it runs the core for single tokens too.

    In transformers 5.17 and 5.19 a forward takes a step of the library wherever the cache has seen a token, also from a
    layer without a recurrent state. The state of the convolution is updated as in a pass over several tokens.
    """

    def __init__(self, past: Any):
        self.past = past

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return False."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.past, name)


class NativeLayer:
    """Mixin of the class of a native linear layer with level weights.

    own_forward: the library's forward with the cores here. arguments: names of its arguments. asks_for_state: whether it
    asks the cache if there is a recurrent state, and does not read the state itself. records_steps: whether it keeps
    the past of its convolution for single tokens too, if the cache records.
    """

    mixer: NativeMixer
    own_forward: Any
    arguments: tuple[str, ...]
    asks_for_state: bool
    records_steps: bool

    @staticmethod
    def class_attributes(base: Any) -> dict[str, Any]:
        """Return the attributes of a subclass of the library class `base`."""
        names = inspect.unwrap(base.forward).__code__.co_names
        asks = "has_previous_state" in names
        return {
            "own_forward": forward_with_cores(base.forward),
            "arguments": tuple(inspect.signature(base.forward).parameters)[1:],
            "asks_for_state": asks,
            "records_steps": "is_recording_past" in names,
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the library's forward with log-linear attention as its core."""
        bound = {**dict(zip(self.arguments, args)), **kwargs}
        documents: RowDocuments | None = bound.pop(DOCUMENTS, None)
        borders = {name: bound.pop(name, None) for name in PACKED_ARGUMENTS}
        if documents is None:
            for name, value in borders.items():
                if value is not None:
                    raise SurgeryError(
                        f"{type(self).__name__} has level weights and was called with {name!r}, that is, with several "
                        "documents in one row, whose levels would count on. Pad the batch instead, one document a row"
                    )
            return self._run_rows(bound)
        documents.readers.add("linear")
        if documents.packed is None:
            return self._run_rows(bound)
        if bound.get("cache_params") is not None:
            raise SurgeryError(
                f"{type(self).__name__} has level weights and was called with several documents packed in a row and a "
                "cache, which holds one document a row. Pass use_cache=False, or pad the batch"
            )

        def run(x_DUD: Tensor, real_DU: Tensor | None) -> Tensor:
            out_DUD: Tensor = self._run_rows({**bound, "hidden_states": x_DUD, "attention_mask": real_DU})
            return out_DUD

        return documents.packed.run(run, bound["hidden_states"])

    def _run_rows(self, bound: dict[str, Any]) -> Any:
        """Run the library's forward on rows of one document each. bound: its arguments by name."""
        past, mask, x_BTD = bound.get("cache_params"), bound.get("attention_mask"), bound["hidden_states"]
        valid_BT = None if mask is None else mask[:, -x_BTD.shape[1] :].to(torch.bool)
        call = NativeCall(self.mixer, x_BTD, valid_BT, None if past is None else self.cache_layer(past))
        if call.layer is not None and call.layer.record_past and x_BTD.shape[1] == 1 and not self.records_steps:
            raise SurgeryError(
                f"{type(self).__name__} of transformers {transformers.__version__} keeps no past of its convolution for "
                "single tokens, so that tokens cannot be removed from the cache. Give it two tokens or more at a time, or do "
                "not record (assisted generation)"
            )
        if past is not None and self.asks_for_state:
            bound = {**bound, "cache_params": CacheWithoutRecurrentStates(past)}
        return type(self).own_forward(self, **bound, surgery=call)

    def cache_layer(self, past: Any) -> MixerCacheLayer:
        """Return the mixer's part of this layer's cache, which is put into the cache if it has none yet."""
        return native_cache_layer(past, self.layer_idx)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_mixin(self, super().__reduce_ex__(protocol))


# -- packed documents ------------------------------------------------------------------------------
@dataclass
class RowDocuments:
    """The documents of one call of a decoder, None if each row is one.

    border: (row, token) where one of them begins. readers: the linear layers, and the softmax layers that keep documents
    apart, which have been called with them.
    """

    packed: PackedDocuments | None
    border: tuple[int, int]
    readers: set[str] = field(default_factory=set)


# Arguments of the outermost model's call that say where documents begin: some models do not pass them to their decoder.
_OUTER: ContextVar[dict[str, Any] | None] = ContextVar("arguments_of_the_outer_model", default=None)


def remember_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model: keep the arguments that say where documents begin, for its decoder."""
    if not torch.compiler.is_compiling():
        _OUTER.set({name: kwargs[name] for name in ("position_ids", *PACKED_ARGUMENTS) if name in kwargs})


def forget_arguments(model: Any, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a model: undo `remember_arguments`."""
    if not torch.compiler.is_compiling():
        _OUTER.set(None)


def add_documents(
    decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a decoder: pass the documents of packed rows to the layers, as keyword argument DOCUMENTS.

    Linear layers get no positions, and the library's own carry their state from one document to the next.
    """
    cls: Any = type(decoder)
    given = {**dict(zip(argument_names(cls), args)), **kwargs}
    tokens = next((t for name in ("input_ids", "inputs_embeds") if (t := given.get(name)) is not None), None)
    if tokens is None or has_one_document_per_row():
        return None
    if not torch.compiler.is_compiling():
        given = {**(_OUTER.get() or {}), **{name: value for name, value in given.items() if value is not None}}
    border_BT = _borders(given, tokens.unsqueeze(-1) if tokens.dim() == 2 else tokens)
    if border_BT is None:
        return None
    if torch.compiler.is_compiling():
        torch._assert_async(~border_BT.any(), "compiled layers take one document a row: pad instead")
        return None
    packed = PackedDocuments.from_borders(border_BT)
    if packed is None and not any(given.get(name) is not None for name in PACKED_ARGUMENTS):
        return None
    parameters = inspect.signature(cls.forward).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise SurgeryError(_carried_state(decoder))
    row, token = (0, 0) if packed is None else border_BT.nonzero()[0].tolist()
    return args, {**kwargs, DOCUMENTS: RowDocuments(packed, (row, token))}


def check_softmax(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a softmax layer beside native layers: note whether it keeps packed documents apart."""
    documents = kwargs.get(DOCUMENTS)
    if documents is None or documents.packed is None:
        return
    cls: Any = type(attention)
    given = {**dict(zip(argument_names(cls), args)), **kwargs}
    mask, (row, token) = given.get("attention_mask"), documents.border
    if mask is None:  # flash attention reads positions, or the borders themselves
        names = ("position_ids", "cu_seq_lens_q")
        flash = "flash" in str(attention.config._attn_implementation)
        apart = flash and any(given.get(name) is not None for name in names)
    elif isinstance(mask, Tensor):
        apart = mask.dim() == 4 and not bool(mask_to_bool(mask[row % len(mask), 0, token, token - 1]))
    else:
        b, h, q, k = (torch.tensor(n, device=documents.packed.back_N.device) for n in (row, 0, token, token - 1))
        apart = not bool(mask.mask_mod(b, h, q, k))
    if apart:
        documents.readers.add("softmax")


def check_documents_read(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a decoder: raise SurgeryError if its layers do not keep packed documents apart."""
    documents = kwargs.get(DOCUMENTS)
    if documents is None or documents.packed is None:
        return
    if "linear" not in documents.readers:
        raise SurgeryError(_carried_state(decoder))
    if "softmax" not in documents.readers and any(
        check_softmax in m._forward_pre_hooks.values() for m in decoder.modules()
    ):
        raise SurgeryError(
            f"several documents are packed in a row, and the softmax layers of {type(decoder).__name__} attend from one "
            f"to the other. {PAD_INSTEAD}"
        )


PAD_INSTEAD = "Pad the batch instead, one document a row (in finetune: data.packing=none)"


def _carried_state(decoder: Any) -> str:
    return (
        f"several documents are packed in a row, and {type(decoder).__name__} does not pass on to its linear layers where "
        f"they begin. {PAD_INSTEAD}"
    )


def _borders(given: Mapping[str, Any], x_BTD: Tensor) -> Tensor | None:
    """Return border_BT, True where a document begins after another in its row, by the arguments of a decoder's call."""
    B, T = x_BTD.shape[:2]
    if (seq_idx := given.get("seq_idx")) is not None:
        begins: Tensor = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
        return begins
    ends = next((given[name] for name in ("cu_seq_lens_q", "cu_seqlens") if given.get(name) is not None), None)
    if ends is not None and B == 1:
        return torch.isin(torch.arange(T, device=x_BTD.device), ends[1:-1].to(x_BTD.device)).unsqueeze(0)
    position_ids, mask = given.get("position_ids"), given.get("attention_mask")
    if not isinstance(position_ids, Tensor):
        return None
    if isinstance(mask, Mapping):  # masks by kind of layer, or by kind within a kind, which generate makes for a step
        values = [v for m in mask.values() for v in (m.values() if isinstance(m, Mapping) else (m,))]
        mask = next((v for v in values if isinstance(v, Tensor) and v.dim() == 4), None)
    valid_BT = split_attention_mask(mask, x_BTD, 0)[0] if isinstance(mask, Tensor) else None
    return document_borders(position_ids, mask, valid_BT, x_BTD)


# -- installing ------------------------------------------------------------------------------------
def add_level_weights(model: Any, path: str, config: Native) -> None:
    """Give the native linear layer at `path` level weights of 1, with the device and dtype of its weights."""
    module = model.get_submodule(path)
    shape = native_shape(model, path)
    if "forward" in vars(module):
        raise SurgeryError(f"{path} is already dispatched over devices (accelerate); add level weights before that")
    if getattr(model, "_use_kernels", False):
        raise SurgeryError(
            f"{type(model).__name__} was loaded with use_kernels=True, which replaces whole layers, their core "
            "included. Load it without"
        )
    put_level_weights(module, config, shape)
    decoder = innermost_model(model, path)
    if add_documents not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(add_documents, with_kwargs=True)
        decoder.register_forward_hook(check_documents_read, with_kwargs=True)
        for layer in decoder.modules():
            if uses_attention_interface(layer):
                layer.register_forward_pre_hook(check_softmax, with_kwargs=True)
        if model is not decoder:
            model.register_forward_pre_hook(remember_arguments, with_kwargs=True)
            model.register_forward_hook(forget_arguments, always_call=True)
    if not isinstance(model, MixerModelMixin):
        model.__class__ = mixin_class(model.__class__, MixerModelMixin)


def put_level_weights(module: Any, config: Native, shape: AttentionShape) -> None:
    """Give a native linear layer level weights of 1, without its model's knowledge; see `add_level_weights`."""
    like = next(t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())
    with torch.device(like.device):
        mixer = NativeMixer(config, shape).to(like.dtype)
    if not isinstance(module, NativeLayer):
        module.__class__ = mixin_class(module.__class__, NativeLayer)
    module.mixer = mixer.train(module.training)


def install_native(model: Any, mixers: Mapping[str, Native]) -> None:
    """Give native linear layers level weights of 1 in place, and record them in the model's table for save_pretrained.

    Raises SurgeryError, with the model unchanged, if a path is none of a native linear layer.
    """
    table, valid = copied_table(model), native_paths(model)
    for path in mixers:
        if path not in valid:
            raise SurgeryError(
                f"{type(model).__name__} has no native linear layer at {path!r}{suggestion(path, valid)}"
            )
    for path, config in mixers.items():
        add_level_weights(model, path, config)
        table.mixers[path] = config.to_dict()
    model.config.quantization_config = table


def has_plain_level_weights(module: Any) -> bool:
    """Return whether a module is a native linear layer whose level weights are 1 in every level."""
    return isinstance(module, NativeLayer) and not any(bool(p.any()) for p in module.mixer.parameters())


def remove_level_weights(module: Any) -> None:
    """Give a native linear layer its library class again, without level weights."""
    del module.mixer
    module.__class__ = type(module).__bases__[1]
