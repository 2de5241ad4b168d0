"""Conversions into stock classes (Qwen3.5, Ling 3.0): exact mapping, refusals, loading without surgery, training."""

from __future__ import annotations

import importlib.resources
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

import surgery
from surgery.checkpoint.source import open_checkpoint
from surgery.checkpoint.stock_latent import LATENT_EPS, latent_attention, latent_sizes, longrope
from surgery.checkpoint.stock_tensors import AttentionSizes, split_norm
from surgery.core.errors import SurgeryError
from surgery.mixers import AttentionShape
from surgery.mixers.common.bidirectional import dense_output
from surgery.mixers.common.linear_features import l2_normalize
from surgery.mixers.masks.base import MaskInputs
from surgery.mixers.masks.gates import Gates, GatesMask
from surgery.planning.recipe import load_recipe
from surgery.planning.stock import plan_stock
from surgery.planning.stock_classes import STOCK_CLASSES, check_tiny_kept, frozen_modules
from surgery.publish.summary import inspect
from surgery.publish.tables import inspect_table
from surgery.training.optim import select_parameters
from surgery.training.recipe import load_healing_recipe
from surgery.training.suitability import check_kept_frozen, recipe_warnings

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FIT = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}
KDA_FIT = {
    "llama": FIT["llama"],
    "llama-tied": FIT["llama-tied"],
    "llama-yarn": FIT["llama-yarn"],
    "one group": ("MistralConfig", {"sliding_window": None, "num_key_value_heads": 1}),
    "neighbouring dims": ("HeliumConfig", {"head_dim": 8}),
}
REFUSED = {
    "norms behind": ("Olmo2Config", {}),
    "sliding window": ("MistralConfig", {"sliding_window": 64}),
    "no RoPE": ("SmolLM3Config", {}),
    "activation gelu": ("GemmaConfig", {"head_dim": 8}),
    "routed experts": ("Qwen3MoeConfig", {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}),
    "output projection has a bias": ("LlamaConfig", {"attention_bias": True}),
    "without biases": ("LlamaConfig", {"mlp_bias": True}),
    "gate_up_proj": ("Phi3Config", {}),
    "neighbouring pairs": ("HeliumConfig", {"head_dim": 8}),
    "computes something else": ("GraniteConfig", {"residual_multiplier": 0.5}),
    "linear already": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}
KDA_REFUSED = {
    "QK norm, and the latent attention of the class has none": ("Qwen3Config", {"head_dim": 16}),
    "q_proj has a bias": ("Qwen2Config", {}),
    "16 groups of keys and values": ("LlamaConfig", {"num_attention_heads": 16, "num_key_value_heads": 16}),
    "depend on the length of the text": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "norms behind": REFUSED["norms behind"],
}


