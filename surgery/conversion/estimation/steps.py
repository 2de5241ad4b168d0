"""Time and peak memory of each step of a conversion, in the order in which `surgery.conversion` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surgery.calibration.layer_runner import CHUNK_TOKENS
from surgery.calibration.lm_head import MAX_LOGITS, ROWS_PER_PASS
from surgery.calibration.partition import MAX_SHARDS, MIN_SHARD_TOKENS
from surgery.conversion.estimation.counting import Work
from surgery.conversion.estimation.fits import (
    FitTask,
    StageTask,
    bare_target,
    count_projection,
    count_quick_fits,
    count_rank_errors,
    count_stage,
    lu_work,
)
from surgery.conversion.estimation.shape import ConversionShape, LayerKind, StageShape, TextRows
from surgery.conversion.estimation.speeds import Speeds
from surgery.conversion.generated import rows_together
from surgery.core.distributed import DistContext
from surgery.planning.targets import LinearTarget
from surgery.structures.shared_basis import STEPS

# Elements per token that a layer's forward reads and writes outside of its products, and holds at its peak, by (width,
# MLP width, query features): counted on Llama layers of six shapes. With a backward pass: of both passes together.
TRAFFIC, TRAFFIC_BACKWARD = (21.0, 5.0, 12.0), (79.0, 14.0, 30.0)
ACTIVATIONS, ACTIVATIONS_BACKWARD = (3.5, 3.2, 3.0), (9.2, 7.4, 5.0)

# Seconds of the host for a layer and a token of all rows that are sampled together. A GPU waits for it. On one H100,
# beside three other conversions, 8 layers took 43 ms.
SAMPLING_SECONDS = {"cuda": 2e-3, "cpu": 2e-4}


@dataclass(frozen=True)
class Step:
    """One step. seconds: of the slowest process. device: peak bytes of tensors where layers run. host: the same of host
    memory, beside the device. files: bytes of temporary files at its end."""

    name: str
    seconds: float
    device: float = 0.0
    host: float = 0.0
    files: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Where the conversion runs. device: `cpu` or `cuda`. processes: that share it. threads: of each, on a CPU. limit:
    bytes of hidden states that stay in memory. sweeps: ALS sweeps of each matrix."""

    speeds: Speeds
    device: str
    processes: int
    threads: int
    limit: float
    sweeps: int

    def seconds(self, work: Work) -> float:
        """Return the seconds of some work of one process."""
        return self.speeds.seconds(work, self.threads)

    def shards(self, rows: int, length: int) -> int:
        """Return the number of row shards of so many rows."""
        return max(1, min(MAX_SHARDS, rows, rows * length // MIN_SHARD_TOKENS))

    def share(self, rows: int, length: int) -> float:
        """Return the share of the rows that the busiest process runs."""
        shards = self.shards(rows, length)
        return -(-shards // self.processes) / shards

    def busiest(self, jobs: list[tuple[float, Work]]) -> Work:
        """Return the work of the process that takes longest. jobs: (cost by which they are dealt out, work)."""
        owners = DistContext(0, self.processes).assign_jobs([cost for cost, _ in jobs])
        loads = [sum((w for (_, w), o in zip(jobs, owners) if o == rank), Work()) for rank in sorted(set(owners))]
        return max(loads, key=self.seconds, default=Work())


class StepEstimates:
    """Estimates of the steps of one conversion."""

    def __init__(self, shape: ConversionShape, setting: Setting):
        self.shape, self.setting, self.recipe = shape, setting, shape.plan.recipe

    # -- steps before the others ---------------------------------------------------------------------
    def generation(self, rows: TextRows) -> Step:
        """Return the step that samples `generated_tokens`, which one process does: each token of the rows sampled
        together reads all weights.
        """
        shape, device = self.shape, self.setting.device
        itemsize = shape.itemsize if device == "cuda" else 4.0
        together = rows_together(shape.layers, shape.width, itemsize, rows.length, device)
        count = self.recipe.generated_tokens // rows.length
        batches, weights = -(-count // together), itemsize * shape.params
        work = Work(
            2.0 * shape.params * count * rows.length,
            files=shape.itemsize * shape.params,
            traffic=weights * batches * rows.length,
        )
        keys = 2.0 * shape.layers * shape.width * itemsize * rows.length * min(count, together)
        waiting = SAMPLING_SECONDS[device] * shape.layers * batches * rows.length
        return Step("generate", self.setting.seconds(work) + waiting, weights + keys)

    # -- parts of steps ----------------------------------------------------------------------------
    def forward(
        self, kind: LayerKind, tokens: float, length: int, macs: float | None = None, backward: bool = False
    ) -> Work:
        """Return the work of running tokens through a layer. macs: of the linears that run, None for all; backward: the
        gradient, too.
        """
        share = 1.0 if macs is None else min(1.0, macs / max(kind.macs, 1))
        query = kind.attention.heads * kind.attention.key if kind.attention else 0
        attention = 4.0 * query * length * (share > 0.05)
        width, mlp, head = TRAFFIC_BACKWARD if backward else TRAFFIC
        traffic = 4 * (width * kind.width + mlp * kind.widest + head * query) * (share if share < 1 else 1.0)
        products = 2 * (kind.macs if macs is None else macs)
        return Work(products * (2 if backward else 1), attention * (3.5 if backward else 1), traffic=traffic).times(
            tokens
        )

    def activations(self, kind: LayerKind, tokens: float, backward: bool = False) -> float:
        """Return the bytes of the activations of one chunk in a layer."""
        width, mlp, head = ACTIVATIONS_BACKWARD if backward else ACTIVATIONS
        query = kind.attention.heads * kind.attention.key if kind.attention else 0
        return 4.0 * tokens * (width * kind.width + mlp * kind.widest + head * query)

    def load(self, kind: LayerKind) -> Work:
        """Return the work of reading a layer: its file, a check for NaN, a copy in float32."""
        stored = self.shape.itemsize * kind.params
        traffic = 0.0 if self.setting.device == "cuda" else 2 * stored + 4 * kind.params
        return Work(files=stored, traffic=traffic)

    def head(self, tokens: float, passes: float) -> Work:
        """Return the work of the head's logits for so many tokens, with `passes` products."""
        elements = float(self.shape.vocabulary) * tokens
        return Work(2 * elements * self.shape.width * passes, traffic=4 * 7 * elements * passes)

    def head_bytes(self, tokens: float) -> float:
        """Return the peak bytes of a slice of logits and of the head's weight."""
        rows = min(tokens, ROWS_PER_PASS)
        step = min(
            self.shape.vocabulary, max(256, MAX_LOGITS[self.setting.device] // max(1, int(rows), self.shape.width))
        )
        return (
            4.0 * (4 * rows * step + 2 * step * self.shape.width + 4 * rows * self.shape.width)
            if self.shape.vocabulary
            else 0.0
        )

    def hidden(self, tokens: float, copies: float) -> tuple[float, float, float]:
        """Return bytes (on the device, on the host, in a file) of float32 hidden states, which move to the host if one
        copy exceeds the limit.
        """
        one = 4.0 * tokens * self.shape.width
        if one <= self.setting.limit:
            return copies * one, 0.0, 0.0
        return 0.0, one, (copies - 1) * one

    def chunk(self, tokens: float, length: int) -> float:
        """Return the tokens of one forward of a layer."""
        return float(min(tokens, max(1, CHUNK_TOKENS[self.setting.device] // max(1, length)) * length))

    def tasks(self, stage: StageShape, rows: TextRows) -> tuple[FitTask, ...]:
        """Return the matrices of a stage as they are counted."""
        rule, tokens = self.recipe.curvature, rows.fit_tokens * stage.share
        measured = rule != "none"

        def full(out: int) -> bool:
            return measured and (rule == "full" or 4 * out <= tokens)

        return tuple(FitTask(bare_target(t), full(t.out), bool(t.linear.residual)) for t in stage.targets)

    def fit_jobs(self, stage: StageShape, works: tuple[Work, ...]) -> list[tuple[float, Work]]:
        """Return the jobs of a layer's equal stages."""
        extra = lu_work(stage.targets).times(1 / len(stage.targets))
        return [(float(t.numel), w + extra) for t, w in zip(stage.targets, works)] * (
            1 if not stage.is_expert else stage.count
        )

    def per_layer(self, work: Callable[[LayerKind], float]) -> float:
        """Return the sum over all layers."""
        return sum(kind.count * work(kind) for kind in self.shape.kinds)

    # -- steps -------------------------------------------------------------------------------------
    def data_free(self) -> Step:
        """The conversion without calibration text: each process converts its share of the layers."""
        setting, most = self.setting, -(-self.shape.layers // self.setting.processes)
        works, peak = Work(), 0.0
        for kind in self.shape.kinds:
            work, replacement_bytes, largest = self.load(kind), 0.0, 0.0
            for target, count in kind.targets():
                counted, bytes_ = count_projection(bare_target(target), setting.device)
                work += counted.times(count)
                replacement_bytes += count * stored_size(target) * (4 + self.shape.itemsize)
                largest = max(largest, bytes_ + 4.0 * target.numel)
            works += work.times(kind.count)
            peak = max(peak, replacement_bytes * min(2, most) + largest)  # the layer before is still being written
        ahead = min(3, most) if setting.device == "cuda" else 1
        return Step("layers", setting.seconds(works.times(most / self.shape.layers)), peak * ahead)

    def sensitivities(self, rows: TextRows) -> Step:
        """The pass that measures the gain of each rank (surgery.conversion.fisher)."""
        setting, tokens, length = self.setting, rows.fit_tokens, rows.length
        share, shards, chunk = (
            setting.share(rows.fit, length),
            setting.shards(rows.fit, length),
            self.chunk(tokens, length),
        )
        seconds, peak = 0.0, 0.0
        saved = 2.0 * tokens * self.shape.width * self.shape.layers
        for kind in self.shape.kinds:
            run = self.forward(kind, tokens, length) + self.forward(kind, tokens, length, backward=True)
            moments, held, temporary, jobs = 0.0, 0.0, 0.0, list[tuple[float, Work]]()
            for stage in kind.stages:
                tasks = self.tasks(stage, rows)
                run += moment_work(stage.in_, tokens * stage.share).times(stage.count)
                moments += 4.0 * stage.count * stage.in_**2
                for task in tasks:
                    out = task.target.out
                    moments += 4.0 * stage.count * (out * out if task.full_gram else out)
                    run += (
                        moment_work(out, tokens * stage.share)
                        if task.full_gram
                        else Work(traffic=8.0 * out * tokens * stage.share)
                    ).times(stage.count)
                works, at_most, cached = count_rank_errors(tasks, setting.device, self.recipe.damping)
                jobs += self.fit_jobs(stage, works)
                held, temporary = held + cached * stage.count, max(temporary, at_most)
            if self.recipe.epochs.layers:
                moments += 4.0 * kind.width**2
            work = (
                run.times(share)
                + setting.busiest(jobs)
                + self.load(kind).times(2)
                + Work(passed=moments * 8 if setting.processes > 1 else 0)
            )
            seconds += kind.count * setting.seconds(work)
            backward = moments * (2 if shards > 1 else 1) + self.activations(kind, chunk, backward=True)
            peak = max(peak, 4.0 * kind.params + max(backward, moments + held + temporary))
        device, host, _ = self.hidden(tokens, 3)
        fits = saved <= setting.limit
        if fits and not host:
            device += saved
        seconds += setting.seconds(self.head(tokens, 2).times(1.0) + Work(files=0 if fits else 2 * saved))
        return Step("budgets", seconds, max(peak, self.head_bytes(tokens)) + device, host, 0 if fits else saved)

    def trial(self, rows: TextRows) -> Step:
        """The trial of two allocations (surgery.conversion.trial), twice as many with pruned MLPs to compare, which are
        counted like structured linears.
        """
        setting, plan = self.setting, self.shape.plan
        tried = (2 if plan.recipe.allocate == "measured" else 1) * len(plan.contenders())
        length, run = (
            rows.length,
            rows.fit_tokens * setting.share(rows.fit, rows.length)
            + (1 + tried) * rows.held_tokens * setting.share(rows.held, rows.length),
        )
        seconds, peak = 0.0, 0.0
        for kind in self.shape.kinds:
            work, moments, temporary, dense, jobs = (
                self.forward(kind, run, length),
                0.0,
                0.0,
                0.0,
                list[tuple[float, Work]](),
            )
            for stage in kind.stages:
                works, at_most = count_quick_fits(self.tasks(stage, rows), setting.device, min(setting.sweeps, 1))
                jobs += self.fit_jobs(stage, tuple(w.times(tried) for w in works))
                work += moment_work(stage.in_, rows.fit_tokens * setting.share(rows.fit, length) * stage.share).times(
                    stage.count
                )
                moments, temporary = moments + 4.0 * stage.count * stage.in_**2, max(temporary, at_most)
                dense += 4.0 * tried * stage.count * sum(t.numel for t in stage.targets)
            seconds += kind.count * setting.seconds(work + setting.busiest(jobs) + self.load(kind))
            grams = self.gram_bytes(kind, rows)
            chunk = self.activations(kind, self.chunk(run, length))
            peak = max(peak, 4.0 * kind.params + grams + max(moments + temporary + dense / tried, dense + chunk))
        device, host, _ = self.hidden(rows.fit_tokens + (1 + tried) * rows.held_tokens, 2)
        seconds += setting.seconds(self.head((1 + tried) * rows.held_tokens, 1))
        return Step("trial", seconds, max(peak, self.head_bytes(rows.held_tokens)) + device, host)

    def gram_bytes(self, kind: LayerKind, rows: TextRows) -> float:
        """Return the bytes of a layer's output Gram matrices."""
        if self.recipe.curvature == "none":
            return 0.0
        tasks = [(task, stage.count) for stage in kind.stages for task in self.tasks(stage, rows)]
        return sum(4.0 * count * (t.target.out**2 if t.full_gram else t.target.out) for t, count in tasks)

    def layers(self, rows: TextRows, has_mixers: bool) -> Step:
        """The conversion of all layers in order (surgery.conversion.sequential)."""
        setting, length = self.setting, rows.length
        sequential = self.recipe.calibrate == "sequential"
        share, shards = setting.share(rows.fit, length), setting.shards(rows.fit, length)
        held = rows.held_tokens * (0.0 if setting.processes > shards else 1.0)
        run = rows.fit_tokens * share + held
        seconds, peak = 0.0, 0.0
        for kind in self.shape.kinds:
            work = self.forward(kind, 2 * run, length) + self.load(kind)
            layer = self.gram_bytes(kind, rows) + 4.0 * kind.params
            done, most = 0.0, 0.0
            for stage in kind.stages:
                first = kind.is_first and stage.is_first and not has_mixers
                diverged = sequential and not first
                passes = (2 if diverged else 1) * (
                    stage.count if not stage.is_expert else 2 / max(1, len(stage.targets))
                )
                macs = stage.before if not stage.is_expert else kind.macs
                work += self.forward(kind, passes * run, length, macs)
                counted = count_stage(self.stage_task(kind, stage, rows, diverged, shards))
                work += (counted.moments[0].times(share) + counted.moments[1]).times(stage.count)
                work += setting.busiest(self.fit_jobs(stage, counted.fits)) + shared_basis_work(stage, setting.sweeps)
                fitted_bytes = sum(stored_size(t) for t in stage.targets) * self.shape.itemsize
                most = max(most, done + counted.peak + self.routed_bytes(kind, stage, rows))
                done += stage.count * (counted.dense + (fitted_bytes if setting.device == "cpu" else 0))
                if setting.processes > 1:
                    work += Work(passed=16.0 * stage.count * stage.in_**2)
            seconds += kind.count * setting.seconds(work + Work(files=2 * self.shape.itemsize * kind.params / 2))
            most = max(most, done + self.activations(kind, self.chunk(run, length)))
            peak = max(peak, layer + most)
        device, host, _ = self.hidden(2 * rows.tokens, 2)
        if self.shape.head is not None:
            peak = max(peak, 3 * 4.0 * self.shape.head.numel)
        seconds += setting.seconds(self.head(2 * rows.held_tokens, 1))
        stored = max(self.shape.itemsize * kind.params for kind in self.shape.kinds)
        return Step(
            "layers",
            seconds,
            max(peak, self.head_bytes(rows.held_tokens)) + device,
            host + (stored if setting.device == "cuda" else 0),
        )

    def stage_task(self, kind: LayerKind, stage: StageShape, rows: TextRows, diverged: bool, shards: int) -> StageTask:
        """Return the stage as it is counted."""
        fit, held = (round(tokens * stage.share) for tokens in (rows.fit_tokens, rows.held_tokens))
        borrowed = max(0, stage.in_ - fit) if stage.is_expert else 0
        chunk = self.chunk(rows.fit_tokens, rows.length)
        share = min(1.0, (stage.before + sum(t.numel for t in stage.targets)) / max(kind.macs, 1))
        return StageTask(
            self.tasks(stage, rows), self.setting.device, max(1, fit), max(1, held), max(1, round(chunk * stage.share)), shards, borrowed,
            diverged, self.setting.sweeps, self.recipe.damping, 0 if stage.is_expert else int(share * self.activations(kind, chunk)),
        )  # fmt: skip

    def routed_bytes(self, kind: LayerKind, stage: StageShape, rows: TextRows) -> float:
        """Return the bytes of the tokens recorded for routed experts, and of the sums over the rows of all experts."""
        if not stage.is_expert:
            return 0.0
        shared = sum(2 * 3 * s.in_**2 for s in kind.stages if s.is_expert)
        return 4.0 * (2 * rows.tokens * kind.width + shared) + shared_basis_bytes(stage)


def moment_work(width: int, tokens: float) -> Work:
    """Return the work of a sum of outer products, of which blocks on and above the diagonal are computed."""
    blocks = -(-width // 1024)
    return Work(
        2.0 * width * width * tokens * (blocks + 1) / (2 * blocks),
        traffic=8.0 * width * width * max(1.0, tokens / 2048),
    )


def shared_basis_work(stage: StageShape, sweeps: int) -> Work:
    """Return the work of the joint fits of a stage whose experts share bases, beside that of fits one by one
    (surgery.structures.shared_basis).
    """
    flops = 0.0
    for target in stage.targets:
        if target.basis:
            rank, in_ = target.basis_rank, target.in_
            step = 2.0 * rank * in_ * (rank + in_)
            flops += stage.count * sweeps * (STEPS * step + 4.0 * target.numel * (rank + in_))
    return Work(flops)


def shared_basis_bytes(stage: StageShape) -> float:
    """Return the bytes of weights and moments of all experts but one of a stage whose experts share bases."""
    sharing = [target for target in stage.targets if target.basis]
    if not sharing:
        return 0.0
    crosses = 2 if any(target.out > target.in_ for target in sharing) else 0
    values_per_expert = (1 + crosses) * stage.in_**2 + sum(t.numel * (1 if t.out > t.in_ else 2) for t in sharing)
    return 4.0 * (stage.count - 1) * values_per_expert


def stored_size(target: LinearTarget) -> int:
    """Return the stored elements of a target under a uniform allocation."""
    if target.preview is None:
        return target.numel
    return target.params(target.preview)
