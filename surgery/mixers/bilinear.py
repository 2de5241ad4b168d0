"""Bilinear attention: scores x^T M x' of hidden states x (query) and x' (key), with a structured matrix M per head.

M is of high rank and takes the place of W_Q W_K^T:

    MLR    M = sum_l (+)_p left[l,p] right[l,p]^T     level l splits the D features into 2^(l-1) blocks of rank r_l
    BTT    M[b,c] = left[b,c] right[b,c]^T            a grid of b x c blocks of rank s

Kuang et al. 2025, "Customizing the Inductive Biases of Softmax Attention", section 3.2, appendices B, E, F.
contraction (eqs. 32, 35):
    split  computes features of x and of x', F = sum_l 2^(l-1) r_l or b c s per head, and caches those of x'
    query  multiplies the query by all of M and caches x' itself, D elements per token for all heads together
base:
    kept   adds M to the module's own score, q . k after RoPE (level 1 of MLR, r_1 = K); M is initially zero
    own    replaces the module's score by M
norm:
    none   x^T M x' / F
    qk     the layer norms of the paper (F.2, eqs. 39, 40), C = scale
           MLR    sum_l C / (r_l p_l) LN(left_l^T x) . LN(right_l^T x')       every level is normalised separately
           BTT    C / D LN(x) . LN(M x')
    layer  an older form, for existing checkpoints and recipes: MLR normalises the features of all levels together and
           divides by F; BTT normalises x^T M only and divides by D
LN has a learned gain on the side of the keys (`key_gain`), initially 0 with base `kept` and 1 with `own`.

Without RoPE (gpt2, bert, vit), `fit_bilinear` projects W_Q W_K^T onto M:

    min E (x^T (scaling W_Q W_K^T - M) x')^2 = ||A^(1/2) (scaling W_Q W_K^T - M) C^(1/2)||^2

A = E[x x^T] of queries, C = Cov[x'] of keys (softmax ignores what all keys have in common). Each block is initialised
by the SVD of its target, whitened by the block's own moments, level by level on the residual of the other levels. That
is optimal if one block is the whole matrix. L-BFGS then minimises the objective over all factors.

B batch, T tokens, H = G J heads, K key dim, D features, F score dims of a head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape, Mixer, MixerConfig, MixerCost, MixerInputs, MixerState
from surgery.mixers.common.kv_layout import KVLayout, append_slots, last_slots, left_pad, make_kv_layout
from surgery.mixers.common.softmax import ScoreTerm, attend, dense_attention, group_heads, upcast
from surgery.mixers.padding import gather_rowwise
from surgery.structures import linalg
from surgery.structures.base import MuP
from surgery.structures.metric import symmetric_roots


def fit_bilinear(
    mixer: Bilinear,
    weight_q_HDK: Tensor,
    weight_k_GDK: Tensor,
    second_moment_DD: Tensor,
    mean_D: Tensor | None = None,
    bias_q_HK: Tensor | None = None,
    *,
    steps: int = 30,
) -> float:
    """Set the factors of a mixer with base 'own' from W_Q and W_K, in place.

    Return the relative squared error of all heads.

    second_moment_DD: E[x x^T]; mean_D: E[x], None: zero. steps: L-BFGS iterations. SurgeryError if the base, the norm
    or RoPE make the projection impossible.
    """
    if mixer.config.base != "own" or mixer.config.norm != "none" or mixer.shape.rotary:
        raise SurgeryError(
            f"{mixer.config.name}: projecting W_Q W_K^T needs base 'own', norm 'none' and no RoPE (got base "
            f"{mixer.config.base!r}, norm {mixer.config.norm!r}, {mixer.shape.rotary} rotary dims); with RoPE "
            "use base 'kept', which starts exact"
        )
    a_DD = second_moment_DD.double()
    c_DD = a_DD if mean_D is None else a_DD - torch.outer(mean_D.double(), mean_D.double())
    keys_HDK = weight_k_GDK.double().repeat_interleave(mixer.shape.heads // mixer.shape.groups, 0) * mixer.shape.scaling
    target_HDD = weight_q_HDK.double() @ keys_HDK.mT
    mixer.fit_blocks(target_HDD, a_DD, c_DD)
    roots = symmetric_roots(a_DD)[0], symmetric_roots(c_DD)[0]
    error = descend_factors(mixer, roots[0] @ target_HDD @ roots[1], roots, steps)
    if bias_q_HK is not None:
        _fit_bias(mixer, torch.einsum("hk,hdk->hd", bias_q_HK.double(), keys_HDK), roots[1])
    return error


def descend_factors(mixer: Bilinear, white_HDD: Tensor, roots: tuple[Tensor, Tensor], steps: int) -> float:
    """Minimise the error over all factors by L-BFGS, in place, and return the relative squared error.

    white_HDD: whitened target. roots: A^(1/2), C^(1/2). The factors do not change if L-BFGS finds nothing better.
    """
    factors = [p for name, p in mixer.named_parameters() if name.startswith(("left", "right"))]
    before = [factor.detach().clone() for factor in factors]
    total = white_HDD.square().sum()

    def loss() -> Tensor:
        return (white_HDD - roots[0] @ mixer.matrix_HDD().to(white_HDD.dtype) @ roots[1]).square().sum() / total

    def closure() -> Tensor:
        for factor in factors:
            factor.grad = None
        with torch.enable_grad():
            value = loss()
            value.backward()
        return value

    with torch.no_grad():
        start = float(loss())
    if steps and start > 1e-10:
        torch.optim.LBFGS(factors, max_iter=steps, history_size=10, line_search_fn="strong_wolfe").step(closure)
    with torch.no_grad():
        end = float(loss())
        for factor, old in zip(factors, before):
            factor.grad = None
            if not end <= start:
                factor.copy_(old)
    return min(start, end) if end == end else start


@torch.no_grad()
def _fit_bias(mixer: Bilinear, target_HD: Tensor, root_DD: Tensor) -> None:
    """Set the bias so that its score with a key x' approximates u . x', the term of W_Q's bias.

    target_HD: u. Least squares under the covariance of the keys, whose square root is root_DD.
    """
    dims = mixer.bias.shape[1]
    eye_1HFF = torch.eye(dims, dtype=torch.float64, device=target_HD.device).expand(1, mixer.shape.heads, -1, -1)
    readers_HFD = mixer.product(eye_1HFF)[0] @ root_DD
    gram_HFF = readers_HFD @ readers_HFD.mT
    gram_HFF.diagonal(dim1=1, dim2=2).add_(1e-9 * gram_HFF.diagonal(dim1=1, dim2=2).mean(1, keepdim=True))
    solution = linalg.solve(gram_HFF, readers_HFD @ (target_HD @ root_DD).unsqueeze(-1)).squeeze(-1)
    mixer.bias.copy_(solution * dims)


CHOICES = {"base": ("kept", "own"), "norm": ("none", "layer", "qk"), "contraction": ("auto", "split", "query")}
SCALE = 8.0  # default of C in eqs. 39 and 40, which the paper tunes; the authors' code has 8 in standard attention


class BilinearConfig(MixerConfig):
    """Options of both structures; see the module's docstring. scale: C of norm `qk`."""

    is_trained: ClassVar[bool] = False

    base: Literal["kept", "own"]
    norm: Literal["none", "layer", "qk"]
    contraction: Literal["auto", "split", "query"]
    scale: float


