"""Cross-entropy and divergence from a teacher, from hidden states and output heads, without the logits of a whole batch.

    logits = head(h)            for CHUNK_TOKENS tokens at a time, in the dtype of the head's products
    total  = kl_weight T^2 sum_n w_n KL_n + ce_weight sum_n w_n CE_n            float32

The gradient by the logits overwrites them, and is multiplied at once with the head's weight (dh) and the hidden states
(dW, summed in float32). The backward pass only scales these two. The teacher's head is applied inside the chunk.
Liger-Kernel and flash-linear-attention have losses of this form, but without weights of tokens, top-k targets, reverse
divergence with softcaps and differently padded vocabularies, so kernels/linear_loss is the only fused implementation.

N tokens, V vocabulary, D model width, K top tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surgery.core.logit_rows import UNCHANGED, Direction, LogitTransform, RowSpec, gathered, row_gradient_, row_stats
from surgery.training.top_k import TopK, top_k_divergence, top_k_log_probs

CHUNK_TOKENS = 2048  # fewer cost more for adding up dW, more cost memory


class LossWeights(NamedTuple):
    """What the loss consists of. The cross-entropy is computed where ce_weight is not 0."""

    kl_weight: float = 0.0
    ce_weight: float = 0.0
    temperature: float = 1.0
    direction: Direction = "forward"


class LossSums(NamedTuple):
    """Sums over the tokens, by weight, in nats: the loss, and without gradient its parts (T^2 KL and CE; zeros where not
    computed).
    """

    total: Tensor
    kl: Tensor
    ce: Tensor


@dataclass(frozen=True)
class Logits:
    """A model's logits (before `transform`) of N tokens, computed from hidden states for a slice of tokens at a time.

    input_NX: hidden states (N, D), or the logits themselves (N, V) with head None. head: gives logits of hidden states.
    """

    input_NX: Tensor
    head: Callable[[Tensor], Tensor] | None
    transform: LogitTransform

    @torch.no_grad()
    def rows(self, rows: slice, device: torch.device) -> Tensor:
        """Return the logits of a slice of tokens, without gradient, on a device."""
        input_NX = self.input_NX[rows]
        if self.head is None:
            return input_NX.to(device)
        with torch.autocast(input_NX.device.type, enabled=False):  # a teacher runs in its own dtype
            return self.head(input_NX).to(device)


@dataclass(frozen=True)
class Targets:
    """What N tokens are compared with.

    weight_N: of the tokens, 0 where not counted. labels_N: tokens of the cross-entropy (any where the weight is 0), or
    None. teacher: a teacher's logits, or None. top: a teacher's top-k log-probabilities, or None. k: number of the
    teacher's most likely tokens that are compared one by one, or None for all.
    """

    weight_N: Tensor
    labels_N: Tensor | None = None
    teacher: Logits | None = None
    top: TopK | None = None
    k: int | None = None

    def top_k(self, rows: slice, teacher_NV: Tensor | None, temperature: float) -> TopK | None:
        """Return the top-k targets of a slice of tokens, or None if the whole distribution is compared."""
        if self.top is not None:
            return TopK(*(t[rows] for t in self.top))
        if self.k is None or teacher_NV is None or self.teacher is None:
            return None
        transform = self.teacher.transform
        spec = RowSpec(teacher_NV.shape[-1], True, False, temperature, transform=transform)
        sums_N = row_stats(teacher_NV, None, spec).soft_N
        return top_k_log_probs(teacher_NV, self.k, temperature, transform=transform, log_sum_N=sums_N)


# -- heads -----------------------------------------------------------------------------------------
class DenseHead:
    """Products of a dense linear head, y = x W^T + b, and their gradients.

    dtype: of the products; that of autocast where it is on. Parameters: weight (V, D), bias (V,) or None.
    """

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None):
        self.parameters = [weight_VD] if bias_V is None else [weight_VD, bias_V]

    def start(self, input_ND: Tensor, parameters: tuple[Tensor, ...], needs: tuple[bool, ...]) -> None:
        """Begin a pass over chunks. needs: whether the gradients of the input and the parameters are needed."""
        device, self.dtype = input_ND.device.type, parameters[0].dtype
        if torch.is_autocast_enabled(device) and self.dtype != torch.float64:
            self.dtype = torch.get_autocast_dtype(device)
        self.weight_VD, *bias = (p.detach().to(self.dtype) for p in parameters)
        self.bias_V = bias[0] if bias else None
        self.input_ND, self.needs = input_ND.detach(), needs
        self.d_input = torch.empty_like(self.input_ND) if needs[0] else None
        self.d_parameters: list[Tensor | None] = [None] * len(parameters)
        self.dtypes = [p.dtype for p in parameters]

    def logits(self, rows: slice) -> Tensor:
        """Return the logits of a slice of tokens, which the caller may overwrite."""
        self.chunk_ND = self.input_ND[rows].to(self.dtype)
        with torch.autocast(self.chunk_ND.device.type, enabled=False):
            return nn.functional.linear(self.chunk_ND, self.weight_VD, self.bias_V)

    def add_gradient(self, rows: slice, grad_NV: Tensor) -> None:
        """Add the gradients that follow from those of a slice's logits."""
        with torch.autocast(grad_NV.device.type, enabled=False):
            if self.d_input is not None:
                self.d_input[rows] = grad_NV @ self.weight_VD
            if self.needs[1]:
                self.d_parameters[0] = add_product(self.d_parameters[0], grad_NV, self.chunk_ND)
            if self.bias_V is not None and self.needs[2]:
                sum_V = grad_NV.sum(0, dtype=torch.promote_types(grad_NV.dtype, torch.float32))
                self.d_parameters[1] = sum_V if self.d_parameters[1] is None else self.d_parameters[1].add_(sum_V)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the input and the parameters, and release what the pass held."""
        found = [self.d_input, *(d if d is None else d.to(t) for d, t in zip(self.d_parameters, self.dtypes))]
        for name in ("weight_VD", "bias_V", "input_ND", "chunk_ND", "d_input", "d_parameters"):
            self.__dict__.pop(name, None)
        return found


class ModuleHead:
    """Any other head, such as a structured or quantized linear, or one with an adapter: called chunk by chunk, with an
    autograd graph of its own for each chunk.
    """

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor]):
        self.forward, self.parameters = forward, [p for p in module.parameters() if p.requires_grad]

    def start(self, input_ND: Tensor, parameters: tuple[Tensor, ...], needs: tuple[bool, ...]) -> None:
        """Begin a pass over chunks, see `DenseHead`."""
        self.input_ND, self.own, self.with_input = input_ND.detach(), list(parameters), needs[0]
        self.with_gradient = any(needs)
        self.found: list[Tensor | None] = [torch.empty_like(self.input_ND) if needs[0] else None]
        self.found += [None] * len(parameters)

    def logits(self, rows: slice) -> Tensor:
        """Return the logits of a slice of tokens, which the caller may overwrite."""
        self.chunk_ND = self.input_ND[rows].requires_grad_(self.with_input)
        with torch.set_grad_enabled(self.with_gradient):
            self.logits_NV = self.forward(self.chunk_ND)
        return self.logits_NV.detach().clone()

    def add_gradient(self, rows: slice, grad_NV: Tensor) -> None:
        """Add the gradients that follow from those of a slice's logits."""
        leaves = [self.chunk_ND, *self.own] if self.with_input else self.own
        grads = list(torch.autograd.grad(self.logits_NV, leaves, grad_NV, allow_unused=True))
        if (d_input := self.found[0]) is not None:
            d_input[rows] = 0.0 if (d_chunk := grads.pop(0)) is None else d_chunk
        for i, grad in enumerate(grads, 1):
            if grad is not None:
                before = self.found[i]
                self.found[i] = grad if before is None else before + grad

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the input and the parameters, and release what the pass held."""
        found = self.found
        for name in ("input_ND", "own", "chunk_ND", "logits_NV", "found"):
            self.__dict__.pop(name, None)
        return found


class NoHead:
    """Logits that are there already: the input is the logits."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []

    def start(self, input_NV: Tensor, parameters: tuple[Tensor, ...], needs: tuple[bool, ...]) -> None:
        """Begin a pass over chunks, see `DenseHead`."""
        self.input_NV = input_NV.detach()
        self.d_input = torch.empty_like(self.input_NV) if needs[0] else None

    def logits(self, rows: slice) -> Tensor:
        """Return the logits of a slice of tokens, which the caller may overwrite."""
        return self.input_NV[rows].clone()

    def add_gradient(self, rows: slice, grad_NV: Tensor) -> None:
        """Store the gradients of a slice's logits."""
        if self.d_input is not None:
            self.d_input[rows] = grad_NV

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of the logits, and release what the pass held."""
        found: list[Tensor | None] = [self.d_input]
        del self.input_NV, self.d_input
        return found


Head = DenseHead | ModuleHead | NoHead


def add_product(total_VD: Tensor | None, left_NV: Tensor, right_ND: Tensor) -> Tensor:
    """Return total + left^T right, in float32 at least; the total is overwritten."""
    dtype = torch.promote_types(left_NV.dtype, torch.float32)
    left_VN = left_NV.T
    if dtype == left_NV.dtype:
        return left_VN @ right_ND if total_VD is None else total_VD.addmm_(left_VN, right_ND)
    if has_float32_output(left_NV.device.type, left_NV.dtype):
        if total_VD is None:
            return torch.mm(left_VN, right_ND, out_dtype=dtype)
        return torch.addmm(total_VD, left_VN, right_ND, out_dtype=dtype, out=total_VD)
    product_VD = left_VN @ right_ND
    return product_VD.to(dtype) if total_VD is None else total_VD.add_(product_VD)


@functools.cache
def has_float32_output(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of this dtype into a float32 sum (torch 2.8 and later, on GPUs)."""
    try:
        a = torch.zeros(16, 16, device=device_type, dtype=dtype)
        total = torch.mm(a, a, out_dtype=torch.float32)
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


