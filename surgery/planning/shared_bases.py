"""Bases shared by the experts of a layer (`share: experts`): which matrices share one, its rank, and what cannot share.

The gate matrices of all experts of a layer get one right factor, and the up matrices another: all of them read the
layer's input. Down matrices read what their own expert computes, so each keeps a basis of its own. See
surgery/structures/shared_basis.py.
"""

from __future__ import annotations

from dataclasses import replace

from surgery.architectures.linears import LinearInfo, ModelLayout
from surgery.core.errors import SurgeryError
from surgery.planning.recipe import ConversionRecipe, LinearSettings
from surgery.planning.targets import LinearTarget
from surgery.structures.base import min_keep
from surgery.structures.low_rank import LowRank
from surgery.structures.shared_basis import basis_path, full_shared_rank, shared_rank

Targets = dict[str, tuple[LinearTarget, ...]]
SHARING_ROLES = ("expert.gate", "expert.up")  # roles whose matrices read the layer's input


def check_can_share(linear: LinearInfo, settings: LinearSettings, recipe: ConversionRecipe) -> bool:
    """Return whether a linear with `share: experts` shares its basis: gate and up of routed experts do.

    Raises SurgeryError if their structure has no right factor that experts can share.
    """
    if not linear.experts or not set(linear.roles) & set(SHARING_ROLES):
        return False
    if settings.structure != "low_rank":
        raise SurgeryError(
            f"plan: {linear.path} ({linear.roles[0]}): share: experts stores one right factor for the experts of a "
            "layer, which only structure "
            f"low_rank has (got structure: {settings.structure}). Set structure: low_rank for "
            f"{' and '.join(SHARING_ROLES)}, or share: none"
        )
    return True


def share_bases(targets: Targets, recipe: ConversionRecipe, layout: ModelLayout) -> tuple[Targets, list[str]]:
    """Return (the targets, those with `share` with the path and the rank of their basis, notes for the user).

    One expert alone shares with no other and is an ordinary low-rank matrix. Raises SurgeryError if the recipe has
    `share: experts` and no experts can share, if ranks within a layer differ, or if rank 1 exceeds the budget.
    """
    if recipe.share != "experts" and not any(rule.share == "experts" for rule in recipe.rules):
        return targets, []
    groups: dict[str, list[LinearTarget]] = {}
    for slices in targets.values():
        for target in slices:
            if target.share:
                groups.setdefault(basis_path(target.linear.path), []).append(target)
    if not groups:
        raise SurgeryError(
            f"plan: share: experts has no experts to act on: {_why_none(layout)}. Leave share out, or set it to none"
        )
    targets, members = dict(targets), 0
    for path, group in groups.items():
        rank = group_rank(path, group, recipe.round_ranks)
        members += len(group)
        for index, target in enumerate(group):
            basis = path if len(group) > 1 else ""
            shared = replace(target, preview=LowRank(rank), basis=basis, stores_basis=bool(basis) and not index)
            targets[target.linear.path] = (shared,)
    down_count = sum(
        target.linear.roles == ("expert.down",) and bool(target.configs) for (target, *_) in targets.values()
    )
    rest = (
        f"; {down_count} matrices of role expert.down, which read no common input, have bases of their own"
        if down_count
        else ""
    )
    return targets, [
        f"share: experts: {members} matrices of {' and '.join(SHARING_ROLES)} share {len(groups)} bases, one for each "
        "layer and role, and take no "
        f"part in the allocation of ranks{rest}"
    ]


def group_rank(path: str, group: list[LinearTarget], multiple: int) -> int:
    """Return the rank of the matrices that share the basis at `path`: the given one, or the largest within the sum of
    their budgets.

    Ranks that the budget chooses are rounded down to multiples of `multiple`, unless they are smaller or full.
    """
    first, count = group[0], len(group)
    shape = (first.out, first.in_)
    full = full_shared_rank(count, shape)
    configured_ranks = {getattr(target.configs[0], "rank", None) for target in group}
    if len(configured_ranks) > 1:
        ranks = ", ".join(sorted(map(str, configured_ranks)))
        raise SurgeryError(
            f"plan: {path}: experts that share a basis must have one rank (got {ranks}). Give all experts of a layer "
            "the same rank, or set "
            "share: none for some"
        )
    if (rank := configured_ranks.pop()) is not None:
        return full if rank == "full" else min(int(rank), full)
    budget = sum(target.uniform_budget() for target in group)
    rank = shared_rank(budget, count, shape)
    if rank < 1:
        least = min_keep(count * first.out + first.in_, count * first.out, first.in_)
        raise SurgeryError(
            f"plan: {path}: {count} matrices of {first.out} x {first.in_} with one basis cannot be stored in "
            f"{int(budget):,} parameters; rank 1 "
            f"already stores {count * first.out + first.in_:,}. Raise keep to {least} or more"
        )
    return rank if rank < multiple or rank == full else rank // multiple * multiple


def _why_none(layout: ModelLayout) -> str:
    if layout.merged:
        first = layout.merged[0]
        return f"the experts of this model stay dense ({first.kind} at {first.path}: {first.reason})"
    if not any(linear.experts for linear in layout.linears):
        return "this model has no routed experts"
    return f"no matrix of {' or '.join(SHARING_ROLES)} is replaced by a structure with share: experts"
