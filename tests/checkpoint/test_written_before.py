"""Files written by version 0.1 can still be read.

They are a checkpoint, recipes, reports, an interrupted conversion and healing, a saved cache, a teacher cache, and
evaluation results, in tests/data/written_before.
"""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import surgery
from surgery.cli.main import main
from surgery.structures import StructuredLinear

WRITTEN = Path(__file__).resolve().parents[1] / "data/written_before"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A copy to work in; paths in it are relative."""
    shutil.copytree(WRITTEN, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def run(*words: str) -> int:
    try:
        return main(list(words)) or 0
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in WRITTEN.rglob("*") if path.is_file()) < 200_000


def test_a_checkpoint_and_a_cache(place):
    from surgery.modeling.cache_io import load_cache

    expected = json.loads((place / "expected.json").read_text())
    model, _ = surgery.load("converted")
    ids = torch.arange(3, 15)[None]
    with torch.inference_mode():
        assert torch.allclose(model(ids).logits[0, -1, :16].float(), torch.tensor(expected["logits"]), atol=0.05)
        cache = load_cache("cache.safetensors", model)
        following = model(torch.tensor([[20]]), past_key_values=cache).logits[0, -1, :16].float()
        again = model(torch.cat([ids, torch.tensor([[20]])], 1)).logits[0, -1, :16].float()
    assert torch.allclose(following, torch.tensor(expected["next"]), atol=0.05)
    assert torch.allclose(following, again, atol=0.05)


def test_the_module_that_a_checkpoint_brings(place):
    """config.json's auto_map names classes of surgery_shim.py, which imports surgery by the name of that time."""
    named = json.loads((place / "converted/config.json").read_text())["auto_map"]
    found = runpy.run_path(str(place / "converted/surgery_shim.py"))
    assert all(target.partition(".")[2] in found for target in named.values())


def test_an_interrupted_conversion_goes_on(place):
    assert run("convert", "source", "--recipe", "recipe.yaml", "-o", "resumed", "--resume") == 0
    resumed, whole = (load_file(place / name / "model.safetensors") for name in ("resumed", "converted"))
    assert resumed.keys() == whole.keys()
    first = [name for name in whole if ".layers.0." in name]
    assert first and all(torch.equal(resumed[name], whole[name]) for name in first)
    models = [surgery.load(name)[0] for name in ("resumed", "converted")]
    linears = [{n: m for n, m in model.named_modules() if isinstance(m, StructuredLinear)} for model in models]
    cores = {f"{path}.{name}" for path, linear in linears[1].items() for name in linear.core_names()}
    others = [name for name in whole if name not in cores]
    assert len(linears[1]) == 14 and cores < whole.keys()
    assert all(torch.allclose(resumed[name].float(), whole[name].float(), atol=0.05) for name in others)
    # The cores of a matrix are unique up to a basis of each block's rank, which the processor's rounding decides. Their
    # product is compared.
    with torch.no_grad():
        for path, linear in linears[1].items():
            made, written = linears[0][path].dense().float(), linear.dense().float()
            assert float((made - written).norm() / written.norm()) < 0.02, path


def test_an_interrupted_healing_goes_on(place):
    words = ("--recipe", "healing.yaml", "--teacher", "source", "--track", "none", "--device", "cpu")
    assert run("finetune", "converted", *words, "-o", "again", "--resume") == 0
    log = [json.loads(line) for line in (place / "again/training/log.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in (place / "healed/training/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [line["step"] for line in before]
    assert all(line["loss"] == pytest.approx(old["loss"], rel=0.05) for line, old in zip(log, before))


def test_a_teacher_cache_is_read(place):
    recipe = (
        (place / "healing.yaml")
        .read_text()
        .replace("  - {kind: align, of: [attention], tokens: 64, trains: [mixers]}\n", "")
    )
    (place / "distill.yaml").write_text(recipe)
    words = ("--recipe", "distill.yaml", "--track", "none", "--device", "cpu", "--set", "teacher.cache=teacher")
    assert run("finetune", "converted", *words, "-o", "taught") == 0


def test_reports_and_results(place, capsys):
    assert run("inspect", "converted") == 0
    assert run("report", "converted", "-o", "page.html", "--eval", "evaluated") == 0
    assert "btt" in capsys.readouterr().out and (place / "page.html").stat().st_size > 5_000


def test_recipes(place):
    from surgery.planning.recipe import load_recipe
    from surgery.training.recipe import load_healing_recipe

    assert load_recipe("recipe.yaml").structure == "btt"
    assert [stage.kind for stage in load_healing_recipe("healing.yaml").stages] == ["align", "distill"]
