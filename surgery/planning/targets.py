"""What a plan consists of: matrices to be replaced, slices of fused linears, structures chosen by time, and the plan
itself.

surgery/planning/plan.py makes plans.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from surgery.architectures.linears import LinearInfo, ModelLayout
from surgery.mixers import AttentionShape
from surgery.planning.attention_plan import AttentionTarget, keep_heads
from surgery.planning.measured_times import decoding_call
from surgery.planning.recipe import SIZE_KEYS, ConversionRecipe, is_given
from surgery.structures import STRUCTURES, StructureConfig, StructuredLinear

if TYPE_CHECKING:
    from surgery.planning.depth import DepthPlan
    from surgery.planning.fewer_experts import ExpertsPlan
    from surgery.planning.native import NativeTarget


@dataclass(frozen=True)
class FusedSlice:
    """The output rows of one role in a fused linear.

    role: its name. index: its position in `sizes`. sizes: output rows of each role. heads: 0 if the roles' rows follow
    one another; otherwise each of the `heads` heads holds size // heads rows of every role.
    """

    role: str
    index: int
    sizes: tuple[int, ...]
    heads: int = 0


@dataclass(frozen=True)
class TimedOption:
    """A structure that a matrix may get: its config with a rank, its predicted nanoseconds, and its stored
    parameters.
    """

    config: StructureConfig
    ns: int
    params: int


@dataclass(frozen=True)
class LinearTarget:
    """A weight matrix to be replaced: a whole linear, one role of a fused linear, or several linears of one input
    together.

    linear: the module. out: output rows. configs: candidate structures, not yet resolved to a budget; () keeps the
    matrix dense (in a split linear). keep: fraction of its parameters to keep. part: its rows in a fused linear, or
    None. preview: the structure shown in the plan, fitted to a uniform budget. round_ranks: ranks chosen by the budget
    are multiples of it. With `speed`, options: the structures that it may get, dense_ns: predicted nanoseconds of the
    dense matrix; a preview of None stays dense. share: whether the recipe asks for a basis shared by the experts of the
    layer. basis: path of that basis, "" if the matrix has none; stores_basis: whether the numbers of the basis count
    with this matrix, the first that uses it. joined: the linears that the matrix replaces, whose rows follow one
    another in it; () if it is `linear` alone, which is the first of them. neurons: of an MLP or attention that is pruned,
    the linears whose outputs make the neurons or heads that `linear` reads (gate and up, or query, key and value); () of
    others. sizes: output rows of the parts of each of `neurons`, each part with rows of every neuron or head.
    """

    linear: LinearInfo
    out: int
    keep: float
    configs: tuple[StructureConfig, ...]
    part: FusedSlice | None = None
    preview: StructureConfig | None = None
    round_ranks: int = 1
    options: tuple[TimedOption, ...] = ()
    dense_ns: int = 0
    share: bool = False
    basis: str = ""
    stores_basis: bool = False
    joined: tuple[LinearInfo, ...] = ()
    neurons: tuple[LinearInfo, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """The path of the linear, with :role for a part of a fused linear; of joined ones a.q_proj+k_proj+v_proj, of a
        pruned MLP a.gate_proj+up_proj+down_proj, of pruned attention a.q_proj+k_proj+v_proj+o_proj.
        """
        if self.joined or self.neurons:
            first, *others = self.all_linears
            return "+".join([first.path, *(_beside(first.path, linear.path) for linear in others)])
        return self.linear.path if self.part is None else f"{self.linear.path}:{self.part.role}"

    @property
    def linears(self) -> tuple[LinearInfo, ...]:
        """The linears that the matrix replaces: one, or those that it joins."""
        return self.joined or (self.linear,)

    @property
    def all_linears(self) -> tuple[LinearInfo, ...]:
        """The linears that change: those that the matrix replaces, and of a pruned MLP or attention those of its
        neurons or heads, which come first.
        """
        return (*self.neurons, *self.linears)

    @property
    def roles(self) -> list[str]:
        """The roles of the matrix's rows; of a pruned MLP or attention those of all its linears."""
        if self.part is not None:
            return [self.part.role]
        return [role for linear in self.all_linears for role in linear.roles]

    @property
    def in_(self) -> int:
        """The number of input features."""
        return self.linear.in_

    @property
    def numel(self) -> int:
        """The number of elements of the matrix, or of all matrices of a pruned MLP or attention."""
        return self.out * self.in_ + sum(linear.out * linear.in_ for linear in self.neurons)

    @property
    def unit(self) -> int:
        """The columns that stay or go together: in pruned attention the outputs of a key/value head's query heads."""
        return getattr(self.configs[0], "unit", 1) if self.configs else 1

    @property
    def unit_params(self) -> int:
        """The elements of a unit of columns; in a pruned MLP those of a neuron in all its matrices, in attention those of
        a key/value head and its query heads.
        """
        return self.numel // (self.in_ // self.unit)

    @property
    def has_fixed_rank(self) -> bool:
        """Whether the recipe fixes the rank, or the experts of the layer have one, so that the matrix takes no part in
        budget allocation.
        """
        return bool(self.basis) or any(
            is_given(getattr(config, key, None)) for config in self.configs for key in SIZE_KEYS
        )

    @property
    def is_dropped(self) -> bool:
        """Whether nothing of the matrix stays, so that there is nothing to fit."""
        return any(config.name == "dropped" for config in self.configs)

    @property
    def has_uniform_width(self) -> bool:
        """Whether all pruned MLPs, or all pruned attention, get one width, which the budget chooses."""
        return any(getattr(config, "width", None) == "uniform" for config in self.configs)

    @property
    def fits_bias(self) -> bool:
        """Whether the bias of `linear` is fitted too: neurons and heads that are removed have a mean."""
        return bool(self.neurons) and self.linear.bias

    def uniform_budget(self) -> float:
        """Return the number of parameters under a uniform allocation."""
        return self.keep * self.numel if self.configs else self.numel

    def params(self, config: StructureConfig) -> int:
        """Return the stored elements of a structure in place of this matrix.

        A shared basis counts with the first matrix that uses it.
        """
        stored = self.structure_params(config)
        if self.basis and not self.stores_basis:
            stored -= config.rank * self.in_  # type: ignore[attr-defined]
        return stored + len(self.joined)  # the `weight` of each JoinedLinear

    def structure_params(self, config: StructureConfig) -> int:
        """Return the stored elements of a structure; of a pruned MLP or attention those of all its linears."""
        stored: int = STRUCTURES[config].params(config, self.out, self.in_)
        return stored // (self.out * self.unit) * self.unit_params if self.neurons else stored

    def macs(self, linear: StructuredLinear) -> int:
        """Return the multiply-accumulates per token of a structure in place of this matrix."""
        return self.params(linear.config) if self.neurons else linear.macs()

    def matrix_budget(self, params: float) -> float:
        """Return how many of `params` elements the matrix itself may have: of a pruned MLP or attention the share of
        `linear`.
        """
        return params / self.unit_params * self.out * self.unit if self.neurons else params

    @property
    def basis_rank(self) -> int:
        """The rank of the shared basis."""
        return self.preview.rank  # type: ignore[union-attr, no-any-return]

    def basis_params(self) -> int:
        """Return how many of the stored elements of `preview` belong to a shared basis."""
        return self.basis_rank * self.in_ if self.stores_basis else 0