needs_ling = pytest.mark.skipif(
    not hasattr(transformers, "BailingHybridForCausalLM"), reason="this version of transformers does not have the class"
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """sources(config class, options, dtype) -> folder of a tiny random checkpoint whose norms are not 1."""
    made = {}

    def make(name, options, dtype=torch.float32):
        key = name, json.dumps(options, sort_keys=True), dtype
        if key not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**SIZES, **options}))
            with torch.no_grad():
                for path, parameter in model.named_parameters():
                    parameter.normal_(std=0.3)
                    if "norm" in path:
                        parameter.add_(1.0).abs_()
            made[key] = tmp_path_factory.mktemp("source")
            model.to(dtype).save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A file of prepared model inputs: 12 rows of 24 tokens, the last of which is padded."""
    ids_BT = torch.randint(3, 96, (12, 24), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[-1, 15:] = 0
    path = tmp_path_factory.mktemp("texts") / "rows.safetensors"
    save_file({"input_ids": ids_BT, "attention_mask": mask_BT}, path)
    return path


@pytest.fixture(scope="module")
def stock(sources, texts, tmp_path_factory):
    """stock(name of FIT or KDA_FIT, dtype, linear) -> (source folder, converted folder, report)."""
    made = {}

    def make(name, dtype=torch.float32, linear="gated-deltanet"):
        key = name, dtype, linear
        if key not in made:
            fit = KDA_FIT if linear == "kda" else FIT
            source, out = sources(*fit[name], dtype), tmp_path_factory.mktemp("stock") / "OUT"
            settings = {"linear": linear, "interval": 2, "steps": 3}
            report = surgery.convert(source, f"stock-{linear}", out, calibration=texts, stock=settings, quiet=True)
            made[key] = source, out, report
        return made[key]

    return make


# -- exact mapping ---------------------------------------------------------------------------------
def test_the_layer_of_the_library_is_gated_deltanet_of_our_masks():
    """Convolution and SiLU, then normalized q and k, gates, the delta rule, gated norm: equal to 1e-5."""
    heads, key_heads, K, V, D, T = 4, 2, 8, 6, 24, 37
    config = Qwen3_5TextConfig(
        hidden_size=D, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=key_heads, linear_num_value_heads=heads, linear_key_head_dim=K, linear_value_head_dim=V,
    )  # fmt: skip
    module = Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    x_BTD = torch.randn(2, T, D)

    z_BTC = F.conv1d(
        F.pad(module.in_proj_qkv(x_BTD).mT, (3, 0)), module.conv1d.weight, groups=len(module.conv1d.weight)
    ).mT
    widths = [key_heads * K, key_heads * K, heads * V]
    q, k, v = (x.unflatten(-1, (-1, n)).transpose(1, 2) for x, n in zip(F.silu(z_BTC).split(widths, -1), (K, K, V)))
    q, k = (l2_normalize(x).repeat_interleave(heads // key_heads, 1) for x in (q, k))
    mask = GatesMask(Gates(), AttentionShape(D, heads, heads, K, V, 1.0))
    with torch.no_grad():
        mask.rate.weight.copy_(module.in_proj_a.weight)
        mask.rate.bias.copy_(module.dt_bias)
        mask.log_scale_G.copy_(module.A_log)
    beta_BGT = module.in_proj_b(x_BTD).sigmoid().mT
    start_B, count_B = torch.zeros(2, dtype=torch.long), torch.full((2,), T)
    rows = MaskInputs((q * K**-0.5).unsqueeze(2), k, v, beta_BGT, start_B, count_B, mask.signals(x_BTD))
    o_BTGV = dense_output(mask, rows).squeeze(2).transpose(1, 2)
    o_BTGV = F.rms_norm(o_BTGV, (V,), module.norm.weight, config.rms_norm_eps)
    ours = module.out_proj((o_BTGV * F.silu(module.in_proj_z(x_BTD).unflatten(-1, (-1, V)))).flatten(-2))
    theirs = module(x_BTD)
    assert float(((ours - theirs).abs().max() / theirs.abs().max()).detach()) < 1e-5


@needs_ling
def test_the_layer_of_the_library_is_kimi_delta_attention():
    """With a gate for each key channel, token by token as in eq. 1 of arXiv 2510.26692: equal to 1e-5."""
    from transformers import BailingHybridConfig
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention

    heads, K, D, T = 3, 8, 24, 70
    config = BailingHybridConfig(hidden_size=D, num_attention_heads=heads, head_dim=K, num_hidden_layers=1)
    module = BailingHybridDeltaAttention(config, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    x_BTD = torch.randn(2, T, D)
    theirs = module(x_BTD).detach()
    module.double()
    x_BTD = x_BTD.double()
    with torch.no_grad():
        z_BTC = torch.cat([project(x_BTD) for project in (module.q_proj, module.k_proj, module.v_proj)], -1)
        conv_C1W = module.conv1d.weight
        z_BTC = F.silu(F.conv1d(F.pad(z_BTC.mT, (3, 0)), conv_C1W, groups=len(conv_C1W)).mT)
        q, k, v = (x.unflatten(-1, (heads, K)) for x in z_BTC.chunk(3, -1))
        q, k = l2_normalize(q) * K**-0.5, l2_normalize(k)
        gate = module.forget_gate
        raw_BTHK = (gate.f_proj(x_BTD) + gate.dt_bias).unflatten(-1, (heads, K))
        keep_BTHK = (-5 * (gate.A_log.exp()[:, None] * raw_BTHK).sigmoid()).exp()
        beta_BTH = module.b_proj(x_BTD).sigmoid()
        state_BHKV, outputs = torch.zeros(2, heads, K, K, dtype=torch.float64), []
        for t in range(T):
            state_BHKV = state_BHKV * keep_BTHK[:, t].unsqueeze(-1)
            error_BHV = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state_BHKV)
            state_BHKV = state_BHKV + torch.einsum("bh,bhk,bhv->bhkv", beta_BTH[:, t], k[:, t], error_BHV)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state_BHKV))
        o_BTHV = F.rms_norm(torch.stack(outputs, 1), (K,), module.o_norm.weight, config.rms_norm_eps)
        ours = module.o_proj((o_BTHV * module.g_proj(x_BTD).sigmoid().unflatten(-1, (heads, K))).flatten(-2))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


@needs_ling
@pytest.mark.parametrize("rotary", [8, 4])
def test_latent_attention_is_that_of_the_source(rotary):
    """Of two groups of heads, and with RoPE in half of the dims: equal to attention by its definition, to 1e-6."""
    from transformers import BailingHybridConfig
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
        BailingHybridAttention,
        BailingHybridRotaryEmbedding,
    )

    heads, groups, K, D, T, scaling = 4, 2, 8, 24, 19, 0.3
    sizes = AttentionSizes(heads, groups, K, rotary, False, scaling, 1e-6, torch.float32)
    layer = {f"self_attn.{name}_proj.weight": torch.randn(n * K, D) * 0.3 for name, n in (("q", 4), ("k", 2), ("v", 2))}
    layer |= {"self_attn.o_proj.weight": torch.randn(D, heads * K), "input_layernorm.weight": torch.rand(D) + 0.5}
    frequency_R = 100.0 ** (-torch.arange(rotary // 2) / 4)
    latent, rest, rotated = latent_sizes(sizes)
    config = BailingHybridConfig(
        hidden_size=D, num_attention_heads=heads, num_key_value_heads=heads, kv_lora_rank=latent, qk_nope_head_dim=rest,
        qk_rope_head_dim=rotated, v_head_dim=K, rope_parameters=longrope(frequency_R, 1.2, sizes, 64),
        attn_implementation="eager",
    )  # fmt: skip
    module = BailingHybridAttention(config, 0)
    module.load_state_dict({n.removeprefix("self_attn."): t for n, t in latent_attention(layer, sizes).items()})
    x_BTD = F.rms_norm(torch.randn(2, T, D), (D,)) * layer["input_layernorm.weight"]
    mask_TT = torch.full((T, T), -torch.inf).triu(1)[None, None]
    rope = BailingHybridRotaryEmbedding(config)(x_BTD, torch.arange(T)[None])
    assert module.kv_a_layernorm.variance_epsilon == LATENT_EPS
    with torch.no_grad():
        theirs = module(x_BTD, position_embeddings=rope, attention_mask=mask_TT)[0]

    tensors = {name: layer[f"self_attn.{name}_proj.weight"].double() for name in "qkvo"}
    x_BTD, angle_TR = x_BTD.double(), torch.arange(T)[:, None] * frequency_R.double()
    cos, sin = (1.2 * torch.cat([f(angle_TR)] * 2, -1) for f in (torch.cos, torch.sin))

    def rotate(x):
        turned, rest = x[..., :rotary], x[..., rotary:]
        first, second = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)

    q, k, v = ((x_BTD @ tensors[name].mT).unflatten(-1, (-1, K)).transpose(1, 2) for name in "qkv")
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    map_BHTT = (rotate(q) @ rotate(k).mT * scaling + mask_TT).softmax(-1)
    ours = (map_BHTT @ v).transpose(1, 2).flatten(2) @ tensors["o"].mT
    assert float((ours - theirs).abs().max() / ours.abs().max()) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_weights_are_split_exactly(dtype):
    w_D = torch.tensor([1.0, 0.5, 0.4, 0.01, -0.3, 0.0, 3.3, 200.0, -7.0, 1e-4]).to(dtype).float()
    stored_D, scale_D = split_norm(w_D, dtype)
    assert torch.equal(stored_D.to(dtype).float(), stored_D) and torch.equal((1 + stored_D) * scale_D, w_D)
    assert torch.equal(scale_D.abs().log2(), scale_D.abs().log2().round())


CASES = [("gated-deltanet", name) for name in FIT] + [pytest.param("kda", name, marks=needs_ling) for name in KDA_FIT]


@pytest.mark.parametrize(("linear", "name"), CASES)
@torch.no_grad()
def test_kept_layers_compute_what_the_source_does(stock, linear, name):
    """Layers 1 and 3 keep softmax: the same outputs for the same hidden states."""
    source, out, report = stock(name, linear=linear)
    original, converted = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, out))
    x_BTD, positions_BT = torch.randn(2, 20, 32), torch.arange(20)[None].expand(2, -1)
    for index in (1, 3):
        outputs = []
        for model in (original, converted):
            rope = model.model.rotary_emb(x_BTD, positions_BT)
            outputs.append(model.model.layers[index](x_BTD, position_embeddings=rope, attention_mask=None))
        before, after = (out[0] if isinstance(out, tuple) else out for out in outputs)
        assert float((after - before).abs().max() / before.abs().max()) < 2e-6
    assert report["stock"]["change"] < 2e-6


def test_kept_layers_are_equal_bit_for_bit_where_the_source_has_qk_norm(sources, texts, tmp_path):
    """In bfloat16: powers of two move between norms and linears, and nothing is rounded."""
    folder = sources("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "q_norm" in name or "k_norm" in name:
            tensor.clamp_(min=0.5)
    tensors["model.norm.weight"][0] = 0.1  # cannot be stored less 1, and the head is tied
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    surgery.convert(folder, "stock-gated-deltanet", tmp_path / "OUT", calibration=texts, stock={"steps": 0}, quiet=True)
    original, converted = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for folder in (folder, tmp_path / "OUT")
    )
    x_BTD, positions_BT = torch.randn(2, 20, 32), torch.arange(20)[None].expand(2, -1)
    rope = original.model.rotary_emb(x_BTD, positions_BT)
    assert all(torch.equal(a, b) for a, b in zip(rope, converted.model.rotary_emb(x_BTD, positions_BT)))
    before, after = (
        model.model.layers[3](x_BTD, position_embeddings=rope, attention_mask=None) for model in (original, converted)
    )
    assert torch.equal(before, after)
    head = [model.lm_head(model.model.norm(x_BTD)) for model in (original, converted)]
    assert torch.equal(*head) and not converted.config.tie_word_embeddings


# -- loading ---------------------------------------------------------------------------------------
SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM
for folder, model_class, layer_class in zip(*[iter(sys.argv[1:])] * 3):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    assert "surgery" not in sys.modules and type(model).__name__ == model_class, (folder, type(model))
    assert layer_class in {type(module).__name__ for module in model.model.layers[0].modules()}
    ids = torch.arange(3, 60).view(3, 19)
    assert model(ids).logits.isfinite().all()
    cached, plain = (
        model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=use)
        for use in (True, False)
    )
    assert torch.equal(cached, plain), (folder, cached, plain)
    past = model(ids[:, :9]).past_key_values
    steps = [model(ids[:, t : t + 1], past_key_values=past).logits for t in range(9, 19)]
    change = (torch.cat(steps, 1) - model(ids).logits[:, 9:]).abs().max()
    assert change < 1e-4, (folder, change)
"""
LOADED = {"gated-deltanet": ("Qwen3_5ForCausalLM", "Qwen3_5GatedDeltaNet")}
LOADED["kda"] = ("BailingHybridForCausalLM", "BailingHybridDeltaAttention")


