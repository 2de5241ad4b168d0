"""`surgery demo`: plan, convert, inspect, evaluate and densify the embedded checkpoint, and show the command of each
step.

DEMO/original       the embedded checkpoint                     DEMO/calibration.txt   calibration text
DEMO/converted      the converted checkpoint                    DEMO/heldout.txt       evaluation text
DEMO/densified      the converted checkpoint, dense again       DEMO/report.md         results and commands
DEMO/eval           results of the evaluation                   DEMO/report.html       the report page
"""

from __future__ import annotations

import importlib.resources
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.core.files import REPORT_NAME, read_json
from surgery.core.journal import check_absent
from surgery.core.progress import Progress
from surgery.planning.plan import make_plan
from surgery.planning.recipe import load_recipe
from surgery.publish.summary import inspect, plan_dict
from surgery.publish.tables import inspect_table, plan_table

FOLDER = Path("surgery-demo")
TEXTS = ("calibration.txt", "heldout.txt")
ROLES = ("original", "converted", "densified")
TOKENS, LENGTH = 16384, 1024
CALIBRATION_TOKENS = 8192  # half of the recipes' default, to save time
NEEDLES: dict[str, Any] = {"lengths": (128, 512), "depths": (0.0, 0.5, 1.0), "samples": 8}

Show = Callable[[list[Any]], None]


def demo(out: Path | None, recipe: str, progress: Progress, show: Show) -> dict[str, Any]:
    """Run the demo in `out` and return {"folder", "report", "page", "verdict", "generations", "commands", "rows"}.

    out: None is ./surgery-demo, or the next free ./surgery-demo-N. recipe: name or file of a conversion recipe. show:
    prints a list of tables and lines.
    """
    choice = load_recipe(recipe)
    folder = _free_folder(out)
    return _Demo(folder, recipe, choice, progress, show).run()


def _free_folder(out: Path | None) -> Path:
    if out is not None:
        check_absent(out)
        return out
    numbered = (FOLDER.with_name(f"{FOLDER.name}-{n}") for n in range(2, 10_000))
    return next(path for path in (FOLDER, *numbered) if not path.exists())


