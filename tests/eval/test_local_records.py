"""Records of lm-eval's tasks in local JSONL files (`surgery eval --data TASK=FILE`): lm-eval's own scores, and an error
for every wrong line.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval import run as running
from surgery.eval import task_names
from surgery.eval.local_records import CONVERTERS, read_records
from surgery.eval.options import parse_options
from surgery.eval.run import evaluate, load, load_eval_model
from surgery.eval.suite import EvalModel, EvalOptions, find_suite
from surgery.eval.verify import verify

ROOT = Path(__file__).resolve().parents[2]
TINY, MIRROR = ROOT / "recipes" / "tiny" / "checkpoint", ROOT / "eval" / "mirror"
# Task -> (data set, configuration, split, records in the form of in-context learning, the same in the columns of the
# data set).
TASKS = {
    "piqa": (
        "baber/piqa", None, "validation",
        [
            {"query": "Question: How do I dry a wet lamp?\n", "choices": ["Put it in the sun.", "Put it in the lake."], "gold": 0},
            {"query": "Question: boat \n", "choices": ["row  it", " eat it "], "gold": 1},
        ],
        [
            {"goal": "How do I dry a wet lamp?", "sol1": "Put it in the sun.", "sol2": "Put it in the lake.", "label": 0},
            {"goal": "boat ", "sol1": "row  it", "sol2": " eat it ", "label": 1},
        ],
    ),
    "arc_easy": (
        "allenai/ai2_arc", "ARC-Easy", "test",
        [
            {"choices": ["a lamp", "a boat", "a tree", "the sun"], "query": "Question: What floats?\n", "gold": 1},
            {"choices": ["the sun", "a lamp", "a hat"], "query": "Question: Which is hot?\nAnswer:", "gold": 2},
        ],
        [
            {"question": "What floats?", "choices": {"text": ["a lamp", "a boat", "a tree", "the sun"], "label": ["A", "B", "C", "D"]}, "answerKey": "B"},
            {"question": "Which is hot?", "choices": {"text": ["the sun", "a lamp", "a hat"], "label": ["A", "B", "C"]}, "answerKey": "C"},
        ],
    ),
    "boolq": (
        "aps/super_glue", "boolq", "validation",
        [
            {"query": "Passage: Mia found a lamp.\nQuestion: Was it lit? She asked.\nQuestion: did mia find a lamp?\n", "choices": ["no", "yes"], "gold": 1},
            {"query": "Passage: Tom went home.\nQuestion: is tom at the lake??\n", "choices": ["yes", "no"], "gold": 1},
        ],
        [
            {"passage": "Mia found a lamp.\nQuestion: Was it lit? She asked.", "question": "did mia find a lamp", "label": 1},
            {"passage": "Tom went home.", "question": "is tom at the lake?", "label": 0},
        ],
    ),
    "copa": (
        "aps/super_glue", "copa", "validation",
        [
            {"query": "Mia lit the lamp, therefore", "choices": ["the room was bright.", "Tom slept."], "gold": 0},
            {"query": "Tom, her friend, was glad because", "gold": 1, "choices": ["he fell.", "he found her boat."]},
        ],
        [
            {"premise": "Mia lit the lamp.", "question": "effect", "choice1": "the room was bright.", "choice2": "Tom slept.", "label": 0},
            {"premise": "Tom, her friend, was glad.", "question": "cause", "choice1": "he fell.", "choice2": "he found her boat.", "label": 1},
        ],
    ),
    "winogrande": (
        "allenai/winogrande", "winogrande_xl", "validation",
        [
            {"context_options": ["The lamp fit the box because the lamp", "The lamp fit the box because the box"], "continuation": "was small.", "gold": 0},
            {"context_options": ["The a_b lamp of Mia", "The a_b lamp of Mia Moss"], "continuation": "was _red_.", "gold": 1},
        ],
        [
            {"sentence": "The lamp fit the box because the _ was small.", "option1": "lamp", "option2": "box", "answer": "1"},
            {"sentence": "_ was _red_.", "option1": "The a_b lamp of Mia", "option2": "The a_b lamp of Mia Moss", "answer": "2"},
        ],
    ),
    "lambada_openai": (
        "EleutherAI/lambada_openai", None, "test",
        [
            {"context": "Mia found a lamp.\n\n\"Whose is it?\" asked Tom, and she lit the", "continuation": "lamp"},
            {"context": "Tom  went", "continuation": "home."},
        ],
        [{"text": "Mia found a lamp.\n\n\"Whose is it?\" asked Tom, and she lit the lamp"}, {"text": "Tom  went home."}],
    ),
}  # fmt: skip
PIQA = {"goal": "g", "sol1": "a", "sol2": "b", "label": 0}
FOUNDRY = {"query": "Question: g\n", "choices": ["a", "b"], "gold": 0}


@pytest.fixture(scope="module")
def eval_model() -> EvalModel:
    model, tokenizer = load(str(TINY), torch.device("cpu"), "float32", False)
    return EvalModel(
        "base", "tiny", TINY, "", model, tokenizer, torch.device("cpu"), torch.float32, 1024, DistContext(), Progress()
    )


def write_lines(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_mirror(root: Path, path: str, config: str | None, split: str, rows: list) -> Path:
    """A mirror in which lm-eval's task finds the rows in every split that it opens."""
    place = root / path
    place.mkdir(parents=True)
    write_lines(place / "rows.jsonl", rows)
    files = "".join(
        f"  - {{split: {name}, path: rows.jsonl}}\n" for name in dict.fromkeys([split, "train", "validation"])
    )
    (place / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config or 'default'}\n  data_files:\n{files}---\n"
    )
    return root


