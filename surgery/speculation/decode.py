"""The decoding loop: draft k tokens, verify them in one forward of the original, keep what the rule accepts.

`decode` is the decoding method that `generate(custom_generate=..)` of transformers calls, so that configs, processors
and stopping criteria are those of `generate`. Rows of a batch accept different numbers of drafts and have lengths of
their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.modeling.cache import CACHE_NAME
from surgery.speculation.bound import LONGEST_DRAFT, best_length
from surgery.speculation.runners import NO_LIMIT, DraftRunner, Verifier
from surgery.speculation.sampling import accept_greedy, accept_sampled, choose_token, process_scores

KNOWN_INPUTS = ("attention_mask", "position_ids", CACHE_NAME, "use_cache", "logits_to_keep", "cache_position")


@dataclass
class SpeculativeOutput:
    """Result of `Drafter.generate`.

    sequences: (B, length), as `generate` returns them. drafted, accepted: numbers of draft tokens, summed over rows.
    tested: drafts up to the first rejection of each round, of which accepted / tested estimates the probability that a
    draft is accepted. rounds: rounds of the loop, summed over the rows that were not finished. forwards: forwards of
    the original, the prompt's included. draft_forwards: forwards of the drafter. generated: tokens written, without
    padding. draft_cache_bytes: cache of the drafter at the end. patterns: for each row, 1 for every draft that was
    accepted and 0 for every one that was rejected, in the order of the text.
    """

    sequences: Tensor
    drafted: int = 0
    accepted: int = 0
    tested: int = 0
    rounds: int = 0
    forwards: int = 0
    draft_forwards: int = 0
    generated: int = 0
    draft_cache_bytes: int = 0
    patterns: list[str] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted, in [0, 1]; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_run(self) -> float:
        """Mean number of accepted drafts per round and row."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def probability(self) -> float:
        """Estimated probability that a draft is accepted if those before it were, in [0, 1]; 0 without drafts."""
        return self.accepted / self.tested if self.tested else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics, without the tokens."""
        counts = (
            "drafted",
            "accepted",
            "tested",
            "rounds",
            "forwards",
            "draft_forwards",
            "generated",
            "draft_cache_bytes",
        )
        rates = ("acceptance", "probability", "mean_run")
        return {n: getattr(self, n) for n in (*counts, *rates)}


@dataclass
class DraftLength:
    """Number of drafts of the next round: fixed, or that with the highest bound on the speedup at the acceptance seen
    so far.

    cost: bytes of a drafter's step over those of the original's. The estimate starts at 0.8, with the weight of ten
    drafts, and old rounds fade by a tenth a round. If drafting does not pay, one draft in every 16 rounds tests whether
    it has begun to.
    """

    fixed: int | None
    cost: float = 0.0
    hits: float = 8.0
    tries: float = 10.0
    skipped: int = field(default=0)

    def next(self) -> int:
        """Return the number of drafts of the next round."""
        if self.fixed is not None:
            return self.fixed
        best = best_length(self.hits / self.tries, self.cost, LONGEST_DRAFT)
        self.skipped = 0 if best else self.skipped + 1
        if self.skipped < 16:
            return best
        self.skipped = 0
        return 1

    def record(self, tested: int, accepted: int) -> None:
        """Take in a round. tested: drafts that were compared, up to the first rejection of each row."""
        if tested:
            self.hits, self.tries = 0.9 * self.hits + accepted, 0.9 * self.tries + tested


@dataclass
class Rows:
    """The text so far. ids (B, room); length_B: tokens of each row with its padding; done_B: rows that have ended."""

    ids: Tensor
    length_B: Tensor
    done_B: Tensor
    pad: int

    def lengths(self) -> list[int]:
        """Return the lengths as numbers."""
        lengths: list[int] = self.length_B.tolist()
        return lengths

    def put(self, tokens_BT: Tensor, offset: int = 0) -> None:
        """Write tokens behind each row's text, without making it longer."""
        place_BT = self.length_B[:, None] + offset + torch.arange(tokens_BT.shape[1], device=self.ids.device)
        if (need := int(place_BT.max()) + 1) > self.ids.shape[1]:
            more = self.ids.new_full((len(self.ids), need - self.ids.shape[1] + 64), self.pad)
            self.ids = torch.cat([self.ids, more], 1)
        self.ids.scatter_(1, place_BT, tokens_BT)

    def end(self, new_B: Tensor, criteria: Any) -> Tensor:
        """Make rows longer by new_B tokens, or fewer where the criteria end them; return by how many."""
        kept_tokens = [0] * len(self.ids)
        lengths, new, done = self.lengths(), new_B.tolist(), self.done_B.tolist()
        for i in range(max(new)):
            going = [b for b in range(len(new)) if not done[b] and i < new[b]]
            for length in sorted({lengths[b] for b in going}):
                rows = [b for b in going if lengths[b] == length]
                stops = self._stops(criteria, length + i + 1).tolist()
                for b in rows:
                    kept_tokens[b], done[b] = kept_tokens[b] + 1, stops[b]
        kept_B = torch.tensor(kept_tokens, device=self.ids.device)
        self.length_B = self.length_B + kept_B
        self.done_B = torch.tensor(done, device=self.ids.device)
        return kept_B

    def _stops(self, criteria: Any, length: int) -> Tensor:
        """Return whether each row ends at this length, (B,); rows of other lengths get values that are not read."""
        ids_BL = self.ids[:, :length]
        stops_B = torch.zeros(len(ids_BL), dtype=torch.bool, device=ids_BL.device)
        for criterion in criteria:
            stops_B = stops_B | torch.as_tensor(criterion(ids_BL, None)).to(ids_BL.device)
        return stops_B


