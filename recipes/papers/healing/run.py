"""Healing tables of docs/quality.md: convert a checkpoint, measure it, heal it, and measure it again.

python -m recipes.papers.healing.run SRC --recipe btt-half --healing linears --tiny
    --data TRAINING --calibration FILE --text FILE [--seed 0 --seed 1] [--set stages.*.rate=1e-3] [--json ROWS]

    original     the checkpoint itself
    converted    as `surgery convert --recipe` leaves it; --start copied: with untrained mixers, or without a calibration text
    healed       after `surgery finetune --recipe HEALING`, once for every --seed

Training, calibration and scored text must be three different texts. Perplexity is computed over adjacent windows, and
its ratio to the original's perplexity from pairs of windows. --needles and --ranked also run the suite of
eval/suites/needle.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch

from recipes.papers.script import run_script
from surgery.conversion.convert import convert
from surgery.core.device import choose_device, device_name
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path
from surgery.eval.speed.generation import cache_bytes
from surgery.eval.suite import EvalOptions, SuiteResult
from surgery.eval.suites import perplexity as ppl
from surgery.eval.suites.needle import (
    RankingQuestion,
    Vocabulary,
    make_ranking_question,
    needle_accuracy,
    score_rankings,
    share_error,
)
from surgery.modeling.cache import mixer_modules
from surgery.planning.recipe import load_recipe
from surgery.training import models as opening
from surgery.training.finetune import finetune
from surgery.training.recipe import HealingRecipe, load_healing_recipe

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
HAYSTACK_CHARACTERS = 150_000  # of the scored text, around the facts of needle-rank
RANKED_BATCH = 24
COLUMNS = ("model", "seed", "tokens", "perplexity", "ratio to the original", "needles, %", "training")


def load(name: str, device: Any) -> tuple[Any, Any]:
    """Load (model in float32, tokenizer)."""
    source = opening.open_trainable(name)
    return opening.load_causal_lm(source, torch.float32).to(device).eval(), opening.load_source_tokenizer(source)


class Scorer:
    """Measures every checkpoint of a table on the same windows and needles.

    lengths: of the windows; the first is that of the table, the others are under "lengths". needles, ranked: lengths of
    the questions of `needle` and of `needle-rank`, which hides its facts in the scored text. caches: lengths of prompts
    whose cache is measured, in bfloat16. far_off: also score the model with the linear branch of its mixers off.
    """

    def __init__(self, source: str, arguments: argparse.Namespace, device: Any):
        self.arguments, self.device = arguments, device
        model, tokenizer = load(source, device)
        self.base: dict[int, SuiteResult] = {}
        self.questions: dict[int, list[RankingQuestion]] = {}
        if arguments.ranked:
            self.questions = ranking_questions(tokenizer, arguments)
        self.original = {"model": "original", **self._scores(model, tokenizer)}

    def __call__(self, folder: Path) -> dict[str, Any]:
        """Return the scores of a checkpoint."""
        return self._scores(*load(str(folder), self.device))

    def _scores(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Score a model. The first model scored is the original, which later ones are compared with."""
        lengths = self.arguments.length
        found = self._perplexity(model, tokenizer, lengths[0])
        if lengths[1:]:
            found["lengths"] = {n: self._perplexity(model, tokenizer, n) for n in lengths[1:]}
        if self.arguments.needles:
            table = needle_accuracy(model, tokenizer, self.arguments.needles, DEPTHS, self.arguments.samples)
            found["needles"] = table.to_dict()
        if self.questions:
            found["ranked"] = {n: rank_answers(model, questions) for n, questions in self.questions.items()}
        if self.arguments.far_off and (branches := linear_branch_weights(model)):
            with torch.no_grad():
                for weight_H in branches:
                    weight_H.zero_()
            found["far_off"] = {n: self._perplexity(model, tokenizer, n)["ratio"] for n in lengths}
        if self.arguments.caches:
            found["cache_bytes"] = {n: prompt_cache_bytes(model.bfloat16(), n) for n in self.arguments.caches}
        return found

    def _perplexity(self, model: Any, tokenizer: Any, length: int) -> dict[str, Any]:
        options = EvalOptions(text=self.arguments.text, tokens=self.arguments.score, length=length)
        measured = ppl.measure(model, tokenizer, options)
        found = ppl.summarize(measured, self.base.get(length))
        self.base.setdefault(length, measured)
        return found


