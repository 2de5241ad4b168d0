"""MLR attention from pretrained softmax attention, without training: which score dims a pair needs at which distance.

    loss rise of leaving dims out  ~  1/2 sum_{t,h} (sum_s g[t,s] delta[t,s])^2          g = d loss / d score
    delta[t,s] = - the part of the score that the pair (t, s) loses

Dims stay together in units: the two of a rotary pair, else one. Distances are cut into bins by a ladder of extents, and
a unit of extent e is left out of all bins beyond e. So a layer's rise is a quadratic form in unit x bin, one for each
kv group, gathered once (`ScoreSensitivity`); every unit then takes the extent that lowers rise + price * cache, the others
given, and the price is the one that meets the budget over all layers (`allocate_ranks`).

g is the gradient of the loss at labels drawn from the model itself (the Fisher form: Martens 2014, "New Insights and
Perspectives on the Natural Gradient Method"); it follows from the gradient at the attention's output. A random gradient
in its place weighs by the output error of the layer alone. Rotations that commute with RoPE change no product of a
pair, so the order of pairs is all there is to choose; without RoPE, `balanced_basis` comes first. What far pairs lose
on average is taken off near ones by one number for each head and level, least squares on the same derivatives.
B batch, T tokens, H = G J heads, K key dim, U units, E bins; X = U E.
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

UNLIMITED = 2**31


def candidate_extents(length: int) -> tuple[int, ...]:
    """Extents to choose from: nowhere, powers of two from 8 to below the calibration windows' length, everywhere."""
    return (0, *(2**i for i in range(3, 31) if 2**i < length), UNLIMITED)


