"""Tables of a public model for docs/quality.md: the original, conversions before and after healing, and the control.

python -m recipes.papers.quality.public_model run SRC --conversion hybrid-25 --conversion low-rank-half --calibration FILE
    --text code=FILE --text prose=FILE --data TRAINING --tokens 20M --work FOLDER [--mc FOLDER] [--out ROWS.jsonl]
python -m recipes.papers.quality.public_model show [ROWS.jsonl ..]

    original     the checkpoint itself: a folder, a GGUF file or a Hub id
    converted    as `surgery convert --recipe CONVERSION` leaves it
    healed       after `surgery finetune --recipe auto` (--healing) on --tokens of --data
    control      the original after the same tokens by cross-entropy, at the best of three rates (recipe `control`), in rows
                 and batches of the same size as the healing

Each is scored by perplexity on every text (ratio to the original, 95% interval) and by agreement with the original, by
needles at --lengths, by RULER's tasks (--ruler), by its cache at --lengths, and by multiple choice (--mc: a folder with
TASK.jsonl, needs lm-eval). --bits adds a row of each conversion in 8 or 4 bits, before and after healing. The texts,
--calibration and --data must be different texts. Conversions, checkpoints and evaluations are kept in --work: an
interrupted command continues. A row that the file has is not measured again.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipes.papers.quality.equal_bytes import latest, table
from recipes.papers.quality.quantized import append_row, read_rows
from recipes.papers.script import run_script
from surgery.architectures.attention import attention_paths, attention_shape
from surgery.checkpoint.outline import describe_unconverted_model
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.quantize_checkpoint import quantize
from surgery.core.config import parse_count
from surgery.core.device import choose_device, device_name
from surgery.core.digests import content_digest
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, partial_path, read_json, size_text
from surgery.core.progress import RichProgress
from surgery.eval.results.compare import ComparisonRow
from surgery.eval.run import Evaluation, evaluate
from surgery.eval.speed.context_tables import measured
from surgery.eval.suite import EvalOptions, stable_id
from surgery.eval.suites import perplexity as ppl
from surgery.mixers.cache_size import cache_bytes
from surgery.planning.recipe import load_recipe
from surgery.publish.summary import checkpoint_mixers
from surgery.training.auto_recipe import load_recipe_of_run
from surgery.training.finetune import finetune
from surgery.training.recipe import HealingRecipe, load_healing_recipe

ROWS = Path(__file__).parent / "rows" / "public_model.jsonl"  # results that belong to the repository
KEYS = ("model", "state", "conversion", "settings")  # of a row: what was measured, and how
STATES = ("original", "converted", "healed", "control")
EARLIER = "†"  # marks scores of an earlier run than the others of a row
Row = dict[str, Any]


# -- what is run ---------------------------------------------------------------------------------------
class PublicModel:
    """The states of one model and their rows. Checkpoints and evaluations lie in `a.work`."""

    def __init__(self, a: argparse.Namespace):
        self.a, self.work, self.states = a, a.work, a.states
        self.texts = dict(parse_text(word) for word in a.text)
        if not isinstance(a.tokens, int):
            raise SurgeryError(f"--tokens must be a number such as 20M (got {a.tokens!r})")
        for name in a.conversion:
            load_recipe(name, a.convert)
        for option, path in (
            ("--calibration", a.calibration),
            ("--data", a.data if a.tokens else None),
            ("--mc", a.mc),
        ):
            if path is not None and not path.exists():
                raise SurgeryError(f"{option} {path} does not exist; give a text of yours")
        self.work.mkdir(parents=True, exist_ok=True)
        self.done = {row_key(row) for row in read_rows(a.out)}
        self.device = device_name(choose_device(a.device))
        self.began, self.longest, self.said_late = time.monotonic(), 0.0, False  # longest: seconds of a row

    def run(self) -> None:
        """Measure the rows that the file lacks."""
        if "original" in self.states:
            self.write("original", "", partial(unchanged, self.a.source), {})
        layouts: dict[tuple[int, int, int], HealingRecipe] = {}
        for name in self.a.conversion if set(self.states) - {"original"} else ():
            if self.is_late():
                return
            converted = self.convert(name)
            make, settings = partial(unchanged, str(converted)), self.conversion_settings()
            if "converted" in self.states:
                self.write("converted", name, make, settings)
                self.write_quantized("converted", name, make, settings)
            if not self.a.tokens:
                continue
            recipe = self.healing_recipe(name, converted)
            stage = recipe.stages[-1]
            layouts.setdefault((stage.length, stage.batch, stage.rows), recipe)
            if "healed" in self.states:
                make, settings = (
                    partial(self.heal, converted, recipe),
                    settings | self.training_settings(self.a.healing),
                )
                self.write("healed", name, make, settings)
                self.write_quantized("healed", name, make, settings)
        if "control" not in self.states:
            return
        for length, batch, rows in layouts:
            recipe = self.control_recipe(length, batch, rows)
            settings = {**self.training_settings("control"), "length": length, "batch": batch}
            self.write("control", "", partial(self.control, recipe), settings)

    def write(
        self, state: str, conversion: str, make: Callable[[], tuple[Row, str]], settings: Mapping[str, Any]
    ) -> None:
        """Append the row of a state unless the file has it. make() -> ({further entries}, folder of the checkpoint)."""
        row: Row = {"kind": "public", "model": Path(self.a.source).stem, "state": state, "conversion": conversion}
        row["settings"] = {**self.scoring_settings(), **settings}
        if row_key(row) in self.done or self.is_late():
            return
        began = time.monotonic()
        entries, folder = make()
        row |= {**entries, **self.scores(folder, state), "device": self.device}
        append_row(self.a.out, row)
        self.done.add(row_key(row))
        self.longest = max(self.longest, time.monotonic() - began)
        print(
            f"{state} {conversion}: {', '.join(f'{n} {perplexity_cell(t)}' for n, t in row['texts'].items())}",
            flush=True,
        )

    def is_late(self) -> bool:
        """Return whether a row as long as the longest one would end after --minutes; say so once."""
        late = time.monotonic() - self.began + self.longest > 60 * self.a.minutes
        if late and not self.said_late:
            print(f"stopped before {self.a.minutes:g} minutes; the same command continues", flush=True)
            self.said_late = True
        return late

    def write_quantized(
        self, state: str, conversion: str, make: Callable[[], tuple[Row, str]], settings: Mapping[str, Any]
    ) -> None:
        """Append the row of a state whose linears are stored in --bits, if that was given."""
        if bits := self.a.bits:
            self.write(state, conversion, partial(self.quantized, make, bits), {**settings, "bits": bits})

    # -- settings --------------------------------------------------------------------------------------
    def scoring_settings(self) -> dict[str, Any]:
        """Return what scores depend on; files by content."""
        a = self.a
        texts = {name: content_digest(Path(path))[:16] for name, path in self.texts.items()}
        settings = {"texts": texts, "score": a.score, "window": a.window, "lengths": a.lengths, "samples": a.samples}
        settings |= {"greedy": [a.greedy_prompts, a.greedy_tokens], "dtype": a.dtype, "seed": a.seed}
        settings |= {"mc": content_digest(a.mc)[:16], "mc_limit": a.mc_limit} if a.mc else {}
        settings |= {"speed": a.speed} if a.speed else {}
        return settings | ({"ruler": a.ruler, "ruler_samples": a.ruler_samples} if a.ruler else {})

    def conversion_settings(self) -> dict[str, Any]:
        """Return what a conversion depends on beside its recipe."""
        return {"calibration": content_digest(self.a.calibration)[:16], "convert": self.a.convert}

    def training_settings(self, recipe: str) -> dict[str, Any]:
        """Return what a training run depends on."""
        settings = {"recipe": recipe, "data": content_digest(self.a.data)[:16], "tokens": self.a.tokens}
        return {**settings, "set": self.a.set, "tiny": self.a.tiny}

    # -- checkpoints -----------------------------------------------------------------------------------
    def convert(self, name: str) -> Path:
        """Return the converted checkpoint, which is made unless it is there."""
        recipe = load_recipe(name, [f"calibration={self.a.calibration}", *self.a.convert])
        depends = (self.a.source, recipe.model_dump_json(), content_digest(self.a.calibration))
        out = self.work / f"{Path(name).stem}-{stable_id(*depends)[:8]}"
        if not out.is_dir():
            resume = partial_path(out).exists()
            convert(self.a.source, recipe, out, device=self.a.device, resume=resume, progress=RichProgress())
        return out

    def overrides(self) -> list[str]:
        """Return the keys that healing and control have in common."""
        data = f"data.sources=[{{path: {self.a.data}}}]"
        return [data, f"seed={self.a.seed}", *self.a.set, f"stages.*.tokens={self.a.tokens}"]

    def healing_recipe(self, name: str, converted: Path) -> HealingRecipe:
        """Return the recipe that heals a conversion. Raises SurgeryError for one of several stages."""
        recipe, _ = load_recipe_of_run(self.a.healing, str(converted), self.overrides(), self.a.tiny)
        if len(recipe.stages) > 1:
            raise SurgeryError(
                f"--healing {self.a.healing} has {len(recipe.stages)} stages; the control needs the layout of one. Give a "
                "recipe with one stage."
            )
        return recipe

    def control_recipe(self, length: int, batch: int, rows: int) -> HealingRecipe:
        """Return the recipe of the control, with the rows and batches of the healing."""
        layout = [f"stages.*.length={length}", f"stages.*.batch={batch}", f"stages.*.rows={rows}"]
        return load_healing_recipe("control", [*self.overrides(), *layout], self.a.tiny)

    def heal(self, converted: Path, recipe: HealingRecipe) -> tuple[Row, str]:
        """Return the entries of the row and the healed checkpoint."""
        return self.train(str(converted), f"{converted.name}-healed", recipe, self.a.source)

    def control(self, recipe: HealingRecipe) -> tuple[Row, str]:
        """Return the entries of the row and the control."""
        return self.train(self.a.source, "control", recipe, None)

    def quantized(self, make: Callable[[], tuple[Row, str]], bits: int) -> tuple[Row, str]:
        """Return the entries of a row and its checkpoint with linears in 8 or 4 bits, which is made unless it is there."""
        entries, folder = make()
        out = Path(f"{folder}-int{bits}")
        if not out.is_dir():
            quantize(folder, out, bits)
        return entries, str(out)

    def train(self, name: str, label: str, recipe: HealingRecipe, teacher: str | None) -> tuple[Row, str]:
        """Train a checkpoint unless that was done; return what the row says of the run, and the result."""
        depends = (name, recipe.model_dump_json(), content_digest(self.a.data))
        out = self.work / f"{label}-{stable_id(*depends)[:8]}"
        if not out.is_dir():
            finetune(
                name, recipe, out, teacher=teacher, resume=True, track="none", device=self.a.device,
                progress=RichProgress(), gpus=self.a.gpus,
            )  # fmt: skip
        record = read_json(out / REPORT_NAME)["training"][-1]
        stage = record["recipe"]["stages"][-1]
        training = {"rate": stage["rate"], "rates": stage["rates"], "seconds": record["seconds"]}
        training |= {"tried": record.get("rates_tried", []), "delivered": record["delivered"]["state"]}
        return {"training": training}, str(out)

    # -- scores ----------------------------------------------------------------------------------------
    def scores(self, folder: str, state: str) -> Row:
        """Return the scores of a checkpoint."""
        a, against = self.a, state != "original"
        found: Row = {"texts": {}}
        for name, path in self.texts.items():
            options = EvalOptions(
                text=path, tokens=a.score, length=a.window, seed=a.seed, greedy_prompts=a.greedy_prompts,
                greedy_tokens=a.greedy_tokens,
            )  # fmt: skip
            done = self.evaluate(f"text-{name}", folder, ["ppl", "agreement"] if against else ["ppl"], options, against)
            found["texts"][name] = text_scores(done)
        if a.samples:
            asked = {"lengths": tuple(a.lengths), "depths": (0.0, 0.5, 1.0), "limit": a.samples}
            options = EvalOptions(text=next(iter(self.texts.values())), tasks=("needle-rank",), seed=a.seed, **asked)
            found["needles"] = needle_scores(self.evaluate("needles", folder, ["needle"], options, against), a.lengths)
        if a.mc:
            tasks = tuple(sorted(path.stem for path in a.mc.glob("*.jsonl")))
            options = EvalOptions(tasks=tasks, data={"*": a.mc}, limit=a.mc_limit, seed=a.seed)
            found["mc"] = choice_scores(self.evaluate("mc", folder, ["lm-eval"], options, against))
        if a.ruler:
            options = EvalOptions(tasks=tuple(a.ruler), lengths=tuple(a.lengths), limit=a.ruler_samples, seed=a.seed)
            done = self.evaluate("ruler", folder, ["ruler"], options, against)
            found["ruler"] = ruler_scores(done, a.lengths)
        if a.speed and against:
            options = EvalOptions(lengths=tuple(a.speed), seed=a.seed)
            done = self.evaluate("speed", folder, ["speed"], options, against, "bfloat16")
            found["speed"] = speed_scores(done)
        source = open_converted_checkpoint(folder)
        found["bytes"] = sum(tensor.nbytes for tensor in source.tensors.values())
        found["cache_bytes"] = cache_sizes(source, a.lengths)
        found["parameters"] = sum(tensor.numel for tensor in source.tensors.values())
        return found

    def evaluate(
        self, place: str, folder: str, suites: list[str], options: EvalOptions, against: bool, dtype: str = ""
    ) -> Evaluation:
        """Run suites, beside the original unless the checkpoint is it. place: folder of the results in `work`."""
        out = self.work / "evaluations" / place
        out.mkdir(parents=True, exist_ok=True)
        done = evaluate(
            folder, suites, options, compare=self.a.source if against else None, out=out,
            device=self.a.device, dtype=dtype or self.a.dtype, progress=RichProgress(), comparison_files=False,
        )  # fmt: skip
        if done.broken:
            suite, why = next(iter(done.broken.items()))
            raise SurgeryError(f"{suite} of {folder} could not be measured: {why}")
        return done


def unchanged(folder: str) -> tuple[Row, str]:
    """Return a checkpoint that needs no training."""
    return {}, folder


def cache_sizes(source: CheckpointSource, lengths: Sequence[int]) -> dict[str, int]:
    """Return the bytes of the cache of one sequence by length, in the dtype of the weights."""
    mixers = {}
    if "quantization_config" in source.config:
        mixers = {path: mixer for path, mixer, _ in checkpoint_mixers(source)}
    model = describe_unconverted_model(source)
    shapes = {path: attention_shape(model, path) for path in attention_paths(model)}
    return {
        str(n): sum(cache_bytes(mixers.get(path), shape, n, source.dtype) for path, shape in shapes.items())
        for n in lengths
    }


def row_key(row: Row) -> str:
    """Return what identifies a row."""
    return str([row.get(key) for key in KEYS])


def parse_text(word: str) -> tuple[str, str]:
    """Return (name, file) of "NAME=FILE". Raises SurgeryError for other text."""
    name, equals, path = word.partition("=")
    if not (name and equals and Path(path).is_file()):
        raise SurgeryError(f"--text must be NAME=FILE, for example code=heldout.txt (got {word!r})")
    return name, path


def value_of(row: ComparisonRow) -> dict[str, Any]:
    """Return value and standard error of the checkpoint in a row of a comparison."""
    return {"value": row.values["converted"], "se": row.errors["converted"]}


def text_scores(done: Evaluation) -> Row:
    """Return perplexity with its ratio, and agreement if it was measured."""
    row = done.row("ppl")
    found: Row = {"perplexity": value_of(row)}
    if row.ratio is not None:
        found["ratio"] = {"ratio": row.ratio.change, "low": row.ratio.low, "high": row.ratio.high}
    if "agreement" in done.results:
        names = {
            "kl": "agreement",
            "top1": "agreement",
            "win_tie": "agreement-documents",
            "same_tokens": "agreement-greedy",
        }
        rows = {row.metric.name: row for row in done.rows if row.is_summary}
        found |= {
            name: value_of(rows[name]) for name, task in names.items() if name in rows and rows[name].task == task
        }
        found["median"] = done.results["agreement"]["converted"].info["greedy"].get("median")
    return found


def needle_scores(done: Evaluation, lengths: Sequence[int]) -> Row:
    """Return the share of needles found by length, in percent."""
    rows = [row for row in done.rows if row.metric.name == "accuracy"]
    return {length: share_of(row) for row in rows if (length := length_of(row, lengths))}


def choice_scores(done: Evaluation) -> Row:
    """Return the accuracy of each multiple-choice task in percent, with its difference from the original's."""
    rows = [row for row in done.rows if row.is_summary and row.metric.name.split(",")[0] == "acc" and row.intervals]
    return {row.task: share_of(row) | difference_of(row) for row in rows}


