"""The suites of this package, on the embedded checkpoint and on one whose attention sees 64 tokens only."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from helpers.small import tiny_config

from surgery.calibration.data import document_stream, load_tokenizer, text_windows
from surgery.cli.main import main
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.eval.losses import check_lm_head, token_losses
from surgery.eval.run import evaluate, load
from surgery.eval.suite import EvalOptions, find_suite
from surgery.eval.suites import perplexity as ppl
from surgery.eval.suites.mqar import POWER_LAW_EXPONENT, make_recall_sequence, sample_vocabulary
from surgery.eval.suites.needle import MIN_LENGTH, Vocabulary, last_logits, make_ranking_question, score_rankings
from surgery.eval.suites.per_position import position_ranges, running_mean
from surgery.planning.recipe import load_recipe

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "checkpoint"
TEXT = str(TINY / "heldout.txt")


@pytest.fixture(scope="module")
def model():
    return load(str(TINY), torch.device("cpu"), "float32", False)[0]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def near(tmp_path_factory) -> str:
    """Converted: every attention sees 64 tokens."""
    out = tmp_path_factory.mktemp("near") / "out"
    convert(str(TINY), load_recipe("sliding-window", ["attention.window=64"]), out)
    return str(out)


# -- perplexity --------------------------------------------------------------------------------------
def test_3_3_perplexity_is_that_of_windows_side_by_side(model, tokenizer):
    """One estimator: the command's and the scripts' numbers are equal, and those of the formula, computed here in
    full.
    """
    options = EvalOptions(text=TEXT, tokens=2048, length=256)
    row = evaluate(str(TINY), ["ppl"], options).row("ppl")
    found = ppl.summarize(ppl.measure(model, tokenizer, options))
    assert (
        row.values["converted"] == pytest.approx(found["perplexity"], rel=1e-6) and row.units == found["windows"] == 8
    )
    assert row.errors["converted"] == pytest.approx(found["se"], rel=1e-5)
    windows_NT = text_windows(document_stream(TEXT), tokenizer, 2048, 256, TEXT)
    with torch.no_grad():
        logits_NTV = model(windows_NT).logits[:, :-1].double()
    losses_NT = torch.nn.functional.cross_entropy(logits_NTV.transpose(1, 2), windows_NT[:, 1:], reduction="none")
    losses_N = losses_NT.mean(1)
    value = float(losses_N.mean().exp())
    assert found["perplexity"] == pytest.approx(value, rel=1e-5) and found["tokens"] == 8 * 255
    assert found["se"] == pytest.approx(value * float(losses_N.std()) / 8**0.5, rel=1e-3), "delta method over windows"
    assert found["losses"] == pytest.approx(losses_N.tolist(), abs=1e-4)


def test_3_3_a_ratio_of_perplexities_is_paired(model, tokenizer):
    """exp of the mean difference of windows; without an interval where there are too few of them."""
    options = EvalOptions(text=TEXT, tokens=2048, length=256)
    base = ppl.measure(model, tokenizer, options)
    worse = replace(
        base,
        samples=[replace(s, metrics={"nll": s.metrics["nll"] + 0.1 + 0.01 * i}) for i, s in enumerate(base.samples)],
    )
    found = ppl.summarize(worse, base)["ratio"]
    assert found["ratio"] == pytest.approx(math.exp(0.135)) and found["low"] < found["ratio"] < found["high"]
    few = [replace(each, samples=each.samples[:3]) for each in (worse, base)]
    assert ppl.summarize(*few)["ratio"]["low"] is None and ppl.format_interval(ppl.summarize(*few)["ratio"]) == "1.116"


def test_3_windows_that_are_shorter_than_asked_are_told(model, tokenizer, tmp_path):
    found = ppl.measure(model, tokenizer, EvalOptions(text=TEXT, tokens=2048, length=2048))
    assert found.notes == ["windows have 1,024 tokens instead of 2,048: the context length of model"]
    (tmp_path / "text.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(SurgeryError, match="no document of two tokens"):
        ppl.measure(model, tokenizer, EvalOptions(text=str(tmp_path / "text.jsonl")))


def test_3_lengths_that_a_task_was_not_asked_at_are_told(model, tokenizer):
    from eval.test_eval_frame import eval_model

    asked = eval_model()
    asked.model, asked.tokenizer = model, tokenizer
    chosen = EvalOptions(lengths=(MIN_LENGTH - 1, MIN_LENGTH), depths=(0.5,), limit=1, tasks=("needle-rank",))
    found = find_suite("needle").run(asked, chosen)
    assert len(found.samples) == 1 and f"not asked at {MIN_LENGTH - 1} tokens" in found.notes[0]
    with pytest.raises(SurgeryError, match="nothing fits"):
        find_suite("needle").run(asked, chosen.model_copy(update={"lengths": (MIN_LENGTH - 1,)}))


def test_documents_are_measured_whole(model, tokenizer, tmp_path):
    documents = ["Story: Mia found a lamp.", "Story: " + "Tom went to the lake. " * 30]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": d}) for d in documents))
    options = EvalOptions(text=str(tmp_path / "text.jsonl"), length=64)
    row = evaluate(str(TINY), ["ppl"], options).row("ppl")
    assert row.units == 2 and row.samples > 3
    total, count = 0.0, 0
    for document in documents:
        ids = tokenizer(document).input_ids
        for start in range(0, len(ids), 64):
            (losses,) = (
                token_losses(model, [tuple(ids[start : start + 64])]) if len(ids) - start > 1 else [torch.empty(0)]
            )
            total, count = total + float(losses.double().sum()), count + len(losses)
    assert row.values["converted"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_padding_changes_no_loss(model):
    rows = [tuple(range(5, 45)), tuple(range(7, 19))]
    together = token_losses(model, rows)
    for row, losses in zip(rows, together):
        torch.testing.assert_close(losses, token_losses(model, [row])[0], rtol=1e-5, atol=1e-5)
        assert len(losses) == len(row) - 1


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_models_that_predict_no_next_token_are_refused(family):
    cls, config = tiny_config(family)
    with pytest.raises(SurgeryError, match="does not predict the next token of its input"):
        check_lm_head(cls(config))


# -- per position ------------------------------------------------------------------------------------
def test_loss_by_position(near, tmp_path):
    options = EvalOptions(text=TEXT, tokens=2048, length=256)
    done = evaluate(near, ["per-position"], options, compare=str(TINY), out=tmp_path / "out")
    rows = {row.group["position"]: row.difference.change for row in done.rows if row.group}
    assert list(rows) == [64, 128, 255]
    assert abs(rows[64]) < 1e-4 and rows[255] > 0.01  # within the window nothing changed
    assert [path.name for path in done.plots] == ["per-position.png"]
    assert (tmp_path / "out" / "per-position.png").read_bytes()[:4] == b"\x89PNG"


def test_stretches_and_running_means():
    assert position_ranges(300) == [(0, 64), (64, 128), (128, 256), (256, 300)]
    values_T = torch.tensor([0.0, 3, 6, 9])
    assert (
        running_mean(values_T, 3).tolist() == [1.5, 3, 6, 7.5]
        and running_mean(values_T, 1).tolist() == values_T.tolist()
    )


# -- needles -----------------------------------------------------------------------------------------
def test_default_lengths_leave_out_what_a_question_does_not_fit_in(tokenizer, monkeypatch):
    """A tokenizer of characters needs more tokens than 64 and 128 for the sentences of a question."""
    from surgery.eval.suites import needle

    monkeypatch.setattr(needle, "counter", lambda *_, **__: lambda texts: [len(text) for text in texts])
    short = needle._too_short(tokenizer, (64, 128, 512), (0.0, 1.0), 3, 0)
    assert short == (64, 128)
    monkeypatch.undo()
    assert needle._too_short(tokenizer, (64, 128, 512), (0.0, 1.0), 3, 0) == ()


def test_needles_tell_what_a_window_loses(near, tmp_path):
    """A window of 64 finds only the last: its map is empty where the original's is full."""
    options = EvalOptions(lengths=(128, 256), depths=(0, 1), limit=6, tasks=("needle",))
    done = evaluate(near, ["needle"], options, compare=str(TINY), out=tmp_path / "out", fail_below=["needle=0.95"])
    cells = {(r.group["length"], r.group["depth"]): r for r in done.rows if len(r.group) == 2}
    assert all(row.values["base"] > 95 for row in cells.values())
    assert cells[128, 0].values["converted"] < 40 and cells[256, 0].values["converted"] < 40
    assert cells[256, 1].values["converted"] > 60
    assert done.row("needle").difference.high < 0 and done.row("needle").p < 1e-2 and done.exit_code == 1
    assert {path.name for path in done.plots} == {"needle.png", "needle-length.png"}


