"""`surgery run`: plan, convert, heal, evaluate and report in one folder, continued after an interruption by the same
command.

DIR/run.json       the settings; a run with other settings is refused
DIR/texts/         with one text for everything: its first nine tenths to train on, the last tenth to measure on
DIR/plan.json      what the recipe replaces
DIR/converted/     the converted checkpoint; its surgery_report.json
DIR/healed/        with a healing recipe: the healed checkpoint
DIR/eval/          results of the last checkpoint beside the original
DIR/report.html    the page
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.core.files import atomic_write, exclusive_lock, explain_disk_errors, partial_path, read_json
from surgery.core.progress import Progress
from surgery.core.version import __version__

SETTINGS_NAME, PLAN_NAME, PAGE_NAME = "run.json", "plan.json", "report.html"
CONVERTED, HEALED, EVAL, TEXTS = "converted", "healed", "eval", "texts"
GENERATED = "generated"  # as --data: the original writes the text
HELD_OUT = 0.1  # share of a text that is kept for the measurements
SUITES = ("ppl", "needle", "speed")

Show = Callable[[list[Any]], None]


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Attributes:
        source: checkpoint to convert, a local folder or a Hub id.
        recipe: name or file of a conversion recipe; overrides: its keys, "key=value".
        heal: name or file of a healing recipe, None: no healing; heal_overrides: its keys.
        data: text to train on, and to calibrate on without `calibration`; GENERATED: the original writes the text to
            train on; calibration: text to calibrate on; text: text to measure on. A local .txt file given as data or calibration is split if `text` is None.
        suites: suites of `surgery eval`; eval_options: fields of EvalOptions.
        tiny: apply the healing recipe's `tiny` block.
        device: where models run; None: a GPU if there is one. gpus: number of GPUs that heal; None: one.
    """

    source: str
    recipe: str
    overrides: tuple[str, ...] = ()
    heal: str | None = None
    heal_overrides: tuple[str, ...] = ()
    data: str | None = None
    calibration: str | None = None
    text: str | None = None
    suites: tuple[str, ...] = SUITES
    eval_options: tuple[tuple[str, Any], ...] = ()
    tiny: bool = False
    device: str | None = None
    gpus: int | None = None
    trust_remote_code: bool = False

    @property
    def given_data(self) -> str | None:
        """The text of `data`, None if the original writes it."""
        return self.data if self.data != GENERATED else None


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        folder: the run's folder. model: folder of the last checkpoint, healed or converted.
        plan: what the recipe replaces. report: the last checkpoint's surgery_report.json. results: of `surgery eval`.
        verdict: one sentence of measured values. page: the HTML page.
    """

    folder: Path
    model: Path
    plan: dict[str, Any]
    report: dict[str, Any]
    results: dict[str, Any]
    verdict: str
    page: Path

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        paths = {name: str(getattr(self, name)) for name in ("folder", "model", "page")}
        return {**paths, "verdict": self.verdict, "plan": self.plan, "report": self.report, "results": self.results}


def run(options: RunOptions, out: Path, progress: Progress | None = None, show: Show | None = None) -> RunResult:
    """Do all steps that `out` does not hold yet and return the result.

    out: folder of the run; it is created, and continued if it holds a run with the same settings. show: prints tables
    and lines. Raises SurgeryError, before anything is computed, for other settings, missing texts and mistakes in the
    recipes.
    """
    return _Run(options, out, progress or Progress(), show or (lambda parts: None)).run()


class _Run:
    def __init__(self, options: RunOptions, out: Path, progress: Progress, show: Show):
        self.options, self.out, self.progress, self.show = options, out, progress, show
        self.converted, self.healed = out / CONVERTED, out / HEALED

    def run(self) -> RunResult:
        from surgery.eval.suite import find_suite

        for name in self.options.suites:
            find_suite(name)
        if self.out.exists() and not self.out.is_dir():
            raise SurgeryError(f"--out {self.out} is a file. Choose a folder for the run, which is created")
        planned = self._plan()
        _check_texts(self.options)
        settings = self._settings(planned)
        self._check_held_out()
        with explain_disk_errors(self.out, "run the same command again"):
            _open_folder(self.out, settings)
            with exclusive_lock(self.out, "run"):
                train, held_out = _split_texts(self.options, self.out / TEXTS)
                (self.out / PLAN_NAME).write_text(json.dumps(planned, indent=2), encoding="utf-8")
                self._step("convert", self.converted, lambda: self._convert(train))
                if self.options.heal is not None:
                    self._step("heal", self.healed, lambda: self._heal(train))
                return self._measure(planned, held_out)

    def _generate(self, held_out: str) -> None:
        """Continue three prompts with both models, unless it was done; the prompts are from the text to measure on, if
        it is a file.
        """
        from surgery.calibration.data import decode_text
        from surgery.core.device import choose_device
        from surgery.eval.generations import FILE_NAME, pick_prompts, write_generations

        path = Path(held_out)
        if path.suffix != ".txt" or not path.is_file() or (self.out / EVAL / FILE_NAME).is_file():
            return
        prompts = pick_prompts(decode_text(path)[0])
        device, trust = choose_device(self.options.device), self.options.trust_remote_code
        self.progress.say("continuing three prompts with the original and the result")
        write_generations(self.options.source, str(self.model), prompts, self.out / EVAL, device, trust=trust)

    @property
    def model(self) -> Path:
        """Folder of the last checkpoint."""
        return self.converted if self.options.heal is None else self.healed

    def _step(self, name: str, result: Path, work: Callable[[], None]) -> None:
        """Do a step unless its result exists: a finished checkpoint is renamed into place as a whole."""
        if result.exists():
            self.show([f"{name}: already done, {result}"])
        else:
            self.show([f"\n[bold]{name}[/]"])
            work()

    def _plan(self) -> dict[str, Any]:
        from surgery.checkpoint.outline import describe_checkpoint
        from surgery.checkpoint.source import open_checkpoint
        from surgery.conversion.estimation.estimate import estimate_conversion
        from surgery.planning.plan import make_plan
        from surgery.planning.recipe import load_recipe
        from surgery.publish.summary import plan_dict
        from surgery.publish.tables import plan_table
        from surgery.training.auto_recipe import AUTO, read_facts

        trust = self.options.trust_remote_code
        opened = open_checkpoint(self.options.source, trust, weights=False)
        described = describe_checkpoint(opened, trust)
        plan = make_plan(described, load_recipe(self.options.recipe, list(self.options.overrides)))
        if self.options.heal == AUTO:
            self.facts = read_facts(opened, len(list(plan.replaced_targets())), len(list(plan.attention_after()[0])))
        planned = plan_dict(plan, estimate=estimate_conversion(described, plan) if plan.recipe.epochs.is_on else None)
        self.show(["[bold]plan[/]", *plan_table(planned)])
        return planned

    def _settings(self, planned: dict[str, Any]) -> dict[str, Any]:
        """Return what a continued run must have in common: sources and recipes, and the contents of local texts."""
        from surgery.core.digests import content_digest
        from surgery.training.distributed.launch import check_gpus
        from surgery.training.recipe import stage_data_config

        options = self.options
        check_gpus(options.gpus, options.device)
        heal = None
        if options.heal is not None:
            recipe, reasons = self._healing_recipe(options.data)
            self.show(["", *reasons] if reasons else [])
            if any(stage_data_config(recipe, stage) is None for stage in recipe.stages):
                raise SurgeryError(
                    "--heal trains on a text, and there is none. Give --data: a file, a folder or a Hub id"
                )
            heal = recipe.model_dump(mode="json", exclude={"description"})
        paths = {name: getattr(options, name) for name in ("data", "calibration", "text")}
        local = {**paths, "data": options.given_data}
        digests = {name: content_digest(Path(p)) for name, p in local.items() if p is not None and Path(p).exists()}
        _check_measured(options, digests)
        return {
            "version": __version__, "source": options.source, "recipe": planned["recipe"], "heal": heal, **paths, "digests": digests,
            "suites": list(options.suites), "eval_options": dict(options.eval_options),
        }  # fmt: skip

    def _check_held_out(self) -> None:
        """Raise SurgeryError if the text to measure on is a file too short for two windows, which would show only after
        the training.
        """
        from surgery.calibration.data import decode_text, load_tokenizer, text_windows
        from surgery.checkpoint.source import open_checkpoint
        from surgery.eval.suite import EvalOptions

        single = _single_text(self.options) if self.options.text is None else None
        path = Path(single or self.options.text or "")
        if "ppl" not in self.options.suites or path.suffix != ".txt" or not path.is_file():
            return
        text = decode_text(path)[0]
        held_out = split_text(text, str(path))[1] if single else text
        folder = open_checkpoint(self.options.source, self.options.trust_remote_code, weights=False).folder
        asked = EvalOptions(**dict(self.options.eval_options))
        where = f"the last tenth of {path}" if single else str(path)
        tokenizer = load_tokenizer(folder, self.options.trust_remote_code)
        text_windows(iter([held_out]), tokenizer, asked.tokens, asked.length, where, option="--length ")

    def _convert(self, train: str | None) -> None:
        from surgery.conversion.convert import convert
        from surgery.planning.recipe import load_recipe
        from surgery.publish.summary import inspect
        from surgery.publish.tables import inspect_table

        chosen = self._part(self.options.calibration or self.options.given_data, train)
        overrides = [*self.options.overrides, *([f"calibration={json.dumps(chosen)}"] if chosen is not None else [])]
        convert(
            self.options.source, load_recipe(self.options.recipe, overrides), self.converted,
            device=self.options.device, resume=partial_path(self.converted).exists(),
            trust_remote_code=self.options.trust_remote_code, progress=self.progress,
        )  # fmt: skip
        self.show(inspect_table(inspect(str(self.converted))))

    def _part(self, text: str | None, train: str | None) -> str | None:
        """Return a text, or its part to train on if it is the one that was split."""
        is_split = self.options.text is None and text == _single_text(self.options)
        return train if is_split else text

    def _healing_recipe(self, train: str | None) -> tuple[Any, list[str]]:
        """Return the recipe, and of `auto` the lines that say what it chose."""
        from surgery.training.auto_recipe import load_recipe_for
        from surgery.training.data.recipe import data_sources

        path = self._part(self.options.data, train)
        data = [] if path is None else [f"data.sources={json.dumps(data_sources(path))}"]
        assert self.options.heal is not None
        overrides = [*self.options.heal_overrides, *data]
        return load_recipe_for(self.options.heal, lambda: self.facts, overrides, self.options.tiny)

    def _heal(self, train: str | None) -> None:
        from surgery.training.data.prefetch import limit_tokenizer_threads
        from surgery.training.finetune import finetune
        from surgery.training.logging import last_line, result_table

        limit_tokenizer_threads()
        record = finetune(
            str(self.converted), self._healing_recipe(train)[0], self.healed, teacher=self.options.source,
            resume=partial_path(self.healed).exists(), device=self.options.device,
            gpus=self.options.gpus, trust_remote_code=self.options.trust_remote_code, progress=self.progress,
            show=self.show,
        )  # fmt: skip
        self.show([*result_table(record), last_line(record, "healed checkpoint")])

    def _measure(self, planned: dict[str, Any], held_out: str) -> RunResult:
        from surgery.eval.results.tables import eval_table
        from surgery.eval.run import evaluate
        from surgery.eval.suite import EvalOptions
        from surgery.publish.html.page import write_page
        from surgery.publish.summary import inspect
        from surgery.publish.verdict import verdict

        self.show(["\n[bold]evaluate[/]"])
        done = evaluate(
            str(self.model), list(self.options.suites), EvalOptions(text=held_out, **dict(self.options.eval_options)),
            compare=self.options.source, out=self.out / EVAL, device=self.options.device,
            trust_remote_code=self.options.trust_remote_code, progress=self.progress,
        )  # fmt: skip
        self.show(eval_table(done))
        self._generate(held_out)
        page = write_page(str(self.model), self.out / PAGE_NAME, self.out / EVAL)
        report, results = inspect(str(self.model)), json.loads(json.dumps(done.to_dict(), default=str))
        sentence = verdict(report, results)
        self.show(["", f"[bold]{sentence}[/]", f"checkpoint: {self.model}", f"page: {page}"])
        return RunResult(self.out, self.model, planned, report, results, sentence, page)


def _check_texts(options: RunOptions) -> None:
    """Raise SurgeryError if there is no text to measure on, or none to train on."""
    if options.heal is None and options.heal_overrides:
        raise SurgeryError(
            f"--heal-set {options.heal_overrides[0]} changes a healing recipe, and there is none. Give --heal RECIPE"
        )
    if options.data == GENERATED and options.heal is None:
        raise SurgeryError("--data generated is text to train on, and nothing is trained. Give --heal RECIPE")
    from surgery.calibration.data import CALIBRATION_SUFFIXES, HUB_DATASET

    for name in ("data", "calibration", "text"):
        text = getattr(options, name)
        if text is None or (name == "data" and text == GENERATED) or Path(text).exists():
            continue
        if not HUB_DATASET.fullmatch(text) or Path(text).suffix in CALIBRATION_SUFFIXES:
            raise SurgeryError(
                f"--{name} {text}: there is no such file or folder. Give a local file, or a Hub data set as org/name"
            )
    if options.text is None and _single_text(options) is None:
        text = options.given_data or options.calibration
        why = "no text was given" if text is None else f"{text} is not a local .txt file, which could be split"
        raise SurgeryError(f"surgery run measures the result on a text, and {why}. Give --text FILE")


def _check_measured(options: RunOptions, digests: dict[str, str]) -> None:
    """Raise SurgeryError if the text to measure on is one that the model is fitted to. digests: of the local texts, by
    option.
    """
    if options.text is None:
        return
    for name in ("data", "calibration"):
        if options.text == getattr(options, name) or (name in digests and digests[name] == digests.get("text")):
            raise SurgeryError(
                f"--text {options.text} is also the text to train or calibrate on, so that the measurements would "
                "flatter. Give another text, "
                "or leave out --text: then the last tenth of a .txt file is kept for them"
            )


def _single_text(options: RunOptions) -> str | None:
    """Return the local .txt file that is split into a part to train on and a part to measure on; None without one."""
    text = options.given_data or options.calibration
    return text if text is not None and text.endswith(".txt") and Path(text).is_file() else None


def _split_texts(options: RunOptions, folder: Path) -> tuple[str | None, str]:
    """Return (text to train and calibrate on or None, text to measure on); writes both parts of a text that is
    split.
    """
    train = options.given_data or options.calibration
    if options.text is not None:
        return train, options.text
    single = _single_text(options)
    assert single is not None
    parts = {name: folder / f"{name}.txt" for name in ("train", "heldout")}
    if not all(path.is_file() for path in parts.values()):
        folder.mkdir(exist_ok=True)
        from surgery.calibration.data import decode_text

        for name, content in zip(parts, split_text(decode_text(Path(single))[0], single)):
            with atomic_write(parts[name], "w") as file:
                file.write(content)
    return str(parts["train"]), str(parts["heldout"])


def split_text(text: str, name: str) -> tuple[str, str]:
    """Return the first nine tenths of a text and the rest, cut at the end of a line, or of a word if there is no line
    end.

    Raises SurgeryError if a part would be empty. name: of the file, for the message.
    """
    middle = int(len(text) * (1 - HELD_OUT))
    cuts = [text.find(mark, middle) + len(mark) for mark in ("\n", " ") if text.find(mark, middle) >= 0]
    cut = next((cut for cut in cuts if text[cut:].strip()), middle)
    if not text[:cut].strip() or not text[cut:].strip():
        raise SurgeryError(f"{name} has {len(text)} characters, too few to keep a part for measuring. Give --text FILE")
    return text[:cut], text[cut:]


def _open_folder(out: Path, settings: dict[str, Any]) -> None:
    """Create the folder of a run with its settings.

    Raises SurgeryError for a folder of something else or of another run.
    """
    path, plain = out / SETTINGS_NAME, json.loads(json.dumps(settings))
    if not out.exists():
        out.mkdir()
    if not path.is_file():
        if any(out.iterdir()):
            raise SurgeryError(f"{out} exists and holds no run of surgery. Choose another --out")
        with atomic_write(path, "w") as file:
            json.dump(plain, file, indent=2)
        return
    before = read_json(path)
    if isinstance(before, dict) and isinstance(before.get("heal"), dict):
        before["heal"].pop("description", None)  # versions up to 0.2 stored it
    different = [key for key in plain if not isinstance(before, dict) or before.get(key) != plain[key]]
    if different:
        raise SurgeryError(
            f"{out} holds a run with other settings ({', '.join(different)} differ). Repeat its command, or choose "
            "another --out"
        )


def parse_suites(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return names of suites, each of which may be several separated by commas; SUITES without names."""
    suites = tuple(word.strip() for raw in names or () for word in raw.split(",") if word.strip())
    return suites or SUITES
