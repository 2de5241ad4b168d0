"""Without a network, with HF_HUB_OFFLINE=1, for a gated or an unknown name: every command that reads the Hub says what
to do, with exit code 2.
"""

from __future__ import annotations

import importlib
import socket
from pathlib import Path

import pytest
from helpers.hub_standin import FakeHub
from helpers.small import make_recipe

from surgery.cli.main import main
from surgery.conversion.convert import convert
from surgery.core.hub_errors import explain_hub_error, explain_network_error, hub_failure

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "checkpoint"
TEXT = TINY / "calibration.txt"
MODEL, DATA = "org/no-model", "org/no-data"
HEAL = ("-r", "linears", "--data", TEXT)
CHECKPOINT = f"{MODEL} is neither a local folder nor a Hub id"
RECORDS = "is neither a mirrored data set (--data-root) nor a Hub data set in the local cache"
FETCH = "surgery fetch-eval-data DATA --suite"
# name -> (words, what the error says). CONVERTED is a converted checkpoint, NEW a folder that does not exist.
COMMANDS = {
    "plan": (("plan", MODEL, "-r", "low-rank-half"), CHECKPOINT),
    "convert": (("convert", MODEL, "-r", "low-rank-half", "-o", "NEW"), CHECKPOINT),
    "convert, text": (("convert", TINY, "-r", "low-rank-half", "-o", "NEW", "--calibration", DATA), f"data {DATA}: it is neither a local file"),
    "run": (("run", MODEL, "-r", "low-rank-half", "-o", "NEW"), CHECKPOINT),
    "inspect": (("inspect", MODEL), CHECKPOINT),
    "densify": (("densify", MODEL, "-o", "NEW"), CHECKPOINT),
    "quantize": (("quantize", MODEL, "-o", "NEW"), CHECKPOINT),
    "toeplitz": (("toeplitz", MODEL, "-o", "NEW"), CHECKPOINT),
    "serve": (("serve", MODEL), CHECKPOINT),
    "report": (("report", MODEL), CHECKPOINT),
    "push": (("push", MODEL, "org/new"), CHECKPOINT),
    "finetune": (("finetune", MODEL, "--teacher", MODEL, "-o", "NEW", *HEAL), CHECKPOINT),
    "finetune, teacher": (("finetune", "CONVERTED", "--teacher", MODEL, "-o", "NEW", *HEAL), CHECKPOINT),
    "finetune, data": (("finetune", "CONVERTED", "--teacher", TINY, "-o", "NEW", "-r", "linears", "--data", DATA), f"data source {DATA} cannot be read: it is neither"),
    "teacher-cache": (("teacher-cache", MODEL, "-o", "NEW", *HEAL), CHECKPOINT),
    "pretrain, model": (("pretrain", "-r", "gpt2", "--model", MODEL, "-o", "NEW", "--data", TEXT), CHECKPOINT),
    "pretrain, tokenizer": (("pretrain", "-r", "gpt2", "--tokenizer", MODEL, "-o", "NEW", "--data", TEXT), CHECKPOINT),
    "bench": (("bench", "linear", "--model", MODEL), CHECKPOINT),
    "bench draft": (("bench", "draft", "--model", MODEL, "--text", TEXT), CHECKPOINT),
    "search": (("search", MODEL, "--max-bytes", "60%", "--calibration", TEXT, "-o", "NEW"), CHECKPOINT),
    "eval": (("eval", MODEL, "--text", TEXT), CHECKPOINT),
    "eval --compare": (("eval", "CONVERTED", "--text", TEXT, "--compare", MODEL), CHECKPOINT),
    "eval --text": (("eval", "CONVERTED", "--text", DATA), f"data {DATA}: it is neither a local file"),
    "eval, lm-eval": (("eval", "CONVERTED", "--suite", "lm-eval", "--tasks", "piqa"), f"baber/piqa {RECORDS}, and HF_HUB_OFFLINE is set; run {FETCH} piqa"),
    "eval, zeroshot": (("eval", "CONVERTED", "--suite", "zeroshot"), f"{RECORDS}, and HF_HUB_OFFLINE is set; run {FETCH} zeroshot"),
    "eval, longbench2": (("eval", "CONVERTED", "--suite", "longbench2"), f"{FETCH} longbench2"),
    "eval, babilong": (("eval", "CONVERTED", "--suite", "babilong", "--tasks", "qa1", "--lengths", "1024"), f"{FETCH} babilong"),
    "eval, ruler": (("eval", "CONVERTED", "--suite", "ruler", "--tasks", "qa_1", "--lengths", "512"), f"{FETCH} ruler"),
    "eval, retrieval": (("eval", "CONVERTED", "--suite", "retrieval", "--tasks", "swde", "--lengths", "512"), f"{FETCH} retrieval"),
    "fetch-eval-data": (("fetch-eval-data", "NEW", "--suite", "piqa"), "baber/piqa could not be fetched (HF_HUB_OFFLINE is set; unset it"),
}  # fmt: skip
LOCAL_ONLY = {"recipes", "demo", "compare"}  # commands that read nothing of the Hub


