"""Hybrids by heads: the assembled layer, its cache, the choice of heads, plans, refusals and whole conversions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conversion.test_convert import bytes_of
from helpers.small import make_recipe, model_outputs, tiny_config, tiny_inputs
from helpers.small_mixers import random_model_with_mixers
from helpers.small_training import EMBEDDED, copy_first_layers
from helpers.tiny_families import TINY_FAMILIES
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer, DynamicCache

from surgery.checkpoint.outline import describe_checkpoint
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.choices import hybrid_lines
from surgery.conversion.convert import convert
from surgery.conversion.hybrid import HeadErrors
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, mixer_config
from surgery.mixers.common.rope import apply_rope
from surgery.modeling.cache_io import load_cache, save_cache
from surgery.planning.attention_recipe import HybridRecipe
from surgery.planning.plan import make_plan
from surgery.publish.summary import inspect, plan_dict
from surgery.publish.tables import plan_table
from surgery.vllm.servable import check_mixer

SHAPE = AttentionShape(dim=24, heads=6, groups=3, key=8, value=6, scaling=8**-0.5, rotary=8)
SMALL = {"mixer": "linear", "mask": "gates", "chunk": 8, "steps": 2}
WINDOWED = {"mixer": "linear", "mask": {"name": "hierarchical", "block": 8}, "scores": "delta", "window": 6, "sinks": 2,
            "rope": "both", "steps": 2}  # fmt: skip


WINDOWED_MIXER = {name: value for name, value in WINDOWED.items() if name != "steps"}


def mixer_inputs(length=20, rope=True):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    angle_1TR = torch.arange(length).double()[None, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.03] * 2).double()
    q, k, v = draw(2, 6, length, 8), draw(2, 3, length, 8), draw(2, 3, length, 6)
    return MixerInputs(q, k, v, draw(2, length, 24), rope=(angle_1TR.cos(), angle_1TR.sin()) if rope else None)


# -- the mixer -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "others",
    [
        {"mixer": "linear", "window": 4, "rope": "both"},
        {"mixer": "linear", "rope": "drop"},
        {"mixer": "window", "window": 4},
    ],
)
@pytest.mark.parametrize("kept", [(1,), (0, 2)])
@torch.no_grad()
def test_each_head_is_that_of_a_layer_of_its_kind(kept, others):
    """Softmax heads as in softmax attention on rotated q and k, the others as in a mixer that has only them."""
    config = mixer_config({"mixer": "head_hybrid", "softmax_heads": list(kept), "others": others})
    mixer, inputs = MIXERS[config](config, SHAPE).double(), mixer_inputs()
    rest = [g for g in range(3) if g not in kept]
    heads = {g: [2 * g, 2 * g + 1] for g in range(3)}
    rotated = replace(
        inputs,
        **{
            n: apply_rope(getattr(inputs, n).transpose(1, 2), *inputs.rope).transpose(1, 2)
            for n in ("q_BHTK", "k_BGTK")
        },
    )
    given = inputs if not mixer.rotated else rotated
    out, _ = mixer.mix(given)
    scores = torch.einsum("bhtk,bhsk->bhts", rotated.q_BHTK, rotated.k_BGTK.repeat_interleave(2, 1)) * SHAPE.scaling
    weights = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    softmax = weights @ inputs.v_BGTV.repeat_interleave(2, 1)
    for g in kept:
        assert torch.allclose(out[:, heads[g]], softmax[:, heads[g]], atol=1e-12)
    part = given if mixer.others.rotated == mixer.rotated else rotated
    own = [h for g in rest for h in heads[g]]
    alone, _ = mixer.others.mix(
        replace(part, q_BHTK=part.q_BHTK[:, own], k_BGTK=part.k_BGTK[:, rest], v_BGTV=part.v_BGTV[:, rest])
    )
    assert torch.allclose(out[:, own], alone, atol=1e-12)


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"softmax_heads": []}, "numbers of key/value heads"),
        ({"softmax_heads": [1, 0]}, "in order"),
        ({"softmax_heads": [-1]}, "from 0"),
        ({"softmax_heads": [3]}, "this layer has heads 0 to 2"),
        ({"softmax_heads": [0, 1, 2]}, "names all 3"),
        ({"softmax_heads": [0], "others": {"mixer": "bilinear_btt"}}, "can have the mixers linear and window"),
        ({"softmax_heads": [0], "others": {"mixer": "head_hybrid"}}, "cannot be a head_hybrid"),
        ({"softmax_heads": [0], "others": {"mixer": "linear", "maks": "decay"}}, "maks"),
        ({"softmax_heads": [0], "others": None}, "must be the options of a mixer"),
        ({"softmax_heads": [0], "softmax": {"mixer": "window"}}, "options of mixer softmax"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(keys, said):
    with pytest.raises(SurgeryError, match=said):
        config = mixer_config({"mixer": "head_hybrid", "others": {"mixer": "linear"}, **keys})
        MIXERS[config].check_config(config, SHAPE)


def test_interleaved_rotary_pairs_need_one_form():
    config = mixer_config({"mixer": "head_hybrid", "softmax_heads": [0], "others": {"mixer": "linear", "rope": "drop"}})
    with pytest.raises(SurgeryError, match="interleaved"):
        MIXERS[config].check_config(config, replace(SHAPE, interleaved=True))
    MIXERS[config].check_config(config, replace(SHAPE, rotary=0))


def test_a_choice_of_heads_that_cannot_be_measured_is_refused_by_the_plan(tmp_path):
    """The choice measures softmax with RoPE beside a mixer without it, although the result would drop RoPE in both."""
    TINY_FAMILIES["cohere"].build().save_pretrained(tmp_path / "cohere")
    hybrid = {"softmax": 0.5, "unit": "heads", "rope": "drop"}
    with pytest.raises(SurgeryError, match=r"attention.hybrid choose_by: measured: .*interleaved"):
        plan_of(tmp_path / "cohere", hybrid, rope="drop")
    plan_of(tmp_path / "cohere", {**hybrid, "choose_by": "every"}, rope="drop")


def test_vllm_refuses_it_by_name():
    config = mixer_config({"mixer": "head_hybrid", "softmax_heads": [0, 2], "others": {"mixer": "linear"}})
    with pytest.raises(SurgeryError, match=r"layers.1.self_attn: this layer keeps softmax in key/value heads \[0, 2\]"):
        check_mixer(config, "layers.1.self_attn")


# -- plans and recipes -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A three-layer model with two key/value heads (gpt2: four), by family and changes of its config."""

    def write(family="llama", **changes):
        torch.manual_seed(0)
        cls, config = tiny_config(family)
        for name, value in {"num_hidden_layers": 3, **changes}.items():
            setattr(config, name, value)
        place = tmp_path_factory.mktemp(family)
        cls(config).save_pretrained(place)
        return place

    return write


