"""Cross-entropy on held-out validation text."""

from __future__ import annotations

import math
from typing import Any

import torch

from surgery.core.parallel_compile import compile_kernels
from surgery.training.batches import to_device
from surgery.training.stages.base import IGNORE_INDEX, Batch, StageModels, next_token_targets
from surgery.training.stages.lm import next_token_loss

MIN_TOKENS = 1000  # of validation text; losses of fewer are decided by chance


class Validation:
    """Mean cross-entropy over fixed examples, in nats per token, distributed over the processes.

    rows: per forward pass, at most. A pass runs without the CUDA graph of training and cannot use the graph's memory, so
    it should hold no more tokens than a step's.
    """

    def __init__(self, examples: list[Batch], rows: int, accelerator: Any):
        self.examples, self.rows, self.accelerator = examples, rows, accelerator
        self.most_rows = rows

    def limit_tokens(self, tokens: int) -> None:
        """Run at most `tokens` tokens per forward pass from now on, or one row, and never more than the rows given first."""
        if self.examples:
            self.rows = max(1, min(self.most_rows, tokens // len(self.examples[0]["input_ids"])))

    def warning(self) -> str | None:
        """Return a warning if the validation text is too short to tell which state of a run is best; None otherwise, or
        without any.
        """
        counted = sum(int((example["labels"][1:] != IGNORE_INDEX).sum()) for example in self.examples)
        if not self.examples or counted >= MIN_TOKENS:
            return None
        return (
            f"the validation text has {counted:,} tokens, too few to tell which state of the run is best. Give more: "
            "--set data.validation=FILE, a larger share such as --set data.validation=0.1, or more --set "
            "data.validation_examples (surgery run: "
            "--heal-set)"
        )

    def __bool__(self) -> bool:
        return bool(self.examples)

    @torch.no_grad()
    def loss(self, run: Any) -> float | None:
        """Return the loss of a model, or None without examples. Every process must call it."""
        if not self.examples:
            return None
        run.eval()
        total = torch.zeros(2, device=self.accelerator.device, dtype=torch.float64)
        # The precision of training, also for models that are not prepared for it: before the first stage and after the
        # last one.
        with self.accelerator.autocast():
            for batch in self._own_batches():
                batch = to_device(batch, self.accelerator.device)
                total[0] += next_token_loss(run, batch)
                total[1] += next_token_targets(batch)[0].sum()
        summed, count = self.accelerator.reduce(total, reduction="sum").tolist()
        return summed / count if count else None

    def compile_kernels(self, run: Any) -> None:
        """Compile the GPU kernels with which a model computes the loss, in parallel. Every process must call it."""
        batch = to_device(self._own_batches()[0], self.accelerator.device)
        with torch.no_grad(), self.accelerator.autocast():
            compile_kernels(lambda: next_token_loss(run.eval(), batch), self.accelerator.device)

    def student_loss(self, models: StageModels) -> float | None:
        """Return the loss of the student."""
        return self.loss(models.run)

    def _own_batches(self) -> list[Batch]:
        """Return this process's batches; rows without labels pad them to the same number on every process."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        padding_row = {**self.examples[0], "labels": torch.full_like(self.examples[0]["labels"], IGNORE_INDEX)}
        examples = self.examples[rank::world]
        count = -(-len(self.examples) // world)
        examples = examples + [padding_row] * (-(-count // self.rows) * self.rows - len(examples))
        parts = [examples[i : i + self.rows] for i in range(0, len(examples), self.rows)]
        return [{k: torch.stack([e[k] for e in batch]) for k in batch[0]} for batch in parts]


def perplexity(loss: float | None) -> float | None:
    """Return exp(loss), infinity where it overflows."""
    return None if loss is None else math.exp(loss) if loss < 700 else math.inf
