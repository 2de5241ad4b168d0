"""Conversations, and prompts with their completions: only what the assistant says is trained on.

A chat template that marks it ({% generation %}) is believed. Any other is asked for the conversation up to each
answer and up to its end: what lies between is the answer, if both are beginnings of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from surgery.core.errors import SurgeryError
from surgery.training.data.documents import Document
from surgery.training.data.recipe import SourceConfig
from surgery.training.data.tokenize import TextEncoder, TokenSequence

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}  # ShareGPT's words
ASSISTANT = "assistant"

Span = tuple[int, int]
Message = dict[str, Any]


def encode_chats(documents: list[Document], source: SourceConfig, encoder: TextEncoder) -> list[TokenSequence]:
    """One piece a conversation, never cut into windows: what is too long loses its end."""
    writer = ChatEncoder(encoder, source)
    return [writer.encode(document.content) for document in documents]


class ChatEncoder:
    def __init__(self, encoder: TextEncoder, source: SourceConfig):
        self.encoder, self.tokenizer, self.source = encoder, encoder.tokenizer, source

    def encode(self, content: Any) -> TokenSequence:
        if not isinstance(content, tuple):
            return self._encode_conversation(parse_messages(content, self.source), 0)
        prompt, completion = content
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._encode_completion(prompt, completion)
        if isinstance(prompt, str) or isinstance(completion, str):
            raise SurgeryError(
                f"data source {self.source.path}: prompt and completion are both text or both turns, and one of each is there"
            )
        asked = parse_messages(prompt, self.source)
        return self._encode_conversation([*asked, *parse_messages(completion, self.source)], len(asked))

    def _encode_completion(self, prompt: str, completion: str) -> TokenSequence:
        asked, answered = (self._ids(text) for text in (prompt, completion))
        asked, answered = [*self.encoder.prefix_ids, *asked], [*answered, *self.encoder.suffix_ids]
        trained = None
        if self.source.train_on != "all":
            trained = torch.tensor([False] * len(asked) + [True] * len(answered))
        return TokenSequence(torch.tensor([*asked, *answered], dtype=torch.int64), trained, indivisible=True)

    def _encode_conversation(self, turns: list[Message], first: int) -> TokenSequence:
        """first: answers before this turn are not trained on."""
        template = self._template()
        last = max((i for i, turn in enumerate(turns) if turn["role"] == ASSISTANT), default=-1)
        if self.source.train_on == "last":
            first = last
        if self.source.train_on != "all" and first == 0 and GENERATION_TAG.search(template):
            return self._encode_marked(turns)
        text = self._render(turns)
        if self.source.train_on == "all":
            return TokenSequence(torch.tensor(self._ids(text), dtype=torch.int64), indivisible=True)
        answers = [i for i, turn in enumerate(turns) if turn["role"] == ASSISTANT and i >= first]
        return self._encode_spans(text, [self._span(turns, i, text) for i in answers])

    # -- the template --------------------------------------------------------------------------------
    def _template(self) -> str:
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError:
            raise SurgeryError(
                f"data source {self.source.path} holds conversations, and the tokenizer has no chat template; put a "
                "chat_template.jinja beside it, or write the conversations out as text"
            ) from None

    def _render(self, turns: list[Message], opened: bool = False) -> str:
        """opened: with what an answer begins with."""
        return self._apply_template(turns, tokenize=False, add_generation_prompt=opened)

    def _apply_template(self, turns: list[Message], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(turns, **options)
        except Exception as error:  # a template may raise, and fail, in any way
            raise SurgeryError(
                f"data source {self.source.path}: the chat template refuses a conversation "
                f"({' '.join(str(error).split())[:160]}): {str(turns)[:160]}"
            ) from None

    def _encode_marked(self, turns: list[Message]) -> TokenSequence:
        found = self._apply_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, marks = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"], dtype=torch.bool)
        return TokenSequence(ids.long(), marks, indivisible=True)

    def _span(self, turns: list[Message], i: int, text: str) -> Span:
        """Characters of turn i."""
        before, until = self._render(turns[:i], opened=True), self._render(turns[: i + 1])
        if not (until.startswith(before) and text.startswith(until)):
            raise SurgeryError(
                f"data source {self.source.path}: which tokens are answers cannot be told: the chat template writes turn "
                f"{i + 1} of {len(turns)} differently once more turns follow, or begins answers otherwise than it asks for "
                "them. Use a template with {% generation %} marks, or train_on: last, or train_on: all"
            )
        return len(before), len(until)

    # -- tokens --------------------------------------------------------------------------------------
    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _encode_spans(self, text: str, spans: Sequence[Span]) -> TokenSequence:
        """A token is an answer's if one of its characters is."""
        if not self.tokenizer.is_fast:
            return self._encode_piecewise(text, spans)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begin_T, end_T = torch.tensor(found["offset_mapping"], dtype=torch.int64).view(-1, 2).unbind(1)
        trained_T = torch.zeros(len(begin_T), dtype=torch.bool)
        for start, stop in spans:
            trained_T |= (end_T > start) & (begin_T < stop) & (end_T > begin_T)
        return TokenSequence(torch.tensor(found["input_ids"], dtype=torch.int64), trained_T, indivisible=True)

    def _encode_piecewise(self, text: str, spans: Sequence[Span]) -> TokenSequence:
        """For tokenizers that do not say which characters a token is of."""
        ids: list[int] = []
        trained: list[bool] = []
        bounds = [0, *(bound for span in spans for bound in span), len(text)]
        for number, (start, stop) in enumerate(pairwise(bounds)):
            some = self._ids(text[start:stop]) if stop > start else []
            ids, trained = ids + some, trained + [number % 2 == 1] * len(some)
        return TokenSequence(
            torch.tensor(ids, dtype=torch.int64), torch.tensor(trained, dtype=torch.bool), indivisible=True
        )


def parse_messages(content: Any, source: SourceConfig) -> list[Message]:
    """[{"role": .., "content": ..}, ..]; ShareGPT's from and value are read as these."""
    turns = []
    for turn in content if isinstance(content, (list, tuple)) else [content]:
        if isinstance(turn, dict) and "role" in turn and "content" not in turn:
            raise SurgeryError(f"data source {source.path}: a turn has no content: {str(turn)[:80]}")
        if isinstance(turn, dict) and "role" in turn:
            # What a table fills up with nothing is not there.
            turns.append({key: value for key, value in turn.items() if value is not None or key == "content"})
        elif isinstance(turn, dict) and {"from", "value"} <= set(turn):
            turns.append({"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]})
        else:
            raise SurgeryError(
                f"data source {source.path}: a conversation is a list of turns "
                f'({{"role": "user", "content": ".."}}), and one holds {str(turn)[:80]!r}'
            )
    return turns
