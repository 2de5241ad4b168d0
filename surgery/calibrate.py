"""Calibration: text to windows of tokens, windows to second moments. No activation is kept.

For a linear y = W x, with x the input that the already converted layers give and y* the output to be
reproduced (the original layer's, on the original input):

    C = E[x x^T]    K = E[y* x^T]    e = E|y*|^2        error(B) = e - 2 <B, K> + <B C, B>

so the best unconstrained matrix is K C^-1, and its structured stand-in is the projection of that in C.
"""

from __future__ import annotations

import codecs
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.parts import Turn
from surgery.ranks import Ranks
from surgery.remote_code import refuse_code
from surgery.shards import finite
from surgery.storage import read_json
from surgery.structures import Metric
from surgery.structures.metric import add_moment_, inner


# -- text ------------------------------------------------------------------------------------------
def calibration_inputs(
    text: str,
    source_folder: Path,
    config: Any,
    tokens: int,
    length: int,
    trust_remote_code: bool = False,
    notes: list[str] | None = None,
) -> dict[str, Tensor]:
    """The model's inputs: `tokens` tokens of the text in windows of `length`, special tokens as the tokenizer
    adds them; an encoder-decoder reads the first half of a window and writes the second.

    text: a file (.txt, .md, .json, .jsonl, .parquet, .csv; .safetensors with ready inputs, for models of
    images or sound) or a Hub data set, "org/name" or "org/name:config:split:column". notes: gets what was odd about it.
    """
    path = Path(text)
    if path.suffix == ".safetensors":
        return ready_inputs(path)
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


def ready_inputs(path: Path) -> dict[str, Tensor]:
    from surgery.shards import read_header, read_tensor

    if not path.is_file():
        raise SurgeryError(f"calibration file {path} does not exist")
    inputs = {name: read_tensor(info) for name, info in read_header(path).items()}
    if not inputs or len({len(t) for t in inputs.values() if t.dim()}) != 1:
        raise SurgeryError(
            f"{path}: every tensor needs the same number of rows, for example pixel_values (64, 3, 224, 224)"
        )
    return inputs


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint. trust_remote_code is never left to transformers' default, which asks on the terminal."""
    from transformers import AutoTokenizer

    folder = Path(folder)
    config = folder / "config.json"
    known = read_json(config) if config.is_file() else {}
    refuse_code(folder, str(folder), known if isinstance(known, dict) else {}, trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        raise SurgeryError(
            f"{folder} has no tokenizer that transformers can load ({' '.join(str(error).split())[:200]}); "
            "put its tokenizer files beside the weights"
        ) from None


FILES = (".txt", ".md", ".json", ".jsonl", ".parquet", ".csv", ".safetensors")
HUB_DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^:]*){0,3}")


def document_stream(text: str, notes: list[str] | None = None) -> Iterator[str]:
    """The documents of a file or of a Hub data set, streamed; notes (else warnings) tell how a file was decoded."""
    path = Path(text)
    if path.is_file():
        if path.suffix in (".json", ".jsonl", ".parquet", ".csv"):
            return _rows(path.suffix[1:].replace("jsonl", "json"), None, "train", None, {"data_files": str(path)})
        read, note = decoded(path)
        if note and notes is None:
            warnings.warn(note, UserWarning, stacklevel=2)
        elif note and notes is not None:
            notes.append(note)
        return iter([read])
    if not HUB_DATASET.fullmatch(text) or path.suffix in FILES:
        raise SurgeryError(f"calibration text {text!r} is not a file; give a text file, or a Hub data set as org/name")
    name, _, rest = text.partition(":")
    config, split, column = ([*rest.split(":"), "", "", ""])[:3]
    return _rows(name, config or None, split or "train", column or None, {})


def encoding_of(start: bytes) -> str | None:
    """UTF-16 or UTF-32 by its mark, or UTF-16 by where its zero bytes stand; None where it may be UTF-8."""
    for mark, name in MARKS:
        if start.startswith(mark):
            return name
    if len(start) < 8 or 0 not in start:
        return None
    even, odd = start[::2].count(0), start[1::2].count(0)
    share = max(even, odd) / max(1, len(start) // 2)
    return ("utf-16-le" if odd > even else "utf-16-be") if share > 0.2 and min(even, odd) < max(even, odd) / 4 else None


# The longer mark first: that of UTF-32 begins with that of UTF-16.
MARKS = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16")),
    *((codecs.BOM_UTF16_BE, "utf-16"), (codecs.BOM_UTF8, "utf-8-sig")),
)
UNREADABLE = 0.1  # share of characters that are no UTF-8, from which a file is no text


