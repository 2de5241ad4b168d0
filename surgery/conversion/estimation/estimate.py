"""Estimate a conversion from its plan: seconds and peak memory of each step, disk, and the memory of the result."""

from __future__ import annotations

from typing import Any

import torch

from surgery.checkpoint.outline import ModelDescription
from surgery.conversion.estimation.attention_steps import hybrid_step, mixer_step
from surgery.conversion.estimation.counting import Work
from surgery.conversion.estimation.fits import NotCountedError
from surgery.conversion.estimation.shape import ConversionShape, TextRows, conversion_shape
from surgery.conversion.estimation.speeds import Speeds, device_speeds
from surgery.conversion.estimation.steps import Setting, Step, StepEstimates, stored_size
from surgery.conversion.estimation.tuning import epoch_seconds, tuning_dict
from surgery.conversion.tune import BATCH_TOKENS, text_factor
from surgery.conversion.tune_model import coordinate_values, resident_bytes, step_order
from surgery.core.errors import SurgeryError
from surgery.core.files import size_text
from surgery.core.progress import duration_text
from surgery.mixers.cache_size import cache_bytes, mixer_cost
from surgery.planning.targets import Plan

MIN_LIMIT = 2.0 * 2**30  # bytes of hidden states that stay in memory (surgery.calibration.layer_runner)
DEFAULT_CONTEXT = 4096  # tokens
SWEEPS = (1, None)  # fewest and most sweeps of alternating least squares; None: those of the recipe


def estimate_conversion(
    meta_model: ModelDescription,
    plan: Plan,
    *,
    device: str | None = None,
    processes: int = 1,
    threads: int | None = None,
    calibrated: bool = True,
    context: int | None = None,
) -> dict[str, Any]:
    """Return the estimate of a conversion as JSON data; times in seconds, sizes in bytes.

    If a fit cannot be counted, the data has no times and sizes, and says why under "unknown".

    device: a name of surgery.conversion.estimation.speeds, None for this machine's kind. processes: that share the
    conversion. threads: of each process on a CPU. calibrated: whether there is a calibration text, of the recipe's
    `tokens` and `length`. context: tokens of a sequence whose caches count in the memory of the result; None: 4,096.

    Raises SurgeryError for an unknown device, or fewer than one process.
    """
    if processes < 1:
        raise SurgeryError(f"--processes must be at least 1 (got {processes})")
    name, speeds = device_speeds(device)
    kind = "cuda" if speeds.memory else "cpu"
    threads = (threads or torch.get_num_threads()) if kind == "cpu" else 1
    shape = conversion_shape(meta_model, plan, calibrated)
    setup = {
        "device": name, "processes": processes, "threads": threads if kind == "cpu" else None, "calibrated": calibrated,
        "tokens": None if shape.rows is None else shape.rows.tokens,
        "tune": None if shape.rows is None else tuning_dict(plan, shape.rows.tokens, kind, threads),
    }  # fmt: skip
    estimates = []
    try:
        for sweeps in dict.fromkeys(
            plan.recipe.sweeps if limit is None else min(limit, plan.recipe.sweeps) for limit in SWEEPS
        ):
            setting = _setting(speeds, kind, processes, threads, sweeps)
            estimates.append(estimate_steps(shape, setting))
    except NotCountedError as error:
        return {**setup, "unknown": str(error)}
    steps = estimates[-1]
    seconds = [speeds.startup + sum(step.seconds for step in estimate) for estimate in estimates]
    host = speeds.program + max(step.host + (0 if kind == "cuda" else step.device) for step in steps)
    result, length = result_bytes(shape), context or DEFAULT_CONTEXT
    source = shape.itemsize * shape.params
    return {
        **setup,
        "steps": [
            {"name": step.name, "seconds": [round(low.seconds, 3), round(step.seconds, 3)], "device": int(step.device),
             "host": int(step.host), "files": int(step.files)}
            for low, step in zip(estimates[0], steps)
        ],
        "seconds": [round(seconds[0], 3), round(seconds[-1], 3)],
        "peak_tensors": int(max(step.device + (step.host if kind == "cpu" else 0) for step in steps)),
        "peak_device": int(max(step.device for step in steps)) if kind == "cuda" else None,
        "peak_host": int(host), "device_memory": int(speeds.memory) or None,
        "disk": {"source": int(source), "result": int(result), "most": int(disk_bytes(shape, steps, result))},
        "result_memory": int(result + result_cache_bytes(shape, length)), "result_cache_tokens": length,
        "speeds": speeds.source,
    }  # fmt: skip


