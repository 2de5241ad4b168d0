"""Old words of recipes are accepted wherever recipes are: each is translated once, with a line that names the new
word.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from helpers.small import make_recipe
from transformers import AutoModelForCausalLM

import surgery
from surgery.checkpoint.table import read_mixers, renew_table
from surgery.cli.main import main
from surgery.conversion import convert as convert_module
from surgery.conversion.convert import convert
from surgery.conversion.preflight import _journal_recipe as journal_recipe
from surgery.conversion.preflight import renew_fingerprint
from surgery.core.errors import RenamedWarning, SurgeryError
from surgery.core.files import partial_path, read_json, write_json
from surgery.core.journal import JOURNAL_NAME, Journal, _encode_entry, _parse_entry
from surgery.mixers import MIXERS, mixer_config
from surgery.mixers.base import to_plain
from surgery.mixers.renamed import RENAMED_OPTIONS, renew_mixer
from surgery.mixers.sliding_window import Window
from surgery.modeling.quantization_config import SurgeryConfig
from surgery.planning.recipe import ConversionRecipe, load_recipe, parse_recipe
from surgery.planning.renamed import changed_choice, renew_attention, renew_recipe, renew_report
from surgery.publish.summary import inspect

WINDOW = {"mixer": "window", "window": 16}
HYBRID = {"keep": 0.25, "by": "every", "of": "heads"}
LINEAR = {"mixer": "linear", "mask": "gates", "window": 8}
# Old words, the same in today's, and what a line about each says.
RECIPES = [
    ({"refine": "auto"}, {"tune": {"model": 20}}, ["refine: auto is now tune: {model: 20}"]),
    ({"refine": False}, {"tune": None}, ["refine is now tune"]),
    ({"refine": None}, {"tune": None}, ["refine is now tune"]),
    ({"refine": {"model": 3}}, {"tune": {"layers": 20, "model": 3}}, ["tune: write {layers: 20, model: 3}"]),
    ({"refine": {"layers": 1, "model": 0, "norms": True}}, {"tune": {"layers": 1, "norms": True}}, ["refine is now tune"]),
    *(({"allocate": old}, {"allocate": "measured"}, [f"allocate: {old} is now allocate: measured"]) for old in ("auto", "best", "spread")),
    ({"allocate": "depth"}, {"allocate": "measured"}, ["between early and late layers is gone"]),
    (
        {"attention": {**WINDOW, "hybrid": HYBRID}},
        {"attention": {**WINDOW, "hybrid": {"softmax": 0.25, "choose_by": "every", "unit": "heads"}}},
        ["attention.hybrid.softmax", "attention.hybrid.choose_by", "attention.hybrid.unit"],
    ),
    *(
        (
            {"attention": {**WINDOW, "hybrid": {"keep": 0.5, "by": old}}},
            {"attention": {**WINDOW, "hybrid": {"softmax": 0.5, "choose_by": "measured"}}},
            ["attention.hybrid.softmax", f"by: {old} is now choose_by: measured"],
        )
        for old in ("sensitivity", "restored", "gates")
    ),
    (
        {"attention": {**WINDOW, "hybrid": {"keep": 0.5, "align_steps": 5, "gate_steps": 5, "weights": "even", "repeated": 0}}},
        {"attention": {**WINDOW, "hybrid": {"softmax": 0.5}}},
        ["attention.hybrid.softmax", "align_steps is gone", "gate_steps is gone", "weights is gone", "repeated is gone"],
    ),
    (
        {"attention": {**LINEAR, "gate": "value", "near": "chunks", "rules": [{"layers": "0", "gate": "head"}]}},
        {"attention": {**LINEAR, "output_gate": "value", "near_tokens": "chunks", "rules": [{"layers": "0", "output_gate": "head"}]}},
        ["attention.gate is now attention.output_gate", "attention.near_tokens", "attention.rules.0.output_gate"],
    ),
]  # fmt: skip
NEW = {**RECIPES[9][1], "allocate": "measured", "tune": {"model": 2}}


def noted(work) -> tuple[object, list[str]]:
    """The result of `work()`, and the lines of its warnings of old words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RenamedWarning)
        found = work()
    return found, [str(w.message) for w in caught if issubclass(w.category, RenamedWarning)]


