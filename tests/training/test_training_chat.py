"""Conversations: which tokens are training targets."""

from __future__ import annotations

import importlib.resources
import itertools
import json
from pathlib import Path

import pytest

from surgery.core.errors import SurgeryError
from surgery.training.data.chat import GENERATION_TAG, ChatEncoder
from surgery.training.data.dataset import DataConfig, SourceConfig, make_data
from surgery.training.data.tokenize import TextEncoder

EMBEDDED = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
LENGTH = 256
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Who likes jokes?"},
    {"role": "assistant", "content": "Tess does."},
    {"role": "user", "content": "And rice?"},
    {"role": "assistant", "content": " The cow.\nMia too. "},
]
ANSWERS = ["Tess does.", " The cow.\nMia too. "]
END = "<|endoftext|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "marked": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>\n{% endgeneration %}"
        "{% else %}{{ m.content }}<|endoftext|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "a default system prompt": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|endoftext|>\n{% endif %}" + CHATML
    ),
}
INSTRUCT = (  # no prompt for an answer, and the system's words inside the first question
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + ' ' %}"
    "{% elif m.role == 'user' %}[INST] {{ ns.system }}{{ m.content }} [/INST]{% set ns.system = '' %}"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|endoftext|>{% else %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}{% endfor %}"
)
FORGETTING = (  # thoughts are written for the last answer alone
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>hm</think>{% endif %}{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(EMBEDDED)


def write_rows(rows, path):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def examples_of(tokenizer, rows, tmp_path, length=LENGTH, packing="none", **source):
    path = write_rows(rows, tmp_path / "rows.jsonl")
    config = DataConfig(sources={"path": path, **source}, packing=packing, shuffle=0, epochs=1)
    return list(make_data(config, tokenizer, length, 0).examples())


def learnt(tokenizer, example):
    """What is trained on, as text, a piece for every stretch."""
    marked = (example["labels"] != -100).tolist()
    stretches = itertools.groupby(zip(marked, example["input_ids"].tolist()), key=lambda pair: pair[0])
    return [tokenizer.decode([i for _, i in some]) for mark, some in stretches if mark]


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_alone(name, tokenizer, tmp_path):
    """With what ends them, so that it is learnt to end."""
    tokenizer.chat_template = TEMPLATES[name]
    (example,) = examples_of(tokenizer, [{"talk": TALK}], tmp_path, messages="talk")
    assert learnt(tokenizer, example) == [answer + END + "\n" for answer in ANSWERS]
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(example["input_ids"][example["valid"]]) == whole


def test_a_template_without_a_prompt_for_answers(tokenizer, tmp_path):
    tokenizer.chat_template = INSTRUCT
    (example,) = examples_of(tokenizer, [{"talk": TALK}], tmp_path, messages="talk")
    assert learnt(tokenizer, example) == [" " + answer + END for answer in ANSWERS]


def test_the_marks_and_the_difference_agree(tokenizer, tmp_path):
    found = []
    for name in ("marked", "chatml"):
        tokenizer.chat_template = TEMPLATES[name]
        found.append(examples_of(tokenizer, [{"talk": TALK}], tmp_path, messages="talk")[0])
    assert all((found[0][n] == found[1][n]).all() for n in found[0])
    assert GENERATION_TAG.search("{%- generation -%}") and not GENERATION_TAG.search("{% if add_generation_prompt %}")


def test_all_and_the_last(tokenizer, tmp_path):
    for name in ("chatml", "marked"):
        tokenizer.chat_template = TEMPLATES[name]
        (last,) = examples_of(tokenizer, [{"talk": TALK}], tmp_path, messages="talk", train_on="last")
        assert learnt(tokenizer, last) == [ANSWERS[1] + END + "\n"]
        (every,) = examples_of(tokenizer, [{"talk": TALK}], tmp_path, messages="talk", train_on="all")
        assert (every["labels"][every["valid"]][1:] == every["input_ids"][every["valid"]][1:]).all()


def test_templates_that_forget(tokenizer, tmp_path):
    tokenizer.chat_template = FORGETTING
    with pytest.raises(SurgeryError, match=r"message 3 of 5 differently when more messages follow.*train_on: last"):
        examples_of(tokenizer, [{"talk": TALK}], tmp_path, messages="talk")
    (last,) = examples_of(tokenizer, [{"talk": TALK}], tmp_path, messages="talk", train_on="last")
    assert learnt(tokenizer, last) == ["<think>hm</think>" + ANSWERS[1] + END + "\n"]


def test_sharegpt_s_words(tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    said = {"system": "system", "user": "human", "assistant": "gpt"}
    talk = [{"from": said[turn["role"]], "value": turn["content"]} for turn in TALK]
    (example,) = examples_of(tokenizer, [{"conversations": talk}], tmp_path, messages="conversations")
    assert learnt(tokenizer, example) == [answer + END + "\n" for answer in ANSWERS]


def test_prompts_and_completions(tokenizer, tmp_path):
    columns = {"prompt": "ask", "completion": "say"}
    (text,) = examples_of(tokenizer, [{"ask": "Tess took", "say": " the road."}], tmp_path, **columns)
    assert learnt(tokenizer, text) == [" the road." + END]
    assert tokenizer.decode(text["input_ids"][text["valid"]]) == "Tess took the road." + END
    tokenizer.chat_template = CHATML
    for name in ("chatml", "marked"):
        tokenizer.chat_template = TEMPLATES[name]
        (turns,) = examples_of(tokenizer, [{"ask": TALK[:4], "say": TALK[4:]}], tmp_path, **columns)
        assert learnt(tokenizer, turns) == [ANSWERS[1] + END + "\n"]


def test_columns_by_their_usual_names(tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    for row in ({"id": "x", "messages": TALK}, {"conversations": TALK, "source": "web"}):
        (example,) = examples_of(tokenizer, [row], tmp_path)
        assert learnt(tokenizer, example) == [answer + END + "\n" for answer in ANSWERS]
    (example,) = examples_of(tokenizer, [{"prompt": "Tess took", "completion": " the road."}], tmp_path)
    assert learnt(tokenizer, example) == [" the road." + END]
    with pytest.raises(SurgeryError, match="cannot tell which column holds the text"):
        examples_of(tokenizer, [{"one": "a b c", "two": "d e f"}], tmp_path)


def test_packed_conversations(tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    rows = [
        {"talk": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]} for i in range(9)
    ]
    (example,) = examples_of(tokenizer, rows, tmp_path, packing="documents", messages="talk", length=400)
    assert learnt(tokenizer, example) == [f"{i}!{END}\n" for i in range(9)]
    assert int((example["position_ids"][example["valid"]] == 0).sum()) == 9
    stream = examples_of(tokenizer, rows, tmp_path, packing="stream", messages="talk", length=20)
    assert "".join(t for e in stream for t in learnt(tokenizer, e)).startswith(f"0!{END}\n1!{END}\n")


def test_long_conversations_lose_their_end(tokenizer, tmp_path):
    """And one whose answers are all lost is left out."""
    tokenizer.chat_template = CHATML
    late = [{"role": "user", "content": "word " * 200}, TALK[2]]
    (example,) = examples_of(tokenizer, [{"talk": TALK}, {"talk": late}], tmp_path, messages="talk", length=64)
    assert learnt(tokenizer, example)[0] == ANSWERS[0] + END + "\n"
    with pytest.raises(SurgeryError, match="no training document with a token to train on"):
        examples_of(tokenizer, [{"talk": late}], tmp_path, messages="talk", length=64)


def test_tokenizers_that_do_not_tell_characters(tokenizer):
    tokenizer.chat_template = CHATML
    writer = ChatEncoder(TextEncoder(tokenizer), SourceConfig(path="x", messages="talk"))
    text = writer._render(TALK)
    spans = [writer._span(TALK, i, text) for i in (2, 4)]
    piece = writer._encode_piecewise(text, spans)
    assert tokenizer.decode(piece.ids_T) == text
    assert tokenizer.decode(piece.ids_T[piece.trained_T]) == "".join(a + END + "\n" for a in ANSWERS)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"talk": [{"role": "tool", "content": "x"}]}], "rejects a conversation .no tool"),
        ([{"talk": ["hello"]}], "a conversation must be a list of messages"),
        ([{"talk": "hello"}], "a conversation must be a list of messages"),
        ([{"talk": {"role": "user"}}], "message has no content"),
    ],
)
def test_people_s_mistakes(rows, said, tokenizer, tmp_path):
    tokenizer.chat_template = INSTRUCT
    with pytest.raises(SurgeryError, match=said):
        examples_of(tokenizer, rows, tmp_path, messages="talk")


def test_no_template(tokenizer, tmp_path):
    tokenizer.chat_template = None
    with pytest.raises(SurgeryError, match="the tokenizer has no chat template"):
        examples_of(tokenizer, [{"talk": TALK}], tmp_path, messages="talk")
