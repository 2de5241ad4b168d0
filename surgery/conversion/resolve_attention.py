"""Choices about attention that need calibration data: which layers or heads keep softmax attention, and how an MLR
cache budget is allocated. Both choices are written to the journal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from surgery.conversion.choices import hybrid_lines, score_rank_lines
from surgery.conversion.context import ConversionContext
from surgery.conversion.gated import choose_gated
from surgery.conversion.hybrid import choose_heads
from surgery.conversion.restored import choose_restored
from surgery.core.journal import Journal
from surgery.planning.attention_plan import keep_heads, keep_layers
from surgery.planning.attention_recipe import HybridRecipe
from surgery.planning.targets import Plan


def resolve_attention_plan(ctx: ConversionContext, journal: Journal) -> tuple[Plan, dict[str, Any] | None]:
    """Return (the plan with the attention targets that will be replaced, the report's "hybrid" entry or None).

    A choice that the journal of an interrupted conversion holds is taken from there.
    """
    settings, plan, hybrid_report = ctx.recipe.attention, ctx.plan, None
    if settings is not None and settings.hybrid is not None and settings.hybrid.is_measured:
        if journal.find("hybrid") is None:
            journal.add("hybrid", told=_choose(ctx, settings.hybrid, journal))
        told = hybrid_report = _entry(journal, "hybrid")["told"]
        for line in hybrid_lines(told):
            ctx.progress.say(line)
        if settings.hybrid.of_heads:
            replaced = keep_heads(plan.attention_targets, told["heads"])
        else:
            replaced = keep_layers(plan.attention_targets, told["softmax"])
        plan = replace(plan, attention_targets=replaced)
    if settings is not None and settings.chooses_ranks:
        from surgery.conversion.mixer_init.mlr_allocation import allocate_score_dims, allocated_targets

        if journal.find("arranged") is None:
            # One process runs all samples: the sums over samples are not partitioned.
            alone = ctx.runner.single_process()
            measure = partial(allocate_score_dims, replace(ctx, plan=plan, runner=alone))
            journal.add("arranged", chosen=ctx.dist.on_main(measure))
            ctx.runner.hidden_bytes = max(ctx.runner.hidden_bytes, alone.hidden_bytes)
        chosen = _entry(journal, "arranged")["chosen"]
        for line in score_rank_lines(chosen):
            ctx.progress.say(line)
        plan = replace(plan, attention_targets=allocated_targets(plan, chosen))
    return plan, hybrid_report


def _choose(ctx: ConversionContext, hybrid: HybridRecipe, journal: Journal) -> dict[str, Any]:
    """Return the report's "hybrid" entry of a choice by measurements."""
    if hybrid.of_heads:
        return choose_heads(ctx, hybrid)
    return choose_restored(ctx, hybrid, journal) if hybrid.choose_by == "restored" else choose_gated(ctx, hybrid)


def _entry(journal: Journal, step: str) -> dict[str, Any]:
    entry = journal.find(step)
    assert entry is not None
    return entry
