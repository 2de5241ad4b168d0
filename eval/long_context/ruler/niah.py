"""RULER's needle tasks: "One of the special magic numbers for tall-tree is: 1234567." in a haystack.

haystack   noise: a repeated sentence    essay: essays    needle: other needles
keys, values, queries: number of keys hidden, of values per key, and of keys asked for
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from surgery.eval.long_context.ruler.base import RulerQuestion, TaskContext
from surgery.eval.long_context.ruler.prompt import WholeUnits
from surgery.eval.long_context.ruler.words import NOISE, random_compound, random_number, random_uuid

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the "
    "{kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
)
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
RULER_DEPTHS = tuple(round(100 * i / 39) / 100 for i in range(40))  # RULER's forty depths
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
VALUE_GENERATORS: dict[str, Callable[[Random], str]] = {
    "words": random_compound,
    "numbers": random_number,
    "uuids": random_uuid,
}


@dataclass(frozen=True)
class NeedleTask:
    """A needle task with its haystack and its numbers of keys, values and queries."""

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
        """Text of the mirror that the task needs: essays, or None."""
        return "essays" if self.haystack == "essay" else None

    def make_questions(self, ctx: TaskContext, samples: int, depths: tuple[float, ...]) -> Iterator[RulerQuestion]:
        """Yield questions; of several needles, one lies at the given depth and the others at random."""
        cells = [(index, depth) for depth in depths or (None,) for index in range(samples)]
        yield from ctx.make_each(lambda cell: self._make_question(ctx, *cell), cells)

    def _make_question(self, ctx: TaskContext, index: int, depth: float | None) -> RulerQuestion:
        rng = ctx.rng(self.name, index, depth)
        keys = [VALUE_GENERATORS[self.key](rng) for _ in range(max(self.keys, self.queries))]
        values = [[VALUE_GENERATORS[self.value](rng) for _ in range(self.values)] for _ in keys]
        asked = rng.sample(range(len(keys)), self.queries)
        # In the haystack the kind stays in the plural, as in RULER.
        needles = [NEEDLE.format(kind=self.value, key=k, value=v) for k, vs in zip(keys, values) for v in vs]
        rng.shuffle(needles)
        one = self.queries * self.values == 1
        words = {"kind": self.value[:-1] if one else self.value, "query": _join_names([keys[i] for i in asked])}
        template, prefix = (_to_singular(TEMPLATE), _to_singular(PREFIX)) if one else (TEMPLATE, PREFIX)
        prefix = prefix.format(**words)
        haystack = HAYSTACKS[self.haystack](self, ctx, rng.random(), needles, depth)
        filled = ctx.fill_prompt(
            lambda n, rest: template.format(context=haystack.text(n, rest), **words) + prefix,
            self.answer_tokens, haystack.least, 16 * ctx.length, haystack.probe, filler=haystack.filler,
            original=haystack.original(ctx), kind=self.name,
        )  # fmt: skip
        return RulerQuestion(
            id=f"{self.name} {ctx.length} {depth} {index}",
            prompt=filled.text[: -len(prefix)],
            prefix=prefix,
            answers=tuple(value for i in asked for value in values[i]),
            length=ctx.length,
            tokens=filled.tokens + self.answer_tokens,
            depth=depth,
        )


class Haystack:
    """text(n, rest): n units with the needles inserted. Positions are redrawn from one seed for each n."""

    least, filler = 0, ""

    def __init__(self, task: NeedleTask, ctx: TaskContext, seed: float, needles: list[str], depth: float | None):
        self.task, self.seed, self.needles, self.depth = task, seed, needles, depth
        self.essays = str(ctx.texts.get("essays", ""))
        self.probe = max(8, ctx.length // 4)  # characters

    def text(self, n: int, rest: str) -> str:
        """Return the text of n units and `rest`."""
        raise NotImplementedError

    def original(self, ctx: TaskContext) -> WholeUnits:
        """Return how the original fills this haystack."""
        raise NotImplementedError

    def needle_positions(self, units: int) -> list[int]:
        """Return the unit before which each needle is inserted, ascending."""
        rng = Random(self.seed)
        if self.depth is not None:
            return sorted([int(units * self.depth), *(rng.randint(0, units) for _ in self.needles[1:])])
        if units < len(self.needles):
            return sorted(rng.randint(0, units) for _ in self.needles)
        return sorted(rng.sample(range(units), len(self.needles)))

    def insert_needles(self, units: list[str], between: str) -> str:
        """Join the units with the needles inserted."""
        for position, needle in reversed(list(zip(self.needle_positions(len(units)), self.needles))):
            units.insert(position, needle)
        return between.join(units)


class NoiseHaystack(Haystack):
    """Lines of NOISE; a unit is a character, so the last line may be incomplete."""

    def text(self, n: int, rest: str) -> str:
        """Return n characters of noise with the needles; `rest` is not used."""
        lines, sentences = divmod(n, len(NOISE) + 1)
        return self.insert_needles([NOISE] * lines + [NOISE[:sentences]] * (sentences > 0), "\n")

    def original(self, ctx: TaskContext) -> WholeUnits:
        """Return the fill by whole lines."""
        return WholeUnits(ctx.step(25), lambda lines: lines * (len(NOISE) + 1))


class EssayHaystack(Haystack):
    """The essays from their beginning, repeated if too short; a unit is a character."""

    def text(self, n: int, rest: str) -> str:
        """Return n characters of the essays with the needles; `rest` is not used."""
        whole = self.essays * (n // max(1, len(self.essays)) + 1)
        return self.insert_needles(SENTENCE_END.split(whole[:n]) if n else [], " ")

    def needle_positions(self, units: int) -> list[int]:
        """Return positions at the given depth, or without one at depths drawn from RULER_DEPTHS."""
        if self.depth is not None:
            return super().needle_positions(units)
        return sorted(int(units * depth) for depth in Random(self.seed).sample(RULER_DEPTHS, len(self.needles)))

    def original(self, ctx: TaskContext) -> WholeUnits:
        """Return the fill by whole words."""
        ends = word_ends(self.essays)

        def size(words: int) -> int:
            rounds, rest = divmod(words, len(ends))
            return rounds * len(self.essays) + (ends[rest - 1] if rest else -1)

        return WholeUnits(500, size)


class NeedleHaystack(Haystack):
    """Other needles, one per unit; the remainder is noise."""

    filler = f"{NOISE} " * 4

    def __init__(self, task: NeedleTask, ctx: TaskContext, seed: float, needles: list[str], depth: float | None):
        super().__init__(task, ctx, seed, needles, depth)
        self.probe = max(1, ctx.length // 256)
        self.other_needles: list[str] = []
        self.draw = Random(seed + 1)

    def text(self, n: int, rest: str) -> str:
        """Return n other needles with the needles asked for among them, then `rest`."""
        while len(self.other_needles) < n:  # drawn in order, so independent of the search
            key, value = VALUE_GENERATORS[self.task.key](self.draw), VALUE_GENERATORS[self.task.value](self.draw)
            self.other_needles.append(NEEDLE.format(kind=self.task.value, key=key, value=value))
        return self.insert_needles(self.other_needles[:n], "\n") + (f"\n{rest}" if rest else "")

    def original(self, ctx: TaskContext) -> WholeUnits:
        """Return the fill by whole needles."""
        return WholeUnits(ctx.step(25))


HAYSTACKS = {"noise": NoiseHaystack, "essay": EssayHaystack, "needle": NeedleHaystack}


@lru_cache(maxsize=2)
def word_ends(text: str) -> tuple[int, ...]:
    """Return the position behind each word of a text whose words are separated by single spaces."""
    return tuple(match.end() for match in re.finditer(r"\S+", text))


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]


def _to_singular(text: str) -> str:
    """Put the template into the singular before words are inserted, as RULER does."""
    for many, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        text = text.replace(many, single)
    return text