@pytest.mark.slow
def test_the_folders_load_without_surgery(stock):
    """In one process: the class, greedy text with and without a cache, and single steps against one pass."""
    names = {"gated-deltanet": ("llama", "llama-tied", "qwen2", "qwen3")}
    if hasattr(transformers, "BailingHybridForCausalLM"):
        names["kda"] = ("llama-tied", "neighbouring dims")
    arguments = []
    for linear, sources in names.items():
        for name in sources:
            _, out, _ = stock(name, linear=linear)
            config = json.loads((out / "config.json").read_text())
            assert config["architectures"] == [LOADED[linear][0]] and "quantization_config" not in config
            assert config["layer_types"] == ["linear_attention", "full_attention"] * 2
            arguments += [str(out), *LOADED[linear]]
    run = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:] = {_paths()}\n{SCRIPT}", *arguments], capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]


def _paths():
    """The import path without the folder of surgery."""
    return [path for path in sys.path if "site-packages" in path or "/lib/python" in path or path.endswith(".zip")]


def test_tensors_have_the_dtype_of_the_source(stock):
    _, out, _ = stock("llama-tied", torch.bfloat16)
    model, problems = Qwen3_5ForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(problems[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@needs_ling
def test_files_of_ling_have_the_names_of_its_checkpoints(stock, tmp_path):
    """Those that transformers writes, with gates and convolutions in float32, as the class keeps them."""
    _, out, _ = stock("llama-tied", torch.bfloat16, linear="kda")
    model, problems = AutoModelForCausalLM.from_pretrained(
        out, dtype="auto", output_loading_info=True, trust_remote_code=False
    )
    assert not any(problems.values())
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {n.rpartition(".")[2] for n, d in dtypes.items() if d == torch.float32} == {"A_log", "dt_bias", "weight"}
    assert {n for n, d in dtypes.items() if d == torch.float32 and n.endswith("weight")} == {
        f"model.layers.{index}.self_attn.conv1d.weight" for index in (0, 2)
    }
    model.save_pretrained(tmp_path)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, tmp_path))
    assert ours.keys() == theirs.keys() and "model.layers.0.attention.q_conv1d.weight" in ours
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


