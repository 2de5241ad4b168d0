"""MLPs whose neurons are pruned (`structure: pruned`): which linears belong to one, and what cannot be pruned.

An MLP is down act(up x), or down (act(gate x) * up x): every neuron is a row of gate and of up, and a column of down.
The three are one target. A routed expert is an MLP too; all experts of a model get one width, unless a rule fixes
others. See surgery/structures/pruned.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from surgery.architectures.linears import LinearInfo, ModelLayout
from surgery.checkpoint.pruned_sizes import EXPERT_WIDTHS
from surgery.core.errors import SurgeryError
from surgery.planning.recipe import ConversionRecipe, LinearSettings, Rule
from surgery.planning.targets import LinearTarget

MLP_ROLES = ("mlp.gate", "mlp.up", "mlp.down")
EXPERT_ROLES = ("expert.gate", "expert.up", "expert.down")
DOWN_ROLES = {"mlp.down", "expert.down"}
Settings = Mapping[str, Sequence[LinearSettings]]  # by path of a linear, for each of its roles


@dataclass(frozen=True)
class Mlp:
    """The linears of one MLP. neurons: those of gate and up, or a fused one of both. down: the one that reads them."""

    neurons: tuple[LinearInfo, ...]
    down: LinearInfo

    @property
    def linears(self) -> tuple[LinearInfo, ...]:
        """All linears, in the order in which they run."""
        return (*self.neurons, self.down)

    @property
    def pattern(self) -> str:
        """The pattern of a rule that matches all of its linears."""
        return "expert.*" if self.down.experts else "mlp.*"


def find_pruned_mlps(
    recipe: ConversionRecipe, layout: ModelLayout, settings: Settings, named: Mapping[str, str], model: Any
) -> tuple[list[Mlp], list[str]]:
    """Return the MLPs that the recipe prunes, and notes for the user.

    settings: of the linears of the layers that are converted. named: linears that a rule with `structure: pruned`
    matches, with its pattern.

    Raises SurgeryError for linears that are named and are not of an MLP, and for MLPs whose linears have different
    settings, share their weights or do more than an MLP does.
    """
    chosen = [linear for linear in layout.linears if is_pruned(settings.get(linear.path, ()))]
    if not chosen:
        return [], []
    if recipe.speed is not None:
        raise SurgeryError("plan: speed has no measured times for structure pruned. Give keep instead of speed")
    for linear in chosen:
        if linear.path in named and not set(linear.roles) & {*MLP_ROLES, *EXPERT_ROLES}:
            raise SurgeryError(
                f"plan: pattern {named[linear.path]!r} matches {linear.path} ({', '.join(linear.roles) or 'no role'}), "
                "and structure pruned removes neurons of MLPs and heads of attention. Match mlp.*, expert.* or "
                "attention.*, or give this linear another structure"
            )
    mlps, paths = list(find_mlps(layout, {linear.layer for linear in chosen})), {linear.path for linear in chosen}
    pruned = [mlp for mlp in mlps if any(linear.path in paths for linear in mlp.linears)]
    for mlp in pruned:
        check_same_settings(mlp.linears, settings, "a neuron of an MLP", mlp.pattern)
        _check_shapes(mlp, model)
    check_one_share([settings[mlp.down.path] for mlp in pruned if not mlp.down.experts], "width", "MLPs")
    check_one_share([expert_settings(settings[m.down.path]) for m in pruned if m.down.experts], "width", "experts")
    inside = {linear.path for mlp in pruned for linear in mlp.linears}
    others = [linear for linear in chosen if linear.path not in inside]
    for linear in others:
        if set(linear.roles) & set(MLP_ROLES):
            raise SurgeryError(
                f"plan: {linear.path} ({', '.join(linear.roles)}) is the only linear of its MLP that is known, so its "
                "neurons cannot be removed. Give it another structure"
            )
    if not pruned:
        raise SurgeryError(
            "plan: structure pruned finds no MLP in this model, because no architecture says which linears are gate, up "
            "and down, or the layers that are converted have none. Choose another structure"
        )
    roles = dict.fromkeys(role or "linears without a role" for linear in others for role in linear.roles or ("",))
    notes = [f"structure pruned: {', '.join(roles)} stay dense, which are of no MLP"] if roles else []
    if any(role.startswith("attention.") for role in roles):
        notes[0] += "; a rule {match: attention.*, structure: pruned} removes heads too"
    return pruned, notes


def is_pruned(settings: Sequence[LinearSettings]) -> bool:
    """Return whether a role of a linear has `structure: pruned`."""
    return any(one.structure == "pruned" for one in settings)


def expert_settings(settings: Sequence[LinearSettings]) -> list[LinearSettings]:
    """Return the settings of an expert's linear, with `width: uniform` where no number is given."""
    return [one if one.width else one.model_copy(update={"width": "uniform"}) for one in settings]


