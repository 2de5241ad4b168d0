"""Benchmark of the training loop: `lm` steps of a Llama-shaped model with random weights, by two loops alternately.

    bare loop   batches already on the device; forward, backward, gradient clipping and fused AdamW under torch's autocast
    surgery     surgery.training's loop: text read, tokenized and packed in parallel, Accelerate, step checks, log lines

A figure is the median wall time of a few consecutive steps. Under `accelerate launch` surgery's loop runs alone, the
batch divided among processes; `losses` show whether both loops train alike.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from surgery.core.errors import SurgeryError
from surgery.core.files import write_json
from surgery.core.progress import Progress
from surgery.eval.speed.model import (
    FAST_HALF,
    JOINED,
    RANK_MULTIPLE,
    SHAPES,
    fast_half_joined,
    install_mixers,
    replace_linears,
)
from surgery.eval.speed.selection import is_selected
from surgery.eval.speed.tables import training_line
from surgery.mixers.linear_config import LinearAttention
from surgery.structures.btt import BTT
from surgery.structures.low_rank import LowRank
from surgery.training.compiled_layers import compile_layers

CaseT = TypeVar("CaseT", bound=Any)  # with a `name`

TEXT_COPIES = 12  # copies of the embedded text, half a million tokens: reading continues while steps are timed

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
}


@dataclass(frozen=True)
class TrainingCase:
    """A training setup.

    Attributes:
        batch: rows per step over all devices; rows: rows per forward.
        log_every: steps between log lines, timed together.
        intervals: log intervals per run; timed from the `first_timed`-th on, when text read ahead is used up.
        rounds: runs of each loop.
        compiled: whether torch.compile compiles every layer; on a CPU nothing is compiled.
    """

    name: str
    shape: dict[str, Any]
    length: int
    batch: int
    rows: int
    memory: str = "keep"
    packing: str = "stream"
    log_every: int = 10
    intervals: int = 13
    first_timed: int = 8
    rounds: int = 2
    compiled: bool = False

    @property
    def positions(self) -> int:
        """Tokens per step."""
        return self.batch * self.length


BILLION = TrainingCase(
    "1B", SHAPES["full"], 2048, 8, 4, "checkpoint", log_every=4, intervals=3, first_timed=1, rounds=1
)
COMPILED_BILLION = replace(BILLION, name="1B, layers compiled", compiled=True)
CASES = {
    "full": [
        TrainingCase("27M", SMALL, 512, 64, 64),
        BILLION,
        COMPILED_BILLION,
        TrainingCase("27M, documents packed", SMALL, 512, 64, 64, packing="documents"),
        TrainingCase("27M, 4 forwards a step", SMALL, 512, 64, 16),
    ],
    "main": [BILLION, COMPILED_BILLION],
    "small": [
        TrainingCase(
            "tiny", {**SHAPES["small"], "vocab_size": 1536}, 64, 8, 4, log_every=2, intervals=2, first_timed=1, rounds=1
        )
    ],
}
CHANGES: dict[str, Callable[[Any], None]] = {
    "original": lambda model: None,
    "BTT half": lambda model: replace_linears(model, BTT(blocks=(4, 4))),
    FAST_HALF: lambda model: replace_linears(model, LowRank(), RANK_MULTIPLE),
    JOINED: fast_half_joined,
    "log-linear Mamba-2": lambda model: install_mixers(model, LinearAttention(mask="hierarchical")),
}


@dataclass
class LoopTimes:
    """Measurements of a loop per log interval: ms per step, losses, share of time spent waiting for text; peak memory
    in bytes.
    """

    ms: list[float] = field(default_factory=list)
    peak: int | None = None
    losses: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


def train(
    sizes: str, only: str | None, device: str | None, ends: float, *, out: Path | None, progress: Progress, about: Any
) -> dict[str, Any]:
    """Return the rows of every case and change. about: describes the device."""
    from surgery.training.data.prefetch import limit_tokenizer_threads
    from surgery.training.distributed.accelerator import make_accelerator

    selected = select_by_words(only, [(case, change) for change in CHANGES for case in CASES[sizes]])
    if not selected:
        raise SurgeryError(
            f"--only {only}: no case of bench train has one of these words in its name. Try --only 1b,btt."
        )
    limit_tokenizer_threads()
    result: dict[str, Any] = {"kind": "train", "sizes": sizes, "rows": [], "complete": False}
    with tempfile.TemporaryDirectory() as folder:
        accelerator = make_accelerator(device, "auto", "none", Path(folder))
        result |= {**about(accelerator.device), "precision": accelerator.mixed_precision}
        result["processes"] = accelerator.num_processes

        def measure(case: TrainingCase, change: str) -> dict[str, Any]:
            return _LoopComparison(case, change, accelerator, Path(folder)).row()

        writer = RowWriter(result, training_line, out, progress) if accelerator.is_main_process else None
        return measure_rows(result, selected, measure, ends, writer)


@dataclass(frozen=True)
class RowWriter:
    """What the main process does with the rows of a benchmark: shows a line of each and writes the result to `out`."""

    result: dict[str, Any]
    line: Callable[[dict[str, Any]], str]
    out: Path | None
    progress: Progress

    def show(self, row: dict[str, Any]) -> None:
        """Show a new row and write the result with it."""
        self.progress.say(self.line(row))
        self.write()

    def write(self) -> None:
        """Write the result."""
        if self.out is not None:
            write_json(self.out, self.result)


def select_by_words(only: str | None, pairs: list[tuple[CaseT, str]]) -> list[tuple[CaseT, str]]:
    """Return the (case, change) whose "case, change" contains one of the words of --only, and no word after a minus
    sign.
    """
    return [(case, change) for case, change in pairs if is_selected(f"{case.name}, {change}", only)]


def measure_rows(
    result: dict[str, Any],
    selected: list[tuple[CaseT, str]],
    measure: Callable[[CaseT, str], dict[str, Any]],
    ends: float,
    writer: RowWriter | None,
) -> dict[str, Any]:
    """Add the rows of the selected cases to the result until the clock is past `ends`, and return it."""
    for case, change in selected:
        if time.monotonic() > ends:
            break
        row = measure(case, change)
        result["rows"].append(row)
        if writer is not None:
            writer.show(row)
    result["complete"] = len(result["rows"]) == len(selected)
    if writer is not None:
        writer.write()
    return result


class _LoopComparison:
    """One model trained by both loops."""

    def __init__(self, case: TrainingCase, change: str, accelerator: Any, folder: Path):
        self.case, self.change, self.accelerator, self.folder = case, change, accelerator, folder
        self.device, self.alone = accelerator.device, accelerator.distributed_type.value == "NO"

    def row(self) -> dict[str, Any]:
        case, ours, bare = self.case, LoopTimes(), LoopTimes()
        row = {"case": case.name, "change": self.change, "tokens": case.positions, "length": case.length}
        row |= {"batch": case.batch, "rows": case.rows, "memory": case.memory, "packing": case.packing}
        try:
            model = self._model()
            row["parameters"] = sum(p.numel() for p in model.parameters())
            for _ in range(case.rounds if self.alone else 1):
                self._run_surgery(model, ours)
                if self.alone:
                    self._run_bare(model, bare)
        except torch.OutOfMemoryError:
            row["note"] = "out of memory"
        model = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {**row, **_figures("ours", ours, case.positions), **_figures("bare", bare, case.positions)}

    def _model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        from surgery.training.models import enable_gradient_checkpointing

        torch.manual_seed(0)
        config = LlamaConfig(**self.case.shape, max_position_embeddings=8192, tie_word_embeddings=True)
        with torch.device(self.device):
            model = LlamaForCausalLM(config)
        CHANGES[self.change](model)
        if self.case.memory == "checkpoint":
            enable_gradient_checkpointing(model)
        if self.case.compiled and self.device.type == "cuda":
            compile_layers(model)
        return model.train()

    # -- surgery's -----------------------------------------------------------------------------------
    def _run_surgery(self, model: Any, timed: LoopTimes) -> None:
        from surgery.training.checkpoints import CheckpointManager, TrainPosition
        from surgery.training.distributed.accelerator import prepare, unwrap_model
        from surgery.training.logging import TrainingLog
        from surgery.training.loop import LoopContext, TrainingLoop
        from surgery.training.optim import make_groups, make_optimizer
        from surgery.training.stages import STAGES, StageModels

        recipe, data = self._recipe(), self._data()
        config = recipe.stages[0]
        groups = make_groups(model, {name for name, _ in model.named_parameters()}, config)
        run, optimiser = prepare(
            self.accelerator, model, make_optimizer(groups, config.optimiser), groups, config, recipe.precision
        )
        marks: list[float] = []

        def report(line: dict[str, Any]) -> None:
            if "loss" not in line:  # what was compiled
                return
            marks.append(time.perf_counter())
            timed.losses.append(line["loss"])
            timed.waited.append(line["waited"])

        setting = LoopContext(
            self.accelerator, recipe, data, TrainingLog(self.folder), CheckpointManager(self.folder / "none", 1), report, lambda _: None
        )  # fmt: skip
        self._reset_peak_memory()
        TrainingLoop(setting, STAGES[config](config), StageModels(model, run), groups, optimiser, TrainPosition()).run()
        timed.peak = self._peak_memory()
        timed.ms += [(b - a) / self.case.log_every * 1e3 for a, b in pairwise(marks)][self.case.first_timed - 1 :]
        unwrap_model(self.accelerator, run)

    def _recipe(self) -> Any:
        from surgery.training.recipe import parse_healing_recipe

        case = self.case
        stage = {"kind": "lm", "length": case.length, "batch": case.batch, "rows": case.rows, "memory": case.memory}
        stage |= {"tokens": case.log_every * case.intervals * case.positions, "rate": 1e-4, "trains": ["all"]}
        data = {"sources": [{"path": str(training_text(self.folder)), "separator": "\n"}], "packing": case.packing}
        return parse_healing_recipe({"data": data, "stages": [stage], "log": case.log_every, "checkpoint": 0})

    def _data(self) -> Any:
        from surgery.calibration.data import load_tokenizer
        from surgery.training.data.dataset import make_data
        from surgery.training.recipe import stage_data_config

        recipe = self._recipe()
        config: Any = stage_data_config(recipe, recipe.stages[0])
        return make_data(config, load_tokenizer(tiny_checkpoint()), self.case.length, seed=0)

    # -- bare ----------------------------------------------------------------------------------------
    def _run_bare(self, model: Any, timed: LoopTimes) -> None:
        batches = self._batches()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._reset_peak_memory()
        for interval in range(1 + self.case.intervals - self.case.first_timed):
            self._synchronize()
            began = time.perf_counter()
            for step in range(self.case.log_every):
                for inputs, next_BT in batches[(interval * self.case.log_every + step) % len(batches)]:
                    self._forward_backward(model, inputs, next_BT)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            self._synchronize()
            if interval:
                timed.ms.append((time.perf_counter() - began) / self.case.log_every * 1e3)
        timed.peak = self._peak_memory()
        optimiser.zero_grad(set_to_none=True)

    def _forward_backward(self, model: Any, inputs: dict[str, Any], next_BT: Any) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.accelerator.mixed_precision == "bf16"):
            logits_BTV = model(**inputs, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), next_BT.flatten(), ignore_index=-100)
        (loss * (self.case.rows / self.case.batch)).backward()

    def _batches(self) -> list[list[tuple[dict[str, Any], Any]]]:
        """Return the batches of the first steps. A stream needs no position ids; packed documents do."""
        from surgery.training.batches import BatchLayout, iter_steps, to_device
        from surgery.training.stages.base import model_inputs, next_token_targets

        steps = iter_steps(self._data(), 0, BatchLayout(self.case.batch, self.case.rows), lambda example: 1)
        steps_of_batches = []
        for _, step in zip(range(4), steps):
            batches = [to_device(batch, self.device) for batch in step.batches]
            steps_of_batches.append(
                [
                    ({k: v for k, v in model_inputs(b).items() if k != "use_cache"}, next_token_targets(b)[1])
                    for b in batches
                ]
            )
        if self.case.packing == "stream":
            steps_of_batches = [[({"input_ids": i["input_ids"]}, n) for i, n in step] for step in steps_of_batches]
        return steps_of_batches

    # -- the device ------------------------------------------------------------------------------------
    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reset_peak_memory(self) -> None:
        self._synchronize()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak_memory(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def training_text(folder: Path) -> Path:
    """Write the text, one document per line, to a folder of this process."""
    path = folder / "stories.txt"
    if not path.exists():
        text = (tiny_checkpoint() / "calibration.txt").read_text(encoding="utf-8")
        path.write_text(text * TEXT_COPIES, encoding="utf-8")
    return path


def tiny_checkpoint() -> Path:
    """Return the folder of the embedded checkpoint, with its tokenizer and text."""
    import importlib.resources

    return Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))


def _figures(who: str, timed: LoopTimes, positions: int) -> dict[str, Any]:
    """Return ms per step (median and all) and tokens per second at the median."""
    if not timed.ms:
        return {}
    ms = median(timed.ms)
    row = {"ms": ms, "every_ms": timed.ms, "tokens_per_second": positions / ms * 1e3, "peak": timed.peak}
    if timed.losses:
        row |= {"losses": timed.losses, "waited": timed.waited}
    return {key if key in ("losses", "waited") else f"{who}_{key}": value for key, value in row.items()}
