"""Suite `agreement`: how far the converted model's predictions are from the original's, token by token and as text.

    kl         KL(p || q) = sum_v p_v (log p_v - log q_v) of the next token     p: original   q: converted    nats per token
    top1       whether the most likely token of both is the same
    win, tie   of a document: mean loss below the original's by more than --tolerance, or within it
    greedy     tokens until the greedy continuations of a prompt differ, at most --greedy-tokens (censored)

A converted model can be as good as the original by likelihood and far from it when it generates, so perplexity alone
flatters it. The first three are of the windows of the text that `ppl` reads, kl and top1 also by position.

The models are loaded one after the other. In between are kept: the original's last hidden states, on the CPU, and its
output head. Logits of both exist for a few tokens at a time (LOGITS_PER_SLICE elements each).

B batch, T tokens of a window, D model width, V vocabulary, N tokens of a slice.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import special_tokens
from surgery.core.errors import SurgeryError
from surgery.core.logit_rows import UNCHANGED, LogitTransform, RowSpec, gathered, row_stats
from surgery.eval.batching import score_in_batches
from surgery.eval.losses import LOGITS_PER_SLICE, check_lm_head
from surgery.eval.suite import (
    EvalMetric,
    EvalModel,
    EvalOptions,
    ModelLoader,
    Sample,
    Suite,
    SuiteResult,
    no_tasks,
    register,
    stable_id,
)
from surgery.eval.suites.per_position import position_ranges
from surgery.eval.text import TextWindow, load_text_windows, window_length_notes
from surgery.training.linear_loss import Logits
from surgery.training.output_head import model_logits

METRICS = {
    metric.name: metric
    for metric in (
        EvalMetric("kl", higher_is_better=False, title="KL(original || converted)", unit="nats"),
        EvalMetric("top1", scale=100, title="same most likely token", unit="%"),
        EvalMetric("win_tie", "accuracy", scale=100, title="wins and ties", unit="%"),
        EvalMetric("win", "accuracy", scale=100, title="wins", unit="%"),
        EvalMetric("tie", "accuracy", scale=100, title="ties", unit="%"),
        EvalMetric("same_tokens", title="tokens until the first difference"),
        EvalMetric("same_text", "accuracy", scale=100, title="no difference", unit="%"),
    )
}
TOKENS, DOCUMENTS, GREEDY = "agreement", "agreement-documents", "agreement-greedy"  # tasks
TITLE = "agreement with the original"  # of the progress bar, and in the keys of the journal
PROMPT_TOKENS = 32
LOW_AGREEMENT = 0.25  # share of equal most likely tokens; two models trained apart on Python agree on 0.79 of them
MAX_STORED_BYTES = 2**33  # of the original's hidden states, or of its logits where these are no product of its head


@dataclass
class OriginalModel:
    """What the converted model is compared with.

    hidden: window id -> input of the head (T, D), or logits (T, V) with head None, on the CPU; see `Logits`. texts: the
    greedy continuation of each prompt.
    """

    windows: list[TextWindow]
    prompts: list[tuple[int, ...]]
    head: Callable[[Tensor], Tensor] | None = None
    transform: LogitTransform = UNCHANGED
    hidden: dict[str, Tensor] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)

    def logits(self, window: TextWindow, device: torch.device) -> Logits:
        """Return the logits of a window."""
        return Logits(self.hidden[window.id].to(device), self.head, self.transform)


def run_against(
    load_base: ModelLoader, load_converted: ModelLoader, tokenizer: Any, options: EvalOptions
) -> SuiteResult:
    """Compare two models; raises SurgeryError if their tokenizers differ. tokenizer: the converted model's."""
    with load_base() as base:
        original = run_original(base, tokenizer, options)
    with load_converted() as converted:
        check_lm_head(converted.model)
        check_windows(original.windows, converted, options)
        scores = compare_windows(original, converted, options)
        texts = continue_prompts(converted, original.prompts, options, f"greedy texts of {converted.name}")
    greedy, summary = compare_texts(original, texts, converted.tokenizer, options)
    by_token = _token_samples(original.windows, scores)
    samples = [*by_token, *_document_samples(original.windows, scores, options), *greedy]
    notes = [*window_length_notes(converted, options), *low_agreement_notes(by_token, base.name, converted.name)]
    notes += summary.pop("notes")
    info = {"longest": converted.longest, "tolerance": options.tolerance, "greedy": summary}
    return SuiteResult(samples, METRICS, notes=notes, info=info)


