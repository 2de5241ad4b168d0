"""What a stranger's file may hold, one target a parser: bytes in; a value or a SurgeryError out, and nothing else.

    TARGETS["recipe"].run(data)       raises where the parser fails otherwise, takes too long or writes elsewhere

A target says which file of which folder the bytes become, gives documents that are good, and reads. tests/fuzz/test_fuzz.py
changes them a little; `python tests/fuzz/fuzz.py TARGET` does so for hours.
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
from helpers.fuzzing import fence
from helpers.small import ROOT, recipe_of, tiny_config

from surgery.core.errors import SurgeryError

SECONDS = 4.0  # of CPU
HOME = Path(tempfile.mkdtemp(prefix="fuzz-"))
atexit.register(shutil.rmtree, HOME, True)
HUB = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
ATTENTION = {"mixer": "linear", "mask": "decay", "start": "copied", "layers": "1"}
RULES = [{"match": "mlp.down", "structure": "pivoted_low_rank"}, {"match": "attention.key", "structure": "kronecker"}]
MIXED = {"structure": "btt", "blocks": [2, 2], "rules": RULES, "attention": ATTENTION}


@dataclass(frozen=True)
class Target:
    """name of the file, None: the bytes are a string; read(file): parses; setup(folder): what lies beside it."""

    name: str
    file: str | None
    read: Callable[[Any], Any]
    seeds: Callable[[], list[bytes]]
    setup: Callable[[Path], Any]
    also: tuple[Path, ...] = ()  # other places that it may write to

    @functools.cached_property
    def folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(dir=HOME, prefix=f"fuzz-{self.name}-"))
        self.setup(folder)
        return folder

    def run(self, data: bytes) -> None:
        folder = self.folder
        given: Any = data.decode("utf-8", "replace")
        if self.file is not None:
            given = folder / self.file
            given.write_bytes(data)
        with fence(folder, SECONDS, *self.also):
            try:
                self.read(given)
            except SurgeryError as error:
                assert 0 < len(str(error)) < 20_000, "a message nobody reads"

    def accepts(self, data: bytes) -> None:
        """Without the fence: what is imported late is imported now."""
        if self.file is not None:
            (self.folder / self.file).write_bytes(data)
        self.read(self.folder / self.file if self.file is not None else data.decode())


TARGETS: dict[str, Target] = {}


def target(file: str | None, *seeds: Any, setup: Callable[[Path], Any] = lambda folder: None, also: Any = ()) -> Any:
    """seeds: text, JSON values, or functions of no arguments that give bytes."""

    def add(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = read.__name__
        TARGETS[name] = Target(name, file, read, lambda: [_bytes(seed) for seed in seeds], setup, tuple(also))
        return read

    return add


def _bytes(seed: Any) -> bytes:
    seed = seed() if callable(seed) else seed
    return seed if isinstance(seed, bytes) else (seed if isinstance(seed, str) else json.dumps(seed)).encode()


def _shipped(path: str) -> Callable[[], bytes]:
    return lambda: (ROOT / path).read_bytes()


# -- checkpoints -------------------------------------------------------------------------------------
@functools.cache
def checkpoint() -> Path:
    """A tiny llama."""
    torch.manual_seed(0)
    cls, config = tiny_config("llama")
    folder = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-source-")) / "llama"
    cls(config).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return folder


@functools.cache
def converted() -> Path:
    """It, with every kind of thing in its table."""
    from surgery.conversion.convert import convert

    out = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-converted-")) / "llama-half"
    convert(str(checkpoint()), recipe_of(**MIXED), out)
    return out


def _copy(made: Callable[[], Path]) -> Callable[[Path], Any]:
    return lambda folder: shutil.copytree(made(), folder, dirs_exist_ok=True)


def _of(made: Callable[[], Path], name: str) -> Callable[[], bytes]:
    return lambda: (made() / name).read_bytes()


@target("config.json", _of(checkpoint, "config.json"), setup=_copy(checkpoint))
def config(path: Path) -> None:
    from surgery.checkpoint.meta_model import Skeleton
    from surgery.checkpoint.source import open_source
    from surgery.planning.plan import make_plan

    make_plan(Skeleton(open_source(str(path.parent))), recipe_of(structure="btt"))


@target("model.safetensors", _of(checkpoint, "model.safetensors"))
def header(path: Path) -> None:
    from surgery.checkpoint.safetensors_io import read_header, read_tensor

    for info in read_header(path).values():
        read_tensor(info)


@target("model.safetensors", _of(converted, "model.safetensors"), setup=_copy(converted))
def weights(path: Path) -> None:
    """Of a converted checkpoint, multiplied out."""
    from surgery.conversion.densify import densify

    out = path.parent / "dense"
    shutil.rmtree(out, ignore_errors=True)
    densify(str(path.parent), out)


def _split(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoint()).save_pretrained(folder, max_shard_size="20KB")
    shutil.copy(folder / "model.safetensors.index.json", folder / "index.good")


@functools.cache
def _index() -> bytes:
    return (TARGETS["index"].folder / "index.good").read_bytes()


@target("model.safetensors.index.json", _index, setup=_split)
def index(path: Path) -> None:
    from surgery.checkpoint.source import open_source

    open_source(str(path.parent)).fingerprint()


@target("config.json", _of(converted, "config.json"), setup=_copy(converted))
def table(path: Path) -> None:
    """The table of stand-ins and mixers, by which a checkpoint is looked at, undone and loaded."""
    from surgery.checkpoint.table import mixers_of, table_of
    from surgery.conversion.densify import densify
    from surgery.publish.summary import inspect

    inspect(str(path.parent))
    said = json.loads(path.read_text())
    out = path.parent / "dense"
    shutil.rmtree(out, ignore_errors=True)
    densify(str(path.parent), out)
    if table_of(said, "it") or mixers_of(said, "it"):
        _load(path.parent)


def _load(folder: Path) -> None:
    """By transformers, whose own complaints about a config are its own."""
    from surgery.mixers import mixer_config
    from surgery.modeling.modules import empty_standin

    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    for spec in table["modules"].values():
        empty_standin(spec)
    for spec in table.get("mixers", {}).values():
        mixer_config(spec)


@target("surgery_report.json", _of(converted, "surgery_report.json"), setup=_copy(converted))
def report(path: Path) -> None:
    """All that reads it: inspect with its tables, the page, a push."""
    from surgery.cli.console import show
    from surgery.publish.html.page import write_page
    from surgery.publish.hub.push import pack
    from surgery.publish.summary import inspect
    from surgery.publish.tables import inspect_table, module_table, parcel_table

    said = inspect(str(path.parent))
    for parts in (inspect_table(said), module_table(said)):
        _silently(show, parts)
    write_page(str(path.parent), path.parent / "report.html")
    (path.parent / "report.html").unlink()
    _silently(show, parcel_table({"dry_run": True, **pack(str(path.parent), "me/it", "mit").to_dict()}))


def _silently(do: Callable[..., Any], *given: Any) -> None:
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        do(*given)


@target("README.md", "---\nlicense: mit\nlicense_name: x\nbase_model: a/b\n---\n# It\n")
def card(path: Path) -> None:
    from surgery.publish.hub.license import licence_of, local_card

    local_card(path.parent)
    source: Any = SimpleNamespace(folder=path.parent, name="it")
    licence_of(source, {"source": {"name": str(path.parent), "revision": None}}, None, None).metadata()


# -- recipes -----------------------------------------------------------------------------------------
@functools.cache
def _skeleton() -> Any:
    from surgery.checkpoint.meta_model import Skeleton
    from surgery.checkpoint.source import open_source

    return Skeleton(open_source(str(checkpoint())))


RECIPES = ("btt-half", "auto-half", "hybrid-25", "mlr-cache-60", "mhla", "sliding-window")


@target("r.yaml", *(_shipped(f"recipes/convert/{name}.yaml") for name in RECIPES), MIXED)
def recipe(path: Path) -> None:
    """And what is planned by it."""
    from surgery.planning.plan import make_plan
    from surgery.planning.recipe import load_recipe
    from surgery.publish.summary import plan_dict
    from surgery.publish.tables import plan_table

    plan_table(plan_dict(make_plan(_skeleton(), load_recipe(str(path)))))


@target(None, "keep=0.75", "rules.0.match=mlp.*", "attention={mixer: linear, mask: decay}", "stages.*.rate=1e-3", "layers=2:-2", 'blocks="sqrt"')  # fmt: skip
def override(text: str) -> None:
    from surgery.planning.recipe import parse_recipe
    from surgery.training.recipe import load_healing

    for read in (lambda: parse_recipe(json.dumps(MIXED), "here", [text]), lambda: load_healing("quick", [text])):
        with contextlib.suppress(SurgeryError):
            read()


HEALING = ("quick", "standard", "weights-only")
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


@target("r.yaml", *(_shipped(f"recipes/healing/{name}.yaml") for name in HEALING), HEAL)
def healing(path: Path) -> None:
    from surgery.training.recipe import data_of, load_healing

    for tiny in (False, True):
        try:
            made = load_healing(str(path), tiny=tiny)
        except SurgeryError:
            continue
        for stage in made.stages:
            data_of(made, stage)
            assert stage.steps >= 0
        made.model_dump_json()


@target("r.yaml", _shipped("recipes/pretrain/gpt2-btt.yaml"))
def pretrain(path: Path) -> None:
    from surgery.training.pretrain.model_config import new_config
    from surgery.training.pretrain.pretrain import digest
    from surgery.training.pretrain.recipe import load_pretrain

    made = load_pretrain(str(path))
    digest(made)
    new_config(made.new.model, _Tokenizer())


class _Tokenizer:
    bos_token_id, eos_token_id, pad_token_id = 0, 1, 2

    def __len__(self) -> int:
        return 300


# -- what surgery wrote and reads again --------------------------------------------------------------
@target("journal.jsonl", lambda: _interrupted_lines(), setup=lambda folder: None)
def journal(path: Path) -> None:
    """A conversion that was interrupted, resumed by it. The lines' checksums are made again after the changes: whoever
    changes a journal on purpose makes them too."""
    from surgery.conversion.convert import convert

    work, out = path.parent / "out.partial", path.parent / "out"
    for folder in (work, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_interrupted(), work)
    (work / "journal.jsonl").write_bytes(b"".join(map(_renewed, path.read_bytes().splitlines(keepends=True))))
    convert(str(checkpoint()), recipe_of(**MIXED), out, resume=True)


def _renewed(raw: bytes) -> bytes:
    from surgery.core.journal import SUM, _written

    try:
        line = json.loads(raw)
        line.pop(SUM, None)
        return _written(line)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return raw


@functools.cache
def _interrupted() -> Path:
    """OUT.partial of a conversion killed before it put its pieces together."""
    from surgery.conversion import convert as conversion

    out = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-interrupted-")) / "out"
    assemble = conversion.assemble
    conversion.assemble = _killed  # type: ignore[assignment]
    try:
        conversion.convert(str(checkpoint()), recipe_of(**MIXED), out)
    except KeyboardInterrupt:
        pass
    finally:
        conversion.assemble = assemble
    return conversion.partial_of(out)


def _killed(*_: Any) -> Any:
    raise KeyboardInterrupt


def _interrupted_lines() -> bytes:
    return (_interrupted() / "journal.jsonl").read_bytes()


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
def _targets() -> Path:
    """A teacher cache."""
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


@target("index.json", lambda: (_targets() / "index.json").read_bytes(), setup=lambda f: _copy(_targets)(f))
def teacher_index(path: Path) -> None:
    _read_targets(path)


@target("shard", lambda: (_targets() / "targets-00000.safetensors").read_bytes(), setup=lambda f: _copy(_targets)(f))
def teacher_shard(path: Path) -> None:
    """With an index that says what its checksum is."""
    import hashlib

    data, index = path.read_bytes(), json.loads((_targets() / "index.json").read_text())
    (path.parent / "targets-00000.safetensors").write_bytes(data)
    index["shards"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path.parent / "index.json").write_text(json.dumps(index))
    _read_targets(path)


class _Trained:
    """Parameters and their optimiser, after a step."""

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

    def held(self) -> Any:
        from surgery.training.checkpoints import Held, TorchMemory

        means = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return Held(dict(self.parameters), TorchMemory(self.optimiser, [list(self.parameters)]), means)


@functools.cache
def _saved() -> Path:
    from surgery.training.checkpoints import Checkpoints, Position

    folder = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-checkpoints-"))
    where = Checkpoints(folder, 2)
    return where.save(Position(0, 5, 20, 1280, {"trained": ["weight"], "stages": [], "best": 1.5}), _Trained().held())


def _read_saved(path: Path) -> None:
    """The file in the place of the one that was saved."""
    from surgery.training.checkpoints import Checkpoints

    where = Checkpoints(path.parent, 2)
    folder = path.parent / _saved().name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_saved(), folder)
    shutil.copy(path, folder / path.name)
    latest = where.latest()
    assert latest is not None
    position = where.position(latest)
    assert isinstance(position.step, int) and isinstance(position.notes.get("trained", []), list)
    trained = _Trained()
    where.restore_weights(latest, dict(trained.parameters))
    where.restore(latest, trained.held())


@target("state.json", lambda: (_saved() / "state.json").read_bytes())
def training_state(path: Path) -> None:
    _read_saved(path)


@target("optimiser.safetensors", lambda: (_saved() / "optimiser.safetensors").read_bytes())
def training_optimiser(path: Path) -> None:
    _read_saved(path)


@target("weights.safetensors", lambda: (_saved() / "weights.safetensors").read_bytes())
def training_weights(path: Path) -> None:
    _read_saved(path)


@target("rng-00000.safetensors", lambda: (_saved() / "rng-00000.safetensors").read_bytes())
def training_rng(path: Path) -> None:
    _read_saved(path)


@target("log.jsonl", '{"stage": 0, "kind": "lm", "step": 1, "total_steps": 1, "tokens": 64, "loss": 3.0}\n{"stage": 0, "kind": "lm", "step": 2, "total_steps": 2, "tokens": 128, "loss": 2.0, "validation": 2.5}\n')  # fmt: skip
def training_log(path: Path) -> None:
    """Gone on with, drawn, and on the page."""
    from surgery.training.logging import Log, draw

    log = Log(path.parent)
    log.going_on(0, 1)
    draw(log.lines(), path.parent / "curve.png")


@functools.cache
def _model() -> Any:
    from transformers import AutoModelForCausalLM

    import surgery  # noqa: F401

    return AutoModelForCausalLM.from_pretrained(converted())


def _held_cache() -> bytes:
    from surgery.modeling.cache_io import save_cache

    path = Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-cache-")) / "cache.safetensors"
    save_cache(_model()(torch.arange(3, 12)[None], use_cache=True).past_key_values, path)
    return path.read_bytes()


@target("cache.safetensors", _held_cache)
def cache_file(path: Path) -> None:
    from surgery.modeling.cache_io import load_cache

    load_cache(path, _model())


@functools.cache
def _store() -> tuple[Any, Path, dict[str, Any]]:
    from surgery.eval.results.store import Store, key_of
    from surgery.eval.suite import EvalOptions, Metric, Sample, SuiteResult

    store = Store(Path(tempfile.mkdtemp(dir=HOME, prefix="fuzz-results-")))
    key = key_of("0" * 64, "ppl", EvalOptions(), "cpu", "float32")
    place = store.place("it", "0" * 64, "ppl")
    assert place is not None
    samples = [Sample("ppl", str(n), {"nll": 2.0 + n}, {"length": 8}, 8.0, shown={"text": "a"}) for n in range(3)]
    store.save(place, key, SuiteResult(samples, {"nll": Metric("nll", "ppl", False)}, arrays={"a": torch.ones(2)}))
    return store, place, key


def _read_result(path: Path) -> None:
    from surgery.eval.results.compare import rows_of

    store, place, key = _store()
    folder = path.parent / "ppl"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place, folder)
    shutil.copy(path, folder / path.name)
    found = store.load(folder, key)
    if found is not None:
        rows_of("ppl", {"base": found, "converted": found}, True, 0)


@target("result.json", lambda: (_store()[1] / "result.json").read_bytes())
def eval_result(path: Path) -> None:
    _read_result(path)


@target("samples.jsonl", lambda: (_store()[1] / "samples.jsonl").read_bytes())
def eval_samples(path: Path) -> None:
    _read_result(path)


@target("arrays.safetensors", lambda: (_store()[1] / "arrays.safetensors").read_bytes())
def eval_arrays(path: Path) -> None:
    _read_result(path)


ROW = {
    "task": "ppl", "suite": "ppl", "group": {"length": 64}, "samples": 40, "flags": [], "p": None,
    "metric": {"name": "nll", "title": "perplexity", "scale": 1.0}, "values": {"base": 2.0, "converted": 2.5},
    "errors": {"base": 0.1, "converted": None}, "difference": {"change": 0.5, "low": -1.0, "high": 1.0},
}  # fmt: skip
MEASURED = {
    "rows": [ROW, {**ROW, "task": "needle", "group": {"length": 512, "depth": 0.5}}],
    "options": {"text": "/home/a"},
}


@target("results.json", MEASURED)
def eval_results(path: Path) -> None:
    """On the page and on the card."""
    from surgery.publish.html.page import write_page
    from surgery.publish.hub.push import pack

    write_page(str(converted()), path.parent / "report.html", path.parent)
    pack(str(converted()), "me/it", "mit", measured=path.parent)


@target("model-float32-cpu.0.jsonl", '\n{"key": "0123", "answer": [1.5, true]}\n{"key": "4567", "answer": "a"}')
def eval_answers(path: Path) -> None:
    """Of `--use-cache`."""
    from surgery.core.distributed import Ranks
    from surgery.eval.lm_eval.answer_cache import Kept

    subject: Any = SimpleNamespace(fingerprint="", dtype=torch.float32, device=torch.device("cpu"), ranks=Ranks())
    kept = Kept(subject, path.parent)
    assert all(isinstance(key, str) for key in kept.answers)


@target("README.md", lambda: (ROOT / "eval/mirror/baber/piqa/README.md").read_bytes(), "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: test, path: default/test.jsonl}\nsurgery_whole: [default]\n---\n")  # fmt: skip
def mirror(path: Path) -> None:
    """The head of a data set in a mirror, as fetch-eval-data goes on from it."""
    from surgery.eval.fetch import Source, _head

    head = _head(path.parent)
    assert not any(head.lacks(Source("a/b", name)) for name in head.whole or ())
    for name in [config["config_name"] for config in head.configs]:
        head.lacks(Source("a/b", name, ("test",)))


@target(None, '{"max_seq_lengths": [4096]}', "temperature=0.7,top_p=0.9,do_sample=true", "ppl=1.05", "ppl:nll=0.9", "4096,8192", "0,0.5,1")  # fmt: skip
def eval_options(text: str) -> None:
    from surgery.cli.eval import _json, _pairs, _words, options_of
    from surgery.eval.results.thresholds import parse_limits

    for read in (
        lambda: options_of(metadata=_json("--metadata", text)),
        lambda: options_of(samples=_json("--samples", text)),
        lambda: options_of(gen_kwargs=_pairs(text)),
        lambda: options_of(lengths=_words(text)),
        lambda: options_of(depths=_words(text)),
        lambda: options_of(batch_size=text),
        lambda: parse_limits([text], True),
    ):
        with contextlib.suppress(SurgeryError):
            read()


@target("measured.json", _shipped("kernels/tuning.json"))
def measured(path: Path) -> None:
    """Of kernels' times."""
    from surgery.kernels import tuning as times

    before = times.TABLE
    times.TABLE = path
    times.tables.cache_clear()
    times.rows_of.cache_clear()
    times.choice.cache_clear()
    try:
        place = times.Place((9, 0), "bfloat16")
        times.choice("btt", "forward", times.sizes(tokens=512, inputs=4096, outputs=4096, rank=4), place)
    finally:
        times.TABLE = before
        times.tables.cache_clear()
        times.rows_of.cache_clear()
        times.choice.cache_clear()


@target("inputs.safetensors", lambda: _inputs())
def ready_inputs(path: Path) -> None:
    from surgery.calibration.data import Batch, calibration_inputs, refuse_unfit

    inputs = calibration_inputs(str(path), path.parent, None, 64, 8)
    refuse_unfit(inputs, _skeleton().model)
    Batch.of(inputs, 0.125).digest()


def _inputs() -> bytes:
    from helpers.small import tiny_inputs
    from safetensors.torch import save

    return save(tiny_inputs("llama", 8))


@target("rows.jsonl", lambda: b"\n".join(_text().read_bytes().split(b"\n")[:10]), {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}, {"prompt": "a", "completion": "b"}, also=[HUB])  # fmt: skip
def training_rows(path: Path) -> None:
    """Read with `datasets`, which keeps what it has read in its own folder."""
    from surgery.training.data.dataset import make_data
    from surgery.training.data.recipe import DataConfig

    data = make_data(DataConfig(sources=str(path)), _data().tokenizer, 16, 0)  # type: ignore[arg-type]
    for _, example in zip(range(4), data.examples(0)):
        assert example["input_ids"].shape == (16,)
