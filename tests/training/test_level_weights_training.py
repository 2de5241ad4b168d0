"""Training of the level weights of native linear layers: recipe lambda, gates as a kind of parameters, rows cut into
shorter texts, adapters beside them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.small_training import TINY_CHECKPOINT
from helpers.tiny_families import TINY_FAMILIES
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgery
from surgery.architectures.native import native_core
from surgery.cli.main import main
from surgery.core.errors import SurgeryError
from surgery.training.finetune import finetune
from surgery.training.optim import make_groups, select_parameters
from surgery.training.recipe import load_healing_recipe, parse_healing_recipe
from surgery.training.stages.lm import LMConfig, LMStage, cut_rows, draw_length, next_token_loss, text_lengths
from surgery.training.suitability import recipe_warnings

FAMILIES = ["mamba2", pytest.param("qwen3_next", marks=pytest.mark.slow)]
NATIVE = {"structure": "dense", "native": {"levels": 4, "block": 4}}
FEW = ["stages.*.tokens=512", "stages.*.length=32", "stages.*.shortest=8", "stages.*.batch=4", "stages.*.rows=4"]
FEW += ["data.validation=0.1", "data.validation_examples=4", "evaluate=0", "deliver=last", "log=1"]


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory):
    """A function from a family to a folder with a tiny random model with level weights, and a tokenizer."""

    def make(name: str) -> Path:
        model = TINY_FAMILIES[name].build()
        if not any(native_core(module) for module in model.modules()):
            pytest.skip("this version of transformers has no core functions by the names that level weights need")
        folder, tokenizer = tmp_path_factory.mktemp(name), AutoTokenizer.from_pretrained(TINY_CHECKPOINT)
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(folder / "source")
        tokenizer.save_pretrained(folder / "source")
        surgery.convert(folder / "source", NATIVE, folder / "upgraded", quiet=True)
        return folder / "upgraded"

    return make


def changed_tensors(before: Path, after: Path) -> set[str]:
    """Return the names of the tensors that differ."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert ours.keys() == theirs.keys()
    return {name for name in ours if not torch.equal(ours[name], theirs[name])}


# -- the recipe ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_the_recipe_trains_gates_and_then_level_weights(name, upgraded, words, tmp_path) -> None:
    """The command runs from end to end: lambda is 1 during the first stage, and only these parameters change."""
    source, out = upgraded(name), tmp_path / "out"
    options = [part for setting in FEW for part in ("--set", setting)]
    with pytest.raises(SystemExit, match="0"):
        main(
            ["finetune", str(source), "--recipe", "lambda", "--tiny", "--data", str(words), "--out", str(out), *options]
        )
    changed = changed_tensors(source, out)
    kinds = {name.rpartition("mixer.")[2] if ".mixer.level" in name else name.rpartition(".")[2] for name in changed}
    assert kinds == {"A_log", "dt_bias", "level.weight", "level.bias"}
    record = json.loads((out / "surgery_report.json").read_text())["training"][-1]
    assert [stage["steps"] for stage in record["stages"]] == [4, 4]
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    rates = []
    for stage in load_healing_recipe("lambda").stages:
        groups = make_groups(model, select_parameters(model, stage.trains, {}), stage)
        rates.append({group.kind: group.rate for group in groups})
    assert rates == [{"gates": 1e-3}, {"mixers": 1e-3, "gates": 1e-3}]
    assert torch.isfinite(model(torch.arange(3, 40)[None]).logits).all()


