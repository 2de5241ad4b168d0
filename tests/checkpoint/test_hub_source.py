"""Checkpoints and calibration texts from the Hub, simulated by a server on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conversion.test_calibrate import DOCUMENTS, words_tokenizer
from helpers.hub_standin import FakeHub
from helpers.small import start_python, tiny_config

TOKEN = "hf_ThisMustNeverBePrinted"
RECIPE = ("-r", "low-rank-half")
CONVERT = (
    *RECIPE,
    "--set",
    "tokens=128",
    "--set",
    "length=16",
    "--set",
    "allocate=uniform",
    "--set",
    "tune=false",
    "--json",
    "--out",
)

# All in one process, one after the other: name -> words.
COMMANDS = {
    "plan": ("plan", "org/llama", *RECIPE, "--json"),
    "plan, sharded": ("plan", "org/sharded", *RECIPE, "--json"),
    "plan, a branch": ("plan", "org/llama@narrow", *RECIPE, "--json"),
    "plan, pickled": ("plan", "org/pickled", *RECIPE),
    "plan, nowhere": ("plan", "org/nowhere", *RECIPE),
    "plan, no such revision": ("plan", "org/llama", *RECIPE, "--revision", "v9"),
    "plan, two revisions": ("plan", "org/llama@narrow", *RECIPE, "--revision", "main"),
    "plan, gated": ("plan", "org/gated", *RECIPE),
    "plan, private": ("plan", "org/private", *RECIPE, "--json"),
    "plan, not a name": ("plan", "no such name", *RECIPE),
    "convert": ("convert", "org/llama", *CONVERT, "plain"),
    "convert, a branch": ("convert", "org/llama", "--revision", "narrow", *CONVERT, "branch"),
    "convert, jsonl": ("convert", "org/llama", "--calibration", "org/lines", *CONVERT, "jsonl"),
    "convert, parquet": ("convert", "org/llama", "--calibration", "org/columns::train:body", *CONVERT, "parquet"),
    "convert, no such column": ("convert", "org/llama", "--calibration", "org/columns::train:txt", *CONVERT, "x"),
    "convert, no such split": ("convert", "org/llama", "--calibration", "org/lines::dev", *CONVERT, "x"),
    "convert, no such data": ("convert", "org/llama", "--calibration", "org/nothing", *CONVERT, "x"),
    "convert, nowhere": ("convert", "org/nowhere", *CONVERT, "x"),
    "inspect": ("inspect", "org/converted@main", "--json"),
}
CODE = """
import contextlib, io, json, sys
from surgery.cli.main import main

for line in sys.stdin:
    told = {}
    for name, words in json.loads(line).items():
        out, err = io.StringIO(), io.StringIO()
        code = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(words)
            except SystemExit as left:
                code = left.code or 0
        told[name] = [code, out.getvalue(), err.getvalue()]
    print(json.dumps(told), flush=True)
"""


@pytest.fixture(scope="module")
def command_results(checkpoints, converted, tmp_path_factory):
    """name -> (exit code, stdout, stderr) of COMMANDS; "served": bytes of weights that plans fetched."""
    import pandas

    root = tmp_path_factory.mktemp("hub")
    llama = _checkpoint(root / "llama")
    narrow = shutil.copytree(checkpoints("llama-tied"), root / "narrow")
    sharded = root / "sharded"
    _save_sharded(llama, sharded)
    pickled = shutil.copytree(llama, root / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for name in ("lines", "columns"):
        (root / name).mkdir()
    (root / "lines" / "train.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in DOCUMENTS))
    pandas.DataFrame({"n": 1, "body": DOCUMENTS}).to_parquet(root / "columns" / "train.parquet")
    with FakeHub(TOKEN) as hub:
        hub.add("models", "org/llama", llama)
        hub.add("models", "org/llama", narrow, branch="narrow")
        hub.add("models", "org/sharded", sharded)
        hub.add("models", "org/pickled", pickled)
        hub.add("models", "org/converted", converted("llama"))
        for name in ("gated", "private"):
            hub.add("models", f"org/{name}", llama)
            getattr(hub, name).add(f"org/{name}")
        for name in ("lines", "columns"):
            hub.add("datasets", f"org/{name}", root / name)
        work = root / "work"
        work.mkdir()
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(root / "home"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
        }
        plans = {k: v for k, v in COMMANDS.items() if v[0] == "plan"}
        with start_python(CODE, cwd=work, **environment) as process:
            found = _ask(process, plans)
            found["served"] = {k: v for k, v in hub.served.items() if k.endswith(".safetensors")}
            found |= _ask(process, {k: v for k, v in COMMANDS.items() if k not in plans})
        found["commit"] = {branch: hub.commit("models", "org/llama", branch) for branch in ("main", "narrow")}
    found["work"] = work
    return found


def _checkpoint(folder: Path) -> Path:
    """With a tokenizer, and an embedding so large that headers are a small share of the file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**{**tiny_config("llama")[1].to_dict(), "vocab_size": 8000})).save_pretrained(folder)
    words_tokenizer(False).save_pretrained(folder)
    return folder


