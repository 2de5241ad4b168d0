"""Choices about attention that need calibration data: which layers keep softmax attention, and how an MLR cache budget
is allocated. Both choices are written to the journal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from surgery.conversion.context import ConversionContext
from surgery.conversion.hybrid import choose_hybrid
from surgery.conversion.mixer_init.mlr_allocation import allocate_score_dims, allocated_targets
from surgery.conversion.restored import choose_restored
from surgery.core.journal import Journal
from surgery.planning.plan import Plan


def resolve_attention_plan(ctx: ConversionContext, journal: Journal) -> tuple[Plan, dict[str, Any] | None]:
    """Return (the plan with the attention targets that will be replaced, the report's "hybrid" entry or None).

    A choice that the journal of an interrupted conversion holds is taken from there.
    """
    settings, plan, hybrid_report = ctx.recipe.attention, ctx.plan, None
    if settings is not None and settings.hybrid is not None and settings.hybrid.is_measured:
        if journal.find("hybrid") is None:
            hybrid = settings.hybrid
            told = choose_restored(ctx, hybrid, journal) if hybrid.is_restored else choose_hybrid(ctx, hybrid)
            journal.add("hybrid", told=told)
        hybrid_report = _entry(journal, "hybrid")["told"]
        replaced = {
            layer: target for layer, target in plan.attention_targets.items() if layer not in hybrid_report["softmax"]
        }
        plan = replace(plan, attention_targets=replaced)
    if settings is not None and settings.cache is not None:
        if journal.find("arranged") is None:
            # One process runs all samples: the sums over samples are not partitioned.
            alone = ctx.runner.single_process()
            measure = partial(allocate_score_dims, replace(ctx, plan=plan, runner=alone))
            journal.add("arranged", chosen=ctx.dist.on_main(measure))
            ctx.runner.hidden_bytes = max(ctx.runner.hidden_bytes, alone.hidden_bytes)
        plan = replace(plan, attention_targets=allocated_targets(plan, _entry(journal, "arranged")["chosen"]))
    return plan, hybrid_report


def _entry(journal: Journal, step: str) -> dict[str, Any]:
    entry = journal.find(step)
    assert entry is not None
    return entry
