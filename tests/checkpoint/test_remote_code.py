"""No command runs Python code of a checkpoint without --trust-remote-code, whatever stdin answers."""

from __future__ import annotations

import ast
import io
import json
import shutil
from pathlib import Path

import pytest
from conversion.test_calibrate import words_tokenizer
from helpers.small import make_recipe

from surgery.calibration.data import load_tokenizer
from surgery.checkpoint.remote_code import named_code
from surgery.checkpoint.source import open_checkpoint, open_converted_checkpoint
from surgery.cli.main import main
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.training.data.recipe import DataConfig
from surgery.training.pretrain.tokenizer import TokenizerConfig, make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("surgery", "kernels", "eval", "recipes")
# Every call by which transformers, datasets, peft or sentence-transformers may run code that a repository holds.
CALLS = {
    "from_pretrained",
    "from_config",
    "load_dataset",
    "load_dataset_builder",
    "get_dataset_split_names",
    "SentenceTransformer",
}
CALLS |= {"get_dataset_config_names", "get_dataset_infos", "pipeline", "dataset_module_factory"}


def names_trust(call: ast.Call) -> bool:
    """trust_remote_code=.., or ** of a table written there that has it."""
    for keyword in call.keywords:
        if keyword.arg == "trust_remote_code":
            return True
        keys = keyword.value.keys if keyword.arg is None and isinstance(keyword.value, ast.Dict) else []
        if any(isinstance(key, ast.Constant) and key.value == "trust_remote_code" for key in keys):
            return True
    return False


def test_2_2_every_loading_call_says_whether_code_is_trusted():
    found, silent = 0, []
    for path in sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in CALLS) else ():
            name = getattr(node.func, "attr", getattr(node.func, "id", None)) if isinstance(node, ast.Call) else None
            if name in CALLS:
                found += 1
                silent += [] if names_trust(node) else [f"{path.relative_to(ROOT)}:{node.lineno} {name}"]
    assert found >= 15 and not silent


# -- custom tokenizer code, and a yes on stdin -----------------------------------------------------------
CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({marker!r}).write_text("ran")


