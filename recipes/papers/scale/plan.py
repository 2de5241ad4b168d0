"""Estimate time, memory and cost of converting, healing, evaluating and pushing a large Llama.

The arithmetic is counted from the model's shape (work.py), the throughput is that measured on small models (rates.py).

python -m recipes.papers.scale.plan --model 70b --device H200 --processes 1 8 64 --price 3.5
python -m recipes.papers.scale.plan --check w256 w512 w1024     fit rates to small conversions here, predict the last one
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from recipes.papers.scale.rates import MEASUREMENTS, Rates, check_rates, fit_rates
from recipes.papers.scale.work import (
    SHAPES,
    CalibrationText,
    LlamaShape,
    calibrated_work,
    data_free_work,
    moments_work,
)
from recipes.papers.script import run_script
from surgery.calibration.partition import MAX_SHARDS, MIN_SHARD_TOKENS


@dataclass(frozen=True)
class DeviceRates:
    """Throughput and memory of a device.

    rates: throughput during conversion. memory: bytes. training: FLOP/s of bf16 training steps. inference: FLOP/s of a
    bf16 forward pass. startup: seconds before the first layer is converted.
    """

    rates: Rates
    memory: float
    training: float
    inference: float
    startup: float = 6.0


def h200() -> DeviceRates:
    """Return the rates of an H200, measured in docs/measurements.

    Conversion: eigenproblems of size 1024 or smaller take 10 ms. Training: 37,255 tokens/s for the 1B model with
    activation checkpointing. Inference: 3.24 x 32,768 tokens/s for 1.2B parameters in bf16.
    """
    one, length = SHAPES["1b"], 32768
    training = 37255 * (8 * one.params + 16 * one.layers * 2048 * one.width)
    inference = 3.24 * length * (2 * one.params + 2 * one.layers * length * one.width)  # attention is causal
    return DeviceRates(fit_rates(MEASUREMENTS[:1], 0.010), 141e9, training, inference)


DEVICES = {"H200": h200}


# -- a plan ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan.

    text: calibration text. disk, link, upload: bytes/s of a machine's disk, between processes, and to the Hub. heal,
    evaluate: tokens. price: of one device per hour.
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
    """Estimate of one stage. device, host: peak bytes on one device, and in the host memory of one process; note: a
    remark.
    """

    name: str
    seconds: float
    device: float
    host: float
    note: str = ""


CHUNK = 16384  # tokens per forward of a layer on a GPU (surgery.calibration.layer_runner)


def estimate_memory(shape: LlamaShape, text: CalibrationText) -> tuple[float, float, float]:
    """Return the peak bytes (on the device, on the host, in a file) while a layer is converted.

    Device: the layer and its replacement in float32; three copies of the moments of the widest group of linears (for
    the fit, held out, and temporary); the activations of a chunk; slices of the LM head. Host: hidden states of the
    original and the converted model, and one stored layer. File: inputs of every layer in bf16, for the backward pass.
    """
    widest = max(moments_work(stage, i in (1, 3))[1] for i, stage in enumerate(shape.stages()))
    chunk = min(CHUNK, max(MIN_SHARD_TOKENS, text.fit // MAX_SHARDS)) * (4 * shape.mlp + 8 * shape.width)
    hidden = 2 * text.tokens * shape.width
    device = 4.0 * (2 * shape.layer + 3 * widest + chunk + 4 * 2**27)
    return device, 4.0 * 2 * hidden + 2 * shape.layer + 2e9, 2.0 * text.fit * shape.width * shape.layers


def plan_stages(shape: LlamaShape, device: DeviceRates, processes: int, options: PlanOptions) -> list[PlannedStage]:
    """Return the estimates of all stages for one model, with half of the linears' parameters kept."""
    rates, kept = device.rates, shape.params - shape.layers * shape.layer / 2
    gpu, host, saved = estimate_memory(shape, options.text)
    io = shape.layers * 2 * shape.layer / options.disk
    budgets, layer = (rates.seconds(work, options.link) for work in calibrated_work(shape, options.text, processes))
    write = 2 * 2 * kept / options.disk  # layer shards, then checkpoint shards, by the first process
    read = 6 * io  # Fisher pass twice, trial, conversion, and a margin of two: every process reads every layer
    most = -(-shape.layers // processes)
    data_free = max(rates.seconds(data_free_work(shape)) * most, 2 * io / shape.layers * most)
    stages = [
        PlannedStage("convert, no text", device.startup + data_free + write, 4 * 2 * shape.layer * min(3, most), host),
        PlannedStage(
            "convert",
            device.startup
            + shape.layers * (budgets + layer)
            + read
            + write
            + 2 * saved / options.disk / min(processes, MAX_SHARDS),
            gpu,
            host,
            f"{saved / 1e9:,.0f} GB in a file" if saved > 4e9 else "",
        ),
    ]
    teacher = 2 * shape.params
    steps = (8 + 2) * shape.params + 20 * shape.layers * options.text.window * shape.width
    training = 16 * kept / processes + 4e9
    fits = training + teacher < device.memory
    stages.append(
        PlannedStage(
            "heal", options.heal * steps / (device.training * processes * (0.96 if processes > 1 else 1)),
            training + (teacher if fits else 0), 2 * shape.params,
            "" if fits else "teacher from a cache" if training < device.memory else "does not fit",
        )
    )  # fmt: skip
    loaded = 2 * kept + 6e9
    flops = 2 * kept + 2 * shape.layers * options.text.window * shape.width
    note = "" if loaded < device.memory else "does not fit on one device"
    stages.append(
        PlannedStage("evaluate", options.evaluate * flops / (device.inference * processes), loaded, 4e9, note)
    )
    stages.append(PlannedStage("push", 2 * kept / options.upload, 0, 1e9))
    return stages


def format_table(shape: LlamaShape, device: DeviceRates, processes: list[int], options: PlanOptions) -> list[str]:
    """Return the lines of a Markdown table: one row per number of processes and stage."""
    lines = ["| stage | processes | hours | peak GB, device | peak GB, host, each process | cost | |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for count in processes:
        for stage in plan_stages(shape, device, count, options):
            hours = stage.seconds / 3600
            cost = "" if stage.name == "push" else f"{hours * count * options.price:,.2f}"
            memory = f"{stage.device / 1e9:,.0f}" if stage.device else ""
            note = stage.note or ("exceeds the device's memory" if stage.device > device.memory else "")
            cells = [stage.name, str(count), f"{hours:,.2f}", memory, f"{stage.host / 1e9:,.0f}", cost, note]
            if "does not fit" in stage.note:
                cells[2] = cells[5] = ""
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the plan, or check the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="70b", help="Shape of the model. Default: %(default)s.")
    parser.add_argument("--device", choices=DEVICES, default="H200", help="Device to plan for. Default: %(default)s.")
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[1, 8, 64],
        help="Numbers of processes, one device each. Default: 1 8 64.",
    )
    parser.add_argument("--price", type=float, default=3.5, help="Price of one device per hour. Default: %(default)s.")
    parser.add_argument(
        "--tokens", type=int, default=131072, help="Number of calibration tokens. Default: %(default)s."
    )
    parser.add_argument("--sweeps", type=int, default=6, help="ALS sweeps per matrix. Default: %(default)s.")
    parser.add_argument("--heal", type=float, default=20e6, help="Number of training tokens. Default: 20e6.")
    parser.add_argument("--evaluate", type=float, default=10e6, help="Number of evaluation tokens. Default: 10e6.")
    parser.add_argument("--disk", type=float, default=2.0, help="Throughput of the disk in GB/s. Default: %(default)s.")
    parser.add_argument(
        "--link", type=float, default=50.0, help="Throughput between processes in GB/s. Default: %(default)s."
    )
    parser.add_argument("--upload", type=float, default=0.1, help="Upload rate in GB/s. Default: %(default)s.")
    parser.add_argument(
        "--check",
        nargs="+",
        choices=SHAPES,
        help="Instead of a plan, convert random models of these shapes, in order of size, and predict the last one "
        "from the others.",
    )
    arguments = parser.parse_args()
    if arguments.check:
        print("\n".join(check_rates(arguments.check, CalibrationText(4096, 256, 1))))
        return
    text = CalibrationText(arguments.tokens, 2048, arguments.sweeps)
    disk, link, upload = (1e9 * number for number in (arguments.disk, arguments.link, arguments.upload))
    options = PlanOptions(text, disk, link, upload, arguments.heal, arguments.evaluate, arguments.price)
    print("\n".join(format_table(SHAPES[arguments.model], DEVICES[arguments.device](), arguments.processes, options)))


if __name__ == "__main__":
    run_script(main)
