"""The choice between our kernels and those of other packages: import, check, timing.

    choose(kernels, call) -> None (our kernel), or the `PackageKernel` that runs the calls of this shape

1. A package is imported at the first call on a GPU that it could run. If the import fails, one warning names the
   package and the error, and the package is left out until the process ends.
2. For each class of calls (dtype, G, J, K, V, shared queries and keys, first state, packing) and pass, a kernel
   computes small random inputs. Its outputs, or gradients, must agree with those of the PyTorch reference in float64:
   relative error in the 2-norm at most `TOLERANCES` (twice that for gradients) in each tensor.
3. At the first call of each power of two of tokens of a class, our kernel and all that passed run that call. Each must
   agree with our kernel within twice the tolerance. The least median of `RUNS` times, of some calls in a row, is chosen,
   also for later calls of as many tokens in more or fewer rows.

A kernel that raises in step 2 or 3 is left out for that class or size; if the GPU no longer works after it, that is an
error. `results` lists choices, times and reasons. The choices of forward and backward are separate: a backward takes the
inputs and recomputes its forward. Choices hold until the process ends, and each process makes its own.

SURGERY_KERNEL_PACKAGES restricts the packages: names separated by commas, or `none`. SURGERY_KERNELS=flash-qla, fla or
flashinfer takes that package wherever it passes step 2; `kernel` takes none. While a CUDA graph is captured, or torch
is set to report synchronization, our kernels run, because a package may wait for the GPU.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from surgery.core.dispatch import PACKAGE_CHOICES as PACKAGES
from surgery.core.dispatch import chooses_by_time, kernel_choice
from surgery.core.errors import SurgeryError, suggestion
from surgery.kernels.packages.adapters import PackageKernel
from surgery.kernels.packages.heads_last import (
    HeadsLast,
    RowTensors,
    input_gradients,
    output_gradients,
    outputs_by_group,
    to_heads_last,
)
from surgery.kernels.tuning import is_capturing
from surgery.mixers.masks.semiseparable import semiseparable

PackagePass = Literal["forward", "backward"]
VARIABLE = "SURGERY_KERNEL_PACKAGES"
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 5e-3}
RUNS, CALLS_IN_A_RUN = 5, 4  # timed runs of a kernel, and calls in each
CHECK_TOKENS = 150  # two chunks of 64 and a part of a third
OURS = "ours"
_log = logging.getLogger(__name__)


@dataclass
class ContestResult:
    """The choice for one size of calls: `chosen` is "ours" or a package; milliseconds and reasons by name."""

    op: str
    pass_: PackagePass
    call: str
    tokens: int
    chosen: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {time:.3f} ms" for name, time in self.milliseconds.items())
        reasons = "".join(f"; {name} left out: {reason}" for name, reason in self.left_out.items())
        return f"{self.op} {self.pass_}, {self.call}, up to {self.tokens} tokens: {self.chosen} ({times}){reasons}"


class PackageCall(NamedTuple):
    """One call of an op. ends: borders of packed sequences, or None. ours: runs our kernel. grads: (d_out, d_last) of a
    backward, whose results are gradients of `rows`."""

    op: str
    rows: RowTensors
    ends: Tensor | None
    ours: Callable[[], tuple[Tensor | None, ...]]
    grads: tuple[Tensor, Tensor] | None = None


class CallClass(NamedTuple):
    """What a check of step 2 holds for."""

    op: str
    pass_: PackagePass
    dtype: torch.dtype
    device: torch.device
    G: int
    J: int
    K: int
    V: int
    shared: bool
    delta: bool
    first: bool
    packed: bool

    @classmethod
    def from_call(cls, call: PackageCall) -> CallClass:
        """Return the class of a call."""
        rows = call.rows
        sizes = rows.groups, rows.per_group, rows.k.shape[-1], rows.v.shape[-1]
        flags = rows.is_shared, rows.beta is not None, rows.first is not None, call.ends is not None
        pass_: PackagePass = "forward" if call.grads is None else "backward"
        return cls(call.op, pass_, rows.v.dtype, rows.v.device, *sizes, *flags)

    def __str__(self) -> str:
        parts = ("shared keys", self.shared), ("first state", self.first), ("packed", self.packed)
        sizes = f"G = {self.G}, J = {self.J}, K = {self.K}, V = {self.V}"
        return f"{str(self.dtype).removeprefix('torch.')}, {sizes}{''.join(f', {name}' for name, on in parts if on)}"


_choices: dict[Hashable, PackageKernel | None] = {}
_results: list[ContestResult] = []
_broken: dict[str, str] = {}  # package -> error of its import


def results() -> list[ContestResult]:
    """Return the choices of this process, in the order in which they were made."""
    return list(_results)


def clear() -> None:
    """Forget choices, checks and imports."""
    _choices.clear()
    _results.clear()
    _broken.clear()
    for kept in (import_kernel, check_kernel, allowed_packages, is_installed):
        kept.cache_clear()


@cache
def allowed_packages() -> tuple[str, ...]:
    """Return the packages that SURGERY_KERNEL_PACKAGES allows; without it, all."""
    value = os.environ.get(VARIABLE)
    if value is None:
        return PACKAGES
    names = tuple(name.strip() for name in value.split(",") if name.strip() not in ("", "none"))
    for name in names:
        if name not in PACKAGES:
            raise SurgeryError(
                f"environment variable {VARIABLE}={value!r} names {name!r}, which is not one of {', '.join(PACKAGES)}"
                f"{suggestion(name, PACKAGES)}. Give names separated by commas, or none."
            )
    return names


def candidates(kernels: tuple[PackageKernel, ...], x: Tensor) -> list[PackageKernel]:
    """Return the kernels that may run calls on x's device: installed and allowed."""
    choice = kernel_choice()
    if choice == "kernel" or not runs_on(x) or (choice not in PACKAGES and not chooses_by_time()):
        return []
    names = (choice,) if choice in PACKAGES else allowed_packages()
    return [kernel for kernel in kernels if kernel.package in names and is_installed(kernel.module.partition(".")[0])]


