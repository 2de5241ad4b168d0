"""Suite `agreement`: divergence and equal tokens beside float64 over whole logits, greedy texts, wins and ties."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from surgery.calibration.data import load_tokenizer
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.core.logit_rows import LogitTransform
from surgery.eval.journal import SampleJournal
from surgery.eval.results.models import compare_folders
from surgery.eval.run import evaluate, load
from surgery.eval.several import evaluate_models
from surgery.eval.suite import EvalOptions
from surgery.eval.suites import agreement
from surgery.eval.suites.agreement import DOCUMENTS, GREEDY, compare_tokens, draw_prompts, first_difference
from surgery.eval.suites.per_position import position_ranges
from surgery.eval.text import TextWindow
from surgery.planning.recipe import load_recipe
from surgery.publish.verdict import verdict
from surgery.training.linear_loss import Logits

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "checkpoint"
TEXT = str(TINY / "heldout.txt")
OPTIONS = EvalOptions(text=TEXT, tokens=1024, length=128, greedy_prompts=6, greedy_tokens=12, tolerance=0.02)


@pytest.fixture(scope="module")
def near(tmp_path_factory) -> str:
    """Converted: every attention sees 64 tokens."""
    out = tmp_path_factory.mktemp("near") / "out"
    convert(str(TINY), load_recipe("sliding-window", ["attention.window=64"]), out)
    return str(out)


def reference(base_TV: torch.Tensor, ours_TV: torch.Tensor, ids: list[int]) -> dict[str, torch.Tensor]:
    """The formulas over whole logits (T, V) in float64."""
    log_p, log_q = base_TV.double().log_softmax(-1), ours_TV.double().log_softmax(-1)
    labels_T1 = torch.tensor(ids[1:])[:, None]
    return {
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "top1": (base_TV.argmax(-1) == ours_TV.argmax(-1)).double(),
        "base": -log_p.gather(-1, labels_T1)[:, 0],
        "converted": -log_q.gather(-1, labels_T1)[:, 0],
    }


# -- tokens ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_slices_of_tokens_give_the_sums_of_whole_logits(dtype, tolerance, softcap, monkeypatch):
    """No more than LOGITS_PER_SLICE logits exist at a time."""
    monkeypatch.setattr(agreement, "LOGITS_PER_SLICE", 3 * 300)
    ids, widths, sides = list(range(20)), [], []
    for _ in range(2):
        head = nn.Linear(16, 300, bias=False, dtype=dtype)
        hidden_TD, transform = 4 * torch.randn(19, 16, dtype=dtype), LogitTransform(0.5, softcap)

        def product(x_ND, head=head):
            widths.append(len(x_ND))
            return head(x_ND)

        sides.append((Logits(hidden_TD, product, transform), transform.apply(head(hidden_TD).detach())))
    found = compare_tokens(sides[0][0], sides[1][0], ids)
    for name, expected_T in reference(sides[0][1], sides[1][1], ids).items():
        assert torch.allclose(found[name].double(), expected_T, rtol=tolerance, atol=tolerance), name
    assert max(widths) == 3 and found["kl"].shape == (19,)


def test_equal_logits_have_no_divergence():
    side = Logits(torch.randn(9, 50), None, LogitTransform())
    found = compare_tokens(side, side, list(range(10)))
    assert found["kl"].tolist() == [0] * 9 and found["top1"].tolist() == [1] * 9
    assert torch.equal(found["base"], found["converted"])


def test_vocabularies_of_other_sizes_are_refused():
    sides = [Logits(torch.randn(3, size), None, LogitTransform()) for size in (50, 51)]
    with pytest.raises(SurgeryError, match="the original has 50 logits, OUT 51"):
        compare_tokens(*sides, [1, 2, 3, 4], "OUT")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_suite_beside_the_formulas(near, tmp_path, batch_size):
    """Documents of unequal lengths, padded in batches of 3: the means by range of positions, and of documents."""
    lengths, tokenizer = (30, 200, 90, 150, 70), load_tokenizer(TINY)
    ids = tokenizer(Path(TEXT).read_text(), add_special_tokens=False)["input_ids"]
    text = tmp_path / "documents.jsonl"
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    documents = [tokenizer.decode(ids[start : start + n]) for start, n in zip(starts, lengths)]
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    options = EvalOptions(text=str(text), length=128, batch_size=batch_size, greedy_prompts=0, tolerance=0.05)
    done = evaluate(near, ["agreement"], options, compare=str(TINY))
    samples = done.results["agreement"]["converted"].samples
    models = [load(name, torch.device("cpu"), "float32", False)[0] for name in (str(TINY), near)]
    expected: dict[tuple[str, int], list[float]] = {}
    wins = ties = 0
    for document in documents:
        parts = []
        encoded = tokenizer(document, add_special_tokens=False)["input_ids"]
        for start in range(0, len(encoded), 128):
            if len(piece := encoded[start : start + 128]) < 2:
                continue
            with torch.inference_mode():
                logits = [model(torch.tensor([piece])).logits[0, :-1] for model in models]
            parts.append(reference(*logits, piece))
            for first, last in position_ranges(len(piece) - 1):
                for name in ("kl", "top1"):
                    expected.setdefault((name, last), []).append(float(parts[-1][name][first:last].mean()))
        base, ours = (float(torch.cat([part[name] for part in parts]).mean()) for name in ("base", "converted"))
        wins, ties = wins + (ours < base - 0.05), ties + (abs(ours - base) <= 0.05)
    for name in ("kl", "top1"):
        for last in {last for _, last in expected}:
            found = [s.metrics[name] for s in samples if s.group.get("position") == last]
            assert found == pytest.approx(expected[name, last], abs=2e-5)
    assert {s.weight for s in samples if s.group.get("position") == 127} == {63}
    of_documents = [s.metrics for s in samples if s.task == DOCUMENTS]
    assert sum(m["win"] for m in of_documents) == wins and sum(m["tie"] for m in of_documents) == ties
    assert len(of_documents) == 5 and not any(s.task == GREEDY for s in samples)
    row = done.row("agreement", "kl")
    assert row.units == 5 and row.values.keys() == {"converted"} and row.errors["converted"] > 0
    weights = sum(s.weight for s in samples if s.task == "agreement")
    mean = sum(s.weight * s.metrics["kl"] for s in samples if s.task == "agreement") / weights
    assert row.values["converted"] == pytest.approx(mean)


def test_a_model_and_itself(tmp_path):
    done = evaluate(str(TINY), ["agreement"], OPTIONS, compare=str(TINY), out=tmp_path / "out")
    assert done.row("agreement", "kl").values["converted"] == 0
    assert done.row("agreement", "top1").values["converted"] == 100
    assert done.row(DOCUMENTS, "tie").values["converted"] == 100
    assert done.row(GREEDY, "same_tokens").values["converted"] == 12
    (note,) = done.results["agreement"]["converted"].notes
    assert "after at least 12 tokens in the median (12 in the mean, counting 12 for the 6 that do not differ" in note
    table = (tmp_path / "out" / "table.md").read_text()
    assert "same most likely token (%)" in table and note in table


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_of_64_differs_beyond_64(near, dtype):
    done = evaluate(near, ["agreement"], OPTIONS, compare=str(TINY), dtype=dtype)
    by_position = {
        row.group["position"]: row.values["converted"]
        for row in done.rows
        if row.task == "agreement" and row.metric.name == "kl" and row.group
    }
    assert list(by_position) == [64, 127] and by_position[64] < 1e-3 < by_position[127]


# -- greedy texts ------------------------------------------------------------------------------------
def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None and first_difference([], []) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1 and first_difference([7], [1]) == 0
    assert first_difference([1, 2], [1, 2, 3]) == 2  # one text ends


def test_texts_are_compared_up_to_their_end():
    original = agreement.OriginalModel([], [(1,), (2,), (3,)], texts=[[5, 6, 9], [5, 6, 7, 8], [5, 6, 7, 8]])
    samples, summary = agreement.compare_texts(
        original, [[5, 6, 9], [5, 6, 9], [4, 6, 7, 8]], load_tokenizer(TINY), EvalOptions(greedy_tokens=4)
    )
    assert [s.metrics["same_tokens"] for s in samples] == [4, 2, 0]  # the first ended alike: counted as no difference
    assert (summary["median"], summary["mean"], summary["same"]) == (2, 2, 1)


def test_texts_are_those_of_greedy_steps(near):
    """Each token is the most likely one after the prompt and the tokens before it."""
    done = evaluate(near, ["agreement"], OPTIONS, compare=str(TINY))
    model, tokenizer = load(near, torch.device("cpu"), "float32", False)
    samples = [s for s in done.results["agreement"]["converted"].samples if s.task == GREEDY]
    assert len(samples) == 6
    ids = tokenizer(samples[0].shown["prompt"], return_tensors="pt", add_special_tokens=False).input_ids
    for _ in range(12):
        with torch.inference_mode():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert tokenizer.decode(ids[0, -12:]) == samples[0].shown["converted"]


def test_prompts_are_drawn_by_the_seed():
    tokenizer = load_tokenizer(TINY)
    windows = [TextWindow(tuple(range(100 * i, 100 * i + 100)), str(i), None) for i in range(4)]
    drawn = draw_prompts(windows, tokenizer, EvalOptions(greedy_prompts=5, seed=3))
    assert drawn == draw_prompts(windows, tokenizer, EvalOptions(greedy_prompts=5, seed=3))
    assert drawn != draw_prompts(windows, tokenizer, EvalOptions(greedy_prompts=5, seed=4))
    assert len(set(drawn)) == 5 and {len(prompt) for prompt in drawn} == {32}
    assert len(draw_prompts(windows, tokenizer, EvalOptions(greedy_prompts=50))) == 12  # three pieces of each window


# -- files, errors, comparison -----------------------------------------------------------------------
def test_refusals(near, tmp_path, monkeypatch):
    with pytest.raises(SurgeryError, match=r"compares two models\. Give the original with --compare SRC"):
        evaluate(near, ["agreement"], OPTIONS)
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    read = json.loads((other / "tokenizer.json").read_text())
    added = [*read["added_tokens"], {**read["added_tokens"][0], "id": 10_000, "content": "<new>"}]
    (other / "tokenizer.json").write_text(json.dumps({**read, "added_tokens": added}))
    monkeypatch.setattr(agreement, "run_windows", None)  # tokens are compared before either model runs
    with pytest.raises(SurgeryError, match="only models with the same tokenizer can be compared"):
        evaluate(str(other), ["agreement"], OPTIONS, compare=str(TINY))
    read["model"]["merges"] = read["model"]["merges"][::-1]
    (other / "tokenizer.json").write_text(json.dumps(read))
    with pytest.raises(SurgeryError, match="cuts the text into other tokens or windows than the original"):
        evaluate(str(other), ["agreement"], OPTIONS, compare=str(TINY))


def test_another_original_is_remarked(near, tmp_path):
    """Of a model with the same tokenizer: by the report of the converted model, and where hardly any token is the same."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    other = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(TINY).config)
    other.save_pretrained(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / "other")
    options = OPTIONS.model_copy(update={"greedy_prompts": 0})
    right = evaluate(near, ["agreement"], options, compare=str(TINY))
    assert not right.notes and not right.results["agreement"]["converted"].notes
    wrong = evaluate(near, ["agreement"], options, compare=str(tmp_path / "other"))
    (warning,), (note,) = wrong.notes, wrong.results["agreement"]["converted"].notes
    assert f"names {str(TINY)!r} as its original, and {tmp_path / 'other'} has other weights" in warning
    assert (
        "% of the most likely tokens are the same" in note and f"{near} was not made from {tmp_path / 'other'}" in note
    )
    assert not evaluate(near, ["ppl"], options, compare=str(tmp_path / "other")).notes  # which need not be the original


