"""GGUF files as sources: the header is checked here, then transformers' loader expands the file once into a folder of
safetensors.

The folder lies in a cache, $HF_HOME/surgery/gguf, under a name made of the file's SHA-256, the dtype, and what else
determines its content: the tokenizer files beside the GGUF file, and the versions of transformers and gguf. It is
written under a temporary name and renamed, by one process at a time, and its files are compared with their SHA-256
before it is used again.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import shutil
import struct
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from surgery.checkpoint.companions import COPIED, MAX_BYTES, check_link, folder_files
from surgery.core.digests import file_digest, files_digest, hash_file
from surgery.core.environment import check_environment
from surgery.core.errors import SurgeryError
from surgery.core.files import (
    atomic_write,
    explain_disk_errors,
    follow_umask,
    is_disk_error,
    no_link,
    read_json,
    size_text,
    write_json,
)
from surgery.core.progress import Progress, RichProgress
from surgery.core.project import install_command

SUFFIX = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# Upper limits of counts in a header: larger than in any file, small enough to read in a second.
MAX_ENTRIES, MAX_TENSORS, MAX_ITEMS, MAX_DIMS, MAX_NAME = 2**14, 2**17, 2**22, 4, 2**10
KEPT_TEXT = 2**10  # bytes; longer texts of the metadata (chat templates) are not kept
# Value types of the metadata: struct format by number; two types have no fixed size.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
NOT_COPIED = ("config.json", "adapter_config.json")
# Rotary frequencies that are stored as tensors. transformers (5.23) does not read them.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
READS_ROPE_SCALING = ("gpt-oss",)  # architectures whose rope.scaling metadata transformers reads
LAYOUT = 1  # raised when an expanded folder would differ from that of an earlier version
FILES_NAME = "files.json"
_announced: set[Path] = set()


class GgufTensor(NamedTuple):
    """A tensor of the file. kind: its ggml type by name, such as Q4_K. shape: as in torch, rows first. start: byte in
    the file.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a GGUF file. metadata: numbers and short texts; of an array, its length."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The name of llama.cpp for the model's family."""
        return str(self.metadata["general.architecture"])

    @property
    def numel(self) -> int:
        """The number of values in all tensors, without rotary frequencies."""
        return sum(math.prod(tensor.shape) for name, tensor in self.tensors.items() if name not in ROPE_TENSORS)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the expanded weights: the narrowest one of an unquantized file (norms are float32 in each), else
        bfloat16.
        """
        kinds = {tensor.kind for tensor in self.tensors.values()}
        if not kinds <= PLAIN.keys():
            return torch.bfloat16
        return next((PLAIN[kind] for kind in ("BF16", "F16") if kind in kinds), torch.float32)

    @property
    def values(self) -> str:
        """A phrase for the values of the weights: "quantized values (Q4_K, Q6_K)" or "float16 values"."""
        kinds = Counter(tensor.kind for tensor in self.tensors.values() if tensor.kind not in PLAIN)
        if not kinds:
            return f"{str(self.dtype).removeprefix('torch.')} values"
        return f"quantized values ({', '.join(kind for kind, _ in kinds.most_common(3))})"


def is_gguf(name: str | Path) -> bool:
    """Return whether a name is the path of an existing GGUF file, by its suffix."""
    return Path(name).suffix.lower() == SUFFIX and Path(name).is_file()


def expand_gguf(path: Path, progress: Progress | None = None) -> Path:
    """Return the folder of safetensors with the model and tokenizer of a GGUF file; it is written if the cache does not
    hold it.

    The tokenizer is that of the files beside the GGUF file, otherwise the one inside it. progress: gets a line that
    names the folder; None: stderr, once per process. Raises SurgeryError for a file that is damaged, hostile or one of
    several shards, whose architecture transformers does not load, or if the package gguf is missing.
    """
    path = Path(path)
    with _explain_read_errors(path):
        header = read_gguf_header(path)
        companions = _companions(path.parent)
        cache = _cache_folder()
        with explain_disk_errors(cache, "run the same command again"):
            cache.mkdir(parents=True, exist_ok=True)
            folder = cache / _key(header, companions)
            _announce(header, folder, companions, progress)
            with _lock(cache / f"{folder.name}.lock") as locked:
                if not _is_whole(folder):
                    if locked:
                        _remove_leftovers(folder)
                    _write(header, companions, folder)
    return folder / "checkpoint"


# -- header ------------------------------------------------------------------------------------------
def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises SurgeryError, with the rule, before anything is allocated for it.
    """
    if SHARD.search(path.name):
        raise SurgeryError(
            f"{path} is one of several shards. A source is a single GGUF file: merge them with llama.cpp's "
            "llama-gguf-split --merge, and "
            "give the result"
        )
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(24)
        if start[:4] != MAGIC:
            raise SurgeryError(f"{path} is not a GGUF file: it begins with {start[:4]!r}, a GGUF file with {MAGIC!r}")
        if len(start) < 24:
            raise _truncated(path)
        version, tensors, entries = struct.unpack("<IQQ", start[4:])
        if version not in VERSIONS:
            order = " (or its bytes are in big-endian order)" if version % 2**16 == 0 else ""
            raise SurgeryError(
                f"{path} has GGUF version {version}{order}; surgery reads versions 2 and 3, little-endian"
            )
        for count, most, what in ((tensors, MAX_TENSORS, "tensors"), (entries, MAX_ENTRIES, "metadata entries")):
            if not count <= most or 12 * count > size:
                raise SurgeryError(
                    f"{path} names {count:,} {what} in {size:,} bytes; a GGUF file has at most {most:,}, of at least "
                    "12 bytes each. Download it again"
                )
        kinds = _quant_sizes(path)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, _Cursor(path, data), tensors, entries, kinds)
            except UnicodeDecodeError:
                raise SurgeryError(f"{path}: a name in the header is not UTF-8. Download the file again") from None