def runs_on(x: Tensor) -> bool:
    """Return whether packages' kernels can run on x's device, and the host may wait for it."""
    if not x.is_cuda or torch.version.hip is not None or is_capturing(x):
        return False
    return torch.cuda.get_sync_debug_mode() == 0


@cache
def is_installed(module: str) -> bool:
    """Return whether a top-level module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module without a spec: it was put into sys.modules
        return True


@cache
def import_kernel(kernel: PackageKernel) -> Any:
    """Return the kernel's function, or None if its import fails."""
    try:
        return kernel.load()
    except Exception as error:
        if kernel.package not in _broken:
            _broken[kernel.package] = f"import {kernel.module}: {_one_line(error)}"
            _log.warning("kernels of %s are not used: %s", kernel.package, _broken[kernel.package])
        return None


def choose(kernels: list[PackageKernel], call: PackageCall) -> PackageKernel | None:
    """Return the kernel for a call, or None for our own. kernels: of `candidates`."""
    of = CallClass.from_call(call)
    tokens = call.rows.v.shape[0] * call.rows.v.shape[2]
    size = 1 << max(0, tokens - 1).bit_length()
    key = of, size, kernel_choice()
    if key in _choices:
        return _choices[key]
    result = ContestResult(of.op, of.pass_, str(of), size, OURS)
    passed, chosen = [], None
    for kernel in kernels:
        reason = check_kernel(kernel, of) if _offers(kernel, of.pass_) else "it has no backward"
        if reason is None:
            passed.append(kernel)
        else:
            result.left_out[kernel.package] = reason
    if kernel_choice() in PACKAGES:
        chosen = passed[0] if passed else None
    elif passed:
        right = call.ours()
        if not all(x is None or x.isfinite().all() for x in right):
            return None  # a NaN agrees with nothing: a later call chooses
        chosen = _fastest(passed, result, call, right)
    result.chosen = OURS if chosen is None else chosen.package
    _choices[key] = chosen
    _results.append(result)
    _log.info("%s", result)
    return chosen


def _offers(kernel: PackageKernel, pass_: PackagePass) -> bool:
    return pass_ == "forward" or kernel.has_backward


def run_kernel(kernel: PackageKernel, call: PackageCall) -> tuple[Tensor | None, ...]:
    """Return what a package's kernel computes for a call: outputs, or gradients of its rows."""
    if call.grads is None:
        return run_forward(kernel, call.rows, call.ends)
    return run_backward(kernel, call.rows, call.ends, *call.grads)


def run_forward(kernel: PackageKernel, rows: RowTensors, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, last_RGKV) of a package's kernel."""
    with torch.no_grad():
        x = to_heads_last(rows, rows.is_shared and kernel.takes_shared)
        return outputs_by_group(rows, *kernel.run(import_kernel(kernel), x, ends))