@pytest.mark.slow
def test_interrupted_and_continued(near, tmp_path, monkeypatch):
    """After an interruption in the second pass, the original runs only over windows that were not compared, and the
    samples are those of a run without interruption.
    """
    options = OPTIONS.model_copy(update={"batch_size": 2})
    whole = evaluate(near, ["agreement"], options, compare=str(TINY)).results["agreement"]["converted"].samples
    append, run_windows, batches, runs = SampleJournal.append, agreement.run_windows, [], []

    def stop_at_seventh(self, keys, values):
        batches.append(len(keys))
        if len(batches) == 7:
            raise KeyboardInterrupt
        append(self, keys, values)

    def counted(model, batch):
        runs.append(len(batch))
        return run_windows(model, batch)

    monkeypatch.setattr(agreement, "run_windows", counted)
    monkeypatch.setattr(SampleJournal, "append", stop_at_seventh)
    with pytest.raises(KeyboardInterrupt):
        evaluate(near, ["agreement"], options, compare=str(TINY), out=tmp_path / "out")
    monkeypatch.setattr(SampleJournal, "append", append)
    assert sum(runs) == 16  # all windows of both models; three batches of texts and three of windows are stored
    runs.clear()
    again = evaluate(near, ["agreement"], options, compare=str(TINY), out=tmp_path / "out")
    assert sum(runs) == 4
    found = [json.loads(json.dumps(s.to_dict())) for s in again.results["agreement"]["converted"].samples]
    assert found == [json.loads(json.dumps(s.to_dict())) for s in whole]
    runs.clear()
    evaluate(near, ["agreement"], options, compare=str(TINY), out=tmp_path / "out")
    assert not runs