def test_level_weights_are_one_in_the_first_stage_and_move_with_their_own_rate(upgraded, words, tmp_path) -> None:
    """Adam's first step is the rate times the schedule's factor, for each kind with its own."""
    source, short = upgraded("mamba2"), [setting for setting in FEW if "tokens" not in setting]
    first = ["stages.0.tokens=512", "stages.1.tokens=128", "stages.1.schedule.warmup=0", "stages.1.rates.mixers=2e-3"]
    first += ["stages.1.schedule.name=constant", "stages.1.rates.gates=5e-4"]
    recipe = load_healing_recipe("lambda", [*short, *first, f"data.sources=[{{path: {words}}}]"], tiny=True)
    alone = recipe.model_copy(update={"stages": recipe.stages[:1]})
    tensors = []
    for name, run in (("gates", alone), ("both", recipe)):
        finetune(str(source), run, tmp_path / name, device="cpu", track="none")
        tensors.append(load_file(tmp_path / name / "model.safetensors"))
    before, gates, both = load_file(source / "model.safetensors"), *tensors
    changed = {name for name in before if not torch.equal(before[name], gates[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"A_log", "dt_bias"}
    for leaf, rate in (("level.weight", 2e-3), ("level.bias", 2e-3), ("A_log", 5e-4), ("dt_bias", 5e-4)):
        moves = [(both[name] - gates[name]).abs().max().item() for name in before if name.endswith(leaf)]
        assert moves and all(0.9 * rate < move < 1.1 * rate for move in moves), (leaf, moves)
    assert not any(gates[name].any() for name in before if name.endswith("level.weight"))  # lambda is 1


def test_packed_documents_are_trained_on(upgraded, texts, tmp_path) -> None:
    """Rows of several documents, cut into shorter texts or not."""
    packed = ["data.packing=documents", f"data.sources=[{{path: {texts}}}]"]
    recipe = load_healing_recipe("lambda", [*FEW, *packed], tiny=True)
    record = finetune(str(upgraded("mamba2")), recipe, tmp_path / "out", device="cpu", track="none")
    assert [stage["steps"] for stage in record["stages"]] == [4, 4]


def test_adapters_beside_level_weights(upgraded, words, tmp_path) -> None:
    """A stage of kind lora trains what is unfrozen, with rates of its own, and merges the adapters."""
    source, out = upgraded("mamba2"), tmp_path / "out"
    lora = ["stages.1.kind=lora", "stages.1.targets=[linear.qkv]", "stages.1.unfrozen=[mixers, gates]"]
    recipe = load_healing_recipe("lambda", [*FEW, *lora, f"data.sources=[{{path: {words}}}]"], tiny=True)
    finetune(str(source), recipe, out, device="cpu", track="none")
    leaves = {name.split("mixer.", 1)[1] for name in changed_tensors(source, out)}
    assert leaves == {"A_log", "dt_bias", "mixer.level.weight", "mixer.level.bias", "in_proj.weight"}


def test_targets_that_peft_refuses_are_named(upgraded, words) -> None:
    stage = {"kind": "lora", "targets": ["linear.output"], "rate": 1e-3, "tokens": 64, "length": 16}
    recipe = parse_healing_recipe({"data": {"sources": str(words)}, "stages": [{**stage, "batch": 4, "rows": 4}]})
    source = upgraded("mamba2")
    with pytest.raises(SurgeryError, match=r"stage lora: targets.*out_proj.*Leave them out"):
        finetune(str(source), recipe, source.parent / "out", device="cpu", track="none")


def test_an_unfrozen_word_is_checked(upgraded, words) -> None:
    stage = {"kind": "lora", "targets": ["linear"], "unfrozen": ["gaets"], "rate": 1e-3, "tokens": 64, "length": 16}
    recipe = parse_healing_recipe({"data": {"sources": str(words)}, "stages": [{**stage, "batch": 4, "rows": 4}]})
    source = upgraded("mamba2")
    with pytest.raises(SurgeryError, match=r"'gaets' selects no parameter.*did you mean 'gates'"):
        finetune(str(source), recipe, source.parent / "out", device="cpu", track="none")


# -- kinds of parameters ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_gates_are_a_kind_of_parameters(name) -> None:
    """They are A_log and dt_bias of the native layers, before and after an upgrade, without weight decay."""
    model = TINY_FAMILIES[name].build()
    paths = [path for path, module in model.named_modules() if native_core(module)]
    if not paths:
        pytest.skip("this version of transformers has no core functions by the names that level weights need")
    expected = {f"{path}.{leaf}" for path in paths for leaf in ("A_log", "dt_bias")}
    assert select_parameters(model, ["gates"], {}) == expected
    with pytest.raises(SurgeryError, match=r"no level weights.*--recipe upgrade-log-linear"):
        select_parameters(model, ["mixers"], {})
    surgery.apply(model, NATIVE)
    assert select_parameters(model, ["gates"], {}) == expected
    groups = surgery.parameter_groups(model, rate=1e-4, rates={"gates": 1e-3}, weight_decay=0.1)
    assert [(g["lr"], g["weight_decay"]) for g in groups if g["kind"] == "gates"] == [(1e-3, 0.0)]


def test_a_model_without_such_layers_is_named() -> None:
    with pytest.raises(
        SurgeryError, match=r"no Gated DeltaNet, Mamba-2 or Kimi delta attention layers.*upgrade-log-linear"
    ):
        select_parameters(TINY_FAMILIES["llama"].build(), ["gates"], {})


@pytest.mark.parametrize(("length", "reached"), [(16, 3), (17, 4), (8, 2), (4, 1)])
def test_rows_that_do_not_reach_all_levels_are_named(length, reached) -> None:
    """The levels of a row are counted as the mask counts them; the last ones would stay at 1."""
    assert max(max(0, (t ^ s).bit_length() - 2) for t in range(length) for s in range(t + 1)) + 1 == reached
    model = TINY_FAMILIES["mamba2"].build()
    if not any(native_core(module) for module in model.modules()):
        pytest.skip("this version of transformers has no core functions by the names that level weights need")
    surgery.apply(model, NATIVE)
    stage = {"kind": "lm", "tokens": 64, "rate": 1e-3, "trains": ["mixers"], "length": max(8, length)}
    stages = [s.model_copy(update={"length": length}) for s in parse_healing_recipe({"stages": [stage]}).stages]
    warnings = recipe_warnings("OUT", model, stages)
    assert bool(warnings) == (reached < 4)
    assert all(f"reach {reached} of the 4 level weights of OUT" in warning for warning in warnings)
    assert recipe_warnings("OUT", model, [stages[0].model_copy(update={"trains": ("gates",)})]) == []


# -- texts of mixed lengths ------------------------------------------------------------------------
def test_lengths_are_halves_and_each_is_drawn_once_in_turn() -> None:
    assert text_lengths(64, 8) == [64, 32, 16, 8] and text_lengths(64, None) == [64] and text_lengths(24, 24) == [24]
    draws = [draw_length([64, 32, 16, 8], step, 5) for step in range(40)]
    assert all(sorted(draws[i : i + 4]) == [8, 16, 32, 64] for i in range(0, 40, 4))
    assert len({tuple(draws[i : i + 4]) for i in range(0, 40, 4)}) > 1
    assert draws != [draw_length([64, 32, 16, 8], step, 6) for step in range(40)]


@pytest.mark.parametrize("keys", [{"shortest": 24}, {"shortest": 1024}, {"shortest": 7}])
@pytest.mark.parametrize("kind", ["lm", "lora"])
def test_other_lengths_are_refused(kind, keys) -> None:
    stage = {"kind": kind, "tokens": 64, "rate": 1e-3, "length": 512}
    with pytest.raises(SurgeryError, match="shortest"):
        parse_healing_recipe({"stages": [{**stage, **keys}]})


def test_cut_rows_are_texts_of_their_own() -> None:
    """Every text is read alone, its documents too; the loss is over the same positions as for whole rows."""
    ids_BT = torch.randint(3, 90, (2, 32), generator=torch.Generator().manual_seed(1))
    position_BT = torch.cat([torch.arange(11), torch.arange(21)]).expand(2, -1)
    cut = cut_rows({"input_ids": ids_BT, "position_ids": position_BT, "use_cache": False}, 8)
    assert torch.equal(cut["input_ids"], ids_BT.reshape(8, 8)) and cut["use_cache"] is False
    begins = [0, 8, 11, 16, 24]
    assert (cut["position_ids"].reshape(2, 32) == 0).nonzero()[:5, 1].tolist() == begins

    model = TINY_FAMILIES["llama"].build()
    batch = {"input_ids": ids_BT, "labels": ids_BT}
    logits_BTV = torch.cat([model(ids_BT[:, i : i + 8]).logits for i in range(0, 32, 8)], dim=1)
    expected = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="sum"
    )
    torch.testing.assert_close(next_token_loss(model, batch, 8), expected)


def test_a_stage_reads_another_length_in_each_step() -> None:
    config = LMConfig(kind="lm", tokens=64, rate=1e-3, length=32, shortest=8)
    stage, seen = LMStage(config), set()
    for step in range(3):
        stage.begin_step(step, 0)
        seen.add(stage.length)
    assert seen == {32, 16, 8}
    whole = LMStage(LMConfig(kind="lm", tokens=64, rate=1e-3, length=32))
    whole.begin_step(0, 0)
    assert whole.length is None
