"""Perplexity: every token after the first of a window, or of a document, counts. Units of the bootstrap are documents, and
windows where the text is a single one: tokens near each other are not independent."""

from __future__ import annotations

from surgery.eval.batching import in_batches
from surgery.eval.losses import check_head, token_losses, tokens_at_once
from surgery.eval.suites import EvalOptions, Metric, Sample, Subject, Suite, SuiteResult, register
from surgery.eval.text import Piece, pieces

NLL = Metric("nll", "ppl", higher_is_better=False, title="perplexity")


def run(subject: Subject, options: EvalOptions) -> SuiteResult:
    check_head(subject.model)
    read = pieces("ppl", subject, options)

    def score(batch: list[Piece]) -> list[tuple[float, int]]:
        losses = token_losses(subject.model, [piece.ids for piece in batch])
        return [(float(each.double().mean()), len(each)) for each in losses]

    most = tokens_at_once(subject.model)
    found = in_batches(subject, options, read, score, lambda p: len(p.ids), f"perplexity of {subject.name}", most)
    samples = [Sample("ppl", p.id, {"nll": nll}, weight=n, unit=p.unit) for p, (nll, n) in zip(read, found)]
    return SuiteResult(samples, {"nll": NLL}, info={"tokens": sum(n for _, n in found)})


register(Suite("ppl", "perplexity of a text", run))