@pytest.mark.slow
def test_several_models_and_folders(near, tmp_path):
    out = tmp_path / "out"
    done = evaluate_models([near, str(TINY)], ["ppl", "agreement"], OPTIONS, out=out, compare=str(TINY))
    row = next(row for row in done.comparison.rows if row.task == "agreement" and row.metric.name == "top1")
    assert row.values["out"] < 100 and done.comparison.base == "checkpoint"
    compared = compare_folders([out])
    assert not compared.refused and not any("was not measured" in note for note in compared.notes)
    assert any("agreement of out: greedy texts of 6 prompts" in note for note in compared.notes)


@pytest.mark.slow
def test_results_against_other_originals_are_not_compared(near, tmp_path):
    evaluate(near, ["ppl", "agreement"], OPTIONS, compare=str(TINY), out=tmp_path / "a")
    evaluate(str(TINY), ["ppl", "agreement"], OPTIONS, compare=near, out=tmp_path / "b")
    (why,) = compare_folders([tmp_path / "a", tmp_path / "b"]).refused
    assert why == "agreement of out is not compared with checkpoint: measured against another original"


def test_verdict_names_agreement(near):
    done = evaluate(near, ["ppl", "agreement"], OPTIONS, compare=str(TINY))
    results = json.loads(json.dumps(done.to_dict()))
    sizes = ("params", "bytes", "replaced_params")
    report = {"totals": {f"{size}_{when}": 10 for size in sizes for when in ("before", "after")}}
    report["source"] = {"name": str(TINY)}
    text = verdict(report, results)
    top1, kl = (done.row("agreement", name).values["converted"] for name in ("top1", "kl"))
    assert f"same most likely token {top1:.1f}% (KL {kl:.3g} nats), greedy texts equal for" in text
    assert text.index("perplexity x") < text.index("same most likely token")
