"""RULER's question answering: documents with the answer among others (SQuAD 2.0 dev, HotpotQA dev distractor)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from surgery.eval.long_context.ruler.base import LengthTooShortError, RulerQuestion, TaskContext
from surgery.eval.long_context.ruler.prompt import WholeUnits

TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\nThe "
    "following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me the "
    "answer "
    "and do not output any other words.\n\nQuestion: {question}"
)
PREFIX = " Answer:"


@dataclass(frozen=True)
class DocumentQuestion:
    """A question; documents are indices into DocumentCollection.

    gold: documents with the answer; same_article: other documents of the same article.
    """

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    same_article: tuple[int, ...] = ()


@dataclass(frozen=True)
class DocumentCollection:
    """Documents and questions about them."""

    documents: tuple[str, ...]
    questions: tuple[DocumentQuestion, ...]


def squad(rows: Sequence[Mapping[str, Any]]) -> DocumentCollection:
    """Read rajpurkar/squad_v2: rows of title, context, question, answers {text, ..}. Unanswerable questions are left
    out.
    """
    documents = tuple(sorted({row["context"] for row in rows}))
    number = {text: i for i, text in enumerate(documents)}
    article: dict[str, dict[int, None]] = {}
    for row in rows:
        article.setdefault(row["title"], {})[number[row["context"]]] = None
    asked = []
    for row in rows:
        if not row["answers"]["text"]:
            continue
        here = number[row["context"]]
        kin = tuple(i for i in article[row["title"]] if i != here)
        asked.append(DocumentQuestion(row["question"], tuple(row["answers"]["text"]), (here,), kin))
    return DocumentCollection(documents, tuple(asked))


def hotpot(rows: Sequence[Mapping[str, Any]]) -> DocumentCollection:
    """Read hotpotqa/hotpot_qa, distractor: rows of question, answer, context {title: [..], sentences: [[..], ..]}."""
    texts = [
        [
            f"{title}\n{''.join(sentences)}"
            for title, sentences in zip(row["context"]["title"], row["context"]["sentences"])
        ]
        for row in rows
    ]
    documents = tuple(sorted({text for paragraphs in texts for text in paragraphs}))
    number = {text: i for i, text in enumerate(documents)}
    return DocumentCollection(
        documents,
        tuple(
            DocumentQuestion(
                row["question"], (row["answer"],), tuple(dict.fromkeys(number[text] for text in paragraphs))
            )
            for row, paragraphs in zip(rows, texts)
        ),
    )


@dataclass(frozen=True)
class DocumentQATask:
    """Task qa_squad or qa_hotpot."""

    name: str
    needs: str
    answer_tokens: int = 32

    def make_questions(self, ctx: TaskContext, samples: int, depths: tuple[float, ...]) -> Iterator[RulerQuestion]:
        """Yield questions in the data's order, without those whose own documents are too long."""
        library: DocumentCollection = ctx.texts[self.needs]

        def make_or_fail(index: int) -> RulerQuestion | LengthTooShortError:
            try:
                return self._make_question(ctx, library, index)
            except LengthTooShortError as error:
                return error

        made, reason = 0, LengthTooShortError("has no questions")
        for question in ctx.make_each(make_or_fail, range(len(library.questions))):
            if isinstance(question, LengthTooShortError):
                reason = question
                continue
            yield question
            made += 1
            if made == samples:
                return
        if not made:
            raise reason

    def _make_question(self, ctx: TaskContext, library: DocumentCollection, index: int) -> RulerQuestion:
        asked, rng = library.questions[index], ctx.rng(self.name, index)
        others = _distractors(library, asked, rng)
        last, seed = others.pop() if others else "", rng.random()

        def build(n: int, rest: str) -> str:
            chosen = [library.documents[i] for i in asked.gold] + [others[i % len(others)] for i in range(n)]
            Random(seed).shuffle(chosen)
            shown = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(chosen, 1))
            return TEMPLATE.format(context=f"{shown} {rest}".rstrip(" "), question=asked.question) + PREFIX

        most = 4 * ctx.length if others else 0
        filled = ctx.fill_prompt(
            build, self.answer_tokens, 0, most, max(1, ctx.length // 1024), filler=f"{last} " * 4, mixed=True,
            original=WholeUnits(10, lambda documents: min(most, max(0, documents - len(asked.gold)))), kind=self.name,
        )  # fmt: skip
        return RulerQuestion(
            id=f"{self.name} {ctx.length} {index}",
            prompt=filled.text[: -len(PREFIX)],
            prefix=PREFIX,
            answers=asked.answers,
            length=ctx.length,
            tokens=filled.tokens + self.answer_tokens,
            rule="any",
        )


def _distractors(library: DocumentCollection, asked: DocumentQuestion, rng: Random) -> list[str]:
    """Return the filler documents in order: same article first, then any; repeated if there are too few."""
    kin = rng.sample(asked.same_article, len(asked.same_article))
    known = {*asked.gold, *asked.same_article}
    rest = [i for i in range(len(library.documents)) if i not in known]
    return [library.documents[i] for i in (*kin, *rng.sample(rest, len(rest)))]
