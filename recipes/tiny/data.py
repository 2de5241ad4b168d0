"""Training data of the embedded checkpoint: settings, tokenizer and batches.

Worker processes generate the text during training; batch i depends on the seed and i only. Small models do not learn
retrieval from ordinary text, so training has two phases. `drill` has short rows, mostly facts that are repeated or
asked for, few at first and then more. The second phase is the full mixture at the full context; half of its rows begin
with a long story that contains facts at any position. B: batch, T: tokens.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from surgery.eval import stories

PAD = "<|pad|>"
_ANSWER = re.compile(r"(?<=Answer:)( [^\n]*)")


@dataclass(frozen=True)
class TrainingChoices:
    """All settings that determine the result; lengths in tokens, phases as shares of the steps in [0, 1]."""

    vocabulary: int = 1536
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 512
    context: int = 1024
    drill_context: int = 256
    drill_share: float = 0.18
    # Small batches first: learning retrieval takes a number of steps, not of tokens.
    drill_tokens: int = 16_384
    batch_tokens: int = 65_536
    steps: int = 14_000
    # With transformers' 0.02, attention is so uniform at first that retrieval takes thousands of steps more.
    init: float = 0.06
    rate: float = 2e-3
    decay: float = 0.1
    answer_weight: float = 5.0
    seed: int = 1
    samples: int = 200
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    depths: tuple[float, ...] = tuple(i / 10 for i in range(11))


SMOKE = TrainingChoices(
    vocabulary=512, hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, context=128, drill_context=96,
    drill_tokens=384, batch_tokens=768, steps=6, samples=2, lengths=(96, 128), depths=(0.0, 1.0),
)  # fmt: skip


def build_tokenizer(choices: TrainingChoices) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on generated text; it merges within a word, digit or mark (with its leading space), never
    across.
    """
    cut = pre_tokenizers.Split(Regex(stories.PIECE), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=choices.vocabulary,
        special_tokens=[stories.END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories.corpus(choices.seed, 2_000_000).split(stories.END), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=stories.END,
        eos_token=stories.END,
        pad_token=PAD,
        model_max_length=choices.context,
        clean_up_tokenization_spaces=False,
    )


class BatchDataset(Dataset):
    """Item i is batch i: (tokens (B, T + 1), whether each is part of an answer (B, T + 1)), generated in a worker."""

    def __init__(self, choices: TrainingChoices, tokenizer: PreTrainedTokenizerFast):
        self.choices = choices
        self.tokenizer = tokenizer.backend_tokenizer
        self.pieces: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return self.choices.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        choices, rng = self.choices, Random(f"tiny {self.choices.seed} {step}")
        share = step / (choices.drill_share * choices.steps)
        context, tokens = choices.context, choices.batch_tokens
        if share < 1:
            context, tokens = choices.drill_context, choices.drill_tokens
        rows = [self.row(rng, context, share) for _ in range(tokens // context)]
        ids, answers = zip(*rows)
        return torch.tensor(ids, dtype=torch.int16), torch.tensor(answers, dtype=torch.bool)

    def encode(self, text: str) -> list[int]:
        """Tokenize quickly by a table of pieces, across which the tokenizer never merges."""
        ids: list[int] = []
        for piece in stories.split_pieces(text):
            if piece not in self.pieces:
                self.pieces[piece] = self.tokenizer.encode(piece, add_special_tokens=False).ids
            ids += self.pieces[piece]
        return ids

    def count(self, text: str) -> int:
        """Return the number of tokens."""
        return len(self.encode(text))

    def row(self, rng: Random, context: int, share: float) -> tuple[list[int], list[bool]]:
        """Return context + 1 tokens of documents, truncated at the end and, unless a long needle comes first, at the
        start.
        """
        ids: list[int] = []
        answers: list[bool] = []
        leads = share >= 1 and rng.random() < 0.5
        skip = 0 if leads or rng.random() < 0.5 else int(rng.random() * context / 2)
        while len(ids) <= skip + context:
            parts = self.long_needle(rng, context) if leads and not ids else self.parts(rng, share)
            for part, answer in [*parts, (f"\n{stories.END}\n", False)]:
                tokens = self.encode(part)
                ids += tokens
                answers += [answer] * len(tokens)
        return ids[skip : skip + context + 1], answers[skip : skip + context + 1]

    def long_needle(self, rng: Random, context: int) -> list[tuple[str, bool]]:
        """Return a long needle document; half of them fill the row with the facts first, which is rare by chance and
        hardest.
        """
        full = rng.random() < 0.5
        length = context if full else int(context * (0.3 + 0.7 * rng.random()))
        return split_answers(stories.needle_document(rng, length, self.count, early=6 if full else 1))

    def parts(self, rng: Random, share: float) -> list[tuple[str, bool]]:
        """Return a document of the mixture or, mostly in the first phase, a recall exercise."""
        kind = rng.random()
        if kind < (0.5 if share < 1 else 0.1):
            return stories.drill(rng, 2 + int(14 * min(share, 1)))
        if share < 1 and kind < 0.85:
            return split_answers(stories.list_document(rng, 2 + int(14 * share)))
        return split_answers(stories.document(rng))


def split_answers(text: str) -> list[tuple[str, bool]]:
    """Split a text into (part, whether it answers a question)."""
    return [(part, i % 2 == 1) for i, part in enumerate(_ANSWER.split(text))]


def load_batches(choices: TrainingChoices, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Iterator[Any]:
    """Yield batches on the device."""
    workers = max(1, (os.cpu_count() or 2) - 1) if device.type == "cuda" else 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loader = DataLoader(
        BatchDataset(choices, tokenizer),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=device.type == "cuda",
    )
    for ids_BT, answers_BT in loader:
        yield ids_BT.to(device, non_blocking=True).long(), answers_BT.to(device, non_blocking=True)
