"""Compile kernels for a Hopper GPU on a machine without one, and search the machine code for reads of unwritten
registers.

    python tests/helpers/machine_code.py two                  the least kernel that ptxas 12.8 compiles wrongly, by that ptxas
    python tests/helpers/machine_code.py mixing mlr local window features quantized delta levels pages    surgery's kernels, forward and backward, by the ptxas that surgery takes

prints a line for each kernel that reads a uniform register, which may hold an operand's address, before it is written.
Run it as a process of its own, because Triton's interpreter must be off.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget


class Instruction(NamedTuple):
    """One line of machine code: whether it is conditional, its name, and its operands."""

    guarded: bool
    name: str
    operands: str

    def writes(self) -> set[int]:
        """Uniform registers that the instruction writes: the first operand of uniform instructions."""
        into = re.match(r"UR(\d+)\b", self.operands)
        if not into or not re.match(r"U|R2UR|S2UR|VOTEU|REDUX", self.name):
            return set()
        wide = 4 if ".128" in self.name else 2 if re.search(r"\.(64|WIDE)", self.name) else 1
        return set(range(int(into[1]), int(into[1]) + wide))

    def reads(self) -> set[int]:
        found = set()
        rest = self.operands.split(",", 1)[-1] if self.writes() else self.operands
        for kind, number in re.findall(r"(gdesc\[|desc\[)?\bUR(\d+)\b", rest):
            start, count = int(number), 1
            if kind == "gdesc[" and self.name.startswith("HGMMA"):
                in_registers = re.match(
                    r"R\d+,\s*R\d+", self.operands
                )  # the left operand: half of the four describe it
                start, count = (start + 2, 2) if in_registers else (start, 4)
            elif kind or f"UR{number}.64" in rest or (".64" in self.name and self.name.startswith("U")):
                count = 2
            found |= set(range(start, start + count))
        return found


def parse_instructions(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions, and the positions of labels."""
    lines, labels = [], {}
    for line in code.splitlines():
        line = re.sub(r"/\*[0-9a-fx]*\*/", "", line).strip()
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            lines.append(Instruction(bool(found[1]), found[2], found[3]))
    return lines, labels


def successors(at: int, lines: list[Instruction], labels: dict[str, int]) -> list[int]:
    """Return the positions that may follow an instruction."""
    one = lines[at]
    ends = one.name.startswith(("EXIT", "RET")) and not one.guarded
    jumps = re.search(r"\.L_x_\d+", one.operands) if one.name.startswith(("BRA", "BRX", "JMP", "CALL")) else None
    falls = one.guarded or jumps is None or one.name.startswith("CALL") or re.match(r"!?U?P", one.operands)
    places = [labels[jumps[0]]] if jumps else []
    return [place for place in [*places, *([at + 1] if falls and not ends else [])] if place < len(lines)]


def unwritten_reads(code: str) -> list[str]:
    """Return instructions that some path reaches while they read a uniform register that nothing has written."""
    lines, labels = parse_instructions(code)
    before: dict[int, set[int]] = {0: set(range(63))}
    work, found = [0], {}
    while work:
        at = work.pop()
        blank = before[at] & lines[at].reads()
        if blank:
            found[at] = f"UR{min(blank)} in {lines[at].name} {lines[at].operands}"
        left = before[at] - lines[at].writes()
        for place in successors(at, lines, labels):
            if place not in before or not left <= before[place]:
                before[place] = before.get(place, set()) | left
                work.append(place)
    return [found[at] for at in sorted(found)]


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a cubin as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        return subprocess.run([tool, "-c", "-ndf", file.name], capture_output=True, text=True, check=True).stdout


class FakeHopperDriver:
    """Triton driver that pretends to have a Hopper GPU: it compiles and keeps the machine code, but launches
    nothing.
    """

    def __init__(self) -> None:
        self.binaries: list[tuple[str, bytes]] = []
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(get_device_properties=lambda _: properties, load_binary=self.load)

    def load(self, name: str, cubin: bytes, *_: Any) -> tuple[int, int, int, int, int]:
        self.binaries.append((name, cubin))
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *_: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


