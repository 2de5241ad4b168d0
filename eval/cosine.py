"""How far an encoder's sentence embeddings moved: cosine to the original's, sentence by sentence."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.calibrate import document_stream
from surgery.errors import SurgeryError


@dataclass(frozen=True)
class Cosine:
    """Mean cosine over sentences, its standard error, the worst of them."""

    cosine: float
    se: float
    worst: float
    sentences: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sentences_of(text: str, count: int, words: int = 6) -> list[str]:
    """The first `count` sentences of at least `words` words."""
    found: list[str] = []
    for document in document_stream(text):
        for sentence in re.split(r"(?<=[.!?])\s+|\n+", document):
            if len(sentence.split()) >= words:
                found.append(sentence.strip())
            if len(found) == count:
                return found
    if len(found) < 2:
        raise SurgeryError(f"{text} has {len(found)} sentences of {words} words or more; at least 2 are needed")
    return found


@torch.inference_mode()
def embeddings(model: Any, tokenizer: Any, sentences: list[str], tick: Any = lambda steps=1: None) -> Tensor:
    """(N, D): the last hidden states, averaged over the real tokens, normalised."""
    found = []
    for start in range(0, len(sentences), 32):
        batch = tokenizer(sentences[start : start + 32], padding=True, truncation=True, return_tensors="pt").to(
            model.device
        )
        hidden_BTD = model(**batch, output_hidden_states=True).hidden_states[-1].float()
        mask_BT1 = batch["attention_mask"][..., None]
        mean_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)
        found.append(torch.nn.functional.normalize(mean_BD, dim=-1).cpu())
        tick(len(mean_BD))
    return torch.cat(found)


def cosine(converted_ND: Tensor, original_ND: Tensor) -> Cosine:
    each_N = (converted_ND * original_ND).sum(-1).double()
    se = float(each_N.std() / len(each_N) ** 0.5)
    return Cosine(float(each_N.mean()), se, float(each_N.min()), len(each_N))