@pytest.mark.parametrize("old, new, says", RECIPES)
def test_every_form_of_a_recipe(old, new, says, tmp_path):
    """A file, a dict, the class itself, and overrides of a recipe that has none of the keys."""
    wanted = ConversionRecipe(**new)
    (tmp_path / "mine.yaml").write_text(json.dumps(old))  # which is YAML
    (tmp_path / "empty.yaml").write_text("{}")
    overrides = [f"{key}={json.dumps(value)}" for key, value in old.items()]
    for work in (
        lambda: load_recipe(str(tmp_path / "mine.yaml")),
        lambda: load_recipe(str(tmp_path / "mine.yaml"), ["seed=0"]),
        lambda: make_recipe(**old),
        lambda: ConversionRecipe(**old),
        lambda: load_recipe(str(tmp_path / "empty.yaml"), overrides),
    ):
        found, lines = noted(work)
        assert found == wanted
        assert len(lines) == len(says) and all(word in line for word, line in zip(says, lines)), lines


def test_todays_words_say_nothing():
    assert noted(lambda: make_recipe(**NEW))[1] == [] and renew_recipe(NEW) == (NEW, [])
    assert renew_recipe(renew_recipe({"refine": "auto", "allocate": "depth"})[0])[1] == []


@pytest.mark.parametrize(
    "overrides, path, value",
    [
        (["refine.model=3"], "tune.model", 3),
        (["refine.layers=2"], "tune.layers", 2),
        (["tune=false", "tune.model=3"], "tune.model", 3),
        (["attention.hybrid.keep=0.5"], "attention.hybrid.softmax", 0.5),
        (["attention.hybrid.by=every"], "attention.hybrid.choose_by", "every"),
        (["attention.hybrid.by=gates"], "attention.hybrid.choose_by", "measured"),
        (["attention.hybrid.of=heads"], "attention.hybrid.unit", "heads"),
        (["attention.hybrid.weights=even"], "attention.hybrid.softmax", 0.25),
        (["attention.gate=head"], "attention.output_gate", "head"),
        (["attention.near=chunks"], "attention.near_tokens", "chunks"),
        (["attention.hybrid={layers: [1]}", "attention.hybrid.layers=[0, 1]"], "attention.hybrid.layers", (0, 1)),
    ],
)
def test_overrides_of_single_keys(overrides, path, value):
    """The override names a key of a shipped recipe, whatever name either of them uses."""
    recipe, lines = noted(lambda: load_recipe("hybrid-25", overrides))
    for key in path.split("."):
        recipe = getattr(recipe, key)
    assert recipe == value and bool(lines) == any(f".{w}" in f".{o}" for o in overrides for w in ("refine", "hybrid.keep", "hybrid.by", "hybrid.of", "hybrid.weights", "attention.gate", "attention.near="))  # fmt: skip


def test_both_names_of_a_key_are_refused():
    for both in (
        "tune: {model: 1}\nrefine: auto",
        "attention: {mixer: window, hybrid: {softmax: 0.5, keep: 0.5}}",
        "attention: {mixer: linear, gate: value, output_gate: head}",
    ):
        with pytest.raises(SurgeryError, match=r"is the old name of .*, and both are given\. Leave out"):
            parse_recipe(both, "mine.yaml")


