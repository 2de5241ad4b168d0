"""Converted models verify drafts: greedy text is that of `model.generate`, in batches whose rows accept different
numbers of drafts.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers.noisy import noisy
from helpers.slow import slow_where
from helpers.small_mixers import MIXER_SPECS, random_model, random_model_with_mixers

import surgery
from surgery.core.errors import SurgeryError
from surgery.mixers import mixer_config
from surgery.speculation.drafter import Drafter
from surgery.speculation.lookup import find_next

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 18}
GREEDY["suppress_tokens"] = [0]  # its embedding is zero, so that logits after it may be equal
QUICK = ["log-linear", "gated deltanet", "toeplitz blocks", "ssd", "mlr", "mhla"]
CASES = [*((n, False) for n in MIXER_SPECS), *((n, True) for n in QUICK)]


@functools.cache
def converted(name: str, hybrid: bool = False) -> Any:
    """Return a two-layer Llama in float64; in a hybrid the first layer keeps softmax."""
    return random_model_with_mixers("llama", mixer_config(MIXER_SPECS[name]), [1] if hybrid else None).double().eval()


def prompts(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (rows, 12), each repeating itself, and their mask; rows begin at columns 0, 5 and 3."""
    pieces = torch.randint(3, 96, (rows, 4), generator=torch.Generator().manual_seed(1))
    ids, pad_R = pieces.repeat(1, 3), torch.tensor([0, 5, 3])[:rows]
    mask = (torch.arange(12) >= pad_R[:, None]).long()
    return ids * mask, mask


def is_slow(name: str, hybrid: bool, rows: int) -> bool:
    """Return whether others are like a case: one row alone is run with two mixers."""
    return name not in (["log-linear"] if hybrid else QUICK) or (rows == 1 and not hybrid and name != "gated deltanet")


@pytest.mark.parametrize(
    "name, hybrid, rows", slow_where(is_slow, [(*case, rows) for case in CASES for rows in (1, 3)])
)
def test_greedy_text_is_that_of_generate(name, hybrid, rows):
    model, (ids, mask) = converted(name, hybrid), prompts(rows)
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    ends = {**GREEDY, "eos_token_id": [int(plain[-1, 17]), int(plain[0, 22])]}
    ended = model.generate(ids, attention_mask=mask, **ends)
    patterns = []
    for draft_model in (None, noisy(model, 0.1), random_model("llama").double().eval()):
        made = Drafter(model, draft_model)
        out = made.generate(ids, mask, draft_tokens=4, **GREEDY)
        assert torch.equal(out.sequences, plain) and out.drafted
        assert torch.equal(made.generate(ids, mask, draft_tokens=3, **ends).sequences, ended)
        patterns += out.patterns
    assert len(set(patterns)) > 1 and any("1" in p for p in patterns) and any("0" in p for p in patterns)


def test_rows_end_and_settings_are_those_of_generate():
    model, (ids, mask) = converted("gated deltanet", True), prompts(3)
    made = surgery.drafter(model, "prompt-lookup")
    for setting in ({"max_new_tokens": 1}, {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}):
        options = {**GREEDY, **setting}
        expected = model.generate(ids, attention_mask=mask, **options)
        assert torch.equal(made.generate(ids, mask, **options).sequences, expected), setting


def test_drafts_follow_the_longest_last_match():
    rows = [
        [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3],  # three tokens match at the start, two later
        [7, 7, 5, 6, 8, 6, 4, 0, 0, 0, 0],  # the row has seven tokens; its last, 4, is new: itself
        [
            3,
            5,
            3,
            6,
            3,
            8,
            3,
            0,
            0,
            0,
            0,
        ],  # only 3 matches; the first column is padding, and so is the fifth token's match
    ]
    found = find_next(torch.tensor(rows), torch.tensor([11, 7, 7]), torch.tensor([0, 0, 5]))
    assert found.tolist() == [4, 4, 3]
    assert find_next(torch.tensor([[5]]), torch.tensor([1]), torch.tensor([0])).tolist() == [5]


def test_only_new_tokens_and_rejected_ones_run_again():
    """One row takes in no token twice; of three rows each call has at most the drafts of one round more."""
    model, widths = converted("log-linear"), []
    hook = model.register_forward_pre_hook(
        lambda m, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for rows, most in ((1, 5), (3, 9)):
        made = Drafter(model, None)
        widths.clear()
        made.generate(*prompts(rows), draft_tokens=4, **GREEDY)
        assert widths[0] == 12 and max(widths[1:]) <= most
    hook.remove()


def test_what_cannot_draft_for_mixers_is_refused():
    model = converted("ssd")
    with pytest.raises(SurgeryError, match="has mixers, whose cache no drafter can read"):
        surgery.drafter(model)
    with pytest.raises(SurgeryError, match="'prompt-lookup' has no weights"):
        surgery.drafter(model, "prompt-lookup", keep=0.5)
    windows = random_model_with_mixers("gemma2", mixer_config(MIXER_SPECS["ssd"]), [1])
    with pytest.raises(SurgeryError, match=r"layer 0 .* softmax with a window"):
        surgery.drafter(windows, "prompt-lookup")


def test_a_lookup_drafter_of_a_plain_model():
    model, (ids, mask) = random_model("llama").double().eval(), prompts(3)
    made = surgery.drafter(model, "prompt-lookup")
    assert made.extra_bytes == made.cache_bytes(100) == 0 and "looked up" in repr(made)
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(made.generate(ids, mask, draft_tokens=4, **GREEDY).sequences, plain)
