"""Calibration samples: text to token windows, divided into samples to fit to and held-out samples.

A window is a row of token ids of fixed length. Ready input tensors (images, sound) are read from safetensors instead.
"""

from __future__ import annotations

import codecs
import hashlib
import inspect
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.remote_code import check_code_trusted
from surgery.core.digests import check_no_outside_files
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import read_json


@dataclass(frozen=True)
class CalibrationSet:
    """Inputs of the model for calibration.

    inputs: keyword arguments of the model's forward, batch axis first. Rows 0:n_fit are fitted to, rows n_fit:rows are held
    out for measuring the error.
    """

    inputs: dict[str, Tensor]
    n_fit: int
    rows: int

    @classmethod
    def from_inputs(cls, inputs: dict[str, Tensor], holdout: float) -> CalibrationSet:
        """Return the set with a share `holdout` of the rows held out: at least one row, and at least two if there are four."""
        rows = len(next(iter(inputs.values())))
        if rows < 2:
            raise SurgeryError(f"calibration: {rows} window; at least two are needed, one to fit and one to check")
        # Two if possible: a standard error cannot be estimated from one.
        held = min(max(2 if rows >= 4 else 1, round(rows * holdout)), rows - 1)
        return cls(inputs, rows - held, rows)

    def subset(self, share: float) -> CalibrationSet:
        """Return a set with a share of the rows to fit to, and all held-out rows."""
        kept = max(1, round(self.n_fit * share))
        rows = [*range(kept), *range(self.n_fit, self.rows)]
        return CalibrationSet({k: v[rows] for k, v in self.inputs.items()}, kept, len(rows))

    def fit_inputs(self) -> dict[str, Tensor]:
        """Return the inputs of the rows to fit to."""
        return {k: v[: self.n_fit] for k, v in self.inputs.items()}

    def mask(self) -> Tensor | None:
        """Return the attention mask (rows, T), nonzero at real tokens; None if the inputs are not padded."""
        return self.inputs.get("attention_mask")

    def head_mask(self) -> Tensor | None:
        """Return the mask of the tokens that reach the head: the decoder's if the model has one."""
        return self.inputs.get("decoder_attention_mask" if "decoder_input_ids" in self.inputs else "attention_mask")

    def tokens(self) -> int:
        """Return the number of tokens of the first input, or of its rows if it holds no token ids."""
        first = next(iter(self.inputs.values()))
        return first.shape[0] * (first.shape[1] if first.dim() == 2 else 1)

    def digest(self) -> str:
        """Return the SHA-256 of the inputs and of their division, which identifies the set in the journal."""
        digest = hashlib.sha256(str((self.n_fit, self.rows)).encode())
        for name in sorted(self.inputs):
            digest.update(name.encode() + self.inputs[name].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def unpadded_rows(x_BTX: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Return the rows of real tokens, (N, X); all rows if there is no mask, or a mask of another shape."""
    if mask_BT is None or x_BTX.shape[:2] != mask_BT.shape:
        return x_BTX.flatten(0, -2)
    return x_BTX[mask_BT.to(x_BTX.device).bool()]


def check_model_inputs(inputs: dict[str, Tensor], model: Any) -> None:
    """Raise SurgeryError if the model's forward lacks one of these arguments, or its embedding one of the token ids."""
    taken = [name for name in inspect.signature(model.forward).parameters if name not in ("labels", "kwargs")]
    for name in inputs:
        if name not in taken:
            raise SurgeryError(f"calibration inputs: {type(model).__name__} takes no {name!r}{suggestion(name, taken)}")
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
    for name, ids in inputs.items():
        if name.endswith("input_ids") and vocabulary is not None:
            low, high = int(ids.min()), int(ids.max())
            if ids.dim() != 2 or ids.is_floating_point() or low < 0 or high >= vocabulary:
                raise SurgeryError(
                    f"calibration inputs: {name} holds {ids.dtype} {list(ids.shape)} from {low} to {high}; it must hold "
                    f"token ids, (rows, length) int64, from 0 to {vocabulary - 1}"
                )


# -- text ------------------------------------------------------------------------------------------
def calibration_inputs(
    text: str,
    source_folder: Path,
    config: Any,
    tokens: int,
    length: int,
    *,
    trust_remote_code: bool = False,
    notes: list[str] | None = None,
) -> dict[str, Tensor]:
    """Return the model's inputs: `tokens` tokens of the text in windows of `length` tokens, special tokens included.

    An encoder-decoder gets the first half of a window as the encoder's input and the second half as the decoder's.

    text: a file (.txt, .md, .json, .jsonl, .parquet, .csv; .safetensors with ready inputs, for models of images or sound) or
    a Hub data set, "org/name" or "org/name:config:split:column". notes: list to which notes about the text are appended,
    such as a converted encoding or too few tokens.
    """
    path = Path(text)
    if path.suffix == ".safetensors":
        return load_input_tensors(path)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or length
    documents = document_stream(text, notes)
    windows_NT = text_windows(
        documents, load_tokenizer(source_folder, trust_remote_code), tokens, min(length, limit), text
    )
    if notes is not None and windows_NT.numel() < 0.9 * tokens:
        notes.append(f"{text} gives {windows_NT.numel():,} tokens in whole windows, where {tokens:,} were asked for")
    if getattr(config, "is_encoder_decoder", False):
        half = windows_NT.shape[1] // 2
        start = torch.full((len(windows_NT), 1), config.decoder_start_token_id)
        answers = torch.cat([start, windows_NT[:, half : 2 * half - 1]], dim=1)
        return {"input_ids": windows_NT[:, :half].contiguous(), "decoder_input_ids": answers}
    return {"input_ids": windows_NT}


def load_input_tensors(path: Path) -> dict[str, Tensor]:
    """Return ready inputs of the model from a safetensors file, by argument name; all must have the same number of rows."""
    from surgery.checkpoint.safetensors_io import read_header, read_tensor

    if not path.is_file():
        raise SurgeryError(f"calibration file {path} does not exist")
    inputs = {name: read_tensor(info) for name, info in read_header(path).items()}
    if not inputs or len({len(t) for t in inputs.values() if t.dim()}) != 1:
        raise SurgeryError(
            f"{path}: every tensor needs the same number of rows, for example pixel_values (64, 3, 224, 224)"
        )
    return inputs


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a checkpoint.

    trust_remote_code is always passed on, because transformers asks on the terminal if it is not given.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    config = folder / "config.json"
    known = read_json(config) if config.is_file() else {}
    check_code_trusted(folder, str(folder), known if isinstance(known, dict) else {}, trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        raise SurgeryError(
            f"{folder} has no tokenizer that transformers can load ({' '.join(str(error).split())[:200]}); "
            "put its tokenizer files beside the weights"
        ) from None


CALIBRATION_SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".parquet", ".csv", ".safetensors")


HUB_DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^:]*){0,3}")


