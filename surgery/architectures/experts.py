"""Routed experts as linears: a mixture of experts whose experts have one nn.Linear for each matrix.

transformers merges the experts of a layer into 3-D parameters: gate_up_proj (E, 2 F, D) and down_proj (E, D, F). Most checkpoints
store a tensor for each matrix of each expert, and transformers' conversion rules name them. `split_experts` replaces the merged
module by `RoutedExperts`, whose linears have the names of the tensors, so that each matrix can be replaced by its path:

    mlp.experts.gate_up_proj[3, :F]  ->  mlp.experts.3.gate_proj.weight

E experts, k of them selected for each token, D model width, F width of an expert, N tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.core.errors import SurgeryError

MAX_EXPERTS = (
    2**15
)  # of all layers together; a linear on the meta device takes a few kilobytes and a tenth of a millisecond
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


class ExpertMLP(nn.Module):
    """One expert: down(act(gate(x)) * up(x)), (.., D) -> (.., D)."""

    def __init__(self, names: ExpertNames, hidden: int, inner: int, **factory: Any):
        super().__init__()
        self.names = names
        self.add_module(names.gate, nn.Linear(hidden, inner, bias=False, **factory))
        self.add_module(names.up, nn.Linear(hidden, inner, bias=False, **factory))
        self.add_module(names.down, nn.Linear(inner, hidden, bias=False, **factory))

    def inner(self, x: Tensor, act_fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the input of the down projection, (.., F)."""
        modules = self._modules
        return act_fn(modules[self.names.gate](x)) * modules[self.names.up](x)  # type: ignore[misc]

    def forward(self, x: Tensor, act_fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the expert's output, (.., D)."""
        out: Tensor = self._modules[self.names.down](self.inner(x, act_fn))  # type: ignore[misc]
        return out


class RoutedExperts(nn.Module):
    """The routed experts of one layer, which are its children "0", "1", .. of class ExpertMLP.

    Takes the place of a merged experts module of transformers and has its arguments: y_n = sum_j weights[n, j] expert_{index[n, j]}(x_n).
    """

    def __init__(self, count: int, names: ExpertNames, hidden: int, inner: int, act_fn: nn.Module, **factory: Any):
        super().__init__()
        self.num_experts, self.names, self.act_fn = count, names, act_fn
        for index in range(count):
            self.add_module(str(index), ExpertMLP(names, hidden, inner, **factory))

    def expert(self, index: int) -> ExpertMLP:
        """Return the expert of an index."""
        found: Any = self._modules[str(index)]
        return found

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, (N, D).

        Args:
            hidden_states: (N, D).
            top_k_index: selected experts, (N, k).
            top_k_weights: their weights, (N, k).
        """
        tokens, selected = top_k_index.shape
        expert_S = top_k_index.reshape(-1)  # S = N k pairs of a token and an expert
        order_S = torch.argsort(expert_S, stable=True)
        outputs, start = [], 0
        for index, rows in enumerate(torch.bincount(expert_S, minlength=self.num_experts).tolist()):
            if rows:
                x = hidden_states[order_S[start : start + rows] // selected]
                outputs.append(self.expert(index)(x, self.act_fn))
                start += rows
        if not outputs:
            return torch.zeros_like(hidden_states)
        weighted_SD = torch.cat(outputs) * top_k_weights.reshape(-1)[order_S, None]
        back_S = torch.empty_like(order_S)
        back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return weighted_SD[back_S].view(tokens, selected, -1).sum(1).to(hidden_states.dtype)


@dataclass(frozen=True)
class MergedExperts:
    """A merged experts module that stays dense. path, kind: its path and class name. params: its parameters. reason: why it is not split."""

    path: str
    kind: str
    params: int
    reason: str


def expert_names(model: Any) -> ExpertNames | None:
    """Return the names of an expert's linears in the files of a model of transformers, or None if its files have no such tensors.

    They are read from transformers' conversion rules for the model's class.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    gate_up: list[str] = []
    down: list[str] = []
    for rule in get_model_conversion_mapping(model) or []:
        operations = [type(operation).__name__ for operation in getattr(rule, "operations", None) or ()]
        targets = [pattern.replace("\\", "") for pattern in rule.target_patterns]
        found = [_expert_linear(pattern) for pattern in rule._original_source_patterns]
        if len(targets) != 1 or None in found:
            continue
        if targets[0].endswith(f"experts.{MERGED_GATE_UP}") and operations == ["MergeModulelist", "Concatenate"]:
            gate_up = [name for name in found if name]
        elif targets[0].endswith(f"experts.{MERGED_DOWN}") and operations == ["MergeModulelist"]:
            down = [name for name in found if name]
    return ExpertNames(gate_up[0], gate_up[1], down[0]) if len(gate_up) == 2 and len(down) == 1 else None


def _expert_linear(pattern: str) -> str | None:
    """Return the linear's name in a pattern such as mlp.experts.*.gate_proj.weight, or None."""
    found = re.fullmatch(r"(?:.*\.)?experts\.?\*\.(\w+)\.weight", pattern.replace("\\", ""))
    return found[1] if found else None


def is_merge_rule(rule: Any) -> bool:
    """Return whether a conversion rule of transformers merges the tensors of experts."""
    return hasattr(rule, "operations") and any(
        target.replace("\\", "").endswith((f"experts.{MERGED_GATE_UP}", f"experts.{MERGED_DOWN}"))
        for target in rule.target_patterns
    )


def keep_experts_split(model: Any) -> None:
    """Let `save_pretrained` of a model with RoutedExperts store their tensors under their own names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # the model was built from a config: the rules that save_pretrained would look up
        found = get_model_conversion_mapping(model, add_legacy=False) or []
        rules = [rule for rule in found if not isinstance(rule, PrefixChange)]
    model._weight_conversions = [rule for rule in rules if not is_merge_rule(rule)]


def has_split_experts(model: nn.Module) -> bool:
    """Return whether a model has RoutedExperts."""
    return any(isinstance(module, RoutedExperts) for module in model.modules())


def merged_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of the modules with merged experts: children of a layer with 3-D parameters of their own."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if any(p is not None and p.dim() == 3 and "proj" in name for name, p in module._parameters.items())
    ]


def split_obstacle(module: Any, names: ExpertNames | None) -> str:
    """Return why a module with merged experts cannot be split into linears, "" if it can."""
    own = {name for name, parameter in module._parameters.items() if parameter is not None}
    if getattr(module, "is_transposed", False):
        return "it stores the transposed matrices"
    if getattr(module, "has_bias", False) or any("bias" in name for name in own):
        return "its experts have biases"
    if not getattr(module, "is_concatenated", True):
        return "it interleaves the rows of gate and up"
    if own != {MERGED_GATE_UP, MERGED_DOWN} or not getattr(module, "has_gate", True):
        return f"its parameters are {', '.join(sorted(own))}"
    if getattr(module, "has_post_expert_norm", False) or not isinstance(getattr(module, "act_fn", None), nn.Module):
        return "its experts compute more than down(act(gate(x)) * up(x))"
    if getattr(getattr(type(module), "_apply_gate", None), "__name__", "_default_apply_gate") != "_default_apply_gate":
        return "its experts have a gate of their own"
    (count, rows, hidden), down = module.gate_up_proj.shape, tuple(module.down_proj.shape)
    if rows % 2 or down != (count, hidden, rows // 2):
        return f"its parameters have shapes {list(module.gate_up_proj.shape)} and {list(down)}"
    return "" if names is not None else "transformers has no rule that stores its experts one by one"


def split_experts(model: Any) -> list[MergedExperts]:
    """Replace the merged experts modules of a model by RoutedExperts, in place, or none of them; return those that stay merged.

    Raises SurgeryError for more than MAX_EXPERTS experts.

    The parameters of the new linears are rows of the merged parameters and share their memory; on the meta device they are empty.
    """
    left = describe_merged_experts(model)
    if any(
        experts.reason for experts in left
    ):  # transformers' conversion rules apply to all experts of a model or to none
        return left
    names = expert_names(model) if left else None
    count = sum(int(model.get_submodule(experts.path).gate_up_proj.shape[0]) for experts in left)
    if count > MAX_EXPERTS:
        raise SurgeryError(
            f"{type(model).__name__} has {count:,} experts in {len(left)} layers, over {MAX_EXPERTS:,}, which no model has. Check the number of "
            "experts in config.json"
        )
    for experts in left:
        assert names is not None
        model.set_submodule(experts.path, _split(model.get_submodule(experts.path), names))
    return []


def describe_merged_experts(model: Any) -> list[MergedExperts]:
    """Return the modules with merged experts of a model, each with the reason why it cannot be split ("" if all can be split)."""
    found = merged_experts(model)
    names = expert_names(model) if found else None
    reasons = [split_obstacle(module, names) for _, module in found]
    return [
        MergedExperts(path, type(module).__name__, sum(p.numel() for p in module.parameters()), reason or max(reasons))
        for (path, module), reason in zip(found, reasons)
    ]


def _split(module: Any, names: ExpertNames) -> RoutedExperts:
    gate_up, down = module.gate_up_proj, module.down_proj
    count, rows, hidden = gate_up.shape
    inner = rows // 2
    routed = RoutedExperts(count, names, hidden, inner, module.act_fn, device="meta", dtype=gate_up.dtype)
    for index in range(count):
        pieces = {
            names.gate: (gate_up, slice(0, inner)),
            names.up: (gate_up, slice(inner, rows)),
            names.down: (down, slice(None)),
        }
        for name, (merged, part) in pieces.items():
            linear: Any = routed.expert(index)._modules[name]
            weight = linear.weight.detach() if merged.is_meta else merged.detach()[index, part]
            linear.weight = nn.Parameter(weight, requires_grad=merged.requires_grad)
    routed.train(module.training)
    return routed


def experts_per_token(config: Any) -> int | None:
    """Return how many routed experts compute each token, as the config says, or None."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"):
        value = getattr(config, key, None)
        if type(value) is int and value > 0:
            return value
    return None
