"""How the merged parameters of experts hold the matrices of each expert, and how an expert joins its gate and up
projections.

    layout                              gate_up_proj                        down_proj
    of most families                    (E, 2 F, D), gate above up          (E, D, F)
    transposed (Llama 4)                (E, D, 2 F), gate left of up        (E, F, D)
    transposed, interleaved (gpt-oss)   (E, D, 2 F), columns gate, up, ..   (E, F, D)

With biases there are gate_up_proj_bias (E, 2 F) and down_proj_bias (E, D) too. E experts, D model width, F width of an
expert.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MERGED_GATE_UP, MERGED_DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class ExpertNames:
    """The names of an expert's linears in the checkpoint files, for example w1, w3 and w2."""

    gate: str
    up: str
    down: str

    def roles(self) -> dict[str, str]:
        """Return the role of each linear by its name."""
        return {self.gate: "expert.gate", self.up: "expert.up", self.down: "expert.down"}


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of a family's merged parameters. names: of an expert's linears.

    transposed: the matrices are (in, out). interleaved: the outputs of gate and up alternate. bias: the linears have
    biases. weighs_inputs: the routing weight multiplies an expert's input, not its output. stored_merged: the files of
    the family hold the merged tensors, not a tensor for each matrix.
    """

    names: ExpertNames = ExpertNames("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False
    weighs_inputs: bool = False
    stored_merged: bool = False

    def merged_names(self) -> tuple[str, ...]:
        """Return the names of the merged parameters."""
        biases = (f"{MERGED_GATE_UP}_bias", f"{MERGED_DOWN}_bias") if self.bias else ()
        return (MERGED_GATE_UP, MERGED_DOWN, *biases)

    def pieces(self, merged: str, outputs: int) -> list[tuple[str, slice]]:
        """Return (name of a linear's tensor, its outputs) for each piece of an expert's part of the merged parameter
        `merged`.

        outputs: length of the output axis, 2 F of gate_up_proj and D of down_proj.
        """
        tensor = "bias" if merged.endswith("_bias") else "weight"
        if merged.startswith(MERGED_DOWN):
            return [(f"{self.names.down}.{tensor}", slice(0, outputs, 1))]
        half = outputs // 2
        gate, up = (
            (slice(0, outputs, 2), slice(1, outputs, 2))
            if self.interleaved
            else (slice(0, half, 1), slice(half, outputs, 1))
        )
        return [(f"{self.names.gate}.{tensor}", gate), (f"{self.names.up}.{tensor}", up)]

    def outputs(self, shape: tuple[int, ...]) -> int:
        """Return the length of the output axis of an expert's part, a matrix or a bias, of this shape."""
        return shape[-1] if self.transposed or len(shape) == 1 else shape[0]

    def take(self, stored: Tensor, outputs: slice) -> Tensor:
        """Return a view of some outputs of an expert's part of a merged parameter, as (out, in), or (out,) of a
        bias.
        """
        return stored[:, outputs].mT if self.transposed and stored.dim() == 2 else stored[outputs]

    def merge(self, merged: str, experts: list[dict[str, Tensor]]) -> Tensor:
        """Return the merged parameter `merged` of the tensors of each expert by their names, in the dtype of the
        first.
        """
        names = [name for name, _ in self.pieces(merged, 2)]
        first = experts[0][names[0]]
        outputs = len(first) * len(names)
        shape = (outputs, *first.shape[1:])
        shape = shape[::-1] if self.transposed else shape
        together = torch.empty(len(experts), *shape, dtype=first.dtype, device=first.device)
        for stored, tensors in zip(together, experts):
            for name, rows in self.pieces(merged, outputs):
                self.take(stored, rows).copy_(tensors[name])
        return together


class ClampedGating(nn.Module):
    """Gating (up + 1) * gate * sigmoid(alpha gate) with gate at most `limit` and up within +-limit (gpt-oss)."""

    def __init__(self, alpha: float, limit: float):
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the input of the down projection, (.., F), from the outputs of gate and up, (.., F)."""
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


# Layouts that transformers' classes do not describe by attributes, or whose gating is their own.
KNOWN_LAYOUTS = {
    "Llama4TextExperts": ExpertLayout(transposed=True, weighs_inputs=True, stored_merged=True),
    "GptOssExperts": ExpertLayout(transposed=True, interleaved=True, bias=True, stored_merged=True),
}


def known_layout(module: Any) -> ExpertLayout | None:
    """Return the layout of a class of transformers in KNOWN_LAYOUTS, or None."""
    kind = type(module)
    return KNOWN_LAYOUTS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def activation_of(module: Any) -> nn.Module:
    """Return what joins gate and up in a merged experts module: a ClampedGating, or the activation of act(gate) *
    up.
    """
    if type(module).__name__ == "GptOssExperts":
        return ClampedGating(module.alpha, module.limit)
    activation: nn.Module = module.act_fn
    return activation


def stored_layout(model: Any) -> ExpertLayout | None:
    """Return how the files of a model of transformers hold its experts, read from transformers' conversion rules for
    its class.

    A tensor for each matrix, whose names are in the layout, or the merged tensors; None if transformers changes them on
    loading.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    gate_up: list[str] = []
    down: list[str] = []
    changed = False
    rules: list[Any] = get_model_conversion_mapping(model) or []
    for rule in rules:
        if not is_merge_rule(rule):
            continue
        changed = True
        operations = [type(operation).__name__ for operation in rule.operations]
        linears = [_expert_linear(pattern) for pattern in rule._original_source_patterns]
        if len(rule.target_patterns) != 1 or None in linears:
            continue
        target = rule.target_patterns[0].replace("\\", "")
        if target.endswith(f"experts.{MERGED_GATE_UP}") and operations == ["MergeModulelist", "Concatenate"]:
            gate_up = [name for name in linears if name]
        elif target.endswith(f"experts.{MERGED_DOWN}") and operations == ["MergeModulelist"]:
            down = [name for name in linears if name]
    if len(gate_up) == 2 and len(down) == 1:
        return ExpertLayout(ExpertNames(gate_up[0], gate_up[1], down[0]))
    return None if changed else ExpertLayout(stored_merged=True)


def _expert_linear(pattern: str) -> str | None:
    """Return the linear's name in a pattern such as mlp.experts.*.gate_proj.weight, or None."""
    match = re.fullmatch(r"(?:.*\.)?experts\.?\*\.(\w+)\.weight", pattern.replace("\\", ""))
    return match[1] if match else None


def is_merge_rule(rule: Any) -> bool:
    """Return whether a conversion rule of transformers merges the tensors of experts."""
    return hasattr(rule, "operations") and any(
        target.replace("\\", "").endswith((f"experts.{MERGED_GATE_UP}", f"experts.{MERGED_DOWN}"))
        for target in rule.target_patterns
    )


def file_names(model: Any, parameter: str) -> list[str]:
    """Return the names that a merged parameter of a model's experts may have in files: the one that transformers
    writes, then others.

    They follow from transformers' rules that rename tensors (block_sparse_moe.experts.gate_up_proj of granitemoe is
    block_sparse_moe.input_linear.weight in files), and each may lack the prefix of the base model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    renamed, prefix = parameter, f"{model.base_model_prefix}." if model.base_model_prefix else ""
    for rule in get_model_conversion_mapping(model, add_legacy=False) or []:
        targets = [target.replace("\\", "") for target in rule.target_patterns]
        if not hasattr(rule, "operations") and any("experts." in t and parameter.endswith(t) for t in targets):
            renamed = rule.reverse_transform().rename_source_key(renamed)[0]
    names = (renamed, parameter)
    return list(dict.fromkeys((*names, *(name.removeprefix(prefix) for name in names))))
