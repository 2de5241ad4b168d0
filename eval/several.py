"""`surgery eval M1 M2 M3 --compare BASE --out DIR`: evaluate several models into one folder, the base once, and compare
them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.core.distributed import init_distributed
from surgery.core.errors import SurgeryError
from surgery.core.files import exclusive_lock, explain_disk_errors
from surgery.eval.results.folders import read_models
from surgery.eval.results.model_tables import write_comparison
from surgery.eval.results.models import ModelComparison, compare_models
from surgery.eval.results.store import ResultStore
from surgery.eval.run import Evaluation, evaluate
from surgery.eval.suite import EvalOptions


@dataclass
class ModelEvaluations:
    """Result of `evaluate_models`.

    Attributes:
        evaluations: each model against the base, in the order given.
        comparison: of all models; None in processes other than the main one.
        messages: thresholds that were missed, suites that could not be measured, figures that could not be drawn.
        exit_code: the largest of all.
    """

    evaluations: list[Evaluation]
    comparison: ModelComparison | None = None
    messages: list[str] = field(default_factory=list)
    exit_code: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON data, with what was broken and the thresholds by model."""
        comparison = {} if self.comparison is None else self.comparison.to_dict()
        broken = {done.models["converted"]["name"]: done.broken for done in self.evaluations if done.broken}
        limits = {
            done.models["converted"]["name"]: [verdict.to_dict() for verdict in done.verdicts]
            for done in self.evaluations
            if done.verdicts
        }
        return {**comparison, "broken": broken, "limits": limits}


def evaluate_models(
    names: Sequence[str], suites: Sequence[str], options: EvalOptions, *, out: Path | None, **settings: Any
) -> ModelEvaluations:
    """Evaluate each model against the base and write the comparison of all to `out`.

    Results of a model that was measured before are read, those of the base too, as in `evaluate`. Suites that time load
    all models together, which take turns. Models of earlier runs in the folder are not compared. The folder is locked
    until all is written. settings: further arguments of `evaluate`.
    """
    if out is None:
        raise SurgeryError(f"surgery eval of {len(names)} models writes their results to a folder. Give --out DIR.")
    names = list(dict.fromkeys(names))
    ranks, store = init_distributed(settings.get("device")), ResultStore(out)
    with ExitStack() as stack:
        ranks.together_or_raise(store.open if ranks.main else lambda: None)
        stack.callback(store.close)
        stack.enter_context(explain_disk_errors(out, "run the same command again to continue with what is missing"))
        ranks.together_or_raise(lambda: stack.enter_context(exclusive_lock(out, "evaluation")) if ranks.main else None)
        common = {"out": out, "comparison_files": False, "lock": False, **settings}
        others = {name: [other for other in names if other != name] for name in names}
        done = ModelEvaluations([evaluate(name, suites, options, beside=others[name], **common) for name in names])
        _collect_messages(done)
        ranks.together_or_raise(lambda: _compare(done, out, options.seed) if ranks.main else None)
    done.exit_code = ranks.broadcast_object(done.exit_code)
    return done


def _collect_messages(done: ModelEvaluations) -> None:
    for evaluation in done.evaluations:
        name = evaluation.models["converted"]["name"]
        done.messages += [f"{name}: {suite} could not be measured: {why}" for suite, why in evaluation.broken.items()]
        done.messages += [
            f"{name}: limit {v.limit} {'held' if v.held else 'MISSED'} by {v.task} {v.metric}"
            for v in evaluation.verdicts
        ]
        done.exit_code = max(done.exit_code, evaluation.exit_code)


def _compare(done: ModelEvaluations, out: Path, seed: int) -> None:
    prints = {model["fingerprint"] for evaluation in done.evaluations for model in evaluation.models.values()}
    base = done.evaluations[0].models.get("base", {}).get("fingerprint")
    suites = {suite for evaluation in done.evaluations for suite in evaluation.results}
    read, _ = read_models([out])  # damaged results of these models were measured again
    models = [model for model in read if model.fingerprint in prints]
    order = {evaluation.models["converted"]["fingerprint"]: i for i, evaluation in enumerate(done.evaluations)}
    models.sort(key=lambda model: order.get(model.fingerprint, -1))
    for model in models:
        model.suites = {suite: stored for suite, stored in model.suites.items() if suite in suites}
    if len(models) < 2:
        raise SurgeryError(f"the models are one and the same, {models[0].name}: there is nothing to compare")
    done.comparison = compare_models(models, base, seed=seed)
    with explain_disk_errors(out):
        done.messages += write_comparison(done.comparison, out)
    done.exit_code = max(done.exit_code, done.comparison.exit_code)
