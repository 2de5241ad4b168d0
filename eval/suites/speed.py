"""Suite `speed`: prefill time, decoding time per token, and memory, by context length.

The input is one sequence of random tokens. Base and converted model are loaded in one process and measured alternately, so that
other load on the machine affects both equally.
"""

from __future__ import annotations

import torch

from surgery.core.errors import SurgeryError
from surgery.eval.losses import check_lm_head
from surgery.eval.speed.generation import cache_bytes, decode, is_out_of_memory, prefill, synchronized_time
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, Sample, Suite, SuiteResult, register

LENGTHS = (512, 2048, 8192, 32768, 131072)
REPEATS, DECODE_TOKENS = 10, 16


def _lower_is_better(name: str, unit: str, title: str) -> EvalMetric:
    return EvalMetric(name, "mean", higher_is_better=False, unit=unit, title=title, pooled=False)


METRICS = {
    "prefill_ms": _lower_is_better("prefill_ms", "ms", "prefill"),
    "decode_ms": _lower_is_better("decode_ms", "ms", "decode, a token"),
    "cache_mb": _lower_is_better("cache_mb", "MB", "cache"),
    "peak_mb": _lower_is_better("peak_mb", "MB", "peak memory, weights included"),
}


def run(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Measure one model."""
    return run_in_turns([eval_model], options)[0]


def run_in_turns(eval_models: list[EvalModel], options: EvalOptions) -> list[SuiteResult]:
    """Measure all models alternately. A length that does not fit in memory gives a note instead of samples."""
    first = eval_models[0]
    for eval_model in eval_models:
        check_lm_head(eval_model.model)
    longest = min((s.longest for s in eval_models if s.longest), default=None)
    lengths = options.lengths or tuple(n for n in LENGTHS if n <= (longest or n)) or (longest or 512,)
    samples: list[list[Sample]] = [[] for _ in eval_models]
    notes = [f"{first.ranks.count} processes ran at the same time"] if first.ranks.count > 1 else []
    with first.progress.bar("speed", len(lengths)) as tick:
        for length in lengths:
            try:
                for mine, rows in zip(samples, _measure_length(eval_models, options, length)):
                    mine += [Sample("speed", f"{length} {i}", row, {"length": length}) for i, row in enumerate(rows)]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                notes.append(f"out of memory at {length:,} tokens")
            tick()
    if not samples[0]:
        raise SurgeryError(f"speed: no length fitted; {'; '.join(notes)}")
    return [SuiteResult(mine, METRICS, notes=notes) for mine in samples]


def _measure_length(eval_models: list[EvalModel], options: EvalOptions, length: int) -> list[list[dict[str, float]]]:
    """Return the measurements of each model. The first round, which compiles and fills allocators, is discarded."""
    generator = torch.Generator().manual_seed(options.seed)
    size = min(s.model.config.get_text_config().vocab_size for s in eval_models)
    ids_1T = torch.randint(size, (1, length), generator=generator).to(eval_models[0].device)
    rounds = [
        [_measure_once(eval_model, ids_1T) for eval_model in eval_models] for _ in range(1 + (options.limit or REPEATS))
    ]
    return [[taken[i] for taken in rounds[1:]] for i in range(len(eval_models))]


@torch.inference_mode()
def _measure_once(eval_model: EvalModel, ids_1T: torch.Tensor) -> dict[str, float]:
    """Return prefill_ms, decode_ms, cache_mb and, on a GPU, peak_mb of one run."""
    model, gpu = eval_model.model, eval_model.device.type == "cuda"
    others = 0
    if gpu:
        torch.cuda.reset_peak_memory_stats(eval_model.device)
        own = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        others = torch.cuda.memory_allocated(eval_model.device) - own
    began = synchronized_time(eval_model.device)
    out = prefill(model, ids_1T)
    prefilled = synchronized_time(eval_model.device)
    cache, token_11 = out.past_key_values, out.logits[:, -1:].argmax(-1)
    found = {"prefill_ms": 1e3 * (prefilled - began), "decode_ms": decode(model, token_11, cache, DECODE_TOKENS)}
    found["cache_mb"] = cache_bytes(cache) / 1e6
    if gpu:
        found["peak_mb"] = (torch.cuda.max_memory_allocated(eval_model.device) - others) / 1e6
    return found


register(Suite("speed", "prefill, decode and memory by length", run, run_pair=run_in_turns))
