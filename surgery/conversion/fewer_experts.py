"""Remove routed experts (`experts`): those go that add least to the tokens that are routed to them, on the calibration
text, by router-weighted expert activation pruning (Lasby et al. 2025, "REAP the Experts"):

    S_j = mean of g_j(x) |f_j(x)| over the tokens x that are routed to expert j

g_j(x): the weight that the router gives the expert for token x. f_j(x) (D,): the expert's output. An expert that no
token is routed to has S_j = 0. All scores are those of the original, so that every layer is measured once.

The routers lose the rows of these experts, and each token is routed to the best of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.layer_runner import LayerRunner
from surgery.calibration.routing import routed_arguments
from surgery.checkpoint.fewer_experts import Kept, router_parameters
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import TensorInfo, TensorSource, read_header, read_tensor, write_shard
from surgery.conversion.context import EXPERTS_NAME, ConversionContext
from surgery.conversion.removals import journaled_choice
from surgery.conversion.score import held_out_score
from surgery.conversion.streams import Contexts, Layer, Stream, Streams, Visitor
from surgery.core.journal import Journal
from surgery.planning.fewer_experts import ExpertsPlan, with_fewer_experts


@dataclass(frozen=True)
class RemovedExperts:
    """The experts that were chosen. kept: those that stay. record: the report's entry. replaced: the tensors of the
    routers without the rows of the others, by parameter.
    """

    kept: Kept
    record: dict[str, Any]
    replaced: dict[str, TensorInfo]


def remove_experts(ctx: ConversionContext, journal: Journal) -> RemovedExperts:
    """Return the experts that stay, and the routers for them; those of an interrupted run are read from its files.

    ctx: of the model with all experts; its plan has `experts`.
    """
    file = ctx.work_dir / EXPERTS_NAME
    entry = journaled_choice(ctx, journal, "experts", file, lambda: _choose(ctx, file))
    kept = {path: tuple(experts) for path, experts in entry["record"]["kept"].items()}
    return RemovedExperts(kept, entry["record"], read_header(file))


def _choose(ctx: ConversionContext, file: Path) -> dict[str, Any]:
    """Return the journal's entry: the report's record, and the SHA-256 of the file with the routers."""
    plan = ctx.plan.experts
    assert plan is not None
    measured = ExpertScores(ctx, plan)
    original_BTD = measured.run()
    scores = {path: measured.scores(path) for path in plan.stack.paths}
    plan = plan.with_kept({path: plan.stack.select(of_path, plan.number) for path, of_path in scores.items()})
    fewer, digest = fewer_model(ctx.model, plan, file)
    runner = ctx.runner.single_process().with_model(fewer)
    with ctx.progress.bar("trying the model with fewer experts", len(plan.layout.layers)) as tick:
        streams = Streams(runner, ctx.samples, {"converted": Stream(ctx.samples.held_out)})
        final = streams.run(Visitor(lambda _: {"converted": nullcontext()}), tick)
    routed = sum(float(measured.tokens[path].sum()) for path in scores)
    record = {
        "experts": plan.stack.count,
        "kept": {path: list(kept) for path, kept in plan.kept.items()},
        "scores": {path: [round(score, 6) for score in of_path] for path, of_path in scores.items()},
        "kept_tokens": sum(float(measured.tokens[p][list(kept)].sum()) for p, kept in plan.kept.items()) / routed,
        "macs": plan.macs,
        "held_out": held_out_score(ctx, original_BTD, final["converted"]).to_dict(),
    }
    return {"record": record, "sha256": digest}


def fewer_model(model: MetaModel, plan: ExpertsPlan, file: Path) -> tuple[MetaModel, str]:
    """Return the model with the experts that a plan keeps, whose routers are written to `file`, and its SHA-256."""
    digest = write_shard(file, _router_tensors(model, plan))
    fewer = with_fewer_experts(model, plan, read_header(file))
    assert isinstance(fewer, MetaModel)  # as `model` is
    return fewer, digest


def _router_tensors(model: MetaModel, plan: ExpertsPlan) -> list[TensorSource]:
    """Return the rows of the experts that stay of each parameter with a row for every expert, as stored."""
    fewer = with_fewer_experts(model, plan)
    rows = router_parameters(model.model, fewer.model, plan.stack, plan.kept)
    return [
        TensorSource.from_tensor(name, read_tensor(model.tensor_info(name))[list(plan.kept[path])])
        for name, path in rows.items()
    ]


class ExpertScores:
    """A pass of the original that measures its experts on the rows to fit. It runs in one process.

    sums, tokens: by path of RoutedExperts, of each expert the sum of g |f| over its tokens, and their number (E,).
    """

    def __init__(self, ctx: ConversionContext, plan: ExpertsPlan):
        self.ctx, self.plan = ctx, plan
        self.runner: LayerRunner = ctx.runner.single_process()
        self.sums, self.tokens = (
            {path: torch.zeros(plan.stack.count, dtype=torch.float64) for path in plan.stack.paths} for _ in range(2)
        )

    def run(self) -> Tensor:
        """Run the samples; return what reaches the head in the held-out ones, (B, T, D)."""
        samples = self.ctx.samples
        with self.ctx.progress.bar("measuring experts", len(self.plan.layout.layers)) as tick:
            streams = {"fit": Stream(samples.fit), "held out": Stream(samples.held_out)}
            final = Streams(self.runner, samples, streams).run(Visitor(self.visit), tick)
        return final["held out"]

    def visit(self, layer: Layer) -> Contexts:
        """Measure the experts of a layer."""
        paths = [path for path in self.plan.stack.paths if path.startswith(f"{layer.path}.")]
        return {"fit": self._measured(layer.path, paths), "held out": nullcontext()}

    def scores(self, path: str) -> list[float]:
        """Return the score of each expert."""
        scores: list[float] = (self.sums[path] / self.tokens[path].clamp_min(1)).tolist()
        return scores

    @contextmanager
    def _measured(self, layer: str, paths: list[str]) -> Iterator[None]:
        masks_BT = self.ctx.samples.token_masks(self.plan.layout.tower(layer))
        handles = [handle for path in paths for handle in self._hooks(path, masks_BT)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, path: str, masks_BT: tuple[Tensor, ...]) -> list[Any]:
        """Return handles of the hooks that measure the experts at `path`."""
        module: Any = self.ctx.model.module(path)
        called: dict[str, Tensor] = {}

        def route(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x_ND, called["index_Nk"], called["weight_Nk"] = routed_arguments(args, kwargs)
            called["real_N"] = torch.ones(len(x_ND), dtype=torch.bool, device=x_ND.device)
            if masks_BT:
                called["real_N"] = masks_BT[0][self.runner.row :].flatten()[: len(x_ND)].bool().to(x_ND.device)

        def measure(expert: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], out_MD: Tensor) -> None:
                mine_Nk = called["index_Nk"] == expert  # rows of the output are in this order
                real_M = called["real_N"][:, None].expand_as(mine_Nk)[mine_Nk]
                sizes_M = out_MD.float().norm(dim=-1)
                if not module.layout.weighs_inputs:
                    sizes_M = sizes_M * called["weight_Nk"][mine_Nk].float()
                self.sums[path][expert] += float(sizes_M[real_M].sum(dtype=torch.float64))
                self.tokens[path][expert] += int(real_M.sum())

            return hook

        hooks = [module.expert(index).register_forward_hook(measure(index)) for index in range(module.num_experts)]
        return [module.register_forward_pre_hook(route, with_kwargs=True), *hooks]
