"""A checkpoint with some of the routed experts of each layer: config.json says how many, tensors are renumbered, and
routers lose the rows of the others.

The result is used only if the model that transformers builds from the new config has the shapes of these tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from surgery.architectures.experts import RoutedExperts, experts_per_token
from surgery.architectures.linears import ModelLayout
from surgery.architectures.towers import owner_config
from surgery.checkpoint.fewer_layers import config_part
from surgery.checkpoint.meta_model import bare_model
from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.checkpoint.source import CheckpointSource
from surgery.core.errors import SurgeryError

Kept = Mapping[str, tuple[int, ...]]  # numbers of the experts that stay, in ascending order, by path of RoutedExperts
ADVICE = "Leave experts out for this model"


@dataclass(frozen=True)
class ExpertStack:
    """The routed experts of a model. paths: of the RoutedExperts, one for each layer that has experts. count: experts of
    each. part: the key of config.json below which it says so, "" at the top. keys: those that say so, as transformers
    writes them; a config.json may have other names for them. groups: of experts in
    each router, which selects groups first; 1 without groups. selected: experts of a token. selected_groups: groups of a
    token.
    """

    paths: tuple[str, ...]
    count: int
    part: str
    keys: tuple[str, ...]
    groups: int
    selected: int
    selected_groups: int

    def check_number(self, number: int) -> None:
        """Raise SurgeryError if `number` experts cannot stay in each layer."""
        if not self.selected <= number < self.count:
            raise SurgeryError(
                f"experts must be from {self.selected}, which each token is routed to, to {self.count - 1}, fewer than the "
                f"{self.count} of each layer (got {number})"
            )
        size = number // self.groups
        if self.groups > 1 and (number % self.groups or size < 2 or size * self.selected_groups < self.selected):
            least = max(2, -(-self.selected // self.selected_groups))
            raise SurgeryError(
                f"experts must be a multiple of the {self.groups} groups (n_group) that the router selects from, with at "
                f"least {least} experts in each group (got {number}). Give {least * self.groups} or another multiple of "
                f"{self.groups}"
            )

    def select(self, scores: list[float], number: int) -> tuple[int, ...]:
        """Return the `number` experts with the highest scores, as many of each group; of equal scores the first one."""
        size, chosen = self.count // self.groups, list[int]()
        for first in range(0, self.count, size):
            members = sorted(range(first, first + size), key=lambda expert: (-scores[expert], expert))
            chosen += sorted(members[: number // self.groups])
        return tuple(chosen)

    def original_name(self, parameter: str, kept: Kept) -> str:
        """Return the parameter of the whole model that becomes `parameter`."""
        for path in self.paths:
            if parameter.startswith(f"{path}."):
                index, _, rest = parameter[len(path) + 1 :].partition(".")
                return f"{path}.{kept[path][int(index)]}.{rest}"
        return parameter


def find_experts(model: Any, layout: ModelLayout) -> ExpertStack:
    """Return the routed experts of the layers that are converted.

    Raises SurgeryError if there are none, if they are not known, or if config.json does not say how many they are.
    """
    name = type(model).__name__
    if layout.merged:
        raise SurgeryError(
            f"experts: those of {layout.merged[0].path} cannot be removed one by one: {layout.merged[0].reason}. {ADVICE}"
        )
    counts = {
        path: module.num_experts
        for path, module in model.named_modules()
        if isinstance(module, RoutedExperts) and any(path.startswith(f"{layer}.") for layer in layout.layers)
    }
    if not counts:
        raise SurgeryError(f"experts: {name} has no routed experts. {ADVICE}")
    if len(set(counts.values())) > 1:
        numbers = ", ".join(str(count) for count in sorted(set(counts.values())))
        raise SurgeryError(f"experts: the layers of {name} have different numbers of them ({numbers}). {ADVICE}")
    paths, count = tuple(counts), next(iter(counts.values()))
    owner = owner_config(model, paths[0])
    part, keys = config_part(model, owner), count_keys(owner.to_dict(), count)
    if part is None or not keys:
        raise SurgeryError(f"experts: config.json of {name} does not say how many experts a layer has. {ADVICE}")
    groups, selected_groups = (
        value if type(value := getattr(owner, key, None)) is int and value > 0 else 1
        for key in ("n_group", "topk_group")
    )
    selected = min(count, experts_per_token(owner) or 1)
    return ExpertStack(paths, count, part, keys, groups, selected, min(groups, selected_groups))


def count_keys(sizes: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Return the keys of a config that say how many routed experts a layer has, such as num_local_experts. count: their
    number.
    """
    return tuple(k for k, n in sizes.items() if k.endswith("experts") and "shared" not in k and n == count)


def with_experts(
    source: CheckpointSource,
    model: Any,
    keys: Mapping[str, str],
    stack: ExpertStack,
    kept: Kept,
    replaced: Mapping[str, TensorInfo] | None = None,
) -> CheckpointSource:
    """Return the checkpoint with the experts `kept`.

    model: of the source, with all experts, parameters on meta. keys: name of the tensor of each of its parameters.
    replaced: the tensors of the routers without the rows of the other experts, by parameter; without them these are
    the first rows, whose values mean nothing.
    """
    config = copy.deepcopy(dict(source.config))
    number = len(next(iter(kept.values())))
    sizes = config.setdefault(stack.part, {}) if stack.part else config
    sizes.update(dict.fromkeys(count_keys(sizes, stack.count) or stack.keys, number))
    fewer = replace(source, config=config, tensors={}, whole=source.original)
    rows = router_parameters(model, bare_model(fewer), stack, kept)
    stored = set(keys.values())
    tensors = {name: info for name, info in source.tensors.items() if name not in stored}
    for parameter, name in keys.items():
        if _expert_number(parameter, stack) >= number:
            continue
        info = source.tensors[keys[stack.original_name(parameter, kept)]]
        if parameter in rows:
            info = (replaced or {}).get(parameter) or info.rows(0, number)
        tensors[name] = replace(info, name=name)
    return replace(fewer, tensors=tensors)


def router_parameters(before: Any, after: Any, stack: ExpertStack, kept: Kept) -> dict[str, str]:
    """Return the parameters and buffers with a row for each expert: name -> path of the experts.

    before, after: models of transformers with all and with fewer experts, on meta. Raises SurgeryError if another shape
    depends on the number of experts.
    """
    shapes = [{name: tuple(t.shape) for name, t in model.state_dict().items()} for model in (before, after)]
    blocks = {path.rpartition(".")[0]: path for path in stack.paths}
    rows, number = {}, len(next(iter(kept.values())))
    for name, shape in shapes[1].items():
        whole = shapes[0].get(stack.original_name(name, kept))
        if shape == whole:
            continue
        path = next((path for block, path in blocks.items() if name.startswith(f"{block}.")), "")
        if not path or whole != (stack.count, *shape[1:]) or shape[:1] != (number,):
            raise SurgeryError(
                f"experts: with {number} of {stack.count} experts {name} has shape {list(shape)} instead of "
                f"{list(whole or ())}, of which no rows are those of single experts. {ADVICE}"
            )
        rows[name] = path
    return rows


def _expert_number(parameter: str, stack: ExpertStack) -> int:
    """Return the number of the expert that a parameter belongs to, -1 for others."""
    path = next((path for path in stack.paths if parameter.startswith(f"{path}.")), "")
    return int(parameter[len(path) + 1 :].partition(".")[0]) if path else -1
