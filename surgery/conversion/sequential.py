"""Sequential conversion: convert layer after layer, each calibrated on the outputs of the converted layers below it
(as GPTQ does; Frantar et al. 2023).

Every calibration sample runs through the model twice: once through the original layers, once through the converted
ones (surgery.conversion.streams). Inside a layer, linears that read the same input form a stage. Stages follow
the order of execution, so that the linears of the MLP are fitted to the output of the converted attention. The LM head
comes last, calibrated on the final hidden states.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.linears import LinearInfo
from surgery.calibration.attention_samples import AttentionSamples, all_attention_replaced
from surgery.calibration.data import CalibrationSet, unpadded_rows
from surgery.calibration.layer_runner import LayerCall, StopForward
from surgery.calibration.moments import InputMoments
from surgery.calibration.partition import MAX_SHARDS, Round
from surgery.calibration.routing import (
    RoutedTokens,
    real_tokens,
    routed_arguments,
    scale_rows,
    shared_weight,
)
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import TensorSource
from surgery.conversion.context import ConversionContext
from surgery.conversion.fisher import load_grams
from surgery.conversion.fit import FitContext, FitResult, fit_linear
from surgery.conversion.fit_shared import fit_shared, share_modules, targets_by_basis
from surgery.conversion.mixer_init.base import build_mixer, select_init
from surgery.conversion.norms import swapped_parameters
from surgery.conversion.replacement import (
    LayerReplacement,
    add_level_weights,
    add_linear,
    add_mixer,
    broadcast_fits,
    broadcast_mixer,
    broadcast_shared_fits,
    densify_module,
    fold_output,
    stored_dtype,
    swapped_modules,
)
from surgery.conversion.score import HeldOutScore, held_out_score
from surgery.conversion.streams import Contexts, Layer, Stream, Streams
from surgery.conversion.tune_layer import tune_layer
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.targets import LinearTarget, Plan
from surgery.planning.weights import target_weight


@dataclass
class LinearStage:
    """Linears of one layer that read the same input.

    paths: their module paths, in order of execution. residual: path, below the layer, of the module whose input is the
    residual stream that the linear's output is added to; "" if there is none. experts, expert: of linears of a routed
    expert the path of its RoutedExperts and its index there; is_inner: whether they read the product of gate and up.
    members: of linears whose bases are shared by the experts of the layer, which are fitted together, a stage for each
    expert; () of other stages.
    """

    paths: list[str]
    residual: str
    experts: str = ""
    expert: int = 0
    is_inner: bool = False
    members: tuple[LinearStage, ...] = ()


class RoutedCalibration:
    """The tokens that reach the routed experts of one layer, recorded once for all experts.

    fit, held_out: the tokens of the rows to fit and of the held-out rows, by the chunk of rows (first, last). shared:
    sums over the rows of all experts, by (is_inner, whether of the rows to fit), computed when an expert needs them.
    """

    def __init__(self, fit: dict[tuple[int, int], RoutedTokens], held_out: dict[tuple[int, int], RoutedTokens]):
        self.fit, self.held_out = fit, held_out
        self.shared: dict[tuple[bool, bool], InputMoments] = {}


def conversion_streams(ctx: ConversionContext) -> Streams:
    """Return the streams of a conversion: the original, and beside it the converted model, each with the rows to fit
    and the held-out ones.
    """
    fit, held_out = ctx.samples.fit, ctx.samples.held_out
    streams = {
        "fit": Stream(fit, MAX_SHARDS),
        "held out": Stream(held_out, 1),
        "converted fit": Stream(fit, beside="fit"),
        "converted held out": Stream(held_out, beside="held out"),
    }
    return Streams(ctx.runner, ctx.samples, streams)


class SequentialConverter:
    """Convert all layers in order, each calibrated on the outputs of the layers already converted.

    budgets: parameters for each target, by name. finished(path): the saved replacement of a layer when resuming, else
    None. write(path, replacement, seconds): store a layer's replacement. validate: whether each matrix is validated on
    held-out rows (False for trials, which are scored as a whole). tune_epochs: epochs of each layer's tuning;
    tune_norms: whether it trains norms and biases too.
    """

    def __init__(
        self,
        ctx: ConversionContext,
        budgets: dict[str, float],
        *,
        finished: Callable[[str], LayerReplacement | None],
        write: Callable[[str, LayerReplacement, float], None],
        validate: bool = True,
        tune_epochs: int = 0,
        tune_norms: bool = False,
    ):
        self.ctx, self.budgets, self.streams = ctx, budgets, conversion_streams(ctx)
        self.fit, self.held_out = ctx.samples.fit, ctx.samples.held_out
        self.model, self.plan, self.recipe, self.runner = ctx.model, ctx.plan, ctx.recipe, ctx.runner
        self.finished, self.write, self.validate = finished, write, validate
        self.tune_epochs, self.tune_norms = tune_epochs, tune_norms
        self.original_BTD: Tensor | None = None  # what reaches the head in the original, after `run`
        self.diverged = False  # whether any layer so far was converted, so that the two streams differ

    @torch.no_grad()
    def run(self) -> tuple[HeldOutScore, LayerReplacement]:
        """Convert every layer, then the head.

        Returns (held-out score of the converted model, the head's replacement).
        """
        final = self.streams.run(self)
        self.original_BTD = original_BTD = final.through("fit", "held out")
        converted_BTD = final.through("converted fit", "converted held out")
        head = convert_head(self.ctx, self.budgets, original_BTD, converted_BTD)
        module = next(iter(head.modules.values()), None)
        return held_out_score(self.ctx, final["held out"], final["converted held out"], head_module=module), head

    def visit(self, layer: Layer) -> Contexts:
        """Convert one layer; then the original rows run through it unchanged, and the converted ones through its
        replacement.
        """
        began, call = time.perf_counter(), layer.call
        replacement = self.finished(call.path)
        if replacement is not None:
            replacement.modules = {path: densify_module(module) for path, module in replacement.modules.items()}
        else:
            replacement = self.convert_layer(layer)
            self.write(call.path, replacement, time.perf_counter() - began)
        self.diverged = self.diverged or bool(replacement.modules) or bool(replacement.mixers)
        # The converted rows run even while they equal the original rows: a later layer may read other outputs of this
        # layer.
        return {
            "fit": nullcontext(),
            "converted fit": self._replaced_modules(call, replacement),
            "held out": nullcontext(),
            "converted held out": self._replaced_modules(call, replacement),
        }

    @contextmanager
    def _replaced_modules(self, call: LayerCall, replacement: LayerReplacement) -> Iterator[None]:
        with (
            swapped_modules(call.layer, call.path, replacement.modules),
            all_attention_replaced(self.model, replacement.mixers),
            swapped_parameters(self.model, replacement.originals),
        ):
            yield

    def convert_layer(self, layer: Layer) -> LayerReplacement:
        """Initialize the layer's mixer, fit its linears stage by stage, and store its output projection."""
        call, replacement, targets = layer.call, LayerReplacement(), self.plan.targets_in_layer(layer.path)
        attention_target = self.plan.attention_targets.get(call.path)
        if attention_target is not None:
            self._init_mixer(call, attention_target, replacement)
        if targets:
            self._fit_stages(call, targets, replacement)
        if attention_target is not None:
            fold_output(self.model, self.plan, attention_target, call.device, replacement)
        if native_target := self.plan.native_targets.get(call.path):
            add_level_weights(self.model, native_target, replacement)
        if self.tune_epochs:
            gram = load_grams(self.ctx.grams_dir / f"{call.path}.safetensors", self.runner.device).get(call.path)
            tune_layer(self.ctx, layer, replacement, gram, self.tune_epochs, self.tune_norms)
            replacement.structured = {}
        return replacement

    def _init_mixer(self, call: LayerCall, attention_target: AttentionTarget, replacement: LayerReplacement) -> None:
        """Initialize the layer's mixer. This comes first: the layer's linears are fitted to inputs that it produces."""
        settings = self.recipe.attention
        assert settings is not None
        rotated = build_mixer(attention_target, torch.device("meta")).rotated
        offset = self.streams.offset if self.recipe.calibrate == "sequential" and self.diverged else 0
        fit, held = (
            AttentionSamples(self.model, call, attention_target, rows, converted_offset=offset, rotated=rotated)
            for rows in (self.fit, self.held_out)
        )
        self.runner.gather_rows(call.hidden_BTD)  # an initialization reads all samples, one after the other
        initialized = broadcast_mixer(
            self.runner.ranks,
            attention_target.index % self.runner.ranks.count,
            attention_target,
            lambda: select_init(attention_target.config, settings).init(attention_target, settings, fit, held),
            call.device,
        )
        add_mixer(self.model, attention_target, initialized, replacement)

    def _fit_stages(
        self, call: LayerCall, targets: dict[str, tuple[LinearTarget, ...]], replacement: LayerReplacement
    ) -> None:
        """Fit the layer's linears, stage after stage, and add them to `replacement`."""
        grams = load_grams(self.ctx.grams_dir / f"{call.path}.safetensors", self.runner.device)
        if self.runner.ranks.broadcast_object(len(grams)) != len(grams):
            raise SurgeryError(
                f"{self.ctx.grams_dir} must hold the same files on all machines (this process finds {len(grams)} "
                "matrices, process 0 another number). Put --out on a file system that all processes share."
            )
        routed: dict[str, RoutedCalibration] = {}
        for stage in find_stages(self.model, self.plan, call):
            weights = {
                target.name: (
                    target_weight(self.model, target, call.device),
                    bool(stage.residual) and target.part is None,
                )
                for path in stage.paths
                for target in targets[path]
            }
            moments_of = partial(self._moments, call, stage, weights, replacement)
            if stage.experts:
                if stage.experts not in routed:
                    routed = {stage.experts: self._record_routing(call, stage.experts, replacement)}
                if stage.members:
                    self._fit_shared_bases(call, stage, weights, replacement, routed[stage.experts], grams)
                    continue
                moments_of = partial(self._expert_moments, call, stage, weights, replacement, routed[stage.experts])
            is_dropped = all(target.is_dropped for path in stage.paths for target in targets[path])
            fit = None if is_dropped else moments_of(self.fit)
            # Computed on first use: by then the Cholesky factor of a wide input's C has been freed.
            validate = self.validate and fit is not None
            held_out = cache(partial(moments_of, self.held_out, besides=fit)) if validate else None
            if held_out is not None and self.runner.ranks.count > 1:
                held_out()  # a collective operation: all processes call it here, not only those that fit a matrix
            fit_context = FitContext(fit, held_out, damping=self.recipe.damping, sweeps=self.recipe.sweeps)
            fits = {
                target.name: (target, partial(self._fit, target, weights[target.name][0], fit_context, grams))
                for path in stage.paths
                for target in targets[path]
            }
            fitted = broadcast_fits(self.runner.ranks, fits, call.device)
            for path in stage.paths:
                results = [fitted[target.name] for target in targets[path]]
                if fit is not None:
                    results = [with_bias_change(result, fit) for result in results]
                add_linear(self.model, list(targets[path]), results, call.device, replacement)
                if self.tune_epochs:
                    replacement.find_structured()
                for linear in targets[path][0].all_linears:  # of a pruned MLP that stays whole only `down` is there
                    if linear.path in replacement.modules:
                        replacement.modules[linear.path] = densify_module(replacement.modules[linear.path])
            del fit, held_out, fit_context  # frees this stage's moments before the next stage's are computed

    def _fit(
        self, target: LinearTarget, weight_OI: Tensor, fit_context: FitContext, grams: dict[str, Tensor]
    ) -> FitResult:
        fit_context.gram, fit_context.stored_dtype = grams.get(target.name), stored_dtype(self.model, target)
        result = fit_linear(target, self.budgets[target.name], weight_OI, fit_context)
        if target.linear.experts and fit_context.fit is not None:
            record_rows(result, fit_context.fit)
        return result

    # -- routed experts ----------------------------------------------------------------------------
    def _fit_shared_bases(
        self,
        call: LayerCall,
        stage: LinearStage,
        weights: dict[str, tuple[Tensor, bool]],
        replacement: LayerReplacement,
        routed: RoutedCalibration,
        grams: dict[str, Tensor],
    ) -> None:
        """Fit the linears of all experts whose bases are shared, and add them to `replacement`.

        The statistics of all experts are in memory.
        """
        targets = {path: self.plan.targets[path][0] for path in stage.paths}
        of_expert = {
            member.expert: partial(
                self._expert_moments, call, member, {path: weights[path] for path in member.paths}, replacement, routed
            )
            for member in stage.members
        }
        fits = {expert: moments_of(self.fit) for expert, moments_of in of_expert.items()}
        groups = list(targets_by_basis(list(targets.values())).values())
        shared = [(members, self._shared_fit(members, weights, fits, of_expert, grams)) for members in groups]
        fitted = broadcast_shared_fits(self.runner.ranks, shared, call.device)
        for target in targets.values():
            add_linear(self.model, [target], [fitted[target.name]], call.device, replacement)
        for members in groups if self.tune_epochs else ():
            share_modules(replacement.modules, members)
        if self.tune_epochs:
            replacement.find_structured()
        for path in targets:
            replacement.modules[path] = densify_module(replacement.modules[path])

    def _shared_fit(
        self,
        members: list[LinearTarget],
        weights: dict[str, tuple[Tensor, bool]],
        fits: dict[int, InputMoments],
        of_expert: Mapping[int, Callable[..., InputMoments]],
        grams: dict[str, Tensor],
    ) -> Callable[[], dict[str, FitResult]]:
        """Return a function that fits the matrices of one basis.

        Held-out rows of several processes are counted before it runs.
        """
        recipe, experts = self.recipe, [target.linear.expert for target in members]

        def held_out_of(index: int) -> InputMoments:
            return of_expert[experts[index]](self.held_out, besides=fits[experts[index]])

        held_out: Callable[[int], InputMoments] | None = held_out_of if self.validate else None
        if held_out is not None and self.runner.ranks.count > 1:  # a collective operation: all processes call it here
            held_out = [held_out_of(index) for index in range(len(members))].__getitem__

        def fit() -> dict[str, FitResult]:
            contexts = [
                FitContext(
                    fits[expert], gram=grams.get(target.name), damping=recipe.damping, sweeps=recipe.sweeps,
                    stored_dtype=stored_dtype(self.model, target),
                )
                for expert, target in zip(experts, members)
            ]  # fmt: skip
            results = fit_shared(members, [weights[target.name][0] for target in members], contexts, held_out)
            for expert, target in zip(experts, members):
                record_rows(results[target.name], fits[expert])
            return results

        return fit

    def _record_routing(self, call: LayerCall, experts: str, replacement: LayerReplacement) -> RoutedCalibration:
        """Record the tokens that reach the experts at the path `experts`, with all linears before them replaced."""
        recordings = []
        for rows in (self.fit, self.held_out):
            chunks: dict[tuple[int, int], RoutedTokens] = {}
            for round_ in self.runner.rounds(rows.start, rows.stop):
                for start, stop in round_.chunks(self.runner.chunk_rows(call.hidden_BTD.shape[1])):
                    x0, index, weight = self._expert_arguments(call, experts, start, stop, LayerReplacement())
                    x = x0
                    if self._streams_differ(replacement):
                        first, last = start + self.streams.offset, stop + self.streams.offset
                        x, index, weight = self._expert_arguments(call, experts, first, last, replacement)
                    chunks[start, stop] = RoutedTokens(x, x0, index, weight)
            recordings.append(chunks)
        return RoutedCalibration(*recordings)

    def _expert_arguments(
        self, call: LayerCall, experts: str, start: int, stop: int, replacement: LayerReplacement
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arguments of the experts module for rows start:stop, of real tokens."""
        caught: list[tuple[Tensor, Tensor, Tensor]] = []

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append(routed_arguments(args, kwargs))
            raise StopForward

        with self._replaced_modules(call, replacement):
            handle = self.model.module(experts).register_forward_pre_hook(hook, with_kwargs=True)
            try:
                call.apply(start, stop)
            except StopForward:
                pass
            finally:
                handle.remove()
        first, masks_BT = self.streams.sample(start), self.ctx.samples.token_masks(self.plan.layout.tower(call.path))
        mask_BT = masks_BT[0][first : first + stop - start] if masks_BT else None
        x, index, weight = (real_tokens(tensor, mask_BT) for tensor in caught[0])
        return x, index, weight

    def _streams_differ(self, replacement: LayerReplacement) -> bool:
        """Return whether the converted model's activations are to be used, and differ from the original's at this
        point.
        """
        replaced = bool(self.diverged or replacement.modules or replacement.mixers)
        return self.recipe.calibrate == "sequential" and replaced

    def _expert_moments(
        self,
        call: LayerCall,
        stage: LinearStage,
        weights: dict[str, tuple[Tensor, bool]],
        replacement: LayerReplacement,
        routed: RoutedCalibration,
        rows: range,
        *,
        besides: InputMoments | None = None,
    ) -> InputMoments:
        """Return the moments of the linears of one expert over the tokens routed to it.

        An expert with fewer rows than its matrix has inputs gets average rows of all experts of the layer for the rest;
        of held-out rows it needs fewer, in proportion. Neurons of one expert have nothing in common with those of
        another, so an expert that is pruned gets white rows instead, which draw its fit towards the original.
        """
        is_fit = rows == self.fit
        tokens, rounds = routed.fit if is_fit else routed.held_out, self.runner.rounds(rows.start, rows.stop)
        step, size = self.runner.chunk_rows(call.hidden_BTD.shape[1]), next(iter(weights.values()))[0].shape[1]
        experts: Any = self.model.module(stage.experts)

        def rows_of(chunk: RoutedTokens, expert: int) -> tuple[Tensor, Tensor]:
            x, x0, weight_M1 = chunk.rows_of(expert)
            if not stage.is_inner:
                return scale_rows(x, x0, weight_M1)
            if experts.layout.weighs_inputs:
                x, x0 = scale_rows(x, x0, weight_M1)
            x, x0 = self._inner_rows(experts, f"{stage.experts}.{expert}", x, x0, replacement)
            return (x, x0) if experts.layout.weighs_inputs else scale_rows(x, x0, weight_M1)

        def add(moments: InputMoments, round_: Round) -> None:
            for chunk in round_.chunks(step):
                moments.add(*rows_of(tokens[chunk], stage.expert))
            self.runner.record_moment_bytes(moments.tensors() + (besides.tensors() if besides else []))

        def add_all(moments: InputMoments, round_: Round) -> None:
            for chunk in round_.chunks(step):
                if stage.is_inner:
                    for expert in range(experts.num_experts):
                        moments.add(*rows_of(tokens[chunk], expert))
                else:
                    x, x0, weight_N1 = tokens[chunk].rows_of_all()
                    moments.add(*scale_rows(x, x0, weight_N1))
                    moments.count += len(x) * (tokens[chunk].index_Nk.shape[1] - 1)

        moments = accumulate_moments(weights, rounds, self.runner.ranks, add)
        min_rows = size if is_fit else math.ceil(size * len(self.held_out) / len(self.fit))
        if moments.count < min_rows and any(self.plan.targets[path][0].neurons for path in stage.paths):
            moments.add_white(min_rows - moments.count)
        elif moments.count < min_rows:
            key = (stage.is_inner, is_fit)
            if key not in routed.shared:
                like = {"shared": (shared_weight(size, next(iter(weights.values()))[0]), False)}
                routed.shared[key] = accumulate_moments(like, rounds, self.runner.ranks, add_all)
            moments.borrow(routed.shared[key], min_rows - moments.count)
        return moments.means()

    def _inner_rows(
        self, experts: Any, prefix: str, x: Tensor, x0: Tensor, replacement: LayerReplacement
    ) -> tuple[Tensor, Tensor]:
        """Return what the expert at `prefix` passes to its down projection, in the converted and in the original
        model.
        """
        expert, names = experts.expert(int(prefix.rpartition(".")[2])), experts.names
        original = [expert.get_submodule(name) for name in (names.gate, names.up)]
        inner0 = experts.gating(original[0](x0), original[1](x0))
        if not self._streams_differ(replacement):
            return inner0, inner0
        gate, up = (
            replacement.modules.get(f"{prefix}.{name}", module)
            for name, module in zip((names.gate, names.up), original)
        )
        return experts.gating(gate(x), up(x)), inner0

    def _moments(
        self,
        call: LayerCall,
        stage: LinearStage,
        weights: dict[str, tuple[Tensor, bool]],
        replacement: LayerReplacement,
        rows: range,
        *,
        besides: InputMoments | None = None,
    ) -> InputMoments:
        """Return the moments of a stage over `rows` of the original; besides: moments in memory at the same time."""
        step = self.runner.chunk_rows(call.hidden_BTD.shape[1])

        def add(moments: InputMoments, round_: Round) -> None:
            for start, stop in round_.chunks(step):
                x0, r0 = self._inputs(call, stage, start, stop, LayerReplacement())
                x, r = x0, r0
                if self._streams_differ(replacement):
                    first, last = start + self.streams.offset, stop + self.streams.offset
                    x, r = self._inputs(call, stage, first, last, replacement)
                gap = r0 - r if r0 is not None and r is not None and r is not r0 else None
                moments.add(x, x0, gap)
            self.runner.record_moment_bytes(moments.tensors() + (besides.tensors() if besides else []))

        fits_bias = any(target.fits_bias for path in stage.paths for target in self.plan.targets[path])
        rounds = self.runner.rounds(rows.start, rows.stop)
        return accumulate_moments(weights, rounds, self.runner.ranks, add, fits_bias).means()

    def _inputs(
        self, call: LayerCall, stage: LinearStage, start: int, stop: int, replacement: LayerReplacement
    ) -> tuple[Tensor, Tensor | None]:
        """Return (the stage's input (N, I), the residual stream (N, D) or None) for rows start:stop, N real tokens.

        The layer's forward stops as soon as it reaches the stage.
        """
        inputs: dict[str, Tensor] = {}

        def record_input(name: str, stop_forward: bool) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                inputs[name] = args[0] if args else next(iter(kwargs.values()))
                if stop_forward:
                    raise StopForward

            return hook

        with self._replaced_modules(call, replacement):
            handles = []
            if stage.residual:
                reader = call.layer.get_submodule(stage.residual)
                handles.append(reader.register_forward_pre_hook(record_input("residual", False), with_kwargs=True))
            first = self.model.module(stage.paths[0])
            handles.append(first.register_forward_pre_hook(record_input("input", True), with_kwargs=True))
            try:
                call.apply(start, stop)
            except StopForward:
                pass
            finally:
                for handle in handles:
                    handle.remove()
        residual = inputs.get("residual")
        return (
            self._unpadded_rows(call, inputs["input"], start, stop),
            None if residual is None else self._unpadded_rows(call, residual, start, stop),
        )

    def _unpadded_rows(self, call: LayerCall, x: Tensor, start: int, stop: int) -> Tensor:
        """Return the rows of real tokens, (N, X)."""
        first, masks_BT = self.streams.sample(start), self.ctx.samples.token_masks(self.plan.layout.tower(call.path))
        return unpadded_rows(x, *(mask_BT[first : first + stop - start] for mask_BT in masks_BT))


def accumulate_moments(
    weights: dict[str, tuple[Tensor, bool]],
    rounds: Sequence[Round],
    dist: DistContext,
    add: Callable[[InputMoments, Round], None],
    fits_bias: bool = False,
) -> InputMoments:
    """Return the moments summed over all rounds.

    weights: target name -> (weight (O, I), whether the output is added to the residual stream). add(moments, round):
    add this process's rows of a round. fits_bias: see InputMoments. The partial sums are added in a fixed order, so the result has the same bits
    for any number of processes.
    """
    total = InputMoments(weights, fits_bias)
    for i, round_ in enumerate(rounds):
        round_moments = InputMoments(weights, fits_bias) if i or dist.count > 1 else total
        add(round_moments, round_)
        if round_moments is not total:
            total.ordered_reduce(round_moments, round_, dist, first=i == 0)
        del round_moments
    if dist.count > 1:
        for tensor in total.tensors():
            dist.gather_rows_(tensor)
    return total


def with_bias_change(result: FitResult, moments: InputMoments) -> FitResult:
    """Return a fit with the change of its bias, where that is fitted too."""
    matrix_OI = result.dense_OI if result.linear is None else result.linear.dense()
    if moments.mean_I is None or matrix_OI is None:
        return result
    return replace(result, bias_change_O=moments.bias_change(result.record.name, matrix_OI))


def record_rows(result: FitResult, moments: InputMoments) -> None:
    """Record how many calibration rows an expert got, and how many average rows of all experts, or white rows, were
    added.
    """
    rows = moments.count - moments.borrowed
    result.record = replace(result.record, rows=rows, shared_rows=moments.borrowed)


def find_stages(meta_model: MetaModel, plan: Plan, call: LayerCall) -> list[LinearStage]:
    """Run one sample through the layer and return its stages: linears that read the same tensor, in order of
    execution.
    """
    stages: list[tuple[Tensor, LinearStage]] = []  # with the input of each stage
    handles = []
    targets = plan.targets_in_layer(call.path)
    linears = {linear.path: linear for parts in targets.values() for linear in parts[0].linears}

    def group_by_input(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            for x, stage in stages:
                if not stage.experts and x.data_ptr() == args[0].data_ptr() and x.shape == args[0].shape:
                    stage.paths.append(path)
                    return
            stages.append((args[0], LinearStage([path], linears[path].residual)))

        return hook

    def mark_experts(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stages.append((routed_arguments(args, kwargs)[0], LinearStage([], "", path)))

        return hook

    for path in linears:
        if not linears[path].experts:
            handles.append(meta_model.module(path).register_forward_pre_hook(group_by_input(path)))
    for path in dict.fromkeys(linear.experts for linear in linears.values() if linear.experts):
        handles.append(meta_model.module(path).register_forward_pre_hook(mark_experts(path), with_kwargs=True))
    try:
        call.apply(0, 1)
    finally:
        for handle in handles:
            handle.remove()
    for target, *_ in targets.values():
        _leave_first(target, [stage for _, stage in stages])
    sharing = {path for path, (target, *_) in targets.items() if target.basis}
    return [
        linear_stage
        for _, stage in stages
        for linear_stage in (_expert_stages(stage, linears, sharing) if stage.experts else [stage])
    ]


def _leave_first(target: LinearTarget, stages: list[LinearStage]) -> None:
    """Leave the first of joined linears in their stage. Raises SurgeryError if they do not read one input."""
    paths = [linear.path for linear in target.joined]
    joined_stages = [stage for stage in stages if set(stage.paths) & set(paths)]
    if len(joined_stages) > 1:
        raise SurgeryError(
            f"{' and '.join(paths)} do not read one input in this model, so that one matrix cannot replace them. Leave "
            "share: input out for "
            f"them: a rule {{match: {paths[0]}, share: none}}"
        )
    for stage in joined_stages:
        stage.paths = [path for path in stage.paths if path not in paths[1:]]


def _expert_stages(marker: LinearStage, linears: dict[str, LinearInfo], sharing: set[str]) -> list[LinearStage]:
    """Return the stages of routed experts: gate and up of every expert, then down of every expert.

    A router selects few experts for one sample, so the stages are found by role and not by running the sample. sharing:
    paths of the linears with a basis that experts share, which come first, in one stage.
    """
    stages: dict[tuple[bool, bool, int], LinearStage] = {}
    for path, linear in linears.items():
        if linear.experts == marker.experts:
            is_inner = "expert.down" in linear.roles
            stage = LinearStage([], "", linear.experts, linear.expert, is_inner)
            stages.setdefault((is_inner, path not in sharing, linear.expert), stage).paths.append(path)
    members = tuple(stages[key] for key in sorted(stages) if not key[1])
    if not members:
        return [stages[key] for key in sorted(stages)]
    paths = [path for member in members for path in member.paths]
    together = LinearStage(paths, "", marker.experts, members=members)
    return [together, *(stages[key] for key in sorted(stages) if key[1])]


@torch.no_grad()
def convert_head(
    ctx: ConversionContext,
    budgets: dict[str, float],
    original_BTD: Tensor | None = None,
    converted_BTD: Tensor | None = None,
) -> LayerReplacement:
    """Return the replacement of the LM head, empty if the plan has no target there.

    original_BTD, converted_BTD: what reaches the head for all samples, from the original layers and from the converted
    ones. If original_BTD is None the head is converted without data; if converted_BTD is None, on the original's
    states.
    """
    replacement = LayerReplacement()
    model, recipe, device = ctx.model, ctx.recipe, ctx.device
    if recipe.calibrate != "sequential":
        converted_BTD = None
    for path, (target, *_) in ctx.plan.targets_in_layer("").items():
        weight_OI = target_weight(model, target, device)
        fit_context = FitContext(damping=recipe.damping, sweeps=recipe.sweeps, stored_dtype=stored_dtype(model, target))
        if original_BTD is not None:
            gather = partial(_head_moments, ctx.samples, target.name, weight_OI, original_BTD, converted_BTD)
            fit_context.fit = gather(rows=ctx.samples.fit)
            fit_context.held_out = partial(gather, rows=ctx.samples.held_out)
            fit_context.gram = load_grams(ctx.grams_dir / f"{path}.safetensors", device).get(target.name)
        fitted = fit_linear(target, budgets[target.name], weight_OI, fit_context)
        add_linear(model, [target], [fitted], device, replacement)
        replacement.entries += untied_entries(model, path)
    return replacement


def _head_moments(
    samples: CalibrationSet,
    name: str,
    weight_OI: Tensor,
    original_BTD: Tensor,
    converted_BTD: Tensor | None,
    *,
    rows: range,
) -> InputMoments:
    """Return the moments of the head's input over `rows`; padding is left out."""
    moments, mask_BT = InputMoments({name: (weight_OI, False)}), samples.head_mask()
    for row in rows:
        real = slice(None) if mask_BT is None else mask_BT[row].bool()
        x0 = original_BTD[row][real].to(weight_OI.device).flatten(0, -2)
        x = x0 if converted_BTD is None else converted_BTD[row][real].to(weight_OI.device).flatten(0, -2)
        moments.add(x, x0)
    return moments.means()


def untied_entries(meta_model: MetaModel, head: str) -> list[TensorSource]:
    """Return entries that store a tensor shared with the head (the input embedding, a bias) under each of its names.

    The head's weight itself is left out, because it is replaced.
    """
    pairs = [pair for pair in meta_model.tied.items() if any(name.startswith(f"{head}.") for name in pair)]
    names = dict.fromkeys(name for pair in pairs for name in pair if name != f"{head}.weight")
    return [TensorSource.from_file(name, meta_model.tensor_info(name)) for name in names if name not in meta_model.keys]
