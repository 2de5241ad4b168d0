"""Suite `cosine`: cosine similarity of an encoder's sentence embeddings to those of the original model, per
sentence.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import document_stream
from surgery.core.errors import SurgeryError
from surgery.eval.batching import score_in_batches
from surgery.eval.suite import (
    EvalMetric,
    EvalModel,
    EvalOptions,
    Sample,
    Suite,
    SuiteResult,
    no_tasks,
    register,
    stable_id,
)
from surgery.eval.text import note_text, resolve_text


def load_sentences(text: str, count: int, words: int = 6) -> list[str]:
    """Return the first `count` sentences of a text that have at least `words` words.

    Raises SurgeryError if there are fewer than two.
    """
    sentences: list[str] = []
    for document in document_stream(text):
        for sentence in re.split(r"(?<=[.!?])\s+|\n+", document):
            if len(sentence.split()) >= words:
                sentences.append(sentence.strip())
            if len(sentences) == count:
                return sentences
    if len(sentences) < 2:
        raise SurgeryError(f"{text} has {len(sentences)} sentences of {words} words or more; at least 2 are needed")
    return sentences


@torch.inference_mode()
def embed_sentences(model: Any, tokenizer: Any, sentences: list[str], tick: Any = lambda steps=1: None) -> Tensor:
    """Return sentence embeddings (N, D): last hidden states averaged over the real tokens, normalized."""
    embeddings = []
    for start in range(0, len(sentences), 32):
        batch = tokenizer(sentences[start : start + 32], padding=True, truncation=True, return_tensors="pt").to(
            model.device
        )
        hidden_BTD = model(**batch, output_hidden_states=True).hidden_states[-1].float()
        mask_BT1 = batch["attention_mask"][..., None]
        mean_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)
        embeddings.append(torch.nn.functional.normalize(mean_BD, dim=-1).cpu())
        tick(len(mean_BD))
    return torch.cat(embeddings)


COSINE = EvalMetric("cosine", "mean")


def run(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Embed the text's sentences with one model; samples have no metric until both results are combined."""
    text = resolve_text("cosine", options.text, None)
    note_text(text, options)
    sentences = load_sentences(text, options.limit or max(2, options.tokens // 64))

    def score(batch: list[str]) -> list[torch.Tensor]:
        return list(embed_sentences(eval_model.model, eval_model.tokenizer, batch))

    embeddings = score_in_batches(
        eval_model, options, sentences, score, lambda s: len(s.split()), f"embeddings of {eval_model.name}"
    )
    samples = [Sample("cosine", stable_id(s), {}, shown={"sentence": s}) for s in sentences]
    return SuiteResult(samples, {"cosine": COSINE}, arrays={"embedding_ND": torch.stack(embeddings)})


def compare_embeddings(base: SuiteResult, converted: SuiteResult) -> SuiteResult:
    """Combine the results of base and converted model: one cosine similarity per sentence."""
    each_N = (base.arrays["embedding_ND"] * converted.arrays["embedding_ND"]).sum(-1).double().tolist()
    samples = [Sample(s.task, s.id, {"cosine": c}, shown=s.shown) for s, c in zip(converted.samples, each_N)]
    return SuiteResult(samples, {"cosine": COSINE}, notes=[f"the worst sentence has {min(each_N):.4f}"])


register(
    Suite(
        "cosine", "an encoder's sentence embeddings against --compare", run, combine=compare_embeddings, tasks=no_tasks
    )
)
