"""Replacing the LM head unties it from the embedding and changes nothing else."""

from __future__ import annotations

import copy
import io
import json
import shutil

import pytest
import torch
from helpers.small import DECODER, make_recipe, model_outputs, tiny_config, tiny_inputs
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import surgery
from surgery.architectures.logits import find_logit_transform
from surgery.calibration.lm_head import ChunkedLMHead
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.tune_model import divergence_gradient
from surgery.core.errors import SurgeryError
from surgery.structures import StructuredLinear

# T5 scales its decoder's output or not by what config.json says of ties; older files say nothing else of it.
OLD_T5 = {"t5": {}, "t5-gated": {"tie_word_embeddings": False}}
FAMILIES = ("llama", "llama-tied", "gemma2", "gpt2", "bert", "t5", "t5-gated")


def load(family, folder):
    return tiny_config(family)[0].from_pretrained(folder, dtype=torch.float32).eval()


def worst(a, b) -> float:
    return float((a - b).abs().max() / b.abs().max())


def head_only(**keys):
    rule = {"match": "head", "structure": "btt", "blocks": [2, 2], **keys}
    return {"structure": "dense", "rules": [rule]}


@pytest.fixture
def source(checkpoints, tmp_path):
    """source(family) -> its checkpoint, T5's with a config.json as of old."""

    def of(family):
        folder = checkpoints(family)
        if family not in OLD_T5:
            return folder
        old = shutil.copytree(folder, tmp_path / "old")
        config = json.loads((old / "config.json").read_text())
        config = {k: v for k, v in config.items() if k not in ("scale_decoder_outputs", "tie_word_embeddings")}
        (old / "config.json").write_text(json.dumps({**config, **OLD_T5[family]}))
        if OLD_T5[family]:  # a head of its own, as in T5 v1.1
            tensors = load_file(old / "model.safetensors")
            tensors["lm_head.weight"] = tensors["shared.weight"].flip(0).contiguous()
            save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
        return old

    return of


