"""The plan of a conversion: from the config and the tensor headers, a printable list of the modules to be replaced.

All settings are checked here, before any weight is read.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from surgery.architectures import get_architecture
from surgery.architectures.attention import key_value_heads
from surgery.architectures.linears import LinearInfo, ModelLayout, find_linears
from surgery.architectures.towers import select_towers, text_config
from surgery.checkpoint.outline import ModelDescription
from surgery.checkpoint.source import check_float_dtype
from surgery.core.config import is_layer_selected
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.registry import validate_config
from surgery.mixers.softmax import describe_softmax
from surgery.planning.attention_plan import (
    AttentionTarget,
    dropped_attention,
    find_attention_targets,
    softmax_shapes,
)
from surgery.planning.joined import check_joins, group_by_input
from surgery.planning.pruned_mlps import (
    Mlp,
    check_sizes_of_rules,
    expert_settings,
    find_mlps,
    find_pruned_mlps,
    is_pruned,
    prunable_mlps,
    shared_width_notes,
)
from surgery.planning.recipe import STRUCTURE_KEYS, ConversionRecipe, LinearSettings, Rule
from surgery.planning.shared_bases import check_can_share, share_bases
from surgery.planning.speed import plan_by_time
from surgery.planning.targets import FusedSlice, LinearTarget, Plan
from surgery.structures import STRUCTURES, StructureConfig

if TYPE_CHECKING:
    from surgery.planning.depth import DepthPlan
    from surgery.planning.fewer_experts import ExpertsPlan
    from surgery.planning.native import NativeTarget


def make_plan(meta_model: ModelDescription, recipe: ConversionRecipe) -> Plan:
    """Return the plan of a recipe for a model.

    With `depth` or `experts`, the plan is that of the model without the layers or experts that are removed.

    Raises SurgeryError if a pattern matches no module, a structure cannot tile its matrix, or nothing is replaced.
    """
    if recipe.stock is not None:
        raise SurgeryError(
            "stock changes the class of the model, so it is for checkpoints: use `surgery plan` and `surgery convert` with "
            "the folder or Hub id, and heal the result with `surgery finetune`"
        )
    whole = find_linears(meta_model.model)
    model_type = meta_model.config.model_type
    selected = select_towers(meta_model.model, whole.towers.values(), recipe.towers)
    layout = replace(whole, layers=tuple(path for path in whole.layers if whole.towers[path] in selected))
    if recipe.depth is not None and meta_model.source.whole is None:
        # Imported by conversions that remove layers.
        from surgery.planning.depth import plan_depth, shortened

        depth = plan_depth(recipe.depth, meta_model, layout)
        return with_depth(make_plan(shortened(meta_model, depth), recipe), depth)
    if recipe.experts is not None and meta_model.source.whole is None:
        # Imported by conversions that remove experts.
        from surgery.planning.fewer_experts import plan_experts, with_fewer_experts

        experts = plan_experts(recipe.experts, meta_model, layout)
        return plan_with_experts(make_plan(with_fewer_experts(meta_model, experts), recipe), experts)
    _check_patterns(recipe, layout, model_type)
    _check_grouped_heads(meta_model.config, layout)
    _check_continues_text(recipe, meta_model.config)
    notes = _layout_notes(meta_model, whole, layout)
    if not meta_model.keys:
        notes.append("planned from config.json alone: there are no weights to check it against")
    notes += [*_merged_notes(meta_model.model, layout), *_held_notes(layout)]
    attention_targets, attention_notes = find_attention_targets(meta_model, recipe, layout)
    native_targets: dict[str, NativeTarget] = {}
    if recipe.native is not None:
        # Imported by conversions that add level weights.
        from surgery.planning.native import find_native_targets

        native_targets = find_native_targets(meta_model, recipe.native, layout)
        _check_one_mixer(attention_targets, native_targets)
    refitted: set[str] = set()  # output projections
    if recipe.attention and recipe.attention.refits_output:
        refitted = {target.output for target in attention_targets.values()}
    notes += attention_notes
    if attention_targets and recipe.attention and recipe.attention.hybrid:
        softmax = next(iter(attention_targets.values())).softmax
        if not softmax.is_plain:
            notes.append(
                f"softmax that stays gets these options: {describe_softmax(softmax)}. The heads or layers with softmax "
                "are chosen without them"
            )
    if attention_targets and recipe.attention and recipe.attention.chooses_ranks:
        notes.append(
            "attention.cache: a conversion with --calibration chooses the ranks of each layer; a plan shows the same "
            "ranks in all layers of one share"
        )
    if attention_targets and _reads_images_both_ways(meta_model.model, whole):
        notes.append(
            "the tokens of one image attend to each other in both directions here (token_type_ids), which mixers do "
            "not: the converted "
            "model reads text, and raises an error for images"
        )
    without_attention = dropped_attention(layout, attention_targets.values())
    _check_dropped(recipe, layout, without_attention)
    targets: dict[str, tuple[LinearTarget, ...]] = {}
    joined, joining_notes = _joined_targets(recipe, layout)
    pruned, pruning_notes = _pruned_targets(recipe, layout, meta_model, set(attention_targets))
    notes += joining_notes + pruning_notes
    for linear in layout.linears:
        if linear.layer and linear.layer not in layout.layers:
            continue  # of a tower that stays as it is
        if linear.path in without_attention:
            linear_targets = _dropped_targets(linear)
        elif linear.path in pruned:
            linear_targets = pruned[linear.path]
        elif linear.path in joined:
            linear_targets = joined[linear.path]
        else:
            linear_targets = _linear_targets(linear, recipe, meta_model, layout)
        if not linear_targets and linear.path in refitted:  # stays dense, but is refitted to the mixer's output
            linear_targets = (LinearTarget(linear, linear.out, 1.0, ()),)
        if linear_targets:
            _check_reachable(linear, layout)
            _check_dtypes(meta_model, linear_targets[0])
            targets[linear.path] = linear_targets
    replaces = (
        attention_targets or native_targets or any(target.configs for slices in targets.values() for target in slices)
    )
    if not replaces and recipe.depth is None and recipe.experts is None:
        raise SurgeryError(
            "plan: the recipe replaces nothing; give a structure other than dense and keep below 1, attention: a mixer, "
            "or native: level weights"
        )
    if not (attention_targets or native_targets):
        replaced = [target for slices in targets.values() for target in slices if target.configs]
        notes += shared_width_notes(replaced, layout, vars(text_config(meta_model.model)))
    targets, sharing_notes = share_bases(targets, recipe, layout)
    notes += sharing_notes
    if layout.head in targets and f"{layout.head}.weight" in _tied_names(meta_model):
        notes.append(
            f"{layout.head} is tied to the input embedding: it gets weights of its own, and the embedding stays as it "
            "is"
        )
    if pruned_targets := _with_pruned_mlps(targets, recipe, layout, meta_model.model):
        notes.append(_trial_note([target for slices in pruned_targets.values() for target in slices if target.neurons]))
    time = None
    if recipe.speed is not None:
        targets, time, time_notes = plan_by_time(targets, recipe.speed, recipe.round_ranks, layout)
        notes += time_notes
    elif recipe.round_ranks > 1 and (note := _rounding_note(recipe.round_ranks, targets)):
        notes.append(note)
    counted = {
        name: parameter.numel()
        for name, parameter in meta_model.model.named_parameters(remove_duplicate=False)
        if name not in meta_model.tied
    }
    is_untied = layout.head in targets and f"{layout.head}.weight" in _tied_names(meta_model)
    untied = targets[layout.head][0].linear.out * targets[layout.head][0].in_ if is_untied else 0
    return Plan(
        meta_model.source.name,
        model_type,
        recipe,
        layout,
        targets,
        tuple(notes),
        attention_targets,
        native_targets,
        softmax_shapes(meta_model, [*attention_targets.values(), *native_targets.values()]),
        model_params=sum(counted.values()),
        untied_params=untied,
        time=time,
        dtype=meta_model.source.dtype,
        pruned_targets=pruned_targets,
    )


def _check_one_mixer(attention: Mapping[str, AttentionTarget], native: Mapping[str, NativeTarget]) -> None:
    """Raise SurgeryError if a layer would get a mixer for its softmax attention and level weights: their states have
    one place in the cache.
    """
    if both := [layer for layer in native if layer in attention]:
        raise SurgeryError(
            f"plan: {both[0]} has softmax attention and a linear layer side by side, and their new states would have one "
            "place in the cache. Give a recipe attention or native, not both"
        )


def with_depth(plan: Plan, depth: DepthPlan) -> Plan:
    """Return the plan of a model without layers, with those that are removed and a note about them."""
    return replace(plan, depth=depth, notes=(depth.note(), *plan.notes))


def plan_with_experts(plan: Plan, experts: ExpertsPlan) -> Plan:
    """Return the plan of a model with fewer experts, with those that stay and a note about them."""
    return replace(plan, experts=experts, notes=(experts.note(), *plan.notes))


def _rounding_note(multiple: int, targets: dict[str, tuple[LinearTarget, ...]]) -> str:
    """Return what `round_ranks` does to the ranks of a plan; "" if no rank is chosen by the budget."""
    free = [
        target
        for slices in targets.values()
        for target in slices
        if target.preview and any(has_free_rank(config, (target.out, target.in_)) for config in target.configs)
    ]
    below = sum(getattr(target.preview, "rank", multiple) < multiple for target in free)
    if not free:
        return ""
    rest = f"; {below} matrices whose budget allows less than {multiple} keep the rank that it allows" if below else ""
    return f"round_ranks: ranks chosen by the budget are rounded down to multiples of {multiple}{rest}"


def _reads_images_both_ways(model: Any, layout: ModelLayout) -> bool:
    """Return whether a model of text and images is told which tokens are of an image, which it masks differently (Gemma
    3).
    """
    return len(set(layout.towers.values())) > 1 and "token_type_ids" in inspect.signature(model.forward).parameters


def _layout_notes(meta_model: ModelDescription, whole: ModelLayout, layout: ModelLayout) -> list[str]:
    """Return what the user should know of towers, and of layers without an architecture. whole: with the layers of all
    towers.
    """
    notes = []
    unknown = sorted({linear.layer for linear in layout.linears if linear.layer in layout.layers and not linear.known})
    if unknown:
        towers = sorted({layout.towers[path] for path in unknown})
        subject = f"tower {' and '.join(towers)}, model_type" if any(towers) else "model_type"
        notes.append(
            f"no architecture for {subject} {meta_model.config.model_type!r}: every nn.Linear of its {len(unknown)} "
            "layers is "
            f"replaced and matched by its path; {_role_limits(layout)}"
        )
    other_towers = sorted(
        {whole.towers[path] for path in whole.layers} - {layout.towers[path] for path in layout.layers}
    )
    if other_towers:
        notes.append(
            f"tower {' and '.join(other_towers)} stays as it is; to replace its linears too, set towers=all and "
            "calibrate with its inputs (a folder of images, or model inputs in a .safetensors file)"
        )
    elif len(set(whole.towers.values())) > 1:
        notes.append(
            "calibrate with inputs of every tower: linears that the calibration inputs do not reach are not replaced, "
            "and the report lists them"
        )
    return notes


def _role_limits(layout: ModelLayout) -> str:
    if any(linear.experts for linear in layout.linears):
        return "rules can use the roles expert.gate, expert.up and expert.down only"
    return "rules cannot use roles"


def _merged_notes(model: Any, layout: ModelLayout) -> list[str]:
    """Return a note about merged experts that stay dense, with their share of the model."""
    if not layout.merged:
        return []
    first, count = layout.merged[0], len(layout.merged)
    params, total = sum(m.params for m in layout.merged), sum(p.numel() for p in model.parameters())
    return [
        f"the experts of {count} layers stay dense ({first.kind}: {first.reason}): {params:,} parameters, "
        f"{params / total:.1%} of the "
        f"model, {', '.join(m.path for m in layout.merged[:2])}{', ..' if count > 2 else ''}"
    ]


def _held_notes(layout: ModelLayout) -> list[str]:
    """Return a note about linears that stay dense, for each reason."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in sorted(layout.held.items()):
        by_reason.setdefault(reason, []).append(path)
    return [
        f"{len(paths)} linears stay dense, because {reason}: {', '.join(paths[:2])}{', ..' if len(paths) > 2 else ''}"
        for reason, paths in by_reason.items()
    ]


