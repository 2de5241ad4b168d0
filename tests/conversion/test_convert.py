"""`convert`: the same bytes after any interruption, and refusals that leave no files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import killing, random_llama
from helpers.slow import slow_where
from helpers.small import make_recipe, run_python, tiny_config, tiny_inputs
from safetensors.torch import load_file, save_file

import surgery
from surgery.checkpoint.safetensors_io import DTYPES, read_header
from surgery.checkpoint.source import CheckpointSource
from surgery.conversion.convert import convert
from surgery.core.device import fast_float32_matmul
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path
from surgery.core.journal import Journal


def bytes_of(folder: Path) -> dict[str, str]:
    """A digest of every file; of the report, everything but times and memory."""
    found = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        if path.name == "surgery_report.json":
            report = json.loads(content)
            modules = [{k: v for k, v in m.items() if k != "seconds"} for m in report["modules"]]
            kept = {k: v for k, v in report.items() if k not in ("time", "memory")}
            content = json.dumps({**kept, "modules": modules}).encode()
        found[path.name] = hashlib.sha256(content).hexdigest()
    return found


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A checkpoint of six layers in three shards, and a calibration file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("deep")
    config = tiny_config("llama")[1].to_dict()
    config.update(num_hidden_layers=6, hidden_size=64, intermediate_size=160, head_dim=16)
    LlamaForCausalLM(LlamaConfig(**config)).bfloat16().save_pretrained(folder, max_shard_size="180KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    inputs = folder.parent / "deep-inputs.safetensors"
    save_file({"input_ids": torch.randint(3, 96, (16, 48))}, inputs)
    return folder, inputs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_ten_random_moments_resumes_to_the_same_bytes(deep, tmp_path, capfd):
    source, inputs = deep
    recipe = make_recipe(structure="btt", blocks=[2, 2], calibration=inputs, allocate="measured", sweeps=2)
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(source), recipe, out, resume=resume), tmp_path, kills=10
    )
    assert capfd.readouterr().out.split().count("killed") == 10
    assert resumed and all(bytes_of(out) == bytes_of(whole) for out in resumed)
    assert not list(tmp_path.glob("*.partial"))


class Crash(BaseException):
    """Stands for the process being killed at one exact point."""


@pytest.mark.parametrize("lines", slow_where(lambda lines: lines in (2, 3, 5, 6, 9), range(1, 11)))
def test_killed_after_every_journal_line(deep, tmp_path, monkeypatch, lines):
    """Six layers, the rest, the shards: wherever the journal ends, --resume gives the same bytes."""
    source, inputs = deep
    recipe = make_recipe(structure="low_rank", keep=0.5, calibration=inputs, allocate="measured")
    whole = tmp_path.parent / "whole-low-rank"
    if not whole.exists():
        convert(str(source), recipe, whole)
    add = Journal.add

    def crash(self, step, **what):
        if len(self.entries) == lines:
            with open(self.path, "ab") as file:  # cut short in the middle of a line
                file.write(b'{"step": "pie')
            raise Crash
        add(self, step, **what)

    monkeypatch.setattr(Journal, "add", crash)
    with pytest.raises(Crash):
        convert(str(source), recipe, tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(SurgeryError, match="continue it with --resume"):
        convert(str(source), recipe, tmp_path / "out")
    convert(str(source), recipe, tmp_path / "out", resume=True)
    assert bytes_of(tmp_path / "out") == bytes_of(whole)


def test_a_journal_of_something_else_is_refused(deep, tmp_path, checkpoints, monkeypatch):
    source, inputs = deep
    recipe = make_recipe(structure="low_rank", calibration=inputs, allocate="uniform", curvature="none")
    add = Journal.add
    monkeypatch.setattr(
        Journal,
        "add",
        lambda self, step, **w: add(self, step, **w) if len(self.entries) < 4 else (_ for _ in ()).throw(Crash),
    )
    with pytest.raises(Crash):
        convert(str(source), recipe, tmp_path / "out")
    monkeypatch.undo()
    before = bytes_of(partial_path(tmp_path / "out") / "pieces")
    others = {
        "recipe": (source, recipe.model_copy(update={"keep": 0.6})),
        "seed": (source, recipe.model_copy(update={"seed": 1})),
        "calibration": (source, recipe.model_copy(update={"holdout": 0.3})),
        "source": (checkpoints("llama"), recipe),
    }
    for key, (other_source, other) in others.items():
        with pytest.raises(SurgeryError, match=f"was begun with another ({key}|recipe)"):
            convert(str(other_source), other, tmp_path / "out", resume=True)
    with pytest.raises(SurgeryError, match=r"another recipe \(keep: 0\.5, now 0\.6\)"):
        convert(str(source), others["recipe"][1], tmp_path / "out", resume=True)
    assert bytes_of(partial_path(tmp_path / "out") / "pieces") == before
    convert(str(source), recipe, tmp_path / "out", resume=True)


def test_outside_d9_a_source_changed_inside_a_tensor_is_refused(deep, tmp_path, monkeypatch):
    """Also where neither end of any tensor changed."""
    source = tmp_path / "source"
    shutil.copytree(deep[0], source)
    recipe, add = make_recipe(structure="low_rank"), Journal.add

    def crash(self, step, **what):
        if step == "piece":
            raise Crash
        add(self, step, **what)

    monkeypatch.setattr(Journal, "add", crash)
    with pytest.raises(Crash):
        convert(str(source), recipe, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(CheckpointSource, "fingerprint", lambda self: "the sampled bytes are the same")
    journal = partial_path(tmp_path / "out") / "journal.jsonl"
    start = {**json.loads(journal.read_text().splitlines()[0]), "source": "the sampled bytes are the same"}
    start.pop("crc32")
    journal.unlink()
    whole = Journal(partial_path(tmp_path / "out"), {}, True)
    whole.add(**start)
    file = next(source.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3000] ^= 1
    file.write_bytes(data)
    with pytest.raises(SurgeryError, match="begun with another weights digest"):
        convert(str(source), recipe, tmp_path / "out", resume=True)


def test_outside_d11_a_layer_shard_of_another_dtype_is_not_used(deep, tmp_path):
    from surgery.checkpoint.meta_model import MetaModel
    from surgery.checkpoint.source import open_checkpoint
    from surgery.conversion.layer_shards import LayerShards
    from surgery.planning.plan import make_plan

    meta_model = MetaModel(open_checkpoint(str(deep[0])), False)
    layer = "model.layers.0"
    shard_of = {name: layer if name.startswith(f"{layer}.") else "rest" for name in meta_model.keys}
    plan = make_plan(meta_model, make_recipe(structure="low_rank", layers="1:"))
    shards = LayerShards(meta_model, plan, shard_of, tmp_path)
    entry = {"piece": layer, "table": {}}
    stored = meta_model.source.tensors
    tensors = {
        n: torch.zeros(shape, dtype=DTYPES[stored[n].dtype]) for n, shape in shards.expected_shapes(entry).items()
    }
    save_file(tensors, tmp_path / "same.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].double()}, tmp_path / "other.safetensors")
    assert shards.has_tensors(tmp_path / "same.safetensors", entry, exact=True)
    assert not shards.has_tensors(tmp_path / "other.safetensors", entry, exact=True)


def test_the_same_seed_gives_the_same_bytes(deep, tmp_path):
    source, inputs = deep
    recipe = make_recipe(structure="auto", keep=0.6, calibration=inputs, sweeps=2, seed=3, layers="2:4")
    for name in ("a", "b"):
        convert(str(source), recipe, tmp_path / name)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_two_conversions_into_one_folder_exclude_each_other(tmp_path):
    first, second = (Journal(tmp_path / "x.partial", {"a": 1}, resume=resume) for resume in (False, True))
    with first, pytest.raises(SurgeryError, match="another conversion is writing"):
        second.__enter__()


@pytest.mark.parametrize("mode", [{}, {"resume": True}, {"overwrite": True}], ids=["new", "resume", "overwrite"])
def test_a_second_conversion_leaves_the_first_alone(deep, tmp_path, monkeypatch, mode):
    """It starts while the first is at work, or had looked at OUT before the first began."""
    source, _ = deep
    recipe, add, said = make_recipe(structure="low_rank"), Journal.add, []

    def meanwhile(self, step, **what):
        add(self, step, **what)
        if step == "piece" and len(said) < 2:
            before = sorted(p.name for p in self.folder.rglob("*"))
            for early in (False, True):
                with monkeypatch.context() as patch, pytest.raises(SurgeryError, match="another conversion") as error:
                    if early:
                        patch.setattr("surgery.conversion.output.check_output_path", lambda out, resume: None)
                    convert(str(source), recipe, tmp_path / "out", **mode)
                said.append(str(error.value))
            assert sorted(p.name for p in self.folder.rglob("*")) == before

    monkeypatch.setattr(Journal, "add", meanwhile)
    convert(str(source), recipe, tmp_path / "out")
    monkeypatch.undo()
    convert(str(source), recipe, tmp_path / "alone")
    assert len(said) == 2 and bytes_of(tmp_path / "out") == bytes_of(tmp_path / "alone")


def test_a_result_that_appears_meanwhile_is_kept_and_so_is_the_work(deep, tmp_path, monkeypatch):
    source, _ = deep
    add = Journal.add

    def meanwhile(self, step, **what):
        add(self, step, **what)
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine").touch()

    monkeypatch.setattr(Journal, "add", meanwhile)
    with pytest.raises(SurgeryError, match="exists; choose another --out"):
        convert(str(source), make_recipe(structure="low_rank"), tmp_path / "out")
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
    shutil.rmtree(tmp_path / "out")
    convert(str(source), make_recipe(structure="low_rank"), tmp_path / "out", resume=True)
    assert not partial_path(tmp_path / "out").exists()


def test_what_is_not_cut_is_copied_to_the_byte(deep, tmp_path):
    source, _ = deep
    rules = [{"match": "mlp.down", "structure": "low_rank", "keep": 0.5, "layers": "2:-2"}]
    convert(str(source), make_recipe(structure="low_rank", layers=":0", rules=rules), tmp_path / "out")
    before = {k: v for path in source.glob("*.safetensors") for k, v in load_file(path).items()}
    after = load_file(tmp_path / "out" / "model.safetensors")
    cut = {f"model.layers.{i}.mlp.down_proj.weight" for i in range(2, 4)}
    assert {k for k in before if k not in after or not torch.equal(before[k], after[k])} == cut
    assert all(after[k].dim() == 3 and after[k].dtype == torch.bfloat16 for k in cut)


def test_sharded_output(deep, tmp_path, monkeypatch):
    from surgery.checkpoint import writer as assemble

    monkeypatch.setattr(assemble, "SHARD_BYTES", 120_000)
    source, _ = deep
    convert(str(source), make_recipe(structure="low_rank"), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = {k: p.name for p in (tmp_path / "out").glob("*.safetensors") for k in read_header(p)}
    assert index["weight_map"] == stored and len(set(stored.values())) == 3
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "out")(**tiny_inputs("llama", 1))


# -- refusals --------------------------------------------------------------------------------------
def copy_damaged(source: Path, target: Path, how: str) -> Path:
    shutil.copytree(source, target)
    shard = sorted(target.glob("*.safetensors"))[0]
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif how == "missing":
        shard.unlink()
    elif how == "config":
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "intermediate_size": 200}))
    else:
        tensors = load_file(shard)
        name = next(k for k in tensors if "proj" in k)
        if how == "nan":
            tensors[name].view(-1)[7] = float("nan")
        else:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        save_file(tensors, shard, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "how, says",
    [
        ("truncated", "ends at byte"),
        ("missing", "lacks shard"),
        ("nan", "NaN or Inf of"),
        ("float8", "has dtype F8_E4M3; weights to be replaced must be one of"),
        ("config", "the config and the weights do not belong together"),
    ],
)
@pytest.mark.parametrize("text", [True, False])
def test_damaged_sources(deep, tmp_path, how, says, text):
    source, inputs = deep
    bad = copy_damaged(source, tmp_path / "bad", how)
    recipe = make_recipe(structure="low_rank", **({"calibration": inputs} if text else {}))
    with pytest.raises(SurgeryError, match=says):
        convert(str(bad), recipe, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]


@pytest.mark.parametrize(
    "keys, says",
    [
        (
            {"rules": [{"match": "*.mpl.*", "keep": 0.5}]},
            r"pattern '\*.mpl.\*' matches no module of llama; a module looks like",
        ),
        ({"structure": "dense"}, "replaces nothing"),
        ({"structure": "btt", "blocks": [100, 4]}, r"cannot tile a matrix of out=64, in=64: 100 blocks"),
        (
            {"structure": "kronecker", "blocks": [3, 4]},
            r"the blocks must divide both. Use for example blocks: \[8, 8\]",
        ),
        ({"structure": "low_rank", "keep": 0.001}, "Raise keep to"),
        ({"structure": "low_rank", "blocks": [2, 2]}, "structure 'low_rank' has no option 'blocks'"),
        (
            {"structure": "low_rank", "rules": [{"match": "mlp.down", "layers": "50:60", "structure": "dense"}]},
            "layers '50:60' of the rule for 'mlp.down' selects none of the layers",
        ),
        (
            {"structure": "dense", "attention": {"mixer": "window"}, "rules": [{"match": "mlp.down", "rank": 4}]},
            "rank for 'mlp.down' has no effect, because the recipe leaves all linears dense",
        ),
        ({"structure": "low_rank", "calibration": "/nowhere.txt"}, "'/nowhere.txt' is not a file"),
    ],
)
def test_recipes_the_plan_refuses(deep, tmp_path, keys, says):
    with pytest.raises(SurgeryError, match=says):
        convert(str(deep[0]), make_recipe(**keys), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("calibration", [None, "/nowhere.txt"])
def test_heads_that_cannot_share_keys_are_refused_in_the_plan(calibration, tmp_path):
    """A Llama with 4 heads and 3 key/value heads cannot run; whether it is calibrated makes no difference."""
    cls, config = tiny_config("llama")
    config.num_attention_heads, config.num_key_value_heads = 4, 3
    model = cls(config)
    model.save_pretrained(tmp_path / "source")
    recipe = make_recipe(structure="low_rank", calibration=calibration)
    for plan in (
        lambda: surgery.plan(model, recipe),
        lambda: convert(str(tmp_path / "source"), recipe, tmp_path / "out"),
    ):
        with pytest.raises(
            SurgeryError, match=r"num_attention_heads \(4\) in config.json must be a multiple of .*\(3\)"
        ):
            plan()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_out_exists_or_its_parent_does_not(deep, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(SurgeryError, match="out exists; choose another --out"):
        convert(str(deep[0]), make_recipe(), tmp_path / "out")
    with pytest.raises(SurgeryError, match="is not a folder; make it first"):
        convert(str(deep[0]), make_recipe(), tmp_path / "no" / "out")
    with pytest.raises(SurgeryError, match=f"{deep[0]} is a checkpoint, and .*sub would lie inside it"):
        convert(str(deep[0]), make_recipe(), deep[0] / "sub")


def test_a_disk_too_small_is_noticed_before_anything_is_written(deep, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 100_000))
    with pytest.raises(SurgeryError, match=r"has 100.0 kB free, the conversion writes up to [\d.]+ kB\."):
        convert(str(deep[0]), make_recipe(structure="low_rank"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


MEMORY = """
import contextlib, io
from torch.profiler import ProfilerActivity, profile
from surgery.cli.main import main
from surgery.calibration.layer_runner import CHUNK_TOKENS

