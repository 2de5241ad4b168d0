"""Choose the attention layers that keep softmax by gradients: one backward pass scores all layers at once.

    attention of layer l = g_l softmax over all tokens + (1 - g_l) softmax over the last 64 tokens and the first 4
    D(g) = sum_t w_t KL(p_t || q_t(g)) / sum_t w_t
    gain_l = -dD/dg_l,  with g = 1 in the layers chosen so far and 0 in all others

The measure D is that of KL-guided layer selection (Li et al. 2025, see surgery.conversion.restored), which restores one
layer after the other in place of the gradients.

p_t: the original's distribution at token t. q_t(g): that of the student with gates g, one for each layer. Weights w_t
and repeated parts of the rows are those of surgery.conversion.restored, which make layers visible that look far back.
The first round adds the layers with the largest gains, the second round those with the largest gains given the first,
and so on. A round is one forward and one backward pass, whatever the number of layers.

The student's window stands for every mixer: the mixers of the recipes read the near tokens exactly, and what they lose
is among the distant ones. So no mixer is initialized or aligned for the choice, and any row of the calibration text can
be scored. Evenly spaced layers are scored beside the choice, and the better one is kept.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.attention_samples import all_attention_replaced, attention_replaced
from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerCall
from surgery.conversion.blended import BlendedAttention
from surgery.conversion.context import ConversionContext
from surgery.conversion.gradients import GradientPass, LayerBackward
from surgery.conversion.hybrid import evenly_spaced
from surgery.conversion.restored import (
    REPEATED,
    DivergenceScorer,
    Replace,
    Variant,
    VariantPass,
    near_mixer,
    scored_rows,
    weight_tokens,
)
from surgery.conversion.streams import FinalStates, Stream, Streams
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import HybridRecipe

SCORED_TOKENS = 4096  # of the calibration text, at most, but at least two rows
ROUNDS = 4  # at most: passes with gradients, each of which adds an equal part of the layers


def count_rows_to_score(rows: int, length: int) -> int:
    """Return how many of `rows` rows of `length` tokens are scored."""
    return min(rows, max(2, SCORED_TOKENS // max(1, length)))


def rows_to_score(samples: CalibrationSet) -> CalibrationSet:
    """Return evenly spaced rows of the calibration text, all of them held out."""
    count = count_rows_to_score(samples.rows, samples.tokens() // samples.rows)
    rows = [(2 * i + 1) * samples.rows // (2 * count) for i in range(count)]
    return replace(samples, inputs={name: x[rows] for name, x in samples.inputs.items()}, n_fit=0, rows=count)


def blended(target: AttentionTarget, gate: float, device: torch.device) -> BlendedAttention:
    """Return the attention of a layer with this gate in all heads."""
    return BlendedAttention(near_mixer(target, device), torch.full((target.shape.groups,), gate, device=device))


class GateBackward(LayerBackward):
    """The backward pass of a layer with blended attention. slope: dD/dg of the layer, summed over rows."""

    def __init__(self, ctx: ConversionContext, target: AttentionTarget, gate: float):
        super().__init__()
        self.ctx, self.target, self.gate, self.slope = ctx, target, gate, 0.0
        self._stack = ExitStack()

    def __enter__(self) -> None:
        attention = blended(self.target, self.gate, self.ctx.device)
        self.leaves = [attention.gate_G.requires_grad_(True)]
        self._stack.enter_context(attention_replaced(self.ctx.model.module(self.target.path), attention))

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def add(self, gradient_BTD: Tensor, of_leaves: list[Tensor | None]) -> None:
        """Add the rows' gradient of the gate."""
        if of_leaves[0] is not None:
            self.slope += float(of_leaves[0].sum(dtype=torch.float64))


