"""The student and its teacher: opened, checked against each other, and sharing what neither will change."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from surgery.architectures.linears import find_linears
from surgery.calibration.data import load_tokenizer
from surgery.checkpoint.meta_model import build_unconverted_model, load_config, model_class
from surgery.checkpoint.remote_code import refuse_code
from surgery.checkpoint.source import CheckpointSource, open_checkpoint, open_converted_checkpoint
from surgery.checkpoint.table import QUANT_METHOD
from surgery.checkpoint.tensor_names import load_complete
from surgery.core.errors import SurgeryError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_trainable(name: str, trust_remote_code: bool = False) -> CheckpointSource:
    """A checkpoint to be trained, converted or not."""
    source = open_converted_checkpoint(name)
    refuse_code(source.folder, name, source.config, trust_remote_code)
    method = (source.config.get("quantization_config") or {}).get("quant_method", QUANT_METHOD)
    if method != QUANT_METHOD:
        raise SurgeryError(f"{name} is quantised ({method}); training wants full-precision weights")
    if source.config.get("is_encoder_decoder"):
        raise SurgeryError(f"{name} is an encoder-decoder; healing is for decoders that predict the next token")
    return source


def load_causal_lm(source: CheckpointSource, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """A causal language model on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import PreTrainedModel

    config = load_config(source.folder, source.name, trust_remote_code)
    cls = model_class(config, trust_remote_code)
    if type(config) not in AutoModelForCausalLM._model_mapping and not config.to_dict().get("auto_map"):
        raise SurgeryError(
            f"{source.name} is a {config.model_type} model, which predicts no next token; healing is for causal language models"
        )
    model = load_complete(cls, source.folder, source.name, dtype=dtype, trust_remote_code=trust_remote_code)
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise SurgeryError(f"{source.name}: {type(model).__name__} has no language-model head")
    return model


def load_student(source: CheckpointSource, trust_remote_code: bool = False) -> Any:
    """In float32: updates of a hundred-thousandth are lost in bf16."""
    student = load_causal_lm(source, torch.float32, trust_remote_code)
    return student.requires_grad_(False)


def load_teacher(
    name: str, student: Any, tokenizer: Any, settings: Any, device: torch.device, trust_remote_code: bool = False
) -> Any:
    """Frozen, on its device; tokenizer: the student's; settings: recipe.TeacherConfig."""
    source = open_checkpoint(name, trust_remote_code)
    check_same_tokenizer(tokenizer, source, trust_remote_code)
    target_device = torch.device(settings.device) if settings.device else device
    auto = torch.float32 if target_device.type == "cpu" else torch.bfloat16
    teacher = load_causal_lm(source, DTYPES.get(settings.dtype, auto), trust_remote_code)
    ours, theirs = (m.config.get_text_config().vocab_size for m in (student, teacher))
    if ours != theirs:
        raise SurgeryError(f"--teacher {name} has {theirs} words, the student {ours}; a teacher reads the same tokens")
    try:
        return teacher.to(target_device).eval().requires_grad_(False)
    except (RuntimeError, AssertionError) as error:
        raise SurgeryError(f"teacher.device {target_device}: {str(error).splitlines()[0]}") from None


def check_same_tokenizer(tokenizer: Any, teacher: CheckpointSource, trust_remote_code: bool = False) -> None:
    """One of the two may know more words than the other. Of a teacher's folder without a tokenizer nothing is known."""
    try:
        theirs = load_tokenizer(teacher.folder, trust_remote_code).get_vocab().items()
    except SurgeryError:
        return
    ours = tokenizer.get_vocab().items()
    if not (ours <= theirs or theirs <= ours):
        raise SurgeryError(
            f"--teacher {teacher.name} has another tokenizer than the student: of {len(ours):,} words {len(ours & theirs):,} "
            "have the same number; give the checkpoint it was converted from"
        )


def load_source_tokenizer(source: CheckpointSource, trust_remote_code: bool = False) -> Any:
    return load_tokenizer(source.folder, trust_remote_code)


@torch.no_grad()
def share_frozen_tensors(student: nn.Module, teacher: nn.Module, changing: set[str]) -> int:
    """Let the teacher use the student's own tensors where both hold the same numbers and nothing will change them; bytes
    that saves."""
    theirs, saved = dict(teacher.named_parameters()), 0
    for name, ours in student.named_parameters():
        other = theirs.get(name)
        if other is None or name in changing or ours.shape != other.shape:
            continue
        if (ours.dtype, ours.device) == (other.dtype, other.device) and torch.equal(ours, other):
            other.data = ours.data
            saved += ours.numel() * ours.element_size()
    return saved


def linear_roles(source: CheckpointSource, model: Any) -> dict[str, tuple[str, ...]]:
    """Path of every linear, or of what stands in its place -> its roles."""
    converted = (source.config.get("quantization_config") or {}).get("quant_method") == QUANT_METHOD
    layout = find_linears(build_unconverted_model(source) if converted else model)
    return {linear.path: linear.roles for linear in layout.linears if linear.roles}


def check_length(model: Any, length: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise SurgeryError(
            f"stages: length {length} is over what {type(model).__name__} can read, {limit} (max_position_embeddings)"
        )


def enable_gradient_checkpointing(model: Any) -> None:
    """Activations within a layer are made again on the way back instead of kept."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def disable_gradient_checkpointing(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_disable"):
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()