def test_an_option_of_a_rule_by_an_override(tmp_path):
    """The mixer of the rule decides which names are old; other mixers may have options of these names."""
    rules = [{"layers": "0", "window": 4}, {"layers": "1", "mixer": "window", "window": 4}]
    (tmp_path / "mine.yaml").write_text(json.dumps({"attention": {**LINEAR, "rules": rules}}))
    recipe, lines = noted(lambda: load_recipe(str(tmp_path / "mine.yaml"), ["attention.rules.0.gate=head"]))
    assert recipe.attention.rules[0].output_gate == "head"
    assert lines == ["recipe: attention.rules.0.gate is now attention.rules.0.output_gate"]
    with pytest.raises(SurgeryError, match="mixer 'window' has no option 'gate'"):
        load_recipe(str(tmp_path / "mine.yaml"), ["attention.rules.1.gate=head"])
    assert renew_attention({"mixer": "of a plugin", "gate": 1}) == ({"mixer": "of a plugin", "gate": 1}, [])


@pytest.mark.parametrize("mixer, names", RENAMED_OPTIONS.items())
def test_options_of_mixers(mixer, names):
    """Python calls warn, stored configs are read silently, and what is written has today's names."""
    config_type = MIXERS.config_type(mixer)
    options = {"others": Window(4)} if mixer == "head_hybrid" else {}
    values = {"output_gate": "value", "near_tokens": "chunks", "softmax_heads": (0,)}
    old = {name: to_plain(values[new]) for name, new in names.items()}
    config = config_type(**options, **{new: values[new] for new in names.values()})
    made, lines = noted(lambda: config_type(**options, **{name: values[new] for name, new in names.items()}))
    assert made == config and lines == [f"{config_type.__name__}: {name} is now {new}" for name, new in names.items()]
    stored = {**config.to_dict(), **old}
    for new in names.values():
        del stored[new]
    read, lines = noted(lambda: mixer_config(stored))
    assert read == config and lines == [] and renew_mixer(stored) == config.to_dict()
    with pytest.raises(SurgeryError, match="is the old name of"):
        mixer_config({**config.to_dict(), **old})


def test_the_command_line_prints_each_line_once(checkpoints, capsys):
    words = ["plan", str(checkpoints("llama")), "-r", "low-rank-half", "--json"]
    with pytest.raises(SystemExit):
        main([*words, "--set", "refine=false", "--set", "allocate=best", "--set", "refine=false"])
    found = capsys.readouterr()
    assert json.loads(found.out)["recipe"]["tune"] is None
    notes = [line for line in found.err.splitlines() if line.startswith("note: recipe: ")]
    assert notes == ["note: recipe: refine is now tune", "note: recipe: allocate: best is now allocate: measured"]
    with pytest.raises(SystemExit):
        main([*words, "--set", "tune=false"])
    assert "note: recipe" not in capsys.readouterr().err


def test_keywords_and_overrides_of_the_functions(checkpoints):
    for given in ({"refine": {"layers": 0, "model": 2}}, {"overrides": {"refine.model": 2}}):
        told, lines = noted(lambda given=given: surgery.plan(checkpoints("llama"), "low-rank-half", **given))
        assert told["recipe"]["tune"] == {"layers": 0, "model": 2, "norms": False} and lines


# -- stored configs ----------------------------------------------------------------------------------
def test_a_checkpoint_with_the_old_names_of_options(checkpoints, tmp_path):
    out = tmp_path / "out"
    attention = {**LINEAR, "output_gate": "value", "near_tokens": "chunks", "start": "copied"}
    attention["hybrid"] = {"heads": {0: [0]}}
    convert(str(checkpoints("llama")), make_recipe(structure="dense", attention=attention), out)
    config = read_json(out / "config.json")
    written = config["quantization_config"]["mixers"]
    ids = torch.arange(3, 25)[None]

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return AutoModelForCausalLM.from_pretrained(out)(ids).logits

    today = logits()
    older = {path: with_old_names(entry) for path, entry in written.items()}
    names = {name for name in ("gate", "near", "kept") if f'"{name}"' in json.dumps(older)}
    assert names == {"gate", "near", "kept"}
    write_json(
        out / "config.json", {**config, "quantization_config": {**config["quantization_config"], "mixers": older}}
    )
    found, lines = noted(logits)
    assert torch.equal(found, today) and lines == []
    config = read_json(out / "config.json")
    assert read_mixers(config, str(out)) == written == renew_table(config, str(out))["quantization_config"]["mixers"]
    assert SurgeryConfig(mixers=older).to_dict()["mixers"] == written