def peak(size):  # most bytes of tensors that the process's memory holds at once; mapped files are not among them
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record, contextlib.suppress(SystemExit):
        with contextlib.redirect_stdout(io.StringIO()):
            words = ["--calibration", f"{size}-calibration.safetensors"]
            main(["convert", size, "-r", "keys.yaml", "-o", f"{size}-out", *words])
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most

CHUNK_TOKENS["cpu"] = 256
print(peak("small"), peak("large"))
"""
KEYS = """
structure: dense
rules: [{match: attention.key, structure: low_rank, keep: 0.5}]
allocate: measured
curvature: diagonal
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path, monkeypatch):
    """Converting 24 layers takes hardly more memory than converting 4 of the same size.

    Only the keys are replaced: everything else passes through just the same, and costs less time.
    """
    draw = functools.cache(functools.partial(random_llama.random_weight, generator=None))
    monkeypatch.setattr(random_llama, "random_weight", lambda shape, _: draw(shape))  # drawing takes longest
    weights = {}
    for size, layers in (("small", 4), ("large", 24)):
        monkeypatch.setitem(random_llama.SHAPES, size, (layers, 256, 1600, 8, 2, 5000, True))
        random_llama.write_checkpoint(tmp_path / size, size, tokens=32, length=16)
        weights[size] = sum(p.stat().st_size for p in (tmp_path / size).glob("*.safetensors"))
    (tmp_path / "keys.yaml").write_text(KEYS)
    done = run_python(MEMORY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "large-out").exists(), done.stderr
    more = weights["large"] - weights["small"]
    assert more > 50e6
    small, large = map(int, done.stdout.split())
    assert small > 2 * 256 * 5000, "the profiler sees the embeddings, which are the largest tensor"
    assert large - small < 0.02 * more, f"{more / 1e6:.0f} MB more weights, {(large - small) / 1e6:.0f} MB more memory"