def difference_of(row: ComparisonRow) -> Row:
    """Return the difference from the original in percent and its 95% interval, of paired questions; {} without one."""
    change, scale = row.difference, 100 / row.metric.scale
    if change is None or change.low is None or change.high is None:
        return {}
    return {"change": {"value": scale * change.change, "low": scale * change.low, "high": scale * change.high}}


def ruler_scores(done: Evaluation, lengths: Sequence[int]) -> Row:
    """Return RULER's score by task and length, in percent, with its standard error."""
    found: Row = {}
    for row in done.rows:
        if length := length_of(row, lengths):
            scale, error = 100 / row.metric.scale, row.errors["converted"]
            score = {"value": scale * row.values["converted"], "se": None if error is None else scale * error}
            found.setdefault(row.task, {})[length] = score
    return found


def speed_scores(done: Evaluation) -> Row:
    """Return tokens per second of decoding by batch and length, with the ratio to the original's in the same run."""
    found: Row = {}
    base, own = (
        {(row["batch"], row["context"]): measured(row, "tokens_s") for row in done.results["speed"][role].info["bench"]}
        for role in ("base", "converted")
    )
    for (batch, length), value in own.items():
        if value is not None and base[batch, length] is not None:
            found.setdefault(str(batch), {})[str(length)] = {"value": value, "ratio": value / base[batch, length]}
    return found


