"""The damage of choices: the KL divergence of the model in which they are made from the original, in nats per token of
held-out text.

Several variants of the model are measured in one streamed pass (surgery.conversion.streams): with one choice each, from
neighboring layers, or with all choices of a plan. The samples to fit run through the original and give the inputs that
linears are fitted to and mixers are initialized on; the held-out samples run through the original, and for each variant
once more from its first changed layer on. So a fit does not see the errors of other choices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from surgery.architectures.experts import RoutedExperts
from surgery.budget.choices import ATTENTION, FULL_BITS, REMOVED, STORED_IN_BITS, Choice, part_name
from surgery.calibration.attention_samples import all_attention_replaced
from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import DTYPES
from surgery.conversion.context import ConversionContext
from surgery.conversion.hybrid import init_trial_mixer
from surgery.conversion.replacement import swapped_modules
from surgery.conversion.restored import DivergenceScorer
from surgery.conversion.score import HeldOutScore
from surgery.conversion.streams import Contexts, Layer
from surgery.conversion.trial import QuickTrial, uniform_budgets
from surgery.mixers import Mixer
from surgery.modeling.quantize import make_storage, quantize_named
from surgery.planning.targets import Plan

PASS_BYTES = 2**30  # hidden states of the variants that one pass measures
PASS_VARIANTS = 64  # variants that one pass measures, at most; more if one layer has more choices


@dataclass(frozen=True)
class Damage:
    """nats: KL divergence from the original per token. error: its standard error over samples, None for one sample."""

    nats: float
    error: float | None


class DamagePass:
    """A pass that measures variants of the model. variants: the choices that each makes, by its name. plans: of each
    kind, by part and name. contexts: of the kinds of attention, likewise, whose recipe and plan have the mixer. fewer:
    the model with fewer experts, by their number.
    """

    def __init__(
        self,
        ctx: ConversionContext,
        variants: Mapping[str, Sequence[Choice]],
        plans: Mapping[tuple[str, str], Plan],
        contexts: Mapping[tuple[str, str], ConversionContext],
        fewer: Mapping[int, MetaModel],
        done: Callable[[], None],
    ):
        self.ctx, self.contexts, self.done = replace(ctx, runner=ctx.runner.single_process()), contexts, done
        self.variants, self.fewer = variants, fewer
        order = {layer: number for number, layer in enumerate(ctx.plan.layout.layers)}
        first = {name: min((c.layer for c in chosen), key=order.__getitem__) for name, chosen in variants.items()}
        plan_of = {name: plan_of_choices(ctx.plan, plans, chosen) for name, chosen in variants.items()}
        budgets = {name: uniform_budgets(plan) for name, plan in plan_of.items()}
        self.trial = QuickTrial(self.ctx, budgets, done, plan_of, first)
        self.parts: dict[str, list[str]] = {}  # the linears of each part
        for (part, _), plan in plans.items():
            for target in (target for slices in plan.targets.values() for target in slices if part in STORED_IN_BITS):
                paths = self.parts.setdefault(part_name(target.linear.layer, part), [])
                paths += [linear.path for linear in target.all_linears if linear.path not in paths]

    def run(self) -> dict[str, Damage]:
        """Return the damage of each variant, by its name."""
        final = self.trial.streams().run(self, self.done)
        samples = self.ctx.samples
        held = {name: x[samples.n_fit :] for name, x in samples.inputs.items()}
        scorer = DivergenceScorer(self.ctx, CalibrationSet(held, 0, samples.rows - samples.n_fit, samples.packed))
        return {name: _damage(scorer.score(final["held out"], final[name])) for name in self.variants}

    def visit(self, layer: Layer) -> Contexts:
        """Replace the parts of this layer that choices replace, each variant in its own stream."""
        contexts = dict(self.trial.visit(layer))
        mixers: dict[str, Mixer] = {}  # by kind: variants share them
        for name, chosen in self.variants.items():
            here = [choice for choice in chosen if choice.layer == layer.path or choice.number is not None]
            if any(choice.name == REMOVED for choice in here):  # its rows go on as they came in
                del contexts[name]
            elif here:
                attention = {
                    self._attention_path(choice): self._mixer(choice, layer, mixers)
                    for choice in here
                    if choice.part == ATTENTION
                }
                rounded = [choice for choice in here if choice.bits != FULL_BITS]
                numbers = [choice.number for choice in here if choice.number is not None]
                fewer = self.fewer[numbers[0]] if numbers else None
                contexts[name] = self._replaced(layer, contexts[name], attention, rounded, fewer)
        return contexts

    def _attention_path(self, choice: Choice) -> str:
        assert choice.kind is not None
        return self.contexts[ATTENTION, choice.kind.name].plan.attention_targets[choice.layer].path

    def _mixer(self, choice: Choice, layer: Layer, mixers: dict[str, Mixer]) -> Mixer:
        assert choice.kind is not None
        name = choice.kind.name
        if name not in mixers:
            mixers[name] = init_trial_mixer(replace(self.contexts[ATTENTION, name], runner=self.ctx.runner), layer.call)
        return mixers[name]

    @contextmanager
    def _replaced(
        self,
        layer: Layer,
        linears: AbstractContextManager[Any],
        attention: dict[str, Mixer],
        rounded: Sequence[Choice],
        fewer: MetaModel | None,
    ) -> Iterator[None]:
        """Replace the experts by those of `fewer`, linears, then attention, and round the linears of these choices as
        they are then.
        """
        blocks = expert_blocks(layer.path, fewer) if fewer is not None else {}
        with loaded(blocks, fewer, layer), linears, all_attention_replaced(self.ctx.model, attention):
            integers = {path: module for choice in rounded for path, module in self._rounded(choice).items()}
            with swapped_modules(layer.call.layer, layer.path, integers):
                yield

    def _rounded(self, choice: Choice) -> dict[str, nn.Module]:
        """Return the linears of a part in integers, by path. The layer is loaded."""
        storage, model, rounded = make_storage(choice.bits), self.ctx.model, {}
        for path in self.parts[choice.covers[0]]:
            dtype = DTYPES[model.tensor_info(f"{path}.weight").dtype]
            linear: Any = copy.deepcopy(model.module(path)).to(dtype)
            rounded[path] = quantize_named(path, linear, storage).float().eval().requires_grad_(False)
        return rounded


def expert_blocks(layer: str, fewer: MetaModel) -> dict[str, nn.Module]:
    """Return the modules of a layer that hold a router and its experts, of the model with fewer experts, by path."""
    experts = [path for path, module in fewer.model.named_modules() if isinstance(module, RoutedExperts)]
    blocks = [path.rpartition(".")[0] for path in experts if path.startswith(f"{layer}.")]
    return {path: fewer.module(path) for path in blocks}


@contextmanager
def loaded(blocks: dict[str, nn.Module], model: MetaModel | None, layer: Layer) -> Iterator[None]:
    """Load these modules of a model, and put them into the layer of another model inside the context."""
    for path in blocks:
        assert model is not None
        model.load_module(path, layer.call.device)
    try:
        with swapped_modules(layer.call.layer, layer.path, blocks):
            yield
    finally:
        for path in blocks:
            assert model is not None
            model.unload_module(path)


def _damage(score: HeldOutScore) -> Damage:
    return Damage(max(score.converted, 0.0), score.difference_se)


def plan_of_choices(plan: Plan, plans: Mapping[tuple[str, str], Plan], chosen: Sequence[Choice]) -> Plan:
    """Return the plan with the targets of the linears that these choices replace. plans: of each kind."""
    kinds = [(choice.layer, choice.kind) for choice in chosen if choice.kind is not None]
    targets = [
        plans[kind.part, kind.name].targets_in_layer(layer)
        for layer, kind in kinds
        if kind.part != ATTENTION and kind.number is None
    ]
    merged = {path: slices for some in targets for path, slices in some.items()}
    return replace(plan, targets=merged, pruned_targets={})


def pass_size(ctx: ConversionContext) -> int:
    """Return how many variants one pass measures."""
    samples = ctx.samples
    tokens = samples.tokens() // samples.rows * (samples.rows - samples.n_fit)
    config = ctx.model.config.get_text_config()
    row_bytes = 4 * tokens * getattr(config, "hidden_size", 1)
    return max(1, min(PASS_VARIANTS, PASS_BYTES // row_bytes))


def steps(ctx: ConversionContext, choices: Iterable[Choice]) -> Iterator[list[Choice]]:
    """Yield the choices in groups that one pass measures: those of neighboring layers."""
    most = pass_size(ctx)
    group: list[Choice] = []
    by_layer: dict[str, list[Choice]] = {}
    for choice in choices:
        by_layer.setdefault(choice.layer, []).append(choice)
    for of_layer in by_layer.values():
        if group and len(group) + len(of_layer) > most:
            yield group
            group = []
        group = [*group, *of_layer]
    if group:
        yield group