def test_hidden_states_spill_to_disk_with_the_same_result(deep, tmp_path, monkeypatch):
    from surgery.calibration import layer_runner as stream

    source, inputs = deep
    recipe = make_recipe(structure="low_rank", calibration=inputs)
    convert(str(source), recipe, tmp_path / "kept", device="cpu")
    defaults = {"limit": 1000, "scratch": None, "ranks": None}
    monkeypatch.setattr(stream.LayerRunner.__init__, "__kwdefaults__", defaults)
    convert(str(source), recipe, tmp_path / "spilled", device="cpu")
    assert bytes_of(tmp_path / "kept") == bytes_of(tmp_path / "spilled")


@pytest.mark.parametrize(
    ("device", "params", "used"), [("cpu", 2**20, True), ("cpu", 2**16, False), ("cuda", 2**20, False)]
)
def test_onednn_computes_the_products_of_all_but_tiny_models(device, params, used, monkeypatch):
    """Its products have float32 accuracy here; the precision of the caller comes back."""
    monkeypatch.setattr("surgery.core.device._reduced_precision_is_exact", lambda: True)
    with fast_float32_matmul(torch.device(device), params):
        assert torch.get_float32_matmul_precision() == ("medium" if used else "highest")
    assert torch.get_float32_matmul_precision() == "highest"