def ranking_questions(tokenizer: Any, arguments: argparse.Namespace) -> dict[int, list[RankingQuestion]]:
    """Return the questions of `needle-rank` by length: --samples at each depth, in the first tokens of the scored
    text.
    """
    vocabulary = Vocabulary(tokenizer)
    text = Path(arguments.text).read_text(encoding="utf-8")[:HAYSTACK_CHARACTERS]
    ids = vocabulary.ids(text)
    return {
        length: [
            make_ranking_question(vocabulary, length, depth, Random(f"needle-rank 0 {length} {depth} {i}"), ids)
            for depth in DEPTHS
            for i in range(arguments.samples)
        ]
        for length in arguments.ranked
    }


def rank_answers(model: Any, questions: list[RankingQuestion]) -> dict[str, float]:
    """Return the share of right answers and its standard error."""
    batches = [questions[i : i + RANKED_BATCH] for i in range(0, len(questions), RANKED_BATCH)]
    right = sum(row["accuracy"] for batch in batches for row in score_rankings(model, batch))
    number = len(questions)
    return {"accuracy": right / number, "se": share_error(right, number), "questions": number}


def linear_branch_weights(model: Any) -> list[torch.Tensor]:
    """Return the weights of the linear branches of mixers that also have a softmax branch."""
    mixers = [module.mixer for _, module in mixer_modules(model)]
    weights = [getattr(m, "linear_weight_H", None) for m in mixers if getattr(m, "window_buffer", None) is not None]
    return [weight for weight in weights if weight is not None]


