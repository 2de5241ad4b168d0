"""What a recipe says of its data.

data:
  sources:
    - {path: corpus/, text: body, weight: 3}        # a file, a folder, or a Hub id
    - {path: org/chats, messages: messages, streaming: true}
  packing: documents
  validation: 0.01
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from surgery.core.errors import SurgeryError

Fraction = Annotated[float, Field(ge=0, lt=1)]


class _FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceConfig(_FrozenModel):
    """path: a .txt, .md, .json, .jsonl, .parquet or .csv file, a folder of such files, or a Hub data set. weight: of the
    tokens, its share among the sources. What a row holds: `text`, a column of text; `messages`, a column of
    conversations ({role, content} each); or `prompt` and `completion`, two columns of text.
    train_on: of conversations the `answers`, the `last` of them, or `all` of the text.
    separator: what parts the documents of a text file; without it a file is one document."""

    path: str
    text: str | None = None
    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    separator: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    weight: float = Field(1.0, gt=0)
    streaming: bool = False
    train_on: Literal["answers", "last", "all"] = "answers"

    @model_validator(mode="after")
    def _check_columns(self) -> SourceConfig:
        if (self.prompt is None) != (self.completion is None):
            raise SurgeryError(f"data source {self.path}: prompt and completion are given together, as two columns")
        kinds = [name for name in ("text", "messages", "prompt") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise SurgeryError(
                f"data source {self.path}: a row is one thing, and {' and '.join(kinds)} are given; leave out all but one"
            )
        if self.separator == "":
            raise SurgeryError(f'data source {self.path}: separator is empty; write for example "\\n\\n"')
        return self

    @property
    def chat(self) -> bool:
        return self.messages is not None or self.prompt is not None


class DataConfig(_FrozenModel):
    """packing: `documents`, several in a row, none sees another (position_ids begin anew); `stream`, all joined and
    cut; `none`, one a row, padded. validation: a share of the documents, chosen by their content, or sources of
    their own; `validation_examples` of them at most are kept. shuffle: documents put in random order together;
    0 keeps the order they come in. epochs: how often the data may be read, None for as long as it takes. rows: the
    first so many and no others, over and over (those of a teacher cache)."""

    sources: tuple[SourceConfig, ...]
    packing: Literal["documents", "stream", "none"] = "documents"
    validation: Fraction | tuple[SourceConfig, ...] = 0.0
    validation_examples: int = Field(64, ge=1)
    shuffle: int = Field(1024, ge=0)
    epochs: int | None = Field(None, ge=1)
    rows: int | None = Field(None, ge=1)

    @field_validator("sources", "validation", mode="before")
    @classmethod
    def _normalize_sources(cls, value: Any) -> Any:
        """A path alone, or one source without the list around it."""
        if isinstance(value, (str, dict, SourceConfig)):
            value = (value,)
        if isinstance(value, (list, tuple)):
            return tuple({"path": v} if isinstance(v, str) else v for v in value)
        return value

    @field_validator("sources")
    @classmethod
    def _check_not_empty(cls, sources: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        if not sources:
            raise SurgeryError("data.sources is empty; name at least one, for example [{path: corpus.jsonl}]")
        return sources