def with_old_names(entry: dict) -> dict:
    """A stored mixer as an older version wrote it."""
    old = {new: name for name, new in RENAMED_OPTIONS[entry["mixer"]].items()}
    return {old.get(k, k): with_old_names(v) if k == "others" else v for k, v in entry.items()}


# -- stored reports ----------------------------------------------------------------------------------
SCORE = {"unit": "nats per token", "original": 1.0, "converted": 2.0, "difference_se": None, "tokens": 10}
ALONE = {"model.layers.0": SCORE, "model.layers.1": SCORE}


def test_a_report_of_an_older_version_is_read_silently(checkpoints, tmp_path):
    out = tmp_path / "out"
    convert(str(checkpoints("llama")), make_recipe(structure="low_rank", keep=0.5, attention=None), out)
    report = read_json(out / "surgery_report.json")
    refine = {"layers": 1, "model": 0, "by_layer": {}, "whole": None}
    old = {**{key: value for key, value in report.items() if key != "tune"}, "refine": refine}
    old["recipe"] = {**report["recipe"], "refine": "auto", "allocate": "depth"}
    del old["recipe"]["tune"]
    old["allocation"] = {
        "kept": "depth",
        "why": "trials",
        "tilt": 0.5,
        "tilts": {"+0": SCORE},
        "uniform": SCORE,
        "spread": SCORE,
    }
    old["hybrid"] = {
        "kept": "sensitivity",
        "softmax": ["model.layers.0"],
        "alone": ALONE,
        "sensitivity": SCORE,
        "every": SCORE,
    }
    write_json(out / "surgery_report.json", old)
    found, lines = noted(lambda: inspect(str(out)))
    assert lines == [] and "refine" not in found and found["tune"] == refine
    assert found["recipe"]["tune"] == {"model": 20} and found["recipe"]["allocate"] == "measured"
    assert found["allocation"] == {"kept": "measured", "why": "trials", "uniform": SCORE, "measured": SCORE}
    assert found["hybrid"] == {"kept": "measured", "softmax": ["model.layers.0"], "measured": SCORE, "every": SCORE}
    assert renew_report(renew_report(old)) == renew_report(old)


# -- journals ----------------------------------------------------------------------------------------
class Crash(BaseException):
    """Stands for the process being killed at one exact point."""


BASE = {"structure": "low_rank", "keep": 0.5, "sweeps": 1, "holdout": 0.25}


def begun_before(source: Path, out: Path, old: dict, new: dict, monkeypatch) -> None:
    """Begin a conversion with `new`, stop it behind the first layer, and let its journal name `old`, as an older
    version did.
    """
    add = Journal.add

    def crash(self, step, **what):
        add(self, step, **what)
        if step in ("piece", "fitted"):
            raise Crash

    monkeypatch.setattr(Journal, "add", crash)
    with pytest.raises(Crash):
        convert(str(source), make_recipe(**new), out, device="cpu")
    monkeypatch.setattr(Journal, "add", add)
    file = partial_path(out) / JOURNAL_NAME
    start, *entries = (_parse_entry(line) for line in file.read_bytes().splitlines(keepends=True))
    written = json.loads(start["recipe"])
    for key in ("tune", "allocate"):
        written.pop(key, None)
    file.write_bytes(b"".join(map(_encode_entry, [{**start, "recipe": json.dumps({**written, **old})}, *entries])))


