"""Papers of model cards and CITATION.cff: each registered part has its papers or is listed without one, and a paper has
one year everywhere.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from helpers.small import make_recipe

from surgery.conversion.convert import convert
from surgery.mixers.base import MIXERS
from surgery.mixers.features.base import FEATURES
from surgery.mixers.masks.base import MASKS
from surgery.planning.recipe import load_recipe
from surgery.publish.hub import citations
from surgery.publish.hub.push import prepare_upload
from surgery.structures import STRUCTURES

ROOT = Path(__file__).resolve().parents[2]
REGISTRIES = {"structure": STRUCTURES, "mixer": MIXERS, "mask": MASKS, "features": FEATURES}
CITATION = re.compile(
    r'\b([A-Z][\w-]+(?: et al\.| (?:and|&) [A-Z]\w+)?) \(?((?:19|20)\d\d)\)?,? "?([A-Z][^",.;:()\n|]{4,})'
)
WINDOWED_LINEAR = (citations.KATHAROPOULOS, citations.ZHANG_LOLCATS, citations.XIAO)
PLACES = ("Figure", "Table", "Section", "Equation")  # of a paper whose title is not given


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_registered_name_has_papers_or_is_listed_without_one(kind):
    cited, without = set(citations.PAPERS[kind]), set(citations.NO_PAPER[kind])
    assert all(citations.PAPERS[kind].values()) and not cited & without
    ours = [config for config in REGISTRIES[kind] if config.__module__.startswith("surgery.")]
    assert cited | without == {config.name for config in ours}


@pytest.mark.parametrize(
    ("name", "papers"),
    [
        ("tbm", {*WINDOWED_LINEAR, citations.FARS, citations.ZHANG_HEDGEHOG}),
        (
            "gated-deltanet",
            {*WINDOWED_LINEAR, citations.DAO_GU, citations.YANG_DELTA, citations.YANG_GATED, citations.ZHANG_HEDGEHOG},
        ),
        ("lolcats", {*WINDOWED_LINEAR, citations.ZHANG_HEDGEHOG}),
        ("mlr-cache-60", {citations.KUANG}),
    ],
)
def test_the_card_of_a_recipe_cites_the_papers_of_its_parts(name, papers, checkpoints, tmp_path):
    attention = load_recipe(name).model_dump()["attention"]
    convert(str(checkpoints("llama")), make_recipe(structure="dense", attention=attention), tmp_path / "out")
    card = prepare_upload(str(tmp_path / "out"), "me/small", "mit", "org/base").card
    assert set(re.findall(r"^- (.+)$", card.split("## Papers")[1], re.M)) == papers


def text_files() -> list[Path]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    folders = ("surgery", "kernels", "eval", "recipes", "tests")
    return [*pages, *(p for f in folders for pattern in ("*.py", "*.yaml") for p in (ROOT / f).rglob(pattern))]


def test_a_paper_has_one_year_everywhere():
    """By its authors and the first words of its title; the year is that of the publication, if it was published after
    arXiv.
    """
    years = defaultdict(lambda: defaultdict(set))
    for path in text_files():
        for authors, year, title in CITATION.findall(path.read_text(encoding="utf-8")):
            if not title.startswith(PLACES):
                years[authors, " ".join(title.split()[:2]).lower()][year].add(path.relative_to(ROOT).as_posix())
    assert len(years) > 40
    assert not {paper: dict(found) for paper, found in years.items() if len(found) > 1}


def test_references_of_the_citation_file_agree_with_the_cards():
    references = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    cards = [text for name, text in vars(citations).items() if name.isupper() and isinstance(text, str)]
    for reference in references:
        (card,) = [text for text in cards if reference["title"] in text]
        assert f" {reference['year']}, " in card, reference["title"]
        number = re.search(r"arXiv:([\d.]+)", card)
        assert number is None or number[0] in reference.get("notes", ""), reference["title"]
        assert ("conference" in reference) == (reference["type"] == "conference-paper")
    assert len(references) == 5
