"""RULER's aggregation tasks: the ten most common words of a numbered list, the three most frequent of a coded text."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import pi
from random import Random

from surgery.core.errors import SurgeryError
from surgery.eval.long_context.ruler.base import LengthTooShortError, RulerQuestion, TaskContext
from surgery.eval.long_context.ruler.prompt import FilledPrompt, WholeUnits
from surgery.eval.long_context.ruler.words import random_letters, vocabulary

COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear "
    "most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded "
    "words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most "
    "frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
TOP = 10


@dataclass(frozen=True)
class WordRepeats:
    """How often common and other words are repeated. example: (words, common, other) of the one-shot example, or
    None.
    """

    common: int
    other: int
    example: tuple[int, int, int] | None


LONG, SHORT = WordRepeats(30, 3, (40, 10, 3)), WordRepeats(6, 1, (20, 3, 1))  # RULER's, from 4096 tokens and below
SMALLER = (SHORT, WordRepeats(6, 1, None), WordRepeats(3, 1, None))


@dataclass(frozen=True)
class CommonWords:
    """Task cwe: name the ten most common words of a numbered list."""

    name: str = "cwe"
    answer_tokens: int = 120
    needs: str | None = None

    def make_questions(self, ctx: TaskContext, samples: int, depths: tuple[float, ...]) -> Iterator[RulerQuestion]:
        """Yield questions; the task has no needle, so depths are ignored."""
        yield from ctx.make_each(lambda index: self._make_question(ctx, index), range(samples))

    def _make_question(self, ctx: TaskContext, index: int) -> RulerQuestion:
        for shape in (LONG, *SMALLER) if ctx.length >= 4096 else SMALLER:
            try:
                return self._make_with_repeats(ctx, index, shape)
            except LengthTooShortError as error:
                reason = error
        raise reason

    def _make_with_repeats(self, ctx: TaskContext, index: int, shape: WordRepeats) -> RulerQuestion:
        rng = ctx.rng(self.name, index)
        words, before, seed = list(vocabulary()), "", rng.random()
        if shape.example:
            size, often, seldom = shape.example
            sample = rng.sample(words, size)
            shown = COMMON.format(context=_numbered_list(sample, often, seldom, rng.random(), "")) + COMMON_PREFIX
            before = shown + " " + " ".join(f"{i}. {word}" for i, word in enumerate(sample[:TOP], 1)) + "\n"
        rng.shuffle(words)
        filled, words = self._fill(ctx, shape, words, before, seed, rng)
        return RulerQuestion(
            id=f"{self.name} {ctx.length} {index}",
            prompt=filled.text[: -len(COMMON_PREFIX)],
            prefix=COMMON_PREFIX,
            answers=tuple(words[:TOP]),
            length=ctx.length,
            tokens=filled.tokens + self.answer_tokens,
            note=_shortening_note(shape, ctx.length),
        )

    def _fill(
        self, ctx: TaskContext, shape: WordRepeats, words: list[str], before: str, seed: float, rng: Random
    ) -> tuple[FilledPrompt, list[str]]:
        """Return the prompt and its words in the order of their frequency; of the longer list where `words` are too
        few, as in RULER.
        """
        filler, most, short = " ".join(words[-8:]), len(words), words
        longer: list[str] = []

        def build(n: int, rest: str) -> str:
            chosen = short if n <= most else longer
            context = _numbered_list(chosen[:n], shape.common, shape.other, seed, rest)
            return before + COMMON.format(context=context) + COMMON_PREFIX

        def fill(least: int, largest: int) -> FilledPrompt:
            kind = f"{self.name} {shape} {largest > most}"
            original = WholeUnits(10, sample=min(4096, most), slack=2, most=largest)
            return ctx.fill_prompt(
                build, self.answer_tokens, least, largest, max(1, ctx.length // 128), filler=filler, mixed=True,
                original=original, kind=kind,
            )  # fmt: skip

        filled = fill(TOP + 1, most)
        if filled.units < most or filled.tokens + self.answer_tokens >= ctx.length * 0.999:
            return filled, short
        english = english_words(ctx)
        if len(english) <= most:
            raise SurgeryError(
                f"cwe at {ctx.length:,} tokens needs more than {most:,} words, but the mirror's list has "
                f"{len(english):,}. Remove its folder "
                "NVIDIA/RULER, then run `surgery fetch-eval-data DATA --suite ruler`"
            )
        longer += rng.sample(english, min(len(english), ctx.length // shape.other))
        with suppress(LengthTooShortError):  # words of the longer list are longer
            filled = fill(most + 1, len(longer))
        return filled, short if filled.units <= most else longer


def english_words(ctx: TaskContext) -> Sequence[str]:
    """Return RULER's longer list of words from the mirror. Raises SurgeryError without it."""
    load = ctx.texts.get("english_words")
    if load is None:
        raise SurgeryError(
            f"cwe at {ctx.length:,} tokens needs more than the {len(vocabulary()):,} words of wonderwords. Fetch "
            "RULER's longer list with "
            "`surgery fetch-eval-data DATA --suite ruler`, and give --data-root DATA"
        )
    words: Sequence[str] = load()
    return words


