"""Scans of single levels (Guo et al. 2025, Figure 4, naive) against the hierarchical mask, values and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.mask_rows import SHAPE, dense_output, make_mask, random_rows

from recipes.papers.attention.level_scans import level_scans
from surgery.mixers.masks.log_linear import Hierarchical


def scans_of(rows):
    gates_BGT, lambda_BGJTL = rows.signals["gate"].transpose(1, 2), rows.signals["level"].permute(0, 2, 3, 1, 4)
    return level_scans(rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV, gates_BGT, lambda_BGJTL, 8)


@pytest.mark.parametrize("groups, heads", [(2, 4), (6, 6)])
@pytest.mark.parametrize("length", [1, 2, 7, 33, 64])
def test_one_scan_a_level_is_the_mask(groups, heads, length):
    mask = make_mask(Hierarchical(levels=8), replace(SHAPE, groups=groups, heads=heads))
    with torch.no_grad():
        rows = random_rows(mask, "kernel", length, [0, 0], [length, length])
        if groups == heads:  # many value heads over one query and key, the setting of the figure
            rows.q_BGJTF, rows.k_BGTF = (x[:, :1].repeat_interleave(groups, 1) for x in (rows.q_BGJTF, rows.k_BGTF))
        expected = dense_output(mask, rows)
    leaves = [t.requires_grad_() for t in (rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV, *rows.signals.values())]
    out = scans_of(rows)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(
        (dense_output(mask, rows) * weight).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
