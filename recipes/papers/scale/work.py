"""Count the arithmetic of a conversion from a model's shape: products (FLOP) and eigenproblems (n^3), by layer.

Work is distributed over processes by the same code as in a conversion (surgery.calibration.partition,
surgery.core.distributed). n tokens, T window, D width, F MLP width; an O x I matrix becomes BTT on a 4 x 4 grid of a x
d blocks of rank s with half of its parameters (recipe btt-half).
"""

from __future__ import annotations

from dataclasses import dataclass

from surgery.calibration.partition import MAX_SHARDS, MIN_SHARD_TOKENS
from surgery.core.distributed import DistContext


@dataclass(frozen=True)
class LlamaShape:
    """Shape of a Llama model."""

    layers: int
    width: int
    mlp: int
    heads: int
    groups: int
    vocabulary: int
    tied: bool = False
    head: int = 128

    def stages(self) -> list[list[tuple[int, int]]]:
        """Return (O, I) of a layer's linears, grouped by shared input, in order."""
        queries, keys, width, mlp = self.heads * self.head, self.groups * self.head, self.width, self.mlp
        return [
            [(queries, width), (keys, width), (keys, width)], [(width, queries)], [(mlp, width), (mlp, width)], [(width, mlp)],
        ]  # fmt: skip

    @property
    def layer(self) -> int:
        """Parameters of a layer's linears."""
        return sum(out * in_ for stage in self.stages() for out, in_ in stage)

    @property
    def params(self) -> int:
        """Parameters of the model."""
        return self.layers * self.layer + self.vocabulary * self.width * (1 if self.tied else 2)


SHAPES = {
    "1b": LlamaShape(16, 2048, 8192, 32, 8, 128256, True, 64),
    "7b": LlamaShape(32, 4096, 11008, 32, 32, 32000),
    "70b": LlamaShape(80, 8192, 28672, 64, 8, 128256),
    "405b": LlamaShape(126, 16384, 53248, 128, 8, 128256),
    # for checking rates on two cores
    "w256": LlamaShape(2, 256, 1024, 4, 4, 1000, True, 64),
    "w512": LlamaShape(2, 512, 2048, 8, 8, 1000, True, 64),
    "w1024": LlamaShape(2, 1024, 4096, 16, 16, 1000, True, 64),
}