# -- the original ------------------------------------------------------------------------------------
def run_original(base: EvalModel, tokenizer: Any, options: EvalOptions) -> OriginalModel:
    """Run the original over the windows and prompts; leave out batches of windows that an interrupted run compared.

    Raises SurgeryError if `tokenizer`, the converted model's, gives other tokens.
    """
    check_lm_head(base.model)
    check_vocabularies(base.tokenizer, tokenizer)
    windows = load_text_windows("agreement", base, options)
    if not windows:
        raise SurgeryError(f"agreement: {options.text} has no document of two tokens or more; give a longer text")
    check_windows(windows, replace(base, tokenizer=tokenizer), options)
    prompts = draw_prompts(windows, base.tokenizer, options)
    original = OriginalModel(windows, prompts)
    done = _stored_windows(base, windows)

    def keep(batch: list[TextWindow]) -> list[None]:
        if not all(window.id in done for window in batch):
            logits = run_windows(base.model, batch)
            _check_size(logits, windows, base)
            original.head, original.transform = logits.head, logits.transform
            hidden_BTX = logits.input_NX.unflatten(0, (len(batch), -1))
            for window, hidden_TX in zip(batch, hidden_BTX):
                original.hidden[window.id] = hidden_TX[: len(window.ids) - 1].cpu()
        return [None] * len(batch)

    title = f"predictions of {base.name}"
    score_in_batches(replace(base, journal=None), options, windows, keep, lambda window: len(window.ids), title)
    original.texts = continue_prompts(base, prompts, options, f"greedy texts of the original {base.name}")
    return original


def run_windows(model: Any, batch: Sequence[TextWindow]) -> Logits:
    """Return the logits (B T, V) of windows, padded on the right to the longest, which a causal model does not see."""
    longest = max(len(window.ids) for window in batch)
    rows = [[*window.ids, *[window.ids[-1]] * (longest - len(window.ids))] for window in batch]
    ids_BT = torch.tensor(rows, device=model.device)
    return model_logits(lambda: model(input_ids=ids_BT, use_cache=False), model, ids_BT.shape)


def _check_size(logits: Logits, windows: Sequence[TextWindow], base: EvalModel) -> None:
    width, size = logits.input_NX.shape[-1], logits.input_NX.element_size()
    stored = sum(len(window.ids) for window in windows) * width * size
    if stored > MAX_STORED_BYTES:
        what = "hidden states" if logits.head is not None else "logits, which are no product of its head,"
        raise SurgeryError(
            f"agreement: the {what} of {base.name} have {width:,} numbers a token, {stored:,} bytes in all; at most "
            f"{MAX_STORED_BYTES:,} are kept. Use --tokens {MAX_STORED_BYTES // (width * size)}."
        )


def draw_prompts(windows: Sequence[TextWindow], tokenizer: Any, options: EvalOptions) -> list[tuple[int, ...]]:
    """Return `greedy_prompts` different pieces of PROMPT_TOKENS tokens of the text, fewer if it has fewer; drawn by the
    seed. All have the same length, special tokens included, so that batches need no padding.
    """
    before, after = (tuple(ids) for ids in special_tokens(tokenizer))
    places = []
    for window in windows:
        body = window.ids
        if before and body[: len(before)] == before:
            body = body[len(before) :]
        if after and body[-len(after) :] == after:
            body = body[: -len(after)]
        ends = range(PROMPT_TOKENS, len(body) + 1, PROMPT_TOKENS)
        places += [(*before, *body[end - PROMPT_TOKENS : end]) for end in ends]
    places = list(dict.fromkeys(places))
    return Random(options.seed).sample(places, min(options.greedy_prompts, len(places)))


# -- the converted model -----------------------------------------------------------------------------
def check_vocabularies(original: Any, converted: Any) -> None:
    """Raise SurgeryError unless two tokenizers have the same tokens with the same ids."""
    ours, theirs = converted.get_vocab(), original.get_vocab()
    if different := len(ours.items() ^ theirs.items()):
        raise SurgeryError(
            f"agreement: the tokenizer of the converted model has {len(ours):,} tokens, that of the original "
            f"{len(theirs):,}, and {different:,} differ. Token by token, only models with the same tokenizer can be "
            "compared."
        )