@pytest.mark.parametrize(
    "old, new",
    [
        ({"allocate": "uniform"}, {"allocate": "uniform"}),
        ({"allocate": "uniform", "refine": {"layers": 1, "model": 1}}, {"allocate": "uniform", "tune": {"layers": 1, "model": 1}}),
    ],
)  # fmt: skip
def test_a_conversion_whose_recipe_means_the_same_goes_on(old, new, checkpoints, calibration, tmp_path, monkeypatch):
    source, keys = checkpoints("llama"), {**BASE, **new, "calibration": calibration("llama")}
    convert(str(source), make_recipe(**keys), tmp_path / "whole", device="cpu")
    begun_before(source, tmp_path / "out", old, keys, monkeypatch)
    done, read = [], convert_module.Conversion._load_finished
    monkeypatch.setattr(
        convert_module.Conversion,
        "_load_finished",
        lambda self, path: done.append(found := read(self, path)) or found,
    )
    convert(str(source), make_recipe(**keys), tmp_path / "out", device="cpu", resume=True)
    assert done[0] is not None, "the finished layer is not done again"
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "old, said",
    [
        ({"allocate": "auto"}, "allocate: auto"),
        ({"allocate": "best"}, "allocate: best"),
        ({"allocate": "uniform", "refine": "auto"}, "refine: auto"),
    ],
)
def test_a_conversion_that_chose_in_another_way_is_not_resumed(
    old, said, checkpoints, calibration, tmp_path, monkeypatch
):
    source, keys = checkpoints("llama"), {**BASE, "allocate": "uniform", "calibration": calibration("llama")}
    begun_before(source, tmp_path / "out", old, keys, monkeypatch)
    before = {path: path.read_bytes() for path in partial_path(tmp_path / "out").rglob("*") if path.is_file()}
    for resumed in (keys, {**keys, "allocate": "measured", "tune": {"model": 20}}):
        with pytest.raises(
            SurgeryError, match=rf"was begun by an older version with {said}, which chose in another way"
        ):
            convert(str(source), make_recipe(**resumed), tmp_path / "out", device="cpu", resume=True)
    assert all(path.read_bytes() == content for path, content in before.items()), "the older version can finish it"


@pytest.mark.parametrize(
    "hybrid, changed",
    [
        ({"keep": 0.5, "by": "sensitivity", "layers": None}, True),
        ({"keep": 0.5}, True),
        ({"keep": 0.5, "by": "gates", "gate_steps": 200, "repeated": 0.5}, True),
        ({"keep": 0.5, "by": "gates", "of": "heads"}, True),
        ({"keep": 0.5, "by": "restored", "align_steps": 100, "weights": "far", "repeated": 0.5}, False),
        ({"keep": 0.5, "by": "restored", "align_steps": 5, "weights": "far", "repeated": 0.5}, True),
        ({"keep": 0.5, "by": "restored", "weights": "even"}, True),
        ({"keep": 0.5, "by": "sensitivity", "of": "heads"}, False),
        ({"keep": 0.5, "by": "every"}, False),
        ({"keep": None, "by": "sensitivity", "layers": [0]}, False),
    ],
)
def test_choices_of_softmax_that_are_made_in_another_way(hybrid, changed):
    found = changed_choice({"allocate": "uniform", "attention": {**WINDOW, "hybrid": hybrid}})
    assert (found is not None) == changed and (found is None or found.startswith("attention.hybrid by: "))


def test_the_conversion_of_an_older_version_in_the_repository_has_old_words():
    """tests/checkpoint/test_written_before.py resumes it."""
    folder = Path(__file__).resolve().parents[1] / "data/written_before"
    start = _parse_entry((folder / "resumed.partial" / JOURNAL_NAME).read_bytes().splitlines(keepends=True)[0])
    assert "by" in json.loads(start["recipe"])["attention"]["hybrid"]


def test_a_journal_whose_recipe_has_old_options(tmp_path):
    written = {**LINEAR, "output_gate": "value", "rules": [{"layers": "0", "near_tokens": "chunks"}]}
    recipe = json.loads(journal_recipe(make_recipe(attention=written)))
    attention = recipe["attention"]
    attention["gate"] = attention.pop("output_gate")
    attention["rules"][0]["near"] = attention["rules"][0].pop("near_tokens")
    renewed, lines = noted(lambda: renew_fingerprint(tmp_path, {"recipe": json.dumps(recipe)}))
    assert renewed["recipe"] == journal_recipe(make_recipe(attention=written)) and lines == []