def _setting(speeds: Speeds, kind: str, processes: int, threads: int, sweeps: int) -> Setting:
    return Setting(speeds, kind, processes, threads, max(MIN_LIMIT, speeds.memory / 4), sweeps)


def estimate_steps(shape: ConversionShape, setting: Setting) -> list[Step]:
    """Return the steps of a conversion in order."""
    steps, recipe, plan, rows = StepEstimates(shape, setting), shape.plan.recipe, shape.plan, shape.rows
    if rows is None:
        return [steps.data_free(), _write(shape, setting)]
    conversion_steps, targets = [], plan.fitted_targets()
    if recipe.generated_tokens:
        conversion_steps.append(steps.generation(rows))
    hybrid = recipe.attention.hybrid if recipe.attention else None
    if plan.attention_targets and hybrid is not None and hybrid.is_measured:
        conversion_steps.append(hybrid_step(steps, hybrid, rows))
    free = [target for target in targets if not target.has_fixed_rank]
    if targets and not (recipe.curvature == "none" and (recipe.allocate == "uniform" or not free)):
        conversion_steps.append(steps.sensitivities(rows))
    if (free and recipe.allocate == "measured") or plan.pruned_targets:
        conversion_steps.append(steps.trial(rows))
    if plan.attention_targets:
        conversion_steps.append(mixer_step(steps, rows))
    conversion_steps.append(steps.layers(rows, bool(plan.attention_targets)))
    return [*conversion_steps, *_tune(shape, setting, steps, rows), _write(shape, setting)]


def _tune(shape: ConversionShape, setting: Setting, steps: StepEstimates, rows: TextRows) -> list[Step]:
    """Return the steps of a recipe's `tune`; only the whole model's is done by one process alone.

    Norms and biases are too small to count.
    """
    epochs = shape.plan.recipe.epochs
    seconds, tune_steps = epoch_seconds(shape.plan, rows.tokens, setting.device, setting.threads), []
    tasks = [
        ("tune layers", epochs.model_copy(update={"model": 0}), epochs.layers),
        ("tune model", epochs.model_copy(update={"layers": 0}), epochs.model),
    ]
    for name, task_epochs, count in tasks:
        if not count:
            continue
        if name == "tune layers":
            states_of = [
                sum(n * (5 * stored_size(t) + 2 * step_order(t) ** 2) for t, n in kind.targets())
                for kind in shape.kinds
            ]
            states = max(
                4.0 * (kind.params + max(states_of))
                + steps.activations(kind, BATCH_TOKENS * text_factor(rows.tokens), True)
                for kind in shape.kinds
            )
            device, host, files = steps.hidden(2 * rows.tokens, 3)
        else:
            states = float(resident_bytes(shape.plan))
            device, host, files = steps.hidden(rows.tokens, 1)
            if states > setting.limit:  # streamed: one layer at a time, states in a file
                largest = max(kind.params for kind in shape.kinds)
                trained = sum(stored_size(t) for t in shape.plan.replaced_targets())
                states, files = 4.0 * 3 * largest, files + 16.0 * trained + 4.0 * coordinate_values(shape.plan)
        tune_steps.append(Step(name, seconds.total(task_epochs), states + device, host, files))
    return tune_steps


def _write(shape: ConversionShape, setting: Setting) -> Step:
    """Return the step that copies what stays and joins the layers' files: each byte of the result is written and read
    twice.
    """
    return Step("write", setting.seconds(Work(files=4 * result_bytes(shape))), 64e6)


def result_bytes(shape: ConversionShape) -> float:
    """Return the bytes of the converted checkpoint."""
    saved = sum(target.numel - stored_size(target) for target in shape.plan.replaced_targets())
    mixed, _, _ = shape.plan.attention_after()
    mixers = sum(mixer_cost(t.config, t.shape, 1).params for t in mixed)
    return shape.itemsize * (shape.params - saved + mixers + shape.plan.untied_params)


