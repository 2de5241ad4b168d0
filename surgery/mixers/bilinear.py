"""Bilinear attention: a head's score x^T M x' with a structured M of high rank in place of W_Q W_K^T.

    MLR    M = sum_l (+)_p left[l,p] right[l,p]^T     level l cuts the D features into 2^(l-1) blocks, each of rank r_l
    BTT    M[b,c] = left[b,c] right[b,c]^T            a grid of b x c blocks, each of rank s

Kuang et al. 2025, "Customizing the Inductive Biases of Softmax Attention", section 3.2, appendices B, E, F. Two orders
of contraction (eqs. 32, 35): `split` makes features of x and of x', sum_l 2^(l-1) r_l or b c s a head, and keeps those
of x'; `query` takes all of M to the query and keeps x' itself, D numbers a token for all heads together.
base: `kept` adds M to the score that the module has, q . k after RoPE (level 1 of MLR, r1 = K), and starts at zero;
`own` puts M in its place. norm: layer norms of both sides' features, or of x^T M (eqs. 39, 40).
B batch, T tokens, H = G J heads, D features, F score dims of a head.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.mixers.base import AttentionShape, Inputs, Mixer, MixerCost, State
from surgery.mixers.slots import appended, framed, kept, packed, take
from surgery.mixers.softmax import Term, attend, define, grouped, wide
from surgery.structures import linalg
from surgery.structures.base import MuP
from surgery.structures.metric import symmetric_roots

CHOICES = {"base": ("kept", "own"), "norm": ("none", "layer"), "contraction": ("auto", "split", "query")}


def check_choices(config: Any) -> None:
    for option, words in CHOICES.items():
        if getattr(config, option) not in words:
            raise ValueError(f"{option} {getattr(config, option)!r} is none of {', '.join(words)}")


class Bilinear(Mixer):
    """What both share: score terms, caches, norms. `left*` (H, ..) act on queries, `right*` (G, ..) on keys."""

    reads_mask = True
    norms_features: ClassVar[bool]

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__(config, shape)
        self.refuse(config, shape)
        self.order = self.contraction(config, shape)
        for name, size in self.factor_shapes(config, shape).items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)))
        if config.base == "own":  # what the bias of W_Q adds to x's features
            self.bias = nn.Parameter(torch.zeros(shape.heads, self.dims(config, shape)))
        if config.norm == "layer":
            dims = self.dims(config, shape) if self.norms_features else shape.dim
            self.key_gain = nn.Parameter(torch.empty(dims))
        self.reset_parameters()

    # -- what a structure defines ------------------------------------------------------------------------------------
    @classmethod
    def factor_shapes(cls, config: Any, shape: AttentionShape) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    @classmethod
    def dims(cls, config: Any, shape: AttentionShape) -> int:
        """F"""
        raise NotImplementedError

    def features(self, x_BTD: Tensor, side: str) -> Tensor:
        """(B, H or G, T, F) of the left or right factors."""
        raise NotImplementedError

    def product(self, features_BHTF: Tensor) -> Tensor:
        """x^T M from x's features, (B, H, T, D)."""
        raise NotImplementedError

    def fit_blocks(self, target_HDD: Tensor, a_DD: Tensor, c_DD: Tensor) -> None:
        """Factors in place: each block's best under its own moments of queries and keys."""
        raise NotImplementedError

    def mup(self) -> dict[str, MuP]:
        raise NotImplementedError

    # -- what follows from it ----------------------------------------------------------------------------------------
    @classmethod
    def contraction(cls, config: Any, shape: AttentionShape) -> str:
        if config.contraction != "auto":
            return config.contraction
        if config.norm == "layer":
            return "split" if cls.norms_features else "query"
        return "query" if shape.dim <= shape.groups * cls.dims(config, shape) else "split"

    def reset_parameters(self) -> None:
        """Random left factors at muP's scale, zero right ones: M = 0 with gradients that flow. An M that stands
        alone, or behind a norm, has both random; behind a norm the gain is what starts at zero."""
        for name, scale in self.mup().items():
            zero = name.startswith("right") and self.config.base == "kept" and self.config.norm == "none"
            nn.init.normal_(getattr(self, name), std=0.0 if zero else scale.std)
        if self.config.base == "own":
            nn.init.zeros_(self.bias)
        if self.config.norm == "layer":
            nn.init.constant_(self.key_gain, 0.0 if self.config.base == "kept" else 1.0)

    def queries(self, inputs: Inputs) -> list[Tensor]:
        """q_BGJTR of each term. A score is divided by the dims summed (muP); `attend` multiplies by the module's
        scaling, which M is free of."""
        side = self.features(wide(inputs.x_BTD), "left")
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
        own = [grouped(side, self.shape.groups)]
        return [grouped(inputs.q_BHTK, self.shape.groups), *own] if self.config.base == "kept" else own

    def keys(self, inputs: Inputs) -> list[Tensor]:
        """What is remembered of each token, (B, G or 1, T, R) for each term."""
        if self.order == "query":
            own = inputs.x_BTD[:, None]
        else:
            own = self.features(wide(inputs.x_BTD), "right")
            if self.config.norm == "layer":
                own = F.layer_norm(own, own.shape[-1:]) * self.key_gain.to(own.dtype)
            own = own.to(inputs.k_BGTK.dtype)
        return [inputs.k_BGTK, own] if self.config.base == "kept" else [own]

    def empty_state(self, batch: int, device: torch.device | str) -> State:
        groups, width = (
            (1, self.shape.dim) if self.order == "query" else (self.shape.groups, self.dims(self.config, self.shape))
        )
        sizes = [(self.shape.groups, self.shape.key)] * (self.config.base == "kept") + [(groups, width)]
        tensors = {f"keys{i}": torch.empty(batch, g, 0, r, device=device) for i, (g, r) in enumerate(sizes)}
        tensors["values"] = torch.empty(batch, self.shape.groups, 0, self.shape.value, device=device)
        return State(torch.zeros(batch, dtype=torch.long, device=device), tensors)

    def mix(self, inputs: Inputs, state: State | None = None) -> tuple[Tensor, State | None]:
        packs, back = packed(inputs)
        frame, count_B = framed(packs, state, 0 if state is None else state.tensors["values"].shape[2])
        new = {**{f"keys{i}": k for i, k in enumerate(self.keys(packs))}, "values": packs.v_BGTV}
        if state is not None:
            new = {name: appended(state.tensors[name], x, count_B) for name, x in new.items()}
        terms = [Term(q, new[f"keys{i}"]) for i, q in enumerate(self.queries(packs))]
        mask = packs.mask_BHTS if state is None else None
        out = attend(terms, new["values"], frame, self.shape, mask, packs.dropout)
        out = out if back is None else take(out, back, 2)
        if state is None:
            return out, None
        slots = frame.slots if count_B is None else int(frame.end_B.max())
        slots = slots if self.shape.window is None else min(slots, self.shape.window - 1)
        return out, State(frame.end_B, {name: kept(x, slots) for name, x in new.items()})

    def dense(self, inputs: Inputs) -> Tensor:
        terms = [Term(q, k) for q, k in zip(self.queries(inputs), self.keys(inputs))]
        return define(terms, inputs, self.shape)

    def matrix_HDD(self) -> Tensor:
        """M of every head, multiplied out: x^T M x' is what is added to the scaled score."""
        factor = next(self.parameters())
        eye_1DD = torch.eye(self.shape.dim, dtype=factor.dtype, device=factor.device)[None]
        features = self.features(eye_1DD, "left")
        return self.product(features / features.shape[-1])[0]

    @classmethod
    def cost(cls, config: Any, shape: AttentionShape, length: int) -> MixerCost:
        live = length if shape.window is None else min(length, shape.window - 1)
        base = shape.key if config.base == "kept" else 0
        query, dims = cls.contraction(config, shape) == "query", cls.dims(config, shape)
        width = shape.dim if query else dims
        kept_numbers = shape.groups * (base + shape.value) + (shape.dim if query else shape.groups * dims)
        params = sum(torch.Size(size).numel() for size in cls.factor_shapes(config, shape).values())
        params += 0 if config.base == "kept" else shape.heads * dims
        params += 0 if config.norm == "none" else (dims if cls.norms_features else shape.dim)
        each = cls.feature_macs(config, shape)
        made = shape.heads * each * (2 if query else 1) + (0 if query else shape.groups * each)
        return MixerCost(live * kept_numbers, made + shape.heads * live * (base + width + shape.value), params)

    @classmethod
    def feature_macs(cls, config: Any, shape: AttentionShape) -> int:
        """Of one side's features of one head: as many as its factor has numbers."""
        return sum(
            torch.Size(size[1:]).numel()
            for name, size in cls.factor_shapes(config, shape).items()
            if name.startswith("left")
        )


def best_factors(block_JAD: Tensor, a_AA: Tensor, c_DD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """left_JAR, right_DR: the best rank-r factors of J blocks that share their right one,
    min sum_j ||A^(1/2) (block - left right^T) C^(1/2)||^2, by the SVD of the whitened stack."""
    (a_root, a_inverse), (c_root, c_inverse) = symmetric_roots(a_AA), symmetric_roots(c_DD)
    u, s, v = linalg.svd((a_root @ block_JAD @ c_root).flatten(0, 1), full_matrices=False)
    found = min(rank, len(s))
    root = s[:found].sqrt()
    left = a_inverse @ (u[:, :found] * root).unflatten(0, block_JAD.shape[:2])
    right = c_inverse @ (v[:found].mT * root)
    return F.pad(left, (0, rank - found)), F.pad(right, (0, rank - found))  # more rank than a block has: zeros