def _tied_names(meta_model: ModelDescription) -> set[str]:
    """Return the parameters of tied pairs that the checkpoint stores once. A pair stored twice is not tied."""
    return {name for pair in meta_model.tied.items() if not set(pair) <= meta_model.keys.keys() for name in pair}


def matches_pattern(pattern: str, linear: LinearInfo, role: str) -> bool:
    """Return whether a rule's pattern (with * and ?) matches the role or the path of a linear."""
    return fnmatchcase(role, pattern) or fnmatchcase(linear.path, pattern)


def _linear_targets(
    linear: LinearInfo, recipe: ConversionRecipe, meta_model: ModelDescription, layout: ModelLayout
) -> tuple[LinearTarget, ...]:
    """Return the targets of a linear: () if it stays unchanged, several if a fused linear is split by role."""
    per_role = [_resolve_settings(linear, role, recipe, layout) for role in linear.roles or ("",)]
    if all(s.structure == "dense" for s in per_role):
        return ()
    if len(per_role) == 1 or (all(s == per_role[0] for s in per_role) and per_role[0].fused == "whole"):
        return (_linear_target(linear, per_role[0], recipe, linear.out, None),)
    sizes, heads = fused_sizes(linear, meta_model.config)
    parts = [FusedSlice(role, i, sizes, heads) for i, role in enumerate(linear.roles)]
    return tuple(_linear_target(linear, s, recipe, sizes[p.index], p) for s, p in zip(per_role, parts))


