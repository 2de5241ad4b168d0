"""`convert` with mixers, every shipped recipe and family: checkpoints load, run, generate and agree with their
report.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from helpers.slow import slow_where
from helpers.small import (
    FAMILIES,
    GENERATIVE_FAMILIES,
    ROOT,
    SMALL_LEVELS,
    choose_layers_quickly,
    make_recipe,
    model_outputs,
    tiny_config,
    tiny_inputs,
)
from safetensors.torch import save_file

from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify, densify_live
from surgery.core.errors import SurgeryError
from surgery.core.journal import Journal
from surgery.mixers.features.base import FEATURES
from surgery.mixers.masks.base import MASKS
from surgery.planning.plan import make_plan
from surgery.planning.recipe import load_recipe, shipped_recipes
from surgery.publish.summary import inspect

CALIBRATION = {"tokens": 64, "length": 32}
ATTENTION = [name for name in shipped_recipes() if load_recipe(name).attention is not None]
MIXABLE = [family for family in FAMILIES if not family.startswith("t5")]
NEAR = ["attention.window=6", "attention.sinks=2"]
SMALL = {  # what shipped recipes say in hundreds of tokens, for texts of 48
    "gated-deltanet": NEAR,
    "hybrid-25": NEAR,
    "log-linear": NEAR,
    "tbm": ["attention.mask.block=8", *NEAR],
    "mhla": ["attention.mask.block=8"],
    "mhla-elu": ["attention.mask.block=8"],
    "tbm-elu": ["attention.mask.block=8"],
    "mlr-nested": SMALL_LEVELS,
    "lolcats": NEAR,
    "sliding-window": ["attention.window=12", "attention.sinks=2"],
    "alternating-window": ["attention.window=12"],
    "window-equal-state": ["attention.window=12"],
    "mhla-frozen": ["attention.mask.block=8"],
    "ssd-equal-state": ["attention.features.features=8"],
}


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    choose_layers_quickly(monkeypatch)


def source(folder, family):
    torch.manual_seed(0)
    cls, config = tiny_config(family)
    model = cls(config).eval()
    model.save_pretrained(folder / "source")
    save_file(tiny_inputs(family, 4, 48), folder / "inputs.safetensors")
    return model


def convert_model(folder, family, recipe):
    """(original model, converted model, report)"""
    original = source(folder, family)
    report = convert(str(folder / "source"), recipe, folder / "out")
    return original, type(original).from_pretrained(folder / "out").eval(), report


def calibrated_recipe(folder, name, *more):
    keys = [f"{k}={v}" for k, v in CALIBRATION.items()]
    few = ["attention.steps=2", f"calibration={json.dumps(str(folder / 'inputs.safetensors'))}"]
    return load_recipe(name, [*keys, *few, *SMALL.get(name, []), *more])


@pytest.mark.parametrize("name", ATTENTION)
def test_every_shipped_recipe(name, tmp_path):
    original, model, report = convert_model(tmp_path, "llama", calibrated_recipe(tmp_path, name))
    assert report["mixers"] and report["held_out"]["converted"] < report["held_out"]["original"] * 1.5
    for record in report["mixers"]:
        stages = list(record["errors"].values())
        assert min(stages) <= stages[0]
    prompt = tiny_inputs("llama", 2, 12, seed=4)["input_ids"]
    out = model.generate(prompt, max_new_tokens=12, do_sample=False, min_new_tokens=12)
    logits = model_outputs(model, {"input_ids": out})[:, 11:-1].clone()
    logits[..., model.config.eos_token_id] = -torch.inf  # which min_new_tokens forbids
    chosen = logits.gather(-1, out[:, 12:, None])[..., 0]
    assert (chosen >= logits.amax(-1) - 1e-4).all()
    model.save_pretrained(tmp_path / "again")
    again = type(original).from_pretrained(tmp_path / "again").eval()
    assert torch.equal(model_outputs(again, {"input_ids": out}), model_outputs(model, {"input_ids": out}))
    told = inspect(str(tmp_path / "out"))
    assert sum(len(row["paths"]) for row in told["mixer_rows"]) == len(report["mixers"])


WINDOWED = (
    "gated-deltanet",
    "hybrid-25",
    "log-linear",
    "lolcats",
    "tbm",
)  # linear attention beside a window, which is causal
REFUSED = {(family, name) for family in ("bert", "vit") for name in WINDOWED}


LINEAR = [name for name in ATTENTION if load_recipe(name).attention.mixer == "linear"]


def pairs():
    """Llama has had every recipe.

    BERT, which sees both ways, has them too; of linear attention, where a family only says what goes in, the others
    have some in turns: every recipe in two of them or more.
    """
    yield from (("bert", name) for name in ATTENTION)
    for n, family in enumerate(("qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "vit")):
        in_turn = [LINEAR[(4 * n + k) % len(LINEAR)] for k in range(4)]
        yield from (
            (family, name) for name in ATTENTION if name not in LINEAR or name in in_turn or (family, name) in REFUSED
        )
    for family in MIXABLE:
        if family not in ("llama", "bert", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "vit"):
            yield from ((family, name) for name in ("ssd", "mlr-cache-60"))


def is_like_another(family, name):
    """Return whether the family's attention takes in its mixers as that of another which has this recipe does."""
    return (family in ("gpt_neox", "phi3") and name in LINEAR) or (
        family not in ("bert", "gemma2", "gpt2", "gpt_neox", "phi3", "qwen3", "vit") and name == "mlr-cache-60"
    )


