"""Packed documents: several documents in one row, without attention between them. A mixer gets each as its own row.

    documents = PackedDocuments.from_borders(border_BT)   border: True where a document begins after another in its row
    out_BHTV = documents.mix(mixer.mix, inputs)
    out_BTD = documents.run(layer, x_BTD)               layer(x_DUD, real_DU): of one document per row

As in transformers, a document begins where position_ids do not increase by one. Padded batches have such positions
too, so the attention mask must also hide the preceding token. See find_packed_sequence_indices in
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/masking_utils.py

D documents of a group, U slots (the length of the longest document in the group).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surgery.mixers.base import MixerInputs


def mask_to_bool(mask: Tensor) -> Tensor:
    """Return a boolean mask (True: visible) for a boolean or additive mask."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def shows_later_tokens(mask_BHTS: Tensor, valid_BT: Tensor) -> bool:
    """Return whether a mask lets a token that is no padding see a later one."""
    T, S = mask_BHTS.shape[-2:]
    s_S = torch.arange(S, device=mask_BHTS.device)
    queries, shown = max(1, 2**26 // (len(valid_BT) * S)), []  # in chunks, which need less memory than the mask
    for start in range(0, T, queries):
        rows = slice(start, start + queries)
        later_NS = s_S > torch.arange(T, device=mask_BHTS.device)[rows, None]
        shown.append((mask_to_bool(mask_BHTS[:, :, rows]) & later_NS & valid_BT[:, None, rows, None]).any())
    return bool(torch.stack(shown).any())


def borders_from_mask(mask_BHTS: Tensor, valid_BT: Tensor) -> Tensor:
    """Return border_BT, True where a token sees no earlier one of its row and is no padding, of a mask without earlier
    tokens (S = T).
    """
    T, S = mask_BHTS.shape[-2:]
    t_T, first_BT = torch.arange(T, device=mask_BHTS.device), []
    for mask_BCS in mask_BHTS[:, 0].split(
        max(1, 2**26 // (len(valid_BT) * S)), 1
    ):  # chunks need less memory than the mask
        first_BT.append(mask_to_bool(mask_BCS).to(torch.uint8).argmax(-1))
    return valid_BT & (torch.cat(first_BT, 1) == t_T)


def document_borders(position_ids: Any, mask: Any, valid_BT: Tensor | None, x_BTD: Tensor) -> Tensor | None:
    """Return border_BT, True where a document begins after another in its row, for a call without a cache.

    mask: boolean or additive mask (B, 1, T, S), a FlexAttention BlockMask, a padding mask (B, T) or None. Returns None
    if the arguments cannot describe packed documents: no position_ids (B, T), a single token, or a padding mask.
    """
    B, T = x_BTD.shape[:2]
    has_positions = isinstance(position_ids, Tensor) and position_ids.dim() == 2 and position_ids.shape[1] == T
    if (
        not has_positions or T == 1 or (isinstance(mask, Tensor) and mask.dim() == 2)
    ):  # a (B, T) mask hides padding only
        return None
    t_T = torch.arange(T, device=x_BTD.device)
    last_T = (t_T - 1).clamp_min(0)  # not slices of T - 1 tokens: a program exported for any length would need T > 2
    position_ids = position_ids.to(x_BTD.device).expand(B, T)
    restart_BT: Tensor = (position_ids != position_ids[:, last_T] + 1) & (t_T > 0)
    if isinstance(mask, Tensor):
        restart_BT = restart_BT & ~mask_to_bool(mask[:, 0, t_T, last_T])
    elif mask is not None:
        rows_B1 = torch.arange(B, device=x_BTD.device)[:, None]
        restart_BT = restart_BT & ~mask.mask_mod(rows_B1, rows_B1.new_zeros(()), t_T, last_T)
    border_BT: Tensor = restart_BT if valid_BT is None else restart_BT & valid_BT & valid_BT[:, last_T]
    return border_BT


@dataclass(frozen=True)
class DocumentGroup:
    """Documents of similar length, padded to one batch.

    index_DU: index among the B T tokens of the call for each slot. real_DU: False for padding slots; None without
    padding.
    """

    index_DU: Tensor
    real_DU: Tensor | None


@dataclass(frozen=True)
class PackedDocuments:
    """Documents of one call, in groups of similar length.

    number_BT: number of the document in its row, per token. back_N: slot of each of the B T tokens among the slots of
    all groups.
    """

    number_BT: Tensor
    groups: tuple[DocumentGroup, ...]
    back_N: Tensor

    @classmethod
    def from_borders(cls, border_BT: Tensor) -> PackedDocuments | None:
        """Return the documents, or None if every row is one document. Synchronizes with the device."""
        B, T = border_BT.shape
        begins_BT = border_BT.cpu()
        if not bool(begins_BT.any()):
            return None
        begins_BT[:, 0] = True
        start_D = begins_BT.flatten().nonzero().flatten()
        length_D = torch.diff(start_D, append=torch.tensor([B * T]))
        groups, slots = [], torch.empty(B * T, dtype=torch.long)
        before = 0
        for group in group_by_length(length_D):
            slot_U = torch.arange(int(length_D[group].max()))
            real_DU = slot_U < length_D[group, None]
            index_DU = start_D[group, None] + slot_U.minimum(length_D[group, None] - 1)
            slots[index_DU[real_DU]] = before + real_DU.flatten().nonzero().flatten()
            before += real_DU.numel()
            no_padding = bool(real_DU.all())
            groups.append(
                DocumentGroup(index_DU.to(border_BT.device), None if no_padding else real_DU.to(border_BT.device))
            )
        return cls(border_BT.cumsum(1), tuple(groups), slots.to(border_BT.device))

    def mix(self, mix: Callable[[MixerInputs], tuple[Tensor, Any]], inputs: MixerInputs) -> Tensor:
        """Return out_BHTV of `mix`, called on batches with one document per row."""
        outs = [mix(_gather_group(group, inputs))[0].transpose(1, 2) for group in self.groups]
        out_BTHV = self._side_by_side(outs)
        return out_BTHV.transpose(1, 2)

    def run(self, layer: Callable[[Tensor, Tensor | None], Tensor], x_BTD: Tensor) -> Tensor:
        """Return the output (B, T, D) of `layer`, called on batches (x_DUD, real_DU) with one document per row; real_DU is
        False at padding behind a document, None without.
        """
        return self._side_by_side([layer(_rows(group, x_BTD), group.real_DU) for group in self.groups])

    def _side_by_side(self, outs: list[Tensor]) -> Tensor:
        """Return (B, T, ..) of the groups' outputs (D, U, ..)."""
        out_N = torch.cat([out.flatten(0, 1) for out in outs]).index_select(0, self.back_N)
        out_BT: Tensor = out_N.unflatten(0, tuple(self.number_BT.shape))
        return out_BT


_ONE_DOCUMENT: ContextVar[bool] = ContextVar("one_document_per_row", default=False)


@contextmanager
def one_document_per_row() -> Iterator[None]:
    """Within the context, calls without a cache have one document per row and no padding that a token sees, known to
    the caller: masks and position_ids are not searched for borders, which the capture of a CUDA graph does not allow.
    """
    token = _ONE_DOCUMENT.set(True)
    try:
        yield
    finally:
        _ONE_DOCUMENT.reset(token)


def has_one_document_per_row() -> bool:
    """Return whether the caller is within `one_document_per_row`; never under torch.compile, which cannot read the
    context.
    """
    return not torch.compiler.is_compiling() and _ONE_DOCUMENT.get()


@dataclass
class DocumentMemo:
    """Result of analysing the mask and positions of a call, computed by the first layer and reused by the others.

    documents: the packed documents by position_ids, or None. is_plain: whether the mask is only causal, padding and
    documents; None if not computed yet. shows_later: whether a token sees later ones by the mask, likewise. shown: the
    documents by the mask alone, of a mask that is not plain; None if it says more than where documents begin, and () if
    not computed yet. The memo is an attribute of the mask tensor, or of position_ids if there is no mask.
    """

    documents: PackedDocuments | None
    is_plain: bool | None = None
    shows_later: bool | None = None
    shown: PackedDocuments | tuple[()] | None = ()

    @staticmethod
    def recall(mask: Any, position_ids: Any) -> DocumentMemo | None:
        """Return the memo stored for these arguments, or None if there is none or they were changed in place since."""
        owner = position_ids if mask is None else mask
        memo: DocumentMemo | None
        positions, versions, memo = getattr(owner, "surgery_document_memo", (None, None, None))
        is_current = positions is (None if mask is None else position_ids) and versions == _versions(mask, position_ids)
        return memo if is_current else None

    def remember(self, mask: Any, position_ids: Any) -> DocumentMemo:
        """Store the memo on its owner and return it. Positions of inference mode get none: they count no changes."""
        if mask is not None:
            mask.surgery_document_memo = (position_ids, _versions(mask, position_ids), self)
        elif _versions(position_ids) != [-1]:
            position_ids.surgery_document_memo = (None, _versions(mask, position_ids), self)
        return self


def _versions(*tensors: Any) -> list[int]:
    """Return each tensor's count of in-place changes; -1 for tensors of inference mode, which have no count."""
    return [t._version if isinstance(t, Tensor) and not t.is_inference() else -1 for t in tensors]


def group_by_length(length_D: Tensor) -> list[Tensor]:
    """Return groups of document indices: one group, or groups with lengths in (2^(n-1), 2^n] if padding all documents
    to the longest would more than double the tokens."""
    if len(length_D) * int(length_D.max()) <= 2 * int(length_D.sum()):
        return [torch.arange(len(length_D))]
    size_D = torch.tensor([(n - 1).bit_length() for n in length_D.tolist()])
    return [(size_D == size).nonzero().flatten() for size in size_D.unique().tolist()]


def _rows(group: DocumentGroup, x_BT: Tensor) -> Tensor:
    """Return (D, U, ..) of a tensor (B, T, ..)."""
    x_N = x_BT.flatten(0, 1).index_select(0, group.index_DU.flatten())
    x_DU: Tensor = x_N.unflatten(0, tuple(group.index_DU.shape))
    return x_DU


def _gather_group(group: DocumentGroup, inputs: MixerInputs) -> MixerInputs:
    """Return the inputs of one group, one document per row. Padding slots repeat the document's last token."""
    rows = partial(_rows, group)
    q, k, v = (rows(x.transpose(1, 2)).transpose(1, 2) for x in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV))
    real_DU = group.real_DU
    if inputs.valid_BT is not None:
        valid_DU = rows(inputs.valid_BT)
        real_DU = valid_DU if real_DU is None else real_DU & valid_DU
    x_DUD, rope = rows(inputs.x_BTD), inputs.rope
    if rope is not None:
        batch = inputs.x_BTD.shape[0]
        rope = rows(rope[0].expand(batch, -1, -1)), rows(rope[1].expand(batch, -1, -1))
    unmasked = replace(inputs, valid_BT=real_DU, mask_BHTS=None, rope=rope)
    return replace(unmasked, q_BHTK=q, k_BGTK=k, v_BGTV=v, x_BTD=x_DUD)