def _joined_targets(
    recipe: ConversionRecipe, layout: ModelLayout
) -> tuple[dict[str, tuple[LinearTarget, ...]], list[str]]:
    """Return (for each linear that is joined with others its targets, notes for the user).

    Only the first of a group has one.
    """
    candidates = {}
    for linear in layout.linears:
        if len(linear.roles) == 1 and not linear.experts and not (linear.layer and linear.layer not in layout.layers):
            settings = _resolve_settings(linear, linear.roles[0], recipe, layout)
            if settings.share == "input" and settings.structure not in ("dense", "pruned", "value_dims"):
                candidates[linear.path] = (linear, settings)
    groups = group_by_input(candidates)
    targets: dict[str, tuple[LinearTarget, ...]] = {}
    for linears in groups:
        settings, out = candidates[linears[0].path][1], sum(linear.out for linear in linears)
        keep = sum(candidates[linear.path][1].keep * linear.out for linear in linears) / out
        target = _linear_target(linears[0], settings.model_copy(update={"keep": keep}), recipe, out, None)
        targets |= {linear.path: () for linear in linears}
        targets[linears[0].path] = (replace(target, joined=tuple(linears)),)
    return targets, check_joins(recipe, groups, candidates, layout.linears)


def _pruned_targets(
    recipe: ConversionRecipe, layout: ModelLayout, meta_model: ModelDescription, mixed: set[str]
) -> tuple[dict[str, tuple[LinearTarget, ...]], list[str]]:
    """Return (targets by path for the linears with `structure: pruned` or `value_dims`, notes for the user). mixed:
    layers whose attention gets a mixer.

    Of an MLP only `down` has a target, of attention only the output projection; linears that belong to neither have
    none.
    """
    inside = [linear for linear in layout.linears if linear.layer in (*layout.layers, "")]
    settings = _settings_by_path(recipe, layout)
    if not any(one.structure in ("pruned", "value_dims") for several in settings.values() for one in several):
        return {}, []
    from surgery.planning.pruned_heads import find_pruned_attention, find_values

    named = {n.path: r.match for n in inside for r in recipe.rules if r.structure == "pruned" and _applies(r, n)}
    attentions = find_pruned_attention(layout, settings, named, mixed, meta_model.model)
    taken = {linear.path for attention in attentions for linear in attention.linears}
    rest = {path: several for path, several in settings.items() if path not in taken}
    mlps, notes = find_pruned_mlps(recipe, layout, rest, named, meta_model.model)
    named = {n.path: r.match for n in inside for r in recipe.rules if r.structure == "value_dims" and _applies(r, n)}
    values, value_notes = find_values(layout, settings, named, mixed, meta_model.model)
    notes += value_notes
    if attentions or mlps:
        check_sizes_of_rules(recipe.rules, lambda rule: {role for n in inside if _applies(rule, n) for role in n.roles})
    targets: dict[str, tuple[LinearTarget, ...]] = dict.fromkeys(taken, ())
    targets |= {path: () for path, several in rest.items() if mlps and is_pruned(several)}
    if values:
        targets |= {n: () for n, several in settings.items() if any(s.structure == "value_dims" for s in several)}
    for one in values:
        chosen, output = settings[one.output.path][0], one.output
        _structure_config("value_dims", chosen, auto=False)  # raises SurgeryError for options of other structures
        target = LinearTarget(
            output, output.out, chosen.keep, (one.config(chosen),), neurons=(one.value,), sizes=((one.value.out,),)
        )
        targets[output.path] = (_with_preview(target),)
    for mlp in mlps:
        targets[mlp.down.path] = (_mlp_target(mlp, settings[mlp.down.path], auto=False),)
    for attention in attentions:
        chosen, output = settings[attention.output.path][0], attention.output
        heads, config = attention.heads, attention.config(chosen)
        target = LinearTarget(output, output.out, chosen.keep, (config,), neurons=heads, sizes=attention.sizes)
        targets[output.path] = (_with_preview(target),)
    return targets, notes