# -- a journal that a stranger wrote ---------------------------------------------------------------
def interrupt_conversion(
    source: Path, recipe, out: Path, monkeypatch, before: str = "assemble", shard_bytes: int = 0
) -> list[dict]:
    """OUT.partial of a conversion killed when all pieces were written, or after its first shard; its journal's
    lines.
    """
    from surgery.checkpoint import writer as assemble
    from surgery.conversion import convert as conversion

    if shard_bytes:
        monkeypatch.setattr(assemble, "SHARD_BYTES", shard_bytes)
    add = Journal.add

    def crash(self, step, **what):
        if step == "shards" and before == "assemble":
            raise Crash
        add(self, step, **what)
        if step == before == "shard":
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(conversion.Journal, "add", crash)
        with pytest.raises(Crash):
            convert(str(source), recipe, out)
    return [json.loads(line) for line in (partial_path(out) / "journal.jsonl").read_text().splitlines()]


def rewritten(out: Path, lines: list[dict]) -> None:
    """With checksums that are right, as an attacker would write them."""
    from surgery.core.journal import CHECKSUM_KEY, _encode_entry

    plain = [{k: v for k, v in line.items() if k != CHECKSUM_KEY} for line in lines]
    (partial_path(out) / "journal.jsonl").write_bytes(b"".join(map(_encode_entry, plain)))


