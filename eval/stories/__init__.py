"""Generator of synthetic training and test texts: short stories, lists of facts, and needle questions.

There are three kinds of document, each a pure function of a random generator:

    Story: ...                        sentences about people, things and places
    Story: ... with codes hidden ...  the same, with sentences such as "The code of the red lantern is 7 3." inserted, and
                                      "Question: What is the code of the red lantern? Answer: 7 3." at the end
    List: ...                         facts without a story, and questions about them

Codes, capitals and colors are drawn anew for each document, so a question can be answered from the context only.
Every draw uses `Random.random()` alone, whose sequence Python guarantees across versions: a seed always gives the same
bytes. Lengths are counted by the `count` function that is passed in (default: words, digits and punctuation marks).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from surgery.eval.stories.lexicon import WORDS
from surgery.eval.stories.world import World, log_uniform, pick

Count = Callable[[str], int]
Counts = Callable[[Sequence[str]], list[int]]  # for many texts at once, which a fast tokenizer counts in parallel

END = "<|endoftext|>"
# Pieces into which the tokenizer splits text before it merges bytes: a word, a digit or a mark, each with its space.
PIECE = r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+"
_PIECE = re.compile(re.escape(END) + "|" + PIECE)

HELDOUT_SEED, CALIBRATION_SEED = 20_001, 20_002
HELDOUT_CHARACTERS, CALIBRATION_CHARACTERS = 120_000, 96_000


@dataclass(frozen=True)
class Fact:
    """A fact that only the context states, with its statement and its question."""

    subject: str  # "code of the"
    key: str  # "red lantern"
    value: str  # "7 3"

    @property
    def statement(self) -> str:
        """The sentence that states the fact."""
        return f" The {self.subject} {self.key} is {self.value}."

    @property
    def prompt(self) -> str:
        """The question, up to its answer."""
        return f"\nQuestion: What is the {self.subject} {self.key}? Answer:"

    @property
    def answer(self) -> str:
        """The answer, with its leading space."""
        return f" {self.value}"


@dataclass(frozen=True)
class NeedleQuestion:
    """A context with a question at its end, and the answer that should follow, including its leading space."""

    prompt: str
    answer: str


def split_pieces(text: str) -> list[str]:
    """Split a text as the tokenizer does, END as one piece; joined, the pieces are the text."""
    return _PIECE.findall(text)


def count_pieces(text: str) -> int:
    """Return the number of words, digits and punctuation marks, slightly below the number of tokens."""
    return len(split_pieces(text))


def _invented_name(rng: Random) -> str:
    """Return an invented name of two syllables, such as Zelmor."""
    first = pick(rng, WORDS["first"])
    return first + pick(rng, WORDS["second"])


def code_facts(rng: Random, n: int) -> list[Fact]:
    """Return n codes of two digits for n different things; about half of the others share a word with the first."""
    keys: dict[tuple[str, str], None] = {}
    while len(keys) < n:
        key = (pick(rng, WORDS["adjective"]), pick(rng, WORDS["thing"]))
        if keys and (shared := rng.random()) < 0.5:
            first = next(iter(keys))
            key = (first[0], key[1]) if shared < 0.25 else (key[0], first[1])
        keys[key] = None
    values: dict[str, None] = {}
    while len(values) < n:
        values[f"{int(rng.random() * 10)} {int(rng.random() * 10)}"] = None
    return [Fact("code of the", " ".join(key), value) for key, value in zip(keys, values)]


def mixed_facts(rng: Random, n: int) -> list[Fact]:
    """Return at most n facts of one kind, mostly codes. Keys are distinct, and so are the values of codes."""
    kind = rng.random()
    if kind < 0.6:
        return code_facts(rng, n)
    if kind < 0.8:
        names = {_invented_name(rng): None for _ in range(n)}
        return [Fact("capital of", name, _invented_name(rng)) for name in names]
    names = {pick(rng, WORDS["girl"]): None for _ in range(n)}
    return [Fact("favorite color of", name, pick(rng, WORDS["adjective"][:12])) for name in names]


def count_each(texts: Sequence[str]) -> list[int]:
    """Count the pieces of each text."""
    return [count_pieces(text) for text in texts]


def _sentence(world: World) -> str:
    return world.person() if len(world.people) < 2 or world.rng.random() < 0.03 else world.event()


def filler(rng: Random, length: int, count: Count = count_pieces, ends: bool = False) -> list[str]:
    """Return sentences of one story, in total at most `length` by `count`; empty if the first is longer.

    ends: append a closing sentence once little room is left, which may exceed `length`.
    """
    world = World(rng)
    sentences: list[str] = []
    while True:
        text = _sentence(world)
        length -= count(text)
        if length < 0:
            return sentences
        sentences.append(text)
        if ends and length < 24:
            return [*sentences, world.ending()]


def long_filler(rng: Random, length: int, counts: Counts) -> list[str]:
    """Return sentences like `filler`, counted many at a time; the state of `rng` afterwards is unspecified."""
    world = World(rng)
    sentences: list[str] = []
    while True:
        texts = [_sentence(world) for _ in range(8 + length // 32)]
        for text, size in zip(texts, counts(texts)):
            length -= size
            if length < 0:
                return sentences
            sentences.append(text)


def insert_facts(sentences: list[str], facts: list[Fact], depths: list[float]) -> str:
    """Return the story with each fact inserted at its depth: 0 before the first sentence, 1 after the last."""
    order = sorted(range(len(facts)), key=lambda i: depths[i])
    gaps = {i: min(len(sentences), int(depths[i] * (len(sentences) + 1))) for i in order}
    lines = [[facts[i].statement for i in order if gaps[i] == gap] for gap in range(len(sentences) + 1)]
    merged = [line + sentences[gap : gap + 1] for gap, line in enumerate(lines)]
    return "Story:" + "".join(text for line in merged for text in line)


def _questions_text(facts: list[Fact]) -> str:
    return "".join(f"{fact.prompt}{fact.answer}." for fact in facts)


def needle_question(
    rng: Random, length: int, depth: float, distractors: int | None = None, counts: Counts = count_each
) -> NeedleQuestion:
    """Return a question for a code that is stated at `depth` (0 first sentence, 1 last) of a story, among other codes.

    Args:
        length: prompt and answer together have at most this length by `counts`, and at most one sentence less.
        distractors: number of other codes; default: length / 64, between 1 and 7.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"needle_question(depth={depth}): the depth must be in [0, 1]")
    others = min(7, max(1, length // 64)) if distractors is None else distractors
    facts = code_facts(rng, 1 + others)
    (used,) = counts(["Story:" + "".join(fact.statement for fact in facts) + facts[0].prompt + facts[0].answer])
    if used > length:
        raise ValueError(f"needle_question(length={length}, distractors={others}): the facts alone have length {used}")
    # The others lie strictly between, so that depth 0 is the first sentence and depth 1 the last.
    depths = [depth] + [0.001 + 0.998 * rng.random() for _ in range(others)]
    return NeedleQuestion(
        insert_facts(long_filler(rng, length - used, counts), facts, depths) + facts[0].prompt, facts[0].answer
    )


def needle_document(rng: Random, length: int, count: Count = count_pieces, early: int = 2) -> str:
    """Return a story of at most `length` with facts inserted and up to four questions at its end.

    early: the depth of a fact is u^early with u uniform in [0, 1]; above 1, facts lie nearer to the beginning.
    """
    facts = mixed_facts(rng, log_uniform(rng, 1, max(1, min(12, length // 32))))
    asked = sorted(facts, key=lambda _: rng.random())[: 1 + int(rng.random() * 4)]
    used = count(_questions_text(asked) + "".join(fact.statement for fact in facts)) + 2
    depths = [rng.random() ** early for _ in facts]
    return insert_facts(filler(rng, length - used, count), facts, depths) + _questions_text(asked)


def list_document(rng: Random, most: int = 16) -> str:
    """Return two to `most` facts in a row, then questions about up to eight of them."""
    facts = mixed_facts(rng, log_uniform(rng, 2, most))
    asked = sorted(facts, key=lambda _: rng.random())[: 1 + int(rng.random() * 8)]
    return "List:" + "".join(fact.statement for fact in facts) + _questions_text(asked)


def drill(rng: Random, most: int = 8) -> list[tuple[str, bool]]:
    """Return the simplest recall exercise: up to `most` facts, then repeated in other orders, as (text, whether it is a
    repetition).

    Not part of the mixture; used in the first phase of training. Half are bare key-value pairs, half whole sentences.
    """
    facts = code_facts(rng, log_uniform(rng, 2, most)) if rng.random() < 0.7 else mixed_facts(rng, most)
    head, tail = ("", ",") if rng.random() < 0.5 else (f"The {facts[0].subject} ", ".")
    middle = " is" if head else ""
    parts = [("List:", False)]
    for turn in range(2 + int(rng.random() * 3)):
        for fact in facts if turn == 0 else sorted(facts, key=lambda _: rng.random()):
            parts += [(f" {head}{fact.key}{middle}", False), (fact.answer, turn > 0), (tail, False)]
    return parts


def document(rng: Random) -> str:
    """Return one document of the mixture: half plain stories, a third stories with needles, a sixth lists."""
    kind = rng.random()
    if kind < 0.5:
        return "Story:" + "".join(filler(rng, log_uniform(rng, 80, 500), ends=True))
    return needle_document(rng, log_uniform(rng, 60, 800)) if kind < 0.83 else list_document(rng)


def corpus(seed: int, characters: int) -> str:
    """Return a text of at least `characters` characters: documents, each followed by a line with END."""
    rng, parts, size = Random(seed), [], 0
    while size < characters:
        parts.append(f"{document(rng)}\n{END}\n")
        size += len(parts[-1])
    return "".join(parts)


def heldout() -> str:
    """Return the text that conversions are evaluated on; its seed is never used for training."""
    return corpus(HELDOUT_SEED, HELDOUT_CHARACTERS)


def calibration() -> str:
    """Return the text that conversions are calibrated on, from another seed."""
    return corpus(CALIBRATION_SEED, CALIBRATION_CHARACTERS)
