"""Continuations of a few prompts by the original and the converted model, side by side: generations.json of a results
folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from surgery.core.files import atomic_write
from surgery.eval.model import load

FILE_NAME = "generations.json"
PROMPTS, PROMPT_WORDS, NEW_TOKENS = 3, 16, 40


def pick_prompts(text: str, count: int = PROMPTS, words: int = PROMPT_WORDS) -> list[str]:
    """Return `count` prompts of `words` words from a text: the beginnings of lines that are spread evenly over its long
    lines (at least twice as many words), or, if there are too few of them, of evenly spaced places."""
    lines = [line.split() for line in text.splitlines()]
    long = [line for line in lines if len(line) >= 2 * words]
    if len(long) < count:
        every = text.split()
        long = [every[i * len(every) // count :] for i in range(count)]
    chosen = [long[i * len(long) // count][:words] for i in range(count)]
    return [" ".join(prompt) for prompt in chosen if prompt]


def write_generations(
    original: str, converted: str, prompts: Sequence[str], folder: Path, device: torch.device, *, trust: bool = False
) -> list[dict[str, str]]:
    """Write the greedy continuations of both models to `folder`/generations.json and return them.

    Return [{"prompt", "original", "converted"}]; [] for a model that does not generate text. The models are loaded one
    after the other, in the dtype of their weights on a GPU and in float32 on a CPU. trust: whether Python code of the
    checkpoints may run.
    """
    written = [continuations(name, prompts, device, trust) for name in (original, converted)]
    generations = [{"prompt": p, "original": a, "converted": b} for p, a, b in zip(prompts, *written)]
    if generations:
        with atomic_write(folder / FILE_NAME, "w") as file:
            json.dump({"new_tokens": NEW_TOKENS, "generations": generations}, file, indent=2, ensure_ascii=False)
    return generations


def continuations(name: str, prompts: Sequence[str], device: torch.device, trust: bool = False) -> list[str]:
    """Return the greedy continuation of each prompt by a checkpoint; [] if it does not generate text."""
    model, tokenizer = load(name, device, "float32" if device.type == "cpu" else "auto", trust)
    if not model.can_generate() or model.config.is_encoder_decoder:
        return []
    return [_continue(model, tokenizer, prompt) for prompt in prompts]


def _continue(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()