class GatePass(GradientPass):
    """A pass of the student forward and back. gates: of the layers with mixers. slopes: dD/dg of each, the result."""

    def __init__(self, ctx: ConversionContext, gates: dict[str, float]):
        self.ctx, self.gates, self.runner = ctx, gates, ctx.runner.single_process()
        self.backwards: dict[str, GateBackward] = {}

    def run(self, scored: CalibrationSet, original_BTD: Tensor, scorer: DivergenceScorer) -> dict[str, float]:
        """Return dD/dg of each layer, in the order of the layers. original_BTD: what reaches the original's head."""
        streams = Streams(self.runner, scored, {"student": Stream(range(scored.rows))})
        with torch.enable_grad():
            final_BTD = streams.run_with_gradients(self)
            torch.autograd.backward(final_BTD, scorer.gradient(original_BTD, final_BTD.detach()))
        self.ctx.runner.hidden_bytes = max(self.ctx.runner.hidden_bytes, self.runner.hidden_bytes)  # for the report
        return {layer: self.backwards[layer].slope for layer in self.gates}

    def forward_context(self, call: LayerCall) -> AbstractContextManager[Any]:
        """Blend the layer's attention, if it will have a mixer."""
        target = self.ctx.plan.attention_targets.get(call.path)
        if target is None:
            return super().forward_context(call)
        attention = blended(target, self.gates[call.path], self.ctx.device)
        return attention_replaced(self.ctx.model.module(target.path), attention)

    def backward_context(self, call: LayerCall) -> LayerBackward:
        """Return the context in which the gate's gradient is summed."""
        target = self.ctx.plan.attention_targets.get(call.path)
        if target is None:
            return LayerBackward()
        self.backwards[call.path] = GateBackward(self.ctx, target, self.gates[call.path])
        return self.backwards[call.path]


class GatedChoice:
    """The choice of softmax layers for one conversion."""

    def __init__(self, ctx: ConversionContext, hybrid: HybridRecipe):
        self.ctx, self.hybrid, self.layers = ctx, hybrid, list(ctx.plan.attention_targets)
        self.scored, self.repeated_rows = scored_rows(rows_to_score(ctx.samples), REPEATED, ctx.recipe.seed)
        self.scorer = DivergenceScorer(ctx, self.scored)

    def run(self) -> dict[str, Any]:
        """Return the report's "hybrid" entry."""
        ctx, count = self.ctx, self.hybrid.softmax_count(len(self.layers))
        weights, final = weight_tokens(ctx, self.scored, self.scorer, self.layers)
        before = self.scorer.score(final["original"], final["near"]).to_dict()
        chosen: list[str] = []
        rounds: list[dict[str, float]] = []
        number = min(ROUNDS, count)
        for i in range(number):
            rounds.append(self._gains(f"choosing softmax layers, round {i + 1} of {number}", chosen, final["original"]))
            ranked = sorted(rounds[-1], key=lambda layer: -rounds[-1][layer])
            chosen += ranked[: (i + 1) * count // number - len(chosen)]
        choices = {"measured": set(chosen), "every": evenly_spaced(ctx.plan, self.hybrid)}
        scores = self._scores(choices)
        best = min(scores, key=lambda name: scores[name]["converted"])
        return {
            "kept": best,
            "softmax": [layer for layer in self.layers if layer in choices[best]],
            "order": chosen,
            "gains": rounds,
            "near": before,
            "weights": weights,
            "repeated_rows": self.repeated_rows,
            **{name: {"softmax": sorted(choices[name], key=self.layers.index), **scores[name]} for name in scores},
        }

    def _gains(self, what: str, chosen: list[str], original_BTD: Tensor) -> dict[str, float]:
        """Return the gain of each layer without softmax, given the chosen ones."""
        gates = {layer: float(layer in chosen) for layer in self.layers}
        with self.ctx.progress.bar(what, len(self.layers)) as tick:
            gate_pass = GatePass(self.ctx, gates)
            gate_pass.end_layer = tick  # type: ignore[method-assign]
            slopes = gate_pass.run(self.scored, original_BTD, self.scorer)
        return {layer: -slope for layer, slope in slopes.items() if layer not in chosen}

    def _scores(self, choices: dict[str, set[str]]) -> dict[str, dict[str, Any]]:
        """Return the divergence of each choice, with windows in all other layers."""
        variants = {name: Variant(frozenset(self.layers) - chosen) for name, chosen in choices.items()}

        def load(target: AttentionTarget) -> Replace:
            mixer = near_mixer(target, self.ctx.device)
            return lambda: all_attention_replaced(self.ctx.model, {target.path: mixer})

        with self.ctx.progress.bar("comparing with evenly spaced layers", len(self.ctx.plan.layout.layers)) as tick:
            final: FinalStates = VariantPass(self.ctx, variants, load).run(self.scored, tick)
        return {name: self.scorer.score(final["original"], final[name]).to_dict() for name in variants}


def choose_gated(ctx: ConversionContext, hybrid: HybridRecipe) -> dict[str, Any]:
    """Return the report's "hybrid" entry; its "softmax" lists the layers that keep softmax attention.

    One process makes the choice for all.
    """
    return ctx.dist.on_main(lambda: GatedChoice(ctx, hybrid).run())
