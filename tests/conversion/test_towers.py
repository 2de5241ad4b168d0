"""Models of text and images, of sound, and encoder-decoders: every law over all families of
helpers/tiny_multimodal.py.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers import tiny_multimodal as families
from helpers.small import make_recipe
from safetensors.torch import save_file

import surgery
from surgery.architectures.linears import find_linears
from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner, run_phases
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.core.errors import SurgeryError

CPU = torch.device("cpu")
# Linears that calibration on all inputs leaves out: LLaVA does not use the last layer of its vision tower.
UNREACHED = {"llava": 6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folders(name) -> folder of a tiny random checkpoint, made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("towers") / name
            families.make_model(name).save_pretrained(made[name])
        return made[name]

    return make


def saved_inputs(folder, inputs):
    path = folder / "inputs.safetensors"
    save_file({name: x.contiguous() for name, x in inputs.items()}, path)
    return path


def load(name, folder):
    return getattr(transformers, families.tiny_family(name).auto).from_pretrained(folder).eval()


def outputs(model, inputs):
    with torch.inference_mode():
        out = model(**inputs)
    return out["logits" if "logits" in out else "logits_per_image"]


def relative(a, b):
    return float((a - b).norm() / a.norm())


def held_out_loss(model, inputs, held):
    """The loss of the last rows, by the model's own logits, without placeholders of images."""
    logits = outputs(model, inputs)[-held:]
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))[-held:]
    placeholder = getattr(model.config, "image_token_id", None)
    real = ids[:, 1:] != (-1 if placeholder is None else placeholder)
    targets = ids[:, 1:].clamp_max(logits.shape[-1] - 1)
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none") * real
    return float((losses.sum(1) / real.sum(1)).mean())


@pytest.mark.parametrize("name", families.NAMES)
def test_rows_run_one_at_a_time_as_the_model_runs_them_together(name, folders):
    """Hidden states of every row, masks, position biases, patches in one sequence, and images of several tiles."""
    meta_model = MetaModel(open_checkpoint(str(folders(name))))
    inputs = families.make_inputs(name, 4, seed=3)
    data = CalibrationSet.from_inputs(inputs, 0.5)
    layout = find_linears(meta_model.model)
    runner = LayerRunner(meta_model, layout.layers, layout.head, CPU)
    runner.packed = data.packed
    runner.chunk_rows = lambda length: 1
    visited = []

    def visit(call):
        visited.append(call.path)
        call.hidden_BTD = runner.writable_buffer(call.hidden_BTD)
        phases = [(0, 2, torch.no_grad()), (2, 4, torch.no_grad())]
        return run_phases(call, phases, runner)

    final = runner.run(data.inputs, visit)
    assert sorted(visited) == sorted(layout.layers)
    model = load(name, folders(name))
    with torch.inference_mode():
        out = model(**inputs)
    if layout.head:
        expected = out.logits
        extra = getattr(model, "final_logits_bias", 0.0)
        found = model.get_output_embeddings()(final) + extra
    else:
        expected, found = torch.cat([out.text_embeds, out.image_embeds], dim=-1)[:, None], final
    assert relative(expected, found) < 1e-5


@pytest.mark.parametrize("name", families.NAMES)
def test_full_rank_is_exact_and_the_result_loads_generates_and_goes_back(name, folders, tmp_path):
    """Calibrated on inputs of all towers, loaded by the Auto class that the original needs."""
    samples = families.make_inputs(name, 6)
    calibration = saved_inputs(tmp_path, samples)
    recipe = make_recipe(structure="low_rank", rank="full", towers="all", curvature="none", calibration=calibration)
    report = convert(str(folders(name)), recipe, tmp_path / "out")
    family, inputs = families.tiny_family(name), families.make_inputs(name, 2, seed=5)
    original, converted = load(name, folders(name)), load(name, tmp_path / "out")
    assert len(report.get("unreached", [])) == UNREACHED.get(name, 0)
    assert report["held_out"]["unit"] == ("nats per token" if family.generates else "relative output error")
    if family.generates:
        expected = held_out_loss(original, samples, 2)
        assert report["held_out"]["original"] == pytest.approx(expected, abs=1e-4)
        assert report["held_out"]["converted"] == pytest.approx(expected, abs=1e-3)
    assert relative(outputs(original, inputs), outputs(converted, inputs)) < 1e-4
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert family.auto in config.auto_map
    if family.generates:
        given = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
        options = {"max_new_tokens": 3, "do_sample": False}
        assert torch.equal(original.generate(**given, **options), converted.generate(**given, **options))
    assert surgery.inspect(tmp_path / "out")["checks"]["as_reported"]
    densify(str(tmp_path / "out"), tmp_path / "dense")
    dense = load(name, tmp_path / "dense")
    assert relative(outputs(converted, inputs), outputs(dense, inputs)) < 1e-4


