"""Fisher pass: for each matrix, the expected increase of the loss (nats per token) at each number of parameters.

The unconverted model runs once forward and once backward, one layer at a time (surgery.conversion.gradients). Hooks on
every linear accumulate the factors of K-FAC (Martens & Grosse 2015): E[x x^T] of its inputs, and E[g g^T] of its output
gradients. The latter is only a diagonal if there are too few tokens to estimate the full matrix. Labels are sampled
from the model, which gives the Fisher information and not the empirical Fisher (Kunstner et al. 2019). For models
without a language-model head, the gradient of the output is random noise, relative to the output's root mean square.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import CalibrationSet, unpadded_rows
from surgery.calibration.layer_runner import LayerCall, LayerRunner
from surgery.calibration.lm_head import ROWS_PER_PASS, ChunkedLMHead
from surgery.calibration.partition import MAX_SHARDS, Round
from surgery.calibration.routing import RoutingRecord
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import TensorSource, read_header, read_tensor, write_shard
from surgery.conversion.gradients import GradientPass, LayerBackward
from surgery.conversion.streams import Stream, Streams
from surgery.core.device import trim_memory
from surgery.core.errors import naming
from surgery.planning.allocate import CostPoint
from surgery.planning.plan import fit_config_to_budget, has_free_rank
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.speed import option_times
from surgery.planning.targets import LinearTarget, Plan
from surgery.planning.weights import target_gram, target_weight
from surgery.structures import STRUCTURES, Metric
from surgery.structures.metric import add_moment_, damp_, damp_output_gram


class GradientHooks(LayerBackward):
    """Hooks on the targeted linears of one layer that accumulate input moments and output-gradient Gram matrices.

    Linears that read the same input share one moment. leaves: outputs of linears whose input needs no gradient, such as
    the keys of an image: the hooks on them get their gradients.
    """

    def __init__(self, fisher_pass: FisherPass, call: LayerCall):
        super().__init__()
        self.fisher_pass, self.path = fisher_pass, call.path
        targets = list(fisher_pass.plan.targets_in_layer(call.path).values())
        self.linears = {linear.path: linear for parts in targets for linear in parts[0].linears}
        joined = [parts[0] for parts in targets if parts[0].joined]
        self.outs = {linear.path: target.out for target in joined for linear in target.joined}
        self.paths = list(self.linears)
        self.routing = RoutingRecord(call.layer, call.path, self.linears.values())
        # Linear -> sum of x x^T, and linear -> sum of g g^T: over the current row shard, in the end over all rows.
        self.moments: dict[str, Tensor] = {}
        self.grams: dict[str, Tensor] = {}
        self.sums: list[dict[str, Tensor]] = [{}, {}]  # moments and grams of the row shards so far
        self.counts: dict[str, int] = {}
        self.shared_input: dict[str, str] = {}  # linear -> the linear whose input it shares
        self.rows: dict[str, int] = {}
        self._seen: list[tuple[Tensor, str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for path in self.paths:
            module = self.fisher_pass.meta_model.module(path)
            self._handles.append(module.register_forward_hook(self._hook(path)))
        self.routing.__enter__()

    def __exit__(self, *_: Any) -> None:
        self.routing.__exit__()
        for handle in self._handles:
            handle.remove()
        self._seen.clear()
        self.leaves.clear()

    def _hook(self, path: str) -> Callable[..., None]:
        fisher_pass = self.fisher_pass

        masks_BT = fisher_pass.token_masks(self.path)

        def drop_padding(x: Tensor) -> Tensor:
            masks = [mask_BT[fisher_pass.rows] for mask_BT in masks_BT]
            if self.routing.is_routed(path):
                return self.routing.unpadded_expert_rows(path, x, masks[0] if masks else None)
            return unpadded_rows(x, *masks)

        def hook(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            x = args[0].detach()
            first = next((p for t, p in self._seen if t.data_ptr() == x.data_ptr() and t.shape == x.shape), None)
            self.shared_input[path] = first or path
            if first is None:
                self._seen = [(t, p) for t, p in self._seen if p != path] + [(x, path)]
                add_outer(self.moments, path, drop_padding(x), full=True)
            self.rows[path] = self.rows.get(path, 0) + len(drop_padding(x[..., :1]))
            if not out.requires_grad:
                self.leaves.append(out.requires_grad_(True))
            hooked: Any = out  # Tensor.register_hook has no types
            hooked.register_hook(lambda grad: add_outer(self.grams, path, drop_padding(grad), self._full(path)))

        return hook

    def _full(self, path: str) -> bool:
        linear = self.linears[path]
        return self._is_full(self.outs.get(path, linear.out), linear.active)

    def _is_full(self, out: int, active: float = 1.0) -> bool:
        rule = self.fisher_pass.recipe.curvature
        return rule == "full" or (rule == "auto" and 4 * out <= self.fisher_pass.tokens * active)

    def begin_rows(self, first: int, last: int) -> None:
        """Note the rows that the hooks will see."""
        self.leaves.clear()
        self.fisher_pass.rows = slice(first, last)

    def add(self, gradient_BTD: Tensor, of_leaves: list[Tensor | None]) -> None:
        """Add the gradient of the layer's output, which weights its error where layers are tuned."""
        if self.paths and self.fisher_pass.recipe.epochs.layers and gradient_BTD.dim() == 3:
            masks_BT = (mask_BT[self.fisher_pass.rows] for mask_BT in self.fisher_pass.token_masks(self.path))
            grad_ND = unpadded_rows(gradient_BTD.to(self.fisher_pass.runner.device), *masks_BT)
            add_outer(self.grams, self.path, grad_ND, self._is_full(grad_ND.shape[1]))
            self.rows[self.path] = self.rows.get(self.path, 0) + len(grad_ND)

    def end_round(self, round_: Round) -> None:
        """Add the sums of the row shards of a round, in the order of the shards."""
        ranks, parts = self.fisher_pass.runner.ranks, (self.moments, self.grams)
        # A process without a row shard has called no linear; it takes names and shapes from the round's first owner.
        state = [{path: tuple(t.shape) for path, t in sums.items()} for sums in parts], self.shared_input, self.rows
        per_rank = ranks.gather(state)
        shapes: list[dict[str, tuple[int, ...]]] = [{}, {}]
        for owner in round_.owners:  # an expert may get rows in some processes only
            for known, owner_shapes in zip(shapes, per_rank[owner][0]):
                known |= owner_shapes
            self.shared_input |= per_rank[owner][1]
            for path, rows in per_rank[owner][2].items():
                self.counts[path] = self.counts.get(path, 0) + rows
        for sums, total, sizes in zip(parts, self.sums, shapes):
            for path, size in sizes.items():
                mine = sums.pop(path) if path in sums else torch.zeros(size, device=self.fisher_pass.runner.device)
                total[path] = ranks.ordered_sum(total.get(path), mine, round_.owners)
        self.rows = {}

    def finish(self) -> None:
        """Turn the sums into means and pass them to the Fisher pass."""
        if not self.paths:
            return
        (self.moments, self.grams), self.rows = self.sums, self.counts
        for tensor in [*self.moments.values(), *self.grams.values()] if self.fisher_pass.runner.ranks.count > 1 else ():
            self.fisher_pass.runner.ranks.gather_rows_(tensor)
        self.fisher_pass.runner.record_moment_bytes([*self.moments.values(), *self.grams.values()])
        seen = [path for path in self.paths if self.rows.get(path)]
        layer_gram = self.grams.get(self.path)
        shared = {
            path: self.fisher_pass.metric(self.moments[path].div_(self.rows[path]))
            for path in self.moments
            if self.rows[path]
        }
        metrics = {path: shared[self.shared_input[path]] for path in seen}
        # The gradients of an expert's matrix are summed over its rows and divided by all tokens: the loss is a mean
        # over tokens.
        real = self.fisher_pass.real_tokens
        grams = {path: self.grams[path].div_(real if self.linears[path].experts else self.rows[path]) for path in seen}
        self._add_unreached_experts(metrics, grams, real)
        extra = {} if layer_gram is None else {self.path: layer_gram.div_(self.rows[self.path])}
        self.fisher_pass.store(self.path, metrics, grams, extra)

    def _add_unreached_experts(self, metrics: dict[str, Metric], grams: dict[str, Tensor], tokens: int) -> None:
        """Give an expert that no token reached the statistics of a reached one of the layer, as if one token had
        reached it.
        """
        for path in self.paths:
            linear = self.linears[path]
            if path in metrics or not linear.experts:
                continue
            like = next(
                p for p in metrics if (self.linears[p].experts, self.linears[p].roles) == (linear.experts, linear.roles)
            )
            metrics[path], grams[path] = metrics[like], grams[like] / max(1, self.rows[like])


