"""Load the student and the teacher of a training run, check that they fit together, and share their frozen tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.experts import split_experts
from surgery.architectures.linears import find_linears
from surgery.architectures.positions import longest_input
from surgery.calibration.data import load_tokenizer
from surgery.checkpoint.load_model import load_config, load_model
from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.remote_code import check_code_trusted
from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.checkpoint.source import CheckpointSource, open_checkpoint, open_converted_checkpoint
from surgery.checkpoint.table import QUANT_METHOD, is_pruned, is_quantized, read_table
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, read_json
from surgery.modeling.joined import record_paths
from surgery.modeling.modules import mark_pruned
from surgery.training.optim import parameter_infos
from surgery.training.sharded_tensors import allocate_meta_tensors, scatter_values

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_trainable(name: str, trust_remote_code: bool = False) -> CheckpointSource:
    """Open a checkpoint that can be trained: a decoder in full precision, converted or not.

    Raises SurgeryError otherwise.
    """
    source = open_converted_checkpoint(name)
    check_code_trusted(source.folder, name, source.config, trust_remote_code)
    method = (source.config.get("quantization_config") or {}).get("quant_method", QUANT_METHOD)
    if method != QUANT_METHOD:
        raise SurgeryError(
            f"{name} is quantized ({method}). Training needs full-precision weights; use the unquantized model."
        )
    if "quantization_config" in source.config and is_quantized(read_table(source.config, name)):
        raise SurgeryError(
            f"{name} stores its linears in few bits, which cannot be trained. Train the checkpoint that `surgery quantize` "
            "read, then quantize the result; or train a PEFT adapter over these linears"
        )
    if source.config.get("is_encoder_decoder"):
        raise SurgeryError(
            f"{name} is an encoder-decoder. Healing needs a decoder-only model, which predicts the next token."
        )
    return source


def load_causal_lm(
    source: CheckpointSource, dtype: torch.dtype, trust_remote_code: bool = False, *, on_meta: bool = False
) -> Any:
    """Load a causal language model on the CPU, or without values on the meta device.

    Raises SurgeryError if the model has no language-model head.
    """
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import PreTrainedModel

    config = load_config(source, trust_remote_code)
    if type(config) not in AutoModelForCausalLM._model_mapping and not config.to_dict().get("auto_map"):
        raise SurgeryError(
            f"{source.name} is a {config.model_type} model, which predicts no next token. Healing needs a causal "
            "language model."
        )
    model = load_model(source, dtype, trust_remote_code, on_meta=on_meta)
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise SurgeryError(
            f"{source.name}: {type(model).__name__} has no language-model head. Healing needs a causal language model."
        )
    return model


def load_student(source: CheckpointSource, trust_remote_code: bool = False, *, on_meta: bool = False) -> Any:
    """Load the student, frozen, in float32: bfloat16 would round away updates of relative size 1e-5.

    Experts become linears, which have the names of the tensors in the files, so that trained values can be written
    back. Linears of pruned MLPs are marked as such. on_meta: as for `load_causal_lm`.
    """
    student = load_causal_lm(source, torch.float32, trust_remote_code, on_meta=on_meta)
    split_experts(student)
    modules = dict(student.named_modules())
    for path in pruned_linears(source):
        if path not in modules:
            raise SurgeryError(
                f"{source.folder / REPORT_NAME} names {path!r} as a linear of a pruned MLP, and {source.name} has no such "
                "module. Is it the report of another model? Remove it"
            )
        mark_pruned(modules[path])
    return student.requires_grad_(False)


def conversion_report(source: CheckpointSource) -> dict[str, Any]:
    """Return the report of the conversion that wrote a checkpoint, {} without one."""
    path = source.folder / REPORT_NAME
    report = read_json(path) if path.is_file() else None
    return report if isinstance(report, dict) else {}


def stock_layers(source: CheckpointSource) -> list[int]:
    """Return the numbers of the layers that a conversion into a stock class made linear, [] without one.

    They are in the report, which may be anyone's: entries that are no numbers of layers count as none.
    """
    stock = conversion_report(source).get("stock")
    layers = stock.get("linear_layers") if isinstance(stock, dict) else None
    return [index for index in layers if type(index) is int] if isinstance(layers, list) else []


def pruned_linears(source: CheckpointSource) -> list[str]:
    """Return the paths of the linears of pruned MLPs, and of the linear that was fitted again before removed layers,
    from the report, which an ordinary checkpoint has too.

    Entries that are not those of a report count as none.
    """
    report = conversion_report(source)
    records, depth = report.get("modules"), report.get("depth")
    paths = []
    for record in records if isinstance(records, list) else ():
        name, structure = (record.get("name"), record.get("structure")) if isinstance(record, dict) else (None, None)
        if isinstance(name, str) and isinstance(structure, dict) and is_pruned(structure):
            paths += record_paths(name)
    # Its layer is below the removed ones, so that its path is as before; structured linears are new anyway.
    refit = depth.get("refit") if isinstance(depth, dict) else None
    return [*paths, *([refit] if isinstance(refit, str) else [])]


def load_teacher(
    name: str, student: Any, tokenizer: Any, settings: Any, device: torch.device, trust_remote_code: bool = False,
    *, is_sharded: bool = False,
) -> Any:  # fmt: skip
    """Load the teacher, frozen, on its device.

    tokenizer: the student's. settings: TeacherConfig of the recipe; where it names no dtype, float32 on the CPU and
    bfloat16 elsewhere. device: used where the settings name none. is_sharded: divide its weights over the processes,
    each of which must call; the first alone reads them. Raises SurgeryError if teacher and student differ in tokenizer
    or vocabulary size, or if the device is not usable.
    """
    source = open_checkpoint(name, trust_remote_code)
    check_same_tokenizer(tokenizer, source, trust_remote_code)
    target_device = torch.device(settings.device) if settings.device else device
    auto = torch.float32 if target_device.type == "cpu" else torch.bfloat16
    is_divided = is_sharded and target_device.type == device.type
    on_meta = is_divided and torch.distributed.get_rank() > 0
    teacher = load_causal_lm(source, DTYPES.get(settings.dtype, auto), trust_remote_code, on_meta=on_meta)
    ours, theirs = (m.config.get_text_config().vocab_size for m in (student, teacher))
    if ours != theirs:
        raise SurgeryError(
            f"Vocabulary sizes differ: teacher {name} has {theirs} tokens, the student {ours}. "
            "The teacher must use the student's tokenizer."
        )
    teacher = teacher.eval().requires_grad_(False)
    try:
        return shard_frozen(teacher, target_device) if is_divided else teacher.to(target_device)
    except (RuntimeError, AssertionError) as error:
        raise SurgeryError(f"teacher.device {target_device} cannot be used: {str(error).splitlines()[0]}") from None


def shard_frozen(model: Any, device: torch.device) -> Any:
    """Divide the weights of a model without gradients over all processes (FSDP2); those of a layer are gathered while it
    runs. Buffers stay whole. All values are those of the first process; the model of another one may be on meta.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    allocate_meta_tensors(model)
    values = {name: p.detach() for name, p in model.named_parameters()}
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in [m for m in model.modules() if type(m).__name__ in layers]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model.to(device)
    scatter_values(model, values)
    return model


