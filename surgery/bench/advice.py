"""What was measured to be slower than what it replaces, said where a plan or a report is shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from surgery.kernels.measured import WAYS, distance, nearest, table

TOKENS = (1, 16, 512, 8192)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
FAR, NEAR = 1.5, 0.5  # a row more than 4.5 times away in size says nothing; of lengths only those measured speak


def speed_notes(structures: Iterable[tuple[dict[str, Any], list[int]]], mixers: Iterable[str]) -> list[str]:
    """One line for each kind of linear (its config as data, (out, in)) and each mixer (as reports describe it) that loses
    somewhere."""
    if not table()["rows"]:
        return []
    found = {_linear(config, *shape) for config, shape in structures}
    found |= {_attention(mixer) for mixer in mixers}
    device = table()["device"]
    return [f"note: speed on one {device}: {said}" for said in sorted(found - {""})]


def plan_notes(plan: dict[str, Any]) -> list[str]:
    """Of a plan as surgery.report has it."""
    cuts = ((cut["first"], cut["shape"]) for cut in plan["cuts"] if cut["first"])
    return speed_notes(cuts, (row["mixer"] for row in plan["mixers"]))


def report_notes(report: dict[str, Any]) -> list[str]:
    """Of a report; it holds no shapes of linears, whose plan has said it."""
    return speed_notes((), (row["mixer"] for row in report.get("mixer_rows", ())))


def ratio(op: str, pass_: str, far: float = FAR, **sizes: int) -> float | None:
    """Times as fast as what it replaces, its fastest way; None where nothing near was measured."""
    row = nearest(op, pass_, **sizes)
    if row is None or "original" not in row or distance(row["sizes"], sizes) > far:
        return None
    ours = [row[way] for way in WAYS if row.get(way)]
    return row["original"] / min(ours) if ours else None


def _linear(config: dict[str, Any], out: int, in_: int) -> str:
    structure = {"monarch": "btt"}.get(config["structure"], config["structure"])
    sizes = {"inputs": in_, "outputs": out, "rank": config.get("rank") or 1}
    if isinstance(config.get("blocks"), (list, tuple)):
        sizes |= dict(zip(("rows", "columns"), config["blocks"]))
    ratios = {n: ratio(structure, "forward", tokens=n, **sizes) for n in TOKENS}
    lost = [f"{r:.2f}x at {n:,} tokens" for n, r in ratios.items() if r is not None and r < 1]
    return f"{config['structure']} for {in_:,} -> {out:,} is slower than dense: {', '.join(lost)}" if lost else ""


def _attention(mixer: str) -> str:
    """mixer: "mlr 32|32 sliding", "linear: gates mask, delta rule"."""
    words = mixer.replace(",", "").split()
    op = words[0] if words[0] != "linear:" else words[1] + (" delta" if "delta rule" in mixer else "")
    ratios = {n: ratio(op, "forward", NEAR, tokens=n) for n in LENGTHS}
    lost = [n for n, r in ratios.items() if r is not None and r < 1]
    if not lost:
        return ""
    return f"{mixer} is slower than SDPA in prefill up to {max(lost):,} tokens ({ratios[max(lost)]:.2f}x there)"