def detect_encoding(start: bytes) -> str | None:
    """Return UTF-16 or UTF-32, detected by a byte order mark or the positions of zero bytes; None if it may be UTF-8."""
    for mark, name in MARKS:
        if start.startswith(mark):
            return name
    if len(start) < 8 or 0 not in start:
        return None
    even, odd = start[::2].count(0), start[1::2].count(0)
    share = max(even, odd) / max(1, len(start) // 2)
    return ("utf-16-le" if odd > even else "utf-16-be") if share > 0.2 and min(even, odd) < max(even, odd) / 4 else None


# UTF-32 before UTF-16, because its byte order mark begins with that of UTF-16.
MARKS = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16")),
    *((codecs.BOM_UTF16_BE, "utf-16"), (codecs.BOM_UTF8, "utf-8-sig")),
)
UNREADABLE = 0.1  # fraction of undecodable characters above which a file is refused


def decode_text(path: Path) -> tuple[str, str | None]:
    """Return (text, note or None) of a file in UTF-8, UTF-16 or UTF-32. Raises SurgeryError for other encodings."""
    data = path.read_bytes()
    name = detect_encoding(data[:4096])
    if name is not None:
        note = None if name == "utf-8-sig" else f"{path} is {name.upper()}, not UTF-8, and was read as that"
        return data.decode(name, errors="replace"), note
    text = data.decode("utf-8", errors="replace")
    bad = text.count("\ufffd") - data.count("\ufffd".encode())
    if bad > UNREADABLE * len(text):
        raise SurgeryError(
            f"{path} is not text in UTF-8: {bad:,} of {len(text):,} characters cannot be read; save it as UTF-8 "
            "(for example: iconv -f LATIN1 -t UTF-8)"
        )
    return text, f"{path}: {bad:,} of {len(text):,} characters are not UTF-8 and were replaced" if bad else None


def document_stream(text: str, notes: list[str] | None = None) -> Iterator[str]:
    """Yield the documents of a file or of a Hub data set.

    notes: list for notes about the decoding of a file; they are printed to standard error if it is None.
    """
    path = Path(text)
    if path.is_file():
        if path.suffix in (".json", ".jsonl", ".parquet", ".csv"):
            kind = path.suffix[1:].replace("jsonl", "json")
            if kind != "parquet" and _is_utf16(path):
                return _stream_decoded(path, kind, notes)
            return _stream_texts(kind, None, "train", None, {"data_files": str(path)})
        read, note = decode_text(path)
        _report_note(note, notes)
        return iter([read])
    if not HUB_DATASET.fullmatch(text) or path.suffix in CALIBRATION_SUFFIXES:
        raise SurgeryError(f"calibration text {text!r} is not a file; give a text file, or a Hub data set as org/name")
    name, _, rest = text.partition(":")
    config, split, column = ([*rest.split(":"), "", "", ""])[:3]
    return _stream_texts(name, config or None, split or "train", column or None, {})


