"""Logging of a run: log.jsonl and its plot, progress lines and tables, and experiment trackers through Accelerate.

Trackers: TensorBoard, wandb and trackio. Credentials stay with the trackers' own packages.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.core.files import is_disk_error
from surgery.core.progress import LinePace, Progress
from surgery.core.tables import format_count, new_table
from surgery.training.checkpoints import TrainPosition
from surgery.training.optim import ParameterGroup
from surgery.training.recipe import HealingRecipe

PROJECT = "surgery"
TRACKERS = ("tensorboard", "wandb", "trackio")
TRACKER_HELP = {
    "tensorboard": "pip install tensorboard",
    "wandb": "run wandb login, or set WANDB_MODE=offline",
    "trackio": "see trackio's page for where it writes",
}


def tracker_names(name: str | None) -> list[str]:
    """Return Accelerate's `log_with` for --track. None: TensorBoard if it is installed; "none": no tracker."""
    if name == "none":
        return []
    from accelerate.utils import imports

    available = {n: getattr(imports, f"is_{n}_available", lambda: False)() for n in TRACKERS}
    if name is None:
        return ["tensorboard"] if available["tensorboard"] else []
    if name not in TRACKERS:
        raise SurgeryError(f"--track {name!r} is unknown; choose one of {', '.join(TRACKERS)}, none.")
    if not available[name]:
        raise SurgeryError(
            f"--track {name}: the package {name} is not installed. Run pip install {name}, or use --track none."
        )
    return [name]


def start_trackers(accelerator: Any, recipe: HealingRecipe, out: Path, at: TrainPosition) -> None:
    """Start the tracker's run, named after OUT. A resumed run continues; TensorBoard drops the steps that run again."""
    if not accelerator.log_with:
        return
    (chosen,) = (str(getattr(name, "value", name)) for name in accelerator.log_with)
    steps_done = sum(stage.steps for stage in recipe.stages[: at.stage]) + at.step
    options = {
        "tensorboard": {"purge_step": steps_done + 1} if steps_done else {},
        "wandb": {"name": out.name, "dir": str(accelerator.project_dir)},
        "trackio": {"name": out.name},
    }
    try:
        accelerator.init_trackers(
            PROJECT, config=None if steps_done else tracker_config(recipe), init_kwargs={chosen: options[chosen]}
        )
    except Exception as error:  # trackers raise exceptions of many types
        accelerator.trackers = []
        if is_disk_error(error):
            raise
        what = " ".join(str(error).split())[:200]
        raise SurgeryError(
            f"--track {chosen} does not start: {type(error).__name__}: {what}. Try: {TRACKER_HELP[chosen]}, or --track "
            "none."
        ) from None


