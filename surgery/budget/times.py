"""Time of one sequence on a device: a prompt of `at` tokens, and the decoding step after it.

    linears      by a table of measured times (surgery.planning.measured_times), where the device has one
    the rest     counted: max(2 products / rate, bytes / bandwidth)

Attention is always counted: products of scores and mixing, and in a decoding step the bytes of its cache. Rate and
bandwidth are the highest that the linears of the table reached, or, for a device without a table, those of its data
sheet, which no program reaches. Norms, embeddings and launches are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape, MixerConfig
from surgery.planning.measured_times import MeasuredTimes, included_tables, read_measured_times
from surgery.publish.summary import compare_costs

PHASES = ("decode", "prefill")
# Operations and bytes per second in bfloat16, without sparsity, of NVIDIA's data sheets (SXM).
DATA_SHEETS = {"h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "a100": (312e12, 2.04e12)}
PER_MS = 1e-3
MEASURE = "Measure it with surgery bench linear --model SRC --out FILE, and give --measured FILE"


@dataclass(frozen=True)
class Device:
    """What a device needs for operations and bytes. rate, bandwidth: per ms. times: measured linears, None without a
    table. at: tokens of the prompt.
    """

    name: str
    rate: float
    bandwidth: float
    at: int
    times: MeasuredTimes | None = None
    width: ClassVar[int] = 2  # bytes of a weight

    def describe(self) -> str:
        """Return in a sentence where the times come from."""
        attention = "attention counted as products and bytes of its cache"
        if self.times is not None:
            return (
                f"times on {self.name} ({self.times.dtype}): linears from measured sizes and between them, others by their "
                f"products and bytes beside those of the dense linear; {attention}, at the highest rate and bandwidth of the table"
            )
        return (
            f"times on {self.name} are counted, not measured: products and bytes at the rate and bandwidth of its data "
            f"sheet, less than any program takes; {attention}. {MEASURE}"
        )

    def linear_ns(
        self,
        phase: str,
        shape: tuple[int, int],
        config: dict[str, Any] | None,
        params: int,
        *,
        last: bool = False,
        active: float = 1.0,
    ) -> int:
        """Return the nanoseconds of a linear (out, in). config: of its structure, None if it is dense. params: stored
        elements. last: whether it reads only the last token of a prompt. active: share of the tokens that it computes,
        below 1 for a routed expert: of a prompt it computes so many, in a decoding step all of one token so often.
        """
        if active < 1 and phase == "decode":
            return round(active * self.linear_ns(phase, shape, config, params, last=last))
        tokens = 1 if phase == "decode" or last else max(1, round(active * self.at))
        found = None
        if self.times is not None and config is None:
            found = self.times.dense(phase, tokens, *shape, farthest=math.inf)
        elif self.times is not None:
            found = self.times.structured(phase, tokens, config or {}, shape)
            found = found or self.times.scaled(phase, tokens, params, shape)
        if found is not None:
            return round(found.ms * 1e6)
        moved = self.width * (params + tokens * sum(shape))
        return round(max(2 * tokens * params / self.rate, moved / self.bandwidth) * 1e6)

    def attention_ns(self, phase: str, config: MixerConfig | None, shape: AttentionShape, dtype: torch.dtype) -> int:
        """Return the nanoseconds of attention without its projections. config: of the mixer, None for softmax."""

        def cost(length: int, name: str) -> int:
            return compare_costs(config, shape, length, dtype)[name][1]

        if phase == "decode":
            products, moved = cost(self.at, "macs"), cost(self.at, "cache_bytes")
            return round(max(2 * products / self.rate, moved / self.bandwidth) * 1e6)
        # Products of all tokens by Simpson's rule: exact where those of a token grow linearly, or not at all.
        middle = cost(max(1, self.at // 2), "macs")
        products = self.at * (cost(1, "macs") + 4 * middle + cost(self.at, "macs")) // 6
        return round(2 * products / self.rate * 1e6)


def find_device(name: str | None, measured: Path | None, at: int) -> Device:
    """Return a device by name, such as h200 or "NVIDIA H200", or that of a file of `surgery bench linear --out`. None:
    the first device with an included table.

    Raises SurgeryError for a device that neither a table nor a data sheet here has.
    """
    if measured is not None:
        return _with_table([read_measured_times(measured)], at)
    tables = [table for table in included_tables() if name is None or name.casefold() in table["device"].casefold()]
    if tables:
        first = [t for t in tables if (t["device"], t["dtype"]) == (tables[0]["device"], tables[0]["dtype"])]
        return _with_table(first, at)
    assert name is not None
    if sheet := DATA_SHEETS.get(name.casefold().removeprefix("nvidia ").split(" ")[0]):
        return Device(name, sheet[0] * PER_MS, sheet[1] * PER_MS, at)
    known = dict.fromkeys([*(table["device"] for table in included_tables()), *DATA_SHEETS])
    raise SurgeryError(f"--on must be one of {', '.join(known)} (got {name!r}). {MEASURE}")


def _with_table(tables: Sequence[dict[str, Any]], at: int) -> Device:
    times = MeasuredTimes({**tables[0], "rows": [row for table in tables for row in table["rows"]]})
    if not times.rate or not times.bandwidth:
        raise SurgeryError(f"the table of {tables[0]['device']} has no times of dense linears. {MEASURE}")
    return Device(tables[0]["device"], times.rate, times.bandwidth, at, times)
