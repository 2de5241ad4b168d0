"""depth: fewer layers, end to end."""

from __future__ import annotations

import copy
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from helpers import killing
from helpers.forked import run_processes
from helpers.narrowed import load
from helpers.small import DECODER, make_recipe, model_outputs, tiny_config, tiny_inputs
from helpers.small_experts import STORED_MERGED, write_experts
from helpers.small_training import EMBEDDED
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import surgery
import surgery.calibration.partition
import surgery.conversion.depth
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.depth import angle
from surgery.conversion.score import HeldOutScore
from surgery.core.errors import SurgeryError
from surgery.planning.depth import block_without, number_ranges
from surgery.training.models import load_student, open_trainable
from surgery.training.optim import select_parameters
from surgery.training.stages.distill import DistillConfig
from surgery.training.suitability import recipe_warnings

LAYERS = 6
DENSE = {"structure": "dense"}
EXPERTS = {**DECODER, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


def config_with_layers(family: str):
    """Return (model class, config) of a tiny model with LAYERS layers, whose layers differ if the family's do."""
    import transformers as t

    special = {
        "smollm3": lambda: (t.SmolLM3ForCausalLM, t.SmolLM3Config(**{**DECODER, "num_hidden_layers": LAYERS})),
        "qwen2-windows": lambda: (
            t.Qwen2ForCausalLM,
            t.Qwen2Config(**{**DECODER, "num_hidden_layers": LAYERS}, use_sliding_window=True, sliding_window=8, max_window_layers=4),
        ),
        "qwen3_moe": lambda: (
            t.Qwen3MoeForCausalLM,
            t.Qwen3MoeConfig(**{**EXPERTS, "num_hidden_layers": LAYERS}, num_experts=4, decoder_sparse_step=2, mlp_only_layers=[5]),
        ),
        "deepseek_v3": lambda: (
            t.DeepseekV3ForCausalLM,
            t.DeepseekV3Config(
                **{**EXPERTS, **LATENT, "num_hidden_layers": LAYERS, "head_dim": 4, "num_key_value_heads": 4},
                n_routed_experts=4, first_k_dense_replace=3, n_group=1, topk_group=1,
            ),
        ),
    }  # fmt: skip
    if family in special:
        return special[family]()
    cls, config = tiny_config(family)
    settings = {**config.to_dict(), "layer_types": None}
    settings |= {key: LAYERS for key in ("num_hidden_layers", "n_layer") if key in settings}
    return cls, type(config)(**{key: value for key, value in settings.items() if value is not None})


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """deep(family) -> folder of a tiny random checkpoint with LAYERS layers, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            torch.manual_seed(0)
            cls, config = config_with_layers(family)
            model = cls(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3.0) if parameter.dim() > 1 else None
            made[family] = tmp_path_factory.mktemp("deep") / family
            model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Path:
    """Token ids to calibrate on."""
    path = tmp_path_factory.mktemp("samples") / "samples.safetensors"
    save_file(tiny_inputs("llama", 12), path)
    return path


@pytest.fixture(scope="module")
def story_samples(tmp_path_factory) -> Path:
    """24 rows of 64 tokens of the embedded checkpoint's calibration text."""
    ids = AutoTokenizer.from_pretrained(EMBEDDED)((EMBEDDED / "calibration.txt").read_text(encoding="utf-8")).input_ids
    path = tmp_path_factory.mktemp("stories") / "stories.safetensors"
    save_file({"input_ids": torch.tensor(ids[: 24 * 64]).view(24, 64)}, path)
    return path


@pytest.fixture(scope="module")
def story_recipe(story_samples) -> dict:
    """A recipe that removes two of the embedded checkpoint's six layers."""
    return {**DENSE, "depth": {"drop": 2}, "calibration": story_samples}


@pytest.fixture(scope="module")
def shallow(story_recipe, tmp_path_factory):
    """(folder, report) of the embedded checkpoint, which is trained, without two of its layers."""
    out = tmp_path_factory.mktemp("shallow") / "out"
    return out, convert(str(EMBEDDED), make_recipe(**story_recipe), out)


@pytest.mark.parametrize("kind", STORED_MERGED)
def test_experts_of_merged_files_stay_merged(kind, tmp_path):
    """The names of the result are those that transformers reads."""
    source = write_experts(kind, tmp_path / "source", num_hidden_layers=3)
    convert(str(source), make_recipe(**DENSE, depth={"remove": "1:2"}), tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert after.keys() == {name for name in before if ".2." not in name}
    for name in after:
        assert torch.equal(after[name], before[name.replace(".layers.1.", ".layers.2.")])


def without_layers(model, kept: list[int]):
    """Return a copy of a model with some of its layers, made with transformers' modules."""
    model = copy.deepcopy(model)
    path, layers = max(
        ((p, m) for p, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)),
        key=lambda found: len(found[1]),
    )
    assert len(layers) == LAYERS
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, torch.nn.ModuleList([layers[i] for i in kept]))
    config = model.config
    config.num_hidden_layers = len(kept)
    for key in ("layer_types", "no_rope_layers"):
        if isinstance(getattr(config, key, None), list):
            setattr(config, key, [getattr(config, key)[i] for i in kept])
    return model


