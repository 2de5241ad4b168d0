"""The `data` section of a recipe: sources, packing, validation.

data:
  sources:
    - {path: corpus/, text: body, weight: 3}        # a file, a folder, or a Hub id
    - {path: org/chats, messages: messages, streaming: true}
    - {generated: true, weight: 2}                  # text that the teacher writes
  packing: documents
  validation: 0.01
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from surgery.core.config import Count, Real, validation_error
from surgery.core.errors import SurgeryError
from surgery.training.data.generated import TASKS, Task

GENERATED = "generated"  # of --data: text that the teacher writes
Fraction = Annotated[float, Field(ge=0, lt=1)]


class _FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GeneratedText(_FrozenModel):
    """Text that the teacher of `surgery finetune` writes itself, from the start of a document or of a conversation.

    tokens: how many; None: what the stages read of this source. length: tokens of a row at most; None: the longest row
    of a stage. temperature: divides the logits. seed: of the sampled tokens. chat: write conversations, from the chat
    template; None: if the tokenizer has one. engine: what samples; auto: vllm where it is installed and there is a GPU.
    """

    tokens: Annotated[Count, Field(ge=1)] | None = None
    length: Annotated[Count, Field(ge=16)] | None = None
    temperature: Annotated[Real, Field(gt=0)] = 1.0
    seed: int = Field(0, ge=0, lt=2**63)
    chat: bool | None = None
    engine: Literal["auto", "transformers", "vllm"] = "auto"


class SourceConfig(_FrozenModel):
    """One data source.

    path: a .txt, .md, .json, .jsonl, .parquet or .csv file, a folder of such files, or a Hub data set. weight: relative
    share of the tokens. Columns: `text`, or `messages` (conversations of {role, content}), or `prompt` and
    `completion`. train_on: all `answers` of a conversation, the `last` one, or `all` of its text. separator: string
    between the documents of a text file; without it a file is one document. generated: true, or settings: the teacher
    writes this text to the folder `path`, by default beside the result, unless it is there already.
    """

    path: str = ""
    generated: GeneratedText | None = None
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

    @model_serializer(mode="wrap")
    def _omit_not_generated(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `generated` where there is none, so that runs begun before the key existed go on."""
        values: dict[str, Any] = to_dict(self)
        return {name: value for name, value in values.items() if name != "generated" or value is not None}

    @field_validator("generated", mode="before")
    @classmethod
    def _parse_generated(cls, value: Any) -> Any:
        return {} if value is True else None if value is False else value

    @model_validator(mode="after")
    def _check_path(self) -> SourceConfig:
        if not self.path and self.generated is None:
            raise SurgeryError("a data source needs a path: a file, a folder, or a Hub id; or generated: true.")
        columns = [n for n in ("text", "messages", "prompt", "separator", "subset", "revision") if getattr(self, n)]
        if self.generated is not None and (columns or self.streaming):
            raise SurgeryError(
                f"data source with generated: {(columns or ['streaming'])[0]} does not apply to text that the teacher "
                "writes. Remove it."
            )
        return self

    @model_validator(mode="after")
    def _check_columns(self) -> SourceConfig:
        if (self.prompt is None) != (self.completion is None):
            raise SurgeryError(
                f"data source {self.path}: prompt and completion must be given together, as two columns."
            )
        kinds = [name for name in ("text", "messages", "prompt") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise SurgeryError(
                f"data source {self.path}: a row is one thing, but {' and '.join(kinds)} are given. Keep one of them."
            )
        if self.separator == "":
            raise SurgeryError(f'data source {self.path}: separator must not be empty; write for example "\\n\\n"')
        return self

    @property
    def chat(self) -> bool:
        """Whether rows are conversations, or prompts with completions."""
        return self.messages is not None or self.prompt is not None


class DataConfig(_FrozenModel):
    """All data of a stage.

    packing:
        documents   several per row, which do not attend to each other (position_ids restart)
        stream      all documents joined and cut
        none        one per row, padded
    validation: a fraction of the documents, chosen by a hash of their content, or separate sources; at most
        `validation_examples` are used.
    shuffle: number of documents shuffled together; 0 keeps their order.
    epochs: passes over the data; None: as many as needed.
    rows: use only the first `rows` examples, repeatedly (those of a teacher cache).
    generated: a task whose rows are computed, instead of sources. Of the other keys only `validation` (0: none) and
        `validation_examples` are read.
    """

    sources: tuple[SourceConfig, ...] = ()
    generated: SerializeAsAny[Task] | None = None
    packing: Literal["documents", "stream", "none"] = "documents"
    validation: Fraction | tuple[SourceConfig, ...] = 0.0
    validation_examples: int = Field(64, ge=1)
    shuffle: int = Field(1024, ge=0)
    epochs: int | None = Field(None, ge=1)
    rows: int | None = Field(None, ge=1)

    @model_serializer(mode="wrap")
    def _omit_no_task(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `generated` where there is none, so that runs and teacher caches made before the key existed go
        on.
        """
        values: dict[str, Any] = to_dict(self)
        return {name: value for name, value in values.items() if name != "generated" or value is not None}

    @field_validator("generated", mode="before")
    @classmethod
    def _parse_task(cls, value: Any) -> Any:
        """Return the task that a mapping names. Raises SurgeryError for an unknown task or wrong keys."""
        if not isinstance(value, dict):
            return value
        task_type = TASKS.get(str(value.get("task")))
        if task_type is None:
            raise SurgeryError(
                f"data.generated: task must be one of {', '.join(sorted(TASKS))} (got {value.get('task')!r})"
            )
        try:
            return task_type.model_validate(value)
        except ValidationError as error:
            raise validation_error(error, "data.generated", task_type) from None

    @field_validator("sources", "validation", mode="before")
    @classmethod
    def _normalize_sources(cls, value: Any) -> Any:
        """Accept a path alone, or one source without a list."""
        if isinstance(value, (str, dict, SourceConfig)):
            value = (value,)
        if isinstance(value, (list, tuple)):
            return tuple({"path": v} if isinstance(v, str) else v for v in value)
        return value

    @model_validator(mode="after")
    def _check_not_empty(self) -> DataConfig:
        if not self.sources and self.generated is None:
            raise SurgeryError("data.sources must name at least one source, for example [{path: corpus.jsonl}].")
        if self.sources and self.generated is not None:
            raise SurgeryError(
                f"data: generated rows ({self.generated.name}) and sources ({self.sources[0].path}) are both given. "
                "Keep one of them."
            )
        return self


def data_sources(name: str) -> list[dict[str, Any]]:
    """Return the sources that --data names: a path or Hub id, or `generated`, the teacher's own text."""
    return [{"generated": True} if name == GENERATED else {"path": name}]
