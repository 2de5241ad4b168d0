"""Initialize a new model with structured layers by muP, so that one base learning rate serves all widths.

    embeddings                            N(0, embedding_std^2) at every width
    linears, cores of structures          N(0, min(1, out/in) / in), with the fan-in and fan-out of each
    last core of linears that write into  0
    the residual stream, and the head
    norms and biases                      as initialized by the model class
    mixers                                as initialized by the mixer class; factors of bilinear scores N(0, 1 / fan_in)

Sources: Qiu et al. 2024, "Compute Better Spent", section 3.2 and Table 2; Yang et al. 2022, "Tensor Programs V", Table
3, whose output layer has variance 1 / in^2 instead of 0.

low_rank_start is the standard deviation of the first factor V of a low-rank layer U V: "spectral" is sqrt(rank) / in,
as for every core; "unit" is sqrt(1 / in), as in Qiu et al. 2024, appendix E.2. With "unit", gradients do not vanish
with the width where U is 0. The paper also initializes W_Q with 0 and divides scores by the size of a head; here W_Q is
initialized like other linears, and scores keep the scale of the model's class. optim.py sets the matching learning
rates when the recipe has a base_width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from surgery.architectures.linears import ModelLayout, find_linears, is_linear
from surgery.checkpoint.meta_model import MetaModel, bare_model
from surgery.checkpoint.model_classes import model_class
from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.checkpoint.source import CheckpointSource
from surgery.core.errors import SurgeryError
from surgery.modeling.attention import install
from surgery.modeling.joined import JoinedLinear, connect_joined
from surgery.modeling.modules import GuardedLinear, SplitLinear, build_module
from surgery.planning.plan import make_plan
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import LinearTarget, Plan
from surgery.planning.weights import joined_entries, narrowed_entries, slice_name, table_entry
from surgery.structures import StructuredLinear
from surgery.structures.base import MuP
from surgery.structures.call_scope import hold_groups
from surgery.structures.low_rank import LowRankLinear

LowRankStart = Literal["spectral", "unit"]
RESIDUAL_ROLES = ("attention.output", "mlp.down")  # roles whose linears write into the residual stream


def plan_new_model(folder: Path, recipe: ConversionRecipe) -> Plan:
    """Return the plan of a conversion recipe for the model of folder/config.json, which needs no weights."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = f"a new {config['model_type']}"
    if recipe.attention and recipe.attention.hybrid and recipe.attention.hybrid.is_measured:
        raise SurgeryError(
            "attention.hybrid: choose_by: measured needs a trained model, and a new model has no trained weights. Use "
            "choose_by: every, or "
            "layers: [..]."
        )
    state = bare_model(CheckpointSource(name, folder, config, {})).state_dict()
    tensors = {
        key: TensorInfo(key, folder / "none", "F32", tuple(t.shape), 0, 4 * t.numel()) for key, t in state.items()
    }
    return make_plan(MetaModel(CheckpointSource(name, folder, config, tensors)), recipe)


def make_model(
    config: Any, plan: Plan | None, embedding_std: float, seed: int, low_rank_start: LowRankStart = "spectral"
) -> Any:
    """Return an initialized causal language model in float32, whose save_pretrained writes the format of `convert`.

    plan: structures and mixers of its layers, None for dense layers. embedding_std: standard deviation of the
    embeddings. low_rank_start: see the module. The same seed gives the same weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)._from_config(config, dtype=torch.float32)
        layout = find_linears(model)
        if plan is not None:
            replace_linears(model, plan)
        initialize_weights(model, layout, embedding_std)
        if low_rank_start == "unit":
            init_unit_low_rank(model)
        if plan is not None and plan.attention_targets:
            install_mixers(model, plan)
        if plan is not None and plan.native_targets:
            # Imported with models that have level weights.
            from surgery.modeling.native import install_native

            install_native(model, {target.path: target.config for target in plan.native_targets.values()})
    return model


def replace_linears(model: Any, plan: Plan) -> None:
    """Replace the planned linears by uninitialized structured layers, in place, and list them in the model's config."""
    from surgery.modeling.quantization_config import SurgeryConfig

    if shared := next((path for path, targets in plan.targets.items() if targets[0].basis), ""):
        raise SurgeryError(
            f"{shared}: share: experts fits bases to the weights of a checkpoint, and a model that is trained from "
            "scratch has none. Set "
            "share: none"
        )
    table = {path: entry for targets in plan.targets.values() for path, entry in _module_entries(targets)}
    built = {path: build_module(entry, device="cpu", dtype=torch.float32) for path, entry in table.items()}
    connect_joined(built)
    for path, module in built.items():
        model.set_submodule(path, module)
    hold_groups(model)
    if table:
        model.config.quantization_config = SurgeryConfig(modules=table)


