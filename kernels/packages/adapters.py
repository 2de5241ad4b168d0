"""Calls of other packages' kernels for the gated delta rule and SSD, by their public functions.

| package | functions | takes |
| --- | --- | --- |
| flash-qla (MIT) | `flash_qla.chunk_gated_delta_rule` | bfloat16 or float16, K = V = 128; forward and backward |
| fla-core (MIT) | `fla.ops.gated_delta_rule.chunk_gated_delta_rule`, `fla.ops.simple_gla.chunk_simple_gla` | forward and backward |
| flashinfer (Apache-2.0) | `flashinfer.gdn_prefill.chunk_gated_delta_rule` | bfloat16 or float16, K = V = 128; forward |

Read in flash-qla 0.1.2, fla 0.6 and flashinfer 0.6. All take heads last (heads_last.py) and `scale`, which is 1 here.
fla and flash-qla take log-gates and states (R, H, K, V). flashinfer takes gates themselves, exp(g), one packed row with
`cu_seqlens`, and states (R, H, V, K). Its SSD kernel is for Blackwell only and is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.packages.heads_last import HeadsLast, RowTensors

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PackageKernel:
    """One function of a package.

    package: its name for SURGERY_KERNELS and SURGERY_KERNEL_PACKAGES. module: where `load` imports the function from.
    run(function, tensors, ends): returns (out_BTHV, last_RHKV); ends (R + 1,) are the borders of packed sequences, or
    None. refuses(rows): returns why the package does not take a call, or None. has_backward: whether autograd
    differentiates `run`. takes_shared: whether q and k may have one head for all values' heads.
    """

    package: str
    module: str
    load: Callable[[], Callable[..., Any]]
    run: Callable[[Any, HeadsLast, Tensor | None], tuple[Tensor, Tensor]]
    refuses: Callable[[RowTensors], str | None] = lambda rows: None
    has_backward: bool = True
    takes_shared: bool = True


def _refuses_all_but_half_of_128(rows: RowTensors) -> str | None:
    features, values = rows.k.shape[-1], rows.v.shape[-1]
    if rows.v.dtype not in HALF:
        return f"it takes bfloat16 and float16 (got {rows.v.dtype})"
    return None if features == values == 128 else f"it takes K = V = 128 (got K = {features}, V = {values})"


def _run_delta(function: Any, x: HeadsLast, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = function(
        x.q_BTNK, x.k_BTNK, x.v_BTHV, g=x.gates_BTH, beta=x.beta_BTH, scale=1.0,
        initial_state=x.first_RHKV, output_final_state=True, cu_seqlens=None if ends is None else ends.long(),
    )  # fmt: skip
    return made


def _run_ssd(function: Any, x: HeadsLast, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = function(
        x.q_BTNK, x.k_BTNK, x.v_BTHV, g=x.gates_BTH, scale=1.0,
        initial_state=x.first_RHKV, output_final_state=True, cu_seqlens=None if ends is None else ends.long(),
    )  # fmt: skip
    return made


def _run_flashinfer(function: Any, x: HeadsLast, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, length = x.v_BTHV.shape[:2]
    borders = torch.arange(batch + 1, device=x.v_BTHV.device) * length if ends is None else ends.long()
    assert x.beta_BTH is not None
    first = None if x.first_RHKV is None else x.first_RHKV.mT.contiguous()
    out, last = function(
        *(tokens.flatten(0, 1) for tokens in (x.q_BTNK, x.k_BTNK, x.v_BTHV)), g=x.gates_BTH.exp().flatten(0, 1),
        beta=x.beta_BTH.flatten(0, 1), scale=1.0, initial_state=first, output_final_state=True, cu_seqlens=borders,
    )  # fmt: skip
    return out.unflatten(0, (batch, length)), last.mT


def _load_flash_qla() -> Callable[..., Any]:
    from flash_qla import chunk_gated_delta_rule  # type: ignore[import-not-found,unused-ignore]

    return chunk_gated_delta_rule  # type: ignore[no-any-return,unused-ignore]


def _load_fla_delta() -> Callable[..., Any]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found,unused-ignore]

    return chunk_gated_delta_rule  # type: ignore[no-any-return,unused-ignore]


def _load_fla_ssd() -> Callable[..., Any]:
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found,unused-ignore]

    return chunk_simple_gla  # type: ignore[no-any-return,unused-ignore]


def _load_flashinfer() -> Callable[..., Any]:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule  # type: ignore[import-not-found,unused-ignore]

    return chunk_gated_delta_rule  # type: ignore[no-any-return,unused-ignore]


GATED_DELTA_KERNELS = (
    PackageKernel("flash-qla", "flash_qla", _load_flash_qla, _run_delta, _refuses_all_but_half_of_128),
    PackageKernel("fla", "fla.ops.gated_delta_rule", _load_fla_delta, _run_delta),
    PackageKernel(
        "flashinfer",
        "flashinfer.gdn_prefill",
        _load_flashinfer,
        _run_flashinfer,
        _refuses_all_but_half_of_128,
        has_backward=False,
    ),
)
SSD_KERNELS = (PackageKernel("fla", "fla.ops.simple_gla", _load_fla_ssd, _run_ssd, takes_shared=False),)
