"""Conversations, and prompts with their completions: only answers are trained on."""

from __future__ import annotations

from surgery.errors import SurgeryError
from surgery.training.data_recipe import SourceConfig
from surgery.training.documents import Document
from surgery.training.encode import Encoder, Piece


def chats(documents: list[Document], source: SourceConfig, encoder: Encoder) -> list[Piece]:
    raise SurgeryError("not yet")