# -- every family -----------------------------------------------------------------------------------------------------
PLAIN = ("llama-tied", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "bert", "vit")
UNLIKE = ("smollm3", "qwen2-windows", "qwen3_moe", "deepseek_v3")  # with layers of several kinds


@pytest.mark.parametrize("family", [*PLAIN, *UNLIKE])
def test_the_result_is_the_original_without_these_layers(family, deep, tmp_path):
    recipe = make_recipe(**DENSE, depth={"remove": "2:4"})
    report = convert(str(deep(family)), recipe, tmp_path / "out")
    assert report["depth"]["removed"] == [2, 3] and report["depth"]["layers"] == LAYERS
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and not list((tmp_path / "out").glob("*.py"))
    inputs = tiny_inputs(family, 3, seed=2)
    wanted = model_outputs(
        without_layers(load(deep(family)), [0, 1, 4, 5]),
        {**inputs, "use_cache": False} if "input_ids" in inputs and family != "bert" else inputs,
    )
    assert torch.equal(model_outputs(load(tmp_path / "out"), inputs), wanted)
    counted = surgery.plan(str(deep(family)), {**DENSE, "depth": {"remove": "2:4"}})["totals"]
    assert counted["model_before"] == sum(p.numel() for p in load(deep(family)).parameters())
    assert counted["model_after"] == sum(p.numel() for p in load(tmp_path / "out").parameters())


def test_a_list_names_layers_apart(deep, tmp_path):
    report = convert(str(deep("llama")), make_recipe(**DENSE, depth={"remove": [4, 1]}), tmp_path / "out")
    assert report["depth"]["removed"] == [1, 4]
    inputs = {**tiny_inputs("llama", 3, seed=2), "use_cache": False}
    wanted = model_outputs(without_layers(load(deep("llama")), [0, 2, 3, 5]), inputs)
    assert torch.equal(model_outputs(load(tmp_path / "out"), inputs), wanted)


@pytest.mark.parametrize("family", ["gemma3", "smollm3", "gpt2"])
def test_the_cache_has_a_layer_for_each(family, deep, tmp_path):
    """Step by step the result computes what it computes at once."""
    convert(str(deep(family)), make_recipe(**DENSE, depth={"remove": "1:3"}), tmp_path / "out")
    model, ids = load(tmp_path / "out"), tiny_inputs(family, 2, seed=4)["input_ids"]
    with torch.no_grad():
        whole, cache, steps = model(ids).logits, None, []
        for position in range(ids.shape[1]):
            out = model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4)


# -- the choice and the fit ---------------------------------------------------------------------------------------------
def test_angle():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert angle(x, 3 * x) == 0
    assert abs(angle(x, torch.tensor([[0.0, 2.0], [-1.0, 0.0]])) - 0.75) < 1e-6


def test_names_of_layers():
    assert block_without(2, 3, 6) == (0, 1, 5)
    assert number_ranges([3, 5, 6, 7]) == "3, 5 to 7"


def test_the_chosen_block_has_the_lowest_loss_of_those_tried(shallow):
    out, report = shallow
    depth = report["depth"]
    assert len(depth["removed"]) == 2 and 0 not in depth["removed"] and 5 not in depth["removed"]
    assert set(depth["candidates"]) == {"1", "2", "3"}
    best = min(depth["candidates"], key=lambda first: depth["candidates"][first])
    assert depth["removed"][0] == int(best)
    assert depth["held_out"]["converted"] <= depth["candidates"][best]
    assert report["held_out"]["original"] == depth["held_out"]["original"] < report["held_out"]["converted"]
    stored = sum(t.numel() for t in load_file(out / "model.safetensors").values())
    assert report["totals"]["params_after"] == stored < report["totals"]["params_before"]


