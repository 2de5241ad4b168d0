"""The commands as functions, for notebooks and scripts: `surgery.plan(..)` is `surgery plan ..`.

    import surgery

    surgery.plan("SRC", "btt-half", keep=0.75)
    surgery.convert("SRC", "btt-half", "OUT", calibration="text.txt")
    model, tokenizer = surgery.load("OUT")
    surgery.finetune("OUT", "quick", teacher="SRC", data="corpus.jsonl", out="HEALED")
    surgery.evaluate("HEALED", text="heldout.txt", compare="SRC")
    surgery.push("HEALED", "me/model", dry_run=True)

Each function returns the dict that the command prints with `--json`; notebooks and terminals display it as the command's
tables. `plan` and `convert` take recipe keys as keywords (`keep=0.75` is `--set keep=0.75`); nested keys go into
`overrides={"attention.cache": 0.5}`. Errors that the user can correct are `surgery.core.errors.SurgeryError`.
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
    """Result of a command: a dict of its data that displays as the command's tables.

    Args:
        data: what the command prints with `--json`.
        parts: makes the tables and lines to display; called at each display.
    """

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
    """Show what a recipe would replace, from the config and the tensor headers alone; loads no weights.

    Args:
        source: checkpoint, a local folder or a Hub id (org/name or org/name@revision).
        recipe: name of a shipped recipe, path of a YAML file, dict, or ConversionRecipe.
        overrides: recipe keys by dotted path, e.g. {"attention.cache": 0.5}.
        context: prompt length in tokens that the notes on speed refer to.
        revision: branch, tag or commit of the Hub repository.
        trust_remote_code: whether Python code in the checkpoint's repository may run.
        keys: top-level recipe keys, e.g. keep=0.75.
    """
    from surgery.checkpoint.outline import describe_checkpoint
    from surgery.checkpoint.source import open_checkpoint
    from surgery.planning.plan import make_plan
    from surgery.publish.speed_notes import plan_notes
    from surgery.publish.summary import plan_dict
    from surgery.publish.tables import plan_table

    opened = open_checkpoint(str(source), trust_remote_code, weights=False, revision=revision)
    data = plan_dict(make_plan(describe_checkpoint(opened, trust_remote_code), _load_recipe(recipe, overrides, keys)))
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
    """Convert a checkpoint into the folder `out`. Return the report that is stored there.

    Args:
        source, recipe, overrides, context, revision, trust_remote_code, keys: as in `plan`.
        out: folder of the converted checkpoint; must not exist unless `resume`.
        calibration: text to calibrate on, a file or a Hub data set (org/name[:config:split:column]).
        resume: continue an interrupted conversion into the same `out`.
        device: cpu, cuda, cuda:1; None: a GPU if there is one.
        seed: random seed; None: the recipe's.
        progress: progress display; None: bars on a terminal.
    """
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
    """Return (causal language model, tokenizer) of a checkpoint, converted or not.

    Other tasks load with the Auto classes of transformers after `import surgery`.

    Args:
        name: a local folder or a Hub id (org/name or org/name@revision).
        dtype: a torch dtype by name, or "auto" for that of the stored weights.
        device: the `device_map` of transformers; None: the CPU.
        revision, trust_remote_code: as in `plan`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from surgery.checkpoint.remote_code import check_code_trusted
    from surgery.checkpoint.source import open_converted_checkpoint, split_revision
    from surgery.checkpoint.tensor_names import load_checked_model

    source = open_converted_checkpoint(os.fspath(name), revision)
    check_code_trusted(source.folder, source.name, source.config, trust_remote_code)
    bare, _ = split_revision(os.fspath(name))
    commit, trust = source.revision or "main", trust_remote_code
    model = load_checked_model(
        AutoModelForCausalLM, bare, bare, dtype=dtype, device_map=device, revision=commit, trust_remote_code=trust
    )
    return model, AutoTokenizer.from_pretrained(bare, revision=commit, trust_remote_code=trust)


