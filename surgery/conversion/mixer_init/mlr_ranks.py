"""Ranks of MLR attention from pretrained softmax attention: which score dimensions a pair of tokens needs at which
distance.

    rise of the loss  ~  1/2 sum_{t,h} (sum_s g[t,s] delta[t,s])^2          g = d loss / d score
    delta[t,s]: minus the part of the score that is omitted for the pair (t, s)

Dimensions are omitted in units: the two of a rotary pair, or a single one. Distances are cut into bins at the candidate
extents, and a unit of extent e is omitted in all bins beyond e. The rise of a layer is thus a quadratic form in the
cells (unit x bin), one for each key/value group, measured in one pass (`ScoreSensitivity`). Each unit then takes the
extent with the lowest rise + price * cache, given those of the others, and one price for all layers meets the budget
(`allocate_ranks`).

g is computed from the gradient of the loss at the attention's output, for labels drawn from the model itself: the
Fisher information (Martens 2014, "New Insights and Perspectives on the Natural Gradient Method"). It is averaged over
scores scaled from 0 to 1 (integrated gradients, Sundararajan et al. 2017, "Axiomatic Attribution for Deep Networks",
eq. 1): then sum_s g delta is the exact change of the output, along its gradient, where all scores are omitted. The
derivative at the full scores alone is almost 0 where one key takes all the weight, however much these scores matter.

Rotations that commute with RoPE change no product q . k of a pair, so only the order of the rotary pairs is chosen. Of
the dimensions that RoPE does not rotate, `balanced_basis` first chooses a basis. One bias of the near scores for each
head and level, by least squares on the same derivatives, compensates what distant pairs lose on average.

Shape letters: B batch, T tokens, C query tokens of a chunk, S key tokens, H = G J heads, G key/value groups, K key
dimension, F dimensions that RoPE does not rotate. U units, E bins, X = U E cells, P = E + 1 candidate extents, N
quadratic forms, L layers or (in near biases) levels. An extent is given by its index among the candidates, 0 to E. A
unit of index p is kept in the first p bins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape, MixerInputs
from surgery.mixers.common.kv_layout import positions_from_mask
from surgery.mixers.common.softmax import group_heads, upcast, within_extent
from surgery.mixers.mlr import MLR, MLRAttention, rotary_units
from surgery.structures import linalg
from surgery.structures.metric import symmetric_roots

# Shares of the scores and their weights: Gauss-Legendre quadrature over [0, 1].
PATH_POINTS = ((0.5 - 0.15**0.5, 5 / 18), (0.5, 4 / 9), (0.5 + 0.15**0.5, 5 / 18))
UNLIMITED = 2**31  # the extent of a unit that is kept at all distances
MAX_SWEEPS = 8  # of coordinate descent over the units
BISECTIONS, LOG2_PRICES = 20, (-50.0, 30.0)  # steps and range of the search for the price


def candidate_extents(length: int) -> tuple[int, ...]:
    """Return the candidate extents in tokens: 0, powers of two from 8 to below `length`, UNLIMITED.

    length: tokens of a calibration sample.
    """
    return (0, *(2**i for i in range(3, 31) if 2**i < length), UNLIMITED)


class ScoreSensitivity:
    """The quadratic forms of one layer's loss rise, accumulated over calibration samples.

    shape, extents: of the attention, and the candidate extents in tokens. sum_GXX: sum of the forms over `tokens`
    tokens. member_KU: 1 where a dimension belongs to a unit. cross_HEX, bins_HEE: sums of products of g, summed over
    each bin, with the cells and with itself, for the biases of near scores.
    """

    def __init__(self, shape: AttentionShape, extents: Sequence[int], device: torch.device | str = "cpu"):
        self.shape, self.extents, self.tokens = shape, tuple(extents), 0
        units, bins = rotary_units(shape), len(self.extents) - 1
        self.member_KU = torch.zeros(shape.key, len(units), device=device)
        for unit, dims in enumerate(units):
            self.member_KU[dims, unit] = 1.0
        size = len(units) * bins
        self.sum_GXX = torch.zeros(shape.groups, size, size, dtype=torch.float64, device=device)
        self.cross_HEX = torch.zeros(shape.heads, bins, size, dtype=torch.float64, device=device)
        self.bins_HEE = torch.zeros(shape.heads, bins, bins, dtype=torch.float64, device=device)

    @property
    def gram_GXX(self) -> Tensor:
        """The mean form per token, (G, X, X)."""
        return self.sum_GXX / max(1, self.tokens)

    @torch.no_grad()
    def add(self, inputs: MixerInputs, grad_BHTV: Tensor, queries: int = 256) -> None:
        """Accumulate the forms of whole sequences.

        inputs: q, k after RoPE and norms, v, padding. grad_BHTV: gradient of the summed loss at the attention's output,
        before the output projection. queries: query tokens processed at a time.
        """
        q = group_heads(upcast(inputs.q_BHTK), self.shape.groups)
        k, v, grad = upcast(inputs.k_BGTK), upcast(inputs.v_BGTV), group_heads(upcast(grad_BHTV), self.shape.groups)
        length, valid_BT = q.shape[3], inputs.valid_BT
        ones_1T = torch.ones(1, length, dtype=torch.bool, device=q.device)
        position_BT = positions_from_mask(ones_1T if valid_BT is None else valid_BT)
        for start in range(0, length, queries):
            span = slice(start, start + queries)
            t, s = position_BT[:, span, None], position_BT[:, None]
            allowed = self._visible_pairs(t, s, valid_BT)
            g = self._score_gradient(q[:, :, :, span], k, v, grad[:, :, :, span], allowed)
            if valid_BT is not None:
                g = g * valid_BT[:, None, None, span, None]
            u, bins = self._omitted_scores(q[:, :, :, span], k, g, t - s)
            rows_GNX = u.flatten(-2).transpose(0, 1).flatten(1, 3)
            self.sum_GXX += (rows_GNX.mT @ rows_GNX).double()
            u_HNX, bins_HNE = (x.flatten(1, 2).transpose(0, 1).flatten(1, 2) for x in (u.flatten(-2), bins))
            self.cross_HEX += (bins_HNE.mT @ u_HNX).double()
            self.bins_HEE += (bins_HNE.mT @ bins_HNE).double()
        self.tokens += length * len(q) if valid_BT is None else int(valid_BT.sum())

    def _visible_pairs(self, t: Tensor, s: Tensor, valid_BT: Tensor | None) -> Tensor:
        """Return which pairs of query and key positions the attention sees, (B, 1, 1, C, S)."""
        allowed = within_extent("sliding", self.shape.window, t, s)
        allowed = allowed & (s <= t) if self.shape.causal else allowed
        allowed = allowed if valid_BT is None else allowed & valid_BT[:, None]
        return allowed[:, None, None]

    def _score_gradient(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, allowed: Tensor) -> Tensor:
        """Return g = d loss / d (scaling q . k), (B, G, J, C, S), from the gradient at the attention's output, averaged
        over shares of the scores from 0 to 1 (PATH_POINTS).
        """
        whole, grad_weights = self.shape.scaling * q @ k[:, :, None].mT, grad @ v[:, :, None].mT
        total = torch.zeros_like(whole)
        for share, quadrature_weight in PATH_POINTS:
            raw = share * whole
            slope: Tensor | float = 1.0
            if self.shape.softcap is not None:
                capped = torch.tanh(raw / self.shape.softcap)
                raw, slope = self.shape.softcap * capped, 1 - capped.square()
            weights = raw.masked_fill(~allowed, torch.finfo(raw.dtype).min).softmax(-1)
            centered = grad_weights - (weights * grad_weights).sum(-1, keepdim=True)
            total += quadrature_weight * weights * centered * slope
        return total

    def _omitted_scores(self, q: Tensor, k: Tensor, g: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Return (-sum_s g delta of each cell, (B, G, J, C, U, E); sum_s g over each bin, (B, G, J, C, E))."""
        distance, cells, sums = distance.abs()[:, None, None], [], []
        for low, high in zip(self.extents, self.extents[1:]):
            g_in_bin = g * ((distance >= low) & (distance < high))
            cells.append(((g_in_bin @ k[:, :, None]) * q * self.shape.scaling) @ self.member_KU)
            sums.append(g_in_bin.sum(-1))
        return torch.stack(cells, -1), torch.stack(sums, -1)

    def near_biases(self, index_GU: Tensor, extents: Sequence[int]) -> tuple[Tensor, float]:
        """Return (the biases of near scores (H, L), the expected rise of the loss with them in nats per token).

        index_GU: extent index of each unit. extents: of the mixer's levels 2, 3, .. in tokens. The biases b minimize
        sum_t (u - sum_l b_l w_l)^2, where u is the omitted sum_s g delta and w_l the sum of g inside extent l.
        """
        heads, bins = self.shape.heads // self.shape.groups, len(self.extents) - 1
        out_HX = _omitted_bins(index_GU, bins).flatten(1).double().repeat_interleave(heads, 0)
        inside = [[float(high <= extent) for high in self.extents[1:]] for extent in extents]
        inside_LE = torch.tensor(inside, dtype=torch.float64, device=out_HX.device).view(len(extents), bins)
        target_HL = torch.einsum("le,hex,hx->hl", inside_LE, self.cross_HEX, out_HX)
        form_HLL = torch.einsum("le,hef,mf->hlm", inside_LE, self.bins_HEE, inside_LE)
        energy_HL = form_HLL.diagonal(dim1=1, dim2=2)  # squares of gradients, in float64
        ridge_HL = torch.where(energy_HL > 0, 1e-3 * energy_HL, 1.0)
        near_HL = linalg.solve(form_HLL + torch.diag_embed(ridge_HL), target_HL.unsqueeze(-1)).squeeze(-1)
        before = loss_rise(self.gram_GXX, index_GU, bins).sum()
        gain = (near_HL * target_HL).sum() - 0.5 * torch.einsum("hl,hlm,hm->", near_HL, form_HLL, near_HL)
        return (near_HL / self.shape.scaling).float(), float(before - gain / max(1, self.tokens))


