"""Tokenize conversations, and prompts with completions, so that only the assistant's messages are training targets.

A chat template with {% generation %} tags marks these messages itself. For other templates, the conversation is
rendered up to the start and up to the end of each assistant message. The text between both is the message, provided
that both renderings are prefixes of the whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from surgery.calibration.chats import Message, apply_chat_template, chat_template, parse_messages
from surgery.core.errors import SurgeryError
from surgery.training.data.documents import Document
from surgery.training.data.recipe import SourceConfig
from surgery.training.data.tokenize import TextEncoder, TokenSequence

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"

Span = tuple[int, int]


def encode_chats(documents: list[Document], source: SourceConfig, encoder: TextEncoder) -> list[TokenSequence]:
    """Return one indivisible sequence per conversation: one that is too long is truncated, not cut into windows."""
    chat_encoder = ChatEncoder(encoder, source)
    return [chat_encoder.encode(document.content) for document in documents]


class ChatEncoder:
    """Tokenizes the conversations of one data source with the tokenizer's chat template."""

    def __init__(self, encoder: TextEncoder, source: SourceConfig):
        self.encoder, self.tokenizer, self.source = encoder, encoder.tokenizer, source
        self.where = f"data source {source.path}"

    def encode(self, content: Any) -> TokenSequence:
        """Return the tokens of a list of messages, or of a tuple (prompt, completion), with their training targets."""
        if not isinstance(content, tuple):
            return self._encode_conversation(parse_messages(content, self.where), 0)
        prompt, completion = content
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._encode_completion(prompt, completion)
        if isinstance(prompt, str) or isinstance(completion, str):
            raise SurgeryError(
                f"data source {self.source.path}: prompt and completion must both be text or both be lists of messages"
                " (got one of each)."
            )
        messages = parse_messages(prompt, self.where)
        return self._encode_conversation([*messages, *parse_messages(completion, self.where)], len(messages))

    def _encode_completion(self, prompt: str, completion: str) -> TokenSequence:
        prompt_ids = [*self.encoder.prefix_ids, *self._ids(prompt)]
        completion_ids = [*self._ids(completion), *self.encoder.suffix_ids]
        trained = None
        if self.source.train_on != "all":
            trained = torch.tensor([False] * len(prompt_ids) + [True] * len(completion_ids))
        return TokenSequence(torch.tensor([*prompt_ids, *completion_ids], dtype=torch.int64), trained, indivisible=True)

    def _encode_conversation(self, messages: list[Message], first: int) -> TokenSequence:
        """Return the tokens of a conversation. first: index of the first message that may be a training target."""
        template = chat_template(self.tokenizer, self.where)
        last = max((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), default=-1)
        if self.source.train_on == "last":
            first = last
        if self.source.train_on != "all" and first == 0 and GENERATION_TAG.search(template):
            return self._encode_marked(messages)
        text = self._render(messages)
        if self.source.train_on == "all":
            return TokenSequence(torch.tensor(self._ids(text), dtype=torch.int64), indivisible=True)
        answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i >= first]
        return self._encode_spans(text, [self._span(messages, i, text) for i in answers])

    # -- the template --------------------------------------------------------------------------------
    def _render(self, messages: list[Message], generation_prompt: bool = False) -> str:
        """Return the conversation as text. generation_prompt: append the start of an assistant message."""
        return self._apply_template(messages, tokenize=False, add_generation_prompt=generation_prompt)

    def _apply_template(self, messages: list[Message], **options: Any) -> Any:
        return apply_chat_template(self.tokenizer, messages, self.where, **options)

    def _encode_marked(self, messages: list[Message]) -> TokenSequence:
        encoded = self._apply_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, marks = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"], dtype=torch.bool)
        return TokenSequence(ids.long(), marks, indivisible=True)

    def _span(self, messages: list[Message], i: int, text: str) -> Span:
        """Return the first and last character position (exclusive) of message i in `text`, the whole conversation."""
        start, end = self._render(messages[:i], generation_prompt=True), self._render(messages[: i + 1])
        if not (end.startswith(start) and text.startswith(end)):
            raise SurgeryError(
                f"data source {self.source.path}: cannot determine which tokens are answers: the chat template renders "
                "message "
                f"{i + 1} of {len(messages)} differently when more messages follow, or does not start it with the "
                "generation "
                "prompt. Use a template with {% generation %} tags, train_on: last, or train_on: all."
            )
        return len(start), len(end)

    # -- tokens --------------------------------------------------------------------------------------
    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _encode_spans(self, text: str, spans: Sequence[Span]) -> TokenSequence:
        """Tokenize `text`; a token is a training target if any of its characters is inside a span."""
        if not self.tokenizer.is_fast:
            return self._encode_piecewise(text, spans)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begin_T, end_T = torch.tensor(encoded["offset_mapping"], dtype=torch.int64).view(-1, 2).unbind(1)
        trained_T = torch.zeros(len(begin_T), dtype=torch.bool)
        for start, stop in spans:
            trained_T |= (end_T > start) & (begin_T < stop) & (end_T > begin_T)
        return TokenSequence(torch.tensor(encoded["input_ids"], dtype=torch.int64), trained_T, indivisible=True)

    def _encode_piecewise(self, text: str, spans: Sequence[Span]) -> TokenSequence:
        """Tokenize the text inside and outside of the spans separately, for tokenizers without offset mappings."""
        ids: list[int] = []
        trained: list[bool] = []
        bounds = [0, *(bound for span in spans for bound in span), len(text)]
        for number, (start, stop) in enumerate(pairwise(bounds)):
            some = self._ids(text[start:stop]) if stop > start else []
            ids, trained = ids + some, trained + [number % 2 == 1] * len(some)
        return TokenSequence(
            torch.tensor(ids, dtype=torch.int64), torch.tensor(trained, dtype=torch.bool), indivisible=True
        )
