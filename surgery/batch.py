"""The calibration windows, and how they are shared out between fitting and checking."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.errors import SurgeryError, nearest


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
        if rows < 2:
            raise SurgeryError(f"calibration: {rows} window; at least two are needed, one to fit and one to check")
        # Two at least where there are four: one window says nothing of its own spread.
        held = min(max(2 if rows >= 4 else 1, round(rows * holdout)), rows - 1)
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


def real_rows(x_BTX: Tensor, mask_BT: Tensor | None) -> Tensor:
    """(N, X): the rows of real tokens; all of them where there is no mask, or one of another shape."""
    if mask_BT is None or x_BTX.shape[:2] != mask_BT.shape:
        return x_BTX.flatten(0, -2)
    return x_BTX[mask_BT.to(x_BTX.device).bool()]


def refuse_unfit(inputs: dict[str, Tensor], model: Any) -> None:
    """SurgeryError where the model's forward does not take these, or its embedding has no such ids."""
    taken = [name for name in inspect.signature(model.forward).parameters if name not in ("labels", "kwargs")]
    for name in inputs:
        if name not in taken:
            raise SurgeryError(f"calibration inputs: {type(model).__name__} takes no {name!r}{nearest(name, taken)}")
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
    for name, ids in inputs.items():
        if name.endswith("input_ids") and vocabulary is not None:
            low, high = int(ids.min()), int(ids.max())
            if ids.dim() != 2 or ids.is_floating_point() or low < 0 or high >= vocabulary:
                raise SurgeryError(
                    f"calibration inputs: {name} holds {ids.dtype} {list(ids.shape)} from {low} to {high}; wanted are "
                    f"windows of ids, (rows, length) int64, from 0 to {vocabulary - 1}"
                )