def end_trackers(accelerator: Any) -> None:
    """Flush and close the trackers; a second call does nothing."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []


def tracker_config(recipe: HealingRecipe) -> dict[str, Any]:
    """Return the flat hyperparameters that trackers show for a run."""
    flat: dict[str, Any] = {"seed": recipe.seed, "precision": recipe.precision}
    for number, stage in enumerate(recipe.stages):
        for key in ("kind", "length", "tokens", "batch", "rate"):
            flat[f"stage {number + 1}/{key}"] = getattr(stage, key)
    return flat


def groups_table(title: str, groups: list[ParameterGroup]) -> list[Any]:
    """Return the table that is shown before a stage: a row for each kind of parameter and decay, with ranges over
    groups.
    """
    table = new_table(title, "trained", "tensors", "parameters", "fan in", "fan out", "learning rate", "decay")
    kinds: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in (group.row() for group in groups):
        kinds.setdefault((row["kind"], row["decay"]), []).append(row)
    for (kind, decay), rows in kinds.items():
        table.add_row(
            kind,
            str(sum(row["tensors"] for row in rows)),
            format_count(sum(row["parameters"] for row in rows)),
            *(_range([row[key] for row in rows if key in row]) for key in ("fan_in", "fan_out", "rate")),
            f"{decay:g}",
        )
    return [table]


def _range(values: list[float]) -> str:
    """Format the range of values, "24 to 512"; one value if they are equal."""
    ends = sorted({min(values), max(values)}) if values else []
    return " to ".join(f"{value:,}" if isinstance(value, int) else f"{value:.3g}" for value in ends)


COMMON_KEYS = {"stage", "kind", "step", "steps", "total_steps", "tokens", "loss", "rate", "gradient_norm"}
COMMON_KEYS |= {"tokens_per_second", "waited", "seconds_left", "memory"}


def format_entry(line: dict[str, Any]) -> str:
    """Return one line of text for a log entry."""
    if "skipped" in line:
        return (
            "skipped, because the gradient was NaN or infinite: step "
            f"{', '.join(str(step) for step in line['skipped'])}"
        )
    if "note" in line:
        return str(line["note"])
    if "compiled" in line:
        return f"compiled {line['compiled']} GPU kernels in {line['seconds']:.1f} s; they are kept in {line['folder']}"
    if "validation" in line:
        return f"{line['kind']} {line['step']}: validation {line['validation']:.4f} nats per token"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in line.items() if name not in COMMON_KEYS)
    parts = f" ({parts})" if parts else ""
    memory = f", {line['memory'] / 2**30:.1f} GiB" if line["memory"] else ""
    return (
        f"{line['kind']} {line['step']}/{line['steps']}: loss {line['loss']:.4f}{parts}, learning rate "
        f"{line['rate']:.2e}, "
        f"{line['tokens_per_second']:,.0f} tokens/s{memory}, {format_duration(line['seconds_left'])} left"
    )


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class LogReporter:
    """Shows log entries during a run: on a terminal a progress bar and a line of text for every tenth entry, elsewhere
    a line of text now and then; and a line for the last entry."""

    def __init__(self, progress: Progress, active: bool):
        self.progress, self.active = progress, active
        self.tick: Any = lambda steps=1: None
        self.step, self.num_entries = 0, 0
        self.pace: LinePace | None = None  # where there is no bar

    @contextmanager
    def stage(self, title: str, steps: int, at: int) -> Iterator[None]:
        """Show the progress of a stage of `steps` steps, of which `at` are done."""
        if not self.progress.is_terminal:
            self.progress.say(f"{title}: {steps:,} steps" + (f", {at:,} of them done" if at else ""))
            self.step, self.num_entries, self.pace = at, 0, LinePace(steps)
            yield
            return
        with self.progress.bar(title, steps) as tick:
            self.tick, self.step, self.num_entries = tick, at, 0
            tick(at)
            yield

    def __call__(self, line: dict[str, Any]) -> None:
        """Show a log entry."""
        if not self.active:
            return
        if "steps" in line:
            self.tick(line["step"] - self.step)
            self.step, self.num_entries = line["step"], self.num_entries + 1
            if line["step"] != line["steps"] and not self._is_due(line["step"]):
                return
        self.progress.say(format_entry(line))

    def _is_due(self, step: int) -> bool:
        """Return whether the entry of this step is shown."""
        if self.pace is None:
            return self.num_entries % 10 == 1
        return self.pace.is_due(step) or self.num_entries == 1


def result_table(result: dict[str, Any], labels: tuple[tuple[str, str], ...] | None = None) -> list[Any]:
    """Return the summary of a run: validation before and after, and one line per stage. labels: (key of the result,
    label).
    """
    parts: list[Any] = []
    rows = [(label, result["validation"].get(key)) for key, label in labels or RESULT_LABELS]
    if any(value for _, value in rows):
        table = new_table(
            "before and after, on validation text", "", "perplexity", "nats per token", "ratio to original"
        )
        original = (result["validation"].get("original") or {}).get("perplexity")
        for label, value in rows:
            if value:
                ratio = f"{value['perplexity'] / original:.4f}" if original else "-"
                table.add_row(label, f"{value['perplexity']:.4f}", f"{value['loss']:.4f}", ratio)
        parts.append(table)
    else:
        parts.append(
            "No validation text. Set data.validation in the recipe, for example 0.02, to compare before and after."
        )
    for stage in result["stages"]:
        parts.append(
            f"{stage['kind']}: {stage['steps']:,} step{'' if stage['steps'] == 1 else 's'}, {stage['tokens']:,} "
            f"tokens, loss {_first_and_last(stage)}, "
            f"{stage['tokens_per_second']:,.0f} tokens/s"
        )
    if tried := result.get("rates_tried"):
        losses = ", ".join(
            f"{t['rate']:g}: {'stopped' if t['loss'] is None else format(t['loss'], '.4f')}" for t in tried
        )
        parts.append(
            f"rates tried, with nats per token of validation text after {tried[0]['tokens']:,} tokens: {losses}"
        )
    return [*parts, f"delivered: {result['delivered']['says']}"]


def _first_and_last(stage: dict[str, Any]) -> str:
    """Format the first and last logged loss of a stage, "0.5100 -> 0.2766"; a single value if they are one log
    entry.
    """
    first, last = stage["first_loss"], stage["last_loss"]
    return f"{last:.4f}" if first == last else f"{first:.4f} -> {last:.4f}"


def last_line(result: dict[str, Any], what: str) -> str:
    """Return the final message: where the checkpoint is, and whether training left it unchanged or made it worse."""
    delivery = result["delivered"]
    if delivery["state"] == "start":
        return f"{what}, unchanged because training did not improve it: {result['out']}"
    if delivery["worse"]:
        losses = f"validation loss {delivery['loss']:.4f}, that of the start {delivery['start']:.4f}"
        return f"{what}, WORSE than the start ({losses}): {result['out']}"
    return f"{what}: {result['out']}"


RESULT_LABELS = (("original", "original"), ("before", "converted"), ("after", "healed"))


LOG_NAME, CURVE_NAME = "log.jsonl", "curve.png"


class TrainingLog:
    """The log file log.jsonl, one JSON entry per line; entries also go to the trackers."""

    def __init__(self, folder: Path, accelerator: Any = None):
        self.path, self.accelerator = folder / LOG_NAME, accelerator

    def truncate_after(self, stage: int, step: int) -> None:
        """Drop the entries of later steps, which a resumed run takes again."""
        if not self.path.is_file():
            return
        remaining = [line for line in self.lines() if (line["stage"], line["step"]) <= (stage, step)]
        partial = self.path.with_name(self.path.name + ".tmp")
        partial.write_text("".join(json.dumps(line) + "\n" for line in remaining), encoding="utf-8")
        os.replace(partial, self.path)

    def add(self, line: dict[str, Any]) -> None:
        """Append an entry and send its numeric values to the trackers."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_json_safe(line)) + "\n")
        if self.accelerator is not None and self.accelerator.trackers:
            values = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k not in ("stage", "step")}
            self.accelerator.log({f"{line['kind']}/{k}": v for k, v in values.items()}, step=line["total_steps"])

    def lines(self) -> list[dict[str, Any]]:
        """Return all complete entries; a killed run may leave a partial line."""
        lines = []
        texts = self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.is_file() else ()
        for text in texts:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if _is_log_entry(line):
                lines.append(line)
        return lines


