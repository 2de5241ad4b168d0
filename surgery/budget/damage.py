"""The damage of each choice: the KL divergence of the model with one choice changed from the original, in nats per token
of held-out text.

All choices of several layers are measured in one streamed pass (surgery.conversion.streams). The samples to fit run
through the original and give the inputs that linears are fitted to and mixers are initialized on; the held-out samples
run through the original, and for each choice once more from its layer on. Other parts stay as they are, so that a fit
does not see the errors of other choices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from surgery.budget.choices import ATTENTION, REMOVED, Choice, part_name
from surgery.calibration.attention_samples import all_attention_replaced
from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.safetensors_io import DTYPES
from surgery.conversion.context import ConversionContext
from surgery.conversion.hybrid import init_trial_mixer
from surgery.conversion.replacement import swapped_modules
from surgery.conversion.restored import DivergenceScorer
from surgery.conversion.score import HeldOutScore
from surgery.conversion.streams import Contexts, Layer, waits_for
from surgery.conversion.trial import QuickTrial, uniform_budgets
from surgery.modeling.quantize import make_storage, quantize_named

PASS_BYTES = 2**30  # hidden states of the choices that one pass measures
PASS_CHOICES = 64  # choices that one pass measures, at most; more if one layer has more


@dataclass(frozen=True)
class Damage:
    """nats: KL divergence from the original per token. error: its standard error over samples, None for one sample."""

    nats: float
    error: float | None


class DamagePass:
    """A pass that measures some choices. plans: of each kind, by part and name. contexts: of the kinds of attention,
    likewise, whose recipe and plan have the mixer.
    """

    def __init__(
        self,
        ctx: ConversionContext,
        choices: Sequence[Choice],
        plans: Mapping[tuple[str, str], Any],
        contexts: Mapping[tuple[str, str], ConversionContext],
        done: Callable[[], None],
    ):
        self.ctx, self.contexts, self.done = replace(ctx, runner=ctx.runner.single_process()), contexts, done
        linears = [choice for choice in choices if choice.kind is not None and choice.kind.part != ATTENTION]
        plan_of = {choice.key: plan_of_choice(plans, choice) for choice in linears}
        budgets = {key: uniform_budgets(plan) for key, plan in plan_of.items()}
        first = {choice.key: choice.layer for choice in linears}
        self.trial = QuickTrial(self.ctx, budgets, done, plan_of, first)
        self.others = [choice for choice in choices if choice.key not in first]
        self.parts: dict[str, list[str]] = {}  # the linears of each part
        for (part, _), plan in plans.items():
            for target in (target for slices in plan.targets.values() for target in slices if part != ATTENTION):
                paths = self.parts.setdefault(part_name(target.linear.layer, part), [])
                paths += [linear.path for linear in target.all_linears if linear.path not in paths]

    def run(self) -> dict[str, Damage]:
        """Return the damage of each choice, by its key."""
        final = self.trial.streams([choice.key for choice in self.others]).run(self, self.done)
        samples = self.ctx.samples
        held = {name: x[samples.n_fit :] for name, x in samples.inputs.items()}
        scorer = DivergenceScorer(self.ctx, CalibrationSet(held, 0, samples.rows - samples.n_fit, samples.packed))
        keys = [*self.trial.contenders, *(choice.key for choice in self.others)]
        return {key: _damage(scorer.score(final["held out"], final[key])) for key in keys}

    def visit(self, layer: Layer) -> Contexts:
        """Replace the parts of this layer that choices replace, each in its own stream."""
        contexts = dict(self.trial.visit(layer))
        for choice in self.others:
            if waits_for(self.ctx.plan.layout, layer.path, choice.layer):
                continue
            if choice.layer != layer.path:
                contexts[choice.key] = nullcontext()
                continue
            layer.branch("held out", choice.key)
            if choice.name == REMOVED:  # its rows go on as they came in
                continue
            if choice.kind is None:
                rounded = self._rounded(choice)
                contexts[choice.key] = swapped_modules(layer.call.layer, layer.path, rounded)
                continue
            of_kind = self.contexts[choice.kind.part, choice.kind.name]
            mixer = init_trial_mixer(replace(of_kind, runner=self.ctx.runner), layer.call)
            path = of_kind.plan.attention_targets[layer.path].path
            contexts[choice.key] = all_attention_replaced(self.ctx.model, {path: mixer})
        return contexts

    def _rounded(self, choice: Choice) -> dict[str, nn.Module]:
        """Return the linears of a part in integers, by path. The layer is loaded."""
        storage, model, rounded = make_storage(choice.bits), self.ctx.model, {}
        for path in self.parts[choice.covers[0]]:
            dtype = DTYPES[model.tensor_info(f"{path}.weight").dtype]
            linear: Any = copy.deepcopy(model.module(path)).to(dtype)
            rounded[path] = quantize_named(path, linear, storage).float().eval().requires_grad_(False)
        return rounded


def _damage(score: HeldOutScore) -> Damage:
    return Damage(max(score.converted, 0.0), score.difference_se)


def plan_of_choice(plans: Mapping[tuple[str, str], Any], choice: Choice) -> Any:
    """Return the plan of a choice of linears: that of its kind, in its layer alone."""
    assert choice.kind is not None
    plan = plans[choice.kind.part, choice.kind.name]
    return replace(plan, targets=plan.targets_in_layer(choice.layer), pruned_targets={})


def steps(ctx: ConversionContext, choices: Iterable[Choice]) -> Iterator[list[Choice]]:
    """Yield the choices in groups that one pass measures: those of neighboring layers."""
    samples = ctx.samples
    tokens = samples.tokens() // samples.rows * (samples.rows - samples.n_fit)
    config = ctx.model.config.get_text_config()
    row_bytes = 4 * tokens * getattr(config, "hidden_size", 1)
    most = max(1, min(PASS_CHOICES, PASS_BYTES // row_bytes))
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
