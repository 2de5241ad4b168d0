"""Choose the attention layers that keep softmax by restoring it: KL-guided layer selection (Li et al. 2025, arXiv
2512.20569).

    D(S) = sum_t w_t KL(p_t || q_t(S)) / sum_t w_t

p_t: the original's distribution at token t of the scored rows. q_t(S): that of the aligned student
(surgery.conversion.aligned) with softmax and the original's projections in the layers S, and mixers in all others. The
first layer to restore is the one with the lowest D({l}), the second the one with the lowest D given the first, and so
on up to the recipe's share. Li et al. distil the student as a whole before they rank its layers; here it is only
aligned layer by layer, which takes one layer in memory.

Two measures make layers visible that look far back, which an average over all tokens hides:

w_t        KL(p_t || r_t) divided by its mean, where r_t is the original's distribution when its selected
           layers see only the last 64 tokens and the first 4. A token that needs no distant context has weight 0. If no
           token needs it, all have weight 1.
repeated   a share of the held-out rows ends with a copy of an earlier part of the same row, more than 64 tokens back. To
           predict the copy, a model must look up what followed the same words before: the task of induction heads
           (Olsson et al. 2022). A student without such a layer fails at it, however small its error on plain text is.

Scored rows are the held-out rows of the calibration text, to which neither the mixers nor the projections are fitted.
Evenly spaced layers are scored in the same way, and the better choice is kept. Every round is one pass through the
model. In it, a candidate's rows are computed from the restored layer on, because below it the candidate equals the
choice so far.

docs/measurements/quality.md compares this choice with others, after healing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.attention_samples import all_attention_replaced
from surgery.calibration.data import CalibrationSet
from surgery.calibration.lm_head import ChunkedLMHead
from surgery.conversion.aligned import AlignedStudent, aligned_attention
from surgery.conversion.context import ConversionContext
from surgery.conversion.fisher import has_lm_head
from surgery.conversion.hybrid import evenly_spaced
from surgery.conversion.mixer_init.base import ERROR_CAP
from surgery.conversion.score import HeldOutScore
from surgery.conversion.streams import Contexts, FinalStates, Layer, Streams, waits_for
from surgery.core.journal import Journal
from surgery.mixers import MIXERS, Mixer
from surgery.mixers.sliding_window import Window
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import HybridRecipe

NEAR = Window(window=64, sinks=4)  # what remains visible for the distribution r_t
REPEATED = 0.5  # share of the scored rows that end with a copy of an earlier part of the row
MIN_GAP = 1e-6  # mean of KL(p_t || r_t), in nats per token, below which the weights are even
Replace = Callable[[], AbstractContextManager[None]]  # a new context in which a layer's attention is replaced


# -- scored rows -----------------------------------------------------------------------------------
def scored_rows(samples: CalibrationSet, repeated: float, seed: int) -> tuple[CalibrationSet, int]:
    """Return (the held-out rows, all of them held out in the result; how many of them end with a repeated part).

    The first rows with room for a copy are changed. In a row of n real tokens the last (n - 64) // 4 are
    replaced by a copy of as many tokens that begin at a random place, more than 64 tokens earlier. Rows keep
    their length and padding. Only `input_ids` are changed, and not those of encoder-decoders.
    """
    inputs = {name: x[samples.n_fit :].clone() for name, x in samples.inputs.items()}
    rows = samples.rows - samples.n_fit
    scored, changed = CalibrationSet(inputs, 0, rows), 0
    ids_BT, mask_BT = inputs.get("input_ids"), scored.mask()
    if ids_BT is None or "decoder_input_ids" in inputs:
        return scored, 0
    generator, repeated_rows = torch.Generator().manual_seed(seed), math.ceil(repeated * rows)
    for row in range(rows):
        real = torch.ones_like(ids_BT[row], dtype=torch.bool) if mask_BT is None else mask_BT[row].bool()
        place_N = real.nonzero()[:, 0]
        count = (len(place_N) - NEAR.window) // 4
        if changed == repeated_rows or count < 1:
            continue
        last = len(place_N) - count - NEAR.window  # a copy that began here would lie 64 tokens back
        start = int(torch.randint(last, (1,), generator=generator))
        ids_BT[row, place_N[len(place_N) - count :]] = ids_BT[row, place_N[start : start + count]]
        changed += 1
    return scored, changed


# -- variants of the model -------------------------------------------------------------------------
@dataclass(frozen=True)
class Variant:
    """The model with replaced attention in `layers`. below, first: it equals the variant `below` before the layer
    `first`.
    """

    layers: frozenset[str]
    below: str = ""
    first: str = ""


class VariantPass:
    """A pass of the original and of variants of it, each in a stream of its name.

    load(target) returns a function that makes the context in which the target's attention is replaced. It is called
    once for each layer.
    """

    def __init__(
        self, ctx: ConversionContext, variants: Mapping[str, Variant], load: Callable[[AttentionTarget], Replace]
    ):
        self.ctx, self.variants, self.load = ctx, variants, load

    def run(self, scored: CalibrationSet, done: Callable[[], None]) -> FinalStates:
        """Return what reaches the head on the scored rows (B, T, D), of "original" and of each variant. done: called
        after each layer.
        """
        runner = self.ctx.runner.single_process()
        final = Streams.of_trial(runner, scored, self.variants).run(self, done)
        self.ctx.runner.hidden_bytes = max(self.ctx.runner.hidden_bytes, runner.hidden_bytes)  # for the report
        return final

    def visit(self, layer: Layer) -> Contexts:
        """Replace the layer's attention for the variants that have it replaced."""
        target = self.ctx.plan.attention_targets.get(layer.path)
        replaced: Replace = nullcontext
        if target is not None and any(layer.path in variant.layers for variant in self.variants.values()):
            replaced = self.load(target)
        contexts: dict[str, AbstractContextManager[Any]] = {"original": nullcontext()}
        for name, variant in self.variants.items():
            if waits_for(self.ctx.plan.layout, layer.path, variant.first):
                continue
            if variant.first == layer.path:
                layer.branch(variant.below, name)
            contexts[name] = replaced() if layer.path in variant.layers else nullcontext()
        return contexts


