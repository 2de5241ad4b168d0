"""An encoder's sentence embeddings beside the original's: mean cosine."""

from __future__ import annotations

import torch

from surgery.eval.batching import in_batches
from surgery.eval.cosine import embeddings, sentences_of
from surgery.eval.suites import EvalOptions, Metric, Sample, Subject, Suite, SuiteResult, register, stable_id
from surgery.eval.text import check_text, note_text

COSINE = Metric("cosine", "mean")


def run(subject: Subject, options: EvalOptions) -> SuiteResult:
    text = check_text("cosine", options.text, None)
    note_text(text, options)
    sentences = sentences_of(text, options.limit or max(2, options.tokens // 64))

    def score(batch: list[str]) -> list[torch.Tensor]:
        return list(embeddings(subject.model, subject.tokenizer, batch))

    found = in_batches(subject, options, sentences, score, lambda s: len(s.split()), f"embeddings of {subject.name}")
    samples = [Sample("cosine", stable_id(s), {}, shown={"sentence": s}) for s in sentences]
    return SuiteResult(samples, {"cosine": COSINE}, arrays={"embedding_ND": torch.stack(found)})


def joint(base: SuiteResult, converted: SuiteResult) -> SuiteResult:
    each_N = (base.arrays["embedding_ND"] * converted.arrays["embedding_ND"]).sum(-1).double().tolist()
    samples = [Sample(s.task, s.id, {"cosine": c}, shown=s.shown) for s, c in zip(converted.samples, each_N)]
    return SuiteResult(samples, {"cosine": COSINE}, notes=[f"the worst sentence has {min(each_N):.4f}"])


register(Suite("cosine", "an encoder's sentence embeddings against --compare", run, joint=joint))