@pytest.mark.parametrize("form", ["in-context", "columns"])
@pytest.mark.parametrize("task", TASKS)
def test_scores_are_those_of_lm_eval_s_own_task(eval_model, tmp_path, task, form):
    """The same prompts, choices, scores and ids as from a mirror with the task's data set."""
    path, config, split, records, rows = TASKS[task]
    mirror = write_mirror(tmp_path / "mirror", path, config, split, rows)
    file = write_lines(tmp_path / "some.jsonl", records if form == "in-context" else rows)
    suite = find_suite("lm-eval")
    own = suite.run(eval_model, EvalOptions(tasks=(task,), data_root=mirror))
    local = suite.run(eval_model, EvalOptions(tasks=(task,), data={task: file}))
    assert len(local.samples) == len(rows) and local.floors == own.floors
    for a, b in zip(local.samples, own.samples):
        assert (a.id, a.shown["arguments"], a.metrics) == (b.id, b.shown["arguments"], b.metrics)
    assert local.info["results"] == own.info["results"]


def test_every_converter_is_compared_with_lm_eval():
    assert set(TASKS) | {"arc_challenge"} == set(CONVERTERS) and CONVERTERS["arc_challenge"] is CONVERTERS["arc_easy"]


def test_a_folder_and_a_mirror_go_together(eval_model, tmp_path):
    """TASK.jsonl where there is one, the mirror for the other tasks."""
    write_lines(tmp_path / "piqa.jsonl", [FOUNDRY] * 3)
    asked = EvalOptions(tasks=("piqa", "arc_easy"), data={"*": tmp_path}, data_root=MIRROR)
    found = find_suite("zeroshot").run(eval_model, asked)
    counts = {task: sum(sample.task == task for sample in found.samples) for task in ("piqa", "arc_easy")}
    assert counts == {
        "piqa": 3,
        "arc_easy": len((MIRROR / "allenai/ai2_arc/ARC-Easy/test.jsonl").read_text().splitlines()),
    }


