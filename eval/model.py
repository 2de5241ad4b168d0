"""Open the checkpoints of an evaluation, and load one as an `EvalModel` for as long as a context lasts."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surgery.architectures.positions import longest_input
from surgery.calibration.data import load_tokenizer
from surgery.checkpoint.load_model import load_model
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint, read_config
from surgery.checkpoint.table import QUANT_METHOD, is_quantized, read_table
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import REPORT_NAME, read_json
from surgery.core.progress import Progress
from surgery.eval.suite import EvalModel, Role
from surgery.modeling.live import is_library_model, model_device
from surgery.planning.recipe import FrontRecipe
from surgery.publish.front import read_front
from surgery.publish.summary import model_sizes
from surgery.structures.quantized import QuantizedLinear

DTYPES = ("auto", "float32", "bfloat16", "float16")


SIZE_FIELDS = ("parameters", "stored_bytes", "cache_bytes", "kept")  # of an OpenedModel, which results repeat


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint whose headers were read, or a model in memory.

    fingerprint: SHA-256 of its files, see `CheckpointSource.digest`, or of its tensors. live: the model in memory, or
    None. parameters: number of stored parameters, tied ones once; None for quantized models, whose tensors hold scales
    and packed integers. stored_bytes: bytes of the stored tensors, scales and packed integers included. kept,
    cache_bytes: see `model_sizes`. front: that a recipe of surgery search was chosen from, as its report says.
    healed: whether the report of a converted checkpoint has training runs; None without a report.
    """

    role: Role
    name: str
    folder: Path
    fingerprint: str
    live: LiveEvalModel | None = None
    parameters: int | None = None
    stored_bytes: int | None = None
    kept: float | None = None
    cache_bytes: int | None = None
    front: FrontRecipe | None = None
    healed: bool | None = None

    def sizes(self) -> dict[str, Any]:
        """Return what results say of the model's size."""
        return {name: getattr(self, name) for name in SIZE_FIELDS}


