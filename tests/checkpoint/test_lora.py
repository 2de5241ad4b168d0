"""PEFT LoRA on structured and split linears: an adapter starts at zero, is all that trains, and can be saved and
loaded.
"""

from __future__ import annotations

import peft
import pytest
import torch
from helpers.small import model_outputs, run_python, tiny_inputs
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM

import surgery
from surgery.conversion.densify import densify
from surgery.modeling.lora import StructuredLora
from surgery.modeling.modules import SplitLinear
from surgery.structures import StructuredLinear

# All linears of a layer; in gpt2 c_attn is split by role.
TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "mlp.c_proj", "attn.c_proj"],
}
FAMILIES = list(TARGETS)


def base_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def config_of(family: str, **options) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": TARGETS[family], **options}
    )


def train(model, steps: int = 8):
    """A few steps; (loss before, loss after)."""
    ids = tiny_inputs("llama", 8, 16)["input_ids"]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps + 1):
        loss = model.train()(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return losses[0], losses[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_adapter_changes_nothing_and_trains_alone(family, converted):
    inputs, base = tiny_inputs(family, 2), base_of(converted(family))
    expected, before = model_outputs(base, inputs), {k: v.clone() for k, v in base.state_dict().items()}
    model = get_peft_model(base, config_of(family)).eval()
    adapted = [m for m in model.modules() if isinstance(m, StructuredLora)]
    assert len(adapted) == 2 * len(TARGETS[family])
    assert all(isinstance(m.get_base_layer(), (StructuredLinear, SplitLinear)) for m in adapted)
    assert torch.equal(model_outputs(model, inputs), expected)
    first, last = train(model)
    assert last < first
    assert not torch.equal(model_outputs(model, inputs), expected)
    after = {k.replace(".base_layer", ""): v for k, v in model.get_base_model().state_dict().items()}
    assert all(torch.equal(after[k], v) for k, v in before.items())
    with model.disable_adapter():
        assert torch.equal(model_outputs(model, inputs), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_again(family, converted, tmp_path):
    inputs = tiny_inputs(family, 2)
    model = get_peft_model(base_of(converted(family)), config_of(family))
    train(model, 2)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base_of(converted(family)), tmp_path).eval()
    assert torch.equal(model_outputs(again, inputs), model_outputs(model, inputs))


def test_an_adapter_loads_whichever_library_is_imported_first(converted, tmp_path):
    """`import surgery` is light, and enough: for the checkpoint, and for its adapter."""
    model = get_peft_model(base_of(converted("llama")), config_of("llama"))
    train(model, 1)
    model.save_pretrained(tmp_path / "adapter")
    code = f"""
import surgery, sys
assert not {{"torch", "transformers", "pydantic", "peft"}} & set(sys.modules)
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(converted("llama"))!r})
print(*[name for name in ("recipe", "planning", "conversion") if f"surgery.{{name}}" in sys.modules])
from peft import AutoPeftModelForCausalLM
from helpers.small import model_outputs, tiny_inputs
import torch
model = AutoPeftModelForCausalLM.from_pretrained({str(tmp_path / "adapter")!r}).eval()
torch.save(model_outputs(model, tiny_inputs("llama", 2)), {str(tmp_path / "logits.pt")!r})
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
    expected = model_outputs(model, tiny_inputs("llama", 2))
    assert torch.allclose(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-4, atol=1e-4)


def test_transformers_own_adapters(converted):
    """model.add_adapter is PEFT too."""
    model, inputs = base_of(converted("llama")), tiny_inputs("llama", 2)
    expected = model_outputs(model, inputs)
    model.add_adapter(config_of("llama"))
    assert torch.equal(model_outputs(model.eval(), inputs), expected)
    first, last = train(model)
    assert last < first


def test_a_part_of_a_split_linear(converted):
    model = get_peft_model(base_of(converted("gpt2")), config_of("gpt2", target_modules=["c_attn.parts.value"]))
    first, last = train(model)
    assert last < first


def test_merging_is_refused_and_unloading_gives_the_base_back(converted, tmp_path):
    """B + AB is not that structure any more; the message says what to do, and that works."""
    inputs, base = tiny_inputs("llama", 2), base_of(converted("llama"))
    expected = model_outputs(base, inputs)
    model = get_peft_model(base, config_of("llama"))
    train(model, 2)
    adapted = model_outputs(model, inputs)
    model.save_pretrained(tmp_path / "adapter")
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=r"cannot be merged into a .*Linear.*surgery densify"):
            merge()
    assert torch.equal(model_outputs(model, inputs), adapted)
    assert torch.equal(model_outputs(model.unload(), inputs), expected)
    densify(str(converted("llama")), tmp_path / "dense")
    merged = PeftModel.from_pretrained(base_of(tmp_path / "dense"), tmp_path / "adapter").merge_and_unload().eval()
    assert torch.allclose(model_outputs(merged, inputs), adapted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"use_dora": True}, "use_dora needs the dense weight"),
        ({"init_lora_weights": "pissa"}, "factors the dense weight"),
    ],
)
def test_what_reads_the_dense_weight_is_refused(options, says, converted):
    with pytest.raises(ValueError, match=says):
        get_peft_model(base_of(converted("llama")), config_of("llama", **options))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_options_that_read_the_output_projection_of_a_mixer_as_a_matrix_are_refused(options, checkpoints):
    """Its weight is (1, out, in): DoRA would take norms over the outputs, and the initial factors have wrong shapes."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    surgery.apply(model, {"structure": "dense", "attention": {"mixer": "linear", "mask": "gates"}})
    with pytest.raises(ValueError, match=r"dense weight, which the output projection of a mixer stores as \(1, out"):
        get_peft_model(model, LoraConfig(target_modules=["o_proj"], **options))
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], **options))


