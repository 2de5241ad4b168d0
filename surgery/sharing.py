"""What one process fits, given to all that share a conversion, so that every one goes on with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from surgery.fit import Fitted
from surgery.mixers import MIXERS
from surgery.planning import Cut
from surgery.ranks import Ranks
from surgery.seats import Seat
from surgery.skeleton import place
from surgery.starts import Started
from surgery.structures import STRUCTURES

K = TypeVar("K")


def shared_fits(
    ranks: Ranks, jobs: Mapping[K, tuple[Cut, Callable[[], Fitted]]], device: torch.device
) -> dict[K, Fitted]:
    """Every job's result: the large ones are dealt out first."""
    if ranks.count == 1:
        return {name: fit() for name, (_, fit) in jobs.items()}
    names = list(jobs)
    owners = ranks.shares([jobs[name][0].numel for name in names])
    own = ranks.all_or_none(
        lambda: {name: jobs[name][1]() for name, owner in zip(names, owners) if owner == ranks.index}
    )
    said = ranks.gather({name: (f.record, f.linear.config if f.linear else None) for name, f in own.items()})
    return {
        name: _passed(ranks, owner, jobs[name][0], own.get(name), *said[owner][name], device)
        for name, owner in zip(names, owners)
    }


def _passed(
    ranks: Ranks, owner: int, cut: Cut, own: Fitted | None, record: Any, config: Any, device: torch.device
) -> Fitted:
    if config is None:
        dense_OI = torch.empty(cut.out, cut.in_, device=device) if own is None else own.dense_OI
        assert dense_OI is not None
        return Fitted(record, None, ranks.passed_(dense_OI, owner))
    linear = own.linear if own is not None else STRUCTURES[config](cut.in_, cut.out, config, bias=False, device="meta")
    assert linear is not None
    for name, tensor in sorted(linear.state_dict().items()):
        passed = ranks.passed_(tensor if own is not None else torch.empty_like(tensor, device=device), owner)
        if own is None:
            place(linear, name, passed)
    return own or Fitted(record, linear)


def shared_start(ranks: Ranks, owner: int, seat: Seat, start: Callable[[], Started], device: torch.device) -> Started:
    """A mixer started by one process."""
    if ranks.count == 1:
        return start()
    own = ranks.all_or_none(lambda: start() if ranks.index == owner else None)
    config, errors = ranks.gather(None if own is None else (own.mixer.config, own.errors))[owner]  # type: ignore[misc]
    if own is None:
        with torch.device(device):
            own = Started(MIXERS[config](config, seat.shape).float(), errors)
    state = own.mixer.state_dict()
    for name in sorted(state):
        tensor: Tensor = state[name].contiguous()
        state[name].copy_(ranks.passed_(tensor, owner))
    return own
