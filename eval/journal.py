"""Journal of an unfinished suite, from which an interrupted evaluation continues: every finished batch is appended at
once.

    DIR/<model>-<fingerprint>/.<suite>.unfinished/<key>.<process>.jsonl      {"key": .., "value": ..}     one line per sample

<key> in the file name is the digest of what the result depends on (results/store.py: model, options, precision,
versions). The key of a line is the digest of the request, the data sets read so far by content, and the kind of work.
So other data gives other keys. The folder is removed when the suite's result is written. A line that was cut off by a
kill is ignored, and its sample is computed again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from surgery.core.distributed import DistContext
from surgery.core.files import no_link
from surgery.eval.results.data_read import current_reads
from surgery.eval.suite import Sample, stable_id

TENSOR, SAMPLE = "__tensor__", "__sample__"  # marks of values that JSON does not have


class SampleJournal:
    """Finished samples of one suite of one model.

    Attributes:
        stored: key -> value of the samples finished before this process began; the same in every process.
        used: how many of them were used.
    """

    def __init__(self, folder: Path, key: dict[str, Any], ranks: DistContext):
        """folder: the folder of the suite's result; key: what the result depends on (results/store.py)."""
        self.folder = folder.with_name(f".{folder.name}.unfinished")
        self.name, self.ranks, self.used = stable_id(key), ranks, 0
        # Broadcast: all processes must divide the same remaining items.
        self.stored: dict[str, Any] = ranks.broadcast_object(self._read() if ranks.main else {})

    def key_of(self, title: str, request: Any) -> str:
        """Return the key of a request (JSON data, or anything with a repr that says all). title: kind of work."""
        return stable_id(title, current_reads(), request if isinstance(request, (list, dict)) else repr(request))

    def append(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Append the samples of a finished batch."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"key": key, "value": value}, default=_encode) for key, value in zip(keys, values))
        path = self.folder / f"{self.name}.{self.ranks.index}.jsonl"
        with open(path, "a", encoding="utf-8", opener=no_link) as file:
            # Each line starts with a newline, so that an incomplete line before it does no harm.
            file.write("".join("\n" + line for line in lines))

    def remove(self) -> None:
        """Remove the journal, and those of other options of this suite. Called when the suite's result is on disk."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if not self.folder.is_dir() or self.folder.is_symlink():
            return values
        for path in sorted(self.folder.glob(f"{self.name}.*.jsonl")):
            with open(path, encoding="utf-8", errors="replace", opener=no_link) as file:
                for line in file:
                    try:
                        entry = json.loads(line, object_hook=_decode)
                        values[entry["key"]] = entry["value"]
                    except (ValueError, KeyError, TypeError, RecursionError):
                        continue  # a line cut off by an interruption
        return values


def _encode(value: Any) -> Any:
    """Return a tensor or a Sample as JSON data; floats keep every bit."""
    import torch

    if isinstance(value, torch.Tensor):
        return {TENSOR: str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, Sample):
        return {SAMPLE: value.to_dict()}
    if hasattr(value, "item"):  # a number of NumPy
        return value.item()
    raise TypeError(f"a suite's scores must be JSON data, tensors or samples (got a {type(value).__name__})")


def _decode(stored: dict[str, Any]) -> Any:
    """Return the value that `_encode` wrote."""
    if TENSOR in stored:
        import torch

        dtype = getattr(torch, str(stored[TENSOR]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{stored[TENSOR]!r} is not a dtype")
        return torch.tensor(stored["values"], dtype=dtype)
    if SAMPLE in stored:
        names = {field.name for field in fields(Sample)}
        return Sample(**{name: value for name, value in stored[SAMPLE].items() if name in names})
    return stored
