"""Losses weighted by the need for distant context: the mask, the weights, and training with them."""

from __future__ import annotations

import pytest
import torch
from helpers.loss_definitions import kl_divergence
from helpers.small import tiny_config, tiny_inputs
from helpers.small_training import TINY_CHECKPOINT, healing_recipe, read_losses

from surgery.core.errors import SurgeryError
from surgery.mixers.sliding_window import Window
from surgery.modeling.attention import install
from surgery.training import cuda_graph
from surgery.training import models as opening
from surgery.training.finetune import finetune
from surgery.training.stages import STAGES, StageModels
from surgery.training.stages.far_weight import NearTeacher, near_tokens, token_weights

pytestmark = pytest.mark.usefixtures("without_curves")
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "gpt2", "gpt_neox")


def tiny_model(family, **keys):
    kind, config = tiny_config(family)
    for name, value in keys.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return kind(config).eval()


@torch.no_grad()
def logits_of(model, ids_BT, cut=None, **keys):
    if cut is None:
        return model(input_ids=ids_BT, use_cache=False, **keys).logits
    position_BT = keys.get("position_ids", torch.arange(ids_BT.shape[1]).expand_as(ids_BT))
    with NearTeacher(model, *cut).cut(position_BT):
        return model(input_ids=ids_BT, use_cache=False, **keys).logits


@pytest.mark.parametrize("window, sinks, own", [(3, 2, None), (1, 0, None), (5, 2, 4), (100, 0, None)])
def test_near_tokens_are_those_of_the_definition(window, sinks, own):
    position_BT = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]])
    found = near_tokens(position_BT, window, sinks, own)
    for row, position_T in enumerate(position_BT.tolist()):
        begins = [t - position_T[t] for t in range(8)]
        for t in range(8):
            for s in range(8):
                near = t - s < window or position_T[s] < sinks
                expected = s <= t and begins[t] == begins[s] and near and (own is None or t - s < own)
                assert bool(found[row, 0, t, s]) == expected


def test_a_cut_model_is_a_model_with_a_sliding_window():
    ids_BT = tiny_inputs("mistral", 2)["input_ids"]
    full, sliding = tiny_model("mistral", sliding_window=None), tiny_model("mistral", sliding_window=7)
    assert NearTeacher(full, 7, 0).own_windows != NearTeacher(sliding, 7, 0).own_windows
    cut = logits_of(full, ids_BT, (7, 0))
    torch.testing.assert_close(cut, logits_of(sliding, ids_BT), rtol=1e-4, atol=1e-5)
    assert (cut[:, :7] - logits_of(full, ids_BT)[:, :7]).abs().max() < 1e-5
    assert (cut[:, 12:] - logits_of(full, ids_BT)[:, 12:]).abs().max() > 1e-4


@pytest.mark.parametrize("family", DECODERS)
def test_a_cut_model_is_a_model_with_windows_and_sinks_as_mixers(family):
    """Also where layers have a sliding window of their own (gemma), for packed documents, and with eager attention."""
    model, ids_BT = tiny_model(family), tiny_inputs(family, 2)["input_ids"]
    keys = {"position_ids": torch.cat([torch.arange(15), torch.arange(9)]).expand(2, -1).contiguous()}
    cut = logits_of(model, ids_BT, (5, 2), **keys)
    whole = logits_of(model, ids_BT, (64, 0), **keys)
    plain = logits_of(model, ids_BT, **keys)
    torch.testing.assert_close(whole, plain, rtol=1e-4, atol=1e-5)
    assert (cut - plain).abs().max() > 1e-4
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits_of(model, ids_BT, (5, 2), **keys), cut, rtol=1e-4, atol=1e-5)
    if "gemma2" not in family:  # its softcap needs eager attention
        model.set_attn_implementation("sdpa")
    install(model, dict.fromkeys(NearTeacher(model, 5, 2).own_windows, Window(window=5, sinks=2)))
    torch.testing.assert_close(logits_of(model, ids_BT, **keys), cut, rtol=1e-4, atol=1e-5)


