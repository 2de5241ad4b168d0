"""`generated_tokens`: rows that the original samples are fitted to beside the calibration text."""

from __future__ import annotations

import os

import pytest
import torch
from conversion.test_convert import Crash, bytes_of
from conversion.test_tune import run, tensors_of
from helpers.forked import run_processes
from helpers.small import make_recipe, tiny_config
from safetensors.torch import load_file, save_file

import surgery
import surgery.calibration.partition
from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion import generated
from surgery.conversion.estimation.shape import TextRows
from surgery.conversion.generated import draw_prompts, sample_rows, with_generated_rows
from surgery.core.errors import SurgeryError
from surgery.core.journal import Journal

BASE = {"structure": "low_rank", "keep": 0.5, "allocate": "uniform", "sweeps": 1, "holdout": 0.25}
MORE = {**BASE, "generated_tokens": 200, "tune": {"layers": 0, "model": 1}}


def samples(ids, mask=None, holdout=0.25):
    return CalibrationSet.from_inputs({"input_ids": ids, **({} if mask is None else {"attention_mask": mask})}, holdout)


def interrupt(monkeypatch, convert, lines):
    """Run a conversion that is killed when its journal has so many lines."""
    add = Journal.add

    def crash(self, step, **what):
        if len(self.entries) == lines:
            raise Crash
        add(self, step, **what)

    monkeypatch.setattr(Journal, "add", crash)
    with pytest.raises(Crash):
        convert()
    monkeypatch.setattr(Journal, "add", add)


def loaded(checkpoints, family):
    return tiny_config(family)[0].from_pretrained(checkpoints(family)).eval()


# -- the rows --------------------------------------------------------------------------------------
def test_rows_join_those_to_fit_and_held_out_rows_stay():
    ids = torch.arange(80).view(8, 10)
    joined = with_generated_rows(samples(ids), torch.full((3, 10), 5))
    assert (joined.n_fit, joined.rows) == (9, 11)
    assert torch.equal(joined.inputs["input_ids"][:6], ids[:6]) and torch.equal(joined.inputs["input_ids"][9:], ids[6:])
    masked = with_generated_rows(samples(ids, (ids > 3).long()), torch.full((3, 10), 5))
    assert masked.inputs["attention_mask"][6:9].all() and not masked.inputs["attention_mask"][0, :4].any()