def length_of(row: ComparisonRow, lengths: Sequence[int]) -> str | None:
    """Return the length that a row is of, None if it is of several. A task of one length has no row beside its own."""
    if len(lengths) == 1:
        return str(lengths[0]) if row.is_summary else None
    return str(row.group["length"]) if set(row.group) == {"length"} else None


def share_of(row: ComparisonRow) -> dict[str, float]:
    """Return a share in percent with its interval."""
    scale = 100 / row.metric.scale
    low, high = row.intervals["converted"]
    return {"value": scale * row.values["converted"], "low": scale * low, "high": scale * high}


# -- the tables ----------------------------------------------------------------------------------------
def perplexity_cell(scores: Row) -> str:
    """Format a perplexity with its standard error; of others than the original the ratio with its interval."""
    if "ratio" in scores:
        return f"x {ppl.format_interval(scores['ratio'])}"
    value, se = scores["perplexity"]["value"], scores["perplexity"]["se"]
    return f"{value:.4g}" + ("" if se is None else f" ± {se:.2g}")


def value_cell(scores: Row, name: str, digits: str) -> str:
    """Format a value with its standard error."""
    if name not in scores:
        return ""
    value, se = scores[name]["value"], scores[name]["se"]
    return f"{value:{digits}}" + ("" if se is None else f" ± {se:.2g}")


