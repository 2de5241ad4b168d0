"""The upstream code of each suite: its repository, and the commit that was read to write or check this package's
prompts and scores.

A commit says which version of the original was compared with ours, not that nothing differs; docs/benchmarks.md lists
the differences.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Upstream:
    """A repository of GitHub at a commit. date: of the commit; compared: what of it was compared with this package.

    license: SPDX id of the license of prompts or rules that this package contains, with its notice in
    THIRD_PARTY_NOTICES; "": it contains none.
    """

    repository: str
    commit: str
    date: str
    compared: str
    license: str = ""

    @property
    def url(self) -> str:
        """Address of the tree at the commit."""
        return f"https://github.com/{self.repository}/tree/{self.commit}"


UPSTREAM: dict[str, Upstream] = {
    "ruler": Upstream(
        "NVIDIA/RULER",
        "c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a",
        "2026-07-22",
        "scripts/data/synthetic and the list of tasks: tasks, templates, budgets, number of units, words of cwe",
        "Apache-2.0",
    ),
    "longbench": Upstream(
        "THUDM/LongBench",
        "2e00731f8d0bff23dc4325161044d0ed8af94c1e",
        "2025-01-15",
        "LongBench/config: all 21 prompts and answer lengths, equal to the letter; LongBench v2: README.md",
        "MIT",
    ),
    "retrieval": Upstream(
        "HazyResearch/prefix-linear-attention",
        "7490f22bda3e38dc057bcbaffe6bdb09b4d475e6",
        "2024-07-08",
        "lm-eval-harness: tasks/based_*, Task.truncate_context, launch_jrt.py (--prompts jrt)",
        "MIT",
    ),
    "mqar": Upstream(
        "HazyResearch/zoology",
        "d88d6f5474f36998d82d5c3bd58a190248d0a669",
        "2026-01-11",
        "zoology/data/multiquery_ar.py, and the configurations of both papers' Figure 2",
    ),
    "babilong": Upstream(
        "booydar/babilong",
        "7a6efee29f5cac03c3c410e6799c80fd2ffe3610",
        "2026-06-01",
        "names of tasks only; prompts and scores are lm-eval's",
    ),
    "infinitebench": Upstream(
        "OpenBMB/InfiniteBench",
        "88b3daa6989da2fbe0077170d7a3c84c25d5ae58",
        "2024-06-13",
        "names of tasks only; prompts and scores are lm-eval's",
    ),
    "niah": Upstream(
        "gkamradt/LLMTest_NeedleInAHaystack",
        "7b90d285651b68d39a94f3d3bd3672f84192c989",
        "2024-04-12",
        "origin of the test by length and depth; the prompts of `niah` are RULER's, so scores are not comparable with "
        "it",
    ),
}
# LongBench-E has LongBench's prompts and scores; LongBench v2 is in the same repository.
UPSTREAM |= dict.fromkeys(("longbench-e", "longbench2"), UPSTREAM["longbench"])
