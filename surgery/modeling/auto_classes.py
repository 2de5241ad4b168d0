"""Classes named by the `auto_map` of converted checkpoints. They call transformers' Auto class of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgery.checkpoint.table import SHIM_MODULE, SHIM_NAME

AUTO_CLASSES = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForAudioClassification",
    "AutoModelForZeroShotImageClassification",
)


def auto_class(name: str) -> Any:
    """Return transformers' Auto class of that name."""
    import transformers

    return getattr(transformers, name)


class Shim:
    """An Auto class that loads without remote code.

    Importing this module has imported `surgery`, which registers with transformers.
    """

    auto: str

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: the native class is loaded, so there is no class to register."""

    @classmethod
    def from_pretrained(cls, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call from_pretrained of transformers' Auto class."""
        kwargs.pop("_from_auto", None)
        return auto_class(cls.auto).from_pretrained(name, *args, **{**kwargs, "trust_remote_code": False})


_shims = {f"Shim{name}": type(f"Shim{name}", (Shim,), {"auto": name}) for name in ("AutoConfig", *AUTO_CLASSES)}
globals().update(_shims)
__all__ = list(_shims)


SHIM_TEXT = '''"""Opens this checkpoint, whose weights are structured, with the package transformer-surgery."""

try:
    from surgery.modeling.auto_classes import *  # noqa: F403
except ImportError as error:
    raise ImportError("this checkpoint needs `pip install transformer-surgery`") from error
'''


# As written before, and by whom a checkpoint on the Hub may have been made.
SHIM_TEXTS = (SHIM_TEXT, SHIM_TEXT.replace("surgery.modeling.auto_classes", "surgery.shims"))


def write_shims(folder: Path, config: dict[str, Any], model: Any) -> None:
    """Write the shim file and the config's auto_map, so that `trust_remote_code=True` opens the checkpoint without
    `import surgery`.

    A remote-code model keeps its own auto_map, and needs both.
    """
    if config.get("auto_map"):
        return

    serving = [name for name in AUTO_CLASSES if type(model.config) in auto_class(name)._model_mapping]
    config["auto_map"] = {name: f"{SHIM_MODULE}.Shim{name}" for name in ("AutoConfig", *serving)}
    (folder / SHIM_NAME).write_text(SHIM_TEXT, encoding="utf-8")
