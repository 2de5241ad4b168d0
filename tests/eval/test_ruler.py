"""RULER: prompts of the exact length with any tokenizer, reproducible samples, and the original's scores."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.calibration.data import load_tokenizer
from surgery.eval import text as encoding
from surgery.eval.long_context import _join_essays
from surgery.eval.long_context.ruler import TASKS, LengthTooShortError, TaskContext
from surgery.eval.long_context.ruler.aggregation import COMMON, LONG, SHORT, _word_counts
from surgery.eval.long_context.ruler.niah import NeedleTask
from surgery.eval.long_context.ruler.prompt import fill_prompt, prompt_counter
from surgery.eval.long_context.ruler.qa import hotpot, squad
from surgery.eval.long_context.ruler.scores import clean_prediction, score_answers
from surgery.eval.long_context.ruler.words import NOISE, load_words, vocabulary
from surgery.eval.long_context.story_needles import StoryNeedles

ROOT = Path(__file__).resolve().parents[2]
MIRROR = ROOT / "eval" / "mirror"
TINY = ROOT / "recipes" / "tiny" / "checkpoint"
STORIES = ROOT.parent / "shared/models/stories260K"


def jsonl(path: str):
    import json

    return [json.loads(line) for line in (MIRROR / path).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def texts():
    essays = jsonl("baber/paul_graham_essays/default/train.jsonl")
    return {
        "essays": _join_essays({"text": [row["text"] for row in essays]}),
        "squad": squad(jsonl("rajpurkar/squad_v2/default/validation.jsonl")),
        "hotpot": hotpot(jsonl("hotpotqa/hotpot_qa/distractor/validation.jsonl")),
    }


def of_bytes():
    """Made here: byte pairs of two hundred lines, 600 of them; a start and an end are put around every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([NOISE, COMMON, " ".join(vocabulary()[:400])], trainer)
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module", params=["embedded", "made here", "stories260K"])
def tokenizer(request):
    if request.param == "embedded":
        return load_tokenizer(TINY)
    if request.param == "made here":
        return of_bytes()
    if not STORIES.is_dir():
        pytest.skip("the third tokenizer is not on this machine")
    return load_tokenizer(STORIES)


@pytest.fixture(scope="module")
def room(texts):
    """Of the embedded tokenizer."""
    count = prompt_counter(load_tokenizer(TINY))
    return lambda length, seed=0: TaskContext(count, length, seed, texts)


# -- the fill ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [512, 1024, 4096, 16384])
def test_prompts_are_as_long_as_they_say(tokenizer, texts, length):
    """Within 1% of the nominal length, prefix and answer counted, never above it.

    What does not fit says how much it needs, and that is more than there is: templates alone are, with the smallest
    vocabularies, at 512.
    """
    count = prompt_counter(tokenizer)
    for task in TASKS.values():
        try:
            (question,) = task.make_questions(TaskContext(count, length, 0, texts), 1, ())
        except LengthTooShortError as error:
            needed = re.search(r"needs ([\d,]+) tokens", str(error))
            assert length == 512 and len(tokenizer) < 1000 and needed, f"{task.name}: {error}"
            assert int(needed[1].replace(",", "")) > length
            continue
        read = tokenizer(question.prompt + question.prefix).input_ids  # as a model reads it, not as we count
        assert len(read) + task.answer_tokens == question.tokens
        assert 0.99 * length <= question.tokens <= length, task.name


def test_ids_are_the_tokenizers_own(tokenizer):
    texts = ["", "Mia found a lamp. ", "Ein Öl, 语言\n\n  x", "a" * 300]
    for special in (True, False):
        own = [tokenizer(text, add_special_tokens=special).input_ids for text in texts]
        assert [ids.tolist() for ids in encoding.encoder(tokenizer, special)(texts)] == own
        assert encoding.counter(tokenizer, special)(texts) == [len(ids) for ids in own]