@torch.inference_mode()
def prompt_cache_bytes(model: Any, length: int) -> int:
    """Return the bytes of the cache after a prompt of one row of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(model.config.get_text_config().vocab_size, (1, length), generator=generator)
    return cache_bytes(model(input_ids=ids_1T.to(model.device), use_cache=True, logits_to_keep=1).past_key_values)


# -- formatting -------------------------------------------------------------------------------
def format_cells(row: dict[str, Any]) -> list[str]:
    """Format a row for the columns of COLUMNS."""
    if "refused" in row:
        return [row["model"], str(row.get("seed", "")), "", row["refused"], "", "", ""]
    ratio, asked, run = row.get("ratio"), row.get("needles"), row.get("training")
    se = "" if row["se"] is None else f" ± {row['se']:.2g}"
    return [
        row["model"],
        str(row.get("seed", "")),
        f"{run['tokens'] / 1e6:.2f}M" if run else "",
        f"{row['perplexity']:.4g}{se}",
        ppl.format_interval(ratio, ".3f") if ratio else "",
        f"{100 * asked['mean']:.1f} ± {100 * mean_error(asked):.1f}" if asked else "",
        f"{run['seconds']:.0f} s, {run['tokens_per_second'] / 1e3:.1f}K tokens/s" if run else "",
    ]


def mean_error(asked: dict[str, Any]) -> float:
    """Return the standard error of the mean over the independent cells of a needle table."""
    errors = [error for row in asked["errors"] for error in row]
    return float(sum(e * e for e in errors) ** 0.5 / len(errors))


def format_line(values: list[str] | tuple[str, ...]) -> str:
    """Format a row of a Markdown table."""
    return "| " + " | ".join(values) + " |"


# -- one row ---------------------------------------------------------------------------------------
def convert_once(arguments: argparse.Namespace, name: str, folder: Path, device: Any) -> Path:
    """Convert, unless the conversion is already in its folder. copied: mixers are initialized without data, structures
    without calibration text.
    """
    out = folder / f"{Path(name).stem}-{arguments.start}"
    if out.exists():
        return out
    text = [f"calibration={json.dumps(arguments.calibration)}", f"tokens={arguments.calibrate}"]
    text += [
        f"length={arguments.length[0]}",
        "tune=false",  # as the tables of docs/quality.md were measured
    ]
    recipe = load_recipe(name, [*text, *arguments.convert])
    if arguments.start == "copied":
        changes = ["attention.start=copied"] if recipe.attention else ["calibration=null"]
        recipe = load_recipe(name, [*text, *arguments.convert, *changes])
    convert(arguments.source, recipe, out, device=str(device), resume=partial_path(out).exists())
    return out


def healing_recipe(arguments: argparse.Namespace, seed: int, varied: str) -> HealingRecipe:
    """Return the recipe of a run. --tokens is the total of all stages, divided as the recipe divides its own."""
    weights = arguments.weight or [1.0] * len(arguments.data)
    sources = [
        {"path": path, "separator": arguments.separator, "weight": weight}
        for path, weight in zip(arguments.data, weights)
    ]
    given = [f"data.sources={json.dumps(sources)}", f"seed={seed}", "checkpoint=0", "data.packing=stream"]
    given += ["data.shuffle=64", f"data.validation={json.dumps([{'path': arguments.text}])}"]
    given += [f"data.validation_examples={arguments.validation}", *arguments.overrides]
    given += varied.split()
    recipe = load_healing_recipe(arguments.healing, given, arguments.tiny)
    if arguments.tokens is None:
        return recipe
    whole = sum(stage.tokens for stage in recipe.stages)
    shares = [f"stages.{i}.tokens={stage.tokens * arguments.tokens // whole}" for i, stage in enumerate(recipe.stages)]
    return load_healing_recipe(arguments.healing, [*given, *shares], arguments.tiny)


def heal_and_score(
    arguments: argparse.Namespace, student: Path, seed: int, varied: str, scorer: Scorer, device: Any
) -> dict[str, Any]:
    """Train, measure, and delete the checkpoint unless --keep. Logs of a killed run stay beside the conversion."""
    with ExitStack() as stack:
        place = tempfile.TemporaryDirectory(dir=student.parent, prefix=f"run-{student.name}-{seed}-")
        folder = Path(stack.enter_context(place))
        record = finetune(
            str(student),
            healing_recipe(arguments, seed, varied),
            folder / "healed",
            teacher=arguments.source,
            device=str(device),
            track="none",
        )
        scores = scorer(folder / "healed")
        log = (folder / "healed" / "training" / "log.jsonl").read_text(encoding="utf-8")
        if arguments.keep:
            shutil.copytree(folder / "healed", arguments.keep / f"{student.name}-{seed}", dirs_exist_ok=True)
    curves = {
        "training": summarize_training(record),
        "validation": record["validation"],
        "curve": validation_curve(record, log),
    }
    return {**scores, **curves}


def summarize_training(record: dict[str, Any]) -> dict[str, Any]:
    """Return tokens_per_second (of the training loops alone) and seconds (of everything, loading and measuring
    included).
    """
    stages = record["stages"]
    seconds = sum(stage["seconds"] for stage in stages)
    totals = {"tokens": sum(stage["tokens"] for stage in stages), "seconds": record["seconds"]}
    totals["tokens_per_second"] = sum(stage["positions"] for stage in stages) / max(seconds, 1e-9)
    kept = {"recipe", "precision", "device", "versions"}
    return {**totals, "stages": stages, **{k: v for k, v in record.items() if k in kept}}


def validation_curve(record: dict[str, Any], log: str) -> list[list[float]]:
    """Return [tokens over all stages, validation loss in nats per token], starting before the first step."""
    before = record["validation"]["before"]
    last = record["delivered"]["last"]
    points = [[0, before["loss"]]] if before else []
    done = [0]
    for stage in record["stages"]:
        done.append(done[-1] + stage["tokens"])
    lines = [json.loads(text) for text in log.splitlines()]
    points += [[done[x["stage"]] + x["tokens"], x["validation"]] for x in lines if "validation" in x]
    return points + ([[done[-1], last]] if last is not None else [])


# -- the table -------------------------------------------------------------------------------------
def run_table(arguments: argparse.Namespace, show: Any) -> list[dict[str, Any]]:
    """Return the rows of the table, one per conversion, start, seed and variation."""
    device = choose_device(arguments.device)
    scorer = Scorer(arguments.source, arguments, device)
    table = [scorer.original]
    show(table)
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        for name in arguments.recipe:
            keys = {"recipe": name, "start": arguments.start, "healing": arguments.healing}
            keys |= {"convert": arguments.convert, "set": arguments.overrides}
            began = time.perf_counter()
            try:
                student = convert_once(arguments, name, work, device)
                seconds = round(time.perf_counter() - began, 1)
                table.append({"model": f"{student.name}, converted", **keys, **scorer(student), "seconds": seconds})
                show(table)
                for varied, seed in (
                    [] if arguments.only_convert else product(arguments.vary or [""], arguments.seed or [0])
                ):
                    model = f"{student.name}, healed {varied}".strip()
                    row = {"model": model, "seed": seed, **keys, "varied": varied}
                    table.append(row | heal_and_score(arguments, student, seed, varied, scorer, device))
                    show(table)
            except SurgeryError as error:
                table.append({"model": name, **keys, "refused": str(error)})
                show(table)
    return [{**row, "device": device_name(device)} for row in table]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Original checkpoint.")
    parser.add_argument("--recipe", action="append", required=True, help="Conversion recipe. Repeatable.")
    parser.add_argument("--healing", default="attention", help="Healing recipe. Default: attention.")
    parser.add_argument("--tiny", action="store_true", help="Apply the `tiny` block of the healing recipe.")
    parser.add_argument("--data", action="append", required=True, help="Text file to train on. Repeatable.")
    parser.add_argument(
        "--weight",
        type=float,
        action="append",
        help="Share of the --data at the same place. Repeatable. Default: equal.",
    )
    parser.add_argument("--separator", help="String between the documents of the text files, e.g. '<|endoftext|>'.")
    parser.add_argument("--calibration", required=True, help="Calibration text.")
    parser.add_argument("--calibrate", type=int, default=16384, help="Tokens of the calibration text. Default: 16384.")
    parser.add_argument("--text", required=True, help="Text to score; it is not trained on.")
    parser.add_argument("--score", type=int, default=65536, help="Tokens of the scored text. Default: 65536.")
    parser.add_argument(
        "--length",
        type=int,
        action="append",
        help="Length in tokens of the scored windows. Repeatable; the first is also that of the calibration. Default: "
        "1024.",
    )
    parser.add_argument("--start", choices=("calibrated", "copied"), default="calibrated", help="Initialization.")
    parser.add_argument("--tokens", type=int, help="Training tokens of all stages together. Default: the recipe's.")
    parser.add_argument("--seed", type=int, action="append", help="Seed of a run. Repeatable. Default: 0.")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="Override a key of the healing recipe.",
    )
    parser.add_argument(
        "--vary", action="append", default=[], help="Overrides KEY=VALUE .. of an additional row. Repeatable."
    )
    parser.add_argument(
        "--convert", action="append", default=[], metavar="KEY=VALUE", help="Override a key of the conversion recipe."
    )
    parser.add_argument("--only-convert", action="store_true", help="Do not train.")
    parser.add_argument(
        "--needles",
        type=int,
        action="append",
        default=[],
        metavar="LENGTH",
        help="Score needles at this length. Repeatable.",
    )
    parser.add_argument(
        "--ranked",
        type=int,
        action="append",
        default=[],
        metavar="LENGTH",
        help="Score needle-rank, in the scored text, at this length. Repeatable.",
    )
    parser.add_argument(
        "--cache",
        type=int,
        action="append",
        default=[],
        dest="caches",
        metavar="LENGTH",
        help="Measure the cache after this many tokens. Repeatable.",
    )
    parser.add_argument("--far-off", action="store_true", help="Also score with the mixers' linear branches off.")
    parser.add_argument(
        "--samples", type=int, default=40, help="Needle questions at each length and depth. Default: 40."
    )
    parser.add_argument(
        "--validation", type=int, default=16, help="Rows of the scored text for the validation curve. Default: 16."
    )
    parser.add_argument("--work", type=Path, help="Keep the converted checkpoints in this folder and use them again.")
    parser.add_argument("--keep", type=Path, help="Keep the healed checkpoints in this folder.")
    parser.add_argument("--device", help="Compute on this device. Default: a GPU if there is one.")
    parser.add_argument("--json", type=Path, help="Write the rows to this file.")
    arguments = parser.parse_args()
    arguments.length = arguments.length or [1024]
    if arguments.weight and len(arguments.weight) != len(arguments.data):
        parser.error(f"--weight is given {len(arguments.weight)} times, and --data {len(arguments.data)} times")
    return arguments


def main() -> None:
    """Print the table row by row."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    arguments = parse_arguments()
    print(format_line(COLUMNS) + "\n" + format_line(["---"] * len(COLUMNS)), flush=True)

    def show(table: list[dict[str, Any]]) -> None:
        print(format_line(format_cells(table[-1])), flush=True)
        if arguments.json:
            partial = arguments.json.with_suffix(".tmp")
            partial.write_text(json.dumps(table, indent=1))
            partial.replace(arguments.json)

    run_table(arguments, show)


if __name__ == "__main__":
    run_script(main)
