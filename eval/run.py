"""`surgery eval`: a suite on a checkpoint and, beside it, on the original."""

from __future__ import annotations

from typing import Any

import torch

from surgery.calibrate import load_tokenizer
from surgery.devices import choose_device
from surgery.errors import SurgeryError, nearest
from surgery.eval.cosine import cosine, embeddings, sentences_of
from surgery.eval.perplexity import compare as compare_losses
from surgery.eval.perplexity import perplexity, window_losses, windows_of
from surgery.progress import Progress
from surgery.skeleton import model_class
from surgery.source import open_converted

SUITES = ("ppl", "cosine")


def load(name: str, device: torch.device, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """(model, tokenizer) of a checkpoint, converted or not."""
    from transformers import AutoConfig

    folder = open_converted(name).folder
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise SurgeryError(f"--dtype {dtype!r}{nearest(dtype, ['auto', 'float32', 'bfloat16', 'float16'])}")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    model = model_class(config, trust_remote_code).from_pretrained(
        folder, dtype=dtype, trust_remote_code=trust_remote_code
    )
    return model.to(device).eval(), load_tokenizer(folder)


def evaluate(
    name: str,
    suite: str,
    text: str,
    original: str | None,
    *,
    tokens: int,
    length: int,
    device: str | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measurements of both, and the comparison, as data."""
    if suite not in SUITES:
        raise SurgeryError(f"unknown suite {suite!r}{nearest(suite, SUITES)}")
    if suite == "cosine" and original is None:
        raise SurgeryError("--suite cosine compares with an original: --compare SRC")
    run = _perplexity if suite == "ppl" else _cosine
    names = {"converted": name, **({"original": original} if original else {})}
    return run(names, text, tokens, length, choose_device(device), dtype, trust_remote_code, progress or Progress())


def _perplexity(
    names: dict[str, str],
    text: str,
    tokens: int,
    length: int,
    device: torch.device,
    dtype: str,
    trust: bool,
    progress: Progress,
) -> dict[str, Any]:
    losses: dict[str, torch.Tensor] = {}
    result: dict[str, Any] = {"suite": "ppl", "text": text}
    for role, name in names.items():
        model, tokenizer = load(name, device, dtype, trust)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        windows_NT = windows_of(text, tokenizer, tokens, length, limit)
        with progress.bar(f"perplexity of {name}", len(windows_NT)) as tick:
            losses[role] = window_losses(model, windows_NT, tick)
        result[role] = {"name": name, **perplexity(losses[role], windows_NT.shape[1]).to_dict()}
        del model
    if "original" in losses:
        if len(losses["original"]) != len(losses["converted"]):
            raise SurgeryError(
                f"{names['converted']} and {names['original']} cut the text differently: not the same tokenizer"
            )
        result["comparison"] = compare_losses(losses["converted"], losses["original"]).to_dict()
    result["rows"] = [
        ("perplexity", "perplexity"),
        ("se", "standard error"),
        ("loss", "loss, nats per token"),
        ("tokens", "tokens"),
    ]
    return result


def _cosine(
    names: dict[str, str],
    text: str,
    tokens: int,
    length: int,
    device: torch.device,
    dtype: str,
    trust: bool,
    progress: Progress,
) -> dict[str, Any]:
    sentences = sentences_of(text, max(2, tokens // 64))
    found = {}
    for role, name in names.items():
        model, tokenizer = load(name, device, dtype, trust)
        with progress.bar(f"embeddings of {name}", len(sentences)) as tick:
            found[role] = embeddings(model, tokenizer, sentences, tick)
    both = cosine(found["converted"], found["original"]).to_dict()
    rows = [
        ("cosine", "mean cosine to the original"),
        ("se", "standard error"),
        ("worst", "worst sentence"),
        ("sentences", "sentences"),
    ]
    return {"suite": "cosine", "text": text, "converted": {"name": names["converted"], **both}, "rows": rows}