def inspect(converted: PathLike, *, modules: bool = False) -> CommandResult:
    """Show what a conversion replaced: parameters, multiply-accumulates per token, relative errors.

    Args:
        converted: converted checkpoint, a local folder or a Hub id.
        modules: display one row per module instead of one per role.
    """
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
    """Train a converted checkpoint to recover its quality (healing = recovery distillation). Return the run's record.

    Args:
        converted: converted checkpoint, a local folder or a Hub id.
        recipe: name of a shipped training recipe (quick, standard, long, weights-only) or path of a YAML file.
        teacher: checkpoint to distill from, the one that `converted` was made from.
        data: text to train on, a file, a folder or a Hub id; None: the recipe's.
        out: folder of the trained checkpoint, must not exist; None: `converted` + "-healed".
        tiny: apply the recipe's `tiny` block, which shortens the run to minutes on two CPU cores.
        overrides: recipe keys by dotted path, e.g. {"stages.0.tokens": 20_000_000}.
        resume: continue an interrupted run from its last training checkpoint.
        skip_bad_steps: skip steps with NaN or infinite gradients instead of stopping.
        track: tensorboard, wandb, trackio or none; None: tensorboard if it is installed.
        device, trust_remote_code, progress: as in `convert`.
    """
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
    """Evaluate a checkpoint, optionally against another one on the same samples.

    Args:
        model: checkpoint, converted or not; a local folder or a Hub id.
        suites: names of suites, see `surgery eval --list-suites`.
        compare: checkpoint to compare with, usually the original.
        out: folder for results, samples and plots; suites already finished there are not run again.
        fail_below: thresholds "name=ratio" on the score relative to `compare`'s, e.g. "ppl=1.05".
        device, trust_remote_code, progress: as in `convert`.
        dtype: float32, bfloat16, float16, or auto (that of the stored weights).
        options: fields of `surgery.eval.suite.EvalOptions`: text, tokens, length, limit, lengths, depths, tasks,
            batch_size, seed, data_root and more.
    """
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
    """Multiply structured weights out, to a dense checkpoint in the folder `out` (must not exist) with the same outputs."""
    from surgery.conversion.densify import densify as run

    result = run(str(converted), Path(out), progress=progress or RichProgress())
    return CommandResult(result, lambda: [f"{result['modules']} linears multiplied out: {out}"])


def report(converted: PathLike, *, out: PathLike | None = None, measured: PathLike | None = None) -> Path:
    """Write a report page about a conversion, one HTML file. Return its path.

    Args:
        converted: converted checkpoint, a local folder or a Hub id.
        out: the HTML file; None: report.html in `converted`.
        measured: folder written by `evaluate(out=..)`; None: eval/ in `converted` if it exists.
    """
    from surgery.publish.html.page import write_page

    return write_page(str(converted), None if out is None else Path(out), None if measured is None else Path(measured))


def push(
    converted: PathLike,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    measured: PathLike | None = None,
    message: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    licence: str | None = None,
) -> CommandResult:
    """Push a converted checkpoint to the Hub with a model card. Return the uploaded files, the card, and the URL.

    Args:
        converted: converted checkpoint, a local folder or a Hub id.
        repo: Hub repository "user/name"; created if it does not exist.
        private: create the repository as private.
        revision: branch to push to; created if it does not exist. None: main.
        license: license id of the Hub's list, e.g. "apache-2.0"; None: the source's license.
        base_model: Hub id of the original model, if it was converted from a local folder.
        measured: folder written by `evaluate(out=..)`; its table and plots are included.
        message: commit message.
        dry_run: list the files and the card, and upload nothing.
        progress: as in `convert`.
        licence: former name of `license`, still accepted.
    """
    from surgery.publish.hub.push import prepare_upload
    from surgery.publish.hub.push import push as run
    from surgery.publish.tables import upload_table

    upload = prepare_upload(
        str(converted), repo, license or licence, base_model, None if measured is None else Path(measured)
    )
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
