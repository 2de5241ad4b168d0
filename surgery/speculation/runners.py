"""How the original and its drafter run on a batch of rows of different lengths.

    target.prefill(ids, mask)                     logits of the last token
    target.verify(tokens_BT, start_B)             logits of all of them, at each row's own slots
    draft.begin(ids, mask)                        the prompt, where the drafter has a cache of its own
    draft.step(tokens_B, start_B)                 logits of the next draft; the first step of a round also takes the new tokens in

B rows, T tokens, V vocabulary. A token's slot is its column in the left-padded text; its position counts from the row's
first token.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from surgery.modeling.cache import CACHE_NAME, mixer_cache_layer, mixer_modules
from surgery.speculation.slots import Sight, SlotCache, attention_windows, masks_by_type

NO_LIMIT = 2**62


class Target:
    """The original on one batch, with the cache that drafters may share.

    pad_B: padding tokens before each row. limit: length at which every row ends; tokens behind it, which the longer
    rows of a round may have, are not kept, and get the last position before it.
    """

    def __init__(self, model: Any, windows: list[int | None]):
        self.model, self.windows = model, windows
        self.cache = SlotCache(len(windows))
        self.pad_B = torch.zeros(0, dtype=torch.long)
        self.limit = NO_LIMIT

    def prefill(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Run the prompt; return the logits of its last token (B, V)."""
        self.pad_B = mask_BL.shape[1] - mask_BL.long().sum(1)
        full = bool((self.pad_B == 0).all())
        position_BL = (mask_BL.long().cumsum(1) - 1).clamp_min(0)
        out = self.model(
            input_ids=ids_BL,
            attention_mask=None if full else mask_BL,
            position_ids=position_BL,
            **{CACHE_NAME: self.cache},
            use_cache=True,
            **last_logits(self.model),
        )
        return out.logits[:, -1]

    def verify(self, tokens_BT: Tensor, start_B: Tensor, done_B: Tensor | None = None) -> Tensor:
        """Run tokens that follow each row's first start_B ones; return their logits (B, T, V).

        Rows in done_B (B,) are not read.
        """
        return self._run(self.model, tokens_BT, start_B, Sight())

    def run_drafter(self, model: Any, tokens_B1: Tensor, start_B: Tensor, sight: Sight) -> Tensor:
        """Run one token per row of a drafter on the original's cache; return its logits (B, 1, V).

        Its keys and values lie where those of the original will be written when the token is verified.
        """
        return self._run(model, tokens_B1, start_B, sight)

    def _run(self, model: Any, tokens_BT: Tensor, start_B: Tensor, sight: Sight) -> Tensor:
        T, device = tokens_BT.shape[1], tokens_BT.device
        slot_BT = start_B[:, None] + torch.arange(T, device=device)
        columns_BS = sight.columns(slot_BT[:, 0], self.pad_B) if T == 1 else None
        with self.cache.at(start_B, T, columns_BS) as read:
            if columns_BS is None:
                column_BS = torch.arange(read, device=device).expand(len(start_B), -1)
                allowed = sight.allowed(slot_BT, column_BS, self.pad_B)
            else:
                column_BS = columns_BS
                allowed = sight.once(slot_BT[:, 0], self.pad_B)[:, None]
            distance_BTS = slot_BT[:, :, None] - column_BS[:, None]
            out = model(
                input_ids=tokens_BT,
                attention_mask=masks_by_type(allowed, distance_BTS, self.windows, model.dtype),
                position_ids=slot_BT.clamp_max(self.limit - 1) - self.pad_B[:, None],
                **{CACHE_NAME: self.cache},
                use_cache=True,
            )
        return out.logits


def last_logits(model: Any) -> dict[str, int]:
    """Return the arguments that ask a model for the logits of its last token alone."""
    return {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}


