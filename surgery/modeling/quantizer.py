"""The quantizer that transformers calls while it loads a converted checkpoint. See surgery/modeling/register.py."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers.quantizers.base import HfQuantizer

from surgery.architectures.expert_layout import is_merge_rule
from surgery.architectures.experts import has_split_experts, merged_experts, split_experts
from surgery.checkpoint.safetensors_io import CONVOLUTION_PART, DTYPES, TensorInfo, read_header
from surgery.checkpoint.table import QUANT_METHOD, has_shims, is_pruned
from surgery.checkpoint.tensor_names import check_tensors, find_model_class, unused_tensors
from surgery.core.errors import SurgeryError
from surgery.mixers import MixerConfig, mixer_config
from surgery.modeling.converted_head import ConvertedModelMixin, converted_head
from surgery.modeling.joined import connect_joined
from surgery.modeling.modules import (
    DAMAGED_TABLE,
    build_module,
    connect_bases,
    fewer_features,
    is_joined,
    shares_basis,
)
from surgery.modeling.quantization_config import SurgeryConfig
from surgery.structures import StructuredLinear
from surgery.structures.call_scope import hold_groups
from surgery.structures.quantized import DAMAGED, QuantizedLinear


class SurgeryQuantizer(HfQuantizer):
    """Replaces modules on the meta device before transformers loads the weights."""

    requires_calibration = False
    has_split_experts = False  # whether the model that is being loaded has RoutedExperts
    dtypes: Mapping[str, torch.dtype] = MappingProxyType(
        {}
    )  # of the floating tensors of the model that is being loaded

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return True: save_pretrained works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: always."""
        return True

    def _tables(self) -> tuple[dict[str, Any], dict[str, Any]]:
        config: Any = self.quantization_config
        return config.modules, config.mixers

    def preprocess_model(self, model: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        """Replace modules on the meta device, and note the dtype in which each tensor is to be loaded."""
        super().preprocess_model(model, dtype=dtype, **kwargs)
        self.dtypes = _dtypes_to_load(model, dtype)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        """Put replacement linears and mixers into the model, on meta, in its dtype.

        The files must hold exactly the tensors of the class that the checkpoint was written from. A model of another
        class may lack some of them, and may have a head of its own.
        """
        if not self.pre_quantized:
            raise SurgeryError("models are converted with `surgery convert`, not on loading")
        name, written = model.config.name_or_path or "the checkpoint", _written_as(model)
        infos = {} if checkpoint_files is None else _tensors_in(checkpoint_files)
        stored = list(infos)
        if any(name.endswith(CONVOLUTION_PART) for name in stored):
            from surgery.checkpoint.joined_convolutions import joined_convolutions

            for whole, parts in joined_convolutions(model.config.to_dict(), stored).items():
                stored = [whole, *(tensor for tensor in stored if tensor not in parts)]
        for one in (model,) if written is None or written is model else (model, written):
            split_named_experts(one, stored)
        if written is None:
            replace_modules(model, *self._tables(), strict=False)
            _check_quantized_dtypes(model, infos)
            self.has_split_experts = has_split_experts(model)
            return
        replace_modules(written, *self._tables())
        _check_quantized_dtypes(written, infos)
        if checkpoint_files is not None:
            check_tensors(written, stored, name, unused_tensors(self.quantization_config))
        if written is not model:
            replace_modules(model, *self._tables(), strict=False)
        self.has_split_experts = has_split_experts(model)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Return transformers' conversion rules without those that would merge the tensors of split experts.

        model: the model to be loaded; transformers before 5.20 does not pass it.
        """
        split = self.has_split_experts if model is None else has_split_experts(model)
        return [rule for rule in weight_conversions if not (split and is_merge_rule(rule))]

    def postprocess_model(self, model: Any, **_: Any) -> Any:
        """Make the loaded model an ordinary one that keeps only its table: the entries of the modules that it has.

        A model of another class than the checkpoint's lacks some, such as a converted language model's head, and is
        saved without them.
        """
        from surgery.modeling.attention import restore_buffers

        config, find = copy.copy(self.quantization_config), ModuleFinder(model)
        for name in ("modules", "mixers"):
            setattr(config, name, {path: entry for path, entry in getattr(config, name).items() if find(path)})
        model.config.quantization_config = config
        model.is_quantized = False
        _cast(model, self.dtypes)
        restore_buffers(model)
        for module in model.modules():
            if isinstance(module, (StructuredLinear, QuantizedLinear)):
                module.check_loaded()
        for name in ("hf_quantizer", "quantization_method"):
            model.__dict__.pop(name, None)
        # Shims exist only beside the loaded files; in a saved copy auto_map would name a missing file.
        if has_shims(vars(model.config)):
            del model.config.auto_map
        return model


def _dtypes_to_load(model: Any, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtype of each floating tensor of a model on meta that is loaded with `dtype`: that of the class's
    exceptions, else its own.
    """
    exceptions = model._get_dtype_plan(dtype)  # keys are regular expressions in which * stands for any text
    return {
        name: next((d for key, d in exceptions.items() if re.search(key.replace("*", ".*"), name)), tensor.dtype)
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def _cast(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast the loaded tensors that have another dtype, in place.

    transformers before 5.21 leaves the tensors of a quantized model that it renames or merges on loading in the dtype
    of the file. Offloaded tensors are on meta here; accelerate casts each one to the dtype of its tensor on meta.
    """
    for name, tensor in model.state_dict(keep_vars=True).items():
        dtype = dtypes.get(name, tensor.dtype)
        if tensor.dtype != dtype and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def replace_modules(model: Any, table: dict[str, Any], mixers: dict[str, Any], strict: bool = True) -> None:
    """Replace linears and attention modules in place, by the entries of the table.

    strict: raise SurgeryError if the model lacks any of the paths; otherwise only if it lacks all of them.
    """
    # Imported here because this module loads during the import of transformers' models, which attention needs complete.
    from surgery.modeling.applied import LoadedModelMixin
    from surgery.modeling.attention import mixin_class

    split_named_experts(model, table)
    find, missing, taken, sharing = ModuleFinder(model), 0, set(), []
    joined: dict[str, Any] = {}
    for path, spec in [*table.items(), *mixers.items()]:
        module_path = find(path)
        if module_path is None:
            missing += 1
            if strict or missing == len(table) + len(mixers):
                raise SurgeryError(
                    f"{DAMAGED_TABLE}: {type(model).__name__} has no module {path!r}"
                    if strict
                    else f"{type(model).__name__} has none of the {missing} linears of the checkpoint's table ({path}, ..)"
                )
            continue
        if module_path in taken:
            raise SurgeryError(f"{DAMAGED_TABLE}: two entries replace {module_path!r}")
        taken.add(module_path)
        if path in table:
            replacement = build_module(spec)
            _check_sizes(model.get_submodule(module_path), replacement, module_path, spec)
            model.set_submodule(module_path, replacement)
            untie(model, module_path)
            sharing += [module_path] if shares_basis(spec) else []
            joined |= {module_path: replacement} if is_joined(spec) else {}
        else:
            put_mixer(model, module_path, mixer_config(spec))
    connect_bases(model, sharing)
    connect_joined(joined)
    hold_groups(model)
    if converted_head(model) is not None and not isinstance(model, ConvertedModelMixin):
        base: Any = type(model)
        model.__class__ = mixin_class(base, LoadedModelMixin)


def put_mixer(model: Any, path: str, config: MixerConfig) -> None:
    """Put a mixer with this config into the module at `path`: in place of its softmax attention, or as level weights of
    a native linear layer."""
    # Imported here because this module loads during the import of transformers' models, which attention needs complete.
    if config.replaces_attention:
        from surgery.modeling.attention import replace_attention

        replace_attention(model, path, config)
    else:
        from surgery.modeling.native import add_level_weights

        add_level_weights(model, path, config)  # type: ignore[arg-type]


def split_named_experts(model: Any, paths: Iterable[str]) -> None:
    """Split the experts of a model into linears if paths, of modules or of stored tensors, name a linear of an
    expert.
    """
    names = "|".join({re.escape(path.rpartition(".")[2]) for path, _ in merged_experts(model)})
    if names and any(re.search(rf"(^|\.)({names})\.\d+\.", path) for path in paths):
        split_experts(model)


def _check_sizes(linear: Any, replacement: Any, path: str, spec: dict[str, Any]) -> None:
    shape = list(getattr(linear, "weight", torch.empty(0)).shape)
    if is_pruned(spec):
        in_, out = spec["in_features"], spec["out_features"]
        fits = len(shape) == 2 and fewer_features(spec, *(shape if spec.get("transposed") else reversed(shape)))
    else:
        in_, out = replacement.in_features, replacement.out_features
        fits = sorted(shape) == sorted((in_, out))
    if not fits:
        here = f"a weight of shape {shape}" if hasattr(linear, "weight") else "no linear"
        raise SurgeryError(
            f"{DAMAGED_TABLE}: its entry for {path!r} maps {in_} features to {out}, where the model has {here}"
        )


def _written_as(model: Any) -> Any:
    """Return a model of the class that the checkpoint was written from: the model itself if it has that class, else one
    on meta.

    Returns None if a remote-code class opens a checkpoint written by another class.
    """
    cls = find_model_class(model.config)
    if cls is not None and cls.config_class is not None and isinstance(model.config, cls.config_class):
        if type(model).__name__ == cls.__name__:
            return model
        with torch.device("meta"):
            return cls(copy.deepcopy(model.config))
    is_of_transformers = type(model).__module__.startswith("transformers.")
    return model if is_of_transformers or type(model).__name__ in (model.config.architectures or ()) else None


def _check_quantized_dtypes(model: Any, stored: Mapping[str, TensorInfo]) -> None:
    """Raise SurgeryError for a linear in 8 or 4 bits whose values or scales have another dtype in the files than its
    table says: loading would cast the values, which are then other numbers.
    """
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        for core in module.shapes:
            values, scale = stored.get(f"{path}.{core}"), stored.get(f"{path}.{core}_scale")
            if values is None or scale is None:  # named differently in this class; `check_loaded` sees the values
                continue
            dtypes = (DTYPES.get(info.dtype, torch.bool) for info in (values, scale))
            if wrong := module.wrong_dtype(*dtypes):
                raise SurgeryError(f"{path}: {core} {wrong}. {DAMAGED}")


def _tensors_in(files: list[str]) -> dict[str, TensorInfo]:
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise SurgeryError(
                f"{file} holds pickled weights, which can run code when opened; surgery reads safetensors only"
            )
    return {name: info for file in files for name, info in read_header(Path(file)).items()}


def untie(model: Any, path: str) -> None:
    """Untie a replaced module, also where the class ties weights whatever the config says (T5)."""
    weight = f"{path}.weight"
    if weight in (model._tied_weights_keys or {}):  # set on the instance; the class stays unchanged
        model._tied_weights_keys = {k: v for k, v in model._tied_weights_keys.items() if k != weight}
    model.all_tied_weights_keys.pop(weight, None)


class ModuleFinder:
    """Callable that returns the path in a model of a module that the table names, or None.

    The path may be the same, differ by the base model's prefix, or follow from transformers' renaming rules.
    """

    def __init__(self, model: Any):
        self.model, self.modules = model, {name for name, _ in model.named_modules()}
        self.rules: tuple[list[Any], dict[str, bool]] | None = None

    def __call__(self, path: str) -> str | None:
        """Return the module's path in the model, or None."""
        prefix = f"{self.model.base_model_prefix}." if self.model.base_model_prefix else ""
        for candidate in (path, path.removeprefix(prefix), prefix + path):
            if candidate in self.modules:
                return candidate
        from transformers.core_model_loading import rename_source_key

        if self.rules is None:
            self.rules = self._rules()
        renamings, state = self.rules
        renamed = rename_source_key(f"{path}.weight", renamings, [], self.model.base_model_prefix, state)[0]
        base = renamed.removesuffix(".weight")
        return base if base in self.modules else None

    def _rules(self) -> tuple[list[Any], dict[str, bool]]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        renamings = [r for r in get_model_conversion_mapping(self.model) or [] if isinstance(r, WeightRenaming)]
        return renamings, {f"{name}.weight": True for name in self.modules}


def register_quantizer() -> None:
    """Make transformers' `from_pretrained` use this quantizer. Calling it again does nothing."""
    import transformers.quantizers.auto as auto

    if QUANT_METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(QUANT_METHOD)(SurgeryConfig)
        auto.register_quantizer(QUANT_METHOD)(SurgeryQuantizer)


register_quantizer()