def share_cell(scores: Row | None) -> str:
    """Format a share with its interval."""
    return "" if scores is None else f"{scores['value']:.1f} [{scores['low']:.1f}, {scores['high']:.1f}]"


def with_earlier_scores(rows: list[Row]) -> list[Row]:
    """Return the last row of each state, with the scores that it lacks from the row before it; `earlier` names them."""
    found: dict[str, Row] = {}
    for row in rows:
        before: Row = found.pop(state_cell(row), {})
        taken: Row = {
            name: before[name] for name in ("needles", "speed", "ruler", "mc") if name in before and name not in row
        }
        found[state_cell(row)] = {**row, **taken, "earlier": list(taken)}
    return list(found.values())


def marked(row: Row, name: str, cell: str) -> str:
    """Return a cell, marked if its score is of an earlier run."""
    return f"{cell} {EARLIER}" if cell and name in row.get("earlier", ()) else cell


def state_cell(row: Row) -> str:
    """Return the first cell of a row."""
    settings = row["settings"]
    count = settings.get("tokens", 0)
    tokens = f", {f'{count / 1e6:g}M' if count >= 1e6 else f'{count:,}'} tokens" if count else ""
    keys = ", ".join(settings.get("convert", ()))
    name = f"`{Path(row['conversion']).stem}`{f' ({keys})' if keys else ''}, " if row["conversion"] else ""
    name += row["state"] + (f", {settings['bits']} bits" if "bits" in settings else "")
    rate = f", rate {row['training']['rate']:g}" if row["state"] == "control" else ""
    return f"{name}{tokens}{rate}"


