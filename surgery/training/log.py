"""What a run writes down: a line of JSON for every look at it, a curve, and trackers by name."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

LOG, CURVE = "log.jsonl", "curve.png"


class Log:
    """Lines of log.jsonl; `going_on` first drops those of steps that will be taken again."""

    def __init__(self, folder: Path, accelerator: Any = None):
        self.path, self.accelerator = folder / LOG, accelerator

    def going_on(self, stage: int, step: int) -> None:
        if not self.path.is_file():
            return
        kept = [line for line in self.lines() if (line["stage"], line["step"]) <= (stage, step)]
        partial = self.path.with_name(self.path.name + ".tmp")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(partial, self.path)

    def add(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(line)) + "\n")
        if self.accelerator is not None and self.accelerator.trackers:
            numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k not in ("stage", "step")}
            self.accelerator.log({f"{line['kind']}/{k}": v for k, v in numbers.items()}, step=line["total_steps"])

    def lines(self) -> list[dict[str, Any]]:
        """Whole lines: a killed run may leave half of one."""
        found = []
        texts = self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.is_file() else ()
        for text in texts:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if _whole(line):
                found.append(line)
        return found


def _whole(line: Any) -> bool:
    """Whether it is a line that `add` wrote."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return False
    if not all(type(line.get(key)) is int and abs(line[key]) < 2**62 for key in ("stage", "step", "tokens")):
        return False
    drawn = [line[key] for key in ("loss", "validation") if line.get(key) is not None]
    return all(type(n) in (int, float) and abs(n) < 1e30 for n in drawn)


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinities."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}


def draw(lines: list[dict[str, Any]], path: Path) -> bool:
    """Loss over tokens, a panel for every stage, validation as points; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    stages = sorted({line["stage"] for line in lines})
    if not stages:
        return False
    figure = Figure(figsize=(5 * len(stages), 3.5), layout="constrained")
    for column, stage in enumerate(stages):
        axes = figure.add_subplot(1, len(stages), column + 1)
        own = [line for line in lines if line["stage"] == stage]
        trained = [(line["tokens"], line["loss"]) for line in own if line.get("loss") is not None]
        checked = [(line["tokens"], line["validation"]) for line in own if line.get("validation") is not None]
        axes.plot(*zip(*trained) if trained else ([], []), lw=1, label="training loss")
        if checked:
            axes.plot(*zip(*checked), "o-", ms=3, lw=0.8, label="validation, nats per token")
        if all(loss > 0 for _, loss in trained):
            axes.set_yscale("log")
        axes.set(title=f"{stage + 1}. {own[0]['kind']}", xlabel="tokens")
        axes.legend(fontsize=8)
    partial = path.with_name(path.name + ".tmp")
    FigureCanvasAgg(figure).print_png(str(partial))
    os.replace(partial, path)
    return True