@pytest.fixture(scope="module")
def low_rank(deep, tmp_path_factory):
    """(source, recipe, digests of the uninterrupted result in one shard)"""
    recipe = make_recipe(structure="low_rank", keep=0.5)
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(str(deep[0]), recipe, out)
    return deep[0], recipe, bytes_of(out)


@pytest.mark.parametrize("how", ["absolute", "parent", "left out", "twice", "no list"])
def test_2_1_groups_of_a_journal_remove_and_move_nothing_else(low_rank, tmp_path, monkeypatch, how):
    source, recipe, whole = low_rank
    out, victim = tmp_path / "out", tmp_path / "victim.safetensors"
    lines = interrupt_conversion(source, recipe, out, monkeypatch)
    save_file({"secret": torch.ones(2)}, victim)
    names = [f"{line['piece']}.safetensors" for line in lines if line["step"] == "piece"]
    groups = {
        "absolute": [[*names, str(victim)]],
        "parent": [["../../victim.safetensors"], names],
        "left out": [names[1:]],
        "twice": [names, names[:1]],
        "no list": [5, None],
    }[how]
    rewritten(out, [*lines, {"step": "shards", "groups": groups}])
    convert(str(source), recipe, out, resume=True)
    assert load_file(victim).keys() == {"secret"} and bytes_of(out) == whole


