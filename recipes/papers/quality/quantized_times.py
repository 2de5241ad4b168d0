"""Decoding times of the tables "at equal bytes" in docs/measurements/quality.md: models of a shape with random weights,
linears in 16, 8 or 4 bits.

python -m recipes.papers.quality.quantized_times 1b 27m --json ROWS.jsonl [--only "4 bits"]

A step decodes one token of one sequence behind --context tokens, greedily. All models of a shape are measured in one
process, in turns: `graph` is a CUDA graph of the whole step over preallocated keys and values, `eager` transformers'
forward, one operation at a time. Linears in integers are computed in five ways:

    packed           as `surgery quantize` stores and computes them: on a GPU by kernels/quantized, integers unpacked inside the product
    multiplied out   the same integers: integers times scales, then the product of the structure, as of many tokens
    compiled         the same integers; product and scales of each linear compiled by torch.compile into kernels for one token
    kernel           the same integers in torch's own kernels: aten::_weight_int4pack_mm and _weight_int8pack_mm, one call for each core
    torchao          dense linears only, by torchao's quantize_: Int4WeightOnlyConfig (tile_packed_to_4d), Int8WeightOnlyConfig; the latter
                     is meant to be compiled, and `torchao compiled` is

With 16 bits, `fused` is low rank with the projections of one input computed together (surgery.fuse_projections).
`error` of a row is the largest relative difference of a linear's output from `multiplied out`, over the linears of the
first layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from recipes.papers.quality.quantized import append_row, read_rows
from recipes.papers.script import run_script
from surgery.core.device import choose_device
from surgery.core.errors import SurgeryError
from surgery.eval.speed.generation import FULL_ROWS, RepeatedStep, repeat_rows, synchronized_time
from surgery.eval.speed.model import SHAPES, allow_cudnn, make_llama, replace_linears
from surgery.modeling.fuse import fuse_projections
from surgery.modeling.quantize import make_storage, quantize_module
from surgery.structures.low_rank import LowRank
from surgery.structures.quantized import QuantizedLinear, Storage, dequantize_rows

MODELS: dict[str, dict[str, Any]] = {
    "1b": SHAPES["full"],
    "27m": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "small": SHAPES["small"],
}
MULTIPLES = {"1b": 64, "27m": 32, "small": 32}  # ranks are multiples of this
CONTEXT = {"1b": 1024, "27m": 1024, "small": 64}
WARMUP_STEPS = 3


class Variant(NamedTuple):
    """A model to time. keep: share of the parameters of the linears, 1 for dense ones; way: how it is computed, see the
    module; "": plainly, with 16 bits.
    """

    keep: float
    bits: int
    way: str

    @property
    def name(self) -> str:
        """Return the name that --only selects by."""
        linears = "dense" if self.keep == 1 else f"low_rank {self.keep:.0%}"
        return f"{linears}, {self.bits} bits" + (f", {self.way}" if self.way else "")


STORED = ((1.0, 8), (1.0, 4), (0.5, 4), (0.75, 4), (0.5, 8), (0.75, 8))  # (keep, bits) of the rows in integers
VARIANTS = (
    *(Variant(keep, 16, "") for keep in (1.0, 0.75, 0.5)),
    *(Variant(keep, 16, "fused") for keep in (0.75, 0.5)),
    *(Variant(*stored, "kernel") for stored in STORED),
    *(Variant(*stored, "packed") for stored in STORED),
    *(Variant(*stored, "multiplied out") for stored in STORED),
    *(Variant(1.0, bits, "torchao") for bits in (8, 4)),
    *(Variant(*stored, "compiled") for stored in STORED),
    Variant(1.0, 8, "torchao compiled"),
)


# -- linears of integers -----------------------------------------------------------------------------------
class Core(NamedTuple):
    """A core as a matrix of integers (O, I), packed if it has 4 bits, and its scales (O, I / g)."""

    integers: Tensor
    scale: Tensor
    inputs: int


def cores_of(linear: QuantizedLinear) -> list[Core]:
    """Return the cores of a dense or low-rank linear in the order in which they are applied."""
    cores = []
    for name in sorted(linear.shapes):  # low rank: right (R, I) before weight (1, O, R)
        integers, scale = getattr(linear, name), getattr(linear, f"{name}_scale")
        cores.append(Core(integers.flatten(0, -2), scale.flatten(0, -2), linear.shapes[name][-1]))
    return cores


def swap_halves(integers: Tensor) -> Tensor:
    """Return bytes with the first of two inputs in the high bits, as torch's kernel takes them; this package has it in
    the low bits.
    """
    return ((integers & 15) << 4 | integers >> 4).contiguous()


class OneTokenProduct(nn.Module):
    """The product of one core with one token as a sum that torch.compile fuses with the scales."""

    def __init__(self, core: Core, storage: Storage):
        super().__init__()
        self.integers, self.scale, self.inputs, self.storage = core.integers, core.scale, core.inputs, storage

    def forward(self, x: Tensor) -> Tensor:
        """Return W x (1, 1, O) for x (1, 1, I)."""
        weight_OI = dequantize_rows(self.integers, self.scale, self.inputs, self.storage)
        return (weight_OI.float() * x.flatten().float()).sum(-1).to(x.dtype).view(1, 1, -1)


class Int4Product(nn.Module):
    """The product of one core of 4 bits by aten::_weight_int4pack_mm, which takes groups of 32 to 256 and inputs that
    32 divides.
    """

    def __init__(self, core: Core, storage: Storage):
        super().__init__()
        self.group = storage.group_size(core.inputs)
        if core.inputs % self.group:
            raise SurgeryError(
                f"torch's kernel of 4 bits takes equal groups: {self.group} must divide {core.inputs} inputs. Choose "
                "another --group"
            )
        tiles = next(tiles for tiles in (8, 4, 2) if core.inputs % (16 * tiles) == 0)
        self.packed = torch.ops.aten._convert_weight_to_int4pack(swap_halves(core.integers), tiles)
        # The kernel's value is (integer - 8) * scale + zero, (groups, O, 2).
        self.scales = torch.stack([core.scale, torch.zeros_like(core.scale)], -1).transpose(0, 1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Return W x (.., O) for x (.., I)."""
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = torch.ops.aten._weight_int4pack_mm(rows, self.packed, self.group, self.scales)
        return y.view(*x.shape[:-1], -1)


