"""Speed and slopes: how the times of the attention kernels grow with the length, and where they cross. (Guo et al.
2025, "Log-Linear Attention", Figure 4)

The slopes of dense and Toeplitz block mixing are those of FARS 2026, "Toeplitz Block Mixing", Figure 3.

python -m recipes.papers.experiments.speed show [PAGE]

Nothing is measured here: the times are the tables "attention, forward" and "attention, forward + backward" of
docs/measurements/performance.md, which `surgery bench attention` measured on one H200 (batch 2, 48 heads, bfloat16). A
slope is that of log time over log T from 16,384 tokens on, with its standard error; the last doubling is log2 of the
ratio of the last two times. What has no rows is forecast from those rows, counted and not measured.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path

from recipes.papers.experiments.driver import markdown
from recipes.papers.experiments.figures import FLOPS, LOG_LINEAR, TBM
from recipes.papers.experiments.times import Times, faster_from, slope, words
from recipes.papers.experiments.verdicts import Verdict
from recipes.papers.script import run_script
from surgery.core import errors
from surgery.core.errors import SurgeryError

PAGE = "docs/measurements/performance.md"
MAX_BYTES = 4_000_000
PASSES = ("forward", "forward + backward")
LONG = 16_384  # tokens from which on slopes are fitted: shorter rows have fixed costs
BEYOND = 8192  # tokens beyond which the paper's log-linear kernel is faster
FLASH, CUDNN, LOG_LINEAR_KERNEL, SSD, TBM_KERNEL, MHLA = (
    "SDPA flash", "SDPA cuDNN", "log-linear Mamba-2, kernel", "SSD, kernel", "TBM, R = 8, kernel", "MHLA, kernel",
)  # fmt: skip
KERNELS = (
    FLASH, CUDNN, "MLR attention, kernel", SSD, LOG_LINEAR_KERNEL, "Gated DeltaNet, kernel", "log-linear GDN, kernel", TBM_KERNEL, MHLA,
)  # fmt: skip
CALLS = 200  # of one kernel at one length, warm-up included
PARAMETERS, STEP_TOKENS, STEPS, STEP_LENGTHS = (
    0.8e9,
    131_072,
    20,
    6,
)  # of the training steps of Figure 4, left: 4K to 128K

Rivals = dict[str, Times]


def read_page(path: Path | None) -> str:
    """Return the text of the page of measurements, that of the repository by default.

    Raises SurgeryError for a missing or large file.
    """
    path = path or Path(errors.__file__).parents[2] / PAGE
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise SurgeryError(
            f"{path} must be a page of at most {MAX_BYTES:,} bytes. Run this in a clone, or give the path of {PAGE}."
        )
    return path.read_text(encoding="utf-8", errors="replace")


def read_table(text: str, kind: str) -> Rivals:
    """Return rival -> length -> milliseconds of the table "attention, KIND".

    Raises SurgeryError if the page lacks it or a cell is no time.
    """
    title = f"\n### attention, {kind}\n"
    if text.count(title) != 1:
        raise SurgeryError(f"the page must have one table {title.strip()!r}. Give the path of {PAGE}.")
    lines = [line for line in text.split(title)[1].split("\n#")[0].splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    if len(table) < 3 or not all(re.fullmatch(r"[\d,]{1,11}", cell) for cell in table[0][1:]):
        raise SurgeryError(f"the head of the table {title.strip()!r} must be lengths. Give the path of {PAGE}.")
    lengths = [int(cell.replace(",", "")) for cell in table[0][1:]]
    return {line[0]: _times(line, lengths) for line in table[2:]}


def _times(line: list[str], lengths: list[int]) -> Times:
    found = {}
    for length, cell in zip(lengths, line[1:]):
        if cell == "-":
            continue
        first = cell.split(" ")[0].replace(",", "")
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", first) or not float(first):
            raise SurgeryError(
                f"table of times: {line[0]} at {length:,} tokens must begin with milliseconds (got {cell[:40]!r})."
            )
        found[length] = float(first)
    return found


def fastest(rivals: Rivals, names: tuple[str, ...]) -> Times:
    """Return the least time of the named rivals at each length."""
    own = [rivals[name] for name in names if name in rivals]
    return {length: min(t[length] for t in own if length in t) for length in {n for times in own for n in times}}


def slopes_table(tables: dict[str, Rivals]) -> list[list[str]]:
    """Return the table of slopes, with two columns for each pass."""
    heads = [head for kind in tables for head in (f"slope from {LONG:,}, {kind}", "last doubling")]
    lines = [["kernel", *heads]]
    for name in KERNELS:
        cells = [cell for rivals in tables.values() for cell in _slope_cells(rivals.get(name, {}))]
        if any(cells):
            lines.append([name.removesuffix(", kernel"), *cells])
    return lines


def _slope_cells(times: Times) -> tuple[str, str]:
    if len(times) < 2:
        return "", ""
    law = slope(times, LONG)
    *_, before, last = sorted(times)
    doubling = math.log(times[last] / times[before]) / math.log(last / before)
    return (f"{law.alpha:.2f} ± {law.error:.2f}" if law else ""), f"{doubling:.2f}"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper about times. paper, place: as in figures.PLACES."""

    paper: str
    place: str
    what: str
    rule: str
    verdict: Verdict