def _ask(process, commands):
    process.stdin.write(json.dumps(commands) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


def _save_sharded(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source).save_pretrained(target, max_shard_size="30KB")
    assert (target / "model.safetensors.index.json").is_file()


def data_of(command_results, name):
    code, out, err = command_results[name]
    assert code == 0, err
    return json.loads(out)


def test_a_plan_reads_headers_and_no_weights(command_results):
    plain, sharded = data_of(command_results, "plan"), data_of(command_results, "plan, sharded")
    assert plain["totals"]["modules"] == 14
    assert plain["rows"] == sharded["rows"]
    assert data_of(command_results, "plan, private")["rows"] == plain["rows"]
    size = 8000 * 32 * 4 * 2
    assert 0 < command_results["served"]["model.safetensors"] < 0.1 * size * len(COMMANDS)
    snapshots = (command_results["work"].parent / "home").rglob("snapshots/*/*.safetensors")
    assert {path.parts[-4] for path in snapshots} == {"models--org--llama", "models--org--converted"}


def test_a_branch_is_another_checkpoint(command_results):
    shapes = {row["role"]: row["shape"] for row in data_of(command_results, "plan, a branch")["rows"]}
    assert shapes == {row["role"]: row["shape"] for row in data_of(command_results, "plan")["rows"]}
    for name, branch in (("convert", "main"), ("convert, a branch", "narrow")):
        source = data_of(command_results, name)["report"]["source"]
        assert (source["name"], source["revision"]) == ("org/llama", command_results["commit"][branch])
    fingerprints = {
        data_of(command_results, n)["report"]["source"]["fingerprint"] for n in ("convert", "convert, a branch")
    }
    assert len(fingerprints) == 2


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_calibration_on_a_data_set(kind, command_results):
    report = data_of(command_results, f"convert, {kind}")["report"]
    assert report["calibration"]["tokens"] == 128 and report["held_out"]["unit"] == "nats per token"


def test_data_sets_of_one_text_calibrate_alike(command_results):
    errors = [
        [m["error"] for m in data_of(command_results, f"convert, {kind}")["report"]["modules"]]
        for kind in ("jsonl", "parquet")
    ]
    assert errors[0] == errors[1]


def test_a_converted_checkpoint_on_the_hub_is_inspected(command_results):
    assert data_of(command_results, "inspect")["checks"]["as_reported"]


@pytest.mark.parametrize(
    "name, says",
    [
        ("plan, pickled", "convert pickled weights to safetensors first"),
        ("plan, nowhere", "org/nowhere is neither a local folder nor a Hub id that you may read"),
        ("plan, no such revision", "org/llama on the Hub has no revision 'v9'"),
        ("plan, two revisions", "org/llama@narrow names a revision, and --revision main names another"),
        ("plan, gated", "org/gated is gated: accept its terms"),
        ("plan, not a name", "neither a local folder nor a Hub id"),
        ("convert, nowhere", "org/nowhere"),
        ("convert, no such column", "has no text field 'txt'; its fields: n (int), body (str)"),
        ("convert, no such split", "dev"),
        ("convert, no such data", "org/nothing"),
    ],
)
def test_refusals(name, says, command_results):
    code, out, err = command_results[name]
    assert code == 2, err
    assert says in err and "Traceback" not in err and out == ""
    assert err.count("error:") == 1 and len(err) < 500


def test_nothing_is_left_and_no_token_is_printed(command_results):
    assert {p.name for p in command_results["work"].iterdir()} == {"plain", "branch", "jsonl", "parquet"}
    for name in COMMANDS:
        assert not any(TOKEN in text for text in command_results[name][1:])
