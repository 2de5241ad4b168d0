"""BTT, block tensor-train with two cores: W[b,c] = left[b,c] @ right[b,c] for every block.

    b,c: block grid   a,d: block shape   s: block rank        out = b*a, in = c*d (padded up where they do not divide)

Low rank, block by block; b = c = 1 is low rank, s = 1 is Monarch (Dao et al. 2022). Qiu et al. 2024,
"Compute Better Spent", section 2, eq. 2. The product is two batched matrix products (`btt_products.py`).

`order` says which output y[b, a] is: contiguous, row b * |a| + a, so that a block is a slice of the matrix; or strided,
row a * |b| + b as printed in eq. 2, so that block b holds rows b, b + |b|, b + 2 |b|, ... In strided order, and only
there, rank 1 includes every Kronecker product of a (a x c) and a (b x d) matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import dispatched_by
from surgery.core.errors import SurgeryError
from surgery.core.repeats import sampled_steps
from surgery.structures import linalg
from surgery.structures.base import (
    STRUCTURES,
    MuP,
    Rank,
    StructureConfig,
    StructuredLinear,
    balance_factors,
    curve_ranks,
    exact_factors,
    is_exporting,
)
from surgery.structures.btt_products import btt_call_key, btt_products, supports_products
from surgery.structures.low_rank import leading_directions, tail_energies
from surgery.structures.metric import Metric, inner_product, input_root, output_roots, spd_factor, spd_inverse

# Multiplications that take as long as writing, transposing and reading one element of z or of the dense matrix.
LAUNCH_MACS = 160

RIDGES = (1e-6, 1e-4, 1e-2)  # of Gram matrices of cores, which may be singular; see `spd_factor`
LEFT_STEPS = 2  # conjugate-gradient steps for the left cores in a sweep with a full G

# Most elements of a temporary tensor in one sweep of `sweep`; row blocks are processed in groups that stay below it.
SWEEP_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}


Order = Literal["contiguous", "strided"]


@dataclass(frozen=True)
class BTT(StructureConfig):
    """Config of BTT. blocks: grid (b, c), or "sqrt", about the square root of each dimension. rank: s.

    order: which rows of the matrix a block holds, neighbors ("contiguous") or every |b|-th ("strided").
    """

    name: ClassVar[str] = "btt"
    blocks: tuple[int, int] | Literal["sqrt"] = "sqrt"
    rank: Rank = None
    order: Order = "contiguous"


def btt_mvm(x_Ncd: Tensor, right_cdbs: Tensor, left_bcsa: Tensor) -> Tensor:
    """Return y (N, b, a) with y[n, b] = sum_c left[b,c] (right[b,c] x[n, c])."""
    z_Nbcs = torch.einsum("ncd,cdbs->nbcs", x_Ncd, right_cdbs)
    return torch.einsum("nbcs,bcsa->nba", z_Nbcs, left_bcsa)


def btt_dense(right_cdbs: Tensor, left_bcsa: Tensor) -> Tensor:
    """Return the dense matrix (b a, c d)."""
    blocks_bacd = torch.einsum("cdbs,bcsa->bacd", right_cdbs, left_bcsa)
    b, a, c, d = blocks_bacd.shape
    return blocks_bacd.reshape(b * a, c * d)


def is_dense_cheaper(rows: int, right_cdbs: Tensor, left_bcsa: Tensor, numel: int) -> bool:
    """Return whether the dense matrix, of `numel` elements, and one product are expected to cost less than two
    products.
    """
    (_, _, b, s), c = right_cdbs.shape, left_bcsa.shape[1]
    gain = right_cdbs.numel() + left_bcsa.numel() + LAUNCH_MACS * b * c * s - numel
    return rows * gain > numel * (s + LAUNCH_MACS)


@dispatched_by(btt_call_key)
def btt_linear(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return B x + bias (..., out) for x (..., in), in <= c d and out <= b a.

    x is padded with zeros up to c d, and rows past `out` are dropped. Computes two batched products, or one product
    with the dense matrix if there are several rows of x and the intermediate z (b c s elements per row) would cost
    more. On a CPU the products are those of `btt_products`, which use x and y in place. In an exported program, whose
    number of rows is not known, they are always two products.
    """
    in_ = x.shape[-1]
    if not is_exporting():
        rows = x.numel() // in_
        if rows > 1 and is_dense_cheaper(rows, right_cdbs, left_bcsa, out * in_):
            return F.linear(x, btt_dense(right_cdbs, left_bcsa)[:out, :in_], bias)
        if x.is_cpu and supports_products(x, right_cdbs, left_bcsa):
            return btt_products(x, right_cdbs, left_bcsa, bias, out)
    (c, d), (b, a) = right_cdbs.shape[:2], left_bcsa.shape[::3]
    if c * d != in_:
        x = F.pad(x, (0, c * d - in_))
    y_Nba = btt_mvm(x.reshape(-1, c, d), right_cdbs, left_bcsa)
    y = y_Nba.reshape(*x.shape[:-1], b * a)[..., :out]
    return y if bias is None else y + bias


