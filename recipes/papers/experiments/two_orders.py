"""One function, two algorithms: do both orders of the contraction of masked attention agree, and where do their times
cross? (Dao and Gu 2024, "Structured Masked Attention", section 4 of "Transformers are SSMs", eqs. 13 and 15, Figure 3)

python -m recipes.papers.experiments.two_orders run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.two_orders show [rows.jsonl ..] [--plot two_orders.png]

One head of N features and P values in float64 on one thread. A cell is a mask at a length T; the seeds draw other
numbers. The quadratic order is eq. 13 with the mask's dense matrix, the linear one eq. 15, where the mask multiplies
the T x (P N) products of values and keys: by cumulative sums (causal, decay, gates) or by the FFT (toeplitz, fourier).
`chunked` is the mask's own algorithm, quadratic in chunks of 64 tokens. `cross_decay` has T keys and T / 4 queries.
Times are the least processor times of several calls. `linformer` and `nystrom` are not eq. 12: they are timed with 32
projected keys or landmarks against softmax attention, and must equal it on 16 tokens with 16 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recipes.papers.attention.cross import CausalDecay, CrossMask, linear_attention, quadratic_attention
from recipes.papers.attention.linformer import Linformer
from recipes.papers.attention.nystrom import nystrom_attention
from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.sweep import BestRows, Cell, Row, Setting, best_rows, difference, mean_and_error
from recipes.papers.experiments.times import Times, faster_from, least_times, slope, words
from recipes.papers.experiments.verdicts import ANY, REFUTED, Comparison, Verdict, above, decide
from recipes.papers.script import run_script
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Mask, MaskInputs, Signals

MASK_NAMES = {"causal": "ones", "decay": "decay", "gates": "gates", "toeplitz": "toeplitz", "fourier": "fourier"}
ORDERS = (*MASK_NAMES, "cross_decay")
REFERENCES = ("linformer", "nystrom")
AGREE = 1e-10  # largest difference of both orders, over the largest output
CHUNK, PROJECTED, WHOLE, STEPS = 64, 32, 16, 40
REPEATS = 3
SETTINGS = (
    Setting(
        "cpu", "cpu", (32, 64, 128, 256, 512, 1024, 2048, 4096), (*ORDERS, *REFERENCES), (1.0,), 3, 1, 1, 4096, 1,
        {"features": 16, "values": 16, "slope_from": 256},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16, 32, 64), (*ORDERS, *REFERENCES), (1.0,), 2, 1, 1, 64, 1,
    {"features": 4, "values": 4, "slope_from": 16},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads."""
    return 1


@dataclass
class SelfMask:
    """A mask of the mixers as a matrix (T, T): its product is its chunked algorithm with one feature of 1."""

    mask: Mask
    signals: Signals
    length: int

    def dense(self) -> Tensor:
        """Return L (T, T)."""
        return self.mask.dense(torch.zeros(1, dtype=torch.long), self.length, self.signals)[0, 0, 0]

    def product(self, z_SX: Tensor) -> Tensor:
        """Return L z (T, X)."""
        ones_S1 = torch.ones(self.length, 1, dtype=z_SX.dtype)
        return self.chunked(ones_S1, ones_S1, z_SX)

    def chunked(self, q_TN: Tensor, k_TN: Tensor, v_TP: Tensor) -> Tensor:
        """Return Y (T, P) by the mask's algorithm."""
        rows = MaskInputs(
            q_TN[None, None, None], k_TN[None, None], v_TP[None, None], None, torch.zeros(1, dtype=torch.long),
            torch.tensor([self.length]), self.signals,
        )  # fmt: skip
        return self.mask.chunked(rows, None, CHUNK)[0][0, 0, 0]


