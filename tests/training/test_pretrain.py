"""Training from scratch: initialization, the loop, and stacked runs that equal separate ones."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.small_training import TINY_CHECKPOINT, read_losses

from recipes.papers.mup.models import STRUCTURE_NAMES, SweepSizes, make_gpt2, make_stage, rate_factors
from recipes.papers.mup.run import make_data_config, stack_examples
from recipes.papers.mup.tables import find_best, markdown, parabola_vertex, table_rows
from recipes.papers.quality.mlr_linear import MLRLinear, MLRLinearConfig
from recipes.papers.training.stacked import StackedTraining
from surgery.core.errors import SurgeryError
from surgery.structures import STRUCTURES
from surgery.training.data.dataset import DataConfig, make_data
from surgery.training.pretrain.initialize import zero_output
from surgery.training.pretrain.model_config import load_config_keys
from surgery.training.pretrain.pretrain import _ensure_initial_checkpoint, pretrain, recipe_digest
from surgery.training.pretrain.recipe import load_pretrain_recipe, parse_pretrain_recipe, pretrain_folder
from surgery.training.pretrain.tokenizer import TokenizerConfig, make_tokenizer

pytestmark = pytest.mark.usefixtures("without_curves")
SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FEW = ["stages.*.tokens=256", "stages.*.length=32", "stages.*.batch=4", "stages.*.rows=4", "log=1", "evaluate=1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((TINY_CHECKPOINT / "calibration.txt").read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    return path


def small(text, **keys):
    data = {"sources": str(text), "packing": "stream", "validation": 0.05, "validation_examples": 4}
    stage = {"kind": "lm", "length": 32, "batch": 4, "rows": 4, "tokens": 4 * 32 * 6, "rate": 2.0**-6}
    optimiser = {"base_width": 32}
    told = {"model": {"model_type": "gpt2", **SHAPE, **STILL}, "tokenizer": {"kind": "characters"}, "data": data}
    told |= {
        "layers": {"structure": "btt", "rank": 2, "fused": "split"},
        "precision": "float32",
        "log": 1,
        "checkpoint": 2,
    }
    return parse_pretrain_recipe({**told, "stages": [{**stage, "optimiser": optimiser}], **keys})


# -- the command's run -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(path.stem for path in pretrain_folder().glob("*.yaml")))
def test_shipped_recipes_run_for_a_few_steps(name, text, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = [*FEW, f"data.sources=[{{path: {text}}}]", "data.validation_examples=2"]
    record = pretrain(load_pretrain_recipe(name, given, tiny=True), tmp_path / "out", device="cpu")
    assert [stage["steps"] for stage in record["stages"]] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(model.generate(**tokenizer("Story", return_tensors="pt"), max_new_tokens=3)[0])
    whole = load_pretrain_recipe(name)
    assert whole.training.stages[0].tokens >= 10**9 and whole.training.stages[0].optimiser.base_width


def test_a_mixture_of_experts_is_trained_and_written_back(text, tmp_path):
    from transformers import AutoModelForCausalLM

    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    recipe = small(text, model={**experts, **sizes, "tie_word_embeddings": False}, layers=None)
    record = pretrain(recipe, tmp_path / "out", device="cpu")
    stage = record["stages"][0]
    assert stage["last_loss"] < stage["first_loss"]
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    down = next(value for name, value in state.items() if name.endswith("experts.down_proj"))
    assert down.shape == (4, 32, 16) and bool((down != 0).any())  # outputs to the residual stream begin at zero


def test_joined_linears_are_trained_from_scratch(text, tmp_path):
    from surgery.publish.summary import inspect

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    layers = {"structure": "pivoted_low_rank", "keep": 0.5, "share": "input"}
    record = pretrain(
        small(text, model={"model_type": "llama", **sizes}, layers=layers), tmp_path / "out", device="cpu"
    )
    assert record["stages"][0]["last_loss"] < record["stages"][0]["first_loss"]
    report = inspect(str(tmp_path / "out"))
    assert report["checks"]["as_reported"] and report["checks"]["structured_linears"] == 7
    assert "model.layers.0.mlp.gate_proj+up_proj" in {module["name"] for module in report["modules"]}


def test_it_learns_and_is_inspected(text, tmp_path):
    from surgery.publish.summary import inspect

    record = pretrain(small(text), tmp_path / "out", device="cpu")
    assert record["validation"]["before"]["loss"] > record["validation"]["after"]["loss"]
    report = inspect(str(tmp_path / "out"))
    assert report["checks"]["as_reported"] and report["checks"]["structured_linears"] == 2 * 4
    assert report["totals"]["params_before"] > report["totals"]["params_after"]


def test_an_interrupted_run_goes_on(text, tmp_path, monkeypatch):
    from surgery.training.loop import TrainingLoop

    pretrain(small(text), tmp_path / "whole", device="cpu")
    step = TrainingLoop._step

    def dying(self, taken):
        if self.at.step == 3:
            raise KeyboardInterrupt
        step(self, taken)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingLoop, "_step", dying)
        pretrain(small(text), tmp_path / "out", device="cpu")
    with pytest.raises(SurgeryError, match="--resume"):
        pretrain(small(text), tmp_path / "out", device="cpu")
    pretrain(small(text), tmp_path / "out", device="cpu", resume=True)
    assert read_losses(tmp_path / "out" / "training") == read_losses(tmp_path / "whole" / "training")
    assert not (tmp_path / "out.blank").exists()


def test_outside_d4_files_planted_beside_the_initial_checkpoint(text, tmp_path):
    blank, recipe = tmp_path / "out.blank", small(text)
    _ensure_initial_checkpoint(recipe, blank)
    _ensure_initial_checkpoint(recipe, blank)  # used again
    (blank / "chat_template.jinja").write_text("x")
    with pytest.raises(SurgeryError, match=r"chat_template.jinja was not written by this command"):
        pretrain(recipe, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mixer", [{"mixer": "linear", "mask": "decay"}, {"mixer": "none"}], ids=str)
def test_mixers_and_other_families(mixer, text, tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {"model_type": "llama", **shape, "num_key_value_heads": 1, "max_position_embeddings": 32}
    layers = {"structure": "low_rank", "rank": 4, "attention": mixer}
    bpe = {"kind": "bpe", "vocab_size": 300}
    record = pretrain(small(text, model=model, layers=layers, tokenizer=bpe), tmp_path / "out", device="cpu")
    assert record["validation"]["before"]["loss"] > record["validation"]["after"]["loss"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert len(config["quantization_config"]["mixers"]) == 2 and config["vocab_size"] <= 300


def test_the_command_takes_a_shape_and_a_tokenizer(text, tmp_path, capsys):
    """Of the embedded checkpoint; what the command line says wins over the recipe's tiny block."""
    from surgery.cli.main import main

    given = [option for key in (*FEW, "data.validation_examples=2") for option in ("--set", key)]
    shape = ["--model", str(TINY_CHECKPOINT), "--tokenizer", str(TINY_CHECKPOINT), "--set", "model.num_hidden_layers=1"]
    place = ["--data", str(text), "--out", str(tmp_path / "out"), "--device", "cpu"]
    with pytest.raises(SystemExit) as left:
        main(["pretrain", "--recipe", "gpt2-btt", "--tiny", *shape, *given, *place])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert "untrained" in said and "trained checkpoint" in said
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", TINY_CHECKPOINT))
    assert ours["hidden_size"] == theirs["hidden_size"] and ours["num_hidden_layers"] == 1
    assert not ours["tie_word_embeddings"] and ours["vocab_size"] == theirs["vocab_size"]


