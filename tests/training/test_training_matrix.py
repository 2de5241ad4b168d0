"""The first stage of MOHAWK: the student's mixing matrix against the teacher's softmax."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.small_training import TINY_CHECKPOINT, healing_recipe

from surgery.core.errors import SurgeryError
from surgery.mixers import mixer_config
from surgery.modeling.attention import install
from surgery.training.finetune import finetune
from surgery.training.stages.align import AlignConfig, AlignStage
from surgery.training.stages.base import StageModels
from surgery.training.stages.mixing_matrix import MixingProbe

pytestmark = pytest.mark.usefixtures("without_curves")

T = 40
PLACE = "model.layers.0.self_attn"
MIXERS = {
    "ssd": {"mask": "gates"},
    "log-linear": {"mask": "hierarchical"},
    "delta": {"mask": "gates", "scores": "delta"},
    "hedgehog": {"mask": "ones", "features": "hedgehog", "normalise": True},
    "window": {"mask": "ones", "features": "hedgehog", "normalise": True, "window": 8},
    "dressed": {"mask": "gates", "norm": "rms", "output_gate": "value"},
}


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99, "initializer_range": 0.2, **options}
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


def pair(config):
    teacher, student = llama(), llama()
    if config is not None:
        install(student, dict.fromkeys([PLACE, PLACE.replace("0", "1")], config))
    return student, teacher


def linear(name):
    return mixer_config({"mixer": "linear", **MIXERS[name]})


def batch(rows=2, packed=False):
    torch.manual_seed(1)
    ids = torch.randint(0, 99, (rows, T))
    position = torch.arange(T).expand(rows, -1).clone()
    if packed:
        position[0, 17:] = torch.arange(T - 17)
    valid = torch.ones(rows, T, dtype=torch.bool)
    valid[-1, -5:] = False
    return {"input_ids": ids, "labels": ids, "position_ids": position, "valid": valid, "index": torch.arange(rows)}


def stage_of(student, teacher, **options):
    config = AlignConfig(
        kind="align", tokens=64, rate=1e-3, modules=["attention"], trains=["all"], matrix_weight=1.0, **options
    )
    stage = AlignStage(config)
    roles = {f"model.layers.{i}.self_attn.{n}_proj": (r,) for i in (0, 1) for n, r in
             (("q", "attention.query"), ("k", "attention.key"), ("v", "attention.value"), ("o", "attention.output"))}  # fmt: skip
    models = StageModels(student, student, teacher)
    stage.prepare(models, roles)
    stage.measure(models, batch())
    return stage, models


def softmax_of(model, inputs):
    """Every layer's (B, H, T, T), by transformers' own eager attention."""
    model.set_attn_implementation("eager")
    told = {k: inputs[k] for k in ("input_ids", "position_ids")}
    weights = model(**told, use_cache=False, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return weights


def read_matrix(model, inputs, place=PLACE):
    """(B, H, T, T) column by column, through the module's own forward."""
    seen = []
    module = model.get_submodule(place)
    handle = module.register_forward_hook(lambda _, a, k, o: seen.append((a, k)), with_kwargs=True)
    model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False)
    handle.remove()
    mixing, parts = MixingProbe.from_model(model, place), []
    for first in range(0, T, mixing.value):
        given = torch.zeros(T, mixing.value)
        for c in range(min(mixing.value, T - first)):
            given[first + c, c] = 1
        parts.append(mixing.mix_values(seen[0], given.expand(len(inputs["input_ids"]), -1, -1)))
    return torch.cat(parts, dim=-1)[..., :T].transpose(1, 2)


def relative(ours, theirs, valid):
    """The definition: a mean over heads of squared Frobenius norms over the tokens, relative to the teacher's."""
    rows = valid[:, None, :, None].float()
    size = (theirs.square().sum(-1, keepdim=True) * rows).sum() / (rows.sum() * theirs.shape[1])
    return ((ours - theirs).square().sum(-1, keepdim=True) * rows).sum() / theirs.shape[1] / size