# -- plan and report -------------------------------------------------------------------------------
def test_plan_report_and_inspect_agree(stock):
    source, out, report = stock("qwen3")
    plan = surgery.plan(source, "stock-gated-deltanet", stock={"interval": 2})
    assert plan["linear_layers"] == [0, 2] == report["stock"]["linear_layers"] and plan["softmax_layers"] == [1, 3]
    assert plan["state_bytes"] == 2 * 4 * 16 * 16 * 4
    assert plan["token_bytes"] == {"before": 4 * 2 * 2 * 16 * 4, "after": 2 * 2 * 2 * 16 * 4}
    assert "Gated DeltaNet" in str(plan) and "QK norm" not in str(plan)
    assert inspect(str(out))["checks"]["as_reported"] and "Qwen3_5ForCausalLM" in str(report)
    for record in report["mixers"]:
        assert list(record["errors"]) == ["copied", "profile", "features", "output", "local"]
    assert report["held_out"]["tokens"] > 0


def test_the_report_names_no_steps_without_times(stock):
    _, _, report = stock("qwen3")
    (line,) = [str(line) for line in inspect_table(report) if str(line).startswith("time: ")]
    assert "s per layer; peak memory" in line and "()" not in line


@needs_ling
def test_plan_and_report_of_kimi_delta_attention(stock):
    """The cache of a token in a kept layer has as many numbers as before."""
    source, out, report = stock("llama", linear="kda")
    plan = surgery.plan(source, "stock-kda", stock={"linear": "kda", "interval": 2})
    assert plan["stock_class"] == "BailingHybridForCausalLM" and plan["linear_layers"] == [0, 2]
    assert plan["token_bytes"] == {"before": 4 * 2 * 2 * 8 * 4, "after": 2 * 2 * 2 * 8 * 4}
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert config.kv_lora_rank + config.qk_rope_head_dim == 2 * 2 * 8
    assert "Kimi delta attention" in str(plan) and "kv_a_proj_with_mqa" in str(plan)
    assert inspect(str(out))["checks"]["as_reported"] and "Kimi delta attention in 2 layers" in str(report)