class Tok(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder: Path, marker: Path) -> Path:
    """A tokenizer whose class is Python in the folder."""
    words_tokenizer(False).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text()) if path.is_file() else {}
    told |= {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": [None, "tok.Tok"]}}
    path.write_text(json.dumps(told))
    (folder / "tok.py").write_text(CODE.format(marker=str(marker)))
    return folder


@pytest.fixture
def place(checkpoints, converted, tmp_path, monkeypatch):
    """SRC and OUT with a custom tokenizer, a text; stdin answers yes to everything."""
    for name, folder in (("SRC", checkpoints("llama")), ("OUT", converted("llama"))):
        with_code(shutil.copytree(folder, tmp_path / name), tmp_path / "marker")
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6\n" * 200)
    (tmp_path / "heal.yaml").write_text("stages: [{kind: distill, tokens: 64, rate: 1.0e-4, length: 16}]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    return tmp_path


QUICK = ("--set", "tokens=128", "--set", "length=16", "--set", "allocate=uniform", "--set", "tune=false")
COMMANDS = {
    "plan": ("plan", "SRC", "-r", "low-rank-half"),
    "convert": ("convert", "SRC", "-r", "low-rank-half", *QUICK, "--calibration", "text.txt", "--out", "NEW"),
    "convert without text": ("convert", "SRC", "-r", "low-rank-half", "--out", "NEW"),
    "finetune": ("finetune", "OUT", "-r", "heal.yaml", "--teacher", "CLEAN", "--data", "text.txt", "--out", "NEW"),
    "teacher": ("finetune", "CLEAN", "-r", "heal.yaml", "--teacher", "SRC", "--data", "text.txt", "--out", "NEW"),
    "teacher-cache": ("teacher-cache", "SRC", "-r", "heal.yaml", "--data", "text.txt", "--out", "NEW"),
    "eval": ("eval", "OUT", "--text", "text.txt", "--tokens", "64"),
    "compare": ("eval", "CLEAN", "--compare", "SRC", "--text", "text.txt", "--tokens", "64"),
}
NO_TOKENIZER = {
    "inspect": ("inspect", "OUT"),
    "report": ("report", "OUT", "--out", "page.html"),
    "push": ("push", "OUT", "me/small", "--license", "mit", "--dry-run"),
    "densify": ("densify", "OUT", "--out", "NEW"),
}


def said_of(words, capsys) -> tuple[int, str]:
    code = 0
    try:
        main(list(words))
    except SystemExit as left:
        code = left.code or 0
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize("name", [*COMMANDS, *NO_TOKENIZER])
def test_2_2_tokenizer_code_is_not_run_by_a_yes_on_stdin(place, capsys, name, converted):
    words = {**COMMANDS, **NO_TOKENIZER}[name]
    if "CLEAN" in words:
        words_tokenizer(False).save_pretrained(shutil.copytree(converted("llama"), place / "CLEAN"))
    code, said = said_of(words, capsys)
    assert not (place / "marker").exists()
    if name in COMMANDS:
        assert code == 2 and "--trust-remote-code" in said, said
        assert not (place / "NEW").exists()
    else:
        assert code == 0, said


def test_2_2_the_demo_opens_only_what_it_brings():
    """It has no argument for a checkpoint, and refuses a folder that is there."""
    import inspect

    from surgery.cli.demo import demo

    assert list(inspect.signature(demo).parameters) == ["out", "recipe", "progress", "show"]


def test_2_2_with_leave_the_code_is_run_and_travels(place):
    """The same folder is no dud: with trust its code runs, and is copied beside the converted weights."""
    recipe = make_recipe(
        structure="low_rank", keep=0.5, calibration=place / "text.txt", tokens=128, length=16, allocate="uniform"
    )
    convert(str(place / "SRC"), recipe, place / "NEW", trust_remote_code=True)
    assert (place / "marker").read_text() == "ran"
    assert (place / "NEW" / "tok.py").is_file() and named_code(
        place / "NEW", open_converted_checkpoint(str(place / "NEW")).config
    )


def test_2_2_a_tokenizer_to_train_with(place, tmp_path):
    """A folder that holds a tokenizer alone, for pretrain."""
    (tmp_path / "alone").mkdir()
    with_code(tmp_path / "alone", tmp_path / "marker")
    (tmp_path / "alone" / "config.json").unlink(missing_ok=True)
    with pytest.raises(SurgeryError, match="needs code from its own repository"):
        make_tokenizer(TokenizerConfig(path=str(tmp_path / "alone")), DataConfig(sources=[{"path": "text.txt"}]))
    assert not (tmp_path / "marker").exists()


# -- which auto_map is refused ---------------------------------------------------------------------------
@pytest.fixture
def source(checkpoints, tmp_path):
    return shutil.copytree(checkpoints("llama"), tmp_path / "source")


REFUSED = {
    "old list": ("tokenizer_config.json", {"auto_map": ["x.Tok", None]}),
    "a model type without a tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["x.Tok", None]}}),
    "another repository": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["me/x--x.Tok", None]}, "tokenizer_class": "Tok"}),
    "a name of Python's": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["x.Tok", None]}, "tokenizer_class": "os.system"}),
    "no table": ("tokenizer_config.json", {"auto_map": 5}),
    "processor": ("processor_config.json", {"auto_map": {"AutoProcessor": "x.P"}, "processor_class": "P"}),
    "within a processor": ("processor_config.json", {"image_processor": {"auto_map": {"AutoImageProcessor": "x.P"}}}),
    "images": ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "x.P"}, "image_processor_type": "P"}),
    "video": ("video_preprocessor_config.json", {"auto_map": {"AutoVideoProcessor": "x.P"}}),
    "generation": ("generation_config.json", {"auto_map": {"AutoModel": "x.G"}}),
    "an Auto class unheard of": ("preprocessor_config.json", {"auto_map": {"AutoThing": "x.P"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_2_2_auto_map_beside_the_config(source, name):
    file, told = REFUSED[name]
    (source / file).write_text(json.dumps(told))
    with pytest.raises(SurgeryError, match=f"{file}: auto_map .*--trust-remote-code"):
        open_checkpoint(str(source))
    open_checkpoint(str(source), trust_remote_code=True)


@pytest.mark.parametrize(
    "file, told",
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["x.Tok", None]}, "tokenizer_class": "LlamaTokenizerFast"}),
        ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "x.P"}, "image_processor_type": "ViTImageProcessor"}),
        ("processor_config.json", {"auto_map": {}}),
    ],
)  # fmt: skip
def test_2_2_transformers_own_class_is_used(source, file, told):
    (source / file).write_text(json.dumps(told))
    open_checkpoint(str(source))


def test_2_2_auto_map_of_a_part_of_the_model(source):
    """Vision-language models build their parts by AutoModel.from_config, which would ask about a part's auto_map."""
    path = source / "config.json"
    part = {"text_config": {"auto_map": {"AutoModelForCausalLM": "x.M"}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **part}))
    with pytest.raises(SurgeryError, match=r"config\.json: auto_map"):
        open_checkpoint(str(source))


def test_2_2_code_is_not_named_by_our_own_shims(converted):
    source = open_converted_checkpoint(str(converted("llama")))
    assert source.config["auto_map"] and not named_code(source.folder, source.config)


def test_2_2_load_tokenizer_refuses_by_itself(place):
    with pytest.raises(SurgeryError, match="--trust-remote-code"):
        load_tokenizer(place / "SRC")


# -- other keys that name code or another config (item 2.6) ----------------------------------------------
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize(
    "value",
    ["owner/name", "owner/name@main:fn", "paged|owner/name", {"": "owner/name"}, {"text_config": "owner/name"}],
    ids=str,
)
def test_2_6_kernels_of_the_hub_are_refused(source, key, value):
    path = source / "config.json"
    config = json.loads(path.read_text())
    for told in ({key: value}, {"text_config": {key: value}}):
        path.write_text(json.dumps({**config, **told}))
        for opens in (open_checkpoint, open_converted_checkpoint):
            with pytest.raises(SurgeryError, match=f"{key} names '.*owner/name.*', code to be downloaded"):
                opens(str(source))
    path.write_text(json.dumps({**config, "attn_implementation": "eager"}))
    open_checkpoint(str(source))


def test_2_6_a_config_that_stands_for_another_is_refused(source):
    path = source / "config.json"
    config = json.loads(path.read_text())
    (source / "config.4.0.0.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "x.M"}}))
    path.write_text(json.dumps({**config, "configuration_files": ["config.4.0.0.json"]}))
    with pytest.raises(SurgeryError, match="configuration_files names other configs"):
        open_checkpoint(str(source))
