"""Suite `ppl`: perplexity over every token after the first of each window or document.

Bootstrap units are documents, or windows if the text is a single document, because neighboring tokens are not
independent. `surgery eval` runs the suite on checkpoints; scripts call `measure` on loaded models.

    base = measure(model, tokenizer, options)
    summarize(measure(other, tokenizer, options), base)      perplexity, standard error, ratio to the base with 95% interval
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgery.architectures.positions import longest_input
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval.batching import score_in_batches
from surgery.eval.losses import check_lm_head, max_batch_tokens, token_losses
from surgery.eval.results.compare import compare_results
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, Sample, Suite, SuiteResult, no_tasks, register
from surgery.eval.text import TextWindow, load_text_windows, window_length_notes

NLL = EvalMetric("nll", "ppl", higher_is_better=False, title="perplexity")


def run(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Measure the mean loss (nats per token) of each window of the text."""
    check_lm_head(eval_model.model)
    read = load_text_windows("ppl", eval_model, options)

    def score(batch: list[TextWindow]) -> list[tuple[float, int]]:
        losses = token_losses(eval_model.model, [piece.ids for piece in batch])
        return [(float(losses_T.double().mean()), len(losses_T)) for losses_T in losses]

    most = max_batch_tokens(eval_model.model)
    scores = score_in_batches(
        eval_model, options, read, score, lambda p: len(p.ids), f"perplexity of {eval_model.name}", tokens=most
    )
    samples = [Sample("ppl", p.id, {"nll": nll}, weight=n, unit=p.unit) for p, (nll, n) in zip(read, scores)]
    if not samples:
        raise SurgeryError(
            f"ppl: {options.text or 'the text'} has no document of two tokens or more; give a longer text"
        )
    tokens = sum(n for _, n in scores)
    return SuiteResult(samples, {"nll": NLL}, notes=window_length_notes(eval_model, options), info={"tokens": tokens})


def measure(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run the suite on a loaded model."""
    return run(as_eval_model(model, tokenizer), options)


def as_eval_model(model: Any, tokenizer: Any) -> EvalModel:
    """Return a loaded model as suites take it, for scripts that call a suite's `run`."""
    return EvalModel(
        "converted",
        "model",
        Path(),
        "",
        model,
        tokenizer,
        model.device,
        model.dtype,
        longest_input(model),
        DistContext(),
        Progress(),
    )


def summarize(converted: SuiteResult, base: SuiteResult | None = None) -> dict[str, Any]:
    """Return perplexity, its standard error, token and window counts, and the losses of all windows (nats per token).

    With `base`, also "ratio": {"ratio", "low", "high"}, the ratio to the base's perplexity with its 95% interval.
    """
    both = {"converted": converted} if base is None else {"base": base, "converted": converted}
    row = next(row for row in compare_results("ppl", both, same=False) if row.is_summary)
    result = {"perplexity": row.values["converted"], "se": row.errors["converted"], "tokens": converted.info["tokens"]}
    result |= {"windows": row.samples, "losses": [round(sample.metrics["nll"], 5) for sample in converted.samples]}
    if row.ratio is not None:
        result["ratio"] = {"ratio": row.ratio.change, "low": row.ratio.low, "high": row.ratio.high}
    return result


def format_interval(ratio: dict[str, Any], digits: str = ".4g") -> str:
    """Format a summary's ratio; without the interval if there were too few units for one."""
    ends = "" if ratio["low"] is None else f" [{ratio['low']:{digits}}, {ratio['high']:{digits}}]"
    return f"{ratio['ratio']:{digits}}{ends}"


register(Suite("ppl", "perplexity of a text", run, tasks=no_tasks))