@pytest.mark.parametrize("packed", [False, True])
def test_a_softmax_is_read_as_transformers_has_it(packed):
    model, inputs = llama(), batch(packed=packed)
    with torch.no_grad():
        torch.testing.assert_close(read_matrix(model, inputs), softmax_of(model, inputs)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3"])
def test_values_are_found_in_fused_projections(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 1}}.get(family, {
        "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 96,
    })  # fmt: skip
    if family == "phi3":
        sizes |= {"num_key_value_heads": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=99, **sizes)).eval()
    place = {"gpt2": "transformer.h.0.attn", "gpt_neox": "gpt_neox.layers.0.attention"}.get(family, PLACE)
    inputs = batch()
    with torch.no_grad():
        torch.testing.assert_close(
            read_matrix(model, inputs, place), softmax_of(model, inputs)[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", [n for n in MIXERS if n != "dressed"])
def test_the_loss_is_the_definition(name):
    """Mixers' matrices by their quadratic definition on the values one has asked for."""
    student, teacher = pair(linear(name))
    stage, models = stage_of(student, teacher, output_weight=0.0)
    inputs = batch()
    with torch.no_grad():
        loss = stage.losses(models, inputs)["total"]
        theirs, mixer = softmax_of(teacher, inputs), student.get_submodule(PLACE).mixer
        mix = type(mixer).mix
        type(mixer).mix = lambda self, given, state=None: (self.dense(given), None)
        try:  # layer 0 alone: the second reads what the teacher's first wrote
            ours = read_matrix(student, inputs)
        finally:
            type(mixer).mix = mix
    first = relative(ours, theirs[0], inputs["valid"])
    stage.matrices.pairs = {k: v for k, v in stage.matrices.pairs.items() if k == PLACE}
    stage.matrix_sizes = {PLACE: stage.matrix_sizes[PLACE]}
    with torch.no_grad():
        torch.testing.assert_close(stage.losses(models, inputs)["total"], first, rtol=1e-4, atol=1e-6)
    assert loss > 0


def test_the_teacher_s_own_matrix_is_no_distance_away():
    student, teacher = pair(None)
    stage, models = stage_of(student, teacher, output_weight=0.0)
    assert stage.losses(models, batch())["total"] < 1e-9


def test_gradients_are_those_of_the_matrix():
    """Of a softmax with other queries, against autograd through transformers' eager attention."""
    student, teacher = pair(None)
    weight = student.get_submodule(f"{PLACE}.q_proj").weight
    with torch.no_grad():
        weight.add_(0.1 * torch.randn_like(weight))
    stage, models = stage_of(student, teacher, output_weight=0.0)
    stage.matrices.pairs = {k: v for k, v in stage.matrices.pairs.items() if k == PLACE}
    stage.matrix_sizes = {PLACE: stage.matrix_sizes[PLACE]}
    inputs = batch()
    stage.losses(models, inputs)["total"].backward()
    ours, weight.grad = weight.grad, None
    with torch.no_grad():
        theirs = softmax_of(teacher, inputs)[0]
    relative(softmax_of(student, inputs)[0], theirs, inputs["valid"]).backward()
    torch.testing.assert_close(ours, weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MIXERS)
def test_everything_in_the_matrix_learns_and_nothing_else(name):
    student, teacher = pair(linear(name))
    stage, models = stage_of(student, teacher, output_weight=0.0)
    stage.losses(models, batch())["total"].backward()
    module = student.get_submodule(PLACE)
    moved = {n for n, p in module.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
    assert {"q_proj.weight", "k_proj.weight"} <= moved and not moved & {"v_proj.weight", "o_proj.weight"}
    inside = {n for n, _ in module.named_parameters() if n.startswith("mixer.")}
    still = {n for n in inside - moved if "norm" not in n and "level" not in n}
    assert not still, f"{still} of {inside}"


def test_probes_are_unbiased():
    student, teacher = pair(linear("ssd"))
    exact, models = stage_of(student, teacher, output_weight=0.0)
    probed, _ = stage_of(student, teacher, output_weight=0.0, matrix_probes=512)
    with torch.no_grad():
        whole, guess = (float(s.losses(models, batch())["total"]) for s in (exact, probed))
        again = float(probed.losses(models, batch())["total"])
    assert guess == again, "the same examples, the same probes"
    assert guess == pytest.approx(whole, rel=0.1)


def test_a_matrix_needs_attention_and_a_weight():
    student, teacher = pair(linear("ssd"))
    told = {"kind": "align", "tokens": 64, "rate": 1e-3, "trains": ["all"]}
    roles = {f"{PLACE}.o_proj": ("attention.output",), "model.layers.0.mlp.down_proj": ("mlp.down",)}
    for said, options in (
        ("the loss is empty", {"output_weight": 0}),
        ("attention modules that train", {"modules": ["mlp"], "matrix_weight": 1}),
    ):
        with pytest.raises(SurgeryError, match=said):
            AlignStage(AlignConfig(**told, **options)).prepare(StageModels(student, student, teacher), roles)


def test_a_run_of_the_three_stages(mixed, texts, tmp_path):
    """MOHAWK whole: matrices, outputs along the student's path, logits."""
    orientation = {"kind": "align", "modules": ["attention"], "trains": ["attention", "mixers"], "output_weight": 0}
    orientation |= {"matrix_weight": 1.0, "matrix_probes": 64, "tokens": 1536, "rate": 1e-3, "data": {"rows": 4}}
    stages = [orientation, {"kind": "hidden", "tokens": 512}, {"kind": "distill", "tokens": 512}]
    finetune(str(mixed), healing_recipe(texts, *stages), tmp_path / "out", teacher=str(TINY_CHECKPOINT), track="none")
    lines = [json.loads(line) for line in (tmp_path / "out/training/log.jsonl").read_text().splitlines()]
    matrix = [line["matrix"] for line in lines if line["stage"] == 0 and "matrix" in line]
    assert len(matrix) == 6 and matrix[-1] < matrix[0]
