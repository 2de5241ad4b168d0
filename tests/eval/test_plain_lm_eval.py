"""`surgery eval` gives the numbers of plain lm-eval (simple_evaluate, --model hf) on the same task, model and batch
size, offline.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from surgery.eval import offline_data as mirror
from surgery.eval.run import evaluate
from surgery.eval.suite import EvalOptions

ROOT = Path(__file__).resolve().parents[2]
TINY, MIRROR = ROOT / "recipes" / "tiny" / "checkpoint", ROOT / "eval" / "mirror"
# One task of each kind of request: likelihoods of choices, rolling likelihood of a text, generated answers after two
# examples.
TASKS = ("piqa", "wikitext", "babilong_qa6")
FOLDERS = ("piqa", "wikitext", "babilong")
BATCH = 2


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[dict, dict]:
    """(ours, plain lm-eval's) results, each {"results", "n-samples", "n-shot", "versions", "samples"}."""
    out = tmp_path_factory.mktemp("ours") / "out"
    evaluate(str(TINY), ["lm-eval"], EvalOptions(tasks=TASKS, batch_size=BATCH, data_root=MIRROR), out=out)
    (path,) = out.rglob("lm_eval.json")
    (samples,) = out.rglob("samples.jsonl")
    ours = json.loads(path.read_text()) | {"samples": [json.loads(line) for line in samples.read_text().splitlines()]}
    import lm_eval
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    manager = lm_eval.tasks.TaskManager(include_path=[str(root / f) for f in FOLDERS], include_defaults=False)
    paths = ["baber/piqa", "EleutherAI/wikitext_document_level", "RMT-team/babilong-1k-samples"]
    with mirror.hide_progress_bars(), mirror.use_mirror(MIRROR, paths):
        theirs = lm_eval.simple_evaluate(
            "hf", model_args={"pretrained": str(TINY), "dtype": "float32"}, tasks=list(TASKS), batch_size=BATCH,
            device="cpu", task_manager=manager, bootstrap_iters=100,
        )  # fmt: skip
    return ours, theirs


@pytest.mark.parametrize("task", TASKS)
def test_the_numbers_are_plain_lm_eval_s(both, task):
    ours, theirs = (each["results"][task] for each in both)
    values = {name: value for name, value in theirs.items() if isinstance(value, float) and "stderr" not in name}
    assert (
        values
        and {"piqa": "acc_norm,none", "wikitext": "word_perplexity,none", "babilong_qa6": "acc,none"}[task] in values
    )
    for name, value in values.items():
        assert math.isfinite(value) and ours[name] == pytest.approx(value, rel=1e-5), name
    for key in ("n-samples", "n-shot", "versions"):
        assert both[0][key][task] == both[1][key][task]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_and_answers_are_plain_lm_eval_s(both, task):
    ours = [sample["shown"] for sample in both[0]["samples"] if sample["task"] == task]
    theirs = both[1]["samples"][task]
    assert [each["prompt_hash"] for each in ours] == [each["prompt_hash"] for each in theirs]
    for own, plain in zip(ours, theirs):
        found, expected = (json.loads(json.dumps(each["filtered_resps"])) for each in (own, plain))
        if task == "babilong_qa6":
            assert found == expected
        else:
            assert _numbers(found) == pytest.approx(_numbers(expected), rel=1e-5)


def _numbers(value) -> list[float]:
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return (
        [float(value)]
        if isinstance(value, (int, float))
        else [float(value == "True")]
        if value in ("True", "False")
        else [float(value)]
    )
