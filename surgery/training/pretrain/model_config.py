"""Config of a new model: the keys of a transformers config class, taken from a recipe or from an existing model's
config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surgery.checkpoint.source import read_config
from surgery.core.config import parse_float
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.hub_errors import explain_hub_error
from surgery.training.pretrain.initialize import check_untied

# Keys of an existing model's config that describe its weights or tokenizer, not its architecture.
EXCLUDED_KEYS = (
    *("architectures", "vocab_size", "tie_word_embeddings", "dtype", "torch_dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "use_cache", "_name_or_path"),
)


def load_config_keys(name: str) -> dict[str, Any]:
    """Return the architecture keys of an existing config, without those of its weights and tokenizer.

    name: a config.json, a folder with one, or a Hub id.
    """
    from transformers import CONFIG_MAPPING

    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        data = read_config(path.parent, name) if path.name == "config.json" else json.loads(path.read_text("utf-8"))
    else:
        data = read_config(path if path.exists() else download_config(name), name)
    if data.get("auto_map"):
        raise SurgeryError(
            f"--model {name} needs remote code (auto_map), which is not executed. Name a model whose class is part of "
            "transformers."
        )
    kind = str(data.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise SurgeryError(f"--model {name}: transformers has no model_type {kind!r}{suggestion(kind, CONFIG_MAPPING)}")
    plain = CONFIG_MAPPING[kind].from_dict({k: v for k, v in data.items() if k not in EXCLUDED_KEYS}).to_diff_dict()
    return {**{k: v for k, v in plain.items() if k not in EXCLUDED_KEYS}, "model_type": kind}


def download_config(name: str) -> Path:
    """Download config.json of a Hub id and return its folder."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError) as error:
        reason = explain_hub_error(error, name, "give a local config.json") or " ".join(str(error).split())[:200]
        raise SurgeryError(
            f"--model {name} must be a config.json, a folder with one, or a reachable Hub id ({reason})"
        ) from None


def make_config(keys: dict[str, Any], tokenizer: Any) -> Any:
    """Return the config of a causal language model with the tokenizer's vocabulary size and special tokens.

    keys: model_type and keys of its config class. Raises SurgeryError for a key that the class does not have.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

    kind = keys["model_type"]
    if kind not in CONFIG_MAPPING:
        raise SurgeryError(f"model.model_type: transformers has no {kind!r}{suggestion(kind, CONFIG_MAPPING)}")
    family: Any = CONFIG_MAPPING[kind]
    causal: Any = AutoModelForCausalLM._model_mapping
    if family not in causal or family in AutoModelForMaskedLM._model_mapping:
        raise SurgeryError(
            f"model.model_type {kind!r} is not a causal language model. Use for example gpt2, llama or qwen3."
        )
    known = {*family().to_dict(), *(getattr(family, "attribute_map", None) or {})}
    for key in keys:
        if key not in known:
            raise SurgeryError(f"model: {kind} has no key {key!r}{suggestion(key, known)}")
    special_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    options = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, **special_ids, **keys}
    try:
        config = family(**{k: parse_float(v) for k, v in options.items() if k != "model_type"})
    except Exception as error:  # the config classes raise exceptions of many types
        raise SurgeryError(f"model: transformers rejects this config ({' '.join(str(error).split())[:200]})") from None
    config.architectures = [causal[family].__name__]
    check_untied(config)
    if config.get_text_config().vocab_size < len(tokenizer):
        raise SurgeryError(
            f"model.vocab_size must be at least {len(tokenizer)}, the tokenizer's vocabulary size (got "
            f"{config.get_text_config().vocab_size})."
        )
    return config