class _Cursor:
    """A position in the mapped file. Reading past the end raises SurgeryError."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 24

    def skip(self, count: int) -> int:
        """Move `count` bytes ahead and return the position before."""
        before = self.at
        if count > len(self.data) - before:
            raise _truncated(self.path)
        self.at += count
        return before

    def number(self, code: str) -> Any:
        """Read one little-endian number of a struct format."""
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]

    def text(self, longest: int) -> str | None:
        """Read a text; None if it has more than `longest` bytes."""
        count = self.number("Q")
        start = self.skip(count)
        return None if count > longest else self.data[start : start + count].decode()

    def name(self) -> str:
        """Read a key or the name of a tensor."""
        name = self.text(MAX_NAME)
        if name is None:
            raise SurgeryError(f"{self.path}: a name in the header has over {MAX_NAME} bytes. Download the file again")
        return name

    def value(self, kind: int) -> Any:
        """Read a value of the metadata: a number, a text (None if it is long), the length of an array."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text(KEPT_TEXT)
        item = self.number("I") if kind == ARRAY else None
        if item not in (*NUMBERS, TEXT):
            raise SurgeryError(
                f"{self.path}: the metadata has a value of type {kind if item is None else f'array of {item}'}, which "
                "GGUF does not define "
                "or transformers does not read"
            )
        count = self.number("Q")
        if count > MAX_ITEMS:
            raise SurgeryError(f"{self.path}: the metadata has a list of {count:,} items; none has over {MAX_ITEMS:,}")
        if item in NUMBERS:
            self.skip(count * struct.calcsize("<" + NUMBERS[item]))
        else:
            for _ in range(count):
                self.skip(self.number("Q"))
        return count