@dataclass(frozen=True)
class LiveEvalModel:
    """A model in memory to be evaluated as it is: on its device and in its dtype. tokenizer: the model's."""

    model: Any
    tokenizer: Any

    def name(self) -> str:
        """Return the name for tables: that which the model was loaded by, and its class."""
        kind, loaded = type(self.model).__name__, getattr(self.model.config, "name_or_path", "")
        return f"{kind} of {loaded}" if loaded else kind

    def check_dtype(self, dtype: str | None) -> str:
        """Return the name of the model's dtype. Raises SurgeryError if another one is asked for."""
        model_dtype = str(self.model.dtype).removeprefix("torch.")
        if dtype not in (None, "auto", model_dtype):
            raise SurgeryError(
                f"a model in memory is evaluated in its own dtype, {model_dtype} (got dtype={dtype!r}). Convert it "
                f"first: model.to(torch.{dtype})"
            )
        return model_dtype

    def digest(self) -> str:
        """Return the SHA-256 over the config and all tensors, and over the tokenizer's vocabulary."""
        digest = hashlib.sha256(self.model.config.to_json_string(use_diff=False).encode())
        digest.update(str(sorted(self.tokenizer.get_vocab().items())).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def live_eval_model(model: Any, tokenizer: Any) -> LiveEvalModel:
    """Return a model in memory for evaluation. tokenizer: None takes the one that `surgery.apply` was given."""
    if not is_library_model(model):
        raise SurgeryError(
            f"surgery.evaluate takes language models of transformers (got a {type(model).__name__}), because suites "
            "are texts"
        )
    tokenizer = getattr(model, "surgery_companions", (None,))[0] if tokenizer is None else tokenizer
    if tokenizer is None:
        raise SurgeryError(
            "a model in memory is evaluated with its tokenizer: surgery.evaluate(model, tokenizer=tokenizer)"
        )
    model_device(model)
    check_dtype(str(model.dtype).removeprefix("torch."))
    return LiveEvalModel(model, tokenizer)


def open_model(role: Role, name: str | LiveEvalModel, ranks: DistContext | None = None) -> OpenedModel:
    """Read the headers of a checkpoint. The main process computes the fingerprint for all processes."""
    if isinstance(name, LiveEvalModel):
        is_integer = any(isinstance(module, QuantizedLinear) for module in name.model.modules())
        count = None if is_integer else sum(parameter.numel() for parameter in name.model.parameters())
        size = sum(
            t.numel() * t.element_size() for t in {t.data_ptr(): t for t in name.model.state_dict().values()}.values()
        )
        return OpenedModel(
            role, name.name(), Path(), (ranks or DistContext()).on_main(name.digest), name, count, size or None
        )
    source = open_converted_checkpoint(name)
    return OpenedModel(
        role, name, source.folder, (ranks or DistContext()).on_main(source.digest),
        parameters=_count_parameters(source), stored_bytes=source.nbytes or None, **_history_of(source),
        **model_sizes(source),
    )  # fmt: skip


def _history_of(source: CheckpointSource) -> dict[str, Any]:
    """Return `front` and `healed` of an OpenedModel; {} without a report, and for one that is damaged."""
    if not (source.folder / REPORT_NAME).is_file():
        return {}
    try:
        report = read_json(source.folder / REPORT_NAME)
    except SurgeryError:
        return {}
    return {"front": read_front(report), "healed": bool(report.get("training"))} if isinstance(report, dict) else {}


def _count_parameters(source: CheckpointSource) -> int | None:
    """Return the number of stored parameters; None without any, or if linears are stored as integers."""
    quantization = source.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method is not None and (method != QUANT_METHOD or is_quantized(read_table(source.config, source.name))):
        return None
    return sum(tensor.numel for tensor in source.tensors.values()) or None


def check_dtype(dtype: str) -> None:
    """Raise SurgeryError unless `dtype` is one of DTYPES."""
    if dtype not in DTYPES:
        raise SurgeryError(f"--dtype {dtype!r} is not supported{suggestion(dtype, DTYPES)}")


def load_from_folder(folder: Path, device: torch.device, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load (model, tokenizer) from a local folder; the model is in evaluation mode on `device`. dtype: one of
    DTYPES.
    """
    check_dtype(dtype)
    source = CheckpointSource(str(folder), folder, read_config(folder, str(folder)), {})
    model = load_model(source, dtype, trust_remote_code)
    return model.to(device).eval(), load_tokenizer(folder, trust_remote_code)


def load(name: str, device: torch.device, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load (model, tokenizer) of a checkpoint, converted or not, by folder or Hub id."""
    return load_from_folder(open_converted_checkpoint(name).folder, device, dtype, trust_remote_code)


def load_eval_tokenizer(opened: OpenedModel, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a model that is not loaded."""
    return opened.live.tokenizer if opened.live is not None else load_tokenizer(opened.folder, trust_remote_code)


@contextmanager
def load_eval_model(
    opened: OpenedModel,
    device: torch.device,
    dtype: str,
    trust_remote_code: bool,
    ranks: DistContext,
    progress: Progress,
) -> Iterator[EvalModel]:
    """Load a model for the duration of the context, then free its memory: original and converted model need not fit on
    the device together. A model in memory stays where it is; its training mode is restored."""
    live = opened.live
    if live is not None:
        model, tokenizer, device = live.model, live.tokenizer, live.model.device
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
    else:
        model, tokenizer = load_from_folder(opened.folder, device, dtype, trust_remote_code)
        modes = []
    longest = longest_input(model)
    eval_model = EvalModel(
        opened.role, opened.name, opened.folder, opened.fingerprint, model, tokenizer, device, model.dtype, longest, ranks,
        progress if ranks.main else Progress(),
    )  # fmt: skip
    try:
        yield eval_model
    finally:
        eval_model.model = None
        for module, training in modes:
            module.training = training
        modes.clear()
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
