"""generate() with mixers: what is decoded step by step from the small cache is what the whole forward says."""

from __future__ import annotations

import pytest
import torch
from small import GENERATING, tiny_inputs
from small_mixers import Decayed, Exact, registered, with_mixers

FAMILIES = [f for f in GENERATING if not f.startswith("t5") and f != "llama-tied"]
HYBRIDS = [("mistral", 0), ("mistral", 1), ("gemma2", 0), ("gemma2", 1), ("gemma3", 1), ("qwen3", 0), ("gpt2", 1)]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module", autouse=True)
def known():
    with registered():
        yield


def prompts(rows: int = 2, length: int = 10, seed: int = 3) -> torch.Tensor:
    return tiny_inputs("llama", rows, length, seed)["input_ids"]


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def decoded(model, ids, new: int, **options):
    """(tokens, logits of the new ones)"""
    done = model.generate(
        ids, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **{**GREEDY, **options}
    )
    return done.sequences, torch.stack(done.logits, dim=1)


@torch.no_grad()
def whole(model, tokens, new: int) -> torch.Tensor:
    """Logits of the last `new` tokens from one forward without a cache."""
    return model(tokens[:, :-1], use_cache=False).logits[:, -new:]


def mixed_model(family: str, mixer, layers=None):
    changes = {"n_positions": 256} if family == "gpt2" else {"sliding_window": 8} if family == "mistral" else {}
    return with_mixers(family, mixer, layers, **changes)


# -- step by step = at once ------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", [Exact(), Decayed()], ids=["exact", "decayed"])
def test_greedy_is_the_argmax_of_the_whole_forward(family, mixer):
    model, new = mixed_model(family, mixer), 40
    tokens, logits = decoded(model, prompts(), new)
    assert far(logits, whole(model, tokens, new)) < 1e-5
    assert torch.equal(tokens[:, -new:], logits.argmax(-1))