def test_losses_are_those_of_the_result(shallow, story_samples):
    """On the held-out windows, computed by transformers."""
    out, report = shallow
    ids = load_file(story_samples)["input_ids"][21:]
    for folder, key in ((EMBEDDED, "original"), (out, "converted")):
        with torch.no_grad():
            logits = load(folder)(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert abs(float(loss) - report["held_out"][key]) < 1e-4


def test_the_refitted_linear_lowers_the_loss_and_is_the_only_one_that_changed(shallow):
    out, report = shallow
    depth = report["depth"]
    first = depth["removed"][0]
    assert depth["refit"] == f"model.layers.{first - 1}.mlp.down_proj"
    assert depth["held_out"]["converted"] < depth["without_refit"]
    before, after = load_file(EMBEDDED / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {name for name in after if not any(torch.equal(after[name], tensor) for tensor in before.values())}
    assert changed == {f"{depth['refit']}.weight"}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_fit_is_the_least_squares_optimum(family, deep, samples, tmp_path, monkeypatch):
    """With a tiny ridge, what the removed layers add and the linear does not is orthogonal to its inputs."""
    losses = itertools.count(10, -1)  # the fit is kept, whatever it does to held-out samples
    score = lambda *_: HeldOutScore("nats per token", 1.0, float(next(losses)), None, 10)  # noqa: E731
    monkeypatch.setattr(surgery.conversion.depth, "held_out_score", score)
    monkeypatch.setattr(surgery.conversion.depth, "RIDGES", (1e-7,))
    recipe = make_recipe(**DENSE, depth={"remove": "2:4"}, calibration=samples)
    report = convert(str(deep(family)), recipe, tmp_path / "out")
    path, original, fitted = report["depth"]["refit"], load(deep(family)), load(tmp_path / "out")
    seen: dict[str, torch.Tensor] = {}
    layers = max((m for m in original.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    for name, module in (("before", layers[2]), ("after", layers[4]), ("input", original.get_submodule(path))):
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].flatten(0, -2)}))
    model_outputs(original, {"input_ids": load_file(samples)["input_ids"][: 12 - 2]})
    with torch.no_grad():
        gained = [model.get_submodule(path)(seen["input"]) for model in (original, fitted)]
    rest = seen["after"] - seen["before"] - (gained[1] - gained[0])
    whole = seen["after"] - seen["before"]
    assert float((rest.mT @ seen["input"]).norm()) < 0.02 * float((whole.mT @ seen["input"]).norm())


