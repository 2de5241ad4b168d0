"""The config class that transformers builds from a checkpoint's `quantization_config` entry."""

from __future__ import annotations

from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from surgery.checkpoint.table import QUANT_METHOD
from surgery.core.errors import SurgeryError
from surgery.core.project import install_command
from surgery.core.version import __version__
from surgery.mixers.renamed import renew_mixer

FORMAT = 1


class SurgeryConfig(QuantizationConfigMixin):
    """The table of replaced modules.

    modules: path -> {"structure": .., its options, in_features, out_features, bias}. mixers: path of an attention
    module -> {"mixer": .., its options}. unused: source tensors that the model's class does not use, kept unchanged.
    """

    def __init__(
        self,
        modules: dict[str, Any] | None = None,
        mixers: dict[str, Any] | None = None,
        unused: list[str] | None = None,
        format: int = FORMAT,
        surgery_version: str = __version__,
        **_: Any,
    ):
        if format != FORMAT:
            raise SurgeryError(
                f"this checkpoint has table format {format} (written by surgery {surgery_version}); this version reads "
                f"{FORMAT}: "
                f"install a newer one ({install_command()})"
            )
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.format, self.surgery_version = format, surgery_version
        self.modules, self.mixers, self.unused = modules or {}, mixers or {}, unused or []
        if isinstance(self.mixers, dict):
            self.mixers = {path: _renewed(entry) for path, entry in self.mixers.items()}
        if isinstance(self.modules, dict):
            self.modules = {path: _with_order(entry) for path, entry in self.modules.items()}

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute, as transformers reads it from a config that is a dict."""
        return getattr(self, key, default)

    def to_dict(self) -> dict[str, Any]:
        """Return the table without empty `mixers` and `unused`, which older versions did not write."""
        return {k: v for k, v in super().to_dict().items() if k not in ("mixers", "unused") or v}


def _renewed(entry: Any) -> Any:
    """Return a mixer's entry with today's names of its options."""
    return renew_mixer(entry) if isinstance(entry, dict) else entry


def _with_order(entry: Any) -> Any:
    """Return a table entry with the order of its parts as a list, which older versions did not write.

    transformers sorts the keys of config.json on saving, so the order of the keys would be lost.
    """
    if isinstance(entry, dict) and isinstance(entry.get("parts"), dict) and "order" not in entry:
        return {**entry, "order": list(entry["parts"])}
    return entry
