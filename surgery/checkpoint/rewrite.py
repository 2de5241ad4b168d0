"""A converted checkpoint written anew with some of its tensors changed: beside its place, then renamed into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgery.checkpoint.safetensors_io import read_header
from surgery.checkpoint.source import Source
from surgery.checkpoint.writer import assemble, copy_companions
from surgery.core.errors import SurgeryError
from surgery.core.files import disk_errors, locked, partial_of, write_json
from surgery.core.journal import NAME, Journal

REWRITE, WHAT = "rewrite", "command"


def rewrite(
    source: Source,
    out: Path,
    pieces: Callable[[Path], list[Path]],
    config: dict[str, Any],
    beside: tuple[str, ...] = (),
) -> None:
    """pieces(folder): writes all tensors into files there, in order; beside: files of the source that are copied as they
    are, where it has them."""
    partial = partial_of(out)
    with disk_errors(out):
        _remove_left(partial)
        with Journal(partial, {REWRITE: source.fingerprint()}, resume=False, what=WHAT) as journal:
            try:
                (partial / "pieces").mkdir()
                written = pieces(partial / "pieces")
                assemble(partial, written, journal, {name for piece in written for name in read_header(piece)})
                copy_companions(source, partial)
                for name in beside:
                    if (source.folder / name).is_file():
                        shutil.copyfile(source.folder / name, partial / name)
                write_json(partial / "config.json", config)
                shutil.rmtree(partial / "pieces")
                journal.move(out)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise


def _remove_left(partial: Path) -> None:
    """What one of these left that was killed; the work of a conversion or a healing is not ours to remove."""
    if not partial.exists():
        return
    lock = locked(partial, WHAT)
    try:
        lines = (partial / NAME).read_bytes().splitlines() if (partial / NAME).is_file() else []
        if lines and f'"{REWRITE}"'.encode() not in lines[0]:
            raise SurgeryError(
                f"{partial} holds work that was interrupted, of surgery convert or finetune; go on with it by --resume, "
                "remove that folder, or choose another --out"
            )
        shutil.rmtree(partial)
    finally:
        lock.close()
