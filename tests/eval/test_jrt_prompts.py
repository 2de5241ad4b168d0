"""`--prompts jrt`: the prompts and the truncation of the Just-Read-Twice harness, compared with a transcription of its
code.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
import torch
from eval.test_ruler import of_bytes

from surgery.calibration.data import load_tokenizer
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval.long_context import retrieval
from surgery.eval.long_context.jrt_prompts import JRT_PROMPTS, jrt_prompt, says_answer
from surgery.eval.run import load
from surgery.eval.suite import EvalModel, EvalOptions, find_suite

ROOT = Path(__file__).resolve().parents[2]
TINY, MIRROR = ROOT / "recipes" / "tiny" / "checkpoint", ROOT / "eval" / "mirror"
SENTENCES = (
    "Mia found a lamp.",
    "Tom went to the mill!",
    "The boat stood near the harbor.",
    "Was it Rosa?\n",
    "Ben slept...",
)


@pytest.fixture(scope="module", params=["embedded", "with start and end"])
def tokenizer(request):
    return load_tokenizer(TINY) if request.param == "embedded" else of_bytes()


def upstream_cut(doc, tokenizer, context_length, answer_key, answer_length=50, context_key="text"):
    """Task.truncate_context, HazyResearch/prefix-linear-attention 7490f22, without its requests; None where it returns
    none.
    """
    desired_length = context_length - answer_length
    context = doc[context_key].strip()
    doc_tokens = tokenizer([context], return_tensors="pt", truncation=False)["input_ids"][0]
    answer_pos = -1
    for key in answer_key:
        answer = doc[key]
        if type(answer) is list:
            answer = answer[0]
        if answer == "" or len(answer) <= 1:
            return None
        answer_pattern = re.compile(re.escape(answer), re.IGNORECASE)
        if (match := answer_pattern.search(context)) and (answer_pos == -1 or answer_pos > match.start()):
            answer_pos = match.start()
    if answer_pos < 0 and "alt_answers" in doc:
        for answer in doc["alt_answers"]:
            if (match := re.compile(re.escape(answer), re.IGNORECASE).search(context)) and (
                answer_pos == -1 or answer_pos > match.start()
            ):
                answer_pos = match.start()
            if answer_pos >= 0:
                break
    context_short_tokens = tokenizer([context[:answer_pos]], return_tensors="pt")["input_ids"][0]
    answer_tok_pos = len(context_short_tokens)
    if answer_pos == -1 and "tok_pos" in doc and len(context_short_tokens) > desired_length:
        answer_tok_pos = doc["tok_pos"]
    half_length = desired_length // 2
    start = max(0, answer_tok_pos - half_length)
    completed_length = answer_tok_pos - start
    remaining_length = desired_length - completed_length
    end = min(len(doc_tokens), answer_tok_pos + remaining_length)
    return {**doc, context_key: tokenizer.decode(doc_tokens[start:end], skip_special_tokens=True)}


def upstream_swde(doc):
    while doc["text"].find("Summary of information above...") >= 0:
        doc["text"] = doc["text"].split("Summary of information above...")[0]
    question = doc["key"] + ":"
    while doc["text"].lower().endswith(question.lower()):
        doc["text"] = doc["text"][: -len(question)]
    question = doc["key"][0].upper() + doc["key"][1:] + ":"
    out = doc["text"].strip("\n").strip().strip("\n").strip().strip(".") + "."
    return out + " " + question


def upstream_fda(doc):
    question = doc["key"] + ":"
    while doc["text"].lower().endswith(question.lower()):
        doc["text"] = doc["text"][: -len(question)]
    upper_key = doc["key"][0].upper() + doc["key"][1:]
    question = upper_key + ":"
    doc["text"] = doc["text"].strip("\n").strip(".")
    out = doc["text"]
    if not out.endswith("."):
        out += "."
    out += " " + question
    return out


def upstream_question(doc, clean=False, once=False):
    context, question = doc["context"].strip(), doc["question"].strip()
    if clean:
        context = re.sub(r"\[PAR\]|\[DOC\]|\[TLE\]", "", context)
    if once:
        if context.endswith(question):
            context = context[: -len(question)]
    else:
        while context.lower().endswith(question.lower()):
            context = context[: -len(question)]
    return context.strip().strip(".") + ". " + question


def text_of(rng: Random, sentences: int) -> str:
    return " ".join(rng.choice(SENTENCES) for _ in range(sentences))


def documents(rng: Random):
    """Rows of SWDE, FDA and SQuAD: key or value early, late, nowhere, in another case, of one character."""
    for key, value in (
        ("director", "Ida Brand"),
        ("device name", "QXZ"),
        ("k", "Ida Brand"),
        ("maker", "7"),
        ("maker", ""),
    ):
        for place in ("before", "after", "both", "neither"):
            said = {"before": f" {key.upper()} is here.", "after": f" It is {value}.", "neither": ""}
            middle = said["before"] + text_of(rng, 3) + said["after"] if place == "both" else said[place]
            for left, right in ((2, 40), (40, 2), (30, 30), (0, 3)):
                text = text_of(rng, left) + middle + " " + text_of(rng, right) + rng.choice(("", "..", "\n", " "))
                yield {"key": key, "value": value, "text": text}


@pytest.mark.parametrize("length", [60, 128, 301])
@pytest.mark.parametrize("name", ["swde", "fda", "squad"])
def test_documents_are_cut_as_the_harness_cuts_them(tokenizer, name, length):
    searched = ("value",) if name == "squad" else ("key", "value")
    ask = {"swde": upstream_swde, "fda": upstream_fda, "squad": lambda doc: doc["text"].strip()}[name]
    dropped, cut = 0, 0
    for doc in documents(Random(length)):
        ends = {"swde": f"\nSummary of information above...\n{doc['key']}:", "fda": f"\n{doc['key'].title()}:"}
        row = {**doc, "text": doc["text"] + ends.get(name, "")}
        theirs = upstream_cut(doc if name == "swde" else row, tokenizer, length, searched)
        ours = jrt_prompt(JRT_PROMPTS[name], row, tokenizer, length)
        if theirs is None:
            dropped += 1
            assert ours is None
            continue
        cut += theirs["text"] != doc["text"].strip()
        assert ours == (ask(theirs), [doc["value"]])
        if name != "squad":
            assert ours[0].endswith(f". {doc['key'][0].upper()}{doc['key'][1:]}:")
    assert dropped and cut


def test_an_alternative_answer_and_a_position_are_used_if_key_and_value_do_not_occur(tokenizer):
    rng = Random(0)
    text = text_of(rng, 30) + " It is Ida." + text_of(rng, 30)
    plain = {"key": "maker", "value": "Nowhere", "text": text}
    found = set()
    for extra in (
        {},
        {"alt_answers": ["none such", "Ida", "Mia"]},
        {"tok_pos": 20},
        {"alt_answers": [], "tok_pos": 90},
    ):
        row = {**plain, **extra}
        theirs = upstream_cut(row, tokenizer, 120, ("key", "value"))
        prompt, _ = jrt_prompt(JRT_PROMPTS["fda"], row, tokenizer, 120)
        assert prompt == upstream_fda(theirs)
        found.add(prompt)
    assert len(found) == 4


@pytest.mark.parametrize("name, how", [("drop", {}), ("triviaqa", {"clean": True}), ("nq", {"once": True})])
def test_questions_are_those_of_the_harness(tokenizer, name, how):
    """Their context is not cut, at any length."""
    asked = "The mill was built by"
    contexts = (
        "A b.",
        f"A b. {asked}",
        f"A b. {asked.upper()} {asked}",
        f"[DOC] [TLE] A [PAR] b... {asked} [PAR]",
        f"A.\n{asked}{asked}",
    )
    for context in contexts:
        row = {
            "context": f" {context} ",
            "question": f" {asked} ",
            "answers": ["Karl", "Tom"],
            "key": "it",
            "value": "Karl",
        }
        want = upstream_question(row, **how), ["Karl", "Tom"]
        assert jrt_prompt(JRT_PROMPTS[name], row, tokenizer, 60) == want
        without = {key: row[key] for key in ("context", "question", "answers")}
        assert jrt_prompt(JRT_PROMPTS[name], without, tokenizer, 60) == want
        assert jrt_prompt(JRT_PROMPTS[name], {**row, "value": "K"}, tokenizer, 60) is None


def test_an_answer_counts_as_in_the_harness():
    assert says_answer("it was IDA brand.", ["Nobody", "Ida Brand"]) == 1.0
    assert says_answer("it was Ida", ["Ida Brand"]) == 0.0
    assert says_answer("1x2", ["1.2"]) == 0.0  # no pattern
    assert says_answer("whatever", ["", "Ida"]) == 1.0


@pytest.fixture(scope="module")
def eval_model() -> EvalModel:
    model, tokenizer = load(str(TINY), torch.device("cpu"), "float32", False)
    return EvalModel(
        "base", "tiny", TINY, "", model, tokenizer, torch.device("cpu"), torch.float32, 1024, DistContext(), Progress()
    )


def test_the_suite_asks_either(eval_model):
    tasks = ("swde", "fda", "drop")
    asked = EvalOptions(
        data_root=MIRROR, lengths=(128,), gen_kwargs={"max_gen_toks": 2}, limit=1, tasks=tasks, prompts="jrt"
    )
    jrt = find_suite("retrieval").run(eval_model, asked)
    assert {s.task for s in jrt.samples} == set(tasks) and all(s.id for s in jrt.samples)
    assert any("drop: the Just-Read-Twice harness does not truncate" in note for note in jrt.notes)
    for sample in jrt.samples:
        if sample.task in ("swde", "fda"):
            assert re.search(r"\. [A-Z][\w ]*:$", sample.shown["prompt"]), sample.shown["prompt"]


def test_rows_of_another_form_are_refused(tokenizer):
    for row in ({"text": "no summary", "key": "maker", "value": "Ida"}, {"text": "x"}):
        with pytest.raises(SurgeryError, match=r"is not of the harness's form .* Use --prompts based"):
            retrieval._ask_jrt("swde", row, tokenizer, 128, EvalOptions())
