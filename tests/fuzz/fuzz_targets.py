"""Fuzz targets, one per parser of untrusted files: for any bytes it must return a value or raise SurgeryError.

    TARGETS["recipe"].run(data)       raises if the parser fails otherwise, takes too long or writes elsewhere

A target defines the file that the bytes are written to, valid documents, and a function that parses the file.
tests/fuzz/test_fuzz.py mutates the documents a little; `python tests/fuzz/fuzz.py TARGET` does so for hours.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers.fuzzing import sandbox
from helpers.small import ROOT, make_recipe, tiny_config

from surgery.core.errors import SurgeryError

SECONDS = 20.0  # of CPU time: enough for a slow machine, since it guards against inputs that never end
HOME = Path(tempfile.mkdtemp(prefix="fuzz-"))
atexit.register(shutil.rmtree, HOME, True)
HUB = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
ATTENTION = {"mixer": "linear", "mask": "decay", "start": "copied", "layers": "1"}
RULES = [{"match": "mlp.down", "structure": "pivoted_low_rank"}, {"match": "attention.key", "structure": "kronecker"}]
MIXED = {"structure": "btt", "blocks": [2, 2], "rules": RULES, "attention": ATTENTION}


@dataclass(frozen=True)
class FuzzTarget:
    """A parser under test.

    Attributes:
        name: name of the input file; None: the input is a string.
        read: parses the file or string.
        setup: writes other files beside it.
        also: further folders that the parser may write to.
    """

    name: str
    file: str | None
    read: Callable[[Any], Any]
    seeds: Callable[[], list[bytes]]
    setup: Callable[[Path], Any]
    also: tuple[Path, ...] = ()

    @functools.cached_property
    def folder(self) -> Path:
        """A fresh folder with the files of `setup`."""
        folder = Path(tempfile.mkdtemp(dir=HOME, prefix=f"fuzz-{self.name}-"))
        self.setup(folder)
        return folder

    def run(self, data: bytes) -> None:
        """Parse the data inside the sandbox; only SurgeryError may be raised."""
        folder = self.folder
        given: Any = data.decode("utf-8", "replace")
        if self.file is not None:
            given = folder / self.file
            given.write_bytes(data)
        with sandbox(folder, SECONDS, *self.also):
            try:
                self.read(given)
            except SurgeryError as error:
                assert 0 < len(str(error)) < 20_000, "a message nobody reads"

    def check_seed(self, data: bytes) -> None:
        """Parse a valid input without the sandbox, which also triggers late imports."""
        if self.file is not None:
            (self.folder / self.file).write_bytes(data)
        self.read(self.folder / self.file if self.file is not None else data.decode())


TARGETS: dict[str, FuzzTarget] = {}


def fuzz_target(
    file: str | None, *seeds: Any, setup: Callable[[Path], Any] = lambda folder: None, also: Any = ()
) -> Any:
    """Register a parser. seeds: text, JSON values, or functions that return bytes."""

    def add(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = read.__name__
        TARGETS[name] = FuzzTarget(name, file, read, lambda: [_to_bytes(seed) for seed in seeds], setup, tuple(also))
        return read

    return add


def _to_bytes(seed: Any) -> bytes:
    seed = seed() if callable(seed) else seed
    return seed if isinstance(seed, bytes) else (seed if isinstance(seed, str) else json.dumps(seed)).encode()


def _read_repository_file(path: str) -> Callable[[], bytes]:
    return lambda: (ROOT / path).read_bytes()


# -- checkpoints -------------------------------------------------------------------------------------
@functools.cache
def checkpoint() -> Path:
    """Folder of a tiny Llama."""
    torch.manual_seed(0)
    cls, config = tiny_config("llama")
    folder = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-source-")) / "llama"
    cls(config).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return folder


@functools.cache
def converted_checkpoint() -> Path:
    """Folder of the same, converted, with every kind of entry in its table."""
    from surgery.conversion.convert import convert

    out = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-converted-")) / "llama-half"
    convert(str(checkpoint()), make_recipe(**MIXED), out)
    return out


def _copy_into(made: Callable[[], Path]) -> Callable[[Path], Any]:
    return lambda folder: shutil.copytree(made(), folder, dirs_exist_ok=True)


def _read_file_of(made: Callable[[], Path], name: str) -> Callable[[], bytes]:
    return lambda: (made() / name).read_bytes()


@fuzz_target("config.json", _read_file_of(checkpoint, "config.json"), setup=_copy_into(checkpoint))
def config(path: Path) -> None:
    """A source config: plan a conversion from it."""
    from surgery.checkpoint.meta_model import MetaModel
    from surgery.checkpoint.outline import describe_checkpoint
    from surgery.checkpoint.source import open_checkpoint
    from surgery.planning.plan import make_plan

    source = open_checkpoint(str(path.parent))
    make_plan(describe_checkpoint(source), make_recipe(structure="btt"))
    make_plan(MetaModel(source), make_recipe(structure="btt"))


@fuzz_target("model.safetensors", _read_file_of(checkpoint, "model.safetensors"))
def header(path: Path) -> None:
    """Header and tensors of a safetensors file."""
    from surgery.checkpoint.safetensors_io import read_header, read_tensor

    for info in read_header(path).values():
        read_tensor(info)


@fuzz_target(
    "model.safetensors",
    _read_file_of(converted_checkpoint, "model.safetensors"),
    setup=_copy_into(converted_checkpoint),
)
def weights(path: Path) -> None:
    """A converted checkpoint's weights, multiplied out."""
    from surgery.conversion.densify import densify

    out = path.parent.with_name(f"{path.parent.name}-dense")
    shutil.rmtree(out, ignore_errors=True)
    densify(str(path.parent), out)