def check_windows(expected: list[TextWindow], converted: EvalModel, options: EvalOptions) -> None:
    """Raise SurgeryError unless the text gives the windows of the original with a tokenizer and context length."""
    if [w.ids for w in load_text_windows("agreement", converted, options)] != [w.ids for w in expected]:
        raise SurgeryError(
            "agreement: the converted model cuts the text into other tokens or windows than the original. Both must have "
            "the same tokenizer; use a --length that both take."
        )


def low_agreement_notes(samples: Sequence[Sample], base: str, converted: str) -> list[str]:
    """Return a note if fewer than LOW_AGREEMENT of the most likely tokens are the same. samples: of the task TOKENS."""
    share = sum(s.weight * s.metrics["top1"] for s in samples) / sum(s.weight for s in samples)
    if share >= LOW_AGREEMENT:
        return []
    return [
        f"only {share:.1%} of the most likely tokens are the same, fewer than of two unrelated models that both predict "
        f"the text well: either {converted} was not made from {base}, or one of them does not predict this text"
    ]


def compare_windows(
    original: OriginalModel, converted: EvalModel, options: EvalOptions
) -> list[dict[str, list[float]]]:
    """Return for each window the means of kl, top1 and both losses over its ranges of positions."""

    def score(batch: list[TextWindow]) -> list[dict[str, list[float]]]:
        logits = run_windows(converted.model, batch)
        input_BTX = logits.input_NX.unflatten(0, (len(batch), -1))
        found = []
        for window, input_TX in zip(batch, input_BTX):
            ours = replace(logits, input_NX=input_TX)
            columns = compare_tokens(original.logits(window, input_TX.device), ours, window.ids, converted.name)
            ranges = position_ranges(len(window.ids) - 1)
            found.append({name: [float(x_T[a:b].double().mean()) for a, b in ranges] for name, x_T in columns.items()})
        return found

    return score_in_batches(converted, options, original.windows, score, lambda window: len(window.ids), TITLE)


@torch.inference_mode()
def compare_tokens(base: Logits, converted: Logits, ids: Sequence[int], name: str = "the model") -> dict[str, Tensor]:
    """Return kl, top1 and the losses "base" and "converted" of each token after the first, each (T - 1,).

    base, converted: logits of the positions that predict them. Raises SurgeryError if the vocabularies differ.
    """
    device = converted.input_NX.device
    labels_T = torch.tensor(ids[1:], device=device)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    step, first = 1, 0  # the number of logits is known after the first token
    while first < len(labels_T):
        rows = slice(first, min(first + step, len(labels_T)))
        base_NV, ours_NV = base.rows(rows, device), converted.rows(rows, device)
        if base_NV.shape != ours_NV.shape:
            raise SurgeryError(
                f"agreement: the vocabularies differ: the original has {base_NV.shape[-1]:,} logits, {name} "
                f"{ours_NV.shape[-1]:,}. Token by token, only models with the same vocabulary can be compared."
            )
        spec = RowSpec(ours_NV.shape[-1], True, True, transform=converted.transform, teacher_transform=base.transform)
        stats, labels_N1 = row_stats(ours_NV, base_NV, spec), labels_T[rows, None]
        assert stats.kl_N is not None and stats.teacher_N is not None and stats.hard_N is not None
        parts["kl"].append(stats.kl_N.clamp_min(0))  # rounding may leave -1e-9
        parts["top1"].append((base_NV.argmax(-1) == ours_NV.argmax(-1)).float())
        parts["base"].append(stats.teacher_N - gathered(base_NV, labels_N1, base.transform)[:, 0])
        parts["converted"].append(stats.hard_N - gathered(ours_NV, labels_N1, converted.transform)[:, 0])
        first, step = rows.stop, max(1, LOGITS_PER_SLICE // ours_NV.shape[-1])
    return {name: torch.cat(columns).cpu() for name, columns in parts.items()}


def _stored_windows(base: EvalModel, windows: Sequence[TextWindow]) -> set[str]:
    """Return the ids of the windows that an interrupted run compared, of which the original need not be run again."""
    journal = base.journal
    if journal is None or not journal.stored:
        return set()
    return {window.id for window in windows if journal.key_of(TITLE, window) in journal.stored}


# -- greedy texts ------------------------------------------------------------------------------------
def continue_prompts(
    eval_model: EvalModel, prompts: Sequence[tuple[int, ...]], options: EvalOptions, title: str
) -> list[list[int]]:
    """Return the greedy continuation of each prompt: the most likely token each time, up to `greedy_tokens` or the end."""
    generation: dict[str, Any] = {
        "do_sample": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
    }
    generation |= {"temperature": None, "top_p": None, "top_k": None, "max_new_tokens": options.greedy_tokens}

    @torch.inference_mode()
    def write(batch: list[tuple[int, ...]]) -> list[list[int]]:
        ids_BT = torch.tensor(batch, device=eval_model.model.device)
        out_BT = eval_model.model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), **generation)
        ends = _end_tokens(eval_model.model)
        return [_until_end(row, ends) for row in out_BT[:, ids_BT.shape[1] :].tolist()]

    return score_in_batches(
        eval_model, options, prompts, write, lambda prompt: len(prompt) + options.greedy_tokens, title
    )