# -- the loss --------------------------------------------------------------------------------------
def linear_loss(
    input_NX: Tensor, head: Head, targets: Targets, weights: LossWeights, transform: LogitTransform
) -> LossSums:
    """Return the loss of N tokens. input_NX: what the head reads; transform: what the model does with its logits.

    The gradient of `total` can be computed once: the sums of the first backward pass are not kept.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in (input_NX, *head.parameters)):
        return LossSums(*_LinearLoss.apply(head, targets, weights, transform, input_NX, *head.parameters))
    needs = (False,) * (1 + len(head.parameters))
    with torch.no_grad():
        sums, _ = _pass_over_chunks(head, targets, weights, transform, input_NX, tuple(head.parameters), needs=needs)
    return sums


class _LinearLoss(torch.autograd.Function):
    """The loss, with its gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, targets: Targets, weights: LossWeights, transform: LogitTransform, input_NX: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        sums, ctx.grads = _pass_over_chunks(
            head, targets, weights, transform, input_NX, parameters, needs=ctx.needs_input_grad[4:]
        )
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found, ctx.grads = ctx.grads, None
        if found is None:
            raise RuntimeError(
                "The gradient of a loss from hidden states can be computed once: it is scaled in place. Compute the "
                "loss again."
            )
        return None, None, None, None, *(d if d is None else d.mul_(grads[0]) for d in found)


