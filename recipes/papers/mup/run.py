"""Measure whether the best base learning rate is the same at every width, as Figure 2b of Qiu et al. 2024 ("Compute
Better Spent").

The models are character-level GPT-2 decoders of one depth and several widths, with structured linears in every layer.

python -m recipes.papers.mup.run run --text FILE --out runs.jsonl [--structure btt ..] [--width 64 ..]
python -m recipes.papers.mup.run show runs.jsonl .. [--plot mup.png]

    mup      every core at the rate of its own fan-in (surgery/training/optim.py): rate * c * 64 / fan_in
    dense    every core at the rate that muP gives the dense layer in its place: rate * 64 / in

Both start from the same parameters, and c makes their rates equal at the base width 64 (`matching_core_rate`). All
rates, seeds and rules of one structure and width train at once as a stack; runs that the file already contains are not
repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.papers.mup.models import (
    STRUCTURE_NAMES,
    SweepSizes,
    make_gpt2,
    make_stage,
    matching_core_rate,
    rate_factors,
)
from recipes.papers.mup.tables import show
from recipes.papers.script import run_script
from recipes.papers.training.stacked import StackedTraining
from surgery.core.device import choose_device
from surgery.training.data.dataset import DataConfig, TrainingData, make_data
from surgery.training.data.documents import Document
from surgery.training.data.tokenize import TextEncoder, TokenSequence
from surgery.training.pretrain.tokenizer import TokenizerConfig, make_tokenizer

RULES = ("mup", "dense")


# -- data -------------------------------------------------------------------------------------------------
def make_data_config(text: str) -> DataConfig:
    """Return the data settings of a text file."""
    return DataConfig.model_validate({"sources": text, "packing": "stream", "validation": 0.05})


class CachedEncoder(TextEncoder):
    """Text encoder that caches the tokens of each list of documents."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self.known: dict[tuple[Any, ...], list[TokenSequence]] = {}

    def encode_texts(self, documents: list[Document]) -> list[TokenSequence]:
        """Return one sequence per document, from the cache if these documents were tokenized before."""
        key = tuple((document.content, document.begins, document.ends) for document in documents)
        if key not in self.known:
            self.known[key] = super().encode_texts(documents)
        return self.known[key]


