"""A native Hugging Face checkpoint: the table of stand-ins is the config's `quantization_config`, and a
registered quantizer puts them in place on the meta device, before transformers loads the weights.

After loading nothing of a quantised model is left but the table, so that half(), float(), Trainer,
save_pretrained and deepcopy treat the model as the ordinary one it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgery.errors import SurgeryError
from surgery.hooks import after_import

METHOD = "surgery"
SHIM_MODULE = "surgery_shim"
SHIM = f"{SHIM_MODULE}.py"
SHIM_TEXT = '''"""Opens this checkpoint, whose weights are structured, with the package transformer-surgery."""

try:
    from surgery.shims import *  # noqa: F403
except ImportError as error:
    raise ImportError("this checkpoint needs `pip install transformer-surgery`") from error
'''


def register() -> None:
    """Make transformers and peft know us, now or when they are imported."""
    after_import("transformers.quantizers.auto", _register_quantizer)
    after_import("peft.tuners.lora.model", _register_lora)


def _register_lora() -> None:
    from surgery.lora import register_lora

    register_lora()


def _register_quantizer() -> None:
    import transformers.quantizers.auto as auto

    if METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    from surgery.quantizer import SurgeryConfig, SurgeryQuantizer

    auto.register_quantization_config(METHOD)(SurgeryConfig)
    auto.register_quantizer(METHOD)(SurgeryQuantizer)


def quantization_table(
    table: dict[str, dict[str, Any]], mixers: dict[str, dict[str, Any]], unused: list[str]
) -> dict[str, Any]:
    """The config's entry: what stands at which path, and the tensors that the model's class does not use."""
    from surgery.version import __version__

    told = {"quant_method": METHOD, "format": 1, "surgery_version": __version__, "modules": table}
    return {**told, **({"mixers": mixers} if mixers else {}), **({"unused": unused} if unused else {})}


def table_of(config: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Path -> entry of a converted checkpoint's config.json; SurgeryError where there is none."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        raise SurgeryError(f"{name} is not a converted checkpoint (its config.json has no surgery table)")
    modules = quantization.get("modules")
    if not isinstance(modules, dict) or not all(isinstance(entry, dict) for entry in modules.values()):
        raise SurgeryError(f"{name}: the surgery table in config.json is damaged")
    return modules


def mixers_of(config: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Path of an attention -> its mixer's entry, of a converted checkpoint's config.json; {} where there are none."""
    table_of(config, name)
    mixers = config["quantization_config"].get("mixers", {})
    if not isinstance(mixers, dict) or not all(isinstance(entry, dict) for entry in mixers.values()):
        raise SurgeryError(f"{name}: the surgery table in config.json is damaged")
    return mixers


def write_shims(folder: Path, config: dict[str, Any], model: Any) -> None:
    """Let `trust_remote_code=True` open the checkpoint without `import surgery`; adds to config. A model of
    remote code keeps its own: it wants both."""
    if config.get("auto_map"):
        return
    from surgery.shims import AUTO_CLASSES, auto_class

    serving = [name for name in AUTO_CLASSES if type(model.config) in auto_class(name)._model_mapping]
    config["auto_map"] = {name: f"{SHIM_MODULE}.Shim{name}" for name in ("AutoConfig", *serving)}
    (folder / SHIM).write_text(SHIM_TEXT, encoding="utf-8")


def names_shims(config: dict[str, Any]) -> bool:
    """Whether the config's auto_map is the one that write_shims writes."""
    return SHIM_MODULE in str(config.get("auto_map", ""))
