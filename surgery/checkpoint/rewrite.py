"""Write a converted checkpoint with some tensors changed: built in OUT.partial, then renamed to OUT."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from surgery.checkpoint.companions import COPIED
from surgery.checkpoint.safetensors_io import TensorSource, read_header, write_shard
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.writer import copy_companions, delivered_files, known_work_files, write_checkpoint
from surgery.core.errors import SurgeryError
from surgery.core.files import (
    acquire_lock,
    check_no_links,
    check_no_unknown_files,
    explain_disk_errors,
    partial_path,
    write_json,
)
from surgery.core.journal import JOURNAL_NAME, Journal

REWRITE_KEY, LOCK_LABEL = "rewrite", "command"
MAX_SHARD_BYTES = 2**29  # of the files written on the way: the tensors of one are in memory together


def rewrite_checkpoint(
    source: CheckpointSource,
    out: Path,
    write_files: Callable[[Path], list[Path]],
    config: dict[str, Any],
    extra_files: tuple[str, ...] = (),
) -> None:
    """Write a new version of `source` to `out`.

    write_files(folder): writes all tensors as safetensors files into the folder and returns them in order. config: the
    new config.json. extra_files: files copied unchanged from the source if it has them.
    """
    partial = partial_path(out)
    with explain_disk_errors(out):
        _remove_leftovers(partial, [*known_work_files(source), *COPIED, *extra_files])
        with Journal(partial, {REWRITE_KEY: source.fingerprint()}, resume=False, what=LOCK_LABEL) as journal:
            try:
                (partial / "pieces").mkdir()
                files = write_files(partial / "pieces")
                expected = {name for file in files for name in read_header(file)}
                delivered = delivered_files(source, write_checkpoint(partial, files, journal, expected))
                copy_companions(source, partial)
                for name in extra_files:
                    if (source.folder / name).is_file():
                        shutil.copyfile(source.folder / name, partial / name)
                        delivered.add(name)
                write_json(partial / "config.json", config)
                shutil.rmtree(partial / "pieces")
                open_converted_checkpoint(str(partial))
                journal.move(out, delivered)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise


def _remove_leftovers(partial: Path, known: list[str]) -> None:
    """Remove what a killed rewrite left behind; raise SurgeryError if the folder belongs to a conversion or training
    run.
    """
    check_no_links(partial)
    if not partial.exists():
        return
    lock = acquire_lock(partial, LOCK_LABEL)
    try:
        lines = (partial / JOURNAL_NAME).read_bytes().splitlines() if (partial / JOURNAL_NAME).is_file() else []
        if lines and f'"{REWRITE_KEY}"'.encode() not in lines[0]:
            raise SurgeryError(
                f"{partial} holds an interrupted surgery convert or finetune. Continue it with --resume, "
                "remove that folder, or choose another --out"
            )
        check_no_unknown_files(partial, known)
        shutil.rmtree(partial)
    finally:
        lock.close()


def write_shards(entries: Iterable[TensorSource], folder: Path) -> list[Path]:
    """Write tensors into files of about MAX_SHARD_BYTES; return the files."""
    files: list[Path] = []
    batch: list[TensorSource] = []

    def write() -> None:
        files.append(folder / f"{len(files):05d}.safetensors")
        write_shard(files[-1], batch)
        batch.clear()

    for entry in entries:
        batch.append(entry)
        if sum(e.nbytes for e in batch) > MAX_SHARD_BYTES:
            write()
    if batch:
        write()
    return files
