"""RULER as the original fills it, its longer list of words, and the upstream commits that are named."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from eval.test_ruler import jsonl

from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval import offline_data as mirror
from surgery.eval import word_list
from surgery.eval.long_context import WORD_LIST, _join_essays, load_texts
from surgery.eval.long_context.ruler import TASKS, LengthTooShortError, TaskContext, aggregation
from surgery.eval.long_context.ruler.prompt import WholeUnits
from surgery.eval.long_context.ruler.qa import hotpot, squad
from surgery.eval.long_context.ruler.words import NOISE, vocabulary
from surgery.eval.run import Evaluation
from surgery.eval.suite import EvalOptions, SuiteResult, load_suites
from surgery.eval.upstream import UPSTREAM

ROOT = Path(__file__).resolve().parents[2]
MIRROR = ROOT / "eval" / "mirror"
MANY = tuple(f"word{i}" for i in range(900))


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture(scope="module")
def texts():
    essays = jsonl("baber/paul_graham_essays/default/train.jsonl")
    return {
        "essays": _join_essays({"text": [row["text"] for row in essays]}),
        "squad": squad(jsonl("rajpurkar/squad_v2/default/validation.jsonl")),
        "hotpot": hotpot(jsonl("hotpotqa/hotpot_qa/distractor/validation.jsonl")),
    }


def upstream_search(total, max_seq_length: int, incremental: int, per: float, slack: int = 3) -> int:
    """The search of the generators of needles, vt and qa (NVIDIA/RULER c3f5e3b). total: units -> tokens with the
    answer.
    """
    lower_bound, upper_bound = incremental, max(int((max_seq_length / per) * slack), incremental * 2)
    optimal = None
    while lower_bound <= upper_bound:
        mid = (lower_bound + upper_bound) // 2
        if total(mid) <= max_seq_length:
            optimal = mid
            lower_bound = mid + 1
        else:
            upper_bound = mid - 1
    return optimal if optimal is not None else incremental


def upstream_steps(tokens, max_len: int, coded_wordlen: int, incremental: int) -> int:
    """The search of the generator of fwe."""
    num_words = max_len // coded_wordlen
    while tokens(num_words) < max_len:
        num_words += incremental
    return num_words - incremental


@pytest.mark.parametrize("length", [1000, 4096, 9001])
@pytest.mark.parametrize("step", [5, 10, 25, 500])
def test_the_number_of_units_is_that_of_the_original(length, step):
    """Prompts of 40 words and 3 to each unit."""

    def build(n: int, rest: str) -> str:
        return "x " * (40 + 3 * n)

    goal = length - 128
    want = upstream_search(lambda n: 40 + 3 * n + 128, length, step, (40 + 3 * step) / step)
    assert WholeUnits(step).search(words, build, length, goal) == want
    steps = upstream_steps(lambda n: 40 + 3 * n, goal, 6, goal // 32)
    assert WholeUnits(goal // 32, start=goal // 6).search(words, build, length, goal) == steps


def test_a_prompt_that_is_too_long_loses_steps():
    units = WholeUnits(10)
    assert units.fill(words, lambda n, rest: "x " * n, 95, 120).units == 90
    assert units.fill(words, lambda n, rest: "x " * n, 95, 95).units == 95
    assert units.fill(words, lambda n, rest: "x " * (n + 200), 95, 120) is None


@pytest.mark.parametrize("name", TASKS)
def test_prompts_have_whole_units_and_as_many_in_each(texts, name):
    ctx = TaskContext(words, 4096, 0, texts, fill="ruler")
    found = list(TASKS[name].make_questions(ctx, 3, ()))
    assert len(found) == 3 and all(0 < question.tokens <= 4096 for question in found)
    assert len(ctx.units) == 1, "one search for the task"
    again = list(TASKS[name].make_questions(TaskContext(words, 4096, 0, texts, fill="ruler"), 3, ()))
    assert found == again
    if name in ("niah_single_1", "vt"):  # whole lines of noise
        lines = [line for line in found[0].prompt.split("\n") if "grass" in line]
        assert set(lines) <= {NOISE} and len({q.prompt.count(NOISE) for q in found}) == 1
    if name == "niah_single_2":  # whole words of the essays from their beginning
        body = found[0].prompt.split("\n")[1]
        body = re.sub(r"One of the special magic numbers for \S+ is: \d+\. ?", "", body).split()
        ours = (texts["essays"].split() * 9)[: len(body)]
        assert body == ours and len(body) == next(iter(ctx.units.values()))
    exact = next(iter(TASKS[name].make_questions(TaskContext(words, 4096, 0, texts), 1, ())))
    assert exact.tokens >= found[0].tokens


def test_a_length_below_the_first_units_is_refused(texts):
    with pytest.raises(LengthTooShortError, match="for the 500 units that the original begins with"):
        list(TASKS["niah_single_2"].make_questions(TaskContext(words, 512, 0, texts, fill="ruler"), 1, ()))


# -- the longer list of words -------------------------------------------------------------------------
def test_the_short_list_has_as_many_words_as_is_said():
    assert len(vocabulary()) == 8166


@pytest.fixture
def few(monkeypatch):
    """Two hundred words in wonderwords' lists."""
    monkeypatch.setattr(aggregation, "vocabulary", lambda: vocabulary()[:200])


