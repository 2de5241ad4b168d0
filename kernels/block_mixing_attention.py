"""Attention that mixes blocks, Toeplitz or freely: sums of blocks, their mixing, and the read-out, forward and backward.

Nothing but q, k, v and the parameters is kept for the backward pass: sums and mixed sums are made again. Sums of
bfloat16 tokens are stored in bfloat16, others in float32 (half would overflow), states in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from surgery.kernels.block_mixing_scan import (
    MOST_HEADS,
    OPERANDS,
    Kernel,
    scan,
    scan_backward,
    scan_both,
    scan_both_backward,
)
from surgery.kernels.block_mixing_tokens import read_blocks, sum_blocks
from surgery.mixers.masks.toeplitz_blocks import toeplitz_both_ways, toeplitz_causal
from surgery.op import kernel_for

LONGEST = 256  # tokens in a block; inside it the work is quadratic


class Mixing(Protocol):
    """mix: sums (B, G, N, E) and parameters -> (mixed (B, G, J, N, E), more); mix_back: gradients of sums and of every
    parameter from those of both."""

    def mix(self, sums: Tensor, *parameters: Any) -> tuple[Tensor, Any]: ...

    def mix_back(self, sums: Tensor, grad: Tensor, grad_more: Any, *parameters: Any) -> tuple[Any, ...]: ...


class Causal:
    """Parameters rate_RG, weight_RGJ, first (B, R, G, E) or None, count_B in blocks or None; more: the last state."""

    def mix(self, sums: Tensor, rate: Tensor, weight: Tensor, first: Any, count_B: Any) -> tuple[Tensor, Any]:
        return scan(sums, Kernel.of(rate, weight), first=first, final=first is not None, count_B=count_B)

    def mix_back(
        self, sums: Tensor, grad: Tensor, last: Any, rate: Tensor, weight: Tensor, first: Any, count_B: Any
    ) -> tuple[Any, ...]:
        return *scan_backward(sums, Kernel.of(rate, weight), grad, first, last, count_B), None


class BothWays:
    """Parameters rate_RG, weight_RGJ."""

    def mix(self, sums: Tensor, rate: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return scan_both(sums, Kernel.of(rate, weight)), None

    def mix_back(self, sums: Tensor, grad: Tensor, _: Any, rate: Tensor, weight: Tensor) -> tuple[Any, ...]:
        return scan_both_backward(sums, Kernel.of(rate, weight), grad)


@dataclass(frozen=True)
class Grid:
    """Tokens (B, G, [J,] T, F) in N blocks that begin where start_B + t is a multiple of block."""

    start_B: Tensor
    length: int
    block: int
    blocks: int

    @classmethod
    def of(cls, start_B: Tensor, length: int, block: int) -> Grid:
        return cls(start_B, length, block, (block + length - 2) // block + 1)

    @property
    def tokens(self) -> int:
        """In a tile."""
        return max(16, min(64, triton.next_power_of_2(self.block)))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        """x (B, G, J, T, F), y (B, G, J, T, V) -> (B, G, J, N, F V), a last column apart (`apart`)."""
        batch, groups, per_group, length, features = x.shape
        more = apart(y.shape[-1])
        values = y.shape[-1] - more
        wide = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        out = x.new_empty(batch, groups, per_group, self.blocks, features * (values + more), dtype=wide)
        f_tile, v_tile = side(features), side(values)
        tiles = triton.cdiv(features, f_tile) * triton.cdiv(values, v_tile)
        sum_blocks[(self.blocks * tiles, batch * groups * per_group)](
            x, y, out, self.start_B, length, self.blocks, groups, per_group, *x.stride()[:4], *y.stride()[:4],
            F=features, V=values, MORE=more, BLOCK=self.block, BT=self.tokens, BF=f_tile, BV=v_tile,
            OP=OPERANDS[x.dtype][1], PRECISION=OPERANDS[x.dtype][2], num_warps=4, num_stages=2,
        )  # fmt: skip
        return out

    def read(
        self,
        x: Tensor,
        y: Tensor,
        z: Tensor,
        mixed: Tensor | None,
        weight_GJN: Tensor | None,
        back: bool = False,
        turned: bool = False,
        compared: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `read_blocks`. weight None: nothing of the own block; turned: M^T. With `compared`, also the sums of
        <compared_t, what t reads of its own block unweighted> over each block, (B, G, J, N)."""
        batch, groups, heads, length = x.shape[:4]
        per_group = y.shape[2] if back else heads
        more_f, more_v = turned and apart(x.shape[-1]), not turned and apart(z.shape[-1])
        features, values = x.shape[-1] - more_f, z.shape[-1] - more_v
        out = x.new_empty(batch, groups, heads, length, z.shape[-1])
        v_tile = 16 * triton.cdiv(values, 16) if values <= 128 else 64
        v_tile = triton.next_power_of_2(v_tile)
        v_tiles, t_tiles = triton.cdiv(values, v_tile), triton.cdiv(self.block, self.tokens)
        shares = None
        if compared is not None:
            shares = torch.zeros(batch, groups, heads, self.blocks, t_tiles * v_tiles, device=x.device)
        stand_in = x if compared is None else compared
        read_blocks[(self.blocks * t_tiles * v_tiles, batch * groups * heads)](
            x, y, z, out if mixed is None else mixed, out if weight_GJN is None else weight_GJN, out, stand_in,
            out if shares is None else shares, self.start_B, length, self.blocks, groups,
            *x.stride()[:4], *y.stride()[:4], *z.stride()[:4], *((1, features) if turned else (values, 1)),
            *((0, 0, 0) if weight_GJN is None else weight_GJN.stride()), *stand_in.stride()[:4],
            F=features, V=values, J=per_group, BACK=back, INNER=weight_GJN is not None, MIXED=mixed is not None,
            SHARES=compared is not None, MORE_F=more_f, MORE_V=more_v, BLOCK=self.block, BT=self.tokens,
            BF=side(features), BV=v_tile, OP=OPERANDS[x.dtype][1], PRECISION=OPERANDS[x.dtype][2],
            num_warps=4 if v_tile <= 64 else 8, num_stages=2,
        )  # fmt: skip
        return out, None if shares is None else shares.sum(-1)