def disk_bytes(shape: ConversionShape, steps: list[Step], result: float) -> float:
    """Return the most bytes beside the source while the conversion runs: the layers' files twice while they are joined,
    output Gram matrices, and temporary files of the largest step."""
    grams = 0.0
    if shape.rows is not None:
        largest = max(shape.kinds, key=lambda kind: kind.count)
        grams = StepEstimates(shape, _ANY).gram_bytes(largest, shape.rows) * shape.layers
    twice = 1.0 if shape.layers == 0 else 1.0 + 5e9 / max(result, 5e9)
    tuned = 2.0 if any(step.name == "tune model" for step in steps) else twice
    return result * tuned + grams + max(step.files for step in steps)


def result_cache_bytes(shape: ConversionShape, context: int) -> float:
    """Return the bytes of the caches of one sequence of so many tokens.

    Targets that may keep softmax attention count by their share.
    """
    mixed, softmax, chosen = shape.plan.attention_after()
    dtype = shape.plan.dtype
    if not mixed and not softmax:
        plain = ((kind.count, kind.attention) for kind in shape.kinds if kind.attention is not None)
        return float(sum(count * cache_bytes(None, attention, context, dtype) for count, attention in plain))
    softmax_bytes = sum(cache_bytes(None, attention, context, dtype) for attention in softmax)
    share = chosen / len(mixed) if mixed else 0.0
    before = sum(cache_bytes(None, t.shape, context, dtype) for t in mixed)
    after = sum(cache_bytes(t.config, t.shape, context, dtype) for t in mixed)
    return softmax_bytes + share * before + (1 - share) * after


_ANY = Setting(device_speeds("cpu")[1], "cpu", 1, 1, MIN_LIMIT, 1)


def estimate_lines(estimate: dict[str, Any]) -> list[str]:
    """Return the estimate as lines for the terminal."""
    if "unknown" in estimate:
        return [f"time and memory cannot be estimated: {estimate['unknown']}"]
    where = f"{estimate['processes']} process{'es' if estimate['processes'] > 1 else ''} on {estimate['device']}"
    where += (
        f" with {estimate['threads']} thread{'s' if estimate['threads'] > 1 else ''} each"
        if estimate["threads"]
        else ", one device each"
    )
    text = f"{estimate['tokens']:,} tokens of calibration text" if estimate["calibrated"] else "no calibration text"
    parts = ", ".join(f"{STEP_LABELS.get(s['name'], s['name'])} {_range(s['seconds'])}" for s in estimate["steps"])
    device = f"{size_text(estimate['peak_device'])} of GPU memory and " if estimate["peak_device"] is not None else ""
    where_loaded = "memory" if estimate["peak_device"] is None else "GPU memory"
    lines = [
        f"estimated time: {_range(estimate['seconds'])} for {where}, {text} ({parts})",
        f"estimated peak memory of each process: {device}{size_text(estimate['peak_host'])} of host memory",
        f"estimated disk: {size_text(estimate['disk']['result'])} for the result, up to "
        f"{size_text(estimate['disk']['most'])} during the conversion",
        f"estimated {where_loaded} of the result in use: {size_text(estimate['result_memory'])} with the caches of "
        f"{estimate['result_cache_tokens']:,} tokens",
    ]
    if estimate["device_memory"] and estimate["peak_device"] > estimate["device_memory"]:
        lines.append(f"note: the conversion needs more than the {size_text(estimate['device_memory'])} of this device")
    return lines


# The steps of an estimate, by name; steps whose names say what they do are left out.
STEP_LABELS = {
    "generate": "sampling text",
    "hybrid": "choice of softmax",
    "budgets": "measuring ranks",
    "trial": "trial of allocations",
    "mixers": "start of the mixers",
    "tune layers": "tuning of each layer",
    "tune model": "tuning of the model",
    "write": "writing",
}


def _range(seconds: list[float]) -> str:
    low, high = (duration_text(value) for value in seconds)
    return low if low == high else f"{low} to {high}"
