"""Results of `surgery bench train`, a line each and as a table."""

from __future__ import annotations

from typing import Any


def lost(row: dict[str, Any]) -> float | None:
    """Share of the bare loop's speed that ours does not reach."""
    if "bare_ms" not in row or "ours_ms" not in row:
        return None
    return 1 - row["bare_ms"] / row["ours_ms"]


def line_of(row: dict[str, Any]) -> str:
    if "ours_ms" not in row:
        return f"{row['case']}, {row['change']}: {row.get('note', 'not run')}"
    said = [f"surgery {row['ours_ms']:.4g} ms, {row['ours_tokens_per_second']:,.0f} tokens/s"]
    if row["ours_peak"]:
        said.append(f"{row['ours_peak'] / 1e9:.1f} GB")
    if (share := lost(row)) is not None:
        said.append(f"bare {row['bare_ms']:.4g} ms, {row['bare_tokens_per_second']:,.0f} tokens/s, {share:+.1%} lost")
    return f"{row['case']}, {row['change']}: " + " | ".join(said)


def table(result: dict[str, Any]) -> list[Any]:
    """For a terminal."""
    from rich.table import Table

    grid = Table(title="training, tokens a second", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("", "", "bare loop", "surgery", "lost", "peak GB, bare", "surgery"):
        grid.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for row in result["rows"]:
        share = lost(row)
        speeds = [row.get(f"{who}_tokens_per_second") for who in ("bare", "ours")]
        peaks = [row.get(f"{who}_peak") for who in ("bare", "ours")]
        grid.add_row(
            row["case"],
            row["change"],
            *(f"{speed:,.0f}" if speed else row.get("note", "-") for speed in speeds),
            f"{share:.1%}" if share is not None else "-",
            *(f"{peak / 1e9:.1f}" if peak else "-" for peak in peaks),
        )
    where = f"{result['device']}, {result['processes']} process{'es' if result['processes'] > 1 else ''}, {result['precision']}, {result['date']}"
    return [grid, where]
