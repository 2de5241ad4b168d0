"""The config of a model that is yet to be made: keys of its family's config in transformers, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surgery.checkpoint.source import read_config
from surgery.core.config import parse_float
from surgery.core.errors import SurgeryError, suggestion
from surgery.training.pretrain.initialize import check_untied

# Of a config that is taken as an example: what belongs to its weights or its tokenizer.
EXCLUDED_KEYS = (
    *("architectures", "vocab_size", "tie_word_embeddings", "dtype", "torch_dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "use_cache", "_name_or_path"),
)


def load_config_keys(name: str) -> dict[str, Any]:
    """Of a config.json, a folder with one, or a Hub id: its shape, without its vocabulary."""
    from transformers import CONFIG_MAPPING

    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        data = read_config(path.parent, name) if path.name == "config.json" else json.loads(path.read_text("utf-8"))
    else:
        data = read_config(path if path.exists() else download_config(name), name)
    if data.get("auto_map"):
        raise SurgeryError(
            f"--model {name} is a model of remote code, which is not run; name one that transformers has"
        )
    kind = str(data.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise SurgeryError(
            f"--model {name}: model_type {kind!r} is none that transformers knows{suggestion(kind, CONFIG_MAPPING)}"
        )
    plain = CONFIG_MAPPING[kind].from_dict({k: v for k, v in data.items() if k not in EXCLUDED_KEYS}).to_diff_dict()
    return {**{k: v for k, v in plain.items() if k not in EXCLUDED_KEYS}, "model_type": kind}


def download_config(name: str) -> Path:
    """The folder that a Hub id's config.json lies in."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError(
            f"--model {name} is neither a config.json, nor a folder with one, nor a Hub id that can be reached ({reason})"
        ) from None


def make_config(keys: dict[str, Any], tokenizer: Any) -> Any:
    """A causal language model's, for the tokenizer's words; SurgeryError for a key that its family does not have."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

    kind = keys["model_type"]
    if kind not in CONFIG_MAPPING:
        raise SurgeryError(
            f"model.model_type {kind!r} is none that transformers knows{suggestion(kind, CONFIG_MAPPING)}"
        )
    family: Any = CONFIG_MAPPING[kind]
    causal: Any = AutoModelForCausalLM._model_mapping
    if family not in causal or family in AutoModelForMaskedLM._model_mapping:
        raise SurgeryError(f"model.model_type {kind!r} predicts no next token; for example gpt2, llama or qwen3")
    known = {*family().to_dict(), *(getattr(family, "attribute_map", None) or {})}
    for key in keys:
        if key not in known:
            raise SurgeryError(f"model: {kind} has no key {key!r}{suggestion(key, known)}")
    special_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    options = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, **special_ids, **keys}
    try:
        config = family(**{k: parse_float(v) for k, v in options.items() if k != "model_type"})
    except Exception as error:  # transformers' checks have exceptions of their own
        raise SurgeryError(f"model: transformers refuses it ({' '.join(str(error).split())[:200]})") from None
    config.architectures = [causal[family].__name__]
    check_untied(config)
    if config.get_text_config().vocab_size < len(tokenizer):
        raise SurgeryError(
            f"model.vocab_size {config.get_text_config().vocab_size} is under the tokenizer's {len(tokenizer)} words"
        )
    return config