@pytest.mark.parametrize("family, name", slow_where(is_like_another, pairs()))
def test_every_family(family, name, tmp_path):
    if (family, name) in REFUSED:
        source(tmp_path, family)
        with pytest.raises(SurgeryError, match="bidirectional"):
            convert(str(tmp_path / "source"), calibrated_recipe(tmp_path, name), tmp_path / "out")
        return
    original, model, report = convert_model(tmp_path, family, calibrated_recipe(tmp_path, name))
    inputs = tiny_inputs(family, 2, 20, seed=3)
    before, after = model_outputs(original, inputs), model_outputs(model, inputs)
    exact = name.startswith("bilinear")
    if (family, name) == ("gemma2", "alternating-window"):
        # The layer that it replaces sees 8 tokens, fewer than the window of 12.
        exact = True
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert after.isfinite().all() and (exact or not torch.equal(before, after))
    for record in report["mixers"]:
        stages = list(record["errors"].values())
        assert min(stages) <= stages[0] and min(stages) < 1.1
    model.save_pretrained(tmp_path / "again")
    again = type(original).from_pretrained(tmp_path / "again").eval()
    assert torch.equal(model_outputs(again, inputs), after)
    if family in GENERATIVE_FAMILIES:
        prompt = inputs["input_ids"][:, :9]
        out = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        logits = model_outputs(model, {"input_ids": out})[:, 8:-1].clone()
        logits[..., model.config.eos_token_id] = -torch.inf  # which min_new_tokens forbids
        chosen = logits.gather(-1, out[:, 9:, None])[..., 0]
        assert (chosen >= logits.amax(-1) - 1e-3).all()


