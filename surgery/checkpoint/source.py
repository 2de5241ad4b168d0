"""The source checkpoint, a local folder or a Hub id: config, tensor headers, and companion files."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surgery.checkpoint.companions import COPIED, SMALL_FILES, check_link, folder_files, subfolder_files
from surgery.checkpoint.remote_code import CONFIGS, check_code_trusted, check_no_outside_code, named_code
from surgery.checkpoint.safetensors_io import (
    CONVOLUTION_PART,
    DTYPES,
    FLOAT_DTYPES,
    TensorInfo,
    edge_bytes,
    read_header,
    source_errors,
)
from surgery.checkpoint.table import SHIM_NAME
from surgery.core.digests import files_digest
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path, read_json
from surgery.core.hub_errors import explain_hub_error
from surgery.core.progress import Progress

SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME = "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors$")
PICKLE_ADVICE = "convert pickled weights to safetensors first (load with transformers, save_pretrained)"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Upper limits for sizes in a config, by words in their keys: larger than in any model, small enough to build.
CONFIG_LIMITS = (
    (("layers", "n_layer", "experts", "heads", "n_head"), 2**14),
    (("size", "dim", "d_model", "d_ff", "d_kv", "n_embd", "n_inner", "n_positions", "position_embeddings"), 2**26),
)
MAX_DEPTH = 50
# Results about a model, which loading it does not read.
RESULT_RECORDS = ("surgery_report.json", "training_log.json", "trainer_state.json")
EXCLUDED_COMPANIONS = ("config.json", SAFE_WEIGHTS_INDEX_NAME, "surgery_report.json", SHIM_NAME)


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint.

    name: as given by the user. folder: its files. config: config.json. tensors: their locations by name. revision: the
    Hub commit, None for a local folder. whole: the checkpoint with all layers and experts, if this one
    has some of them (fewer_layers.py, fewer_experts.py); its config then differs from the folder's.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    revision: str | None = None
    whole: CheckpointSource | None = None

    @property
    def original(self) -> CheckpointSource:
        """The checkpoint as it is stored, with all layers and experts."""
        return self.whole or self

    def fingerprint(self) -> str:
        """Return a SHA-256 over the config, the tensor headers, and the first and last 4 KB of each tensor."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self.tensors):
            info = self.tensors[name]
            digest.update(f"{name} {info.dtype} {info.shape}".encode())
            digest.update(edge_bytes(info))
        return digest.hexdigest()

    def weights_digest(self) -> str:
        """Return the commit of a Hub id, for a local folder the SHA-256 over the weight files."""
        if self.revision is not None:
            return self.revision
        with source_errors(self.folder):
            return files_digest((path.name, path) for path in {info.file for info in self.tensors.values()})

    def digest(self) -> str:
        """Return the SHA-256 over all files that determine the model's output.

        These are weights, config, tokenizer, templates, generation settings and code.
        """
        files = {info.file for info in self.tensors.values()} | {self.folder / name for name in self.companions()}
        files |= {path for end in ("*.json", "*.py", "*.jinja") for path in self.folder.glob(end) if path.is_file()}
        files -= {self.folder / name for name in RESULT_RECORDS}
        return files_digest((Path(os.path.relpath(path, self.folder)).as_posix(), path) for path in files)

    def companions(self) -> list[Path]:
        """Return the files to copy beside the converted weights, relative to the folder."""
        code = ("*.py",) if named_code(self.folder, self.config) else ()  # code of a remote-code model or tokenizer
        weights = {info.file for info in self.tensors.values()}
        files = [p for p in folder_files(self.folder, (*COPIED, *code)) if p.name not in EXCLUDED_COMPANIONS]
        return [p for p in (*files, *subfolder_files(self.folder).files) if self.folder / p not in weights]

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which transformers loads the model unless told otherwise: that of config.json, else of the first
        floating tensor.

        bfloat16 without both.
        """
        named = getattr(torch, str(self.config.get("dtype") or self.config.get("torch_dtype") or ""), None)
        if isinstance(named, torch.dtype) and named.is_floating_point:
            return named
        stored = (t.dtype for t in self.tensors.values() if t.dtype in FLOAT_DTYPES)
        return DTYPES[next(stored, "BF16")]


def open_checkpoint(
    name: str,
    trust_remote_code: bool = False,
    weights: bool = True,
    revision: str | None = None,
    progress: Progress | None = None,
) -> CheckpointSource:
    """Open a local folder, a GGUF file or a Hub id for conversion. weights=False downloads only config and headers (for
    `plan`), and accepts a local folder without weights, which then has no tensors.

    progress: gets a line where a GGUF file is expanded; None: stderr.
    Raises SurgeryError, with the reason, for a missing folder or id, pickled weights only, missing or damaged shards, a
    quantized or already converted checkpoint, and remote code without `trust_remote_code`.
    """
    name, folder, commit = _locate(name, weights, revision, progress)
    config = read_config(folder, name)
    _check_not_quantized(config, name)
    check_code_trusted(folder, name, config, trust_remote_code)
    if not weights and commit is None and not _has_weights(folder):
        return CheckpointSource(name, folder, config, {})
    local = commit is None or weights
    tensors = _read_headers(folder, name) if local else _read_remote_headers(name, commit)
    return CheckpointSource(name, folder, config, _with_joined_convolutions(config, tensors, values=local), commit)


def _with_joined_convolutions(
    config: dict[str, Any], tensors: dict[str, TensorInfo], *, values: bool = True
) -> dict[str, TensorInfo]:
    """Return the tensors with joined convolutions in place of their parts."""
    if not any(name.endswith(CONVOLUTION_PART) for name in tensors):
        return tensors
    # Few families store convolutions in parts.
    from surgery.checkpoint.joined_convolutions import join_convolutions

    return join_convolutions(config, tensors, values=values)


def _has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights in any format, or the index of shards."""
    kinds = ("*.safetensors", SAFE_WEIGHTS_INDEX_NAME, "*.gguf", *PICKLE_PATTERNS)
    return any(path for pattern in kinds for path in folder.glob(pattern))


