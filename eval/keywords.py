"""Types of the keywords of `surgery.evaluate`, for editors and type checkers; a test holds them equal to the fields of EvalOptions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class EvalKeywords(TypedDict, total=False):
    """Keywords of `surgery.evaluate` that are fields of EvalOptions, which says what they mean and checks them."""

    text: str | None
    limit: int | None
    tokens: int
    length: int
    lengths: str | Sequence[int | str]
    depths: str | Sequence[float]
    tasks: str | Sequence[str]
    batch_size: int | Literal["auto"]
    seed: int
    data_root: str | os.PathLike[str] | None
    data: Mapping[str, str | os.PathLike[str]] | Sequence[str]
    num_fewshot: int | None
    gen_kwargs: str | Mapping[str, Any]
    metadata: str | Mapping[str, Any]
    include_path: str | os.PathLike[str] | None
    apply_chat_template: bool
    samples: str | Mapping[str, Sequence[int]]
    use_cache: str | os.PathLike[str] | None
    prompts: Literal["based", "jrt"]
    fill: Literal["exact", "ruler"]
    pairs: str | Sequence[int]