def test_few_counts_fill_a_prompt(texts, monkeypatch):
    """Tokenizing is what it costs: little more than once for a needle's whole text, some ten times where units are
    mixed anew. Prompts of a task are equally long, so that batches need no padding. In one thread: prompts that are
    made at once cannot use each other's counts.
    """
    calls = Counter()
    monkeypatch.setattr("surgery.eval.long_context.ruler.base.os.cpu_count", lambda: 1)

    def count_words(text: str) -> int:
        calls["characters"] += len(text)
        return len(text.split())

    for name, task in TASKS.items():
        calls.clear()
        questions = list(
            task.make_questions(
                TaskContext(count_words, 8192, 0, {**texts, "essays": "Some words make an essay. " * 50}), 2, ()
            )
        )
        exact = {8192} if name != "cwe" else {8191, 8192}  # a word with its number is two
        assert {question.tokens for question in questions} <= exact, name
        whole = sum(len(question.prompt) for question in questions)
        assert calls["characters"] <= whole * (1.3 if name in ("niah_single_1", "niah_single_2", "vt") else 12), name


def test_a_wrong_estimate_is_counted_again(texts):
    """A tokenizer of whole texts: sentences together are fewer tokens than one by one, or more."""
    for count in (
        lambda text: len(text.split()) - text.count(". ") // 7,
        lambda text: len(text) // 5 + text.count("t"),
    ):
        for name in ("niah_single_1", "niah_multikey_2", "qa_1"):
            (question,) = TASKS[name].make_questions(TaskContext(count, 4096, 0, texts), 1, ())
            assert question.tokens == count(question.prompt + question.prefix) + TASKS[name].answer_tokens
            assert 0.99 * 4096 <= question.tokens <= 4096, name