def _report_note(note: str | None, notes: list[str] | None) -> None:
    if note and notes is None:
        print(f"note: {note}", file=sys.stderr)
    elif note and notes is not None:
        notes.append(note)


def _is_utf16(path: Path) -> bool:
    with open(path, "rb") as file:
        return detect_encoding(file.read(4096)) not in (None, "utf-8-sig")


def _stream_decoded(path: Path, kind: str, notes: list[str] | None) -> Iterator[str]:
    """Yield the texts of a table in UTF-16 or UTF-32, from a temporary copy in UTF-8."""
    text, note = decode_text(path)
    _report_note(note, notes)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_text(text.removeprefix("\ufeff"), encoding="utf-8")
        yield from _stream_texts(kind, None, "train", None, {"data_files": str(copy)})


def _stream_texts(
    name: str, config: str | None, split: str, column: str | None, options: dict[str, Any]
) -> Iterator[str]:
    import datasets

    # `datasets` caches the columns of local files by path and mtime, and casts rows of changed files to them, so local files
    # are read with an empty cache.
    local = "data_files" in options or Path(name).is_dir()
    if Path(name).is_dir() and not options:
        check_no_outside_files(Path(name))
    try:
        with tempfile.TemporaryDirectory() if local else nullcontext() as cache:
            rows = iter(
                datasets.load_dataset(
                    name, config, split=split, streaming=True, trust_remote_code=False, cache_dir=cache, **options
                )
            )
        first = next(rows)
    except StopIteration:
        raise SurgeryError(f"calibration data {options.get('data_files', name)} has no rows") from None
    except Exception as error:  # `datasets` raises errors of many libraries
        raise SurgeryError(
            f"cannot read calibration data {options.get('data_files', name)}: {' '.join(str(error).split())[:200]}"
        ) from None
    where = options.get("data_files", name)
    texts = [key for key, value in first.items() if isinstance(value, str)]
    fields = ", ".join(f"{key} ({type(value).__name__})" for key, value in first.items()) or "none"
    if column is None and not texts:
        raise SurgeryError(f"calibration data {where} has no field with text; its fields: {fields}")
    column = column or ("text" if "text" in texts else texts[0])
    if column not in texts:
        raise SurgeryError(f"calibration data {where} has no text field {column!r}; its fields: {fields}")
    yield first[column]
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # as above, at a later row
            raise SurgeryError(f"cannot read calibration data {where}: {' '.join(str(error).split())[:200]}") from None
        if row is None:
            return
        if isinstance(row.get(column), str):  # rows without a text are skipped
            yield row[column]


def text_windows(documents: Iterator[str], tokenizer: Any, tokens: int, length: int, where: str) -> Tensor:
    """Return token ids (N, length): the concatenated documents cut into windows, each with the tokenizer's special tokens."""
    prefix, suffix = special_tokens(tokenizer)
    body, wanted = length - len(prefix) - len(suffix), max(1, tokens // length)
    ids: list[int] = []
    for document in documents:
        for part in _split_document(document):
            ids += tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= wanted * body:
                break
        if len(ids) >= wanted * body:
            break
    count = min(wanted, len(ids) // body)
    if wanted < 2:
        raise SurgeryError(
            f"{tokens:,} tokens make {wanted} window of {length}; at least two are needed. Set more tokens, or a length of "
            f"{max(8, tokens // 4)} or less"
        )
    if count < 2:
        raise SurgeryError(
            f"{where} has {len(ids):,} tokens; at least two windows of {length} are needed "
            f"(a longer text, or --set length={max(8, len(ids) // 4)})"
        )
    rows = [prefix + ids[i * body : (i + 1) * body] + suffix for i in range(count)]
    return torch.tensor(rows, dtype=torch.int64)


def _split_document(document: str, size: int = 2**20) -> Iterator[str]:
    """Yield parts of about `size` characters, cut at line ends, so that only the needed part of a book is tokenized."""
    start = 0
    while start < len(document):
        stop = document.find("\n", start + size) + 1 or len(document)
        yield document[start:stop]
        start = stop


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer adds before and after a text ([CLS] and [SEP], <s>)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []
