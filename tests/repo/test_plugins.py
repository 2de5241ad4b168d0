"""Users' own structures, mixers and families: files of --plugin, and installed packages with an entry point.

The files are the worked examples of docs/extend.md, as the page prints them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from helpers.small import checkpoint_logits, run_python
from typer.main import get_command

import surgery
from surgery.architectures import get_architecture
from surgery.architectures.base import Architecture, _plugin_families, add_family
from surgery.cli.main import app, main
from surgery.core import plugins
from surgery.core.errors import SurgeryError, UnknownNameError
from surgery.core.journal import Journal
from surgery.core.plugins import PLUGINS, load_entry_points, load_plugin_file
from surgery.mixers import MIXERS, AttentionShape, MixerInputs
from surgery.mixers.features.base import FEATURES
from surgery.mixers.masks.base import MASKS
from surgery.modeling.modules import build_module
from surgery.structures import STRUCTURES, Metric
from surgery.structures.base import StructureConfig, StructuredLinear
from surgery.vllm.packed_linear import PackedLinear
from surgery.vllm.servable import check_mixer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend.md"
EXAMPLES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S))
RECIPES = {
    "grouped_rows.py": {"structure": "grouped_rows", "blocks": 2, "keep": 0.7, "allocate": "uniform"},
    "aft.py": {"structure": "dense", "attention": {"mixer": "aft", "sharpness": 0.5}},
}
REGISTER = "from surgery.structures import STRUCTURES\nfrom surgery.structures.base import StructureConfig\n"
REGISTER += "class Mine(StructureConfig):\n    name = {!r}\n@STRUCTURES.register(Mine)\nclass MineLinear: pass\n"


@pytest.fixture(autouse=True)
def registries():
    """Forget what a test registers."""
    tables = [table for r in (STRUCTURES, MIXERS, MASKS, FEATURES) for table in (r._by_name, r._by_config)]
    tables.append(_plugin_families)
    for registry in (STRUCTURES, MIXERS, MASKS, FEATURES):
        registry.names()
    before, modules = [dict(table) for table in tables], set(sys.modules)
    yield
    for table, entries in zip(tables, before):
        table.clear()
        table.update(entries)
    for name in set(sys.modules) - modules:
        if name.startswith("surgery_plugin_"):
            del sys.modules[name]
    plugins.REGISTERED.clear()


@pytest.fixture
def examples(tmp_path):
    """Folder with the files of the page and a recipe for each."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).with_suffix(".yaml").write_text(json.dumps(RECIPES[name]))
    return tmp_path


@pytest.fixture
def command(capsys):
    """command(*words) -> (exit code, what it said on stderr)."""

    def run(*words) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        return left.value.code or 0, " ".join(capsys.readouterr().err.split())

    return run


@pytest.fixture
def install(monkeypatch):
    """install("module", ..): the plugins that are installed."""

    def installed(*modules: str) -> None:
        points = [importlib.metadata.EntryPoint(name=m, value=m, group=PLUGINS) for m in modules]
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: points if group == PLUGINS else pytest.fail(group)
        )
        load_entry_points.cache_clear()

    yield installed
    load_entry_points.cache_clear()


def convert_words(name: str, source: Path, calibration: Path, folder: Path) -> list:
    recipe = (folder / name).with_suffix(".yaml")
    return ["convert", source, "-r", recipe, "--calibration", calibration, "-o", folder / "OUT", "--set", "tune=false"]


