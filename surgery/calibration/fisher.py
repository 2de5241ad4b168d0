"""What the way back through a layer gives: hooks on its linears, sums over the parts of the windows.

What an error costs: for each matrix the options a budget can buy, in units of the loss.

One forward and one backward pass of the unconverted model, a layer at a time: each layer is an autograd
step that keeps only its input and, going back, reads its weights again, runs its forward once more and
passes the gradient on. On the way every linear gives E[x x^T] and the gradient's energy E[g g^T] (all of
it, or its diagonal where tokens are too few to know it). Labels are drawn from the model itself, so this
is the Fisher information, not its empirical cousin (Kunstner et al. 2019). Models without a
language-model head get random directions of their output, scaled to its size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import unpadded_rows
from surgery.calibration.layer_runner import LayerCall
from surgery.calibration.partition import Round
from surgery.structures.metric import add_moment_

if TYPE_CHECKING:
    pass
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from torch.utils._pytree import tree_flatten, tree_unflatten

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner, run_phases
from surgery.calibration.lm_head import ROWS_PER_PASS, ChunkedLMHead
from surgery.calibration.partition import MAX_SHARDS
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import TensorSource, read_header, read_tensor, write_shard
from surgery.core.device import trim_memory
from surgery.core.errors import naming
from surgery.planning.allocate import CostPoint
from surgery.planning.plan import LinearTarget, Plan
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.weights import target_gram, target_weight
from surgery.structures import STRUCTURES, Metric
from surgery.structures.metric import damp_, damp_output_gram


class GradientHooks:
    """Hooks on the layer's linears to be cut: input moments (one for linears that share an input) and the
    outputs' gradients."""

    def __init__(self, survey: FisherPass, call: LayerCall):
        self.survey, self.path = survey, call.path
        self.paths = list(survey.plan.of_layer(call.path))
        self.moments: dict[str, Tensor] = {}  # of the part of a turn that is going back, then of all
        self.grams: dict[str, Tensor] = {}
        self.sums: list[dict[str, Tensor]] = [{}, {}]  # of the parts so far
        self.counts: dict[str, int] = {}
        self.same: dict[str, str] = {}  # linear -> the linear whose input it shares
        self.rows: dict[str, int] = {}
        self._seen: list[tuple[Tensor, str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for path in self.paths:
            module = self.survey.skeleton.module(path)
            self._handles.append(module.register_forward_hook(self._hook(path)))

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._seen.clear()

    def _hook(self, path: str) -> Callable[..., None]:
        survey = self.survey

        def real(x: Tensor) -> Tensor:
            return unpadded_rows(x, None if survey.mask_BT is None else survey.mask_BT[survey.rows])

        def hook(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            x = args[0].detach()
            first = next((p for t, p in self._seen if t.data_ptr() == x.data_ptr() and t.shape == x.shape), None)
            self.same[path] = first or path
            if first is None:
                self._seen = [(t, p) for t, p in self._seen if p != path] + [(x, path)]
                add_outer(self.moments, path, real(x), full=True)
            self.rows[path] = self.rows.get(path, 0) + len(real(x[..., :1]))
            out.register_hook(lambda grad: add_outer(self.grams, path, real(grad), self._full(path)))

        return hook

    def _full(self, path: str) -> bool:
        rule, out = self.survey.recipe.curvature, self.survey.plan.cuts[path][0].linear.out
        return rule == "full" or (rule == "auto" and 4 * out <= self.survey.tokens)

    def fold(self, turn: Round) -> None:
        """A turn is over: its parts' sums are added, in order."""
        ranks, parts = self.survey.stream.ranks, (self.moments, self.grams)
        # A process without a part has seen no linear: which there are, and of what size, the first holder knows.
        own = [{path: tuple(t.shape) for path, t in part.items()} for part in parts], self.same, self.rows
        said = ranks.gather(own)
        shapes, self.same, _ = said[turn.holders[0]]
        for holder in turn.holders:
            for path, rows in said[holder][2].items():
                self.counts[path] = self.counts.get(path, 0) + rows
        for part, total, sizes in zip(parts, self.sums, shapes):
            for path, size in sizes.items():
                mine = part.pop(path) if path in part else torch.zeros(size, device=self.survey.stream.device)
                total[path] = ranks.added(total.get(path), mine, turn.holders)
        self.rows = {}

    def record(self) -> None:
        if not self.paths:
            return
        (self.moments, self.grams), self.rows = self.sums, self.counts
        for tensor in [*self.moments.values(), *self.grams.values()] if self.survey.stream.ranks.count > 1 else ():
            self.survey.stream.ranks.complete_(tensor)
        self.survey.stream.count_moments([*self.moments.values(), *self.grams.values()])
        seen = [path for path in self.paths if path in self.grams]
        shared = {path: self.survey.metric(self.moments[path].div_(self.rows[path])) for path in self.moments}
        metrics = {path: shared[self.same[path]] for path in seen}
        self.survey.store(self.path, metrics, {path: self.grams[path].div_(self.rows[path]) for path in seen})


@torch.no_grad()
def add_outer(sums: dict[str, Tensor], key: str, rows_NX: Tensor, full: bool) -> None:
    """sums[key] += rows^T rows, or its diagonal."""
    if full:
        add_moment_(sums.setdefault(key, rows_NX.new_zeros(rows_NX.shape[1], rows_NX.shape[1])), rows_NX)
    else:
        sums[key] = sums.get(key, 0) + rows_NX.square().sum(0)


class FisherPass:
    """options: cut name -> Options; the Gram matrices of a layer are kept in `pretrain_folder`, one file a layer."""

    def __init__(
        self, skeleton: MetaModel, plan: Plan, recipe: ConversionRecipe, stream: LayerRunner, folder: Path, done: Callable[[], None]
    ):
        self.skeleton, self.plan, self.recipe, self.stream = skeleton, plan, recipe, stream
        self.folder, self.done = folder, done
        self.options: dict[str, list[CostPoint]] = {}
        self.tokens = 0
        self.mask_BT: Tensor | None = None
        self.head_mask_BT: Tensor | None = None
        self.rows = slice(0)  # the windows that are going back through a layer right now
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, batch: CalibrationSet) -> dict[str, list[CostPoint]]:
        """On the windows to fit."""
        inputs = batch.fitted()
        self.mask_BT, self.head_mask_BT = (
            None if m is None else m[: batch.fit_rows].bool() for m in (batch.mask(), batch.head_mask())
        )
        rows = next(iter(inputs.values()))
        self.tokens = rows.shape[0] * (rows.shape[1] if rows.dim() == 2 else 1)
        with torch.enable_grad():
            final_BTD = self.stream.run(inputs, self._visit, [(0, batch.fit_rows, MAX_SHARDS)])
            whole_BTD = final_BTD.detach()
            if self.stream.ranks.count > 1:
                whole_BTD = self.stream.complete(whole_BTD.contiguous().clone())
            final_BTD.backward(self._cotangent(whole_BTD))
        return self.options

    def _visit(self, call: LayerCall) -> Any:
        leaves, spec = tree_flatten((call.args, call.kwargs))
        # A detached copy to start from: the first layer's input needs a gradient, whatever made it.
        hidden = call.hidden_BTD
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_(True)
        return _RecomputedLayer.apply(self, call, spec, hidden, *leaves)

    def going_there(self, call: LayerCall) -> Any:
        """A context around the way forward through one layer."""
        return nullcontext()

    def gathering(self, call: LayerCall) -> Any:
        """A context around the way back through a layer, and `note_datasets()` behind it."""
        return GradientHooks(self, call)

    def _cotangent(self, final_BTD: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.recipe.seed)
        if not (body := self.plan.body).head or not has_lm_head(self.skeleton):
            noise = torch.randn(final_BTD.shape, generator=generator).to(final_BTD)
            real_ND = unpadded_rows(final_BTD, self.head_mask_BT)
            return self._unpadded(noise / real_ND.square().mean().sqrt().clamp_min(1e-30))
        head = ChunkedLMHead(self.skeleton, body.head, body.anatomy, self.stream.device)
        flat_ND = unpadded_rows(final_BTD, self.head_mask_BT)
        grads, cut, energy = [], body.head in self.plan.cuts, torch.zeros(0)
        for part in flat_ND.split(ROWS_PER_PASS):
            hidden_ND = part.to(self.stream.device)
            grad_ND, total_N, label_N = head.cotangent(hidden_ND, generator)
            grads.append(grad_ND.to(final_BTD.device))
            if cut:
                share = head.energies(hidden_ND, total_N, label_N) * (len(part) / len(flat_ND))
                energy = energy + share if len(energy) else share
        if cut:
            moment_II = (flat_ND.mT @ flat_ND).div_(len(flat_ND)).to(self.stream.device)
            self.store(body.head, {body.head: self.metric(moment_II)}, {body.head: energy})
        if self.head_mask_BT is None:
            return torch.cat(grads).view_as(final_BTD)
        out_BTD = torch.zeros_like(final_BTD)
        out_BTD[self.head_mask_BT.to(out_BTD.device)] = torch.cat(grads)
        return out_BTD

    def _unpadded(self, grad_BTD: Tensor) -> Tensor:
        """Zero where there is padding."""
        mask_BT = self.head_mask_BT
        if mask_BT is None or grad_BTD.shape[:2] != mask_BT.shape:
            return grad_BTD
        return grad_BTD * mask_BT[..., None].to(grad_BTD)

    def metric(self, moment_II: Tensor) -> Metric:
        """The input's side, for all linears that share the input; damps in place."""
        damp_(moment_II, self.recipe.damping)
        return Metric(moment_II)

    def store(self, unit: str, metrics: dict[str, Metric], grams: dict[str, Tensor]) -> None:
        """Options of every cut of a layer's linears, from their input's metric and output Gram matrix."""
        ranks, cuts = self.stream.ranks, [(cut, m) for path, m in metrics.items() for cut in self.plan.cuts[path]]
        kept = {cut.name: self._kept(target_gram(cut, grams[cut.linear.path])) for cut, _ in cuts}
        if ranks.main:
            saved = [TensorSource.of(name, gram) for name, gram in kept.items()] if self.recipe.curvature != "none" else []
            write_shard(self.folder / f"{unit}.safetensors", saved)
        found = {}
        for (cut, metric), owner in zip(cuts, ranks.shares([cut.numel for cut, _ in cuts])):
            if owner == ranks.index:
                weight_OI = target_weight(self.skeleton, cut, self.stream.device)
                two_sided = Metric(metric.c_II, damp_output_gram(kept[cut.name]), metric.of_c)
                with naming(cut.name):
                    found[cut.name] = cost_points(cut, weight_OI, two_sided)
        for theirs in ranks.gather(found):
            self.options |= theirs

    def _kept(self, gram: Tensor) -> Tensor:
        """With curvature: none, outputs count alike: the mean of the energies keeps the unit."""
        if self.recipe.curvature != "none":
            return gram
        energies = gram if gram.dim() == 1 else gram.diagonal()
        return energies.mean().expand(len(gram)).clone()


def cost_points(cut: LinearTarget, weight_OI: Tensor, metric: Metric) -> list[CostPoint]:
    """What each number of stored numbers leaves as expected rise of the loss; its dense self included."""
    found = [CostPoint(cut.numel, 0.0)]
    for config in cut.configs:
        cls = STRUCTURES[config]
        resolved = cls.resolve(config, cut.out, cut.in_)
        for step, error in cls.ladder(weight_OI, resolved, metric):
            params = cls.params(step, cut.out, cut.in_)
            if params < cut.numel:
                found.append(CostPoint(params, error / 2))
    return found


def load_grams(path: Path, device: torch.device) -> dict[str, Tensor]:
    """A layer's kept Gram matrices by cut name; {} where none were kept."""
    if not path.is_file():
        return {}
    return {name: read_tensor(info).to(device) for name, info in read_header(path).items()}


def has_lm_head(skeleton: MetaModel) -> bool:
    head = skeleton.model.get_output_embeddings() if hasattr(skeleton.model, "get_output_embeddings") else None
    return head is not None


class _RecomputedLayer(torch.autograd.Function):
    """A layer as one autograd step, recomputed window by window on the way back."""

    @staticmethod
    def forward(ctx: Any, survey: FisherPass, call: LayerCall, spec: Any, hidden: Tensor, *leaves: Any) -> Any:
        ctx.survey, ctx.call, ctx.spec = survey, call, spec
        # The stations' arguments carry no gradient but for hidden states of another stack.
        ctx.leaves = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        # Half the memory; what is estimated from it bears far more noise than this rounding (2^-9).
        ctx.hidden = survey.stream.kept(hidden.detach(), len(survey.stream.layers), torch.bfloat16)
        phases = [(0, len(hidden), survey.going_there(call))]
        out = run_phases(replace(call, hidden_BTD=hidden.detach().clone()), phases, survey.stream)
        ctx.mark_non_differentiable(*(t for t in _as_tuple(out)[1:] if isinstance(t, Tensor)))
        return out if isinstance(out, Tensor) else tuple(out)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor, *_: Any) -> Any:
        survey, call = ctx.survey, ctx.call
        gathered = survey.gathering(call)
        grads: list[Tensor | None] = [None] * len(ctx.leaves)
        out_BTD = torch.zeros_like(grad_BTD)  # the hidden states may lie in a file
        survey.skeleton.fill(call.path, call.device)
        with gathered:
            step = survey.stream.chunk_rows(ctx.hidden.shape[1])
            for turn in survey.stream.turns(0, len(ctx.hidden)):
                for first, last in turn.spans(step):
                    _backward_rows(ctx, first, last, grad_BTD, out_BTD, grads)
                gathered.fold(turn)
        gathered.record()
        survey.skeleton.empty(call.path)
        trim_memory()
        survey.done()
        return (None, None, None, out_BTD, *grads)


def _backward_rows(ctx: Any, first: int, last: int, grad_BTD: Tensor, out_BTD: Tensor, grads: list[Tensor | None]) -> None:
    call = ctx.call
    args, kwargs = tree_unflatten(ctx.leaves, ctx.spec)
    piece = LayerCall(call.path, call.layer, call.forward, ctx.hidden, args, kwargs, call.device)
    ctx.survey.rows = slice(first, last)
    with torch.enable_grad():
        hidden, args, kwargs = piece.rows(first, last)
        hidden = hidden.float().requires_grad_(True)
        out = _as_tuple(piece.forward(hidden, *args, **kwargs))[0]
        wanted = [i for i, leaf in enumerate(ctx.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        inputs = [hidden, *(ctx.leaves[i] for i in wanted)]
        found = torch.autograd.grad(out, inputs, grad_BTD[first:last].to(out.device), allow_unused=True)
    out_BTD[first:last] = found[0].to(out_BTD.device)
    for i, grad in zip(wanted, found[1:]):
        if grad is not None:
            before = grads[i]
            grads[i] = grad if before is None else before + grad


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)