def _beside(first: str, path: str) -> str:
    """Return the last part of a path if the rest is that of `first`, else the whole path."""
    parent, _, leaf = path.rpartition(".")
    return leaf if parent == first.rpartition(".")[0] else path


@dataclass(frozen=True)
class TimeTarget:
    """The time that a plan's replaced linears may take.

    phase, tokens, ratio: of the recipe. device, dtype: of the table of measured times. digest: SHA-256 of the table.
    share: time of the replaced linears / time of all linears of the model, while all are dense; None if some were not
    measured.
    """

    phase: str
    tokens: int
    ratio: float
    device: str
    dtype: str
    digest: str
    share: float | None = None

    def describe_call(self) -> str:
        """Return the call, device and dtype in words."""
        call = f"a prompt of {self.tokens:,} tokens" if self.phase == "prefill" else f"a {decoding_call(self.device)}"
        return f"{call} on {self.device} ({self.dtype})"


@dataclass(frozen=True)
class Plan:
    """All replacements of a conversion.

    targets: linear targets by path of the linear, in model order. attention_targets: attention modules to be replaced
    by mixers, by path of their layer. native_targets: native linear layers that get level weights, likewise.
    softmax_shapes: shapes of all other attention modules, if there are targets of either kind.
    notes: messages for the user. unreached: names of linears that the recipe would replace and that stay dense, because
    the calibration inputs do not reach them. model_params: parameters of the whole model, a tied pair counted once.
    untied_params: those that are stored twice after the conversion, because a tied weight is replaced. time: what the
    replaced linears may take, with `speed`. dtype: in which the model loads. pruned_targets: what a trial on held-out
    text compares with `targets`: the same with MLPs and routed experts of fewer neurons; {} if there is nothing to
    compare. depth: the layers that are removed first, with `depth`; experts: the routed experts that are removed first,
    with `experts`; all else is then of the model without them.
    """

    source: str
    model_type: str
    recipe: ConversionRecipe
    layout: ModelLayout
    targets: dict[str, tuple[LinearTarget, ...]]
    notes: tuple[str, ...]
    attention_targets: dict[str, AttentionTarget] = field(default_factory=dict)
    native_targets: dict[str, NativeTarget] = field(default_factory=dict)
    softmax_shapes: tuple[AttentionShape, ...] = ()
    unreached: tuple[str, ...] = ()
    model_params: int = 0
    untied_params: int = 0
    time: TimeTarget | None = None
    dtype: torch.dtype = torch.bfloat16
    depth: DepthPlan | None = None
    experts: ExpertsPlan | None = None
    pruned_targets: dict[str, tuple[LinearTarget, ...]] = field(default_factory=dict)

    @property
    def removal(self) -> DepthPlan | ExpertsPlan | None:
        """What is removed first: layers, or experts."""
        return self.depth or self.experts

    def contenders(self) -> dict[str, Plan]:
        """Return the plans that a trial compares: with fewer neurons ("pruned"), if there are MLPs or routed experts to
        prune, with fewer neurons in one of the two ("pruned_mlps", "pruned_experts"), if there are both, and "linears".
        """
        changed = [target for slices in self.pruned_targets.values() for target in slices if target.neurons]
        plans = {"pruned": self.pruned_targets} if self.pruned_targets else {}
        if len({bool(target.linear.experts) for target in changed}) > 1:
            for name, experts in (("pruned_mlps", False), ("pruned_experts", True)):
                others = [target for target in changed if bool(target.linear.experts) is not experts]
                plans[name] = self._with_linears({linear.path for target in others for linear in target.all_linears})
        plans["linears"] = self.targets
        return {name: replace(self, targets=some, pruned_targets={}) for name, some in plans.items()}

    def _with_linears(self, paths: Collection[str]) -> dict[str, tuple[LinearTarget, ...]]:
        """Return `pruned_targets` with the targets of some linears as in `targets`."""
        chosen = {path: self.targets if path in paths else self.pruned_targets for path in self.targets}
        return {path: some[path] for path, some in chosen.items() if path in some}

    def keep_targets(self, reached: Collection[str], **changes: Any) -> Plan:
        """Return the plan with the targets of the linears `reached` alone, by path, and with other changes."""
        targets, pruned_targets = (
            {path: slices for path, slices in both.items() if path in reached}
            for both in (self.targets, self.pruned_targets)
        )
        return replace(self, targets=targets, pruned_targets=pruned_targets, **changes)

    def target_names(self) -> set[str]:
        """Return the names of all targets."""
        return {target.name for slices in self.targets.values() for target in slices}

    def tried_targets(self, path: str) -> tuple[LinearTarget, ...]:
        """Return the targets of a linear, and the pruned MLP whose neurons it reads, if a trial compares that too."""
        pruned = (target for target in self.pruned_targets.get(path, ()) if target.neurons)
        return (*self.targets.get(path, ()), *pruned)

    @property
    def measured_softmax_count(self) -> int:
        """How many of the attention targets will keep softmax attention, chosen by measurements on text during the
        conversion.
        """
        hybrid = self.recipe.attention.hybrid if self.recipe.attention else None
        if hybrid is None or not hybrid.is_measured or hybrid.of_heads:
            return 0
        return hybrid.softmax_count(len(self.attention_targets))

    def expected_targets(self) -> dict[str, AttentionTarget]:
        """Return the attention targets as costs count them: if heads that keep softmax will be measured, evenly spaced
        ones instead.
        """
        hybrid, targets = self.recipe.attention.hybrid if self.recipe.attention else None, self.attention_targets
        if hybrid is None or not hybrid.is_measured or not hybrid.of_heads or not targets:
            return targets
        heads = hybrid.fixed_heads(list(targets.values()))
        return keep_heads(targets, {layer: heads[target.index] for layer, target in targets.items()})

    def attention_after(self) -> tuple[list[AttentionTarget | NativeTarget], list[AttentionShape], int]:
        """Return (targets that get mixers or level weights, shapes of the modules that keep softmax attention, how many targets will
        keep softmax too).

        Which targets keep it is known after measurements on text. Both lists are empty without attention targets.
        """
        expected = self.expected_targets()
        whole = (target.shape for layer, target in self.attention_targets.items() if layer not in expected)
        mixed: list[AttentionTarget | NativeTarget] = [*expected.values(), *self.native_targets.values()]
        return mixed, [*self.softmax_shapes, *whole], self.measured_softmax_count

    def targets_in_layer(self, layer: str) -> dict[str, tuple[LinearTarget, ...]]:
        """Return the targets of one layer by path of the linear."""
        return {path: targets for path, targets in self.targets.items() if targets[0].linear.layer == layer}

    def replaced_linears(self, layer: str | None = None) -> dict[str, LinearTarget]:
        """Return the first target of each linear that is replaced or refitted, by its path. layer: of this layer
        alone.
        """
        targets = (slices[0] for slices in self.targets.values())
        return {linear.path: t for t in targets for linear in t.all_linears if layer is None or linear.layer == layer}

    def fitted_targets(self) -> list[LinearTarget]:
        """Return the targets that get a structure which is fitted to the matrix: not those that are dropped."""
        return [target for target in self.replaced_targets() if not target.is_dropped]

    def replaced_targets(self) -> list[LinearTarget]:
        """Return the targets that get a structure."""
        return [target for targets in self.targets.values() for target in targets if target.configs]

    def totals(self) -> dict[str, int]:
        """Return the number of replaced matrices, and numbers of parameters before and, under a uniform allocation,
        after.

        params_*: of the replaced matrices. model_*: of the whole model, without parameters of mixers. active_*: of the
        whole model for one token, which few of the routed experts compute; only if the model has such experts.
        """
        targets = self.replaced_targets()
        after = [t.params(t.preview) if t.preview else t.numel for t in targets]
        before = [t.numel for t in targets]
        totals = {"modules": len(targets), "params_before": sum(before), "params_after": sum(after)}
        change = sum(after) - sum(before) + self.untied_params
        removal = self.removal
        whole, layout = (self.model_params, self.layout) if removal is None else (removal.params, removal.layout)
        totals |= {"model_before": whole, "model_after": self.model_params + change}
        if any(linear.experts for linear in self.layout.linears):
            saved = sum((a - b) * t.linear.active for t, a, b in zip(targets, after, before)) + self.untied_params
            saved += sum(t.basis_params() * (1 - t.linear.active) for t in targets)  # every token reads a shared basis
            active = self.model_params - _idle_params(self.layout)
            totals |= {"active_before": round(whole - _idle_params(layout)), "active_after": round(active + saved)}
        return totals


def _idle_params(layout: ModelLayout) -> float:
    """Return the parameters of experts that a token does not reach, on average."""
    return sum(linear.out * linear.in_ * (1 - linear.active) for linear in layout.linears if linear.experts)