def stack_examples(data: TrainingData, steps: int, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return input_ids and labels of the first steps on the device, (steps, rows, T)."""
    examples = [example for example, _ in zip(data.examples(0), range(steps * rows))]
    return {
        name: torch.stack([e[name] for e in examples]).unflatten(0, (steps, rows)).to(device)
        for name in ("input_ids", "labels")
    }


# -- runs -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SweepRun:
    """One training run; its fields identify it in the result file."""

    structure: str
    width: int
    rule: str
    seed: int
    log2_rate: float


def list_runs(name: str, width: int, sizes: SweepSizes) -> list[SweepRun]:
    """Return the runs of one structure and width."""
    rules = RULES[:1] if name == "dense" else RULES  # both rules coincide for dense layers
    every = ((rule, seed, rate) for rule in rules for seed in range(sizes.seeds) for rate in sizes.log2_rates)
    return [SweepRun(name, width, *which) for which in every]


class Sweep:
    """Trains stacks of runs on one text."""

    def __init__(self, text: str, sizes: SweepSizes, device: torch.device, graph: bool = True):
        self.sizes, self.device, self.graph = sizes, device, graph
        config = make_data_config(text)
        self.tokenizer = make_tokenizer(TokenizerConfig(kind="characters"), config)
        data = [make_data(config, self.tokenizer, sizes.length, seed) for seed in range(sizes.seeds)]
        encoder = CachedEncoder(self.tokenizer)
        for d in data:
            d.encoder = encoder
        self.training = [stack_examples(d, sizes.steps, sizes.rows, device) for d in data]
        held = data[0].validation()
        self.held_out = {n: torch.stack([e[n] for e in held]).to(device) for n in ("input_ids", "labels")}

    def train(self, runs: list[SweepRun]) -> list[dict[str, Any]]:
        """Train the runs at once and return a result row for each."""
        began, sizes = time.perf_counter(), self.sizes
        name, width, vocabulary = runs[0].structure, runs[0].width, len(self.tokenizer)
        models = {seed: make_gpt2(name, width, vocabulary, sizes, seed) for seed in {run.seed for run in runs}}
        constants = {"mup": matching_core_rate(name, vocabulary, sizes), "dense": 1.0}
        stages = {rule: make_stage(sizes, rule, constant) for rule, constant in constants.items()}
        factors = {rule: rate_factors(models[runs[0].seed], stage) for rule, stage in stages.items()}
        rates = [{n: f * 2.0**run.log2_rate for n, f in factors[run.rule].items()} for run in runs]
        stage = stages[runs[0].rule]
        stack = StackedTraining(
            [models[run.seed] for run in runs], rates, stage.optimiser, stage.clip, self.device, self.graph
        )
        which = torch.tensor([run.seed for run in runs])
        tail = torch.zeros(len(runs), device=self.device)
        for step in range(sizes.steps):
            batch = {n: torch.stack([d[n][step] for d in self.training])[which] for n in self.held_out}
            losses_M = stack.step(batch, stage.schedule.factor(step, sizes.steps))
            if step >= sizes.steps - sizes.steps // 10:
                tail += losses_M / (sizes.steps // 10)
        held_M, tail_M = self._held_out_losses(stack, len(runs)), tail.tolist()
        record = {"parameters": sum(stack.sizes), "tokens": stage.steps * sizes.rows * sizes.length}
        record |= {"seconds": round(time.perf_counter() - began, 2), "stack": len(runs), "device": str(self.device)}
        return [
            {**asdict(run), "held_out": _finite_or_none(held), "train": _finite_or_none(train), **record}
            for run, held, train in zip(runs, held_M.tolist(), tail_M)
        ]

    def _held_out_losses(self, stack: StackedTraining, runs: int) -> Tensor:
        rows = self.sizes.rows
        starts = range(0, len(self.held_out["labels"]) // rows * rows, rows)
        return stack.evaluate(
            [{n: t[i : i + rows].expand(runs, -1, -1) for n, t in self.held_out.items()} for i in starts]
        )


def _finite_or_none(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def estimate_memory(width: int, sizes: SweepSizes) -> float:
    """Return the estimated memory of one run in GB."""
    activations = sizes.rows * sizes.length * sizes.layers * width * 60
    return 4 * (activations + 4 * 12 * sizes.layers * width**2) / 1e9


def split_into_stacks(runs: list[SweepRun], memory: float, sizes: SweepSizes) -> Iterator[list[SweepRun]]:
    """Divide runs into stacks that fit in the memory."""
    if runs:
        runs = sorted(runs, key=lambda r: r.seed)
        count = -(-len(runs) // max(1, int(memory / estimate_memory(runs[0].width, sizes))))
        size = -(-len(runs) // count)
        yield from (runs[at : at + size] for at in range(0, len(runs), size))


def run(arguments: argparse.Namespace) -> None:
    """Train the runs that the result file lacks and append their rows."""
    sizes = SweepSizes(
        **{k: v for k, v in vars(arguments).items() if k in SweepSizes.__dataclass_fields__ and v is not None}
    )
    device = choose_device(arguments.device)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    sweep, out = Sweep(arguments.text, sizes, device, not arguments.plain), Path(arguments.out)
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    done = {SweepRun(*(json.loads(line)[f] for f in SweepRun.__dataclass_fields__)) for line in lines}
    for width in arguments.width or [64, 128, 256, 512]:
        for name in arguments.structure or STRUCTURE_NAMES:
            todo = [r for r in list_runs(name, width, sizes) if r not in done]
            for some in split_into_stacks(todo, arguments.memory, sizes):
                rows = sweep.train(some)
                with open(out, "a", encoding="utf-8") as file:
                    file.write("".join(json.dumps(row) + "\n" for row in rows))
                best = min((r["held_out"] or 99.0, r["rule"], r["log2_rate"]) for r in rows)
                print(f"{name} {width}: {len(rows)} runs, {rows[0]['seconds']} s, best {best}", flush=True)


def main() -> None:
    """Run the command `run` or `show`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="Train the models of the sweep.")
    running.add_argument("--text", required=True, help="Train on this text.")
    running.add_argument("--out", required=True, help="Append results to this JSON-lines file.")
    running.add_argument("--structure", action="append", choices=STRUCTURE_NAMES, help="Repeatable. Default: all.")
    running.add_argument("--width", action="append", type=int, help="Repeatable. Default: 64, 128, 256 and 512.")
    running.add_argument("--memory", type=float, default=8.0, help="Memory of a stack of runs in GB. Default: 8.")
    running.add_argument("--device", help="Default: a GPU if there is one.")
    running.add_argument("--plain", action="store_true", help="Do not use CUDA graphs.")
    for name in ("layers", "head", "length", "rows", "steps", "seeds"):
        running.add_argument(f"--{name}", type=int)
    running.add_argument("--embedding-std", type=float, dest="embedding_std")
    running.add_argument("--rates", type=float, nargs=3, metavar=("FROM", "TO", "STEP"), help="log2 of the base rates.")
    running.set_defaults(do=run)
    showing = commands.add_parser("show", help="Print the table of results.")
    showing.add_argument("runs", type=Path, nargs="+", help="Files that `run --out` wrote.")
    showing.add_argument("--plot", type=Path, help="Draw the losses to this file.")
    showing.set_defaults(do=lambda arguments: show(arguments.runs, arguments.plot))
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    run_script(main)