class DivergenceScorer:
    """Divergence of variants from the original on the scored rows, weighted by token.

    Models with a language-model head: KL(p || q) in nats. Others: |f - f0|^2 of each token's output relative to the
    mean
    |f0|^2. weight_BT: of each token, with mean 1 over real tokens and 0 at padding.
    """

    def __init__(self, ctx: ConversionContext, scored: CalibrationSet):
        layout, self.head = ctx.plan.layout, None
        if layout.head and has_lm_head(ctx.model):
            self.head = ChunkedLMHead(ctx.model, layout.head, layout.architecture, ctx.device)
        self.unit = "nats of KL divergence per token" if self.head else "relative squared output error"
        self.mask_BT = scored.head_mask()
        self.weight_BT: Tensor | None = None

    def by_token(self, original_BTD: Tensor, variant_BTD: Tensor) -> Tensor:
        """Return the divergence of each token, (B, T) in float64 on the CPU; 0 at padding. NaN becomes ERROR_CAP."""
        original_BTX, variant_BTX = tokens_of(original_BTD), tokens_of(variant_BTD)
        real_BT = self.real_tokens(original_BTX)
        original_NX, variant_NX = (x[real_BT.to(x.device)] for x in (original_BTX, variant_BTX))
        if self.head is not None:
            found_N = self.head.divergences(original_NX, variant_NX)
        else:
            energy = original_NX.square().sum(-1).mean().clamp_min(1e-30)
            found_N = (variant_NX - original_NX).square().sum(-1) / energy
        out_BT = torch.zeros(real_BT.shape, dtype=torch.float64)
        out_BT[real_BT] = found_N.double().cpu().nan_to_num(nan=ERROR_CAP, posinf=ERROR_CAP)
        return out_BT

    def real_tokens(self, x_BTX: Tensor) -> Tensor:
        """Return which tokens are no padding, (B, T); all of them if there is no mask, or a mask of another shape."""
        if self.mask_BT is None or self.mask_BT.shape != x_BTX.shape[:2]:
            return torch.ones(x_BTX.shape[:2], dtype=torch.bool)
        return self.mask_BT.bool().cpu()

    def weight_by_gap(self, original_BTD: Tensor, near_BTD: Tensor) -> bool:
        """Weight tokens by the divergence of `near_BTD`, the variant with a short window.

        Returns False, with even weights, if its mean is below MIN_GAP (no token needs distant context) or not finite.
        """
        gap_BT = self.by_token(original_BTD, near_BTD)
        mean = float(gap_BT.sum() / self.real_tokens(tokens_of(original_BTD)).sum())
        is_used = MIN_GAP <= mean < ERROR_CAP / gap_BT.numel()
        self.weight_BT = gap_BT / mean if is_used else None
        return is_used

    def gradient(self, original_BTD: Tensor, variant_BTD: Tensor) -> Tensor:
        """Return the gradient of the weighted mean divergence with respect to `variant_BTD`, in its shape."""
        original_BTX, variant_BTX = tokens_of(original_BTD), tokens_of(variant_BTD)
        real_BT = self.real_tokens(original_BTX)
        original_NX, variant_NX = (x[real_BT.to(x.device)] for x in (original_BTX, variant_BTX))
        if self.head is not None:
            gradient_NX = self.head.divergence_gradient(original_NX, variant_NX)
        else:
            gradient_NX = 2 * (variant_NX - original_NX) / original_NX.square().sum(-1).mean().clamp_min(1e-30)
        weight_N1 = torch.ones(len(gradient_NX), 1) if self.weight_BT is None else self.weight_BT[real_BT][:, None]
        out_BTX = torch.zeros_like(variant_BTX)
        out_BTX[real_BT.to(out_BTX.device)] = (gradient_NX * weight_N1.to(gradient_NX) / len(gradient_NX)).to(out_BTX)
        return out_BTX.reshape(variant_BTD.shape)

    def score(self, original_BTD: Tensor, variant_BTD: Tensor) -> HeldOutScore:
        """Return the weighted mean divergence, with its standard error over rows; `original` is 0."""
        found_BT = self.by_token(original_BTD, variant_BTD)
        tokens = int(self.real_tokens(tokens_of(original_BTD)).sum())
        weighted_BT = found_BT if self.weight_BT is None else found_BT * self.weight_BT
        share_B = weighted_BT.sum(1) * len(weighted_BT) / tokens  # its mean is the score
        error = min(float(share_B.std()) / len(share_B) ** 0.5, ERROR_CAP) if len(share_B) > 1 else None
        return HeldOutScore(self.unit, 0.0, min(float(share_B.mean()), ERROR_CAP), error, tokens)


