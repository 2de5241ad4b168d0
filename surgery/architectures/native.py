"""Native linear layers of a model, Gated DeltaNet, Mamba-2 and Kimi delta attention: their paths, and their shapes as a
mixer needs them.

A module is one if the forward of its class calls the core functions of transformers by name. That is how
surgery.modeling.native replaces these functions, so no list of families is needed.
"""

from __future__ import annotations

import inspect
from typing import Any

from surgery.architectures.towers import text_config
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape

GATED_DELTA = frozenset({"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"})
MAMBA2 = frozenset({"mamba2_chunk_scan", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined"})
KIMI_DELTA = frozenset({"chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"})
# Attributes of a module: value heads, heads that share queries and keys, key dims (Mamba-2: state size), value dims.
SIZES = {
    GATED_DELTA: ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim"),
    MAMBA2: ("num_heads", "n_groups", "ssm_state_size", "head_dim"),
    KIMI_DELTA: ("num_heads", "num_heads", "head_dim", "head_dim"),
}
# Modules of recurrent layers that have other states, by a part of the name of their class.
OTHERS = {
    "MambaMixer": "a Mamba-1 layer, whose decay differs from state to state",
    "ShortConv": "a short convolution, which has no state to weigh",
    "RecurrentBlock": "an RG-LRU layer, whose decay differs from channel to channel",
    "LightningAttention": "lightning attention, whose state has a place of its own in the cache",
}


def native_core(module: Any) -> frozenset[str] | None:
    """Return the core functions of a native linear layer by name, or None for any other module."""
    forward = getattr(type(module), "own_forward", type(module).forward)  # own_forward: with level weights already
    code = getattr(inspect.unwrap(forward), "__code__", None)
    called = set() if code is None else set(code.co_names)
    return next((names for names in SIZES if names <= called), None)


def native_paths(model: Any) -> list[str]:
    """Return the paths of the native linear layers, in order.

    Raises SurgeryError if there are none, with the reason where other recurrent layers are known.
    """
    paths = [path for path, module in model.named_modules() if native_core(module) is not None]
    if not paths:
        raise SurgeryError(f"{type(model).__name__} cannot be given level weights: {_reason(model)}")
    return paths


def _reason(model: Any) -> str:
    kinds = {type(module).__name__ for module in model.modules()}
    for part, reason in OTHERS.items():
        if named := sorted(kind for kind in kinds if part in kind):
            return f"its {named[0]} is {reason}. Level weights are for Gated DeltaNet, Mamba-2 and Kimi delta attention"
    return (
        "no layer of it calls the core of Gated DeltaNet, Mamba-2 or Kimi delta attention as transformers 5.23 does "
        f"({', '.join(sorted(GATED_DELTA | MAMBA2 | KIMI_DELTA))}). Use a model with such layers, and that version"
    )


def native_shape(model: Any, path: str) -> AttentionShape:
    """Return the shape of the native linear layer at `path`: one group per value head."""
    module: Any = model.get_submodule(path)
    core = native_core(module)
    if core is None:
        raise SurgeryError(
            f"{type(model).__name__} has no Gated DeltaNet, Mamba-2 or Kimi delta attention layer at {path!r}"
        )
    heads, shared, key, value = (int(getattr(module, name)) for name in SIZES[core])
    if heads % shared:
        raise SurgeryError(f"{path}: {heads} value heads must be a multiple of its {shared} key heads")
    dim = int(getattr(module, "hidden_size", 0) or text_config(model).hidden_size)
    scaling = 1.0 if core == MAMBA2 else key**-0.5
    return AttentionShape(dim=dim, heads=heads, groups=heads, key=key, value=value, scaling=scaling)
