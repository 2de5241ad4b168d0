"""What a person sees of a run: the groups before it, a line while it goes, before and after at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from surgery.progress import Progress
from surgery.tables import _table, count
from surgery.training.optim import Group


def groups_table(title: str, groups: list[Group]) -> list[Any]:
    table = _table(title, "trained", "tensors", "numbers", "fan in", "fan out", "rate", "decay")
    for row in (group.row() for group in groups):
        fans = (str(row.get(key, "")) for key in ("fan_in", "fan_out"))
        table.add_row(
            row["kind"], str(row["tensors"]), count(row["numbers"]), *fans, f"{row['rate']:.3g}", f"{row['decay']:g}"
        )
    return [table]


FIXED = {"stage", "kind", "step", "steps", "total_steps", "tokens", "loss", "rate", "gradient_norm"}
FIXED |= {"tokens_per_second", "waited", "seconds_left", "memory"}


def said(line: dict[str, Any]) -> str:
    """A line of the log."""
    if "skipped" in line:
        return "skipped: step " + ", ".join(str(step) for step in line["skipped"])
    if "validation" in line:
        return f"{line['kind']} {line['step']}: validation {line['validation']:.4f} nats per token"
    parts = " ".join(f"{name} {value:.4g}" for name, value in line.items() if name not in FIXED)
    memory = f", {line['memory'] / 2**30:.1f} GiB" if line["memory"] else ""
    return (
        f"{line['kind']} {line['step']}/{line['steps']}: loss {line['loss']:.4f} ({parts}), rate {line['rate']:.2e}, "
        f"{line['tokens_per_second']:,.0f} tokens/s{memory}, {duration(line['seconds_left'])} left"
    )


def duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class Reporter:
    """Lines of the log as they come: a bar that says the last one on a terminal, else one line in ten."""

    def __init__(self, progress: Progress, active: bool):
        self.progress, self.active = progress, active
        self.tick: Any = lambda steps=1: None
        self.step, self.looks = 0, 0

    @contextmanager
    def stage(self, title: str, steps: int, at: int) -> Iterator[None]:
        with self.progress.bar(title, steps) as tick:
            self.tick, self.step, self.looks = tick, at, 0
            tick(at)
            yield

    def __call__(self, line: dict[str, Any]) -> None:
        if not self.active:
            return
        if "steps" in line:
            self.tick(line["step"] - self.step)
            self.step, self.looks = line["step"], self.looks + 1
            if self.looks % 10 != 1 and line["step"] != line["steps"]:
                return
        self.progress.say(said(line))


def result_table(result: dict[str, Any], labels: tuple[tuple[str, str], ...] | None = None) -> list[Any]:
    """Before and after; what was trained. labels: what is measured -> what it is called."""
    parts: list[Any] = []
    rows = [(label, result["validation"].get(key)) for key, label in labels or ROWS]
    if any(value for _, value in rows):
        table = _table("before and after, on validation text", "", "perplexity", "nats per token", "to the original")
        original = (result["validation"].get("original") or {}).get("perplexity")
        for label, value in rows:
            if value:
                ratio = f"{value['perplexity'] / original:.4f}" if original else "-"
                table.add_row(label, f"{value['perplexity']:.4f}", f"{value['loss']:.4f}", ratio)
        parts.append(table)
    else:
        parts.append("no validation text: give the recipe data.validation, for example 0.02, to see before and after")
    for stage in result["stages"]:
        parts.append(
            f"{stage['kind']}: {stage['steps']:,} steps, {stage['tokens']:,} tokens, loss {stage['first_loss']:.4f} -> "
            f"{stage['last_loss']:.4f}, {stage['tokens_per_second']:,.0f} tokens/s"
        )
    return [*parts, f"delivered: {result['delivered']['says']}"]


def last_line(result: dict[str, Any], what: str) -> str:
    """Where the checkpoint is; and whether training has left it as it was, or made it worse."""
    told = result["delivered"]
    if told["state"] == "start":
        return f"{what}, no better than the start and so unchanged: {result['out']}"
    if told["worse"]:
        return f"{what}, WORSE than the start ({told['loss']:.4f} after {told['start']:.4f} nats per token): {result['out']}"
    return f"{what}: {result['out']}"


ROWS = (("original", "original"), ("before", "converted"), ("after", "healed"))