WRONG = [
    ([FOUNDRY, "{"], "line 2 is not JSON"),
    ([FOUNDRY, [1]], r"line 2 must be a JSON object \(got a list\)"),
    ([FOUNDRY, '{"query": NaN}'], "line 2 is not JSON .NaN is not a number"),
    ([FOUNDRY, b'{"query": "caf\xe9"}'], "line 2 is not UTF-8.*iconv -f LATIN1"),
    ([FOUNDRY, '{"query": "\\ud800", "choices": ["a", "b"], "gold": 0}'], "line 2 is not JSON"),
    ([FOUNDRY, "", {"query": "q", "gold": 0}], "line 3 has no key 'choices', which line 1 has"),
    ([FOUNDRY, {**FOUNDRY, "more": 1}], "line 2 has a key 'more', which line 1 does not have"),
    ([FOUNDRY, {**FOUNDRY, "gold": "0"}], r"line 2: 'gold' is a text, and in line 1 a whole number"),
    ([FOUNDRY, {**FOUNDRY, "choices": ["a", 1]}], "line 2: 'choices' is a list"),
    ([{**FOUNDRY, "gold": 2}], "line 1: 'gold' must be the number of a choice, 0 to 1 .got 2.*query, choices, gold"),
    ([{**FOUNDRY, "gold": -1}], "line 1: 'gold' must be"),
    ([{**FOUNDRY, "gold": True}], "line 1: 'gold' must be"),
    ([{**FOUNDRY, "gold": 10**30}], "line 1: 'gold'"),
    ([{**FOUNDRY, "choices": ["a", "b", "c"]}], "line 1: 'choices' must be a list of 2 texts"),
    ([{**FOUNDRY, "choices": ["a", " "]}], "line 1: 'choices' must be a list of 2 texts that are not empty"),
    ([{**FOUNDRY, "query": None}], "line 1: 'query' must be a text that is not empty .got nothing"),
    ([], "has no records"),
]  # fmt: skip


@pytest.mark.parametrize("lines, said", WRONG, ids=lambda each: each if isinstance(each, str) else "")
def test_a_wrong_line_is_named(tmp_path, lines, said):
    written = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    (tmp_path / "some.jsonl").write_bytes(b"\n".join(written))
    with pytest.raises(SurgeryError, match=said) as error:
        read_records("piqa", tmp_path / "some.jsonl")
    assert "some.jsonl" in str(error.value)


@pytest.mark.parametrize(
    "task, record, said",
    [
        ("boolq", {"query": "Question: q?\n", "choices": ["no", "yes"], "gold": 0}, "must be a passage, a line break"),
        (
            "boolq",
            {"query": "p\nQuestion: q?\n", "choices": ["no", "maybe"], "gold": 0},
            "'choices' must be no and yes",
        ),
        ("copa", {"query": "Mia slept", "choices": ["a", "b"], "gold": 0}, "must end with `because` or `therefore`"),
        ("lambada_openai", {"context": "a b", "continuation": "c d"}, "one word without a space"),
        ("winogrande", {"context_options": ["a", "b"], "gold": 0}, "context_options, continuation, gold"),
    ],
)
def test_a_record_that_its_task_cannot_ask_is_refused(tmp_path, task, record, said):
    with pytest.raises(SurgeryError, match=f"some.jsonl, line 1: .*{said}"):
        read_records(task, write_lines(tmp_path / "some.jsonl", [record]))