def check_choices(config: BilinearConfig) -> None:
    """Raise ValueError if an option of a bilinear config has an unknown value."""
    for option, valid in CHOICES.items():
        if getattr(config, option) not in valid:
            raise ValueError(f"{option} must be one of {', '.join(valid)} (got {getattr(config, option)!r})")
    if not (math.isfinite(config.scale) and config.scale > 0):
        raise ValueError(f"scale must be a positive number (got {config.scale}); for example scale: {SCALE}")
    if config.norm != "qk" and config.scale != SCALE:
        raise ValueError(
            f"scale is the constant C of norm 'qk'; norm {config.norm!r} has none (got scale {config.scale}). Leave "
            "scale "
            "out or use norm: qk"
        )


class FactorMuP(MuP):
    """Fan-in and fan-out of a factor. Its initial variance is 1 / fan_in for any fan-out (Kuang et al. 2025, appendix
    F.1); the fan-out counts all heads that read one block."""

    @property
    def std(self) -> float:
        """Return the initial standard deviation."""
        return float(self.fan_in**-0.5)


class Bilinear(Mixer):
    """Base class of both structures: score terms, caches and norms.

    left* (H, ..): factors of the queries. right* (G, ..): factors of the keys. bias (H, F): query features of W_Q's
    bias. norms_features: whether layer norms act on features (MLR) or on vectors of D dims (BTT).
    """

    config: BilinearConfig
    reads_mask = True
    norms_features: ClassVar[bool]

    def __init__(self, config: BilinearConfig, shape: AttentionShape):
        super().__init__(config, shape)
        self.check_config(config, shape)
        self.order = self.contraction(config, shape)
        for name, size in self.factor_shapes(config, shape).items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)))
        if self.has_bias(config):
            self.bias = nn.Parameter(torch.zeros(shape.heads, self.dims(config, shape)))
        if config.norm != "none":
            dims = self.dims(config, shape) if self.norms_features else shape.dim
            self.key_gain = nn.Parameter(torch.empty(dims))
        self.reset_parameters()

    @staticmethod
    def has_bias(config: BilinearConfig) -> bool:
        """Return whether queries have a bias. Eqs. 39 and 40 have none."""
        return config.base == "own" and config.norm != "qk"

    # -- defined by the structure ------------------------------------------------------------------------------------
    @classmethod
    def factor_shapes(cls, config: Any, shape: AttentionShape) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every factor."""
        raise NotImplementedError

    @classmethod
    def dims(cls, config: Any, shape: AttentionShape) -> int:
        """Return F, the score dims of a head."""
        raise NotImplementedError

    def features(self, x_BTD: Tensor, side: str) -> Tensor:
        """Return the features of x (B, H or G, T, F). side: "left" for queries, "right" for keys."""
        raise NotImplementedError

    def product(self, features_BHTF: Tensor) -> Tensor:
        """Return x^T M (B, H, T, D) from the left features of x."""
        raise NotImplementedError

    def fit_blocks(self, target_HDD: Tensor, a_DD: Tensor, c_DD: Tensor) -> None:
        """Set the factors, in place, to the best fit of each block of the target under the block's own moments.

        a_DD, c_DD: second moments of queries and keys.
        """
        raise NotImplementedError

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each matrix, for initialization and learning rates."""
        raise NotImplementedError

    def qk_queries(self, x_BTD: Tensor) -> Tensor:
        """Return the queries (B, H, T, F or D) of norm `qk`, eq. 39 or 40, times the constant."""
        raise NotImplementedError

    def qk_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the keys (B, G or 1, T, F or D) of norm `qk`, and the factor on the scores of each key (B, H, T, 1) or
        None."""
        raise NotImplementedError

    # -- the same for all structures ---------------------------------------------------------------------------------
    @classmethod
    def contraction(cls, config: BilinearConfig, shape: AttentionShape) -> str:
        """Return the order of contraction, 'split' or 'query'. 'auto': the only one that the norm allows; without a
        norm, the one with the smaller cache."""
        if config.contraction != "auto":
            return config.contraction
        if config.norm != "none":
            return "split" if cls.norms_features else "query"
        return "query" if shape.dim <= shape.groups * cls.dims(config, shape) else "split"

    def reset_parameters(self) -> None:
        """Initialise the parameters.

        Left factors are random with muP's scale. With base `kept` and norm `none`, right factors are zero: M = 0, but
        gradients flow. Otherwise right factors are random too; with base `kept` and a norm, the gain is zero instead.
        """
        for name, scale in self.mup().items():
            zero = name.startswith("right") and self.config.base == "kept" and self.config.norm == "none"
            nn.init.normal_(getattr(self, name), std=0.0 if zero else scale.std)
        if self.has_bias(self.config):
            nn.init.zeros_(self.bias)
        if self.config.norm != "none":
            nn.init.constant_(self.key_gain, 0.0 if self.config.base == "kept" else 1.0)

    def queries(self, inputs: MixerInputs) -> list[Tensor]:
        """Return q_BGJTR of each term.

        Scores are divided by the number of summed dims (muP), and by the module's scaling, because `attend` multiplies
        by it.
        """
        if self.config.norm == "qk":
            side = self.qk_queries(upcast(inputs.x_BTD)) / self.shape.scaling
        else:
            side = self._scaled_queries(upcast(inputs.x_BTD))
        sides = [group_heads(side, self.shape.groups)]
        return [group_heads(inputs.q_BHTK, self.shape.groups), *sides] if self.config.base == "kept" else sides

    def _scaled_queries(self, x_BTD: Tensor) -> Tensor:
        """Return the queries (B, H, T, F or D) of norms `none` and `layer`."""
        side = self.features(x_BTD, "left")
        if self.config.base == "own":
            side = side + self.bias.to(side.dtype)[:, None]
        if self.config.norm == "layer" and self.norms_features:
            side = F.layer_norm(side, side.shape[-1:])
        side = side / (side.shape[-1] * self.shape.scaling)
        if self.order == "query":
            side = self.product(side)
        if self.config.norm == "layer" and not self.norms_features:
            gain = self.key_gain.to(side.dtype) / (self.shape.dim * self.shape.scaling)
            side = F.layer_norm(side, side.shape[-1:]) * gain
        return side

    def cache_entries(self, inputs: MixerInputs) -> dict[str, Tensor]:
        """Return the tensors to cache (B, heads, T, ..): `keys<i>` of term i, `values`, and for eq. 40 `scale`, the
        factor on each head's scores with the key."""
        keys, scale = self.keys(inputs)
        scales = {} if scale is None else {"scale": scale}
        return {**{f"keys{i}": k for i, k in enumerate(keys)}, **scales, "values": inputs.v_BGTV}

    def terms(self, inputs: MixerInputs, cache: dict[str, Tensor]) -> list[ScoreTerm]:
        """Return the terms of the score. cache: the `cache_entries` of all slots."""
        terms = [ScoreTerm(q, cache[f"keys{i}"]) for i, q in enumerate(self.queries(inputs))]
        if "scale" in cache:
            terms[-1] = terms[-1]._replace(scale_BGJS=group_heads(cache["scale"], self.shape.groups).squeeze(-1))
        return terms

    def keys(self, inputs: MixerInputs) -> tuple[list[Tensor], Tensor | None]:
        """Return the keys (B, G or 1, T, R) of each term, and the factor on the last term's scores (B, H, T, 1) or
        None.
        """
        scale = None
        if self.config.norm == "qk":
            side, scale = self.qk_keys(upcast(inputs.x_BTD))
            side = side.to(inputs.k_BGTK.dtype)
        elif self.order == "query":
            side = inputs.x_BTD[:, None]
        else:
            side = self.features(upcast(inputs.x_BTD), "right")
            if self.config.norm == "layer":
                side = F.layer_norm(side, side.shape[-1:]) * self.key_gain.to(side.dtype)
            side = side.to(inputs.k_BGTK.dtype)
        return ([inputs.k_BGTK, side] if self.config.base == "kept" else [side]), scale

    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        groups, width = (
            (1, self.shape.dim) if self.order == "query" else (self.shape.groups, self.dims(self.config, self.shape))
        )
        sizes = [(self.shape.groups, self.shape.key)] * (self.config.base == "kept") + [(groups, width)]
        tensors = {f"keys{i}": torch.empty(batch, g, 0, r, device=device) for i, (g, r) in enumerate(sizes)}
        if self.scales_keys(self.config):
            tensors["scale"] = torch.empty(batch, self.shape.heads, 0, 1, device=device)
        tensors["values"] = torch.empty(batch, self.shape.groups, 0, self.shape.value, device=device)
        return MixerState(torch.zeros(batch, dtype=torch.long, device=device), tensors)

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, state after these tokens, or None without a state)."""
        padded, back = left_pad(inputs)
        layout, count_B = make_kv_layout(padded, state, 0 if state is None else state.tensors["values"].shape[2])
        cache = self.cache_entries(padded)
        if state is not None:
            cache = {name: append_slots(state.tensors[name], x, count_B) for name, x in cache.items()}
        terms = self.terms(padded, cache)
        mask = padded.mask_BHTS if state is None else None
        out = attend(terms, cache["values"], layout, self.shape, mask, padded.dropout)
        out = out if back is None else gather_rowwise(out, back, 2)
        return out, None if state is None else self._next_state(layout, cache, count_B)

    def next_state(self, inputs: MixerInputs, state: MixerState) -> MixerState:
        """Return the state after these tokens, without their outputs."""
        padded, _ = left_pad(inputs)
        layout, count_B = make_kv_layout(padded, state, state.tensors["values"].shape[2])
        cache = {name: append_slots(state.tensors[name], x, count_B) for name, x in self.cache_entries(padded).items()}
        return self._next_state(layout, cache, count_B)

    def _next_state(self, layout: KVLayout, cache: dict[str, Tensor], count_B: Tensor | None) -> MixerState:
        slots = layout.slots if count_B is None else int(layout.end_B.max())
        slots = slots if self.shape.window is None else min(slots, self.shape.window - 1)
        return MixerState(layout.end_B, {name: last_slots(x, slots) for name, x in cache.items()})

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV by the definition, in quadratic time."""
        return dense_attention(self.terms(inputs, self.cache_entries(inputs)), inputs, self.shape)

    def matrix_HDD(self) -> Tensor:
        """Return M of every head as a dense matrix, (H, D, D). x^T M x' is added to the scaled score."""
        factor = next(self.parameters())
        eye_1DD = torch.eye(self.shape.dim, dtype=factor.dtype, device=factor.device)[None]
        features = self.features(eye_1DD, "left")
        return self.product(features / features.shape[-1])[0]

    @classmethod
    def cost(cls, config: Any, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        live = length if shape.window is None else min(length, shape.window - 1)
        base = shape.key if config.base == "kept" else 0
        query, dims = cls.contraction(config, shape) == "query", cls.dims(config, shape)
        width = shape.dim if query else dims
        per_token = shape.groups * (base + shape.value) + (shape.dim if query else shape.groups * dims)
        params = sum(torch.Size(size).numel() for size in cls.factor_shapes(config, shape).values())
        params += shape.heads * dims if cls.has_bias(config) else 0
        params += 0 if config.norm == "none" else (dims if cls.norms_features else shape.dim)
        per_head = cls.feature_macs(config, shape)
        macs = shape.heads * per_head * (2 if query else 1) + (0 if query else shape.groups * per_head)
        scales = 0
        if cls.scales_keys(config):  # M x' is computed for its variance, and one element per head is cached, in float32
            per_token, width, scales = per_token + shape.heads, width + 1, live * shape.heads
            macs += (shape.groups + shape.heads) * per_head
        return MixerCost(live * per_token, macs + shape.heads * live * (base + width + shape.value), params, scales)

    @classmethod
    def scales_keys(cls, config: BilinearConfig) -> bool:
        """Return whether the scores of each head and key have a factor, for LN(M x') of eq. 40."""
        return config.norm == "qk" and not cls.norms_features

    @classmethod
    def feature_macs(cls, config: Any, shape: AttentionShape) -> int:
        """Return multiply-accumulates for the features of one token, side and head: the elements of its factor."""
        return sum(
            torch.Size(size[1:]).numel()
            for name, size in cls.factor_shapes(config, shape).items()
            if name.startswith("left")
        )


def block_features(x_BTD: Tensor, factor_HPMR: Tensor) -> Tensor:
    """Return the features (B, H, T, P R) of x under P blocks along the diagonal."""
    parts_BTPM = x_BTD.unflatten(-1, (factor_HPMR.shape[1], -1))
    return torch.einsum("btpm,hpmr->bhtpr", parts_BTPM, factor_HPMR.to(x_BTD.dtype)).flatten(-2)


def block_product(features_BGJTF: Tensor, right_GPMR: Tensor) -> Tensor:
    """Return x^T M (B, G, J, T, D) from the left features of x, for M with P blocks along the diagonal."""
    _, blocks, _, rank = right_GPMR.shape
    parts = features_BGJTF.unflatten(-1, (blocks, rank))
    return torch.einsum("bgjtpr,gpmr->bgjtpm", parts, right_GPMR.to(parts.dtype)).flatten(-2)


def grid_left_features(rows_BTba: Tensor, left_Hbcas: Tensor) -> Tensor:
    """Return the features (B, H, T, b c s) of x, given as b parts, under the left factors of a grid of blocks."""
    return torch.einsum("btxa,hxyas->bhtxys", rows_BTba, left_Hbcas.to(rows_BTba.dtype)).flatten(-3)


def grid_right_features(x_BTD: Tensor, right_Gbcds: Tensor) -> Tensor:
    """Return the features (B, G, T, b c s) of x under the right factors of a grid of blocks."""
    parts_BTcd = x_BTD.unflatten(-1, (right_Gbcds.shape[2], -1))
    return torch.einsum("btyd,gxyds->bgtxys", parts_BTcd, right_Gbcds.to(x_BTD.dtype)).flatten(-3)


def grid_product(features_BGJTF: Tensor, right_Gbcds: Tensor) -> Tensor:
    """Return x^T M (B, G, J, T, D) from the left features of x, for M with a grid of blocks."""
    _, b, c, _, rank = right_Gbcds.shape
    parts = features_BGJTF.unflatten(-1, (b, c, rank))
    return torch.einsum("bgjtxys,gxyds->bgjtyd", parts, right_Gbcds.to(parts.dtype)).flatten(-2)


def factor_blocks(left: Tensor, right: Tensor) -> Iterator[tuple[tuple[int, ...], slice, slice]]:
    """Yield (index of a block in its factors, its rows of M, its columns of M) of blocks along the diagonal, whose
    factors have 4 axes, or of a grid, whose factors have 5.
    """
    rows, columns = left.shape[-2], right.shape[-2]
    for index in itertools.product(*map(range, left.shape[1:-2])):
        x, y = index[0], index[-1]
        yield index, slice(x * rows, (x + 1) * rows), slice(y * columns, (y + 1) * columns)


@torch.no_grad()
def fit_levels(
    levels: Sequence[tuple[Tensor, Tensor]], target_HDD: Tensor, a_DD: Tensor, c_DD: Tensor, dims: int
) -> None:
    """Set (left, right) factors of each level, in place: four rounds over the levels, each fitted to the residual of the
    others; a single level is fitted once.

    dims: by which the score is divided.
    """
    residual, parts = target_HDD.clone(), [torch.zeros_like(target_HDD) for _ in levels]
    for _ in range(4 if len(levels) > 1 else 1):
        for i, (left, right) in enumerate(levels):
            residual += parts[i]
            per_group = len(left) // len(right)
            for g, (index, rows, columns) in itertools.product(range(len(right)), factor_blocks(left, right)):
                heads = slice(g * per_group, (g + 1) * per_group)
                target_JAD, rank = residual[heads, rows, columns], left.shape[-1]
                new_left, new_right = best_factors(target_JAD, a_DD[rows, rows], c_DD[columns, columns], rank)
                at_left, at_right = (heads, *index), (g, *index)
                left[at_left], right[at_right] = (new_left * dims).to(left.dtype), new_right.to(right.dtype)
                parts[i][heads, rows, columns] = new_left @ new_right.mT
            residual -= parts[i]


def best_factors(block_JAD: Tensor, a_AA: Tensor, c_DD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return (left_JAR, right_DR), the optimal factors of rank R of J blocks with a common right factor.

    They minimise sum_j ||A^(1/2) (block - left right^T) C^(1/2)||^2, by the SVD of the whitened stack of blocks. If the
    stack has a lower rank, the remaining columns are zeros.
    """
    (a_root, a_inverse), (c_root, c_inverse) = symmetric_roots(a_AA), symmetric_roots(c_DD)
    u, s, v = linalg.svd((a_root @ block_JAD @ c_root).flatten(0, 1), full_matrices=False)
    kept_rank = min(rank, len(s))
    root = s[:kept_rank].sqrt()
    left = a_inverse @ (u[:, :kept_rank] * root).unflatten(0, block_JAD.shape[:2])
    right = c_inverse @ (v[:kept_rank].mT * root)
    return F.pad(left, (0, rank - kept_rank)), F.pad(right, (0, rank - kept_rank))