# -- extents of units for a given price ------------------------------------------------------------
def cache_costs(extents: Sequence[int], context: int, window: int | None = None) -> Tensor:
    """Return the cost of each candidate extent, (P,): cached keys per token of a sequence of `context` tokens.

    window: the attention's own sliding window, which bounds its cache.
    """
    most = context if window is None else min(context, window - 1)
    return torch.tensor([min(max(extent - 1, 0), most) / context for extent in extents[:-1]] + [most / context])


def choose_extents(gram_NXX: Tensor, size_U: Tensor, cost_NP: Tensor, price: float) -> Tensor:
    """Return the extent index of each unit, (N, U), with a low loss rise + price * cache for each of N forms.

    Coordinate descent: each unit in turn takes its best extent given those of the others, starting once from all units
    kept everywhere and once from none kept; the better result is returned. size_U: dimensions of each unit. cost_NP:
    cost of one dimension at each candidate extent.
    """
    count, units, bins = len(gram_NXX), len(size_U), cost_NP.shape[1] - 1
    onto_UNXE = gram_NXX.unflatten(2, (units, bins)).permute(2, 0, 1, 3).contiguous()
    block_UNEE = torch.stack([onto_UNXE[unit, :, unit * bins : (unit + 1) * bins] for unit in range(units)])
    out_PE = _omitted_bins(torch.arange(bins + 1, device=gram_NXX.device), bins).to(gram_NXX)
    cache_UNP = price * size_U.to(gram_NXX)[:, None, None] * cost_NP.to(gram_NXX)
    own_UNP = 0.5 * torch.einsum("pe,unef,pf->unp", out_PE, block_UNEE, out_PE) + cache_UNP
    results: list[tuple[Tensor, Tensor]] = []
    for start in (bins, 0):
        index_NU = torch.full((count, units), start, device=gram_NXX.device)
        # Product of the form with the omitted cells, updated after every change of a unit.
        product_NX = (gram_NXX @ out_PE[index_NU].flatten(1).unsqueeze(-1)).squeeze(-1)
        for _ in range(MAX_SWEEPS):
            before = index_NU.clone()
            for unit in range(units):
                old_NE, cells = out_PE[index_NU[:, unit]], slice(unit * bins, (unit + 1) * bins)
                others_NE = product_NX[:, cells] - (block_UNEE[unit] @ old_NE.unsqueeze(-1)).squeeze(-1)
                index_NU[:, unit] = (others_NE @ out_PE.mT + own_UNP[unit]).argmin(1)
                change_NE = out_PE[index_NU[:, unit]] - old_NE
                product_NX += (onto_UNXE[unit] @ change_NE.unsqueeze(-1)).squeeze(-1)
            if torch.equal(before, index_NU):
                break
        cache_N = cache_UNP.gather(2, index_NU.mT.unsqueeze(-1)).sum((0, 2))
        results.append((loss_rise(gram_NXX, index_NU, bins) + cache_N, index_NU))
    (from_all_N, from_all_NU), (from_none_N, from_none_NU) = results
    return torch.where((from_none_N < from_all_N)[:, None], from_none_NU, from_all_NU)


