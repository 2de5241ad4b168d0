"""Benchmark of healing: `surgery bench train --stage distill`, teacher and KL divergence by surgery's own loop.

    original, Trainer   the original model fine-tuned by transformers' Trainer on the same rows, without a teacher
    hybrid-25, ..       a student as the recipe makes it (random weights), distilled from the original in bfloat16

A figure is the median over log entries, where the loop has waited for the GPU. Cases named "student step" compare one
forward and backward pass of the `lm` loss, student and original, both in a CUDA graph.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from surgery.architectures.attention import attention_paths
from surgery.core.dispatch import record_references
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval.speed import kernel_split
from surgery.eval.speed.model import SHAPES, make_llama
from surgery.eval.speed.tables import distill_line
from surgery.eval.speed.train import RowWriter, measure_rows, select_by_words, tiny_checkpoint, training_text
from surgery.mixers import mixer_config
from surgery.modeling.attention import install
from surgery.planning.recipe import load_recipe

ORIGINAL, RECIPES = "original, Trainer", ("hybrid-25", "gated-deltanet")
BF16_PEAK = {"H100": 989e12, "H200": 989e12}  # dense FLOP/s of bfloat16 (the data sheets of the SXM cards)
FULL_SPEED = 1.25  # an interval within this factor of the median time has full speed
SOFTMAX_SHARE = 0.25  # of layers that keep softmax in `hybrid-25`, evenly spaced here

MODELS: dict[str, dict[str, Any]] = {
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49_152,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 151_936,
    },
    "1B": SHAPES["full"],
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    },
}


@dataclass(frozen=True)
class DistillCase:
    """A setup of healing.

    Attributes:
        batch, rows: rows of `length` tokens a step over all devices, and a forward on one.
        log_every, intervals: steps between log entries, and log entries; the last interval is profiled, not timed.
        multi: whether the case needs several devices.
        step: whether only the student's forward and backward pass is compared with the original's.
        compiled: whether torch.compile compiles every layer of student and teacher; on a CPU nothing is compiled.
    """

    name: str
    shape: dict[str, Any]
    batch: int
    length: int = 2048
    rows: int | None = None
    log_every: int = 4
    intervals: int = 6
    memory: str = "keep"
    multi: bool = False
    step: bool = False
    compiled: bool = False

    @property
    def positions(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


TINY = DistillCase("tiny", {**SHAPES["small"], "vocab_size": 1536}, batch=2, length=64, log_every=1, intervals=4)
CASES = {
    "full": [
        DistillCase("135M, 8K tokens", MODELS["135M"], 4),
        DistillCase("135M, 8K tokens, layers compiled", MODELS["135M"], 4, compiled=True),
        DistillCase("135M, 64K tokens", MODELS["135M"], 32, rows=16, log_every=2),
        DistillCase("135M, 64K tokens, layers compiled", MODELS["135M"], 32, rows=16, log_every=2, compiled=True),
        DistillCase("0.5B, 8K tokens", MODELS["0.5B"], 4),
        DistillCase("0.5B, 8K tokens, layers compiled", MODELS["0.5B"], 4, compiled=True),
        DistillCase("1B, 8K tokens", MODELS["1B"], 4, log_every=3),
        DistillCase("1B, 8K tokens, layers compiled", MODELS["1B"], 4, log_every=3, compiled=True),
        DistillCase("8B, 8K tokens a card", MODELS["8B"], 4, log_every=1, memory="checkpoint", multi=True),
        DistillCase("135M, student step, rows of 2K", MODELS["135M"], 16, step=True),
        DistillCase("135M, student step, rows of 32K", MODELS["135M"], 1, length=32_768, step=True),
        DistillCase("1B, student step, rows of 2K", MODELS["1B"], 4, step=True),
    ],
    "main": [
        DistillCase("135M, 8K tokens", MODELS["135M"], 4),
        DistillCase("1B, 8K tokens", MODELS["1B"], 4, log_every=3),
    ],
    "small": [
        TINY,
        replace(TINY, name="tiny, student step", step=True),
        replace(TINY, name="tiny, sharded", memory="checkpoint", multi=True),
    ],
}


def train_distill(
    sizes: str, only: str | None, device: str | None, ends: float, *, out: Path | None, progress: Progress, about: Any
) -> dict[str, Any]:
    """Return the rows of every case and student. about: describes the device. Arguments as those of `train`."""
    import tempfile

    from surgery.training.data.prefetch import limit_tokenizer_threads
    from surgery.training.distributed.accelerator import make_accelerator

    selected = select_cases(sizes, only)
    limit_tokenizer_threads()
    result: dict[str, Any] = {"kind": "train", "stage": "distill", "sizes": sizes, "rows": [], "complete": False}
    with tempfile.TemporaryDirectory() as folder:
        accelerator = make_accelerator(device, "auto", "none", Path(folder))
        result |= {**about(accelerator.device), "precision": accelerator.mixed_precision}
        result["processes"] = accelerator.num_processes

        def measure(case: DistillCase, change: str) -> dict[str, Any]:
            if case.multi and result["processes"] == 1:
                return {"case": case.name, "change": change, "note": "needs several GPUs: accelerate launch"}
            again = make_accelerator(device, "auto", "none", Path(folder))
            say = writer.progress.say if writer is not None and case.multi else lambda _: None
            return _measure(_scaled(case, again), change, again, Path(folder), say)

        writer = RowWriter(result, distill_line, out, progress) if accelerator.is_main_process else None
        return measure_rows(result, selected, measure, ends, writer)


def select_cases(sizes: str, only: str | None) -> list[tuple[DistillCase, str]]:
    """Return the cases and students that --only names, see `select_by_words`."""
    pairs = [
        (case, change)
        for case in CASES[sizes]
        for change in (RECIPES if case.step or case.compiled else (ORIGINAL, *RECIPES))
    ]
    selected = select_by_words(only, pairs)
    if not selected:
        raise SurgeryError(
            f"--only {only}: no case of bench train --stage distill has one of these words in its name. Try --only "
            "135m,-gated."
        )
    return selected


def _scaled(case: DistillCase, accelerator: Any) -> DistillCase:
    """Return the case with as many rows for every device as for one."""
    return replace(case, batch=case.batch * accelerator.num_processes, rows=case.rows or case.batch)


def install_recipe(model: Any, recipe: str) -> None:
    """Give a model the mixers of a conversion recipe, untrained. Layers that keep softmax are evenly spaced, where the
    recipe chooses them by measurements.
    """
    attention: Any = load_recipe(recipe).attention
    config = mixer_config({"mixer": attention.mixer, **(attention.model_extra or {})})
    paths = attention_paths(model)
    kept: set[int] = set()
    if attention.hybrid is not None:
        count = attention.hybrid.softmax_count(len(paths))
        kept = {(2 * i + 1) * len(paths) // (2 * count) for i in range(count)}
    install(model, {path: config for i, path in enumerate(paths) if i not in kept})


def flops_per_token(shape: dict[str, Any], with_teacher: bool) -> float:
    """Return the floating-point operations a token, nothing recomputed counted: 6 (N + D V) for the forward and backward
    pass, and 2 (N + D V) for a teacher. N: weights of the layers' linears; D: width; V: vocabulary.
    """
    D, heads, groups, dim = (
        shape[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = 2 * D * heads * dim + 2 * D * groups * dim + 3 * D * shape["intermediate_size"]
    weights = shape["num_hidden_layers"] * layer + D * shape["vocab_size"]
    return (8.0 if with_teacher else 6.0) * float(weights)


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bfloat16 FLOP/s of a known card, or None."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((rate for card, rate in BF16_PEAK.items() if card in name), None)


# -- a row -----------------------------------------------------------------------------------------
def _measure(
    case: DistillCase, change: str, accelerator: Any, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the row of one student, with fewer rows a forward, then recomputed activations, where memory runs out.

    say: called with a line about each phase.
    """
    row: dict[str, Any] = {"case": case.name, "change": change, "tokens": case.positions, "length": case.length}
    if case.step:
        return row | _guarded(lambda: _compare_steps(case, change, accelerator.device), accelerator.device)
    single = replace(case, rows=1)
    attempts = [case, *([single] if single != case else []), replace(single, memory="checkpoint")]
    measured: dict[str, Any] = {}
    for attempt in attempts if change != ORIGINAL else attempts[:-1]:
        row |= {"batch": attempt.batch, "rows": attempt.rows, "memory": attempt.memory}
        run: Any = (
            _TrainerRun(attempt, accelerator.device, folder)
            if change == ORIGINAL
            else _DistillRun(attempt, change, accelerator, folder, say)
        )
        measured = _guarded(run.row, accelerator.device)
        if measured.get("note") != "out of memory":
            break
    if "ms" in measured:
        rate = case.positions / measured["ms"] * 1e3
        measured["tokens_per_second"] = rate
        if (peak := peak_flops(accelerator.device)) is not None:
            flops = flops_per_token(case.shape, change != ORIGINAL)
            measured["share_of_peak"] = rate * flops / peak / accelerator.num_processes
    return row | measured