@settings(max_examples=60, deadline=None)
@given(unit=st.integers(1, 40), fixed=st.integers(0, 50), goal=st.integers(60, 5000), jitter=st.integers(0, 3))
def test_fill_is_the_longest_that_fits(unit, fixed, goal, jitter):
    """Of units of some tokens and filler of one token a character; counts wobble as byte pairs do."""

    def build(n: int, rest: str) -> str:
        return "x" * (fixed + n * unit + (n * 7919 % (jitter + 1))) + rest

    found = fill_prompt(build, len, goal, 0, 10_000, 3, filler="y" * 60)
    assert found is not None and found.tokens == len(found.text) <= goal
    assert found.tokens >= goal - max(goal // 1000, 1)


def test_what_cannot_fit_is_none():
    assert fill_prompt(lambda n, rest: "x" * (100 + n), len, 99, 0, 10, 1) is None


# -- samples -----------------------------------------------------------------------------------------
def test_samples_depend_on_task_length_and_number_alone(room):
    """Not on how many are asked, what ran before, or the global generator."""
    for name, task in TASKS.items():
        many = list(task.make_questions(room(1024), 3, ()))
        Random(5).random()
        assert list(task.make_questions(room(1024), 2, ())) == many[:2], name
        assert len({q.prompt for q in many}) == 3, name
        assert next(iter(task.make_questions(room(1024, seed=1), 1, ()))).prompt != many[0].prompt, name
        assert len({q.id for q in many}) == 3
    assert len({next(iter(task.make_questions(room(1024), 1, ()))).id for task in TASKS.values()}) == 13


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
def test_needles_are_in_the_haystack(room, name):
    task = TASKS[name]
    (question,) = task.make_questions(room(1024), 1, ())
    kind = task.value
    for answer in question.answers:
        assert question.prompt.count(f"is: {answer}.") == 1
    assert len(question.answers) == task.queries * task.values
    hidden = len(re.findall(rf"One of the special magic {kind} for \S+ is: \S+\.", question.prompt))
    assert hidden >= max(task.keys, task.queries) * task.values
    assert (hidden > task.keys) == (task.haystack == "needle" or task.queries * task.values > task.keys)
    one = task.queries * task.values == 1
    assert question.prefix.endswith("mentioned in the provided text is" if one else "provided text are")
    assert question.prompt.startswith(
        f"A special magic {kind[:-1]} is hidden" if one else f"Some special magic {kind} are"
    )


@pytest.mark.parametrize("haystack", ["noise", "essay", "needle"])
def test_a_needle_lies_as_deep_as_asked(room, haystack):
    for depth in (0.0, 0.5, 1.0):
        (question,) = NeedleTask("n", haystack).make_questions(room(2048), 1, (depth,))
        body = question.prompt[question.prompt.index("afterwards.") :]
        place = body.index(f"is: {question.answers[0]}.") / len(body)
        assert question.depth == depth and abs(place - depth) < 0.12


def test_depths_are_all_used(room):
    """Where none is asked for, needles lie anywhere."""
    places = []
    for question in TASKS["niah_single_2"].make_questions(room(512), 24, ()):
        places.append(question.prompt.index(f"is: {question.answers[0]}.") / len(question.prompt))
    assert min(places) < 0.35 and max(places) > 0.65


@pytest.fixture(scope="module")
def words(texts):
    """Of a tokenizer whose tokens are words."""
    return lambda length: TaskContext(lambda text: len(text.split()), length, 0, texts)


def test_the_chain_can_be_followed(words):
    for length in (1024, 4096):
        (question,) = TASKS["vt"].make_questions(words(length), 1, ())
        asked = question.prompt[question.prompt.rindex("Memorize and track") :]
        value = re.search(r"assigned the value (\d+) in", asked)[1]
        held = set(re.findall(rf"VAR (\w+) = {value}\b", asked))
        for name, of in re.findall(r"VAR (\w+) = VAR (\w+)", asked):
            held |= {name} if of in held else set()  # a chain is told in its order
        assert held == set(question.answers) and len(held) == 5
        assert (
            value in question.prefix
            and "5 variables are assigned" in question.prefix
            and "assgined" not in question.prompt
        )
        example = question.prompt[: question.prompt.rindex("Memorize and track")]
        assert example.count("VAR ") == 9 and value not in example and not question.note


def test_common_words_are_the_most_common(words):
    for length, shape in ((1024, SHORT), (4096, LONG)):
        (question,) = TASKS["cwe"].make_questions(words(length), 1, ())
        assert question.prompt.count("Below is a numbered list") == 2  # the example is there
        example, asked = question.prompt.split("Below is a numbered list")[1:]
        counts = Counter(re.findall(r"\d+\. (\S+)", asked[: asked.rindex("Question")]))
        assert {word for word, _ in counts.most_common(10)} == set(question.answers)
        assert counts[question.answers[0]] == shape.common and not question.note
        told = example[example.index("in the list are:") :]
        shown = Counter(re.findall(r"\d+\. (\S+)", example[: example.index("Question")]))
        assert set(re.findall(r"\d+\. (\S+)", told)) == {word for word, _ in shown.most_common(10)}


@pytest.mark.parametrize("length", [512, 1024])
def test_common_words_below_4096(room, length):
    found = list(TASKS["cwe"].make_questions(room(length), 2, ()))
    assert len(found) == 2 and "one-shot example" in found[0].note


def test_frequent_words_are_the_most_frequent(room):
    (question,) = TASKS["fwe"].make_questions(room(2048), 1, ())
    body = question.prompt[question.prompt.index("coded words. ") + 13 : question.prompt.rindex("\nQuestion")]
    counts = Counter(body.split())
    assert counts.most_common(1)[0][0] == "..."
    assert [word for word, _ in counts.most_common(4)[1:]] == list(question.answers)
    assert _word_counts(1000, 4) == [607, 151, 67, 37]  # 1000 / (zeta(2) k^2), cut


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_documents_hold_the_answer(room, name):
    for question in TASKS[name].make_questions(room(1024), 3, ()):
        assert any(answer in question.prompt for answer in question.answers[:1])
        assert question.rule == "any" and "Document 1:\n" in question.prompt and question.prefix == " Answer:"


def test_questions_without_an_answer_are_left_out(texts):
    assert all(asked.answers for asked in texts["squad"].questions)
    assert "Who broke it?" not in {asked.question for asked in texts["squad"].questions}


def test_documents_too_long_are_passed_over(room, texts):
    with pytest.raises(LengthTooShortError, match=r"needs \d+ tokens"):
        list(TASKS["qa_2"].make_questions(room(128), 1, ()))


def test_story_needles(room):
    for question in StoryNeedles().make_questions(room(256), 2, (0.5,)):
        assert 200 < question.tokens <= 256 and f"is {question.answers[0]}." in question.prompt
        assert question.prompt.endswith("Answer:") and question.prefix == ""


# -- scores ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "output, answers, rule, score",
    [
        (" 1234567.", ["1234567"], "all", 1.0),
        ("1234567, 7654321", ["1234567", "7654321", "1111111", "2222222"], "all", 0.5),
        ("ABCDE\x00FGHIJ", ["abcde", "fghij"], "all", 1.0),
        ("", ["x"], "all", 0.0),
        ("It was Karl Winter.", ["the builder", "karl winter"], "any", 1.0),  # lm-eval gives a half
        ("nobody", ["karl", "winter"], "any", 0.0),
        ("1. apple 2. pear", ["apple", "pear", "plum", "fig"], "all", 0.5),
    ],
)
def test_scores_of_canned_answers(output, answers, rule, score):
    assert score_answers(output, answers, rule) == score


