"""The commands as functions, for notebooks and scripts: `surgery.plan(..)` is `surgery plan ..`.

    import surgery

    surgery.plan("SRC", "btt-half", keep=0.75)
    surgery.convert("SRC", "btt-half", "OUT", calibration="text.txt")
    model, tokenizer = surgery.load("OUT")
    surgery.finetune("OUT", "quick", teacher="SRC", data="corpus.jsonl", out="HEALED")
    surgery.evaluate("HEALED", text="heldout.txt", compare="SRC")
    surgery.push("HEALED", "me/model", dry_run=True)

What comes back is what `--json` prints, a dict, and a notebook or a terminal shows it as the table of the command.
Keywords that a function does not know are keys of the recipe (`keep=0.75` is `--set keep=0.75`); those in the depth of
it are given as `overrides={"attention.cache": 0.5}`. Errors are `surgery.core.errors.SurgeryError`.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surgery.core.progress import Progress, RichProgress

PathLike = str | os.PathLike[str]
CONSOLE_WIDTH = 140


class CommandResult(dict[str, Any]):
    """Data of a command, shown as its tables."""

    def __init__(self, data: Mapping[str, Any], parts: Callable[[], Sequence[Any]]):
        super().__init__(data)
        self._parts = parts

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(width=CONSOLE_WIDTH, file=io.StringIO(), force_jupyter=False)
        console.print(*self._parts(), sep="\n", soft_wrap=True)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        from surgery.publish.tables import to_html

        return to_html(self._parts())


def plan(
    source: PathLike,
    recipe: Any,
    *,
    overrides: Mapping[str, Any] | None = None,
    context: int = 4096,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **keys: Any,
) -> CommandResult:
    """What a recipe would cut, from the config and the tensor headers alone.

    recipe: name of a shipped one, path of a YAML file, or a dict; context: tokens that notes on speed are for.
    """
    from surgery.checkpoint.meta_model import MetaModel
    from surgery.checkpoint.source import open_checkpoint
    from surgery.planning.plan import make_plan
    from surgery.publish.speed_notes import plan_notes
    from surgery.publish.summary import plan_dict
    from surgery.publish.tables import plan_table

    opened = open_checkpoint(str(source), trust_remote_code, weights=False, revision=revision)
    data = plan_dict(make_plan(MetaModel(opened, trust_remote_code), _load_recipe(recipe, overrides, keys)))
    data["speed"] = plan_notes(data, context)
    return CommandResult(data, lambda: [*plan_table(data), *data["speed"]])


def convert(
    source: PathLike,
    recipe: Any,
    out: PathLike,
    *,
    calibration: PathLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    device: str | None = None,
    seed: int | None = None,
    context: int = 4096,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **keys: Any,
) -> CommandResult:
    """Convert a checkpoint into the folder `out`; the report, as it lies there."""
    from surgery.conversion.convert import convert as run
    from surgery.publish.speed_notes import report_notes
    from surgery.publish.tables import inspect_table

    given = {"calibration": None if calibration is None else os.fspath(calibration), "seed": seed}
    keys |= {key: value for key, value in given.items() if value is not None}
    report = run(
        str(source),
        _load_recipe(recipe, overrides, keys),
        Path(out),
        device=device,
        resume=resume,
        trust_remote_code=trust_remote_code,
        revision=revision,
        progress=progress or RichProgress(),
    )
    return CommandResult(report, lambda: [*inspect_table(report), *report_notes(report, context)])


def load(
    name: PathLike,
    *,
    dtype: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a checkpoint, converted or not, for what it generates; any other Auto class does as well."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from surgery.checkpoint.remote_code import refuse_code
    from surgery.checkpoint.source import open_converted_checkpoint, split_revision
    from surgery.checkpoint.tensor_names import load_complete

    source = open_converted_checkpoint(os.fspath(name), revision)
    refuse_code(source.folder, source.name, source.config, trust_remote_code)
    bare, _ = split_revision(os.fspath(name))
    commit, trust = source.revision or "main", trust_remote_code
    model = load_complete(
        AutoModelForCausalLM, bare, bare, dtype=dtype, device_map=device, revision=commit, trust_remote_code=trust
    )
    return model, AutoTokenizer.from_pretrained(bare, revision=commit, trust_remote_code=trust)


def inspect(converted: PathLike, *, modules: bool = False) -> CommandResult:
    """What was replaced in a converted checkpoint; modules: shown with a row for each."""
    from surgery.publish.speed_notes import report_notes
    from surgery.publish.summary import inspect as run
    from surgery.publish.tables import inspect_table, module_table

    report = run(str(converted))
    table = module_table if modules else inspect_table
    return CommandResult(report, lambda: [*table(report), *report_notes(report)])


def finetune(
    converted: PathLike,
    recipe: str = "standard",
    *,
    teacher: PathLike | None = None,
    data: PathLike | None = None,
    out: PathLike | None = None,
    tiny: bool = False,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    skip_bad_steps: bool = False,
    track: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> CommandResult:
    """Heal a converted checkpoint by training; the record of the run."""
    from surgery.training.finetune import finetune as run
    from surgery.training.logging import result_table
    from surgery.training.recipe import load_healing_recipe

    given = {**({"data.sources": [{"path": os.fspath(data)}]} if data is not None else {}), **(overrides or {})}
    record = run(
        str(converted),
        load_healing_recipe(recipe, _to_overrides(given), tiny),
        None if out is None else Path(out),
        teacher=None if teacher is None else str(teacher),
        resume=resume,
        skip_bad_steps=skip_bad_steps,
        track=track,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress or RichProgress(),
    )
    return CommandResult(record, lambda: [*result_table(record), f"healed checkpoint: {record['out']}"])


def evaluate(
    model: PathLike,
    suites: Sequence[str] = ("ppl",),
    *,
    compare: PathLike | None = None,
    out: PathLike | None = None,
    fail_below: Sequence[str] = (),
    device: str | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> CommandResult:
    """Measure a checkpoint, beside the original if `compare` names it. options: of `surgery.eval.suite.EvalOptions`
    (text, tokens, length, limit, lengths, depths, tasks, batch_size, seed, data_root ..)."""
    from surgery.core.errors import SurgeryError, suggestion
    from surgery.eval.results.tables import eval_table
    from surgery.eval.run import evaluate as run
    from surgery.eval.suite import EvalOptions

    for unknown in set(options) - set(EvalOptions.model_fields):
        raise SurgeryError(f"evaluate has no option {unknown!r}{suggestion(unknown, EvalOptions.model_fields)}")
    done = run(
        str(model),
        list(suites),
        EvalOptions(**options),
        compare=None if compare is None else str(compare),
        out=None if out is None else Path(out),
        fail_below=fail_below,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        progress=progress or RichProgress(),
    )
    return CommandResult(done.to_dict(), lambda: eval_table(done))


def densify(converted: PathLike, out: PathLike, *, progress: Progress | None = None) -> CommandResult:
    """Structured linears multiplied out, to an ordinary checkpoint in `out`."""
    from surgery.conversion.densify import densify as run

    result = run(str(converted), Path(out), progress=progress or RichProgress())
    return CommandResult(result, lambda: [f"{result['modules']} linears multiplied out: {out}"])


def report(converted: PathLike, *, out: PathLike | None = None, measured: PathLike | None = None) -> Path:
    """The page about a conversion, one HTML file; where it was written. measured: a folder of an evaluation."""
    from surgery.publish.html.page import write_page

    return write_page(str(converted), None if out is None else Path(out), None if measured is None else Path(measured))


def push(
    converted: PathLike,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    licence: str | None = None,
    base_model: str | None = None,
    measured: PathLike | None = None,
    message: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CommandResult:
    """A converted checkpoint to the Hub; with dry_run what would go up, and under "card" its model card."""
    from surgery.publish.hub.push import prepare_upload
    from surgery.publish.hub.push import push as run
    from surgery.publish.tables import upload_table

    upload = prepare_upload(str(converted), repo, licence, base_model, None if measured is None else Path(measured))
    result = {"dry_run": dry_run, **upload.to_dict(), "card": upload.card}
    if not dry_run:
        result |= run(upload, private, revision, message, progress or RichProgress())
    return CommandResult(result, lambda: upload_table(result))


def _load_recipe(recipe: Any, overrides: Mapping[str, Any] | None, keys: Mapping[str, Any]) -> Any:
    from surgery.planning.recipe import ConversionRecipe, load_recipe, parse_recipe

    settings = _to_overrides({**keys, **(overrides or {})})
    if isinstance(recipe, ConversionRecipe):
        recipe = recipe.model_dump(mode="json", exclude_unset=True)
    if isinstance(recipe, Mapping):
        return parse_recipe(json.dumps(recipe), "(given as a dict)", settings)
    return load_recipe(os.fspath(recipe), settings)


def _to_overrides(given: Mapping[str, Any]) -> list[str]:
    """{"attention.cache": 0.5} -> ["attention.cache=0.5"], which is YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]
