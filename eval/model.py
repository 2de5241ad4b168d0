"""Open the checkpoints of an evaluation, and load one as an `EvalModel` for as long as a context lasts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surgery.calibration.data import load_tokenizer
from surgery.checkpoint.load_model import load_model
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint, read_config
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.progress import Progress
from surgery.eval.suite import EvalModel, Role

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint whose headers were read. fingerprint: SHA-256 of its files, see `CheckpointSource.digest`."""

    role: Role
    name: str
    folder: Path
    fingerprint: str


def open_model(role: Role, name: str, ranks: DistContext | None = None) -> OpenedModel:
    """Read the headers of a checkpoint. The main process computes the fingerprint for all processes."""
    source = open_converted_checkpoint(name)
    return OpenedModel(role, name, source.folder, (ranks or DistContext()).on_main(source.digest))


def check_dtype(dtype: str) -> None:
    """Raise SurgeryError unless `dtype` is one of DTYPES."""
    if dtype not in DTYPES:
        raise SurgeryError(f"--dtype {dtype!r} is not supported{suggestion(dtype, DTYPES)}")


def load_from_folder(folder: Path, device: torch.device, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load (model, tokenizer) from a local folder; the model is in evaluation mode on `device`. dtype: one of DTYPES."""
    check_dtype(dtype)
    source = CheckpointSource(str(folder), folder, read_config(folder, str(folder)), {})
    model = load_model(source, dtype, trust_remote_code)
    return model.to(device).eval(), load_tokenizer(folder, trust_remote_code)


def load(name: str, device: torch.device, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load (model, tokenizer) of a checkpoint, converted or not, by folder or Hub id."""
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
    """Load a model for the duration of the context, then free its memory: original and converted model need not fit on the
    device together."""
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
