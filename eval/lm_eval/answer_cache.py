"""Cache of answers on disk, one line each (`--use-cache DIR`), from which an interrupted suite continues.

    DIR/<fingerprint>-<dtype>-<device>.<process>.jsonl      {"key": .., "answer": ..}

The fingerprint is the digest of the model's files. A key is the digest of surgery's version and the whole request:
prompts as text or tokens, never a path, so other data gives another key. lm-eval's own cache is not used because it
unpickles files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from surgery.core.errors import SurgeryError
from surgery.core.version import __version__
from surgery.eval.batching import score_in_batches
from surgery.eval.suite import EvalModel, EvalOptions, stable_id

T = TypeVar("T")


class AnswerCache:
    """Cached answers of one model; without a folder nothing is stored."""

    def __init__(self, eval_model: EvalModel, folder: Path | None):
        self.eval_model, self.folder = eval_model, folder
        device = eval_model.device.type
        self.name = f"{eval_model.fingerprint[:16] or 'model'}-{str(eval_model.dtype).removeprefix('torch.')}-{device}"
        # Broadcast: all processes must divide the same remaining items.
        self.answers: dict[str, Any] = eval_model.ranks.broadcast_object(self._read())

    def get_or_compute(
        self,
        options: EvalOptions,
        items: Sequence[T],
        key_of: Callable[[T], Any],
        score: Callable[[list[T]], list[Any]],
        size: Callable[[T], int],
        title: str,
        *,
        tokens: int | None = None,
    ) -> list[Any]:
        """Return the answers of all items; score(batch) computes those that are not cached.

        Args:
            key_of: item -> everything that its answer depends on, as JSON data.
            size: tokens of an item.
            tokens: tokens per batch.
        """
        journal = self.eval_model.journal is not None
        requests = [key_of(item) for item in items] if self.folder or journal else []
        keys = [stable_id(__version__, requests[i]) if self.folder else str(i) for i in range(len(items))]
        missing = [i for i, key in enumerate(keys) if self.folder is None or key not in self.answers]

        def score_and_write(batch: list[int]) -> list[Any]:
            computed = score([items[i] for i in batch])
            self._write([(keys[i], answer) for i, answer in zip(batch, computed)])
            return computed

        scored = score_in_batches(
            self.eval_model, options, missing, score_and_write, lambda i: size(items[i]), title, tokens=tokens,
            request=lambda i: requests[i],
        )  # fmt: skip
        computed = dict(zip(missing, scored))
        return [computed[i] if i in computed else self.answers[key] for i, key in enumerate(keys)]

    def _read(self) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        if self.folder is None:
            return answers
        if self.folder.exists() and not self.folder.is_dir():
            raise SurgeryError(f"--use-cache {self.folder} is a file; give a folder for answers")
        for path in sorted(self.folder.glob(f"{self.name}.*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                    answers[entry["key"]] = entry["answer"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # a line cut off by an interruption
        return answers

    def _write(self, answers: list[tuple[str, Any]]) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{self.name}.{self.eval_model.ranks.index}.jsonl", "a", encoding="utf-8") as file:
            # Each line starts with a newline, so that an incomplete line before it does no harm.
            file.write("".join("\n" + json.dumps({"key": key, "answer": answer}) for key, answer in answers))
        self.answers |= dict(answers)