def _save_sharded(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoint()).save_pretrained(folder, max_shard_size="20KB")
    shutil.copy(folder / "model.safetensors.index.json", folder / "index.good")


@functools.cache
def _index_bytes() -> bytes:
    return (TARGETS["index"].folder / "index.good").read_bytes()


@fuzz_target("model.safetensors.index.json", _index_bytes, setup=_save_sharded)
def index(path: Path) -> None:
    """Index of a sharded checkpoint."""
    from surgery.checkpoint.source import open_checkpoint

    open_checkpoint(str(path.parent)).fingerprint()


@fuzz_target("config.json", _read_file_of(converted_checkpoint, "config.json"), setup=_copy_into(converted_checkpoint))
def table(path: Path) -> None:
    """The table of structured linears and mixers, as inspected, densified and loaded."""
    from surgery.checkpoint.table import read_mixers, read_table
    from surgery.conversion.densify import densify
    from surgery.publish.summary import inspect

    inspect(str(path.parent))
    said = json.loads(path.read_text())
    out = path.parent.with_name(f"{path.parent.name}-dense")
    shutil.rmtree(out, ignore_errors=True)
    densify(str(path.parent), out)
    if read_table(said, "it") or read_mixers(said, "it"):
        _load(path.parent)


def _load(folder: Path) -> None:
    """Load with transformers, whose own errors about a config are accepted."""
    from surgery.mixers import mixer_config
    from surgery.modeling.modules import build_module

    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    for spec in table["modules"].values():
        build_module(spec)
    for spec in table.get("mixers", {}).values():
        mixer_config(spec)


@fuzz_target(
    "surgery_report.json",
    _read_file_of(converted_checkpoint, "surgery_report.json"),
    setup=_copy_into(converted_checkpoint),
)
def report(path: Path) -> None:
    """report.json as read by inspect, the page and a push."""
    from surgery.cli.console import show
    from surgery.publish.html.page import write_page
    from surgery.publish.hub.push import prepare_upload
    from surgery.publish.summary import inspect
    from surgery.publish.tables import inspect_table, module_table, upload_table

    said = inspect(str(path.parent))
    for parts in (inspect_table(said), module_table(said)):
        _call_silently(show, parts)
    write_page(str(path.parent), path.parent / "report.html")
    (path.parent / "report.html").unlink()
    _call_silently(show, upload_table({"dry_run": True, **prepare_upload(str(path.parent), "me/it", "mit").to_dict()}))


