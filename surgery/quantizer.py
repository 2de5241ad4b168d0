"""What transformers calls while it loads a converted checkpoint. See checkpoint.py."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from surgery.checkpoint import METHOD, names_shims
from surgery.errors import SurgeryError
from surgery.mixers import mixer_config
from surgery.standins import empty_standin
from surgery.structures import StructuredLinear
from surgery.version import __version__

FORMAT = 1


class SurgeryConfig(QuantizationConfigMixin):
    """The table of stand-ins. modules: path -> {"structure": .., its options, in_features, out_features, bias};
    mixers: path of an attention -> {"mixer": .., its options}."""

    def __init__(
        self,
        modules: dict[str, Any] | None = None,
        mixers: dict[str, Any] | None = None,
        format: int = FORMAT,
        surgery_version: str = __version__,
        **_: Any,
    ):
        if format != FORMAT:
            raise SurgeryError(
                f"this checkpoint has table format {format} (written by surgery {surgery_version}); this version reads {FORMAT}: "
                "pip install -U transformer-surgery"
            )
        self.quant_method = METHOD  # type: ignore[assignment]
        self.format, self.surgery_version = format, surgery_version
        self.modules, self.mixers = modules or {}, mixers or {}

    def to_dict(self) -> dict[str, Any]:
        """Without the table of mixers where there are none, as it was written before there were any."""
        return {k: v for k, v in super().to_dict().items() if k != "mixers" or v}


class SurgeryQuantizer(HfQuantizer):
    requires_calibration = False

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def _tables(self) -> tuple[dict[str, Any], dict[str, Any]]:
        config: Any = self.quantization_config
        return config.modules, config.mixers

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        """Stand-ins for the linears of the table and mixers, on meta, in the dtype the model is loaded in."""
        if not self.pre_quantized:
            raise SurgeryError("models are converted with `surgery convert`, not while they load")
        modules = dict(model.named_modules())
        # This module is imported while transformers' models are; attention needs them whole.
        from surgery.attention import swap

        (table, mixers), missing = self._tables(), []
        for path, spec in table.items():
            place = _place(model, path, modules)
            if place is None:
                missing.append(path)
                continue
            model.set_submodule(place, empty_standin(spec))
            _untie(model, place)
        for path, spec in mixers.items():
            place = _place(model, path, modules)
            if place is None:
                missing.append(path)
            else:
                swap(model, place, mixer_config(spec))
        if missing and len(missing) == len(table) + len(mixers):
            raise SurgeryError(
                f"{type(model).__name__} has none of the {len(missing)} linears of the checkpoint's table ({missing[0]}, ..)"
            )

    def postprocess_model(self, model: Any, **_: Any) -> Any:
        """Leave an ordinary model that remembers its table."""
        from surgery.attention import refill

        model.config.quantization_config = self.quantization_config
        model.is_quantized = False
        refill(model)
        for module in model.modules():
            if isinstance(module, StructuredLinear):
                module.refuse_damaged()
        for name in ("hf_quantizer", "quantization_method"):
            model.__dict__.pop(name, None)
        # Shims lie beside the loaded files only; a copy saved from here would point at nothing.
        if names_shims(vars(model.config)):
            del model.config.auto_map
        return model


def _untie(model: Any, path: str) -> None:
    """A stand-in shares no weight, even where the class ties by itself whatever the config says (T5)."""
    weight = f"{path}.weight"
    if weight in (model._tied_weights_keys or {}):  # of this model, not of its class
        model._tied_weights_keys = {k: v for k, v in model._tied_weights_keys.items() if k != weight}
    model.all_tied_weights_keys.pop(weight, None)


def _place(model: Any, path: str, modules: dict[str, Any]) -> str | None:
    """Where the table's path is in this class: as written, with the base model's prefix more or less, or
    renamed since the checkpoint was written."""
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    for candidate in (path, path.removeprefix(prefix), prefix + path):
        if candidate in modules:
            return candidate
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [rule for rule in get_model_conversion_mapping(model) or [] if isinstance(rule, WeightRenaming)]
    state = {f"{name}.weight": True for name in modules}
    renamed = rename_source_key(f"{path}.weight", renamings, [], model.base_model_prefix, state)[0]
    found = renamed.removesuffix(".weight")
    return found if found in modules else None
