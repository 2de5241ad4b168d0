"""Softmax attention of a Llama-like layer as the latent attention (MLA) of Ling 3.0, which computes the same function.

RoPE        the class shares one rotated key among its heads. It becomes the rotated keys of all G groups side by side,
            and a head's query is zero outside its group. The frequencies of a group are repeated by the factors of
            RoPE type longrope, and dims of a half become neighbours
latent      values, and the dims of keys without RoPE, of all groups. The norm behind the latent becomes a constant factor
            by rows so small that their mean square is below the rounding of its eps; the norm's weight and the
            projection behind it, which hands each head its group's part, undo the factor
gate        one per head, sigmoid(W_g x). W_g = 0 gives 1/2, and o_proj is doubled: exact

So the cache has as many numbers per token as the source's. H query heads in G key/value groups of K dims, of which the
first R have RoPE; V = K dims of a value, D hidden states, L latent dims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from surgery.checkpoint.stock_tensors import ROUNDING, AttentionSizes, pair_with_product

LATENT_EPS = 1e-6  # of the norm behind the latent, whatever the config says


def latent_sizes(sizes: AttentionSizes) -> tuple[int, int, int]:
    """Return the dims of the latent, and those of a head's queries without and with RoPE."""
    rest = sizes.key - sizes.rotary
    return sizes.groups * (rest + sizes.key), rest, sizes.groups * sizes.rotary


def score_factor(sizes: AttentionSizes) -> float:
    """Return the source's factor of the scores / that of the class."""
    _, rest, rotated = latent_sizes(sizes)
    return sizes.scaling * math.sqrt(rest + rotated)


def latent_attention(layer: Mapping[str, Tensor], sizes: AttentionSizes) -> dict[str, Tensor]:
    """Return the tensors of the attention of a layer, by name in the layer."""
    tensors = {name: layer[f"self_attn.{name}_proj.weight"] for name in "qkvo"}
    hidden, (latent, rest, _) = tensors["q"].shape[1], latent_sizes(sizes)
    q_HKD, k_GKD = (tensors[name].unflatten(0, (-1, sizes.key)) for name in "qk")
    group_H = torch.arange(sizes.heads, device=q_HKD.device) // (sizes.heads // sizes.groups)

    q_HGRD = q_HKD.new_zeros(sizes.heads, sizes.groups, sizes.rotary, hidden)
    q_HGRD[torch.arange(sizes.heads, device=q_HKD.device), group_H] = _neighbours(q_HKD, sizes)
    rest_HPD = q_HKD[:, sizes.rotary :] * score_factor(sizes)  # with RoPE it is in the cosines

    rows_LD = torch.cat([k_GKD[:, sizes.rotary :].flatten(0, 1), tensors["v"]])
    power, norm, weight = _neutral_norm(rows_LD, layer["input_layernorm.weight"], sizes)
    keys_RD = _neighbours(k_GKD, sizes).flatten(0, 1)

    eye_LL = torch.eye(latent, dtype=rows_LD.dtype, device=rows_LD.device) * weight
    keys_GPL, values_GVL = (
        part.unflatten(0, (sizes.groups, -1)) for part in eye_LL.split([sizes.groups * rest, sizes.groups * sizes.key])
    )
    return {
        "self_attn.q_proj.weight": torch.cat([rest_HPD, q_HGRD.flatten(1, 2)], 1).flatten(0, 1),
        "self_attn.kv_a_proj_with_mqa.weight": torch.cat([rows_LD * power, keys_RD]),
        "self_attn.kv_a_layernorm.weight": rows_LD.new_full((latent,), norm),
        "self_attn.kv_b_proj.weight": torch.cat([keys_GPL, values_GVL], 1)[group_H].flatten(0, 1),
        "self_attn.o_proj.weight": 2 * tensors["o"],
        "self_attn.g_proj.weight": rows_LD.new_zeros(sizes.heads, hidden),
    }


def longrope(frequency_R: Tensor, scale: float, sizes: AttentionSizes, length: int) -> dict[str, object]:
    """Return the RoPE parameters of the class. frequency_R: the source's, one per pair of dims. scale: what its cosines
    are multiplied by. length: the longest text of the config.
    """
    factors = (1 / frequency_R.double()).tolist() * sizes.groups  # of a base of 1
    return {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": scale * math.sqrt(score_factor(sizes)),  # on the cosines of queries and keys
        "original_max_position_embeddings": length,
    }


def _neighbours(weight_GKD: Tensor, sizes: AttentionSizes) -> Tensor:
    """Return the rows with RoPE, the two dims of a pair side by side."""
    rotary = sizes.rotary
    if sizes.interleaved:
        return weight_GKD[:, :rotary]
    return torch.stack([weight_GKD[:, : rotary // 2], weight_GKD[:, rotary // 2 : rotary]], 2).flatten(1, 2)


def _neutral_norm(rows_LD: Tensor, norm_D: Tensor, sizes: AttentionSizes) -> tuple[float, float, float]:
    """Return the power of two of the latent's rows, and the weights of its norm and of the projection behind it."""
    bound_L = (rows_LD.double() * norm_D.double()).norm(dim=1) * math.sqrt(rows_LD.shape[1])  # |x| <= sqrt(D)
    largest = max(float(bound_L.square().mean().sqrt()), 1e-30)
    power = 2.0 ** math.floor(math.log2(ROUNDING * math.sqrt(LATENT_EPS) / largest))
    inverse_rms = float(torch.rsqrt(torch.tensor(LATENT_EPS, dtype=torch.float32)))
    return power, *pair_with_product(1 / (power * inverse_rms), sizes.dtype, offset=0.0)