def check_same_tokenizer(tokenizer: Any, teacher: CheckpointSource, trust_remote_code: bool = False) -> None:
    """Raise SurgeryError unless one tokenizer's vocabulary, token ids included, contains the other's.

    A teacher folder without a tokenizer is accepted unchecked.
    """
    try:
        theirs = load_tokenizer(teacher.folder, trust_remote_code).get_vocab().items()
    except SurgeryError:
        return
    ours = tokenizer.get_vocab().items()
    if not (ours <= theirs or theirs <= ours):
        raise SurgeryError(
            f"--teacher {teacher.name} has another tokenizer than the student: of {len(ours):,} tokens "
            f"{len(ours & theirs):,} "
            "have the same id. Give the checkpoint that the student was converted from."
        )


def load_source_tokenizer(source: CheckpointSource, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a checkpoint."""
    return load_tokenizer(source.folder, trust_remote_code)


@torch.no_grad()
def share_frozen_tensors(student: nn.Module, teacher: nn.Module, changing: set[str]) -> int:
    """Point the teacher's parameters at the student's storage where values, dtype and device are equal.

    Return the bytes saved.

    changing: names of student parameters that training will change; these are never shared.
    """
    theirs, saved = dict(teacher.named_parameters()), 0
    for name, ours in student.named_parameters():
        other = theirs.get(name)
        if other is None or name in changing or ours.shape != other.shape:
            continue
        if (ours.dtype, ours.device) == (other.dtype, other.device) and torch.equal(ours, other):
            other.data = ours.data
            saved += ours.numel() * ours.element_size()
    return saved


def hold_frozen_in_bfloat16(student: nn.Module, stored: Mapping[str, TensorInfo], changing: set[str]) -> int:
    """Hold weights of linears and embeddings in bfloat16 that training leaves as they are and files have in bfloat16.

    Return the bytes saved. Products under bfloat16 autocast are the same, bit for bit. An embedding still returns
    float32: the residual stream follows it. stored: where the files have each parameter, by its name. changing: names
    of parameters that training will change; they stay in float32, as do vectors, structured cores and mixers.
    """
    saved, embeddings = 0, dict[Tensor, nn.Module]()
    for embedding in student.modules():
        if type(embedding) is nn.Embedding:
            embeddings[embedding.weight] = embedding
    infos = parameter_infos(student)
    for name, parameter in student.named_parameters():
        module, info = embeddings.get(parameter), infos[name]
        is_linear_weight = info.kind == "dense" and info.fans is not None
        if name in changing or not (is_linear_weight or module is not None):
            continue
        if parameter.dtype != torch.float32 or name not in stored or stored[name].dtype != "BF16":
            continue
        parameter.data = parameter.data.to(torch.bfloat16)
        if module is not None:
            module.register_forward_hook(_to_float32)
        saved += parameter.nbytes
    return saved


def _to_float32(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.float()


def linear_roles(source: CheckpointSource, model: Any) -> dict[str, tuple[str, ...]]:
    """Return path -> roles for every linear; a converted linear keeps the roles of the linear that it replaced."""
    converted = (source.config.get("quantization_config") or {}).get("quant_method") == QUANT_METHOD
    layout = find_linears(build_unconverted_model(source) if converted else model)
    return {linear.path: linear.roles for linear in layout.linears if linear.roles}


def check_length(model: Any, length: int) -> None:
    """Raise SurgeryError if `length` (tokens per row) exceeds the model's max_position_embeddings, or the rows that its
    table has for them.
    """
    limit = longest_input(model)
    if limit is not None and length > limit:
        raise SurgeryError(
            f"stages: length must be at most {limit}, max_position_embeddings of {type(model).__name__} (got "
            f"{length}). "
            "Lower it with --set stages.*.length."
        )


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute the activations inside each layer in the backward pass instead of storing them."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def disable_gradient_checkpointing(model: Any) -> None:
    """Store activations again (the inverse of `enable_gradient_checkpointing`)."""
    if hasattr(model, "activation_checkpointing_disable"):
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()
