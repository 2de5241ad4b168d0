"""From finished pieces to a Hugging Face folder: shards with an index, config, tokenizer, shims."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from surgery.checkpoint import quantization_table
from surgery.errors import SurgeryError
from surgery.journal import Journal
from surgery.shards import Entry, TensorInfo, read_header, write_shard
from surgery.skeleton import Skeleton
from surgery.source import INDEX, SINGLE, Source
from surgery.storage import is_disk, write_json

SHARD_BYTES = 5_000_000_000


def assemble(folder: Path, pieces: list[Path], journal: Journal) -> dict[str, str]:
    """Join pieces into shards of at most SHARD_BYTES, never holding more than a few megabytes, each piece
    removed once its shard is durable; tensor name -> shard."""
    sizes = {p: sum(t.nbytes for t in read_header(p).values()) for p in pieces if p.exists()}
    if (planned := journal.find("shards")) is None:
        groups = _grouped([(p.name, sizes[p]) for p in pieces])
        journal.add("shards", groups=groups)
    else:
        groups = planned["groups"]
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups):
        name = SINGLE if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        paths = [pieces[0].parent / piece for piece in group]
        if journal.find("shard", name=name) is None:
            _join(folder / name, paths)
            journal.add("shard", name=name)
        for path in paths:
            path.unlink(missing_ok=True)
        weight_map.update(dict.fromkeys(read_header(folder / name), name))
    if len(groups) > 1:
        total = sum(t.nbytes for name in set(weight_map.values()) for t in read_header(folder / name).values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return weight_map


def _grouped(sizes: list[tuple[str, int]]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if groups[-1] and filled + size > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _join(target: Path, pieces: list[Path]) -> None:
    if len(pieces) == 1:
        if pieces[0].exists():  # else killed after this very move
            pieces[0].replace(target)
        return
    tensors: dict[str, TensorInfo] = {}
    for piece in pieces:
        tensors.update(read_header(piece))
    write_shard(target, [Entry.copy(name, info) for name, info in tensors.items()])


def out_config(source: Source, skeleton: Skeleton, table: dict[str, Any], mixers: dict[str, Any]) -> dict[str, Any]:
    """The source's config with our tables; a replaced head is no longer tied."""
    config = {**source.config, "quantization_config": quantization_table(table, mixers)}
    twins = {name.removesuffix(".weight") for pair in skeleton.tied.items() for name in pair}
    return _untied(config, skeleton.config) if twins & set(table) else config


def _untied(config: dict[str, Any], loaded: Any) -> dict[str, Any]:
    """With tie_word_embeddings off and nothing else changed: what the config's class would conclude from that
    (T5: not to scale the decoder's output) is said as it was."""
    config = {**config, "tie_word_embeddings": False}
    before = loaded.to_dict()
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    after = type(loaded).from_dict(plain).to_dict()
    changed = {k for k in before if before[k] != after.get(k, before[k])} - {"tie_word_embeddings"}
    return {**config, **{k: before[k] for k in changed}}


def copy_companions(source: Source, folder: Path) -> None:
    try:
        for path in source.companions():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.folder / path, folder / path)
    except OSError as error:
        if is_disk(error):
            raise
        raise SurgeryError(
            f"cannot copy the files beside the weights (tokenizer, licence, sub-folders): {error}"
        ) from None