def prunable_mlps(layout: ModelLayout, settings: Settings, model: Any) -> list[Mlp]:
    """Return the MLPs and routed experts whose linears all have `structure: auto`, and of which neurons can be removed.
    Experts, which get one width, need one share. settings: of the linears of the layers that are converted.
    """
    mlps: dict[bool, list[Mlp]] = {False: [], True: []}  # by whether they are routed experts
    for mlp in find_mlps(layout, layout.layers):
        if any(one.structure != "auto" for linear in mlp.linears for one in settings[linear.path]):
            continue
        with suppress(SurgeryError):
            check_same_settings(mlp.linears, settings, "a neuron of an MLP", mlp.pattern)
            _check_shapes(mlp, model)
            mlps[bool(mlp.down.experts)].append(mlp)
    with suppress(SurgeryError):
        check_one_share([expert_settings(settings[mlp.down.path]) for mlp in mlps[True]], "width", "experts")
        return mlps[False] + mlps[True]
    return mlps[False]


def shared_width_notes(targets: Iterable[LinearTarget], layout: ModelLayout, config: Mapping[str, Any]) -> list[str]:
    """Return a note if pruned experts make a checkpoint that needs this package, because config.json has one width for
    them and for the shared experts beside them (DeepSeek, GLM, Llama 4).

    targets: all that are replaced. There is no note if other structures, or experts of several widths, need this package
    in any case. config: of the text model.
    """
    pruned = {target.linear.path: target for target in targets}
    routed = [target for target in pruned.values() if target.linear.experts]
    downs = {linear.path: linear.in_ for linear in layout.linears if "expert.down" in linear.roles}
    widths = set((downs | {target.linear.path: getattr(target.preview, "width", 0) for target in routed}).values())
    if (
        not routed
        or len(widths) != 1
        or any(config.name != "pruned" for target in pruned.values() for config in target.configs)
    ):
        return []
    (width,), before = widths, routed[0].in_
    key = next((key for key in EXPERT_WIDTHS if config.get(key) == before), None)
    if key is None or any("shared" in other and other.endswith("intermediate_size") for other in config):
        return []
    parents = {f"{target.linear.experts.rpartition('.')[0]}." for target in routed}
    shared = [
        n
        for n in layout.linears
        if not n.experts
        and any(n.path.startswith(parent) for parent in parents)
        and (n.out, n.in_ % before) == (routed[0].out, 0)
    ]
    given = {path: getattr(target.configs[0], "width", None) for path, target in pruned.items()}
    is_fixed = all(given[target.linear.path] == width for target in routed)
    if not shared or (is_fixed and all(given.get(n.path) == n.in_ // before * width for n in shared)):
        return []
    first = shared[0]
    note = (
        f"{key} in config.json is the width of the routed and of the shared experts. The recipe does not give both the "
        "same share, so the result needs this package to load"
    )
    if not set(first.roles) & DOWN_ROLES:
        return [f"{note}: structure pruned does not know the shared experts of this family ({first.path})"]
    name, several = first.path.split(".")[-2], first.in_ // before
    return [
        f"{note}. For an ordinary checkpoint fix both widths: width: {width} for expert.*, and "
        f"{{match: '*.{name}.*', structure: pruned, width: {width * several}}}"
    ]


def find_mlps(layout: ModelLayout, layers: Iterable[str]) -> Iterator[Mlp]:
    """Yield the MLPs of some layers, by their parent if a layer has several, such as a dense one, a shared expert and
    routed ones.
    """
    of_layer: dict[tuple[str, str, int], list[LinearInfo]] = {}
    inside = set(layers)
    for linear in layout.linears:
        if linear.layer in inside and set(linear.roles) & {*MLP_ROLES, *EXPERT_ROLES}:
            of_layer.setdefault((linear.layer, linear.experts, linear.expert), []).append(linear)
    for linears in of_layer.values():
        downs = [linear for linear in linears if set(linear.roles) & DOWN_ROLES]
        for down in downs:
            parent = down.path.rpartition(".")[0]
            members = [n for n in linears if len(downs) == 1 or n.path.rpartition(".")[0] == parent]
            neurons = tuple(n for n in members if n is not down)
            if neurons:
                yield Mlp(neurons, down)


def check_same_settings(linears: Sequence[LinearInfo], settings: Settings, removed: str, pattern: str) -> None:
    """Raise SurgeryError unless all linears of an MLP or attention have the same settings. removed: what the structure
    removes. pattern: of a rule that matches all of them.
    """
    first, *others = [one for linear in linears for one in settings[linear.path]]
    if any(one != first for one in others):
        given = "; ".join(
            f"{linear.path}: " + ", ".join(f"{one.structure} keep {one.keep:g}" for one in settings[linear.path])
            for linear in linears
        )
        raise SurgeryError(
            f"plan: structure pruned removes {removed} from all of its linears, so they need the same settings (got "
            f"{given}). Give them in one rule for {pattern}"
        )


def check_one_share(settings: Sequence[Sequence[LinearSettings]], key: str, owners: str) -> None:
    """Raise SurgeryError if MLPs or attention modules of one width or number of groups have different shares. settings:
    of each of them.
    """
    shares = {one.keep for several in settings for one in several if getattr(one, key) == "uniform"}
    if len(shares) > 1:
        raise SurgeryError(
            f"plan: {key}: uniform gives all {owners} one size, and rules give them different shares (keep "
            f"{', '.join(f'{share:g}' for share in sorted(shares))}). Give one keep, or leave {key} out"
        )


def check_sizes_of_rules(rules: Sequence[Rule], roles: Callable[[Rule], Collection[str]]) -> None:
    """Raise SurgeryError if a rule gives attention the size of MLPs, or MLPs that of attention. roles(rule): of the
    linears that it matches.
    """
    for rule in rules:
        kinds = {role.partition(".")[0] for role in roles(rule)}
        if rule.groups is not None and kinds in ({"mlp"}, {"expert"}):
            raise SurgeryError(
                f"plan: groups in the rule for {rule.match!r} is a number of key/value heads, and an MLP has none. Give "
                "its width instead"
            )
        if rule.width is not None and rule.structure == "pruned" and kinds == {"attention"}:
            raise SurgeryError(
                f"plan: width in the rule for {rule.match!r} is a number of neurons, and attention has none. Give groups "
                "instead, a number of key/value heads"
            )


def check_untied(linears: Sequence[LinearInfo], model: Any, owner: str) -> None:
    """Raise SurgeryError if a linear of an MLP or attention shares a parameter with another module."""
    pairs = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*pairs, *pairs.values()}
    for linear in linears:
        if shared := next((name for name in (f"{linear.path}.weight", f"{linear.path}.bias") if name in tied), ""):
            raise SurgeryError(
                f"plan: {shared} is shared with another module, which structure pruned would change too. Leave {owner} "
                f"dense: a rule {{match: {linear.path}, structure: dense}}"
            )


def _check_shapes(mlp: Mlp, model: Any) -> None:
    """Raise SurgeryError unless gate and up make the neurons that down reads, one by one, and own their weights."""
    width, down = mlp.down.in_, mlp.down
    count = sum(len(linear.roles) for linear in mlp.neurons)
    if any(linear.out != width * len(linear.roles) for linear in mlp.neurons) or count > 2:
        sizes = ", ".join(f"{linear.path} has {linear.out} outputs" for linear in mlp.neurons)
        raise SurgeryError(
            f"plan: {down.path} reads {width} neurons, and {sizes}, so that neurons cannot be removed from both. Give "
            "this MLP another structure"
        )
    check_untied(mlp.linears, model, "its MLP")
    paths = {linear.path for linear in mlp.linears}
    common = _common_parent([linear.path for linear in mlp.linears])
    for name, parameter in model.get_submodule(common).named_parameters():
        owner = f"{common}.{name}".rpartition(".")[0]
        if owner not in paths and owner.startswith(common) and width in parameter.shape and common != down.layer:
            raise SurgeryError(
                f"plan: {common}.{name} has a value for each of the {width} neurons of {down.path}, and structure "
                "pruned knows only gate, up and down. Give this MLP another structure"
            )


def _common_parent(paths: Sequence[str]) -> str:
    parts = [path.split(".") for path in paths]
    common = []
    for names in zip(*parts):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
