"""The loss of each stage, against definitions written out here."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.loss_definitions import kl_divergence, top_k_kl_divergence
from helpers.small_training import LAYERS, TINY_CHECKPOINT, healing_recipe

from surgery.calibration.data import load_tokenizer
from surgery.checkpoint.source import CheckpointSource
from surgery.core.errors import SurgeryError
from surgery.training import models as opening
from surgery.training.finetune import finetune
from surgery.training.stages import STAGES, StageModels
from surgery.training.stages.hidden import HiddenConfig, HiddenStage
from surgery.training.stages.lm import LMStage
from surgery.training.top_k import top_k_log_probs

pytestmark = pytest.mark.usefixtures("without_curves")


def open_models(student):
    """(models, roles) of a student and the embedded checkpoint as its teacher."""
    source, original = opening.open_trainable(str(student)), opening.open_trainable(str(TINY_CHECKPOINT))
    model = opening.load_student(source)
    teacher = opening.load_causal_lm(original, torch.float32).eval().requires_grad_(False)
    return StageModels(model, model, teacher), opening.linear_roles(source, model)


def rows(count=2, length=48, seed=0):
    ids = torch.randint(5, 200, (count, length), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).expand(count, -1).contiguous()
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "valid": torch.ones_like(ids).bool()}


def prepare_stage(models, roles, **keys):
    (config,) = healing_recipe("none.jsonl", {**keys}).stages
    stage = STAGES[config](config)
    stage.prepare(models, roles)
    stage.measure(models, rows(seed=5))
    return stage


@pytest.mark.parametrize("kind", ["align", "hidden", "distill"])
def test_the_teacher_itself_has_nothing_to_learn(kind):
    models, roles = open_models(TINY_CHECKPOINT)
    stage = prepare_stage(models, roles, kind=kind, trains=["attention", "mlp"])
    assert abs(float(stage.losses(models, rows())["total"])) < 1e-3


def test_align_is_each_module_on_the_teacher_s_inputs(btt):
    models, roles = open_models(btt)
    stage = prepare_stage(models, roles, kind="align", modules=["mlp"])
    batch = rows()
    x = models.teacher.model(input_ids=batch["input_ids"], output_hidden_states=True, use_cache=False).hidden_states
    got = stage.losses(models, batch)
    layer, student = models.teacher.model.layers[1], models.student.model.layers[1]
    attended = x[1] + layer.self_attn(
        layer.input_layernorm(x[1]),
        position_embeddings=models.teacher.model.rotary_emb(x[1], batch["position_ids"]),
        attention_mask=None,
    )[0]  # fmt: skip
    read = layer.post_attention_layernorm(attended)
    gap = (student.mlp(read) - layer.mlp(read)).square().mean(-1).sum()
    assert list(stage.sizes) == stage.paths and len(stage.paths) == len(models.teacher.model.layers)
    expected = gap / stage.sizes["model.layers.1.mlp"]
    assert expected > 0 and got["total"] > 0
    alone = prepare_stage(models, roles, kind="align", modules=["mlp"], trains=["model.layers.1.mlp.*"])
    torch.testing.assert_close(alone.losses(models, batch)["total"], expected, rtol=1e-4, atol=1e-5)


def test_align_trains_modules_independently(btt):
    """A module's gradient is the same whatever else is aligned, up to its share of the mean."""
    models, roles = open_models(btt)
    gradients = []
    for trains in (["new"], ["model.layers.1.mlp.*"]):
        models.student.requires_grad_(True)
        stage = prepare_stage(models, roles, kind="align", trains=trains)
        stage.losses(models, rows())["total"].backward()
        core = models.student.model.layers[1].mlp.up_proj.weight
        gradients.append(core.grad * len(stage.paths))
        models.student.zero_grad()
    torch.testing.assert_close(*gradients)


def test_hidden_follows_the_student_s_own_path(btt):
    models, roles = open_models(btt)
    stage = prepare_stage(models, roles, kind="hidden")
    batch = rows()
    ours, theirs = (
        m(input_ids=batch["input_ids"], output_hidden_states=True, use_cache=False).hidden_states[1:]
        for m in (models.student, models.teacher)
    )
    each = [(a - b).square().mean(-1).sum() / scale for a, b, scale in zip(ours, theirs, stage.sizes)]
    torch.testing.assert_close(stage.losses(models, batch)["total"], torch.stack(each).mean(), rtol=1e-4, atol=1e-5)
    assert STAGES[HiddenConfig] is HiddenStage


def test_top_k_lumps_the_rest():
    """The whole KL where k is the vocabulary, less or equal otherwise, by hand where k is two."""
    student, teacher = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)).double().float()
    whole = kl_divergence(student, teacher, 1.0)
    torch.testing.assert_close(
        top_k_kl_divergence(student, *top_k_log_probs(teacher, 11, 1.0), 1.0), whole, rtol=1e-3, atol=1e-4
    )
    for temperature in (1.0, 2.0):
        parts = top_k_kl_divergence(student, *top_k_log_probs(teacher, 2, temperature), temperature)
        p, q = (t.div(temperature).softmax(-1) for t in (teacher, student))
        top = p.topk(2).indices
        pk, qk = (torch.cat([d.gather(-1, top), 1 - d.gather(-1, top).sum(-1, keepdim=True)], -1) for d in (p, q))
        torch.testing.assert_close(parts, (pk * (pk / qk).log()).sum(-1), rtol=1e-3, atol=1e-4)
        assert (parts <= kl_divergence(student, teacher, temperature) + 1e-5).all()