def _parse(
    path: Path, cursor: _Cursor, tensors: int, entries: int, kinds: dict[int, tuple[str, int, int]]
) -> GgufHeader:
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.name()
        if key in metadata:
            raise SurgeryError(f"{path}: the metadata has {key[:100]!r} twice. Download the file again")
        metadata[key] = cursor.value(cursor.number("I"))
    infos = [(cursor.name(), *_tensor_info(cursor)) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
        raise SurgeryError(f"{path}: general.alignment is {alignment!r}; it must be a small positive integer")
    data_start = -(-cursor.at // alignment) * alignment
    size, named = len(cursor.data), {}
    for name, shape, number, offset in infos:
        if number not in kinds:
            raise SurgeryError(
                f"{path}: tensor {name[:100]!r} has ggml type {number}, which the installed gguf does not know. "
                "Upgrade it (pip install -U gguf)"
            )
        kind, block, block_bytes = kinds[number]
        if not shape or 0 in shape or shape[-1] % block or math.prod(shape) > 2**48:
            raise SurgeryError(f"{path}: tensor {name[:100]!r} of type {kind} has the impossible shape {shape}")
        tensor = GgufTensor(kind, shape, data_start + offset, math.prod(shape) // block * block_bytes)
        if tensor.start + tensor.nbytes > size:
            raise SurgeryError(
                f"{path}: tensor {name[:100]!r} ends at byte {tensor.start + tensor.nbytes:,}, beyond the file's "
                f"{size:,} bytes; the file is "
                "truncated. Download it again"
            )
        if name in named:
            raise SurgeryError(f"{path} has tensor {name[:100]!r} twice. Download the file again")
        named[name] = tensor
    if sum(tensor.nbytes for tensor in named.values()) > size:
        raise SurgeryError(
            f"{path}: its tensors overlap: together they are larger than the file. Download the file again"
        )
    return _check_model(GgufHeader(path, metadata, named))


def _tensor_info(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
    """Read (shape with rows first, ggml type, offset in the data section)."""
    count = cursor.number("I")
    if count > MAX_DIMS:
        raise SurgeryError(f"{cursor.path}: a tensor has {count:,} dimensions; GGUF has at most {MAX_DIMS}")
    shape = tuple(cursor.number("Q") for _ in range(count))[::-1]
    return shape, cursor.number("I"), cursor.number("Q")


def _check_model(header: GgufHeader) -> GgufHeader:
    """Raise SurgeryError unless the file holds the whole of one model whose metadata transformers takes into
    account.
    """
    path, metadata = header.path, header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not re.fullmatch(r"[\w.-]{1,64}", architecture):
        raise SurgeryError(f"{path}: the metadata names no general.architecture, such as llama (got {architecture!r})")
    if (metadata.get("split.count") or 1) != 1:
        raise SurgeryError(
            f"{path} is one of {metadata['split.count']} shards. A source is a single GGUF file: merge them with "
            "llama.cpp's "
            "llama-gguf-split --merge, and give the result"
        )
    layers = metadata.get(f"{architecture}.block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(header.tensors):
        raise SurgeryError(
            f"{path}: {architecture}.block_count is {layers!r}, and the file has {len(header.tensors):,} tensors; a "
            "model has at least one in "
            "each of its blocks"
        )
    scaling = metadata.get(f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none") and architecture not in READS_ROPE_SCALING:
        raise _lost_rope(path, f"{architecture}.rope.scaling.type {scaling!r}")
    return header


def _truncated(path: Path) -> SurgeryError:
    return SurgeryError(f"{path} ends within its header; the file is truncated. Download it again")


def _lost_rope(path: Path, what: str) -> SurgeryError:
    return SurgeryError(
        f"{path} scales its rotary frequencies ({what}), which transformers does not read from a GGUF file: the model "
        "would be "
        "another one. Give the checkpoint that the file was made from"
    )


def _quant_sizes(path: Path) -> dict[int, tuple[str, int, int]]:
    """Return ggml type -> (name, values per block, bytes per block), from the package gguf."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        if str(error.name).partition(".")[0] != "gguf":
            check_environment(error)
        raise SurgeryError(
            f"{path} is a GGUF file, and the package gguf, which reads it, is not installed. Run "
            f"{install_command('gguf')}, or pip install gguf"
        ) from None
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


# -- cache -------------------------------------------------------------------------------------------
def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "surgery" / "gguf"


def _key(header: GgufHeader, companions: list[Path]) -> str:
    from importlib.metadata import version

    others = [LAYOUT, version("transformers"), version("gguf"), files_digest((path.name, path) for path in companions)]
    return f"{file_digest(header.path)[:32]}-{_dtype_name(header)}-{hashlib.sha256(json.dumps(others).encode()).hexdigest()[:8]}"


def _dtype_name(header: GgufHeader) -> str:
    return str(header.dtype).removeprefix("torch.")


def _companions(folder: Path) -> list[Path]:
    """Return the files beside the GGUF file that belong to its model: none if there is no tokenizer among them."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return []
    paths = [folder / name for name in folder_files(folder, COPIED) if name.name not in NOT_COPIED]
    for path in paths:
        check_link(path, folder)
    return [path for path in paths if path.stat().st_size <= MAX_BYTES]


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Wait for the lock file and hold it. Yields whether it excludes others: not where the system has no such locks."""
    with open(path, "a", encoding="utf-8", opener=no_link) as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        except (ImportError, OSError):
            locked = False
        yield locked


def _is_whole(expanded: Path) -> bool:
    """Return whether a folder of the cache holds the files that were written, with their contents."""
    folder = expanded / "checkpoint"
    try:
        digests = read_json(expanded / FILES_NAME)
        assert isinstance(digests, dict)
        names = {path.name for path in folder.iterdir()}
        return names == digests.keys() and all(file_digest(folder / name) == digests[name] for name in sorted(names))
    except (SurgeryError, OSError, AssertionError):
        return False


def _remove_leftovers(expanded: Path) -> None:
    """Remove a damaged folder, and what killed processes left of it. Call it with the lock held."""
    for leftover in (expanded, *expanded.parent.glob(f"{expanded.name}.partial-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def _write(header: GgufHeader, companions: list[Path], expanded: Path) -> None:
    """Expand the file into a new folder and rename it to `expanded`."""
    needed, free = header.numel * header.dtype.itemsize, shutil.disk_usage(expanded.parent).free
    if needed > free:
        raise SurgeryError(
            f"{header.path} needs {size_text(needed)} as {_dtype_name(header)} in {expanded.parent}, whose disk has "
            f"{size_text(free)} free. Free some "
            "space, or set HF_HOME to a folder on another disk"
        )
    partial = Path(tempfile.mkdtemp(prefix=f"{expanded.name}.partial-", dir=expanded.parent))
    try:
        folder = partial / "checkpoint"
        folder.mkdir()
        (partial / "source").mkdir()
        # Alone in a folder: transformers does not see the other files beside it, such as configs and adapters.
        link = partial / "source" / f"model{SUFFIX}"
        link.symlink_to(header.path.resolve())
        if not companions and "tokenizer.ggml.tokens" in header.metadata:
            _save_tokenizer(header, link, folder)
        _save_model(header, link, folder)
        for path in companions:
            shutil.copyfile(path, folder / path.name)
        follow_umask(*folder.iterdir())
        write_json(partial / FILES_NAME, {path.name: hash_file(path) for path in sorted(folder.iterdir())})
        shutil.rmtree(partial / "source")
        partial.chmod(0o755)
        try:
            partial.rename(expanded)
        except OSError:  # another process, that no lock excluded, was faster
            if not _is_whole(expanded):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _announce(header: GgufHeader, expanded: Path, companions: list[Path], progress: Progress | None) -> None:
    """Say once where a file is expanded, and whose values the weights have.

    Of processes started together, the first one says it.
    """
    if progress is None and (expanded in _announced or os.environ.get("RANK", "0") != "0"):
        return
    _announced.add(expanded)
    tokenizer = "of the files beside it" if companions else "of the file"
    if not companions and "tokenizer.ggml.tokens" not in header.metadata:
        tokenizer = "missing"
    verb = "is expanded" if expanded.exists() else "will be expanded, once,"
    (progress or RichProgress()).say(
        f"note: {header.path} {verb} to {_dtype_name(header)} in {expanded / 'checkpoint'}; its weights are the file's "
        f"{header.values}, not the "
        f"original model's. Tokenizer: {tokenizer}"
    )


# -- transformers ------------------------------------------------------------------------------------
def _save_tokenizer(header: GgufHeader, link: Path, folder: Path) -> None:
    """Save the tokenizer inside the file, without tokens beyond its list: transformers adds <|endoftext|> where the
    list has none.
    """
    from transformers import AutoTokenizer

    with _explain_load_errors(
        header, "tokenizer", "Put the model's tokenizer.json and tokenizer_config.json beside it"
    ):
        tokenizer = AutoTokenizer.from_pretrained(link.parent, gguf_file=link.name, trust_remote_code=False)
        tokenizer.save_pretrained(folder)
        saved = read_json(folder / "tokenizer.json")
        count = header.metadata["tokenizer.ggml.tokens"]
        saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < count]
        with atomic_write(folder / "tokenizer.json", "w") as file:
            json.dump(saved, file, ensure_ascii=False)


def _save_model(header: GgufHeader, link: Path, folder: Path) -> None:
    """Load the model in the header's dtype and save it; raises SurgeryError unless the file has a tensor for each
    parameter.
    """
    import transformers
    from transformers import AutoConfig

    cls: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # where it exists, weights stay quantized without it
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _explain_load_errors(
        header, f"model of architecture {header.architecture}", "Give the checkpoint that it was made from"
    ):
        config = AutoConfig.from_pretrained(link.parent, gguf_file=link.name, trust_remote_code=False)
        _check_config(header, config)
        model, info = cls.from_pretrained(
            link.parent,
            gguf_file=link.name,
            config=config,
            dtype=header.dtype,
            output_loading_info=True,
            trust_remote_code=False,
            **options,
        )
        for key in sorted(info["missing_keys"]):
            raise SurgeryError(f"{header.path} has no tensor for {key}, which {type(model).__name__} needs")
        with suppress(AttributeError):
            del model.config._model_name_or_path  # the file's general.name: what its author wrote there
        model.save_pretrained(folder)


def _check_config(header: GgufHeader, config: Any) -> None:
    """Raise SurgeryError if the config describes more values than the file holds: they would be allocated, and drawn at
    random.
    """
    import transformers

    cls: Any = transformers.AutoModelForCausalLM
    if type(config) not in cls._model_mapping:
        raise SurgeryError(
            f"{header.path} is a {config.model_type} model; of GGUF files, surgery reads models that predict the next "
            "token"
        )
    _restore_rope(header, config)
    with torch.device("meta"):
        model = cls.from_config(config, trust_remote_code=False)
    described = sum(parameter.numel() for parameter in model.parameters())
    if described < header.numel:
        warnings.warn(
            f"{header.path}: transformers uses {described:,} of the {header.numel:,} values in the file",
            UserWarning,
            stacklevel=2,
        )
    if described > header.numel:
        raise SurgeryError(
            f"{header.path}: its metadata describe a model of {described:,} parameters, and its tensors hold "
            f"{header.numel:,} values. Download it again"
        )


def _restore_rope(header: GgufHeader, config: Any) -> None:
    """Put the frequency scaling of Llama 3.1 to 3.3 into the config. llama.cpp stores it as divisors of the rotary
    frequencies.

    The factor is the largest divisor; the other settings are those that all these models have. Raises SurgeryError if
    the file's divisors (head_dim / 2) are not those of the settings.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not (stored := [name for name in ROPE_TENSORS if name in header.tensors]):
        return
    tensor = header.tensors[stored[0]]
    rope = getattr(config, "rope_parameters", None)
    if (
        stored != list(ROPE_TENSORS[:1])
        or tensor.kind != "F32"
        or not isinstance(rope, dict)
        or tensor.nbytes > MAX_NAME * 4
    ):
        raise _lost_rope(header.path, f"tensor {stored[0]}")
    with open(header.path, "rb") as file:
        file.seek(tensor.start)
        divisors = torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=torch.float32)
    if bool((divisors == 1).all()):
        return
    config.rope_parameters = {**rope, "rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_ROPE}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = float(rope["rope_theta"]) ** -(torch.arange(len(scaled)) / len(scaled))
    if divisors.shape != scaled.shape or not torch.allclose(plain / divisors, scaled, rtol=1e-4, atol=0):
        raise _lost_rope(header.path, f"tensor {stored[0]}")


@contextmanager
def _explain_load_errors(header: GgufHeader, what: str, advice: str) -> Iterator[None]:
    """Turn errors of transformers and gguf, which document none, into a SurgeryError that names the file."""
    try:
        yield
    except (SurgeryError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if is_disk_error(error):
            raise
        check_environment(error)
        raise SurgeryError(
            f"{header.path}: transformers cannot load the {what} of this GGUF file ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}). {advice}"
        ) from None


@contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None or Path(os.fsdecode(error.filename)) != path:
            raise
        raise SurgeryError(f"cannot read {path}: {error.strerror}") from None
