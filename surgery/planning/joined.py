"""Linears of one input that one matrix replaces (`share: input`): which ones are joined.

Query, key and value of an attention read one input, and so do gate and up of an MLP. [W_q; W_k; W_v] is fitted as one
matrix, so that its right factor is stored once and its parameters go to the rows that need them. Fused linears are one
matrix already (`fused: whole`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from surgery.core.errors import SurgeryError

if TYPE_CHECKING:
    from surgery.architectures.linears import LinearInfo
    from surgery.planning.recipe import ConversionRecipe, LinearSettings

JOINED_ROLES = ("attention.query", "attention.key", "attention.value"), ("mlp.gate", "mlp.up")
COMPRESSED = re.compile(r"_b_proj$")  # of multi-head latent attention: each reads a compressed input of its own
CROSS_ATTENTION = re.compile(
    r"cross|encoder_attn|encdec", re.IGNORECASE
)  # whose query reads another input than key and value


def group_by_input(candidates: Mapping[str, tuple[LinearInfo, LinearSettings]]) -> list[list[LinearInfo]]:
    """Return the linears that one matrix replaces, in groups of two or more.

    candidates: the linears with `share: input` that are replaced, by path, with their settings. Those of a group have
    one parent, one number of inputs and the same settings up to `keep`.
    """
    groups: dict[object, list[LinearInfo]] = {}
    for linear, settings in candidates.values():
        role = linear.roles[0] if len(linear.roles) == 1 else ""
        role_group = next((index for index, roles in enumerate(JOINED_ROLES) if role in roles), None)
        parent = linear.path.rpartition(".")[0]
        crossed = CROSS_ATTENTION.search(parent) and role == "attention.query"
        if role_group is None or linear.experts or crossed or COMPRESSED.search(linear.path):
            continue
        alike = settings.model_copy(update={"keep": 1.0}).model_dump_json()
        groups.setdefault((parent, role_group, linear.in_, linear.transposed, alike), []).append(linear)
    return [group for group in groups.values() if len(group) > 1]


def check_joins(
    recipe: ConversionRecipe,
    groups: list[list[LinearInfo]],
    candidates: Mapping[str, tuple[LinearInfo, LinearSettings]],
    linears: tuple[LinearInfo, ...],
) -> list[str]:
    """Return notes for the user. candidates: as for `group_by_input`.

    Raise SurgeryError if the recipe has `share: input` and no linears are joined.
    """
    if recipe.share != "input" and not any(rule.share == "input" for rule in recipe.rules):
        return []
    if not groups:
        if not any(linear.roles for linear in linears):
            raise SurgeryError(
                "plan: share: input joins query, key and value, and gate and up, and no architecture names the linears "
                "of this model_type. Leave "
                "share out, or set it to none"
            )
        fused = " (its fused linears are one matrix already)" if any(linear.fused for linear in linears) else ""
        raise SurgeryError(
            "plan: share: input has nothing to join in this model: no two linears of their own that read one input "
            "(query, key and value; gate "
            f"and up) are replaced with the same settings{fused}. Leave share out, or set it to none"
        )
    kinds = dict.fromkeys(
        " and ".join(role.rpartition(".")[2] for linear in group for role in linear.roles) for group in groups
    )
    paths = {linear.path for group in groups for linear in group}
    alone = dict.fromkeys(
        role
        for linear, _ in candidates.values()
        for role in linear.roles
        if linear.path not in paths and any(role in roles for roles in JOINED_ROLES)
    )
    rest = (
        f"; not joined: {', '.join(alone)}, because what reads the same input is fused, dense or has other settings"
        if alone
        else ""
    )
    return [f"share: input: {len(paths)} linears are replaced as {len(groups)} matrices ({'; '.join(kinds)}){rest}"]