def tokens_of(x_BTD: Tensor) -> Tensor:
    """Return an output as (B, T, X); an output without a token axis, such as an image's classes, gets T = 1."""
    return x_BTD[:, None] if x_BTD.dim() == 2 else x_BTD.flatten(2)


def near_mixer(target: AttentionTarget, device: torch.device) -> Mixer:
    """Return the attention that sees the near tokens only."""
    return MIXERS[NEAR](NEAR, target.shape).to(device)


def weight_tokens(
    ctx: ConversionContext, scored: CalibrationSet, scorer: DivergenceScorer, layers: list[str]
) -> tuple[str, FinalStates]:
    """Set the scorer's weights; return the weights in use, "far" or "even", and what reaches the head of "original" and
    of "near", in which `layers` see the near tokens only.
    """

    def load(target: AttentionTarget) -> Replace:
        mixer = near_mixer(target, ctx.device)
        return lambda: all_attention_replaced(ctx.model, {target.path: mixer})

    with ctx.progress.bar("finding tokens with distant context", len(ctx.plan.layout.layers)) as tick:
        final = VariantPass(ctx, {"near": Variant(frozenset(layers))}, load).run(scored, tick)
    if scorer.weight_by_gap(final["original"], final["near"]):
        return "far", final
    ctx.progress.say(
        f"note: attention.hybrid: the original predicts the scored text from the last {NEAR.window} tokens as well as "
        "from all tokens, so no token shows which layers need softmax. All tokens get the same weight. Longer windows "
        "of calibration text (length) may help"
    )
    return "even", final


