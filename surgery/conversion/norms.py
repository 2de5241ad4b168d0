"""Norms and biases that are trained beside the new parameters (`tune: {norms: true}`).

These are the parameters of the norms of a converted layer, the biases of its linears, and the norms behind the layers.
They keep their names and dtypes in the files. Left as they are: tensors that several modules share, and float64
tensors, since training is in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.linears import ModelLayout, is_linear
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import read_tensor

TRAINED_DTYPES = ("F32", "F16", "BF16")


def layer_norms_and_biases(meta_model: MetaModel, layer: str) -> dict[str, str]:
    """Return parameter -> name in the files, for the norms of a layer and the biases of its linears. layer: its
    path.
    """
    names = []
    for path, module in meta_model.module(layer).named_modules(prefix=layer):
        if is_norm(module):
            names += [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        elif is_linear(module):
            names.append(f"{path}.bias")
    return _stored_names(meta_model, names)


def outer_norms(meta_model: MetaModel, layout: ModelLayout) -> dict[str, str]:
    """Return parameter -> name in the files, for the norms outside the layers, before and behind them."""
    inside = tuple(f"{path}." for path in layout.towers)
    names = [
        f"{path}.{name}"
        for path, module in meta_model.model.named_modules()
        if is_norm(module) and not path.startswith(inside)
        for name, _ in module.named_parameters(recurse=False)
    ]
    return _stored_names(meta_model, names)


def _stored_names(meta_model: MetaModel, parameters: list[str]) -> dict[str, str]:
    """Return the names in the files of the parameters that have a tensor of their own, in a dtype that is trained."""
    uses, tied = Counter(meta_model.keys.values()), {name for pair in meta_model.tied.items() for name in pair}
    names = {p: meta_model.keys[p] for p in parameters if p in meta_model.keys and p not in tied}
    tensors = meta_model.source.tensors
    return {p: name for p, name in names.items() if uses[name] == 1 and tensors[name].dtype in TRAINED_DTYPES}


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, which is told by the name of its class: LayerNorm, LlamaRMSNorm,
    T5LayerNorm.
    """
    return "norm" in type(module).__name__.lower() and not is_linear(module)


def read_originals(meta_model: MetaModel, parameters: Mapping[str, str], device: torch.device) -> dict[str, Tensor]:
    """Return the source's tensors of these parameters in float32, by parameter."""
    return {p: read_tensor(meta_model.tensor_info(p), torch.float32, device=device) for p in parameters}


@torch.no_grad()
def weight_offset(norm: nn.Module) -> float:
    """Return c of a norm that multiplies by (c + weight): 1 for Gemma's, 0 for others.

    Measured by two calls on the CPU, with weights of 0 and of 1. 0 for a norm that takes further inputs, and for other
    modules.
    """
    parameters = dict(norm.named_parameters())
    weight = parameters.get("weight")
    if not is_norm(norm) or weight is None:
        return 0.0
    x = torch.linspace(-1.0, 1.0, weight.shape[-1]).expand(weight.shape)[None]
    others = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    try:
        outputs = [
            torch.func.functional_call(norm, {**others, "weight": torch.full(weight.shape, value)}, (x,))
            for value in (0.0, 1.0)
        ]
        return round(float(outputs[0].norm() / (outputs[1] - outputs[0]).norm().clamp_min(1e-12)))
    except Exception:  # code of any family, which may need other inputs
        return 0.0


@contextmanager
def swapped_parameters(meta_model: MetaModel, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put tensors in the place of the model's parameters inside the context. tensors: by parameter; they may require
    gradients.
    """
    before = []
    for parameter, tensor in tensors.items():
        path, _, leaf = parameter.rpartition(".")
        module: Any = meta_model.module(path)
        before.append((module, leaf, module._parameters[leaf]))
        module._parameters[leaf] = tensor
    try:
        yield
    finally:
        for module, leaf, parameter in before:
            module._parameters[leaf] = parameter
