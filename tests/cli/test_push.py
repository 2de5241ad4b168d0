"""`surgery push` to the Hub, simulated by a server on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.hub_writable import WritableHub
from huggingface_hub import constants

from surgery.cli.main import main
from surgery.core.errors import SurgeryError
from surgery.publish.hub.files import strip_local_paths
from surgery.publish.hub.push import prepare_upload

TOKEN = "hf_ThisMustNeverBePrinted0123456789abcdef"


@pytest.fixture
def out(converted, tmp_path) -> Path:
    folder = tmp_path / "OUT"
    shutil.copytree(converted("llama"), folder)
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Read as the library is imported, so set where it keeps them."""
    with WritableHub(TOKEN) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield hub


@pytest.fixture
def push_command(monkeypatch, capsys):
    def run(*words: Any, token: str | None = TOKEN) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of `surgery push ..`."""
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN", raising=False)
        code: Any = 0
        try:
            main(["push", *map(str, words)])
        except SystemExit as left:
            code = left.code or 0
        told = capsys.readouterr()
        assert TOKEN not in told.out + told.err
        return code, told.out, told.err

    return run


def test_everything_of_a_checkpoint_arrives_and_nothing_else(hub, push_command, out):
    (out / "training").mkdir()
    (out / "training" / "log.jsonl").write_text("{}\n")
    before = sorted(p.relative_to(out) for p in out.rglob("*"))
    code, said, error = push_command(out, "me/small", "--license", "mit", "--private", "--json")
    assert code == 0, error
    told, there = json.loads(said), hub.files("me/small")
    assert sorted(there) == sorted(file["name"] for file in told["files"]) == sorted(told["uploaded"])
    assert {"README.md", "training/log.jsonl", "surgery_report.json", "config.json"} <= set(there)
    for name in ("model.safetensors", "config.json", "surgery_shim.py"):
        assert there[name] == (out / name).read_bytes()
    assert hub.private == {"me/small"}
    assert sorted(p.relative_to(out) for p in out.rglob("*")) == before
    assert told["url"].endswith("/me/small")


def test_paths_of_this_machine_stay_here(hub, push_command, out):
    push_command(out, "me/small", "--license", "mit")
    report = json.loads((out / "surgery_report.json").read_text())
    source = report["source"]["name"]
    assert source.startswith("/")
    for name, content in hub.files("me/small").items():
        assert source.encode() not in content, name
    assert strip_local_paths({"a": ["/home/me/x.txt", "org/name", "~/y", "a b", "/"]}) == {
        "a": ["x.txt", "org/name", "y", "a b", "/"]
    }


def test_outside_d8_paths_in_configs_and_templates(out):
    config = json.loads((out / "config.json").read_text())
    told = {
        "_name_or_path": "models/alice/llama", "teacher": "/home/alice/teacher", "_from": "\\\\server\\alice\\model",
        "base": "file:///home/alice/base", "data_dir": "..\\alice\\texts", "own": "C:\\Users\\alice\\x", "label": "/m/09l8g",
        "think": "/think", "hub": "org/name",
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps({**config, **told}))
    (out / "special_tokens_map.json").write_text(json.dumps({"base": "/home/alice/x", "eos_token": "</s>"}))
    (out / "chat_template.jinja").write_text("{# from /home/alice/t.jinja #}{{ '/think' }}<|/x|>")
    items = {item.name: item.content() for item in prepare_upload(str(out), "me/small", "mit").items}
    names = ("config.json", "special_tokens_map.json", "chat_template.jinja")
    assert not [name for name in names if "alice" in items[name]]
    cleaned = json.loads(items["config.json"])
    assert [cleaned[key] for key in ("label", "think", "hub")] == ["/m/09l8g", "/think", "org/name"]
    assert cleaned["teacher"] == "teacher" and items["chat_template.jinja"] == "{# from t.jinja #}{{ '/think' }}<|/x|>"


def test_outside_d8_an_edited_shim_is_refused(out):
    shim, before = out / "surgery_shim.py", (out / "surgery_shim.py").read_text()
    shim.write_text(before.replace("surgery.modeling.auto_classes", "surgery.shims"))
    prepare_upload(str(out), "me/small", "mit")  # as it was written before
    shim.write_text(before + "import os\n")
    with pytest.raises(SurgeryError, match=r"surgery_shim\.py was changed"):
        prepare_upload(str(out), "me/small", "mit")


def _without_an_entry(config):
    config["quantization_config"]["modules"].popitem()


def _with_an_entry(config):
    modules = config["quantization_config"]["modules"]
    modules["model.layers.0.mlp.no_proj"] = next(iter(modules.values()))


@pytest.mark.parametrize(
    "change",
    [
        _without_an_entry,
        _with_an_entry,
        lambda config: config.update(num_hidden_layers=config["num_hidden_layers"] + 1),
        lambda config: next(iter(config["quantization_config"]["modules"].values())).update(bias=True),
        lambda config: config.update(vocab_size=config["vocab_size"] + 8),
    ],
)
def test_outside_d8_a_folder_that_no_loader_opens_is_refused(out, change):
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(SurgeryError):
        prepare_upload(str(out), "me/small", "mit")


def test_outside_d8_code_of_a_tokenizer_that_is_not_there_is_refused(out):
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": ["tokens.Mine", None]}}))
    with pytest.raises(SurgeryError, match=r"tokens\.py is not in the folder"):
        prepare_upload(str(out), "me/small", "mit")


def test_a_dry_run_sends_nothing_and_needs_no_token(hub, push_command, out):
    code, said, _ = push_command(out, "me/small", "--license", "mit", "--dry-run", token=None)
    assert code == 0 and not hub.repos
    assert "model.safetensors" in said and "license: mit" in said and "## Limits" in said


def test_what_broke_off_goes_on(hub, push_command, out):
    """Weights that arrived are not sent again; until the end the repository is as it was."""
    whole = (out / "model.safetensors").read_bytes()
    _split(out)
    hub.fail_after = 1
    command = (out, "me/small", "--license", "mit")
    code, _, said = push_command(*command)
    assert code == 2 and "again" in said
    assert hub.files("me/small") == {} and len(hub.sent) == 1
    hub.fail_after = None
    code, _, _ = push_command(*command)
    assert code == 0 and len(hub.sent) == len(set(hub.sent)) == 2
    there = hub.files("me/small")
    assert "model.safetensors" not in there and sum(map(len, there.values())) > len(whole)


def test_refusals_are_told_in_words(hub, push_command, out):
    code, _, said = push_command(out, "others/small", "--license", "mit")
    assert code == 2 and "write permission" in said
    code, _, said = push_command(out, "a/b/c", "--license", "mit")
    assert code == 2 and "not a valid repository name" in said
    code, _, said = push_command(out, "me/small", "--license", "mit", token="hf_wrong")
    assert code == 2 and "rejects the token" in said and "hf_wrong" not in said
    code, _, said = push_command(out, "me/small", "--license", "mit", token=None)
    assert code == 2 and "hf auth login" in said


def test_a_repository_that_is_there_and_a_branch_of_it(hub, push_command, out):
    again = (out, "me/small", "--license", "mit")
    assert [push_command(*again)[0], push_command(*again, "--revision", "v2", "-m", "second")[0]] == [0, 0]
    assert hub.messages[-1] == "second" and len(hub.sent) == 1
    assert hub.files("me/small", "v2").keys() == hub.files("me/small").keys()


def test_what_an_earlier_push_left_is_taken_away(hub, push_command, out):
    """Its other shards would be loaded, its measurements read, beside the new ones; what is not ours stays."""
    again = (out, "me/small", "--license", "mit")
    assert push_command(*again)[0] == 0
    hub.repos["me/small"]["main"] |= {"eval/table.md": b"old", "notes.md": b"mine"}
    _split(out)
    code, said, _ = push_command(*again, "--json")
    there = hub.files("me/small")
    assert code == 0 and json.loads(said)["removed"] == ["eval/table.md", "model.safetensors"]
    assert "notes.md" in there and "model.safetensors.index.json" in there and "eval/table.md" not in there


def test_another_model_is_not_overwritten(hub, push_command, out):
    hub.repos["me/original"] = {"main": {"model.safetensors": b"the original", "config.json": b"{}"}}
    code, _, said = push_command(out, "me/original", "--license", "mit")
    assert code == 2 and "holds another model" in said and "me/original-surgery" in said
    assert push_command(out, "me/original", "--license", "mit", "--revision", "surgery")[0] == 0
    assert hub.files("me/original")["model.safetensors"] == b"the original"
    assert hub.files("me/original", "surgery")["model.safetensors"] == (out / "model.safetensors").read_bytes()


def test_a_public_repository_does_not_take_what_shall_be_private(hub, push_command, out):
    hub.repos["me/small"] = {"main": {}}
    code, _, said = push_command(out, "me/small", "--license", "mit", "--private")
    assert code == 2 and "public" in said and hub.files("me/small") == {} and not hub.sent


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (".env", "HF_TOKEN=x", "do not belong to a checkpoint: .env"),
        ("notes.txt", "hello", "notes.txt"),
        ("pytorch_model.bin", "", "pytorch_model.bin"),
        ("eval/secrets.txt", "", "eval/secrets.txt"),
        ("surgery_shim.py", f"token = '{TOKEN}'", "seems to contain a secret"),
    ],
)
def test_files_outside_the_known_set_are_refused(out, name, content, said):
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text(content)
    with pytest.raises(SurgeryError, match=said):
        prepare_upload(str(out), "me/small", license="mit")


def test_a_link_out_of_the_folder_is_refused(out, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("x")
    (out / "vocab.json").unlink(missing_ok=True)
    (out / "vocab.json").symlink_to(secret)
    with pytest.raises(SurgeryError, match="is a link to"):
        prepare_upload(str(out), "me/small", license="mit")


def test_the_licence_is_that_of_the_source(out, checkpoints):
    source = checkpoints("llama")
    with pytest.raises(SurgeryError, match="names no license"):
        prepare_upload(str(out), "me/small")
    (out / "LICENSE.txt").write_text("do what you like")
    assert prepare_upload(str(out), "me/small").license.metadata()["license_link"] == "LICENSE.txt"
    card = source / "README.md"
    card.write_text("---\nlicense: llama3.1\n---\nhello")
    try:
        assert prepare_upload(str(out), "me/small").license.id == "llama3.1"
    finally:
        card.unlink()
    assert prepare_upload(str(out), "me/small", license="mit").license.id == "mit"


def test_a_license_that_the_hub_does_not_list_is_refused(out):
    with pytest.raises(
        SurgeryError, match=r"--license apache-2: the Hub has no license .* did you mean 'apache-2.0'\?"
    ):
        prepare_upload(str(out), "me/small", license="apache-2")
    for name in ("other", "unknown", "llama3.1"):
        assert prepare_upload(str(out), "me/small", license=name).license.id == name


def test_the_card_says_what_the_report_says(out, tmp_path):
    report = json.loads((out / "surgery_report.json").read_text())
    report["held_out"] = {
        "unit": "nats per token",
        "original": 1.5,
        "converted": 1.75,
        "difference_se": 0.01,
        "tokens": 999,
    }
    stage = {"kind": "distill", "tokens": 12345}
    scores = {"original": {"perplexity": 2.5}, "before": {"perplexity": 4.5}, "after": {"perplexity": 2.75}}
    report["training"] = [{"stages": [stage], "validation": scores}]
    (out / "surgery_report.json").write_text(json.dumps(report))
    measured = tmp_path / "measured"
    measured.mkdir()
    (measured / "results.json").write_text("{}")
    (measured / "table.md").write_text("| suite | base |\n| --- | --- |\n")
    (measured / "needle.png").write_bytes(b"png")
    parcel = prepare_upload(str(out), "me/small", "mit", "org/base", measured)
    head = yaml.safe_load(parcel.card.split("---\n")[1])
    assert head["license"] == "mit" and head["base_model"] == "org/base" and "surgery" in head["tags"]
    for words in ("1.5000 -> 1.7500", "difference of 0.2500 ± 0.0100", "12,345", "2.750", "| suite | base |",
                  "![needle](eval/needle.png)", "import surgery", "me/small", "Seed 0", "arXiv:2406.06248"):  # fmt: skip
        assert words in parcel.card, words
    assert {"eval/needle.png", "eval/table.md", "eval/results.json"} <= {item.name for item in parcel.items}
    (out / "README.md").write_text("# mine\n")
    own = prepare_upload(str(out), "me/small", "mit")
    assert own.card == "# mine\n" and own.note


def test_weights_that_are_not_those_of_the_report_are_refused(out):
    report = json.loads((out / "surgery_report.json").read_text())
    report["totals"]["params_after"] += 1
    (out / "surgery_report.json").write_text(json.dumps(report))
    with pytest.raises(SurgeryError, match="one of the two was changed"):
        prepare_upload(str(out), "me/small", license="mit")


def _split(folder: Path) -> None:
    """The weights in two files with an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, mine in halves.items():
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, mine in halves.items() for name in mine}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


