"""Ratios of perplexity file by file: a text of source files is split into its files, and each is scored by itself.

python -m recipes.papers.quality.by_file split heldout.txt heldout.jsonl            one JSON line for each file
python -m recipes.papers.quality.by_file score SRC CONVERTED .. --text heldout.txt [--tokens 65536] [--above 1.5] [--json ROWS.jsonl]

`score` prints a row for each converted checkpoint: the median of the files' ratios to the original, the worst file, the
share of files above a ratio, and the ratio of all tokens with its 95% interval, in which files are the units of the
bootstrap. A file starts without context, so perplexities are higher than in windows of running text; a file longer than
--length is scored in pieces. Files of fewer than --least tokens count in the ratio of all tokens only.

How a text is split: at lines <|endoftext|>, if it has any (recipes/papers/healing/text.py writes them). Else where two
empty lines end, and a docstring, an import or a comment before one of them begins: the way in which a Python file
begins, and hardly anything within one.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from recipes.papers.quality.quantized import append_row
from recipes.papers.script import run_script
from surgery.core.device import choose_device
from surgery.core.errors import SurgeryError
from surgery.core.files import atomic_write
from surgery.eval.run import load
from surgery.eval.stories import END
from surgery.eval.suite import EvalOptions, SuiteResult
from surgery.eval.suites import perplexity as ppl

# After two empty lines: comment lines and one empty line at most, then a docstring or an import.
FILE_START = re.compile(r'(?<=\n\n\n)(?=(?:#.*\n)*\n?(?:[rub]?"""|import \w|from [\w.]+ import ))')
LEAST_TOKENS = 64  # of a file, below which its ratio is noise


def split_files(text: str) -> list[str]:
    """Return the files of a text, see the module."""
    ends = rf"^{re.escape(END)}\n"
    pieces = re.split(ends, text, flags=re.MULTILINE) if re.search(ends, text, re.MULTILINE) else FILE_START.split(text)
    return [stripped + "\n" for piece in pieces if (stripped := piece.strip("\n"))]


def write_files(text: Path, out: Path) -> int:
    """Write the files of a text as JSON lines and return their number. Raises SurgeryError if it has fewer than two."""
    files = split_files(text.read_text(encoding="utf-8"))
    if len(files) < 2:
        raise SurgeryError(f"{text} has {len(files)} file of source code. Give a text of several, or a .jsonl of them")
    with atomic_write(out, "w") as file:
        file.writelines(json.dumps({"text": one}) + "\n" for one in files)
    return len(files)


def file_losses(found: SuiteResult) -> dict[str, tuple[float, int]]:
    """Return (nats, tokens) of each file."""
    files: dict[str, tuple[float, int]] = {}
    for sample in found.samples:
        nats, tokens = files.get(str(sample.unit), (0.0, 0))
        files[str(sample.unit)] = (nats + sample.metrics["nll"] * sample.weight, tokens + int(sample.weight))
    return files


def summarize_files(found: SuiteResult, base: SuiteResult, above: float, least: int = LEAST_TOKENS) -> dict[str, Any]:
    """Return {"files", "median", "worst", "worst_file", "above", "share_above", "tokens", "perplexity", "se", "ratio"}.

    Ratios are of a file's perplexity to the original's. worst_file: its place in the text, from 0. "files" counts those
    of `least` tokens or more, which the first values are of; the last four are of all tokens. Raises SurgeryError if
    there are none.
    """
    ours, theirs = file_losses(found), file_losses(base)
    ratios = {}
    for index, (name, (nats, tokens)) in enumerate(ours.items()):
        if tokens >= least:
            ratios[index] = float(torch.tensor((nats - theirs[name][0]) / tokens).exp())
    if not ratios:
        raise SurgeryError(f"no file has {least} tokens. Give a longer --text, or a smaller --least")
    worst = max(ratios, key=lambda index: ratios[index])
    whole = ppl.summarize(found, base)
    return {
        "files": len(ratios),
        "median": median(ratios.values()),
        "worst": ratios[worst],
        "worst_file": worst,
        "above": above,
        "share_above": sum(ratio > above for ratio in ratios.values()) / len(ratios),
        **{name: whole[name] for name in ("tokens", "perplexity", "se", "ratio")},
    }


def format_line(name: str, row: dict[str, Any]) -> str:
    """Format a row of the table."""
    cells = [name, str(row["files"]), ppl.format_interval(row["ratio"]), f"{row['median']:.3f}", f"{row['worst']:.3f}"]
    return f"| {' | '.join([*cells, format(row['share_above'], '.0%')])} |"


def main() -> None:
    """Split a text, or print a row for each converted checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    splitting = commands.add_parser("split", help="Write the files of a text as JSON lines.")
    splitting.add_argument("text", type=Path, help="Text of source files.")
    splitting.add_argument("out", type=Path, help="File to write, .jsonl.")
    splitting.set_defaults(do=lambda a: print(f"{a.out}: {write_files(a.text, a.out):,} files"))
    scoring = commands.add_parser("score", help="Score converted checkpoints file by file.")
    add = scoring.add_argument
    add("source", help="Original checkpoint.")
    add("converted", nargs="+", help="Converted checkpoints.")
    add("--text", type=Path, required=True, help="Text of source files, or a .jsonl of them.")
    add("--tokens", type=int, default=65536, help="Tokens of the text. Default: %(default)s.")
    add("--length", type=int, default=1024, help="Tokens of a piece of a longer file. Default: %(default)s.")
    add("--least", type=int, default=LEAST_TOKENS, help="Tokens of a file that has a ratio. Default: %(default)s.")
    add("--above", type=float, default=1.5, help="Ratio above which files are counted. Default: %(default)s.")
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add("--json", type=Path, help="Append the rows to this file.")
    scoring.set_defaults(do=score)
    arguments = parser.parse_args()
    arguments.do(arguments)


def score(arguments: argparse.Namespace) -> None:
    """Print and write a row for each converted checkpoint."""
    device = choose_device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        text = arguments.text
        if text.suffix != ".jsonl":
            text = Path(folder) / "files.jsonl"
            write_files(arguments.text, text)
        options = EvalOptions(text=str(text), tokens=arguments.tokens, length=arguments.length)
        base = ppl.measure(*load(arguments.source, device, "float32", False), options)
        print(
            f"| conversion | files | ratio of all tokens | median | worst | above {arguments.above:g} |\n"
            + "| --- " * 6
            + "|"
        )
        for name in arguments.converted:
            found = ppl.measure(*load(name, device, "float32", False), options)
            row = summarize_files(found, base, arguments.above, arguments.least)
            print(format_line(Path(name).name, row), flush=True)
            append_row(arguments.json, {"kind": "files", "source": arguments.source, "converted": name, **row})


if __name__ == "__main__":
    run_script(main)