@pytest.mark.parametrize("text", [False, True], ids=["plain", "calibrated"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_at_full_rank_is_exact(family, text, source, calibration, tmp_path):
    folder, inputs = source(family), tiny_inputs(family, 3, seed=2)
    more = {"calibration": calibration(family)} if text else {}
    report = convert(str(folder), make_recipe(**head_only(rank="full"), **more), tmp_path / "out")
    assert [m["roles"] for m in report["modules"]] == [["head"]]
    before = load(family, folder)
    tied = before.get_output_embeddings().weight is before.get_input_embeddings().weight
    assert (
        any("gets weights of its own" in note for note in report["notes"])
        == tied
        == (family not in ("llama", "t5-gated"))
    )
    original = model_outputs(before, inputs)
    model = load(family, tmp_path / "out")
    assert isinstance(model.get_output_embeddings(), StructuredLinear)
    assert worst(model_outputs(model, inputs), original) < 1e-5
    model.tie_weights()  # libraries call it; there is nothing left to tie
    model.save_pretrained(tmp_path / "again")
    densify(str(tmp_path / "out"), tmp_path / "dense")
    for name in ("again", "dense"):
        assert worst(model_outputs(load(family, tmp_path / name), inputs), original) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_smaller_head_leaves_the_embedding_alone(family, source, calibration, tmp_path):
    """The output is that of the original with the products as its head, the rest to the bit as it was."""
    folder, inputs = source(family), tiny_inputs(family, 3, seed=2)
    report = convert(str(folder), make_recipe(**head_only(keep=0.5), calibration=calibration(family)), tmp_path / "out")
    assert report["totals"]["kept"] <= 0.5 and report["modules"][0]["error"] < 1
    original, model = load(family, folder), load(family, tmp_path / "out")
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)
    standin, linear = model.get_output_embeddings(), original.get_output_embeddings()
    linear.weight = torch.nn.Parameter(standin.dense())
    found, expected = model_outputs(model, inputs), model_outputs(original, inputs)
    assert worst(found, expected) < 1e-5


def test_an_embedding_stored_under_the_heads_name_survives(checkpoints, tmp_path):
    """A tied pair may be stored under either name."""
    folder = shutil.copytree(checkpoints("llama-tied"), tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    convert(str(folder), make_recipe(**head_only(rank="full")), tmp_path / "out")
    inputs = tiny_inputs("llama", 2)
    original, converted = (load("llama-tied", f) for f in (checkpoints("llama-tied"), tmp_path / "out"))
    assert worst(model_outputs(converted, inputs), model_outputs(original, inputs)) < 1e-5


# -- library calls on a converted head ---------------------------------------------------------------------------
IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def with_head(tmp_path_factory):
    """with_head(tied, structure) -> (a model converted in memory, head included; the folder that it saved), each made
    once.
    """
    made = {}

    def make(tied: bool, structure: str):
        if (tied, structure) not in made:
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, tie_word_embeddings=tied, initializer_range=0.2, pad_token_id=0,
            )  # fmt: skip
            recipe = {"structure": structure, "keep": 0.7, "rules": [{"match": "head", "keep": 0.7}]}
            model = surgery.apply(LlamaForCausalLM(config).eval(), recipe)
            folder = tmp_path_factory.mktemp("head") / "out"
            model.save_pretrained(folder)
            made[tied, structure] = model, folder
        return made[tied, structure]

    return make


@pytest.fixture(params=["in memory", "loaded"])
def model_with_head(request, with_head):
    """model_with_head(tied, structure) -> a new model whose head is converted."""

    def make(tied: bool, structure: str = "low_rank"):
        model, folder = with_head(tied, structure)
        return copy.deepcopy(model) if request.param == "in memory" else AutoModelForCausalLM.from_pretrained(folder)

    return make


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("structure", ["low_rank", "btt"])
def test_a_converted_head_is_not_resized_nor_replaced(tied, structure, model_with_head):
    """A refusal names the head and leaves the model as it was; a call that changes no size is none."""
    model = model_with_head(tied, structure).eval()
    before, logits = state(model), model(IDS).logits
    for change in (
        lambda: model.resize_token_embeddings(61),
        lambda: model.resize_token_embeddings(50, mean_resizing=False),
        lambda: model.resize_token_embeddings(pad_to_multiple_of=64),
        lambda: model.resize_token_embeddings(58, 32),
        lambda: model.set_output_embeddings(nn.Linear(16, 60, bias=False)),
    ):
        with pytest.raises(SurgeryError, match=r"LlamaForCausalLM: lm_head is structured.*surgery.densify"):
            change()
    embedding = model.get_input_embeddings()
    assert model.resize_token_embeddings() is model.resize_token_embeddings(60) is embedding
    assert model.resize_token_embeddings(57, pad_to_multiple_of=20) is embedding
    model.set_output_embeddings(model.get_output_embeddings())
    model.tie_weights()
    after = state(model)
    assert model.config.vocab_size == 60 and before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(model(IDS).logits, logits)
    surgery.densify(model)
    assert type(model) is LlamaForCausalLM
    model.resize_token_embeddings(61)
    torch.testing.assert_close(model(IDS).logits[..., :60], logits, rtol=1e-4, atol=1e-4)


def test_an_unconverted_head_is_resized_as_ever():
    """Of a converted model too, tied or not."""
    for tied in (True, False):
        config = LlamaConfig(
            vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tied,
        )  # fmt: skip
        model = surgery.apply(LlamaForCausalLM(config).eval(), {"structure": "low_rank", "keep": 0.7})
        logits = model(IDS).logits
        model.resize_token_embeddings(70)
        assert model(IDS).logits.shape[-1] == 70 == model.config.vocab_size
        assert torch.equal(model(IDS).logits[..., :60], logits)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_trains_and_saves_a_converted_head(tied, model_with_head, tmp_path):
    """As PEFT's modules_to_save, and with LoRA over it; the head in the adapter is not resized either."""
    base = model_with_head(tied)
    original = base(IDS).logits
    options = {"task_type": "CAUSAL_LM", "r": 2}
    model = get_peft_model(
        copy.deepcopy(base), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **options)
    )
    trained = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad and "lm_head" in name}
    assert trained == {"weight", "right"}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    expected = model.eval()(IDS).logits
    assert not torch.allclose(expected, original)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(again(IDS).logits, expected)
    over = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=["lm_head"], **options))
    torch.testing.assert_close(over(IDS).logits, original)
    for adapted in (model, over):
        with pytest.raises(SurgeryError, match="lm_head is structured"):
            adapted.get_base_model().resize_token_embeddings(61)
        assert adapted.get_base_model().get_input_embeddings().weight.shape[0] == 60


