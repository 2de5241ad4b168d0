"""Tensors of a Llama-like decoder as tensors of a stock Qwen3.5 text model that computes the same function.

norm        Qwen3.5 multiplies by 1 + w'. A weight w is split as w = s (1 + w'), s a power of two or 1, and s goes into
            the columns of the linears behind the norm: exact in every floating-point format
gate        Qwen3.5 multiplies the heads' outputs by sigmoid(W_g x). W_g = 0 gives 1/2, and o_proj is doubled: exact
QK norm     of a source without it: q / sqrt(mean(q^2) + eps) (1 + w'). With q_proj scaled by a power of two so small
            that mean(q^2) is below the rounding of eps, this is a constant times q, which w' undoes. The factors of q
            and k are chosen together, so that their product is right to the rounding of the pair

H query heads in G key/value groups of K dims, D hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 2.0**-13  # sqrt of mean(q^2) / eps at which float32 still adds nothing to eps


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of the attention that is kept. rotary: dims of a key with RoPE; interleaved: whether pairs of them are
    neighbours. scaling: of the source's scores, which the stock class divides by sqrt(K).

    eps: of all norms. dtype: in which the result is stored.
    """

    heads: int
    groups: int
    key: int
    rotary: int
    interleaved: bool
    scaling: float
    eps: float
    dtype: torch.dtype


def split_norm(weight_D: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return w' and s, (D,) each, with w = s (1 + w') and w' exact in `dtype`."""
    w_D = weight_D.double()
    is_exact_D = 1 + (w_D - 1).to(dtype).double() == w_D
    power_D = torch.where(w_D == 0, 1.0, 2.0 ** w_D.abs().clamp_min(1e-300).log2().floor()) * w_D.sign().where(
        w_D != 0, 1
    )
    scale_D = torch.where(is_exact_D, 1.0, power_D)
    return (w_D / scale_D - 1).to(weight_D), scale_D.to(weight_D)


def kept_layer(layer: Mapping[str, Tensor], sizes: AttentionSizes) -> dict[str, Tensor]:
    """Return the tensors of a layer that keeps softmax attention, by name in the layer."""
    scale_D, tensors = mapped_mlp(layer, sizes.dtype)
    return tensors | {f"self_attn.{name}": tensor for name, tensor in _attention(layer, scale_D, sizes).items()}


def mapped_mlp(layer: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the scale s (D,) of what attention reads, and the tensors of a layer's norms and MLP."""
    norm_D, scale_D = split_norm(layer["input_layernorm.weight"], dtype)
    mlp_norm_D, mlp_scale_D = split_norm(layer["post_attention_layernorm.weight"], dtype)
    return scale_D, {
        "input_layernorm.weight": norm_D,
        "post_attention_layernorm.weight": mlp_norm_D,
        "mlp.gate_proj.weight": layer["mlp.gate_proj.weight"] * mlp_scale_D,
        "mlp.up_proj.weight": layer["mlp.up_proj.weight"] * mlp_scale_D,
        "mlp.down_proj.weight": layer["mlp.down_proj.weight"],
    }


def mapped_outside(
    embedding: Tensor, norm_D: Tensor, head: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the weight w' of the last norm, and that of the output embedding; None if it stays tied to the input.

    head: None if it is tied. A tied head is stored apart if w' would be rounded and `dtype` is not float32.
    """
    stored_D, scale_D = split_norm(norm_D, dtype)
    if head is None and (dtype == torch.float32 or bool((scale_D == 1).all())):
        return norm_D - 1, None
    return stored_D, (embedding if head is None else head) * scale_D


def _attention(layer: Mapping[str, Tensor], scale_D: Tensor, sizes: AttentionSizes) -> dict[str, Tensor]:
    tensors = {name.removeprefix("self_attn."): t for name, t in layer.items() if name.startswith("self_attn.")}
    linears = {name: tensors[f"{name}_proj.weight"] * scale_D for name in "qkv"}
    biases = {name: tensors[f"{name}_proj.bias"] for name in "qkv" if f"{name}_proj.bias" in tensors}
    if "q_norm.weight" in tensors:
        norms = {name: tensors[f"{name}_norm.weight"] - 1 for name in "qk"}
    else:
        norms = _neutral_norms(layer, linears, biases, sizes)
    gate_HKD = torch.zeros_like(linears["q"]).unflatten(0, (sizes.heads, sizes.key))
    linears["q"] = torch.cat([linears["q"].unflatten(0, (sizes.heads, sizes.key)), gate_HKD], 1).flatten(0, 1)
    output = 2 * tensors["o_proj.weight"]
    if biases:
        biases["q"] = torch.cat([biases["q"].unflatten(0, (sizes.heads, sizes.key)), gate_HKD[..., 0]], 1).flatten()
        biases["o"] = output.new_zeros(len(output))
    return {
        **{f"{name}_proj.weight": weight for name, weight in linears.items()},
        **{f"{name}_proj.bias": bias for name, bias in biases.items()},
        **{f"{name}_norm.weight": weight for name, weight in norms.items()},
        "o_proj.weight": output,
    }


def _neutral_norms(
    layer: Mapping[str, Tensor], linears: dict[str, Tensor], biases: dict[str, Tensor], sizes: AttentionSizes
) -> dict[str, Tensor]:
    """Scale q and k in `linears` and `biases` so that their norms are linear; return the norms' weights, (K,) each."""
    largest = 0.0
    for name in "qk":  # |x| <= sqrt(D) behind a norm, before its weight
        weight = layer[f"self_attn.{name}_proj.weight"].double() * layer["input_layernorm.weight"].double()
        bound_HK = weight.norm(dim=1).mul(math.sqrt(weight.shape[1]))
        bound_HK = (bound_HK + (biases[name].abs() if name in biases else 0)).unflatten(0, (-1, sizes.key))
        largest = max(largest, float(bound_HK.square().mean(1).max().sqrt()))
    power = 2.0 ** math.floor(math.log2(ROUNDING * math.sqrt(sizes.eps) / max(largest, 1e-30)))
    for name in "qk":
        linears[name] = linears[name] * power
        if name in biases:
            biases[name] = biases[name] * power
    inverse_rms = float(torch.rsqrt(torch.tensor(sizes.eps, dtype=torch.float32)))
    factors = pair_with_product(sizes.scaling * math.sqrt(sizes.key) / (power * inverse_rms) ** 2, sizes.dtype)
    return {name: linears["q"].new_full((sizes.key,), value) for name, value in zip("qk", factors)}


def pair_with_product(product: float, dtype: torch.dtype, offset: float = 1.0) -> tuple[float, float]:
    """Return two values of `dtype` with (offset + a) (offset + b) as close to `product` as 256 values of a allow."""
    steps = torch.arange(256, dtype=torch.float64) / 256 * 0.5 + 0.75
    a_N = (math.sqrt(product) * steps).to(dtype).double()
    b_N = (product / (offset + a_N) - offset).to(dtype).double()
    best = int(((offset + a_N) * (offset + b_N) / product - 1).abs().argmin())
    return float(a_N[best]), float(b_N[best])
