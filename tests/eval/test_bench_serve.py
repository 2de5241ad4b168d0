"""`surgery bench serve`: cells over batch and context, the prediction by counted bytes, and going on after a kill."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.small_mixers import random_model
from transformers import DynamicCache

from surgery.core.errors import SurgeryError
from surgery.eval.speed import generation, serve
from surgery.eval.speed.model import install_mixers
from surgery.eval.speed.run import bench
from surgery.eval.speed.serve_tables import measured_crossover, predicted_crossover, serve_markdown, throughput_cell
from surgery.eval.speed.tables import result_tables, save_plot
from surgery.mixers.linear_config import LinearAttention


@pytest.fixture
def small(monkeypatch):
    """One context of eight tokens, batches of 1 and 2."""
    monkeypatch.setitem(serve.CONTEXTS, "small", (8,))
    monkeypatch.setitem(serve.BATCHES, "small", (1, 2))
    monkeypatch.setitem(serve.STEPS, "small", 1)


def run(out, **options):
    return bench("serve", "small", device="cpu", out=out, **options)


def test_a_killed_run_goes_on_at_the_missing_cell(small, tmp_path, monkeypatch):
    out, whole = tmp_path / "serve.json", serve.measure_cell
    calls = []

    def killed(model, cache, batch, sizes, device):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(model, cache, batch, sizes, device)

    monkeypatch.setattr(serve, "measure_cell", killed)
    with pytest.raises(KeyboardInterrupt):
        run(out, only="mlr")
    first = json.loads(out.read_text())
    assert len(first["rows"]) == 1 and not first["complete"]
    result = run(out, only="mlr")
    assert result["rows"][0] == first["rows"][0] and result["complete"] and json.loads(out.read_text()) == result
    assert [(row["model"], row["batch"]) for row in result["rows"]] == [
        (name, batch) for name in (serve.ORIGINAL, "MLR attention") for batch in (1, 2)
    ]
    assert len(calls) == 5
    assert result_tables(result) and "tokens per second" in serve_markdown(result)
    save_plot(result, tmp_path / "serve.png")
    assert (tmp_path / "serve.png").stat().st_size > 1000


def test_a_cell_without_memory_says_so_and_the_others_run(small, tmp_path, monkeypatch):
    whole = serve.measure_cell

    def scarce(model, cache, batch, sizes, device):
        if batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return whole(model, cache, batch, sizes, device)

    monkeypatch.setattr(serve, "measure_cell", scarce)
    one, two = run(None, only="none")["rows"]
    assert one["ms"] > 0 and two["ms"] is None and two["note"] == "does not fit: out of memory"
    assert throughput_cell({("a", 2): two}, "a", 2) == "does not fit"


def test_other_files_are_not_continued(small, tmp_path):
    out = tmp_path / "o.json"
    for found, message in (
        ({"kind": "decode", "rows": []}, "is not a result of bench serve"),
        ({"kind": "serve", "rows": []}, "other sizes, device, dtype, versions, shape"),
    ):
        out.write_text(json.dumps(found))
        with pytest.raises(SurgeryError, match=message):
            run(out)
    good = {"model": "a", "batch": 1, "context": 8, "weight_bytes": 5, "row_bytes": 2, "ms": 1.0}
    assert serve.is_cell(good)
    for damage in ({"ms": float("inf")}, {"batch": True}, {"row_bytes": -1}, {"model": None}, {"ms": None}):
        assert not serve.is_cell({**good, **damage})


@pytest.mark.parametrize("mixers", [False, True])
def test_repeated_rows_decode_as_each_row_alone(mixers):
    """A step of a batch that was copied from one row has that row's logits, and does not change the row."""
    model = random_model("llama").double().eval()
    if mixers:
        install_mixers(model, LinearAttention(mask="hierarchical"))
        model.double()
    ids = torch.arange(3, 12)[None]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        generation.prefill(model, ids, cache)
        rows = generation.repeat_rows(cache, 3, 4)
        tokens = torch.tensor([[5], [6], [7]])
        for _ in range(2):  # after rewind the same again; a mixer's state has no way back
            generation.rewind(rows)
            logits = model(tokens, past_key_values=rows).logits
            if mixers:
                break
        for token, row in zip(tokens, logits):
            whole = model(torch.cat([ids, token[None]], 1)).logits[0, -1]
            assert (row[0] - whole).abs().max() < 1e-9
    assert cache.get_seq_length() == 9
    if not mixers:
        assert generation.cache_bytes(rows) == generation.cache_bytes(cache) * 3 * (9 + 4) // 9


def test_crossovers():
    cell = lambda weights, row: {"weight_bytes": weights, "row_bytes": row}  # noqa: E731
    assert predicted_crossover(cell(100, 10), cell(130, 4)) == "from batch 6"  # 130 + 4 B < 100 + 10 B for B > 5
    assert predicted_crossover(cell(100, 4), cell(70, 10)) == "up to batch 4"
    assert predicted_crossover(cell(100, 10), cell(50, 10)) == "every batch"
    assert predicted_crossover(cell(100, 10), cell(100, 10)) == "nowhere"
    assert measured_crossover([(1, False), (4, True), (16, True)]) == "from batch 4"
    assert measured_crossover([(1, True), (4, False)]) == "at batch 1"
    assert measured_crossover([(1, False)]) == "nowhere" and measured_crossover([(1, True)]) == "every batch"
