"""Throughput of a device during conversion: fit rates to measured seconds, and predict other conversions.

seconds = products / (FLOP/s) + sum of n^3 of the eigenproblems / (n^3/s) + bytes passed between processes / (bytes/s)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipes.papers.scale.work import SHAPES, CalibrationText, ConversionWork, calibrated_work


@dataclass(frozen=True)
class MeasuredConversion:
    """Measured seconds of a conversion over `layers` layers.

    budgets: Fisher pass and quick trial; conversion: the rest; free: a conversion without text, None if not measured.
    """

    device: str
    shape: str
    layers: int
    text: CalibrationText
    budgets: float
    conversion: float
    free: float | None = None


MEASUREMENTS = [
    MeasuredConversion("H200", "7b", 32, CalibrationText(), 152, 96, 33),
    MeasuredConversion("H200", "1b", 4, CalibrationText(), 16.2, 9.0),
]


@dataclass(frozen=True)
class Rates:
    """Throughputs: products in FLOP/s, roots in n^3/s, calls in 1/s."""

    products: float  # FLOP/s
    roots: float = 1e30  # n^3/s
    calls: float = 1e30  # 1/s

    def seconds(self, work: ConversionWork, link: float = 50e9) -> float:
        """Return the seconds of some work. link: bytes/s between processes."""
        arithmetic = work.products / self.products + work.roots / self.roots + work.calls / self.calls
        return arithmetic + work.passed / link


def fit_rates(rows: list[MeasuredConversion], root: float = 0.0) -> Rates:
    """Fit rates by least squares of relative errors.

    root: seconds of an eigenproblem of size 1024, 0 to neglect eigenproblems, as for small models on a CPU.
    """
    roots, known, wanted = Rates(1e30, 1024**3 / root, 1 / root) if root else Rates(1e30), [], []
    for row in rows:
        for work, seconds in zip(calibrated_work(SHAPES[row.shape], row.text), (row.budgets, row.conversion)):
            known.append(row.layers * work.products / seconds)
            wanted.append(1 - row.layers * roots.seconds(work) / seconds)
    products = sum(k * k for k in known) / sum(k * w for k, w in zip(known, wanted))
    return Rates(products, roots.roots, roots.calls)


def predict_seconds(row: MeasuredConversion, rates: Rates) -> tuple[float, float]:
    """Return the predicted seconds of both parts."""
    budgets, conversion = (row.layers * rates.seconds(work) for work in calibrated_work(SHAPES[row.shape], row.text))
    return budgets, conversion


# -- rates of this machine ---------------------------------------------------------------------------------------
def measure_conversion(name: str, text: CalibrationText) -> MeasuredConversion:
    """Convert a random Llama of a shape and measure the CPU seconds of this process, which other load does not
    change.
    """
    import tempfile
    import time
    from contextlib import contextmanager
    from pathlib import Path

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from surgery.checkpoint.safetensors_io import TensorSource, write_shard
    from surgery.conversion.convert import convert
    from surgery.core.progress import Progress
    from surgery.planning.recipe import load_recipe

    spent: dict[str, float] = {}

    class Clock(Progress):
        @contextmanager
        def bar(self, title: str, total: int) -> Any:
            began = time.process_time()
            yield lambda steps=1: None
            part = "layers" if title == "converting layers" else "budgets"
            spent[part] = spent.get(part, 0.0) + time.process_time() - began

    shape = SHAPES[name]
    config = LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.mlp, num_hidden_layers=shape.layers, head_dim=shape.head,
        num_attention_heads=shape.heads, num_key_value_heads=shape.groups, vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied, max_position_embeddings=text.window,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config).bfloat16().save_pretrained(Path(folder) / "model")
        ids = torch.randint(3, shape.vocabulary, (text.tokens // text.window, text.window))
        write_shard(Path(folder) / "text.safetensors", [TensorSource.from_tensor("input_ids", ids)])
        recipe = load_recipe("btt-half", [f"calibration={folder}/text.safetensors", "sweeps=1", "tune=false"])
        convert(f"{folder}/model", recipe, Path(folder) / "out", device="cpu", progress=Clock())
    return MeasuredConversion("here", name, shape.layers, text, spent["budgets"], spent["layers"])


def check_rates(names: list[str], text: CalibrationText) -> list[str]:
    """Fit rates to all but the last conversion and predict the last."""
    rows = [measure_conversion(name, text) for name in names]
    rates = fit_rates(rows[:-1])
    lines = [f"{rates.products / 1e9:,.1f} GFLOP/s"]
    lines += [
        "| model | | Fisher pass and trial | predicted | layers | predicted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for i, row in enumerate(rows):
        budgets, layers = predict_seconds(row, rates)
        use = "predicted" if i == len(rows) - 1 else "used to fit the rates"
        cells = [f"{row.budgets:.1f}", f"{budgets:.1f} ({budgets / row.budgets - 1:+.0%})"]
        cells += [f"{row.conversion:.1f}", f"{layers:.1f} ({layers / row.conversion - 1:+.0%})"]
        lines.append("| " + " | ".join([row.shape, use, *cells]) + " |")
    return lines