def make_mask(method: str, length: int) -> CrossMask:
    """Return the mask of a method with random parameters, in float64. Uses torch's random numbers."""
    if method == "cross_decay":
        key_S = torch.arange(length)
        return CausalDecay(key_S[3::4], key_S, 0.99)
    kind = MASKS.config_type(MASK_NAMES[method])
    options = {"toeplitz": {"length": length}, "fourier": {"period": length}}.get(method, {})
    shape = AttentionShape(dim=8, heads=1, groups=1, key=1, value=1, scaling=1.0)
    config = kind(**options)
    mask: Mask = MASKS[config](config, shape).double()
    for parameter in mask.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return SelfMask(mask, mask.signals(torch.randn(1, length, 8, dtype=torch.float64)), length)


Call = Callable[[], Tensor]


def masked_calls(method: str, length: int, sizes: dict[str, Any]) -> tuple[dict[str, Call], float]:
    """Return (algorithm -> call, largest difference of their outputs over the largest output)."""
    mask = make_mask(method, length)
    queries = length // 4 if method == "cross_decay" else length
    q, k, v = (
        torch.randn(n, dims, dtype=torch.float64)
        for n, dims in ((queries, sizes["features"]), (length, sizes["features"]), (length, sizes["values"]))
    )
    calls: dict[str, Call] = {
        "quadratic": partial(quadratic_attention, q, k, v, mask),
        "linear": partial(linear_attention, q, k, v, mask),
    }
    if isinstance(mask, SelfMask):
        calls["chunked"] = partial(mask.chunked, q, k, v)
    expected, *others = (call() for call in calls.values())
    return calls, max(relative_error(other, expected) for other in others)