def _check_dropped(recipe: ConversionRecipe, layout: ModelLayout, without_attention: set[str]) -> None:
    """Raise SurgeryError unless `structure: dropped` drops whole MLPs, and no other key decides about what is dropped.

    without_attention: paths of the projections that are dropped.
    """
    is_named = "dropped" in (recipe.structure, *(rule.structure for rule in recipe.rules))
    settings = _settings_by_path(recipe, layout) if is_named else {}
    chosen = [path for path, several in settings.items() if any(one.structure == "dropped" for one in several)]
    mlps = [mlp for mlp in find_mlps(layout, layout.layers) if not mlp.down.experts] if is_named else []
    whole = {
        linear.path
        for mlp in mlps
        if all(one.structure == "dropped" for linear in mlp.linears for one in settings[linear.path])
        for linear in mlp.linears
    }
    for path in chosen:
        if path not in whole:
            raise SurgeryError(
                f"plan: structure dropped drops an MLP with all of its linears, and {path} is not of an MLP that is "
                "dropped as a whole. Give a rule {match: mlp.*, structure: dropped}; to drop attention give "
                "attention: {mixer: none}, and for fewer routed experts the key experts"
            )
    if recipe.speed is not None and (chosen or without_attention):
        raise SurgeryError("plan: speed has no measured times for structure dropped. Give keep instead of speed")
    hybrid = recipe.attention.hybrid if recipe.attention else None
    if hybrid is not None and hybrid.is_measured and without_attention:
        raise SurgeryError(
            f"plan: attention.hybrid choose_by: {hybrid.choose_by} keeps softmax where it reads distant tokens, and "
            "mixer none drops what near tokens give as well. Name the layers with softmax, for example hybrid: {layers: "
            "[0, 8]}, or search for them: surgery search --only 'attention dropped'"
        )


