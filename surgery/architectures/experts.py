"""Routed experts as linears: a mixture of experts whose experts have one nn.Linear for each matrix.

transformers merges the experts of a layer into 3-D parameters: gate_up_proj (E, 2 F, D) and down_proj (E, D, F). Most
checkpoints store a tensor for each matrix of each expert, and transformers' conversion rules name them. Some store the
3-D tensors. See _build_checkpoint_conversion_mapping and use_experts_implementation in
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/conversion_mapping.py
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/moe.py

`split_experts` replaces the merged module by `RoutedExperts`, so that each matrix can be replaced by its path:

    mlp.experts.gate_up_proj[3, :F]  ->  mlp.experts.3.gate_proj.weight

How a family's 3-D parameters hold the matrices, and what its experts compute, says its ExpertLayout (expert_layout.py).

E experts, k of them selected for each token, D model width, F width of an expert, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.expert_layout import (
    MERGED_DOWN,
    MERGED_GATE_UP,
    ClampedGating,
    ExpertLayout,
    ExpertNames,
    activation_of,
    is_merge_rule,
    known_layout,
    stored_layout,
)
from surgery.core.errors import SurgeryError

Gating = Callable[[Tensor, Tensor], Tensor]  # (output of gate, output of up) -> input of the down projection
MAX_EXPERTS = (
    2**15
)  # of all layers together; a linear on the meta device takes a few kilobytes and a tenth of a millisecond


class ExpertMLP(nn.Module):
    """One expert: down(gating(gate(x), up(x))), (.., D) -> (.., D)."""

    def __init__(self, names: ExpertNames, hidden: int, inner: int, bias: bool = False, **factory: Any):
        super().__init__()
        self.names = names
        self.add_module(names.gate, nn.Linear(hidden, inner, bias=bias, **factory))
        self.add_module(names.up, nn.Linear(hidden, inner, bias=bias, **factory))
        self.add_module(names.down, nn.Linear(inner, hidden, bias=bias, **factory))

    def inner(self, x: Tensor, gating: Gating) -> Tensor:
        """Return the input of the down projection, (.., F)."""
        modules = self._modules
        return gating(modules[self.names.gate](x), modules[self.names.up](x))  # type: ignore[misc]

    def forward(self, x: Tensor, gating: Gating) -> Tensor:
        """Return the expert's output, (.., D)."""
        out: Tensor = self._modules[self.names.down](self.inner(x, gating))  # type: ignore[misc]
        return out


