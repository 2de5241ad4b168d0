"""SEARCH/table.json: the choices of a model with their damage and costs, written after each step.

A table is read by the search that goes on with it. It is then no more than a stranger's word: its schema is checked,
its start must be that of this search, and only damages and the configs of mixers that measurements chose are taken from
it. Costs are counted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgery.budget.choices import Choice, Choices
from surgery.budget.damage import Damage
from surgery.checkpoint.meta_model import MetaModel
from surgery.core.config import validation_error
from surgery.core.errors import SurgeryError
from surgery.core.files import check_not_link, read_json, size_text, write_json

TABLE_NAME = "table.json"
MAX_TABLE_BYTES = 2**26  # largest table that is read

PlanKey = tuple[str, ...]  # sorted names of the choices of a plan that change the model

Text = Annotated[str, Field(max_length=1000)]
Nats = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Whole = Annotated[int, Field(gt=-(2**62), lt=2**62)]


class TableModel(BaseModel):
    """Base of the table's parts: strict types, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Row(TableModel):
    """One choice. covers: the parts that it decides. damage: KL divergence from the original in nats per token. error:
    its standard error. costs: differences from the original. mixer: the config of a mixer that measurements chose.
    """

    choice: Text
    covers: list[Text]
    family: Text
    damage: Nats
    error: Nats | None
    costs: dict[Text, Whole]
    mixer: dict[Text, Any] | None = None


class PlanRow(TableModel):
    """A plan that was measured as a whole. choices: all that change the model, sorted. damage, error: as of a choice."""

    choices: Annotated[list[Text], Field(min_length=1, max_length=100_000)]
    damage: Nats
    error: Nats | None


class Table(TableModel):
    """The table of a search. start: what must be equal when a search goes on. original: costs of the unconverted model.
    at: tokens of a sequence whose cache and multiply-accumulates count. plans: those that were measured as a whole.
    """

    format: Literal[1] = 1
    start: dict[Text, Any]
    original: dict[Text, Whole]
    at: Annotated[int, Field(ge=1)]
    rows: Annotated[list[Row], Field(max_length=1_000_000)] = []
    plans: Annotated[list[PlanRow], Field(max_length=100_000)] = []


@dataclass(frozen=True)
class Measured:
    """What a table holds. rows: by name of their choice. plans: damage of those measured as a whole, by `plan_key`."""

    rows: dict[str, Row] = field(default_factory=dict)
    plans: dict[PlanKey, Damage] = field(default_factory=dict)


def plan_key(chosen: Iterable[Choice]) -> PlanKey:
    """Return the names of the choices that change the model, sorted."""
    return tuple(sorted(choice.key for choice in chosen if choice.is_change))


def read_table(folder: Path, start: Mapping[str, Any], known: set[str], parts_of_plans: set[str]) -> Measured:
    """Return what an interrupted or finished search measured; nothing without a table.

    known: names of the choices of this search that have rows. parts_of_plans: names of the choices of its plans. Raises
    SurgeryError for a table that is damaged or was begun otherwise.
    """
    path = folder / TABLE_NAME
    check_not_link(path)
    if not path.exists():
        return Measured()
    if path.stat().st_size > MAX_TABLE_BYTES:
        raise SurgeryError(
            f"{path} must have at most {size_text(MAX_TABLE_BYTES)} (got {size_text(path.stat().st_size)}). Remove it to "
            "measure again"
        )
    try:
        table = Table.model_validate(read_json(path))
    except ValidationError as error:
        raise SurgeryError(f"{validation_error(error, str(path), Table)}. Remove it to measure again") from None
    except SurgeryError as error:
        raise SurgeryError(f"{error}. Remove it to measure again") from None
    begun, now = _flat_start(table.start), _flat_start(start)
    if changed := [key for key in {**now, **begun} if now.get(key) != begun.get(key)]:
        raise SurgeryError(
            f"{path} was begun with another {changed[0]}. Give the same model, calibration text and options, or another "
            "--out"
        )
    rows = {row.choice: row for row in table.rows}
    if len(rows) < len(table.rows):
        raise SurgeryError(f"{path}: a choice has two rows. Remove the file to measure again")
    if unknown := [name for name in rows if name not in known]:
        raise SurgeryError(f"{path}: {unknown[0][:200]!r} is no choice of this model. Remove the file to measure again")
    plans = {tuple(plan.choices): Damage(plan.damage, plan.error) for plan in table.plans}
    if unknown := [name for key in plans for name in key if name not in parts_of_plans]:
        raise SurgeryError(
            f"{path}: {unknown[0][:200]!r} of a plan is no choice of this model. Remove the file to measure again"
        )
    if len(plans) < len(table.plans) or any(list(key) != sorted(set(key)) for key in plans):
        raise SurgeryError(
            f"{path}: a plan is there twice, or its choices are not sorted. Remove the file to measure again"
        )
    return Measured(rows, plans)


def _flat_start(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the start with its settings beside the other entries, so that a message names the one that differs."""
    settings = start.get("settings")
    return {**start, "settings": None, **settings} if isinstance(settings, Mapping) else dict(start)


def write_table(
    folder: Path,
    start: Mapping[str, Any],
    choices: Choices,
    damages: Mapping[str, Damage],
    mixers: Mapping[str, Any],
    *,
    plans: Mapping[PlanKey, Damage],
    at: int,
) -> None:
    """Write the rows of the choices and plans that are measured. mixers: configs that measurements chose, by name of the
    choice.
    """
    rows = [
        Row(
            choice=choice.key,
            covers=list(choice.covers),
            family=choice.family,
            damage=damages[choice.key].nats,
            error=damages[choice.key].error,
            costs=dict(choice.costs),
            mixer=mixers.get(choice.key),
        )
        for choice in choices.choices
        if choice.key in damages
    ]
    whole = [PlanRow(choices=list(key), damage=damage.nats, error=damage.error) for key, damage in plans.items()]
    table = Table(start=dict(start), original=choices.base, at=at, rows=rows, plans=whole)
    write_json(folder / TABLE_NAME, table.model_dump(exclude_none=False))


def table_start(model: MetaModel, settings: Mapping[str, Any], calibration: str) -> dict[str, Any]:
    """Return what must be equal when a search goes on. settings: keys of all recipes. calibration: digest of the
    samples.
    """
    return {
        "source": model.source.fingerprint(),
        "weights": model.source.weights_digest(),
        "settings": {key: value for key, value in settings.items() if key != "calibration"},
        "calibration": calibration,
    }


def measured_damages(rows: Mapping[str, Row], choices: list[Choice]) -> dict[str, Damage]:
    """Return the damages of the choices that have rows, by name."""
    return {c.key: Damage(rows[c.key].damage, rows[c.key].error) for c in choices if c.key in rows}
