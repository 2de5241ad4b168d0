"""`surgery bench draft --replay FILE`: an acceptance pattern, measured on a trained decoder, replayed on larger random
weights.

A model with random weights accepts no drafts, and a trained one of 1B parameters is not always at hand. FILE is the
result of an earlier `bench draft`: for every draft whether the original accepted it. Here the original is a Llama of
the shape SHAPES[sizes] with random weights, the drafter sees a window of its cache, and the number of tokens that a
round writes is taken from the pattern. Work and memory traffic are those of the real loop: k drafts, one forward over k
+ 1 tokens, the comparison, and one read-back per round. All rows keep the length T, as in `bench serve`. On a GPU every
forward is a CUDA graph, of the original's decoding too, and both take turns in one process.

    speedup = original's ms per token / (ms per round / tokens per round)      bound: the same quotient of counted bytes
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from surgery.core.errors import SurgeryError
from surgery.core.files import read_json
from surgery.core.progress import Progress
from surgery.eval.speed.generation import (
    FULL_ROWS,
    PreallocatedLayer,
    RepeatedStep,
    is_out_of_memory,
    rewind,
    synchronized_time,
)
from surgery.eval.speed.model import SHAPES, allow_cudnn, make_model
from surgery.eval.speed.serve import fill_row
from surgery.modeling.cuda_graph import record_graph
from surgery.speculation.bound import best_length, cache_bytes, weight_bytes
from surgery.speculation.slots import Sight

CONTEXTS = {"full": (2048, 8192, 32768), "main": (2048, 8192, 32768), "small": (24, 48)}
BATCHES = {"full": (1, 8), "main": (1, 8), "small": (1, 2)}
TOKENS = {"full": 48, "main": 48, "small": 6}  # that each loop writes per row in a turn
TURNS = {"full": 5, "main": 3, "small": 2}
DRAFTS = 4  # where the bound says that drafting does not pay
LONGEST = 10**6  # entries of a pattern


class SightLayer(PreallocatedLayer):
    """A preallocated layer of which a single query may see a part. sight: what it sees; None: everything."""

    sight: Sight | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, G, N, K) behind the content; return what the queries see."""
        keys, values = super().update(key_states, value_states)
        if self.sight is None or self.sight.window is None or keys.shape[2] <= self.sight.window + self.sight.sinks:
            return keys, values
        first, last = self.sight.sinks, keys.shape[2] - self.sight.window
        near, far = (torch.cat([x[:, :, :first], x[:, :, last:]], 2) for x in (keys, values))
        return near, far


class DraftRound:
    """The forwards of a round of k drafts after T tokens, on a GPU each a CUDA graph.

    Args:
        model: the original, which is its own drafter.
        cache: SightLayers with room for k + 1 tokens.
        sight: what the drafter sees of the cache.
        batch, count: B and k.
    """

    def __init__(self, model: Any, cache: Any, sight: Sight, batch: int, count: int):
        device = model.device
        self.model, self.cache, self.sight, self.count = model, cache, sight, count
        self.seen = cache.get_seq_length()
        self.tokens_BK = torch.zeros(batch, count + 1, dtype=torch.long, device=device)
        self.place_BK = (self.seen + torch.arange(count + 1, device=device)).expand(batch, -1).contiguous()
        self.accepted_B = torch.zeros(batch, dtype=torch.long, device=device)
        steps: list[Callable[[], None]] = [lambda i=i: self._draft(i) for i in range(count)]  # type: ignore[misc]
        self.steps = [*steps, self._verify]
        if device.type == "cuda":
            self.steps = [record_graph(step, warmups=2) for step in self.steps]

    def __call__(self) -> list[int]:
        """Run a round. Return the number of accepted drafts of each row, which waits for the device."""
        for step in self.steps:
            step()
        accepted: list[int] = self.accepted_B.tolist()
        return accepted

    def _draft(self, i: int) -> None:
        self._show(self.seen + i, self.sight)
        logits_B1V = self._forward(slice(i, i + 1))
        self.tokens_BK[:, i + 1 : i + 2].copy_(logits_B1V.argmax(-1))

    def _verify(self) -> None:
        self._show(self.seen, None)
        best_BK = self._forward(slice(0, self.count + 1)).argmax(-1)
        hits_Bk = best_BK[:, :-1] == self.tokens_BK[:, 1:]
        self.accepted_B.copy_(hits_Bk.long().cumprod(1).sum(1))
        self.tokens_BK[:, 0].copy_(best_BK.gather(1, self.accepted_B[:, None])[:, 0])

    def _forward(self, columns: slice) -> Tensor:
        ids, positions = self.tokens_BK[:, columns], self.place_BK[:, columns]
        out = self.model(input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True)
        rewind(self.cache)
        logits: Tensor = out.logits
        return logits

    def _show(self, tokens: int, sight: Sight | None) -> None:
        for layer in self.cache.layers:
            layer.show(tokens)
            layer.sight = sight