def test_the_original_finds_them_at_its_training_length():
    options = EvalOptions(lengths=(1024,), depths=(0, 0.5), limit=5, tasks=("needle",))
    assert evaluate(str(TINY), ["needle"], options).row("needle").values["converted"] > 95


def test_beyond_what_it_was_made_for_is_said():
    done = evaluate(str(TINY), ["needle"], EvalOptions(lengths=(1100,), depths=(1,), limit=1, tasks=("needle",)))
    assert "beyond the model's context length of 1,024 tokens: 1,100" in done.results["needle"]["converted"].notes[0]


def test_a_ranking_is_what_it_says(tokenizer):
    vocabulary = Vocabulary(tokenizer)
    one = make_ranking_question(vocabulary, 200, 0.5, Random("x"), None)
    assert one == make_ranking_question(vocabulary, 200, 0.5, Random("x"), None) and len(one.ids) == 200
    assert len(set(one.candidates)) == 16 and len(one.context_values) == 4 and one.answer in one.context_values
    text = tokenizer.decode(one.ids)
    key = tokenizer.decode(one.ids[-2:-1])
    value = tokenizer.decode([one.candidates[one.answer]])
    assert text.endswith(f" The code of{key} is") and f" The code of{key} is{value}." in text
    assert text.count(" The code of") == 5
    place = text.index(f" The code of{key} is{value}.") / len(text)
    assert 0.25 < place < 0.75
    assert (
        make_ranking_question(vocabulary, 200, 0.0, Random("x"), list(range(20, 400))).ids[0]
        == vocabulary.ids(" The code of")[0]
    )
    with pytest.raises(SurgeryError, match="leaves no text around the codes; use 96 or more"):
        make_ranking_question(vocabulary, 30, 0.5, Random("x"), None)


