"""Tensor train and block tensor train with any number of cores: W is a tensor with the indices i_1 .. i_c, j_1 .. j_c.

    W[i_1 .. i_c, j_1 .. j_c] = sum over a_1 .. a_(c-1) of  G_1[..] G_2[..] .. G_c[..],   i_t < m_t, j_t < n_t, a_t < r_t

    tensor train         G_t[a_(t-1), i_t, j_t, a_t]
    block tensor train   G_t[a_(t-1), i_t, i_(t+1) .. i_c, j_1 .. j_(t-1), j_t, a_t]

    m_t, n_t: factors of out and in, the first index slowest   r_t: ranks, r_0 = r_c = 1

A block tensor train of two cores is the structure `btt` without a free grid. A product takes the cores from the last to
the first; both kinds need equally many multiplications, and a tensor train stores fewer numbers. Qiu et al. 2024,
"Compute Better Spent", appendix C (definitions and products) and appendix D (projection of a block tensor train,
largest ranks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.core.repeats import repeated
from surgery.structures.base import STRUCTURES, MuP, Rank, StructureConfig, StructuredLinear, curve_ranks, is_exporting
from surgery.structures.btt import zero_pad
from surgery.structures.kronecker import conjugate_gradient
from surgery.structures.low_rank import leading_directions, orthonormalize
from surgery.structures.metric import Metric

DEFAULT_CORES = 3
CURVE_POINTS = 8  # ranks of `rank_error_curve`, which projects the matrix at each of them
STEPS = 4  # conjugate-gradient steps for each core in a sweep


@dataclass(frozen=True)
class TensorTrain(StructureConfig):
    """Config of a tensor train.

    cores: number of cores c; None: 3, or 2 for a matrix with fewer than 8 rows or columns. rank: every r_t, as far as a
    larger one adds anything.
    """

    name: ClassVar[str] = "tensor_train"
    cores: int | None = None
    rank: Rank = None


@dataclass(frozen=True)
class BlockTensorTrain(TensorTrain):
    """Config of a block tensor train; options as in TensorTrain."""

    name: ClassVar[str] = "block_tensor_train"


def near_equal_factors(n: int, count: int, padded: bool = True) -> tuple[int, ...]:
    """Return `count` factors of n, about equal.

    padded: where no divisors are near, the factors are such that their product is a little more than n.
    """
    if count == 1:
        return (n,)
    root = n ** (1 / count)
    first = next(k for k in range(max(1, int(root + 1e-9)), 0, -1) if n % k == 0)
    if padded and first * 2 <= root:
        first = round(root)
    return (first, *near_equal_factors(-(-n // first), count - 1, padded))


def most_cores(out: int, in_: int) -> int:
    """Return the largest number of cores whose factors of out and in can all be 2 or more, at least 2."""
    return max(2, min(out, in_).bit_length() - 1)


@STRUCTURES.register(TensorTrain)
class TensorTrainLinear(StructuredLinear):
    """Tensor-train linear layer.

    Cores: `weight` = G_1 and `core<t>` = G_t, each (J, L, n_t, r_t, r_(t-1), m_t) with J = L = 1.
    """

    weight: Tensor
    scales_named = True
    shared: ClassVar[bool] = True  # one core for all values of the indices that its product leaves alone

    @property
    def contracted(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        """The axes of each core that its product sums over: j_t and a_t."""
        return dict.fromkeys(self.core_names(), (2, 3))

    # -- sizes ---------------------------------------------------------------------------------------------
    @classmethod
    def resolve(cls, config: Any, out: int, in_: int) -> Any:
        """Return the config with `cores` as a number. SurgeryError if the matrix is too small for them."""
        most = most_cores(out, in_)
        cores = min(DEFAULT_CORES, most) if config.cores is None else config.cores
        if not 2 <= cores <= most:
            raise SurgeryError(
                f"{config} cannot divide a matrix of out={out}, in={in_}: {cores} cores; use 2 to {most}"
            )
        return replace(config, cores=cores)

    @classmethod
    def factors(cls, config: Any, out: int, in_: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return m_1 .. m_c and n_1 .. n_c.

        A tensor train cut to a smaller matrix has a higher rank, so it is not padded.
        """
        padded = not cls.shared
        return near_equal_factors(out, config.cores, padded), near_equal_factors(in_, config.cores, padded)

    @classmethod
    def bond_ranks(cls, config: Any, out: int, in_: int, rank: int) -> list[int]:
        """Return r_0 .. r_c: `rank`, or less where the factors on one side have fewer values."""
        m, n = cls.factors(config, out, in_)
        ranks = [1]
        for t in range(config.cores - 1, 0, -1):
            rest = n[t] * ranks[0] * (m[t] if cls.shared else 1)
            ranks.insert(0, min(rank, math.prod(m[:t]) * (math.prod(n[:t]) if cls.shared else 1), rest))
        return [1, *ranks]

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest rank that represents every (out, in) matrix exactly."""
        return max(cls.bond_ranks(config, out, in_, out * in_))

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core (layout in the class docstring)."""
        config = cls.resolve(config, out, in_)
        (m, n), r = cls.factors(config, out, in_), cls.bond_ranks(config, out, in_, config.rank)
        shapes: dict[str, tuple[int, ...]] = {}
        for t in range(1, config.cores + 1):
            batch = (1, 1) if cls.shared else (math.prod(n[: t - 1]), math.prod(m[t:]))
            shapes["weight" if t == 1 else f"core{t}"] = (*batch, n[t - 1], r[t], r[t - 1], m[t - 1])
        return shapes

    # -- fit -----------------------------------------------------------------------------------------------
    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the approximation that splits off one core at a time, from the last, each by a singular value
        decomposition.

        Each split is optimal in the Frobenius norm; all of them together are optimal for two cores, and exact at full
        rank. The metric is ignored; `sweep` reduces the error in it. Block tensor train: Qiu et al. 2024, appendix D.
        """
        out, in_ = weight_OI.shape
        config = cls.resolve(config, out, in_)
        (m, n), r = cls.factors(config, out, in_), cls.bond_ranks(config, out, in_, config.rank)
        rest = zero_pad(weight_OI, math.prod(m), math.prod(n))
        if cls.shared:  # rows i_1 j_1 .. i_c j_c
            c = config.cores
            rest = rest.reshape(*m, *n).permute([k for t in range(c) for k in (t, c + t)])
        cores = {}
        for t in range(config.cores, 1, -1):
            before = (math.prod(m[: t - 1]), math.prod(n[: t - 1]))
            rest, core = (cls._split_shared if cls.shared else cls._split_blocks)(
                rest, before, (m[t - 1], n[t - 1]), (r[t - 1], r[t])
            )
            cores[f"core{t}"] = core
        shapes = cls.shapes(config, out, in_)
        if cls.shared:
            cores["weight"] = rest.reshape(m[0], n[0], r[1]).permute(1, 2, 0).reshape(shapes["weight"])
        else:
            cores["weight"] = rest.reshape(m[0], -1, n[0], r[1]).permute(1, 2, 3, 0).reshape(shapes["weight"])
        return cls.from_cores(config, (out, in_), balance_cores(cores))

    @staticmethod
    def _split_shared(
        rest: Tensor, before: tuple[int, int], here: tuple[int, int], ranks: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return what is left of the tensor, and the core (1, 1, n, r, s, m) that is split off."""
        (m, n), (s, r) = here, ranks
        left_As, right_sK = split_matrix(rest.reshape(before[0] * before[1], m * n * r), s)
        return left_As, right_sK.view(s, m, n, r).permute(2, 3, 0, 1)[None, None]

    @staticmethod
    def _split_blocks(
        rest: Tensor, before: tuple[int, int], here: tuple[int, int], ranks: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return what is left of the tensor, (A, B, J, s), and the core (J, L, n, r, s, m), with B = m L, one split for
        each (B, J).
        """
        (m, n), (s, r), (A, J) = here, ranks, before
        x_BJAK = rest.reshape(A, -1, J, n * r).permute(1, 2, 0, 3)
        left_BJAs, right_BJsK = split_matrix(x_BJAK, s)
        core = right_BJsK.reshape(m, -1, J, s, n, r).permute(2, 1, 4, 5, 3, 0)
        return left_BJAs.permute(2, 0, 1, 3), core

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = CURVE_POINTS
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at about `steps` ranks, cheapest first.

        The share of the error is that of the projection in the Frobenius norm.
        """
        config = cls.resolve(config, *weight_OI.shape)
        square, norm = Metric().squared_norm(weight_OI), metric.squared_norm(weight_OI)
        curve = []
        for rank in curve_ranks(cls.full_rank(config, *weight_OI.shape), min(steps, CURVE_POINTS)):
            option = replace(config, rank=rank)
            gap_OI = weight_OI - cls.project(weight_OI, option).dense().detach()
            curve.append((option, Metric().squared_norm(gap_OI) / (square or 1.0) * norm))
        return curve

    @torch.no_grad()
    def sweep(self, weight_OI: Tensor, metric: Metric) -> float | None:
        """Run one sweep in the metric, in place: each core in turn by conjugate gradients, with the others fixed.

        Returns the squared error that is left, or None if `project` is already exact or optimal.
        """
        optimal = self.config.cores == 2 and metric.c_II is None and metric.g_OO is None
        if optimal or self.config.rank >= self.full_rank(self.config, *weight_OI.shape):
            return None
        target_OI = metric.apply(weight_OI)
        cores = {name: core.data for name, core in self._cores().items()}
        for name, core in cores.items():

            def matrix(x: Tensor, name: str = name) -> Tensor:
                return self._matrix({**cores, name: x})

            def adjoint(matrix_OI: Tensor, core: Tensor = core, matrix: Any = matrix) -> Tensor:
                with torch.enable_grad():
                    x = core.detach().requires_grad_(True)
                    (gradient,) = torch.autograd.grad((matrix(x) * matrix_OI).sum(), x)
                return gradient

            def normal(x: Tensor, adjoint: Any = adjoint, matrix: Any = matrix) -> Tensor:
                return adjoint(metric.apply(matrix(x)))  # type: ignore[no-any-return]

            steps = 1 if core.is_meta else STEPS  # on the meta device one step is counted for all
            with repeated(STEPS / steps):
                core.copy_(conjugate_gradient(normal, adjoint(target_OI), core.clone(), steps))
        return metric.squared_norm(weight_OI - self.dense())

    # -- product -------------------------------------------------------------------------------------------
    def product(self, x: Tensor) -> Tensor:
        """Return B x (..., O) without the bias, for x (..., I).

        Multiplies by the dense matrix if x has so many rows that this costs less, which happens at ranks where the
        cores need more multiplications than the dense matrix. An exported program always multiplies by the cores.
        """
        gain = self.macs() - self.out_features * self.in_features
        if not is_exporting() and x.numel() // self.in_features * gain > self._dense_macs():
            return F.linear(x, self.dense())
        return self._multiply(self._cores(), x)

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        return self._matrix(self._cores())

    def _matrix(self, cores: dict[str, Tensor]) -> Tensor:
        """Return the dense matrix (O, I) of these cores, multiplied from the first to the last."""
        rows = 1 if self.shared else math.prod(self.factors(self.config, self.out_features, self.in_features)[0])
        product = self.weight.new_ones(
            (1, rows, 1, 1)
        )  # (i_1 .. i_t, i_(t+1) .. i_c, j_1 .. j_t, a_t); a tensor train: one i after i_t
        for name in self.core_names():
            core = cores[name]
            (A, _, J, s), (_, L, n, r, _, m) = product.shape, core.shape
            if self.shared:
                product = torch.einsum("AJs,nrsm->AmJnr", product.flatten(0, 1), core.flatten(0, 2))
            else:
                product = torch.einsum("AmLJs,JLnrsm->AmLJnr", product.reshape(A, m, L, J, s), core)
            product = product.reshape(A * m, L, J * n, r)
        dense_OI, shape = product.flatten(2).flatten(0, 1), (self.out_features, self.in_features)
        return dense_OI if dense_OI.shape == shape else dense_OI[: shape[0], : shape[1]]

    def _dense_macs(self) -> int:
        """Return the multiply-accumulates of `dense`."""
        m, n = self.factors(self.config, self.out_features, self.in_features)
        r = self.bond_ranks(self.config, self.out_features, self.in_features, self.config.rank)
        steps = range(1, self.config.cores + 1)
        return sum(math.prod(m[:t] if self.shared else m) * math.prod(n[:t]) * r[t] * r[t - 1] for t in steps)

    def _cores(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.core_names()}

    def _multiply(self, cores: dict[str, Tensor], x: Tensor) -> Tensor:
        m, n = self.factors(self.config, self.out_features, self.in_features)
        if math.prod(n) != self.in_features:
            x = F.pad(x, (0, math.prod(n) - self.in_features))
        z = x.reshape(-1, math.prod(n), 1, 1)  # (N, j_1 .. j_t, i_(t+1) .. i_c, a_t)
        for t in range(self.config.cores, 0, -1):
            core = cores["weight" if t == 1 else f"core{t}"]
            J, L = math.prod(n[: t - 1]), math.prod(m[t:])
            z = z.reshape(-1, J, n[t - 1], L, core.shape[3])
            if self.shared:
                z = torch.einsum("Njnlr,nrsm->Njmls", z, core.flatten(0, 2))
            else:
                z = torch.einsum("Njnlr,jlnrsm->Njmls", z, core)
            z = z.reshape(-1, J, m[t - 1] * L, core.shape[4])
        return z.reshape(*x.shape[:-1], math.prod(m))[..., : self.out_features]

    def macs(self) -> int:
        """Return multiply-accumulates per token, the same for both kinds of train."""
        m, n = self.factors(self.config, self.out_features, self.in_features)
        r = self.bond_ranks(self.config, self.out_features, self.in_features, self.config.rank)
        return sum(math.prod(n[:t]) * math.prod(m[t - 1 :]) * r[t] * r[t - 1] for t in range(1, self.config.cores + 1))

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each core: n_t r_t numbers in, m_t r_(t-1) out (Qiu et al. 2024, section 3.2).

        A core of a tensor train has the fan-out m_t max(r_t, r_(t-1)): its r_t terms share the scale of their sum, as
        in `kronecker`.
        """
        fans = {}
        for name in self.core_names():
            _, _, n, r, s, m = getattr(self, name).shape
            fans[name] = MuP(n * r, m * (max(r, s) if self.shared else s))
        return fans


@STRUCTURES.register(BlockTensorTrain)
class BlockTensorTrainLinear(TensorTrainLinear):
    """Block tensor-train linear layer.

    Cores as in TensorTrainLinear, with J = n_1 .. n_(t-1) and L = m_(t+1) .. m_c.
    """

    shared = False


def split_matrix(x_AK: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best left (..., A, rank) and right (..., rank, K) in the Frobenius norm, right with orthonormal
    rows.
    """
    A, K = x_AK.shape[-2:]
    if rank >= K:
        return x_AK, torch.eye(K, dtype=x_AK.dtype, device=x_AK.device).expand(*x_AK.shape[:-2], K, K)
    right_Kr = orthonormalize(x_AK.mT) if rank >= A else leading_directions(x_AK.mT, rank)
    return x_AK @ right_Kr, right_Kr.mT


def balance_cores(cores: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rescale the cores to about equal root mean squares, by powers of two, so that no precision is lost.

    Cores of zeros count as 1.
    """
    norms = [torch.linalg.vector_norm(core, dtype=torch.float64) / core.numel() ** 0.5 for core in cores.values()]
    logs = torch.stack([torch.where(norm > 0, norm, 1.0).log2() for norm in norms])
    shifts = (logs.mean() - logs).round()
    shifts[-1] = -shifts[:-1].sum()
    return {name: core * shift.exp2().to(core.dtype) for (name, core), shift in zip(cores.items(), shifts)}
