"""Measured speeds of devices, and the seconds that counted work takes on them.

    seconds = sum over kinds of work of (count / speed)

The row of a CPU is one thread; N threads are N times as fast. `python -m surgery.conversion.estimation.speeds` measures
this machine's row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from surgery.conversion.estimation.counting import Work
from surgery.core.device import ONEDNN_LAYER, fast_float32_matmul
from surgery.core.errors import SurgeryError
from surgery.structures import linalg


@dataclass(frozen=True)
class Speeds:
    """Speeds of one device.

    Infinity: not counted by itself, because the speed of products was fitted to whole conversions.

    products, attention, solves: FLOP/s. roots: n^3/s of eigenproblems. small_root: least seconds of one eigenproblem.
    traffic: bytes/s of other operations. files: bytes/s of the disk. link: bytes/s between processes. memory: bytes of
    the device, 0 for a CPU. program: bytes of a process before any tensor. startup: seconds of imports. source: where
    the numbers come from.
    """

    products: float
    attention: float
    roots: float
    solves: float
    traffic: float
    small_root: float
    files: float
    link: float
    memory: float
    program: float
    startup: float
    source: str

    def seconds(self, work: Work, threads: int = 1) -> float:
        """Return the seconds of some work. threads: of a CPU."""
        counted = work.products / self.products + work.attention / self.attention + work.solves / self.solves
        counted += work.traffic / self.traffic
        counted += max(work.roots / self.roots, work.small_roots * self.small_root)
        return counted / threads + work.files / self.files + work.passed / self.link


INFINITE = float("inf")
SPEEDS = {
    "cpu": Speeds(
        products=200e9, attention=80e9, roots=8e9, solves=25e9, traffic=4e9, small_root=0.0, files=1e9, link=5e9,
        memory=0.0, program=0.5e9, startup=6.0, source="one thread of an x86-64 server with AVX-512, `python -m surgery.conversion.estimation.speeds`",
    ),
    "h200": Speeds(
        products=43e12, attention=43e12, roots=1024**3 / 0.010, solves=INFINITE, traffic=INFINITE, small_root=0.010, files=2e9, link=50e9,
        memory=141e9, program=2e9, startup=6.0,
        source="products and eigenproblems fitted to a 7B conversion on one H200 (docs/measurements/scale.md); disk "
        "and links assumed",
    ),
}  # fmt: skip


def device_speeds(name: str | None) -> tuple[str, Speeds]:
    """Return (name, speeds) of a device: `cpu`, a name of SPEEDS, `cuda` for the GPU in it, or None for the kind of
    this machine's device.
    """
    if name is None:
        name = "h200" if torch.cuda.is_available() else "cpu"
    key = "h200" if name.lower() == "cuda" else name.lower()
    if key not in SPEEDS:
        raise SurgeryError(
            f"--device {name}: speeds are known of {', '.join(SPEEDS)} only. For another GPU give h200, and expect "
            "times in proportion to "
            "its speed"
        )
    return key, SPEEDS[key]


def measure_cpu() -> dict[str, float]:
    """Return the speeds of one thread of this CPU, each the best of three runs."""
    torch.set_num_threads(1)
    with fast_float32_matmul(torch.device("cpu"), ONEDNN_LAYER), torch.no_grad():
        x, w = torch.randn(2048, 1024), torch.randn(1024, 1024)
        q = torch.randn(8, 16, 256, 64)
        m = torch.randn(4, 512, 512)
        m = m @ m.mT + torch.eye(512)
        lower, long = linalg.cholesky_ex(m)[0], torch.randn(2**24)
        attend = torch.nn.functional.scaled_dot_product_attention
        return {
            "products": 2 * x.numel() * 1024 / _best(lambda: x @ w),
            "attention": 4 * q.numel() * 256 / _best(lambda: attend(q, q, q, is_causal=True)),
            "roots": 4 * 512**3 / _best(lambda: linalg.eigh(m)),
            "solves": 4 * 512**3 / _best(lambda: linalg.solve_triangular(lower, m, upper=False)),
            "traffic": 12 * long.numel() / _best(lambda: long + long),
        }


def _best(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(3):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps({name: float(f"{value:.3g}") for name, value in measure_cpu().items()}, indent=2))
    print(json.dumps(asdict(SPEEDS["cpu"]), indent=2))