def test_kl_in_parts_is_kl_at_once(btt, monkeypatch):
    """Values and gradients, with temperature and cross-entropy mixed in."""
    from surgery.training import linear_loss

    models, roles = open_models(btt)
    models.student.requires_grad_(True)
    found = []
    for size in (2048, 40):
        monkeypatch.setattr(linear_loss, "CHUNK_TOKENS", size)
        stage = prepare_stage(models, roles, kind="distill", temperature=2.0, ce_weight=0.3, top_k=8)
        total = stage.losses(models, rows())["total"]
        total.backward()
        found.append((total.detach(), models.student.model.layers[0].mlp.up_proj.weight.grad.clone()))
        models.student.zero_grad()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["align", "hidden", "distill", "lm"])
def test_mixers_learn_from_every_stage(mixed, texts, tmp_path, kind):
    stage = {"kind": kind, "trains": ["mixers"], "rates": {"mixers": 1e-2}, "tokens": 1280}
    record = finetune(str(mixed), healing_recipe(texts, stage), tmp_path / "out", teacher=str(TINY_CHECKPOINT))
    (told,) = record["stages"]
    assert record["validation"]["after"]["loss"] < record["validation"]["before"]["loss"]
    if kind in ("align", "hidden"):
        assert told["last_loss"] < told["first_loss"]


def test_lora_is_merged_into_what_is_dense(mixed, texts, tmp_path):
    """The output projections of attention with mixers too, which are folded."""
    from safetensors.torch import load_file

    stage = {"kind": "lora", "targets": ["attention"], "rate": 1e-3, "tokens": 1280}
    out = tmp_path / "out"
    record = finetune(str(mixed), healing_recipe(texts, stage), out)
    before, after = load_file(mixed / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert before.keys() == after.keys() and not (out / "adapter").exists()
    assert len(changed) == 4 * LAYERS and all("self_attn" in n and n.endswith("_proj.weight") for n in changed)
    again = finetune(str(out), healing_recipe(texts, {"kind": "lm", "tokens": 256, "rate": 1e-12}), tmp_path / "again")
    measured = [r["validation"][k]["loss"] for r, k in ((record, "after"), (again, "before"))]
    assert abs(measured[0] - measured[1]) < 1e-4


def test_lora_beside_structures_stays_an_adapter_that_peft_reads(btt, texts, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import surgery  # noqa: F401

    stage = {"kind": "lora", "targets": ["mlp.up", "attention.query"], "rate": 1e-2, "tokens": 1280}
    stage |= {"loss": "distill", "top_k": 16}
    out = tmp_path / "out"
    finetune(str(btt), healing_recipe(texts, stage), out, teacher=str(TINY_CHECKPOINT))
    base = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    batch = {"input_ids": rows()["input_ids"]}
    with torch.no_grad():
        plain = base(**batch).logits
        healed = PeftModel.from_pretrained(base, out / "adapter")
        assert not torch.allclose(plain, healed(**batch).logits, atol=1e-3)
    loras = [p for n, p in healed.named_parameters() if "lora_B" in n]
    assert len(loras) == 2 * LAYERS and all(bool(p.abs().sum() > 0) for p in loras)


def test_an_adapter_that_stays_ends_the_recipe(btt, texts, tmp_path):
    stages = {"kind": "lora", "targets": ["mlp.up"]}, {"kind": "lm"}
    with pytest.raises(SurgeryError, match="Make it the last"):
        finetune(str(btt), healing_recipe(texts, *stages), tmp_path / "out")


def test_a_teacher_reads_the_same_tokens(tmp_path):
    """One may know more words; a word of another number is refused."""
    tokenizer, folder = load_tokenizer(TINY_CHECKPOINT), tmp_path / "other"
    folder.mkdir()
    opening.check_same_tokenizer(tokenizer, CheckpointSource("without a tokenizer", folder, {}, {}))
    more = load_tokenizer(TINY_CHECKPOINT)
    more.add_tokens(["<more>"])
    more.save_pretrained(folder)
    opening.check_same_tokenizer(tokenizer, CheckpointSource("more", folder, {}, {}))
    written = json.loads((folder / "tokenizer.json").read_text())
    words = written["model"]["vocab"]
    (one, first), (two, second), *_ = list(words.items())[100:]
    words |= {one: second, two: first}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(SurgeryError, match=f"of {len(tokenizer):,} tokens {len(tokenizer) - 2:,} have the same id"):
        opening.check_same_tokenizer(tokenizer, CheckpointSource("swapped", folder, {}, {}))


def test_what_neither_changes_is_shared(btt):
    models, roles = open_models(btt)
    changing = {n for n, _ in models.student.named_parameters() if "layers" in n}
    assert opening.share_frozen_tensors(models.student, models.teacher, changing) > 0
    ours, theirs = models.student.get_input_embeddings().weight, models.teacher.get_input_embeddings().weight
    assert ours.data_ptr() == theirs.data_ptr()
    assert all(roles.values())


def test_every_stage_multiplies_in_the_recipe_s_precision(btt, texts, tmp_path, monkeypatch):
    seen = []
    plain = LMStage.losses

    def record_autocast(self, models, batch):
        hook = models.student.lm_head.register_forward_pre_hook(
            lambda *_: seen.append(torch.is_autocast_enabled("cpu"))
        )
        found = plain(self, models, batch)
        hook.remove()
        return found

    monkeypatch.setattr(LMStage, "losses", record_autocast)
    stages = [{"kind": "lm", "tokens": 256, "trains": ["structured"]}] * 2
    finetune(str(btt), healing_recipe(texts, *stages, precision="bf16"), tmp_path / "out")
    assert seen and all(seen)