def in_order(rows: list[Row]) -> list[Row]:
    """Return the original, the control, then each conversion before and after healing."""
    place = {"original": 0, "control": 1}
    names = list(dict.fromkeys(map(conversion_key, rows)))
    order = ("original", "control", "converted", "healed")  # rows of one state stay in the order of the file
    return sorted(
        rows, key=lambda row: (place.get(row["state"], 2), names.index(conversion_key(row)), order.index(row["state"]))
    )


def conversion_key(row: Row) -> str:
    """Return what identifies a conversion: its recipe and the keys that were changed."""
    return str([row["conversion"], row["settings"].get("convert")])


def model_tables(rows: list[Row]) -> Iterator[str]:
    """Yield the tables of rows that were scored alike: quality, agreement, needles with cache, multiple choice."""
    rows = in_order(with_earlier_scores(rows))
    texts, lengths = list(rows[0]["texts"]), [str(n) for n in rows[0]["settings"]["lengths"]]
    head = ["model", "parameters", "bytes", *(f"perplexity, {name}" for name in texts)]
    yield table(
        [head]
        + [
            [
                state_cell(row),
                f"{row['parameters'] / 1e6:.1f}M" if "bits" not in row["settings"] else "",
                size_text(row["bytes"]) if "bytes" in row else "",
                *(perplexity_cell(row["texts"][name]) for name in texts),
            ]
            for row in rows
        ]
    )
    compared = [row for row in rows if "kl" in row["texts"][texts[0]]]
    if compared:
        head = [
            "model",
            "text",
            "KL, nats",
            "same token, %",
            "wins and ties, %",
            "tokens until greedy texts differ",
            "median",
        ]
        lines = [
            [
                state_cell(row), name, value_cell(scores, "kl", ".3g"), value_cell(scores, "top1", ".1f"),
                value_cell(scores, "win_tie", ".0f"), value_cell(scores, "same_tokens", ".1f"),
                "" if scores["median"] is None else f"{scores['median']:g}",
            ]
            for row in compared for name, scores in row["texts"].items()
        ]  # fmt: skip
        yield table([head, *lines])
    if any(row.get("needles") or row["cache_bytes"] for row in rows):
        head = ["model", *(f"needles at {int(n):,}, %" for n in lengths), *(f"cache at {int(n):,}" for n in lengths)]
        lines = [
            [
                state_cell(row), *(marked(row, "needles", share_cell(row.get("needles", {}).get(n))) for n in lengths),
                *(size_text(row["cache_bytes"][n]) if n in row["cache_bytes"] else "" for n in lengths),
            ]
            for row in rows
        ]  # fmt: skip
        yield table([head, *lines])
    yield from speed_table([row for row in rows if "speed" in row])
    yield from ruler_table([row for row in rows if "ruler" in row], lengths)
    yield from choice_table([row for row in rows if "mc" in row])
    if any(row["earlier"] for row in rows):
        yield f"{EARLIER} Measured in an earlier run of the same recipe and number of tokens."


