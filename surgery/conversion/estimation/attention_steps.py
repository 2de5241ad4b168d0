"""Time and memory of the steps that replace attention: initialization of mixers, and the choice of hybrids."""

from __future__ import annotations

from surgery.conversion.aligned import ALIGN_STEPS, ALIGN_TOKENS
from surgery.conversion.estimation.counting import Work
from surgery.conversion.estimation.shape import LayerKind, TextRows
from surgery.conversion.estimation.steps import Step, StepEstimates
from surgery.conversion.gated import ROUNDS, count_rows_to_score
from surgery.conversion.hybrid import TRIAL_STEPS_SHARE
from surgery.conversion.mixer_init.linear import PROFILE_SAMPLES, SHARPNESS
from surgery.mixers.cache_size import mixer_cost
from surgery.planning.attention_recipe import HybridRecipe

# Bytes read and written for each multiply-accumulate of a mixer in plain PyTorch, and passes of one local step of Adam.
MIXER_TRAFFIC, STEP_PASSES = 1.0, 4.0


def mixer_work(kind: LayerKind, tokens: float, length: int) -> Work:
    """Return the work of a layer's mixer on so many tokens in rows of `length`, by its multiply-accumulates for one
    token.
    """
    assert kind.target is not None
    macs = mixer_cost(kind.target.config, kind.target.shape, length).macs
    return Work(2.0 * macs, traffic=MIXER_TRAFFIC * macs).times(tokens)


def init_work(steps: StepEstimates, kind: LayerKind, rows: TextRows, local: float) -> Work:
    """Return the work of initializing a layer's mixer: `local` steps of one row, and its stages, each scored on the
    held-out rows.
    """
    length, held = rows.length, rows.held_tokens
    few = min(rows.fit, PROFILE_SAMPLES) * length
    stages = mixer_work(kind, 6 * held + len(SHARPNESS) * few + rows.fit_tokens, length)
    read = steps.forward(kind, 6 * held + 2 * few + rows.fit_tokens + 2 * local * length, length, kind.macs / 3)
    return stages + read + mixer_work(kind, STEP_PASSES * local * length, length)


def mixer_step(steps: StepEstimates, rows: TextRows) -> Step:
    """The initialization of all mixers, each by one process."""
    attention = steps.recipe.attention
    assert attention is not None
    softmax_share = steps.shape.plan.measured_softmax_count / max(1, len(steps.shape.plan.attention_targets))
    local = attention.steps if attention.start == "calibrated" else 0
    seconds, peak = 0.0, 0.0
    for kind in steps.shape.kinds:
        if kind.target is None:
            continue
        if attention.start == "copied" or not kind.target.config.is_trained:
            work = mixer_work(kind, rows.held_tokens, rows.length)
        else:
            work = init_work(steps, kind, rows, local)
        seconds += kind.count * (1 - softmax_share) * steps.setting.seconds(work)
        peak = max(peak, 4.0 * kind.params + 6 * steps.activations(kind, rows.length, backward=True))
    return Step("mixers", seconds, peak + steps.hidden(2 * rows.tokens, 2)[0])


def gated_step(steps: StepEstimates, count: int, rows: TextRows) -> Step:
    """The choice of `count` softmax layers by gradients: the original runs twice, the student once with windows, in
    each round forward, again and back, and once with each of two choices.
    """
    setting, length, rounds = steps.setting, rows.length, min(ROUNDS, count)
    tokens = float(count_rows_to_score(rows.fit + rows.held, length) * length)
    forward = steps.per_layer(lambda kind: setting.seconds(steps.forward(kind, tokens, length) + steps.load(kind)))
    backward = steps.per_layer(lambda kind: setting.seconds(steps.forward(kind, tokens, length, backward=True)))
    seconds = 5 * forward + rounds * (forward + backward) + setting.seconds(steps.head(tokens, 6 + 4 * rounds))
    peak = max(4.0 * kind.params + 6 * steps.activations(kind, length, backward=True) for kind in steps.shape.kinds)
    device, host, files = steps.hidden(tokens, steps.shape.layers + 3)
    return Step("hybrid", seconds, peak + device, host, files)


def hybrid_step(steps: StepEstimates, hybrid: HybridRecipe, rows: TextRows) -> Step:
    """The choice of the layers or heads that keep softmax, by measurement."""
    setting, kinds, length = steps.setting, [k for k in steps.shape.kinds if k.target is not None], rows.length
    attention = steps.recipe.attention
    assert attention is not None
    layers = sum(kind.count for kind in kinds)
    if hybrid.choose_by == "measured" and not hybrid.of_heads:
        return gated_step(steps, hybrid.softmax_count(layers), rows)
    local = TRIAL_STEPS_SHARE * attention.steps
    every = steps.per_layer(lambda kind: setting.seconds(steps.forward(kind, rows.tokens, length) + steps.load(kind)))
    of_held = steps.per_layer(lambda kind: setting.seconds(steps.forward(kind, rows.held_tokens, length)))
    start = sum(kind.count * setting.seconds(init_work(steps, kind, rows, local)) for kind in kinds)
    score = setting.seconds(steps.head(2 * rows.held_tokens, 1))
    shared = -(-layers // setting.processes) / layers
    peak = max((4.0 * kind.params + 6 * steps.activations(kind, length, backward=True) for kind in kinds), default=0.0)
    runs, files = 2.0, 0.0
    if hybrid.of_heads:
        groups = max(kind.target.shape.groups for kind in kinds if kind.target)
        seconds = (start + groups * of_held) * shared + 2 * every + 2 * (of_held + score)
    else:
        count = hybrid.softmax_count(layers)
        passes = sum(1 + (layers - i) * shared / 2 for i in range(count)) + count + 3
        align = sum(
            k.count * setting.seconds(
                steps.forward(k, 4 * ALIGN_TOKENS, length, k.macs / 3) + mixer_work(k, STEP_PASSES * ALIGN_TOKENS, length)
            )
            for k in kinds
        )  # fmt: skip
        seconds = (start + ALIGN_STEPS * align) * shared + every + passes * of_held
        seconds += 2 * score * sum(1 + (layers - i) * shared for i in range(count))
        runs, files = float(layers + 2), sum(4.0 * kind.count * kind.params / 3 for kind in kinds)
    device, host, _ = steps.hidden(rows.tokens + runs * rows.held_tokens, 2)
    return Step("hybrid", seconds, peak + device, host, files)
