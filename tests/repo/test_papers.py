"""docs/papers.md: the listed files exist and name their papers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_file_names_its_paper():
    author, missing, rows = "", [], 0
    for line in (ROOT / "docs/papers.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 3 or cells[0] in ("paper", "---"):
            continue
        rows += 1
        author = author if cells[0].startswith("the same") else re.split(r" et al\.| and | \d{4}", cells[0])[0]
        for file in re.findall(r"`([^`]+)`", cells[2]):
            path = ROOT / file
            if not path.is_file() or author not in path.read_text(encoding="utf-8"):
                missing.append(f"{file} does not name {author}")
    assert rows > 30 and not missing