@pytest.fixture(scope="module")
def structured(tmp_path_factory) -> Path:
    """A conversion of the embedded checkpoint, with its tokenizer."""
    out = tmp_path_factory.mktemp("hub-errors") / "structured"
    convert(str(TINY), make_recipe(structure="low_rank"), out)
    return out


@pytest.fixture
def command(structured, tmp_path, monkeypatch, capsys):
    """command(words) -> (exit code, standard error on one line) with an empty Hub cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    places = {"CONVERTED": str(structured), "NEW": str(tmp_path / "new")}

    def run(words) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([places.get(str(word), str(word)) for word in words])
        return int(left.value.code or 0), " ".join(capsys.readouterr().err.split())

    return run


@pytest.fixture
def offline(monkeypatch):
    """HF_HUB_OFFLINE=1, which the libraries read when they are imported."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def endpoint(monkeypatch):
    """endpoint(address): the libraries ask this server, without pauses before they ask again."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)

    def ask(address: str) -> None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", address)

    return ask


@pytest.mark.parametrize("name", COMMANDS)
def test_offline_every_command_says_what_to_do(command, offline, name):
    words, said = COMMANDS[name]
    code, told = command(words)
    assert code == 2 and said in told, told
    assert "HF_HUB_OFFLINE is set" in told and "internal error" not in told and "Traceback" not in told


def test_every_command_that_reads_the_hub_is_tried():
    from typer.main import get_command

    from surgery.cli.main import app

    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert {words[0] for words, _ in COMMANDS.values()} == commands - LOCAL_ONLY


@pytest.mark.parametrize(
    "name", ["plan", "inspect", "convert, text", "finetune, data", "pretrain, model", "fetch-eval-data"]
)
def test_without_a_network_a_command_says_what_to_do(command, endpoint, name):
    endpoint("http://127.0.0.1:9")  # the discard port, where nothing listens
    code, told = command(COMMANDS[name][0])
    assert code == 2 and "internal error" not in told, told
    assert "the Hub cannot be reached; give" in told or "could not be fetched (ConnectError" in told, told


def test_gated_and_unknown_names_of_the_hub(command, endpoint, tmp_path):
    (tmp_path / "model").mkdir()
    with FakeHub() as hub:
        endpoint(hub.endpoint)
        hub.add("models", "org/gated", tmp_path / "model")
        hub.gated.add("org/gated")
        for name, said in (
            ("org/gated", "org/gated is gated: accept its terms on its Hub page, then run `hf auth login`"),
            ("org/unknown", "org/unknown is neither a local folder nor a Hub id that you may read; if it is private"),
            ("org/gated@v2", "org/gated is gated"),
        ):
            code, told = command(("inspect", name))
            assert code == 2 and said in told, told


def test_errors_of_data_sets_are_told_apart():
    from datasets.exceptions import DatasetNotFoundError

    kinds = ("a local file", "a Hub data set")
    for text, said in (
        ("Dataset 'x' is a gated dataset on the Hub.", "it is gated: accept its terms"),
        ("Dataset 'x' doesn't exist on the Hub", "it is neither a local file nor a Hub data set that you may read"),
    ):
        assert said in str(explain_hub_error(DatasetNotFoundError(text), "it", "give a file", kinds=kinds))


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "module, name", [("requests", "ConnectionError"), ("requests", "Timeout"), ("aiohttp", "ClientConnectionError"), ("httpx", "ConnectError"), ("httpx2", "ConnectError")]
)  # fmt: skip
def test_errors_of_http_libraries_are_of_the_network(module, name, monkeypatch):
    pytest.importorskip(module)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    found = importlib.import_module(f"{module}.exceptions" if module == "requests" else module)
    error = getattr(found, name)("no route to host")
    assert hub_failure(error) == hub_failure(raised(RuntimeError("wrapped"), error)) == "unreachable"
    assert "try again with a network connection" in str(explain_network_error(error)).lower()


def test_an_error_that_is_not_of_the_network_stays_a_defect(monkeypatch):
    for error in (
        ValueError("x"),
        KeyError("y"),
        FileNotFoundError("z"),
        BrokenPipeError(),
        raised(ValueError("x"), OSError("y")),
    ):
        assert hub_failure(error) is None and explain_network_error(error) is None
        assert explain_hub_error(error, "org/name", "give a folder") is None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert hub_failure(socket.gaierror(-2, "Name or service not known")) == "unreachable"


def test_what_escapes_from_a_command_is_still_no_internal_error(monkeypatch, capsys):
    """A library that reads the Hub by itself, at a place that does not expect it."""
    import requests

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def fail(*given, **more):
        raise RuntimeError("could not load") from requests.exceptions.ConnectionError("no route to host")

    monkeypatch.setattr("surgery.publish.summary.inspect", fail)
    with pytest.raises(SystemExit) as left:
        main(["inspect", "somewhere"])
    said = " ".join(capsys.readouterr().err.split())
    assert left.value.code == 2 and "could not be read" in said and "--data-root DIR" in said and "report" not in said
