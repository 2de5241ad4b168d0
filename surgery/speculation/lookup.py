"""Drafts looked up in the text so far, without a model (prompt lookup, Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.speculation.runners import NO_LIMIT

LONGEST_MATCH = 3  # tokens, the default of the published code
UNLIKELY = -1e4  # logit of the tokens that were not found


class LookupRunner:
    """Drafts the token that followed the last earlier place where the row's last three tokens stand, or else its last
    two, or one.

    Without such a place it drafts the row's last token. B rows, L columns, V vocabulary.
    """

    def __init__(self, vocabulary: int):
        self.vocabulary, self.steps, self.limit = vocabulary, 0, NO_LIMIT
        self.pad_B = torch.zeros(0, dtype=torch.long)

    def begin(self, ids_BL: Tensor, mask_BL: Tensor) -> None:
        """Take in where the rows begin."""
        self.pad_B = mask_BL.shape[1] - mask_BL.long().sum(1)

    def step(self, ids_BL: Tensor, length_B: Tensor, draft: int) -> Tensor:
        """Return logits (B, V) that are 0 at the token found and UNLIKELY at the others."""
        token_B1 = find_next(ids_BL, length_B + draft, self.pad_B)[:, None]
        logits_BV = torch.full((len(ids_BL), self.vocabulary), UNLIKELY, device=ids_BL.device)
        return logits_BV.scatter(1, token_B1, 0.0)

    def nbytes(self) -> int:
        """Return 0."""
        return 0


def find_next(ids_BL: Tensor, length_B: Tensor, pad_B: Tensor) -> Tensor:
    """Return the token (B,) that followed the last earlier match of the end of each row, tokens pad_B to length_B of
    ids (B, L).
    """
    next_B1 = length_B[:, None] - 1
    for size in range(1, LONGEST_MATCH + 1):
        if ids_BL.shape[1] < size:
            break
        parts_BPn = ids_BL.unfold(1, size, 1)
        start_P = torch.arange(parts_BPn.shape[1], device=ids_BL.device)
        own_B1 = length_B[:, None] - size
        end_Bn = ids_BL.gather(1, (own_B1 + torch.arange(size, device=ids_BL.device)).clamp_min(0))
        same_BP = (parts_BPn == end_Bn[:, None]).all(-1) & (start_P >= pad_B[:, None]) & (start_P < own_B1)
        found_B1 = torch.where(same_BP, start_P, -1).max(1, keepdim=True).values
        next_B1 = torch.where(found_B1 >= 0, found_B1 + size, next_B1)
    return ids_BL.gather(1, next_B1)[:, 0]