def _module_entries(targets: tuple[LinearTarget, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, entry of the quantization_config) of the linear, of those that are joined, or of those of a pruned
    MLP; none if it stays dense.
    """
    linear, specs = targets[0].linear, [table_entry(target, target.preview) for target in targets]
    if all(target.preview is None for target in targets):
        return
    if targets[0].joined or targets[0].neurons:
        preview: Any = targets[0].preview
        entries = (narrowed_entries if targets[0].neurons else joined_entries)(targets[0], preview)
        for path, entry in entries.items():
            yield path, {**entry, **({"transposed": True} if linear.transposed else {})}
        return
    if targets[0].part is None:
        entry = specs[0]
    else:
        names = [slice_name(target.part.role) for target in targets if target.part]
        entry = {
            "structure": "split",
            "parts": dict(zip(names, specs)),
            "order": names,
            "heads": targets[0].part.heads,
        }
    yield linear.path, {**entry, **({"transposed": True} if linear.transposed else {})}


def install_mixers(model: Any, plan: Plan) -> None:
    """Replace the planned attention modules by mixers, in place, and set the tensors that the plan determines."""
    install(
        model, {attention_target.path: attention_target.config for attention_target in plan.attention_targets.values()}
    )
    for attention_target in plan.attention_targets.values():
        state = model.get_submodule(attention_target.path).mixer.state_dict()
        for name, value in attention_target.fixed.items():
            state[name].copy_(torch.tensor(value))


# -- initialisation --------------------------------------------------------------------------------------
@torch.no_grad()
def initialize_weights(model: Any, layout: ModelLayout, embedding_std: float) -> None:
    """Initialize embeddings and linears in place. layout: the layout of the model before its linears were replaced."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=embedding_std)
    for linear in layout.linears:
        module = model.get_submodule(linear.path)
        (zero_output if linear.path == layout.head or set(RESIDUAL_ROLES) & set(linear.roles) else initialize_module)(
            module
        )


def initialize_module(module: Any) -> None:
    """Initialize a linear from N(0, min(1, out/in) / in), a structured one with the fans of its cores; biases become
    0.
    """
    if isinstance(module, SplitLinear):
        for linear in module.parts.values():
            initialize_module(linear)
    elif isinstance(module, JoinedLinear):  # the first of a group initializes the matrix
        for matrix in module.children():
            initialize_module(matrix)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, StructuredLinear):
        module.reset_parameters()
    else:
        out, in_ = _weight_shape(module)
        nn.init.normal_(module.weight, std=MuP(in_, out).std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def zero_output(module: Any) -> None:
    """Initialize a linear so that its output is 0 and its gradient is not: only the last core is 0.

    Pivoted low rank and sums of structures have several cores that are last (`output_cores`).
    """
    initialize_module(module)
    if isinstance(module, SplitLinear):
        for linear in module.parts.values():
            zero_output(linear)
        return
    for name in module.output_cores() if isinstance(module, StructuredLinear) else ["weight"]:
        nn.init.zeros_(module.get_parameter(name))


@torch.no_grad()
def init_unit_low_rank(model: Any) -> None:
    """Initialize V of every low-rank layer from N(0, 1 / in), the variance of the dense layer."""
    for module in model.modules():
        if isinstance(module, LowRankLinear):
            nn.init.normal_(module.right, std=module.in_features**-0.5)


def _weight_shape(module: Any) -> tuple[int, int]:
    """Return (out, in)."""
    if isinstance(module, GuardedLinear) or not is_linear(module):
        raise TypeError(type(module).__name__)
    out, in_ = module.weight.shape
    return (out, in_) if isinstance(module, nn.Linear) else (in_, out)  # Conv1D keeps (in, out)


def check_untied(config: Any) -> None:
    """Raise SurgeryError if the output layer shares its weights with the embeddings."""
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        raise SurgeryError(
            "model.tie_word_embeddings must be false: muP initializes the output layer with 0 and scales its learning "
            "rate by "
            "1 / width, which the embeddings do not share. Set tie_word_embeddings: false."
        )
