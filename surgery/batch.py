"""The calibration windows, and how they are shared out between fitting and checking."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """inputs: the model's keyword arguments, windows first. Windows 0:fit_rows are fitted to, the rest (of
    `rows`) only checked."""

    inputs: dict[str, Tensor]
    fit_rows: int
    rows: int

    @classmethod
    def of(cls, inputs: dict[str, Tensor], holdout: float) -> Batch:
        rows = len(next(iter(inputs.values())))
        held = min(max(1, round(rows * holdout)), rows - 1)
        return cls(inputs, rows - held, rows)

    def fewer(self, share: float) -> Batch:
        """A share of the windows to fit, all those to check."""
        kept = max(1, round(self.fit_rows * share))
        rows = [*range(kept), *range(self.fit_rows, self.rows)]
        return Batch({k: v[rows] for k, v in self.inputs.items()}, kept, len(rows))

    def fitted(self) -> dict[str, Tensor]:
        return {k: v[: self.fit_rows] for k, v in self.inputs.items()}

    def twice(self) -> dict[str, Tensor]:
        """Once for the original layers, once for the converted."""
        return {k: torch.cat([v, v]) for k, v in self.inputs.items()}

    def mask(self) -> Tensor | None:
        """Real tokens (rows, T), where the inputs are padded."""
        return self.inputs.get("attention_mask")

    def head_mask(self) -> Tensor | None:
        """The same of what reaches the head: of the decoder, where there is one."""
        return self.inputs.get("decoder_attention_mask" if "decoder_input_ids" in self.inputs else "attention_mask")

    def tokens(self) -> int:
        first = next(iter(self.inputs.values()))
        return first.shape[0] * (first.shape[1] if first.dim() == 2 else 1)

    def digest(self) -> str:
        digest = hashlib.sha256(str((self.fit_rows, self.rows)).encode())
        for name in sorted(self.inputs):
            digest.update(name.encode() + self.inputs[name].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