class _Demo:
    def __init__(self, folder: Path, name: str, recipe: Any, progress: Progress, show: Show):
        self.folder, self.name, self.progress, self.show = folder, name, progress, show
        self.recipe = recipe.model_copy(update={"tune": None})  # tuning would take minutes
        self.settings = "--set tune=false " if recipe.epochs.is_on else ""
        self.paths = {role: folder / role for role in ROLES}
        self.calibration, self.heldout = (folder / text for text in TEXTS)
        self.results = folder / "eval"
        self.commands: list[str] = []

    def run(self) -> dict[str, Any]:
        self._copy_inputs()
        self._plan()
        report = self._convert()
        perplexity = self._evaluate()
        self._densify()
        rows = [*_size_rows(report), *self._score_rows(perplexity)]
        generations = self._generate()
        page, sentence = self._write_page()
        path = self._write_report(rows, sentence, generations)
        return {
            "folder": str(self.folder), "report": str(path), "page": str(page), "verdict": sentence, "generations": generations,
            "commands": self.commands, "rows": rows,
        }  # fmt: skip

    def _step(self, what: str, command: str) -> None:
        self.commands.append(f"surgery {command}")
        self.show([f"\n[bold]{len(self.commands)}. {what}[/]", f"[cyan]$ surgery {escape(command)}[/]"])

    def _copy_inputs(self) -> None:
        """Copy the embedded checkpoint and its texts, so that the commands shown can be run again unchanged."""
        embedded = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
        excluded = shutil.ignore_patterns("*.py", "__pycache__", "training_log.json", *TEXTS)
        shutil.copytree(embedded, self.paths["original"], ignore=excluded)
        for text in TEXTS:
            shutil.copyfile(embedded / text, self.folder / text)
        self.show([f"The embedded checkpoint, a Llama of 4 million parameters: {self.paths['original']}"])

    def _plan(self) -> None:
        original = str(self.paths["original"])
        self._step(
            "Plan: show what would be replaced. Only the config is read.",
            f"plan {original} --recipe {self.name} {self.settings}".rstrip(),
        )
        self.show(plan_table(plan_dict(make_plan(MetaModel(open_checkpoint(original)), self.recipe))))

    def _convert(self) -> dict[str, Any]:
        original, converted = self.paths["original"], self.paths["converted"]
        tokens = min(self.recipe.tokens, CALIBRATION_TOKENS)
        fewer = f"--set tokens={tokens} " if tokens < self.recipe.tokens else ""
        self._step(
            "Convert layer by layer, calibrated on text. This step takes longest.",
            f"convert {original} --recipe {self.name} {self.settings}{fewer}--calibration {self.calibration} --out "
            f"{converted}",
        )
        recipe = self.recipe.model_copy(update={"calibration": str(self.calibration), "tokens": tokens})
        convert(str(original), recipe, converted, progress=self.progress)
        self._step("Inspect: show the replaced modules and their errors.", f"inspect {converted}")
        report = inspect(str(converted))
        self.show(inspect_table(report))
        return report

    def _evaluate(self) -> dict[str, Any]:
        from surgery.eval.results.tables import eval_table
        from surgery.eval.run import evaluate
        from surgery.eval.suite import EvalOptions

        original, converted = str(self.paths["original"]), str(self.paths["converted"])
        self._step(
            "Evaluate both models on text that neither was trained or calibrated on.",
            f"eval {converted} --text {self.heldout} --tokens {TOKENS} --compare {original} --out {self.results}",
        )
        options = EvalOptions(text=str(self.heldout), tokens=TOKENS, length=LENGTH)
        measured = evaluate(converted, ["ppl"], options, compare=original, out=self.results, progress=self.progress)
        self.show(eval_table(measured))
        row = measured.row("ppl")
        return {"original": _ppl(row, "base"), "converted": _ppl(row, "converted")}

    def _densify(self) -> None:
        converted, densified = self.paths["converted"], self.paths["densified"]
        self._step(
            "Densify: convert back to an ordinary checkpoint with the same outputs.",
            f"densify {converted} --out {densified}",
        )
        done = densify(str(converted), densified, progress=self.progress)
        self.show([f"{done['modules']} linears converted to dense weights: {densified}"])

    def _score_rows(self, measured: dict[str, Any]) -> list[list[str]]:
        from surgery.eval.run import evaluate, load
        from surgery.eval.suite import EvalOptions
        from surgery.eval.suites.needle import needle_accuracy

        options = EvalOptions(text=str(self.heldout), tokens=TOKENS, length=LENGTH)
        measured["densified"] = _ppl(evaluate(str(self.paths["densified"]), ["ppl"], options).row("ppl"), "converted")
        tables = []
        with self.progress.bar("needle retrieval", len(ROLES)) as tick:
            for role in ROLES:
                model, tokenizer = load(str(self.paths[role]), torch.device("cpu"), "float32", False)
                tables.append(needle_accuracy(model, tokenizer, **NEEDLES))
                tick()
        cells = len(NEEDLES["lengths"]) * len(NEEDLES["depths"])
        return [
            [
                "perplexity ± standard error",
                *(f"{measured[r]['perplexity']:.3f} ± {measured[r]['se']:.3f}" for r in ROLES),
            ],
            [f"needles found, of {cells * NEEDLES['samples']}", *(f"{table.mean:.0%}" for table in tables)],
        ]

    def _generate(self) -> list[dict[str, str]]:
        """Continue three prompts of the evaluation text with the original and the converted model."""
        from surgery.eval.generations import pick_prompts, write_generations

        prompts = pick_prompts(self.heldout.read_text(encoding="utf-8"))
        original, converted = (str(self.paths[role]) for role in ROLES[:2])
        return write_generations(original, converted, prompts, self.results, torch.device("cpu"))

    def _write_page(self) -> tuple[Path, str]:
        """Write the report page; return its path and the verdict."""
        from surgery.publish.html.page import write_page
        from surgery.publish.verdict import verdict

        page, converted = self.folder / "report.html", str(self.paths["converted"])
        self._step("Report: one HTML page.", f"report {converted} --eval {self.results} --out {page}")
        write_page(converted, page, self.results)
        return page, verdict(inspect(converted), read_json(self.results / "results.json"))

    def _write_report(self, rows: list[list[str]], sentence: str, generations: list[dict[str, str]]) -> Path:
        lines = [
            "# surgery demo: before and after",
            "",
            sentence,
            "",
            "| | " + " | ".join(ROLES) + " |",
            "| --- | --- | --- | --- |",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        for entry in generations:
            lines += [
                "",
                *(f"- {label}: {' '.join(entry[label].split())}" for label in ("prompt", "original", "converted")),
            ]
        lines += ["", "The converted checkpoint was not trained. The error of every replaced module is in"]
        lines += [f"`converted/{REPORT_NAME}`. Commands:", ""]
        lines += [f"    {command}" for command in self.commands]
        path = self.folder / "report.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def _ppl(row: Any, role: Any) -> dict[str, float]:
    return {"perplexity": row.values[role], "se": row.errors[role]}


def _size_rows(report: dict[str, Any]) -> list[list[str]]:
    """Return the table rows of size and compute; those of the densified checkpoint equal the original's."""
    total, macs = report["totals"], report["macs_per_token"]
    quantities = [
        ("parameters", total["params_before"], total["params_after"], ""),
        ("megabytes", total["bytes_before"] / 1e6, total["bytes_after"] / 1e6, ".1f"),
        ("MFLOPs per token, linears", 2 * macs["before"] / 1e6, 2 * macs["after"] / 1e6, ".2f"),
    ]
    return [
        [label, *(format(n, kind or ",") for n in (before, after, before))] for label, before, after, kind in quantities
    ]
