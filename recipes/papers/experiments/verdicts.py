"""Verdicts on the papers' claims: the one place where rows become "reproduced", "refuted" or less.

    comparison   a mean difference d over paired seeds, and the range where the claim puts it, for example d > 0
    p            two-sided, Student's t: of the nearest end of that range if d lies inside; else of the end beyond which
                 the difference contradicts the claim
    Holm         the k comparisons of a verdict, by ascending p: the i-th counts if p_(j) <= 0.05 / (k - j + 1) for all
                 j <= i (Holm 1979). Its interval is the one of that level

    reproduced   every comparison lies in its range, and so does whatever else the claim says
    in part      some do, and none contradicts the claim
    refuted      one contradicts the claim, and the baseline of the same run reaches what the paper reports for it, or
                 the setting is the paper's
    not seen at this size   one contradicts the claim, in a run that cannot refute it
    undecided    otherwise; also if a compared method's best rate lies at an end of its grid

The first three need learning rates that were chosen on two seeds or more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from recipes.papers.experiments.sweep import BestRows, Difference, Setting, edge_words
from surgery.eval.results.statistics import student_tail

REPRODUCED, PART, REFUTED, NOT_SEEN, UNDECIDED = WORDS = (
    "reproduced", "in part", "refuted", "not seen at this size", "undecided",
)  # fmt: skip
OPEN = "no interval lies on one side"  # why a result is undecided, if nothing else is the reason
ERROR = 0.05  # chance that one comparison or more of a verdict counts by accident
CHOOSING = 2  # seeds on which a rate must have been chosen
Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)  # as `fair`: no difference contradicts the claim


def above(bound: float) -> Range:
    """Return the range of numbers above a bound."""
    return (bound, math.inf)


def below(bound: float) -> Range:
    """Return the range of numbers below a bound."""
    return (-math.inf, bound)


class Verdict(NamedTuple):
    """What the rows say about a claim. word: one of WORDS, or one that begins with "undecided". why: what decided.
    found: the differences with their intervals. besides: results that decide nothing.
    """

    word: str
    why: str
    found: str = ""
    besides: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({'; '.join(part for part in self[1:] if part)})"


DIVERGED = Verdict(UNDECIDED, "a run at the best rate diverged")


def has_diverged(best: BestRows, setting: Setting) -> bool:
    """Return whether a run at the best rate diverged, or a run of every rate."""
    return len(best) < len(setting.cells) * setting.seeds or any(row["loss"] is None for row in best.values())


class Comparison(NamedTuple):
    """A difference and what the claim says about it.

    found: None if no runs can be compared. claim: where the claim puts the mean. fair: outside of this range it
    contradicts the claim; None: outside of `claim`.
    """

    name: str
    found: Difference | None
    claim: Range
    fair: Range | None = None

    @property
    def is_inside(self) -> bool:
        """Whether the mean lies where the claim puts it."""
        return self.found is not None and self.claim[0] < self.found.mean < self.claim[1]

    def p_value(self) -> float:
        """Return the p-value against the nearest end of the range, 1 if the mean says nothing."""
        if self.found is None or self.found.pairs < 2:
            return 1.0
        mean, fair = self.found.mean, self.fair or self.claim
        if self.is_inside:
            distance = min(mean - self.claim[0], self.claim[1] - mean)
        else:
            distance = max(fair[0] - mean, mean - fair[1])
        if distance <= 0:
            return 1.0
        return student_tail(distance / self.found.error, self.found.freedom) if self.found.error else 0.0


class Outcome(NamedTuple):
    """A comparison after the correction. state: "holds", "contradicts" or "open". level: of its interval."""

    comparison: Comparison
    state: str
    level: float

    def __str__(self) -> str:
        name, found = self.comparison.name, self.comparison.found
        return f"{name}: {found.at_level(self.level) if found else 'no common compute'}"


def correct(comparisons: Sequence[Comparison]) -> list[Outcome]:
    """Return the outcomes in the order of the comparisons, by the method of Holm and Bonferroni."""
    values = [comparison.p_value() for comparison in comparisons]
    outcomes: dict[int, Outcome] = {}
    failed_at = None  # the level at which the first comparison failed, which all later ones share
    for place, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        error = failed_at or ERROR / (len(values) - place)
        if values[i] > error:
            failed_at = error
        state = "open" if failed_at else "holds" if comparisons[i].is_inside else "contradicts"
        outcomes[i] = Outcome(comparisons[i], state, 1 - error)
    return [outcomes[i] for i in range(len(values))]


def decide(
    setting: Setting,
    best: BestRows,
    comparisons: Sequence[Comparison],
    methods: Iterable[str],
    *,
    missed: Sequence[str] = (),
    invalid: str = "",
    lacking: str = "",
    besides: Sequence[str] = (),
) -> Verdict:
    """Return the verdict of a setting from its rows at the best rates.

    methods: those whose rates must be chosen well. missed: what keeps the run from refuting the claim: what the
    baselines do not reach, or how the setting differs from the paper's where nothing can be compared. invalid: why the
    rows say nothing for the claim, for example because training was too short. lacking: what else the claim says and
    the means do not show. besides: results that decide nothing.
    """
    methods = list(methods)
    outcomes = correct(comparisons)
    found = ("; ".join(map(str, outcomes)), "; ".join(besides))
    states = Counter(outcome.state for outcome in outcomes)
    if edges := edge_words(best, methods):
        return Verdict(UNDECIDED, edges, *found)
    few = few_seeds(best, methods)
    if states["contradicts"]:
        limits = [few] if few else []
        limits += [] if setting.as_printed else missed
        if not limits:
            return Verdict(REFUTED, _names(outcomes, "contradicts"), *found)
        return Verdict(NOT_SEEN, "; ".join([size_words(setting), *limits]), *found)
    nothing = "" if states["holds"] else lacking or OPEN
    if invalid or few or nothing:
        return Verdict(UNDECIDED, "; ".join(part for part in (invalid, few, nothing) if part), *found)
    if states["holds"] == len(outcomes) and not lacking:
        return Verdict(REPRODUCED, size_words(setting), *found)
    return Verdict(PART, "; ".join(part for part in (_names(outcomes, "holds"), lacking) if part), *found)


def _names(outcomes: Sequence[Outcome], state: str) -> str:
    return ", ".join(outcome.comparison.name for outcome in outcomes if outcome.state == state)


def few_seeds(best: BestRows, methods: Iterable[str]) -> str:
    """Return a clause if the rate of one of the methods was chosen on too few seeds; empty if not."""
    chosen = set(methods)
    fewest = min((row["chosen_on"] for (m, _, _), row in best.items() if m in chosen), default=0)
    return f"rates chosen on {fewest} of {CHOOSING} seeds" if fewest < CHOOSING else ""


def size_words(setting: Setting) -> str:
    """Return the size of a setting in words. One step: nothing is trained."""
    steps = f"{setting.steps:,} steps, " if setting.steps > 1 else ""
    return f"T = {setting.length:,}, {steps}{setting.seeds} seeds"


def combine(words: Iterable[str]) -> str:
    """Return the verdict on one claim of several settings: a setting without a verdict says nothing about it, and only
    what holds in all others is reproduced.
    """
    known = {word for word in words if word in WORDS[:-1]}
    if {REPRODUCED, PART} & known and len(known) > 1:
        return PART
    return next((word for word in (REFUTED, REPRODUCED, PART, NOT_SEEN) if word in known), UNDECIDED)


def count(words: Iterable[str]) -> str:
    """Return how often each word of WORDS occurs, in words; "undecided: GPU time" counts as undecided."""
    counted = Counter(word.split(":")[0] for word in words)
    return ", ".join(f"{word} {counted[word]}" for word in WORDS)
