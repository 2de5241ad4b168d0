"""Structured maps N_h in place of W_V W_O^T: Y = sum_h softmax(S_h) X N_h.

Kuang et al. 2025, "Customizing the Inductive Biases of Softmax Attention", eq. 3: a head writes softmax(S) X (W_V W_O^T),
where W_V W_O^T (D, D) has the rank of a head, as W_Q W_K^T has in its score. The paper replaces the score alone (section
2.1). Here N_h is an MLBTC matrix (section 3.3, eq. 8), fitted to W_V W_O^T. A plain-torch reference without a recipe: it
takes the place of the output projection too, and caches X, D elements per token for all heads together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgery.structures import STRUCTURES
from surgery.structures.base import StructuredLinear
from surgery.structures.metric import Metric
from surgery.structures.mlbtc import MLBTC


def fit_value_output(
    value_HDK: Tensor, output_HDK: Tensor, config: MLBTC, second_moment_DD: Tensor | None = None
) -> list[StructuredLinear]:
    """Return N_h of each head as a linear layer x -> N_h^T x, the fit of (W_V W_O^T)^T.

    second_moment_DD: E[x x^T] of the mixed hidden states, None: the identity. The error is weighted by it.
    """
    structure = STRUCTURES[config]
    metric = Metric(c_II=second_moment_DD)
    return [structure.project(o_DK @ v_DK.mT, config, metric) for v_DK, o_DK in zip(value_HDK, output_HDK)]


def relative_errors(maps: Sequence[StructuredLinear], value_HDK: Tensor, output_HDK: Tensor) -> list[float]:
    """Return ||N_h - W_V W_O^T|| / ||W_V W_O^T|| of each head."""
    errors = []
    for linear, v_DK, o_DK in zip(maps, value_HDK, output_HDK):
        target_DD = o_DK @ v_DK.mT
        errors.append(float((linear.dense() - target_DD).norm() / target_DD.norm()))
    return errors


def attention_output(weight_HTT: Tensor, x_TD: Tensor, maps: Sequence[StructuredLinear]) -> Tensor:
    """Return Y (T, D) of eq. 3, without forming N_h. weight_HTT: softmax(S) of each head."""
    out_TD = torch.zeros_like(x_TD)
    for weight_TT, linear in zip(weight_HTT, maps):
        out_TD = out_TD + linear.product(weight_TT @ x_TD)
    return out_TD