def speed_table(rows: list[Row]) -> Iterator[str]:
    """Yield the table of decoding by batch and length, with its ratio to the original's, if any row has it."""
    if rows:
        cells = [(batch, n) for batch, lengths in rows[0]["speed"].items() for n in lengths]
        found = [[row["speed"].get(batch, {}).get(n) for batch, n in cells] for row in rows]
        lines = [
            [state_cell(row), *(marked(row, "speed", speed_cell(x)) for x in scores)]
            for row, scores in zip(rows, found)
        ]
        yield table([["decoding, tokens/s", *(f"{int(n):,} x {batch}" for batch, n in cells)], *lines])


def speed_cell(scores: Row | None) -> str:
    """Format tokens per second with the ratio to the original's."""
    return "" if scores is None else f"{scores['value']:,.0f} ({scores['ratio']:.2f}x)"


def ruler_table(rows: list[Row], lengths: list[str]) -> Iterator[str]:
    """Yield the table of RULER's tasks by length, if any row has them."""
    if rows:
        cells = [(task, n) for task in rows[0]["ruler"] for n in lengths]
        lines = [
            [state_cell(row), *(marked(row, "ruler", value_cell(row["ruler"].get(t, {}), n, ".0f")) for t, n in cells)]
            for row in rows
        ]
        yield table([["RULER", *(f"{task}, {int(n):,}" for task, n in cells)], *lines])


