"""Mixers call their submodules, so that offloading and LoRA, which act on the call of a module, reach every
parameter.
"""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path

import accelerate
import peft
import pytest
import torch
import transformers
from helpers.slow import slow_where
from helpers.small import tiny_inputs
from helpers.small_mixers import random_model_with_mixers
from torch import nn

from surgery.core.config import read_yaml
from surgery.mixers import MIXERS, MixerConfig, mixer_config
from surgery.mixers.features.base import FEATURES
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.masks.base import MASKS
from surgery.mixers.projections import is_hooked

RECIPES = Path(__file__).parents[2] / "recipes" / "convert"


def plain_options(name: str) -> dict:
    """Options of every registered mixer at the size of the tiny model: 4 heads of 8 dims, 32 features."""
    sizes = {
        "mlr": {"ranks": [4, 4], "extents": [8]},
        "global_window": {"ranks": [4, 4], "window": 6},
        "bilinear_mlr": {"ranks": [8, 2]},
        "window": {"window": 6, "sinks": 2},
        "head_hybrid": {"softmax_heads": [1], "others": {"mixer": "linear"}},
    }
    return {"mixer": name, **sizes.get(name, {})}


def recipe_options(path: Path) -> dict:
    """The mixer's options of a shipped recipe; ranks that depend on the size of the heads are those of the tiny
    model.
    """
    attention = read_yaml(path.read_text())["attention"]
    options = {key: value for key, value in attention.items() if key in known_options(attention["mixer"])}
    ranks = {"mlr": {"ranks": [4, 4], "extents": [8]}, "bilinear_mlr": {"ranks": [0, 2]}}
    return {"mixer": attention["mixer"], **options, **ranks.get(attention["mixer"], {})}


def known_options(name: str) -> set[str]:
    return {f.name for f in fields(MIXERS.config_type(name))}


def all_configs() -> dict[str, MixerConfig]:
    """Every registered mixer that replaces softmax attention, every mask and feature map, every optional submodule, and
    the mixer of every shipped recipe."""
    configs = {name: mixer_config(plain_options(name)) for name in MIXERS.names() if name != "native"}
    for mask in MASKS.names():
        configs[f"mask-{mask}"] = LinearAttention(mask=mask)
        configs[f"delta-{mask}"] = LinearAttention(mask=mask, scores="delta")
    for features in FEATURES.names():
        options = {"queries": "exact"} if features in ("favor", "lara") else {}
        configs[f"features-{features}"] = LinearAttention(features={"name": features, **options})
    parts = {"scores": "delta", "convolution": 3, "norm": "rms", "window": 3, "sinks": 2}
    for gate in ("head", "value"):
        configs[f"parts-{gate}"] = LinearAttention(mask="hierarchical", output_gate=gate, **parts)
    for mask in ("hierarchical", "toeplitz_blocks"):
        configs[f"chunks-{mask}"] = LinearAttention(mask=mask, scores="delta", window=2, sinks=1, near_tokens="chunks")
    for path in sorted(RECIPES.glob("*.yaml")):
        if "attention" in read_yaml(path.read_text()):
            config = mixer_config(recipe_options(path))
            if isinstance(config, LinearAttention) and config.window:  # texts here have a few tokens
                config = replace(config, window=3, sinks=2)
            configs[f"recipe-{path.stem}"] = config
    return configs


CONFIGS = all_configs()


def has_linear(config: MixerConfig) -> bool:
    config = getattr(config, "others", config)
    if not isinstance(config, LinearAttention):
        return False
    return config.scores == "delta" or config.output_gate is not None or config.mask.name in ("gates", "hierarchical")


LINEARS = [name for name, config in CONFIGS.items() if has_linear(config)]


def decoded_outputs(model, ids) -> torch.Tensor:
    """Logits of a whole call, then of a prefill and of two single tokens with a cache."""
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=False).logits
        cache = model(input_ids=ids[:, :-2], use_cache=True).past_key_values
        steps = []
        for t in (-2, -1):
            token = ids[:, t : ids.shape[1] + t + 1]
            steps.append(model(input_ids=token, past_key_values=cache, use_cache=True).logits)
    return torch.cat([whole, *steps], 1)


@pytest.mark.parametrize(
    "name", slow_where(lambda name: name.partition("-")[0] in ("delta", "features", "mask"), CONFIGS)
)
def test_offloaded_mixers_compute_the_same(name, tmp_path):
    model, ids = random_model_with_mixers("llama", CONFIGS[name]), tiny_inputs("llama", 2)["input_ids"]
    expected = decoded_outputs(model, ids)
    device = torch.device("cpu")
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=device)
    assert all(p.is_meta for p in offloaded.parameters())
    assert float((decoded_outputs(offloaded, ids) - expected).abs().max()) == 0.0
    offloaded = accelerate.disk_offload(copy.deepcopy(model), tmp_path, execution_device=device)
    assert all(p.is_meta for p in offloaded.parameters())
    assert float((decoded_outputs(offloaded, ids) - expected).abs().max()) == 0.0


@pytest.mark.parametrize("name", ["recipe-log-linear-gdn", "recipe-lolcats", "parts-value"])
def test_a_device_map_may_put_mixers_on_disk(name, tmp_path):
    model, ids = random_model_with_mixers("llama", CONFIGS[name]), tiny_inputs("llama", 2)["input_ids"]
    model.save_pretrained(tmp_path / "a")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    load = transformers.AutoModelForCausalLM.from_pretrained
    split = load(tmp_path / "a", device_map=places, offload_folder=tmp_path / "disk")
    assert next(split.model.layers[1].self_attn.mixer.parameters()).is_meta
    assert torch.equal(decoded_outputs(split, ids), decoded_outputs(load(tmp_path / "a"), ids))


@pytest.mark.parametrize("name", LINEARS)
def test_lora_on_the_linears_of_mixers_has_gradients(name):
    model, ids = random_model_with_mixers("llama", CONFIGS[name]), tiny_inputs("llama", 2)["input_ids"]
    targets = [n for n, m in model.named_modules() if ".mixer." in n and isinstance(m, nn.Linear)]
    assert targets
    options = {"target_modules": targets, "init_lora_weights": False}  # B = 0 would give A a gradient of zeros
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(targets) and all("lora_" in n for n in trained)
    assert [n for n, p in trained.items() if p.grad is None or not bool(p.grad.any())] == []


def test_hooks_on_submodules_run_and_are_seen():
    model, ids = random_model_with_mixers("llama", CONFIGS["delta-gates"]), tiny_inputs("llama", 2)["input_ids"]
    mixer, calls = model.model.layers[0].self_attn.mixer, []
    assert not any(is_hooked(m) for m in mixer.modules())
    linears = [m for m in mixer.modules() if isinstance(m, nn.Linear)]
    for linear in linears:
        linear.register_forward_hook(lambda module, args, out: calls.append(module))
    assert len(linears) == 2 and all(is_hooked(linear) for linear in linears)
    model(input_ids=ids, use_cache=False)
    assert set(calls) == set(linears)
    offloaded = accelerate.cpu_offload(nn.Linear(2, 2), execution_device=torch.device("cpu"))
    assert is_hooked(offloaded) and not is_hooked(nn.Linear(2, 2))