def _call_silently(do: Callable[..., Any], *given: Any) -> None:
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        do(*given)


RECORDED = {
    "provenance": {"versions": {"torch": "2.0"}},
    "models": {"converted": {"name": "it", "fingerprint": "0" * 64}},
    "options": {"text": "text.txt", "limit": 3},
    "all_options": {"text": "text.txt", "limit": 3, "tokens": 64},
    "suites": {
        "ppl": {
            "converted": {
                "provenance": {
                    "versions": {"torch": "2.1"},
                    "suite_version": 1,
                    "data": {"a/b": {"sha256": "0", "commit": "1"}},
                },
                "reads": [
                    {"kind": kind, "name": name, "digest": "0"}
                    for kind, name in (("file", "text.txt"), ("mirror", "a/b"), ("package", "lm_eval"))
                ],
            }
        }
    },
}


@fuzz_target("results.json", RECORDED)
def recorded_results(path: Path) -> None:
    """results.json as read by `surgery eval --verify`."""
    from surgery.eval.verify import verify

    done = verify(path, text=str(path), data_root=path.parent)
    json.dumps(done.to_dict())
    assert all("\n" not in line for line in done.lines())


@fuzz_target("README.md", "---\nlicense: mit\nlicense_name: x\nbase_model: a/b\n---\n# It\n")
def card(path: Path) -> None:
    """A checkpoint's model card, as read for its license."""
    from surgery.publish.hub.license import find_license, read_local_card

    read_local_card(path.parent)
    source: Any = SimpleNamespace(folder=path.parent, name="it")
    find_license(source, {"source": {"name": str(path.parent), "revision": None}}, None, None).metadata()


# -- recipes -----------------------------------------------------------------------------------------
@functools.cache
def _meta_model() -> Any:
    from surgery.checkpoint.meta_model import MetaModel
    from surgery.checkpoint.source import open_checkpoint

    return MetaModel(open_checkpoint(str(checkpoint())))


RECIPES = ("btt-half", "auto-half", "hybrid-25", "mlr-cache-60", "mhla", "sliding-window")


@fuzz_target("r.yaml", *(_read_repository_file(f"recipes/convert/{name}.yaml") for name in RECIPES), MIXED)
def recipe(path: Path) -> None:
    """A conversion recipe, and the plan made from it."""
    from surgery.planning.plan import make_plan
    from surgery.planning.recipe import load_recipe
    from surgery.publish.summary import plan_dict
    from surgery.publish.tables import plan_table

    plan_table(plan_dict(make_plan(_meta_model(), load_recipe(str(path)))))


@fuzz_target(None, "keep=0.75", "rules.0.match=mlp.*", "attention={mixer: linear, mask: decay}", "stages.*.rate=1e-3", "layers=2:-2", 'blocks="sqrt"')  # fmt: skip
def override(text: str) -> None:
    """A --set option of conversion and healing recipes."""
    from surgery.planning.recipe import parse_recipe
    from surgery.training.recipe import load_healing_recipe

    for read in (
        lambda: parse_recipe(json.dumps(MIXED), "here", [text]),
        lambda: load_healing_recipe("attention", [text]),
    ):
        with contextlib.suppress(SurgeryError):
            read()


HEALING = ("linears", "attention", "new-modules")
STAGES = [{"kind": "align", "rate": "1e-3", "tokens": "1k"}, {"kind": "lora", "rank": 4, "tokens": 512, "rate": 1e-4}]
HEAL = {
    "data": {"sources": [{"path": "a.jsonl", "weight": 2.0}], "validation": 0.01, "packing": "stream"},
    "common": {"batch": 4, "length": 64, "schedule": {"name": "cosine"}, "optimiser": {"name": "adamw"}},
    "stages": [
        *STAGES,
        {"kind": "distill", "tokens": "1k", "rate": 1e-4, "trains": ["all"], "rates": {"attention": 0.1}},
    ],
    "tiny": {"stages.*.tokens": 4096},
}


