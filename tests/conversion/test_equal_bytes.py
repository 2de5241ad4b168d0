"""Scripts behind the tables at equal bytes and by file: recipes/papers/quality/quantized.py, quantized_times.py,
equal_bytes.py, by_file.py.
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.papers.quality import by_file, equal_bytes, quantized, quantized_times
from recipes.papers.script import run_script
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.eval.suite import Sample, SuiteResult
from surgery.planning.recipe import validate_recipe
from surgery.structures import STRUCTURES
from surgery.structures.low_rank import LowRank
from surgery.structures.quantized import dequantize_rows, quantize_rows

EMBEDDED = importlib.resources.files("surgery.recipes.tiny.checkpoint")
TEXTS = ("--calibration", str(EMBEDDED / "calibration.txt"), "--text", str(EMBEDDED / "heldout.txt"))
LAYERS = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The first layers of the embedded checkpoint."""
    folder = tmp_path_factory.mktemp("source") / "SRC"
    shutil.copytree(str(EMBEDDED), folder, ignore=shutil.ignore_patterns("*.py", "*.txt", "__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    more = tuple(f"model.layers.{n}." for n in range(LAYERS, config["num_hidden_layers"]))
    kept = {k: v for k, v in load_file(folder / "model.safetensors").items() if not k.startswith(more)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    return folder


def run(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


@pytest.fixture(scope="module")
def measured(source, tmp_path_factory):
    """(file of rows, arguments that measured them): the original, dense in 3 bits, low rank at half in 4 bits."""
    folder = tmp_path_factory.mktemp("measured")
    size = ("--tokens", 256, "--score", 640, "--length", 64, "--needles", 2, "--lengths", 128, "--device", "cpu")
    only = ("--only", "dense, 16", "--only", "dense, 3", "--only", "50%, 4")
    arguments = (source, *TEXTS, *size, *only, "--conversions", folder / "kept", "--json", folder / "rows.jsonl")
    recipe = {"structure": "low_rank", "keep": 0.5, "round_ranks": 32, "calibration": None}
    (folder / "kept").mkdir()
    convert(str(source), validate_recipe(recipe, "test"), folder / "kept" / "low_rank-0.5")  # found, not made again
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(monkeypatch, quantized, *arguments)
    return folder / "rows.jsonl", arguments


def test_rows_are_measured_once(measured, monkeypatch, capsys):
    rows, arguments = measured
    before = rows.read_bytes()
    found = [json.loads(line) for line in before.splitlines()]
    names = [(row["linears"], row["keep"], row["bits"]) for row in found]
    assert names == [("dense", 1.0, 16), ("dense", 1.0, 3), ("low_rank", 0.5, 4)]
    assert all(len(row["losses"]) == 10 and len(row["answers"]) == 6 for row in found)
    whole, three, half = (row["bytes"] for row in found)
    assert three / whole == pytest.approx(3.5 / 16) and 0.1 < half / whole <= 0.5 * 4.5 / 16

    monkeypatch.setattr(quantized, "measure_row", lambda *_, **__: pytest.fail("measured again"))
    run(monkeypatch, quantized, *arguments)
    assert rows.read_bytes() == before
    assert "| dense | 16 |" in capsys.readouterr().out


def test_tables_come_from_the_rows(measured, tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.jsonl"
    shutil.copy(measured[0], rows)
    quick = ("--turns", 1, "--steps", 1, "--only", "50%, 4", "--only=-compiled", "--json", rows)
    run(monkeypatch, quantized_times, "small", "--device", "cpu", *quick)
    timed = [json.loads(line) for line in rows.read_text().splitlines()[3:]]
    assert [(row["bits"], row["way"]) for row in timed] == [
        (16, ""),
        (4, "kernel"),
        (4, "packed"),
        (4, "multiplied out"),
    ]
    assert ["eager_ms" in row for row in timed] == [True, False, True, True] and "on a GPU" in timed[1]["note"]
    before = rows.read_bytes()
    run(monkeypatch, quantized_times, "small", "--device", "cpu", "--json", rows)
    assert rows.read_bytes() == before

    page = tmp_path / "page.md"
    page.write_text(f"before\n{equal_bytes.BEGIN}old\n{equal_bytes.END}after\n")
    run(monkeypatch, equal_bytes, rows, "--write", page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| dense | 16 | " in text and "| low rank, 50% | 4 | " in text
    run(monkeypatch, equal_bytes, rows, "--write", page)
    assert page.read_text() == text
    capsys.readouterr()
    run(monkeypatch, equal_bytes, rows)
    printed = capsys.readouterr().out
    assert "| multiplied out |" in printed and "needles, %" in printed and "Not measured: " in printed
    with pytest.raises(SurgeryError, match="has no marks"):
        equal_bytes.update_page("no marks", [], page)


def test_the_page_has_the_tables_of_the_rows():
    page = Path(__file__).resolve().parents[2] / "docs/measurements/quality.md"
    text = page.read_text(encoding="utf-8")
    assert equal_bytes.update_page(text, quantized.read_rows(equal_bytes.ROWS), page) == text


def test_damaged_rows_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    for damage in ("{", "[1]\n", '{"bits": 4}\n'):
        path.write_text(damage)
        with pytest.raises(SurgeryError, match="Give another file"):
            quantized.read_rows(path)


@pytest.mark.parametrize("bits", [2, 3])
def test_values_are_rounded_to_few_levels(bits):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    rounded = quantized.round_values(weight, bits, 32)
    assert max(len(group.unique()) for group in rounded.view(-1, 32)) <= 2**bits
    finer = quantized.round_values(weight, bits + 1, 32)
    assert (finer - weight).norm() < (rounded - weight).norm() < 0.7 * weight.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_ways_compute_the_same_integers(bits):
    config = LowRank(rank=32)
    linear = STRUCTURES[config](64, 96, config, bias=False).requires_grad_(False)
    stored = quantized.quantize_module(linear, quantized.make_storage(bits, 32 if bits == 4 else None))
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(quantized_times.linear_by_way(stored, "compiled")(x), stored(x), rtol=1e-5, atol=1e-6)


def test_int4_packing_keeps_the_order_of_inputs():
    """torch's kernel takes the first of two inputs in the high bits and values (integer - 8) * scale."""
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    integers, scale = quantize_rows(rows, quantized.make_storage(4, 32))
    swapped = quantized_times.swap_halves(integers)
    unpacked = torch.stack([swapped >> 4, swapped & 15], -1).flatten(-2).float() - 8
    exact = dequantize_rows(integers, scale, 64, quantized.make_storage(4, 32))
    torch.testing.assert_close((unpacked.unflatten(-1, (-1, 32)) * scale[..., None]).flatten(-2), exact)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bits", [8, 4])
def test_kernels_compute_the_same_integers(bits):
    config = LowRank(rank=96)
    linear = STRUCTURES[config](1408, 512, config, bias=False).requires_grad_(False).to("cuda", torch.bfloat16)
    stored = quantized.quantize_module(linear, quantized.make_storage(bits, 32 if bits == 4 else None))
    x = torch.randn(1, 1, 1408, device="cuda", dtype=torch.bfloat16)
    exact, found = stored(x).float(), quantized_times.linear_by_way(stored, "kernel")(x).float()
    assert (found - exact).norm() < 0.02 * exact.norm()


# -- by file -------------------------------------------------------------------------------------------
def test_texts_are_split_into_their_files():
    first = (
        '"""One."""\n\nimport os\n\n\ndef f():\n    return os\n\n\n# a comment of the second function\ndef g():\n    '
        "pass\n"
    )
    second = "# Copyright\n# of somebody\n\nfrom os import path\n\n\nclass A:\n    pass\n"
    third = 'import re\n\nX = re.compile("a")\n'
    assert by_file.split_files(f"{first}\n\n{second}\n\n{third}") == [first, second, third]
    marked = "".join(f"{one}\n{by_file.END}\n" for one in (first, second, third))
    assert by_file.split_files(marked) == [first, second, third]


def test_files_are_summarized():
    def result(*losses):
        sizes = (100, 100, 200, 10, 100, 100, 100)
        units = ("a", "b", "b", "c", "d", "e", "f")
        samples = [
            Sample("ppl", str(i), {"nll": nll}, weight=size, unit=unit)
            for i, (nll, size, unit) in enumerate(zip(losses, sizes, units))
        ]
        return SuiteResult(samples, {"nll": by_file.ppl.NLL}, info={"tokens": sum(sizes)})

    base = result(*[1.0] * 7)
    found = by_file.summarize_files(result(1.1, 1.3, 1.0, 9.0, 1.2, 2.0, 1.0), base, above=1.15)
    assert found["files"] == 5 and found["worst_file"] == 4
    exact = torch.tensor([0.1, 0.1, 0.2, 1.0, 0.0]).exp()  # b: 300 tokens, of which 100 lose 0.3
    assert found["median"] == pytest.approx(float(exact.median())) and found["worst"] == pytest.approx(
        float(exact.max())
    )
    assert found["share_above"] == pytest.approx(2 / 5)
    with pytest.raises(SurgeryError, match="no file has 1000 tokens"):
        by_file.summarize_files(base, base, 1.5, least=1000)


def test_checkpoints_are_scored_by_file(source, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    stories = (EMBEDDED / "heldout.txt").read_text()[:6000]
    text.write_text("".join(f"{stories[i : i + 1000]}\n{by_file.END}\n" for i in range(0, 6000, 1000)))
    rows = tmp_path / "rows.jsonl"
    size = ("--text", text, "--tokens", 1024, "--length", 128, "--least", 16, "--device", "cpu", "--json", rows)
    run(monkeypatch, by_file, "score", source, source, *size)
    row = json.loads(rows.read_text())
    assert row["files"] > 2 and row["median"] == row["worst"] == 1 and row["share_above"] == 0
    assert "| SRC | " in capsys.readouterr().out
    text.write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", ["by_file", "split", str(text), str(tmp_path / "out.jsonl")])
    with pytest.raises(SystemExit) as stopped:
        run_script(by_file.main)
    assert stopped.value.code == 2 and "Give a text of several" in capsys.readouterr().err
