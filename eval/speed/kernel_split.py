"""GPU time of a training step by kernel, and by the part of the step that launched it, from torch.profiler.

    kernel_times(profile)      kernel name -> microseconds, of any run, replays of a CUDA graph included
    label_modules(models)      hooks that name the parts of an eager step in a profile
    part_times(profile)        part -> microseconds, of an eager step under those hooks

The kernels of a graph have no operators around them, so parts are found in an eager step. A kernel of the forward pass
belongs to the innermost label around its operator. A kernel of the backward pass belongs to the label of the operator
with the same sequence number, whose gradient it computes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

PREFIX = "part: "
PARTS = ("teacher", "linears", "mixer", "other layers", "loss", "optimizer")
BACKWARD_SCOPE = 1  # of torch::RecordScope
PRODUCTS = re.compile(r"gemm|cutlass|nvjet|xmma|gemv|splitk", re.IGNORECASE)
FLOAT32_PRODUCTS = re.compile(r"sgemm|gemm_f32f32|_sss_", re.IGNORECASE)
ATTENTION = re.compile(r"sdpa|flash|fmha", re.IGNORECASE)
OPTIMIZER = re.compile(r"multi_tensor_apply|fused_?adam|foreach", re.IGNORECASE)


@contextmanager
def profile_gpu(device: torch.device) -> Iterator[Any]:
    """Yield a running torch.profiler; on a CPU it records operators alone."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as running:
        yield running
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# -- kernels ---------------------------------------------------------------------------------------
def kernel_times(recorded: Any) -> dict[str, float]:
    """Return kernel name -> microseconds on the GPU, longest first."""
    times: dict[str, float] = {}
    for event in recorded.events():
        if is_on_gpu(event):
            times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us()
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def is_on_gpu(event: Any) -> bool:
    """Return whether an event of a profile is a kernel, a copy or a fill on the GPU."""
    on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
    return (
        on_gpu and not getattr(event, "is_user_annotation", False) and not event.name.startswith((PREFIX, "Profiler"))
    )


def kernel_rows(times: dict[str, float], count: int = 15) -> list[dict[str, Any]]:
    """Return the `count` longest kernels: name, kind, microseconds and share of all kernels' time."""
    total, ours = sum(times.values()) or 1.0, triton_kernels()
    return [
        {"kernel": short_name(name), "kind": kernel_kind(name, ours), "us": us, "share": us / total}
        for name, us in list(times.items())[:count]
    ]


def kind_shares(times: dict[str, float]) -> dict[str, float]:
    """Return kind of kernel -> share of all kernels' time."""
    total, ours, shares = sum(times.values()) or 1.0, triton_kernels(), dict[str, float]()
    for name, us in times.items():
        kind = kernel_kind(name, ours)
        shares[kind] = shares.get(kind, 0.0) + us / total
    return shares


def kernel_kind(name: str, triton: dict[str, str]) -> str:
    """Return what a kernel does, by its name: "products", "float32 products", "softmax attention", "mixer", "loss",
    "optimizer" or "elementwise and others".

    triton: this package's Triton kernels, as `triton_kernels` returns them.
    """
    if (kind := triton.get(name)) is not None:
        return kind
    if ATTENTION.search(name):
        return "softmax attention"
    if FLOAT32_PRODUCTS.search(name):
        return "float32 products"
    if PRODUCTS.search(name):
        return "products"
    if OPTIMIZER.search(name):
        return "optimizer"
    return "elementwise and others"


def triton_kernels() -> dict[str, str]:
    """Return the names of this package's Triton kernels that are imported: "mixer", or "loss" for those of training."""
    names = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("surgery.kernels", "surgery.training", "surgery.mixers")):
            kind = "loss" if ".training" in module_name or "loss" in module_name.rsplit(".", 1)[-1] else "mixer"
            for value in list(vars(module).values()):
                if type(value).__name__ in ("JITFunction", "Autotuner", "Heuristics"):
                    names[str(getattr(value, "__name__", ""))] = kind
    return names


def short_name(name: str) -> str:
    """Return a kernel's name without the template arguments and namespaces of C++."""
    if not name.startswith("void ") and "<" not in name:
        return name[:100]
    inner = re.findall(r"(\w*(?:Functor|functor|_kernel|Kernel|_cuda|Ops?)\w*)", name)
    return " ".join(dict.fromkeys(inner))[:100] or name[:100]


# -- parts -----------------------------------------------------------------------------------------
@contextmanager
def label_modules(student: Any, teacher: Any) -> Iterator[None]:
    """Label, in a profile of an eager step, the teacher, the student's layers, linears and mixers.

    teacher: None for a stage without one. Output projections to the vocabulary keep the label around them, which is the loss's.
    """
    with ExitStack() as stack:
        if teacher is not None:
            _label(stack, teacher, "teacher")
            _label(stack, teacher.get_output_embeddings(), "loss")
        head = student.get_output_embeddings()
        _label(stack, student, "other layers")
        _label(stack, head, "loss")
        for module in student.modules():
            mixer = getattr(module, "mixer", None)
            if isinstance(mixer, nn.Module):
                _label(stack, mixer, "mixer")
        inside = {
            id(part) for module in student.modules() if hasattr(module, "mixer") for part in module.mixer.modules()
        }
        for module in student.modules():
            if isinstance(module, nn.Linear) and module is not head and id(module) not in inside:
                _label(stack, module, "linears")
        yield


def _label(stack: ExitStack, module: nn.Module, part: str) -> None:
    running: list[Any] = []

    def begin(*_: Any) -> None:
        running.append(record_function(PREFIX + part))
        running[-1].__enter__()

    def end(*_: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(begin).remove)
    stack.callback(module.register_forward_hook(end, always_call=True).remove)


def part_times(recorded: Any) -> dict[str, float]:
    """Return part of the step -> microseconds on the GPU, of an eager step under `label_modules`, whose loss and
    optimizer are labeled too.
    """
    events, ours = list(recorded.events()), triton_kernels()
    of_number: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and event.scope != BACKWARD_SCOPE and (part := _label_around(event)) is not None:
            of_number[event.sequence_nr] = part
    times: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    left = kernel_times(recorded)
    for event in events:
        if not event.kernels or event.device_type != torch.autograd.DeviceType.CPU:
            continue
        part = _part_of(event, of_number)
        for kernel in event.kernels:
            if not kernel.name.startswith(PREFIX):
                times[part] += kernel.duration
                left[kernel.name] = left.get(kernel.name, 0.0) - kernel.duration
    for name, us in left.items():  # launched outside of any operator
        kind = kernel_kind(name, ours)
        times[kind if kind in PARTS else "other layers"] += max(0.0, us)
    return times


def _label_around(event: Any) -> str | None:
    """Return the part that the innermost label around an operator names, or None."""
    while event is not None:
        if event.name.startswith(PREFIX):
            return str(event.name[len(PREFIX) :])
        event = event.cpu_parent
    return None


def _part_of(event: Any, of_number: dict[int, str]) -> str:
    """Return the part of an operator, of the forward or the backward pass."""
    around: Any = event
    while around is not None:
        if around.name.startswith(PREFIX):
            return str(around.name[len(PREFIX) :])
        if around.scope == BACKWARD_SCOPE and around.sequence_nr in of_number:
            return of_number[around.sequence_nr]
        around = around.cpu_parent
    return "other layers"