def test_layers_outside_the_range_keep_softmax(sources):
    plan = surgery.plan(
        sources("Qwen3Config", {"head_dim": 16}), "stock-gated-deltanet", stock={"layers": "1:", "interval": 3}
    )
    assert plan["linear_layers"] == [1, 3]


def test_a_source_without_qk_norm_is_noted(sources):
    shown = str(surgery.plan(sources("LlamaConfig", {}), "stock-gated-deltanet"))
    assert "no QK norm" in shown and "frozen in training" in shown


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize("reason", REFUSED)
def test_sources_that_do_not_fit_are_refused_with_the_reason(sources, reason):
    name, options = REFUSED[reason]
    with pytest.raises(SurgeryError, match=f"cannot become a stock Qwen3_5ForCausalLM: .*{reason}"):
        plan_stock(open_checkpoint(str(sources(name, options)), weights=False), load_recipe("stock-gated-deltanet"))


@needs_ling
@pytest.mark.parametrize("reason", KDA_REFUSED)
def test_sources_that_do_not_fit_ling_are_refused_with_the_reason(sources, reason):
    folder = sources(*KDA_REFUSED[reason])
    with pytest.raises(SurgeryError, match=f"cannot become a stock BailingHybridForCausalLM: .*{reason}"):
        plan_stock(open_checkpoint(str(folder), weights=False), load_recipe("stock-kda"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"structure": "low_rank"}, "structure: low_rank"),
        ({"attention": {"mixer": "window", "window": 8}}, "no place for attention"),
        ({"depth": {"drop": 1}}, "no place for depth"),
        ({"stock": {"interval": 5}}, "needs a layer with softmax"),
        ({"stock": {"layers": "3"}}, "convert no layer"),
        ({"stock": {"interval": 1}}, "interval"),
    ],
)
def test_settings_that_do_not_fit_are_refused(sources, keys, words):
    with pytest.raises(SurgeryError, match=words):
        surgery.plan(sources("Qwen3Config", {"head_dim": 16}), "stock-gated-deltanet", **keys)


