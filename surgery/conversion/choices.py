"""Lines on what a conversion chose: what was compared, and behind "kept:" the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ALLOCATIONS = {
    "uniform": "the same share of every matrix",
    "measured": "more for matrices whose errors fall most with rank",
}
HYBRIDS = {"aligned": "no softmax", "near": "no softmax", "every": "evenly spaced", "measured": "measured"}
SOFTMAX_STAGE = "softmax heads, "  # begins the names of stages that initialize the softmax heads of a hybrid by heads


MLPS = {
    "pruned": "fewer neurons",
    "pruned_mlps": "fewer neurons in MLPs, structured experts",
    "pruned_experts": "fewer neurons in experts, structured MLPs",
    "linears": "structured linears",
}


def allocation_lines(allocation: Mapping[str, Any]) -> list[str]:
    """Return lines on what a trial chose for the MLPs, if it did, and on how the parameters, or the time, were shared
    among the matrices; none if the recipe chose it.

    allocation: the report's entry.
    """
    return [*_mlp_lines(allocation.get("mlps")), *_sharing_lines(allocation)]


def _mlp_lines(mlps: Mapping[str, Any] | None) -> list[str]:
    if not mlps:
        return []
    tried = ", ".join(f"{words} {mlps[name]['converted']:.4f}" for name, words in MLPS.items() if name in mlps)
    unit = mlps["pruned"].get("unit", "")
    return [f"MLPs, held-out loss of a quick trial: {tried} {unit}; kept: {mlps['kept']} ({MLPS[mlps['kept']]})"]


def _sharing_lines(allocation: Mapping[str, Any]) -> list[str]:
    best, why = str(allocation.get("kept")), allocation.get("why")
    result = f"kept: {best}" + (f" ({ALLOCATIONS[best]})" if best in ALLOCATIONS else "")
    scores = {name: allocation[name] for name in ("uniform", "measured") if allocation.get(name)}
    if scores:
        tried = ", ".join(f"{name} {score['converted']:.4f}" for name, score in scores.items())
        return [f"allocation of ranks, {why}: {tried} {next(iter(scores.values())).get('unit', '')}; {result}"]
    if why == "no calibration text":
        return [f"allocation of ranks: not measured, because there is no calibration text; {result}"]
    return ["allocation of ranks: the recipe gives every rank"] if why == "every rank is given" else []


def hybrid_lines(hybrid: Mapping[str, Any] | None) -> list[str]:
    """Return lines on the layers or heads that keep softmax attention, and on the losses that decided it.

    hybrid: the report's entry.
    """
    if not hybrid:
        return []
    scores = {name: hybrid[name] for name in HYBRIDS if hybrid.get(name)}
    tried = ", ".join(f"{HYBRIDS[name]} {score['converted']:.4f}" for name, score in scores.items())
    where = ", ".join(hybrid["softmax"])
    if heads := hybrid.get("heads"):
        where = "key/value heads " + "; ".join(f"{layer}: {numbers}" for layer, numbers in heads.items() if numbers)
    best = hybrid["kept"]
    value = f" {scores[best]['converted']:.4f}" if best in scores else ""
    unit = next((score["unit"] for score in scores.values()), "")
    lines = [f"order in which layers got softmax back: {', '.join(hybrid['order'])}"] if hybrid.get("order") else []
    return [
        *lines,
        f"softmax {'heads' if heads else 'layers'}, {unit} on held-out text: {tried}; "
        f"kept: {HYBRIDS.get(best, best)}{value}, softmax in {where}",
    ]


def score_rank_lines(allocated: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line on the ranks of MLR attention that a cache budget allows.

    allocated: by layer, with the "config" of its mixer and the estimated "rise" of the loss in nats per token.
    """
    ranks = Counter("|".join(str(rank) for rank in entry["config"].get("ranks", ())) for entry in allocated.values())
    counts = ", ".join(f"{name} in {count} layer{'s' if count > 1 else ''}" for name, count in ranks.most_common())
    rise = sum(entry["rise"] for entry in allocated.values())
    return [
        "ranks of MLR attention, by how much the loss depends on each score dimension; estimated rise of the loss "
        f"{rise:.2g} nats per token; kept: {counts}"
    ]


def initialization_lines(mixers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines on the stages of the mixers' initialization: the error after each, and the stages that were kept,
    which are those that lowered the error of their layer. mixers: the report's entries."""
    errors = [dict(record["errors"]) for record in mixers]
    softmax = [
        {stage.removeprefix(SOFTMAX_STAGE): error for stage, error in stages.items() if stage.startswith(SOFTMAX_STAGE)}
        for stages in errors
    ]
    others = [{stage: e for stage, e in stages.items() if not stage.startswith(SOFTMAX_STAGE)} for stages in errors]
    return [*_stage_line("start of the mixers", others), *_stage_line("start of the softmax heads", softmax)]


def _stage_line(what: str, layers: Sequence[Mapping[str, float]]) -> list[str]:
    layers = [errors for errors in layers if errors]
    stages = dict.fromkeys(stage for errors in layers for stage in errors)
    if not stages:
        return []
    medians = [f"{_words(s)} {_median(errors[s] for errors in layers if s in errors):.3f}" for s in stages]
    line = f"{what}, relative error of the heads' outputs on held-out text, median layer: {', '.join(medians)}"
    if len(stages) == 1:
        return [line]
    combinations = Counter(" + ".join(map(_words, accepted_stages(errors))) for errors in layers).most_common()
    several = (f"{name} in {count} layer{'s' if count > 1 else ''}" for name, count in combinations)
    names = combinations[0][0] if len(combinations) == 1 else ", ".join(several)
    return [f"{line}; kept: {names}, error {_median(min(errors.values()) for errors in layers):.3f}"]


def accepted_stages(errors: Mapping[str, float]) -> list[str]:
    """Return the stages whose error is below that of all stages before them; without any the first one, the plain
    start.

    errors: by stage, in order.
    """
    first, *later = errors
    accepted: list[str] = []
    lowest = errors[first]
    for stage in later:
        if errors[stage] < lowest:
            accepted, lowest = [*accepted, stage], errors[stage]
    return accepted or [first]


def _words(stage: str) -> str:
    return stage.replace("_", " ")


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
