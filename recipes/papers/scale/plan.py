"""Estimate time, memory and cost of converting, healing and evaluating a large Llama.

Work is counted from the model's shape (recipes/papers/scale/work.py), throughputs are measured on small models (rates.py).

python -m surgery.recipes.papers.scale.plan --model 70b --device H200 --processes 1 8 64 --price 3.5
python -m surgery.recipes.papers.scale.plan --check w256 w512 w1024     fit rates to small conversions on this machine, predict the last
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from surgery.calibration.partition import MAX_SHARDS, MIN_SHARD_TOKENS
from surgery.recipes.papers.scale.rates import MEASUREMENTS, Rates, check_rates, fit_rates
from surgery.recipes.papers.scale.work import (
    SHAPES,
    CalibrationText,
    LlamaShape,
    calibrated_work,
    data_free_work,
    moments_work,
)


@dataclass(frozen=True)
class DeviceRates:
    """Throughputs of a device.

    Attributes:
        rates: throughputs of a conversion.
        memory: bytes.
        training, reading: FLOP/s of bf16 training steps and of a forward pass.
        starting: seconds before the first layer.
    """

    rates: Rates
    memory: float
    training: float
    reading: float
    starting: float = 6.0


def h200() -> DeviceRates:
    """Return the rates of an H200, measured in docs/measurements.

    performance.md: conversion, and 10 ms for an eigenproblem of size 1024 or smaller. training.md: 37,255 tokens/s for 1B with
    activation checkpointing. evaluation.md: 3.24 x 32,768 tokens/s for 1.2B in bf16.
    """
    one, length = SHAPES["1b"], 32768
    trained = 37255 * (8 * one.params + 16 * one.layers * 2048 * one.width)
    read = 3.24 * length * (2 * one.params + 2 * one.layers * length * one.width)  # attention is causal
    return DeviceRates(fit_rates(MEASUREMENTS[:1], 0.010), 141e9, trained, read)


DEVICES = {"H200": h200}


# -- a plan ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PlanOptions:
    """Assumptions of an estimate.

    Attributes:
        disk, link, upload: bytes/s of each machine's disk, between processes, and to the Hub.
        heal, evaluate: tokens.
        price: of a device for an hour.
    """

    text: CalibrationText
    disk: float
    link: float
    upload: float
    heal: float
    evaluate: float
    price: float


@dataclass(frozen=True)
class PlannedStage:
    """Estimate of one stage. device, host: peak memory in bytes of one device, and of one process on the host."""

    name: str
    seconds: float
    device: float
    host: float
    note: str = ""


CHUNK = 16384  # tokens that go through a layer at a time on a GPU (surgery.calibration.layer_runner)


def estimate_memory(shape: LlamaShape, text: CalibrationText) -> tuple[float, float, float]:
    """Return the peak bytes (on the device, on the host, in a file) of a conversion.

    Device: the layer and its replacements in float32; three sets of second moments of the widest group of linears (fitted windows,
    held-out windows, and one for a part or the fit); activations of a chunk; slices of the head. Host: hidden states of the original
    and the converted model, and a layer as stored. File: the inputs of every layer in bf16, for the backward pass.
    """
    widest = max(moments_work(stage, i in (1, 3))[1] for i, stage in enumerate(shape.stages()))
    chunk = min(CHUNK, max(MIN_SHARD_TOKENS, text.fit // MAX_SHARDS)) * (4 * shape.mlp + 8 * shape.width)
    hidden = 2 * text.tokens * shape.width
    device = 4.0 * (2 * shape.layer + 3 * widest + chunk + 4 * 2**27)
    return device, 4.0 * 2 * hidden + 2 * shape.layer + 2e9, 2.0 * text.fit * shape.width * shape.layers


def plan_stages(shape: LlamaShape, device: DeviceRates, processes: int, options: PlanOptions) -> list[PlannedStage]:
    """Return the stages of converting a model to half of its linears' parameters, healing, evaluating and pushing it."""
    rates, kept = device.rates, shape.params - shape.layers * shape.layer / 2
    gpu, host, saved = estimate_memory(shape, options.text)
    io = shape.layers * 2 * shape.layer / options.disk
    budgets, layer = (rates.seconds(work, options.link) for work in calibrated_work(shape, options.text, processes))
    written = 2 * 2 * kept / options.disk  # layer shards, then the final shards, by the first process
    reads = 6 * io  # Fisher pass twice, trial, conversion, and a margin: every process reads every layer
    most = -(-shape.layers // processes)
    free = max(rates.seconds(data_free_work(shape)) * most, 2 * io / shape.layers * most)
    stages = [
        PlannedStage("convert, no text", device.starting + free + written, 4 * 2 * shape.layer * min(3, most), host),
        PlannedStage(
            "convert",
            device.starting
            + shape.layers * (budgets + layer)
            + reads
            + written
            + 2 * saved / options.disk / min(processes, MAX_SHARDS),
            gpu,
            host,
            f"{saved / 1e9:,.0f} GB in a file" if saved > 4e9 else "",
        ),
    ]
    teacher = 2 * shape.params
    steps = (8 + 2) * shape.params + 20 * shape.layers * options.text.window * shape.width
    trained = 16 * kept / processes + 4e9
    fits = trained + teacher < device.memory
    stages.append(
        PlannedStage(
            "heal", options.heal * steps / (device.training * processes * (0.96 if processes > 1 else 1)),
            trained + (teacher if fits else 0), 2 * shape.params,
            "" if fits else "teacher from a cache" if trained < device.memory else "does not fit",
        )
    )  # fmt: skip
    whole = 2 * kept + 6e9
    read = 2 * kept + 2 * shape.layers * options.text.window * shape.width
    note = "" if whole < device.memory else "one device does not hold it"
    stages.append(PlannedStage("evaluate", options.evaluate * read / (device.reading * processes), whole, 4e9, note))
    stages.append(PlannedStage("push", 2 * kept / options.upload, 0, 1e9))
    return stages


def format_table(shape: LlamaShape, device: DeviceRates, processes: list[int], options: PlanOptions) -> list[str]:
    """Return the lines of a Markdown table, a row per number of processes and stage."""
    lines = ["| stage | processes | hours | peak GB, device | peak GB, host, each process | cost | |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for count in processes:
        for stage in plan_stages(shape, device, count, options):
            hours = stage.seconds / 3600
            cost = "" if stage.name == "push" else f"{hours * count * options.price:,.2f}"
            memory = f"{stage.device / 1e9:,.0f}" if stage.device else ""
            note = stage.note + (", more than a device has" if stage.device > device.memory and not stage.note else "")
            cells = [stage.name, str(count), f"{hours:,.2f}", memory, f"{stage.host / 1e9:,.0f}", cost, note]
            if "does not" in stage.note:
                cells[2] = cells[5] = ""
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="70b")
    parser.add_argument("--device", choices=DEVICES, default="H200")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--price", type=float, default=3.5, help="Price of a device for an hour; default 3.5.")
    parser.add_argument("--tokens", type=int, default=131072, help="Calibration tokens; default 131072.")
    parser.add_argument("--sweeps", type=int, default=6)
    parser.add_argument("--heal", type=float, default=20e6, help="Tokens of healing; default 20e6.")
    parser.add_argument("--evaluate", type=float, default=10e6, help="Tokens of evaluation; default 10e6.")
    parser.add_argument("--disk", type=float, default=2.0, help="GB/s of a disk; default 2.")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s between processes; default 50.")
    parser.add_argument("--upload", type=float, default=0.1, help="GB/s to the Hub; default 0.1.")
    parser.add_argument("--check", nargs="+", choices=SHAPES, help="Convert these on this machine, in this order.")
    arguments = parser.parse_args()
    if arguments.check:
        print("\n".join(check_rates(arguments.check, CalibrationText(4096, 256, 1))))
        return
    text = CalibrationText(arguments.tokens, 2048, arguments.sweeps)
    disk, link, upload = (1e9 * number for number in (arguments.disk, arguments.link, arguments.upload))
    options = PlanOptions(text, disk, link, upload, arguments.heal, arguments.evaluate, arguments.price)
    print("\n".join(format_table(SHAPES[arguments.model], DEVICES[arguments.device](), arguments.processes, options)))


if __name__ == "__main__":
    main()