def test_conversions_that_do_not_fit_are_refused(sources, texts, tmp_path):
    folder = sources("Qwen3Config", {"head_dim": 16})
    with pytest.raises(SurgeryError, match="calibration text"):
        surgery.convert(folder, "stock-gated-deltanet", tmp_path / "A")
    with pytest.raises(SurgeryError, match="--resume and --overwrite"):
        surgery.convert(folder, "stock-gated-deltanet", tmp_path / "A", calibration=texts, overwrite=True)
    with pytest.raises(SurgeryError, match="float16 cannot hold"):
        surgery.convert(
            sources("LlamaConfig", {}), "stock-gated-deltanet", tmp_path / "A", calibration=texts, dtype="float16"
        )
    with pytest.raises(SurgeryError, match="for checkpoints"):
        surgery.apply(AutoModelForCausalLM.from_pretrained(folder), "stock-gated-deltanet")
    assert not list(tmp_path.iterdir())


def test_held_out_rows_of_one_token_are_not_scored(sources, tmp_path):
    folder, settings = sources("Qwen3Config", {"head_dim": 16}), {"steps": 0}
    ids = torch.randint(3, 96, (8, 24), generator=torch.Generator().manual_seed(0))
    for ones in (1, 2):  # of the two held-out rows
        mask = torch.tensor([[1] * 24] * (8 - ones) + [[1] + [0] * 23] * ones)
        save_file({"input_ids": ids, "attention_mask": mask}, tmp_path / f"{ones}.safetensors")
    report = surgery.convert(
        folder, "stock-gated-deltanet", tmp_path / "OUT", calibration=tmp_path / "1.safetensors", stock=settings
    )
    with pytest.raises(SurgeryError, match=r"no row of the last 2, which are held out .* has two tokens"):
        surgery.convert(folder, "stock-gated-deltanet", tmp_path / "A", calibration=tmp_path / "2.safetensors")
    assert (report["held_out"]["samples"], report["held_out"]["tokens"]) == (1, 23)
    assert report["held_out"]["converted"] > 0


