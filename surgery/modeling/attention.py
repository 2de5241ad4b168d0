"""Attention modules whose softmax(Q K^T) V is replaced by a mixer; projections, norms and RoPE stay.

    install(model, {"model.layers.0.self_attn": LinearAttention(...)})

The module becomes an instance of a subclass of its own class. The subclass passes the mixer's inputs through the
library's own forward to the attention function registered here. Parameter names stay the same; the mixer's own
parameters are `<path>.mixer.*`.
"""

from __future__ import annotations

import copy
import dis
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from surgery.architectures.attention import attention_paths, attention_shape, output_path
from surgery.architectures.dry_run import CACHE_ARGUMENTS
from surgery.architectures.linears import is_linear
from surgery.core.errors import SurgeryError, suggestion
from surgery.mixers import MIXERS, AttentionShape, Mixer, MixerConfig, MixerInputs
from surgery.mixers.common.packed_documents import (
    DocumentMemo,
    PackedDocuments,
    borders_from_mask,
    document_borders,
    has_one_document_per_row,
    mask_to_bool,
    shows_later_tokens,
)
from surgery.modeling.attention_weights import record_no_weights, weights_placeholder
from surgery.modeling.cache import (
    MixerCacheLayer,
    advance_offloading,
    hook_decoder,
    is_paged_cache,
    mixer_cache_layer,
    mixer_modules,
)
from surgery.modeling.converted_head import ConvertedModelMixin
from surgery.modeling.generation import MixerGenerationMixin
from surgery.modeling.modules import GuardedLinear
from surgery.modeling.padding_positions import derive_positions

ATTENTION_NAME = "surgery"
# Arguments that say where the sequences of a packed row begin, or where their keys and values lie.
PACKED_ARGUMENTS = ("cu_seq_lens_q", "cu_seqlens_q", "block_table")


@dataclass
class AttentionCall:
    """Inputs of the attention function that transformers does not pass: see MixerInputs. layer: the cache layer, or
    None.
    """

    x_BTD: Tensor
    valid_BT: Tensor | None
    mask_BHTS: Tensor | None
    layer: MixerCacheLayer | None
    offloading: Any  # the cache, if it offloads layers to the CPU
    documents: PackedDocuments | None = None
    rope: tuple[Tensor, Tensor] | None = None