def choice_table(rows: list[Row]) -> Iterator[str]:
    """Yield the table of multiple-choice tasks with their average, if any row has them."""
    if rows:
        tasks = list(rows[0]["mc"])
        lines = [
            [
                state_cell(row), *(share_cell(row["mc"].get(task)) for task in tasks),
                marked(row, "mc", average_cell(row["mc"])),
            ]
            for row in rows
        ]  # fmt: skip
        yield table([["model", *(f"{task}, %" for task in tasks), "average (change)"], *lines])


def average_cell(tasks: Mapping[str, Row]) -> str:
    """Format the mean of the tasks and its change with a 95% interval, in points.

    The intervals of the tasks' paired differences are those of independent questions: half their widths add in squares.
    """
    mean = sum(scores["value"] for scores in tasks.values()) / len(tasks)
    if any("change" not in scores for scores in tasks.values()):
        return f"{mean:.1f}"
    changes = [scores["change"] for scores in tasks.values()]
    change = sum(change["value"] for change in changes) / len(changes)
    half = math.sqrt(sum(((change["high"] - change["low"]) / 2) ** 2 for change in changes)) / len(changes)
    return f"{mean:.1f} ({change:+.1f} [{change - half:.1f}, {change + half:.1f}])"


def show(rows: list[Row]) -> str:
    """Return all tables in Markdown, by model and by what they were scored on. Raises SurgeryError without rows.

    Rows with different numbers of needles share a table: every share has its interval. Of rows of the same state, for
    example with and without needles, the last one is shown.
    """
    rows = latest([row for row in rows if row["kind"] == "public"], KEYS)
    if not rows:
        raise SurgeryError("there are no rows of this command; write them with `run`")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        scoring = [row["settings"][name] for name in ("texts", "score", "window", "lengths", "greedy", "dtype")]
        groups.setdefault(str([row["model"], scoring]), []).append(row)
    parts = []
    for group in groups.values():
        first = group[0]
        about = f"{first['settings']['score']:,} tokens of each text in windows of {first['settings']['window']:,}"
        parts += [f"{first['model']}, {about}, {first['settings']['dtype']}, {first['device']}:", *model_tables(group)]
    return "\n\n".join(parts)