# -- healing -----------------------------------------------------------------------------------------
STAGES = [
    {"kind": "align", "tokens": 64, "rate": 1e-3, "modules": ["mlp"]},
    {"kind": "lora", "tokens": 64, "rate": 1e-3, "loss": "distill", "adapter": "keep"},
]
OLD_STAGES = [
    {"kind": "align", "tokens": 64, "rate": 1e-3, "of": ["mlp"]},
    {"kind": "lora", "tokens": 64, "rate": 1e-3, "towards": "distill", "ends": "keep"},
]
STAGE_LINES = ["stage: of is now modules", "stage: towards is now loss", "stage: ends is now adapter"]


def test_healing_recipes_and_their_stages(tmp_path):
    from surgery.training.finetune import _journal_recipe
    from surgery.training.finetune import renew_fingerprint as renew_run
    from surgery.training.recipe import load_healing_recipe
    from surgery.training.stages.align import AlignConfig
    from surgery.training.stages.lora import LoraStageConfig

    mine = tmp_path / "mine.yaml"
    mine.write_text(json.dumps({"stages": STAGES, "checkpoints": 3}))
    recipe, lines = noted(lambda: load_healing_recipe(str(mine)))
    assert lines == []
    overrides = ["stages.0.of=[mlp]", "stages.*.towards=distill", "stages.1.ends=keep", "keep=3"]
    mine.write_text(json.dumps({"stages": [STAGES[0], {**STAGES[1], "loss": "lm", "adapter": "merge"}]}))
    found, lines = noted(
        lambda: load_healing_recipe(str(mine), [*overrides[:1], *overrides[2:], "stages.1.towards=distill"])
    )
    assert found == recipe and len(lines) == 4 and lines[0] == "recipe: stage: of is now modules"
    mine.write_text(json.dumps({"stages": OLD_STAGES, "keep": 3, "tiny": {"stages.0.of": ["mlp"]}}))
    found, lines = noted(lambda: load_healing_recipe(str(mine), tiny=True))
    assert found == recipe and {f"recipe: {line}" for line in (*STAGE_LINES, "keep is now checkpoints")} == set(lines)
    common = [{key: value for key, value in stage.items() if key != "of"} for stage in OLD_STAGES]
    mine.write_text(json.dumps({"stages": common, "common": {"of": ["attention"]}, "keep": 3}))
    assert noted(lambda: load_healing_recipe(str(mine), ["common.of=[mlp]"]))[0] == recipe
    for old, config_type, stage in zip(OLD_STAGES, (AlignConfig, LoraStageConfig), recipe.stages):
        made, lines = noted(lambda old=old, config_type=config_type: config_type(**old))
        assert made == stage and set(lines) <= {f"recipe: {line}" for line in STAGE_LINES} and lines
    mine.write_text(json.dumps({"stages": STAGES, "keep": 3, "checkpoints": 3}))
    with pytest.raises(SurgeryError, match="keep is the old name of checkpoints, and both are given"):
        load_healing_recipe(str(mine))
    stored = _journal_recipe(recipe)
    older = stored.replace('"modules"', '"of"').replace('"loss"', '"towards"').replace('"adapter"', '"ends"')
    assert older != stored and noted(lambda: renew_run({"recipe": older})) == ({"recipe": stored}, [])


def test_overrides_of_shipped_healing_recipes():
    from surgery.training.recipe import load_healing_recipe

    for override in ("keep=3", "checkpoints=3"):
        recipe, lines = noted(lambda override=override: load_healing_recipe("linears", [override]))
        assert recipe.checkpoints == 3 and lines == (["recipe: keep is now checkpoints"] if "keep" in override else [])