class RoutedExperts(nn.Module):
    """The routed experts of one layer, which are its children "0", "1", .. of class ExpertMLP.

    Takes the place of a merged experts module of transformers and has its arguments: y_n = sum_j weights[n, j]
    expert_{index[n, j]}(x_n), or, where the layout weighs the inputs, y_n = sum_j expert_{index[n, j]}(weights[n, j]
    x_n).
    """

    def __init__(self, count: int, layout: ExpertLayout, hidden: int, inner: int, act_fn: nn.Module, **factory: Any):
        super().__init__()
        self.num_experts, self.layout, self.names, self.act_fn = count, layout, layout.names, act_fn
        self.merged_class: Any = None  # the class of transformers whose place this module takes
        for index in range(count):
            self.add_module(str(index), ExpertMLP(layout.names, hidden, inner, layout.bias, **factory))

    def expert(self, index: int) -> ExpertMLP:
        """Return the expert of an index."""
        mlp: Any = self._modules[str(index)]
        return mlp

    def gating(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the input of an expert's down projection, (.., F), from the outputs of gate and up, (.., F)."""
        joined: Tensor = self.act_fn(gate, up) if isinstance(self.act_fn, ClampedGating) else self.act_fn(gate) * up
        return joined

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
        weight_S1 = top_k_weights.reshape(-1)[order_S, None]
        outputs, start = [], 0
        for index, rows in enumerate(torch.bincount(expert_S, minlength=self.num_experts).tolist()):
            if rows:
                x = hidden_states[order_S[start : start + rows] // selected]
                if self.layout.weighs_inputs:
                    x = x * weight_S1[start : start + rows]
                outputs.append(self.expert(index)(x, self.gating))
                start += rows
        if not outputs:
            return torch.zeros_like(hidden_states)
        out_SD = torch.cat(outputs)
        weighted_SD = out_SD if self.layout.weighs_inputs else out_SD * weight_S1
        back_S = torch.empty_like(order_S)
        back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return weighted_SD[back_S].view(tokens, selected, -1).sum(1).to(hidden_states.dtype)


class InputWeightedBlock(nn.Module):
    """A mixture of experts that multiplies the inputs of its experts by their scores, with RoutedExperts in it (Llama
    4).

    Takes the place of transformers' Llama4TextMoe, which computes every expert on every token, with inputs of zero for
    those that are not selected.

    block: the module of transformers, whose router, shared expert and arguments this one has. experts: its experts.
    """

    def __init__(self, block: Any, experts: RoutedExperts):
        super().__init__()
        self.experts, self.router, self.shared_expert = experts, block.router, block.shared_expert
        self.top_k, self.hidden_dim, self.block_class = block.top_k, block.hidden_dim, type(block)

    def unweighted(self, experts: nn.Module, config: Any) -> nn.Module:
        """Return a block of transformers' class with the router and the shared expert of this one. experts: merged.
        config: of the text model.
        """
        with torch.device("meta"):
            block: Any = self.block_class(config)
        block.experts, block.router, block.shared_expert = experts, self.router, self.shared_expert
        return block.train(self.training)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the block's output (N, D), the router's logits (N, E)).

        Args:
            hidden_states: (.., D), N tokens together.
        """
        x_ND = hidden_states.reshape(-1, self.hidden_dim)
        scores_NE, logits_NE = self.router(x_ND)
        weight_Nk, index_Nk = torch.topk(scores_NE, self.top_k, dim=1)
        return self.shared_expert(x_ND) + self.experts(x_ND, index_Nk, weight_Nk), logits_NE


@dataclass(frozen=True)
class MergedExperts:
    """A merged experts module that stays dense. path, kind: its path and class name. params: its parameters. reason:
    why it is not split.
    """

    path: str
    kind: str
    params: int
    reason: str


def keep_experts_split(model: Any) -> None:
    """Let `save_pretrained` of a model with RoutedExperts store their tensors under their own names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # the model was built from a config: the rules that save_pretrained would look up
        mapping = get_model_conversion_mapping(model, add_legacy=False) or []
        rules = [rule for rule in mapping if not isinstance(rule, PrefixChange)]
    model._weight_conversions = [rule for rule in rules if not is_merge_rule(rule)]


def has_split_experts(model: nn.Module) -> bool:
    """Return whether a model has RoutedExperts."""
    return any(isinstance(module, RoutedExperts) for module in model.modules())


def merged_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of the modules with merged experts: children of a layer with 3-D parameters of their
    own.
    """
    return [
        (path, module)
        for path, module in model.named_modules()
        if any(p is not None and p.dim() == 3 and "proj" in name for name, p in module._parameters.items())
    ]


def split_obstacle(module: Any, stored: ExpertLayout | None) -> str:
    """Return why a module with merged experts cannot be split into linears, "" if it can.

    stored: how the files of its model hold experts, see stored_layout.
    """
    if stored is None:
        return "transformers changes their tensors on loading"
    layout = _layout(module, stored)
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    if not stored.stored_merged and (getattr(module, "is_transposed", False) or getattr(module, "has_bias", False)):
        return "it stores the transposed matrices" if module.is_transposed else "its experts have biases"
    if names != set(layout.merged_names()) or not getattr(module, "has_gate", True):
        return f"its parameters are {', '.join(sorted(names))}"
    if known_layout(module) is None:
        if not getattr(module, "is_concatenated", True):
            return "it interleaves the rows of gate and up"
        if getattr(module, "has_post_expert_norm", False) or not isinstance(getattr(module, "act_fn", None), nn.Module):
            return "its experts compute more than down(act(gate(x)) * up(x))"
        if (
            getattr(getattr(type(module), "_apply_gate", None), "__name__", "_default_apply_gate")
            != "_default_apply_gate"
        ):
            return "its experts have a gate of their own"
        if stored.stored_merged and not hasattr(module, "is_concatenated"):
            return "transformers has no rule that stores its experts one by one"
    return _wrong_shapes(module, layout)


def _layout(module: Any, stored: ExpertLayout) -> ExpertLayout:
    """Return the layout of a module with merged experts, from its class or the attributes that transformers gives
    it.
    """
    transposed, bias = (bool(getattr(module, name, False)) for name in ("is_transposed", "has_bias"))
    return known_layout(module) or replace(stored, transposed=transposed, bias=bias)


def _wrong_shapes(module: Any, layout: ExpertLayout) -> str:
    """Return a sentence on the shapes of the merged parameters if they do not fit together, else ""."""
    shapes: dict[str, tuple[int, ...]] = {name: tuple(module._parameters[name].shape) for name in layout.merged_names()}
    gate_up, down = shapes[MERGED_GATE_UP], shapes[MERGED_DOWN]
    if len(gate_up) == len(down) == 3:
        count, rows, hidden = (gate_up[0], *(gate_up[:0:-1] if layout.transposed else gate_up[1:]))
        matrix = (hidden, rows // 2)
        expected: dict[str, tuple[int, ...]] = {
            MERGED_GATE_UP: gate_up,
            MERGED_DOWN: (count, *(matrix[::-1] if layout.transposed else matrix)),
        }
        if layout.bias:
            expected |= {f"{MERGED_GATE_UP}_bias": (count, rows), f"{MERGED_DOWN}_bias": (count, hidden)}
        if rows % 2 == 0 and shapes == expected:
            return ""
    return f"its parameters have shapes {' and '.join(str(list(shape)) for shape in shapes.values())}"


def split_experts(model: Any) -> list[MergedExperts]:
    """Replace the merged experts modules of a model by RoutedExperts, in place, or none of them; return those that stay
    merged.

    Raises SurgeryError for more than MAX_EXPERTS experts.

    The parameters of the new linears are rows of the merged parameters and share their memory; those of transposed
    matrices are copies. On the meta device they are empty.
    """
    merged = describe_merged_experts(model)
    if any(
        experts.reason for experts in merged
    ):  # transformers' conversion rules apply to all experts of a model or to none
        return merged
    stored = stored_layout(model) if merged else None
    count = sum(int(model.get_submodule(experts.path).gate_up_proj.shape[0]) for experts in merged)
    if count > MAX_EXPERTS:
        raise SurgeryError(
            f"{type(model).__name__} has {count:,} experts in {len(merged)} layers, over {MAX_EXPERTS:,}, which no "
            "model has. Check the number of "
            "experts in config.json"
        )
    for experts in merged:
        assert stored is not None
        module: Any = model.get_submodule(experts.path)
        routed = _split(module, _layout(module, stored))
        if not routed.layout.weighs_inputs:
            model.set_submodule(experts.path, routed)
            continue
        parent = experts.path.rpartition(".")[0]
        block = InputWeightedBlock(model.get_submodule(parent), routed)
        model.set_submodule(parent, block.train(module.training))
    return []


def describe_merged_experts(model: Any) -> list[MergedExperts]:
    """Return the modules with merged experts of a model, each with the reason why it cannot be split ("" if all can be
    split).
    """
    merged = merged_experts(model)
    stored = stored_layout(model) if merged else None
    reasons = [split_obstacle(module, stored) for _, module in merged]
    return [
        MergedExperts(path, type(module).__name__, sum(p.numel() for p in module.parameters()), reason or max(reasons))
        for (path, module), reason in zip(merged, reasons)
    ]


def _split(module: Any, layout: ExpertLayout) -> RoutedExperts:
    down = module.down_proj
    count, (hidden, inner) = down.shape[0], down.shape[:0:-1] if layout.transposed else down.shape[1:]
    routed = RoutedExperts(count, layout, hidden, inner, activation_of(module), device="meta", dtype=down.dtype)
    for merged in layout.merged_names():
        parameter = module._parameters[merged]
        for name, rows in layout.pieces(merged, layout.outputs(parameter.shape[1:])):
            linear, _, tensor = name.rpartition(".")
            for index in range(count):
                linear_module: Any = routed.expert(index)._modules[linear]
                piece = getattr(linear_module, tensor).detach()
                if not parameter.is_meta:
                    piece = layout.take(parameter.detach()[index], rows).contiguous()
                setattr(linear_module, tensor, nn.Parameter(piece, requires_grad=parameter.requires_grad))
    routed.train(module.training)
    routed.merged_class = type(module)
    return routed


def merge_experts(model: Any) -> None:
    """Undo `split_experts`, in place, in a model whose files hold merged tensors and whose experts are all plain
    linears.

    Other models stay as they are: transformers' rules merge their tensors on loading, or some experts are not linears.
    """
    routed = [(path, module) for path, module in model.named_modules() if isinstance(module, RoutedExperts)]
    plain = all(
        type(linear) is nn.Linear for _, m in routed for e in range(m.num_experts) for linear in m.expert(e).children()
    )
    if not routed or not plain or not all(module.layout.stored_merged for _, module in routed):
        return
    for path, module in routed:
        parent, _, leaf = path.rpartition(".")
        with torch.device("meta"):
            merged: Any = module.merged_class(model.config.get_text_config())
        experts = [dict(module.expert(index).named_parameters()) for index in range(module.num_experts)]
        for name in module.layout.merged_names():
            tensor = module.layout.merge(name, [{key: p.detach() for key, p in expert.items()} for expert in experts])
            setattr(merged, name, nn.Parameter(tensor, requires_grad=next(iter(experts[0].values())).requires_grad))
        merged.train(module.training)
        block: Any = model.get_submodule(parent)
        if isinstance(block, InputWeightedBlock):
            model.set_submodule(parent, block.unweighted(merged, model.config.get_text_config()))
        else:
            setattr(block, leaf, merged)


def experts_per_token(config: Any) -> int | None:
    """Return how many routed experts compute each token, as the config says, or None."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"):
        value = getattr(config, key, None)
        if type(value) is int and value > 0:
            return value
    return None
