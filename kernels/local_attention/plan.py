"""Plan of a call of local attention: sizes, tiles, and the arguments that the kernels share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.kernels.kernel_tensors import GroupTensor, HeadTensor, unit_last_stride

MIN_SPAN = 256  # least queries whose gradients of the sinks one program sums
SPAN_PROGRAMS = 512  # programs that sum gradients of the sinks, about
SPLIT_TILES = 4  # least window, in key tiles, of which some are multiplied without a mask


class LocalTiles(NamedTuple):
    """Tile of M rows (queries times heads) and N keys, and how it is compiled."""

    M: int
    N: int
    warps: int
    stages: int


@dataclass(frozen=True)
class LocalPlan:
    """Sizes and options of a call that the kernels are compiled for.

    window, sinks: in tokens. softcap: of scaled scores, None for no cap. largest: whether the largest scores are
    returned too.
    """

    window: int
    sinks: int
    scaling: float
    softcap: float | None
    largest: bool


@dataclass(frozen=True)
class LocalInputs:
    """Tensors of a call and their plan.

    q: (B, G, J, T, K). k, v: of the ring and the call, (B, G, window + T, K or V). sink_k, sink_v: (B, G, sinks, K or
    V). seen: tokens of each row before the call, int64 (B,).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink_k: Tensor
    sink_v: Tensor
    seen: Tensor
    plan: LocalPlan

    def with_unit_strides(self) -> LocalInputs:
        """Return the call with unit strides along the last axes."""
        parts = {name: unit_last_stride(getattr(self, name)) for name in ("q", "k", "v", "sink_k", "sink_v")}
        return replace(self, **parts, seen=self.seen.contiguous())

    @property
    def lanes(self) -> int:
        """Key/value heads of all rows, B * G."""
        return self.k.shape[0] * self.k.shape[1]

    @property
    def rows(self) -> int:
        """Queries times heads that share a key/value head, T * J."""
        return self.q.shape[2] * self.q.shape[3]

    @property
    def span(self) -> int:
        """Queries whose gradients of the sinks one program sums."""
        length = self.q.shape[3]
        return max(MIN_SPAN, -(-length * self.lanes // SPAN_PROGRAMS))

    def tensors(self) -> tuple[Any, ...]:
        """Return q, k, v, sinks and seen as kernel arguments."""
        keys = (self.k, self.v, self.sink_k, self.sink_v)
        return HeadTensor.from_tensor(self.q), *map(GroupTensor.from_tensor, keys), self.seen

    def sizes(self) -> tuple[float, int, int, int]:
        """Return (scaling, window, T, G)."""
        return self.plan.scaling, self.plan.window, self.q.shape[3], self.k.shape[1]

    def options(self, tiles: LocalTiles) -> dict[str, Any]:
        """Return the compile-time constants that all kernels share."""
        K, V = self.q.shape[-1], self.v.shape[-1]
        return {
            "J": self.q.shape[2],
            "S": self.plan.sinks,
            "K": K,
            "V": V,
            "CAP": self.plan.softcap or 0.0,
            "LARGEST": self.plan.largest,
            "M": tiles.M,
            "BK": pow2(K),
            "BV": pow2(V),
            "PRECISION": "tf32x3" if self.q.dtype == torch.float32 else None,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }


def pow2(n: int) -> int:
    """Return the power of two that holds n, 16 or more: a side that a matrix product takes."""
    return max(16, 1 << (n - 1).bit_length())


# Tiles of the forward and of the backward, by the widest of keys and values. Compiled for Hopper, those of half
# precision spill next to no registers.
HALF_TILES = {
    64: (LocalTiles(64, 64, 4, 3), LocalTiles(64, 64, 4, 3)),
    128: (LocalTiles(64, 64, 4, 2), LocalTiles(64, 64, 8, 2)),
    256: (LocalTiles(64, 32, 8, 2), LocalTiles(64, 32, 8, 2)),
}
FLOAT32_TILES = {
    64: (LocalTiles(64, 32, 4, 1), LocalTiles(32, 32, 4, 1)),
    128: (LocalTiles(32, 32, 8, 1), LocalTiles(32, 32, 8, 1)),
    256: (LocalTiles(16, 16, 8, 1), LocalTiles(16, 16, 8, 1)),
}


def forward_tiles(inputs: LocalInputs) -> LocalTiles:
    """Return the tile of `local_forward`. Of few sizes: a server has calls of any length, and compiles it for each tile."""
    tiles = fit_tiles(tile_pair(inputs)[0], inputs)
    return tiles if tiles.M == 16 else tiles._replace(M=tile_pair(inputs)[0].M)


def backward_tiles(inputs: LocalInputs) -> LocalTiles:
    """Return the tile of `local_queries` and `local_keys`."""
    return fit_tiles(tile_pair(inputs)[1], inputs)


def tile_pair(inputs: LocalInputs) -> tuple[LocalTiles, LocalTiles]:
    """Return the tiles of the forward and of the backward for the call's dtype and head sizes."""
    dims = max(64, pow2(inputs.q.shape[-1]), pow2(inputs.v.shape[-1]))
    return (FLOAT32_TILES if inputs.q.dtype == torch.float32 else HALF_TILES)[dims]


def fit_tiles(tiles: LocalTiles, inputs: LocalInputs) -> LocalTiles:
    """Return the tile without rows and keys that a short call or a short window does not have."""
    return tiles._replace(M=min(tiles.M, pow2(inputs.rows)), N=min(tiles.N, pow2(max(1, inputs.plan.window))))
