"""State of a story (people, their possessions, hidden things) and the sentences that change it.

Facts about a person or thing stay fixed and are mentioned again many sentences later, so that a model predicts better
if it uses distant context.
"""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from surgery.eval.stories.lexicon import ACT, DETAIL, ENDINGS, EVENTS, OPENINGS, WORDS, WORK

T = TypeVar("T")


def pick(rng: Random, options: Sequence[T]) -> T:
    """Return an option, all equally likely."""
    return options[int(rng.random() * len(options))]


def pick_skewed(rng: Random, options: Sequence[T]) -> T:
    """Return an option, early ones more often (density ~ 1/sqrt), because words of real texts differ in frequency."""
    return options[int(len(options) * rng.random() * rng.random())]


def log_uniform(rng: Random, low: int, high: int) -> int:
    """Return an integer in [low, high] whose logarithm is uniformly distributed."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


# Slots whose options depend on another slot: the work of a role, the sights of a place, the acts of an animal.
_GOES_WITH = {
    "work": ("role", WORK),
    "own_work": ("own", WORK),
    "detail": ("place", DETAIL),
    "act": ("animal", ACT),
    "pet_act": ("pet", ACT),
}


class World:
    """The people of one story, their possessions and hidden things; `world[slot]` fills a template's slot."""

    def __init__(self, rng: Random):
        self.rng = rng
        self.people: list[dict[str, str]] = []
        self.holds: dict[str, list[str]] = {}
        self.hidden: list[tuple[str, str]] = []
        self.slots: dict[str, str] = {}

    def __getitem__(self, slot: str) -> str:
        if slot in _GOES_WITH:
            base, group = _GOES_WITH[slot]
            return pick(self.rng, group[self[base]])
        if slot not in self.slots:
            self.slots[slot] = pick_skewed(self.rng, WORDS[slot.rstrip("2")])
        return self.slots[slot]

    def tell(self, templates: Sequence[str]) -> str:
        """Return a random template with its slots filled, after a space."""
        return " " + pick(self.rng, templates).format_map(self)

    def person(self) -> str:
        """Introduce a new person and return the sentence that does so; an event if all names are used."""
        girl = self.rng.random() < 0.5
        names = [name for name in WORDS["girl" if girl else "boy"] if name not in self.holds]
        if not names:
            return self.event()
        someone = {"A": pick(self.rng, names), "he": "she" if girl else "he"}
        for slot, group in (("home", "place"), ("own", "role"), ("pet", "animal"), ("likes", "food")):
            someone[slot] = pick(self.rng, WORDS[group])
        self.people.append(someone)
        self.holds[someone["A"]] = []
        self.slots = {**someone, "role": someone["own"]}
        return self.tell(OPENINGS)

    def cast(self) -> None:
        """Choose who acts next (A) and who else is there (B); the other slots are cleared."""
        first = int(self.rng.random() * len(self.people))
        second = (first + 1 + int(self.rng.random() * (len(self.people) - 1))) % len(self.people)
        self.slots = dict(self.people[first])
        self.slots["B"] = self.people[second]["A"]

    def event(self) -> str:
        """Draw one of the possible events, apply its effect and return its sentences."""
        self.cast()
        mine = self.holds[self.slots["A"]]
        kinds = ["walk", "mood", "work", "scene", "creature", "talk", "meal", "sight", "find"]
        kinds += ["give", "hide", "recall"] * bool(mine) + ["where", "where", "fetch"] * bool(self.hidden)
        kind = pick(self.rng, kinds)
        if kind in ("give", "hide", "recall"):
            self.slots["mine"] = pick(self.rng, mine)
        elif kind in ("where", "fetch"):
            self.slots["hidden"], self.slots["where"] = pick(self.rng, self.hidden)
        elif kind == "find":
            self.slots["new"] = f"{pick_skewed(self.rng, WORDS['adjective'])} {pick_skewed(self.rng, WORDS['thing'])}"
        if kind == "hide":
            self.slots["where"] = pick(self.rng, WORDS["spot"])
        text = self.tell(EVENTS[kind])
        self._change(kind)
        return text

    def _change(self, kind: str) -> None:
        """Apply the effect of an event on possessions and hidden things."""
        slots, mine = self.slots, self.holds[self.slots["A"]]
        if kind == "find":
            mine.append(slots["new"])
        elif kind == "give":
            mine.remove(slots["mine"])
            self.holds[slots["B"]].append(slots["mine"])
        elif kind == "hide":
            mine.remove(slots["mine"])
            self.hidden.append((slots["mine"], slots["where"]))
        elif kind == "fetch":
            self.hidden.remove((slots["hidden"], slots["where"]))
            mine.append(slots["hidden"])

    def ending(self) -> str:
        """Return a closing sentence."""
        self.cast()
        self.slots["mine"] = (self.holds[self.slots["A"]] or ["secret"])[0]
        return self.tell(ENDINGS)
