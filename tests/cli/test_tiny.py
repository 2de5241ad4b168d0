"""The embedded checkpoint: its card is true, it retrieves, and its training script runs."""

import importlib.resources
import json
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest
import torch
from helpers.slow import slow_where
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.eval import stories
from surgery.eval.stories.lexicon import ACT, DETAIL, WORDS, WORK
from surgery.eval.suites.needle import NeedleTable, needle_accuracy
from surgery.recipes.tiny import train as tiny
from surgery.recipes.tiny.card import format_card
from surgery.recipes.tiny.data import SMOKE, BatchDataset, TrainingChoices, build_tokenizer

FOLDER = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
FILES += ["README.md", "heldout.txt", "calibration.txt", "training_log.json"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Its matrices are so small that threads cost more than they bring, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_files_are_there_and_small():
    assert [name for name in FILES if not (FOLDER / name).is_file()] == []
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000


def test_texts_come_from_the_generator():
    assert (FOLDER / "heldout.txt").read_bytes() == stories.heldout().encode()
    assert (FOLDER / "calibration.txt").read_bytes() == stories.calibration().encode()
    assert stories.heldout()[:1000] != stories.calibration()[:1000]


def test_the_card_says_what_the_log_says():
    assert (FOLDER / "README.md").read_text() == format_card(json.loads((FOLDER / "training_log.json").read_text()))


def test_the_choices_are_the_ones_it_was_trained_with():
    choices = json.loads((FOLDER / "training_log.json").read_text())["choices"]
    assert choices == json.loads(json.dumps(asdict(TrainingChoices())))


def test_it_is_a_llama_with_grouped_queries(model, tokenizer):
    config = model.config
    assert config.model_type == "llama" and config.tie_word_embeddings and config.hidden_act == "silu"
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.max_position_embeddings >= 512 and len(tokenizer) == config.vocab_size


@pytest.mark.parametrize("text", [stories.corpus(3, 3000), "  Ünïcode\t\n\n, 12  x;", stories.END + "a"])
def test_the_tokenizer_loses_nothing(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize(
    "length, depths",
    slow_where(lambda length, _: length > 256, [(64, (0.5,)), (256, (0.0, 0.5, 1.0)), (1024, (0.0, 0.5))]),
)
def test_it_retrieves(model, tokenizer, length, depths):
    table = needle_accuracy(model, tokenizer, (length,), depths, samples=8, seed=3, batch_size=8)
    assert table.worst > 0.95, table.markdown()


def test_its_perplexity_is_the_card_s(model, tokenizer):
    log = json.loads((FOLDER / "training_log.json").read_text())
    ids_N = torch.tensor(tokenizer(stories.heldout()[:12_000], verbose=False).input_ids)
    with torch.inference_mode():
        loss = float(model(input_ids=ids_N[None, :1024], labels=ids_N[None, :1024]).loss)
    # One window of text is not the whole: near, not equal.
    assert abs(loss - torch.tensor(log["scores"]["heldout_perplexity"]).log()) < 0.25


def test_a_model_that_cannot_look_back_finds_nothing(model, tokenizer):
    class Forgetful(torch.nn.Module):
        """Sees the last 12 tokens only, and does not know `logits_to_keep`."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids):
            near_TT = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril().triu(-12).bool()
            return self.inner(input_ids=input_ids, attention_mask=near_TT[None, None].expand(len(input_ids), 1, -1, -1))

    table = needle_accuracy(Forgetful(model), tokenizer, (128,), (0.0, 0.5), samples=16)
    assert table.mean < 0.2


@pytest.mark.parametrize("length", [64, 200, 700])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_lies_where_it_should(length, depth):
    for seed in range(20):
        question = stories.needle_question(Random(seed), length, depth)
        assert stories.count_pieces(question.prompt + question.answer) <= length
        key = question.prompt.rsplit("code of the ", 1)[1].removesuffix("? Answer:")
        story, needle = question.prompt.split("\n")[0], f"The code of the {key} is{question.answer}."
        assert story.count(f"The code of the {key} is") == 1
        if depth == 0:
            assert story.startswith(f"Story: {needle}")
        elif depth == 1:
            assert story.endswith(needle)


def test_questions_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="must be in"):
        stories.needle_question(Random(0), 100, 1.5)
    with pytest.raises(ValueError, match="alone have length"):
        stories.needle_question(Random(0), 20, 0.5)


def test_words_go_together():
    assert set(WORK) == set(WORDS["role"]) and set(DETAIL) == set(WORDS["place"]) and set(ACT) == set(WORDS["animal"])
    for name in ("adjective", "role", "trait", "animal"):
        assert not [word for word in WORDS[name] if word[0] in "aeiou"]


def test_batches_depend_on_seed_and_step_alone():
    tokenizer = build_tokenizer(SMOKE)
    one, two = BatchDataset(SMOKE, tokenizer), BatchDataset(SMOKE, tokenizer)
    first = one[4]
    assert all(torch.equal(a, b) for a, b in zip(first, two[4]))
    assert first[0].shape == (SMOKE.batch_tokens // SMOKE.context, SMOKE.context + 1)
    text = stories.corpus(5, 4000)
    assert one.encode(text) == tokenizer(text, verbose=False).input_ids


def test_standard_errors_are_never_zero():
    table = NeedleTable((64,), (0.0, 1.0), 200, ((1.0, 0.5),))
    assert 0.003 < table.errors[0][0] < 0.006 and 0.03 < table.errors[0][1] < 0.04
    assert table.worst == 0.5 and "| 64 | 100.0 | 50.0 |" in table.markdown()


def test_the_training_runs_again(tmp_path):
    record = tiny.train_and_save(SMOKE, tmp_path, None, "smoke")
    assert record["log"][-1]["loss"] < record["log"][0]["loss"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids_BT = AutoTokenizer.from_pretrained(tmp_path)("Story: Mia", return_tensors="pt").input_ids
    assert again(input_ids=ids_BT).logits.shape == (1, ids_BT.shape[1], SMOKE.vocabulary)
