"""A converted checkpoint written anew with some of its tensors changed: beside its place, then renamed into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgery.assemble import assemble, copy_companions
from surgery.conversion import partial_of
from surgery.errors import SurgeryError
from surgery.journal import Journal
from surgery.source import Source
from surgery.storage import write_json


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise SurgeryError(f"{out} exists; choose another --out, or remove it")


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
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with Journal(partial, {"rewrite": source.fingerprint()}, resume=False) as journal:
            (partial / "pieces").mkdir()
            assemble(partial, pieces(partial / "pieces"), journal)
        copy_companions(source, partial)
        for name in beside:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, partial / name)
        write_json(partial / "config.json", config)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(partial / "pieces", ignore_errors=True)
    for leftover in ("lock", "journal.jsonl"):
        (partial / leftover).unlink(missing_ok=True)
    os.replace(partial, out)