def test_weights_have_mean_one_over_the_counted_tokens_of_a_row():
    gap_BT = torch.tensor([[0.0, 1.0, 3.0, 9.0], [0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    counts_BT = torch.tensor([[True, True, True, False], [True] * 4, [False] * 4])
    weight_BT = token_weights(gap_BT, counts_BT, 0.5)
    expected = torch.tensor([[1.0, 1.5, 2.5, 0.0]]) / ((1.0 + 1.5 + 2.5) / 3)
    torch.testing.assert_close(weight_BT, torch.cat([expected, torch.ones(1, 4), torch.zeros(1, 4)]))


# -- the stage -------------------------------------------------------------------------------------
def open_models(student):
    source, original = opening.open_trainable(str(student)), opening.open_trainable(str(TINY_CHECKPOINT))
    model = opening.load_student(source)
    return StageModels(
        model, model, opening.load_causal_lm(original, torch.float32).eval().requires_grad_(False)
    ), opening.linear_roles(source, model)


def stage_of(models, roles, **keys):
    (config,) = healing_recipe("none.jsonl", {"kind": "distill", **keys}).stages
    stage = STAGES[config](config)
    stage.prepare(models, roles)
    return stage


def rows(count=2, length=48):
    ids_BT = torch.randint(5, 200, (count, length), generator=torch.Generator().manual_seed(0))
    labels_BT = ids_BT.clone()
    labels_BT[0, 30:] = -100
    return {"input_ids": ids_BT, "labels": labels_BT, "position_ids": torch.arange(length).expand(count, -1)}


def test_the_loss_is_the_weighted_sum(btt):
    models, roles = open_models(btt)
    batch = rows()
    stage = stage_of(models, roles, far_weight=2.0, far_window=8, far_sinks=1, ce_weight=0.5)
    ids_BT, counts_BT = batch["input_ids"], torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100) != -100
    full, student = logits_of(models.teacher, ids_BT), logits_of(models.student, ids_BT)
    gap_BT = kl_divergence(logits_of(models.teacher, ids_BT, (8, 1)), full, 1.0)
    weight_BT = token_weights(gap_BT, counts_BT, 2.0)
    ce_BT = torch.nn.functional.cross_entropy(student[:, :-1].mT, ids_BT[:, 1:], reduction="none")
    expected = {
        "kl": (kl_divergence(student, full, 1.0) * weight_BT).sum(),
        "ce": (torch.nn.functional.pad(ce_BT, (0, 1)) * weight_BT).sum(),
        "far": (gap_BT * counts_BT).sum(),
    }
    found = stage.losses(models, batch)
    assert gap_BT.max() > 0.01 and weight_BT.std() > 0.01
    torch.testing.assert_close(
        found, {"total": expected["kl"] + 0.5 * expected["ce"], **expected}, rtol=1e-4, atol=1e-4
    )


def test_a_window_as_long_as_the_row_weights_all_tokens_alike(btt):
    models, roles = open_models(btt)
    plain = stage_of(models, roles, ce_weight=0.5, top_k=8).losses(models, rows())
    same = stage_of(models, roles, ce_weight=0.5, top_k=8, far_weight=3.0, far_window=48).losses(models, rows())
    assert float(same.pop("far")) == 0
    torch.testing.assert_close(same, plain, rtol=1e-6, atol=0)


STAGE = {"kind": "distill", "trains": ["all"], "length": 32, "tokens": 512, "batch": 4, "rate": 1e-3, "far_weight": 4.0, "far_window": 8}  # fmt: skip


def train(student, texts, out, rows, **keys):
    recipe = healing_recipe(texts, {**STAGE, "rows": rows}, **keys)
    recipe = recipe.model_copy(update={"data": {**recipe.data, "packing": "stream"}})
    finetune(str(student), recipe, out, teacher=str(TINY_CHECKPOINT), track="none", device="cpu")
    return [loss for *_, loss in read_losses(out / "training")]


@pytest.mark.slow
def test_the_same_losses_in_micro_batches_and_captured(btt, texts, tmp_path, monkeypatch):
    whole = train(btt, texts, tmp_path / "whole", 4)
    assert train(btt, texts, tmp_path / "parts", 1) == pytest.approx(whole, rel=1e-4)
    replays = []
    monkeypatch.setattr(cuda_graph, "record_graph", lambda step, **options: lambda: (replays.append(1), step()))
    monkeypatch.setattr(cuda_graph, "is_on_one_gpu", lambda model: True)
    assert train(btt, texts, tmp_path / "captured", 4, cuda_graph=True) == pytest.approx(whole, rel=1e-4)
    assert len(replays) == len(whole) - cuda_graph.WARMUP_BATCHES


def test_what_is_refused(btt, mixed, texts, tmp_path):
    with pytest.raises(SurgeryError, match="far_window is read only if far_weight is above 0"):
        healing_recipe(texts, {"kind": "distill", "far_window": 8})
    with pytest.raises(SurgeryError, match="far_window 32 holds a whole row of 32 tokens"):
        healing_recipe(texts, {**STAGE, "far_window": 32})
    recipe = healing_recipe(texts, STAGE, teacher={"cache": str(tmp_path / "cache")})
    with pytest.raises(SurgeryError, match=r"--teacher SRC\. A teacher cache holds logits only"):
        finetune(str(btt), recipe, tmp_path / "out")
    models, roles = open_models(btt)
    mixers = StageModels(models.student, models.student, opening.load_student(opening.open_trainable(str(mixed))))
    with pytest.raises(SurgeryError, match="this teacher has mixers"):
        stage_of(mixers, roles, far_weight=1, far_window=8)
    models.teacher.config._attn_implementation = "flash_attention_2"
    with pytest.raises(SurgeryError, match=r"attention sdpa or eager \(got flash_attention_2\)"):
        stage_of(models, roles, far_weight=1, far_window=8)
