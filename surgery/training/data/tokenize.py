"""Tokenize documents and mark the tokens to train on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import document_tokens, end_token
from surgery.training.data.documents import Document


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of one document. ids_T: int64; trained_T: bool, the training targets (None: all); indivisible: must not be
    cut.
    """

    ids_T: Tensor
    trained_T: Tensor | None = None
    indivisible: bool = False

    def __len__(self) -> int:
        return self.ids_T.numel()


class TextEncoder:
    """Tokenizes text with the special tokens of the tokenizer around it, and its end-of-text token after it."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.prefix_ids, self.suffix_ids = document_tokens(tokenizer)
        self.end = end_token(tokenizer)
        pads = (tokenizer.pad_token_id, self.end, self.prefix_ids[0] if self.prefix_ids else None, 0)
        self.pad = int(next(p for p in pads if p is not None))

    def encode_texts(self, documents: list[Document]) -> list[TokenSequence]:
        """Return one sequence per document, in order; the parts of a long document are joined."""
        if not documents:
            return []
        texts = [document.content for document in documents]
        unread = {"return_attention_mask": False, "return_token_type_ids": False}  # a list as long for every document
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False, **unread)["input_ids"]
        every: list[int] = []
        lengths: list[int] = []
        for row, document in zip(ids, documents):  # one tensor for all: a small one each would take as long as the rest
            before = len(every)
            every += self.prefix_ids if document.begins else []
            every += row
            every += self.suffix_ids if document.ends else []
            if document.begins or not lengths:
                lengths.append(0)
            lengths[-1] += len(every) - before
        return [TokenSequence(ids_T) for ids_T in torch.tensor(every, dtype=torch.int64).split(lengths)]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a SHA-256 of everything that determines the ids of a text, and of the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        model = json.loads(backend.to_str())
        for passing in ("padding", "truncation"):  # of the last call, not of the tokenizer
            model.pop(passing, None)
    else:
        model = {"vocabulary": tokenizer.get_vocab(), "kind": type(tokenizer).__name__}
    identity = {"model": model, "specials": tokenizer.special_tokens_map, "chat": tokenizer.chat_template}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