@pytest.mark.parametrize("name", ["gemma3-vl", "clip", "whisper", "bloom", "falcon"])
def test_without_calibration_every_selected_linear_is_replaced(name, folders, tmp_path):
    recipe = make_recipe(structure="btt", blocks=[2, 2], keep=0.6)
    planned = surgery.plan(folders(name), recipe.model_copy())
    report = convert(str(folders(name)), recipe, tmp_path / "out")
    assert len(report["modules"]) == planned["totals"]["modules"] > 0
    towers = set(find_linears(MetaModel(open_checkpoint(str(folders(name)))).model).towers.values())
    assert towers - {""} == set(families.tiny_family(name).towers)
    replaced_vision = any("vision" in record["name"] for record in report["modules"])
    assert replaced_vision == (name == "clip")  # a model that generates text keeps its vision tower
    assert outputs(load(name, tmp_path / "out"), families.make_inputs(name, 2)).isfinite().all()


@pytest.mark.parametrize("name", ["gemma3-vl", "qwen2-vl", "whisper"])
def test_half_of_the_parameters_fitted_to_inputs_of_all_towers(name, folders, tmp_path):
    """Better than the projection without inputs, on other inputs: with curvature, allocation and trials."""
    calibration = saved_inputs(tmp_path, families.make_inputs(name, 12))
    keys = {"structure": "low_rank", "keep": 0.5, "towers": "all", "sweeps": 1, "allocate": "measured"}
    report = convert(str(folders(name)), make_recipe(**keys, calibration=calibration), tmp_path / "fitted")
    convert(str(folders(name)), make_recipe(**keys), tmp_path / "plain")
    assert report["allocation"]["kept"] in ("uniform", "measured") and "measured" in report["allocation"]
    inputs = families.make_inputs(name, 8, seed=9)
    expected = outputs(load(name, folders(name)), inputs)
    errors = [relative(expected, outputs(load(name, tmp_path / made), inputs)) for made in ("fitted", "plain")]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name, unreached", [("gemma3-vl", 12), ("mllama", 25)])
def test_text_alone_leaves_the_vision_tower_dense_and_lists_it(name, unreached, folders, tmp_path, capsys):
    calibration = saved_inputs(tmp_path, families.text_inputs(name, 6))
    keys = {"structure": "low_rank", "keep": 0.5, "curvature": "none", "allocate": "uniform", "sweeps": 0}
    said = []

    class Said(surgery.core.progress.Progress):
        def say(self, message):
            said.append(message)

    recipe = make_recipe(**keys, towers="all", calibration=calibration)
    report = convert(str(folders(name)), recipe, tmp_path / "out", progress=Said())
    assert len(report["unreached"]) == unreached
    assert not {record["name"] for record in report["modules"]} & set(report["unreached"])
    assert any("left dense" in message for message in said) and any("left dense" in note for note in report["notes"])
    original, converted = (load(name, f).state_dict() for f in (folders(name), tmp_path / "out"))
    assert all(torch.equal(original[f"{path}.weight"], converted[f"{path}.weight"]) for path in report["unreached"])
    with pytest.raises(SurgeryError, match="reach no linear of the plan"):
        convert(str(folders(name)), recipe.model_copy(update={"towers": "vision"}), tmp_path / "none")