def _omitted_bins(index: Tensor, bins: int) -> Tensor:
    """Return which bins a unit of that extent index omits, (.., E)."""
    return torch.arange(bins, device=index.device) >= index.unsqueeze(-1)


def loss_rise(gram_NXX: Tensor, index_NU: Tensor, bins: int) -> Tensor:
    """Return the expected rise of the loss for each form, (N,), in nats per token. index_NU: extent index of each
    unit.
    """
    out_NX = _omitted_bins(index_NU, bins).flatten(1).to(gram_NXX)
    return 0.5 * torch.einsum("nx,nxy,ny->n", out_NX, gram_NXX, out_NX)


# -- the price that meets a budget -----------------------------------------------------------------
@dataclass(frozen=True)
class ScoreDimAllocation:
    """The result for one layer.

    config: of the mixer. order_GK, near_HL: initial values of its `order` and `near`. rise: expected rise of the loss
    in nats per token.
    """

    config: MLR
    order_GK: Tensor
    near_HL: Tensor
    rise: float

    @torch.no_grad()
    def apply_to(self, mixer: MLRAttention) -> None:
        """Set the order and the near biases of a mixer of this config."""
        mixer.order.copy_(self.order_GK)
        if mixer.near is not None:
            mixer.near.copy_(self.near_HL)


