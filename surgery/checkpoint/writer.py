"""Writing a Hugging Face folder from finished layer files: shards with an index, config, and companion files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from glob import escape
from pathlib import Path
from typing import Any

from surgery.checkpoint.meta_model import MetaModel, config_object
from surgery.checkpoint.pruned_sizes import with_pruned_sizes
from surgery.checkpoint.safetensors_io import TensorInfo, TensorSource, file_digest, read_header, write_shard
from surgery.checkpoint.source import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, CheckpointSource
from surgery.checkpoint.table import SHIM_NAME, quantization_table
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, is_disk_error, write_json
from surgery.core.journal import Journal

SHARD_BYTES = 5_000_000_000  # a layer file that is larger alone stays whole


Rewrite = Callable[[Iterable[TensorSource]], Iterable[TensorSource]]


def write_checkpoint(
    folder: Path, layer_files: list[Path], journal: Journal, expected: set[str], rewrite: Rewrite | None = None
) -> dict[str, str]:
    """Merge layer files into shards of at most SHARD_BYTES and return the shard of each tensor.

    Memory use is a few megabytes; each layer file is removed once its shard is on disk. expected: names of all tensors.
    rewrite: returns the tensors of a layer file as the shards have them; None: as they are.
    Raises SurgeryError if the shards hold any other set.
    """
    groups = _groups(layer_files, journal)
    weight_map: dict[str, str] = {}
    files = iter(layer_files)
    for i, group in enumerate(groups):
        name = shard_name(i, len(groups))
        paths = [next(files) for _ in group]
        if journal.find("shard", name=name) is None:
            journal.add("shard", name=name, sha256=_merge_shards(folder / name, paths, rewrite))
        for path in paths:
            path.unlink(missing_ok=True)
        weight_map.update(dict.fromkeys(read_header(folder / name), name))
    _check_joined_tensors(weight_map, expected, folder)
    if len(groups) > 1:
        total = sum(t.nbytes for name in set(weight_map.values()) for t in read_header(folder / name).values())
        write_json(
            folder / SAFE_WEIGHTS_INDEX_NAME,
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        )
    return weight_map


WORK_FILES = (
    "journal*.jsonl",
    "lock",
    "pieces/*.safetensors",
    "curvature/*.safetensors",
    "aligned/*.safetensors",
    "gates/*.safetensors",
    "fitted/*.safetensors",
    "generated.safetensors",
    "depth.safetensors",
    "experts.safetensors",
    "generated-*.safetensors",
    "hidden-*",
    "pieces/",
    "curvature/",
    "aligned/",
    "gates/",
    "fitted/",
)
RESULT_FILES = ("model*.safetensors", SAFE_WEIGHTS_INDEX_NAME, "config.json", SHIM_NAME, REPORT_NAME)


def known_work_files(source: CheckpointSource) -> list[str]:
    """Return patterns of the files that an interrupted command may leave in OUT.partial, for
    `check_no_unknown_files`.
    """
    return [*WORK_FILES, *RESULT_FILES, *(escape(path.as_posix()) for path in source.companions())]


def delivered_files(source: CheckpointSource, weight_map: dict[str, str]) -> set[str]:
    """Return the names of the files of a written checkpoint: shards, index, config and companions of the source."""
    shards = set(weight_map.values())
    index = {SAFE_WEIGHTS_INDEX_NAME} if len(shards) > 1 else set()
    return {*shards, *index, "config.json", *(path.as_posix() for path in source.companions())}


def concatenate(groups: list[list[str]]) -> list[str]:
    """Return the concatenation of lists of names."""
    return [name for group in groups for name in group]


def shard_name(index: int, count: int) -> str:
    """Return the file name of shard `index` of `count`."""
    return SAFE_WEIGHTS_NAME if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _groups(layer_files: list[Path], journal: Journal) -> list[list[str]]:
    """Return the layer files of each shard.

    Groups in the journal are used only if they hold exactly these files in this order, because files are merged and
    removed.
    """
    names = [file.name for file in layer_files]
    if (planned := journal.find("shards")) is not None:
        if concatenate(planned["groups"]) != names or not all(planned["groups"]):
            raise SurgeryError(
                f"the journal in {journal.folder} lists other layer files than this conversion has; remove that folder "
                "to start again"
            )
        groups: list[list[str]] = planned["groups"]
        return groups
    groups = _group_shards([(p.name, sum(t.nbytes for t in read_header(p).values())) for p in layer_files])
    journal.add("shards", groups=groups)
    return groups


def _check_joined_tensors(files_by_name: dict[str, str], expected: set[str], folder: Path) -> None:
    if wrong := sorted(files_by_name.keys() ^ expected):
        lacking = "lack" if wrong[0] in expected else "have, but should not have,"
        raise SurgeryError(
            f"the joined weights in {folder} {lacking} tensor {wrong[0]!r} (and {len(wrong) - 1} more differ); "
            "remove that folder to start again"
        )


def _group_shards(sizes: list[tuple[str, int]]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if groups[-1] and filled + size > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _merge_shards(target: Path, layer_files: list[Path], rewrite: Rewrite | None = None) -> str:
    """Merge layer files into one file and return its SHA-256. rewrite: see `write_checkpoint`."""
    if rewrite is not None:
        rewritten = [path.with_name(f"{path.stem}.rewritten{path.suffix}") for path in layer_files]
        for path, new in zip(layer_files, rewritten):
            entries = (TensorSource.from_file(name, info) for name, info in read_header(path).items())
            write_shard(new, rewrite(entries))
        digest = _merge_shards(target, rewritten)
        for new in rewritten:
            new.unlink(missing_ok=True)
        return digest
    if len(layer_files) == 1:
        if layer_files[0].exists():  # otherwise an earlier run was killed right after this rename
            layer_files[0].replace(target)
        return file_digest(target) or ""
    tensors: dict[str, TensorInfo] = {}
    for file in layer_files:
        header = read_header(file)
        if twice := header.keys() & tensors.keys():
            raise SurgeryError(f"{file} holds tensor {min(twice)!r}, which another layer file holds too")
        tensors.update(header)
    return write_shard(target, [TensorSource.from_file(name, info) for name, info in tensors.items()])


def converted_config(
    source: CheckpointSource, meta_model: MetaModel, table: dict[str, Any], mixers: dict[str, Any]
) -> dict[str, Any]:
    """Return the source's config with the table of replacements, and with the model's class if the source names none.

    Replacing the head or the embedding unties them. Pruned MLPs of one width, pruned attention of one number of heads
    and fewer layers or experts are in the config alone, and without other replacements there is no table.
    """
    architectures = meta_model.config.architectures
    named = {} if source.config.get("architectures") or not architectures else {"architectures": architectures}
    plain, rest = with_pruned_sizes({**source.config, **named}, table, meta_model)
    if not rest and not mixers and (table or source.whole is not None):
        return plain
    table = rest
    config = {**plain, "quantization_config": quantization_table(table, mixers, meta_model.unused)}
    twins = {name.removesuffix(".weight") for pair in meta_model.tied.items() for name in pair}
    return _untie_config(config, meta_model.config) if twins & set(table) else config


def _untie_config(config: dict[str, Any], loaded: Any) -> dict[str, Any]:
    """Turn off tie_word_embeddings and keep all else.

    Values that the config's class would derive from it (T5: not to scale the decoder's output) are written out as
    before.
    """
    config = {**config, "tie_word_embeddings": False}
    before = loaded.to_dict()
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    after = config_object(type(loaded), plain).to_dict()
    changed = {k for k in before if before[k] != after.get(k, before[k])} - {"tie_word_embeddings"}
    return {**config, **{k: before[k] for k in changed}}


def copy_companions(source: CheckpointSource, folder: Path) -> None:
    """Copy the companion files of the source into `folder`."""
    try:
        for path in source.companions():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.folder / path, folder / path)
    except OSError as error:
        if is_disk_error(error):
            raise
        raise SurgeryError(
            f"cannot copy the files beside the weights (tokenizer, license, subfolders): {error}"
        ) from None