@pytest.mark.parametrize("missing", ["", "folder"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, missing):
    (tmp_path / "folder").mkdir()
    with pytest.raises(SurgeryError, match=r"cannot be read \((No such file|Is a directory)"):
        read_records("piqa", tmp_path / (missing or "nothing.jsonl"))


@pytest.mark.parametrize(
    "task, rows, more, said",
    [
        ("piqa", [PIQA, {**PIQA, "label": 2}], {}, "line 2: the answer 2 is none of the 2 choices of piqa"),
        ("piqa", [PIQA, {**PIQA, "label": -1}], {}, "line 2: the answer -1 is none"),
        ("piqa", [{**PIQA, "label": "0"}], {}, 'line 1: the answer "0" is none'),
        ("piqa", [{"goal": "g", "sol1": "a", "label": 0}], {}, "line 1: lm-eval's piqa cannot make a question of it .*or the keys query"),
        ("winogrande", [{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}], {}, "line 1: lm-eval's winogrande cannot"),
        ("hellaswag", [FOUNDRY], {}, "line 1: lm-eval's hellaswag cannot .*query, choices, gold are read for lambada_openai"),
        ("piqa", [PIQA], {"num_fewshot": 2}, "asks with 2 examples, and --data has no records to take them from"),
    ],
)  # fmt: skip
def test_columns_that_lm_eval_cannot_ask_are_refused(tmp_path, task, rows, more, said):
    file = write_lines(tmp_path / "some.jsonl", rows)
    with pytest.raises(SurgeryError, match=said):
        task_names.load_tasks((task,), EvalOptions(tasks=(task,), data={task: file}, **more))


def test_results_follow_the_content_of_the_file(tmp_path, monkeypatch):
    """Other records are measured again, the same are not, and --verify compares them."""
    file = write_lines(tmp_path / "some.jsonl", TASKS["piqa"][3])
    asked = EvalOptions(tasks=("piqa",), data={"piqa": file})
    assert EvalOptions(tasks=("piqa",)).digest() == EvalOptions(tasks=("piqa",), data={}).digest() != asked.digest()
    evaluate(str(TINY), ["zeroshot"], asked, out=tmp_path / "out")
    loaded = []
    monkeypatch.setattr(running, "load_eval_model", lambda *a: loaded.append(1) or load_eval_model(*a))
    again = evaluate(str(TINY), ["zeroshot"], asked, out=tmp_path / "out")
    assert not loaded and again.rows

    def status(**given) -> dict[str, str]:
        checks = verify(tmp_path / "out", str(TINY), **given).checks
        return {check.thing.partition(" in ")[0]: check.status for check in checks if check.thing.startswith("records")}

    assert status(data={"piqa": file}) == {"records of piqa": "same"}
    assert status() == {"records of piqa": "cannot be checked"}
    assert status(data={"piqa": file, "copa": file})["records of copa"] == "different"
    write_lines(file, TASKS["piqa"][3][:1])
    assert status(data={"piqa": file}) == {"records of piqa": "different"}
    done = evaluate(str(TINY), ["zeroshot"], asked, out=tmp_path / "out")
    assert loaded and len(done.results["zeroshot"]["converted"].samples) == 1


def test_records_of_a_task_that_is_not_measured_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "open_model", lambda *arguments: pytest.fail("a model is opened"))
    file = write_lines(tmp_path / "some.jsonl", [FOUNDRY])
    with pytest.raises(SurgeryError, match="--data: no task 'piqaa' is measured; did you mean 'piqa'"):
        evaluate(str(TINY), ["zeroshot"], EvalOptions(tasks=("piqa",), data={"piqa": file, "piqaa": file}))


def test_values_of_the_option(tmp_path):
    file = write_lines(tmp_path / "some.jsonl", [FOUNDRY])
    assert parse_options({"data": [f"piqa={file}", str(tmp_path)]}, "eval").data == {"piqa": file, "*": tmp_path}
    for words, said in (
        ([str(file)], "must be TASK=FILE, or a folder"),
        ([f"={file}"], "must be TASK=FILE"),
        (["piqa=nothing.jsonl"], "nothing.jsonl does not exist"),
        ([f"piqa={tmp_path}"], "is a folder"),
        ([f"piqa={file}"] * 2, "names piqa twice"),
        ([str(tmp_path)] * 2, "names two folders"),
    ):
        with pytest.raises(SurgeryError, match=said):
            parse_options({"data": words}, "eval")
