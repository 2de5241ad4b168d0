"""Faster decoding steps of converted models: projections that read the same input are computed together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from surgery.structures.call_scope import hold_groups
from surgery.structures.grouped import group_linears
from surgery.structures.low_rank import LowRankLinear

# Names, in one module, of linears that read the same input.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"),
    ("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"),
)  # fmt: skip
CROSS_ATTENTION = ("cross", "encoder_attn", "encdec")  # in the path of attention whose keys come from another model


def fuse_projections(model: nn.Module) -> int:
    """Compute q, k and v together, and gate and up, in decoding steps of up to four tokens.

    Return the number of groups.

    Low-rank linears are grouped. Parameters, their names and what is saved stay as they are. Groups compute together
    without gradients, and outside of inference mode unless torch.compile traces them. A group whose linears turn out to
    read different tensors dissolves.
    """
    groups = list(_siblings(model))
    for linears in groups:
        group_linears(linears, is_held=True)
    hold_groups(model)
    return len(groups)


def _siblings(model: nn.Module) -> Iterator[list[LowRankLinear]]:
    """Yield the low-rank linears of each module that read the same input and are in no group yet."""
    for path, module in model.named_modules():
        if any(word in path.lower() for word in CROSS_ATTENTION):
            continue
        for names in SIBLINGS:
            linears = [getattr(module, name, None) for name in names]
            siblings = [linear for linear in linears if type(linear) is LowRankLinear and linear.group is None]
            kinds = {(linear.in_features, linear.bias is None) for linear in siblings}
            if len(siblings) > 1 and len(kinds) == 1:
                yield siblings