def test_control_characters_become_line_ends():
    assert clean_prediction("\t a\x01b \n") == "a\nb"


# -- what we take from elsewhere ---------------------------------------------------------------------
def test_word_lists_are_those_of_ruler():
    """RULER joins adjectives and nouns of wonderwords; lists of other sizes would make other tasks."""
    assert len(load_words("noun")) > 6000 and len(load_words("adjective")) > 800 and len(load_words("verb")) > 900


def test_prompts_agree_with_lm_eval():
    """Its copies of NVIDIA's templates, the ones that can be imported without a download."""
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, qa_utils, vt_utils

    from surgery.eval.long_context.ruler import aggregation as counting
    from surgery.eval.long_context.ruler import qa as questions
    from surgery.eval.long_context.ruler import variable_tracking as tracking

    assert cwe_utils.TEMPLATE == counting.COMMON + counting.COMMON_PREFIX
    assert fwe_utils.TEMPLATE == counting.FREQUENT + counting.FREQUENT_PREFIX
    assert questions.TEMPLATE.replace("{question}", "{query}") == qa_utils.TEMPLATE
    ours = (tracking.TEMPLATE + tracking.PREFIX).replace("{value}", "{query}").replace("{number}", "{num_v}")
    assert ours == vt_utils.TEMPLATE.replace("assgined", "assigned")  # RULER mended it in 4a216f4
    assert (cwe_utils.CONFIG["tokens_to_generate"], fwe_utils.CONFIG["tokens_to_generate"]) == (120, 50)
    assert qa_utils.CONFIG["tokens_to_generate"] == 32
    assert vt_utils.CONFIG["variable_tracking"]["tokens_to_generate"] == 30


def test_needles_agree_with_lm_eval():
    """Read, not imported: importing these downloads a sentence splitter."""
    import lm_eval

    from surgery.eval.long_context.ruler import niah as needles

    folder = Path(lm_eval.__file__).parent / "tasks" / "ruler"
    held = {}
    for name in ("niah_utils.py", "prepare_niah.py"):
        for node in ast.parse((folder / name).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                held[node.targets[0].id] = node.value.value
    assert needles.TEMPLATE.replace("{kind}", "{type_needle_v}") == held["TEMPLATE"]
    assert needles.NEEDLE.replace("{kind}", "{type_needle_v}") == held["NEEDLE"]
    assert len(needles.RULER_DEPTHS) == 40 and needles.RULER_DEPTHS[0] == 0 and needles.RULER_DEPTHS[-1] == 1
