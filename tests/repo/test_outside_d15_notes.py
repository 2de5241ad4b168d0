"""SECURITY.md and CHANGELOG.md repeat nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["SECURITY.md", "CHANGELOG.md"])
def test_no_bullet_or_line_occurs_twice(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    bullets = [" ".join(b.split())[:60] for b in re.split(r"\n(?=- |#)", text) if b.startswith("- ")]
    assert len(set(lines)) == len(lines) and len(set(bullets)) == len(bullets)
