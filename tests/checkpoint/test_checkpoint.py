"""A converted checkpoint loads, saves, trains, compiles and generates like any other."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
import transformers
from helpers.slow import slow_where
from helpers.small import Logits, make_recipe, matrix_structures, model_outputs, relative, run_python, tiny_inputs
from helpers.small_mixers import (
    MIXER_SPECS,
    DecayedConfig,
    random_model,
    random_model_with_mixers,
    register_test_mixers,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surgery  # noqa: F401
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.core.errors import SurgeryError
from surgery.mixers import mixer_config
from surgery.mixers.common.softmax import QUERIES_PER_PASS
from surgery.modeling.modules import SplitLinear
from surgery.structures import StructuredLinear


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options}).eval()


def structured_linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, StructuredLinear)}


def same_tensors(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def tensors_of(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


# -- loading ---------------------------------------------------------------------------------------
AUTO = [
    ("llama", "AutoModelForCausalLM"),
    ("llama-tied", "AutoModel"),
    ("gpt2", "AutoModelForCausalLM"),
    ("gpt2", "AutoModel"),
    ("bert", "AutoModelForMaskedLM"),
    ("bert", "AutoModel"),
    ("vit", "AutoModelForImageClassification"),
    ("vit", "AutoModel"),
    ("t5", "AutoModelForSeq2SeqLM"),
    ("t5", "AutoModel"),
]


@pytest.fixture(scope="module")
def densified(converted, tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("densified") / family
            densify(str(converted(family)), made[family])
        return made[family]

    return make


@pytest.mark.parametrize("family, auto", AUTO)
def test_every_auto_class_loads_it(family, auto, converted, densified):
    """The function is that of the ordinary checkpoint with the same products written out."""
    cls = getattr(transformers, auto)
    model, plain = (cls.from_pretrained(f, dtype=torch.float32).eval() for f in (converted(family), densified(family)))
    assert type(model) is type(plain)
    assert len({m.config.name for m in structured_linears(model).values()}) == len(matrix_structures())
    inputs = tiny_inputs(family, 2)
    found, expected = model_outputs(model, inputs), model_outputs(plain, inputs)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


FRESH = """
import sys
# As where surgery is not installed: without the finder of surgery_startup.py, which an install adds.
sys.meta_path = [finder for finder in sys.meta_path if "surgery_startup" not in str(finder)]
sys.modules.pop("surgery_startup", None)
import transformers
from helpers.small import tiny_inputs, model_outputs
import torch
inputs = tiny_inputs("llama", 2)
for folder in {refused!r}:
    try:
        transformers.AutoModel.from_pretrained(folder)
    except RuntimeError as error:
        assert "mismatch" in str(error), error
    else:
        raise SystemExit(f"plain transformers loaded {{folder}}, with weights that are not the checkpoint's")
