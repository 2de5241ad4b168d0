"""What a conversion removes before all else: a choice that is made once and entered into the journal, with the tensors
that it changes in a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgery.conversion.context import ConversionContext
from surgery.core.digests import hash_file
from surgery.core.errors import SurgeryError
from surgery.core.journal import Journal

Entry = dict[str, Any]  # {"record": the report's entry, "sha256": of the file, "" without one}


def journaled_choice(
    ctx: ConversionContext, journal: Journal, step: str, file: Path, choose: Callable[[], Entry]
) -> Entry:
    """Return the journal's entry of a step; that of an interrupted run if its file is intact. Process 0 computes.

    Raises SurgeryError if the file was lost, and what is computed now differs.
    """
    entry: Entry | None = journal.find(step)
    if entry is None or not _is_intact(file, entry):
        made = ctx.dist.on_main(choose)
        if entry is None:
            journal.add(step, **made)
        elif made["sha256"] != entry["sha256"]:
            raise SurgeryError(
                f"{file} was lost or changed, and this machine computes other values, so finished steps do not fit "
                f"them. Remove {ctx.work_dir} to start again"
            )
        entry = made
    return entry


def _is_intact(file: Path, entry: Entry) -> bool:
    return not entry["sha256"] or (file.is_file() and hash_file(file) == entry["sha256"])