def _applies(rule: Rule, linear: LinearInfo) -> bool:
    """Return whether a rule matches a linear, in its layer."""
    if rule.layers is not None and (
        linear.index is None or not is_layer_selected(rule.layers, linear.index, linear.count)
    ):
        return False
    return any(matches_pattern(rule.match, linear, role) for role in linear.roles or ("",))


def _mlp_target(mlp: Mlp, given: Sequence[LinearSettings], auto: bool) -> LinearTarget:
    """Return the target of an MLP that is pruned. Raises SurgeryError if its budget allows no width.

    given: settings of its `down`. auto: whether `structure: auto` tries it.
    """
    chosen = (expert_settings(given) if mlp.down.experts else given)[0].model_copy(update={"groups": None})
    config = _structure_config("pruned", chosen, auto=auto)
    sizes = tuple((mlp.down.in_,) * len(linear.roles) for linear in mlp.neurons)
    return _with_preview(LinearTarget(mlp.down, mlp.down.out, chosen.keep, (config,), neurons=mlp.neurons, sizes=sizes))


def _with_preview(target: LinearTarget) -> LinearTarget:
    """Return a target of a pruned MLP or attention with the size that a uniform budget allows."""
    try:
        return replace(target, preview=fit_target(target.configs[0], target, target.uniform_budget()))
    except SurgeryError as error:
        raise SurgeryError(f"plan: {target.name}: {error}") from None