@fuzz_target("r.yaml", *(_read_repository_file(f"recipes/healing/{name}.yaml") for name in HEALING), HEAL)
def healing(path: Path) -> None:
    """A healing recipe."""
    from surgery.training.recipe import load_healing_recipe, stage_data_config

    for tiny in (False, True):
        try:
            made = load_healing_recipe(str(path), tiny=tiny)
        except SurgeryError:
            continue
        for stage in made.stages:
            stage_data_config(made, stage)
            assert stage.steps >= 0
        made.model_dump_json()


@fuzz_target("r.yaml", _read_repository_file("recipes/pretrain/gpt2-btt.yaml"))
def pretrain(path: Path) -> None:
    """A pretraining recipe."""
    from surgery.training.pretrain.model_config import make_config
    from surgery.training.pretrain.pretrain import recipe_digest
    from surgery.training.pretrain.recipe import load_pretrain_recipe

    made = load_pretrain_recipe(str(path))
    recipe_digest(made)
    make_config(made.new.model, _Tokenizer())


class _Tokenizer:
    bos_token_id, eos_token_id, pad_token_id = 0, 1, 2

    def __len__(self) -> int:
        return 300


# -- what surgery wrote and reads again --------------------------------------------------------------
@fuzz_target("journal.jsonl", lambda: _interrupted_lines(), setup=lambda folder: None)
def journal(path: Path) -> None:
    """A resumed conversion's journal.

    Checksums of the lines are recomputed after mutation, because an attacker would do so too.
    """
    from surgery.conversion.convert import convert

    work, out = path.parent / "out.partial", path.parent / "out"
    for folder in (work, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_interrupted_conversion(), work)
    (work / "journal.jsonl").write_bytes(
        b"".join(map(_with_valid_checksum, path.read_bytes().splitlines(keepends=True)))
    )
    convert(str(checkpoint()), make_recipe(**MIXED), out, resume=True)


def _with_valid_checksum(raw: bytes) -> bytes:
    from surgery.core.journal import CHECKSUM_KEY, _encode_entry

    try:
        line = json.loads(raw)
        line.pop(CHECKSUM_KEY, None)
        return _encode_entry(line)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return raw


@functools.cache
def _interrupted_conversion() -> Path:
    """OUT.partial of a conversion that was interrupted before writing the checkpoint."""
    from surgery.conversion import sinks
    from surgery.conversion.convert import convert

    out = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-interrupted-")) / "out"
    assemble = sinks.write_checkpoint
    sinks.write_checkpoint = _raise_interrupt  # type: ignore[assignment]
    try:
        convert(str(checkpoint()), make_recipe(**MIXED), out)
    except KeyboardInterrupt:
        pass
    finally:
        sinks.write_checkpoint = assemble
    return sinks.partial_path(out)


def _raise_interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def _interrupted_lines() -> bytes:
    return (_interrupted_conversion() / "journal.jsonl").read_bytes()


@functools.cache
def _text() -> Path:
    path = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-text-")) / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"Mia saw {n} birds in the tree."}) + "\n" for n in range(80)))
    return path