def test_a_pickled_model_still_refuses(model_with_head):
    buffer = io.BytesIO()
    torch.save(model_with_head(False), buffer)
    buffer.seek(0)
    with pytest.raises(SurgeryError, match="lm_head is structured"):
        torch.load(buffer, weights_only=False).resize_token_embeddings(61)


def test_another_class_is_resized_and_saved_without_the_head(with_head, tmp_path):
    """A classifier loaded from the folder has no converted head, so its table must not list one."""
    _, folder = with_head(True, "low_rank")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    model.resize_token_embeddings(61)
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules"]
    assert "lm_head" not in table and "model.layers.0.mlp.up_proj" in table
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(again(IDS).logits, expected) and again.get_input_embeddings().weight.shape[0] == 61


SCALED = {  # model type -> keys of its config
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
    "falcon_h1": {"lm_head_multiplier": 0.1, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "nanochat": {"final_logit_softcapping": 3.0},  # no architecture describes it
}  # fmt: skip


@pytest.fixture(params=SCALED)
def scaled(request, tmp_path):
    """A model that scales or caps its logits, and its folder. Its logits are far from even."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **{**DECODER, **SCALED[request.param]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.mul_(8 if parameter.dim() > 1 else 1)
    model.save_pretrained(tmp_path / "source")
    return model, tmp_path / "source"


def test_losses_are_those_of_the_model_that_scales_its_logits(scaled, tmp_path):
    model, folder = scaled
    inputs = tiny_inputs("llama", 8)
    save_file(inputs, tmp_path / "inputs.safetensors")
    rules = [{"match": "lm_head", "keep": 0.5}]
    recipe = make_recipe(structure="low_rank", rules=rules, calibration=tmp_path / "inputs.safetensors")
    score = convert(str(folder), recipe, tmp_path / "out")["held_out"]
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False).eval()
    for one, name in ((model, "original"), (converted, "converted")):
        logits = model_outputs(one, {"input_ids": inputs["input_ids"][-2:]})[:, :-1]
        labels = inputs["input_ids"][-2:, 1:]
        assert score[name] == pytest.approx(float(cross_entropy(logits.flatten(0, 1), labels.flatten())), rel=1e-4)


def test_gradients_are_those_of_the_model_that_scales_its_logits(scaled):
    model, folder = scaled
    meta_model = MetaModel(open_checkpoint(str(folder)))
    head = ChunkedLMHead(meta_model, "lm_head", None, torch.device("cpu"))
    transform = find_logit_transform(model)
    hidden, other = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    leaf = other.requires_grad_(True)
    p, q = (transform.apply(model.lm_head(x)).log_softmax(-1) for x in (hidden, leaf))
    divergence_N = kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(head.divergences(hidden, other.detach()), divergence_N.detach(), rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad(divergence_N.sum(), leaf, retain_graph=True)
    torch.testing.assert_close(head.divergence_gradient(hidden, other.detach()), gradient, rtol=1e-4, atol=1e-5)
    _, tuned = divergence_gradient(head, other.detach(), hidden)
    torch.testing.assert_close(tuned, gradient, rtol=1e-4, atol=1e-5)
    sampled, _, labels = head.output_gradient(other.detach(), torch.Generator().manual_seed(1))
    (wanted,) = torch.autograd.grad(-q.gather(1, labels[:, None]).sum(), leaf)
    torch.testing.assert_close(sampled, wanted, rtol=1e-4, atol=1e-5)
