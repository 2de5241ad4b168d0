"""Checks for Python code named by a checkpoint's configs: `auto_map` in any config, and attention kernels on the Hub.

Such code is refused before transformers opens the folder, because transformers would ask for permission on the
terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.core.files import read_json

MAIN = "config.json"
SHIM = "surgery_shim.Shim"  # the auto_map entry of a converted checkpoint (modeling.auto_classes.write_shims)
# Where transformers looks for the classes of tokenizers and processors, beside config.json.
CONFIGS = (
    *("tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("audio_tokenizer_config.json", "generation_config.json"),
)
# Auto class -> the key that names the library's own class.
CLASS_KEYS = {
    "AutoTokenizer": "tokenizer_class",
    "AutoProcessor": "processor_class",
    "AutoImageProcessor": "image_processor_type",
    "AutoFeatureExtractor": "feature_extractor_type",
    "AutoVideoProcessor": "video_processor_type",
}
# Keys of config.json that choose an implementation: "org/name", "org/name@revision:function", "paged|org/name".
IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal)?")
MAX_CONFIG = 2**26  # bytes; the largest are tokenizer_config.json files


def iter_tables(data: Any) -> Iterator[dict[str, Any]]:
    """Yield a config's dictionary and every dictionary nested in it."""
    values = [data]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield value
        if isinstance(value, (dict, list)):
            values += value.values() if isinstance(value, dict) else value


def named_code(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `auto_map` by config file, for files that name code of the checkpoint.

    The shims that surgery writes do not count: they only import surgery, and run only with the user's own
    `trust_remote_code=True`.
    """
    named: dict[str, Any] = {}
    for table in iter_tables(config):
        if table.get("auto_map") and not (table is config and _only_shims(table["auto_map"])):
            named[MAIN] = table["auto_map"]
    for name in CONFIGS:
        for table in iter_tables(_table(folder / name)):
            if table.get("auto_map"):
                named[name] = table["auto_map"]
    return named


def _only_shims(auto_map: Any) -> bool:
    return isinstance(auto_map, dict) and all(str(at).startswith(SHIM) for at in auto_map.values())


def _table(path: Path) -> Any:
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_CONFIG:
        raise SurgeryError(f"{path} has {path.stat().st_size:,} bytes; a config has under {MAX_CONFIG:,}")
    return read_json(path)


def check_code_trusted(folder: Path, name: str, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Raise SurgeryError if the model, tokenizer or processor is code of the checkpoint and `trust_remote_code` is
    off.
    """
    if trust_remote_code:
        return
    refused = [MAIN] if MAIN in named_code(folder, config) else []
    refused += [name for name in CONFIGS if _needs_code(_table(folder / name), config)]
    if refused:
        file, auto_map = refused[0], named_code(folder, config)[refused[0]]
        raise SurgeryError(
            f"{name} needs code from its own repository ({file}: auto_map {str(auto_map)[:100]}); read that code, "
            "then pass --trust-remote-code"
        )


def _needs_code(data: Any, config: dict[str, Any]) -> bool:
    """Return whether an auto_map in a tokenizer or processor config names a class that transformers does not have."""
    for table in iter_tables(data):
        auto_map = table.get("auto_map")
        if not auto_map:
            continue
        if isinstance(auto_map, list):  # old tokenizer configs: [slow, fast]
            auto_map = {"AutoTokenizer": auto_map}
        if not isinstance(auto_map, dict) or not all(_is_own(auto, table, config) for auto in auto_map):
            return True
    return False


def _is_own(auto: str, table: dict[str, Any], config: dict[str, Any]) -> bool:
    """Return whether transformers has the class named by this config (for an unnamed tokenizer: one for its model
    type).
    """
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    named = table.get(CLASS_KEYS.get(auto, ""))
    if auto == "AutoTokenizer" and named is None:
        kind = config.get("model_type")
        return isinstance(kind, str) and TOKENIZER_MAPPING_NAMES.get(kind) is not None
    if not isinstance(named, str) or not named.isidentifier():
        return False
    if auto == "AutoTokenizer":
        return any(tokenizer_class_from_name(class_name) is not None for class_name in (named, f"{named}Fast"))
    return named in dir(transformers)


def check_no_outside_code(config: dict[str, Any], path: Path) -> None:
    """Raise SurgeryError if a config makes transformers download code, or read another config instead of this one."""
    for table in iter_tables(config):
        for key, value in table.items():
            if not IMPLEMENTATIONS.fullmatch(str(key)):
                continue
            for text in _strings(value):
                if "/" in text:
                    raise SurgeryError(
                        f"{path}: {key} names {text[:100]!r}, code to be downloaded from the Hub; surgery runs only "
                        f"transformers' own attention. Remove {key} from the file, or set it to sdpa or eager"
                    )
    if config.get("configuration_files"):
        raise SurgeryError(
            f"{path}: configuration_files names other configs that transformers would read instead of this one. Save "
            "the "
            "intended config as config.json, without that key"
        )


def _strings(value: Any) -> Iterator[str]:
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            values += value.values() if isinstance(value, dict) else value