def load_pattern(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a result of `bench draft` whose drafter is a window. Raise SurgeryError if it is anything else."""
    pattern = read_json(Path(path))
    patterns = pattern.get("patterns") if isinstance(pattern, dict) and pattern.get("kind") == "draft" else None
    if (
        not isinstance(patterns, list)
        or not patterns
        or not all(isinstance(p, str) and not p.strip("01") for p in patterns)
        or not 0 < sum(map(len, patterns)) <= LONGEST
    ):
        raise SurgeryError(
            f"{path} has no acceptance pattern. --replay takes the --out of `surgery bench draft --model SRC --text "
            "FILE`"
        )
    sizes = pattern.get("window"), pattern.get("sinks")
    if not all(type(n) is int and 0 <= n <= 2**20 for n in sizes) or not sizes[0]:
        raise SurgeryError(
            f"{path} is of a drafter that is not a window of its original (window {sizes[0]!r}, sinks {sizes[1]!r}). "
            "Measure one with "
            "--drafter sliding-window"
        )
    return pattern


class Pattern:
    """The patterns of a file as one endless sequence for each row, begun at different places."""

    def __init__(self, patterns: list[str], batch: int):
        self.hits = "".join(patterns)
        self.at = [row * len(self.hits) // batch for row in range(batch)]

    def next(self, drafts: int) -> list[int]:
        """Return how many of the next `drafts` drafts of each row are accepted.

        The draft after them counts as rejected.
        """
        accepted_counts = []
        for row, at in enumerate(self.at):
            accepted = 0
            while accepted < drafts and self.hits[(at + accepted) % len(self.hits)] == "1":
                accepted += 1
            self.at[row] = (at + accepted + (accepted < drafts)) % len(self.hits)
            accepted_counts.append(accepted)
        return accepted_counts


def replay(
    pattern: str | os.PathLike[str],
    sizes: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    deadline: float,
    progress: Progress,
    save: Callable[[dict[str, Any]], None],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Measure all batches and contexts. Return JSON data, handed to `save` after every row."""
    source = load_pattern(pattern)
    sight = Sight(source["window"], source["sinks"])
    hits = "".join(source["patterns"])
    result = {"kind": "draft replay", "sizes": sizes, **about, "dtype": str(dtype).removeprefix("torch.")}
    result |= {
        "shape": SHAPES[sizes],
        "window": sight.window,
        "sinks": sight.sinks,
        "probability": hits.count("1") / len(hits),
    }
    result |= {"pattern_of": str(source.get("model"))[:200], "pattern_tokens": source.get("prompt_tokens")}
    result |= {"rows": [], "complete": False}
    model = make_model(sizes, device, dtype)
    model.config._attn_implementation = FULL_ROWS
    row_cache = DynamicCache(config=model.config)
    for context in CONTEXTS[sizes]:
        for batch in BATCHES[sizes]:
            if time.monotonic() > deadline:
                return result
            row = counted_row(model, sight, context, batch, result["probability"])
            try:
                fill_row(model, row_cache, context)
                row |= measure_row(model, row_cache, sight, row, Pattern(source["patterns"], batch), sizes)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                row["note"] = "does not fit: out of memory"
            if device.type == "cuda":
                torch.cuda.empty_cache()
            result["rows"].append(row)
            save(result)
            progress.say(row_text(row))
    result["complete"] = True
    save(result)
    return result


def counted_row(model: Any, sight: Sight, context: int, batch: int, probability: float) -> dict[str, Any]:
    """Return a row with the bytes of a step of both, and the number of drafts with the highest bound."""
    weights = weight_bytes(model)
    whole = weights + batch * cache_bytes(model, context)
    draft = weights + batch * cache_bytes(model, context, sight)
    best = best_length(probability, draft / whole)
    return {
        "context": context,
        "batch": batch,
        "original_bytes": whole,
        "draft_bytes": draft,
        "pays": best > 0,
        "drafts": best or DRAFTS,
    }


def measure_row(
    model: Any, row_cache: Any, sight: Sight, row: dict[str, Any], pattern: Pattern, sizes: str
) -> dict[str, Any]:
    """Return ms per token of both loops, in turns, and the speedup with its bound for the tokens that were written."""
    batch, count, tokens = row["batch"], row["drafts"], TOKENS[sizes]
    with torch.inference_mode(), allow_cudnn(False):
        cache = sighted_rows(row_cache, batch, count + RepeatedStep.WARMUPS + 1)
        first_B1 = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        step, drafted = RepeatedStep(model, cache, first_B1), DraftRound(model, cache, sight, batch, count)
        alone, ours, rounds, written = [], [], 0, 0
        for turn in range(1 + TURNS[sizes]):
            began = synchronized_time(model.device)
            for _ in range(tokens):
                step()
            alone.append(1e3 * (synchronized_time(model.device) - began) / tokens)
            began, here = synchronized_time(model.device), [0, 0]
            while here[1] < tokens * batch:
                drafted()
                here = [here[0] + 1, here[1] + sum(n + 1 for n in pattern.next(count))]
            ours.append(1e3 * (synchronized_time(model.device) - began) * batch / here[1])
            if turn:
                rounds, written = rounds + here[0], written + here[1]
    per_round = written / (rounds * batch)
    bound = per_round * row["original_bytes"] / (count * row["draft_bytes"] + row["original_bytes"])
    measured = {
        "original_runs_ms": alone[1:],
        "drafting_runs_ms": ours[1:],
        "tokens_per_round": per_round,
        "bound": bound,
    }
    measured |= {"original_ms": median(alone[1:]), "drafting_ms": median(ours[1:]), "captured": step.problem is None}
    return measured | {"speedup": measured["original_ms"] / measured["drafting_ms"]}


def sighted_rows(row_cache: Any, batch: int, room: int) -> Any:
    """Return a cache of `batch` rows equal to the one row, with room for further tokens."""
    rows = DynamicCache()
    rows.layers = [SightLayer(layer, batch, room) for layer in row_cache.layers]
    return rows


def row_text(row: dict[str, Any]) -> str:
    """Return a row in a line."""
    where = f"batch {row['batch']}, context {row['context']:,}"
    if "note" in row:
        return f"{where}: {row['note']}"
    return (
        f"{where}: {row['speedup']:.2f}x of a bound of {row['bound']:.2f}x ({row['speedup'] / row['bound']:.0%}), "
        f"{row['drafts']} drafts per round, "
        f"{row['tokens_per_round']:.2f} tokens written; {row['original_ms']:.3g} ms per token alone, "
        f"{row['drafting_ms']:.3g} ms with drafts" + ("" if row["pays"] else "; by counted bytes drafting does not pay")
    )


def replay_lines(result: dict[str, Any]) -> list[str]:
    """Return the result as lines."""
    ends = "" if result["complete"] else "; stopped early"
    return [
        f"random weights of the shape {result['shape']['num_hidden_layers']} layers x "
        f"{result['shape']['hidden_size']}; acceptance replayed from "
        f"{result['pattern_of']} at {result['pattern_tokens']} tokens: {result['probability']:.1%} of tested drafts, "
        f"window {result['window']}, {result['sinks']} sinks",
        *map(row_text, result["rows"]),
        "the bound counts bytes read: k steps of the drafter and one of the original, for the tokens that were written",
        f"{result['device']}, {result['dtype']}, torch {result['versions']['torch']}, {result['date']}{ends}",
    ]