class Int8Product(nn.Module):
    """The product of one core of 8 bits, one scale per output, by aten::_weight_int8pack_mm."""

    def __init__(self, core: Core):
        super().__init__()
        self.integers, self.scale = core.integers.contiguous(), core.scale.flatten().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Return W x (.., O) for x (.., I)."""
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.integers, self.scale)
        return y.view(*x.shape[:-1], -1)


class MultipliedOut(nn.Module):
    """A linear of integers that multiplies them by their scales at every call."""

    def __init__(self, linear: QuantizedLinear):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Return B x + bias (.., O) for x (.., I)."""
        y: Tensor = self.linear.float_linear()(x)
        return y


def linear_by_way(linear: QuantizedLinear, way: str) -> nn.Module:
    """Return a linear of the same integers that computes them by `way`; see the module."""
    if way == "packed":
        return linear
    if way == "multiplied out":
        return MultipliedOut(linear)
    storage, cores = linear.storage, cores_of(linear)
    if way == "kernel":
        if not cores[0].integers.is_cuda:
            raise SurgeryError("torch's kernels of integers are measured on a GPU")
        return nn.Sequential(
            *(Int4Product(core, storage) if storage.bits == 4 else Int8Product(core) for core in cores)
        )
    product = nn.Sequential(*(OneTokenProduct(core, storage) for core in cores))
    if cores[0].integers.is_cuda:
        for part in product:
            part.compile(dynamic=False)
    return product


@torch.no_grad()
def store(model: Any, variant: Variant, group: int) -> float | None:
    """Store the linears of the layers as the variant says, in place; return the error of a way beside `multiplied out`,
    see the module.
    """
    if variant.bits == 16:
        if variant.way == "fused":
            fuse_projections(model)
        return None
    layers = model.model.layers
    if variant.way.startswith("torchao"):
        store_with_torchao(layers, variant, group)
        return None
    storage, worst = make_storage(variant.bits, group if variant.bits == 4 else None), 0.0
    linears = [(path, one) for path, one in layers.named_modules() if hasattr(one, "in_features")]
    for path, linear in linears:
        stored = quantize_module(linear, storage)
        assert isinstance(stored, QuantizedLinear)
        made = linear_by_way(stored, variant.way)
        if path.startswith("0."):
            x = torch.randn(1, 1, stored.in_features, device=linear_device(stored), dtype=model.dtype)
            exact, found = stored.float_linear()(x).float(), made(x).float()
            worst = max(worst, float((found - exact).norm() / exact.norm()))
        layers.set_submodule(path, made)
    return worst if variant.way != "multiplied out" else None