def softmax(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Return softmax attention between all pairs."""
    return (scaling * q @ k.mT).softmax(-1) @ v


def reference_calls(method: str, length: int, sizes: dict[str, Any]) -> tuple[dict[str, Call], float]:
    """Return (algorithm -> call, error at WHOLE tokens with as many projected keys or landmarks) of Linformer or
    Nystroemformer.
    """
    q, k, v = (torch.randn(1, 1, length, sizes[n], dtype=torch.float64) for n in ("features", "features", "values"))
    scaling, fewer = sizes["features"] ** -0.5, min(PROJECTED, length)
    few_q, few_k, few_v = (x[:, :, :WHOLE] for x in (q, k, v))
    if method == "nystrom":
        short: Call = partial(nystrom_attention, q, k, v, fewer, scaling)
        whole = nystrom_attention(few_q, few_k, few_v, WHOLE, scaling, steps=STEPS)
    else:
        short = partial(Linformer(length, fewer).double(), q, k, v, scaling)
        full = Linformer(WHOLE, WHOLE).double()
        for parameter in full.parameters():
            nn.init.eye_(parameter)
        whole = full(few_q, few_k, few_v, scaling)
    calls: dict[str, Call] = {"quadratic": partial(softmax, q, k, v, scaling), "linear": short}
    return calls, relative_error(whole, softmax(few_q, few_k, few_v, scaling))


def relative_error(given: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected number, at least the machine precision."""
    return max(float((given - expected).abs().max() / expected.abs().max()), torch.finfo(torch.float64).eps)


@torch.no_grad()
def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Return the rows of one mask and length: nothing is trained; `loss` is the difference of the algorithms."""
    threads, rows, sizes = torch.get_num_threads(), [], setting.options
    make = reference_calls if cell.method in REFERENCES else masked_calls
    torch.set_num_threads(1)
    try:
        for rate, seed in runs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                calls, error = make(cell.method, cell.width, sizes)
            seconds = dict(zip(calls, least_times(list(calls.values()), REPEATS)))
            macs = cell.width * (sizes["features"] + sizes["values"])
            keys = {"setting": setting.name, "method": cell.method, "width": cell.width, "rate": rate, "seed": seed}
            rows.append({**keys, "loss": error, "macs": macs, **{f"{n}_ms": 1e3 * s for n, s in seconds.items()}})
    finally:
        torch.set_num_threads(threads)
    return rows


# -- results --------------------------------------------------------------------------------------------
def times_of(best: BestRows, method: str, algorithm: str, seed: int | None = None) -> Times:
    """Return length -> mean milliseconds over seeds, or those of one seed."""
    found: dict[int, list[float]] = {}
    for (m, length, s), row in best.items():
        if m == method and seed in (None, s) and f"{algorithm}_ms" in row:
            found.setdefault(length, []).append(row[f"{algorithm}_ms"])
    return {length: mean_and_error(values)[0] for length, values in found.items()}


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "both orders are one function, and the linear one grows more slowly".

    The first half is algebra, which one larger difference refutes at any size.
    """
    best, least = best_rows(rows, setting), setting.options["slope_from"]
    error = max(row["loss"] for row in best.values())
    if error > AGREE:
        return Verdict(REFUTED, f"largest difference {error:.1e}")
    comparisons, slow = [], []
    for method in setting.methods:
        gaps = []
        for seed in range(setting.seeds):
            laws = [slope(times_of(best, method, name, seed), least) for name in ("quadratic", "linear")]
            gaps += [laws[0].alpha - laws[1].alpha] if laws[0] and laws[1] else []
        comparisons.append(Comparison(f"slope, {method}", difference(gaps), above(0.0), ANY))
        if faster_from(times_of(best, method, "linear"), times_of(best, method, "quadratic")) is None:
            slow.append(method)
    lacking = f"not faster at the longest row: {', '.join(slow)}" if slow else ""
    besides = [f"largest difference {error:.1e}"]
    return decide(setting, best, comparisons, setting.methods, lacking=lacking, besides=besides)


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: difference, slopes of the times, the length from which on the linear order is faster, and
    milliseconds.
    """
    best, least = best_rows(rows, setting), setting.options["slope_from"]
    longest = max(setting.widths)
    lines = [
        ["mask", "largest difference", *(f"slope, {n}" for n in ("quadratic", "linear", "chunked")), "linear faster", "chunked faster",
         f"ms at {longest:,}: quadratic, linear, chunked"]
    ]  # fmt: skip
    for method in setting.methods:
        own = [row["loss"] for (m, _, _), row in best.items() if m == method]
        if not own:
            continue
        times = {name: times_of(best, method, name) for name in ("quadratic", "linear", "chunked")}
        laws = [slope(known, least) for known in times.values()]
        starts = [
            words(faster_from(times[n], times["quadratic"]), times[n], times["quadratic"]) if times[n] else ""
            for n in ("linear", "chunked")
        ]
        cells = [f"{law.alpha:.2f} ± {law.error:.2f}" if law else "" for law in laws]
        shown = ", ".join(f"{known[longest]:.3g}" for known in times.values() if longest in known)
        lines.append([method, f"{max(own):.1e}", *cells, *starts, shown])
    return lines


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw the times of both orders against the length."""
    best = best_rows(rows, setting)
    for axis, algorithm in zip(axes, ("quadratic", "linear")):
        for method in setting.methods:
            known = times_of(best, method, algorithm)
            axis.plot(sorted(known), [known[length] for length in sorted(known)], "o-", markersize=3, label=method)
        axis.set(xscale="log", yscale="log", xlabel=f"tokens, {algorithm} order", ylabel="ms")
    axes[0].legend(fontsize=6)


EXPERIMENT = Experiment(
    name="two_orders",
    title="One function, two algorithms",
    source="Structured Masked Attention, Figure 3, eqs. 13, 15",
    claim="the quadratic and the linear order of the contraction are one function, and the time of the linear one "
    "grows more slowly",
    rule=(
        "no difference above 1e-10 of the largest output in float64, which alone refutes; for every mask and "
        "reference the slope of log processor time over log T from 256 tokens on, quadratic minus linear order, "
        "by seed, > 0. Also: the linear order is faster at the longest row"
    ),
    settings=SETTINGS,
    smoke=SMOKE,
    heads=heads,
    train=train,
    verdict=verdict,
    table=table,
    draw=draw,
)

if __name__ == "__main__":
    run_script(lambda: main(EXPERIMENT))