class ScoreSensitivity:
    """The quadratic form of one layer, gathered over calibration text: `gram_GXX` per token, X = unit x bin."""

    def __init__(self, shape: AttentionShape, extents: Sequence[int], device: torch.device | str = "cpu"):
        self.shape, self.extents, self.tokens = shape, tuple(extents), 0
        together = rotary_units(shape)
        self.member_KU = torch.zeros(shape.key, len(together), device=device)
        for unit, dims in enumerate(together):
            self.member_KU[dims, unit] = 1.0
        size = len(together) * (len(self.extents) - 1)
        self.sum_GXX = torch.zeros(shape.groups, size, size, dtype=torch.float64, device=device)
        # of g summed over each bin, with the cells and with itself
        self.cross_HEX = torch.zeros(shape.heads, len(self.extents) - 1, size, dtype=torch.float64, device=device)
        self.bins_HEE = torch.zeros(
            *self.cross_HEX.shape[:2], len(self.extents) - 1, dtype=torch.float64, device=device
        )

    @property
    def gram_GXX(self) -> Tensor:
        return self.sum_GXX / max(1, self.tokens)

    @torch.no_grad()
    def add(self, inputs: MixerInputs, grad_BHTV: Tensor, queries: int = 256) -> None:
        """Whole sequences: q, k after RoPE (and norm), v, padding, and the gradient of the summed loss at the
        attention's output, before the output projection."""
        q = group_heads(upcast(inputs.q_BHTK), self.shape.groups)
        k, v, grad = upcast(inputs.k_BGTK), upcast(inputs.v_BGTV), group_heads(upcast(grad_BHTV), self.shape.groups)
        length, valid_BT = q.shape[3], inputs.valid_BT
        ones_1T = torch.ones(1, length, dtype=torch.bool, device=q.device)
        position_BT = positions_from_mask(ones_1T if valid_BT is None else valid_BT)
        for start in range(0, length, queries):
            span = slice(start, start + queries)
            t, s = position_BT[:, span, None], position_BT[:, None]
            allowed = self._allowed(t, s, valid_BT)
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

    def _allowed(self, t: Tensor, s: Tensor, valid_BT: Tensor | None) -> Tensor:
        allowed = within_extent("sliding", self.shape.window, t, s)
        allowed = allowed & (s <= t) if self.shape.causal else allowed
        allowed = allowed if valid_BT is None else allowed & valid_BT[:, None]
        return allowed[:, None, None]

    def _score_gradient(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, allowed: Tensor) -> Tensor:
        """d loss / d (scaling q . k), (B, G, J, C, S), from the gradient at the output."""
        raw = self.shape.scaling * q @ k[:, :, None].mT
        slope: Tensor | float = 1.0
        if self.shape.softcap is not None:
            bent = torch.tanh(raw / self.shape.softcap)
            raw, slope = self.shape.softcap * bent, 1 - bent.square()
        weights = raw.masked_fill(~allowed, torch.finfo(raw.dtype).min).softmax(-1)
        pull = grad @ v[:, :, None].mT
        return weights * (pull - (weights * pull).sum(-1, keepdim=True)) * slope

    def _omitted_scores(self, q: Tensor, k: Tensor, g: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """sum_s g delta of every unit and bin, (B, G, J, C, U, E), but for its sign; sum_s g of every bin."""
        distance, parts, sums = distance.abs()[:, None, None], [], []
        for low, high in zip(self.extents, self.extents[1:]):
            inside = g * ((distance >= low) & (distance < high))
            parts.append(((inside @ k[:, :, None]) * q * self.shape.scaling) @ self.member_KU)
            sums.append(inside.sum(-1))
        return torch.stack(parts, -1), torch.stack(sums, -1)

    def near_biases(self, place_GU: Tensor, extents: Sequence[int]) -> tuple[Tensor, float]:
        """near_HL for levels of these extents where units stand at these places, and the expected rise after them:
        min_b sum_t (u - sum_l b_l w_l)^2 with u what is left out, w_l the sum of g inside extent l."""
        heads, bins = self.shape.heads // self.shape.groups, len(self.extents) - 1
        out_HX = _omitted_bins(place_GU, bins).flatten(1).double().repeat_interleave(heads, 0)
        inside = [[float(high <= extent) for high in self.extents[1:]] for extent in extents]
        inside_LE = torch.tensor(inside, dtype=torch.float64, device=out_HX.device).view(len(extents), bins)
        wanted_HL = torch.einsum("le,hex,hx->hl", inside_LE, self.cross_HEX, out_HX)
        form_HLL = torch.einsum("le,hef,mf->hlm", inside_LE, self.bins_HEE, inside_LE)
        ridge_HL = 1e-3 * form_HLL.diagonal(dim1=1, dim2=2) + 1e-30
        near_HL = linalg.solve(form_HLL + torch.diag_embed(ridge_HL), wanted_HL.unsqueeze(-1)).squeeze(-1)
        before = loss_rise(self.gram_GXX, place_GU, bins).sum()
        gain = (near_HL * wanted_HL).sum() - 0.5 * torch.einsum("hl,hlm,hm->", near_HL, form_HLL, near_HL)
        return (near_HL / self.shape.scaling).float(), float(before - gain / max(1, self.tokens))


# -- choosing --------------------------------------------------------------------------------------------------------
def cache_prices(extents: Sequence[int], context: int, window: int | None = None) -> Tensor:
    """price_E: keys that a dim of each extent keeps per token of a sequence of `context`, nowhere to everywhere."""
    most = context if window is None else min(context, window - 1)
    return torch.tensor([min(max(extent - 1, 0), most) / context for extent in extents[:-1]] + [most / context])


def choose_extents(gram_NXX: Tensor, size_U: Tensor, price_NE: Tensor, weight: float, sweeps: int = 8) -> Tensor:
    """Of N separate forms: each unit's place on the ladder, (N, U), at a low rise + weight * cache: every unit in turn
    takes its best place given the others, from all kept and from none kept; the better of the two. size_U: dims of a
    unit; price_NE: of a dim at every place."""
    count, total, bins = len(gram_NXX), len(size_U), price_NE.shape[1] - 1
    onto_UNXE = gram_NXX.unflatten(2, (total, bins)).permute(2, 0, 1, 3).contiguous()
    block_UNEE = torch.stack([onto_UNXE[unit, :, unit * bins : (unit + 1) * bins] for unit in range(total)])
    out_PE = _omitted_bins(torch.arange(bins + 1, device=gram_NXX.device), bins).to(gram_NXX)
    cache_UNP = weight * size_U.to(gram_NXX)[:, None, None] * price_NE.to(gram_NXX)
    own_UNP = 0.5 * torch.einsum("pe,unef,pf->unp", out_PE, block_UNEE, out_PE) + cache_UNP
    found: list[tuple[Tensor, Tensor]] = []
    for start in (bins, 0):
        place_NU = torch.full((count, total), start, device=gram_NXX.device)
        pull_NX = (gram_NXX @ out_PE[place_NU].flatten(1).unsqueeze(-1)).squeeze(-1)
        for _ in range(sweeps):
            before = place_NU.clone()
            for unit in range(total):
                old_NE, cells = out_PE[place_NU[:, unit]], slice(unit * bins, (unit + 1) * bins)
                others_NE = pull_NX[:, cells] - (block_UNEE[unit] @ old_NE.unsqueeze(-1)).squeeze(-1)
                place_NU[:, unit] = (others_NE @ out_PE.mT + own_UNP[unit]).argmin(1)
                change_NE = out_PE[place_NU[:, unit]] - old_NE
                pull_NX += (onto_UNXE[unit] @ change_NE.unsqueeze(-1)).squeeze(-1)
            if torch.equal(before, place_NU):
                break
        cache_N = cache_UNP.gather(2, place_NU.mT.unsqueeze(-1)).sum((0, 2))
        found.append((loss_rise(gram_NXX, place_NU, bins) + cache_N, place_NU))
    (kept_N, kept_NU), (none_N, none_NU) = found
    return torch.where((none_N < kept_N)[:, None], none_NU, kept_NU)


def _omitted_bins(place: Tensor, bins: int) -> Tensor:
    """Which bins a unit at that place leaves out, (.., E)."""
    return torch.arange(bins, device=place.device) >= place.unsqueeze(-1)


def loss_rise(gram_NXX: Tensor, place_NU: Tensor, bins: int) -> Tensor:
    """Expected rise of the loss in nats a token of each form."""
    out_NX = _omitted_bins(place_NU, bins).flatten(1).to(gram_NXX)
    return 0.5 * torch.einsum("nx,nxy,ny->n", out_NX, gram_NXX, out_NX)


@dataclass(frozen=True)
class ScoreDimAllocation:
    """One layer: its config, what its mixer's `order` and `near` start as, and the expected rise of the loss in nats
    a token."""

    config: MLR
    order_GK: Tensor
    near_HL: Tensor
    rise: float

    @torch.no_grad()
    def apply_to(self, mixer: MLRAttention) -> None:
        """A mixer of this config, in place."""
        mixer.order.copy_(self.order_GK)
        if mixer.near is not None:
            mixer.near.copy_(self.near_HL)


def allocate_ranks(sensitivities: Sequence[ScoreSensitivity], budget: float, context: int) -> list[ScoreDimAllocation]:
    """For layers of one shape (windows may differ): the arrangements that keep at most `budget` of their keys in a
    sequence of `context` tokens, at the least expected rise. Groups of a layer share ranks, each has its own dims."""
    if not 0 < budget <= 1:
        raise SurgeryError(f"cache {budget} must be a share of the full key cache above 0 and up to 1, for example 0.5")
    shape, extents = sensitivities[0].shape, sensitivities[0].extents
    together, bins = rotary_units(shape), len(extents) - 1
    size_U = torch.tensor([float(len(dims)) for dims in together])
    price_LE = torch.stack([cache_prices(extents, context, sensitivity.shape.window) for sensitivity in sensitivities])
    gram_LGXX = torch.stack([sensitivity.gram_GXX.float() for sensitivity in sensitivities])
    price_NE = price_LE.repeat_interleave(shape.groups, 0)
    alone_NU = _bisect_price(
        lambda w: choose_extents(gram_LGXX.flatten(0, 1), size_U, price_NE, w), size_U, price_NE, budget
    )
    ranked_LGU = _rank_units(alone_NU.unflatten(0, (-1, shape.groups)), gram_LGXX, size_U)
    form_LXX, size_U = _sum_groups(gram_LGXX, ranked_LGU, bins), size_U[ranked_LGU[0, 0].cpu()]
    place_LU = _bisect_price(lambda w: choose_extents(form_LXX, size_U, price_LE, w), size_U, price_LE, budget)
    return [build_allocation(*layer) for layer in zip(sensitivities, place_LU, ranked_LGU)]


def _bisect_price(settled: Callable[[float], Tensor], size_U: Tensor, price_NE: Tensor, budget: float) -> Tensor:
    """The places at the lowest weight of cache that keeps within the budget, by bisection of its logarithm."""
    low, high = -50.0, 30.0
    best_NU = settled(2.0**high)
    most = budget * float((price_NE[:, -1:] * size_U).sum()) * (1 + 1e-6)
    for _ in range(20):
        middle = (low + high) / 2
        place_NU = settled(2.0**middle)
        if float((price_NE.gather(1, place_NU.cpu()) * size_U).sum()) <= most:
            best_NU, high = place_NU, middle
        else:
            low = middle
    return best_NU


def _rank_units(place_LGU: Tensor, gram_LGXX: Tensor, size_U: Tensor) -> Tensor:
    """Units of every group, larger ones first, then those that reach further, then those dearer to leave out."""
    bins = gram_LGXX.shape[-1] // place_LGU.shape[-1]
    blocks = gram_LGXX.unflatten(3, (-1, bins)).unflatten(2, (-1, bins))
    dear_LGU = blocks.diagonal(dim1=2, dim2=4).sum((2, 3))
    order = dear_LGU.argsort(dim=-1, descending=True, stable=True)
    for key in (place_LGU, size_U.to(place_LGU.device).expand(place_LGU.shape)):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    return order


def _sum_groups(gram_LGXX: Tensor, ranked_LGU: Tensor, bins: int) -> Tensor:
    """The forms of a layer's groups added up, unit by rank, (L, X, X)."""
    total = 0.0 * gram_LGXX[:, 0]
    for group in range(gram_LGXX.shape[1]):
        index_LX = (ranked_LGU[:, group, :, None] * bins + torch.arange(bins, device=ranked_LGU.device)).flatten(1)
        rows = gram_LGXX[:, group].gather(1, index_LX[:, :, None].expand(-1, -1, gram_LGXX.shape[-1]))
        total += rows.gather(2, index_LX[:, None].expand(-1, index_LX.shape[1], -1))
    return total


def build_allocation(sensitivity: ScoreSensitivity, place_U: Tensor, ranked_GU: Tensor) -> ScoreDimAllocation:
    """A layer from the place of every rank of unit: those that reach furthest come first."""
    together = rotary_units(sensitivity.shape)
    by_reach = place_U.argsort(dim=0, descending=True, stable=True).tolist()
    order = [[dim for slot in by_reach for dim in together[units_of[slot]]] for units_of in ranked_GU.tolist()]
    dims: dict[int, int] = {UNLIMITED: 0}
    for slot in by_reach:
        extent = sensitivity.extents[int(place_U[slot])]
        dims[extent] = dims.get(extent, 0) + len(together[ranked_GU[0][slot]])
    dims.pop(0, None)
    if list(dims.values()) == [0]:  # worth nothing anywhere: one unit in the shortest reach, for a config needs one
        dims[sensitivity.extents[1]] = len(together[ranked_GU[0][by_reach[0]]])
    reach = tuple(extent for extent in dims if extent != UNLIMITED)
    place_GU = torch.zeros_like(ranked_GU).scatter(1, ranked_GU, place_U.expand_as(ranked_GU))
    near_HL, loss = sensitivity.near_biases(place_GU, reach)
    return ScoreDimAllocation(MLR(tuple(dims.values()), reach, "sliding"), torch.tensor(order), near_HL, loss)


# -- without RoPE ----------------------------------------------------------------------------------------------------
def balanced_basis(query_GKK: Tensor, key_GKK: Tensor) -> tuple[Tensor, Tensor]:
    """A, B with q A . k B = q . k in which dims are worth most first and q and k share the size of each: from the
    second moments E[q q^T], E[k k^T] of each group, with Q^(1/2) K^(1/2) = U S V^T, the first n dims leave the least
    E (q . k)^2 behind. Fold them into the projections: W_Q A, W_K B. Not through a norm or RoPE."""
    q_root, q_inverse = symmetric_roots(query_GKK.double())
    k_root, k_inverse = symmetric_roots(key_GKK.double())
    u, s, vh = linalg.svd(q_root @ k_root)
    scale = s.clamp_min(1e-12 * s[..., :1]).sqrt().unsqueeze(-2)
    return q_inverse @ u * scale, k_inverse @ vh.mT * scale
