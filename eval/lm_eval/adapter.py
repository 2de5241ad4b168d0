"""lm-eval's Hugging Face model (HFLM) around a loaded model, with our batching.

HFLM tokenizes, generates and truncates answers, so scores equal those of `lm_eval --model hf`. Batches go through
`score_in_batches`: longest first, divided among processes, halved when memory runs out. Likelihoods compute only the
logits of the scored tokens. Shapes: B batch, T tokens, V vocabulary, N scored tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from surgery.core.errors import SurgeryError
from surgery.eval.batching import BATCH_TOKENS
from surgery.eval.lm_eval.answer_cache import AnswerCache
from surgery.eval.suite import EvalModel, EvalOptions
from surgery.eval.text import encoder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

LikelihoodRequest = tuple[Any, list[int], list[int]]  # lm-eval's cache key, context, continuation

POSITION_TABLE_NAMES = ("wpe", "position_embeddings", "embed_positions")
UNBOUNDED_LENGTH = 2**20  # tokens; longest input of a model that declares none


def harness_model(
    eval_model: EvalModel, options: EvalOptions, longest: int | None = None, *, keep_ends: bool = False
) -> Any:
    """Return the HFLM subclass around a model.

    longest: inputs are truncated to this; default: the model's longest input. keep_ends: inputs that are too long lose
    their middle instead of their beginning.
    """
    _check_positions(eval_model, longest or 0)
    if options.apply_chat_template:
        check_chat_template(eval_model.tokenizer)
    lm = _lm_class()(
        pretrained=eval_model.model,
        tokenizer=copy.deepcopy(eval_model.tokenizer),  # HFLM sets a padding token on it
        backend="default" if eval_model.model.config.is_encoder_decoder else "causal",
        max_length=longest or eval_model.longest or UNBOUNDED_LENGTH,
        batch_size=1,
    )
    lm.eval_model, lm.options, lm.answer_cache, lm.truncated = (
        eval_model,
        options,
        AnswerCache(eval_model, options.use_cache),
        Counter(),
    )
    lm.keep_ends = keep_ends
    return lm


def check_chat_template(tokenizer: Any) -> None:
    """Raise SurgeryError if the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise SurgeryError(
            "--apply-chat-template: the tokenizer has no chat template (chat_template in tokenizer_config.json). Omit "
            "the option."
        )


def _check_positions(eval_model: EvalModel, longest: int) -> None:
    """Raise SurgeryError if inputs exceed a table of learned positions: on a GPU such a lookup aborts the process."""
    for name, module in eval_model.model.named_modules():
        table = name.rpartition(".")[2] in POSITION_TABLE_NAMES and isinstance(module, torch.nn.Embedding)
        if table and module.num_embeddings < longest:
            raise SurgeryError(
                f"{eval_model.name} has learned positions ({name}) for {module.num_embeddings:,} tokens, fewer than "
                "the requested "
                f"{longest:,}. Use --lengths up to {module.num_embeddings}."
            )


