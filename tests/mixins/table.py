"""Print a table of the results of transformers' own tests over converted models (docs/models.md sums it up).

make test-mixins PYTEST_ARGS="-n 0 --junitxml=build/mixins/results.xml"
python tests/mixins/table.py build/mixins/results.xml [MORE.xml ..]
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable

KINDS = ("passed", "skipped", "expected", "failed")


def outcome(case: ElementTree.Element) -> str:
    """Return one of KINDS for a test case of pytest's JUnit XML."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "expected" if skipped.get("type") == "pytest.xfail" else "skipped"


def results_table(files: Iterable[str]) -> str:
    """Return the Markdown table: one row for each run, with the names of its expected and unexpected failures."""
    counts: dict[str, Counter[str]] = {}
    failures: dict[str, list[str]] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            run, kind = case.get("classname", "").rpartition(".Test_")[2], outcome(case)
            counts.setdefault(run, Counter())[kind] += 1
            if kind in ("expected", "failed"):
                name = case.get("name", "").removeprefix("test_")
                failures.setdefault(run, []).append(f"`{name}`" if kind == "expected" else f"**{name}**")
    rows = [
        "| run | passed | skipped | expected failures | other failures | failures |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run, found in counts.items():
        numbers = " | ".join(str(found[kind]) for kind in KINDS)
        family, _, recipe = run.partition("_")
        rows.append(
            f"| {family}, {recipe.replace('_', '-')} | {numbers} | {', '.join(sorted(failures.get(run, [])))} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(results_table(sys.argv[1:]))
