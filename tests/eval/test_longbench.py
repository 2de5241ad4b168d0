"""LongBench: scores by hand from the original's definitions, prompts, and truncation."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from surgery.calibration.data import load_tokenizer
from surgery.eval.long_context import truncate as cutting
from surgery.eval.long_context.longbench import PAPER_TASKS, _one_line_generation, best_score, format_prompt
from surgery.eval.long_context.longbench.prompts import TASKS
from surgery.eval.long_context.longbench.scores import SCORES, code, first_line, qa_f1_zh, rouge, rouge_zh
from surgery.eval.long_context.ruler.prompt import prompt_counter

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "checkpoint"


@pytest.mark.parametrize(
    "score, output, answer, expected",
    [
        # f1: words without punctuation, case and articles
        ("qa_f1", "The Otto Lund.", "otto lund", 1.0),
        ("qa_f1", "Otto", "Otto Lund", 2 / 3),  # p 1, r 1/2
        ("qa_f1", "It was Otto Lund of Korr", "Otto Lund", 2 * (2 / 6) / (2 / 6 + 1)),  # p 2/6, r 1
        ("qa_f1", "lund lund", "lund", 2 / 3),  # counted once: p 1/2, r 1
        ("qa_f1", "", "Otto", 0.0),
        ("qa_f1", "\nOtto Lund", "Otto Lund", 1.0),
        ("qa_f1", "the", "a", 0.0),  # nothing is left of either
        # rouge-l: longest common subsequence
        ("rouge", "the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("rouge", "the cat", "the cat sat down", 2 / 3),  # p 1, r 2/4
        ("rouge", "sat cat", "the cat sat down", 2 * 0.5 * 0.25 / 0.75),  # in order only one of them
        ("rouge", "", "the cat", 0.0),
        ("rouge", "...", "the cat", 0.0),
        ("rouge", "dog", "cat", 0.0),
        # numbers: the share of those said that are right
        ("count", "3", "3", 1.0),
        ("count", "There are 3 or 4", "3", 0.5),
        ("count", "\n\n3", "3", 1.0),
        ("count", "none", "3", 0.0),
        ("count", "33", "3", 0.0),
        ("retrieval", "Paragraph 12", "Paragraph 12", 1.0),
        ("retrieval", "Paragraph 12, or 7, or 12", "Paragraph 12", 2 / 3),
        ("retrieval", "", "Paragraph 12", 0.0),
        ("retrieval_zh", "段落12", "段落12", 1.0),
        ("retrieval_zh", "答案是：段落3和段落12", "段落12", 0.5),
        ("retrieval_zh", "没有", "段落12", 0.0),
        # code: 2 * common characters / all characters, in whole percent
        ("code", "return a + b", "return a + b", 1.0),
        ("code", "\n\nreturn a", "return a", 1.0),
        ("code", "# note\n```python\nreturn a", "return a", 1.0),
        ("code", "abcd", "abxy", 0.5),
        ("code", "abc", "abd", 0.67),
        ("code", "", "abc", 0.0),
        ("code", "// only this", "abc", 0.0),
        ("code", "\nx\n\nreturn a", "return a", 0.0),  # the first line that is no comment, whatever it says
    ],
)
def test_scores_by_hand(score, output, answer, expected):
    assert SCORES[score](output, answer, ()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "output, answer, classes, expected",
    [
        ("Food", "Food", ["Number", "Food"], 1.0),
        ("Food or Number", "Food", ["Number", "Food"], 0.5),
        ("nothing", "Food", ["Number", "Food"], 0.0),
        ("", "Food", ["Number", "Food"], 0.0),
        ("Number", "Food", ["Number", "Food"], 0.0),
        # "animal" stands inside the answer's own name, and does not count against it
        ("Other animal", "Other animal", ["animal", "Other animal"], 1.0),
        # two such in a row: the original walks along the list that it shortens, and misses the second
        ("Other animal", "Other animal", ["Other", "animal", "Other animal"], 0.5),
        ("体育", "体育", ["体育", "天气"], 1.0),
    ],
)
def test_classes_by_hand(output, answer, classes, expected):
    assert SCORES["classification"](output, answer, classes) == expected


@pytest.mark.parametrize(
    "output, answer, expected",
    [
        ("李明", "李明", 1.0),
        ("李明。", "李明", 1.0),  # full stop of Chinese
        ("\n李明！", "李明", 1.0),
        ("", "李明", 0.0),
        ("灯塔", "李明", 0.0),
        ("灯塔 春天", "灯塔", 2 / 3),  # two words, one right: p 1/2, r 1
    ],
)
def test_chinese_words_by_hand(output, answer, expected):
    assert qa_f1_zh(output, answer) == pytest.approx(expected)


def test_chinese_rouge():
    assert rouge_zh("会议决定秋天开始", "会议决定秋天开始") == pytest.approx(1.0, abs=1e-6)
    assert rouge_zh("", "会议") == 0.0 and rouge_zh("苹果", "会议") == 0.0
    assert 0 < rouge_zh("会议决定春天开始", "会议决定秋天开始") < 1


def test_code_is_the_ratio_of_fuzzywuzzy():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz = pytest.importorskip("fuzzywuzzy.fuzz")
    for a, b in (("def f(x):", "def g(y):"), ("return a * b", "return area(a, b)"), ("x", "xyz"), ("é ü", "e u")):
        assert code(a, b) == fuzz.ratio(a, b) / 100


def test_only_the_first_line_of_examples_counts():
    assert first_line("\n\nFood\nQuestion: next") == "Food"
    assert best_score(TASKS["trec"], "\nFood\nNumber", ["Food"], ["Food", "Number"]) == 1.0
    assert best_score(TASKS["triviaqa"], "Lund\nPassage: more words", ["Lund"], []) == 1.0
    assert best_score(TASKS["hotpotqa"], "Lund\nPassage", ["Lund"], []) == pytest.approx(2 / 3)  # there all lines count
    assert {name for name, task in TASKS.items() if task.first_line_only} == {"trec", "triviaqa", "samsum", "lsht"}


def test_the_best_reference_counts():
    assert best_score(TASKS["hotpotqa"], "Lund", ["Otto", "Lund"], []) == 1.0
    assert best_score(TASKS["hotpotqa"], "Lund", [], []) == 0.0


def test_the_paper_s_fourteen_and_all():
    assert len(TASKS) == 21 and len(PAPER_TASKS) == 14
    assert not {"passage_count", "multifieldqa_zh", "lsht", "dureader"} & set(PAPER_TASKS)
    assert {name for name, task in TASKS.items() if task.no_chat_template} == {
        "trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"
    }  # fmt: skip


def test_prompts_agree_with_lm_eval():
    """Up to white space, which the original has and lm-eval has not always, and its "asconcisely"; lengths agree."""
    import lm_eval

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    for name, task in TASKS.items():
        path = Path(lm_eval.__file__).parent / "tasks" / "longbench" / f"{name}.yaml"
        theirs = yaml.load(path.read_text(encoding="utf-8"), Loader)
        assert theirs["generation_kwargs"]["max_gen_toks"] == task.answer_tokens, name
        text = theirs["doc_to_text"].replace("{{context}}", "{context}").replace("{{question}}", "{input}")
        assert re.sub(r"\s", "", text) == re.sub(r"\s", "", task.prompt), name
        assert name != "narrativeqa" or text == task.prompt


def test_prompts_end_as_the_original_s():
    row = {"context": "C", "question": "Q"}
    assert format_prompt(TASKS["triviaqa"], row).endswith("some examples.\n\nC\n\nQ")
    assert format_prompt(TASKS["samsum"], row).endswith("C\n\nQ") and format_prompt(TASKS["trec"], row).endswith("C\nQ")
    assert format_prompt(TASKS["lcc"], row).endswith("CNext line of code:\n")
    assert format_prompt(TASKS["repobench-p"], row).endswith("CQNext line of code:\n")
    assert format_prompt(TASKS["passage_count"], row).endswith("The final answer is: ")
    assert format_prompt(TASKS["narrativeqa"], row).count(" asconcisely as you can") == 2  # to the letter
    assert "as concisely as you can" in format_prompt(TASKS["qasper"], row)
    assert format_prompt(TASKS["qmsum"], {"context": "C", "input": "I"}).endswith(
        "Query: I\nAnswer:"
    )  # the original's field
    assert format_prompt(TASKS["lcc"], {"context": "{not a field}", "question": ""}).count("{not a field}") == 1


# -- what is cut -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


def test_the_middle_is_cut(tokenizer):
    count = prompt_counter(tokenizer)
    text = "Read this. " + " ".join(f"number {i}" for i in range(600)) + " Now answer."
    assert cutting.truncate_middle(text, tokenizer, count, 10_000) == text
    short = cutting.truncate_middle(text, tokenizer, count, 300)
    assert short.startswith("Read this. number 0") and short.endswith("number 599 Now answer.")
    assert 280 < count(short) <= 300


def test_what_is_left_lies_around_the_answer(tokenizer):
    count = prompt_counter(tokenizer)
    context = " ".join(f"number {i}" for i in range(600))
    for answer in ("number 5 ", "number 300", "number 599"):
        cut = cutting.truncate_around(context, " It was", [answer], tokenizer, count, 200)
        assert answer in cut and cut.endswith(" It was") and 185 < count(cut) <= 200
    assert cutting.truncate_around(context, " It was", ["nowhere"], tokenizer, count, 200).startswith("number 0")
    assert cutting.truncate_around("short", " It was", ["short"], tokenizer, count, 200) == "short It was"


def test_samsum_ends_at_a_line_after_one_token(tokenizer):
    asked = _one_line_generation(tokenizer)
    assert asked["min_new_tokens"] == 1 and tokenizer.eos_token_id in asked["eos_token_id"]
    assert tokenizer.encode("\n", add_special_tokens=False)[-1] in asked["eos_token_id"]
    without = SimpleNamespace(encode=lambda text, add_special_tokens: [], eos_token_id=None)
    assert _one_line_generation(without)["eos_token_id"] == []


def test_rouge_refuses_nothing_loudly():
    assert rouge("word " * 3000, "word") > 0  # long answers as well