def allocate_ranks(sensitivities: Sequence[ScoreSensitivity], budget: float, context: int) -> list[ScoreDimAllocation]:
    """Allocate ranks and extents over layers of one shape (windows may differ), with a low expected rise of the loss.

    budget: fraction of the keys that all layers together may keep in a sequence of `context` tokens. The groups of a
    layer share ranks and extents, but each has its own order of dimensions: units are first ranked in every group
    alone, then the forms of the groups are summed rank by rank, and the ranks of the sum get extents. Raises
    SurgeryError if the budget is not in (0, 1].
    """
    if not 0 < budget <= 1:
        raise SurgeryError(f"cache {budget} must be a share of the full key cache above 0 and up to 1, for example 0.5")
    shape, extents = sensitivities[0].shape, sensitivities[0].extents
    bins = len(extents) - 1
    size_U = torch.tensor([float(len(dims)) for dims in rotary_units(shape)])
    cost_LP = torch.stack([cache_costs(extents, context, sensitivity.shape.window) for sensitivity in sensitivities])
    gram_LGXX = torch.stack([sensitivity.gram_GXX.float() for sensitivity in sensitivities])
    cost_NP = cost_LP.repeat_interleave(shape.groups, 0)
    alone_NU = _bisect_price(
        lambda price: choose_extents(gram_LGXX.flatten(0, 1), size_U, cost_NP, price), size_U, cost_NP, budget
    )
    ranked_LGU = _rank_units(alone_NU.unflatten(0, (-1, shape.groups)), gram_LGXX, size_U)
    form_LXX, size_U = _sum_groups(gram_LGXX, ranked_LGU, bins), size_U[ranked_LGU[0, 0].cpu()]
    index_LU = _bisect_price(lambda price: choose_extents(form_LXX, size_U, cost_LP, price), size_U, cost_LP, budget)
    return [build_allocation(*layer) for layer in zip(sensitivities, index_LU, ranked_LGU)]


def _bisect_price(choose: Callable[[float], Tensor], size_U: Tensor, cost_NP: Tensor, budget: float) -> Tensor:
    """Return the extent indices `choose(price)` at the lowest price that meets the budget, by bisection of
    log2(price).
    """
    low, high = LOG2_PRICES
    best_NU = choose(2.0**high)
    most = budget * float((cost_NP[:, -1:] * size_U).sum()) * (1 + 1e-6)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        index_NU = choose(2.0**middle)
        if float((cost_NP.gather(1, index_NU.cpu()) * size_U).sum()) <= most:
            best_NU, high = index_NU, middle
        else:
            low = middle
    return best_NU


