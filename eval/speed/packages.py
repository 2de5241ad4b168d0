"""Benchmark of gated masks beside the kernels of other packages: 48 heads, each with its own queries and keys of 128
features, values of 128, tokens before heads in memory, which no package needs to copy.

A row "Gated DeltaNet, fla" calls the op with that package forced (kernels/packages/contest.py). It has no time if the
package is left out because it fails the check against the reference; the note says why. "measured" is what a model
runs. Packages that are not installed have no rows and the version null; log-linear masks have none either, because no
package takes several heads of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import PACKAGE_CHOICES, KernelChoice, load_kernels
from surgery.core.errors import SurgeryError
from surgery.eval.speed.attention import BenchmarkTokens, make_masked
from surgery.eval.speed.baselines import distribution_version
from surgery.eval.speed.roofline import linear_attention_work, log_linear_reads
from surgery.eval.speed.timer import BenchmarkCase, Call, TimedImplementation, backward, forward

TOKENS = {"full": (8192, 16384, 32768, 65536), "main": (8192, 16384, 32768), "small": (64,)}
WIDTHS = {"full": (1, 48, 128, 128), "main": (1, 48, 128, 128), "small": (1, 2, 16, 16)}  # B, H, V, K
MASKS = {  # tables: name, mask, delta, its op in kernels/packages; the first row is what the others are compared with
    "Gated DeltaNet": (
        ("Gated DeltaNet", "gates", True, "gated delta rule"),
        ("log-linear GDN", "hierarchical", True, None),
    ),
    "SSD": (("SSD", "gates", False, "SSD"), ("log-linear Mamba-2", "hierarchical", False, None)),
}


def benchmark_cases(sizes: str, device: torch.device, dtype: torch.dtype) -> Iterator[BenchmarkCase]:
    """Yield the cases of all lengths, forward and training."""
    batch, heads, value, key = WIDTHS[sizes]
    where = {"batch": batch, "heads": heads, "value": value, "key of linear": key, "lanes": batch * heads}
    for length in TOKENS[sizes]:
        for back in (False, True):
            tokens = _tokens(sizes, length, device, dtype)
            for title, masks in MASKS.items():
                table = f"{title} and other packages, forward{' + backward' if back else ''}"
                yield BenchmarkCase(table, length, {**where, "tokens": length}, _implementations(tokens, masks, back))


def _tokens(sizes: str, length: int, device: torch.device, dtype: torch.dtype) -> BenchmarkTokens:
    """Return random inputs whose q, k and v are (B, T, H, X) in memory; q_BT1K and k_BT1K have all heads."""
    batch, heads, value, key = WIDTHS[sizes]
    tokens = BenchmarkTokens.random((batch, heads, value, key), length, device, dtype)
    draw = lambda size: torch.randn(batch, length, heads, size, device=device, dtype=dtype)  # noqa: E731
    tokens.q_BT1K, tokens.k_BT1K = draw(key) * key**-0.5, F.normalize(draw(key).float(), dim=-1).to(dtype)
    tokens.v_BHTV = draw(value).transpose(1, 2)
    return tokens


def _implementations(
    tokens: BenchmarkTokens, masks: Sequence[tuple[str, str, bool, str | None]], back: bool
) -> list[TimedImplementation]:
    batch, heads, length, value = tokens.v_BHTV.shape
    key, levels = tokens.q_BT1K.shape[-1], tokens.level_BTH1L.shape[-1]
    made = []
    for name, mask, delta, op in masks:
        leveled = mask == "hierarchical"
        work = linear_attention_work(
            batch, heads, heads, length, key, value, back=back, width=tokens.v_BHTV.element_size(),
            extra=1 + delta + leveled * levels, reads=log_linear_reads(length) if leveled else 1,
        )  # fmt: skip
        choices: list[KernelChoice] = ["kernel", "measured"]
        if op is not None and tokens.v_BHTV.is_cuda:
            choices += [package for package in PACKAGE_CHOICES if package in _installed(op)]
        for choice in choices:
            make = _maker(tokens, mask, delta, op, choice, back)
            made.append(TimedImplementation(f"{name}, {choice}", make, choice, work))
    return made


def _maker(
    tokens: BenchmarkTokens, mask: str, delta: bool, op: str | None, choice: str, back: bool
) -> Callable[[], Call]:
    def make() -> Call:
        call, leaves = make_masked(tokens, mask, delta)
        if choice in PACKAGE_CHOICES:
            _require_package(op, choice, call, leaves, back)
        return backward(call, leaves) if back else forward(call)

    return make


def _require_package(
    op: str | None, package: str, call: Callable[[], Tensor], leaves: list[Tensor], back: bool
) -> None:
    """Run the call once. Raises SurgeryError with the reason if our kernel ran instead of the package's."""
    (backward(call, leaves) if back else forward(call))()
    pass_ = "backward" if back else "forward"
    found = [result for result in _results() if (result.op, result.pass_) == (op, pass_) and not result.milliseconds]
    for result in reversed(found):  # with a package forced, no times are taken
        if result.chosen == package:
            return
        if package in result.left_out:
            raise SurgeryError(result.left_out[package])
    raise SurgeryError(f"our kernel ran in place of {package}, for a reason that was not recorded")


def _installed(op: str) -> list[str]:
    """Return the installed packages that have a kernel of an op."""
    if not load_kernels():
        return []
    from surgery.kernels.packages.adapters import GATED_DELTA_KERNELS, SSD_KERNELS
    from surgery.kernels.packages.contest import is_installed

    kernels = {"gated delta rule": GATED_DELTA_KERNELS, "SSD": SSD_KERNELS}[op]
    return [kernel.package for kernel in kernels if is_installed(kernel.module.partition(".")[0])]


def versions() -> dict[str, str | None]:
    """Return the installed versions of the packages."""
    return {name: distribution_version(name) for name in ("flash-qla", "fla-core", "flashinfer-python")}


def choices() -> list[str]:
    """Return the choices between our kernels and those of packages in this process, as sentences."""
    return [str(result) for result in _results()]


def _results() -> list[Any]:
    if not load_kernels():
        return []
    from surgery.kernels.packages.contest import results

    return list(results())
