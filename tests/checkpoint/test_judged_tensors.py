"""Missing tensors, unexpected tensors and wrong shapes: every command applies the same rule."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from helpers.small import make_recipe
from helpers.small_training import TINY_CHECKPOINT
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import surgery
from surgery.cli.main import main
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.core.errors import SurgeryError
from surgery.eval.model import load_from_folder
from surgery.training import models

CPU = torch.device("cpu")


def change_tensors(folder, **changes):
    """changes: name with __ for each dot -> tensor, None to remove it, or a function of the tensor."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors[name] = value(tensors[name]) if callable(value) else value
    tensors = {name: t for name, t in tensors.items() if t is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def with_tokenizer(folder):
    AutoTokenizer.from_pretrained(TINY_CHECKPOINT).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(checkpoints, tmp_path):
    return with_tokenizer(shutil.copytree(checkpoints("llama"), tmp_path / "llama"))


@pytest.fixture
def converted(checkpoints, tmp_path):
    convert(str(checkpoints("llama")), make_recipe(structure="low_rank"), tmp_path / "converted")
    return with_tokenizer(tmp_path / "converted")


CORE = "model.layers.1.self_attn.q_proj"
EXTRA = {"v_head__summary__weight": torch.ones(1, 32), "model__layers__2__eh_proj__weight": torch.ones(3, 3)}


# -- a source with left-over tensors is judged as `convert` judges it -------------------------------------
def test_outside_d1_left_over_tensors_of_a_source_are_a_warning(llama):
    change_tensors(llama, **EXTRA)
    with pytest.warns(
        UserWarning, match=r"llama: LlamaForCausalLM does not use tensors 'model.layers.2.eh_proj.weight', 'v_head"
    ):
        load_from_folder(llama, CPU, "float32", False)
    with pytest.warns(UserWarning, match="v_head"):
        models.load_causal_lm(models.open_trainable(str(llama)), torch.float32)
    with pytest.warns(UserWarning, match="v_head"):
        surgery.load(llama)


def test_outside_d1_an_old_bert_is_loaded_for_comparison(checkpoints, tmp_path):
    folder = with_tokenizer(shutil.copytree(checkpoints("bert"), tmp_path / "bert"))
    tensors = load_file(folder / "model.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t for name, t in tensors.items()}  # fmt: skip
    old |= {"bert.embeddings.position_ids": torch.arange(64)[None], "bert.pooler.dense.weight": torch.ones(32, 32)}
    old |= {"cls.seq_relationship.weight": torch.ones(2, 32), "cls.seq_relationship.bias": torch.ones(2)}
    save_file(old, folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match=r"'bert.pooler.dense.weight', 'cls.seq_relationship.bias'"):
        model, _ = load_from_folder(folder, CPU, "float32", False)
    assert torch.equal(model.state_dict()["bert.encoder.layer.0.output.LayerNorm.weight"], tensors["bert.encoder.layer.0.output.LayerNorm.weight"])  # fmt: skip


def test_outside_d1_missing_tensors_of_a_source_are_refused(llama):
    change_tensors(llama, model__norm__weight=None)
    with pytest.raises(SurgeryError, match=r"lacks tensor 'model.norm.weight'"):
        load_from_folder(llama, CPU, "float32", False)


def test_outside_d1_a_converted_folder_stays_strict(llama, tmp_path):
    change_tensors(llama, **EXTRA)
    convert(str(llama), make_recipe(structure="low_rank"), tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_from_folder(tmp_path / "out", CPU, "float32", False)  # its list of unused tensors names them
    change_tensors(tmp_path / "out", another=torch.ones(1))
    with pytest.raises(SurgeryError, match="has tensor 'another', which LlamaForCausalLM does not use"):
        load_from_folder(tmp_path / "out", CPU, "float32", False)


# -- shapes, and the list of unused tensors ----------------------------------------------------------------
def test_outside_d5_densify_compares_shapes(converted, tmp_path):
    change_tensors(converted, model__norm__weight=lambda t: t[:16].clone())
    with pytest.raises(SurgeryError, match=r"'model.norm.weight' has shape \[16\], but config.json makes .* \[32\]"):
        densify(str(converted), tmp_path / "dense")
    assert not (tmp_path / "dense").exists()


@pytest.mark.parametrize("dense", [False, True])
def test_outside_d5_cores_are_never_unused(converted, tmp_path, dense):
    """Also where a dense weight was put beside the cores."""
    cores = [name for name in load_file(converted / "model.safetensors") if name.startswith(f"{CORE}.")]

    def change(config):
        del config["quantization_config"]["modules"][CORE]
        config["quantization_config"]["unused"] = cores

    change_config(converted, change)
    if dense:
        change_tensors(converted, **{f"{CORE}.weight".replace(".", "__"): torch.zeros(32, 32)})
    for load in (lambda: densify(str(converted), tmp_path / "dense"), lambda: surgery.load(converted)):
        with pytest.raises(
            SurgeryError, match=rf"'{CORE}\.\w+', which belongs to a linear of LlamaForCausalLM|lists tensor"
        ):
            load()
    assert not (tmp_path / "dense").exists()


def test_outside_d5_a_tensor_of_the_class_is_never_unused(converted, tmp_path):
    change_config(converted, lambda config: config["quantization_config"].update(unused=["model.norm.weight"]))
    with pytest.raises(SurgeryError, match=r"lists tensor 'model.norm.weight' as unused, which LlamaForCausalLM uses"):
        densify(str(converted), tmp_path / "dense")


def test_outside_d5_convert_refuses_what_it_could_only_call_unused(llama, tmp_path):
    change_tensors(llama, **{f"{CORE}.weight_scale".replace(".", "__"): torch.ones(1)})
    with pytest.raises(SurgeryError, match="weight_scale', which belongs to a linear"):
        convert(str(llama), make_recipe(structure="low_rank"), tmp_path / "out")


# -- sentences, exit 2 ---------------------------------------------------------------------------------------
def _cut_norm(folder):
    change_tensors(folder, model__norm__weight=lambda t: t[:16].clone())


def _odd_dtype(folder):
    change_config(folder, lambda config: config.update(dtype="os.system"))


def _unknown_type(folder):
    auto = {
        "AutoConfig": "surgery_shim.ShimAutoConfig",
        "AutoModelForCausalLM": "surgery_shim.ShimAutoModelForCausalLM",
    }
    change_config(folder, lambda config: config.update(model_type="weird", auto_map=auto))


@pytest.mark.parametrize("damage", [_cut_norm, _odd_dtype, _unknown_type])
@pytest.mark.parametrize("command", ["eval", "finetune", "load"])
def test_outside_d6_damaged_checkpoints_end_in_a_sentence(llama, words, tmp_path, capsys, damage, command):
    damage(llama)
    if command == "load":
        with pytest.raises(SurgeryError):
            surgery.load(llama)
        return
    eval_options = ["--suite", "ppl", "--text", words, "--tokens", "64", "--length", "32"]
    heal = ["--recipe", "linears", "--tiny", "--data", words, "--out", tmp_path / "healed", "--track", "none"]
    heal += ["--teacher", llama, "--set", "data.packing=stream"]
    with pytest.raises(SystemExit) as left:
        main([command, str(llama), *map(str, eval_options if command == "eval" else heal)])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "error: " in error and "internal error" not in error
    assert any(
        words in error for words in ("belong together", "cannot use its config.json", "has no attribute 'os.system'")
    )
    assert not (tmp_path / "healed").exists()