@pytest.mark.parametrize("name", ["../../victim", "/tmp/victim", "model.layers.9", "", None, 5])
def test_2_1_a_journal_names_no_piece_that_the_plan_has_not(low_rank, tmp_path, monkeypatch, name):
    source, recipe, whole = low_rank
    lines = interrupt_conversion(source, recipe, tmp_path / "out", monkeypatch)
    lines[-1] = {**lines[-1], "piece": name}
    rewritten(tmp_path / "out", lines)
    convert(str(source), recipe, tmp_path / "out", resume=True)
    assert bytes_of(tmp_path / "out") == whole


@pytest.mark.parametrize(
    "how", ["zeroed", "one bit", "gone", "another layer's", "no sha256", "no table", "another table"]
)
def test_2_1_a_damaged_layer_shard_is_converted_again(low_rank, tmp_path, monkeypatch, how):
    """Also a piece in a journal of an earlier version, whose lines have no SHA-256."""
    source, recipe, whole = low_rank
    out = tmp_path / "out"
    lines = interrupt_conversion(source, recipe, out, monkeypatch)
    pieces = partial_path(out) / "pieces"
    piece, other = (pieces / f"model.layers.{n}.safetensors" for n in (2, 3))
    at = next(i for i, line in enumerate(lines) if line.get("piece") == "model.layers.2")
    data = bytearray(piece.read_bytes())
    if how == "zeroed":
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    elif how == "one bit":
        data[-100] ^= 1
    piece.write_bytes(other.read_bytes() if how == "another layer's" else data)
    if how == "gone":
        piece.unlink()
    elif how == "another layer's":  # with its digest
        lines[at]["sha256"] = hashlib.sha256(other.read_bytes()).hexdigest()
    elif how == "no sha256":
        lines = [{k: v for k, v in line.items() if k != "sha256"} for line in lines]
    elif how == "no table":
        lines[at]["table"] = {}
    elif how == "another table":
        entry = next(iter(lines[at]["table"].values()))
        lines[at]["table"] = {path: {**entry, "in_features": 4} for path in lines[at]["table"]}
    rewritten(out, lines)
    convert(str(source), recipe, out, resume=True)
    assert bytes_of(out) == whole


@pytest.mark.parametrize("how", ["as it was", "one bit", "gone"])
def test_2_1_a_finished_shard_is_checked(deep, tmp_path, monkeypatch, how):
    source, out = deep[0], tmp_path / "out"
    recipe = make_recipe(structure="low_rank", keep=0.5)
    interrupt_conversion(source, recipe, out, monkeypatch, before="shard", shard_bytes=150_000)
    convert(str(source), recipe, tmp_path / "whole")
    shard = min(partial_path(out).glob("model-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= how == "one bit"
    shard.write_bytes(data)
    if how == "gone":
        shard.unlink()
    convert(str(source), recipe, out, resume=True)
    assert bytes_of(out) == bytes_of(tmp_path / "whole") and (out / "model.safetensors.index.json").is_file()


def test_2_1_joined_weights_that_lack_a_tensor_are_refused(low_rank, tmp_path, monkeypatch):
    """Whatever let it pass: the names are compared once more before anything is renamed."""
    from surgery.conversion.layer_shards import LayerShards

    source, recipe, _ = low_rank
    shapes = LayerShards.expected_shapes
    monkeypatch.setattr(LayerShards, "expected_shapes", lambda self, entry: {**shapes(self, entry), "extra": (1,)})
    with pytest.raises(SurgeryError, match="lack tensor 'extra'"):
        convert(str(source), recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()