# -- refusals --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "keys, said",
    [
        ({"model": {"n_embd": 32}}, "model must have a model_type"),
        ({"model": {"model_type": "gtp2"}}, "did you mean 'gpt2'"),
        ({"model": {"model_type": "bert"}}, "not a causal language model"),
        ({"model": {"model_type": "gpt2", "n_emb": 32}}, "no key 'n_emb'; did you mean 'n_embd'"),
        ({"model": {"model_type": "gpt2", **SHAPE, "tie_word_embeddings": True}}, "tie_word_embeddings: false"),
        ({"model": {"model_type": "gpt2", **SHAPE, "vocab_size": 7}}, "vocab_size must be at least"),
        ({"layers": {"structure": "auto"}}, "Name a structure"),
        ({"layers": {"structure": "btt", "speed": {"decode": 2, "device": "X"}}}, "Give keep and round_ranks"),
        (
            {"layers": {"structure": "btt", "attention": {"mixer": "linear", "hybrid": {"softmax": 0.5}}}},
            "choose_by: every",
        ),
        ({"tokenizer": {"path": "/nowhere"}}, "cannot be loaded by transformers"),
        ({"stages": [{"kind": "distill", "tokens": 1, "rate": 1}]}, "Use stages of kind .*lm"),
        ({"embeding_std": 1}, "unknown key 'embeding_std'"),
        ({"data": {}}, "no data to train on"),
    ],
)
def test_refusals(keys, said, text, tmp_path):
    with pytest.raises(SurgeryError, match=said):
        pretrain(small(text, **keys), tmp_path / "out", device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_config_as_example(tmp_path):
    keys = load_config_keys(str(TINY_CHECKPOINT))
    assert keys["model_type"] == "llama" and "vocab_size" not in keys and keys["hidden_size"] > 0
    with pytest.raises(SurgeryError, match="must be a config"):
        load_config_keys("./nowhere")


# -- how models begin ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    [
        "btt",
        "low_rank",
        "monarch",
        "kronecker",
        "pivoted_low_rank",
        "mlr",
        "mlbtc",
        "tensor_train",
        "block_tensor_train",
    ],
)
def test_silent_linears_answer_zero_and_learn(name):
    config_type = STRUCTURES.config_type(name)
    config = STRUCTURES[config_type].fit(config_type(), 48, 64, 0.5 * 48 * 64)
    linear = STRUCTURES[config](64, 48, config)
    zero_output(linear)
    y = linear(torch.randn(3, 64))
    y.square().sum().add(y.sum()).backward()
    assert not y.any()
    assert any(p.grad.any() for n, p in linear.named_parameters() if n != "bias")