def _is_log_entry(line: Any) -> bool:
    """Return whether this is an entry that `add` wrote."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return False
    if not all(type(line.get(key)) is int and abs(line[key]) < 2**62 for key in ("stage", "step", "tokens")):
        return False
    drawn = [line[key] for key in ("loss", "validation") if line.get(key) is not None]
    return all(type(n) in (int, float) and abs(n) < 1e30 for n in drawn)


def _json_safe(line: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity by None: JSON cannot store them."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}


def draw_curve(lines: list[dict[str, Any]], path: Path) -> bool:
    """Plot loss over tokens, one panel per stage, to a PNG file.

    Return False if matplotlib is missing or the log is empty.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
    except ImportError:
        return False
    stages = sorted({line["stage"] for line in lines})
    if not stages:
        return False
    figure = Figure(figsize=(5 * len(stages), 3.5), layout="constrained")
    for column, stage in enumerate(stages):
        axes = figure.add_subplot(1, len(stages), column + 1)
        stage_lines = [line for line in lines if line["stage"] == stage]
        trained = [(line["tokens"], line["loss"]) for line in stage_lines if line.get("loss") is not None]
        checked = [(line["tokens"], line["validation"]) for line in stage_lines if line.get("validation") is not None]
        if trained:  # a line through one point is invisible without its marker
            axes.plot(*zip(*trained), "o-" if len(trained) < 3 else "-", ms=3, lw=1, label="training loss")
        if checked:
            axes.plot(*zip(*checked), "o-", ms=3, lw=0.8, label="validation, nats per token")
        if all(loss > 0 for _, loss in trained):
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            if high < 20 * low:  # too few powers of ten for ticks
                axes.set_yticks([tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high])
        axes.set(title=f"{stage + 1}. {stage_lines[0]['kind']}", xlabel="tokens", ylabel="loss")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_count(round(x))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        if trained or checked:
            axes.legend(fontsize=8)
        else:
            axes.text(0.5, 0.5, "no finite loss was logged", ha="center", va="center", transform=axes.transAxes)
    partial = path.with_name(path.name + ".tmp")
    FigureCanvasAgg(figure).print_png(str(partial))
    os.replace(partial, path)
    return True