def _with_pruned_mlps(
    targets: dict[str, tuple[LinearTarget, ...]], recipe: ConversionRecipe, layout: ModelLayout, model: Any
) -> dict[str, tuple[LinearTarget, ...]]:
    """Return the targets with pruned MLPs in place of the linears of MLPs and routed experts with `structure: auto`; {}
    if the candidates have no `pruned`, or if no MLP can be pruned within its budget.
    """
    if not recipe.tries_pruning or recipe.speed is not None:
        return {}
    pruned, settings = dict(targets), _settings_by_path(recipe, layout)
    for mlp in prunable_mlps(layout, settings, model):
        with suppress(SurgeryError):
            pruned[mlp.down.path] = (_mlp_target(mlp, settings[mlp.down.path], auto=True),)
            for linear in mlp.neurons:
                pruned.pop(linear.path, None)
    return {} if pruned == targets else pruned


def _trial_note(tried: Sequence[LinearTarget]) -> str:
    """Return which MLPs and routed experts a trial on held-out text compares with structured linears."""
    experts = sum(bool(target.linear.experts) for target in tried)
    counts = {"MLPs": len(tried) - experts, "routed experts": experts}
    what = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
    return (
        f"structure: auto tries {what} with fewer neurons (structure pruned) too: a trial on held-out text chooses "
        "between that and structured linears, whose numbers stand here"
    )


def _settings_by_path(recipe: ConversionRecipe, layout: ModelLayout) -> dict[str, list[LinearSettings]]:
    """Return the settings of each role of the linears of the layers that are converted, and of the head."""
    inside = (linear for linear in layout.linears if linear.layer in (*layout.layers, ""))
    return {n.path: [_resolve_settings(n, role, recipe, layout) for role in n.roles or ("",)] for n in inside}


def _resolve_settings(linear: LinearInfo, role: str, recipe: ConversionRecipe, layout: ModelLayout) -> LinearSettings:
    # A linear of a known family without a role is replaced only by an explicit rule.
    unnamed = (linear.known and not linear.roles) or linear.router
    index = None if unnamed else linear.index
    return recipe.settings(lambda pattern: matches_pattern(pattern, linear, role), index, linear.count)


def _linear_target(
    linear: LinearInfo, settings: LinearSettings, recipe: ConversionRecipe, out: int, fused_slice: FusedSlice | None
) -> LinearTarget:
    if settings.structure == "dense":
        return LinearTarget(linear, out, 1.0, (), fused_slice)
    share = settings.share == "experts" and check_can_share(linear, settings, recipe)
    names = recipe.linear_candidates if settings.structure == "auto" else (settings.structure,)
    configs = tuple(_structure_config(name, settings, auto=settings.structure == "auto") for name in names)
    fitted, reasons = [], []
    for config in configs:
        try:
            if recipe.speed is not None:
                fitted.append(STRUCTURES[config].resolve(config, out, linear.in_))
                continue
            budget = settings.keep * out * linear.in_
            if share:  # `share_bases` chooses the rank of all experts of the layer together
                fitted.append(config)
                continue
            fitted.append(_fitted_config(config, (out, linear.in_), budget, recipe.round_ranks))
        except SurgeryError as error:
            reasons.append(str(error))
    if not fitted:
        raise SurgeryError(f"plan: {linear.path} ({' '.join(linear.roles)}): {reasons[0]}")
    feasible_configs = tuple(c for c in configs if any(type(f) is type(c) for f in fitted))
    preview = None if recipe.speed is not None else fitted[0]
    return LinearTarget(
        linear, out, settings.keep, feasible_configs, fused_slice, preview, recipe.round_ranks, share=share
    )