def test_a_mixer_in_the_text_tower_reads_images(folders, tmp_path):
    calibration = saved_inputs(tmp_path, families.make_inputs("llava", 6))
    attention = {"mixer": "linear", "mask": "decay", "steps": 1}
    recipe = make_recipe(structure="dense", attention=attention, calibration=calibration)
    report = convert(str(folders("llava")), recipe, tmp_path / "out")
    assert [m["name"] for m in report["mixers"]] == [f"model.language_model.layers.{i}.self_attn" for i in range(2)]
    model, inputs = load("llava", tmp_path / "out"), families.make_inputs("llava", 2, seed=4)
    whole = outputs(model, inputs)
    steps = model.generate(
        **inputs, max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    assert relative(whole[:, -1], steps.logits[0]) < 1e-4


def test_a_mixer_of_gemma_3_is_noted_to_refuse_images(folders):
    notes = surgery.plan(folders("gemma3-vl"), {"structure": "dense", "attention": {"mixer": "linear"}})["notes"]
    assert any("raises an error for images" in note for note in notes)


@pytest.mark.parametrize(
    "attention", [{"mixer": "window", "window": 96}, {"mixer": "mlr", "cache": 0.5}, {"mixer": "linear"}]
)
def test_a_mixer_of_gemma_3_refuses_images_and_reads_text(attention):
    model = surgery.apply(families.make_model("gemma3-vl"), {"structure": "dense", "attention": attention})
    assert outputs(model, families.text_inputs("gemma3-vl", 2)).isfinite().all()
    for use_cache in (False, True):
        with pytest.raises(SurgeryError, match=r"the attention mask (is not causal|lets tokens see later ones)"):
            outputs(model, {**families.make_inputs("gemma3-vl", 2), "use_cache": use_cache})


@pytest.mark.parametrize("name", ["qwen2-vl", "bart"])
def test_a_model_in_memory_gives_the_same_weights(name, folders, tmp_path):
    inputs = families.make_inputs(name, 6)
    keys = {
        "structure": "low_rank",
        "keep": 0.5,
        "curvature": "none",
        "allocate": "uniform",
        "sweeps": 0,
        "towers": "all",
    }
    calibration = saved_inputs(tmp_path, inputs)
    convert(str(folders(name)), make_recipe(**keys, calibration=calibration), tmp_path / "out")
    live = surgery.apply(load(name, folders(name)), keys, calibration=[inputs])
    saved = load(name, tmp_path / "out").state_dict()
    assert all(torch.equal(x, saved[n]) for n, x in live.state_dict().items())


@pytest.mark.parametrize(
    "name, keys, says",
    [
        ("llava", {"towers": "sight"}, "has no tower 'sight'; valid: text, vision, or all"),
        ("bart", {"towers": ["text"]}, "it has no towers, so leave the key out"),
        (
            "llava",
            {"rules": [{"match": "*vision_tower*", "keep": 0.3}]},
            "matches only modules of tower 'vision'.*towers=all",
        ),
        ("bloom", {"attention": {"mixer": "linear"}}, "without transformers' attention functions"),
    ],
)
def test_plans_that_are_refused(name, keys, says, folders):
    with pytest.raises(SurgeryError, match=says):
        surgery.plan(folders(name), {"structure": "low_rank", **keys})


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("clip", lambda x: {"input_ids": x["input_ids"]}, "does not run on two rows of its calibration inputs.*pixel_values"),
        ("bart", lambda x: {"input_ids": x["input_ids"]}, "needs labels or decoder_input_ids"),
        ("bart", lambda x: {**x, "labels": x["input_ids"].float(), "decoder_input_ids": None}, "labels must hold token ids"),
        ("qwen2-vl", lambda x: {**x, "pixel_values": x["pixel_values"][:-1]}, "every tensor needs the same number of rows"),
    ],
)  # fmt: skip
def test_inputs_that_are_refused(name, change, says, folders, tmp_path):
    inputs = {k: v for k, v in change(families.make_inputs(name, 4)).items() if v is not None}
    with pytest.raises(SurgeryError, match=says):
        convert(str(folders(name)), make_recipe(calibration=saved_inputs(tmp_path, inputs)), tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
