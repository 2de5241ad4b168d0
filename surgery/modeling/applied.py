"""Models converted in memory by `surgery.apply`: `save_pretrained` writes the folder that `surgery convert` writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from surgery.checkpoint.source import CheckpointSource, read_config
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, follow_umask, write_json
from surgery.modeling.attention import MixerModelMixin, mixin_class, reduce_mixin
from surgery.modeling.auto_classes import write_shims
from surgery.modeling.converted_head import ConvertedModelMixin
from surgery.modeling.quantization_config import SurgeryConfig


class LoadedModelMixin(ConvertedModelMixin):
    """Mixin of a model class whose instance was loaded with a converted head, and without mixers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_mixin(self, super().__reduce_ex__(protocol))


class AppliedModelMixin(ConvertedModelMixin):
    """Mixin of a model class whose instance was converted in memory.

    surgery_report: the report of the conversion. surgery_companions: (the tokenizer or None, the folder of the original
    checkpoint or None), whose files are saved beside the weights.
    """

    surgery_report: dict[str, Any]
    surgery_companions: tuple[Any, Path | None] = (None, None)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> Any:
        """Save the model as transformers does, and beside it the report, the shim, and the tokenizer or the original's
        files.

        Args:
            save_directory: folder to write to.
            is_main_process: whether this process writes.
            kwargs: as in PreTrainedModel.save_pretrained, except push_to_hub=True.
        """
        if kwargs.get("push_to_hub"):
            raise SurgeryError(
                "save_pretrained(push_to_hub=True) would upload the weights without the report and the model card. "
                "Save the model, "
                "then surgery.push(folder, 'user/name')"
            )
        adapter = bool(getattr(self, "_hf_peft_config_loaded", False))
        config: Any = self.config  # type: ignore[attr-defined]
        if adapter or not is_main_process:
            return super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)  # type: ignore[misc]
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        before = vars(config).get("auto_map")
        if getattr(config, "quantization_config", None) is not None:
            shims = {"auto_map": before}
            write_shims(folder, shims, self)
            config.auto_map = shims["auto_map"]
        try:
            saved = super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)  # type: ignore[misc]
        finally:
            if before is None and hasattr(config, "auto_map"):
                del config.auto_map
        follow_umask(*folder.glob("*.safetensors"))
        _write_companions(folder, *self.surgery_companions)
        if getattr(self, "surgery_report", None) is not None:
            beside = CheckpointSource(str(folder), folder, read_config(folder, str(folder)), {}).companions()
            write_json(folder / REPORT_NAME, {**self.surgery_report, "companions": [p.as_posix() for p in beside]})
        return saved

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_mixin(self, super().__reduce_ex__(protocol))


class AppliedMixerModelMixin(AppliedModelMixin, MixerModelMixin):
    """AppliedModelMixin of a model that contains mixers."""


def set_applied_class(model: Any, has_mixers: bool) -> None:
    """Give the instance's class the mixin. The class of other instances stays unchanged."""
    base: Any = type(model)
    model.__class__ = mixin_class(base, AppliedMixerModelMixin if has_mixers else AppliedModelMixin)


def remove_table(model: Any, folded: dict[str, Any]) -> None:
    """Remove the linears from the model's table, and the report. folded: entries that stay, beside the mixers.

    Without mixers the table is removed, and the model has the library's class again.
    """
    config = model.config
    for name in ("surgery_report", "surgery_companions"):
        vars(model).pop(name, None)
    if config.quantization_config.mixers:
        config.quantization_config = SurgeryConfig(folded, config.quantization_config.mixers)
        return
    del config.quantization_config
    if isinstance(model, ConvertedModelMixin):
        model.__class__ = type(model).__bases__[1]


def _write_companions(folder: Path, tokenizer: Any, original: Path | None) -> None:
    """Save the tokenizer, then copy files of the original checkpoint's folder that are not there yet (license,
    processor).
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if original is None or original.resolve() == folder.resolve() or not (original / "config.json").is_file():
        return
    source = CheckpointSource(str(original), original, read_config(original, str(original)), {})
    for path in source.companions():
        if not (folder / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original / path, folder / path)


def original_folder(model: Any) -> Path | None:
    """Return the local folder that a model was loaded from, in the cache for a Hub id; None if it was not loaded or
    moved.
    """
    name = str(getattr(model.config, "name_or_path", "") or "")
    if not name:
        return None
    if (Path(name) / "config.json").is_file():
        return Path(name).resolve()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(model.config, "_commit_hash", None))
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None