def plan_of(folder, hybrid, **attention):
    recipe = make_recipe(structure="dense", attention={**SMALL, "hybrid": hybrid, **attention})
    return make_plan(describe_checkpoint(open_checkpoint(str(folder))), recipe)


def kept_of(plan):
    return {t.index: getattr(t.config, "softmax_heads", ()) for t in plan.attention_targets.values()}


def test_explicit_and_evenly_spaced_heads(sources):
    folder = sources()
    assert kept_of(plan_of(folder, {"heads": {"0": [1], "2": [0, 1]}})) == {0: (1,), 1: ()}  # layer 2 keeps softmax
    assert kept_of(plan_of(folder, {"softmax": 0.5, "unit": "heads", "choose_by": "every"})) == {
        0: (1,),
        1: (1,),
        2: (1,),
    }
    assert kept_of(plan_of(folder, {"softmax": 0.3, "unit": "heads", "choose_by": "every"})) == {
        0: (1,),
        1: (),
        2: (0,),
    }
    rules = [{"layers": "1", "mixer": "window", "window": 4}]
    found = plan_of(folder, {"softmax": 0.5, "unit": "heads", "choose_by": "every"}, rules=rules).attention_targets
    assert [t.config.others.name for t in found.values()] == ["linear", "window", "linear"]