# -- the choice ------------------------------------------------------------------------------------
class Restoration:
    """The greedy choice of softmax layers for one conversion. Finished rounds are taken from the journal."""

    def __init__(self, ctx: ConversionContext, hybrid: HybridRecipe, journal: Journal):
        self.ctx, self.hybrid, self.journal = ctx, hybrid, journal
        self.layers = list(ctx.plan.attention_targets)
        self.student = AlignedStudent(ctx, journal)
        self.scored, self.repeated_rows = scored_rows(ctx.samples, REPEATED, ctx.recipe.seed)
        self.scorer = DivergenceScorer(ctx, self.scored)

    def run(self) -> dict[str, Any]:
        """Return the report's "hybrid" entry."""
        alignment = self.student.align()
        weights, _ = weight_tokens(self.ctx, self.scored, self.scorer, self.layers)
        restored: list[str] = []
        rounds: list[dict[str, Any]] = []
        for _ in range(self.hybrid.softmax_count(len(self.layers))):
            rounds.append(self._round(restored))
            restored.append(rounds[-1]["layer"])
        evenly = evenly_spaced(self.ctx.plan, self.hybrid)
        scores = {"measured": rounds[-1]["scores"][restored[-1]], "every": self._score_even(restored, rounds, evenly)}
        choices = {"measured": set(restored), "every": evenly}
        best = min(scores, key=lambda name: scores[name]["converted"])
        return {
            "kept": best,
            "softmax": [layer for layer in self.layers if layer in choices[best]],
            "order": restored,
            "rounds": [{layer: score["converted"] for layer, score in entry["scores"].items()} for entry in rounds],
            "aligned": rounds[0]["before"],
            "alignment": alignment,
            "weights": weights,
            "repeated_rows": self.repeated_rows,
            **{name: {"softmax": sorted(choices[name], key=self.layers.index), **scores[name]} for name in scores},
        }

    def _round(self, restored: list[str]) -> dict[str, Any]:
        """Return the round that follows the choice `restored`: its journal entry and the layer that it adds.

        Its scores are measured unless the journal has them.
        """
        number = len(restored)
        done = self.journal.find("restored", round=number)
        if done is not None and done["given"] == restored and set(done["scores"]) == set(self.layers) - set(restored):
            return self._with_best(done)
        replaced = frozenset(self.layers) - set(restored)
        candidates = {
            layer: Variant(replaced - {layer}, "before", layer) for layer in self.layers if layer not in restored
        }
        scores = self._run_distributed(
            f"choosing softmax layer {number + 1} of {self.hybrid.softmax_count(len(self.layers))}",
            Variant(replaced),
            candidates,
        )
        before = scores.pop("before")
        entry = {"round": number, "given": list(restored), "before": before, "scores": scores}
        self.journal.add("restored", **entry)
        return self._with_best(entry)

    @staticmethod
    def _with_best(entry: dict[str, Any]) -> dict[str, Any]:
        """Return a round's entry with the "layer" that is restored, the one with the lowest divergence."""
        return {**entry, "layer": min(entry["scores"], key=lambda name: entry["scores"][name]["converted"])}

    def _score_even(self, restored: list[str], rounds: list[dict[str, Any]], evenly: set[str]) -> dict[str, Any]:
        """Return the score of evenly spaced softmax layers, from the last round if that tried them."""
        last = evenly - set(restored[:-1])
        if len(last) == 1:
            score: dict[str, Any] = rounds[-1]["scores"][last.pop()]
            return score
        variant = Variant(frozenset(self.layers) - evenly)
        return self._run_distributed("scoring evenly spaced softmax layers", variant, {})["before"]

    def _run_distributed(self, what: str, before: Variant, candidates: dict[str, Variant]) -> dict[str, dict[str, Any]]:
        """Return the scores of the variant "before" and of the candidates, in all processes, which share the
        candidates.
        """
        ctx, dist = self.ctx, self.ctx.dist
        local_candidates = {name: candidates[name] for name in list(candidates)[dist.index :: dist.count]}

        def load(target: AttentionTarget) -> Replace:
            aligned = self.student.load(target.layer)
            return lambda: aligned_attention(ctx.model, target, aligned)

        def run() -> dict[str, dict[str, Any]]:
            with ctx.progress.bar(what, len(ctx.plan.layout.layers)) as tick:
                final = VariantPass(ctx, {"before": before, **local_candidates}, load).run(self.scored, tick)
            return {
                name: self.scorer.score(final["original"], final[name]).to_dict()
                for name in ("before", *local_candidates)
            }

        gathered = dist.gather(dist.together_or_raise(run if local_candidates or dist.main else dict))
        scores = {name: score for theirs in reversed(gathered) for name, score in theirs.items()}  # process 0's last
        return {name: scores[name] for name in ("before", *candidates)}


def choose_restored(ctx: ConversionContext, hybrid: HybridRecipe, journal: Journal) -> dict[str, Any]:
    """Return the report's "hybrid" entry; its "softmax" lists the layers that keep softmax attention."""
    return Restoration(ctx, hybrid, journal).run()