OPTIONS = [
    *({"mask": name, "scores": scores} for name in MASKS.names() for scores in ("kernel", "delta")),
    *({"mask": "ones", "features": name, "normalise": True} for name in FEATURES.names() if name != "identity"),
    {"convolution": 3, "output_gate": "value", "norm": "rms", "rope": "drop"},
    {"window": 5, "sinks": 1, "scores": "delta"},
    {"mask": "ones", "scores": "delta", "negative_eigenvalues": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(str(v) for v in options.values()))
def test_every_mask_and_feature_map(options, tmp_path):
    source(tmp_path, "llama")
    attention = {"mixer": "linear", "steps": 1, "layers": "1", **options}
    recipe = make_recipe(
        structure="dense", attention=attention, calibration=tmp_path / "inputs.safetensors", **CALIBRATION
    )
    _, model, report = convert_model(tmp_path, "llama", recipe)
    errors = list(report["mixers"][0]["errors"].values())
    assert min(errors) <= errors[0] and errors[0] == errors[0]
    prompt = tiny_inputs("llama", 2, 9, seed=4)["input_ids"]
    assert model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (2, 12)


def test_linears_and_attention_in_one_recipe(tmp_path):
    """Each linear of a layer is fitted to what the mixer before it gives; undoing leaves the mixer in place."""
    source(tmp_path, "llama")
    recipe = make_recipe(
        structure="low_rank",
        keep=0.9,
        attention={"mixer": "linear", "mask": "decay", "steps": 2},
        calibration=tmp_path / "inputs.safetensors",
        **CALIBRATION,
    )
    original, model, report = convert_model(tmp_path, "llama", recipe)
    assert report["totals"]["kept"] < 0.91 and len(report["mixers"]) == 2
    inputs = tiny_inputs("llama", 2, 20, seed=3)
    densify(str(tmp_path / "out"), tmp_path / "dense")
    dense = type(original).from_pretrained(tmp_path / "dense").eval()
    assert torch.allclose(model_outputs(dense, inputs), model_outputs(model, inputs), atol=1e-4)
    assert dense.model.layers[0].mlp.up_proj.weight.dim() == 2
    assert type(dense.model.layers[0].self_attn.mixer).__name__ == "LinearMixer"


def test_mixers_alone_are_not_multiplied_out(tmp_path):
    """Of a folder and of a model in memory; nothing is written or changed."""
    source(tmp_path, "llama")
    recipe = make_recipe(structure="dense", attention={"mixer": "linear", "mask": "decay", "steps": 0})
    _, model, _ = convert_model(tmp_path, "llama", recipe)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for undo in (lambda: densify(str(tmp_path / "out"), tmp_path / "dense"), lambda: densify_live(model)):
        with pytest.raises(
            SurgeryError, match="no structured linears to multiply out: only the attention of 2 layers was replaced"
        ):
            undo()
    assert not (tmp_path / "dense").exists()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_hybrids_keep_softmax_where_said(tmp_path):
    source(tmp_path, "llama")
    by_hand = make_recipe(structure="dense", attention={"mixer": "linear", "hybrid": {"layers": [1]}, "steps": 0})
    _, model, report = convert_model(tmp_path, "llama", by_hand)
    assert [record["name"] for record in report["mixers"]] == ["model.layers.0.self_attn"]
    assert not hasattr(model.model.layers[1].self_attn, "mixer")


def test_resumed_and_whole_are_the_same_bytes(tmp_path, monkeypatch):
    source(tmp_path, "llama")
    recipe = calibrated_recipe(tmp_path, "log-linear-mamba2")
    convert(str(tmp_path / "source"), recipe, tmp_path / "whole")
    import surgery.conversion.sequential as layerwise

    seats, real = [], layerwise.SequentialConverter._init_mixer

    def once(self, call, *rest):
        seats.append(call.path)
        if len(seats) == 2:
            raise KeyboardInterrupt
        return real(self, call, *rest)

    monkeypatch.setattr(layerwise.SequentialConverter, "_init_mixer", once)
    with pytest.raises(KeyboardInterrupt):
        convert(str(tmp_path / "source"), recipe, tmp_path / "out")
    convert(str(tmp_path / "source"), recipe, tmp_path / "out", resume=True)
    assert len(seats) == 3  # the first layer was not done again
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "attention, said",
    [
        ({"mixer": "liner"}, "linear"),
        ({"mixer": "linear", "maks": "decay"}, "mask"),
        ({"mixer": "linear", "mask": "decay", "cache": 0.5}, "cache"),
        ({"mixer": "linear", "hybrid": {"softmax": 0.5, "layers": [0]}}, "give softmax"),
        ({"mixer": "linear", "layers": "9"}, "selects none"),
        ({"mixer": "linear", "hybrid": {"softmax": 0.5}}, "--calibration"),
        ({"mixer": "mlr", "ranks": [64]}, "8"),
    ],
)
def test_refusals(attention, said, tmp_path):
    source(tmp_path, "llama")
    with pytest.raises(SurgeryError, match=said):
        convert(str(tmp_path / "source"), make_recipe(structure="dense", attention=attention), tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_t5_is_refused_with_the_reason(tmp_path):
    source(tmp_path, "t5")
    with pytest.raises(SurgeryError, match="position bias"):
        convert(str(tmp_path / "source"), load_recipe("ssd"), tmp_path / "out")


# -- the table of docs/attention.md -----------------------------------------------------------------
BEGIN, END = "<!-- support -->", "<!-- /support -->"
PAGE = ROOT / "docs" / "attention.md"


def support(name, folder):
    """How a recipe's mixer fares in every family: yes, or the reason it is refused, planned from config alone."""
    cells = []
    for family in TABLE_FAMILIES:
        opened = open_checkpoint(str(folder / family), False, weights=False)
        try:
            make_plan(MetaModel(opened), load_recipe(name, SMALL.get(name, [])))
            cells.append("yes")
        except SurgeryError as error:
            cells.append("no: " + reason(str(error)))
    return cells


def reason(message):
    return next(short for part, short in REASONS.items() if part in message)


REASONS = {
    "position bias": "position bias",
    "need causal attention": "windows are causal",
    "depends on the order of tokens": "the delta rule has an order",
}
TABLE_FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "gpt2", "gpt_neox", "bert", "vit", "t5",
)  # fmt: skip