def _guarded(run: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Return the figures of a run, or a note if memory runs out; leave the device's memory free."""
    _free(device)
    try:
        return run()
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}
    finally:
        _free(device)


def _free(device: torch.device) -> None:
    torch.compiler.reset()  # else compilations of earlier cases count against torch.compile's limit
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _student(shape: dict[str, Any], device: torch.device, recipe: str | None) -> Any:
    """Return a float32 student with random weights; the original where `recipe` is None."""
    torch.manual_seed(0)
    model = make_llama(shape, device, torch.float32)
    model.config.max_position_embeddings = 2**15
    if recipe is not None:
        install_recipe(model, recipe)
    return model.train()


class _Clock:
    """Times of log entries, where the GPU has been waited for, and the memory seen there."""

    def __init__(self, device: torch.device):
        self.device, self.began, self.marks = device, time.perf_counter(), list[float]()
        self.losses: list[float] = []
        self.outside = 0  # bytes of the card that torch's allocator does not count: context, libraries, graphs

    def mark(self, loss: float) -> None:
        self.marks.append(time.perf_counter())
        self.losses.append(loss)
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            self.outside = max(self.outside, total - free - torch.cuda.memory_reserved(self.device))

    def figures(self, log_every: int, unprofiled: int) -> dict[str, Any]:
        """Return ms a step (median over intervals after the start), seconds to full speed and peak memory in bytes.

        unprofiled: log entries before the profiler started.
        """
        marks = self.marks[:unprofiled]
        every = [(b - a) / log_every * 1e3 for a, b in pairwise(marks)]
        ms = median(every[len(every) // 2 :])
        slow = [i for i, took in enumerate(every) if took > FULL_SPEED * ms]
        at = marks[slow[-1] + 1] if slow else marks[0]
        row = {"ms": ms, "every_ms": every, "seconds_to_full_speed": at - self.began, "losses": self.losses}
        if self.device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self.device)
            row |= {"allocated": torch.cuda.max_memory_allocated(self.device), "reserved": reserved}
            row["card"] = reserved + self.outside
        return row


class _DistillRun:
    """One student, distilled by surgery's loop."""

    def __init__(
        self,
        case: DistillCase,
        recipe: str,
        accelerator: Any,
        folder: Path,
        say: Callable[[str], None] = lambda _: None,
    ):
        self.case, self.recipe_name, self.accelerator, self.folder = case, recipe, accelerator, folder
        self.device, self.say, self.began = accelerator.device, say, time.perf_counter()

    def _say(self, phase: str) -> None:
        self.say(f"{self.case.name}, {self.recipe_name}: {phase} after {time.perf_counter() - self.began:.0f} s")

    def row(self) -> dict[str, Any]:
        from surgery.training.checkpoints import CheckpointManager, TrainPosition
        from surgery.training.distributed.accelerator import prepare, sharding_name, unwrap_model
        from surgery.training.logging import TrainingLog
        from surgery.training.loop import LoopContext, TrainingLoop
        from surgery.training.models import enable_gradient_checkpointing, shard_frozen
        from surgery.training.optim import make_groups, make_optimizer
        from surgery.training.stages import STAGES, StageModels

        case = self.case
        teacher_dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(1)
        teacher = make_llama(case.shape, self.device, teacher_dtype).eval().requires_grad_(False)
        if sharding_name(self.accelerator) == "FSDP2":
            teacher = shard_frozen(teacher, self.device)
        self._say("teacher built")
        start = _triton_cache_state()
        student = _student(case.shape, self.device, self.recipe_name)
        self._say("student built")
        clock = _Clock(self.device)
        recipe = self._recipe()
        config = recipe.stages[0]
        if case.memory == "checkpoint":
            enable_gradient_checkpointing(student)
        groups = make_groups(student, {name for name, _ in student.named_parameters()}, config)
        run, optimiser = prepare(
            self.accelerator, student, make_optimizer(groups, config.optimiser), groups, config, recipe.precision
        )
        self._say("weights divided over the devices")
        references: dict[str, str] = {}
        profiles: list[Any] = []
        with ExitStack() as recording, ExitStack() as profiling, warnings.catch_warnings(record=True) as warned:
            recorded = recording.enter_context(record_references())

            def report(line: dict[str, Any]) -> None:
                if "loss" not in line:  # what was compiled
                    return
                clock.mark(line["loss"])
                self._say(f"log entry {len(clock.marks)}")
                references.update(recorded)
                recording.close()
                if len(clock.marks) == case.intervals - 1 and self.device.type == "cuda":
                    profiles.append(profiling.enter_context(kernel_split.profile_gpu(self.device)))

            context = LoopContext(
                self.accelerator, recipe, self._data(recipe), TrainingLog(self.folder),
                CheckpointManager(self.folder / "none", 1), report, lambda _: None,
            )  # fmt: skip
            models, stage = StageModels(student, run, teacher), STAGES[config](config)
            loop = TrainingLoop(context, stage, models, groups, optimiser, TrainPosition())
            loop.run()
        row = clock.figures(case.log_every, case.intervals - 1)
        row |= {"references": references, "start": start, "warnings": [str(w.message)[:200] for w in warned][:5]}
        row["parameters"] = sum(p.numel() for p in student.parameters())
        row["graph"] = getattr(loop.captured, "replay", None) is not None
        if profiles:
            row |= _kernel_figures(profiles[0], case.log_every)
        loop.captured = None
        if self.accelerator.num_processes == 1:
            row |= self._split(models, stage, loop)
        unwrap_model(self.accelerator, run)
        return row

    def _split(self, models: Any, stage: Any, loop: Any) -> dict[str, Any]:
        """Return the shares of the parts of an eager step in its GPU time."""
        if self.device.type != "cuda":
            return {}
        from surgery.training.batches import iter_steps, to_device

        _free_keeping_peaks(self.device)
        step = next(iter(iter_steps(self._data(self._recipe()), 0, loop.layout, stage.count_positions)))
        batches = [to_device(batch, self.device) for batch in step.batches]

        def run() -> None:
            for batch in batches:
                with torch.profiler.record_function(kernel_split.PREFIX + "loss"):
                    total = stage.losses(models, batch)["total"] / step.num_counted
                loop.optimizer_step.backward(total)
            with torch.profiler.record_function(kernel_split.PREFIX + "optimizer"):
                loop.optimizer_step.step()

        try:
            with kernel_split.label_modules(models.student, models.teacher):
                run()
                with kernel_split.profile_gpu(self.device) as recorded:
                    run()
            times = kernel_split.part_times(recorded)
            total = sum(times.values()) or 1.0
            return {"parts": {part: us / total for part, us in times.items()}, "eager_gpu_ms": total / 1e3}
        except (
            RuntimeError,
            AttributeError,
            LookupError,
            TypeError,
            AssertionError,
        ) as error:  # the profiler, or memory, which never spoils the figures above
            return {"parts_note": f"{type(error).__name__}: {str(error)[:200]}"}

    def _recipe(self) -> Any:
        from surgery.training.recipe import parse_healing_recipe

        case = self.case
        stage: dict[str, Any] = {"kind": "distill", "length": case.length, "batch": case.batch, "rows": case.rows}
        stage |= {"tokens": case.log_every * case.intervals * case.positions, "rate": 1e-4, "trains": ["all"]}
        stage |= {"memory": case.memory, "rates": {"mixers": 1e-3}}
        stage["compile"] = "layers" if case.compiled and self.device.type == "cuda" else "none"
        data = {"sources": [{"path": str(training_text(self.folder)), "separator": "\n"}], "packing": "stream"}
        keys = {"data": data, "stages": [stage], "log": case.log_every, "checkpoint": 0, "cuda_graph": True}
        return parse_healing_recipe(keys)

    def _data(self, recipe: Any) -> Any:
        return _make_data(recipe, self.case.length)


def _make_data(recipe: Any, length: int) -> Any:
    from surgery.calibration.data import load_tokenizer
    from surgery.training.data.dataset import make_data
    from surgery.training.recipe import stage_data_config

    config: Any = stage_data_config(recipe, recipe.stages[0])
    return make_data(config, load_tokenizer(tiny_checkpoint()), length, seed=0)


def _kernel_figures(recorded: Any, steps: int) -> dict[str, Any]:
    """Return the longest kernels, the shares of their kinds and the GPU's time a step (ms) of a profiled interval."""
    try:
        times = kernel_split.kernel_times(recorded)
    except (RuntimeError, AttributeError, LookupError, TypeError, AssertionError) as error:
        return {"kernels_note": f"{type(error).__name__}: {str(error)[:200]}"}
    return {
        "kernels": kernel_split.kernel_rows(times),
        "kinds": kernel_split.kind_shares(times),
        "gpu_ms": sum(times.values()) / steps / 1e3,
        "launches": sum(1 for event in recorded.events() if kernel_split.is_on_gpu(event)) // steps,
    }


def _free_keeping_peaks(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_trained_mixers = False


def _triton_cache_state() -> str:
    """Return "cold" if Triton's cache on disk holds no kernel, "warm" if it does, "same process" if an earlier row
    loaded kernels in this process.
    """
    global _trained_mixers
    if _trained_mixers:
        return "same process"
    _trained_mixers = True
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return "warm" if folder.is_dir() and any(folder.iterdir()) else "cold"


# -- transformers' Trainer -------------------------------------------------------------------------
class _TrainerRun:
    """The original, fine-tuned by transformers' Trainer on the same rows."""

    def __init__(self, case: DistillCase, device: torch.device, folder: Path):
        self.case, self.device, self.folder = case, device, folder

    def row(self) -> dict[str, Any]:
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

        case, model, clock = self.case, _student(self.case.shape, self.device, None), _Clock(self.device)
        steps = case.log_every * (case.intervals - 1)
        cuda = self.device.type == "cuda"

        class Marks(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % case.log_every == 0:
                    if cuda:
                        torch.cuda.synchronize()
                    clock.mark(0.0)

        world = max(1, int(os.environ.get("WORLD_SIZE", "1")))
        rows = case.rows or case.batch
        arguments = TrainingArguments(
            output_dir=str(self.folder / "trainer"), per_device_train_batch_size=rows, max_steps=steps,
            gradient_accumulation_steps=max(1, case.batch // world // rows), bf16=cuda, use_cpu=not cuda,
            learning_rate=1e-4, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        arguments._n_gpu = min(arguments.n_gpu, 1)  # the Trainer would divide rows over all cards of the machine
        with _kept_environment():
            trainer = Trainer(model=model, args=arguments, train_dataset=self._rows(steps), callbacks=[Marks()])
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        row = clock.figures(case.log_every, len(clock.marks))
        return {**row, "losses": [], "parameters": sum(p.numel() for p in model.parameters())}

    def _rows(self, steps: int) -> list[dict[str, Any]]:
        recipe = _DistillRun(self.case, RECIPES[0], _OnDevice(self.device), self.folder)._recipe()
        examples = _make_data(recipe, self.case.length).examples(0)
        kept = [example["input_ids"] for example, _ in zip(examples, range(min(64, steps * self.case.batch)))]
        return [
            {"input_ids": kept[i % len(kept)], "labels": kept[i % len(kept)]} for i in range(steps * self.case.batch)
        ]


@dataclass(frozen=True)
class _OnDevice:
    device: torch.device


@contextmanager
def _kept_environment() -> Iterator[None]:
    """Restore the environment that TrainingArguments sets for Accelerate."""
    before = os.environ.get("ACCELERATE_MIXED_PRECISION")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        else:
            os.environ["ACCELERATE_MIXED_PRECISION"] = before


# -- one step --------------------------------------------------------------------------------------
def _compare_steps(case: DistillCase, recipe: str, device: torch.device) -> dict[str, Any]:
    """Return ms of a forward and backward pass of the `lm` loss, of student and original, and their ratio."""
    times: dict[str, float] = {}
    references: dict[str, str] = {}
    for name in (None, recipe):
        _free(device)
        with record_references() as recorded:
            times["ms" if name else "original_ms"] = _step_ms(case, _student(case.shape, device, name), device)
        references |= recorded
    return {**times, "ratio": times["ms"] / times["original_ms"], "references": references}


def _step_ms(case: DistillCase, model: Any, device: torch.device) -> float:
    from surgery.core.parallel_compile import compile_kernels
    from surgery.mixers.common.packed_documents import one_document_per_row
    from surgery.modeling.cuda_graph import record_graph
    from surgery.modeling.graph_masks import masks_of_ordinary_calls
    from surgery.training.stages import STAGES, StageModels

    config_type: Any = STAGES.config_type("lm")
    config = config_type.model_validate(
        {"kind": "lm", "tokens": case.positions, "length": case.length, "rate": 1e-4, "trains": ["all"]}
    )
    stage, models = STAGES[config](config), StageModels(model, model)
    ids_BT = torch.randint(case.shape["vocab_size"], (case.batch, case.length), device=device)
    batch = {"input_ids": ids_BT, "labels": ids_BT}

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total = stage.losses(models, batch)["total"]
        total.backward()

    if device.type != "cuda":
        step()
        began = time.perf_counter()
        step()
        return (time.perf_counter() - began) * 1e3
    stream = torch.cuda.Stream(device)
    compile_kernels(step, device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with one_document_per_row(), masks_of_ordinary_calls([model]):
        with torch.cuda.stream(stream):
            step()
        replay = record_graph(step, stream=stream)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for event in events:
        event.record()
        replay()
    torch.cuda.synchronize(device)
    return median(a.elapsed_time(b) for a, b in pairwise(events))
