"""Baselines from flash-linear-attention, if installed: the same tokens through its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from surgery.eval.speed.timer import Call

CallAndLeaves = tuple[Call, list[Tensor]]


def fla_baselines(tokens: Any) -> list[tuple[str, Callable[[], CallAndLeaves]]]:
    """Return (name, constructor of a call and its leaf tensors); the constructor imports the library.

    tokens: BenchmarkTokens, laid out here as the library requires.
    """
    return [
        ("fla log-linear", lambda: _log_linear(tokens)),
        ("fla SSD (simple GLA)", lambda: _simple_gla(tokens)),
        ("fla gated delta", lambda: _gated_delta(tokens)),
    ]


def _log_linear(t: Any) -> CallAndLeaves:
    from fla.ops.log_linear_attn import chunk_log_linear_attn  # type: ignore[import-not-found,unused-ignore]

    q, k, v = t.q_BT1K, t.k_BT1K, t.v_BHTV.transpose(1, 2).contiguous()
    gate, level = t.gate_BTH, t.level_BTH1L.squeeze(3).to(v.dtype)  # it takes lambdas in no other dtype
    return lambda: chunk_log_linear_attn(q, k, v, gate, level)[0], [q, k, v, gate, level]


def _simple_gla(t: Any) -> CallAndLeaves:
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found,unused-ignore]

    v, gate = t.v_BHTV.transpose(1, 2).contiguous(), t.gate_BTH
    q, k = (x.expand(-1, -1, v.shape[2], -1).contiguous() for x in (t.q_BT1K, t.k_BT1K))
    return lambda: chunk_simple_gla(q, k, v, gate, scale=1.0)[0], [q, k, v, gate]


def _gated_delta(t: Any) -> CallAndLeaves:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found,unused-ignore]

    v, beta = t.v_BHTV.transpose(1, 2).contiguous(), t.beta_BHT.transpose(1, 2).contiguous()
    q, k = t.q_BT1K, F.normalize(t.k_BT1K.float(), dim=-1).to(v.dtype)
    gate = t.gate_BTH
    return lambda: chunk_gated_delta_rule(q, k, v, gate, beta, scale=1.0)[0], [q, k, v, gate, beta]


def distribution_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of

    try:
        return of(name)
    except PackageNotFoundError:
        return None