def _end_tokens(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, (list, tuple)) else set() if ends is None else {ends}


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Return a continuation up to its end token, without what pads it to the longest of its batch."""
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


def compare_texts(
    original: OriginalModel, texts: Sequence[Sequence[int]], tokenizer: Any, options: EvalOptions
) -> tuple[list[Sample], dict[str, Any]]:
    """Return a sample per prompt, and median, mean and counts over prompts. Equal texts count as `greedy_tokens`."""
    samples = []
    for prompt, base, ours in zip(original.prompts, original.texts, texts):
        same = first_difference(base, ours)
        metrics = {
            "same_tokens": float(options.greedy_tokens if same is None else same),
            "same_text": float(same is None),
        }
        read = {"prompt": prompt, "original": base, "converted": ours}
        shown = {name: tokenizer.decode(ids) for name, ids in read.items()}
        samples.append(Sample(GREEDY, stable_id(prompt), metrics, shown=shown))
    if not samples:
        return [], {"notes": []}
    counts = [sample.metrics["same_tokens"] for sample in samples]
    whole = sum(int(sample.metrics["same_text"]) for sample in samples)
    median, mean, asked = statistics.median(counts), statistics.fmean(counts), options.greedy_tokens
    at_least = "at least " if median >= asked else ""
    note = (
        f"greedy texts of {len(samples)} prompts differ first after {at_least}{median:g} tokens in the median "
        f"({mean:.4g} in the mean, counting {asked} for the {whole} that do not differ in {asked} tokens)"
    )
    summary = {"prompts": len(samples), "tokens": asked, "median": median, "mean": mean, "same": whole, "notes": [note]}
    return samples, summary


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the number of equal tokens before the first that differs, the end of a text included; None if all are
    equal.
    """
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# -- samples -----------------------------------------------------------------------------------------
def _token_samples(windows: Sequence[TextWindow], scores: Sequence[dict[str, list[float]]]) -> list[Sample]:
    return [
        Sample(
            TOKENS, window.id, {"kl": kl, "top1": top1}, {"position": last}, last - first, window.unit or window.id
        )
        for window, score in zip(windows, scores)
        for (first, last), kl, top1 in zip(position_ranges(len(window.ids) - 1), score["kl"], score["top1"])
    ]  # fmt: skip


def _document_samples(
    windows: Sequence[TextWindow], scores: Sequence[dict[str, list[float]]], options: EvalOptions
) -> list[Sample]:
    """Return wins and ties by document; by window if the text is a single document."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for window, score in zip(windows, scores):
        of_document = sums[window.unit or window.id]
        for (first, last), base, ours in zip(position_ranges(len(window.ids) - 1), score["base"], score["converted"]):
            for i, value in enumerate((base * (last - first), ours * (last - first), last - first)):
                of_document[i] += value
    samples = []
    for unit, (base_sum, our_sum, count) in sums.items():
        base, ours = base_sum / count, our_sum / count
        win, tie = ours < base - options.tolerance, abs(ours - base) <= options.tolerance
        metrics = {"win_tie": float(win or tie), "win": float(win), "tie": float(tie)}
        samples.append(Sample(DOCUMENTS, unit, metrics, shown={"original": base, "converted": ours}))
    return samples


register(
    Suite(
        "agreement",
        "divergence from --compare, equal tokens, greedy texts, wins and ties",
        None,
        run_against=run_against,
        tasks=no_tasks,
    )
)