def decoded(path: Path) -> tuple[str, str | None]:
    """(text, a note or None): UTF-8, or UTF-16 and UTF-32 where the bytes say so; SurgeryError for what is none of them."""
    data = path.read_bytes()
    name = encoding_of(data[:4096])
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


def _rows(name: str, config: str | None, split: str, column: str | None, options: dict[str, Any]) -> Iterator[str]:
    import datasets

    # Of local files `datasets` keeps columns by path and mtime, and casts rows of changed files to them: nothing is kept here.
    local = "data_files" in options or Path(name).is_dir()
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
    except Exception as error:  # datasets raises many kinds, from many libraries
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
        except Exception as error:  # as above, further into the file
            raise SurgeryError(f"cannot read calibration data {where}: {' '.join(str(error).split())[:200]}") from None
        if row is None:
            return
        if isinstance(row.get(column), str):  # not a row without it
            yield row[column]


def text_windows(documents: Iterator[str], tokenizer: Any, tokens: int, length: int, where: str) -> Tensor:
    """(N, length) ids: the documents joined and cut into windows, each with the tokenizer's own specials."""
    prefix, suffix = special_tokens(tokenizer)
    body, wanted = length - len(prefix) - len(suffix), max(1, tokens // length)
    ids: list[int] = []
    for document in documents:
        for piece in _pieces(document):
            ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= wanted * body:
                break
        if len(ids) >= wanted * body:
            break
    count = min(wanted, len(ids) // body)
    if wanted < 2:
        raise SurgeryError(
            f"{tokens:,} tokens make {wanted} window of {length}; at least two are needed: more tokens, or a length of "
            f"{max(8, tokens // 4)} or less"
        )
    if count < 2:
        raise SurgeryError(
            f"{where} has {len(ids):,} tokens; at least two windows of {length} are needed "
            f"(a longer text, or --set length={max(8, len(ids) // 4)})"
        )
    rows = [prefix + ids[i * body : (i + 1) * body] + suffix for i in range(count)]
    return torch.tensor(rows, dtype=torch.int64)


def _pieces(document: str, size: int = 2**20) -> Iterator[str]:
    """A long document in parts cut at line ends, so that a book is not tokenised for its first page."""
    start = 0
    while start < len(document):
        stop = document.find("\n", start + size) + 1 or len(document)
        yield document[start:stop]
        start = stop


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids the tokenizer puts before and after a text by itself ([CLS] .. [SEP], <s>)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


# -- moments ---------------------------------------------------------------------------------------
@dataclass
class Target:
    """What is kept of one output: K itself (O, I); or nothing, where the output is just W x0 and O is
    large, so that E[x0 x^T] (I, I), shared by every matrix that reads x0, says as much."""

    weight_OI: Tensor
    residual: bool
    k_OI: Tensor | None = None
    energy: float = 0.0  # E|y*|^2

    @property
    def shares(self) -> bool:
        return not self.residual and self.weight_OI.shape[0] > self.weight_OI.shape[1]


class Moments:
    """Means over rows for the matrices that read one input; weights: name -> (W, whether the residual stream's
    gap is added to its output). Rows are `add`ed, `means` ends that: sums become means where they lie."""

    def __init__(self, weights: dict[str, tuple[Tensor, bool]]):
        first = next(iter(weights.values()))[0]
        self.count, self.diverged, self.summing = 0, False, True
        self.known: dict[Any, Any] = {}  # functions of C, once for every matrix of the stage
        self.targets = {name: Target(w, residual) for name, (w, residual) in weights.items()}
        self.c_II = first.new_zeros(first.shape[1], first.shape[1])
        shared = any(t.shares for t in self.targets.values())
        self.cross_II = torch.zeros_like(self.c_II) if shared else None  # E[x0 x^T]
        self.original_II = torch.zeros_like(self.c_II) if shared else None  # E[x0 x0^T]
        for target in self.targets.values():
            if not target.shares:
                target.k_OI = torch.zeros_like(target.weight_OI)

    def add(self, x_NI: Tensor, x0_NI: Tensor, gap_NO: Tensor | None = None) -> None:
        """x: the converted stream's input; x0: the original's (the same tensor while the streams are one);
        gap: original minus converted residual stream."""
        assert self.summing
        self.count += len(x_NI)
        add_moment_(self.c_II, x_NI)
        if x_NI is not x0_NI or gap_NO is not None:
            self.diverged = True
        if self.cross_II is not None and self.original_II is not None:
            self.cross_II.addmm_(x0_NI.mT, x_NI)
            add_moment_(self.original_II, x0_NI)
        for target in self.targets.values():
            if target.k_OI is None:
                continue
            y_NO = x0_NI @ target.weight_OI.mT
            if target.residual and gap_NO is not None:
                y_NO += gap_NO
            target.energy += inner(y_NO, y_NO)
            target.k_OI.addmm_(y_NO.mT, x_NI)

    def fold(self, part: Moments, turn: Turn, ranks: Ranks, first: bool) -> None:
        """+= the parts of a turn, in order; with others, each process adds some of the rows."""
        for mine, other in zip(self.held(), part.held()):
            ranks.fold_(mine, other, turn.holders, first)
        energies = {name: target.energy for name, target in part.targets.items()}
        said = ranks.gather((part.count, part.diverged, energies))
        for count, diverged, found in (said[holder] for holder in turn.holders):
            self.count, self.diverged = self.count + count, self.diverged or diverged
            for name, energy in found.items():
                self.targets[name].energy += energy

    def means(self) -> Moments:
        assert self.summing
        for total in self.held():
            total /= self.count
            if not finite(total):
                raise SurgeryError(
                    f"calibration: what reaches {', '.join(self.targets)} holds NaN or Inf, or overflows float32 when it is "
                    "squared; the original model computes no usable numbers on this text: check the checkpoint"
                )
        for target in self.targets.values():
            target.energy /= self.count
        self.summing = False
        return self

    def cross(self, name: str) -> Tensor:
        """K (O, I)."""
        target = self.targets[name]
        if target.k_OI is not None:
            return target.k_OI
        assert self.cross_II is not None
        return target.weight_OI @ self.cross_II

    def energy(self, name: str) -> float:
        """E|y*|^2."""
        target = self.targets[name]
        if target.k_OI is not None:
            return target.energy
        assert self.original_II is not None
        return Metric(self.original_II).square(target.weight_OI)

    def held(self) -> list[Tensor]:
        held = [self.c_II, self.cross_II, self.original_II, *(t.k_OI for t in self.targets.values())]
        return [t for t in held if t is not None]


ROWS = 1024  # of a matrix, judged at a time


class Check:
    """Judgement of one matrix by moments: how far B x is from y*, on the rows they were gathered from."""

    def __init__(self, moments: Moments, name: str, g_OO: Tensor | None):
        assert not moments.summing
        self.c_II, self.k_OI = moments.c_II, moments.cross(name)
        self.g_OO = g_OO
        self.wanted = moments.energy(name)

    def measure(self, b_OI: Tensor) -> tuple[float, float]:
        """(loss, error): <G (B C - 2 K), B>, the weighted squared error up to a constant; and, unweighted,
        sqrt(E|y* - B x|^2 / E|y*|^2). A few rows of B C - 2 K at a time: all of them are as large as B."""
        plain = loss = 0.0
        for first in range(0, len(b_OI), ROWS):
            rows = slice(first, first + ROWS)
            change_RI = torch.addmm(self.k_OI[rows], b_OI[rows], self.c_II, beta=-2)
            each_R = torch.linalg.vecdot(change_RI, b_OI[rows])
            plain += float(each_R.sum(dtype=torch.float64))
            if self.g_OO is not None and self.g_OO.dim() == 1:
                loss += float((self.g_OO[rows] * each_R).sum(dtype=torch.float64))
            elif self.g_OO is not None:
                loss += float((self.g_OO[rows] * (change_RI @ b_OI.mT)).sum(dtype=torch.float64))
        error = (max(plain + self.wanted, 0.0) / max(self.wanted, 1e-30)) ** 0.5
        return (plain if self.g_OO is None else loss), error