@pytest.mark.parametrize(
    "hybrid, said",
    [
        ({"softmax": 0.5, "heads": {0: [1]}}, "softmax and heads"),
        ({"unit": "heads"}, "none of them"),
        ({"layers": [0], "unit": "heads"}, "names whole layers"),
        ({"heads": {0: [1]}, "unit": "layers"}, "Leave unit out"),
        ({"heads": {0: [1, 0]}}, "layer 0 must have numbers of key/value heads in order"),
        ({"heads": {0: [2]}}, r"layer 0 has key/value heads 0 to 1 \(got 2\)"),
        ({"heads": {7: [0]}}, r"layer 7 must be one of the selected layers \[0, 1, 2\]"),
        ({"heads": {0: []}}, "names no head"),
        ({"heads": {0: [0, 1], 1: [0, 1], 2: [0, 1]}}, "nothing would be replaced"),
        ({"softmax": 0.5, "unit": "head"}, "attention.hybrid.unit"),
    ],
)
def test_choices_that_are_refused(sources, hybrid, said):
    with pytest.raises(SurgeryError, match=said):
        plan_of(sources(), hybrid)


def test_other_mixers_and_one_shared_head_are_refused(sources):
    with pytest.raises(SurgeryError, match=r"needs mixer linear or window .*got 'mlr'"):
        attention = {"mixer": "mlr", "ranks": [4, 4], "extents": [8], "hybrid": {"softmax": 0.5, "unit": "heads"}}
        make_recipe(structure="dense", attention=attention)
    with pytest.raises(SurgeryError, match=r"attention.rules.0: hybrid unit: heads needs"):
        plan_of(sources(), {"softmax": 0.5, "unit": "heads"}, rules=[{"layers": "1", "mixer": "bilinear_btt"}])
    with pytest.raises(SurgeryError, match=r"has one, which all its 4 query heads share \(multi-query attention\)"):
        plan_of(sources(num_key_value_heads=1), {"softmax": 0.5, "unit": "heads", "choose_by": "every"})


@pytest.mark.parametrize("attention", [SMALL, WINDOWED])
def test_plans_count_the_heads_that_keep_softmax(sources, attention):
    """A choice that is not made yet counts as any choice of as many heads does."""
    folder = sources()
    told = [plan_dict(plan_of(folder, hybrid, **attention)) for hybrid in (
        {"softmax": 0.5, "unit": "heads"}, {"heads": {0: [0, 1], 1: [1]}}, {"heads": {0: [0], 1: [1], 2: [1]}})]  # fmt: skip
    caches = [t["attention_totals"]["cache_bytes"] for t in told]
    assert caches[0] == caches[1] == caches[2] and caches[0]["1024"][0] == 4 * 3 * 2 * 16 * 1024  # float32
    assert "3 of these 6 key/value heads in 3 layers keep softmax" in " ".join(told[0]["notes"])
    (row,) = told[2]["mixers"]  # which head it is makes no difference
    assert row["layers"] == 3 and row["mixer"].startswith("softmax in 1 key/value head of a layer; linear")
    assert [len(t["mixers"]) for t in told] == [1, 2, 1] and plan_table(told[1])


def test_heads_are_kept_in_journals():
    for hybrid in (HybridRecipe(softmax=0.5, unit="heads"), HybridRecipe(heads={"0": [1]})):
        assert HybridRecipe(**json.loads(hybrid.model_dump_json())) == hybrid


# -- conversions -----------------------------------------------------------------------------------
def calibrated(tmp_path, hybrid, attention=WINDOWED, family="llama"):
    if not (tmp_path / "inputs.safetensors").exists():
        save_file(tiny_inputs(family, 6, 32), tmp_path / "inputs.safetensors")
    attention = {**attention, "hybrid": hybrid}
    return make_recipe(structure="dense", attention=attention, calibration=tmp_path / "inputs.safetensors")


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2"])
@pytest.mark.parametrize("attention", [WINDOWED, {"mixer": "window", "window": 5}], ids=["linear", "window"])
def test_a_converted_model_decodes_as_it_reads(family, attention, tmp_path, sources):
    """Loads again, steps as in one pass, and its cache has what plan and inspect count."""
    changes = {
        "gpt2": {"n_layer": 3},
        "gemma2": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    }
    folder = sources(family, **changes.get(family, {}))
    groups = {"gpt2": 4, "phi3": 2}.get(family, 2)
    recipe = calibrated(tmp_path, {"heads": {0: [1], 1: list(range(groups))}}, attention, family)
    report = convert(str(folder), recipe, tmp_path / "out")
    assert [record["name"].split(".")[2] for record in report["mixers"]] == ["0", "2"]
    plan = plan_dict(make_plan(describe_checkpoint(open_checkpoint(str(folder))), recipe))
    told = inspect(str(tmp_path / "out"))
    assert told["attention_totals"] == plan["attention_totals"] and told["mixer_rows"] == plan["mixers"]
    model = tiny_config(family)[0].from_pretrained(tmp_path / "out").eval()
    ids = tiny_inputs(family, 2, 30, seed=3)["input_ids"]
    cache, parts = DynamicCache(config=model.config), []
    with torch.inference_mode():
        for piece in (ids[:, :20], *ids[:, 20:].split(1, dim=1)):
            parts.append(model(input_ids=piece, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), model_outputs(model, {"input_ids": ids}), rtol=1e-3, atol=1e-4)
    for row in plan["mixers"]:
        assert row["layers"] == 1
    layer = cache.layers[0]
    target = make_plan(describe_checkpoint(open_checkpoint(str(folder))), recipe).attention_targets
    target = next(iter(target.values()))
    if attention["mixer"] == "window":  # whose cost is exact at every length
        assert layer.nbytes() == 4 * 2 * MIXERS[target.config].cost(target.config, target.shape, 30).cache
    kept = layer.state.tensors["softmax.keys"]
    assert kept.shape == (2, 1, min(30, (target.shape.window or 31) - 1), target.shape.key)
    prompt = ids[:, :9]
    assert model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (2, 12)


def test_kept_heads_are_the_original_s_and_the_others_are_fitted(tmp_path, sources):
    """With the first layer converted alone, its softmax heads have the inputs of the original."""
    folder, reports = sources(), {}
    for name, hybrid in (("few", {"heads": {0: [1]}}), ("all", None)):
        recipe = calibrated(tmp_path, hybrid, {**WINDOWED, "layers": "0"})
        reports[name] = convert(str(folder), recipe, tmp_path / name)
    few, every = (reports[name]["held_out"]["converted"] for name in ("few", "all"))
    original = reports["few"]["held_out"]["original"]
    assert abs(few - original) < abs(every - original)
    errors = reports["few"]["mixers"][0]["errors"]
    assert {"copied", "least_squares", "local"} <= set(errors) and min(errors.values()) < 1


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_the_measured_choice_ranks_heads_of_all_layers_together(keep, tmp_path, sources):
    folder, hybrid = sources(), {"softmax": keep, "unit": "heads"}
    told = convert(str(folder), calibrated(tmp_path, hybrid), tmp_path / "out")["hybrid"]
    count = {0.5: 3, 0.9: 5}[keep]
    errors = {(layer, head): e for layer, own in told["head_errors"].items() for head, e in enumerate(own)}
    chosen = {(layer, head) for layer, own in told["measured"]["heads"].items() for head in own}
    assert len(errors) == 6 and len(chosen) == count
    assert min(errors[unit] for unit in chosen) >= max(errors[unit] for unit in set(errors) - chosen)
    assert told[told["kept"]]["converted"] == min(told[name]["converted"] for name in ("measured", "every"))
    assert sum(map(len, told["heads"].values())) == count
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    mixers = config["quantization_config"]["mixers"]
    for layer, own in told["heads"].items():
        spec = mixers.get(f"{layer}.self_attn")
        assert (spec is None) if len(own) == 2 else (spec.get("softmax_heads", []) == own)
    assert told["softmax"] == [layer for layer, own in told["heads"].items() if len(own) == 2]
    assert "key/value heads model.layers" in hybrid_lines(inspect(str(tmp_path / "out"))["hybrid"])[-1]


