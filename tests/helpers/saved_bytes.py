"""Bytes that a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def saved_storages(given: Iterable[Tensor] = ()) -> Iterator[dict[int, Tensor]]:
    """Yield address -> tensor of the memory that autograd keeps in the context; views of one tensor count once.

    given: tensors that are there anyway, such as parameters, which are left out.
    """
    known = {t.untyped_storage().data_ptr() for t in given}
    kept: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        address = t.untyped_storage().data_ptr()
        if address not in known:
            kept[address] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        yield kept


def total_bytes(kept: dict[int, Tensor]) -> int:
    """Return the bytes of the memory that `saved_storages` found."""
    return sum(t.untyped_storage().nbytes() for t in kept.values())
