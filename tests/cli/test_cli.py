"""The command line: JSON output, and for mistakes of the user one sentence and exit code 2."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.small import run_python
from safetensors.torch import load_file, save_file

from surgery import api
from surgery.cli.main import PANELS, main
from surgery.core.errors import SurgeryError
from surgery.core.files import explain_path_error
from surgery.planning.recipe import shipped_recipes
from surgery.planning.shipped import COMMON
from surgery.publish.summary import cost_lengths

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "checkpoint"


@pytest.fixture
def run(capsys):
    """run(*words) -> (exit code, stdout, stderr), in this process."""

    def command(*words) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        return left.value.code or 0, *capsys.readouterr()

    return command


@pytest.fixture
def run_json(run):
    def command(*words):
        code, out, err = run(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    return command


# -- what each verb gives --------------------------------------------------------------------------
def test_recipes(run, run_json):
    code, out, _ = run("recipes")
    words = [line.split()[0] for line in out.splitlines() if line[:1].isalpha()]
    assert code == 0 and words == ["recipe", *COMMON]
    assert list(run_json("recipes")) == list(COMMON) and api.recipes() == run_json("recipes")
    whole = run_json("recipes", "--all")
    assert list(whole)[: len(COMMON)] == list(COMMON) and set(whole) == set(shipped_recipes())
    assert f"{len(whole) - len(COMMON)} others: surgery recipes --all" in out
    listed = run("recipes", "--all")[1]
    assert all(name in listed for name in whole) and api.recipes(every=True) == whole
    assert all(recipe.keys() == {"description", "aim", "cost"} for recipe in api.recipes().values())
    healing = run_json("recipes", "--healing")
    assert healing.keys() >= {"attention", "linears"} and "btt-half" not in run("recipes", "--healing")[1]
    assert api.recipes(healing=True) == healing


def test_help_groups_the_commands_in_the_order_of_use(run):
    listed = [line.strip("│╭─╮ ").split() for line in run("--help")[1].partition("Convert")[2].splitlines()]
    words = [line[0] for line in listed if line]
    expected = [name for panel, commands in PANELS.items() for name in (panel, *commands)][1:]
    assert [word for word in words if word in expected] == expected


def test_a_healing_recipe_is_not_converted_by(run, checkpoints):
    for name in ("linears", "weights-only"):
        code, _, err = run("plan", checkpoints("llama"), "-r", name)
        assert code == 2 and f"{name} is a healing recipe, for `surgery finetune`" in " ".join(err.split())


def test_plan(run, run_json, checkpoints):
    words = ("plan", checkpoints("llama"), "-r", "low-rank-half", "--set", "keep=0.75")
    data = run_json(*words)
    assert data["recipe"]["keep"] == 0.75 and len(data["targets"]) == data["totals"]["modules"] == 14
    assert data["cuts"] == data["targets"]  # the key until 0.1
    assert sum(row["after"] for row in data["rows"]) == data["totals"]["params_after"]
    code, out, _ = run(*words)
    assert code == 0 and "mlp.down" in out and "low_rank" in out


def test_plan_shows_caches_at_the_context_asked_for(run, run_json, checkpoints):
    words = ("plan", checkpoints("llama"), "-r", "log-linear")
    usual, asked = run_json(*words), run_json(*words, "--context", "32k")
    assert list(usual["mixers"][0]["cache_bytes"]) == ["1024", "8192", "65536"]
    assert (
        list(asked["mixers"][0]["cache_bytes"])
        == list(asked["attention_totals"]["cache_bytes"])
        == ["1024", "8192", "32768"]
    )
    assert asked["mixers"][0]["cache_bytes"]["8192"] == usual["mixers"][0]["cache_bytes"]["8192"]
    assert usual["estimate"]["result_cache_tokens"] == 4096 and asked["estimate"]["result_cache_tokens"] == 32768
    code, out, _ = run(*words, "--context", "32K")
    assert code == 0 and "cache at 8K" in out and "cache at 32K" in out and "caches of 32,768 tokens" in out
    for wrong in ("0", "-3", "many", "4.5k"):
        code, _, err = run(*words, "--context", wrong)
        assert code == 2 and "number of tokens" in plain(err) and "32k" in plain(err)


@pytest.mark.parametrize("context", [1, 1024, 4096, 32768, 10**6])
def test_lengths_of_costs_hold_the_context(context):
    lengths = cost_lengths(context)
    assert context in lengths and len(lengths) == 3 and lengths == tuple(sorted(lengths))
    assert cost_lengths(None) == (1024, 8192, 65536)


def test_the_plan_of_mlr_attention_says_that_it_is_slow_on_a_cpu(run, checkpoints):
    code, out, _ = run("plan", checkpoints("llama"), "-r", "mlr-cache-60")
    assert code == 0 and "on a CPU MLR attention runs in plain PyTorch" in plain(out)


def test_convert_inspect_densify(run, run_json, checkpoints, calibration, tmp_path):
    out = tmp_path / "out"
    words = (
        "--recipe",
        "auto-half",
        "--calibration",
        calibration("llama"),
        "--set",
        "allocate=uniform",
        "--set",
        "tune=false",
        "--seed",
        3,
    )
    made = run_json("convert", checkpoints("llama"), *words, "--out", out, "--device", "cpu")
    assert made["out"] == str(out) and made["report"]["seed"] == 3
    assert made["report"] == json.loads((out / "surgery_report.json").read_text())
    seen = run_json("inspect", out)
    assert seen["checks"] == {
        "stored_params": seen["totals"]["params_after"],
        "as_reported": True,
        "structured_linears": 14,
    }
    assert seen["macs_per_token"]["after"] < seen["macs_per_token"]["before"]
    for more in ((), ("--modules",)):
        code, text, _ = run("inspect", out, *more)
        assert code == 0 and "kept" in text
    assert run_json("densify", out, "--out", tmp_path / "dense")["modules"] == 14
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoints("llama"), tmp_path / "dense"))
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "out"]


def test_options_are_short_for_keys(run_json, run, checkpoints, calibration, tmp_path):
    """The same bytes as with --set, replaced without a word but the warnings and the path."""
    text, out = ("--calibration", calibration("llama")), tmp_path / "out"
    words = ("convert", checkpoints("llama"), "-r", "low-rank-half", *text, "--set", "tune=false", "--out", out)
    short = run_json(*words, "--keep", 0.7, "--tokens", "1k", "--length", 24, "--set", "keep=0.7")["report"]["recipe"]
    first = (out / "model.safetensors").read_bytes()
    keys = [word for pair in ("keep=0.7", "tokens=1024", "length=24") for word in ("--set", pair)]
    code, printed, err = run(*words, *keys, "--overwrite", "--quiet")
    assert (code, printed, err) == (0, f"{out}\n", "")
    assert short == json.loads((out / "surgery_report.json").read_text())["recipe"]
    assert (out / "model.safetensors").read_bytes() == first
    code, printed, err = run(*words[:4], "--out", tmp_path / "free", "--quiet")
    assert printed == f"{tmp_path / 'free'}\n" and err.startswith("warning: no calibration text") and "note:" not in err


def test_a_long_tuning_is_said_with_one_plan(run, checkpoints, calibration, tmp_path, monkeypatch):
    from surgery.planning.plan import make_plan

    made = []
    monkeypatch.setattr("surgery.conversion.sources.make_plan", lambda *words: made.append(1) or make_plan(*words))
    monkeypatch.setattr("surgery.planning.plan.make_plan", None)
    monkeypatch.setattr("surgery.publish.tables.LONG_TUNING", -1)
    words = ("-r", "low-rank-half", "--calibration", calibration("llama"), "--set", "tune={model: 1}")
    code, _, err = run("convert", checkpoints("llama"), *words, "--out", tmp_path / "out")
    assert code == 0 and made == [1] and "note: tuning is estimated at" in plain(err)


def test_eval_beside_the_original(run, run_json, tmp_path):
    """The embedded checkpoint at full rank measures as itself; at half it measures worse."""
    layer = ("--set", "layers=:1", "--out")
    run_json("convert", TINY, "-r", "low-rank-half", "--set", "rank=full", *layer, tmp_path / "full")
    run_json("convert", TINY, "-r", "low-rank-half", *layer, tmp_path / "half")
    sizes = ("--text", TINY / "heldout.txt", "--tokens", 512, "--length", 128)
    full = run_json("eval", tmp_path / "full", "--compare", TINY, *sizes)["rows"][0]
    assert full["ratio"]["change"] == pytest.approx(1, abs=1e-4)
    half = run_json("eval", tmp_path / "half", "--compare", TINY, *sizes)["rows"][0]
    assert half["ratio"]["change"] > 1 and half["errors"]["converted"] > 0
    cosine = run_json("eval", tmp_path / "half", "--suite", "cosine", "--compare", TINY, *sizes)["rows"][0]
    assert 0 < cosine["values"]["converted"] < 1
    code, out, _ = run("eval", tmp_path / "full", "--compare", TINY, *sizes)
    assert code == 0 and "perplexity" in out


def test_help_and_version(run):
    from surgery.core.version import __version__

    assert run("--version")[:2] == (0, f"surgery {__version__}\n")
    code, out, _ = run("--help")
    assert code == 0
    assert all(verb in out for verb in ("recipes", "plan", "convert", "inspect", "eval", "densify", "demo"))
    assert "--resume" in run("convert", "--help")[1]


# -- slips -----------------------------------------------------------------------------------------
def plain(message: str) -> str:
    """Without the frame and the line breaks that Typer puts around its own messages."""
    return " ".join(message.replace("│", " ").split())


CONVERT = ("convert", "{llama}", "-r", "low-rank-half", "--out", "{tmp}/out")
SLIPS = [
    (("plan", "{tmp}/none", "-r", "btt-half"), "{tmp}/none does not exist"),
    (("plan", "{llama}/config.json", "-r", "btt-half"), "is a file; give a checkpoint folder"),
    (("plan", "{llama}", "-r", "btt-haf"), "did you mean 'btt-half'?"),
    (("plan", "{llama}", "-r", "{tmp}/none.yaml"), "recipe file {tmp}/none.yaml does not exist"),
    (("plan", "{llama}", "-r", "{empty}"), "recipe {empty} has no keys (got an empty file, or comments only). Write keys into it"),
    (("plan", "{llama}", "-r", "{empty}", "--keep", "0.7"), "recipe {empty} has no keys"),
    (("convert", "{llama}", "-r", "{empty}", "--calibration", "a.txt", "--out", "{tmp}/out"), "recipe {empty} has no keys"),
    (("run", "{llama}", "-r", "{empty}", "--out", "{tmp}/run"), "recipe {empty} has no keys"),
    (("finetune", "{converted}", "-r", "{empty}", "--out", "{tmp}/out"), "recipe {empty} has no keys"),
    (("pretrain", "-r", "{empty}", "--out", "{tmp}/out"), "recipe {empty} has no keys"),
    (("quantize", "{llama}", "--rules", "{empty}", "--out", "{tmp}/out"), "--rules: {empty} must be a mapping with a list of rules (got None)"),
    (("plan", "{llama}", "-r", "btt-half", "--set", "kep=0.5"), "unknown key 'kep'; did you mean 'keep'?"),
    (("plan", "{llama}", "-r", "btt-half", "--set", "keep"), "write key=value, for example --set keep=0.75"),
    (("plan", "{llama}", "-r", "btt-half", "--set", "structure=btu"), "unknown structure 'btu'; did you mean 'btt'?"),
    (("plan", "{llama}", "-r", "btt-half", "--set", "tune.layer=3"), "unknown key 'tune.layer'; did you mean 'layers'?"),
    (("plan", "{llama}", "-r", "btt-half", "--set", "keep=7"), "btt-half.yaml with override keep=7: keep: write a fraction"),
    (
        ("plan", "{llama}", "-r", "btt-half", "--set", "rules=[{{match: mlp.dwn}}]"),
        "unknown role 'mlp.dwn'; did you mean 'mlp.down'?",
    ),
    (("plan", "{llama}", "-r", "btt-half", "--set", "tune={{model:2}}"), "unknown key 'tune.model:2'; write a space behind the colon: model: 2"),
    (("plan", "{llama}", "-r", "btt-half", "--keep", "0.7", "--set", "keep=0.5"), "--keep 0.7 and --set keep=0.5 give keep different values"),
    (("plan", "{llama}", "-r", "btt-half", "--keep", "0.7", "--set", "keep.mlp=0.5"), "--keep 0.7 and --set keep.mlp=0.5"),
    (("plan", "{llama}", "-r", "btt-half", "--keep", "7"), "keep: write a fraction over 0 and at most 1"),
    (("plan", "{llama}", "-r", "log-linear", "--keep", "0.5"), "this recipe replaces none"),
    (("plan", "{llama}", "-r", "btt-half", "--data-free", "--tokens", "8k"), "--tokens 8192 is about the calibration text, and there is none"),
    (("plan", "{llama}", "-r", "btt-half", "--tokens", "3"), "tokens: "),
    (("run", "{llama}", "-r", "log-linear", "--keep", "0.5", "--out", "{tmp}/run"), "this recipe replaces none"),
    (("plan", "{converted}", "-r", "btt-half"), "is already converted; start from its source, or multiply its structured linears out: surgery densify"),
    (("plan", "{quantised}", "-r", "btt-half"), "is quantized (gptq)"),
    (("plan", "{pickled}", "-r", "btt-half"), "has only pickled weights (pytorch_model.bin)"),
    (("plan", "{truncated}", "-r", "btt-half"), "(a truncated download?)"),
    (("plan", "{llama}", "-r", "btt-half", "--revision", "v2"), "--revision needs a Hub id "),
    (("plan", "{llama}"), "Missing option '--recipe'"),
    (("pan", "{llama}"), "No such command 'pan'"),
    ((*CONVERT[:-1], "{tmp}/taken"), "taken exists; choose another --out"),
    ((*CONVERT[:-1], "{tmp}/a/b/out"), "{tmp}/a/b is not a folder; make it first"),
    ((*CONVERT, "--device", "cuda:99"), "--device cuda:99: "),
    ((*CONVERT, "--device", "gpu"), "--device gpu: "),
    ((*CONVERT, "--seed", "-1"), "seed: "),
    ((*CONVERT, "--seed", "1", "--set", "seed=2"), "--seed 1 and --set seed=2 give seed different values"),
    ((*CONVERT, "--length", "64"), "--length 64 is about the calibration text, and there is none. Give --calibration FILE"),
    ((*CONVERT, "--calibration", "a.txt", "--set", "calibration=b.txt"), "--calibration a.txt and --set calibration=b.txt"),
    ((*CONVERT, "--calibration", "a.txt", "--tokens", "many"), "must be a number of tokens"),
    ((*CONVERT, "--resume", "--overwrite"), "--overwrite starts again, and --resume continues"),
    ((*CONVERT[:-1], "{tmp}/taken", "--overwrite"), "taken holds no surgery_report.json, so that no conversion wrote it"),
    ((*CONVERT, "--calibration", "{tmp}/none.txt"), "'{tmp}/none.txt' is not a file"),
    ((*CONVERT, "--calibration", "{tmp}/none.safetensors"), "calibration file {tmp}/none.safetensors does not exist"),
    ((*CONVERT, "--calibration", "{tmp}/taken/text.txt"), "has no tokenizer that transformers can load"),
    (("convert", "{nan}", *CONVERT[2:]), "'model.layers.0.mlp.up_proj.weight' in model.safetensors holds 1 NaN or Inf"),
    (("inspect", "{llama}"), "is not a converted checkpoint"),
    (("inspect", "{tmp}/none"), "{tmp}/none does not exist"),
    (("densify", "{llama}", "-o", "{tmp}/out"), "is not a converted checkpoint"),
    (("densify", "{converted}", "-o", "{tmp}/taken"), "taken exists; choose another --out"),
    (("densify", "{torn}", "-o", "{tmp}/out"), "lacks tensors 'model.layers.0.mlp.up_proj."),
    (("eval", "{tmp}/none", "--text", "{tmp}/taken/text.txt"), "{tmp}/none does not exist"),
    (("eval", "{llama}", "--text", "x", "--suite", "pl"), "unknown suite 'pl'; did you mean 'ppl'?"),
    (("eval", "{llama}", "--text", "x", "--suite", "cosine"), "compares two models. Give the original with --compare SRC"),
    (("eval", "{llama}", "--text", "x", "--dtype", "bf16"), "--dtype 'bf16' is not supported; did you mean 'bfloat16'?"),
    (("eval", "{tiny}", "--text", "{tmp}/none.txt"), "none.txt' is not a file"),
    (("eval", "{tiny}", "--text", "{tmp}/taken/text.txt"), "tokens; at least two windows of 1024 are needed"),
    (("eval", "{llama}", "--text", "x", "--tokens", "many"), "Invalid value for '--tokens'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(checkpoints, converted, tmp_path_factory):
    """Checkpoints with one thing wrong each, made once."""
    root, llama, ours = tmp_path_factory.mktemp("bad"), checkpoints("llama"), converted("llama")
    made = {name: root / name for name in ("truncated", "nan", "quantised", "pickled", "torn")}
    for name, folder in made.items():
        shutil.copytree(ours if name == "torn" else llama, folder)
    weights = {name: folder / "model.safetensors" for name, folder in made.items()}
    weights["truncated"].write_bytes(weights["truncated"].read_bytes()[:-64])
    weights["pickled"].rename(made["pickled"] / "pytorch_model.bin")
    tensors = load_file(weights["nan"])
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, weights["nan"])
    tensors = load_file(weights["torn"])
    save_file({k: v for k, v in tensors.items() if "layers.0.mlp.up_proj" not in k}, weights["torn"])
    config = json.loads((llama / "config.json").read_text())
    (made["quantised"] / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    )
    (root / "empty.yaml").write_text("# structure: btt\n")
    return {**made, "llama": llama, "converted": ours, "tiny": TINY, "empty": root / "empty.yaml"}


@pytest.mark.parametrize("words, says", SLIPS, ids=[" ".join(words)[:60] for words, _ in SLIPS])
def test_slips(words, says, run, folders, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "text.txt").write_text("a few words")
    places = {**folders, "tmp": tmp_path}
    code, out, err = run(*(word.format(**places) for word in words))
    assert code == 2, err
    assert says.format(**places) in plain(err)
    assert "Traceback" not in err and out == ""
    assert err.count("error:") + err.count("Error") == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["taken", "text.txt"]


def test_debug_shows_where(run, tmp_path):
    with pytest.raises(SurgeryError, match="does not exist"):
        main(["--debug", "plan", str(tmp_path / "none"), "-r", "btt-half"])
    assert run("plan", tmp_path / "none", "-r", "btt-half")[0] == 2


def test_as_a_process(tmp_path):
    done = run_python(
        f"import surgery.cli.main; surgery.cli.main.main(['plan', {str(tmp_path / 'none')!r}, '-r', 'btt-half'])"
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and "does not exist" in done.stderr


@pytest.mark.parametrize(
    "error, code, says",
    [
        (RuntimeError("a defect"), 1, "internal error, RuntimeError: a defect"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 2, "x cannot be written: No space left on device"),
        (KeyboardInterrupt(), 130, "--resume"),
    ],
)
def test_what_happens_meanwhile(error, code, says, run, checkpoints, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("surgery.conversion.convert.convert_head", fails)
    found, _, err = run("convert", checkpoints("llama"), "-r", "low-rank-half", "--out", tmp_path / "out")
    assert found == code and says in plain(err) and "Traceback" not in err
    monkeypatch.undo()
    assert run("convert", checkpoints("llama"), "-r", "low-rank-half", "--out", tmp_path / "out")[0] == 2
    found, _, err = run("convert", checkpoints("llama"), "-r", "low-rank-half", "--out", tmp_path / "out", "--resume")
    assert found == 0, err
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


LONG = "x" * 5000
BENCH = ("bench", "linear", "--sizes", "small", "--time-limit", "0.1", "--out")
# A word FILE is a text file, FOLDER an empty folder, BELOW a path below FILE, TINY the embedded checkpoint.
UNUSABLE_PATHS = [
    (("plan", LONG, "-r", "btt-half"), "[..] cannot be used: the name is too long"),
    (("inspect", LONG), "the name is too long"),
    (("plan", "TINY", "-r", LONG), "the name is too long"),
    (("compare", LONG), "the name is too long"),
    (("plan", "TINY", "-r", f"{LONG}.yaml"), "the name is too long"),
    (("convert", "TINY", "-r", "low-rank-half", "-o", LONG), "the name is too long"),
    (("eval", "TINY", "--text", LONG), "the name is too long"),
    (("fetch-eval-data", "FILE", "--suite", "niah"), "file.txt cannot be used: it is a file, and a folder is needed"),
    (("fetch-eval-data", "BELOW", "--suite", "niah"), "cannot be used: a part of the path is a file"),
    (("demo", "-o", "BELOW"), "a part of the path is a file"),
    (("teacher-cache", "TINY", "-r", "linears", "--data", "FILE", "-o", "BELOW"), "a part of the path is a file"),
    ((*BENCH, "FOLDER"), "is a folder. Name a JSON file in it"),
    ((*BENCH, "BELOW"), "file.txt is not a folder. Create it first"),
    ((*BENCH, "JSON"), "exists and was not written by `surgery bench`"),
    ((*BENCH, "FILE"), "exists and was not written by `surgery bench`. Choose another name"),
]


@pytest.mark.parametrize(
    "words, said", UNUSABLE_PATHS, ids=lambda each: "-".join(each)[:40] if isinstance(each, tuple) else ""
)
def test_a_path_that_cannot_be_used_is_the_user_s_error(run, tmp_path, words, said):
    (tmp_path / "file.txt").write_text("Mia found a lamp. " * 50)
    (tmp_path / "folder").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    places = {"FILE": "file.txt", "JSON": "config.json", "FOLDER": "folder", "BELOW": "file.txt/below.json"}
    named = {word: tmp_path / place for word, place in places.items()} | {"TINY": TINY}
    code, _, err = run(*[named.get(word, word) for word in words])
    assert code == 2 and said in plain(err) and "internal error" not in err, err
    assert len(plain(err).rpartition("error:")[2]) < 1000 and (tmp_path / "file.txt").read_text().startswith("Mia")


def test_a_missing_file_that_the_user_did_not_name_stays_a_defect():
    named = ["eval", "OUT", "--out=results"]
    for path in ("results", "results.tmp", "results.partial"):
        assert "results cannot be used" in str(explain_path_error(FileNotFoundError(errno.ENOENT, "x", path), named))
    for path in ("results/samples.jsonl", "elsewhere", "resul", None):
        assert explain_path_error(FileNotFoundError(errno.ENOENT, "x", path), named) is None
    assert explain_path_error(ValueError("results"), named) is None


def test_an_interrupt_that_a_library_turned_into_its_own_error_is_an_interrupt(monkeypatch, capsys):
    def lazy_import(*args, **kwargs):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module 'AttentionInterface'") from error

    monkeypatch.setattr("surgery.cli.main.make_app", lambda only: lazy_import)
    with pytest.raises(SystemExit) as left:
        main(["plan", "x"])
    assert left.value.code == 130 and "interrupted" in capsys.readouterr().err


def test_an_interrupt_prints_the_command_that_goes_on(monkeypatch, capsys):
    import typer

    from surgery.cli.main import RESUMABLE, app, continue_command

    commands = typer.main.get_command(app).commands
    assert {name for name, c in commands.items() if any("--resume" in p.opts for p in c.params)} == set(RESUMABLE)
    assert continue_command(["convert", "a b", "--out", "x"]) == "surgery convert 'a b' --out x --resume"
    assert continue_command(["--debug", "finetune", "x", "--resume"]) == "surgery --debug finetune x --resume"
    assert continue_command(["convert", "x", "--overwrite", "--out", "y"]) == "surgery convert x --out y --resume"
    assert continue_command(["eval", "x", "--text", "t"]) == "surgery eval x --text t"

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("surgery.cli.main.make_app", lambda only: interrupted)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as left:
        main(["convert", "SRC", "-r", "btt-half", "--out", "OUT"])
    if left.type is SystemExit:
        assert "surgery convert SRC -r btt-half --out OUT --resume" in capsys.readouterr().err


def test_an_interrupt_of_a_conversion_that_kept_nothing_does_not_promise_to_go_on(tmp_path):
    from surgery.cli.main import _interrupted_message

    words = ["convert", "SRC", "-r", "stock-gated-deltanet", "-o", str(tmp_path / "out")]
    assert "Nothing was written" in (said := _interrupted_message(words)) and "--resume" not in said
    (tmp_path / "out.partial").mkdir()
    assert "Finished work is kept" in (said := _interrupted_message(words)) and said.endswith("--resume")


FIRST_OUTPUT = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            raise SystemExit(7)
sys.meta_path.insert(0, NoTorch())
from surgery import api
from surgery.cli.main import PANELS, main
main(["convert", "SRC", "--recipe", "btt-half", "--out", "OUT"])
"""


def test_convert_prints_a_line_before_it_imports_torch():
    done = subprocess.run([sys.executable, "-c", FIRST_OUTPUT], capture_output=True, text=True)
    assert done.returncode == 7 and done.stderr.startswith("converting SRC by recipe btt-half into OUT"), done.stderr


def test_missing_calibration_is_a_warning_only_where_weights_are_projected(run, checkpoints, tmp_path):
    for recipe, begins in (("low-rank-half", "warning: no calibration text"), ("ssd", "note: no calibration text")):
        code, out, err = run("convert", checkpoints("llama"), "-r", recipe, "--out", tmp_path / recipe)
        assert code == 0, err
        assert any(line.startswith(begins) for line in err.splitlines()), err
        assert ("warning" in err) == (recipe == "low-rank-half")
        assert "numbers" not in out + err and "NVIDIA" not in out