def strided_btt_linear(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return B x + bias (..., out) of a B in strided order; arguments as in `btt_linear`.

    The product and its kernels write the outputs block by block. One copy of them then brings them into order.
    """
    b, a = left_bcsa.shape[0], left_bcsa.shape[3]
    blockwise = None if bias is None else rows_by_block(bias[:, None], b, a, "strided").flatten()
    y: Tensor = btt_linear(x, right_cdbs, left_bcsa, blockwise, b * a)
    ordered: Tensor = y.unflatten(-1, (b, a)).transpose(-1, -2).flatten(-2)
    return ordered[..., :out]


def rows_by_block(rows_OX: Tensor, b: int, a: int, order: Order, fill: float = 0.0) -> Tensor:
    """Return the rows by block (b, a, X), in the order of the config. Positions past O hold `fill`."""
    if len(rows_OX) != b * a:
        rows_OX = F.pad(rows_OX, (0, 0, 0, b * a - len(rows_OX)), value=fill)
    blocks_baX: Tensor = rows_OX.unflatten(0, (b, a) if order == "contiguous" else (a, b))
    return blocks_baX if order == "contiguous" else blocks_baX.transpose(0, 1)


def rows_in_order(rows_bX: Tensor, blocks: int, order: Order) -> Tensor:
    """Return the rows (b a, X), given one block after another, in the order of the matrix."""
    if order == "contiguous":
        return rows_bX
    ordered: Tensor = rows_bX.unflatten(0, (blocks, -1)).transpose(0, 1).flatten(0, 1)
    return ordered


def sqrt_blocks(n: int) -> int:
    """Return the largest divisor of n up to sqrt(n), or round(sqrt(n)) with padding if no divisor is near (a prime)."""
    divisor = next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)
    return divisor if divisor * 4 > math.isqrt(n) else round(n**0.5)


def zero_pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return the matrix padded with zeros to (rows, columns), or the matrix itself if it has that shape."""
    if tuple(matrix.shape[-2:]) == (rows, columns):
        return matrix
    return F.pad(matrix, (0, columns - matrix.shape[-1], 0, rows - matrix.shape[-2]))


@STRUCTURES.register(BTT)
class BTTLinear(StructuredLinear):
    """BTT linear layer. Cores: `weight` = left (b, c, s, a), `right` (c, d, b, s)."""

    weight: Tensor
    right: Tensor
    contracted = {"weight": (1, 2), "right": (1,)}  # noqa: RUF012

    @classmethod
    def resolve(cls, config: Any, out: int, in_: int) -> Any:
        """Return the config with `blocks` as numbers. SurgeryError if they cannot tile an (out, in) matrix."""
        blocks = (sqrt_blocks(out), sqrt_blocks(in_)) if config.blocks == "sqrt" else tuple(config.blocks)
        for count, dim, side in zip(blocks, (out, in_), ("out", "in")):
            if not 1 <= count <= dim:
                raise SurgeryError(
                    f"{config} cannot tile a matrix of out={out}, in={in_}: {count} blocks along {side}; "
                    f"use 1 to {dim}, for example blocks: [4, 4]"
                )
        return replace(config, blocks=blocks)

    @classmethod
    def block_shape(cls, config: Any, out: int, in_: int) -> tuple[int, int]:
        """Return the shape (a, d) of one block, rounded up."""
        return -(-out // config.blocks[0]), -(-in_ // config.blocks[1])

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core (layout in the class docstring)."""
        (b, c), (a, d), s = config.blocks, cls.block_shape(config, out, in_), config.rank
        return {"weight": (b, c, s, a), "right": (c, d, b, s)}

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest rank that represents every (out, in) matrix exactly."""
        return min(cls.block_shape(config, out, in_))

    @classmethod
    def _blocks(cls, weight_OI: Tensor, config: Any) -> Tensor:
        """Return the blocks (b, c, a, d) of the zero-padded matrix."""
        (b, c), (a, d) = config.blocks, cls.block_shape(config, *weight_OI.shape)
        wide_OI = zero_pad(weight_OI, len(weight_OI), c * d)
        return rows_by_block(wide_OI, b, a, config.order).reshape(b, a, c, d).transpose(1, 2)

    @classmethod
    def _roots(cls, config: Any, shape: Sequence[int], metric: Metric) -> tuple[Any, Any, Any]:
        """Return roots of G_bb and their inverses as functions of (b, c, a, X), and roots of C_cc (c, d, d) or None."""
        (b, c), (a, d) = config.blocks, cls.block_shape(config, *shape)
        apply_root: Callable[[Tensor], Tensor] = _identity
        apply_inverse, c_root = apply_root, None
        if metric.g_OO is not None and metric.g_OO.dim() == 1:
            scale_b1a1 = rows_by_block(metric.g_OO[:, None], b, a, config.order, fill=1.0).sqrt()[:, None]
            apply_root, apply_inverse = (lambda m: m * scale_b1a1), (lambda m: m / scale_b1a1)
        elif metric.g_OO is not None:
            root, inverse = (r[:, None] for r in output_roots(gram_blocks(metric.g_OO, b, a, config.order)))
            apply_root, apply_inverse = (lambda m: root @ m), (lambda m: inverse @ m)
        if metric.c_II is not None:
            moment_II = metric.c_II
            c_root = metric.compute_once(("block roots", c), lambda: input_root(diagonal_blocks(moment_II, c, d)))
        return apply_root, apply_inverse, c_root

    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the best rank-s approximation of every block in its own C_cc and G_bb. Exact at full rank.

        Optimal if inputs of different blocks are uncorrelated; `sweep` improves it otherwise.
        """
        blocks_bcad = cls._blocks(weight_OI, config)
        if config.rank >= cls.full_rank(config, *weight_OI.shape):
            left_bcas, right_bcsd = exact_factors(blocks_bcad)
        else:
            apply_root, apply_inverse, c_root = cls._roots(config, weight_OI.shape, metric or Metric())
            weighed_bcad = apply_root(blocks_bcad)
            u_bcas = leading_directions(apply_block_roots(weighed_bcad, c_root), config.rank)
            left_bcas, right_bcsd = balance_factors(apply_inverse(u_bcas), u_bcas.mT @ weighed_bcad)
        cores = {"weight": left_bcas.mT, "right": right_bcsd.permute(1, 3, 0, 2)}
        return cls.from_cores(config, weight_OI.shape, cores)

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = 64
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at about `steps` ranks, cheapest first."""
        tail = cls.block_tails(weight_OI, config, metric)
        ranks = curve_ranks(cls.full_rank(config, *weight_OI.shape), steps)
        return [(replace(config, rank=r), tail[r]) for r in ranks]

    @classmethod
    def block_tails(cls, weight_OI: Tensor, config: Any, metric: Metric) -> list[float]:
        """Return the squared error at rank 0, 1, ..., assuming that inputs of different blocks are uncorrelated."""
        apply_root, _, c_root = cls._roots(config, weight_OI.shape, metric)
        m_bcad = apply_root(cls._blocks(weight_OI, config))
        return tail_energies(apply_block_roots(m_bcad, c_root)).sum((0, 1)).tolist()

    @torch.no_grad()
    def sweep(self, weight_OI: Tensor, metric: Metric) -> float | None:
        """Run one sweep of alternating least squares, in place, with the full C and G.

        It solves (a) for all left cores jointly, given right, then (b) for the right cores of each block column given
        the others. Without G, and with a diagonal one, row blocks do not depend on each other, and each solution is
        exact; else see `joint_sweep`. Returns the squared error that is left, or None if `project` is already optimal.
        """
        (b, c), s = self.config.blocks, self.config.rank
        a, d = self.block_shape(self.config, self.out_features, self.in_features)
        if s >= min(a, d) or metric.c_II is None:  # block SVD is already the optimum
            return None
        c_II, order = zero_pad(metric.c_II, c * d, c * d), self.config.order
        inverses_cdd = metric.compute_once(("block inverses", c), lambda: spd_inverse(diagonal_blocks(c_II, c, d)))
        target_baI = rows_by_block(zero_pad(weight_OI, self.out_features, c * d), b, a, order)
        if metric.g_OO is not None and metric.g_OO.dim() == 2:
            g_XX = gram_by_block(metric.g_OO, b, a, order)
            square = joint_sweep(self.weight.data, self.right.data, target_baI, c_II, inverses_cdd, g_XX)
        else:
            wc_baI = rows_by_block(zero_pad(metric.times_c(weight_OI), self.out_features, c * d), b, a, order)
            g_baa, square = None if metric.g_OO is None else gram_blocks(metric.g_OO, b, a, order), 0.0
            for rows in row_groups(b, c * d * c * s + a * c * d, weight_OI.device.type):
                left_bcsa, right_cdbs = self.weight.data[rows], self.right.data[:, :, rows]
                g = None if g_baa is None else g_baa[rows]
                square += sweep(
                    left_bcsa, right_cdbs, target_baI[rows], wc_baI[rows], c_II, inverses_cdd=inverses_cdd, g_baa=g
                )
        left, right = balance_factors(self.weight.data.mT, self.right.data.permute(2, 0, 3, 1))
        self.weight.data.copy_(left.mT)
        self.right.data.copy_(right.permute(1, 3, 0, 2))
        return square

    def product(self, x: Tensor) -> Tensor:
        """Return B x (..., O) without the bias, for x (..., I)."""
        run = btt_linear if self.config.order == "contiguous" else strided_btt_linear
        y: Tensor = run(x, *self.right_and_left(), None, self.out_features)
        return y

    def product_by_cores(
        self, x: Tensor, multiply: Callable[[str, Tensor, int], Tensor], tables: Mapping[str, Any]
    ) -> Tensor:
        """Return B x (..., O), without the bias. multiply(name, x, groups): the products of a core's matrices with the
        parts of x (..., groups * K). tables: of indices, of which this structure has none."""
        (b, c), (a, d) = self.config.blocks, self.block_shape(self.config, self.out_features, self.in_features)
        x = F.pad(x, (0, c * d - self.in_features)) if c * d != self.in_features else x
        z = multiply("right", x, c).unflatten(-1, (c, b, -1)).transpose(-3, -2).flatten(-3)
        y = multiply("weight", z, b)
        if self.config.order != "contiguous":
            y = y.unflatten(-1, (b, a)).transpose(-1, -2).flatten(-2)
        return y[..., : self.out_features]

    def forward(self, x: Tensor) -> Tensor:
        """Return B x + bias (..., O) for x (..., I)."""
        run = btt_linear if self.config.order == "contiguous" else strided_btt_linear
        y: Tensor = run(x, *self.right_and_left(), self.bias, self.out_features)
        return y

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        rows_bI = btt_dense(self.right, self.weight)
        return rows_in_order(rows_bI, self.config.blocks[0], self.config.order)[: self.out_features, : self.in_features]

    def macs(self) -> int:
        """Return multiply-accumulates per token."""
        return self.weight.numel() + self.right.numel()

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each core."""
        (b, c, s, a), d = self.weight.shape, self.right.shape[1]
        return {"right": MuP(d, b * s), "weight": MuP(c * s, a)}


def _identity(matrix: Tensor) -> Tensor:
    return matrix


def apply_block_roots(m_bcad: Tensor, root_cdd: Tensor | None) -> Tensor:
    """Return M[b,c] R[c], one product for each c: broadcasting over b would copy every root b times."""
    if root_cdd is None:
        return m_bcad
    b, c, a, d = m_bcad.shape
    return (m_bcad.transpose(0, 1).reshape(c, b * a, d) @ root_cdd).view(c, b, a, d).transpose(0, 1)


def diagonal_blocks(matrix: Tensor, count: int, size: int) -> Tensor:
    """Return the diagonal blocks (count, size, size) of a matrix (n, n) or of a diagonal (n,).

    Positions past n hold the mean of the diagonal.
    """
    n, diagonal = matrix.shape[0], matrix if matrix.dim() == 1 else matrix.diagonal()
    if matrix.dim() == 1:
        whole_n = F.pad(diagonal, (0, count * size - n), value=float(diagonal.mean()))
        return torch.diag_embed(whole_n.view(count, size))
    whole = zero_pad(matrix, count * size, count * size)
    whole.diagonal()[n:] = diagonal.mean()
    return torch.stack([whole[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])


def gram_blocks(g_OO: Tensor, b: int, a: int, order: Order) -> Tensor:
    """Return G_bb (b, a, a) of the rows of each block, of G (O, O) or its diagonal (O,), padded as in
    `diagonal_blocks`.
    """
    if order == "contiguous":
        return diagonal_blocks(g_OO, b, a)
    parts = [g_OO[j::b] if g_OO.dim() == 1 else g_OO[j::b, j::b] for j in range(b)]
    return torch.cat([diagonal_blocks(block, 1, a) for block in parts])


def gram_by_block(g_OO: Tensor, b: int, a: int, order: Order) -> Tensor:
    """Return G (b a, b a) with rows and columns one block after another.

    Positions past O hold the mean of the diagonal.
    """
    n = len(g_OO)
    if n != b * a:
        mean = g_OO.diagonal().mean()
        g_OO = zero_pad(g_OO, b * a, b * a)
        g_OO.diagonal()[n:] = mean
    if order == "contiguous":
        return g_OO
    place_X = rows_by_block(torch.arange(b * a, device=g_OO.device)[:, None], b, a, order).flatten()
    return g_OO[place_X][:, place_X]


def row_groups(b: int, block_elements: int, device: str) -> Iterator[slice]:
    """Yield slices of row blocks whose temporaries of `block_elements` elements per block stay below SWEEP_ELEMENTS."""
    size = max(1, SWEEP_ELEMENTS.get(device, 2**23) // block_elements)
    return (slice(start, min(b, start + size)) for start in range(0, b, size))


def solve_spd(matrix: Tensor, rhs: Tensor) -> Tensor:
    """Return matrix^-1 rhs, with a ridge of rounding size because the Gram matrix of cores may be singular."""
    factor = spd_factor(matrix, RIDGES)
    half = linalg.solve_triangular(factor, rhs, upper=False)
    return linalg.solve_triangular(factor.mT, half, upper=True)


def right_products(right_cdbs: Tensor, c_II: Tensor) -> tuple[Tensor, Tensor]:
    """Return C R^T (I, b, c, s) and R C R^T (b, c s, c s), R the block-diagonal right of each row block."""
    c, d, b, s = right_cdbs.shape
    # One block of columns at a time: a single product over all of them would copy C into another layout first.
    columns = zip(torch.split(c_II, d, dim=1), right_cdbs)
    cr_Ibcs = torch.stack([(c_Id @ right_dbs.reshape(d, b * s)).view(-1, b, s) for c_Id, right_dbs in columns], 2)
    gram_bcset = torch.einsum("cdbs,cdbet->bcset", right_cdbs, cr_Ibcs.view(c, d, b, c, s))
    return cr_Ibcs, gram_bcset.reshape(b, c * s, c * s)


def sweep(
    left_bcsa: Tensor,
    right_cdbs: Tensor,
    target_baI: Tensor,
    wc_baI: Tensor,
    c_II: Tensor,
    *,
    inverses_cdd: Tensor,
    g_baa: Tensor | None,
) -> float:
    """Run one alternation over a group of row blocks, in place, and return the squared error that is left.

    For row blocks that do not depend on each other. wc_baI: W C. inverses_cdd: inverse of each C_cc. g_baa: G_bb of
    each row block.

    (a) left_b = (W C R^T)(R C R^T)^-1 with R the block-diagonal right of row block b; G drops out.
    (b) right += X C_cc^-1, X = (L^T G L)^-1 L^T G (E C)[:, c], with E the residual. That lowers the squared error by
        <L^T G (E C)[:, c], X C_cc^-1>, so E C is only brought up to date where later blocks read it.
    """
    b, c, s, a = left_bcsa.shape
    d = right_cdbs.shape[1]
    cr_Ibcs, gram_bXX = right_products(right_cdbs, c_II)
    rhs_bcsa = torch.einsum("bacd,cdbs->bcsa", wc_baI.view(b, a, c, d), right_cdbs)
    rhs_bXa = rhs_bcsa.reshape(b, c * s, a)
    left_bcsa.copy_(solve_spd(gram_bXX, rhs_bXa).view(b, c, s, a))

    left_bacs = left_bcsa.permute(0, 3, 1, 2)
    fit_Ibcs = cr_Ibcs.permute(1, 2, 3, 0).reshape(b, c * s, c * d)
    ec_baI = wc_baI - left_bacs.reshape(b, a, c * s) @ fit_Ibcs
    gap_bacd = target_baI.view(b, a, c, d) - torch.einsum("cdbs,bcsa->bacd", right_cdbs, left_bcsa)
    square = inner_product(ec_baI if g_baa is None else g_baa @ ec_baI, gap_bacd.flatten(-2))
    gained = ec_baI.new_zeros((), dtype=torch.float64)
    for j in sampled_steps(c, c_II.is_meta):
        here, later = slice(j * d, (j + 1) * d), slice((j + 1) * d, None)
        left_bas = left_bacs[:, :, j]
        weighted_bsa = left_bas.mT if g_baa is None else left_bas.mT @ g_baa
        gradient_bsd = weighted_bsa @ ec_baI[:, :, here]
        step_bsd = solve_spd(weighted_bsa @ left_bas, gradient_bsd) @ inverses_cdd[j]
        ec_baI[:, :, later] -= left_bas @ (step_bsd @ c_II[here, later])
        right_cdbs[j] += step_bsd.permute(2, 0, 1)
        gained += torch.linalg.vecdot(gradient_bsd, step_bsd).sum(dtype=torch.float64)
    return square - float(gained)


def joint_sweep(
    left_bcsa: Tensor, right_cdbs: Tensor, target_baI: Tensor, c_II: Tensor, inverses_cdd: Tensor, g_XX: Tensor
) -> float:
    """Run one alternation over all row blocks, which G couples, in place, and return the squared error that is left.

    inverses_cdd: inverse of each C_cc. g_XX: G (b a, b a), block after block.

    Both halves of `sweep` become steps of conjugate gradients, with the solution of `sweep` for each row block alone as
    preconditioner: (a) LEFT_STEPS steps for all left cores, with the gradient G E C R^T, E the residual; (b) one step
    for the right cores of each block column in turn, with the gradient L^T (G E C)[:, c]. Their lengths are exact, so
    none raises the error, and each lowers its square by length <gradient, direction>.
    """
    b, c, s, a = left_bcsa.shape
    d = right_cdbs.shape[1]
    groups = row_groups(b, c * d * c * s, c_II.device.type)
    gram_factor = spd_factor(torch.cat([right_products(right_cdbs[:, :, rows], c_II)[1] for rows in groups]), RIDGES)
    g_baa = torch.stack([g_XX[i * a : (i + 1) * a, i * a : (i + 1) * a] for i in range(b)])
    g_factor = spd_factor(g_baa)

    def times_right(m_XI: Tensor) -> Tensor:
        return torch.einsum("bacd,cdbs->bacs", m_XI.view(b, a, c, d), right_cdbs).reshape(b, a, c * s)

    dense_bacd = torch.einsum("cdbs,bcsa->bacd", right_cdbs, left_bcsa)
    gap_XI = (target_baI.reshape(b, a, c, d) - dense_bacd).reshape(b * a, c * d)
    slope_XI = g_XX @ (gap_XI @ c_II)
    square = torch.linalg.vecdot(slope_XI, gap_XI).sum(dtype=torch.float64)
    gradient_baX, previous = times_right(slope_XI), None
    direction_baX = torch.zeros_like(gradient_baX)
    for _ in range(LEFT_STEPS):
        half_baX = linalg.cholesky_solve(gradient_baX, g_factor)
        moved_baX = linalg.cholesky_solve(half_baX.mT, gram_factor).mT
        size = _dot(gradient_baX, moved_baX)
        direction_baX = moved_baX if previous is None else moved_baX + _ratio(size, previous) * direction_baX
        change_bacd = torch.einsum("bacs,cdbs->bacd", direction_baX.view(b, a, c, s), right_cdbs)
        image_XI = g_XX @ (change_bacd.reshape(b * a, c * d) @ c_II)
        image_baX = times_right(image_XI)
        length = _ratio(size, _dot(direction_baX, image_baX))
        left_bcsa += length * direction_baX.view(b, a, c, s).permute(0, 2, 3, 1)
        slope_XI -= length * image_XI
        gradient_baX, previous, square = gradient_baX - length * image_baX, size, square - length * size
    for j in sampled_steps(c, c_II.is_meta):
        here, later = slice(j * d, (j + 1) * d), slice((j + 1) * d, None)
        left_bas = left_bcsa[:, j].mT
        gradient_bsd = left_bas.mT @ slope_XI[:, here].view(b, a, d)
        direction_bsd = solve_spd(left_bas.mT @ g_baa @ left_bas, gradient_bsd) @ inverses_cdd[j]
        change_Xd = (left_bas @ direction_bsd).view(b * a, d)
        weighed_Xd, size = g_XX @ change_Xd, _dot(gradient_bsd, direction_bsd)
        length = _ratio(size, _dot(weighed_Xd @ c_II[here, here], change_Xd))
        right_cdbs[j] += length * direction_bsd.permute(2, 0, 1)
        slope_XI[:, later] -= weighed_Xd @ (length * c_II[here, later])
        square = square - length * size
    return float(square)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return <a, b> as in `inner_product`, without waiting for it."""
    product: Tensor = torch.linalg.vecdot(a, b).sum(dtype=torch.float64)
    return product


def _ratio(value: Tensor, by: Tensor) -> Tensor:
    """Return value / by, or 0 where only rounding error is left of `by`, which is not negative."""
    return torch.where(by > 0, value / by, 0.0)