@triton.jit
def two(x, y, z, w, out, T, F, V, BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr):
    """Compute (masked x y^T) z + x w: three products whose right operands share an address and differ in width."""
    t, f, v = tl.arange(0, BT), tl.arange(0, BF), tl.arange(0, BV)
    left = tl.load(x + t[:, None] * F + f[None, :], mask=(f < F)[None, :], other=0.0)
    total = tl.zeros((BT, BV), tl.float32)
    for s in range(0, T, BT):
        right = tl.load(y + (s + t)[:, None] * F + f[None, :], mask=(f < F)[None, :], other=0.0)
        scores = tl.dot(left, tl.trans(right))
        scores = tl.where(s + t[None, :] <= t[:, None] + 192, scores, 0.0)
        values = tl.load(z + (s + t)[:, None] * V + v[None, :], mask=(v < V)[None, :], other=0.0)
        total = tl.dot(scores.to(tl.bfloat16), values, total)
    right = tl.load(w + f[:, None] * V + v[None, :], mask=(f < F)[:, None] & (v < V)[None, :], other=0.0)
    total = tl.dot(left, right, total)
    tl.store(out + t[:, None] * V + v[None, :], total, mask=(v < V)[None, :])


def compile_two() -> None:
    """Compile the kernel `two`."""
    numbers = torch.empty(256, 18, dtype=torch.bfloat16)
    two[(1,)](numbers, numbers, numbers, numbers, numbers.float(), 256, 18, 3, BT=64, BF=32, BV=16)


def compile_mixing() -> None:
    """Compile block mixing with narrow heads, in a block of more than one tile."""
    from surgery.mixers.masks.toeplitz_block_mixing import toeplitz_causal

    sizes = (1, 2, 2, 70, 18), (1, 2, 70, 18), (1, 2, 70, 3)
    q, k, v = (torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes)
    zero_B = torch.zeros(1, dtype=torch.int64)
    place = {"start_B": zero_B, "count_B": zero_B + 70}
    kernel = torch.rand(2, 2), torch.rand(2, 2, 2)
    out, _ = toeplitz_causal(q, k, v, *kernel, first_BRGFV=None, **place, block=70, chunk=70)
    out.sum().backward()