def test_a_head_s_error_is_that_of_a_model_with_it_alone(tmp_path, monkeypatch):
    """The last layer's output with one head replaced, against the original's, on the held-out rows."""
    copy_first_layers(tmp_path / "source", 2)
    text = (EMBEDDED / "calibration.txt").read_text(encoding="utf-8")[:4000]
    ids = torch.tensor(AutoTokenizer.from_pretrained(EMBEDDED)(text)["input_ids"][: 4 * 64]).view(4, 64)
    save_file({"input_ids": ids}, tmp_path / "inputs.safetensors")
    seen, measure = {}, HeadErrors._head_errors

    def measured(self, call, mixer):
        seen[call.path] = mixer
        return measure(self, call, mixer)

    monkeypatch.setattr(HeadErrors, "_head_errors", measured)
    hybrid = {"softmax": 0.25, "unit": "heads"}
    told = convert(str(tmp_path / "source"), calibrated(tmp_path, hybrid, SMALL), tmp_path / "out")["hybrid"]
    from transformers import AutoModelForCausalLM

    from surgery.calibration.attention_samples import attention_replaced
    from surgery.conversion.hybrid import partly_replaced

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    caught = []
    model.model.layers[1].register_forward_hook(
        lambda _, __, out: caught.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(ids[2:], use_cache=False)
        for head in range(4):
            mixer = partly_replaced(seen["model.layers.1"], [g for g in range(4) if g != head])
            with attention_replaced(model.model.layers[1].self_attn, mixer):
                model(ids[2:], use_cache=False)
    wanted, *found = (x.double().flatten(0, 1) for x in caught)
    for head, out in enumerate(found):
        error = ((out - wanted).square().sum(-1) / wanted.square().sum(-1)).mean().sqrt()
        assert told["head_errors"]["model.layers.1"][head] == pytest.approx(float(error), rel=1e-3)


def test_an_interrupted_choice_and_a_damaged_one_give_the_same_bytes(tmp_path, sources, monkeypatch):
    from surgery.core.files import partial_path
    from surgery.core.journal import JOURNAL_NAME, Journal, _encode_entry, _parse_entry

    folder, recipe = sources(), calibrated(tmp_path, {"softmax": 0.5, "unit": "heads"})
    convert(str(folder), recipe, tmp_path / "whole")
    add = Journal.add

    def stop(self, step, **what):
        add(self, step, **what)
        if step == "hybrid":
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(str(folder), recipe, tmp_path / "out")
    monkeypatch.setattr(Journal, "add", add)
    file = partial_path(tmp_path / "out") / JOURNAL_NAME
    entries = [_parse_entry(line) for line in file.read_bytes().splitlines(keepends=True)]
    next(entry for entry in entries if entry["step"] == "hybrid")["told"]["heads"]["model.layers.0"] = [9]
    file.write_bytes(b"".join(map(_encode_entry, entries)))
    convert(str(folder), recipe, tmp_path / "out", resume=True)
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "out")


def test_damaged_caches_of_softmax_heads_are_refused(tmp_path):
    model = random_model_with_mixers(
        "llama", mixer_config({"mixer": "head_hybrid", "softmax_heads": [1], "others": WINDOWED_MIXER})
    )
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tiny_inputs("llama", 2, 9)["input_ids"], past_key_values=cache)
    save_cache(cache, tmp_path / "cache")
    with safe_open(tmp_path / "cache", "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    for damaged in (
        tensors["0.softmax.values"][:, :, :5],
        tensors["0.softmax.values"].repeat(1, 2, 1, 1),
        tensors["0.softmax.values"][:1],
    ):
        save_file({**tensors, "0.softmax.values": damaged.contiguous()}, tmp_path / "damaged", metadata=metadata)
        with pytest.raises(SurgeryError, match=r"softmax.values must have the shape \(2, 1, 9, 8\)"):
            load_cache(tmp_path / "damaged", model)