def linear_device(linear: nn.Module) -> torch.device:
    """Return the device of a linear's buffers."""
    return next(linear.buffers()).device


def store_with_torchao(layers: nn.Module, variant: Variant, group: int) -> None:
    """Quantize dense linears by torchao, in the formats that need no other package, and compile each where the variant
    says so.
    """
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise SurgeryError("torchao is not installed. Install it: pip install torchao") from None
    compiled = variant.way.endswith("compiled")  # torchao then sets options of torch.compile for the whole process
    int4 = {"group_size": group, "int4_packing_format": "tile_packed_to_4d", "set_inductor_config": compiled}
    quantize_(
        layers,
        Int4WeightOnlyConfig(**int4) if variant.bits == 4 else Int8WeightOnlyConfig(set_inductor_config=compiled),
    )
    for linear in layers.modules():
        if compiled and isinstance(linear, nn.Linear) and linear.weight.is_cuda:
            linear.compile(dynamic=False)


# -- steps -----------------------------------------------------------------------------------------------
def make_variant(shape: str, variant: Variant, group: int, device: torch.device) -> tuple[Any, float | None]:
    """Return (model of the variant with random weights, error of its way)."""
    torch.manual_seed(0)
    model = make_llama(MODELS[shape], device, torch.bfloat16)
    model.config._attn_implementation = FULL_ROWS
    if variant.keep < 1:
        replace_linears(model, LowRank(), MULTIPLES[shape], variant.keep)
    return model, store(model, variant, group)


def linear_bytes(model: Any) -> int:
    """Return the bytes of the tensors in the layers, norms included."""
    return sum(t.numel() * t.element_size() for t in [*model.model.layers.parameters(), *model.model.layers.buffers()])


def random_cache(model: Any, context: int) -> DynamicCache:
    """Return a cache of one row with `context` tokens of random keys and values, so that no linear is run on many
    tokens.
    """
    config, cache = model.config, DynamicCache(config=model.config)
    for layer in range(config.num_hidden_layers):
        size = (1, config.num_key_value_heads, context, config.head_dim)
        cache.update(*torch.randn(2, *size, device=model.device, dtype=model.dtype), layer)
    return cache


class TimedSteps:
    """Decoding steps of one model behind a context: captured in a CUDA graph, and eager.

    Attributes: runs: ms of a step by kind, one number for each turn. problem: why there is no graph.
    """

    def __init__(self, model: Any, context: int):
        self.model, self.device = model, model.device
        cache = repeat_rows(random_cache(model, context), 1, RepeatedStep.WARMUPS + 2)
        step = RepeatedStep(model, cache, torch.zeros(1, 1, dtype=torch.long, device=self.device))
        captured = self.device.type == "cuda" and step.problem is None
        self.problem = step.problem
        self.steps: dict[str, Callable[[], None]] = {"graph": step} if captured else {}
        self.steps["eager"] = step._step
        self.runs: dict[str, list[float]] = {kind: [] for kind in self.steps}
        for run in self.steps.values():
            for _ in range(WARMUP_STEPS):
                run()

    def take_turn(self, steps: dict[str, int]) -> None:
        """Time `steps` steps of each kind in a row."""
        for kind, run in self.steps.items():
            began = synchronized_time(self.device)
            for _ in range(steps[kind]):
                run()
            self.runs[kind].append(1e3 * (synchronized_time(self.device) - began) / steps[kind])


