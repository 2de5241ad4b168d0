"""Write and read teacher caches: for every token the k most likely next tokens, their log-probabilities, and the
log-probability of all other tokens together.

    write_teacher_cache(teacher, data, "cache", top_k=64, examples=10_000)
    cache = TeacherCache("cache")
    cache.check(data)                             the same tokenizer, text, order and length
    tokens_TK, log_probs_TK, rest_T = cache.targets(17)

A shard is complete or absent, and the index lists complete shards only, so an interrupted run continues with `resume`.
Row i is in the shard with the largest `first` <= i. Entry t predicts the token at t + 1, at temperature 1. Tensors of a
shard:

    tokens      int32    (rows, length, k)    most likely first
    log_probs   float16  (rows, length, k)    their natural log-probabilities
    rest        float32  (rows, length)       log of the total probability of all other tokens, at least -80
    input_ids   int32    (rows, length)       the teacher's input

Keys of index.json:

    format, version                       "surgery-teacher-cache", 1
    teacher, teacher_digest               name of the teacher; SHA-256 of its files
    top_k, length, dtype, vocabulary      tokens stored per position, tokens per row, precision of the teacher, size of
                                          its vocabulary
    examples, per_shard                   number of rows; rows per shard
    seed, sources, data, tokenizer        order and origin of the rows; SHA-256 of the data settings and of the tokenizer
    shards                                per shard: `file`, `first` row, `count` of rows, `bytes`, `sha256`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.safetensors_io import TensorInfo, TensorSource, read_tensor, write_shard
from surgery.core.digests import hash_file
from surgery.core.errors import SurgeryError
from surgery.core.files import check_no_links, exclusive_lock, explain_disk_errors, write_json
from surgery.core.progress import Progress
from surgery.training.data.dataset import Example, TrainingData
from surgery.training.data.packing import check_packed_attention
from surgery.training.data.tokenize import tokenizer_fingerprint
from surgery.training.teacher_cache.index import (
    FORMAT,
    INDEX_NAME,
    VERSION,
    is_intact,
    open_shard,
    read_index,
)
from surgery.training.top_k import top_k_log_probs

TENSOR_NAMES = ("tokens", "log_probs", "rest", "input_ids")
MAX_LOGITS = 2**26  # logits converted to float32 at a time


# -- writing ---------------------------------------------------------------------------------------
def write_teacher_cache(
    model: Any,
    data: TrainingData,
    out_dir: str | Path,
    top_k: int,
    examples: int,
    rows: int = 1,
    *,
    per_shard: int = 256,
    dtype: torch.dtype = torch.float16,
    resume: bool = False,
    teacher: str = "",
    progress: Progress | None = None,
    weights: str | None = None,
) -> dict[str, Any]:
    """Write the teacher's targets of the first `examples` examples of the data and return the index.

    rows: examples per forward. per_shard: examples per file. dtype: of the stored log-probabilities. teacher: its name
    for the index. weights: digest of the teacher's files, which must not change when resuming. resume: complete the
    cache in `out_dir`, writing lost or damaged shards again. Raises SurgeryError if `out_dir` holds a cache and
    `resume` is False, or holds one with other settings.
    """
    out = Path(out_dir)
    check_no_links(out)
    size = model.config.get_text_config().vocab_size
    if not 1 <= top_k <= size:
        raise SurgeryError(f"teacher cache: top_k must be 1 to {size:,} (got {top_k} of a vocabulary of {size:,}).")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise SurgeryError(f"teacher cache: dtype must be float16, bfloat16 or float32 (got {dtype}).")
    check_packed_attention(model, data.config.packing, rows)
    header = {
        "format": FORMAT, "version": VERSION, "teacher": teacher or getattr(model, "name_or_path", ""),
        "top_k": top_k, "length": data.length, "dtype": str(dtype).removeprefix("torch."), "vocabulary": size,
        "examples": examples, "per_shard": per_shard, "seed": data.seed,
        "tokenizer": tokenizer_fingerprint(data.tokenizer), "data": data.fingerprint(),
        "sources": [source.path for source in data.config.sources], "teacher_digest": weights,
    }  # fmt: skip
    with explain_disk_errors(out, "run the same command with --resume"):
        out.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(out, "teacher cache"):
            index = _open_index(out, header, resume)
            return _TargetWriter(model, data, out, rows, dtype).write_missing(index, progress or Progress())


def _open_index(out: Path, header: dict[str, Any], resume: bool) -> dict[str, Any]:
    """Return the index with its intact shards; `examples` may have grown since the cache was begun."""
    if not (out / INDEX_NAME).is_file():
        write_json(out / INDEX_NAME, {**header, "shards": []})
        return {**header, "shards": []}
    if not resume:
        raise SurgeryError(f"{out} already holds a teacher cache; finish it with --resume, or choose another folder.")
    index = read_index(out)
    if None in (header["teacher_digest"], index.get("teacher_digest")):  # unknown at one of the two times
        header["teacher_digest"] = index.get("teacher_digest")
    for key, value in header.items():
        if index.get(key) != value and key not in ("examples", "teacher", "sources"):
            raise SurgeryError(
                f"{out} was begun with another {key} ({index.get(key)}, now {value}). Resume with the original "
                "settings, or "
                "choose another folder."
            )
    good = [shard for shard in index["shards"] if is_intact(out, shard)]
    return {**index, "examples": max(header["examples"], index["examples"]), "shards": good}


@dataclass(frozen=True)
class _TargetWriter:
    """Writes shards of a cache into `out`. rows: examples per forward; dtype: of the stored log-probabilities."""

    model: Any
    data: TrainingData
    out: Path
    rows: int
    dtype: torch.dtype

    def write_missing(self, index: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Write all shards that the index lacks, updating it after each; return the complete index."""
        per, examples = index["per_shard"], index["examples"]
        shards_by_first = {shard["first"]: shard for shard in index["shards"]}
        missing = [
            f
            for f in range(0, examples, per)
            if f not in shards_by_first or shards_by_first[f]["count"] < min(per, examples - f)
        ]
        stream: Iterator[Example] = iter(())
        at = -1
        with progress.bar("running the teacher", len(missing)) as tick:
            for first in missing:
                if first != at:
                    stream = self.data.examples(first)
                some = [example for _, example in zip(range(min(per, examples - first)), stream)]
                if not some:
                    raise SurgeryError(
                        f"teacher cache: the data ends after {first:,} rows, but {examples:,} are needed. Leave out "
                        f"data.epochs, or write a cache of {first:,} rows."
                    )
                shards_by_first[first] = self._write_shard(some, first, index)
                index = {**index, "shards": [shards_by_first[f] for f in sorted(shards_by_first)]}
                write_json(self.out / INDEX_NAME, index)
                at = first + len(some)
                tick()
        return index

    def _write_shard(self, some: list[Example], first: int, index: dict[str, Any]) -> dict[str, Any]:
        """Write the targets of one shard, whose first example is number `first`; return its entry of the index."""
        file = f"targets-{first // index['per_shard']:05d}.safetensors"
        tokens, log_probs, rest = (
            torch.cat(parts) for parts in zip(*_iter_targets(self.model, some, index["top_k"], self.rows))
        )
        tensors = {
            "tokens": tokens.to(torch.int32),
            "log_probs": log_probs.to(self.dtype),
            "rest": rest,
            "input_ids": torch.stack([example["input_ids"] for example in some]).to(torch.int32),
        }
        write_shard(self.out / file, [TensorSource.from_tensor(name, tensor) for name, tensor in tensors.items()])
        size, digest = (self.out / file).stat().st_size, hash_file(self.out / file)
        return {"file": file, "first": first, "count": len(some), "bytes": size, "sha256": digest}


