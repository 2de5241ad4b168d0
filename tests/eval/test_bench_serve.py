"""`surgery bench serve`: cells over batch and context, the prediction by counted bytes, and going on after a kill."""

from __future__ import annotations

import copy
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
from surgery.mixers.mlr import MLR
from surgery.modeling.cache import mixer_modules


@pytest.fixture
def small(monkeypatch):
    """One context of eight tokens, batches of 1 and 2."""
    monkeypatch.setitem(serve.CONTEXTS, "small", (8,))
    monkeypatch.setitem(serve.BATCHES, "small", (1, 2))
    monkeypatch.setitem(serve.STEPS, "small", 1)


def run(out, **options):
    return bench("serve", "small", device="cpu", out=out, **options)


def test_a_killed_run_goes_on_at_the_missing_cell(small, tmp_path, monkeypatch):
    out, whole = tmp_path / "serve.json", serve.measure_once
    calls = []

    def killed(model, cache, batch, sizes, device):
        calls.append((batch, next(mixer_modules(model), None) is not None))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return whole(model, cache, batch, sizes, device)

    monkeypatch.setattr(serve, "measure_once", killed)
    with pytest.raises(KeyboardInterrupt):
        run(out, only="mlr")
    first = json.loads(out.read_text())
    assert len(first["rows"]) == 2 and not first["complete"]
    assert calls == [(1, False), (1, True), (1, False), (1, True), (2, False), (2, True)]  # the models take turns
    result = run(out, only="mlr")
    assert result["rows"][:2] == first["rows"] and result["complete"] and json.loads(out.read_text()) == result
    assert [(row["model"], row["batch"]) for row in result["rows"]] == [
        (name, batch) for batch in (1, 2) for name in (serve.ORIGINAL, "MLR attention")
    ]
    assert len(calls) == 10 and all(len(row["runs_ms"]) == 2 for row in result["rows"])
    assert "runs in turns with the other models" in serve_markdown(result)
    assert result_tables(result) and "tokens per second" in serve_markdown(result)
    save_plot(result, tmp_path / "serve.png")
    assert (tmp_path / "serve.png").stat().st_size > 1000


def test_a_cell_without_memory_says_so_and_the_others_run(small, tmp_path, monkeypatch):
    whole = serve.measure_once

    def scarce(model, cache, batch, sizes, device):
        if batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return whole(model, cache, batch, sizes, device)

    monkeypatch.setattr(serve, "measure_once", scarce)
    one, two = run(None, only="none")["rows"]
    assert one["ms"] > 0 and two["ms"] is None and two["note"] == "does not fit: out of memory"
    assert throughput_cell({("a", 2): two}, "a", 2) == "does not fit"


def test_other_files_are_not_continued(small, tmp_path):
    out = tmp_path / "o.json"
    for found, message in (
        ({"kind": "decode", "rows": []}, "is not a result of bench serve"),
        ({"kind": "serve", "rows": []}, "other loop, sizes, device, dtype, versions, shape"),
    ):
        out.write_text(json.dumps(found))
        with pytest.raises(SurgeryError, match=message):
            run(out)
    good = {"model": "a", "batch": 1, "context": 8, "weight_bytes": 5, "row_bytes": 2, "ms": 1.0, "runs_ms": [1.0]}
    assert serve.is_cell(good)
    for damage in (
        {"ms": float("inf")},
        {"batch": True},
        {"row_bytes": -1},
        {"model": None},
        {"ms": None},
        {"runs_ms": []},
        {"runs_ms": [-1.0]},
    ):
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


@pytest.mark.parametrize(
    "mixer", [None, MLR(ranks=(4, 4), extents=(6,)), LinearAttention(mask="hierarchical")], ids=str
)
def test_a_repeated_step_leaves_the_context_as_it_is(mixer):
    """Steps at one length: softmax and MLR attention answer the same token alike each time, and a recurrent state moves
    on.
    """
    model = random_model("llama").double().eval()
    if mixer is not None:
        install_mixers(model, mixer)
        model.double()
    ids, cache = torch.arange(3, 23)[None], DynamicCache(config=model.config)
    model.config._attn_implementation = generation.FULL_ROWS
    with torch.inference_mode():
        generation.prefill(model, ids[:, :12], cache)
        generation.prefill(model, ids[:, 12:], cache)
        plain = copy.deepcopy(cache)
        rows = generation.repeat_rows(cache, 2, generation.RepeatedStep.WARMUPS + 2)
        step = generation.RepeatedStep(model, rows, torch.tensor([[5], [7]]))
        for _ in range(2):
            step()
        assert step.problem is None and rows.get_seq_length() == len(ids[0]) + (2 if mixer is not None else 0)
        tokens_B1, place = torch.tensor([[5], [7]]), torch.full((2, 1), 20)
        plain.batch_repeat_interleave(2)
        for _ in range(4):
            tokens_B1 = model(tokens_B1, past_key_values=plain, position_ids=place).logits[:, -1:].argmax(-1)
            if mixer is None:
                plain.crop(-1)
    if not isinstance(mixer, MLR):  # its warm-up tokens stay in the cache
        assert (step.token_B1 == tokens_B1).all()
    else:
        before = {n: t.clone() for n, t in rows.layers[0].state.tensors.items()}
        with torch.inference_mode():
            step()
        assert all(n.startswith("keys1") or torch.equal(t, before[n]) for n, t in rows.layers[0].state.tensors.items())


def test_rows_without_padding_need_no_mask():
    """The attention implementation of the benchmarks gives the logits of sdpa: whole prompts, pieces and steps."""
    model = random_model("llama").double().eval()
    ids = torch.arange(3, 33).view(2, 15)
    with torch.inference_mode():
        expected = model(ids).logits
        model.config._attn_implementation = generation.FULL_ROWS
        cache = DynamicCache(config=model.config)
        found = [model(part, past_key_values=cache).logits for part in ids.split([6, 8, 1], 1)]
    assert (torch.cat(found, 1) - expected).abs().max() < 1e-9


def test_crossovers():
    cell = lambda weights, row: {"weight_bytes": weights, "row_bytes": row}  # noqa: E731
    assert predicted_crossover(cell(100, 10), cell(130, 4)) == "from batch 6"  # 130 + 4 B < 100 + 10 B for B > 5
    assert predicted_crossover(cell(100, 4), cell(70, 10)) == "up to batch 4"
    assert predicted_crossover(cell(100, 10), cell(50, 10)) == "every batch"
    assert predicted_crossover(cell(100, 10), cell(100, 10)) == "nowhere"
    assert measured_crossover([(1, False), (4, True), (16, True)]) == "from batch 4"
    assert measured_crossover([(1, True), (4, False)]) == "at batch 1"
    assert measured_crossover([(1, False)]) == "nowhere" and measured_crossover([(1, True)]) == "every batch"
