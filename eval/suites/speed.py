"""Suite `speed`: time to first token, tokens per second, cache and peak memory, by context length.

The measurement is that of `surgery bench speed` (eval/speed/contexts.py): base and converted model are in memory
together and take turns in one process. The JSON rows of the benchmark are in the result's `info`, and samples and
figures are made from them. A length that was measured for all models is not measured again after an interruption.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.eval.losses import check_lm_head
from surgery.eval.speed.context_tables import plot_speed, speed_result
from surgery.eval.speed.contexts import check_rows, is_row, is_whole_context, measure_context
from surgery.eval.suite import EvalModel, EvalOptions, Suite, SuiteResult, no_tasks, register

LENGTHS = (512, 2048, 8192, 32768, 131072)
REPEATS, DECODE_TOKENS, BATCHES = 10, 16, (1, 16)


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
    names = [str(i) for i in range(len(eval_models))]  # two models may have one name
    rows: list[dict[str, Any]] = []
    with first.progress.bar("speed", len(lengths)) as tick:
        for length in lengths:
            rows += _length_rows(eval_models, names, options, length)
            tick()
    check_rows(rows)
    notes = [f"{first.ranks.count} processes ran at the same time"] if first.ranks.count > 1 else []
    notes += _memory_notes(rows, dict(zip(names, eval_models)))
    results = []
    for name, eval_model in zip(names, eval_models):
        model_rows = [
            {**row, "model": eval_model.name} for row in rows if row["model"] == name and _has_all(rows, row["context"])
        ]
        results.append(speed_result(model_rows, notes))
    return results


def _length_rows(
    eval_models: list[EvalModel], names: list[str], options: EvalOptions, length: int
) -> list[dict[str, Any]]:
    """Return the rows of all models at one length, from the journal of an interrupted run if it has them."""
    journal, runs = eval_models[-1].journal, options.limit or REPEATS
    key = "" if journal is None else journal.key_of("speed", [length, runs, DECODE_TOKENS, BATCHES])
    if journal is not None and _is_whole(rows := journal.stored.get(key), length, names):
        journal.used += len(rows)
        return list(rows)
    rows = measure_context(
        {name: eval_model.model for name, eval_model in zip(names, eval_models)},
        length,
        BATCHES,
        runs=runs,
        steps=DECODE_TOKENS,
        device=eval_models[0].device,
        seed=options.seed,
    )
    if journal is not None:
        journal.append([key], [rows])
    return rows


def _is_whole(rows: Any, length: int, names: list[str]) -> bool:
    """Return whether rows of a journal are those of all models at a length."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) and is_row(row) for row in rows):
        return False
    return all(row["context"] == length for row in rows) and is_whole_context(rows, length, names, BATCHES)


def _has_all(rows: list[dict[str, Any]], length: int) -> bool:
    """Return whether every model was measured at a length: samples of base and converted model are paired."""
    return all(row["step_ms"] for row in rows if row["context"] == length and row["batch"] == 1)


def _memory_notes(rows: list[dict[str, Any]], models: Mapping[str, EvalModel]) -> list[str]:
    """Return a note for each length and batch that does not fit, with the models that it does not fit for."""
    roles_by_cell: dict[tuple[int, int], list[str]] = {}
    for row in (row for row in rows if row.get("note")):
        roles_by_cell.setdefault((row["context"], row["batch"]), []).append(models[row["model"]].role)
    return [
        f"out of memory at {length:,} tokens{f' in batches of {batch}' if batch > 1 else ''} ({', '.join(roles)})"
        for (length, batch), roles in roles_by_cell.items()
        if batch == 1 or (length, 1) not in roles_by_cell
    ]


def plot(results: Mapping[str, SuiteResult], folder: Path, base: str | None = "base") -> list[Path]:
    """Draw all metrics by length in one figure, if several lengths were measured."""
    lengths = {sample.group.get("length") for result in results.values() for sample in result.samples}
    return plot_speed(results, folder / "speed.png", base) if len(lengths) > 1 else []


register(
    Suite(
        "speed",
        "time to first token, tokens per second, cache and peak memory by length",
        run,
        run_pair=run_in_turns,
        plot=plot,
        tasks=no_tasks,
        version=2,
    )
)
