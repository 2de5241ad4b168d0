"""Malicious checkpoints and recipes are refused with one sentence, before anything is built, copied or written."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import torch
from helpers.small import make_recipe
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import surgery
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import read_header, read_tensor
from surgery.checkpoint.source import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    open_checkpoint,
    open_converted_checkpoint,
)
from surgery.cli.demo import demo
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.conversion.sinks import FolderSink
from surgery.conversion.toeplitz import convert_to_toeplitz
from surgery.core.config import apply_override
from surgery.core.errors import SurgeryError
from surgery.core.files import size_text, write_json
from surgery.core.progress import Progress
from surgery.eval.fetch import fetch
from surgery.eval.model import load_from_folder
from surgery.eval.results.store import ResultStore
from surgery.planning.recipe import load_recipe, parse_recipe
from surgery.publish.hub.license import read_local_card
from surgery.training import models
from surgery.training.finetune import finetune
from surgery.training.recipe import load_healing_recipe, parse_healing_recipe
from surgery.training.teacher_cache.build import build_teacher_cache


@pytest.fixture
def source(checkpoints, tmp_path):
    return shutil.copytree(checkpoints("llama"), tmp_path / "source")


def with_config(source, **changes):
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return source


# -- shards ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shard",
    [
        *("../secret.safetensors", "/etc/secret.safetensors", "a/../b.safetensors", "..", "", "sub/a.safetensors"),
        *("~/a.safetensors", "file:///a.safetensors", ["a.safetensors"], {"a": 1}, None, True, 1e400),
    ],
)
def test_an_index_points_beside_itself_only(source, shard):
    shutil.copy(source / SAFE_WEIGHTS_NAME, source.parent / "secret.safetensors")
    (source / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(SurgeryError, match=r"shards are .safetensors files beside the index|is not a shard index"):
        open_checkpoint(str(source))


@pytest.mark.parametrize(
    "name",
    [SAFE_WEIGHTS_NAME, "config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE", SAFE_WEIGHTS_INDEX_NAME],
)
@pytest.mark.parametrize("how", ["absolute", "relative"])
def test_a_link_out_of_the_folder(source, name, how):
    """A companion is copied into OUT, and may be pushed from there."""
    outside = source.parent / "private"
    outside.mkdir()
    if (source / name).exists():
        (source / name).rename(outside / name)
    else:
        (outside / name).write_text("{}")
    (source / name).symlink_to(outside / name if how == "absolute" else f"../private/{name}")
    with pytest.raises(SurgeryError, match=f"{name} is a link to .*outside the checkpoint"):
        convert(str(source), make_recipe(structure="low_rank"), source.parent / "out")
    assert sorted(p.name for p in source.parent.iterdir()) == ["private", "source"]


def test_links_of_the_hub_s_cache_and_inside_the_folder_are_followed(source):
    blobs, snapshot = source.parent / "m" / "blobs", source.parent / "m" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    (snapshot / "tokenizer.json").symlink_to("config.json")
    (source.parent / "named").symlink_to(snapshot)
    assert open_checkpoint(str(snapshot)).tensors.keys() == open_checkpoint(str(source.parent / "named")).tensors.keys()


def write_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start=0, stop=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header, says",
    [
        ({"a": entry(), "b": entry(4, 12)}, "share bytes"),
        ({"a": entry(0, 16, (4,)), "b": entry(4, 8, (1,))}, "share bytes"),
        ({"a": entry(-8, 0)}, "is invalid; download"),
        ({"a": entry(0, 2**63, (2**61,))}, "is invalid; download"),
        ({"a": entry(0, 2**40, (2**38,))}, "ends at byte"),
        ({"a": entry(shape=(2**61, 2**61))}, "is invalid; download"),
        ({"a": entry(0, 0, (0, 2**61, 2**61))}, "is invalid; download"),
        ({"a": entry(shape=(1,) * 65 + (2,))}, "is invalid; download"),
        ({"a": entry(shape=(-2,))}, "is invalid; download"),
        ({"a": {**entry(), "data_offsets": [0, 8, 16]}}, "is invalid; download"),
        ({"a": {**entry(), "data_offsets": ["0", "8"]}}, "is invalid; download"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), "has a duplicate name"),
        (b'{"a": {"dtype": "F32", "dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}', "has a duplicate name"),
        (b'{"a":' * 50_000, "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"a": NaN}', "is invalid; download"),
    ],
)
def test_headers(tmp_path, header, says):
    with pytest.raises(SurgeryError, match=says):
        read_header(write_file(tmp_path / "x.safetensors", header, b"0" * 16))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 100_000_001, 17])
def test_header_lengths_beyond_the_file(tmp_path, length):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", length) + b"0" * 16)
    with pytest.raises(SurgeryError, match="its header claims"):
        read_header(tmp_path / "x.safetensors")


def test_a_dtype_nobody_knows(tmp_path):
    header = read_header(write_file(tmp_path / "x.safetensors", {"a": entry(dtype="os.system")}, b"0" * 8))
    with pytest.raises(SurgeryError, match="which surgery cannot read"):
        read_tensor(header["a"])


# -- which weights ---------------------------------------------------------------------------------
def write_two_shards(folder, names=("a.safetensors", "b.safetensors"), scale=1.0):
    """The weights of a folder as two shards with an index, times `scale`; model.safetensors stays."""
    tensors = {name: scale * tensor for name, tensor in load_file(folder / SAFE_WEIGHTS_NAME).items()}
    half = len(tensors) // 2
    parts = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    for name, part in zip(names, parts):
        save_file(part, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, part in zip(names, parts) for tensor in part}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_2_3_model_safetensors_beside_an_index(source):
    """transformers loads the single file. An index of that same file is no contradiction; any other is."""
    tensors = list(read_header(source / SAFE_WEIGHTS_NAME))
    (source / SAFE_WEIGHTS_INDEX_NAME).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, SAFE_WEIGHTS_NAME)})
    )
    assert {t.file.name for t in open_checkpoint(str(source)).tensors.values()} == {SAFE_WEIGHTS_NAME}
    write_two_shards(source, scale=2.0)
    for read in (open_checkpoint, open_converted_checkpoint):
        with pytest.raises(SurgeryError, match="names other weights; transformers would load the first"):
            read(str(source))
    (source / SAFE_WEIGHTS_NAME).unlink()
    loaded = LlamaForCausalLM.from_pretrained(source).state_dict()
    for name, info in open_checkpoint(str(source)).tensors.items():
        assert torch.equal(read_tensor(info), loaded[name])


def test_2_3_weights_that_the_config_names(source):
    shutil.copy(source / SAFE_WEIGHTS_NAME, source / "other.safetensors")
    with_config(source, transformers_weights="other.safetensors")
    with pytest.raises(SurgeryError, match=r"names its weights by transformers_weights \('other.safetensors'\)"):
        convert(str(source), make_recipe(structure="low_rank"), source.parent / "out")


def test_2_3_an_adapter_beside_whole_weights(source):
    (source / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(SurgeryError, match=r"would load the PEFT adapter .* of org/base: merge it first"):
        convert(str(source), make_recipe(structure="low_rank"), source.parent / "out")


def test_2_3_a_distributed_checkpoint_beside_whole_weights(source):
    shutil.copy(source / SAFE_WEIGHTS_NAME, source / "shard-00000-model-00001-of-00002.safetensors")
    with pytest.raises(SurgeryError, match="distributed checkpoint of torch"):
        open_checkpoint(str(source))


def test_2_3_a_tensor_in_two_shards_and_an_index_without_metadata(source):
    write_two_shards(source)
    (source / SAFE_WEIGHTS_NAME).unlink()
    index = json.loads((source / SAFE_WEIGHTS_INDEX_NAME).read_text())
    (source / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": index["weight_map"]}))
    with pytest.raises(SurgeryError, match='has no table "metadata"'):
        open_checkpoint(str(source))
    both = {**load_file(source / "a.safetensors"), **load_file(source / "b.safetensors")}
    save_file(both, source / "b.safetensors")
    with pytest.raises(SurgeryError, match="is in two shards"):
        open_checkpoint(str(source))


# -- configs ---------------------------------------------------------------------------------------
def nested_value(depth):
    value: object = 1
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "head_dim", "intermediate_size", "num_hidden_layers")


@pytest.mark.parametrize("key", [*SIZES, "max_position_embeddings"])
@pytest.mark.parametrize("value", [10**12, 10**30, -(10**12), 1e300, float("inf"), float("nan")])
def test_enormous_sizes(source, key, value):
    with pytest.raises(SurgeryError, match=f"{key} is .*no model is that large"):
        open_checkpoint(str(with_config(source, **{key: value})))


def test_enormous_sizes_further_in(source):
    with pytest.raises(SurgeryError, match="hidden_size is 1e"):
        open_checkpoint(str(with_config(source, text_config=[{"hidden_size": 10**12}])))


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", ["x", None, [1], {}, -5, 0, 1.5, True])
def test_sizes_that_are_none(source, key, value):
    if key == "head_dim" and value is None:
        pytest.skip("it is a default")
    with pytest.raises(SurgeryError):
        convert(str(with_config(source, **{key: value})), make_recipe(structure="low_rank"), source.parent / "out")
    assert [p.name for p in source.parent.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"rope_parameters": v} for v in ("x", [1], {"rope_type": "evil"})),
        *({"hidden_act": v} for v in ("evil", "os.system", [1])),
        *({"dtype": v} for v in ("evil", [1], {"a": "b"})),
        *({"layer_types": v} for v in (["evil"], 5)),
        *(
            {"auto_map": v}
            for v in ({"AutoConfig": "x.Y"}, "x", ["x"], 5, {"a": None}, {"AutoModel": "other/repo--x.Y"})
        ),
        *({"quantization_config": v} for v in ("x", [1], 5, {"quant_method": ["surgery"]})),
        *({"model_type": v} for v in ("../llama", "os", "", "llama\0", 5, None, ["llama"])),
        *({"id2label": v} for v in (5, "x")),
        *({"extra": nested_value(depth)} for depth in (60, 500, 900)),
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_configs(source, changes):
    with pytest.raises(SurgeryError):
        MetaModel(open_checkpoint(str(with_config(source, **changes))))


@pytest.mark.parametrize("named", [["os"], ["logging"], ["Trainer"], ["AutoTokenizer"], ["pipeline"], [5], 5, "x"])
def test_an_architecture_is_a_model_class_or_nothing(source, named):
    """Another name of the library's is not called; the config's own type decides, as where none is named."""
    assert (
        type(MetaModel(open_checkpoint(str(with_config(source, architectures=named)))).model).__name__ == "LlamaModel"
    )


@pytest.mark.parametrize("text", ["[" * 100_000, '{"model_type":' * 50_000, "\ud800", "", "null", "\x00", "9" * 5000])
def test_configs_that_are_no_table(source, text):
    (source / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(SurgeryError):
        open_checkpoint(str(source))


# -- recipes ---------------------------------------------------------------------------------------
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n" for before, after in zip("abcdefgh", "bcdefghi")
)
YAMLS = {
    "bomb": (BOMB, "alias"),
    "itself": ("description: &a [*a]", "alias"),
    "merged": ("x: &x {keep: 0.5}\n<<: *x", "alias"),
    "python": ("description: !!python/object/apply:os.system [true]", "not YAML"),
    "name": ("description: !!python/name:os.system", "not YAML"),
    "deep": ("description: " + "[" * 20_000, "nested too deeply"),
    "deep maps": ("description: " + "{a: " * 20_000, "nested too deeply"),
    "date": ("description: 2024-99-99", "not YAML"),
    "digits": ("seed: " + "9" * 5000, "not YAML"),
    "large": ("# " + "x" * 1_000_001, "must have at most 1,000,000 bytes"),
}


@pytest.mark.parametrize("name", YAMLS)
@pytest.mark.parametrize("load", [load_recipe, load_healing_recipe])
def test_recipes(tmp_path, name, load):
    text, says = YAMLS[name]
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(SurgeryError, match=says) as refused:
        load(str(tmp_path / "r.yaml"))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", [name for name in YAMLS if name != "large"])
def test_one_value_of_a_recipe(name):
    value = YAMLS[name][0].partition(": ")[2] if name not in ("bomb", "merged") else YAMLS[name][0]
    with pytest.raises(SurgeryError, match="--set"):
        parse_recipe("{}", "here", [f"seed={value}"])
    with pytest.raises(SurgeryError, match="--set"):
        apply_override({}, f"seed={value}")


@pytest.mark.parametrize("tokens", ["9" * 400 + "b", "9" * 5000, "1." + "9" * 5000 + "k", float("inf"), -1, [1]])
def test_counts(tokens):
    with pytest.raises(SurgeryError, match="tokens"):
        parse_healing_recipe({"stages": [{"kind": "lm", "tokens": tokens, "rate": 1e-4}]})


@pytest.mark.parametrize("name", [name for name in YAMLS if name != "large"])
def test_a_model_card_s_head(tmp_path, name):
    (tmp_path / "README.md").write_text(f"---\n{YAMLS[name][0]}\n---\n# A model\n")
    assert read_local_card(tmp_path) == {}


# -- tensors that are not there --------------------------------------------------------------------
@pytest.fixture
def checkpoint_copy(converted, tmp_path):
    return shutil.copytree(converted("llama"), tmp_path / "converted")


def changed_tensors(folder, change):
    tensors = load_file(folder / SAFE_WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def changed_table(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"]["modules"])
    (folder / "config.json").write_text(json.dumps(config))


UP = "model.layers.0.mlp.up_proj"
INCOMPLETE = {
    "norm": (lambda f: changed_tensors(f, lambda t: t.pop("model.norm.weight")), "lacks tensor 'model.norm.weight'"),
    "bias": (lambda f: changed_table(f, lambda t: t[UP].update(bias=True)), f"lacks tensor '{UP}.bias'"),
    "extra": (lambda f: changed_tensors(f, lambda t: t.update(more=torch.ones(2))), "has tensor 'more'"),
    "entry": (lambda f: changed_table(f, lambda t: t.pop(UP)), f"lacks tensor|has tensors '{UP}|has tensor '{UP}"),
    "sizes": (lambda f: changed_table(f, lambda t: t[UP].update(in_features=30)), "30 features"),
}


@pytest.mark.parametrize("how", INCOMPLETE)
def test_2_4_nothing_is_invented_in_a_converted_folder(checkpoint_copy, how):
    """By plain transformers, by every class it can be opened as, by our loaders and by densify."""
    change, says = INCOMPLETE[how]
    change(checkpoint_copy)
    for cls in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(SurgeryError, match=says):
            cls.from_pretrained(checkpoint_copy)
    device = torch.device("cpu")
    for use in (
        lambda: surgery.load(checkpoint_copy),
        lambda: load_from_folder(checkpoint_copy, device, "float32", False),
        lambda: models.load_causal_lm(models.open_trainable(str(checkpoint_copy)), torch.float32),
        lambda: densify(str(checkpoint_copy), checkpoint_copy.parent / "dense"),
    ):
        with pytest.raises(SurgeryError, match=says):
            use()
    assert [p.name for p in checkpoint_copy.parent.iterdir()] == ["converted"]


def test_2_4_nothing_is_invented_in_an_ordinary_folder(source):
    changed_tensors(source, lambda t: t.pop("model.norm.weight"))
    for use in (
        lambda: convert(str(source), make_recipe(structure="low_rank"), source.parent / "out"),
        lambda: load_from_folder(source, torch.device("cpu"), "float32", False),
    ):
        with pytest.raises(SurgeryError, match=r"lacks tensor 'model.norm.weight'"):
            use()
    assert [p.name for p in source.parent.iterdir()] == ["source"]


def test_2_4_tensors_beyond_the_class_are_kept_and_named(source):
    """As bert-base-uncased has, whose file holds a second head."""
    changed_tensors(source, lambda t: t.update({"second.head.weight": torch.ones(2)}))
    out = source.parent / "out"
    convert(str(source), make_recipe(structure="low_rank"), out)
    table = json.loads((out / "config.json").read_text())["quantization_config"]
    assert table["unused"] == ["second.head.weight"]
    AutoModelForCausalLM.from_pretrained(out)
    models.load_causal_lm(models.open_trainable(str(out)), torch.float32)
    densify(str(out), source.parent / "dense")
    assert "second.head.weight" in load_file(source.parent / "dense" / SAFE_WEIGHTS_NAME)


# -- links -----------------------------------------------------------------------------------------
def writers(source, converted, out):
    """Every command that writes a folder, by its function."""
    recipe = load_healing_recipe("linears", ['data.sources=[{"path": "no.jsonl"}]'], True)
    return {
        "convert": lambda: convert(str(source), make_recipe(structure="low_rank"), out, resume=True),
        "densify": lambda: densify(str(converted), out),
        "finetune": lambda: finetune(str(converted), recipe, out, teacher=str(source), resume=True),
        "toeplitz": lambda: convert_to_toeplitz(str(converted), out),
        "teacher-cache": lambda: build_teacher_cache(
            str(source), recipe, out, 4, 4, resume=True, device="cpu", trust_remote_code=False, progress=None
        ),
        "eval": lambda: ResultStore(out).open(),
        "fetch": lambda: fetch(out, [], Progress()),
        "demo": lambda: demo(out, "btt-half", Progress(), print),
    }


@pytest.mark.parametrize(
    "command", ["convert", "densify", "finetune", "toeplitz", "teacher-cache", "eval", "fetch", "demo"]
)
def test_2_5_a_dangling_link_as_out(source, converted, tmp_path, command):
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SurgeryError, match="out is a symbolic link"):
        writers(source, converted("llama"), out)[command]()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("command", ["convert", "densify", "finetune", "toeplitz"])
@pytest.mark.parametrize("where", [".", "pieces", "lock", "journal.jsonl"])
def test_2_5_a_link_at_or_in_the_work_folder(source, converted, tmp_path, command, where):
    elsewhere, work = tmp_path / "elsewhere", tmp_path / "out.partial"
    elsewhere.mkdir()
    if where != ".":
        work.mkdir()
    (work / where if where != "." else work).symlink_to(elsewhere)
    with pytest.raises(SurgeryError, match="is a symbolic link"):
        writers(source, converted("llama"), tmp_path / "out")[command]()
    assert not list(elsewhere.iterdir())


def test_2_5_a_file_is_not_written_through_a_link_beside_it(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "x.json.tmp").symlink_to(tmp_path / "victim")
    write_json(tmp_path / "x.json", {})
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "x.json").is_symlink()


# -- sources that change meanwhile -----------------------------------------------------------------
def test_2_7_a_shard_that_vanishes_while_it_is_converted(source, monkeypatch):
    out, write = source.parent / "out", FolderSink.write_layer

    def vanishing(self, ctx, step, layer, tensors):
        sha256 = write(self, ctx, step, layer, tensors)
        if layer == "model.layers.0":
            (source / SAFE_WEIGHTS_NAME).rename(source.parent / "away")
        return sha256

    with monkeypatch.context() as patched:
        patched.setattr(FolderSink, "write_layer", vanishing)
        with pytest.raises(SurgeryError, match=r"cannot be read any longer .*No such file.*Put the file back"):
            convert(str(source), make_recipe(structure="low_rank"), out)
    (source.parent / "away").rename(source / SAFE_WEIGHTS_NAME)
    convert(str(source), make_recipe(structure="low_rank"), out, resume=True)


def test_2_7_sizes_have_units_that_suit_them():
    shown = {0: "0 bytes", 999: "999 bytes", 1500: "1.5 kB", 999_960: "1.0 MB", 2.5e9: "2.5 GB", 3e12: "3.0 TB"}
    assert {size: size_text(size) for size in shown} == shown