def main(given: list[str] | None = None) -> None:
    """Run the command `run` or `show`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="Measure the rows that the file lacks.")
    running.add_argument("--conversion", action="append", required=True, help="Conversion recipe. Repeatable.")
    add_arguments(running)
    running.set_defaults(do=lambda a: PublicModel(a).run())
    showing = commands.add_parser("show", help="Print the tables in Markdown.")
    showing.add_argument("rows", type=Path, nargs="*", help="Files of `run`. Default: the one of the repository.")
    showing.set_defaults(do=lambda a: print(show([row for path in a.rows or [ROWS] for row in read_rows(path)])))
    arguments = parser.parse_args(given)
    arguments.do(arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run` that do not say which conversions are measured."""
    add = parser.add_argument
    add("source", help="Original checkpoint: a folder, a GGUF file or a Hub id.")
    add("--calibration", type=Path, required=True, help="Calibration text.")
    add(
        "--text",
        action="append",
        required=True,
        metavar="NAME=FILE",
        help="Text to score, repeatable; needles lie in the first.",
    )
    add("--data", type=Path, required=True, help="Text file to train on.")
    add(
        "--tokens",
        type=parse_count,
        default=0,
        help="Tokens of healing and of the control, e.g. 20M. Default: no training.",
    )
    add("--healing", default="auto", help="Healing recipe with one stage. Default: %(default)s.")
    add("--tiny", action="store_true", help="Apply the `tiny` block of the training recipes.")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="Key of both training recipes. Repeatable.")
    add(
        "--convert", action="append", default=[], metavar="KEY=VALUE", help="Key of the conversion recipes. Repeatable."
    )
    add("--score", type=int, default=65536, help="Tokens of each text to score. Default: %(default)s.")
    add("--window", type=int, default=2048, help="Length of the scored windows. Default: %(default)s.")
    add("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="Lengths of needles and caches.")
    add("--samples", type=int, default=20, help="Needles at each length and depth; 0: none. Default: %(default)s.")
    add("--greedy-prompts", type=int, default=32, help="Prompts of the greedy texts. Default: %(default)s.")
    add("--greedy-tokens", type=int, default=64, help="Length of the greedy texts. Default: %(default)s.")
    add("--mc", type=Path, help="Folder with TASK.jsonl of multiple-choice tasks. Default: none.")
    add("--mc-limit", type=int, help="Questions of each task. Default: all.")
    add("--ruler", nargs="+", default=[], metavar="TASK", help="RULER's tasks to ask at --lengths. Default: none.")
    add("--ruler-samples", type=int, default=10, help="Questions of each of RULER's tasks and lengths. Default: 10.")
    add("--speed", type=int, nargs="+", default=[], metavar="LENGTH", help="Lengths at which to measure decoding.")
    add("--bits", type=int, choices=(8, 4), help="Score each conversion with its linears in 8 or 4 bits, too.")
    add("--dtype", default="float32", help="Precision of the scores. Default: %(default)s.")
    add("--seed", type=int, default=0, help="Seed of needles, prompts and training. Default: 0.")
    add("--gpus", type=int, help="Train in this number of processes, one a GPU, which share the rows of a batch.")
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add("--states", nargs="+", choices=STATES, default=STATES, help="States to measure. Default: all.")
    add("--minutes", type=float, default=math.inf, help="Begin no row that may end later. Default: no limit.")
    add("--work", type=Path, required=True, help="Folder of checkpoints and evaluations.")
    add("--out", type=Path, default=ROWS, help="JSON-lines file. Default: the one of the repository.")


if __name__ == "__main__":
    run_script(main)