@functools.cache
def _data() -> Any:
    import importlib.resources

    from surgery.calibration.data import load_tokenizer
    from surgery.training.data.dataset import make_data
    from surgery.training.data.recipe import DataConfig

    tokenizer = load_tokenizer(Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint"))))
    return make_data(DataConfig(sources=str(_text())), tokenizer, 16, 0)  # type: ignore[arg-type]


@functools.cache
def _teacher_cache() -> Path:
    """Folder of a teacher cache."""
    from helpers.small import DECODER
    from transformers import LlamaConfig, LlamaForCausalLM

    from surgery.training.teacher_cache.write_read import write_teacher_cache

    torch.manual_seed(0)
    data = _data()
    teacher = LlamaForCausalLM(LlamaConfig(**{**DECODER, "vocab_size": len(data.tokenizer)}))
    folder = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-targets-")) / "cache"
    write_teacher_cache(teacher, data, folder, 4, 8, rows=2, per_shard=4)
    return folder


def _read_targets(path: Path) -> None:
    from surgery.training.teacher_cache.write_read import TeacherCache

    cache = TeacherCache(path.parent)
    cache.check(_data())
    for row in (0, len(cache) - 1, 5, 2**50):
        with contextlib.suppress(SurgeryError):
            cache.targets(row)


@fuzz_target(
    "index.json", lambda: (_teacher_cache() / "index.json").read_bytes(), setup=lambda f: _copy_into(_teacher_cache)(f)
)
def teacher_index(path: Path) -> None:
    """index.json of a teacher cache."""
    _read_targets(path)


@fuzz_target(
    "shard",
    lambda: (_teacher_cache() / "targets-00000.safetensors").read_bytes(),
    setup=lambda f: _copy_into(_teacher_cache)(f),
)
def teacher_shard(path: Path) -> None:
    """A shard of a teacher cache; the index is updated with its checksum."""
    import hashlib

    data, index = path.read_bytes(), json.loads((_teacher_cache() / "index.json").read_text())
    (path.parent / "targets-00000.safetensors").write_bytes(data)
    index["shards"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path.parent / "index.json").write_text(json.dumps(index))
    _read_targets(path)


class _TrainedParameters:
    """Parameters and their optimizer after one step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.parameters = {
            "a.weight": torch.nn.Parameter(torch.randn(3, 2)),
            "weight": torch.nn.Parameter(torch.randn(2)),
        }
        self.optimiser = torch.optim.AdamW(self.parameters.values())
        for parameter in self.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        self.optimiser.step()

    def train_state(self) -> Any:
        from surgery.training.checkpoints import TorchOptimizerState, TrainState

        means = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return TrainState(dict(self.parameters), TorchOptimizerState(self.optimiser, [list(self.parameters)]), means)


@functools.cache
def _saved_checkpoint() -> Path:
    from surgery.training.checkpoints import CheckpointManager, TrainPosition

    folder = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-checkpoints-"))
    where = CheckpointManager(folder, 2)
    return where.save(
        TrainPosition(0, 5, 20, 1280, {"trained": ["weight"], "stages": [], "best": 1.5}),
        _TrainedParameters().train_state(),
    )


def _read_saved(path: Path) -> None:
    """Replace the saved file by this one and load the training checkpoint."""
    from surgery.training.checkpoints import CheckpointManager

    where = CheckpointManager(path.parent, 2)
    folder = path.parent / _saved_checkpoint().name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_saved_checkpoint(), folder)
    shutil.copy(path, folder / path.name)
    latest = where.latest()
    assert latest is not None
    position = where.read_position(latest)
    assert isinstance(position.step, int) and isinstance(position.notes.get("trained", []), list)
    trained = _TrainedParameters()
    where.restore_weights(latest, dict(trained.parameters))
    where.restore(latest, trained.train_state())


@fuzz_target("state.json", lambda: (_saved_checkpoint() / "state.json").read_bytes())
def training_state(path: Path) -> None:
    """state.json of a training checkpoint."""
    _read_saved(path)


@fuzz_target("optimiser.safetensors", lambda: (_saved_checkpoint() / "optimiser.safetensors").read_bytes())
def training_optimiser(path: Path) -> None:
    """Optimizer state of a training checkpoint."""
    _read_saved(path)


@fuzz_target("weights.safetensors", lambda: (_saved_checkpoint() / "weights.safetensors").read_bytes())
def training_weights(path: Path) -> None:
    """Weights of a training checkpoint."""
    _read_saved(path)


@fuzz_target("rng-00000.safetensors", lambda: (_saved_checkpoint() / "rng-00000.safetensors").read_bytes())
def training_rng(path: Path) -> None:
    """Random states of a training checkpoint."""
    _read_saved(path)


@fuzz_target("log.jsonl", '{"stage": 0, "kind": "lm", "step": 1, "total_steps": 1, "tokens": 64, "loss": 3.0}\n{"stage": 0, "kind": "lm", "step": 2, "total_steps": 2, "tokens": 128, "loss": 2.0, "validation": 2.5}\n')  # fmt: skip
def training_log(path: Path) -> None:
    """A training log, as continued, drawn and shown on the page."""
    from surgery.training.logging import TrainingLog, draw_curve

    log = TrainingLog(path.parent)
    log.truncate_after(0, 1)
    draw_curve(log.lines(), path.parent / "curve.png")


@functools.cache
def _model() -> Any:
    from transformers import AutoModelForCausalLM

    import surgery  # noqa: F401

    return AutoModelForCausalLM.from_pretrained(converted_checkpoint())


def _saved_cache() -> bytes:
    from surgery.modeling.cache_io import save_cache

    path = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-cache-")) / "cache.safetensors"
    save_cache(_model()(torch.arange(3, 12)[None], use_cache=True).past_key_values, path)
    return path.read_bytes()


@fuzz_target("cache.safetensors", _saved_cache)
def cache_file(path: Path) -> None:
    """A saved generation cache."""
    from surgery.modeling.cache_io import load_cache

    load_cache(path, _model())


@functools.cache
def _result_store() -> tuple[Any, Path, dict[str, Any]]:
    from surgery.eval.results.store import ResultStore, result_key
    from surgery.eval.suite import EvalMetric, EvalOptions, Sample, SuiteResult

    store = ResultStore(Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-results-")))
    key = result_key("0" * 64, "ppl", EvalOptions(), "cpu", "float32")
    place = store.result_folder("it", "0" * 64, "ppl")
    assert place is not None
    samples = [Sample("ppl", str(n), {"nll": 2.0 + n}, {"length": 8}, 8.0, shown={"text": "a"}) for n in range(3)]
    store.save(place, key, SuiteResult(samples, {"nll": EvalMetric("nll", "ppl", False)}, arrays={"a": torch.ones(2)}))
    return store, place, key


def _read_result(path: Path) -> None:
    from surgery.eval.results.compare import compare_results

    store, place, key = _result_store()
    folder = path.parent / "ppl"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place, folder)
    shutil.copy(path, folder / path.name)
    found = store.load(folder, key)
    if found is not None:
        compare_results("ppl", {"base": found, "converted": found}, True, 0)


@fuzz_target("result.json", lambda: (_result_store()[1] / "result.json").read_bytes())
def eval_result(path: Path) -> None:
    """result.json of an evaluation."""
    _read_result(path)


@fuzz_target("samples.jsonl", lambda: (_result_store()[1] / "samples.jsonl").read_bytes())
def eval_samples(path: Path) -> None:
    """samples.jsonl of an evaluation."""
    _read_result(path)


@fuzz_target("arrays.safetensors", lambda: (_result_store()[1] / "arrays.safetensors").read_bytes())
def eval_arrays(path: Path) -> None:
    """Arrays of an evaluation."""
    _read_result(path)


ROW = {
    "task": "ppl", "suite": "ppl", "group": {"length": 64}, "samples": 40, "flags": [], "p": None,
    "metric": {"name": "nll", "title": "perplexity", "scale": 1.0}, "values": {"base": 2.0, "converted": 2.5},
    "errors": {"base": 0.1, "converted": None}, "difference": {"change": 0.5, "low": -1.0, "high": 1.0},
}  # fmt: skip
EVAL_RESULTS = {
    "rows": [ROW, {**ROW, "task": "needle", "group": {"length": 512, "depth": 0.5}}],
    "options": {"text": "/home/a"},
}


@fuzz_target("results.json", EVAL_RESULTS)
def eval_results(path: Path) -> None:
    """results.json as shown on the page and the card."""
    from surgery.publish.html.page import write_page
    from surgery.publish.hub.push import prepare_upload

    write_page(str(converted_checkpoint()), path.parent / "report.html", path.parent)
    prepare_upload(str(converted_checkpoint()), "me/it", "mit", measured=path.parent)


@fuzz_target("model-float32-cpu.0.jsonl", '\n{"key": "0123", "answer": [1.5, true]}\n{"key": "4567", "answer": "a"}')
def eval_answers(path: Path) -> None:
    """The answer cache of --use-cache."""
    from surgery.core.distributed import DistContext
    from surgery.eval.lm_eval.answer_cache import AnswerCache

    eval_model: Any = SimpleNamespace(
        fingerprint="", dtype=torch.float32, device=torch.device("cpu"), ranks=DistContext()
    )
    kept = AnswerCache(eval_model, path.parent)
    assert all(isinstance(key, str) for key in kept.answers)


RECORDS = (
    {"query": "Question: q?\n", "choices": ["a", "b"], "gold": 0},
    {"context_options": ["the lamp", "the box"], "continuation": "is lit.", "gold": 1},
    {"context": "Mia lit the", "continuation": "lamp"},
    {"query": "Passage: p\nQuestion: q?\n", "choices": ["no", "yes"], "gold": 1},
    {"query": "Mia slept, because", "choices": ["a", "b"], "gold": 1},
    {"goal": "g", "sol1": "a", "sol2": "b", "label": 0},
)


@fuzz_target("records.jsonl", *[json.dumps(record) + "\n" + json.dumps(record) for record in RECORDS])
def local_records(path: Path) -> None:
    """Records of a task in a local file, for every task whose records have a second form."""
    from surgery.eval.local_records import CONVERTERS, read_records

    for task in (*CONVERTERS, "hellaswag"):
        with contextlib.suppress(SurgeryError):
            read_records(task, path)


@fuzz_target("README.md", lambda: (ROOT / "eval/mirror/baber/piqa/README.md").read_bytes(), "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: test, path: default/test.jsonl}\nsurgery_whole: [default]\n---\n")  # fmt: skip
def mirror(path: Path) -> None:
    """The README header of a mirrored data set, as fetch-eval-data reads it."""
    from surgery.eval.fetch import DatasetSource, _read_readme

    head = _read_readme(path.parent)
    assert not any(head.lacks(DatasetSource("a/b", name)) for name in head.complete or ())
    for name in [config["config_name"] for config in head.configs]:
        head.lacks(DatasetSource("a/b", name, ("test",)))


@fuzz_target(None, '{"max_seq_lengths": [4096]}', "temperature=0.7,top_p=0.9,do_sample=true", "ppl=1.05", "ppl:nll=0.9", "4096,8192", "0,0.5,1")  # fmt: skip
def eval_options(text: str) -> None:
    """Options of an evaluation."""
    from surgery.eval.options import parse_options
    from surgery.eval.results.thresholds import parse_thresholds

    for read in (
        *(
            functools.partial(parse_options, {name: text}, "eval")
            for name in ("metadata", "samples", "gen_kwargs", "lengths", "depths")
        ),
        *(functools.partial(parse_options, {name: text}, "eval") for name in ("pairs", "batch_size", "tasks")),
        lambda: parse_options({"data": [text]}, "eval"),
        lambda: parse_thresholds([text], True),
    ):
        with contextlib.suppress(SurgeryError):
            read()


@fuzz_target("measured.json", _read_repository_file("kernels/tuning.json"))
def measured(path: Path) -> None:
    """Kernel timings."""
    from surgery.kernels import tuning as times

    before = times.TABLE
    times.TABLE = path
    times.tables.cache_clear()
    times.device_rows.cache_clear()
    times.fastest_measured.cache_clear()
    try:
        place = times.DeviceKey((9, 0), "bfloat16")
        times.fastest_measured(
            "btt", "forward", times.named_sizes(tokens=512, inputs=4096, outputs=4096, rank=4), place
        )
    finally:
        times.TABLE = before
        times.tables.cache_clear()
        times.device_rows.cache_clear()
        times.fastest_measured.cache_clear()


SEARCH_ROW = {"choice": "model.layers.0 mlp: pruned 50%", "covers": ["model.layers.0 mlp"], "family": "pruned"}
SEARCH_ROW |= {"damage": 0.1, "error": None, "costs": {"bytes": -64}, "mixer": {"mixer": "mlr", "ranks": [4, 4]}}


@fuzz_target(
    "table.json",
    {
        "format": 1,
        "start": {"source": {"name": "it"}},
        "original": {"bytes": 640},
        "at": 4096,
        "rows": [SEARCH_ROW],
        "plans": [{"choices": [SEARCH_ROW["choice"]], "damage": 0.2, "error": 0.01}],
    },
)
def search_table(path: Path) -> None:
    """The table of an interrupted search."""
    from surgery.budget.table import read_table

    known = {str(SEARCH_ROW["choice"])}
    measured = read_table(path.parent, {"source": {"name": "it"}}, known, known)
    assert all(0 <= row.damage <= 1e30 for row in measured.rows.values())
    assert all(0 <= damage.nats <= 1e30 and set(key) <= known for key, damage in measured.plans.items())


@fuzz_target("gains.json", _read_repository_file("surgery/budget/gains.json"))
def search_gains(path: Path) -> None:
    """What healing gives back, for a search."""
    from surgery.budget.gains import read_gains

    assert all(gain.gain > 0 for gain in read_gains(path).values())


@fuzz_target(
    "bits.yaml", 'rules:\n- {match: "mlp.*", layers: "0:1", bits: 4, group: 16}\n- {match: mlp.down, bits: 8}\n'
)
def bits_rules(path: Path) -> None:
    """Rules of `surgery quantize --rules`."""
    from surgery.architectures.linears import find_linears
    from surgery.planning.bits_recipe import read_bits

    rules = read_bits(path)
    for linear in find_linears(_meta_model().model).linears:
        rules.rule_of(linear)


@fuzz_target("inputs.safetensors", lambda: _input_bytes())
def ready_inputs(path: Path) -> None:
    """Prepared model inputs as calibration data."""
    from surgery.calibration.data import CalibrationSet, calibration_inputs, check_model_inputs

    inputs = calibration_inputs(str(path), path.parent, None, 64, 8)
    check_model_inputs(inputs, _meta_model().model)
    CalibrationSet.from_inputs(inputs, 0.125).digest()


@fuzz_target("pairs.jsonl", '{"input": "a b", "target": "c"}\n{"input": "d", "target": "e"}\n')
def pairs(path: Path) -> None:
    """Pairs of texts as calibration data."""
    from surgery.calibration.pairs import read_pairs

    for source, target in read_pairs(path) or ():
        (source + target).encode()


@fuzz_target("metadata.jsonl", '{"file_name": "0.png", "text": "a b"}\n')
def captions(path: Path) -> None:
    """Captions of calibration images."""
    from surgery.calibration.images import read_captions

    for text in read_captions(path).values():
        text.encode()


def _input_bytes() -> bytes:
    from helpers.small import tiny_inputs
    from safetensors.torch import save

    return save(tiny_inputs("llama", 8))


@fuzz_target("rows.jsonl", lambda: b"\n".join(_text().read_bytes().split(b"\n")[:10]), {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}, {"prompt": "a", "completion": "b"}, also=[HUB])  # fmt: skip
def training_rows(path: Path) -> None:
    """Training rows read with `datasets`, which caches them in its own folder."""
    from surgery.training.data.dataset import make_data
    from surgery.training.data.recipe import DataConfig

    data = make_data(DataConfig(sources=str(path)), _data().tokenizer, 16, 0)  # type: ignore[arg-type]
    for _, example in zip(range(4), data.examples(0)):
        assert example["input_ids"].shape == (16,)