class Attend(torch.autograd.Function):
    """(out (B, G, J, T, V), what the mixing gives beside) of q (B, G, J, T, F), k (B, G, T, F), v (B, G, T, V) and
    own_GJN, the weight of a block in itself (None: the mixing has it)."""

    @staticmethod
    def forward(
        ctx: Any, mixing: Mixing, grid: Grid, q: Tensor, k: Tensor, v: Tensor, own_GJN: Any, *parameters: Any
    ) -> Any:
        ctx.mixing, ctx.grid = mixing, grid
        ctx.save_for_backward(q, k, v, own_GJN, *parameters)
        ctx.set_materialize_grads(False)
        k1, v1 = k.unsqueeze(2), v.unsqueeze(2)
        mixed, more = mixing.mix(grid.sums(k1, v1).squeeze(2), *parameters)
        return grid.read(q, k1, v1, mixed, own_GJN)[0], more

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_more: Any) -> Any:
        (q, k, v, own_GJN, *parameters), grid = ctx.saved_tensors, ctx.grid
        k1, v1 = k.unsqueeze(2), v.unsqueeze(2)
        grad = q.new_zeros(*q.shape[:-1], v.shape[-1]) if grad is None else packed_rows(grad)
        sums = grid.sums(k1, v1).squeeze(2)
        mixed, _ = ctx.mixing.mix(sums, *parameters)
        compared = None if own_GJN is None else q
        grad_q, shares = grid.read(grad, v1, k1, mixed, own_GJN, turned=True, compared=compared)
        del mixed
        mixed_grad = grid.sums(q, grad)
        grad_sums, *grads = ctx.mixing.mix_back(sums, mixed_grad, grad_more, *parameters)
        grad_v, _ = grid.read(k1, q, grad, grad_sums, own_GJN, back=True)
        grad_k, _ = grid.read(v1, grad, q, grad_sums, own_GJN, back=True, turned=True)
        grad_own = None if shares is None else shares.sum(0)
        return None, None, grad_q, grad_k.squeeze(2), grad_v.squeeze(2), grad_own, *grads


def side(size: int) -> int:
    return max(16, min(64, triton.next_power_of_2(size)))


def apart(values: int) -> bool:
    """Whether the last column goes apart: a normaliser's, which would cost a tile of its own."""
    return values > 16 and values % 16 == 1


def packed(state: Tensor) -> Tensor:
    """(.., F, V) -> (.., F V) as sums are stored."""
    if not apart(state.shape[-1]):
        return state.flatten(-2).contiguous()
    return torch.cat([state[..., :-1].flatten(-2), state[..., -1]], -1)


def unpacked(state: Tensor, features: int, values: int) -> Tensor:
    if not apart(values):
        return state.unflatten(-1, (features, values))
    main = state[..., : features * (values - 1)].unflatten(-1, (features, values - 1))
    return torch.cat([main, state[..., features * (values - 1) :].unsqueeze(-1)], -1)


def packed_rows(x: Tensor) -> Tensor:
    """With rows of numbers side by side, as kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def accepts(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, *more: Any, **named: Any
) -> bool:
    batch, groups, per_group, length, _ = q_BGJTF.shape
    block = named["block"] if "block" in named else more[-1] if len(more) < 3 else more[3]
    same = q_BGJTF.dtype == k_BGTF.dtype == v_BGTV.dtype and q_BGJTF.dtype in OPERANDS
    fits = len(rate_RG) <= 16 and per_group <= MOST_HEADS and batch * groups * per_group < 2**16
    return same and fits and 0 < block <= LONGEST and length > 0


@kernel_for(toeplitz_causal, accepts)
def toeplitz_causal_triton(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    first_BRGFV: Tensor | None,
    start_B: Tensor,
    count_B: Tensor,
    block: int,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    grid = Grid.of(start_B, v_BGTV.shape[2], block)
    entering, count_blocks = None, None
    if first_BRGFV is not None:
        offset_B = start_B % block
        enters_B = (offset_B == 0) & (count_B > 0)
        gate_BRG = torch.exp(-rate_RG * enters_B[:, None, None])
        entering = packed(gate_BRG[..., None, None] * first_BRGFV.float())
        count_blocks = torch.where(count_B > 0, (offset_B + count_B + block - 1) // block, 0)
    own_GJN = weight_RGJ.float().sum(0).unsqueeze(-1).expand(-1, -1, grid.blocks)
    qkv = (packed_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    out, last = Attend.apply(Causal(), grid, *qkv, own_GJN, rate_RG, weight_RGJ, entering, count_blocks)
    return out, None if last is None else unpacked(last, k_BGTF.shape[-1], v_BGTV.shape[-1])


@kernel_for(toeplitz_both_ways, accepts)
def toeplitz_both_ways_triton(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, block: int
) -> Tensor:
    start_B = torch.zeros(len(v_BGTV), dtype=torch.int64, device=v_BGTV.device)
    grid = Grid.of(start_B, v_BGTV.shape[2], block)
    qkv = (packed_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    return Attend.apply(BothWays(), grid, *qkv, None, rate_RG, weight_RGJ)[0]