assert not [name for name in sys.modules if name.startswith("surgery")]
config = transformers.AutoConfig.from_pretrained({folder!r}, trust_remote_code=True)
assert type(config) is transformers.LlamaConfig
model = transformers.AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True)
assert type(model) is transformers.LlamaForCausalLM
torch.save(model_outputs(model.eval(), inputs), {saved!r})
model.save_pretrained({again!r})
print(*[name for name in sys.modules if name.startswith("surgery.")])
"""
CONVERTING = {f"surgery.{name}" for name in ("recipe", "planning", "conversion", "calibrate", "skeleton", "cli")}


def test_a_fresh_interpreter(converted, tmp_path):
    """Without us it fails loudly, and so does softmax attention on weights that belong to a mixer; with
    trust_remote_code it loads, and nothing of converting is imported."""
    folder, saved, again = (str(p) for p in (converted("llama"), tmp_path / "logits.pt", tmp_path / "again"))
    refused = [folder, *(str(tmp_path / family) for family in ("llama", "gpt2", "bert", "vit"))]
    with register_test_mixers():
        for mixed in refused[1:]:
            random_model_with_mixers(mixed.rpartition("/")[2], DecayedConfig(), [0]).save_pretrained(mixed)
    done = run_python(FRESH.format(refused=refused, folder=folder, saved=saved, again=again))
    assert done.returncode == 0, done.stderr
    expected = model_outputs(load(folder), tiny_inputs("llama", 2))
    assert torch.allclose(torch.load(saved), expected, rtol=1e-4, atol=1e-4)  # it may have another number of threads
    assert same_tensors(load(again), load(folder))
    loaded = set(done.stdout.split())
    assert "surgery.modeling.modules" in loaded
    assert not loaded & CONVERTING


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(family, device_map, converted):
    mapped = load(converted(family), device_map=device_map)
    plain = load(converted(family)).to(mapped.device)  # a GPU, where there is one
    assert same_tensors(mapped, plain)
    inputs = {name: value.to(mapped.device) for name, value in tiny_inputs(family, 2).items()}
    assert torch.equal(model_outputs(mapped, inputs), model_outputs(plain, inputs))


def test_meta_device_and_disk_offload(converted, tmp_path):
    meta = load(converted("llama"), device_map="meta")
    assert structured_linears(meta) and all(p.is_meta for p in meta.parameters())
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    offloaded = load(converted("llama"), device_map=places, offload_folder=str(tmp_path))
    assert next(offloaded.model.layers[1].parameters()).is_meta
    inputs = tiny_inputs("llama", 2)
    assert torch.equal(model_outputs(offloaded, inputs), model_outputs(load(converted("llama")), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, converted, tmp_path):
    """Loaded in a dtype, or cast to it afterwards: the same model; "auto" is what is stored."""
    model = load(converted("llama"), dtype=dtype)
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {dtype}
    assert same_tensors(model, load(converted("llama")).to(dtype))
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", dtype="auto")
    assert again.dtype == dtype and same_tensors(again, model)
    inputs, exact = tiny_inputs("llama", 2), model_outputs(load(converted("llama")), tiny_inputs("llama", 2))
    gap = float((model_outputs(model, inputs).float() - exact).norm() / exact.norm())
    assert gap < {torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from .own_part import SCALE

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * SCALE
        return out
"""


def test_a_model_of_remote_code_keeps_its_code(checkpoints, tmp_path):
    """Converted and densified with leave; without it refused before anything runs."""
    source = shutil.copytree(checkpoints("llama"), tmp_path / "source")
    (source / "own_model.py").write_text(OWN_CODE)
    (source / "own_part.py").write_text("SCALE = 2.0\n")
    config = json.loads((source / "config.json").read_text())
    auto_map = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}
    config.update(model_type="own_llama", architectures=["OwnForCausalLM"], auto_map=auto_map)
    (source / "config.json").write_text(json.dumps(config))
    recipe = make_recipe(structure="low_rank", keep=0.5)
    with pytest.raises(SurgeryError, match="then pass --trust-remote-code"):
        convert(str(source), recipe, tmp_path / "out")
    convert(str(source), recipe, tmp_path / "out", trust_remote_code=True)
    densify(str(tmp_path / "out"), tmp_path / "dense")
    inputs, logits = tiny_inputs("llama", 2), []
    for name in ("out", "dense"):
        model = load(tmp_path / name, trust_remote_code=True)
        assert type(model).__name__ == "OwnForCausalLM" and bool(structured_linears(model)) == (name == "out")
        logits.append(model_outputs(model, inputs))
    assert float((logits[0] - logits[1]).abs().max() / logits[1].abs().max()) < 1e-5


# -- saving ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "phi3", "t5", "bert", "vit"])
@pytest.mark.parametrize("shard", [None, "12KB"])
def test_save_pretrained_writes_the_same_checkpoint(family, shard, converted, tmp_path):
    """Bit-equal tensors under the same names, and the same table, in one file or in many."""
    from surgery.checkpoint.meta_model import model_class

    config = transformers.AutoConfig.from_pretrained(converted(family))
    model = model_class(config).from_pretrained(converted(family))
    model.save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == bool(shard)
    before, after = tensors_of(converted(family)), tensors_of(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    tables = [json.loads((f / "config.json").read_text())["quantization_config"] for f in (converted(family), tmp_path)]
    assert tables[0] == tables[1]
    assert same_tensors(model_class(config).from_pretrained(tmp_path), model)


def test_it_is_copied_and_cast_like_any_model(converted):
    model = load(converted("gpt2"))
    assert same_tensors(copy.deepcopy(model), model)
    assert model.half().float().dtype == torch.float32
    assert not getattr(model, "is_quantized", False)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda table: table.update(format=2), "table format 2"),
        (lambda table: table["modules"]["model.layers.0.mlp.up_proj"].update(structure="bt"), "unknown structure 'bt'"),
        (lambda table: table["modules"]["model.layers.0.mlp.up_proj"].pop("in_features"), "table .* is damaged"),
        (lambda table: table.update(modules={"nowhere": {}}), "has no module 'nowhere'"),
        (lambda table: table["modules"].update({f"model.layers.{n}.x": {} for n in range(20_000)}), "has no module"),
    ],
)
def test_a_table_that_cannot_be_read(change, says, converted, tmp_path):
    folder = shutil.copytree(converted("llama"), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SurgeryError, match=says):
        load(folder)