def test_registering_twice_wraps_once():
    from surgery.modeling.lora import register_lora

    before = peft.tuners.lora.model.dispatch_default
    register_lora()
    assert peft.tuners.lora.model.dispatch_default is before


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_is_every_linear_of_the_layers(family, converted):
    """Structured, split and dense ones; as often as in the original model. Adding a second adapter finds the same."""
    model = get_peft_model(base_of(converted(family)), config_of(family, target_modules="all-linear"))
    adapted = {name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    assert len(adapted) == 2 * (7 if family == "llama" else 4)
    assert not any("head" in name or ".parts." in name for name in adapted)
    model.add_adapter("second", config_of(family, target_modules="all-linear"))
    assert {name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)} == adapted
    first, last = train(model, 3)
    assert last < first


def test_all_linear_leaves_mixers_alone(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    recipe = {"structure": "low_rank", "attention": {"mixer": "linear", "mask": "gates"}}
    surgery.apply(model, {**recipe, "rules": [{"match": "head", "structure": "low_rank"}]})
    model = get_peft_model(model, config_of("llama", target_modules="all-linear"))
    adapted = {name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    assert len(adapted) == 14 and not any("mixer" in name or "lm_head" in name for name in adapted)


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules="all-linear", feedforward_modules=[]),
        peft.OFTConfig(target_modules="all-linear"),
        peft.BOFTConfig(target_modules="all-linear"),
        peft.AdaLoraConfig(target_modules="all-linear", total_step=10),
        peft.LoHaConfig(target_modules="all-linear"),
        peft.LoKrConfig(target_modules="all-linear"),
        peft.HRAConfig(target_modules="all-linear"),
        peft.FourierFTConfig(target_modules="all-linear"),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_adapters_name_what_they_refuse(config, converted):
    """None adapts some linears and leaves the structured ones out without a word."""
    with pytest.raises((ValueError, TypeError), match=r"Linear.*(?:not supported|only)"):
        get_peft_model(base_of(converted("llama")), config)


@pytest.mark.parametrize(
    "config", [peft.VeraConfig(target_modules="all-linear"), peft.RandLoraConfig(target_modules="all-linear")]
)
def test_adapters_that_look_for_shapes_first_find_none(config, converted):
    with pytest.raises(ValueError, match="No layers types compatible"):
        get_peft_model(base_of(converted("llama")), config)