@pytest.mark.parametrize("name", STRUCTURE_NAMES)
def test_models_begin_as_mup_says(name):
    """Activations of one size at every width, logits zero, rates falling with the fans."""
    sizes, seen = SweepSizes(head=16, length=16), {}
    for width in (64, 256):
        model = make_gpt2(name, width, 50, sizes, seed=0)
        kept = []
        model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda m, i, y, kept=kept: kept.append(y.std()))
        logits = model(torch.arange(16)[None]).logits
        assert not logits.any()
        seen[width] = kept[0].item()
        factors = rate_factors(model, make_stage(sizes, "mup"))
        assert factors["lm_head.weight"] == 64 / width and factors["transformer.wte.weight"] == 1
        naive = rate_factors(model, make_stage(sizes, "dense"))
        assert naive["transformer.h.0.mlp.c_proj." + core_of(model)] == pytest.approx(64 / (4 * width))
    assert 0.5 < seen[256] / seen[64] < 2


def core_of(model):
    return next(name for name, _ in model.transformer.h[0].mlp.c_proj.named_parameters() if name != "bias")


def test_multi_level_low_rank_is_its_definition():
    linear = MLRLinear(16, 8, MLRLinearConfig(ranks=(3, 2)))
    x = torch.randn(5, 16)
    first = linear.right[0] @ linear.weight[0]
    blocks = torch.block_diag(*(linear.right1[k] @ linear.weight1[k] for k in range(2)))
    assert torch.allclose(linear(x), x @ (first + blocks), atol=1e-5)
    fans = {name: (mup.fan_in, mup.fan_out) for name, mup in linear.mup().items()}
    assert fans == {"weight": (5, 8), "right": (16, 3), "weight1": (5, 4), "right1": (8, 2)}


# -- tokenizers ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_tokenizers_say_what_they_read(kind, text, tmp_path):
    data = DataConfig.model_validate({"sources": str(text), "validation": 0.05})
    tokenizer = make_tokenizer(TokenizerConfig(kind=kind, vocab_size=400), data)
    again = make_tokenizer(TokenizerConfig(kind=kind, vocab_size=400), data)
    assert tokenizer.get_vocab() == again.get_vocab() and len(tokenizer) <= 400
    some = text.read_text(encoding="utf-8")[:500]
    tokenizer.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded(some)["input_ids"]
    assert loaded.decode(ids) == some and ids == tokenizer(some)["input_ids"]
    assert loaded.eos_token_id == 0 and (kind == "bpe" or len(ids) == len(some))


def test_vocabulary_is_still_accepted_for_vocab_size(text, tmp_path):
    """It was the key until 0.1. Of a recipe's key and an override by the other name, the override counts."""
    old, new = (small(text, tokenizer={"kind": "bpe", key: 400}) for key in ("vocabulary", "vocab_size"))
    assert old == new and recipe_digest(old) == recipe_digest(new)
    assert load_pretrain_recipe("gpt2", ["tokenizer.vocabulary=400"]).new.tokenizer.vocab_size == 400
    path = tmp_path / "old.yaml"
    path.write_text((pretrain_folder() / "gpt2.yaml").read_text().replace("vocab_size: 32768", "vocabulary: 500"))
    assert load_pretrain_recipe(str(path)).new.tokenizer.vocab_size == 500
    assert load_pretrain_recipe(str(path), ["tokenizer.vocab_size=400"]).new.tokenizer.vocab_size == 400