# -- training --------------------------------------------------------------------------------------
def lesson(rows: int = 8) -> dict[str, torch.Tensor]:
    ids = tiny_inputs("llama", rows, 16)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def loss_of(model) -> float:
    with torch.inference_mode():
        return float(model.eval()(**lesson()).loss)


@pytest.mark.parametrize("how", ["trainer", "trainer, gradient checkpointing", "accelerate"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training(family, how, converted, tmp_path):
    """A few steps lower the loss, and every core of every structure takes part; what is saved is what was trained."""
    model = load(converted(family))
    before, start = copy.deepcopy(model), loss_of(model)
    (with_accelerate if how == "accelerate" else with_trainer)(model, tmp_path, "checkpointing" in how)
    assert loss_of(model) < 0.9 * start
    trained = dict(model.named_parameters())
    for name, module in structured_linears(before).items():
        for core, value in module.named_parameters():
            if value.requires_grad:
                assert not torch.equal(trained[f"{name}.{core}"], value), f"{name}.{core} did not move"
    model.save_pretrained(tmp_path / "trained")
    assert same_tensors(load(tmp_path / "trained"), model)


def with_trainer(model, folder, checkpointing: bool) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{k: v[i] for k, v in lesson().items()} for i in range(8)]
    arguments = TrainingArguments(
        output_dir=str(folder / "runs"), max_steps=16, learning_rate=3e-3, per_device_train_batch_size=8, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows).train()


def with_accelerate(model, folder, _: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model.train()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for _ in range(16):
        accelerator.backward(wrapped(**lesson()).loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradients(family, converted):
    gradients = []
    for checkpointing in (False, True):
        model = load(converted(family))
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        model.train()(**lesson(2)).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any(".right" in name for name in gradients[0])
    assert all(torch.allclose(g, gradients[1][n], rtol=1e-4, atol=1e-6) for n, g in gradients[0].items())


# -- running ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "family", slow_where(lambda family: family in ("gpt2", "vit"), ["llama", "gpt2", "phi3", "bert", "vit", "t5"])
)
def test_compiles_whole(family, converted):
    """fullgraph: one graph break, in a stand-in or anywhere, is an error."""
    from surgery.checkpoint.meta_model import model_class

    config = transformers.AutoConfig.from_pretrained(converted(family))
    model = model_class(config).from_pretrained(converted(family), dtype=torch.float32).eval()
    inputs = tiny_inputs(family, 2, 12)
    options = {} if family == "vit" else {"use_cache": False}
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.inference_mode():
        assert torch.equal(compiled(**inputs, **options)[0], model(**inputs, **options)[0])


def test_exports_with_any_length(converted):
    """One program for 3 and for 60 tokens: no structure branches on the number of rows."""
    model = load(converted("llama")).eval()
    structures = {type(module).__name__ for module in model.modules()}
    assert {"BTTLinear", "LowRankLinear"} <= structures

    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        Logits(model), (tiny_inputs("llama", 2, 9)["input_ids"],), dynamic_shapes=({1: length},)
    )
    for tokens in (3, 60):
        ids = tiny_inputs("llama", 2, tokens)["input_ids"]
        with torch.no_grad():
            assert torch.allclose(program.module()(ids), Logits(model)(ids), atol=1e-5)


class MaskedLogits(torch.nn.Module):
    """A language model as a function of token ids and a padding mask, for exports."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@torch.no_grad()
@pytest.mark.parametrize("names", [("mlr", "window"), ("bilinear", "global window")])
def test_mixers_that_score_keys_export_with_any_length(names):
    """One program for rows with and without padding, and for more tokens than one pass over the queries takes
    otherwise.
    """
    from surgery.architectures.attention import attention_paths
    from surgery.modeling.attention import install

    model = random_model("llama")
    install(model, {path: mixer_config(MIXER_SPECS[name]) for path, name in zip(attention_paths(model), names)})
    ids, mask = tiny_inputs("llama", 2, 9)["input_ids"], torch.ones(2, 9, dtype=torch.long)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(MaskedLogits(model), (ids, mask), dynamic_shapes=({1: length}, {1: length})).module()
    for tokens, padding in ((2, 0), (5, 3), (60, 0), (QUERIES_PER_PASS + 90, 40)):
        ids, mask = tiny_inputs("llama", 2, tokens)["input_ids"], torch.ones(2, tokens, dtype=torch.long)
        mask[1, :padding] = 0
        found, expected = program(ids, mask), MaskedLogits(model)(ids, mask)
        assert relative(found[mask.bool()], expected[mask.bool()]) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_generates_as_its_densified_self(family, converted, densified):
    auto = transformers.AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    ids = tiny_inputs(family, 2, 8, seed=3)["input_ids"]
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    models = [auto.from_pretrained(f, dtype=torch.float32).eval() for f in (converted(family), densified(family))]
    assert torch.equal(*(m.generate(input_ids=ids, **options) for m in models))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_left_padding_changes_nothing(family, converted):
    model = load(converted(family))
    long, short = tiny_inputs(family, 2, 10, seed=4)["input_ids"][:, None]
    short = short[:, :6]
    batch = torch.cat([long, torch.cat([torch.zeros(1, 4, dtype=torch.int64), short], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(input_ids=batch, attention_mask=mask, **options)
    alone = model.generate(input_ids=short, attention_mask=torch.ones_like(short), **options)
    assert torch.equal(together[1, 4:], alone[0])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_loaded_config_and_a_state_dict_give_the_model(family, converted):
    """from_pretrained(None, config=.., state_dict=..), with the config of a loaded model or a copy of it."""
    model, inputs = load(converted(family)), tiny_inputs(family, 2)
    for config in (model.config, copy.deepcopy(model.config), type(model.config).from_dict(model.config.to_dict())):
        again = type(model).from_pretrained(None, config=config, state_dict=model.state_dict()).eval()
        assert same_tensors(again, model) and torch.equal(model_outputs(again, inputs), model_outputs(model, inputs))


def test_a_split_linear_saved_again_keeps_the_order_of_its_parts(converted, tmp_path):
    """transformers sorts the keys of config.json; tables of older versions have the order in their keys alone."""
    config = json.loads((converted("phi3") / "config.json").read_text())
    for older in (False, True):
        folder = tmp_path / f"older-{older}"
        shutil.copytree(converted("phi3"), folder)
        for spec in config["quantization_config"]["modules"].values():
            assert spec.get("order", list(spec.get("parts", {}))) == list(spec.get("parts", {}))
            if older:
                spec.pop("order", None)
        (folder / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.save_pretrained(folder / "again")
        again = AutoModelForCausalLM.from_pretrained(folder / "again")
        inputs = tiny_inputs("phi3", 2)
        assert torch.equal(model_outputs(again, inputs), model_outputs(model, inputs))
    name = next(name for name, spec in config["quantization_config"]["modules"].items() if "parts" in spec)
    for order in (["query"], ["query", "key", "key"], "query", [1, 2, 3], {}):
        config["quantization_config"]["modules"][name]["order"] = order
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(SurgeryError, match="of a split entry must list its parts"):
            AutoModelForCausalLM.from_pretrained(folder)


def test_fused_linears_that_were_split_stay_one_module(converted):
    model = load(converted("phi3"))
    split = [m for m in model.modules() if isinstance(m, SplitLinear)]
    assert len(split) == 4
    x = torch.randn(3, split[0].in_features)
    assert torch.allclose(split[0](x), x @ split[0].dense().mT, atol=1e-5)