# -- training --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("linear", "frozen"),
    [
        pytest.param("gated-deltanet", ("q_proj", "k_proj", "q_norm", "k_norm"), marks=pytest.mark.slow),
        pytest.param("kda", ("kv_a_proj_with_mqa", "kv_a_layernorm"), marks=[needs_ling, pytest.mark.slow]),
    ],
)
def test_the_recipes_of_the_page_lower_the_loss_and_leave_small_weights(linear, frozen, tmp_path):
    """The tensors that make a norm of the stock class linear are frozen; recipes that train them are refused."""
    tiny = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
    surgery.convert(
        tiny, f"stock-{linear}", tmp_path / "OUT", calibration=tiny / "calibration.txt", tokens=512, length=64,
        stock={"linear": linear, "steps": 2}, quiet=True,
    )  # fmt: skip
    page = (Path(__file__).resolve().parents[2] / "docs" / "stock.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    recipe, trains = (next(text for text in blocks if key in text) for key in ("stages:", 'trains: ["*.[q'))
    (tmp_path / "heal.yaml").write_text(recipe)
    overrides = {
        "common.length": 64, "common.batch": 8, "common.rows": 8, "stages.0.tokens": 8192, "precision": "float32",
        "data.validation": str(tiny / "heldout.txt"), "data.validation_examples": 8,
    }  # fmt: skip
    if linear == "kda":
        overrides |= {"stages.0.trains": yaml.safe_load(trains)["trains"], "stages.0.tokens": 4096}

    def heal(**stage):
        return surgery.finetune(
            tmp_path / "OUT", str(tmp_path / "heal.yaml"), teacher=tiny, data=tiny / "calibration.txt",
            out=tmp_path / "HEALED", overrides={**overrides, **{f"stages.0.{key}": value for key, value in stage.items()}},
        )  # fmt: skip

    for stage in ({"trains": ["all"]}, {"trains": [f"*.{frozen[0]}"]}):
        with pytest.raises(SurgeryError, match=rf"layers\.3\.self_attn\.({'|'.join(frozen)}).*out of `trains`"):
            heal(**stage)
    record = heal()
    before, after = (record["validation"][name]["perplexity"] for name in ("before", "after"))
    assert after < 0.8 * before
    converted, healed = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("OUT", "HEALED"))
    assert type(healed).__name__ == LOADED[linear][0]
    kept = next(index for index, kind in enumerate(healed.config.layer_types) if kind == "full_attention")
    for name in frozen:
        weights = [model.get_parameter(f"model.layers.{kept}.self_attn.{name}.weight") for model in (converted, healed)]
        assert torch.equal(*weights)


def test_tiny_weights_are_those_of_the_report(stock):
    """Of the layers that keep softmax, and only if a norm was made linear."""
    _, _, report = stock("llama")
    entry, name = report["stock"], "model.layers.{}.self_attn.k_proj.weight"
    with pytest.raises(
        SurgeryError, match=r"OUT: .*layers\.1\.self_attn\.k_proj.*q_proj, k_proj, q_norm and k_norm of the layers 1, 3"
    ):
        check_kept_frozen("OUT", entry, [name.format(0), name.format(1)])
    for checked, changed in (
        (entry, [name.format(0)]),
        ({**entry, "neutral_qk_norm": False}, [name.format(1)]),
        ("not a report", [name.format(1)]),
    ):
        check_kept_frozen("OUT", checked, changed)


NORMS = {"gated-deltanet": ("q_norm", "k_norm"), "kda": ("kv_a_layernorm",)}


@pytest.mark.parametrize("linear", ["gated-deltanet", pytest.param("kda", marks=needs_ling)])
def test_norms_that_undo_tiny_projections_stay_as_they_are(stock, linear):
    """What the page and `surgery plan` say to freeze is what finetune refuses to train."""
    _, converted, report = stock("llama", linear=linear)
    parameters = dict(AutoModelForCausalLM.from_pretrained(converted).named_parameters())
    kept = [f"model.layers.1.self_attn.{name}.weight" for name in NORMS[linear]]
    assert all(name in parameters for name in kept)
    for name in kept:
        with pytest.raises(SurgeryError, match=rf"leave {re.escape(name)} as it is: its large weights undo"):
            check_kept_frozen("OUT", report["stock"], [name])
    check_kept_frozen("OUT", report["stock"], [name for name in parameters if ".self_attn." not in name])
    note = STOCK_CLASSES[linear].note(True)
    page = (Path(__file__).resolve().parents[2] / "docs" / "stock.md").read_text(encoding="utf-8")
    bold = re.findall(r"\*\*(freeze.*?)\*\*", page, re.S)
    frozen = {path.rpartition(".")[2] for path in frozen_modules(report["stock"])}
    assert any(set(re.findall(r"`(\w+)`", text)) == frozen for text in bold)
    assert linear == "gated-deltanet" or all(name in note for name in frozen)


def test_messages_of_finetune_know_that_attention_was_replaced(stock):
    """Kinds of parameters that only our modules have, and a recipe for replaced attention."""
    _, converted, _ = stock("qwen3")
    model = AutoModelForCausalLM.from_pretrained(converted)
    for word in ("new", "structured", "mixers"):
        with pytest.raises(
            SurgeryError, match=r"If a recipe stock-\* wrote this Qwen3_5ForCausalLM, name its layers"
        ) as error:
            select_parameters(model, [word], {})
        assert "was replaced" not in str(error.value)
    stages = load_healing_recipe("attention").stages
    assert recipe_warnings("OUT", model, stages, converted_whole=True, stock=True) == []
    assert "is as it was" in recipe_warnings("OUT", model, stages, converted_whole=True)[0]


def test_a_second_conversion_keeps_tiny_weights(stock):
    """Low rank of a matrix of 1e-9 behind a norm of 1e9 would lose what the norm makes large."""
    _, _, report = stock("llama")
    tiny = "model.layers.1.self_attn.q_proj"
    with pytest.raises(SurgeryError, match=r"OUT is a conversion into a stock class.*layers\.1\.self_attn\.q_proj"):
        check_tiny_kept("OUT", report, ["model.layers.0.mlp.up_proj", tiny])
    for other in (None, [], {}, {**report, "stock": {**report["stock"], "neutral_qk_norm": False}}):
        check_tiny_kept("OUT", other, [tiny])