class MixerAttention:
    """Mixin of an attention class with a mixer.

    host: the model's config, which determines how masks are made. arguments: names of the forward's arguments.
    passes_options: whether the forward hands its keyword arguments on to the attention function; if not (SigLIP), the
    function finds the call in the module.
    """

    mixer: Mixer
    host: Any
    arguments: tuple[str, ...]
    passes_options: bool

    @staticmethod
    def class_attributes(base: Any) -> dict[str, Any]:
        """Return the attributes of a subclass of the library class `base`."""
        arguments = tuple(inspect.signature(base.forward).parameters)[1:]
        return {"arguments": arguments, "passes_options": passes_options(base.forward)}

    def cache_layer(self, past: Any) -> MixerCacheLayer:
        """Return this layer of a cache, which is put into the cache if it is not there yet."""
        return mixer_cache_layer(past, self.layer_idx)  # type: ignore[attr-defined]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the library's forward with the mixer as attention function, and the mixer's state as cache."""
        bound = {**dict(zip(self.arguments, args)), **kwargs}
        for name, value in bound.items():
            if is_paged_cache(value):
                raise SurgeryError(
                    f"{type(self).__name__} has a mixer and was called with a {type(value).__name__} ({name!r}), that "
                    "is, for continuous "
                    "batching, whose pages cannot hold a mixer's state. Use generate() on padded batches"
                )
            if name in PACKED_ARGUMENTS and value is not None:
                raise SurgeryError(
                    f"{type(self).__name__} has a mixer and was called with {name!r}, that is, with several sequences "
                    "in one row. Mixers find their borders from position_ids that restart at 0: pass position_ids "
                    "only, or pad "
                    "the batch"
                )
        name = next((n for n in CACHE_ARGUMENTS if n in self.arguments), "")
        past = bound.pop(name, None)
        if past is None and name == "cache":  # the library's own forwards still take the old name
            past = bound.pop("past_key_values", None)
        layer = None if past is None else self.cache_layer(past)
        if name:
            bound[name] = None
        rope = bound.get("position_embeddings")
        if rope is not None and not self.mixer.rotated:
            dtype = _projection_dtype(rope[0])
            bound["position_embeddings"] = (
                torch.ones_like(rope[0], dtype=dtype),
                torch.zeros_like(rope[1], dtype=dtype),
            )
        x_BTD = bound["hidden_states"]
        valid_BT, mask_BHTS = self._masks(bound.get("attention_mask"), x_BTD, 0 if layer is None else layer.seen)
        documents = self._documents(bound, valid_BT, mask_BHTS, layer)
        if layer is not None:
            valid_BT = drop_mask_without_padding(bound.get("attention_mask"), valid_BT, layer.seen)
        offloading = past if getattr(past, "offloading", False) else None
        call = AttentionCall(x_BTD, valid_BT, mask_BHTS, layer, offloading, documents, rope)
        if self.passes_options:
            out = super().forward(**bound, surgery=call)  # type: ignore[misc]
        else:
            self._surgery_call = call
            try:
                out = super().forward(**bound)  # type: ignore[misc]
            finally:
                del self._surgery_call
        if (
            self.host._attn_implementation == "eager"
        ):  # others have no weights in any layer, and transformers lists none
            record_no_weights(out)
        return out

    def _masks(self, mask: Any, x_BTD: Tensor, seen: int) -> tuple[Tensor | None, Tensor | None]:
        implementation = self.host._attn_implementation
        if mask is None and implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
            raise SurgeryError(
                f"attention implementation {implementation!r} makes no masks, so padding cannot be distinguished from "
                "text; "
                "use model.set_attn_implementation('sdpa')"
            )
        if has_one_document_per_row() and not seen:
            return None, None  # transformers makes a mask during the capture of a graph even where none is needed
        return split_attention_mask(mask, x_BTD, seen)

    def _documents(
        self, bound: dict[str, Any], valid_BT: Tensor | None, mask_BHTS: Tensor | None, layer: MixerCacheLayer | None
    ) -> PackedDocuments | None:
        """Return the documents of packed rows, or None if every row is one document.

        Other masks are passed to mixers that read masks, and raise SurgeryError for all others.
        """
        x_BTD, mask, position_ids = bound["hidden_states"], bound.get("attention_mask"), bound.get("position_ids")
        if x_BTD.shape[1] == 1 or (layer is not None and layer.seen) or has_one_document_per_row():
            return None
        position_ids = position_ids if layer is None else None  # transformers does not pack rows with a cache
        memo = None if torch.compiler.is_compiling() else DocumentMemo.recall(mask, position_ids)
        if memo is None:
            border_BT = document_borders(position_ids, mask, valid_BT, x_BTD)
            if torch.compiler.is_compiling():
                if border_BT is not None:
                    torch._assert_async(~border_BT.any(), "compiled mixers take one document a row: pad instead")
                return None
            memo = DocumentMemo(None if border_BT is None else PackedDocuments.from_borders(border_BT)).remember(
                mask, position_ids
            )
        if mask_BHTS is None or valid_BT is None:
            return memo.documents
        # Only calls without a state apply masks, and only those of mixers to which it does not matter where a document
        # begins.
        reads_mask = self.mixer.reads_mask and layer is None and not self.mixer.counts_tokens
        if reads_mask and memo.documents is None:
            self._check_order(memo, mask_BHTS, valid_BT)
            return memo.documents
        if memo.is_plain is None:
            memo.is_plain = is_plain_mask(mask_BHTS, valid_BT, self.mixer.shape, memo.documents)
        if not memo.is_plain and self.mixer.counts_tokens and self.mixer.reads_mask and layer is None:
            if memo.shown == ():
                memo.shown = documents_shown(mask_BHTS, valid_BT, self.mixer.shape)
            if isinstance(memo.shown, PackedDocuments):
                return memo.shown
        if not memo.is_plain and not reads_mask:
            if self.mixer.reads_mask:
                self._check_order(memo, mask_BHTS, valid_BT)
            advice = "pass use_cache=False" if self.mixer.reads_mask and not self.mixer.counts_tokens else "pad instead"
            raise SurgeryError(
                f"the attention mask is not {'causal' if self.mixer.shape.causal else 'full'} over the real tokens (a "
                f"prefix, a custom mask, or packed documents whose position_ids do not restart), and "
                f"{type(self.mixer).__name__} takes one sequence per "
                f"row{' with a cache' if layer is not None else ''}; {advice}"
            )
        return memo.documents if memo.is_plain else None

    def _check_order(self, memo: DocumentMemo, mask_BHTS: Tensor, valid_BT: Tensor) -> None:
        """Raise SurgeryError if a mask of causal attention shows later tokens."""
        if memo.shows_later is None:
            memo.shows_later = shows_later_tokens(mask_BHTS, valid_BT)
        if memo.shows_later and self.mixer.shape.causal:
            raise SurgeryError(
                "the attention mask lets tokens see later ones (a prefix, or the tokens of one image in Gemma 3), and "
                "a mixer here takes the "
                "place of causal attention. Calibrate and run the model on text alone, or leave its softmax attention "
                "as it is"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_mixin(self, super().__reduce_ex__(protocol))


class MixerModelMixin(ConvertedModelMixin, MixerGenerationMixin):
    """Mixin of a model class that contains mixers."""

    def _move_missing_keys_from_meta_to_device(self, missing_keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise SurgeryError for missing mixer tensors, before from_pretrained would initialize them randomly."""
        ours = tuple(f"{path}.mixer." for path, _ in mixer_modules(self))  # type: ignore[arg-type]
        if lost := sorted(key for key in missing_keys if key.startswith(ours)):
            raise SurgeryError(f"the checkpoint lacks {len(lost)} tensors of its mixers: {', '.join(lost[:4])}")
        return super()._move_missing_keys_from_meta_to_device(missing_keys, *args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_mixin(self, super().__reduce_ex__(protocol))


# -- masks -----------------------------------------------------------------------------------------
def split_attention_mask(mask: Any, x_BTD: Tensor, seen: int) -> tuple[Tensor | None, Tensor | None]:
    """Return (valid_BT, mask_BHTS) of any mask the library makes for T new tokens after `seen` earlier ones.

    A real token attends to itself and padding does not, so validity is the mask's diagonal at the columns of the new
    tokens. Those columns are the last, except with static caches, which have columns for future tokens. Sliding-window
    layers drop columns at the front.
    """
    B, T = x_BTD.shape[:2]
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor):  # flex attention
        first = mask.shape[-1] - T if mask.shape[-1] < seen + T else seen
        rows_B1, t_T = torch.arange(B, device=x_BTD.device)[:, None], torch.arange(T, device=x_BTD.device)
        return mask.mask_mod(rows_B1, rows_B1.new_zeros(()), t_T, t_T + first).expand(B, T), None
    if mask.dim() == 2:  # flash attention
        return mask[:, -T:].to(torch.bool), None
    S = mask.shape[-1]
    first = S - T if seen + T > S else seen
    valid_BT = mask_to_bool(mask[:, 0, :, first : first + T].diagonal(dim1=-2, dim2=-1)).expand(B, T)
    return valid_BT, mask[..., : first + T]


def drop_mask_without_padding(mask: Any, valid_BT: Tensor | None, seen: int) -> Tensor | None:
    """Return None if none of the T new tokens after `seen` earlier ones is padding, else valid_BT (B, T).

    Static caches have a mask in every step, and mixers are slower with one. The first layer of a call compares, which
    synchronizes with the device, and leaves the answer on the mask for the others. Where the answer cannot be read or
    kept, valid_BT stays.
    """
    if valid_BT is None or torch.compiler.is_compiling() or not isinstance(mask, Tensor) or mask.is_inference():
        return valid_BT
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return valid_BT
    call = (mask._version, seen, valid_BT.shape[1])
    known, has_padding = getattr(mask, "surgery_padding_of_call", (None, True))
    if known != call:
        has_padding = not bool(valid_BT.all())
        mask.surgery_padding_of_call = (call, has_padding)  # type: ignore[attr-defined]
    return valid_BT if has_padding else None


def is_plain_mask(
    mask_BHTS: Tensor, valid_BT: Tensor, shape: AttentionShape, documents: PackedDocuments | None
) -> bool:
    """Return whether a mask encodes only padding, the causal order, the window, and document borders."""
    T, S = mask_BHTS.shape[-2:]
    behind_TS = torch.arange(T, device=mask_BHTS.device)[:, None] - torch.arange(S, device=mask_BHTS.device)
    order_TS = behind_TS.abs() < (shape.window or S)
    order_TS = order_TS & (behind_TS >= 0) if shape.causal else order_TS
    number_BT = torch.zeros_like(valid_BT, dtype=torch.long) if documents is None else documents.number_BT
    mask_BHTS = mask_BHTS.expand(len(valid_BT), -1, -1, -1)
    # Compared in chunks of rows: comparing all at once would need several times the mask's memory.
    rows, same = max(1, 2**26 // (T * S)), []
    for mask_RHTS, valid_RT, number_RT in zip(*(t.split(rows) for t in (mask_BHTS, valid_BT, number_BT))):
        wanted_RTS, seen_RHTS = valid_RT[:, None] & order_TS, mask_to_bool(mask_RHTS)
        if documents is not None:
            wanted_RTS = wanted_RTS & (number_RT.unsqueeze(-1) == number_RT.unsqueeze(1))
            if mask_RHTS.dtype != torch.bool:  # an additive mask: values other than 0 count as a difference
                seen_RHTS = seen_RHTS & (mask_RHTS == 0)
        same.append(((seen_RHTS == wanted_RTS.unsqueeze(1)) | ~valid_RT[:, None, :, None]).all())
    return bool(torch.stack(same).all())


def documents_shown(mask_BHTS: Tensor, valid_BT: Tensor, shape: AttentionShape) -> PackedDocuments | None:
    """Return the documents that a mask keeps apart, or None if it says anything else."""
    documents = PackedDocuments.from_borders(borders_from_mask(mask_BHTS, valid_BT))
    return documents if documents is not None and is_plain_mask(mask_BHTS, valid_BT, shape, documents) else None


def _projection_dtype(rotation_BTR: Tensor) -> torch.dtype:
    """Return the dtype in which queries and keys leave their projections: autocast's, if it is active, else that of the
    rotation, which follows the hidden states."""
    device = rotation_BTR.device.type
    active = rotation_BTR.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if active else rotation_BTR.dtype


def mixer_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    """Attention function of modules with a mixer; returns (output (B, T, H, V), None or a placeholder for the
    weights).
    """
    call = kwargs.get("surgery") or getattr(module, "_surgery_call", None)
    if call is None:
        raise SurgeryError(
            f"attention implementation {ATTENTION_NAME!r} is for modules that surgery.modeling.attention.install has "
            "given a mixer; "
            f"{type(module).__name__} has none. Use attn_implementation='sdpa'"
        )
    dropout = kwargs.get("dropout", 0.0)
    # Under autocast values leave their projection in the lower precision, while queries and keys leave RoPE, and hidden
    # states their norm, in float32. SDPA casts in this case, and so do mixers, once for all that reads them.
    query, key, x_BTD = (t.to(value.dtype) for t in (query, key, call.x_BTD))
    inputs = MixerInputs(query, key, value, x_BTD, call.valid_BT, call.mask_BHTS, dropout, call.rope)
    if call.documents is not None:
        out_BHTV = call.documents.mix(module.mixer, inputs)
    elif call.layer is None:
        out_BHTV, _ = module.mixer(inputs)
    else:
        out_BHTV = call.layer.advance(module.mixer, inputs)
        if call.offloading is not None:
            advance_offloading(call.offloading, module.layer_idx, query.device)
    if call.valid_BT is not None:  # padding may hold any value, even NaN, which must not reach later layers
        out_BHTV = out_BHTV.masked_fill(~call.valid_BT[:, None, :, None], 0.0)
    return out_BHTV.transpose(1, 2).to(query.dtype), weights_placeholder(query)


AttentionInterface.register(ATTENTION_NAME, mixer_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


# -- classes ---------------------------------------------------------------------------------------
@cache
def mixin_class(base: Any, mixin: Any) -> Any:
    """Return a subclass of a library class under the same name, so that saved files name the library's class."""
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    if hasattr(mixin, "class_attributes"):
        names |= mixin.class_attributes(base)
    return type(base.__name__, (mixin, base), names)


def passes_options(forward: Any) -> bool:
    """Return whether a function reads its **kwargs, and so may pass them on; False if it has none."""
    code = inspect.unwrap(forward).__code__
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    loads = (
        instruction.argval for instruction in dis.get_instructions(code) if instruction.opname.startswith("LOAD_FAST")
    )
    return any(name in (value if isinstance(value, tuple) else (value,)) for value in loads)


def reduce_mixin(self: Any, reduced: Any) -> tuple[Any, ...]:
    """Return what pickle stores of an object with a mixin: the library's class, found by name, and the mixin."""
    mixin, base = type(self).__bases__
    return (_new_mixin, (base, mixin), *reduced[2:])


def _new_mixin(base: type, mixin: type) -> Any:
    cls: Any = mixin_class(base, mixin)
    return cls.__new__(cls)


# -- installing ------------------------------------------------------------------------------------
def replace_attention(model: Any, path: str, config: MixerConfig) -> None:
    """Replace the attention at `path` by a mixer, initialized from its config, with the device and dtype of the
    module's weights.
    """
    module = model.get_submodule(path)
    shape = attention_shape(model, path)
    kind = MIXERS[config]
    kind.check_config(config, shape)
    if "forward" in vars(module):
        raise SurgeryError(f"{path} is already dispatched over devices (accelerate); install mixers before that")
    # Quantized projections have no parameters; their scales have the dtype.
    like = next(t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())
    with torch.device(like.device):
        mixer = kind(config, shape).to(like.dtype)
    attach_mixer(module, mixer.train(module.training))
    if shape.rotary:
        derive_positions(model, path, shape.causal)
    if shape.causal:
        hook_decoder(model, path)
    if not isinstance(model, MixerModelMixin):
        model.__class__ = mixin_class(model.__class__, MixerModelMixin)


def attach_mixer(module: Any, mixer: Mixer) -> None:
    """Turn an attention module into one that calls `mixer`."""
    if not isinstance(module, MixerAttention):
        module.host, module.config = module.config, copy.copy(module.config)
        module.config._attn_implementation_internal = ATTENTION_NAME
        module.__class__ = mixin_class(module.__class__, MixerAttention)
    module.mixer = mixer


def detach_mixer(module: Any) -> None:
    """Give an attention module its library class and its attention again, without the mixer."""
    del module.mixer
    module.config = module.host
    del module.host
    module.__class__ = type(module).__bases__[1]


def install(model: Any, mixers: dict[str, MixerConfig]) -> None:
    """Replace attention modules by mixers in place, and record them in the model's table for save_pretrained.

    Raises SurgeryError, with the model unchanged, if a path or config is invalid.
    """
    table = copied_table(model)
    valid = attention_paths(model)
    for path, config in mixers.items():
        if path not in valid:
            raise SurgeryError(f"{type(model).__name__} has no attention at {path!r}{suggestion(path, valid)}")
        MIXERS[config].check_config(config, attention_shape(model, path))
    for path, config in mixers.items():
        replace_attention(model, path, config)
        table.mixers[path] = config.to_dict()
        projections = fold_output_projection if config.reads_projections else drop_projections
        table.modules.update(projections(model, path))
    model.config.quantization_config = table


def copied_table(model: Any) -> Any:
    """Return a copy of the model's table of replaced modules, an empty one if it has none."""
    from surgery.modeling.quantization_config import SurgeryConfig

    before = getattr(model.config, "quantization_config", None)
    if before is not None and not isinstance(before, SurgeryConfig):
        raise SurgeryError("the model is quantized by another method; convert it first, then quantize")
    return SurgeryConfig() if before is None else copy.deepcopy(before)


def restore_buffers(model: nn.Module) -> None:
    """Recompute buffers that checkpoints do not store, which loading leaves undefined, from each mixer's config."""
    for _, module in mixer_modules(model):
        lost = [n for n, b in module.mixer.named_buffers() if n not in module.mixer.state_dict()]
        if lost:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                fresh = dict(type(module.mixer)(module.mixer.config, module.mixer.shape).named_buffers())
            for name in lost:
                module.mixer.get_buffer(name).copy_(fresh[name])


def drop_projections(model: Any, path: str) -> dict[str, Any]:
    """Replace the linears of the attention at `path` by dropped ones; return their table entries by path. Those that a
    plan replaced are dropped already.
    """
    # Imported by models without attention in some layers.
    from surgery.structures.dropped import Dropped, DroppedLinear

    parts, entries = (f"{path}.", f"{output_path(model, path)}."), {}
    for name, linear in list(model.named_modules()):
        if not (f"{name}.".startswith(parts) and is_linear(linear)):
            continue
        transposed = not isinstance(linear, nn.Linear)
        (out, in_), like = reversed(linear.weight.shape) if transposed else linear.weight.shape, linear.weight
        dropped = DroppedLinear(in_, out, Dropped(), bias=False, device=like.device, dtype=like.dtype)
        dropped.bias = linear.bias
        model.set_submodule(name, dropped.train(linear.training))
        spec = {**Dropped().to_dict(), "in_features": in_, "out_features": out, "bias": linear.bias is not None}
        entries[name] = {**spec, **({"transposed": True} if transposed else {})}
    return entries


def fold_output_projection(model: Any, path: str) -> dict[str, Any]:
    """Replace the output projection of the attention at `path` by a GuardedLinear; return its table entry by path.

    Returns {} if the projection was already replaced: its weight is not 2-D either.
    """
    projection = output_path(model, path)
    linear = model.get_submodule(projection)
    transposed = not isinstance(linear, nn.Linear)
    if linear.weight.dim() != 2:
        return {}
    weight_OI = linear.weight.detach().mT.contiguous() if transposed else linear.weight
    folded = GuardedLinear.from_weight(weight_OI.requires_grad_(linear.weight.requires_grad), linear.bias)
    model.set_submodule(projection, folded.train(linear.training))
    spec = {"structure": "folded", "in_features": folded.in_features, "out_features": folded.out_features}
    return {projection: {**spec, "bias": folded.bias is not None, **({"transposed": True} if transposed else {})}}
