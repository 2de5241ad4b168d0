"""What healing gives back: predicted loss after healing from the damage before it, by family of choices.

    ln healed_r = ln damage_r + ln g_f + e_r       e_r ~ N(0, s^2)      r: a healed run of the family f

g_f, the gain, is the geometric mean of healed / damage over the runs of a family. s is pooled over all families, so that
a family with two runs has an interval too: ln g_f +- t s sqrt(1 + 1 / n_f), the interval of one further run, with the
quantile t of Student's distribution at 95%, and at most 1, as healing keeps its best state. Losses below FLOOR count as FLOOR: a run that ends below the original
trained on text like the scored one. Losses are linear in damages, so that those of choices add up.

The runs are rows of recipes/papers/quality/rows/healed.jsonl, of several models, texts and amounts of healing; the
fitted values are surgery/budget/gains.json. A family without runs has the gain 1, and is called not fitted.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgery.core.config import validation_error
from surgery.core.errors import SurgeryError
from surgery.core.files import parse_json, read_json

FLOOR = 0.002  # nats per token
COVERAGE = 0.95
COVERAGE_QUANTILE = 1.96  # half an interval of this coverage in standard errors
MAX_ROWS = 100_000

Nats = Annotated[float, Field(gt=-1e3, lt=1e3, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=1000)]


class HealedRun(BaseModel):
    """A row of a file of healed runs.

    family: of the choices of the conversion. model, conversion, text, source: what was converted, scored on what, and
    where that is reported. tokens: of healing. measure: "KL" or "loss". damage, healed: nats per token above the
    original before and after healing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    family: Text
    model: Text
    conversion: Text
    text: Text
    tokens: Annotated[int, Field(ge=1)]
    measure: Text
    damage: Annotated[float, Field(gt=0, lt=1e3, allow_inf_nan=False)]
    healed: Nats
    source: Text


@dataclass(frozen=True)
class Gain:
    """The gain of a family. low, high: its interval for one further run. runs: how many it was fitted to, 0 if it is not
    fitted.
    """

    gain: float = 1.0
    low: float = 1.0
    high: float = 1.0
    runs: int = 0


class StoredGain(BaseModel):
    """A gain in a file of gains."""

    model_config = ConfigDict(extra="forbid", strict=True)

    gain: Annotated[float, Field(gt=0, le=1e3)]
    low: Annotated[float, Field(ge=0, le=1e3)]
    high: Annotated[float, Field(gt=0, le=1e6)]
    runs: Annotated[int, Field(ge=1)]


def read_runs(path: Path) -> list[HealedRun]:
    """Return the rows of a file of healed runs, JSON lines. Raises SurgeryError for a line that is none."""
    runs = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SurgeryError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines[:MAX_ROWS], 1):
        try:
            runs.append(HealedRun.model_validate(parse_json(line)))
        except ValidationError as error:
            raise validation_error(error, f"{path}, line {number}", HealedRun) from None
        except ValueError:
            raise SurgeryError(f"{path}, line {number} is not JSON") from None
    return runs


def fit_gains(runs: Iterable[HealedRun]) -> dict[str, Gain]:
    """Return the gain of each family with runs. Raises SurgeryError if there are not more runs than families."""
    # SciPy's distributions take half a second to import.
    from scipy.stats import t as student

    logs: dict[str, list[float]] = {}
    for run in runs:
        logs.setdefault(run.family, []).append(math.log(max(run.healed, FLOOR) / max(run.damage, FLOOR)))
    count = sum(map(len, logs.values()))
    if count <= len(logs):
        raise SurgeryError(
            f"gains: more healed runs than families are needed (got {count} runs of {len(logs)} families)"
        )
    means = {family: math.fsum(values) / len(values) for family, values in logs.items()}
    squares = math.fsum((value - means[family]) ** 2 for family, values in logs.items() for value in values)
    spread = math.sqrt(squares / (count - len(logs)))
    quantile = float(student.ppf((1 + COVERAGE) / 2, count - len(logs)))
    gains = {}
    for family, values in sorted(logs.items()):
        half = quantile * spread * math.sqrt(1 + 1 / len(values))
        gain, low, high = (math.exp(means[family] + shift) for shift in (0, -half, half))
        gains[family] = Gain(round(gain, 4), round(low, 4), round(max(gain, min(1.0, high)), 4), len(values))
    return gains


def gains_data(gains: Mapping[str, Gain]) -> dict[str, Any]:
    """Return gains as a file holds them."""
    return {family: asdict(gain) for family, gain in gains.items()}


def read_gains(path: Path | None = None) -> dict[str, Gain]:
    """Return the gains of a file; None: those of this package. Raises SurgeryError if it is damaged."""
    file = path or Path(str(importlib.resources.files("surgery.budget").joinpath("gains.json")))
    data = read_json(file)
    if not isinstance(data, dict):
        raise SurgeryError(f"{file} must be a mapping of families to gains, not a {type(data).__name__}")
    gains = {}
    for family, value in data.items():
        try:
            stored = StoredGain.model_validate(value)
        except ValidationError as error:
            raise validation_error(error, f"{file}, {family[:100]}", StoredGain) from None
        gains[family] = Gain(stored.gain, stored.low, stored.high, stored.runs)
    return gains


@dataclass(frozen=True)
class Term:
    """The damage of one choice and its standard error, with the gain of its family."""

    family: str
    damage: float
    error: float
    gain: Gain

    @property
    def healed(self) -> float:
        """The predicted loss after healing."""
        return self.gain.gain * self.damage


def interval(terms: Sequence[Term], noise: float = 0.0) -> tuple[float, float]:
    """Return the interval of the sum of predicted losses. noise: half the interval of a further, independent error.

    The gain of a family errs alike in all of its choices, those of different families and the damages err
    independently: variances above and below the prediction are summed.
    """
    total = math.fsum(term.healed for term in terms)
    below = above = noise**2
    for family in dict.fromkeys(term.family for term in terms):
        mine = [term for term in terms if term.family == family]
        damage, gain = math.fsum(term.damage for term in mine), mine[0].gain
        error = sum((COVERAGE_QUANTILE * gain.gain * term.error) ** 2 for term in mine)
        below += ((gain.gain - gain.low) * damage) ** 2 + error
        above += ((gain.high - gain.gain) * damage) ** 2 + error
    return max(0.0, total - math.sqrt(below)), total + math.sqrt(above)