def _pass_over_chunks(
    head: Head, targets: Targets, weights: LossWeights, transform: LogitTransform, input_NX: Tensor,
    parameters: tuple[Tensor, ...], *, needs: tuple[bool, ...],
) -> tuple[LossSums, list[Tensor | None]]:  # fmt: skip
    """Return the sums and the gradients of the input and the parameters."""
    head.start(input_NX, parameters, needs)
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(input_NX), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        logits_NV = head.logits(rows)
        with torch.autocast(logits_NV.device.type, enabled=False):  # sums are float32
            parts.append(_chunk_losses_(logits_NV, rows, targets, weights, transform, any(needs)))
        if any(needs):
            head.add_gradient(rows, logits_NV)
        del logits_NV  # before the next chunk's are allocated
    kl, ce = (torch.stack(sums).sum() for sums in zip(*parts))
    kl = kl * weights.temperature**2
    total = weights.kl_weight * kl + weights.ce_weight * ce if weights.ce_weight else weights.kl_weight * kl
    return LossSums(total, kl, ce), head.gradients()


def _chunk_losses_(
    logits_NV: Tensor, rows: slice, targets: Targets, weights: LossWeights, transform: LogitTransform, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """Return the weighted sums of KL and CE, scalars. overwrite: replace the logits by the gradient of the total."""
    weight_N, temperature = targets.weight_N[rows], weights.temperature
    labels_N = targets.labels_N[rows] if targets.labels_N is not None and weights.ce_weight else None
    teacher, vocabulary = targets.teacher, logits_NV.shape[-1]
    teacher_NV = None if teacher is None else teacher.rows(rows, logits_NV.device)
    top = targets.top_k(rows, teacher_NV, temperature)
    if top is not None:
        teacher_NV = None
    spec = RowSpec(
        vocabulary if teacher_NV is None else min(vocabulary, teacher_NV.shape[-1]),
        top is not None or teacher_NV is not None, labels_N is not None, temperature, weights.direction, transform,
        UNCHANGED if teacher is None else teacher.transform,
    )  # fmt: skip
    stats = row_stats(logits_NV, teacher_NV, spec)
    zero = weight_N.new_zeros(())
    kl = zero if stats.kl_N is None else (stats.kl_N * weight_N).sum()
    ce, hard_N = zero, None
    if labels_N is not None:
        label_N = gathered(logits_NV, labels_N[:, None], transform).squeeze(-1)
        assert stats.hard_N is not None
        ce, hard_N = ((stats.hard_N - label_N) * weight_N).sum(), weights.ce_weight * weight_N
    soft_N = weights.kl_weight * temperature * weight_N if spec.soft else None
    if top is None:
        if overwrite:
            row_gradient_(logits_NV, teacher_NV, stats, soft_N, hard_N, labels_N, spec=spec)
        return kl, ce
    assert stats.soft_N is not None
    x_NK = gathered(logits_NV, top.tokens_NK, transform)
    log_q_NK = x_NK / temperature - stats.soft_N[:, None]
    with torch.set_grad_enabled(overwrite):
        leaf_NK = log_q_NK.requires_grad_(overwrite)
        kl_N = top_k_divergence(leaf_NK, top, weights.direction)
    kl = (kl_N.detach() * weight_N).sum()
    if overwrite:
        assert soft_N is not None
        (d_NK,) = torch.autograd.grad(kl_N, leaf_NK, soft_N.to(kl_N.dtype))
        # By x the divergence has the gradient d_k [v = k] - q_v sum_k d_k; the top tokens get theirs in float32.
        rest_N = -d_NK.sum(-1)
        row_gradient_(logits_NV, None, stats, rest_N, hard_N, labels_N, spec=spec)
        value_NK = d_NK + rest_N[:, None] * log_q_NK.detach().exp()
        if hard_N is not None and labels_N is not None and stats.hard_N is not None:
            hard_NK = (x_NK - stats.hard_N[:, None]).exp() - (top.tokens_NK == labels_N[:, None]).float()
            value_NK = value_NK + hard_N[:, None] * hard_NK
        logits_NV.scatter_(-1, top.tokens_NK, (value_NK * transform.slope(x_NK)).to(logits_NV.dtype))
    return kl, ce


def divergence(student: Logits, teacher: Logits, device: torch.device) -> Tensor:
    """Return KL(teacher || student), (N,) in nats, at temperature 1, without gradient."""
    parts = []
    for start in range(0, len(student.input_NX), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        ours_NV, theirs_NV = student.rows(rows, device), teacher.rows(rows, device)
        size = min(ours_NV.shape[-1], theirs_NV.shape[-1])
        spec = RowSpec(size, True, False, transform=student.transform, teacher_transform=teacher.transform)
        kl_N = row_stats(ours_NV, theirs_NV, spec).kl_N
        assert kl_N is not None
        parts.append(kl_N)
    return torch.cat(parts)