def test_a_model_that_knows_ranks_first(tokenizer):
    """Stand-ins whose logits prefer one token: the right one, another that was said, one that was not."""
    one = make_ranking_question(Vocabulary(tokenizer), 128, 0.5, Random("x"), None)
    wrong = next(i for i in one.context_values if i != one.answer)
    never = next(i for i in range(16) if i not in one.context_values)

    class Prefers(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self, token):
            super().__init__()
            self.token = token

        def forward(self, input_ids, use_cache):
            logits = torch.zeros(*input_ids.shape, len(tokenizer))
            logits[..., self.token] = 3.0
            return type("Out", (), {"logits": logits})

    scores = [score_rankings(Prefers(one.candidates[i]), [one])[0] for i in (one.answer, wrong, never)]
    assert [(s["accuracy"], s["any"]) for s in scores] == [(1, 1), (0, 1), (0, 0)]
    assert scores[0]["nll"] == pytest.approx(math.log(1 + 15 * math.exp(-3)), rel=1e-4)
    assert scores[0]["reciprocal_rank"] == 1 and scores[1]["reciprocal_rank"] == 0.5


def test_ranks_do_not_depend_on_the_batch(model, tokenizer):
    vocabulary = Vocabulary(tokenizer)
    asked = [make_ranking_question(vocabulary, length, 0.5, Random(length), None) for length in (128, 160, 128)]
    for one, scores in zip(asked, score_rankings(model, asked)):
        assert scores["nll"] == pytest.approx(score_rankings(model, [one])[0]["nll"], rel=1e-4)
    assert last_logits(model, torch.tensor([asked[0].ids])).shape == (1, model.config.vocab_size)