class Verifier(Protocol):
    """The original on one batch."""

    limit: int  # as in Target

    def prefill(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Run the prompt; return the logits of its last token (B, V)."""

    def verify(self, tokens_BT: Tensor, start_B: Tensor, done_B: Tensor | None = None) -> Tensor:
        """Run tokens that follow each row's first start_B ones; return their logits (B, T, V).

        Rows in done_B (B,) are not read.
        """


class DraftRunner(Protocol):
    """A drafter on one batch."""

    steps: int
    limit: int  # as in Target

    def begin(self, ids_BL: Tensor, mask_BL: Tensor) -> None:
        """Take in the prompt."""

    def step(self, ids_BL: Tensor, length_B: Tensor, draft: int) -> Tensor:
        """Return the logits (B, V) after the first length_B + draft tokens of each row; draft counts up from 0 in a
        round.
        """

    def nbytes(self) -> int:
        """Return the bytes of the drafter's own cache."""


class SharedCacheRunner:
    """A drafter that reads the original's cache. It has none of its own, and takes in no prompt."""

    def __init__(self, model: Any, target: Target, sight: Sight):
        self.model, self.target, self.sight, self.steps = model, target, sight, 0
        self.limit = NO_LIMIT  # that of the target holds

    def begin(self, ids_BL: Tensor, mask_BL: Tensor) -> None:
        """Do nothing: the original's keys and values of the prompt are read."""

    def step(self, ids_BL: Tensor, length_B: Tensor, draft: int) -> Tensor:
        """Return the logits (B, V) after the first length_B + draft tokens of each row."""
        self.steps += 1
        last_B = length_B + draft - 1
        tokens_B1 = ids_BL.gather(1, last_B[:, None])
        return self.target.run_drafter(self.model, tokens_B1, last_B, self.sight)[:, -1]

    def nbytes(self) -> int:
        """Return 0."""
        return 0


class OwnCacheRunner:
    """A drafter with a cache of its own: keys and values of softmax layers, states of mixers.

    At the start of a round the cache goes back to the last verified text and takes in the tokens since then, those of
    shorter rows padded on the right; the holes are masked. Drafted tokens follow one by one.
    """

    def __init__(self, model: Any):
        self.model, self.steps, self.limit = model, 0, NO_LIMIT
        self.cache = SlotCache(len(attention_windows(model)))
        self.mixers = [mixer_cache_layer(self.cache, m.layer_idx) for _, m in mixer_modules(model)]
        self.mask_BC = torch.zeros(0, 0, dtype=torch.long)  # which columns of the cache hold tokens
        self.taken_B = torch.zeros(0, dtype=torch.long)  # slots of the text that are in the cache
        self.pad_B = torch.zeros(0, dtype=torch.long)
        self._base: tuple[int, list[Any]] = (0, [])

    def begin(self, ids_BL: Tensor, mask_BL: Tensor) -> None:
        """Take in the prompt but for its last token, which the first round takes in with what follows."""
        self.mask_BC = mask_BL.long()[:, :0]
        self.pad_B = mask_BL.shape[1] - mask_BL.long().sum(1)
        self.taken_B = torch.full_like(self.pad_B, ids_BL.shape[1] - 1)
        if ids_BL.shape[1] > 1:
            self._feed(ids_BL[:, :-1], mask_BL.long()[:, :-1], (mask_BL.long().cumsum(1) - 1)[:, :-1])
        self._hold()

    def step(self, ids_BL: Tensor, length_B: Tensor, draft: int) -> Tensor:
        """Return the logits (B, V) after the first length_B + draft tokens of each row."""
        if draft:
            last_B1 = length_B[:, None] + draft - 1
            return self._feed(ids_BL.gather(1, last_B1), torch.ones_like(last_B1), self._positions(last_B1))[:, -1]
        self._rewind()
        new_B = length_B - self.taken_B
        place_T = torch.arange(int(new_B.max()), device=ids_BL.device)
        slot_BT = self.taken_B[:, None] + place_T
        mask_BT = (place_T < new_B[:, None]).long()
        tokens_BT = ids_BL.gather(1, slot_BT.clamp_max(ids_BL.shape[1] - 1))
        logits_BTV = self._feed(tokens_BT * mask_BT, mask_BT, self._positions(slot_BT))
        self.taken_B = length_B.clone()
        self._hold()
        last_B = (new_B - 1).clamp_min(0)
        return logits_BTV[torch.arange(len(last_B), device=last_B.device), last_B]

    def nbytes(self) -> int:
        """Return the bytes of the cache."""
        return sum(layer.nbytes() for layer in self.cache.layers)  # type: ignore[union-attr]

    def _positions(self, slot_BT: Tensor) -> Tensor:
        return slot_BT.clamp_max(self.limit - 1) - self.pad_B[:, None]

    def _feed(self, tokens_BT: Tensor, mask_BT: Tensor, position_BT: Tensor) -> Tensor:
        """Run tokens behind the cache's columns; return their logits (B, T, V)."""
        self.steps += 1
        start = self.mask_BC.shape[1]
        self.mask_BC = torch.cat([self.mask_BC, mask_BT], 1)
        with self.cache.at(torch.full_like(self.pad_B, start), tokens_BT.shape[1]):
            out = self.model(
                input_ids=tokens_BT,
                attention_mask=None if bool(self.mask_BC.all()) else self.mask_BC,
                position_ids=position_BT.clamp_min(0),
                **{CACHE_NAME: self.cache},
                use_cache=True,
            )
        return out.logits

    def _hold(self) -> None:
        """Remember the state of the cache, to which the next round goes back."""
        self._base = (self.mask_BC.shape[1], [layer.hold() for layer in self.mixers])

    def _rewind(self) -> None:
        columns, held = self._base
        self.mask_BC = self.mask_BC[:, :columns]
        for layer, state in zip(self.mixers, held):
            layer.go_back(state)


def check_runs(model: Any, target: Verifier) -> float:
    """Return the largest difference between the logits of one forward and those of pieces at per-row slots, over the
    largest logit.

    Two rows of six and four tokens, the second left-padded; then two and one more tokens.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    device = model.get_input_embeddings().weight.device
    ids = (torch.arange(14, device=device) * 37 + 11).view(2, 7) % vocabulary
    mask = torch.ones(2, 5, dtype=torch.long, device=device)
    mask[1, :2] = 0
    target.prefill(ids[:, :5], mask)
    start_B = torch.tensor([5, 4], device=device)
    tokens_BT = torch.stack([ids[0, 5:7], ids[1, 4:6]])
    logits = target.verify(tokens_BT, start_B)
    rows = [
        model(input_ids=ids[:1], use_cache=False).logits[0, 5:],
        model(input_ids=ids[1:, 2:6], use_cache=False).logits[0, 2:],
    ]
    expected = torch.stack(rows)
    return float((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