@dataclass(frozen=True)
class CalibrationText:
    """Size of the calibration text, in tokens."""

    tokens: int = 8192
    window: int = 1024
    sweeps: int = 1  # ALS sweeps per matrix: random weights converge after one, trained weights mostly after two to six

    @property
    def held_out(self) -> int:
        """Number of held-out tokens."""
        return max(self.window, self.tokens // 8)

    @property
    def fit(self) -> int:
        """Number of tokens to fit on."""
        return self.tokens - self.held_out


LARGE_EIGENPROBLEM = 1024  # size n: smaller eigenproblems take a GPU as long (docs/measurements/scale.md)


@dataclass(frozen=True)
class ConversionWork:
    """Arithmetic and communication.

    products: FLOP; roots: sum of n^3 of symmetric eigenproblems of size at least LARGE_EIGENPROBLEM; calls: number of
    smaller ones; passed: bytes between processes.
    """

    products: float = 0.0
    roots: float = 0.0
    calls: float = 0.0
    passed: float = 0.0

    def __add__(self, other: ConversionWork) -> ConversionWork:
        sums = self.products + other.products, self.roots + other.roots, self.calls + other.calls
        return ConversionWork(*sums, self.passed + other.passed)

    def times(self, share: float) -> ConversionWork:
        """Return this work multiplied by a factor."""
        return ConversionWork(self.products * share, self.roots * share, self.calls * share, self.passed)


# -- counting ------------------------------------------------------------------------------------------------
def forward_work(shape: LlamaShape, tokens: float, window: int, linears: int | None = None) -> ConversionWork:
    """Return the work of a layer's forward pass. linears: parameters of the linears that run; None: all of them."""
    return ConversionWork(
        tokens * (2 * (shape.layer if linears is None else linears) + 4 * window * shape.heads * shape.head)
    )


def projection_work(out: int, in_: int) -> ConversionWork:
    """Return the work of a projection: whitened blocks, their Gram matrices, 16 eigenproblems, cores."""
    a, d = out / 4, in_ / 4
    size, products = min(a, d), 2 * out * in_ * (d + 2 * min(a, d))
    return ConversionWork(products, 16 * size**3) if size >= LARGE_EIGENPROBLEM else ConversionWork(products, calls=16)


def sweep_work(out: int, in_: int) -> ConversionWork:
    """Return the work of one ALS sweep (surgery.structures.btt): C R and step C, W C - L (R C), least squares of both
    sides.
    """
    a, d = out / 4, in_ / 4
    s = a * d / (2 * (a + d))
    return ConversionWork(
        2 * (2 * in_ * in_ * 4 * s + 2 * out * 4 * s * in_ + out * s * in_) + 4 * (4 * s) ** 3 / 3 * 2
    )


def fit_work(out: int, in_: int, text: CalibrationText) -> ConversionWork:
    """Return the work of fitting a matrix.

    Counted are two targets, ALS sweeps of the better one, the held-out error of each candidate, and W C of the shifted
    target.
    """
    product = 2 * out * in_ * in_
    judged = (2 + min(text.sweeps, 2)) * product
    whole = ConversionWork(judged + 2 * product + product) + projection_work(out, in_) + projection_work(out, in_)
    for _ in range(text.sweeps):
        whole = whole + sweep_work(out, in_)
    return whole


def total_cost(job: ConversionWork) -> float:
    """Return a scalar cost for load balancing."""
    return job.products + job.roots + job.calls


def busiest_work(jobs: list[ConversionWork], processes: int) -> ConversionWork:
    """Return the work of the busiest process."""
    costs = [total_cost(job) for job in jobs]
    owners = DistContext(0, processes).assign_jobs(costs)
    loads = [[job for job, owner in zip(jobs, owners) if owner == rank] for rank in set(owners)]
    return max((sum(load, ConversionWork()) for load in loads), key=total_cost)


def busiest_share(tokens: float, processes: int, most: int = MAX_SHARDS) -> float:
    """Return the share of tokens that the busiest process runs."""
    parts = max(1, min(most, int(tokens) // MIN_SHARD_TOKENS))
    return -(-parts // processes) / parts


def moments_work(stage: list[tuple[int, int]], residual: bool) -> tuple[float, float]:
    """Return (FLOP per token, elements stored) of the second moments of a group of linears.

    C by its upper half; E[x0 x^T] and E[x0 x0^T] for outputs wider than the input, otherwise y and K of each output.
    """
    in_ = stage[0][1]
    narrow = [out for out, _ in stage if residual or out <= in_]
    wide = len(narrow) < len(stage)
    flop = in_ * in_ * (4 if wide else 1) + sum(4 * out * in_ for out in narrow)
    return flop, in_ * in_ * (3 if wide else 1) + sum(out * in_ for out in narrow)


def calibrated_work(
    shape: LlamaShape, text: CalibrationText, processes: int = 1
) -> tuple[ConversionWork, ConversionWork]:
    """Return (Fisher pass and quick trial, conversion) of a layer, for the busiest process."""
    few = max(text.window, text.fit // 4)
    survey = forward_work(shape, 4 * text.fit * busiest_share(text.fit, processes), text.window)
    trial = forward_work(
        shape,
        few * busiest_share(few, processes) + 3 * text.held_out * busiest_share(text.held_out * 3, processes),
        text.window,
    )
    run = (
        text.fit * busiest_share(text.fit, processes) if processes < 8 else text.fit / MAX_SHARDS
    ) + text.held_out / min(processes, 2)
    layer, so_far, linears = (
        forward_work(shape, 2 * run, text.window),
        0,
        [m for stage in shape.stages() for m in stage],
    )
    for i, stage in enumerate(shape.stages()):
        flop, held = moments_work(stage, residual=i in (1, 3))
        in_ = stage[0][1]
        survey += ConversionWork(text.fit * busiest_share(text.fit, processes) * in_ * in_)
        trial += ConversionWork(few * busiest_share(few, processes) * in_ * in_)
        layer += forward_work(shape, 2 * run, text.window if i else 0, so_far) + ConversionWork(run * flop)
        layer += busiest_work([fit_work(out, width, text) for out, width in stage], processes)
        quick = [
            projection_work(o, w) + sweep_work(o, w) + ConversionWork(2 * o * w * w) for o, w in stage for _ in range(2)
        ]
        trial += busiest_work(quick, processes)
        so_far += sum(out * width for out, width in stage)
        if processes > 1:
            sizes = (
                4.0 * held * (1 + -(-MAX_SHARDS // processes)) * 2,
                4.0 * in_ * in_ * (1 + -(-MAX_SHARDS // processes)),
            )
            layer, trial = layer + ConversionWork(passed=sizes[0]), trial + ConversionWork(passed=sizes[1])
            survey += ConversionWork(passed=sizes[1])
            layer += ConversionWork(passed=sum(2.0 * out * width for out, width in stage))
    for out, _ in linears:
        if 4 * out <= text.tokens:
            survey += ConversionWork(text.fit * busiest_share(text.fit, processes) * out * out)
    survey += busiest_work([projection_work(out, in_) for out, in_ in linears], processes)
    return survey + trial, layer


def data_free_work(shape: LlamaShape) -> ConversionWork:
    """Return the work of converting a layer without data."""
    return sum((projection_work(out, in_) for stage in shape.stages() for out, in_ in stage), ConversionWork())
