"""RULER's variable tracking: VAR A = 12345, VAR B = VAR A, .. in noise; which variables are 12345?"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from surgery.eval.long_context.ruler.base import LengthTooShortError, RulerQuestion, TaskContext
from surgery.eval.long_context.ruler.prompt import WholeUnits, fill_prompt
from surgery.eval.long_context.ruler.words import NOISE, random_letters

TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all "
    "variables that are assigned the value {value} in the text above."
)
# RULER wrote "assgined" until its commit 4a216f4 of 2025-05-13, and so does lm-eval; scores before it were measured
# with that word.
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {number} variables are assigned the "
    "value "
    "{value}, they are: "
)
EXAMPLE_TOKENS = 500


@dataclass(frozen=True)
class VariableTracking:
    """Task vt: name the variables of a chain of assignments that share one value."""

    name: str = "vt"
    hops: int = 4
    answer_tokens: int = 30
    needs: str | None = None

    def make_questions(self, ctx: TaskContext, samples: int, depths: tuple[float, ...]) -> Iterator[RulerQuestion]:
        """Yield questions; the chain lies at random places, so depths are ignored."""
        yield from ctx.make_each(lambda index: self._make_question(ctx, index), range(samples))

    def _make_question(self, ctx: TaskContext, index: int) -> RulerQuestion:
        """Make a question with an example of up to 500 tokens and a quarter of the length, or without one."""
        example = self._example(ctx, ctx.rng(self.name, index, "example"))
        for before in (example, "") if example else ("",):
            try:
                return self._make_with_example(ctx, index, before)
            except LengthTooShortError:
                if not before:
                    raise
        raise AssertionError("the last one returns or raises")

    def _make_with_example(self, ctx: TaskContext, index: int, example: str) -> RulerQuestion:
        rng = ctx.rng(self.name, index)
        names, value, lines = self._chain(rng, 5)
        seed = rng.random()
        prefix = PREFIX.format(number=self.hops + 1, value=value)

        def build(n: int, rest: str) -> str:
            return example + TEMPLATE.format(context=_insert_chain(lines, n, seed), value=value) + prefix

        filled = ctx.fill_prompt(
            build, self.answer_tokens, 0, 16 * ctx.length, max(8, ctx.length // 4),
            original=WholeUnits(ctx.step(10), lambda lines: lines * (len(NOISE) + 1)), kind=f"{self.name} {bool(example)}",
        )  # fmt: skip
        return RulerQuestion(
            id=f"{self.name} {ctx.length} {index}",
            prompt=filled.text[: -len(prefix)],
            prefix=prefix,
            answers=tuple(names),
            length=ctx.length,
            tokens=filled.tokens + self.answer_tokens,
            note="" if example else "no room for the one-shot example",
        )

    def _example(self, ctx: TaskContext, rng: Random) -> str:
        names, value, lines = self._chain(rng, 3)
        seed = rng.random()
        prefix = PREFIX.format(number=self.hops + 1, value=value)

        def build(n: int, rest: str) -> str:
            context = _insert_chain(lines, n * (len(NOISE) + 1), seed)
            return TEMPLATE.format(context=context, value=value) + prefix + " " + " ".join(names) + "\n\n"

        filled = fill_prompt(build, ctx.count, min(EXAMPLE_TOKENS, ctx.length // 4), 0, EXAMPLE_TOKENS, 1)
        return filled.text if filled else ""

    def _chain(self, rng: Random, size: int) -> tuple[list[str], int, list[str]]:
        """Return (names, value, lines): distinct names of `size` letters."""
        names: dict[str, None] = {}
        while len(names) <= self.hops:
            names[random_letters(rng, size, string.ascii_uppercase)] = None
        value, variables = rng.randrange(10_000, 99_999), list(names)
        lines = [f"VAR {variables[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(variables))]
        return variables, value, lines


def _insert_chain(lines: list[str], n: int, seed: float) -> str:
    """Insert the chain's lines, in order, into n characters of noise."""
    whole, rest = divmod(n, len(NOISE) + 1)
    units = [NOISE] * whole + [NOISE[:rest]] * (rest > 0)
    rng = Random(seed)
    enough = len(units) >= len(lines)
    places = rng.sample(range(len(units)), len(lines)) if enough else [rng.randint(0, len(units)) for _ in lines]
    for shift, (position, line) in enumerate(zip(sorted(places), lines)):
        units.insert(position + shift, line)
    return "\n".join(units).replace(". \n", ".\n")
