"""Layout of tokens in blocks and of the blocks' sums, and the launches of kernels/block_mixing/tokens.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.kernels.block_mixing.scan import OPERANDS, count_tiles, next_power_of_2
from surgery.kernels.block_mixing.tokens import read_blocks, read_blocks_backward, sum_blocks


@dataclass(frozen=True)
class BlockLayout:
    """T tokens (B, G, [J,] T, F) in N = `blocks` blocks, which begin where start_B + t is a multiple of `block`.

    length: T. wide: whether sums are stored in float32 whatever the tokens' dtype.
    """

    start_B: Tensor
    length: int
    block: int
    blocks: int
    wide: bool = False

    @classmethod
    def from_start(cls, start_B: Tensor, length: int, block: int) -> BlockLayout:
        """Return the layout of tokens whose first one has position start_B."""
        return cls(start_B, length, block, (block + length - 2) // block + 1)

    @classmethod
    def from_zero(cls, x: Tensor, length: int, block: int, wide: bool = False) -> BlockLayout:
        """Return the layout of the rows of x, whose first token has position 0."""
        start_B = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return cls(start_B, length, block, -(-length // block), wide)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return max(16, min(64, next_power_of_2(self.block)))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        """Return sum_t x_t y_t^T of each block, (B, G, [J,] N, F V), of x (B, G, [J,] T, F) and y (B, G, [J,] T, V).

        A last column of y is stored behind the others (`has_extra_column`).
        """
        heads, features = x.shape[2] if x.dim() == 5 else 1, x.shape[-1]
        more = has_extra_column(y.shape[-1])
        values = y.shape[-1] - more
        wide = torch.float32 if self.wide or x.dtype != torch.bfloat16 else x.dtype
        out = x.new_empty(*x.shape[:-2], self.blocks, features * (values + more), dtype=wide)
        f_tile, v_tile = tile_side(features), tile_side(values)
        programs = self.blocks * count_tiles(features, f_tile) * count_tiles(values, v_tile)
        sum_blocks[(programs, x.shape[0] * x.shape[1] * heads)](
            x, y, out, self.start_B, self.length, self.blocks, x.shape[1], heads, *strides(x), *strides(y),
            F=features, V=values, MORE=more, BLOCK=self.block, BT=self.tile_tokens, BF=f_tile, BV=v_tile,
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
        *,
        back: bool = False,
        turned: bool = False,
        compared: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Launch `read_blocks`, and return (its output, shares).

        x, y, z have an axis of the heads of a group, or none for one head. mixed: the mixed sums M, None for zeros.
        weight_GJN: weight of a block in itself, None for zeros. back: tokens read the later tokens of their block
        instead of the earlier ones. turned: M^T in place of M. shares_GJN, given `compared`: the sum over rows of
        <compared_t, what t reads of its own block, unweighted>, else None.
        """
        (batch, groups), heads = x.shape[:2], x.shape[2] if x.dim() == 5 else 1
        per_group = y.shape[2] if back else heads
        more_f, more_v = turned and has_extra_column(x.shape[-1]), not turned and has_extra_column(z.shape[-1])
        features, values = x.shape[-1] - more_f, z.shape[-1] - more_v
        out = x.new_empty(*x.shape[:-1], z.shape[-1])
        wide = x.dtype != torch.bfloat16  # registers spill with a wider tile
        v_tile = 64 if values > (64 if wide else 128) else max(16, next_power_of_2(values))
        v_tiles, t_tiles = count_tiles(values, v_tile), count_tiles(self.block, self.tile_tokens)
        shares = None
        if compared is not None:
            shares = torch.zeros(batch, groups, heads, self.blocks, t_tiles * v_tiles, device=x.device)
        other = x if compared is None else compared
        read_blocks[(self.blocks * t_tiles * v_tiles, batch * groups * heads)](
            x, y, z, out if mixed is None else mixed, out if weight_GJN is None else weight_GJN, out, other,
            out if shares is None else shares, self.start_B, self.length, self.blocks, groups,
            *strides(x), *strides(y), *strides(z), *((1, features) if turned else (values, 1)),
            *((0, 0, 0) if weight_GJN is None else weight_GJN.stride()), *strides(other),
            F=features, V=values, J=per_group, BACK=back, INNER=weight_GJN is not None, MIXED=mixed is not None,
            SHARES=compared is not None, MORE_F=more_f, MORE_V=more_v, BLOCK=self.block, BT=self.tile_tokens,
            BF=tile_side(features), BV=v_tile, OP=OPERANDS[x.dtype][1], PRECISION=OPERANDS[x.dtype][2],
            num_warps=8 if max(v_tile, features if wide else 0) > 64 else 4, num_stages=2,
        )  # fmt: skip
        return out, None if shares is None else shares.sum((0, -1))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, grad_sums: Tensor, weight_GJN: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of k and v. grad: of the output; grad_sums: of the blocks' sums."""
        features, more = q.shape[-1], has_extra_column(v.shape[-1])
        values = v.shape[-1] - more
        if q.dtype != torch.bfloat16 or max(features, values) > 128:
            keys_grad, _ = self.read(v, grad, q, grad_sums, weight_GJN, back=True, turned=True)
            return keys_grad, self.read(k, q, grad, grad_sums, weight_GJN, back=True)[0]
        keys_grad, values_grad = k.new_empty(k.shape), v.new_empty(v.shape)
        wide = max(features, values) > 64
        read_blocks_backward[(self.blocks * count_tiles(self.block, self.tile_tokens), k.shape[0] * k.shape[1])](
            q, k, v, grad, grad_sums, grad if weight_GJN is None else weight_GJN, keys_grad, values_grad, self.start_B,
            self.length, self.blocks, k.shape[1], *strides(q), *k.stride()[:3], *v.stride()[:3], *strides(grad),
            *((0, 0, 0) if weight_GJN is None else weight_GJN.stride()),
            F=features, V=values, J=q.shape[2], INNER=weight_GJN is not None, MORE=more, BLOCK=self.block,
            BT=self.tile_tokens, BF=max(16, next_power_of_2(features)), BV=max(16, next_power_of_2(values)),
            OP=OPERANDS[q.dtype][1], PRECISION=OPERANDS[q.dtype][2], num_warps=8 if wide else 4, num_stages=2,
        )  # fmt: skip
        return keys_grad, values_grad


def strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of rows, groups, heads (0 for one head) and tokens."""
    return x.stride()[:4] if x.dim() == 5 else (x.stride(0), x.stride(1), 0, x.stride(2))


def tile_side(size: int) -> int:
    """Return the side of a tile over `size` elements: a power of two from 16 to 64."""
    return max(16, min(64, next_power_of_2(size)))


def has_extra_column(values: int) -> bool:
    """Return whether the last of `values` columns is stored apart: a normaliser's, which would cost a tile of its
    own.
    """
    return values > 16 and values % 16 == 1


def pack_state(state: Tensor) -> Tensor:
    """Return a state (.., F, V) flattened to (.., F V) as sums are stored."""
    if not has_extra_column(state.shape[-1]):
        return state.flatten(-2).contiguous()
    return torch.cat([state[..., :-1].flatten(-2), state[..., -1]], -1)


def unpack_state(state: Tensor, features: int, values: int) -> Tensor:
    """Return a state (.., F, V) from its flat form; the inverse of `pack_state`."""
    if not has_extra_column(values):
        return state.unflatten(-1, (features, values))
    main = state[..., : features * (values - 1)].unflatten(-1, (features, values - 1))
    return torch.cat([main, state[..., features * (values - 1) :].unsqueeze(-1)], -1)


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x, copied if the elements of a row are not contiguous, or if the rows of a block, 1,024 at most, may span
    2^31 elements.
    """
    return x if x.stride(-1) == 1 and x.stride(-2) < 2**20 else x.contiguous()