# -- many runs at once -----------------------------------------------------------------------------------
def test_a_stacked_run_is_the_run_of_the_loop(text, tmp_path):
    """Three rates at once; the second is that of the recipe."""
    recipe = small(text, data=make_data_config(str(text)).model_dump(mode="json"))
    pretrain(recipe, tmp_path / "out", device="cpu")
    alone = [loss for _, _, loss in read_losses(tmp_path / "out" / "training")]
    models, stage, batches = initial_models(recipe, tmp_path / "blank")
    factors = rate_factors(models[0], stage)
    rates = [{name: rate * scale for name, rate in factors.items()} for scale in (0.5, 1.0, 2.0)]
    stack = StackedTraining(models, rates, stage.optimiser, stage.clip, torch.device("cpu"))
    found = []
    for step in range(6):
        batch = {name: t[step].expand(3, -1, -1) for name, t in batches.items()}
        found.append(stack.step(batch, stage.schedule.factor(step, stage.steps)))
    assert torch.stack(found)[:, 1].tolist() == pytest.approx(alone, abs=2e-5)
    assert abs(found[-1][0] - alone[-1]) > 1e-3


def initial_models(recipe, blank):
    """(three times the model as it begins, the stage, the batches of the loop)"""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from surgery.training.pretrain.pretrain import write_initial_checkpoint
    from surgery.training.recipe import stage_data_config as data_config

    write_initial_checkpoint(recipe, blank)
    stage = recipe.training.stages[0]
    data = make_data(data_config(recipe.training, stage), AutoTokenizer.from_pretrained(blank), stage.length, 0)
    models = [AutoModelForCausalLM.from_pretrained(blank, attn_implementation="eager") for _ in range(3)]
    return models, stage, stack_examples(data, stage.steps, stage.batch, torch.device("cpu"))


def test_a_run_that_diverges_leaves_the_others():
    sizes, ids = SweepSizes(layers=1, head=16, length=16), torch.randint(0, 50, (4, 4, 16))
    stage, model = make_stage(sizes, "mup"), make_gpt2("btt", 32, 50, sizes, seed=0)
    factors = rate_factors(model, stage)

    def train_stack(*scales):
        rates = [{name: rate * scale for name, rate in factors.items()} for scale in scales]
        stack = StackedTraining([model] * len(scales), rates, stage.optimiser, None, torch.device("cpu"))
        batches = ({"input_ids": i.expand(len(scales), -1, -1)} for i in ids)
        return [stack.step({**batch, "labels": batch["input_ids"]}, 1.0) for batch in batches]

    together, alone = train_stack(1e30, 1e-2), train_stack(1e-2)
    assert not together[-1][0].isfinite()
    assert torch.allclose(torch.stack(together)[:, 1], torch.stack(alone)[:, 0], atol=1e-5)


# -- the figure ------------------------------------------------------------------------------------------
def test_the_best_rate_lies_at_the_vertex():
    rates = [-8.0, -7.5, -7.0, -6.5, -6.0]
    assert parabola_vertex(rates, [(r + 7.1) ** 2 for r in rates]) == pytest.approx(-7.1)
    assert parabola_vertex(rates, [0.0, 1.0, 2.0, 3.0, 4.0]) == -8.0
    bend = {r: {0: (r + 7.1) ** 2, 1: (r + 6.9) ** 2} for r in rates}
    found = find_best(bend)
    assert found.log2_rate == pytest.approx(-7.0) and found.error == pytest.approx(0.1) and not found.edge


def test_the_table_says_how_far_the_best_moves():
    def bowl(centre):
        return {r / 2: dict.fromkeys(range(2), (r / 2 - centre) ** 2 + 1) for r in range(-20, -9)}

    found = {("btt", "mup", 64): bowl(-7.0), ("btt", "mup", 512): bowl(-7.0)}
    found |= {("btt", "dense", 64): bowl(-7.0), ("btt", "dense", 512): bowl(-5.5)}
    aware, naive = table_rows(found)
    assert aware["moved"] == pytest.approx(0) and aware["lost"] == pytest.approx(0)
    assert naive["moved"] == pytest.approx(1.5) and naive["lost"] == pytest.approx(2.25)
    assert "+1.50 ± 0.00" in markdown([aware, naive])
