"""`surgery bench vllm`: the models it writes, its refusals and its tables. The engines run under `make test-vllm`."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.small import make_recipe

import surgery
from surgery.checkpoint.source import open_converted_checkpoint
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.eval.speed import vllm_engines
from surgery.eval.speed.model import make_llama
from surgery.vllm.servable import check_config


def cells(step: float) -> list[dict]:
    return [{"prompt": 64, "batch": batch, "prefill_s": step / 100, "decode_ms": step * batch} for batch in (1, 4)]


@pytest.fixture
def stand_in(monkeypatch):
    """A tested vLLM, and processes that measure 2 ms a step of the original and 1 ms of a conversion."""
    monkeypatch.setattr(vllm_engines, "installed_version", lambda: "0.32.0")
    monkeypatch.setitem(vllm_engines.ROUNDS, "small", 2)
    order: list[str] = []

    def measure(folder, sizes, dtype):
        order.append(folder.name)
        about = {"vllm": "0.32.0", "cudagraph_mode": "PIECEWISE", "eager": False, "blocks": 7, "block_size": 64}
        return cells(2.0 if folder.name in ("original", "SRC") else 1.0), about

    monkeypatch.setattr(vllm_engines, "_run_process", measure)
    return order


class Engine:
    """vLLM's engine with one second a step, which reads one prompt a step and writes a token of each that it has read."""

    def __init__(self, clock):
        self.clock, self.requests = clock, {}

    def add_request(self, name, prompt, sampling):
        assert prompt["prompt_token_ids"]
        self.requests[name] = [0, sampling.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        self.clock.now += 1.0
        waiting = [name for name, (written, _) in self.requests.items() if not written]
        outputs = []
        for name, request in list(self.requests.items()):
            if request[0] or name == waiting[0]:
                request[0] += 1
                outputs.append(output_of(name, request[0], request[0] == request[1]))
                if request[0] == request[1]:
                    del self.requests[name]
        self.clock.now += 0.5 * len(outputs)
        return outputs


def output_of(name, count, finished):
    return SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(range(count)))], finished=finished)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(9, (3 + 0.5 * 6, 2.5)), (1, (3 + 0.5 * 3, None)), (2, (3 + 0.5 * 5, None))]
)
def test_decoding_is_timed_while_every_request_writes(tokens, expected, monkeypatch):
    """Three prompts, one read a step: first tokens after three steps; then steps of 1 + 3 / 2 seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(vllm_engines.time, "perf_counter", lambda: clock.now)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given)))
    assert vllm_engines.run_requests(Engine(clock), [[5, 6], [7], [8]], tokens) == expected


def test_requests_that_do_not_fit_at_once_have_no_decoding_time(stand_in, monkeypatch):
    """The table says so in place of a time and of ratios to it."""
    measured = vllm_engines._run_process
    without = lambda rows: [{**row, "decode_ms": None} if row["batch"] == 4 else row for row in rows]  # noqa: E731

    def measure(folder, sizes, dtype):
        rows, about = measured(folder, sizes, dtype)
        return (without(rows) if folder.name == "original" else rows), about

    monkeypatch.setattr(vllm_engines, "_run_process", measure)
    shown = repr(surgery.bench("vllm", sizes="small", only="log-linear"))
    assert "do not fit at once" in shown and "1.00 (1.00 to 1.00), 2.00x" in shown
    assert "4.00 (4.00 to 4.00)" in shown and "4.00 (4.00 to 4.00)," not in shown


def test_random_models_take_turns_and_are_servable(stand_in, tmp_path, monkeypatch):
    tables, write = [], vllm_engines.write_random_models

    def written(*args):
        folders = write(*args)
        tables.extend(
            check_config(open_converted_checkpoint(str(f)).config, n) for n, f in folders.items() if n != "original"
        )
        return folders

    monkeypatch.setattr(vllm_engines, "write_random_models", written)
    out = tmp_path / "vllm.json"
    found = surgery.bench("vllm", sizes="small", only="fast-half,log-linear", out=out)
    assert stand_in == ["original", "fast-half", "log-linear"] * 2 and json.loads(out.read_text()) == found
    assert found["complete"] and len(found["rows"]) == 12
    assert bool(tables[0].modules) and bool(tables[1].mixers)
    assert "0.50 (0.50 to 0.50)" not in repr(found) and "1.00 (1.00 to 1.00), 2.00x" in repr(found)
    assert "7 blocks of 64 tokens" in repr(found) and "PIECEWISE" in repr(found)


def test_checkpoints_are_compared_with_the_first(stand_in, checkpoints, tmp_path):
    convert(str(checkpoints("llama")), make_recipe(structure="low_rank"), tmp_path / "OUT")
    (tmp_path / "SRC").symlink_to(checkpoints("llama"))
    found = surgery.bench("vllm", model=f"{tmp_path / 'SRC'},{tmp_path / 'OUT'}", sizes="small")
    assert stand_in == ["SRC", "OUT"] * 2 and "2.00x" in repr(found)
    with pytest.raises(SurgeryError, match=r"gone is no checkpoint"):
        surgery.bench("vllm", model=str(tmp_path / "gone"), sizes="small")


def test_models_of_8b_are_a_config_alone_with_the_ranks_of_the_plan(stand_in, monkeypatch):
    written, write = {}, vllm_engines.write_config_only_models

    def kept(*args):
        folders = write(*args)
        assert all([file.name for file in folder.iterdir()] == ["config.json"] for folder in folders.values())
        written.update({name: json.loads((folder / "config.json").read_text()) for name, folder in folders.items()})
        return folders

    monkeypatch.setattr(vllm_engines, "write_config_only_models", kept)
    found = surgery.bench("vllm", sizes="8b", only="fast-half", dtype="bfloat16")
    assert stand_in == ["original", "fast-half"] * 2 and found["complete"] and found["new_tokens"] == 128
    table = check_config(written["fast-half"], "fast-half").modules
    shapes = {(e["rank"], e["in_features"], e["out_features"]) for e in table.values()}
    assert len(table) == 7 * 32 and {e["structure"] for e in table.values()} == {"low_rank"}
    assert shapes == {(1024, 4096, 4096), (384, 4096, 1024), (1536, 4096, 14336), (1536, 14336, 4096)}
    assert {**written["fast-half"], "quantization_config": None} == {**written["original"], "quantization_config": None}


def test_the_table_of_a_config_alone_is_that_of_a_conversion(tmp_path):
    shape = {**vllm_engines.SHAPES_HERE["small"], "hidden_size": 256, "intermediate_size": 640}
    planned = vllm_engines.write_config_only_models(["fast-half"], shape, "float32", tmp_path / "PLANNED")
    model = make_llama(shape, "cpu", torch.float32)
    model.save_pretrained(tmp_path / "SRC")
    convert(str(tmp_path / "SRC"), vllm_engines.recipe_without_text("fast-half"), tmp_path / "OUT")
    tables = [json.loads((f / "config.json").read_text()) for f in (planned["fast-half"], tmp_path / "OUT")]
    assert tables[0]["quantization_config"] == tables[1]["quantization_config"]
    assert 64 in {e["rank"] for e in tables[0]["quantization_config"]["modules"].values()}  # rounded; others are below


def test_choices_without_a_model_are_refused(stand_in, checkpoints):
    with pytest.raises(SurgeryError, match=r"--sizes 8b has models of its own, without weights"):
        surgery.bench("vllm", model=str(checkpoints("llama")), sizes="8b")
    with pytest.raises(SurgeryError, match=r"--only log-linear names no model .* There are original, fast-half$"):
        surgery.bench("vllm", sizes="8b", only="log-linear")
    assert not stand_in


def test_without_a_tested_vllm_it_says_which_to_install(monkeypatch):
    monkeypatch.setattr(vllm_engines, "installed_version", lambda: "0.29.0")
    with pytest.raises(SurgeryError, match=r"has version 0\.29\.0, .* tested with 0\.26 or 0\.32"):
        surgery.bench("vllm", sizes="small")


def test_what_a_process_says_is_shown_when_it_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engines, "WORKER", "import sys; print('no blocks left', file=sys.stderr); sys.exit(3)")
    with pytest.raises(SurgeryError, match=r"exit code 3\)\. Its last lines:\nno blocks left"):
        vllm_engines._run_process(tmp_path, "small", "float32")