# -- files ----------------------------------------------------------------------------------------------
def test_the_examples_are_of_a_readable_length():
    assert set(EXAMPLES) == set(RECIPES)
    assert all(45 <= text.count("\n") + 1 <= 70 for text in EXAMPLES.values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_converts_and_loads(name, examples, command, checkpoints, calibration):
    words = convert_words(name, checkpoints("llama"), calibration("llama"), examples)
    code, said = command(*words)
    own = name.removesuffix(".py")
    assert code == 2 and f"unknown {'structure' if own == 'grouped_rows' else 'mixer'} '{own}'" in said
    assert "--plugin FILE.py" in said and "entry point surgery.plugins" in said and not (examples / "OUT").exists()

    code, said = command(*words, "--plugin", examples / name)
    assert code == 0, said
    ids = torch.randint(3, 96, (2, 9))
    assert torch.isfinite(checkpoint_logits(examples / "OUT", ids)).all()
    code, said = command("inspect", examples / "OUT", "--plugin", examples / name, "--json")  # the second time: known
    assert code == 0, said
    card = surgery.push(examples / "OUT", "me/own", license="mit", base_model="me/base", dry_run=True)["card"]
    assert f"registers the {'structure' if own == 'grouped_rows' else 'mixer'} `{own}` with surgery" in card
    registry = STRUCTURES if own == "grouped_rows" else MIXERS
    for table in (registry._by_name, registry._by_config):
        table.popitem()  # as in a process without the plugin
    with pytest.raises(UnknownNameError, match=rf"unknown {registry.what} '{own}'.*--plugin FILE\.py"):
        checkpoint_logits(examples / "OUT", ids)
    code, said = command("serve", examples / "OUT")
    assert code == 2 and f"unknown {registry.what} '{own}'" in said and "has no --plugin" in said, said


def test_the_structure_is_exact_at_full_rank_and_is_served_by_the_plugin_of_vllm(examples):
    load_plugin_file(examples / "grouped_rows.py")
    config_type = STRUCTURES.config_type("grouped_rows")
    cls, weight = STRUCTURES[config_type], torch.randn(24, 40)
    full = cls.fit(replace(config_type(), rank="full"), 24, 40, budget=0)
    assert Metric().relative_error(weight, cls.project(weight, full).dense()) < 2e-6
    half = cls.fit(config_type(), 24, 40, 0.5 * weight.numel())
    linear = cls.project(weight, half).requires_grad_(False)
    x = torch.randn(3, 40)
    assert torch.allclose(linear(x), x @ linear.dense().mT, atol=1e-4) and linear.cost().params <= 0.5 * weight.numel()

    entry = {**linear.config.to_dict(), "in_features": 40, "out_features": 24, "bias": False}
    packed = PackedLinear([entry], 40, (24,), torch.float32)
    flats = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in packed.tensors.items()}
    for tensor, value in linear.state_dict().items():
        packed.copy_part(flats[tensor], tensor, 0, value)
    assert torch.allclose(packed(flats, x), linear(x), atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_the_mixer_cached_is_the_mixer_by_its_definition(padded, examples):
    load_plugin_file(examples / "aft.py")
    config = MIXERS.config_type("aft")()
    mixer = MIXERS[config](config, AttentionShape(dim=12, heads=4, groups=2, key=5, value=5, scaling=1.0)).double()
    mixer.requires_grad_(False).sharpness_G.mul_(torch.tensor([0.7, 1.6]))
    q, k, v = (torch.randn(2, heads, 11, 5, dtype=torch.float64) for heads in (4, 2, 2))
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[0, : 3 if padded else 0] = False
    inputs = MixerInputs(q, k, v, torch.randn(2, 11, 12, dtype=torch.float64), valid if padded else None)
    expected, shown = mixer.dense(inputs), valid[:, None, :, None]
    state, outs = mixer.empty_state(2, "cpu"), []
    for start, end in ((0, 4), (4, 5), (5, 11)):
        cut = slice(start, end)
        parts = MixerInputs(q[:, :, cut], k[:, :, cut], v[:, :, cut], inputs.x_BTD[:, cut], valid[:, cut])
        out, state = mixer.mix(parts, state)
        outs.append(out)
    for out in (torch.cat(outs, dim=2), mixer.mix(inputs)[0]):
        assert torch.allclose(out * shown, expected * shown, atol=1e-12)
    assert state.seen_B.tolist() == valid.sum(1).tolist()
    stored = sum(t[0].numel() for t in state.tensors.values())
    cost = type(mixer).cost(config, mixer.shape, 11)
    assert (cost.cache, cost.params) == (stored, sum(p.numel() for p in mixer.parameters()))
    with pytest.raises(SurgeryError, match="vLLM has neither a cache nor an attention kernel"):
        check_mixer(config, "here")


def test_a_conversion_begun_with_a_plugin_continues_with_it_only(
    examples, command, checkpoints, calibration, monkeypatch
):
    words = convert_words("grouped_rows.py", checkpoints("llama"), calibration("llama"), examples)
    plugin, add = ["--plugin", examples / "grouped_rows.py"], Journal.add

    def interrupted(self, step, **what):
        if step == "piece" and self.find("piece") is not None:
            raise KeyboardInterrupt
        add(self, step, **what)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", interrupted)
        code, said = command(*words, *plugin)
    assert code == 130 and "--plugin" in said, said
    partial = {f.name: f.read_bytes() for f in (examples / "OUT.partial").iterdir() if f.is_file()}
    for table in (STRUCTURES._by_name, STRUCTURES._by_config):
        table.popitem()  # as in a process of its own
    code, said = command(*words, "--resume")
    assert code == 2 and "unknown structure 'grouped_rows'" in said and "--plugin FILE.py" in said, said
    assert partial == {f.name: f.read_bytes() for f in (examples / "OUT.partial").iterdir() if f.is_file()}
    for name in [name for name in sys.modules if name.startswith("surgery_plugin_")]:
        del sys.modules[name]
    code, said = command(*words, "--resume", *plugin)
    assert code == 0 and (examples / "OUT" / "config.json").is_file(), said


FILES = {
    "mine.txt": (REGISTER.format("mine"), "must be a Python file"),
    "absent.py": (None, "does not exist. Give the path"),
    "raises.py": ("import torch\n\ntorch.zeros(2) @ torch.zeros(3)\n", r"raises.py, line 3 \(`torch.zeros.* RuntimeError"),
    "syntax.py": ("x = 1\ndef (:\n", r"syntax.py, line 2 .*SyntaxError"),
    "exits.py": ("import sys\nsys.exit(0)\n", r"exits.py, line 2 \(`sys.exit\(0\)`\): SystemExit"),
    "imports.py": ("import no_such_module\n", "line 1 .* ModuleNotFoundError: No module named 'no_such_module'"),
    "nothing.py": ("class Mine: pass\n", r"registers nothing. .*@STRUCTURES.register\(Config\)"),
    "taken.py": (REGISTER.format("btt"), "line 5 .*the name 'btt' of the structure MineLinear is taken: surgery.structures.btt"),
    "nameless.py": (REGISTER.replace("    name = {!r}", "    pass"), "config Mine of a structure must have a name"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used_is_explained(name, tmp_path, command):
    text, said = FILES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    before = STRUCTURES.names(), set(sys.modules)
    code, shown = command("plan", tmp_path, "-r", "btt-half", "--plugin", tmp_path / name)
    assert code == 2 and re.search(said, shown), shown
    assert STRUCTURES.names() == before[0]
    assert not {m for m in set(sys.modules) - before[1] if m.startswith("surgery_plugin_")}


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "torch.py").write_text(REGISTER.format(folder))
        load_plugin_file(tmp_path / folder / "torch.py")
    load_plugin_file(tmp_path / "a" / ".." / "b" / "torch.py")  # known already
    assert {"a", "b"} <= set(STRUCTURES.names()) and sys.modules["torch"] is torch


def test_a_notebook_may_define_a_structure_twice():
    def cell() -> None:
        @dataclass(frozen=True)
        class Mine(StructureConfig):
            name: ClassVar[str] = "mine"

        @STRUCTURES.register(Mine)
        class MineLinear:
            pass

    cell()
    first = STRUCTURES.config_type("mine")
    cell()
    assert STRUCTURES.config_type("mine") is not first and first not in list(STRUCTURES)


def test_every_command_that_opens_a_checkpoint_takes_a_plugin():
    """All but `serve`, whose server is another process, and `bench`."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    opening = {
        name for name, c in commands.items() if {"source", "converted", "recipe"} & {p.name for p in c.params}
    } - {"demo", "serve"}
    assert {"plan", "convert", "inspect", "eval", "finetune", "run"} <= opening
    assert opening == {name for name, c in commands.items() if "plugins" in {p.name for p in c.params}}


# -- installed packages -----------------------------------------------------------------------------------
def test_an_installed_package_loads_what_was_converted_with_its_file(
    examples, command, checkpoints, calibration, tmp_path, monkeypatch
):
    """In another process, with a broken package beside it, and by transformers alone."""
    words = convert_words("grouped_rows.py", checkpoints("llama"), calibration("llama"), examples)
    assert command(*words, "--plugin", examples / "grouped_rows.py")[0] == 0
    site = tmp_path / "site"
    for package, module in (("grouped-rows", "grouped_rows"), ("broken-parts", "no_such_module")):
        info = site / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{PLUGINS}]\nparts = {module}\n")
    (site / "grouped_rows.py").write_text(EXAMPLES["grouped_rows.py"])
    monkeypatch.setenv("PYTHONPATH", str(site))
    ids = torch.arange(3, 12)[None]
    code = (
        "import sys, warnings, torch, surgery\n"
        "from surgery.structures import STRUCTURES\n"
        "STRUCTURES.config_type('btt')\n"
        "assert 'grouped_rows' not in sys.modules\n"
        "from transformers import AutoModelForCausalLM\n"
        "with warnings.catch_warnings(record=True) as noted:\n"
        "    warnings.simplefilter('always')\n"
        "    model = AutoModelForCausalLM.from_pretrained('OUT').eval()\n"
        "said = {str(w.message) for w in noted if 'plugin' in str(w.message)}\n"
        "assert len(said) == 1 and 'package broken-parts cannot be imported, ModuleNotFoundError' in said.pop()\n"
        "assert type(model.model.layers[0].mlp.up_proj).__module__ == 'grouped_rows'\n"
        "torch.save(model(torch.arange(3, 12)[None]).logits.detach(), 'logits.pt')\n"
    )
    done = run_python(code, examples)
    assert done.returncode == 0, done.stderr
    assert torch.allclose(torch.load(examples / "logits.pt"), checkpoint_logits(examples / "OUT", ids), atol=1e-5)


def test_a_plugin_that_fails_is_named_and_breaks_nothing_else(install):
    install("no_such_module_of_a_plugin")
    assert get_architecture("llama") is not None and STRUCTURES.config_type("btt")
    with pytest.warns(UserWarning, match="no_such_module_of_a_plugin .* ModuleNotFoundError"):
        assert get_architecture("plugged") is None
    with pytest.raises(UnknownNameError, match=r"unknown mixer 'mine'.*Besides, the plugin no_such_module_of_a_plugin"):
        MIXERS.config_type("mine")


def test_a_family_of_a_plugin(install, monkeypatch):
    architecture = Architecture(
        model_types=("plugged",), layers=("blocks",), attention=("attn",), mlp=("mlp",), query="wq"
    )
    monkeypatch.setitem(sys.modules, "plugged_family", ModuleType("plugged_family"))
    install("plugged_family")
    assert get_architecture("plugged") is None
    add_family(architecture)
    assert get_architecture("plugged") is architecture and get_architecture("llama") is not None
    assert "family 'plugged'" in plugins.REGISTERED


def test_a_table_in_integers_names_the_missing_structure(install):
    install()
    entry = {"structure": "mine", "bits": 8, "in_features": 8, "out_features": 8, "bias": False}
    with pytest.raises(UnknownNameError, match=r"^unknown structure 'mine'.*--plugin FILE\.py"):
        build_module(entry)


def test_a_name_is_looked_for_in_its_own_file_first():
    """Without a file of that name, and for lists of names, the package is scanned."""
    assert get_architecture("qwen2_moe") is not None and get_architecture("attention") is None
    assert MASKS.config_type("hierarchical").name == "hierarchical"
    with pytest.raises(SurgeryError, match="unknown mask 'chunking'"):
        MASKS.config_type("chunking")
    assert [config.name for config in MASKS] == MASKS.names()


def test_each_name_is_registered_by_the_file_where_it_is_looked_for():
    for registry in (STRUCTURES, MIXERS, MASKS, FEATURES):
        for name in registry.names():
            module = registry[registry.config_type(name)].__module__
            assert module == f"{registry.package}.{registry.elsewhere.get(name, name)}", name


def test_a_structure_or_mixer_without_its_methods_is_refused_when_it_registers():
    class Half(StructureConfig):
        name = "half"

    with pytest.raises(
        SurgeryError, match=r"structure 'half' \(HalfLinear\) does not define shapes, full_rank, .*product"
    ):
        STRUCTURES.register(Half)(type("HalfLinear", (StructuredLinear,), {}))
    with pytest.raises(SurgeryError, match="does not define rank_error_curve"):
        methods = dict.fromkeys(set(StructuredLinear.REQUIRED) - {"rank_error_curve"}, lambda *_: {})
        STRUCTURES.register(Half)(type("HalfLinear", (StructuredLinear,), methods))
    named = type("HalfLinear", (StructuredLinear,), {"shapes": staticmethod(lambda *_: {"left": (2, 2)})})
    with pytest.raises(SurgeryError, match="one of them must be named weight"):
        named(2, 2, Half())
