"""The report of a model that `surgery.apply` converted in memory, as `surgery inspect` shows it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from surgery.architectures.attention import shapes_without_mixer
from surgery.architectures.linears import is_linear
from surgery.core.errors import SurgeryError
from surgery.modeling.cache import mixer_modules
from surgery.modeling.modules import REPLACED
from surgery.modeling.quantize import stored_bytes
from surgery.publish.summary import attention_costs
from surgery.publish.training_kernels import training_kernels
from surgery.publish.verdict import verdict
from surgery.structures.quantized import QuantizedLinear
from surgery.structures.shared_basis import SharedBasis


def inspect_model(model: Any) -> dict[str, Any]:
    """Return the report of a model that `surgery.apply` converted, compared with its tensors and extended by costs, as
    `inspect` does.
    """
    report = copy.deepcopy(getattr(model, "surgery_report", None))
    if report is None:
        raise SurgeryError(
            f"{type(model).__name__} has no surgery_report, which surgery.apply sets. Of a model loaded from a "
            "converted checkpoint, "
            "inspect the folder: surgery.inspect(folder)"
        )
    tensors = {id(t): t.numel() for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    stored, linears = sum(tensors.values()), list(_iter_linears(model))
    structured = sum(isinstance(m, REPLACED) for m in linears)
    unit = "bytes" if any(isinstance(m, QuantizedLinear) for m in model.modules()) else "params"
    stored = stored if unit == "params" else stored_bytes(model)
    as_reported = stored == report["totals"][f"{unit}_after"]
    report["checks"] = {f"stored_{unit}": stored, "as_reported": as_reported, "structured_linears": structured}
    before = sum(_linear_macs(module) for module in linears)
    change = report["totals"]["macs_after"] - report["totals"]["macs_before"]
    report["macs_per_token"] = {"before": before, "after": before + change}
    if replaced := [(path, m.mixer.config, m.mixer.shape) for path, m in mixer_modules(model)]:
        with_softmax = shapes_without_mixer(model, {path: config for path, config, _ in replaced}).values()
        report |= attention_costs(replaced, with_softmax, "mixer_rows", model.dtype)
        report["training_kernels"] = training_kernels(replaced)
    report["verdict"] = verdict(report)
    return report


def _iter_linears(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all linears, structured or not; a split linear as one, and none for a basis that experts share."""
    if isinstance(module, SharedBasis):
        return
    if is_linear(module) or isinstance(module, REPLACED):
        yield module
        return
    for child in module.children():
        yield from _iter_linears(child)


def _linear_macs(module: Any) -> int:
    size: int = module.weight.numel() if is_linear(module) else module.in_features * module.out_features
    return size
