"""Packed documents: several in a row, none of which may see another. A mixer gets each as a row of its own.

    documents = Documents.from_borders(border_BT)                 border: where a document begins behind another
    out_BHTV = documents.mix(mixer.mix, inputs)

As transformers has it, a document begins where position_ids do not go on by one; only, that is, where the mask keeps
it from the token before: padded batches have such positions too. D documents of a group, U slots of the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surgery.mixers.base import MixerInputs


def mask_to_bool(mask: Tensor) -> Tensor:
    """True where a boolean or additive mask lets a token be seen."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def document_borders(position_ids: Any, mask: Any, valid_BT: Tensor | None, x_BTD: Tensor) -> Tensor | None:
    """border_BT (bool) of a call without a cache; None where positions say nothing."""
    B, T = x_BTD.shape[:2]
    given = isinstance(position_ids, Tensor) and position_ids.dim() == 2 and position_ids.shape[1] == T
    if not given or T == 1 or (isinstance(mask, Tensor) and mask.dim() == 2):  # which says all that there is to say
        return None
    restart_BT = (position_ids[:, 1:] != position_ids[:, :-1] + 1).to(x_BTD.device).expand(B, T - 1)
    if isinstance(mask, Tensor):
        restart_BT = restart_BT & ~mask_to_bool(mask[:, 0, :, :T].diagonal(offset=-1, dim1=-2, dim2=-1))
    elif mask is not None:
        rows_B1, t_T = torch.arange(B, device=x_BTD.device)[:, None], torch.arange(1, T, device=x_BTD.device)
        restart_BT = restart_BT & ~mask.mask_mod(rows_B1, rows_B1.new_zeros(()), t_T, t_T - 1)
    if valid_BT is not None:
        restart_BT = restart_BT & valid_BT[:, 1:] & valid_BT[:, :-1]
    return torch.nn.functional.pad(restart_BT, (1, 0))


@dataclass(frozen=True)
class DocumentGroup:
    """Documents laid out together. index_DU: the token of each slot, among all B T; real_DU: None where none is empty."""

    index_DU: Tensor
    real_DU: Tensor | None


@dataclass(frozen=True)
class PackedDocuments:
    """number_BT counts the documents of a row; back_N: the slot of each of the B T tokens among those of all groups."""

    number_BT: Tensor
    groups: tuple[DocumentGroup, ...]
    back_N: Tensor

    @classmethod
    def from_borders(cls, border_BT: Tensor) -> PackedDocuments | None:
        """None where every row is one document. Reads the borders back from the device."""
        B, T = border_BT.shape
        begins_BT = border_BT.cpu()
        if not bool(begins_BT.any()):
            return None
        begins_BT[:, 0] = True
        start_D = begins_BT.flatten().nonzero().flatten()
        length_D = torch.diff(start_D, append=torch.tensor([B * T]))
        groups, slots = [], torch.empty(B * T, dtype=torch.long)
        before = 0
        for which in _group_by_length(length_D):
            slot_U = torch.arange(int(length_D[which].max()))
            real_DU = slot_U < length_D[which, None]
            index_DU = start_D[which, None] + slot_U.minimum(length_D[which, None] - 1)
            slots[index_DU[real_DU]] = before + real_DU.flatten().nonzero().flatten()
            before += real_DU.numel()
            everything = bool(real_DU.all())
            groups.append(
                DocumentGroup(index_DU.to(border_BT.device), None if everything else real_DU.to(border_BT.device))
            )
        return cls(border_BT.cumsum(1), tuple(groups), slots.to(border_BT.device))

    def mix(self, mix: Callable[[MixerInputs], tuple[Tensor, Any]], inputs: MixerInputs) -> Tensor:
        """out_BHTV of a mixer that sees one document a row."""
        B, T = self.number_BT.shape
        outs = []
        for group in self.groups:
            out_DHUV, _ = mix(_gather_group(group, inputs))
            outs.append(out_DHUV.transpose(1, 2).flatten(0, 1))
        out_NHV = torch.cat(outs).index_select(0, self.back_N)
        return out_NHV.unflatten(0, (B, T)).transpose(1, 2)


@dataclass
class DocumentMemo:
    """What one layer found out about a call's mask and positions, for the layers that follow. is_plain: None if nobody
    has looked."""

    documents: PackedDocuments | None
    is_plain: bool | None = None

    @staticmethod
    def recall(mask: Any, position_ids: Any) -> DocumentMemo | None:
        whose, versions, known = getattr(position_ids if mask is None else mask, "surgery_known", (None, None, None))
        mine = whose is (None if mask is None else position_ids) and versions == _versions(mask, position_ids)
        return known if mine else None

    def remember(self, mask: Any, position_ids: Any) -> DocumentMemo:
        """On the mask, or where there is none on the positions, if changes of theirs would be noticed."""
        if mask is not None:
            mask.surgery_known = (position_ids, _versions(mask, position_ids), self)
        elif _versions(position_ids) != [-1]:
            position_ids.surgery_known = (None, _versions(mask, position_ids), self)
        return self


def _versions(*tensors: Any) -> list[int]:
    """They count changes in place, which tensors of inference mode do not."""
    return [t._version if isinstance(t, Tensor) and not t.is_inference() else -1 for t in tensors]


def _group_by_length(length_D: Tensor) -> list[Tensor]:
    """Numbers of documents to be laid out together: all, or where that would more than double the tokens, those whose
    lengths are within a power of two."""
    if len(length_D) * int(length_D.max()) <= 2 * int(length_D.sum()):
        return [torch.arange(len(length_D))]
    size_D = torch.tensor([(n - 1).bit_length() for n in length_D.tolist()])
    return [(size_D == size).nonzero().flatten() for size in size_D.unique().tolist()]


def _gather_group(group: DocumentGroup, inputs: MixerInputs) -> MixerInputs:
    """A slot that is empty holds some token's numbers."""
    index_N, shape = group.index_DU.flatten(), tuple(group.index_DU.shape)

    def rows(x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, index_N).unflatten(0, shape)

    q, k, v = (rows(x.transpose(1, 2)).transpose(1, 2) for x in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV))
    real_DU = group.real_DU
    if inputs.valid_BT is not None:
        there_DU = rows(inputs.valid_BT)
        real_DU = there_DU if real_DU is None else real_DU & there_DU
    return replace(inputs, q_BHTK=q, k_BGTK=k, v_BGTV=v, x_BTD=rows(inputs.x_BTD), valid_BT=real_DU, mask_BHTS=None)