@torch.no_grad()
def _iter_targets(model: Any, some: list[Example], k: int, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (tokens_BTK, log_probs_BTK, rest_BT) on the CPU, for `rows` examples at a time."""
    model.eval()
    for start in range(0, len(some), rows):
        both = ({n: e[n] for n in ("input_ids", "position_ids")} for e in some[start : start + rows])
        inputs = {n: torch.stack(t).to(model.device) for n, t in _collect_by_name(both).items()}
        logits_BTV = model(**inputs, use_cache=False).logits
        flat_NV = logits_BTV.flatten(0, 1)
        parts = [
            top_k_log_probs(logits_NV, k, exact_rest=True)
            for logits_NV in flat_NV.split(max(1, MAX_LOGITS // flat_NV.shape[-1]))
        ]
        tokens, log_probs, rest = (torch.cat(p).unflatten(0, logits_BTV.shape[:2]).cpu() for p in zip(*parts))
        if not bool(torch.isfinite(log_probs).all()):
            raise SurgeryError(
                f"teacher cache: the teacher's logits of rows {start} to {start + rows} contain NaN or infinity. Load "
                "the "
                "teacher in bfloat16 or float32."
            )
        yield tokens, log_probs, rest


def _collect_by_name(rows: Iterable[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
    tensors_by_name: dict[str, list[Tensor]] = {}
    for row in rows:
        for name, tensor in row.items():
            tensors_by_name.setdefault(name, []).append(tensor)
    return tensors_by_name


# -- reading ---------------------------------------------------------------------------------------
class TeacherCache:
    """A teacher cache opened for reading. Rows are read on demand; a shard's checksum is verified at its first use."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        self.top_k, self.length = self.index["top_k"], self.index["length"]
        self.shards = {shard["first"] // self.index["per_shard"]: shard for shard in self.index["shards"]}
        self._opened: dict[int, dict[str, TensorInfo]] = {}
        self._rows: int | None = None

    def __len__(self) -> int:
        """Return the number of examples up to the first gap."""
        count = 0
        while (shard := self.shards.get(count // self.index["per_shard"])) is not None and shard["first"] == count:
            count += shard["count"]
            if shard["count"] < self.index["per_shard"]:
                break
        return count

    def check(self, data: TrainingData) -> None:
        """Raise SurgeryError unless the cache was written for the same tokenizer, length, seed and data."""
        tokenizer = tokenizer_fingerprint(data.tokenizer)
        for what, theirs, ours in (
            ("tokenizer", self.index["tokenizer"], tokenizer),
            ("length", self.length, data.length),
            ("seed", self.index["seed"], data.seed),
            ("data", self.index["data"], data.fingerprint()),
        ):
            if theirs != ours:
                raise SurgeryError(
                    f"teacher cache {self.folder} was written with another {what} ({_abbreviate(theirs)}, here "
                    f"{_abbreviate(ours)}; "
                    f"its sources: {', '.join(self.index['sources'])}). Train with the same {what}, or write a cache "
                    "for this run."
                )
        if data.config.rows is not None and data.config.rows > len(self):
            raise SurgeryError(
                f"teacher cache {self.folder} holds {len(self):,} rows, but data.rows is {data.config.rows:,}. Lower "
                "it, or "
                "write more rows with --resume."
            )
        self._rows = data.config.rows

    def targets(self, index: int, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (tokens (T, k) int32, log-probabilities (T, k), rest (T,) float32) of one example.

        index: number of the example in the data; input_ids (T,): if given, compared with the stored ones.
        """
        number = index if self._rows is None else index % self._rows
        at, row = divmod(number, self.index["per_shard"])
        shard = self.shards.get(at)
        if shard is None or row >= shard["count"]:
            raise SurgeryError(
                f"teacher cache {self.folder} holds {len(self):,} rows, but row {number:,} is needed. Write more rows "
                "with "
                f"--resume, or set data.rows={len(self)} to repeat these."
            )
        tensors = self._open(at, shard)
        row_tensors = {
            name: read_tensor(tensors[name].rows(row, row + 1))[0] for name in TENSOR_NAMES if name != "input_ids"
        }
        if input_ids is not None:
            stored = read_tensor(tensors["input_ids"].rows(row, row + 1))[0]
            if not torch.equal(stored.long(), input_ids.cpu().long()):
                raise SurgeryError(
                    f"teacher cache {self.folder}: row {number:,} has another text than the training example. Write a "
                    "cache for this run."
                )
        return row_tensors["tokens"], row_tensors["log_probs"], row_tensors["rest"]

    def _open(self, at: int, shard: dict[str, Any]) -> dict[str, TensorInfo]:
        if at not in self._opened:
            self._opened[at] = open_shard(self.folder, shard, self.length, self.top_k)
        return self._opened[at]


def _abbreviate(value: Any) -> str:
    return str(value)[:12]