def _shortening_note(shape: WordRepeats, length: int) -> str:
    if shape == (LONG if length >= 4096 else SHORT):
        return ""
    example = "the one-shot example of short lengths" if shape.example else "no room for the one-shot example"
    return f"{example}, common words {shape.common} times"


def _numbered_list(words: list[str], often: int, seldom: int, seed: float, rest: str) -> str:
    """Return "1. word 2. word ..", shuffled.

    The first ten words occur `often` times, the others `seldom` times; words of `rest` follow once each.
    """
    listed = words[:TOP] * often + words[TOP:] * seldom
    Random(seed).shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate([*listed, *rest.split()], 1))


@dataclass(frozen=True)
class FrequentWords:
    """Task fwe: word k occurs n / (zeta(2) k^2) times. The first is dots; the next three are asked for."""

    name: str = "fwe"
    answer_tokens: int = 50
    needs: str | None = None
    letters: int = 6

    def make_questions(self, ctx: TaskContext, samples: int, depths: tuple[float, ...]) -> Iterator[RulerQuestion]:
        """Yield questions; the task has no needle, so depths are ignored."""
        yield from ctx.make_each(lambda index: self._make_question(ctx, index), range(samples))

    def _make_question(self, ctx: TaskContext, index: int) -> RulerQuestion:
        rng = ctx.rng(self.name, index)
        goal, words = ctx.length - self.answer_tokens, {"...": None}
        while len(words) < max(5, goal // 50):
            words[random_letters(rng, self.letters, string.ascii_lowercase)] = None
        coded, seed = list(words), rng.random()

        def build(n: int, rest: str) -> str:
            text = [word for word, times in zip(coded, _word_counts(n, len(coded))) for _ in range(times)]
            Random(seed).shuffle(text)
            return FREQUENT.format(context=" ".join(text) + rest) + FREQUENT_PREFIX

        filled = ctx.fill_prompt(
            build, self.answer_tokens, 1, 16 * ctx.length, max(1, ctx.length // 32), filler=" ..." * 64, mixed=True,
            original=WholeUnits(max(1, goal // 32), start=goal // self.letters), kind=self.name,
        )  # fmt: skip
        times = _word_counts(filled.units, len(coded))
        if not times[1] > times[2] > times[3] > times[4]:
            raise LengthTooShortError(
                f"tells the three most frequent words apart only above {ctx.length:,} tokens with this tokenizer"
            )
        return RulerQuestion(
            id=f"{self.name} {ctx.length} {index}",
            prompt=filled.text[: -len(FREQUENT_PREFIX)],
            prefix=FREQUENT_PREFIX,
            answers=tuple(coded[1:4]),
            length=ctx.length,
            tokens=filled.tokens + self.answer_tokens,
        )


def _word_counts(n: int, words: int) -> list[int]:
    return [int(n * 6 / (pi * k) ** 2) for k in range(1, words + 1)]