def generation_tokens(device: torch.device) -> int:
    """Return the tokens per batch that "auto" starts with for generation.

    A decoding step takes as long for sixteen rows as for one, so the batch grows with free memory.
    """
    tokens = BATCH_TOKENS.get(device.type, 2**17)
    if device.type != "cuda":
        return tokens
    unallocated = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    times = (torch.cuda.mem_get_info(device)[0] + unallocated) // (32 * 2**30)
    return tokens * 2 ** (max(1, times).bit_length() - 1)


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, its generation settings, and its ids (T,) int32."""

    text: str
    settings: dict[str, Any]
    ids_T: torch.Tensor


@cache
def _lm_class() -> type:
    from lm_eval.models.huggingface import HFLM

    return type("SurgeryLM", (BatchedLM, HFLM), {})


class BatchedLM:
    """Overrides of HFLM that batch by `score_in_batches` and use the answer cache.

    truncated: task name -> number of prompts that lost a part because they exceed the model's longest input. keep_ends:
    that part is the middle, not the beginning.
    """

    eval_model: EvalModel
    options: EvalOptions
    model: Any
    tokenizer: Any
    max_length: int
    backend: str
    answer_cache: AnswerCache
    truncated: Counter[str]
    keep_ends: bool = False
    _task_names: Sequence[str] = ()  # task names of the current likelihood requests, in order

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate answers, in groups of equal settings, as batches require. Every prompt is tokenized once."""
        from lm_eval.models.utils import normalize_gen_kwargs

        asked = [
            GenerationRequest(request.args[0], request.args[1], ids_T)
            for request, ids_T in zip(requests, self._encode_prompts(requests))
        ]
        alike: dict[str, list[int]] = {}
        for i, generation in enumerate(asked):
            alike.setdefault(repr(generation.settings), []).append(i)
        answers = [""] * len(requests)
        for group in alike.values():
            tokens = normalize_gen_kwargs(asked[group[0]].settings, self.max_gen_toks)["max_gen_toks"]  # type: ignore[attr-defined]
            for i in group:
                self._count_truncated(requests[i].task_name, len(asked[i].ids_T) > self.max_length - tokens)
            completions = self.answer_cache.get_or_compute(
                self.options,
                [asked[i] for i in group],
                lambda generation: [
                    "answer",
                    self.max_length,
                    generation.text,
                    generation.settings,
                    *self._sampling_key(generation.settings),
                    *self._cut_key(),
                ],
                self._generate if self.backend == "causal" else self._generate_with_hflm,
                lambda generation: len(generation.ids_T),
                f"{requests[group[0]].task_name}: answers",
                tokens=generation_tokens(self.eval_model.device),
            )
            for i, answer in zip(group, completions):
                answers[i] = answer
        return answers

    def _sampling_key(self, settings: dict[str, Any]) -> list[Any]:
        """Return what a sampled answer depends on besides the request."""
        return ["seed", self.options.seed] if settings.get("do_sample") or settings.get("temperature") else []

    def _cut_key(self) -> list[Any]:
        """Return what an answer to a truncated prompt depends on besides the request."""
        return ["middle"] if self.keep_ends else []

    def _truncate(self, ids: Any, room: int) -> Any:
        """Return at most `room` of the ids (a list or a tensor): the last ones, or as many from both ends."""
        if len(ids) <= room or not self.keep_ends:
            return ids[-room:]
        first, last = ids[: room // 2], ids[-(room - room // 2) :]
        return torch.cat([first, last]) if isinstance(ids, torch.Tensor) else [*first, *last]

    def _encode_prompts(self, requests: list[Instance]) -> Iterator[torch.Tensor]:
        """Yield the prompts' ids; 32 at a time, which a fast tokenizer encodes in parallel."""
        from lm_eval.models.utils import has_bos_prefix

        bos = getattr(self.tokenizer, "bos_token", None)
        encode = {special: encoder(self.tokenizer, special) for special in (True, False)}
        for start in range(0, len(requests), 32):
            texts = [request.args[0] for request in requests[start : start + 32]]
            begun = has_bos_prefix(texts[0], bos)  # added by a chat template
            yield from map(torch.from_numpy, encode[not begun](texts))

    def _generate(self, batch: list[GenerationRequest]) -> list[str]:
        """Generate from prompts padded on the left, with a mask; truncate answers at the first stop string."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

        settings = dict(normalize_gen_kwargs(batch[0].settings, self.max_gen_toks))  # type: ignore[attr-defined]
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)  # type: ignore[attr-defined]
        stop = handle_stop_sequences(settings.pop("until", None), eos=eos)
        tokens = settings.pop("max_gen_toks")
        settings.pop("max_length", None)
        room = self.max_length - tokens
        if room < 1:
            raise SurgeryError(
                f"answers of {tokens} tokens leave no room for a question in inputs of {self.max_length}. Use longer "
                "--lengths."
            )
        longest = min(room, max(len(request.ids_T) for request in batch))
        ids_BT = torch.full((len(batch), longest), self.tokenizer.pad_token_id, dtype=torch.int64)
        mask_BT = torch.zeros_like(ids_BT)
        for row, request in enumerate(batch):
            kept_T = self._truncate(request.ids_T, longest)
            ids_BT[row, longest - len(kept_T) :], mask_BT[row, longest - len(kept_T) :] = kept_T, 1
        with torch.inference_mode():
            output_BT = self._model_generate(  # type: ignore[attr-defined]
                context=ids_BT.to(self.eval_model.device),
                attention_mask=mask_BT.to(self.eval_model.device),
                stop=[words for words in stop if not (words == eos and self._stops_at_eos(settings))],
                max_length=longest + tokens,
                **settings,
            )
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in output_BT[:, longest:].tolist()]
        return [postprocess_generated_text(text, stop, None) for text in texts]

    def _stops_at_eos(self, settings: dict[str, Any]) -> bool:
        """Return whether generate() itself stops at the end-of-text token.

        If so, its text is not used as a stop string, which would be searched at every step and in every row.
        """
        ends = settings.get("eos_token_id", self.model.generation_config.eos_token_id)
        return self.eot_token_id in (ends if isinstance(ends, (list, tuple)) else [ends])  # type: ignore[attr-defined]

    def _generate_with_hflm(self, batch: list[GenerationRequest]) -> list[str]:
        from lm_eval.api.instance import Instance

        self.batch_size_per_gpu = len(batch)
        asked = [Instance("generate_until", {}, (request.text, request.settings), i) for i, request in enumerate(batch)]
        with torch.inference_mode():
            return super().generate_until(asked, disable_tqdm=True)  # type: ignore[misc]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations; progress bars are those of `score_in_batches`."""
        self._task_names = [str(request.task_name) for request in requests]
        try:
            return super().loglikelihood(requests, disable_tqdm=True)  # type: ignore[misc]
        finally:
            self._task_names = []

    def _count_truncated(self, task: str | None, cut: bool) -> None:
        if cut:
            self.truncated[str(task)] += 1

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return sums over disjoint windows; each token after the first is conditioned on those before it in its
        window.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[LikelihoodRequest] = []
        owner: list[int] = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])  # type: ignore[attr-defined]
            first = self.prefix_token_id  # type: ignore[attr-defined]
            cut = get_rolling_token_windows(tokens, first, self.max_length, context_len=1)
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owner.append(i)
        sums = [0.0] * len(requests)
        for i, (likelihood, _) in zip(owner, self._loglikelihood_tokens(windows)):
            sums[i] += likelihood
        return sums

    def _loglikelihood_tokens(
        self, requests: list[LikelihoodRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood of the continuation, whether it is the greedy one) of each request.

        Continuations that differ only in their last token share a row.
        """
        for task, (_, context, continuation) in zip(self._task_names, requests):
            self._count_truncated(task, len(context) + len(continuation) > self.max_length + 1)
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            rows.setdefault((*context, *continuation[:-1]), []).append(i)
        items = [[requests[i] for i in row] for row in rows.values()]
        scored = self.answer_cache.get_or_compute(
            self.options,
            items,
            lambda row: ["likelihoods", self.max_length, [pair[1:] for pair in row], *self._cut_key()],
            self._score if self.backend == "causal" else self._score_with_hflm,
            lambda row: len(row[0][1]) + len(row[0][2]),
            "likelihoods",
        )
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for row, scores in zip(rows.values(), scored):
            for i, (likelihood, greedy) in zip(row, scores):
                answers[i] = likelihood, greedy
        return answers

    def _score_with_hflm(self, batch: list[list[LikelihoodRequest]]) -> list[list[tuple[float, bool]]]:
        flat = super()._loglikelihood_tokens(  # type: ignore[misc]
            [pair for row in batch for pair in row], disable_tqdm=True, override_bs=len(batch)
        )
        results = iter(flat)
        return [[next(results) for _ in row] for row in batch]

    @torch.inference_mode()
    def _score(self, batch: list[list[LikelihoodRequest]]) -> list[list[tuple[float, bool]]]:
        """Score rows in one forward pass, padded on the right, so without a mask; rows too long are truncated."""
        most = max(len(pair[2]) for row in batch for pair in row)
        if most > self.max_length:
            raise SurgeryError(
                f"an answer to score has {most} tokens, more than an input may have ({self.max_length}). Use longer "
                "--lengths."
            )
        inputs = [self._truncate(row[0][1] + row[0][2], self.max_length + 1)[:-1] for row in batch]
        longest = max(map(len, inputs))
        scored = [max(len(pair[2]) for pair in row) for row in batch]
        ids_BT = torch.tensor([ids + [ids[-1]] * (longest - len(ids)) for ids in inputs], device=self.eval_model.device)
        first = min(len(ids) - n for ids, n in zip(inputs, scored))
        logits_BNV = self._logits(ids_BT, first)
        answers = []
        for row, ids, logits_NV in zip(batch, inputs, logits_BNV):
            logits_NV = logits_NV[: len(ids) - first]
            answers.append([_likelihood(logits_NV, pair[2]) for pair in row])
        return answers

    def _logits(self, ids_BT: torch.Tensor, first: int) -> torch.Tensor:
        """Return the logits from position `first` on, (B, N, V)."""
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            keep_N = torch.arange(first, ids_BT.shape[1], device=ids_BT.device)
            return self.model(input_ids=ids_BT, use_cache=False, logits_to_keep=keep_N).logits
        return self.model(input_ids=ids_BT, use_cache=False).logits[:, first:]


def _likelihood(logits_NV: torch.Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Score the last len(continuation) positions, 1024 at a time."""
    logits_NV = logits_NV[-len(continuation) :]
    targets_N = torch.tensor(continuation, device=logits_NV.device)
    total, greedy = 0.0, True
    for part_NV, part_N in zip(logits_NV.split(1024), targets_N.split(1024)):
        total -= float(torch.nn.functional.cross_entropy(part_NV.float(), part_N, reduction="sum"))
        greedy &= bool((part_NV.argmax(-1) == part_N).all())
    return total, greedy