def run_backward(
    kernel: PackageKernel, rows: RowTensors, ends: Tensor | None, d_out: Tensor, d_last: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `rows`, by autograd through a package's kernel."""
    x = HeadsLast(
        *(
            None if tensor is None else tensor.detach().requires_grad_()
            for tensor in to_heads_last(rows, rows.is_shared and kernel.takes_shared)
        )
    )
    leaves = [tensor for tensor in x if tensor is not None]
    with torch.enable_grad():
        outputs = kernel.run(import_kernel(kernel), x, ends)
    directions = output_gradients(rows, d_out, d_last)
    grads = iter(torch.autograd.grad(outputs, leaves, [d.to(o.dtype) for d, o in zip(directions, outputs)]))
    return input_gradients(rows, HeadsLast(*(None if tensor is None else next(grads) for tensor in x)))


# -- step 2: the check against the reference ------------------------------------------------------------------
@cache
def check_kernel(kernel: PackageKernel, of: CallClass) -> str | None:
    """Return why a kernel is left out for a class of calls, or None if it agrees with the reference."""
    rows, ends = random_call(of)
    reason = kernel.refuses(rows)
    if reason is not None:
        return reason
    if import_kernel(kernel) is None:
        return _broken[kernel.package]
    tolerance = TOLERANCES[of.dtype] * (1 if of.pass_ == "forward" else 2)
    try:
        if of.pass_ == "forward":
            return _disagreement(run_forward(kernel, rows, ends), reference_outputs(rows, ends), tolerance)
        d_out, d_last = _random_directions(rows, ends)
        made = run_backward(kernel, rows, ends, d_out, d_last)
        return _disagreement(made, _reference_gradients(rows, ends, d_out, d_last), tolerance)
    except Exception as error:
        return _reason_of(error, kernel, of.device)


def random_call(of: CallClass) -> tuple[RowTensors, Tensor | None]:
    """Return small inputs of a class of calls, always the same, and the borders of packed sequences."""
    generator = torch.Generator().manual_seed(0)
    host: Any = {"generator": generator, "device": "cpu", "dtype": torch.float32}  # whatever torch's defaults are
    draw = lambda *shape: torch.randn(*shape, **host)  # noqa: E731
    B, T, N = 1 if of.packed else 2, CHECK_TOKENS, 1 if of.shared else of.G
    ends = torch.tensor([0, 67, T], dtype=torch.int32, device=of.device) if of.packed else None
    move = lambda x, dtype=of.dtype: x.to(of.device, dtype)  # noqa: E731
    q, k = draw(B, N, of.J, T, of.K) * of.K**-0.5, torch.nn.functional.normalize(draw(B, N, T, of.K), dim=-1)
    q, k = (move(x).expand(-1, of.G, *x.shape[2:]) for x in (q, k))
    gates = torch.nn.functional.logsigmoid(draw(B, of.G, T) + 2)
    gates[..., 40::50] = -12.0  # the state is all but forgotten
    beta = move(torch.rand(B, of.G, T, **host), torch.float32) if of.delta else None
    first = move(draw(2, of.G, of.K, of.V), torch.float32) if of.first else None
    return RowTensors(q, k, move(draw(B, of.G, T, of.V)), beta, move(gates, torch.float32), first), ends


def reference_outputs(rows: RowTensors, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, last_RGKV) of the PyTorch reference, in the tensors' dtype or float64 of wide tensors."""
    wide = RowTensors(*(None if x is None else x.double() for x in rows))
    borders = [(0, rows.v.shape[2])] if ends is None else list(zip(ends.tolist(), ends.tolist()[1:]))
    outs, lasts = [], []
    for r, (start, end) in enumerate(borders):
        first = wide.first if wide.first is None or ends is None else wide.first[r : r + 1]
        out, last = semiseparable_reference(
            wide.q[:, :, :, start:end],
            wide.k[:, :, start:end],
            wide.v[:, :, start:end],
            None if wide.beta is None else wide.beta[:, :, start:end],
            wide.gates[:, None, :, start:end],
            None,
            first_BRGFV=None if first is None else first.unsqueeze(1),
            chunk=64,
        )
        outs.append(out)
        lasts.append(last.squeeze(1))
    return torch.cat(outs, 3), torch.cat(lasts)


def semiseparable_reference(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Run the reference of `semiseparable` on any device."""
    reference: Callable[..., tuple[Tensor, Tensor]] = semiseparable.reference  # type: ignore[attr-defined]
    return reference(*args, **kwargs)


def _random_directions(rows: RowTensors, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    host: Any = {"generator": torch.Generator().manual_seed(1), "device": "cpu", "dtype": torch.float32}
    R = len(rows.v) if ends is None else len(ends) - 1
    d_out = torch.randn(*rows.q.shape[:4], rows.v.shape[-1], **host)
    d_last = torch.randn(R, rows.groups, rows.k.shape[-1], rows.v.shape[-1], **host)
    return d_out.to(rows.v), d_last.to(rows.v.device)


def _reference_gradients(
    rows: RowTensors, ends: Tensor | None, d_out: Tensor, d_last: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `rows` in float64; those of shared queries and keys in equal parts for each group."""
    wide = RowTensors(*(None if x is None else x.double().detach().requires_grad_() for x in rows))
    leaves = [x for x in wide if x is not None]
    with torch.enable_grad():
        outputs = reference_outputs(wide, ends)
    grads = iter(torch.autograd.grad(outputs, leaves, [d_out.double(), d_last.double()]))
    by_input = [None if x is None else next(grads) for x in wide]
    if rows.is_shared:
        by_input[:2] = [None if d is None else d.mean(1, keepdim=True).expand_as(d) for d in by_input[:2]]
    return tuple(by_input)


def _disagreement(
    made: tuple[Tensor | None, ...], right: tuple[Tensor | None, ...], tolerance: float
) -> str | None:  # fmt: skip
    """Return a sentence about the first tensor whose relative error exceeds the tolerance, or None."""
    names = ("output", "state") if len(right) == 2 else tuple(f"gradient of {name}" for name in RowTensors._fields)
    for name, x, y in zip(names, made, right):
        if y is None:
            continue
        if x is None or x.shape != y.shape:
            return f"{name} has shape {None if x is None else tuple(x.shape)}, not {tuple(y.shape)}"
        norm = torch.linalg.vector_norm(y, dtype=torch.float64)
        error = (torch.linalg.vector_norm(x - y, dtype=torch.float64) / norm.clamp_min(1e-30)).item()
        if not error <= tolerance:  # NaN is no agreement
            return f"{name} has a relative error of {error:.2g}, above {tolerance:.2g}"
    return None


# -- step 3: the call itself ----------------------------------------------------------------------------------
def _fastest(
    passed: list[PackageKernel], result: ContestResult, call: PackageCall, right: tuple[Tensor | None, ...]
) -> PackageKernel | None:
    """Return the fastest of our kernel (None) and those that passed, which must agree with ours on the call. right: what
    `call.ours` returned."""
    result.milliseconds[OURS] = measure(call.ours)
    chosen, least = None, result.milliseconds[OURS]
    tolerance = 2 * TOLERANCES[call.rows.v.dtype] * (1 if call.grads is None else 2)
    for kernel in passed:
        run = partial(run_kernel, kernel, call)
        try:
            reason = _disagreement(run(), right, tolerance)
            if reason is None:
                result.milliseconds[kernel.package] = measure(run)
        except Exception as error:
            reason = _reason_of(error, kernel, call.rows.v.device)
        if reason is not None:
            result.left_out[kernel.package] = f"at this size {reason}"
        elif result.milliseconds[kernel.package] < least:
            chosen, least = kernel, result.milliseconds[kernel.package]
    return chosen


def measure(run: Callable[[], Any]) -> float:
    """Return the median of `RUNS` times of a call on the GPU, in milliseconds.

    The calls of a run follow each other without a pause, as in a model: the next one is launched while the GPU works.
    """
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS_IN_A_RUN):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS_IN_A_RUN)
    return median(times)


def _reason_of(error: Exception, kernel: PackageKernel, device: torch.device) -> str:
    """Return the error of a package's kernel in one line. Raise SurgeryError if the GPU no longer works: after an illegal
    address, for example, every later call of the process fails, also where no package runs.
    """
    try:
        wait_for(device)
    except Exception as broken:
        others = ",".join(name for name in allowed_packages() if name != kernel.package) or "none"
        raise SurgeryError(
            f"a kernel of {kernel.package} ({kernel.module}) stopped {device} for this process: {_one_line(broken)}. "
            f"Start again with the environment variable {VARIABLE}={others}"
        ) from error
    return _one_line(error)


def wait_for(device: torch.device) -> None:
    """Wait for all work on a GPU; errors of its kernels are raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