def test_without_refit_no_tensor_changes(story_recipe, tmp_path):
    recipe = make_recipe(**{**story_recipe, "depth": {"keep": 0.67, "refit": False}})
    report = convert(str(EMBEDDED), recipe, tmp_path / "out")
    before, after = load_file(EMBEDDED / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(any(torch.equal(tensor, old) for old in before.values()) for tensor in after.values())
    assert "refit" not in report["depth"] and len(report["depth"]["removed"]) == 2


# -- with other replacements ---------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_linears_of_the_layers_that_stay_are_replaced(story_recipe, tmp_path):
    recipe = {**story_recipe, "structure": "low_rank", "keep": 0.5, "sweeps": 0, "curvature": "none"}
    report = convert(str(EMBEDDED), make_recipe(**recipe, allocate="uniform"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    assert {path.split(".")[2] for path in config["quantization_config"]["modules"]} == set("0123")
    assert report["held_out"]["original"] == report["depth"]["held_out"]["original"]
    planned = surgery.plan(str(EMBEDDED), {"structure": "low_rank", "keep": 0.5, "depth": {"drop": 2}})["totals"]
    assert planned["modules"] == len(report["modules"])
    assert planned["model_before"] == report["totals"]["params_before"]
    found = surgery.inspect(tmp_path / "out")
    assert found["checks"]["as_reported"] and "2 of 6 layers removed" in str(found)
    densify(str(tmp_path / "out"), tmp_path / "dense")
    assert load(tmp_path / "dense").config.num_hidden_layers == 4


def test_commands_on_the_result(shallow, tmp_path):
    out, report = shallow
    found = surgery.inspect(out)
    macs = found["macs_per_token"]
    assert macs["before"] - macs["after"] == report["depth"]["macs"] > 0
    text = str(found)
    assert f"2 of 6 layers removed: {number_ranges(report['depth']['removed'])}" in text and "fitted again" in text
    with pytest.raises(SurgeryError, match="ordinary checkpoint already"):
        densify(str(out), tmp_path / "dense")
    again = convert(str(out), make_recipe(structure="low_rank", keep=0.5), tmp_path / "again")
    assert again["totals"]["params_before"] == report["totals"]["params_after"], "it converts like any other"
    plan = surgery.plan(str(EMBEDDED), {**DENSE, "depth": {"drop": 2}})
    assert "2 of 6 layers are removed" in str(plan)


def test_training_counts_the_refitted_linear_as_new(shallow):
    out, report = shallow
    student = load_student(open_trainable(str(out)))
    assert select_parameters(student, ["new"], {}) == {f"{report['depth']['refit']}.weight"}


# -- healing -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_healing_with_a_deeper_teacher(shallow, texts, tmp_path):
    out, _ = shallow
    stage = {"trains": ["all"], "length": 16, "tokens": 128, "batch": 4, "rows": 2, "rate": 1e-3}
    for kind in ("distill", "hidden", "align"):
        recipe = tmp_path / f"{kind}.yaml"
        recipe.write_text(json.dumps({"stages": [{"kind": kind, **stage}]}))
        healed = tmp_path / kind
        if kind == "distill":
            surgery.finetune(out, recipe, out=healed, data=texts, teacher=str(EMBEDDED))
            assert load(healed).config.num_hidden_layers == 4
        else:
            with pytest.raises(SurgeryError, match="the student has 4 layers and the teacher 6"):
                surgery.finetune(out, recipe, out=healed, data=texts, teacher=str(EMBEDDED))


def test_no_warning_that_nothing_was_converted(shallow):
    student = load_student(open_trainable(str(EMBEDDED)))
    stage = DistillConfig(kind="distill", trains=("all",), tokens=128, rate=1e-3)
    assert recipe_warnings("name", student, [stage]) and not recipe_warnings(
        "name", student, [stage], converted_whole=True
    )


# -- journal, processes ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_killed_and_resumed_to_the_same_bytes(deep, samples, tmp_path):
    recipe = make_recipe(**DENSE, depth={"drop": 2}, calibration=samples)
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(deep("gpt2")), recipe, out, resume=resume), tmp_path, kills=2
    )
    assert resumed
    for out in resumed:
        for name in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()
        assert not list(out.glob("depth*"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_give_the_bytes_of_one(deep, samples, tmp_path, monkeypatch):
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 64)
    recipe = make_recipe(**DENSE, depth={"drop": 2}, calibration=samples)
    for count in (1, 2):
        out = tmp_path / f"out-{count}"
        work = lambda _, out=out: convert(str(deep("gpt2")), recipe, out, device="cpu")  # noqa: E731
        assert run_processes(count, work) == [0] * count
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out-1" / name).read_bytes() == (tmp_path / "out-2" / name).read_bytes()


# -- what is refused ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "depth, message",
    [
        ({"drop": 5}, "from 1 to 4 of the 6 layers"),
        ({"remove": ":"}, "from 1 to 5 of the 6 layers"),
        ({"keep": 0.99}, "from 1 to 4 of the 6 layers"),
        ({"drop": 2, "keep": 0.5}, "give one of keep"),
        ({}, "give one of keep"),
        ({"remove": 3}, "range of layer numbers"),
        ({"remove": [2, 6]}, r"depth.remove: layers are 0 to 5 \(got 6\)"),
        ({"remove": []}, "from 1 to 5 of the 6 layers"),
    ],
)
def test_numbers_of_layers_that_are_refused(depth, message, deep):
    with pytest.raises(SurgeryError, match=message):
        surgery.plan(str(deep("llama-tied")), {**DENSE, "depth": depth})


def test_what_is_refused(deep, checkpoints, tmp_path):
    with pytest.raises(SurgeryError, match="depth chooses the layers on calibration text"):
        convert(str(deep("llama-tied")), make_recipe(**DENSE, depth={"drop": 2}), tmp_path / "out")
    with pytest.raises(SurgeryError, match="2 lists of layers"):
        surgery.plan(str(checkpoints("t5")), {**DENSE, "depth": {"drop": 1}})
    with pytest.raises(SurgeryError, match="not of a model in memory"):
        surgery.apply(load(deep("llama-tied")), {**DENSE, "depth": {"remove": "2"}})
    cls, config = config_with_layers("gpt2")
    config.scale_attn_by_inverse_layer_idx = True
    cls(config).save_pretrained(tmp_path / "scaled")
    with pytest.raises(SurgeryError, match="layer 4 would become layer 2"):
        surgery.plan(str(tmp_path / "scaled"), {**DENSE, "depth": {"remove": "2:4"}})