def _rank_units(index_LGU: Tensor, gram_LGXX: Tensor, size_U: Tensor) -> Tensor:
    """Return the units of every group by rank, (L, G, U): larger units first, then longer extents, then higher
    importance.

    The importance of a unit is the sum over its block of the form: twice the rise if it alone is omitted at all
    distances.
    """
    bins = gram_LGXX.shape[-1] // index_LGU.shape[-1]
    blocks_LGUEUE: Tensor = gram_LGXX.unflatten(3, (-1, bins)).unflatten(2, (-1, bins))
    importance_LGU = blocks_LGUEUE.diagonal(dim1=2, dim2=4).sum((2, 3))
    order = importance_LGU.argsort(dim=-1, descending=True, stable=True)
    for key in (index_LGU, size_U.to(index_LGU.device).expand(index_LGU.shape)):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    return order


def _sum_groups(gram_LGXX: Tensor, ranked_LGU: Tensor, bins: int) -> Tensor:
    """Return the sum of the forms of each layer's groups, with units in the order of their ranks, (L, X, X)."""
    total = 0.0 * gram_LGXX[:, 0]
    for group in range(gram_LGXX.shape[1]):
        index_LX = (ranked_LGU[:, group, :, None] * bins + torch.arange(bins, device=ranked_LGU.device)).flatten(1)
        rows = gram_LGXX[:, group].gather(1, index_LX[:, :, None].expand(-1, -1, gram_LGXX.shape[-1]))
        total += rows.gather(2, index_LX[:, None].expand(-1, index_LX.shape[1], -1))
    return total


def build_allocation(sensitivity: ScoreSensitivity, index_U: Tensor, ranked_GU: Tensor) -> ScoreDimAllocation:
    """Return a layer's config, order and biases. index_U: extent index of each rank; ranked_GU: the unit of each
    rank.
    """
    units = rotary_units(sensitivity.shape)
    # Ranks of the longest extents come first, because level 1 of MLR is the unlimited one.
    ranks = index_U.argsort(dim=0, descending=True, stable=True).tolist()
    order = [[dim for rank in ranks for dim in units[unit_of_rank[rank]]] for unit_of_rank in ranked_GU.tolist()]
    dims: dict[int, int] = {UNLIMITED: 0}  # extent -> number of dimensions
    for rank in ranks:
        extent = sensitivity.extents[int(index_U[rank])]
        dims[extent] = dims.get(extent, 0) + len(units[ranked_GU[0][rank]])
    dims.pop(0, None)
    if list(dims.values()) == [
        0
    ]:  # nothing is kept anywhere: keep one unit at the shortest extent, since a config needs one
        dims[sensitivity.extents[1]] = len(units[ranked_GU[0][ranks[0]]])
    extents = tuple(extent for extent in dims if extent != UNLIMITED)
    index_GU = torch.zeros_like(ranked_GU).scatter(1, ranked_GU, index_U.expand_as(ranked_GU))
    near_HL, rise = sensitivity.near_biases(index_GU, extents)
    return ScoreDimAllocation(MLR(tuple(dims.values()), extents, "sliding"), torch.tensor(order), near_HL, rise)


# -- dimensions that RoPE does not rotate ----------------------------------------------------------------
def balanced_basis(query_GFF: Tensor, key_GFF: Tensor) -> tuple[Tensor, Tensor]:
    """Return bases A, B (G, F, F) with q A . k B = q . k, in which the most important dimensions come first.

    query_GFF, key_GFF: second moments Q = E[q q^T], K = E[k k^T] of each group. With Q^(1/2) K^(1/2) = U S V^T the
    first n dimensions have the least error E (q . k)^2 of all rank-n products, and q and k have equal second moments.
    The bases can be folded into the projections, W_Q A and W_K B, unless a norm or RoPE follows them.
    """
    q_root, q_inverse = symmetric_roots(query_GFF.double())
    k_root, k_inverse = symmetric_roots(key_GFF.double())
    u, s, vh = linalg.svd(q_root @ k_root)
    scale = s.clamp_min(1e-12 * s[..., :1]).sqrt().unsqueeze(-2)
    return q_inverse @ u * scale, k_inverse @ vh.mT * scale
