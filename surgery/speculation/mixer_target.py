"""A converted model that verifies drafts: mixer states go back to the last token that all rows accepted.

A cache with mixers has one length for all rows. After a round it is cropped by the largest number of rejected drafts of
a row; rows that accepted more take those tokens in again, with the next round's drafts and in the same forward. Shorter
rows are padded on the left of it, and the padding is masked. One row takes in no token twice.

B rows, T tokens, V vocabulary. Slots as in `surgery.speculation.runners`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from surgery.modeling.cache import CACHE_NAME, cached_modules, mixer_cache_layer, record_past
from surgery.speculation.runners import NO_LIMIT, last_logits


class MixerTarget:
    """A converted model on one batch. pad_B, limit: as in `Target`. taken_B: slots of each row's text that are in the
    cache.
    """

    def __init__(self, model: Any):
        self.model, self.cache, self.limit = model, DynamicCache(config=model.config), NO_LIMIT
        self.pad_B = self.taken_B = self.last_start_B = torch.zeros(0, dtype=torch.long)
        self.mask_BC = self.last_BT = torch.zeros(0, 0, dtype=torch.long)

    def prefill(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Run the prompt; return the logits of its last token (B, V)."""
        self.mask_BC = mask_BL.long()
        self.pad_B = mask_BL.shape[1] - self.mask_BC.sum(1)
        self.taken_B = torch.full_like(self.pad_B, ids_BL.shape[1])
        self.last_BT, self.last_start_B = ids_BL, torch.zeros_like(self.pad_B)
        position_BL = (self.mask_BC.cumsum(1) - 1).clamp_min(0)
        record_past(self.cache, self.model)
        return self._feed(ids_BL, position_BL, **last_logits(self.model))[:, -1]

    def verify(self, tokens_BT: Tensor, start_B: Tensor, done_B: Tensor | None = None) -> Tensor:
        """Run tokens that follow each row's first start_B ones; return their logits (B, T, V).

        Rows in done_B are padding.
        """
        going_B = torch.ones_like(start_B, dtype=torch.bool) if done_B is None else ~done_B
        self._crop(int(((self.taken_B - start_B) * going_B).max()))
        behind = int(((start_B - self.taken_B) * going_B).max())
        place_N = torch.arange(-behind, tokens_BT.shape[1], device=tokens_BT.device)
        slot_BN = start_B[:, None] + place_N
        old_BN = (slot_BN[:, :behind] - self.last_start_B[:, None]).clamp(0, self.last_BT.shape[1] - 1)
        new_BN = torch.cat([self.last_BT.gather(1, old_BN), tokens_BT], 1)
        valid_BN = ((slot_BN >= self.taken_B[:, None]) & going_B[:, None]).long()
        self.mask_BC = torch.cat([self.mask_BC, valid_BN], 1)
        position_BN = (slot_BN.clamp_max(self.limit - 1) - self.pad_B[:, None]).clamp_min(0)
        logits = self._feed(new_BN * valid_BN, position_BN)
        self.last_BT, self.last_start_B = tokens_BT, start_B
        self.taken_B = start_B + tokens_BT.shape[1]
        return logits[:, behind:]

    def _crop(self, count: int) -> None:
        """Remove the last `count` columns, and forget what was recorded of the others."""
        if count:
            self.cache.crop(-count)
            self.mask_BC = self.mask_BC[:, :-count]
            self.taken_B = self.taken_B - count
            return
        for module in cached_modules(self.model):
            mixer_cache_layer(self.cache, module.layer_idx).crop(0)

    def _feed(self, ids_BT: Tensor, position_BT: Tensor, **options: Any) -> Tensor:
        logits: Tensor = self.model(
            input_ids=ids_BT,
            attention_mask=None if bool(self.mask_BC.all()) else self.mask_BC,
            position_ids=position_BT,
            **{CACHE_NAME: self.cache},
            use_cache=True,
            **options,
        ).logits
        return logits