def compile_mlr() -> None:
    """Compile MLR attention with three levels and biases."""
    from surgery.mixers import AttentionShape
    from surgery.mixers.common.kv_layout import KVLayout
    from surgery.mixers.common.softmax import ScoreTerm, attend

    ranks, extents, length = (32, 16, 16), (1024, 256), 2048
    q, k, v = (torch.randn(1, 1, 1, length, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    biases = torch.zeros(len(extents), 1, 1, requires_grad=True)
    parts = zip(q.split(ranks, -1), k[:, :, 0].split(ranks, -1), (None, *extents), (None, *biases))
    terms = [ScoreTerm(a, b, extent, "sliding", bias) for a, b, extent, bias in parts]
    shape = AttentionShape(64, 1, 1, 64, 64, 0.125, True, None, None)
    attend(terms, v[:, :, 0], KVLayout(torch.tensor([length]), length, length, False), shape).sum().backward()


def compile_local() -> None:
    """Compile attention over a window and sinks, with whole tiles and a partial tile of sinks."""
    from surgery.mixers import AttentionShape
    from surgery.mixers.common.window_hybrid import RecentAndSinks, local_attention

    q = torch.randn(1, 1, 4, 300, 64, dtype=torch.bfloat16, requires_grad=True)
    recent, sinks = (torch.randn(1, 1, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (556, 4))
    keys, zero_B = RecentAndSinks(recent, sinks), torch.zeros(1, dtype=torch.int64)
    out = local_attention(q, keys, keys, zero_B, AttentionShape(256, 4, 1, 64, 64, 0.125), 64, with_largest=True)
    out.sums().sum().backward()


def compile_window() -> None:
    """Compile a decoding step behind a window: log-linear states of the delta rule, and a normalised state; and the same
    in the pages of a server.
    """
    from surgery.mixers import MIXERS, AttentionShape, MixerInputs
    from surgery.mixers.linear import step_in_pool
    from surgery.mixers.linear_config import LinearAttention
    from surgery.vllm.mixer_state import StateLayout

    shape = AttentionShape(256, 8, 2, 64, 64, 0.125, rotary=64)
    configs = (
        LinearAttention(mask="hierarchical", scores="delta", window=64, sinks=4),
        LinearAttention(mask="ones", features="hedgehog", normalise=True, window=64, sinks=4),
        LinearAttention(
            mask={"name": "hierarchical", "block": 512},
            scores="delta",
            features="hedgehog",
            rope="both",
            window=64,
            sinks=4,
            output_gate="value",
        ),
    )
    for config in configs:
        mixer = MIXERS[config](config, shape).bfloat16()
        state = mixer.empty_state(1, "cpu")
        for name, t in state.tensors.items():
            waits = name.startswith(("ring.", "sink.")) and name.rpartition(".")[2] in ("k", "v", "linear_k")
            state.tensors[name] = t.bfloat16() if waits else t
        sizes = (8, 1, 64), (2, 1, 64), (2, 1, 64), (1, 256)
        with torch.no_grad():
            angle = torch.randn(1, 1, 64, dtype=torch.bfloat16)
            inputs = MixerInputs(*(torch.randn(1, *size, dtype=torch.bfloat16) for size in sizes), rope=(angle, angle))
            mixer.mix(inputs, state)
            layout, zero_B = StateLayout(mixer, 4096), torch.zeros(1, dtype=torch.int32)
            pool = layout.views(torch.zeros(1, layout.size))
            step_in_pool(inputs.q_BHTK, mixer, inputs, zero_B, pool, zero_B)


def compile_features() -> None:
    """Compile features and the join of a mixer as in the recipe hybrid-25, on heads of 64."""
    from surgery.mixers import AttentionShape
    from surgery.mixers.common.linear_features import FeaturePlan, linear_features
    from surgery.mixers.common.window_hybrid import join_and_gate
    from surgery.mixers.features.hedgehog import Hedgehog, HedgehogMap

    x, rotation = torch.randn(1, 70, 2, 64, dtype=torch.bfloat16, requires_grad=True), (torch.ones(1, 70, 64),) * 2
    feature_map = HedgehogMap(Hedgehog(), AttentionShape(128, 2, 2, 128, 64, 0.125))
    plan = FeaturePlan("queries", "both", True, 0.3, True, 4, 60, 1, torch.bfloat16)
    features, near = linear_features(x, rotation, feature_map, torch.zeros(1, 70), plan)
    weight_H = torch.ones(2, requires_grad=True)
    out = join_and_gate(near.transpose(1, 2).float(), features[..., :64], weight_H, weight_H, near, torch.bfloat16)
    out.sum().backward()


def compile_quantized() -> None:
    """Compile products with packed integers, for one token and for several, with and without groups."""
    from surgery.structures.fp8 import quantize_tokens
    from surgery.structures.quantized import Storage, quantize_rows, quantized_product

    for storage in (Storage(8), Storage(8, 32), Storage(4, 64), Storage(4, 8)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            stored = quantize_rows(torch.randn(1, 1100, 1024).to(dtype), storage)
            for tokens in (1, 5):
                quantized_product(torch.randn(tokens, 1, 1024).to(dtype), *stored, storage)
    for columns in (1024, 20000):
        for dtype in (torch.bfloat16, torch.float32):
            quantize_tokens(torch.randn(3, columns).to(dtype))


def compile_delta() -> None:
    """Compile the gated delta rule in chunks, forward and backward."""
    from surgery.kernels.gated_delta import gated_delta

    q, k, v = (torch.randn(1, 2, *one, 70, 64, dtype=torch.bfloat16, requires_grad=True) for one in ((1,), (), ()))
    out, _ = gated_delta(q, k, v, torch.rand(1, 2, 70), torch.zeros(1, 2, 70))
    out.sum().backward()


def compile_levels() -> None:
    """Compile log-linear Gated DeltaNet over enough chunks for a launch of each kernel: by slots, and by levels where a
    transition is large beside a state.
    """
    from surgery.kernels.log_linear_delta import log_linear_delta

    tokens, wide = 2048, torch.bfloat16
    for features, values in ((128, 128), (64, 64), (64, 16)):
        sizes = (1, tokens, features), (tokens, features), (tokens, values)
        q, k, v = (torch.randn(1, 1, *size, dtype=wide, requires_grad=True) for size in sizes)
        out = log_linear_delta(
            q, k, v, torch.rand(1, 1, tokens), torch.zeros(1, 1, tokens), torch.rand(1, tokens, 1, 1, 12)
        )  # fmt: skip
        out.sum().backward()


def compile_pages() -> None:
    """Compile pieces of prompts in the pages of a server's cache: log-linear states with and without blocks, the window."""
    from surgery.mixers.common.packed_pieces import PackedPieces
    from surgery.mixers.common.request_rows import write_request_rows
    from surgery.mixers.common.window_hybrid import gather_window, store_window
    from surgery.mixers.masks.log_linear import log_linear_in_pool

    pieces, wide, page_R = PackedPieces((70, 200), (3, 65), "cpu"), torch.bfloat16, torch.arange(2)
    q, k, v = (torch.randn(1, 2, *one, 270, size, dtype=wide) for one, size in (((4,), 256), ((), 256), ((), 64)))
    tokens = q, k, v, torch.rand(1, 2, 270), torch.zeros(1, 2, 270), torch.rand(1, 270, 2, 4, 29)
    for bits in (0, 9):
        given = {"page_R": page_R, "pieces": pieces, "chunk": 64, "block_bits": bits}
        log_linear_in_pool(*tokens, pool_PNGFV=torch.zeros(2, 12, 2, 256, 64), **given)
    new = {"k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1), "gate": torch.zeros(270, 2)}
    pool = {f"ring.{name}": torch.zeros(2, 65, *t.shape[1:]) for name, t in new.items()}
    pool |= {f"sink.{name}": torch.zeros(2, 4, *new[name].shape[1:]) for name in "kv"}
    length_R, start_R, page_RP = (torch.zeros(*size, dtype=torch.int32) for size in ((2,), (3,), (2, 4)))
    write_request_rows(length_R, start_R, page_RP, page_R.int(), page_R.int(), block=16, no_page=0)
    plan = pieces.window_plan(64, 4, 65, 64)
    gather_window(new["k"], new, pool, page_R, plan, list(new))
    store_window(new["k"], new, pool, page_R, plan)


def main(names: list[str]) -> None:
    """Compile the named kernels and print a line for each with unwritten reads."""
    from surgery.core import dispatch
    from surgery.core.dispatch import use_kernels
    from surgery.kernels import ptxas as assembler

    gpu = FakeHopperDriver()
    triton.runtime.driver.set_active(gpu)
    nvidia = assembler.nvidia_knobs()
    if names != ["two"] and nvidia.ptxas.version == assembler.BROKEN_VERSION:
        assembler.set_ptxas(nvidia, next(assembler.sound_ptxas_paths(nvidia)))
    dispatch._check_interpreter = lambda: None  # kernels are compiled for a GPU that is not there
    with use_kernels("kernel"):
        for name in names:
            COMPILED[name]()
    for name, cubin in gpu.binaries:
        for what in unwritten_reads(disassemble(cubin)):
            print(f"{name}: {what}")
    print(f"{len(gpu.binaries)} kernels, ptxas {nvidia.ptxas.version}")


COMPILED = {
    "two": compile_two,
    "mixing": compile_mixing,
    "mlr": compile_mlr,
    "local": compile_local,
    "window": compile_window,
    "features": compile_features,
    "quantized": compile_quantized,
    "delta": compile_delta,
    "levels": compile_levels,
    "pages": compile_pages,
}

if __name__ == "__main__":
    main(sys.argv[1:])