def test_the_table_of_what_goes_where_is_true(tmp_path):
    """SURGERY_WRITE_DOCS=1 writes it anew."""
    for family in TABLE_FAMILIES:
        cls, config = tiny_config(family)
        cls(config).save_pretrained(tmp_path / family)
    rows: dict[tuple[str, ...], list[str]] = {}  # answers in the order of TABLE_FAMILIES -> recipes that have them
    for name in ATTENTION:
        rows.setdefault(tuple(support(name, tmp_path)), []).append(f"`{name}`")
    columns: dict[tuple[str, ...], list[str]] = {}  # answers in the order of the rows -> families that have them
    for family, answers in zip(TABLE_FAMILIES, zip(*rows, strict=True), strict=True):
        columns.setdefault(answers, []).append(family)
    cells = [["recipe", *map(", ".join, columns.values())], ["---"] * (len(columns) + 1)]
    most = max(rows.values(), key=len)
    shown_names = [", ".join(names) if names is not most else "all others" for names in rows.values()]
    by_recipe = [[names, *answers] for names, *answers in zip(shown_names, *columns, strict=True)]
    cells += sorted(by_recipe, key=lambda row: row[0] == "all others")
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    table = "\n".join(lines)
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    shown, tail = rest.split(END)
    if os.environ.get("SURGERY_WRITE_DOCS"):
        PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")
    else:
        assert shown.strip() == table


def test_without_calibration_the_report_says_what_is_not_fitted(tmp_path):
    """An attention recipe projects no weights, so its warning speaks of mixers; a window has nothing to fit."""
    source(tmp_path, "llama")
    for name, words in (
        ("ssd", ["mixers are not fitted"]),
        ("sliding-window", []),
        ("low-rank-half", ["weights are projected"]),
    ):
        report = convert(str(tmp_path / "source"), load_recipe(name, SMALL.get(name, [])), tmp_path / name)
        warnings = [note for note in report["notes"] if "no calibration text" in note]
        assert len(warnings) == len(words) and all(word in note for word, note in zip(words, warnings))


@pytest.mark.parametrize("near, length, warns", [("sliding", 8, True), ("sliding", 32, False), ("chunks", 18, True)])
def test_windows_of_text_that_show_nothing_of_a_mixer_are_a_warning(tmp_path, near, length, warns):
    """2 sinks and 8 tokens, or two blocks of 8: shorter windows have no token that the linear attention reads."""
    source(tmp_path, "llama")
    save_file(tiny_inputs("llama", 4, length), tmp_path / "inputs.safetensors")
    recipe = calibrated_recipe(tmp_path, "log-linear", f"attention.near_tokens={near}", "attention.window=8")
    notes = [note for note in convert(str(tmp_path / "source"), recipe, tmp_path / "out")["notes"] if "farther" in note]
    assert len(notes) == warns and all(f"have {length} tokens" in note for note in notes)


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
@pytest.mark.parametrize(
    "keys", [{"structure": "dense", "attention": {"mixer": "linear"}}, {"structure": "low_rank", "fused": "split"}]
)
def test_a_stray_number_of_key_value_heads_is_ignored_as_transformers_does(tmp_path, family, keys):
    """These families have a key/value head for every query head, whatever their config says beside it."""
    from safetensors.torch import load_file

    source(tmp_path, family)
    recipe = make_recipe(**keys)
    convert(str(tmp_path / "source"), recipe, tmp_path / "out")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    convert(str(tmp_path / "source"), recipe, tmp_path / "stray")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("stray", "out"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    kind, _ = tiny_config(family)
    model = kind.from_pretrained(tmp_path / "stray").eval()
    assert model_outputs(model, tiny_inputs(family, 2)).isfinite().all()


def test_a_resumed_conversion_in_bfloat16_has_the_same_random_features(tmp_path, monkeypatch):
    """Random features are buffers, which files hold in bfloat16: layers above are fitted to their rounded values."""
    torch.manual_seed(0)
    cls, config = tiny_config("llama")
    cls(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    save_file(tiny_inputs("llama", 8), tmp_path / "inputs.safetensors")
    attention = {"mixer": "linear", "features": "rfa", "mask": "ones", "steps": 1}
    recipe = make_recipe(structure="low_rank", attention=attention, calibration=tmp_path / "inputs.safetensors")
    whole = convert(str(tmp_path / "source"), recipe, tmp_path / "whole")
    add = Journal.add

    def crash(self, step, **what):
        add(self, step, **what)
        if step == "piece":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Journal, "add", crash)
        convert(str(tmp_path / "source"), recipe, tmp_path / "resumed")
    resumed = convert(str(tmp_path / "source"), recipe, tmp_path / "resumed", resume=True)
    assert resumed["files"] == whole["files"]
    assert resumed["held_out"] == whole["held_out"]