def test_prompts_are_of_the_rows_to_fit_to_behind_what_begins_all_windows():
    ids = torch.randint(3, 90, (8, 40), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 1
    prompts = draw_prompts(samples(ids), 50, seed=3)
    assert prompts.shape == (50, 11) and (prompts[:, 0] == 1).all()
    spans = {tuple(row[i : i + 10].tolist()) for row in ids[:6] for i in range(1, 31)}
    assert {tuple(row[1:].tolist()) for row in prompts} <= spans
    assert torch.equal(prompts, draw_prompts(samples(ids), 50, seed=3)) and len(prompts.unique(dim=0)) > 20


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_have_no_padding(side):
    ids = torch.randint(3, 90, (8, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(4):
        pad = slice(0, 10) if side == "left" else slice(14, None)
        ids[row, pad], mask[row, pad] = 0, 0
    assert (draw_prompts(samples(ids, mask), 40, seed=0) > 2).all()


def test_rows_follow_the_model_and_not_its_generation_config(checkpoints):
    model, ids = loaded(checkpoints, "llama"), torch.randint(3, 96, (8, 24), generator=torch.Generator().manual_seed(0))
    recipe = make_recipe(**BASE, generated_tokens=24 * 4000, length=24)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    before = torch.random.get_rng_state()
    rows = sample_rows(model, samples(ids), recipe, torch.device("cpu"))
    assert torch.equal(before, torch.random.get_rng_state()) and rows.shape == (4000, 24)
    model.generation_config.temperature, model.generation_config.top_k, model.generation_config.do_sample = (
        0.1,
        1,
        False,
    )
    model.generation_config.eos_token_id, model.generation_config.repetition_penalty = 7, 2.0
    kept = model.generation_config
    assert torch.equal(rows, sample_rows(model, samples(ids), recipe, torch.device("cpu")))
    assert model.generation_config is kept
    # Of the model's own samples the mean loss is the mean entropy of its predictions; tokens of any other distribution
    # have another loss.
    with torch.no_grad():
        logs = model(rows[:2000]).logits[:, 10:-1].log_softmax(-1)
    loss = -logs.gather(2, rows[:2000, 11:, None]).mean()
    entropy = -(logs.exp() * logs).sum(-1).mean()
    assert float(entropy) < 4.0 and float(loss) == pytest.approx(float(entropy), abs=0.05)


def test_estimates_count_the_rows():
    text, more = TextRows.of(160, 20, 0.25), TextRows.of(160, 20, 0.25, 400)
    assert (text.fit, text.held) == (6, 2) and (more.fit, more.held) == (26, 2)


# -- conversions -----------------------------------------------------------------------------------
def test_reports_and_bytes(checkpoints, calibration, tmp_path):
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    plain = run(checkpoint, inputs, tmp_path / "plain", BASE)
    one = run(checkpoint, inputs, tmp_path / "one", MORE)
    run(checkpoint, inputs, tmp_path / "two", MORE)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    length = load_file(inputs)["input_ids"].shape[1]
    more = 200 // length * length
    assert one["calibration"]["generated_tokens"] == more > 0
    assert one["calibration"]["tokens"] == plain["calibration"]["tokens"] + more
    assert one["calibration"]["held_out_windows"] == plain["calibration"]["held_out_windows"]
    assert "generated_tokens" not in plain["calibration"] and "generate" in one["time"]["seconds"]
    assert not (tmp_path / "one" / "generated.safetensors").exists()


def test_an_interrupted_sampling_goes_on_with_the_rows_that_it_has(checkpoints, calibration, tmp_path, monkeypatch):
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    monkeypatch.setattr(generated, "MAX_TOGETHER", 3)
    run(checkpoint, inputs, tmp_path / "whole", MORE)
    cls, calls = tiny_config("llama")[0], []
    generate = cls.generate

    def counted(self, *given, **keys):
        calls.append(1)
        if len(calls) == 3:
            raise Crash
        return generate(self, *given, **keys)

    monkeypatch.setattr(cls, "generate", counted)
    with pytest.raises(Crash):
        run(checkpoint, inputs, tmp_path / "out", MORE)
    parts = sorted(path.name for path in (tmp_path / "out.partial").glob("generated-*"))
    assert parts == ["generated-0.safetensors", "generated-1.safetensors"]
    damaged = tmp_path / "out.partial" / parts[1]
    rows = load_file(damaged)["input_ids"]
    save_file({"input_ids": rows.flip(1).contiguous()}, damaged)  # other rows than from these prompts
    calls.clear()
    monkeypatch.setattr(cls, "generate", lambda self, *g, **k: (calls.append(1), generate(self, *g, **k))[1])
    run(checkpoint, inputs, tmp_path / "out", MORE, resume=True)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    whole = -(-(200 // rows.shape[1]) // 3)
    assert len(calls) == whole - 1  # the first batch was kept


def test_plans_refuse_models_that_do_not_continue_text(checkpoints):
    for family in ("bert", "t5"):
        with pytest.raises(SurgeryError, match=r"plan: generated_tokens needs a model that continues text \(got "):
            surgery.plan(str(checkpoints(family)), {"structure": "low_rank", "generated_tokens": 4096})


def test_killed_after_every_journal_line(checkpoints, calibration, tmp_path, monkeypatch):
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    run(checkpoint, inputs, tmp_path / "whole", MORE)
    whole, calls = bytes_of(tmp_path / "whole"), []
    sample = generated.sample_rows
    monkeypatch.setattr(generated, "sample_rows", lambda *a: calls.append(1) or sample(*a))
    for lines in (1, 2, 4):
        out = tmp_path / f"out-{lines}"
        interrupt(monkeypatch, lambda out=out: run(checkpoint, inputs, out, MORE), lines)
        calls.clear()
        run(checkpoint, inputs, out, MORE, resume=True)
        assert bytes_of(out) == whole and len(calls) == (lines == 1), lines


@pytest.mark.parametrize("damage", ["lost", "other"])
def test_a_damaged_file_is_sampled_again(damage, checkpoints, calibration, tmp_path, monkeypatch):
    checkpoint, inputs, out = checkpoints("llama"), calibration("llama"), tmp_path / "out"
    run(checkpoint, inputs, tmp_path / "whole", MORE)

    interrupt(monkeypatch, lambda: run(checkpoint, inputs, out, MORE), lines=4)
    file = tmp_path / "out.partial" / "generated.safetensors"
    assert file.is_file()
    if damage == "lost":
        file.unlink()
    else:
        save_file({"input_ids": torch.full((10, 2), 10**6)}, file)
    run(checkpoint, inputs, out, MORE, resume=True)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("ids, words", [("large", r"input_ids holds .* from 0 to 95"), ("few", r"must hold input_ids")])
def test_rows_of_a_strange_file_are_checked(ids, words, checkpoints, calibration, tmp_path, monkeypatch):
    """The journal and the file may both be a stranger's."""
    checkpoint, inputs, out = checkpoints("llama"), calibration("llama"), tmp_path / "out"
    interrupt(monkeypatch, lambda: run(checkpoint, inputs, out, MORE), lines=4)
    file = tmp_path / "out.partial" / "generated.safetensors"
    rows = load_file(file)["input_ids"]
    digest = generated.hash_file(file)
    save_file({"input_ids": torch.full_like(rows, 10**6) if ids == "large" else rows[:1].clone()}, file)
    monkeypatch.setattr(generated, "hash_file", lambda path: digest)
    with pytest.raises(SurgeryError, match=words):
        run(checkpoint, inputs, out, MORE, resume=True)


def test_finished_steps_need_the_rows_that_they_were_computed_from(checkpoints, calibration, tmp_path, monkeypatch):
    checkpoint, inputs, out = checkpoints("llama"), calibration("llama"), tmp_path / "out"

    interrupt(monkeypatch, lambda: run(checkpoint, inputs, out, MORE), lines=4)
    (tmp_path / "out.partial" / "generated.safetensors").unlink()
    sample = generated.sample_rows
    monkeypatch.setattr(generated, "sample_rows", lambda *a: sample(*a).flip(0) + 1)
    with pytest.raises(SurgeryError, match=r"was lost or changed, and this machine samples other text"):
        run(checkpoint, inputs, out, MORE, resume=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_several_processes_make_the_bytes_of_one(checkpoints, calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 48)
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    run(checkpoint, inputs, tmp_path / "alone", MORE)
    assert run_processes(2, lambda rank: run(checkpoint, inputs, tmp_path / "shared", MORE)) == [0, 0]
    assert bytes_of(tmp_path / "shared") == bytes_of(tmp_path / "alone")


def test_a_live_model_gets_the_tensors_of_the_command(checkpoints, calibration, tmp_path):
    checkpoint, inputs = checkpoints("qwen2"), calibration("qwen2")
    run(checkpoint, inputs, tmp_path / "out", MORE)
    live = tiny_config("qwen2")[0].from_pretrained(checkpoint).train()
    config = live.generation_config
    model = surgery.apply(live, MORE, calibration=load_file(inputs))
    state, written = model.state_dict(), tensors_of(tmp_path / "out")
    assert all(torch.equal(state[name], tensor) for name, tensor in written.items())
    assert model.training and model.generation_config is config


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["bert", "t5", "vit"])
def test_models_that_continue_no_text_are_refused(family, checkpoints, calibration, tmp_path):
    with pytest.raises(SurgeryError, match=r"generated_tokens needs a model that continues text"):
        run(checkpoints(family), calibration(family), tmp_path / "out", MORE)
    assert not list(tmp_path.glob("out*"))


def test_refusals_say_what_to_do(checkpoints, calibration, tmp_path):
    with pytest.raises(SurgeryError, match=r"at least one window of \d+ tokens .got 3.\. Set more"):
        run(checkpoints("llama"), calibration("llama"), tmp_path / "out", {**BASE, "generated_tokens": 3})
    with pytest.raises(SurgeryError, match=r"continuations of the calibration text, and there is none"):
        run(checkpoints("llama"), None, tmp_path / "out", {**BASE, "generated_tokens": 300})
    with pytest.raises(SurgeryError, match=r"generated_tokens"):
        make_recipe(**BASE, generated_tokens=-1)


def test_journals_from_before_go_on(checkpoints):
    from surgery.conversion.preflight import journal_fingerprint

    source = open_checkpoint(str(checkpoints("llama")), False)
    assert "generated_tokens" not in journal_fingerprint(source, make_recipe(**BASE), None)["recipe"]
    assert "generated_tokens" in journal_fingerprint(source, make_recipe(**MORE), None)["recipe"]
    assert MetaModel(source).model.can_generate()


def test_plans_estimate_the_sampling(checkpoints):
    plain, more = (
        surgery.plan(checkpoints("llama"), recipe)["estimate"] for recipe in (BASE, {**BASE, "generated_tokens": 65536})
    )
    (step,) = [step for step in more["steps"] if step["name"] == "generate"]
    assert step["seconds"][1] > 0 and more["tokens"] > plain["tokens"] and "generate" not in str(plain["steps"])