# -- MQAR --------------------------------------------------------------------------------------------
def test_mqar_is_zoology_s():
    vocabulary = list(range(1000, 1600))
    one = make_recall_sequence(vocabulary, 128, 8, Random("a"))
    assert one == make_recall_sequence(vocabulary, 128, 8, Random("a")) and len(one.ids) == 128
    pairs = dict(zip(one.ids[0:16:2], one.ids[1:16:2]))
    assert len(pairs) == 8 and all(1000 < k < 1300 <= v for k, v in pairs.items())
    assert sorted(one.ids[q] for q in one.queries) == sorted(pairs)  # every key once more
    assert [pairs[one.ids[q]] for q in one.queries] == list(one.targets)
    assert all(q >= 16 and q % 2 == 0 for q in one.queries) and list(one.queries) == sorted(one.queries)
    assert all(one.ids[q - gap] == one.ids[q] for q, gap in zip(one.queries, one.gaps))
    for bad in ((127, 8), (64, 17), (600, 8)):
        with pytest.raises(SurgeryError, match="mqar: "):
            make_recall_sequence(vocabulary, *bad, Random("a"))


def test_mqar_s_numbers_of_pairs():
    """As options, as the papers' settings, and one for each 16 tokens without either."""
    from surgery.eval.suites.mqar import PAPER_SETTINGS, lengths_and_pairs

    assert lengths_and_pairs(EvalOptions(), 300) == [(64, 4), (128, 8), (256, 16)]
    assert lengths_and_pairs(EvalOptions(pairs=(4, 32)), 300) == [(64, 4), (128, 4), (128, 32), (256, 4), (256, 32)]
    assert lengths_and_pairs(EvalOptions(pairs=(4,), lengths=(64, 100)), 300) == [(64, 4), (100, 4)]
    assert lengths_and_pairs(EvalOptions(pairs="based"), 300) == list(PAPER_SETTINGS["based"][:5])
    assert {n for n, _ in PAPER_SETTINGS["log-linear"]} == {256}
    assert all(n % 2 == 0 and 4 * pairs <= n for each in PAPER_SETTINGS.values() for n, pairs in each)
    for asked, said in (
        ({"pairs": "zoology", "lengths": (64,)}, "sets the lengths too"),
        ({"pairs": (200,)}, "no length fits"),
    ):
        with pytest.raises(SurgeryError, match=said):
            lengths_and_pairs(EvalOptions(**asked), 300)


def test_recalls_follow_the_power_law():
    """One pair: its place s has probability s^(a - 1) / sum."""
    found = Counter(make_recall_sequence(range(200), 34, 1, Random(i)).queries[0] // 2 - 1 for i in range(4000))
    weights = [s ** (POWER_LAW_EXPONENT - 1) for s in range(1, 17)]
    for s, weight in enumerate(weights):
        share = weight / sum(weights)
        assert found[s] / 4000 == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)