def _check_no_other_weights(folder: Path, config: dict[str, Any], name: str) -> None:
    """Raise SurgeryError if from_pretrained would load other weights than model.safetensors or the shards of its
    index.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise SurgeryError(
            f"{name} holds {ADAPTER_CONFIG}: transformers would load the PEFT adapter and its base model, not the "
            "weights in "
            f"this folder. {_suggest_folder(folder).capitalize()}; or remove {ADAPTER_CONFIG} if the weights here are "
            "meant"
        )
    if config.get("transformers_weights") is not None:
        raise SurgeryError(
            f"{name}: config.json names its weights by transformers_weights "
            f"({str(config['transformers_weights'])[:100]!r}); "
            f"surgery reads {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME} only. Rename the file to "
            f"{SAFE_WEIGHTS_NAME}, then remove transformers_weights"
        )
    if distributed := sorted(path.name for path in folder.glob("shard-*.safetensors") if DISTRIBUTED.match(path.name)):
        raise SurgeryError(
            f"{name} holds {distributed[0]}, of a distributed checkpoint of torch, which transformers would load in "
            "place "
            f"of {SAFE_WEIGHTS_NAME}. Remove such files, or load the model and save_pretrained to a new folder"
        )


def open_converted_checkpoint(name: str, revision: str | None = None) -> CheckpointSource:
    """Open a checkpoint written by `surgery convert`, or any other: a folder, a GGUF file, or a Hub id (org/name or
    org/name@revision).
    """
    name, folder, commit = _locate(name, True, revision)
    config = read_config(folder, name)
    return CheckpointSource(
        name, folder, config, _with_joined_convolutions(config, _read_headers(folder, name)), commit
    )


def _locate(
    name: str, weights: bool, revision: str | None, progress: Progress | None = None
) -> tuple[str, Path, str | None]:
    """Return (name without revision, local folder, commit or None), downloading a Hub id and expanding a GGUF file if
    necessary.
    """
    if Path(name).exists():
        if revision is not None:
            raise SurgeryError(f"--revision needs a Hub id (got the local path {name}). Leave it out")
        return name, _local_folder(Path(name), progress), None
    if os.path.isdir(partial := partial_path(Path(name))):  # False for a name that is too long
        raise SurgeryError(
            f"{name} does not exist; {partial} holds unfinished work. To finish it, run the command that began it again, "
            "with --resume"
        )
    bare, pinned = split_revision(name)
    if pinned and revision is not None:
        raise SurgeryError(f"{name} names a revision, and --revision {revision} names another; give only one of them")
    return bare, *_download(bare, weights, revision or pinned)


def _local_folder(path: Path, progress: Progress | None) -> Path:
    """Return the folder of a local checkpoint: that in which a GGUF file was expanded, otherwise `path` itself."""
    if not path.is_file():
        return path
    from surgery.checkpoint.gguf import expand_gguf, is_gguf

    return expand_gguf(path, progress) if is_gguf(path) else path


def split_revision(name: str) -> tuple[str, str | None]:
    """Split org/name@revision into (id, revision). An existing local path is returned unchanged."""
    bare, _, pinned = (name, "", "") if Path(name).exists() else name.partition("@")
    return bare, pinned or None


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return a checkpoint's config.json as a dictionary.

    Raises SurgeryError if it is missing or invalid, names code or configs elsewhere, or if transformers would load
    other weights.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise SurgeryError(
            f"{name} is a file; give a checkpoint folder that contains config.json and *.safetensors, or a GGUF file "
            "(*.gguf)"
        )
    _check_links(folder)
    if not path.is_file():
        raise SurgeryError(f"{name} has no config.json; {_suggest_folder(folder)}")
    config = read_json(path)
    if not isinstance(config, dict):
        raise SurgeryError(
            f"{path} must hold a JSON object, as a Hugging Face config does (got {type(config).__name__})"
        )
    if not isinstance(config.get("model_type"), str):
        raise SurgeryError(f'{path} names no model_type; a Hugging Face config has one, for example "llama"')
    _check_config_sizes(config, path)
    check_no_outside_code(config, path)
    _check_no_other_weights(folder, config, name)
    return config


def _suggest_folder(folder: Path) -> str:
    """Return advice for a folder that is not a checkpoint, depending on its contents."""
    if (folder / "adapter_config.json").is_file():
        adapter_config = read_json(folder / "adapter_config.json")
        base = adapter_config.get("base_model_name_or_path") if isinstance(adapter_config, dict) else None
        return (
            f"it is a PEFT adapter of {str(base)[:100]}: merge it first (load it with peft, merge_and_unload(), "
            "save_pretrained to a new folder) and give that folder"
        )
    if files := sorted(folder.glob("*.gguf")):
        held = "a GGUF file" if len(files) == 1 else f"{len(files)} GGUF files"
        return f"it holds {held}: give the file itself, {files[0]}"
    return "give the folder of a Hugging Face checkpoint, or a Hub id"


def _check_links(folder: Path) -> None:
    """Raise SurgeryError for a link that leads outside the checkpoint and the Hub cache's blobs."""
    patterns = ("config.json", SAFE_WEIGHTS_INDEX_NAME, "*.safetensors", "*.py", *COPIED)
    below = [folder / path for path in subfolder_files(folder).files]
    for path in (*(p for p in folder.iterdir() if any(p.match(pattern) for pattern in patterns)), *below):
        check_link(path, folder)