def _dropped_targets(linear: LinearInfo) -> tuple[LinearTarget, ...]:
    """Return the only target of a projection that is dropped."""
    # Imported by conversions that drop attention.
    from surgery.structures.dropped import Dropped

    return (LinearTarget(linear, linear.out, 1.0, (Dropped(),), preview=Dropped()),)


@lru_cache(4096)
def _fitted_config(config: StructureConfig, shape: tuple[int, int], budget: float, multiple: int) -> StructureConfig:
    """Return the config with the largest rank within the budget; the experts of a layer have the same shapes."""
    fitted: StructureConfig = fit_rounded(config, shape, budget, multiple)
    return fitted


def _structure_config(name: str, settings: LinearSettings, auto: bool) -> StructureConfig:
    """Return the structure's config with the recipe's options; with structure: auto, options that do not apply are
    ignored.
    """
    config_type = STRUCTURES.config_type(name)
    options = {field.name for field in dataclasses.fields(config_type)}
    values = {k: getattr(settings, k) for k in STRUCTURE_KEYS if getattr(settings, k) is not None}
    if not auto:
        for key in values:
            if key not in options:
                raise SurgeryError(f"plan: structure {name!r} has no option {key!r}{suggestion(key, options)}")
        checked: StructureConfig = validate_config(config_type, values)
        return checked
    config: StructureConfig = config_type()
    for key in values.keys() & options:
        with suppress(SurgeryError):
            validate_config(config_type, {key: values[key]})
            config = replace(config, **{key: values[key]})
    return config


def fused_sizes(linear: LinearInfo, config: Any) -> tuple[tuple[int, ...], int]:
    """Return the output rows of each role of a fused linear, and the number of heads that interleave them (0:
    stacked).
    """
    config = config.get_text_config()
    assert linear.fused is not None
    if linear.roles[0].startswith("mlp"):
        return (linear.out // len(linear.roles),) * len(linear.roles), 0
    heads = config.num_attention_heads
    groups = key_value_heads(config, get_architecture(config.model_type))
    head_dim = linear.out // (heads + 2 * groups)
    if head_dim * (heads + 2 * groups) != linear.out:
        raise SurgeryError(
            f"plan: {linear.path} has {linear.out} rows, not a multiple of {heads} query + 2 x {groups} key/value "
            "heads; "
            "it can be replaced whole (fused: whole)"
        )
    sizes = (heads * head_dim, groups * head_dim, groups * head_dim)
    return sizes, heads if linear.fused.layout == "per_head" else 0


def _check_reachable(linear: LinearInfo, layout: ModelLayout) -> None:
    if linear.index is None and linear.path != layout.head:
        raise SurgeryError(
            f"plan: {linear.path} lies outside the layers; only linears of the layers and the head "
            f"({layout.head or 'this model has none'}) "
            "can be replaced"
        )


def _check_continues_text(recipe: ConversionRecipe, config: Any) -> None:
    """Raise SurgeryError if the recipe lets the original sample text, and its class is known not to continue text."""
    names = [name for name in getattr(config, "architectures", None) or () if isinstance(name, str)]
    continues = any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names)
    if recipe.generated_tokens and ((names and not continues) or getattr(config, "is_encoder_decoder", False) is True):
        raise SurgeryError(
            f"plan: generated_tokens needs a model that continues text (got {', '.join(names) or config.model_type}). "
            "Leave generated_tokens out, "
            "and give a longer calibration text"
        )


def _check_dtypes(meta_model: ModelDescription, target: LinearTarget) -> None:
    """Raise SurgeryError if a weight is not of floating point, or if those that one matrix would replace differ in
    dtype.
    """
    infos = [meta_model.tensor_info(f"{linear.path}.weight") for linear in target.all_linears]
    for info in infos:
        check_float_dtype(info)
    if target.joined and len({info.dtype for info in infos}) > 1:
        kinds = ", ".join(f"{linear.path} {info.dtype}" for linear, info in zip(target.linears, infos))
        raise SurgeryError(
            f"plan: share: input stores one matrix in one dtype, and these weights differ ({kinds}). Add a rule "
            f"{{match: "
            f"{target.linear.path}, share: none}}"
        )