@torch.no_grad()
def add_outer(sums: dict[str, Tensor], key: str, rows_NX: Tensor, full: bool) -> None:
    """Add rows^T rows (X, X) to sums[key], or its diagonal (X,) if not `full`."""
    if full:
        add_moment_(sums.setdefault(key, rows_NX.new_zeros(rows_NX.shape[1], rows_NX.shape[1])), rows_NX)
    else:
        sums[key] = sums.get(key, 0) + rows_NX.square().sum(0)


class FisherPass(GradientPass):
    """One forward and backward pass of the original model.

    options: target name -> cost points, the result. folder: where the output Gram matrices are written, one file for
    each layer. done: called after each layer.
    """

    def __init__(
        self,
        meta_model: MetaModel,
        plan: Plan,
        recipe: ConversionRecipe,
        runner: LayerRunner,
        folder: Path,
        done: Callable[[], None],
    ):
        self.meta_model, self.plan, self.recipe, self.runner = meta_model, plan, recipe, runner
        self.folder, self.done = folder, done
        self.options: dict[str, list[CostPoint]] = {}
        self.tokens = self.real_tokens = 0  # with padding, and without
        self.samples: CalibrationSet | None = None
        self.head_mask_BT: Tensor | None = None
        self.rows = slice(0)  # the rows in the current backward pass of a layer
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, batch: CalibrationSet) -> dict[str, list[CostPoint]]:
        """Run on the rows to fit to, and return the cost points of each target."""
        head_mask_BT, self.samples = batch.head_mask(), batch
        self.head_mask_BT = None if head_mask_BT is None else head_mask_BT[: batch.n_fit].bool()
        rows = next(iter(batch.inputs.values()))
        self.tokens = batch.n_fit * (rows.shape[1] if rows.dim() == 2 else 1)
        mask_BT = batch.mask()
        self.real_tokens = self.tokens if mask_BT is None else int(mask_BT[: batch.n_fit].sum())
        streams = Streams(self.runner, batch, {"fit": Stream(batch.fit, MAX_SHARDS)})
        with torch.enable_grad():
            final_BTD = streams.run_with_gradients(self)
            all_rows_BTD = final_BTD.detach()
            if self.runner.ranks.count > 1:
                all_rows_BTD = self.runner.gather_rows(all_rows_BTD.contiguous().clone())
            torch.autograd.backward(final_BTD, self._output_gradient(all_rows_BTD))
        return self.options

    def token_masks(self, layer: str) -> tuple[Tensor, ...]:
        """Return the masks (rows, T) of the tokens that a layer reads."""
        assert self.samples is not None
        return self.samples.token_masks(self.plan.layout.tower(layer))

    def backward_context(self, call: LayerCall) -> LayerBackward:
        """Return the hooks of the backward pass through one layer."""
        return GradientHooks(self, call)

    def stored_input(self, hidden_BTD: Tensor) -> Tensor:
        """Return the layer's input in bfloat16: half of the memory, and its relative rounding error of 2^-9 is far
        below the noise of the estimates.
        """
        return self.runner.copy_hidden(hidden_BTD, len(self.runner.layers), torch.bfloat16)

    def end_layer(self) -> None:
        """Return freed memory to the system, and count the layer."""
        trim_memory()
        self.done()

    def _output_gradient(self, final_BTD: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.recipe.seed)
        if not (layout := self.plan.layout).head or not has_lm_head(self.meta_model):
            noise = torch.randn(final_BTD.shape, generator=generator).to(final_BTD)
            real_ND = unpadded_rows(final_BTD, self.head_mask_BT)
            return self._zero_padding(noise / real_ND.square().mean().sqrt().clamp_min(1e-30))
        head = ChunkedLMHead(self.meta_model, layout.head, layout.architecture, self.runner.device)
        flat_ND = unpadded_rows(final_BTD, self.head_mask_BT)
        grads, head_is_target, energy = [], layout.head in self.plan.targets, torch.zeros(0)
        for chunk_ND in torch.split(flat_ND, ROWS_PER_PASS):
            hidden_ND = chunk_ND.to(self.runner.device)
            grad_ND, total_N, label_N = head.output_gradient(hidden_ND, generator)
            grads.append(grad_ND.to(final_BTD.device))
            if head_is_target:
                share = head.logit_gradient_energy(hidden_ND, total_N, label_N) * (len(chunk_ND) / len(flat_ND))
                energy = energy + share if len(energy) else share
        if head_is_target:
            moment_II = (flat_ND.mT @ flat_ND).div_(len(flat_ND)).to(self.runner.device)
            self.store(layout.head, {layout.head: self.metric(moment_II)}, {layout.head: energy})
        if self.head_mask_BT is None:
            return torch.cat(grads).view_as(final_BTD)
        out_BTD = torch.zeros_like(final_BTD)
        out_BTD[self.head_mask_BT.to(out_BTD.device)] = torch.cat(grads)
        return out_BTD

    def _zero_padding(self, grad_BTD: Tensor) -> Tensor:
        """Return the gradient with zeros at padding."""
        mask_BT = self.head_mask_BT
        if mask_BT is None or grad_BTD.shape[:2] != mask_BT.shape:
            return grad_BTD
        return grad_BTD * mask_BT[..., None].to(grad_BTD)

    def metric(self, moment_II: Tensor) -> Metric:
        """Return the metric with the damped input moment, for all linears that share the input. Damps in place."""
        damp_(moment_II, self.recipe.damping)
        return Metric(moment_II)

    def store(
        self,
        unit: str,
        metrics: dict[str, Metric],
        grams: dict[str, Tensor],
        extra: dict[str, Tensor] | None = None,
    ) -> None:
        """Compute the cost points of all targets of a layer and store their output Gram matrices.

        unit: the layer or the head. metrics: linear -> metric of its input. grams: linear -> output Gram matrix (O, O),
        or its diagonal (O,). extra: further Gram matrices to store: that of the layer's own output, by the layer's
        path.
        """
        ranks, targets = (
            self.runner.ranks,
            [(target, m) for path, m in metrics.items() for target in self.plan.tried_targets(path)],
        )
        output_grams = {target.name: self._output_gram(target_gram(target, grams)) for target, _ in targets}
        if ranks.main:
            saved = (
                [TensorSource.from_tensor(name, gram) for name, gram in {**output_grams, **(extra or {})}.items()]
                if self.recipe.curvature != "none"
                else []
            )
            write_shard(self.folder / f"{unit}.safetensors", saved)
        points = {}
        for (target, metric), owner in zip(targets, ranks.assign_jobs([target.numel for target, _ in targets])):
            if owner == ranks.index:
                weight_OI = target_weight(self.meta_model, target, self.runner.device)
                two_sided = Metric(metric.c_II, damp_output_gram(output_grams[target.name]), metric.c_cache)
                with naming(target.name):
                    points[target.name] = cost_points(target, weight_OI, two_sided)
        for theirs in ranks.gather(points):
            self.options |= theirs

    def _output_gram(self, gram: Tensor) -> Tensor:
        """Return G, or with `curvature: none` its mean diagonal for every output, which keeps the unit (nats)."""
        if self.recipe.curvature != "none":
            return gram
        energies = gram if gram.dim() == 1 else gram.diagonal()
        return energies.mean().expand(len(gram)).clone()