def _check_config_sizes(config: dict[str, Any], path: Path) -> None:
    """Raise SurgeryError for sizes that no model has, before anything is built with them."""
    entries: list[tuple[str, Any, int]] = [("", config, 0)]
    while entries:
        key, value, depth = entries.pop()
        if depth > MAX_DEPTH:
            raise SurgeryError(f"{path} is nested over {MAX_DEPTH} deep; a Hugging Face config has a few levels")
        if isinstance(value, dict):
            entries += [(str(k), v, depth + 1) for k, v in value.items()]
        elif isinstance(value, list):
            entries += [(key, v, depth + 1) for v in value]
        elif isinstance(value, (int, float)):
            limit = next((most for words, most in CONFIG_LIMITS if any(word in key for word in words)), None)
            if limit is not None and not abs(value) <= limit:
                raise SurgeryError(f"{path}: {key} is {value:.3g}, over {limit:,}; no model is that large")


CAN_DEQUANTIZE = ("bitsandbytes", "higgs")  # methods for which transformers implements model.dequantize()


def _check_not_quantized(config: dict[str, Any], name: str) -> None:
    quantization = config.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
    if method == "surgery":
        raise SurgeryError(
            f"{name} is already converted; start from its source, or multiply its structured linears out: surgery "
            f"densify {name} --out "
            "DIR (attention that was replaced stays replaced)"
        )
    advice = "Give the checkpoint that it was made from"
    if str(method).startswith(CAN_DEQUANTIZE):
        advice += (
            ", or dequantize it: load it with transformers, call model.dequantize(), save_pretrained to a new folder"
        )
    raise SurgeryError(f"{name} is quantized ({method}); surgery needs full-precision weights. {advice}")


