"""Checkpoints, opened and loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surgery.calibration.data import load_tokenizer
from surgery.checkpoint.meta_model import load_config, model_class
from surgery.checkpoint.remote_code import refuse_code
from surgery.checkpoint.source import open_converted_checkpoint, read_config
from surgery.checkpoint.tensor_names import load_complete
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.progress import Progress
from surgery.eval.suite import EvalModel, Role

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint whose headers were read. fingerprint: the digest of its files, see `Source.digest`."""

    role: Role
    name: str
    folder: Path
    fingerprint: str


def open_model(role: Role, name: str, ranks: DistContext | None = None) -> OpenedModel:
    source = open_converted_checkpoint(name)
    return OpenedModel(role, name, source.folder, (ranks or DistContext()).on_main(source.digest))


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise SurgeryError(f"--dtype {dtype!r}{suggestion(dtype, DTYPES)}")


def load_from_folder(folder: Path, device: torch.device, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """(model, tokenizer)."""
    check_dtype(dtype)
    refuse_code(folder, str(folder), read_config(folder, str(folder)), trust_remote_code)
    config = load_config(folder, str(folder), trust_remote_code)
    cls = model_class(config, trust_remote_code)
    model = load_complete(cls, folder, str(folder), dtype=dtype, trust_remote_code=trust_remote_code)
    return model.to(device).eval(), load_tokenizer(folder, trust_remote_code)


def load(name: str, device: torch.device, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """(model, tokenizer) of a checkpoint, converted or not."""
    return load_from_folder(open_converted_checkpoint(name).folder, device, dtype, trust_remote_code)


@contextmanager
def load_eval_model(
    opened: OpenedModel,
    device: torch.device,
    dtype: str,
    trust_remote_code: bool,
    ranks: DistContext,
    progress: Progress,
) -> Iterator[EvalModel]:
    """Gone from the device when the context ends: base and converted need not fit together."""
    model, tokenizer = load_from_folder(opened.folder, device, dtype, trust_remote_code)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    eval_model = EvalModel(
        opened.role, opened.name, opened.folder, opened.fingerprint, model, tokenizer, device, model.dtype, longest, ranks,
        progress if ranks.main else Progress(),
    )  # fmt: skip
    try:
        yield eval_model
    finally:
        eval_model.model = None
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
