"""The commands as functions, for notebooks and scripts: `surgery.plan(..)` is `surgery plan ..`.

    import surgery

    surgery.plan("SRC", "btt-half", keep=0.75)
    surgery.convert("SRC", "btt-half", "OUT", calibration="text.txt")
    model, tokenizer = surgery.load("OUT")
    surgery.finetune("OUT", "linears", teacher="SRC", data="corpus.jsonl", out="HEALED")
    surgery.evaluate("HEALED", text="heldout.txt", compare="SRC")
    surgery.push("HEALED", "me/model", dry_run=True)

A model in memory is converted in place, and saved by its own method:

    model = surgery.apply(model, "btt-half", calibration=texts, tokenizer=tokenizer)
    model.save_pretrained("OUT")

`plan`, `inspect`, `evaluate`, `quantize` and `densify` also take a model in memory. Each function returns the dict that
the command prints with `--json`; notebooks and terminals display it as the command's tables. `plan`, `apply` and
`convert` take recipe keys as keywords (`keep=0.75` is `--set keep=0.75`); nested keys go into
`overrides={"attention.cache": 0.5}`. Errors that the user can correct are `surgery.core.errors.SurgeryError`.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard, TypeVar, overload

from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress, QuietProgress, RichProgress

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from surgery.checkpoint.outline import ModelDescription
    from surgery.speculation.drafter import Drafter
    from surgery.workflow import RunResult

PathLike = str | os.PathLike[str]
LiveModel = TypeVar("LiveModel", bound="nn.Module")
CONSOLE_WIDTH = 140


class EvalKeywords(TypedDict, total=False):
    """Types of the keywords of `evaluate` that are fields of EvalOptions, for editors and type checkers.

    A test holds them equal to it.
    """

    text: str | None
    limit: int | None
    tokens: int
    length: int
    lengths: str | Sequence[int | str]
    depths: str | Sequence[float]
    tasks: str | Sequence[str]
    batch_size: int | Literal["auto"]
    seed: int
    data_root: PathLike | None
    data: Mapping[str, PathLike] | Sequence[str]
    num_fewshot: int | None
    gen_kwargs: str | Mapping[str, Any]
    metadata: str | Mapping[str, Any]
    include_path: PathLike | None
    apply_chat_template: bool
    samples: str | Mapping[str, Sequence[int]]
    use_cache: PathLike | None
    prompts: Literal["based", "jrt"]
    fill: Literal["exact", "ruler"]
    pairs: str | Sequence[int]
    greedy_prompts: int
    greedy_tokens: int
    tolerance: float


class CommandResult(dict[str, Any]):
    """Result of a command: a dict of its data that displays as the command's tables.

    Args:
        data: what the command prints with `--json`.
        parts: makes the tables and lines to display; called at each display.
    """

    def __init__(self, data: Mapping[str, Any], parts: Callable[[], Sequence[Any]]):
        super().__init__(data)
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle stores: a plain dict, because the tables cannot be pickled."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(width=CONSOLE_WIDTH, file=io.StringIO(), force_jupyter=False)
        console.print(*self._parts(), sep="\n", soft_wrap=True)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        from surgery.publish.tables import to_html

        return to_html(self._parts())


def recipes(*, healing: bool = False, every: bool = False) -> dict[str, dict[str, str]]:
    """Return name -> {"description", "aim", "cost"} of the conversion recipes that most people need.

    Args:
        healing: those of `finetune` instead of those of `convert`; they have a description only.
        every: also the other conversion recipes, which have a description only (`surgery recipes --all`).
    """
    from surgery.planning.shipped import read_recipes

    return read_recipes(healing, every)


def plan(
    source: PathLike | nn.Module,
    recipe: Any,
    *,
    overrides: Mapping[str, Any] | None = None,
    context: int | None = None,
    measured: PathLike | None = None,
    device: str | None = None,
    processes: int = 1,
    calibrated: bool = True,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **keys: Any,
) -> CommandResult:
    """Show what a recipe would replace, from the config and the tensor headers alone; loads no weights.

    Args:
        source: checkpoint, a local folder, a GGUF file, or a Hub id (org/name or org/name@revision); or a model in
            memory.
        recipe: name of a shipped recipe, path of a YAML file, dict, or ConversionRecipe.
        overrides: recipe keys by dotted path, e.g. {"attention.cache": 0.5}.
        context: length in tokens of a sequence whose caches are shown, and that notes on speed refer to; None: caches
            at 1,024, 8,192 and 65,536 tokens, speed at 4,096.
        measured: file of `surgery bench linear --out`, from which the time of the linears is predicted; None: the times
            that are included.
        device: estimate time and memory for this device: "cpu", "h200", or None for the kind of this machine. Of a
            transformers model in memory, the conversion of its checkpoint by `convert`; none of another module.
        processes: how many processes share the estimated conversion.
        calibrated: whether the estimated conversion has a calibration text, of the recipe's `tokens`.
        revision: branch, tag or commit of the Hub repository.
        trust_remote_code: whether Python code in the checkpoint's repository may run.
        keys: top-level recipe keys, e.g. keep=0.75.
    """
    from surgery.checkpoint.outline import describe_checkpoint
    from surgery.checkpoint.source import open_checkpoint
    from surgery.conversion.estimation.estimate import estimate_conversion, estimate_lines
    from surgery.core.device import choose_device
    from surgery.planning.plan import make_plan
    from surgery.planning.speed import named_table
    from surgery.publish.speed_notes import notes_for_device, plan_notes, predict_linears, predicted_lines
    from surgery.publish.summary import plan_dict
    from surgery.publish.tables import plan_table

    settings = _load_recipe(recipe, overrides, keys)
    if not calibrated:
        from surgery.conversion.preflight import check_needs_no_calibration

        check_needs_no_calibration(settings, "Leave out calibrated=False")
    if _is_module(source):
        from surgery.conversion.live_source import LiveSource

        live = LiveSource(source)
        copied = live.open()
        planned = live.plan(settings)
        described: ModelDescription | None = None if live.prefix else copied
    else:
        name = _checkpoint_name(source, "plan")
        opened = open_checkpoint(name, trust_remote_code, weights=False, revision=revision)
        if settings.stock is not None:
            from surgery.planning.stock import plan_stock

            stock = plan_stock(opened, settings, trust_remote_code)
            return CommandResult(stock.to_dict(), stock.lines)
        described = describe_checkpoint(opened, trust_remote_code)
        live, planned = None, make_plan(described, settings)
    estimate = None
    if described is not None:
        estimate = estimate_conversion(
            described, planned, device=device, processes=processes, calibrated=calibrated, context=context
        )
    data = plan_dict(planned, context, estimate)
    if live is not None:
        for target in data["targets"]:
            target["name"] = live.public_path(target["name"])
    if estimate is not None:
        data["estimate"] = estimate
    table = named_table(settings, None if measured is None else Path(measured))
    data["speed"], data["linear_times"] = plan_notes(data, context), predict_linears(data, context, table)
    speed = [*predicted_lines(data["linear_times"]), *data["speed"]]
    where = data["estimate"]["device"] if "estimate" in data else choose_device(None).type
    speed = notes_for_device(speed, where, asked=table is not None)
    estimated = estimate_lines(data["estimate"]) if "estimate" in data else []
    return CommandResult(data, lambda: [*plan_table(data), *estimated, *speed])


def apply(
    model: LiveModel,
    recipe: Any,
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    overrides: Mapping[str, Any] | None = None,
    device: str | None = None,
    seed: int | None = None,
    scratch: PathLike | None = None,
    progress: Progress | None = None,
    **keys: Any,
) -> LiveModel:
    """Convert a model in memory, in place, and return it. `model.surgery_report` is the report.

    The model may be any of transformers, or another module, whose nn.Linear are then matched by path. The result has
    the same bits as that of `convert` on the saved model, with the same inputs and device.
    `model.save_pretrained("OUT")` writes the folder that `convert` writes. Parts that are not replaced keep their
    tensors, hooks, training mode, requires_grad, device and dtype; replaced linears take these over. After an error the
    model is as before.

    Args:
        model: the model; its weights must lie on one device.
        recipe, overrides, keys: as in `plan`.
        calibration: inputs to calibrate on: a list of texts, a datasets.Dataset, batches of inputs (dicts of tensors, a
            DataLoader), the path or Hub id of a text as in `convert`, or a function. A function gets the model; it
            returns one of the former, or runs the model on its own inputs, which are recorded. None: the recipe's, else
            the conversion is data-free.
        tokenizer: the model's tokenizer, for texts; it is saved with the model.
        device: where layers run, cpu, cuda, cuda:1; None: where the weights are.
        seed: random seed; None: the recipe's.
        scratch: folder of temporary files (curvature, hidden states); None: the system's.
        progress: progress display; None: bars on a terminal.
    """
    from surgery.conversion.apply import apply as run
    from surgery.modeling.live import check_is_module

    check_is_module(model, "apply")
    keys |= {} if seed is None else {"seed": seed}
    return run(
        model,
        _load_recipe(recipe, overrides, keys),
        calibration,
        tokenizer=tokenizer,
        device=device,
        scratch=None if scratch is None else Path(scratch),
        progress=progress or RichProgress(),
    )


def convert(
    source: PathLike,
    recipe: Any,
    out: PathLike,
    *,
    calibration: PathLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    context: int = 4096,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
    progress: Progress | None = None,
    **keys: Any,
) -> CommandResult:
    """Convert a checkpoint into the folder `out`. Return the report that is stored there.

    Args:
        source, recipe, overrides, revision, trust_remote_code, keys: as in `plan`.
        context: prompt length in tokens that the notes on speed refer to.
        out: folder of the converted checkpoint, which must not exist.
        calibration: text to calibrate on, a file or a Hub data set (org/name[:config:split:column]).
        resume: continue an interrupted conversion into the same `out`.
        overwrite: replace the result of an earlier conversion in `out`, or an interrupted one, once the new one is
            complete. A folder with any other file, or with a changed one, is refused.
        dtype: bfloat16, float16 or float32, in which the result is stored; the source's weights are rounded as they are
            read. None: as the source stores them.
        device: cpu, cuda, cuda:1; None: a GPU if there is one.
        seed: random seed; None: the recipe's.
        quiet: print warnings only.
        progress: progress display; None: bars on a terminal, or warnings only with `quiet`.
    """
    from surgery.conversion.convert import convert as run

    name = _checkpoint_name(source, "convert", "surgery.apply(model, recipe), which converts it in place")
    if calibration is not None and not isinstance(calibration, (str, os.PathLike)):
        raise SurgeryError(
            f"surgery.convert takes the path or Hub id of a calibration text (got a {type(calibration).__name__}). "
            "Write the texts to a "
            "file, or use surgery.apply(model, recipe, calibration=texts) on a model in memory"
        )
    keywords = {"calibration": None if calibration is None else os.fspath(calibration), "seed": seed}
    keys |= {key: value for key, value in keywords.items() if value is not None}
    report = run(
        name,
        _load_recipe(recipe, overrides, keys),
        Path(out),
        device=device,
        resume=resume,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        revision=revision,
        dtype=dtype,
        progress=progress or (QuietProgress() if quiet else RichProgress()),
    )
    return CommandResult(report, lambda: _conversion_tables(out, context))


def search(
    source: PathLike,
    out: PathLike,
    *,
    max_bytes: str | None = None,
    max_parameters: str | None = None,
    max_cache_bytes: str | None = None,
    max_decode_ms: str | None = None,
    max_prefill_ms: str | None = None,
    at: int = 4096,
    on: str | None = None,
    measured: PathLike | None = None,
    calibration: PathLike | Sequence[PathLike] | None = None,
    tokens: int | None = None,
    length: int | None = None,
    points: int = 8,
    bits: Sequence[int] = (),
    only: str | None = None,
    healing: bool = True,
    check: bool = True,
    gains: PathLike | None = None,
    seed: int | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
    progress: Progress | None = None,
) -> CommandResult:
    """Choose a structure for every part of every layer so that the model loses least within limits. Return the front.

    Args:
        source, revision, trust_remote_code: as in `plan`.
        out: folder of the table, the front and the recipes; a search that was begun there goes on.
        max_bytes, max_parameters, max_cache_bytes, max_decode_ms, max_prefill_ms: limits, such as "60%" of the original,
            "80MB", "80M" or "8.5"; None: no limit. At least one is given.
        at: tokens of the sequence whose cache and times count.
        on: device whose times count, such as "h200"; None: the first one with an included table.
        measured: file of `bench("linear", out=..)` with times of linears, in place of the included ones.
        calibration: text to measure on, as in `convert`; a list mixes texts in equal parts.
        device, seed, quiet, progress: as in `convert`.
        tokens, length: how much of the text is read, and in windows of how many tokens; None: a recipe's default.
        points: for how many more values of the first limit the front is solved.
        bits: in which parts of linears may be stored too, 8 and 4; see `quantize(rules=..)`.
        only: words of kinds of choices, comma-separated, such as "mlp,-btt"; None: all kinds.
        healing: whether to predict the loss after healing, or that of the conversion itself.
        check: whether to measure each point of the front as a whole, and to choose by that.
        gains: file of what healing gives back; None: the values included.
    """
    from surgery.budget.search import SearchSettings
    from surgery.budget.search import search as run
    from surgery.budget.summary import search_lines
    from surgery.core.files import explain_disk_errors

    given = {"bytes": max_bytes, "parameters": max_parameters, "cache": max_cache_bytes}
    given |= {"decode": max_decode_ms, "prefill": max_prefill_ms}
    texts = [calibration] if isinstance(calibration, (str, os.PathLike)) else calibration or ()
    names = [os.fspath(text) for text in texts]
    settings = SearchSettings(
        calibration=names[0] if len(names) == 1 else names or None,
        tokens=tokens,
        length=length,
        seed=seed,
        at=at,
        points=points,
        bits=tuple(bits),
        only=only,
        healing=healing,
        check=check,
        gains=None if gains is None else Path(gains),
        on=on,
        measured=None if measured is None else Path(measured),
        device=device,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )
    with explain_disk_errors(Path(out)):
        result = run(
            _checkpoint_name(source, "search"),
            Path(out),
            {name: text for name, text in given.items() if text is not None},
            settings,
            progress=progress or (QuietProgress() if quiet else RichProgress()),
        )
    return CommandResult(result, lambda: search_lines(result))


def _conversion_tables(out: PathLike, context: int) -> list[Any]:
    """Return the tables of a converted checkpoint, as `inspect` displays them, and notes on its speed."""
    from surgery.publish.speed_notes import notes_for_device, report_notes
    from surgery.publish.summary import inspect as read
    from surgery.publish.tables import inspect_table

    report = read(str(out))
    notes = notes_for_device(report_notes(report, context), report["time"]["device"], asked="speed" in report)
    return [*inspect_table(report), *notes]


def load(
    name: PathLike,
    *,
    dtype: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Return (causal language model, tokenizer) of a checkpoint, converted or not.

    Other tasks load with the Auto classes of transformers.

    Args:
        name: a local folder, a GGUF file, or a Hub id (org/name or org/name@revision).
        dtype: a torch dtype by name, or "auto" for that of the stored weights.
        device: the `device_map` of transformers; None: the CPU.
        revision, trust_remote_code: as in `plan`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from surgery.checkpoint.gguf import is_gguf
    from surgery.checkpoint.remote_code import check_code_trusted
    from surgery.checkpoint.source import open_converted_checkpoint, split_revision
    from surgery.checkpoint.tensor_names import load_checked_model

    name = _checkpoint_name(name, "load")
    source = open_converted_checkpoint(name, revision)
    check_code_trusted(source.folder, source.name, source.config, trust_remote_code)
    bare = str(source.folder) if is_gguf(name) else split_revision(name)[0]
    commit, trust = source.revision or "main", trust_remote_code
    model = load_checked_model(
        AutoModelForCausalLM, bare, bare, dtype=dtype, device_map=device, revision=commit, trust_remote_code=trust
    )
    return model, AutoTokenizer.from_pretrained(bare, revision=commit, trust_remote_code=trust)


def fuse_projections(model: LiveModel) -> int:
    """Let a converted model compute q, k and v in one call in decoding steps, and gate and up.

    Return the number of groups.

    For low-rank linears, for up to four tokens at a time without gradients; see `surgery.modeling.fuse`. A step
    captured in a CUDA graph or compiled (`generate(cache_implementation="static")`) has fewer launches and is faster;
    an eager one is not. Saved files stay as they are.

    Args:
        model: a converted model in memory, of transformers or another module.
    """
    from surgery.modeling.fuse import fuse_projections as run
    from surgery.modeling.live import check_is_module

    check_is_module(model, "fuse_projections")
    return run(model)


def parameter_groups(
    model: nn.Module,
    rate: float,
    *,
    rates: Mapping[str, float] | None = None,
    weight_decay: float = 0.0,
    optimizer: str = "adamw",
    rule: str = "mup",
    base_width: int | None = None,
) -> list[dict[str, Any]]:
    """Return the trainable parameters of a model as groups for a torch optimizer, with the learning rates that
    `finetune` gives them.

    A core of a structured linear is a small dense layer with its own fan-in, and learns too slowly at the rate of the
    dense layer that it replaced. For a linear with `in` inputs, the rate of a core is (Qiu et al. 2024, "Compute Better
    Spent", section 3.2 and Table 2):

        adamw, sign    rate * in / fan_in
        sgd            rate * (fan_out / fan_in) / (out / in)

    Without base_width dense matrices have `rate`, and so have all parameters of an unconverted model. Mixers, norms and
    biases have no weight decay. A tied parameter is in one group; frozen parameters (requires_grad=False) are in none,
    so that a PEFT model trains its adapters. Call it before the model is wrapped by FSDP.

    Each group is {"params": tensors, "lr", "weight_decay", "kind", "names": of the parameters}. Schedulers of torch and
    transformers scale all rates alike. Raises SurgeryError for a rate that is no number above 0, and if nothing is left
    to train.

    Args:
        model: a model in memory, converted or not.
        rate: learning rate of a dense matrix.
        rates: other base rates by kind: structured, mixers, adapters, dense, embeddings, vectors (norms, biases); kinds
            of rate 0 are left out.
        weight_decay: of structured, adapters, dense and embeddings.
        optimizer: "adamw" for Adam and its relatives, "sign" for sign descent such as Lion, or "sgd".
        rule: "mup"; "dense": a core has the rate of the dense layer; "same": no rule.
        base_width: the width for which `rate` holds, also for dense matrices; None: each linear's own.
    """
    from pydantic import ValidationError

    from surgery.modeling.live import check_is_module
    from surgery.training.optim import OptimizerConfig, trainable_groups

    check_is_module(model, "parameter_groups")
    try:
        settings = OptimizerConfig.model_validate(
            {"name": optimizer, "rates": rule, "base_width": base_width, "weight_decay": weight_decay}
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = {"name": "optimizer", "rates": "rule"}.get(str(first["loc"][0]), str(first["loc"][0]))
        raise SurgeryError(f"{name}: {first['msg'].lower()} (got {first['input']!r})") from None
    return trainable_groups(model, settings, rate, rates or {})


def inspect(
    converted: PathLike | nn.Module, *, modules: bool = False, measured: PathLike | None = None
) -> CommandResult:
    """Show what a conversion replaced: parameters, multiply-accumulates per token, relative errors, a verdict.

    Tensors are checked by the headers of their files: a file that is cut off is an error, changed bytes in a tensor are
    not noticed.

    Args:
        converted: converted checkpoint, a local folder or a Hub id; or a model that `apply` converted.
        modules: display one row per module instead of one per role.
        measured: give the verdict with the results in this folder, written by `evaluate` or `compare`. None: eval/ in
            the checkpoint's folder, if it exists.
    """
    from surgery.core.device import choose_device
    from surgery.publish.live_summary import inspect_model
    from surgery.publish.speed_notes import notes_for_device, report_notes
    from surgery.publish.summary import inspect as run
    from surgery.publish.tables import inspect_table, module_table

    if _is_module(converted):
        if measured is not None:
            raise SurgeryError("measured: results are of a checkpoint, and this is a model in memory. Leave it out.")
        report = inspect_model(converted)
    else:
        report = run(_checkpoint_name(converted, "inspect"), None if measured is None else Path(measured))
    table = module_table if modules else inspect_table
    notes = notes_for_device(report_notes(report), choose_device(None).type, asked="speed" in report)
    return CommandResult(report, lambda: [*table(report), *notes])


def quantize(
    converted: PathLike | nn.Module,
    out: PathLike | None = None,
    *,
    bits: int = 8,
    group: int | None = None,
    format: Literal["int", "fp8"] = "int",
    rules: PathLike | None = None,
    progress: Progress | None = None,
) -> CommandResult:
    """Store the linears of a converted checkpoint or model as integers, or in FP8.

    Return their number, and the bytes of all tensors before and after.

    Args:
        converted: converted checkpoint, a local folder or a Hub id; or a converted model, which is changed in place.
        out: folder of the quantized checkpoint; must not exist. None for a model.
        bits: 8 or 4.
        group: inputs that share a scale; None: 64 with 4 bits, all inputs of an output with 8.
        format: int; or fp8, e4m3 with 8 bits, which rounds the inputs of each product too.
        rules: YAML file with the bits of each linear, which `search(bits=..)` writes, in place of `bits` and `group`;
            for a folder only.
        progress: as in `convert`.
    """
    from surgery.conversion.quantize_checkpoint import quantize as run
    from surgery.conversion.quantize_checkpoint import quantize_line
    from surgery.modeling.quantize import quantize_live
    from surgery.planning.bits_recipe import read_bits

    if _is_module(converted) and out is None and rules is None:
        result = quantize_live(converted, bits, group, format)
    elif out is None or _is_module(converted):
        raise SurgeryError(
            "surgery.quantize takes a folder and `out`, or a model without `out`. Save a model with save_pretrained"
        )
    else:
        name = _checkpoint_name(converted, "quantize")
        chosen = None if rules is None else read_bits(Path(rules))
        result = run(name, Path(out), bits, group, format=format, rules=chosen, progress=progress or RichProgress())
    return CommandResult(result, lambda: [quantize_line(result)])


def finetune(
    converted: PathLike,
    recipe: Any,
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
    gpus: int | None = None,
    sharding: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> CommandResult:
    """Train a converted checkpoint to recover its quality (healing = recovery distillation). Return the run's record.

    Args:
        converted: converted checkpoint, a local folder or a Hub id.
        recipe: name of a shipped healing recipe (auto, linears, attention, new-modules, lambda, control), path of a
            YAML file, or dict.
        teacher: checkpoint to distill from, the one that `converted` was made from.
        data: text to train on, a file, a folder or a Hub id; "generated": the teacher writes it (docs/data.md); None:
            the recipe's.
        out: folder of the trained checkpoint, must not exist; None: `converted` + "-healed".
        tiny: apply the recipe's `tiny` block, which shortens the run to minutes on two CPU cores.
        overrides: recipe keys by dotted path, e.g. {"stages.0.tokens": 20_000_000}.
        resume: continue an interrupted run from its last training checkpoint.
        skip_bad_steps: skip steps with NaN or infinite gradients instead of stopping.
        track: tensorboard, wandb, trackio or none; None: tensorboard if it is installed.
        gpus: train on this many GPUs of this machine, one process each; None: in this process.
        sharding: with several processes: ddp (every device has all weights), fsdp2 (they are divided), or auto.
        device, trust_remote_code, progress: as in `convert`.
    """
    from surgery.training.auto_recipe import load_recipe_of_run
    from surgery.training.finetune import finetune as run
    from surgery.training.logging import result_table

    name = _checkpoint_name(converted, "finetune", SAVE_FIRST)
    all_overrides = _to_overrides(_with_data(data, overrides))
    loaded, reasons = load_recipe_of_run(recipe, name, all_overrides, tiny, trust_remote_code)
    progress = progress or RichProgress()
    for line in reasons:
        progress.say(line)
    record = run(
        name,
        loaded,
        None if out is None else Path(out),
        teacher=None if teacher is None else _checkpoint_name(teacher, "finetune(teacher=..)"),
        resume=resume,
        skip_bad_steps=skip_bad_steps,
        track=track,
        device=device,
        gpus=gpus,
        sharding=sharding,
        trust_remote_code=trust_remote_code,
        progress=progress or RichProgress(),
    )
    return CommandResult(record, lambda: [*result_table(record), f"healed checkpoint: {record['out']}"])


def teacher_cache(
    source: PathLike,
    recipe: str,
    out: PathLike,
    *,
    data: PathLike | None = None,
    top_k: int = 64,
    examples: int | None = None,
    tiny: bool = False,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> CommandResult:
    """Store the teacher's top-k log-probabilities for a recipe's text, so that `finetune` needs no teacher in memory.

    Return the index of the cache. Train with it: `finetune(.., overrides={"teacher.cache": out})`.

    Args:
        source: the teacher, a local folder, a GGUF file, or a Hub id.
        recipe, data, tiny, overrides: as in `finetune`.
        out: folder of the cache.
        top_k: log-probabilities stored at each position.
        examples: sequences to store; None: the recipe's data.rows, else all that the stage trains on.
        resume: continue an interrupted run.
        device, trust_remote_code, progress: as in `convert`.
    """
    from surgery.core.files import size_text
    from surgery.training.auto_recipe import refuse_auto
    from surgery.training.recipe import load_healing_recipe
    from surgery.training.teacher_cache.build import build_teacher_cache

    refuse_auto(recipe)
    index = build_teacher_cache(
        _checkpoint_name(source, "teacher_cache"),
        load_healing_recipe(recipe, _to_overrides(_with_data(data, overrides)), tiny),
        Path(out),
        top_k,
        examples,
        resume=resume,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress or RichProgress(),
    )
    size = size_text(sum(shard["bytes"] for shard in index["shards"]))
    return CommandResult(
        index, lambda: [f"{index['examples']:,} sequences of {index['length']:,} tokens, {size}: {os.fspath(out)}"]
    )


def pretrain(
    recipe: str,
    out: PathLike,
    *,
    data: PathLike | None = None,
    model: PathLike | None = None,
    tokenizer: PathLike | None = None,
    tiny: bool = False,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    skip_bad_steps: bool = False,
    track: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> CommandResult:
    """Train a model with structured layers from scratch, with muP learning rates. Return the run's record.

    Args:
        recipe: name of a shipped pretraining recipe or path of a YAML file.
        out: folder of the trained checkpoint; must not exist unless `resume`.
        data: text to train on, a file, a folder or a Hub id; None: the recipe's.
        model: config of the new model, a JSON file or a checkpoint; None: the recipe's.
        tokenizer: folder or Hub id of the tokenizer; None: the recipe's.
        tiny, overrides, resume, skip_bad_steps, track, device, progress: as in `finetune`.
    """
    from surgery.training.logging import result_table
    from surgery.training.pretrain.model_config import load_config_keys
    from surgery.training.pretrain.pretrain import pretrain as run
    from surgery.training.pretrain.recipe import load_pretrain_recipe

    overrides_given = {
        **({"model": load_config_keys(os.fspath(model))} if model is not None else {}),
        **_with_data(data, overrides),
        **({"tokenizer.path": os.fspath(tokenizer)} if tokenizer is not None else {}),
    }
    record = run(
        load_pretrain_recipe(recipe, _to_overrides(overrides_given), tiny),
        Path(out),
        resume=resume,
        skip_bad_steps=skip_bad_steps,
        track=track,
        device=device,
        progress=progress or RichProgress(),
    )
    labels = (("before", "untrained"), ("after", "trained"))
    return CommandResult(record, lambda: [*result_table(record, labels), f"trained checkpoint: {record['out']}"])


def evaluate(
    model: PathLike | nn.Module,
    suites: str | Sequence[str] = ("ppl",),
    *,
    tokenizer: Any = None,
    compare: PathLike | nn.Module | None = None,
    out: PathLike | None = None,
    fail_below: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Unpack[EvalKeywords],
) -> CommandResult:
    """Evaluate a checkpoint or a model in memory, optionally against another one on the same samples.

    Args:
        model: checkpoint, converted or not, a local folder, a GGUF file, or a Hub id; or a model in memory, which runs
            as it is.
        suites: names of suites, see `surgery eval --list-suites`; a list, or one string "ppl,needle".
        tokenizer: the tokenizer of models in memory; None: that which `apply` was given.
        compare: checkpoint or model to compare with, usually the original.
        out: folder for results, samples and plots; suites already finished there are not run again.
        fail_below: thresholds "name=ratio" on the score relative to `compare`'s, e.g. "ppl=1.05".
        device, trust_remote_code, progress: as in `convert`; a model in memory runs on its own device.
        dtype: float32, bfloat16, float16, or auto (that of the stored weights); None: float32, or that of the model in
            memory.
        options: fields of `surgery.eval.options.EvalOptions`: text, tokens, length, limit, lengths, depths, tasks,
            batch_size, seed, data_root and more. `surgery eval --help` says what they mean.
    """
    from surgery.eval.model import LiveEvalModel, live_eval_model
    from surgery.eval.options import parse_options
    from surgery.eval.results.tables import eval_table
    from surgery.eval.run import evaluate as run

    eval_options = parse_options(options, "evaluate")

    def opened(one: PathLike | nn.Module) -> str | LiveEvalModel:
        return live_eval_model(one, tokenizer) if _is_module(one) else _checkpoint_name(one, "evaluate")

    first, second = opened(model), None if compare is None else opened(compare)
    if isinstance(first, LiveEvalModel):
        device, dtype = device or str(first.model.device), first.check_dtype(dtype)
    done = run(
        first,
        suites.split(",") if isinstance(suites, str) else list(suites),
        eval_options,
        compare=second,
        out=None if out is None else Path(out),
        fail_below=fail_below,
        device=device,
        dtype=dtype or "float32",
        trust_remote_code=trust_remote_code,
        progress=progress or RichProgress(),
    )
    return CommandResult(done.to_dict(), lambda: eval_table(done))


def verify(
    results: PathLike,
    model: PathLike | None = None,
    *,
    compare: PathLike | None = None,
    text: str | None = None,
    data_root: PathLike | None = None,
    include_path: PathLike | None = None,
    data: Mapping[str, PathLike] | None = None,
    suites: Sequence[str] = (),
    **options: Any,
) -> CommandResult:
    """Compare what a finished evaluation recorded with what is here: versions, models, data, options. Measures nothing.

    The result has `same`, and in `checks` one entry for each thing: same, different, or cannot be checked. Nothing that
    the results name is opened: a model or a text that is not given here cannot be checked. Raises SurgeryError if the
    results are damaged.

    Args:
        results: results.json that `evaluate(out=..)` wrote, or its folder.
        model, compare: the checkpoints to compare with the recorded ones, local folders or Hub ids.
        text, data_root, include_path, data: as for `evaluate`; their contents are compared.
        suites: names of suites to compare with the recorded ones; empty: not compared.
        options: fields of `surgery.eval.options.EvalOptions` to compare with the recorded ones.
    """
    from surgery.eval.options import parse_options
    from surgery.eval.verify import verify as run

    parse_options(options, "verify")
    done = run(
        Path(results),
        None if model is None else _checkpoint_name(model, "verify"),
        compare=None if compare is None else _checkpoint_name(compare, "verify(compare=..)"),
        text=text,
        data_root=None if data_root is None else Path(data_root),
        include_path=None if include_path is None else Path(include_path),
        data={task: Path(file) for task, file in (data or {}).items()},
        suites=tuple(suites),
        options=options,
    )
    return CommandResult(done.to_dict(), lambda: list(done.lines()))


def compare(
    folders: Sequence[PathLike],
    *,
    base: PathLike | None = None,
    out: PathLike | None = None,
    quality: str | None = None,
    seed: int = 0,
) -> CommandResult:
    """Compare results that `evaluate(out=..)` has written, of any number of models.

    Return rows, averages and Pareto charts.

    Results that are not comparable are left out; `refused` says which and why.

    Args:
        folders: folders written by `evaluate(out=..)`.
        base: results folder of the model that the others are compared with; None: the base that all results name, if
            there is one.
        out: folder for tables, figures and comparison.json; or a file .md, .tex, .csv or .json.
        quality: task, suite or average in the Pareto charts; None: perplexity if measured, else the first average or
            task.
        seed: of the bootstrap.
    """
    from surgery.core.files import explain_disk_errors
    from surgery.eval.results.model_tables import check_out, comparison_table, write_comparison
    from surgery.eval.results.models import compare_folders

    if isinstance(folders, (str, os.PathLike)):
        raise SurgeryError(f"surgery.compare takes a list of folders (got {os.fspath(folders)!r})")
    folder = None if out is None else Path(out)
    if folder is not None:
        check_out(folder)
    done = compare_folders([Path(f) for f in folders], None if base is None else Path(base), quality=quality, seed=seed)
    if folder is not None:
        with explain_disk_errors(folder):
            done.notes += write_comparison(done, folder)
    return CommandResult(done.to_dict(), lambda: comparison_table(done))


@overload
def densify(converted: PathLike, out: PathLike, *, progress: Progress | None = None) -> CommandResult: ...


@overload
def densify(converted: LiveModel, *, progress: Progress | None = None) -> LiveModel: ...


def densify(
    converted: PathLike | nn.Module, out: PathLike | None = None, *, progress: Progress | None = None
) -> CommandResult | nn.Module:
    """Multiply structured weights out, to a dense checkpoint or model with the same outputs. Mixers stay, except level
    weights of native linear layers that are still 1.

    Return the command's result, or the model in memory itself, which is changed in place.

    Args:
        converted: converted checkpoint, a local folder or a Hub id; or a model in memory.
        out: folder of the dense checkpoint, must not exist; None for a model in memory.
        progress: as in `convert`.
    """
    from surgery.conversion.densify import densify as run
    from surgery.conversion.densify import densify_live

    if _is_module(converted):
        if out is not None:
            raise SurgeryError(
                "surgery.densify changes a model in memory in place and writes no folder (got "
                f"out={os.fspath(out)!r}). Leave out "
                "`out`, then model.save_pretrained(folder)"
            )
        densify_live(converted)
        return converted
    name = _checkpoint_name(converted, "densify")
    if out is None:
        raise SurgeryError(f"surgery.densify({name!r}) needs the folder to write to: surgery.densify({name!r}, out)")
    result = run(name, Path(out), progress=progress or RichProgress())
    removed = f", {result['native']} native linear layers without level weights" if result["native"] else ""
    return CommandResult(result, lambda: [f"{result['modules']} linears multiplied out{removed}: {os.fspath(out)}"])


def toeplitz(converted: PathLike, out: PathLike, *, components: int = 8) -> CommandResult:
    """Turn MHLA mixers into Toeplitz block mixing (TBM), which reads any length in linear time.

    Return the fit's R^2 of each layer.

    Args:
        converted: converted checkpoint with block mixing, a local folder or a Hub id.
        out: folder of the new checkpoint; must not exist.
        components: number of exponentials that approximate each Toeplitz kernel, 1 to 16.
    """
    from surgery.conversion.toeplitz import convert_to_toeplitz

    if not 1 <= components <= 16:
        raise SurgeryError(f"toeplitz: components must be from 1 to 16 (got {components!r})")
    result = convert_to_toeplitz(_checkpoint_name(converted, "toeplitz"), Path(out), components)
    mean = sum(result["r2"].values()) / len(result["r2"])
    return CommandResult(result, lambda: [f"{len(result['r2'])} layers, R^2 {mean:.4f}: {os.fspath(out)}"])


def bench(
    what: str,
    *,
    sizes: str | None = None,
    peers: bool = False,
    only: str | None = None,
    dtype: str | None = None,
    out: PathLike | None = None,
    time_limit: float | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    model: PathLike | None = None,
    drafter: Any = None,
    text: PathLike | None = None,
    replay: PathLike | None = None,
    stage: str | None = None,
) -> CommandResult:
    """Benchmark the kernels against their PyTorch references and torch's own operators. Return the measurements.

    Args:
        what: linear, attention, decode, model, speed, serve, train, vllm or draft.
        sizes: full, main or small, for vllm also 8b; None: full on a GPU, else small.
        peers: include other libraries.
        only: comma-separated words; only implementations whose name contains one of them run. A word after a minus sign
            excludes.
        dtype: bfloat16, float16 or float32; None: bfloat16 on a GPU, else float32.
        out: JSON file, written after every case.
        time_limit: seconds after which no further case starts.
        device, progress: as in `convert`.
        model: for linear: a checkpoint whose shapes are measured instead of `sizes`. For vllm: folders of checkpoints,
            separated by commas, the first of which the others are compared with.
        model, drafter, text: for draft: the checkpoint, the recipe or folder of its drafter or prompt-lookup (None:
            sliding-window, or prompt-lookup for a model with mixers), and the text of the prompts.
        replay: for draft: the `out` of an earlier draft benchmark, whose acceptance is timed on random weights; no
            model or text then.
        stage: for train: lm, or distill, which is healing with a teacher; None: lm.
    """
    from surgery.eval.speed.run import bench as run
    from surgery.eval.speed.tables import result_tables

    file = None if out is None else Path(out)
    shown = progress or RichProgress()
    if what == "draft":
        from surgery.eval.speed.draft import bench_draft, draft_tables

        asked = {"device": device, "dtype": dtype, "out": file, "progress": shown, "replayed": replay}
        measured = bench_draft(model, drafter, text, sizes, **asked, time_limit=time_limit)
        return CommandResult(measured, lambda: draft_tables(measured))
    if what == "vllm" and drafter is None and text is None and replay is None:
        from surgery.eval.speed.vllm_engines import bench_vllm, vllm_tables

        folders = None if model is None else str(model)
        measured = bench_vllm(folders, sizes, only=only, dtype=dtype, out=file, time_limit=time_limit, progress=shown)
        return CommandResult(measured, lambda: vllm_tables(measured))
    if model is not None and what not in ("linear", "vllm"):
        raise SurgeryError(
            f"model is an option of bench draft, bench linear and bench vllm (got bench {what}). Leave it out"
        )
    if stage is not None and what != "train":
        raise SurgeryError(f"stage is an option of bench train (got bench {what}). Leave it out")
    for name, value in {"drafter": drafter, "text": text, "replay": replay}.items():
        if value is not None:
            raise SurgeryError(f"{name} is an option of bench draft (got bench {what}). Leave it out")
    shapes = None if model is None else _checkpoint_name(model, "bench")
    result = run(
        what, sizes, peers, device, time_limit, out=file, only=only, progress=shown, dtype=dtype, shapes_of=shapes,
        stage=stage,
    )  # fmt: skip
    return CommandResult(result, lambda: result_tables(result))


def drafter(
    model: nn.Module,
    recipe: Any = "sliding-window",
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    overrides: Mapping[str, Any] | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    **keys: Any,
) -> Drafter:
    """Return a drafter for a model: `drafter.generate(input_ids, max_new_tokens=..)` writes the model's own text in
    fewer of its forwards.

    The drafter is a conversion of the model that shares the weights it does not replace; `drafter.extra_bytes` counts
    the others. A recipe that only gives all layers a window, as "sliding-window" does, shares all weights and the
    model's key/value cache. The model itself is not changed. See docs/speculation.md.

    Args:
        model: the original, a causal language model of transformers.
        recipe: how the drafter is made: a recipe as in `plan`, the folder of a converted checkpoint, another model in
            memory, or "prompt-lookup": drafts are looked up in the text. A model with mixers takes the last three.
        calibration, tokenizer: as in `apply`, for recipes that are calibrated.
        overrides, keys: as in `plan`, for example overrides={"attention.window": 512}.
        device, progress: as in `apply`.
    """
    from surgery.speculation.drafter import make_drafter

    source = recipe
    if isinstance(recipe, str) and recipe == "prompt-lookup":
        if keys or overrides or calibration is not None:
            raise SurgeryError(
                "'prompt-lookup' has no weights; recipe keys and calibration are for recipes. Leave them out"
            )
        source = None
    elif not _is_module(recipe):
        is_folder = isinstance(recipe, (str, os.PathLike)) and (Path(recipe) / "config.json").is_file()
        if is_folder and (keys or overrides or calibration is not None):
            raise SurgeryError(
                f"{os.fspath(recipe)} is a converted checkpoint; recipe keys and calibration are for recipes. Leave "
                "them out"
            )
        source = Path(recipe) if is_folder else _load_recipe(recipe, overrides, keys)
    return make_drafter(
        model, source, calibration, tokenizer=tokenizer, device=device, progress=progress or RichProgress()
    )


def fetch_eval_data(
    folder: PathLike,
    suites: Sequence[str] = (),
    *,
    tasks: Sequence[str] = (),
    commits: PathLike | None = None,
    progress: Progress | None = None,
) -> CommandResult:
    """Download the data sets of `evaluate` to a local mirror; `evaluate(.., data_root=folder)` then needs no network.

    Return {"folder", "fetched": names, "kept": names}.

    Args:
        folder: folder of the mirror; created if it does not exist.
        suites: niah, ruler, longbench, longbench-e, longbench2, babilong, infinitebench, retrieval, zeroshot, or any
            lm-eval task; (): all suites of this package.
        tasks: download only these tasks of LongBench or BABILong.
        commits: commits.json of another mirror, whose commits are downloaded; None: the folder's own, else the newest.
        progress: as in `convert`.
    """
    from surgery.eval.fetch import SUITE_SOURCES, read_commits
    from surgery.eval.word_list import fetch_suites

    pinned = None if commits is None else read_commits(Path(commits))
    names = list(suites) or list(SUITE_SOURCES)
    done = fetch_suites(Path(folder), names, list(tasks), progress or RichProgress(), pinned)
    result = {"folder": os.fspath(folder), **done}
    line = f"{len(done['fetched'])} data sets downloaded, {len(done['kept'])} already present: {os.fspath(folder)}"
    return CommandResult(result, lambda: [line])


def report(converted: PathLike, *, out: PathLike | None = None, measured: PathLike | None = None) -> Path:
    """Write a report page about a conversion, one HTML file. Return its path.

    Args:
        converted: converted checkpoint, a local folder or a Hub id.
        out: the HTML file; None: report.html in `converted`.
        measured: folder written by `evaluate(out=..)`; None: eval/ in `converted` if it exists.
    """
    from surgery.publish.html.page import write_page

    return write_page(
        _checkpoint_name(converted, "report"),
        None if out is None else Path(out),
        None if measured is None else Path(measured),
    )


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
        _checkpoint_name(converted, "push", SAVE_FIRST),
        repo,
        license or licence,
        base_model,
        None if measured is None else Path(measured),
    )
    result = {"dry_run": dry_run, **upload.to_dict(), "card": upload.card}
    if not dry_run:
        result |= run(upload, private, revision, message, progress or RichProgress())
    return CommandResult(result, lambda: upload_table(result))


def run(
    source: PathLike,
    recipe: str,
    out: PathLike,
    *,
    heal: str | None = None,
    data: PathLike | None = None,
    calibration: PathLike | None = None,
    text: PathLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    heal_overrides: Mapping[str, Any] | None = None,
    tiny: bool = False,
    suites: Sequence[str] = ("ppl", "needle", "speed"),
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> RunResult:
    """Plan, convert, heal, evaluate and report in the folder `out`. The same call continues an interrupted run.

    Args:
        source: checkpoint to convert, a local folder, a GGUF file, or a Hub id.
        recipe: name of a shipped conversion recipe or path of a YAML file; overrides: its keys, as in `plan`.
        out: folder of the run: converted/, healed/, eval/, report.html.
        heal: name or path of a healing recipe; None: no healing. heal_overrides: its keys. tiny: as in `finetune`.
        data: text to train on, and to calibrate on without `calibration`; a file, a folder or a Hub id; or "generated":
            the original writes the text to train on.
        calibration: text to calibrate on, as in `convert`.
        text: text to measure on; None: the last tenth of `data` or `calibration`, if that is a .txt file, of which the
            rest is trained on.
        suites: suites of `evaluate`; options: its options, e.g. tokens=4096, length=512.
        device, trust_remote_code, progress: as in `convert`.
    """
    from surgery.eval.options import parse_options
    from surgery.workflow import RunOptions
    from surgery.workflow import run as run_all

    parse_options(options, "run")
    chosen = RunOptions(
        _checkpoint_name(source, "run"),
        os.fspath(recipe),
        overrides=tuple(_to_overrides(overrides or {})),
        heal=heal,
        heal_overrides=tuple(_to_overrides(heal_overrides or {})),
        data=None if data is None else os.fspath(data),
        calibration=None if calibration is None else os.fspath(calibration),
        text=None if text is None else os.fspath(text),
        suites=tuple(suites),
        eval_options=tuple(options.items()),
        tiny=tiny,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return run_all(chosen, Path(out), progress or RichProgress())


SAVE_FIRST = "model.save_pretrained(folder), and give the folder"


def _is_module(value: Any) -> TypeGuard[nn.Module]:
    """Return whether a value is a model in memory."""
    from torch import nn

    return isinstance(value, nn.Module)


def _checkpoint_name(value: Any, function: str, advice: str = SAVE_FIRST) -> str:
    """Return a folder or Hub id as a string.

    Raises SurgeryError for any other value. advice: what to do with a model.
    """
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    what = f"a model in memory, {type(value).__name__}" if _is_module(value) else f"a {type(value).__name__}"
    todo = f"Use {advice}" if _is_module(value) else "Give a path or org/name"
    raise SurgeryError(f"surgery.{function} takes a local folder or a Hub id (got {what}). {todo}")


def _with_data(data: PathLike | None, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return overrides of a training recipe, with the text to train on if it is given."""
    from surgery.training.data.recipe import data_sources

    return {**({"data.sources": data_sources(os.fspath(data))} if data is not None else {}), **(overrides or {})}


def _load_recipe(recipe: Any, overrides: Mapping[str, Any] | None, keys: Mapping[str, Any]) -> Any:
    from surgery.planning.recipe import ConversionRecipe, load_recipe, parse_recipe

    settings = _to_overrides({**keys, **(overrides or {})})
    if isinstance(recipe, ConversionRecipe):
        recipe = recipe.model_dump(mode="json", exclude_unset=True)
    if isinstance(recipe, Mapping):
        return parse_recipe(json.dumps(recipe), "(given as a dict)", settings)
    return load_recipe(os.fspath(recipe), settings)


def _to_overrides(values: Mapping[str, Any]) -> list[str]:
    """{"attention.cache": 0.5} -> ["attention.cache=0.5"], which is YAML; text of layer ranges is not quoted, as with
    --set.
    """
    return [
        f"{key}={value if isinstance(value, str) and key.rpartition('.')[2] == 'layers' else json.dumps(value)}"
        for key, value in values.items()
    ]