def _read_headers(folder: Path, name: str) -> dict[str, TensorInfo]:
    """Return the tensors that transformers would load: those of model.safetensors, else those of the index's shards."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    sharded = _read_sharded_headers(folder, index, name) if index.is_file() else None
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        single = read_header(folder / SAFE_WEIGHTS_NAME)
        if sharded is not None and sharded != single:
            raise SurgeryError(
                f"{name} has {SAFE_WEIGHTS_NAME} and an {SAFE_WEIGHTS_INDEX_NAME} that names other weights; "
                "transformers would load the first, other "
                "programs the second. Remove the one you do not want"
            )
        return single
    if sharded is not None:
        return sharded
    pickles = [p.name for pattern in PICKLE_PATTERNS for p in folder.glob(pattern)]
    if pickles:
        raise SurgeryError(
            f"{name} has only pickled weights ({pickles[0]}), which can run code when opened; {PICKLE_ADVICE}"
        )
    raise SurgeryError(
        f"{name} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; {_suggest_folder(folder)}"
    )


def _read_sharded_headers(folder: Path, index: Path, name: str) -> dict[str, TensorInfo]:
    try:
        table = read_json(index)
        weight_map, metadata = table["weight_map"], table.get("metadata")
        shards = sorted(set(weight_map.values()))
    except (SurgeryError, KeyError, TypeError, AttributeError):
        raise SurgeryError(f"{index} is not a shard index (a table with a weight_map)") from None
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        if not is_shard_name(shard):
            raise SurgeryError(f"{index} points to {shard!r}; shards are .safetensors files beside the index")
        if not (folder / shard).is_file():
            raise SurgeryError(f"{name} lacks shard {shard}, which its index names; download it again")
        header = read_header(folder / shard)
        if twice := header.keys() & tensors.keys():
            raise SurgeryError(
                f"{name}: tensor {min(twice)!r} is in two shards, {shard} and {tensors[min(twice)].file.name}"
            )
        tensors.update(header)
    for tensor, shard in weight_map.items():
        if tensor not in tensors or tensors[tensor].file.name != shard:
            raise SurgeryError(f"{name}: the index puts tensor {tensor!r} in {shard}, whose header does not have it")
    if not isinstance(metadata, dict):
        raise SurgeryError(
            f'{index} has no table "metadata", without which transformers cannot load it; add "metadata": {{}}'
        )
    return tensors


def is_shard_name(name: Any) -> bool:
    """Return whether `name` is a plain .safetensors file name, without a path."""
    whole = isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors") and "\0" not in name
    return whole and len(name.encode()) <= 255  # the limit of file systems


def check_float_dtype(info: TensorInfo) -> None:
    """Raise SurgeryError unless a weight to be replaced is stored in plain floating point."""
    if info.dtype not in FLOAT_DTYPES:
        known = "" if info.dtype in DTYPES else " (unknown to surgery)"
        raise SurgeryError(
            f"tensor {info.name!r} has dtype {info.dtype}{known}; weights to be replaced must be one of "
            f"{', '.join(FLOAT_DTYPES)}"
        )


def _download(name: str, weights: bool, revision: str | None) -> tuple[Path, str | None]:
    """Download from the Hub, for a plan only the configs; return (folder, commit)."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SurgeryError(f"{name} does not exist; give the folder of a checkpoint, or a Hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    patterns = ["config.json", ADAPTER_CONFIG, "*.py", *CONFIGS] + (
        [
            "*.safetensors",
            SAFE_WEIGHTS_INDEX_NAME,
            "surgery_report.json",
            *COPIED,
            *(f"*/*{kind}" for kind in SMALL_FILES),
        ]
        if weights
        else []
    )
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise SurgeryError(_hub_error_message(name, revision, error)) from None
    return folder, folder.name


def _hub_error_message(name: str, revision: str | None, error: Exception) -> str:
    message = explain_hub_error(error, name, "give the path of a folder", revision=revision)
    if message is not None:
        return message
    reason = " ".join(str(error).split())[:200]
    return f"{name} is neither a local folder nor a Hub id that can be reached ({type(error).__name__}: {reason})"


def _read_remote_headers(name: str, revision: str | None) -> dict[str, TensorInfo]:
    """Read only the tensor headers of a Hub checkpoint, by range requests."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    try:
        files = get_safetensors_metadata(name, revision=revision).files_metadata
    except NotASafetensorsRepoError:
        raise SurgeryError(
            f"{name} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; {PICKLE_ADVICE}"
        ) from None
    except (HfHubHTTPError, SafetensorsParsingError, OSError) as error:
        reason = explain_hub_error(error, name, "give the path of a folder", revision=revision)
        reason = reason or " ".join(str(error).split())[:200]
        raise SurgeryError(f"cannot read the tensor headers of {name}: {reason}") from None
    return {
        tensor: TensorInfo(tensor, Path(file), str(info.dtype), tuple(info.shape), *info.data_offsets)
        for file, header in files.items()
        for tensor, info in header.tensors.items()
    }
