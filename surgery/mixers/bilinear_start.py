"""A bilinear score from W_Q W_K^T, for attention without RoPE: gpt2, bert, vit.

    min E (x^T (scaling W_Q W_K^T - M) x')^2 = ||A^(1/2) (scaling W_Q W_K^T - M) C^(1/2)||^2
        A = E[x x^T] of queries, C = Cov[x'] of keys (what all keys share, a softmax does not see)

Start: every block by its SVD whitened by the block's own moments, level by level on what the others leave (the optimum
where one block is the whole matrix); then L-BFGS on the objective itself. D features, H = G J heads, K key dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.mixers.bilinear import Bilinear
from surgery.structures import linalg
from surgery.structures.metric import symmetric_roots


def from_bilinear(
    mixer: Bilinear,
    weight_q_HDK: Tensor,
    weight_k_GDK: Tensor,
    second_moment_DD: Tensor,
    mean_D: Tensor | None = None,
    bias_q_HK: Tensor | None = None,
    steps: int = 30,
) -> float:
    """Fills a mixer of base 'own' in place; the squared error it leaves, relative, over all heads."""
    if mixer.config.base != "own" or mixer.config.norm != "none" or mixer.shape.rotary:
        raise SurgeryError(
            f"{mixer.config.name}: W_Q W_K^T can be projected onto base 'own', norm 'none' where no RoPE stands between "
            f"(base {mixer.config.base!r}, norm {mixer.config.norm!r}, {mixer.shape.rotary} rotary dims here); with "
            "RoPE use base 'kept', which starts exact"
        )
    a_DD = second_moment_DD.double()
    c_DD = a_DD if mean_D is None else a_DD - torch.outer(mean_D.double(), mean_D.double())
    keys_HDK = weight_k_GDK.double().repeat_interleave(mixer.shape.heads // mixer.shape.groups, 0) * mixer.shape.scaling
    target_HDD = weight_q_HDK.double() @ keys_HDK.mT
    mixer.fit_blocks(target_HDD, a_DD, c_DD)
    roots = symmetric_roots(a_DD)[0], symmetric_roots(c_DD)[0]
    left = polished(mixer, roots[0] @ target_HDD @ roots[1], roots, steps)
    if bias_q_HK is not None:
        _fit_bias(mixer, torch.einsum("hk,hdk->hd", bias_q_HK.double(), keys_HDK), roots[1])
    return left


def polished(mixer: Bilinear, white_HDD: Tensor, roots: tuple[Tensor, Tensor], steps: int) -> float:
    """L-BFGS on all factors; they stay as they were where it finds nothing better. The relative error left."""
    factors = [p for name, p in mixer.named_parameters() if name.startswith(("left", "right"))]
    before = [factor.detach().clone() for factor in factors]
    least = white_HDD.square().sum()

    def loss() -> Tensor:
        return (white_HDD - roots[0] @ mixer.matrix_HDD().to(white_HDD.dtype) @ roots[1]).square().sum() / least

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
def _fit_bias(mixer: Bilinear, wanted_HD: Tensor, root_DD: Tensor) -> None:
    """What W_Q's bias says to every key, u . x', by the keys' features: least squares under their covariance."""
    dims = mixer.bias.shape[1]
    eye_1HFF = torch.eye(dims, dtype=torch.float64, device=wanted_HD.device).expand(1, mixer.shape.heads, -1, -1)
    readers_HFD = mixer.product(eye_1HFF)[0] @ root_DD
    gram_HFF = readers_HFD @ readers_HFD.mT
    gram_HFF.diagonal(dim1=1, dim2=2).add_(1e-9 * gram_HFF.diagonal(dim1=1, dim2=2).mean(1, keepdim=True))
    solution = linalg.solve(gram_HFF, readers_HFD @ (wanted_HD @ root_DD).unsqueeze(-1)).squeeze(-1)
    mixer.bias.copy_(solution * dims)