def measure_shape(shape: str, variants: list[Variant], arguments: argparse.Namespace, device: torch.device) -> None:
    """Time the variants of a shape in turns, and append a row for each. The first variant is what ratios refer to."""
    context = arguments.context or CONTEXT[shape]
    timed: dict[Variant, TimedSteps] = {}
    rows: dict[Variant, dict[str, Any]] = {}
    began = time.monotonic()
    for variant in variants:
        row = rows[variant] = describe_row(shape, variant, arguments, context, device)
        if time.monotonic() - began > arguments.seconds:
            row["note"] = f"not measured: {arguments.seconds:g} seconds were over"
            continue
        try:
            model, error = make_variant(shape, variant, arguments.group, device)
            row |= {"bytes": linear_bytes(model)} if variant.way in ("", "packed", "multiplied out") else {}
            row |= {} if error is None else {"error": float(f"{error:.2g}")}
            timed[variant] = TimedSteps(model, context)
        except (RuntimeError, NotImplementedError, SurgeryError, AttributeError, ValueError, AssertionError) as failure:
            row["note"] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        print(f"{shape}: {variant.name}: {row.get('note', 'ready')}, {time.monotonic() - began:.0f} s", flush=True)
    for _ in range(arguments.turns):
        for steps in timed.values():
            steps.take_turn({"graph": arguments.steps, "eager": max(1, arguments.steps // 3)})
    for variant, row in rows.items():
        if variant in timed:
            found = timed[variant]
            row |= {f"{kind}_ms": round(median(runs), 4) for kind, runs in found.runs.items()}
            row["runs_ms"] = {kind: [round(ms, 4) for ms in runs] for kind, runs in found.runs.items()}
            row |= {"problem": found.problem} if found.problem else {}
        append_row(arguments.json, row)
        print(format_line(row, rows[variants[0]]), flush=True)


def is_chosen(name: str, words: list[str]) -> bool:
    """Return whether a name has one of the words, and none of those that a dash precedes."""
    wanted = [word for word in words if not word.startswith("-")]
    return all(word[1:] not in name for word in words if word not in wanted) and (
        not wanted or any(word in name for word in wanted)
    )


def describe_row(
    shape: str, variant: Variant, arguments: argparse.Namespace, context: int, device: torch.device
) -> dict[str, Any]:
    """Return what a row is of."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "kind": "times",
        "shape": shape,
        "linears": "dense" if variant.keep == 1 else "low_rank",
        "keep": variant.keep,
        "bits": variant.bits,
        "way": variant.way,
        "group": arguments.group if variant.bits == 4 else None,
        "context": context,
        "device": name,
        "torch": torch.__version__.split("+")[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def format_line(row: dict[str, Any], base: dict[str, Any]) -> str:
    """Format a row as a line of a table: ms of a step and ratio to the dense original, captured and eager."""
    name = Variant(row["keep"], row["bits"], row["way"]).name
    cells = [
        f"{row[kind]:.4g} ({row[kind] / base[kind]:.2f})" if kind in row and kind in base else ""
        for kind in ("graph_ms", "eager_ms")
    ]
    return f"| {row['shape']}: {name} | {' | '.join(cells)} | {row.get('error', '')} | {row.get('note', '')} |"


def main() -> None:
    """Time every variant of each shape that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("shape", nargs="+", choices=tuple(MODELS), help="Shapes to time.")
    add("--group", type=int, default=32, help="Inputs that share a scale, with 4 bits. Default: %(default)s.")
    add("--context", type=int, help="Tokens before the step. Default: 1024, and 64 for `small`.")
    add(
        "--only",
        action="append",
        help="Time only variants whose name contains this, and the original; --only=-WORD leaves out. Repeatable.",
    )
    add("--turns", type=int, default=5, help="Turns of every model; the median counts. Default: %(default)s.")
    add("--steps", type=int, default=60, help="Steps of a turn; a third of it eager. Default: %(default)s.")
    add("--seconds", type=float, default=600, help="Prepare no further model after this time. Default: %(default)s.")
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add("--json", type=Path, help="Append the rows to this file, and do not measure a shape that it has.")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    variants = [one for one in VARIANTS if one is VARIANTS[0] or is_chosen(one.name, arguments.only or [])]
    known = {row["shape"] for row in read_rows(arguments.json) if row["kind"] == "times"}
    torch._dynamo.config.recompile_limit = 256  # every shape of a core is a compilation of its own
    for shape in arguments.shape:
        if shape in known:
            print(f"{shape}: measured already, in {arguments.json}")
            continue
        with torch.no_grad(), allow_cudnn(False):
            measure_shape(shape, variants, arguments, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run_script(main)
