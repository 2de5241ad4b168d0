"""How fast: a prompt read whole (prefill), then one token after the other (decode), and the memory of both, by length. One
sequence, random tokens, base and converted one after the other in the same process. Times depend on what else the machine does."""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch

from surgery.errors import SurgeryError
from surgery.eval.losses import check_head
from surgery.eval.suites import EvalOptions, Metric, Sample, Subject, Suite, SuiteResult, register

LENGTHS = (512, 2048, 8192, 32768, 131072)
REPEATS, DECODED = 10, 16


def _less(name: str, unit: str, title: str) -> Metric:
    return Metric(name, "mean", higher_is_better=False, unit=unit, title=title, pooled=False)


METRICS = {
    "prefill_ms": _less("prefill_ms", "ms", "prefill"),
    "decode_ms": _less("decode_ms", "ms", "decode, a token"),
    "cache_mb": _less("cache_mb", "MB", "cache"),
    "peak_mb": _less("peak_mb", "MB", "peak memory, weights included"),
}


def run(subject: Subject, options: EvalOptions) -> SuiteResult:
    check_head(subject.model)
    lengths = options.lengths or tuple(n for n in LENGTHS if n <= (subject.longest or n)) or (subject.longest or 512,)
    samples: list[Sample] = []
    notes = []
    with subject.progress.bar(f"speed of {subject.name}", len(lengths)) as tick:
        for length in lengths:
            try:
                samples += _at(subject, options, length)
            except Exception as error:
                if not _no_memory(error):
                    raise
                notes.append(f"{subject.name}: out of memory at {length:,} tokens")
            tick()
    if not samples:
        raise SurgeryError(f"speed: no length fitted; {'; '.join(notes)}")
    if subject.ranks.count > 1:
        notes.append(f"{subject.ranks.count} processes ran at the same time")
    return SuiteResult(samples, METRICS, notes=notes)


def _no_memory(error: Exception) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return should_reduce_batch_size(error)


def _at(subject: Subject, options: EvalOptions, length: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(options.seed)
    size = subject.model.config.get_text_config().vocab_size
    ids_1T = torch.randint(size, (1, length), generator=generator).to(subject.device)
    _once(subject, ids_1T)  # compiles, and fills allocators
    rows = [_once(subject, ids_1T) for _ in range(options.limit or REPEATS)]
    return [Sample("speed", f"{length} {i}", row, {"length": length}) for i, row in enumerate(rows)]


@torch.inference_mode()
def _once(subject: Subject, ids_1T: torch.Tensor) -> dict[str, float]:
    model, gpu = subject.model, subject.device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(subject.device)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    began = _now(subject)
    out = model(input_ids=ids_1T, use_cache=True, **last)
    prefilled = _now(subject)
    cache, token_11 = out.past_key_values, out.logits[:, -1:].argmax(-1)
    for _ in range(DECODED):
        out = model(input_ids=token_11, past_key_values=cache, use_cache=True)
        token_11 = out.logits[:, -1:].argmax(-1)
    done = _now(subject)
    found = {"prefill_ms": 1e3 * (prefilled - began), "decode_ms": 1e3 * (done - prefilled) / DECODED}
    found["cache_mb"] = cache_bytes(cache) / 1e6
    if gpu:
        found["peak_mb"] = torch.cuda.max_memory_allocated(subject.device) / 1e6
    return found


def _now(subject: Subject) -> float:
    if subject.device.type == "cuda":
        torch.cuda.synchronize(subject.device)
    return time.perf_counter()


def cache_bytes(cache: Any) -> int:
    """Of keys, values and mixers' states; storage that a layer lays out in advance counts."""
    total = 0
    for layer in getattr(cache, "layers", []):
        if (state := getattr(layer, "state", None)) is not None and hasattr(state, "nbytes"):
            total += state.nbytes()
        else:
            held = (getattr(layer, "keys", None), getattr(layer, "values", None))
            total += sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor))
    return total


register(Suite("speed", "prefill, decode and memory by length", run))