LOCAL = "/home/somebody/models/my llama"


def test_2_6_paths_are_cut_from_every_file(hub, push_command, out, tmp_path):
    """In configs by key, in reports and logs wherever they stand; labels and tokens that only look like paths stay."""

    def update_json(name: str, **told: Any) -> None:
        path = out / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **told}))

    labels = {"0": "/m/09l8g", "1": "/think"}
    update_json(
        "config.json", _name_or_path=LOCAL, id2label=labels, task_specific={"cache_dir": "C:\\Users\\me\\cache"}
    )
    update_json(
        "tokenizer_config.json",
        name_or_path=LOCAL,
        vocab_file=f"{LOCAL}/vocab.txt",
        eos_token="/think",
        extra=str(tmp_path),
    )
    update_json("generation_config.json", _name_or_path=LOCAL)
    update_json("adapter/adapter_config.json", base_model_name_or_path=LOCAL, peft_type="LORA")
    (out / "adapter" / "README.md").write_text(
        f"base_model: {LOCAL}\n\nTrained from {tmp_path}/x.txt, see https://x.org/home/y."
    )
    (out / "training").mkdir()
    lines = [{"source": LOCAL}, {"said": f"reads {tmp_path}/data.jsonl. ~/notes too"}]
    (out / "training" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut off')
    (out / "report.html").write_text(f"<title>{LOCAL}</title><p>from '{tmp_path}/a&amp;b'</p>")
    (out / "eval").mkdir()
    update_json("eval/results.json", command=f"surgery eval {tmp_path}/OUT --text {LOCAL}", rows=[])
    (out / "eval" / "table.md").write_text(f"| {tmp_path}/OUT | 1.0 |\n")
    report = json.loads((out / "surgery_report.json").read_text())
    report["recipe"]["description"] = f"Made with {tmp_path}/recipe.yaml"
    (out / "surgery_report.json").write_text(json.dumps(report))
    code, _, said = push_command(out, "me/small", "--license", "mit")
    assert code == 0, said
    there = hub.files("me/small")
    for name, content in there.items():
        for path in (
            LOCAL,
            str(tmp_path),
            str(tmp_path.parent),
            "/home/somebody",
            "Users",
            "~/notes",
            report["source"]["name"],
        ):
            assert path.encode() not in content, (name, path)
    config = json.loads(there["config.json"])
    assert config["_name_or_path"] == "my llama" and config["id2label"] == labels
    tokenizer = json.loads(there["tokenizer_config.json"])
    assert tokenizer["vocab_file"] == "vocab.txt" and tokenizer["eos_token"] == "/think"
    assert there["adapter/README.md"].decode().endswith("from x.txt, see https://x.org/home/y.")
    assert there["training/log.jsonl"].decode() == '{"source": "my llama"}\n{"said": "reads data.jsonl. notes too"}\n'
    assert json.loads(there["eval/results.json"])["command"] == "surgery eval OUT --text my llama"
    assert b"| OUT | 1.0 |" in there["README.md"] and b"Made with recipe.yaml" in there["README.md"]


@pytest.mark.parametrize("ticks", ["```", "````", "`"])
def test_2_6_a_code_fence_in_a_recipe_stays_inside(out, ticks):
    report = json.loads((out / "surgery_report.json").read_text())
    report["recipe"]["description"] = f"a\n{ticks}\n\n# Not a heading\n\n![x](https://x.org/y.png)\n"
    report["versions"] = {"torch": "2.0\n\n# Nor this"}
    report["source"]["revision"] = "`\n# Nor this one"
    (out / "surgery_report.json").write_text(json.dumps(report))
    lines = prepare_upload(str(out), "me/small", "mit").card.splitlines()
    fences = [i for i, line in enumerate(lines) if line.endswith("```yaml")]
    (start,) = fences
    fence = lines[start].removesuffix("yaml")
    stop = next(i for i, line in enumerate(lines[start + 1 :], start + 1) if line.startswith(fence))
    inside = [i for i, line in enumerate(lines) if "Not a heading" in line or "x.org" in line]
    assert inside and all(start < i < stop for i in inside)
    assert "seed: " in "\n".join(lines[start:stop]) and not [line for line in lines if line.startswith("# Nor")]


def _eval_results(value: float) -> dict[str, Any]:
    row = {
        "suite": "ppl", "task": "ppl", "group": {}, "values": {"base": 2.0, "converted": value},
        "metric": {"name": "nll", "kind": "ppl", "title": "perplexity"},
    }  # fmt: skip
    found = {
        **row,
        "suite": "needle",
        "task": "needle",
        "metric": {"name": "accuracy", "kind": "accuracy", "title": ""},
    }
    grouped = {**row, "group": {"length": 128}}
    return {"rows": [row, grouped, {**found, "values": {"converted": 75.0}}, {"values": None}, "damaged"]}


def test_the_card_has_the_metrics_of_the_hubs_model_index(out, tmp_path):
    """The library that the Hub itself uses reads them."""
    from huggingface_hub import ModelCard

    measured = tmp_path / "measured"
    measured.mkdir()
    (measured / "results.json").write_text(json.dumps(_eval_results(2.5)))
    (measured / "table.md").write_text("| suite | base |\n| --- | --- |\n")
    card = prepare_upload(str(out), "me/small", "mit", "org/base", measured).card
    data = ModelCard(card, ignore_metadata_errors=False).data
    assert data.base_model == "org/base" and data.model_name == "small" and data.widget[0]["text"]
    found = {(r.dataset_name, r.metric_type, r.metric_name, r.metric_value) for r in data.eval_results}
    assert found == {("ppl", "perplexity", "perplexity", 2.5), ("needle", "accuracy", "accuracy", 75.0)}
    (measured / "results.json").write_text(json.dumps(_eval_results(float("nan"))))
    card = prepare_upload(str(out), "me/small", "mit", "org/base", measured).card
    assert {r.metric_type for r in ModelCard(card).data.eval_results} == {"accuracy"}


def test_a_base_model_is_asked_for_where_the_source_is_a_folder(out):
    upload = prepare_upload(str(out), "me/small", "mit")
    assert upload.note and "--base-model org/name" in upload.note and "base_model" not in upload.card
    assert prepare_upload(str(out), "me/small", "mit", "org/base").note is None


def test_cards_say_how_to_install_from_source(out, monkeypatch):
    from surgery.core import project

    card = prepare_upload(str(out), "me/small", "mit").card
    assert "pypi.org" not in card and "pip install ." in card and f"pip install {project.PACKAGE_NAME}" not in card
    monkeypatch.setattr(project, "REPOSITORY_URL", "https://example.org/o/surgery")
    card = prepare_upload(str(out), "me/small", "mit").card
    assert (
        "[surgery](https://example.org/o/surgery)" in card and "pip install git+https://example.org/o/surgery" in card
    )
    monkeypatch.setattr(project, "PACKAGE_IS_PUBLISHED", True)
    assert f"pip install {project.PACKAGE_NAME}\n" in prepare_upload(str(out), "me/small", "mit").card


def test_results_in_another_folder_of_the_checkpoint_are_left_out_and_named(push_command, out):
    for name in ("before/results.json", "before/table.md", "before/ppl.png", "before/OUT-1234/ppl/samples.jsonl"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    code, said, _ = push_command(out, "me/small", "--license", "mit", "--dry-run")
    assert code == 0 and f"the results in {out / 'before'} are not uploaded" in said
    upload = prepare_upload(str(out), "me/small", license="mit")
    assert upload.left_out == (str(out / "before"),) and not [
        item.name for item in upload.items if "before" in item.name
    ]
    chosen = prepare_upload(str(out), "me/small", license="mit", measured=out / "before")
    assert chosen.left_out == () and "eval/table.md" in [item.name for item in chosen.items]
    (out / "before" / "notes.txt").write_text("hello")
    with pytest.raises(SurgeryError, match=r"do not belong to a checkpoint: before/notes\.txt"):
        prepare_upload(str(out), "me/small", license="mit")


def test_results_of_another_checkpoint_are_refused_and_old_ones_named(out):
    """The card must not show another model's numbers as those of this one."""
    (out / "eval").mkdir()
    models = {"converted": {"name": "/home/me/OTHER", "fingerprint": "f" * 64}}
    (out / "eval" / "results.json").write_text(json.dumps({"models": models, "rows": []}))
    with pytest.raises(SurgeryError, match=r"eval/results\.json is of OTHER, not of .*OUT"):
        prepare_upload(str(out), "me/small", "mit")
    models["converted"]["name"] = "runs/OUT"
    (out / "eval" / "results.json").write_text(json.dumps({"models": models, "rows": []}))
    assert "changed since it was measured" in prepare_upload(str(out), "me/small", "mit").note