def cost_points(target: LinearTarget, weight_OI: Tensor, metric: Metric) -> list[CostPoint]:
    """Return the expected increase of the loss (nats per token) at each number of parameters, dense matrix included.

    With `round_ranks` these are the numbers of parameters of the ranks that the target may have. With `speed` see
    `timed_points`.
    """
    if target.dense_ns:
        return timed_points(target, weight_OI, metric)
    points = [CostPoint(target.numel, 0.0)]
    for config in target.configs:
        cls = STRUCTURES[config]
        resolved = cls.resolve(config, target.out, target.in_)
        curve = cls.rank_error_curve(weight_OI, resolved, metric)
        if target.round_ranks > 1 and has_free_rank(config, (target.out, target.in_)):
            curve = round_curve(curve, target.round_ranks)
            uniform = fit_config_to_budget(config, target, target.uniform_budget())
            if uniform is not None and uniform.rank >= target.round_ranks:  # a smaller rank would be no multiple
                curve = [point for point in curve if point[0].rank >= target.round_ranks]
        for step, error in curve:
            params = target.structure_params(step)
            if params < target.numel:
                points.append(CostPoint(params, error / 2))
    return points


def timed_points(target: LinearTarget, weight_OI: Tensor, metric: Metric) -> list[CostPoint]:
    """Return (nanoseconds, expected increase of the loss) of the dense matrix and of each option of a target with
    `speed`.
    """
    errors = [0.0]
    curves = {}
    for config in target.configs if target.options else ():
        cls = STRUCTURES[config]
        resolved = cls.resolve(config, target.out, target.in_)
        curves[type(config)] = cls.rank_error_curve(weight_OI, resolved, metric)
    errors += [error_at(curves[type(option.config)], option.config) / 2 for option in target.options]
    return [CostPoint(ns, error) for ns, error in zip(option_times(target), errors)]