def _check_grouped_heads(config: Any, layout: ModelLayout) -> None:
    """Raise SurgeryError if query heads cannot share the key/value heads evenly, in a model whose linears have that
    many: it cannot run.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads, groups = (getattr(config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    if type(heads) is not int or type(groups) is not int or min(heads, groups) < 1 or heads % groups == 0:
        return
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    if any(linear.out in (groups * size, (heads + 2 * groups) * size) for linear in layout.linears):
        raise SurgeryError(
            f"plan: num_attention_heads ({heads}) in config.json must be a multiple of num_key_value_heads ({groups}): "
            "each key/value head "
            "serves the same number of query heads, so this model cannot run. Correct config.json"
        )


def _check_patterns(recipe: ConversionRecipe, layout: ModelLayout, model_type: str) -> None:
    is_dense = {recipe.structure, *(rule.structure for rule in recipe.rules)} <= {"dense", None}
    for rule in recipe.rules:
        if is_dense and (given := [key for key in ("keep", *STRUCTURE_KEYS) if getattr(rule, key) is not None]):
            raise SurgeryError(
                f"plan: {given[0]} for {rule.match!r} has no effect, because the recipe leaves all linears dense. Give "
                f"the rule a structure, for example low_rank, or leave {given[0]} out"
            )
        anywhere = rule.model_copy(update={"layers": None})
        matched = [linear for linear in layout.linears if _applies(anywhere, linear)]
        if matched and all(linear.layer and linear.layer not in layout.layers for linear in matched):
            raise SurgeryError(
                f"plan: pattern {rule.match!r} matches only modules of tower {matched[0].tower!r} ({matched[0].path}), "
                "which the recipe "
                f"leaves as it is. Set towers=all, or towers={matched[0].tower}"
            )
        if not matched:
            raise SurgeryError(
                f"plan: pattern {rule.match!r} matches no module of {model_type}; a module looks like "
                f"{layout.linears[0].path!r}, the roles here are {', '.join(_roles(layout)) or 'none'}"
            )
        if not any(_applies(rule, linear) for linear in matched):
            layers = sorted({linear.index for linear in matched if linear.index is not None})
            raise SurgeryError(
                f"plan: layers {rule.layers!r} of the rule for {rule.match!r} selects none of the layers with such "
                f"modules, {layers}. Name some of these, or leave the rule out"
            )


def _roles(layout: ModelLayout) -> Iterable[str]:
    return dict.fromkeys(role for linear in layout.linears for role in linear.roles)


def fit_config_to_budget(config: Any, target: LinearTarget, budget: float) -> Any | None:
    """Return the config fitted to a budget of `budget` parameters, or None if no fit exists."""
    try:
        return fit_target(config, target, budget)
    except SurgeryError:
        return None


def fit_target(config: Any, target: LinearTarget, budget: float) -> Any:
    """Return the config fitted to a budget of `budget` parameters. Raises SurgeryError if no fit exists."""
    return fit_rounded(config, (target.out, target.in_), target.matrix_budget(budget), target.round_ranks)


def fit_rounded(config: Any, shape: tuple[int, int], budget: float, multiple: int) -> Any:
    """Return the config of the largest rank within `budget` stored elements, rounded down to a multiple of `multiple`.

    shape: (out, in). Ranks below `multiple` and full rank are not rounded, nor are ranks that the recipe or the
    structure gives. Raises SurgeryError if rank 1 exceeds the budget.
    """
    cls = STRUCTURES[config]
    fitted = cls.fit(replace(config), *shape, budget)
    if not has_free_rank(config, shape) or fitted.rank < multiple or fitted.rank == cls.full_rank(fitted, *shape):
        return fitted
    return replace(fitted, rank=fitted.rank // multiple * multiple)


def has_free_rank(config: Any, shape: tuple[int, int]) -> bool:
    """Return whether the budget chooses the rank. Monarch's follows from its blocks."""
    return getattr(STRUCTURES[config].resolve(config, *shape), "rank", 1) is None