def test_mqar_scores_a_model_that_looks_up(tokenizer, monkeypatch):
    """A stand-in that answers by what followed the same token before."""
    from surgery.eval.suites import mqar

    class Looks(torch.nn.Module):
        device = torch.device("cpu")

        def get_output_embeddings(self):
            return self

        config = type("C", (), {"vocab_size": 1536, "get_text_config": lambda self: self})()

        def forward(self, input_ids, use_cache):
            logits = torch.zeros(*input_ids.shape, 1536)
            for row, ids in enumerate(input_ids.tolist()):
                follows: dict[int, int] = {}
                for i, token in enumerate(ids):
                    if token in follows:
                        logits[row, i, follows[token]] = 9.0
                    if i:
                        follows.setdefault(ids[i - 1], token)
            return type("Out", (), {"logits": logits})

    from eval.test_eval_frame import eval_model

    asked = eval_model()
    asked.model, asked.tokenizer = Looks(), tokenizer
    result = mqar.run(asked, EvalOptions(lengths=(64,), limit=4))
    assert len(result.samples) == 16 and all(s.metrics["accuracy"] == 1 for s in result.samples)
    assert result.floors["mqar"]["accuracy"] == pytest.approx(2 / len(sample_vocabulary(tokenizer, 0)), rel=0.01)
    assert all(s.group == {"length": 64} for s in result.samples)
    several = mqar.run(asked, EvalOptions(lengths=(64,), pairs=(2, 16), limit=2))
    assert Counter(s.group["pairs"] for s in several.samples) == {2: 4, 16: 32}
    assert {s.task for s in several.samples} == set(several.floors) == {"mqar_2", "mqar_16"}
    assert len({s.id for s in several.samples}) == 36 and all(s.metrics["accuracy"] == 1 for s in several.samples)


# -- speed, and all of them ------------------------------------------------------------------------------
def test_speed_by_length(near):
    done = evaluate(
        near, ["speed"], EvalOptions(lengths=(64, 256), limit=2), compare=str(TINY), fail_below=["speed:cache=0.5"]
    )
    cache = {r.group["length"]: r.values for r in done.rows if r.metric.name == "cache_mb"}
    per_token = 2 * 6 * 4 * 32 * 4 / 1e6  # keys and values, layers, heads, dimensions, float32
    assert cache[256]["base"] == pytest.approx((256 + 16) * per_token)
    assert cache[256]["converted"] < 0.5 * cache[256]["base"]
    assert [v.held for v in done.verdicts] == [False, True]
    assert {r.metric.name for r in done.rows} == {"prefill_ms", "decode_ms", "tokens_s", "tokens_s_many", "cache_mb"}
    for result in done.results["speed"].values():
        rows = result.info["bench"]
        assert [(row["context"], row["batch"], len(row["step_ms"])) for row in rows] == [
            (context, batch, 2) for context in (64, 256) for batch in (1, 16)
        ]
        assert rows[1]["cache_bytes"] == 16 * rows[0]["cache_bytes"] and "first_token_ms" not in rows[1]
        for sample, ms in zip(result.samples, rows[0]["step_ms"]):
            assert sample.metrics["tokens_s"] == 1e3 / ms == 1e3 / sample.metrics["decode_ms"]


def test_the_command(near, tmp_path, capsys):
    words = ["eval", near, "-s", "ppl,mqar", "-s", "needle", "--text", TEXT, "--tokens", "1024", "--length", "128"]
    words += [
        "--limit",
        "4",
        "--lengths",
        "128",
        "--depths",
        "0,1",
        "--compare",
        str(TINY),
        "--out",
        str(tmp_path / "r"),
    ]
    with pytest.raises(SystemExit) as left:
        main([*words, "--fail-below", "ppl=1.001"])
    out = capsys.readouterr().out
    assert (
        left.value.code == 1
        and "MISSED" in out
        and "no better than guessing" in out
        and f"results: {tmp_path}/r" in out
    )
    with pytest.raises(SystemExit) as left:
        main([*words, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert left.value.code in (0, None) and set(said["suites"]) == {"ppl", "mqar", "needle"}


def test_suites_are_named(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--list_suites"])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"ppl", "per-position", "mqar", "needle", "cosine", "speed"} <= set(names)
    with pytest.raises(SurgeryError, match="unknown suite 'needel'; did you mean 'needle'"):
        find_suite("needel")