@dataclass
class Loop:
    """One call of generate. target and draft: runners of the two models; length: chooses the drafts of each round."""

    target: Verifier
    draft: DraftRunner
    length: DraftLength
    streamer: Any = None

    def decode(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> SpeculativeOutput:
        """Write the continuation of input_ids (B, L). Arguments are those of transformers' decoding methods."""
        unknown = [n for n, value in inputs.items() if n not in KNOWN_INPUTS and value is not None]
        if unknown:
            raise SurgeryError(f"Drafter.generate takes text alone (got {', '.join(unknown)}); use model.generate")
        device, sample = input_ids.device, bool(generation_config.do_sample)
        mask_BL = inputs.get("attention_mask")
        mask_BL = torch.ones_like(input_ids) if mask_BL is None else mask_BL.to(device)
        check_mask(mask_BL)
        pad = generation_config._pad_token_tensor
        rows = Rows(
            input_ids.clone(),
            torch.full((len(input_ids),), input_ids.shape[1], device=device),
            torch.zeros(len(input_ids), dtype=torch.bool, device=device),
            0 if pad is None else int(pad),
        )
        result = SpeculativeOutput(input_ids, patterns=[""] * len(input_ids))
        logits_BV = self.target.prefill(input_ids, mask_BL)
        result.forwards += 1
        scores_B1V = process_scores(logits_processor, rows.ids, rows.lengths(), logits_BV[:, None].float())
        rows.put(choose_token(scores_B1V[:, 0], sample)[0][:, None])
        self._keep(rows, torch.ones_like(rows.length_B), stopping_criteria, result)
        begun = False
        limit = stopping_criteria.max_length or NO_LIMIT
        self.target.limit = self.draft.limit = limit
        while not bool(rows.done_B.all()):
            remaining = limit - min(n for n, done in zip(rows.lengths(), rows.done_B.tolist()) if not done)
            count = max(0, min(self.length.next(), remaining - 1))
            if count and not begun:
                self.draft.begin(input_ids, mask_BL)
                begun = True
            self._round(rows, count, logits_processor, sample, stopping_criteria, result=result)
        if self.streamer is not None:
            self.streamer.end()
        longest = int(rows.length_B.max())
        place_L = torch.arange(longest, device=device)
        result.sequences = rows.ids[:, :longest].masked_fill(place_L >= rows.length_B[:, None], rows.pad)
        result.draft_forwards, result.draft_cache_bytes = self.draft.steps, self.draft.nbytes()
        return result

    def _round(
        self, rows: Rows, count: int, processors: Any, sample: bool, criteria: Any, *, result: SpeculativeOutput
    ) -> None:
        drafts, chances, lengths = [], [], rows.lengths()
        for i in range(count):
            logits_B1V = self.draft.step(rows.ids, rows.length_B, i)[:, None].float()
            scores_B1V = process_scores(processors, rows.ids, [n + i for n in lengths], logits_B1V)
            token_B, q_BV = choose_token(scores_B1V[:, 0], sample)
            drafts.append(token_B)
            chances.append(q_BV)
            rows.put(token_B[:, None], i)
        last_B1 = rows.ids.gather(1, rows.length_B[:, None] - 1)
        drafts_Bk = torch.stack(drafts, 1) if drafts else last_B1[:, :0]
        logits_BKV = self.target.verify(torch.cat([last_B1, drafts_Bk], 1), rows.length_B - 1, rows.done_B).float()
        scores_BKV = process_scores(processors, rows.ids, lengths, logits_BKV)
        if not sample:
            accepted_B, after_B = accept_greedy(scores_BKV, drafts_Bk)
        else:
            q_BkV = torch.stack(chances, 1) if count else scores_BKV[:, :0]  # type: ignore[arg-type]
            accepted_B, after_B = accept_sampled(scores_BKV, drafts_Bk, q_BkV)
        going_B = ~rows.done_B
        tokens_BT = torch.cat([drafts_Bk, after_B[:, None]], 1).scatter(1, accepted_B[:, None], after_B[:, None])
        rows.put(tokens_BT)
        kept_B = self._keep(rows, (accepted_B + 1) * going_B, criteria, result)
        # A row that ended within its draft tells nothing about the drafts behind its end.
        hits_B = torch.minimum(accepted_B, kept_B) * going_B
        tested_B = torch.minimum((accepted_B + 1).clamp_max(count), kept_B) * going_B
        hits, tested, is_going = torch.stack([hits_B, tested_B, going_B.long()]).tolist()
        for row, (accepted, of) in enumerate(zip(hits, tested)):
            result.patterns[row] += "1" * accepted + "0" * (of - accepted)
        result.forwards, result.rounds = result.forwards + 1, result.rounds + sum(is_going)
        result.drafted, result.accepted = result.drafted + count * sum(is_going), result.accepted + sum(hits)
        result.tested += sum(tested)
        self.length.record(sum(tested), sum(hits))

    def _keep(self, rows: Rows, new_B: Tensor, criteria: Any, result: SpeculativeOutput) -> Tensor:
        """Append the tokens that end no row, and hand them to the streamer."""
        start = rows.length_B
        kept_B = rows.end(new_B, criteria)
        result.generated += int(kept_B.sum())
        if self.streamer is not None:
            for token in rows.ids[0, int(start[0]) : int(rows.length_B[0])]:
                self.streamer.put(token[None].cpu())
        return kept_B


def check_mask(mask_BL: Tensor) -> None:
    """Raise SurgeryError unless padding is on the left and every row has a token."""
    mask_BL = mask_BL.ne(0)
    if not bool(mask_BL[:, -1].all()) or bool((mask_BL[:, 1:] < mask_BL[:, :-1]).any()):
        raise SurgeryError(
            "the attention mask has padding after tokens, and decoding needs it before them: tokenizer.padding_side = "
            "'left'"
        )
