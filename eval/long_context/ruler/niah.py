"""RULER's needles: "One of the special magic numbers for tall-tree is: 1234567." in a haystack.

haystack   noise: a sentence over and over    essay: essays    needle: other needles
keys, values, queries: how many things are hidden, how many values each has, how many are asked for
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from surgery.eval.long_context.ruler.base import Question, Room, at_once
from surgery.eval.long_context.ruler.words import NOISE, compound, identifier, number

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
)
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
PLACES = tuple(round(100 * i / 39) / 100 for i in range(40))  # RULER's forty depths
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
DRAW: dict[str, Callable[[Random], str]] = {"words": compound, "numbers": number, "uuids": identifier}


@dataclass(frozen=True)
class Needles:
    name: str
    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    answer_tokens: int = 128

    @property
    def needs(self) -> str | None:
        return "essays" if self.haystack == "essay" else None

    def ask(self, room: Room, samples: int, depths: tuple[float, ...]) -> Iterator[Question]:
        cells = [(index, depth) for depth in depths or (None,) for index in range(samples)]
        yield from at_once(lambda cell: self._one(room, *cell), cells)

    def _one(self, room: Room, index: int, depth: float | None) -> Question:
        rng = room.rng(self.name, index, depth)
        keys = [DRAW[self.key](rng) for _ in range(max(self.keys, self.queries))]
        values = [[DRAW[self.value](rng) for _ in range(self.values)] for _ in keys]
        asked = rng.sample(range(len(keys)), self.queries)
        # In the haystack the kind stays in the plural, as in RULER.
        needles = [NEEDLE.format(kind=self.value, key=k, value=v) for k, vs in zip(keys, values) for v in vs]
        rng.shuffle(needles)
        one = self.queries * self.values == 1
        words = {"kind": self.value[:-1] if one else self.value, "query": _list([keys[i] for i in asked])}
        template, prefix = (_singular(TEMPLATE), _singular(PREFIX)) if one else (TEMPLATE, PREFIX)
        prefix = prefix.format(**words)
        hay = HAYSTACKS[self.haystack](self, room, rng.random(), needles, depth)
        found = room.filled(
            lambda n, rest: template.format(context=hay.text(n, rest), **words) + prefix,
            self.answer_tokens, hay.least, 16 * room.length, hay.probe, hay.filler,
        )  # fmt: skip
        return Question(
            id=f"{self.name} {room.length} {depth} {index}",
            prompt=found.text[: -len(prefix)],
            prefix=prefix,
            answers=tuple(value for i in asked for value in values[i]),
            length=room.length,
            tokens=found.tokens + self.answer_tokens,
            depth=depth,
        )


class Hay:
    """text(n, rest): n units with the needles among them. Positions are drawn anew for each n, from one seed."""

    least, filler = 0, ""

    def __init__(self, task: Needles, room: Room, seed: float, needles: list[str], depth: float | None):
        self.task, self.seed, self.needles, self.depth = task, seed, needles, depth
        self.essays = str(room.texts.get("essays", ""))
        self.probe = max(8, room.length // 4)  # characters

    def text(self, n: int, rest: str) -> str:
        raise NotImplementedError

    def places(self, units: int) -> list[int]:
        """Before which unit each needle goes, ascending."""
        rng = Random(self.seed)
        if self.depth is not None:
            return sorted([int(units * self.depth), *(rng.randint(0, units) for _ in self.needles[1:])])
        if units < len(self.needles):
            return sorted(rng.randint(0, units) for _ in self.needles)
        return sorted(rng.sample(range(units), len(self.needles)))

    def among(self, units: list[str], between: str) -> str:
        for place, needle in reversed(list(zip(self.places(len(units)), self.needles))):
            units.insert(place, needle)
        return between.join(units)


class Noise(Hay):
    """Lines of NOISE; a unit is a character, so the last line may be cut."""

    def text(self, n: int, rest: str) -> str:
        lines, part = divmod(n, len(NOISE) + 1)
        return self.among([NOISE] * lines + [NOISE[:part]] * (part > 0), "\n")


class Essay(Hay):
    """The beginning of the essays, again from the start where they end; a unit is a character."""

    def text(self, n: int, rest: str) -> str:
        whole = self.essays * (n // max(1, len(self.essays)) + 1)
        return self.among(SENTENCE.split(whole[:n]) if n else [], " ")

    def places(self, units: int) -> list[int]:
        if self.depth is not None:
            return super().places(units)
        return sorted(int(units * place) for place in Random(self.seed).sample(PLACES, len(self.needles)))


class Straw(Hay):
    """Other needles, a unit each; what is left over is noise."""

    filler = f"{NOISE} " * 4

    def __init__(self, task: Needles, room: Room, seed: float, needles: list[str], depth: float | None):
        super().__init__(task, room, seed, needles, depth)
        self.probe = max(1, room.length // 256)
        self.straws: list[str] = []
        self.draw = Random(seed + 1)

    def text(self, n: int, rest: str) -> str:
        while len(self.straws) < n:  # drawn in order, so the same however the search goes
            key, value = DRAW[self.task.key](self.draw), DRAW[self.task.value](self.draw)
            self.straws.append(NEEDLE.format(kind=self.task.value, key=key, value=value))
        return self.among(self.straws[:n], "\n") + (f"\n{rest}" if rest else "")


HAYSTACKS = {"noise": Noise, "essay": Essay, "needle": Straw}


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]


def _singular(text: str) -> str:
    """As RULER makes it, before the words are put in."""
    for many, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        text = text.replace(many, single)
    return text