def claims(tables: dict[str, Rivals]) -> list[Claim]:
    """Return the claims with their verdicts."""
    both = tables[PASSES[1]]
    return [
        Claim(
            LOG_LINEAR, "Figure 4", "right: log-linear Mamba-2 against softmax, forward and backward",
            f"reproduced: faster than the faster of PyTorch's kernels at every length beyond {BEYOND:,}; refuted: "
            "slower at the longest",
            _log_linear(both),
        ),
        Claim(LOG_LINEAR, "Figure 4", "right: scans of single levels (naive)", "needs rows", _naive(both)),
        Claim(LOG_LINEAR, "Figure 4", "left: whole training steps from 4K to 128K tokens", "needs rows", _steps()),
        Claim(
            TBM, "Figure 3", "TBM against MHLA, forward",
            "reproduced: TBM faster at the longest row, and its slope smaller by two standard errors; refuted: slower "
            "at the longest",
            _toeplitz(tables[PASSES[0]]),
        ),
    ]  # fmt: skip


def _log_linear(both: Rivals) -> Verdict:
    ours, softmax = both.get(LOG_LINEAR_KERNEL, {}), fastest(both, (FLASH, CUDNN))
    start = faster_from(ours, softmax)
    why = (
        f"faster {words(start, ours, softmax)}; than SDPA flash alone "
        f"{words(faster_from(ours, both[FLASH]), ours, both[FLASH])}"
    )
    if start is None:
        return Verdict("refuted" if set(ours) & set(softmax) else "undecided", why)
    later = [length for length in set(ours) & set(softmax) if length > BEYOND]
    return Verdict("reproduced" if later and start <= min(later) else "undecided", why)


def _toeplitz(forward: Rivals) -> Verdict:
    ours, dense = forward.get(TBM_KERNEL, {}), forward.get(MHLA, {})
    laws = slope(ours, LONG), slope(dense, LONG)
    start = faster_from(ours, dense)
    if laws[0] is None or laws[1] is None:
        return Verdict("undecided", f"fewer than three lengths from {LONG:,} on")
    gap, error = laws[1].alpha - laws[0].alpha, math.hypot(laws[0].error, laws[1].error)
    why = f"TBM faster {words(start, ours, dense)}; MHLA's slope larger by {gap:.2f} ± {error:.2f}"
    if start is None:
        return Verdict("refuted", why)
    return Verdict("reproduced" if gap > 2 * error else "undecided", why)


def _naive(both: Rivals) -> Verdict:
    scans = sum(ms * (1 + math.log2(length)) for length, ms in both.get(SSD, {}).items())
    minutes = max(1, math.ceil(CALLS * scans / 60_000))
    return Verdict(
        "undecided: GPU time", f"no rows; forecast {minutes} minutes of one H200, counted: an SSD scan for each level"
    )


def _steps() -> Verdict:
    seconds = 2 * 2 * STEP_LENGTHS * STEPS * 6 * PARAMETERS * STEP_TOKENS / FLOPS  # two models, doubled for safety
    return Verdict(
        "undecided: GPU time",
        f"no rows; forecast {math.ceil(seconds / 60)} minutes of one H200, counted: two models of 800M",
    )


def read_tables(path: Path | None = None) -> dict[str, Rivals]:
    """Return pass -> rival -> length -> milliseconds."""
    text = read_page(path)
    return {kind: read_table(text, kind) for kind in PASSES}


def section(path: Path | None = None) -> str:
    """Return slopes and verdicts in Markdown."""
    tables = read_tables(path)
    lines = [["claim", "rule", "verdict"]]
    for claim in claims(tables):
        verdict = f"{claim.verdict.word} ({claim.verdict.why})"
        lines.append([f"{claim.paper}, {claim.place}, {claim.what}", claim.rule, verdict])
    return f"{markdown(lines)}\n\n{markdown(slopes_table(tables))}"


def main(given: list[str] | None = None) -> None:
    """Run the command `show`."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.papers.experiments.speed",
        description="Slopes and crossovers of the attention kernels.",
    )
    showing = parser.add_subparsers(required=True).add_parser("show", help="Print slopes, crossovers and verdicts.")
    showing.add_argument(
        "page", type=Path, nargs="?", help=f"Page with the tables of times. Default: {PAGE} of the clone."
    )
    print(section(parser.parse_args(given).page))


if __name__ == "__main__":
    run_script(main)