def error_at(curve: list[tuple[Any, float]], config: Any) -> float:
    """Return the squared error of a config, interpolated between the ranks of a curve."""
    above = next(i for i, (known, _) in enumerate(curve) if known.rank >= config.rank)
    (last, error), (known, before) = curve[above], curve[max(0, above - 1)]
    share = 1.0 if last.rank == known.rank else (config.rank - known.rank) / (last.rank - known.rank)
    return before + share * (error - before)


def round_curve(curve: list[tuple[Any, float]], multiple: int) -> list[tuple[Any, float]]:
    """Return (config, squared error) at the multiples of `multiple` within the curve's ranks, interpolated between its
    ranks.

    Ranks below `multiple` and the curve's last rank stay. The error is convex in the rank, so interpolation does not
    underestimate it.
    """
    last = curve[-1][0].rank
    points = [(config, error) for config, error in curve if config.rank < multiple or config.rank == last]
    for (config, error), (above, less) in itertools.pairwise(curve):
        for rank in range(-(-config.rank // multiple) * multiple, above.rank, multiple):
            share = (rank - config.rank) / (above.rank - config.rank)
            points.append((replace(config, rank=rank), error + share * (less - error)))
    return sorted(points, key=lambda point: point[0].rank)


def load_grams(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Return a layer's stored output Gram matrices by target name; {} if there is no file."""
    if not path.is_file():
        return {}
    return {name: read_tensor(info).to(device) for name, info in read_header(path).items()}


def has_lm_head(meta_model: MetaModel) -> bool:
    """Return whether the model has output embeddings, that is logits over a vocabulary."""
    head = meta_model.model.get_output_embeddings() if hasattr(meta_model.model, "get_output_embeddings") else None
    return head is not None