@pytest.mark.parametrize("fill", ["exact", "ruler"])
def test_many_common_words_are_those_of_the_longer_list(few, fill):
    ctx = TaskContext(words, 4096, 0, {"english_words": lambda: MANY}, fill=fill)
    found = list(TASKS["cwe"].make_questions(ctx, 2, ()))
    for question in found:
        asked = question.prompt[question.prompt.rindex("Below is a numbered list") :]
        counts = Counter(re.findall(r"\d+\. (\S+)", asked[: asked.rindex("Question")]))
        assert {word for word, _ in counts.most_common(10)} == set(question.answers) <= set(MANY)
        assert all(counts[word] == 30 for word in question.answers) and len(counts) > 200
        assert 4080 <= question.tokens <= 4096
    assert found[0].answers != found[1].answers
    (short,) = TASKS["cwe"].make_questions(TaskContext(words, 700, 0, {}, fill=fill), 1, ())
    assert set(short.answers) <= set(vocabulary()), "few words need no list"


def test_without_the_list_it_is_said_how_to_get_it(few):
    with pytest.raises(SurgeryError, match=r"more than the 200 words.*surgery fetch-eval-data DATA --suite ruler"):
        list(TASKS["cwe"].make_questions(TaskContext(words, 4096, 0, {}), 1, ()))
    with pytest.raises(SurgeryError, match="the mirror's list has 30"):
        list(TASKS["cwe"].make_questions(TaskContext(words, 4096, 0, {"english_words": lambda: MANY[:30]}), 1, ()))


@pytest.fixture
def download(monkeypatch, tmp_path):
    """The file that is downloaded: 900 words, with the digest that is expected."""
    data = json.dumps({str(i): word for i, word in enumerate(MANY)}).encode()
    place = SimpleNamespace(data=data, urls=[])

    class Answer:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self, most):
            return place.data[:most]

    def urlopen(url, timeout):
        place.urls.append(url)
        if isinstance(place.data, Exception):
            raise place.data
        return Answer()

    monkeypatch.setattr(word_list.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(word_list, "SHA256", hashlib.sha256(data).hexdigest())
    return place


def test_the_list_is_downloaded_once_and_read_by_the_suite(download, tmp_path):
    assert word_list.fetch_word_list(tmp_path, Progress()) == {"fetched": ["NVIDIA/RULER"], "kept": []}
    assert word_list.fetch_word_list(tmp_path, Progress())["kept"] == ["NVIDIA/RULER"]
    assert len(download.urls) == 1 and word_list.COMMIT in download.urls[0]
    assert tuple(mirror.load_rows(tmp_path, "ruler", *WORD_LIST)["word"]) == MANY
    assert json.loads((tmp_path / "commits.json").read_text()) == {"NVIDIA/RULER": word_list.COMMIT}
    loaded = load_texts([TASKS["cwe"]], "ruler", EvalOptions(data_root=tmp_path))
    assert loaded["english_words"]() == MANY
    assert "english_words" not in load_texts([TASKS["cwe"]], "ruler", EvalOptions(data_root=MIRROR))


def test_another_file_or_none_is_refused(download, tmp_path):
    good = download.data
    for data, said in ((good + b" ", "must have the SHA-256"), (OSError("the line was cut"), "could not be fetched")):
        download.data = data
        with pytest.raises(SurgeryError, match=said):
            word_list.fetch_word_list(tmp_path, Progress())
        assert not (tmp_path / "NVIDIA").exists()
    with pytest.raises(SurgeryError, match="not 0000"):
        word_list.fetch_word_list(tmp_path, Progress(), {"NVIDIA/RULER": "0" * 40})


# -- upstream ----------------------------------------------------------------------------------------
def test_every_upstream_commit_is_named_in_the_docs():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert set(UPSTREAM) <= set(load_suites())
    for one in UPSTREAM.values():
        assert re.fullmatch(r"[0-9a-f]{40}", one.commit) and one.repository in page and one.commit[:7] in page


def test_results_name_the_upstream_commit_of_a_suite():
    results = {suite: {"converted": SuiteResult([], {})} for suite in ("longbench-e", "ppl")}
    done = Evaluation({"converted": {"name": "m"}}, EvalOptions(), results)
    suites = done.to_dict()["suites"]
    assert suites["longbench-e"]["converted"]["upstream"] == UPSTREAM["longbench"].url
    assert "upstream" not in suites["ppl"]["converted"]
