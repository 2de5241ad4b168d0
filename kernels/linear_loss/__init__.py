"""Losses of rows of logits and their gradient, written over the logits: replaces `row_stats` and `row_gradient_`.

One program reads a row of student and teacher logits once for the statistics, with a running maximum; another grid reads
both again and writes the gradient. Products with the heads stay PyTorch's (surgery/training/linear_loss.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.core.logit_rows import RowSpec, RowStats, row_gradient_, row_stats
from surgery.kernels.linear_loss.rows import gradient_kernel, stats_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 4096  # logits of a row at a time
WARPS = 8


def accepts(logits_NV: Tensor, teacher_NV: Tensor | None, *_: Any, **__: Any) -> bool:
    """Return whether the kernels compute this call: rows without gaps, on one device."""
    tensors = [logits_NV] if teacher_NV is None else [logits_NV, teacher_NV]
    return all(
        t.dtype in DTYPES
        and t.ndim == 2
        and t.stride(-1) == 1
        and t.device == logits_NV.device
        and 0 < t.shape[-1] < 2**30
        and t.shape[0] > 0
        for t in tensors
    )


def row_arguments(logits_NV: Tensor, teacher_NV: Tensor | None, spec: RowSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (arguments, compile-time constants) that both kernels share."""
    teacher = logits_NV if teacher_NV is None else teacher_NV
    student, theirs = spec.transform, spec.teacher_transform
    sizes = {
        "logits_ptr": logits_NV,
        "teacher_ptr": teacher,
        "stride": logits_NV.stride(0),
        "teacher_stride": teacher.stride(0),
        "N": logits_NV.shape[0],
        "V": logits_NV.shape[1],
        "SIZE": spec.size,
        "inverse_temperature": 1.0 / spec.temperature,
        "scale": student.scale,
        "cap": student.softcap,
        "teacher_scale": theirs.scale,
        "teacher_cap": theirs.softcap,
    }
    options = {
        "SOFT": spec.soft,
        "HARD": spec.hard,
        "SHARED": spec.shares_sum(logits_NV.shape[1]),
        "TEACHER": teacher_NV is not None,
        "REVERSE": spec.direction == "reverse",
        "CAPPED": spec.transform.softcap != 0,
        "TEACHER_CAPPED": spec.teacher_transform.softcap != 0,
        "BLOCK": min(BLOCK, triton.next_power_of_2(logits_NV.shape[1])),
        "num_warps": WARPS,
    }
    return sizes, options


@register_kernel(row_stats, accepts=accepts)
def row_stats_triton(logits_NV: Tensor, teacher_NV: Tensor | None, spec: RowSpec) -> RowStats:
    """Return the statistics of rows, as in `row_stats`."""
    rows = logits_NV.shape[0]
    out_4N = torch.empty(4, rows, device=logits_NV.device, dtype=torch.float32)
    sizes, options = row_arguments(logits_NV, teacher_NV, spec)
    stats_kernel[(rows,)](out_ptr=out_4N, **sizes, **options)
    has_teacher = spec.soft and teacher_NV is not None
    known = (spec.soft, has_teacher, has_teacher, spec.hard)
    return RowStats(*(out_4N[i] if is_known else None for i, is_known in enumerate(known)))


@register_kernel(row_gradient_, accepts=accepts)
def row_gradient_triton_(
    logits_NV: Tensor,
    teacher_NV: Tensor | None,
    stats: RowStats,
    soft_N: Tensor | None,
    hard_N: Tensor | None,
    labels_N: Tensor | None,
    *,
    spec: RowSpec,
) -> None:
    """Overwrite the logits by the gradient, as `row_gradient_`."""
    rows, vocabulary = logits_NV.shape
    sizes, options = row_arguments(logits_NV, teacher_NV, spec)
    options |= {"SOFT": soft_N is not None, "HARD": hard_N is not None}
    factors = (soft_N, hard_N, *stats)
    given = [logits_NV if t is None else t.contiguous().float() for t in factors]
    labels = logits_NV if labels_N is None else labels_N.contiguous()
    gradient_kernel[(rows, triton.cdiv(vocabulary, options["BLOCK"]))](
        soft_ptr=given[0],
        hard_ptr=given[1],
        soft_sum_ptr=given[2],
        teacher_sum_ptr=given[3],
        kl_ptr=given[4],
        hard_sum_ptr=given[5],
        labels_ptr=labels,
        **sizes,
        **options,
    )
