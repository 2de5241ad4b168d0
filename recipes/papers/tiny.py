"""Trains the embedded checkpoint: a tiny Llama that reads stories and really retrieves from its context.

    python -m surgery.recipes.papers.tiny --out runs/tiny --minutes 8      # one GPU
    python -m surgery.recipes.papers.tiny --out /tmp/tiny --smoke          # a few steps on a CPU

Text is generated as it is trained on, by worker processes; batch i depends on the seed and i alone.
Small models do not learn retrieval by accident, so there are two phases: `drill` (short rows, mostly lists
of facts with questions, longer and longer lists) and the full mixture at the full context, four rows in ten
of which begin with a long story that hides its facts anywhere. The tokens of answers weigh more in the loss.
Everything quoted in the model card is measured on the saved file. B batch, T tokens.
"""

import argparse
import copy
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from surgery.eval.needle import NeedleTable, needle_accuracy
from surgery.recipes.papers import stories
from surgery.recipes.papers.tiny_card import card

PAD = "<|pad|>"
_ANSWER = re.compile(r"(?<=Answer:)( [^\n]*)")


@dataclass(frozen=True)
class Choices:
    """Everything that decides the result; lengths in tokens, shares of the steps between 0 and 1."""

    vocabulary: int = 1536
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 512
    context: int = 1024
    drill_context: int = 256
    drill_share: float = 0.2
    drill_tokens: int = 16_384
    batch_tokens: int = 65_536
    steps: int = 16_000
    init: float = 0.02
    rate: float = 2e-3
    decay: float = 0.1
    answer_weight: float = 5.0
    seed: int = 1
    samples: int = 200
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    depths: tuple[float, ...] = tuple(i / 10 for i in range(11))


SMOKE = Choices(
    vocabulary=512, hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, context=128, drill_context=96,
    drill_tokens=384, batch_tokens=768, steps=6, samples=2, lengths=(96, 128), depths=(0.0, 1.0),
)  # fmt: skip


def build_tokenizer(choices: Choices) -> PreTrainedTokenizerFast:
    """A byte-level BPE of our own text: a word, digit or mark (with its space) is merged, never more."""
    cut = pre_tokenizers.Split(Regex(stories.PIECE), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=choices.vocabulary,
        special_tokens=[stories.END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories.corpus(choices.seed, 2_000_000).split(stories.END), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=stories.END,
        eos_token=stories.END,
        pad_token=PAD,
        model_max_length=choices.context,
        clean_up_tokenization_spaces=False,
    )


def build_model(choices: Choices, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(choices.seed)
    config = LlamaConfig(
        vocab_size=choices.vocabulary,
        hidden_size=choices.hidden,
        intermediate_size=choices.intermediate,
        num_hidden_layers=choices.layers,
        num_attention_heads=choices.heads,
        num_key_value_heads=choices.kv_heads,
        max_position_embeddings=choices.context,
        tie_word_embeddings=True,
        initializer_range=choices.init,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class Batches(Dataset):
    """Batch i as (tokens [B, T + 1], is an answer [B, T + 1]); made from scratch, in a worker."""

    def __init__(self, choices: Choices, tokenizer: PreTrainedTokenizerFast):
        self.choices = choices
        self.tokenizer = tokenizer.backend_tokenizer
        self.pieces: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return self.choices.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        choices, rng = self.choices, Random(f"tiny {self.choices.seed} {step}")
        share = step / (choices.drill_share * choices.steps)
        context, tokens = choices.context, choices.batch_tokens
        if share < 1:
            context, tokens = choices.drill_context, choices.drill_tokens
        rows = [self.row(rng, context, share) for _ in range(tokens // context)]
        ids, answers = zip(*rows)
        return torch.tensor(ids, dtype=torch.int16), torch.tensor(answers, dtype=torch.bool)

    def encode(self, text: str) -> list[int]:
        """The tokenizer's own tokens, by a table of pieces, across which it never merges: fast."""
        ids: list[int] = []
        for piece in stories.pieces(text):
            if piece not in self.pieces:
                self.pieces[piece] = self.tokenizer.encode(piece, add_special_tokens=False).ids
            ids += self.pieces[piece]
        return ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def row(self, rng: Random, context: int, share: float) -> tuple[list[int], list[bool]]:
        """context + 1 tokens of documents, cut off at the end and, if no long needle leads, at the start."""
        ids: list[int] = []
        answers: list[bool] = []
        leads = share >= 1 and rng.random() < 0.4
        skip = 0 if leads or rng.random() < 0.5 else int(rng.random() * context / 2)
        while len(ids) <= skip + context:
            parts = self.long_needle(rng, context) if leads and not ids else self.parts(rng, share)
            for part, answer in [*parts, (f"\n{stories.END}\n", False)]:
                tokens = self.encode(part)
                ids += tokens
                answers += [answer] * len(tokens)
        return ids[skip : skip + context + 1], answers[skip : skip + context + 1]

    def long_needle(self, rng: Random, context: int) -> list[tuple[str, bool]]:
        return split(stories.needle_document(rng, int(context * (0.3 + 0.7 * rng.random())), self.count))

    def parts(self, rng: Random, share: float) -> list[tuple[str, bool]]:
        """A document of the mixture or, in the first phase mostly, one that drills recall."""
        kind = rng.random()
        if kind < (0.5 if share < 1 else 0.1):
            return stories.drill(rng, 2 + int(14 * min(share, 1)))
        if share < 1 and kind < 0.85:
            return split(stories.list_document(rng, 2 + int(14 * share)))
        return split(stories.document(rng))


def split(text: str) -> list[tuple[str, bool]]:
    """The text in parts: is it the answer to a question?"""
    return [(part, i % 2 == 1) for i, part in enumerate(_ANSWER.split(text))]


def batches(choices: Choices, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Iterator[Any]:
    workers = max(1, (os.cpu_count() or 2) - 1) if device.type == "cuda" else 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loader = DataLoader(
        Batches(choices, tokenizer),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=device.type == "cuda",
    )
    for ids_BT, answers_BT in loader:
        yield ids_BT.to(device, non_blocking=True).long(), answers_BT.to(device, non_blocking=True)


def losses(
    model: Any, ids_BT: torch.Tensor, answers_BT: torch.Tensor, weight: float
) -> tuple[torch.Tensor, ...]:
    """The weighted loss to descend, and (without gradient) the mean nats per token and per answer token."""
    device = ids_BT.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        logits_BTv = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
    nats_N = functional.cross_entropy(
        logits_BTv.float().flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none"
    )
    answer_N = answers_BT[:, 1:].flatten().float()
    weight_N = 1 + (weight - 1) * answer_N
    asked = (nats_N * answer_N).sum() / answer_N.sum().clamp(min=1)
    return (nats_N * weight_N).sum() / weight_N.sum(), nats_N.mean().detach(), asked.detach()


def rate_at(progress: float) -> float:
    """Warm-up over the first 2%, then a cosine down to zero; a share of the peak rate."""
    return min(1.0, progress / 0.02) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train(choices: Choices, model: Any, tokenizer: Any, out: Path, minutes: float | None) -> list[dict]:
    """Trains in place; ends after `choices.steps`, or when `minutes` are over (the rate follows either)."""
    device = model.device
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    fast = device.type == "cuda"
    adam = torch.optim.AdamW(
        groups, lr=choices.rate, betas=(0.9, 0.95), weight_decay=choices.decay, fused=fast
    )
    descend = torch.compile(losses, dynamic=False) if fast else losses
    tokens, log, start, every = 0, [], time.time(), max(1, choices.steps // 40)
    for step, (ids_BT, answers_BT) in enumerate(batches(choices, tokenizer, device)):
        progress = max(step / choices.steps, (time.time() - start) / (60 * minutes) if minutes else 0.0)
        if progress >= 1:
            break
        for group in adam.param_groups:
            group["lr"] = choices.rate * rate_at(progress)
        loss, nats, asked = descend(model, ids_BT, answers_BT, choices.answer_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        tokens += answers_BT[:, 1:].numel()
        if step % every == 0 or step == choices.steps - 1:
            line = {"step": step, "tokens": tokens, "seconds": round(time.time() - start, 1)}
            line |= {"loss": round(float(nats), 4), "answer_loss": round(float(asked), 4)}
            log.append(line | glance(choices, model, tokenizer))
            print(json.dumps(log[-1]), flush=True)
            save(model, tokenizer, out)
    return log


def glance(choices: Choices, model: Any, tokenizer: Any) -> dict[str, float]:
    """A quick look at retrieval, for the log: 24 questions at each of up to three lengths."""
    lengths = sorted({choices.lengths[0], choices.drill_context, choices.context})
    table = needle_accuracy(model, tokenizer, lengths, (0.1, 0.5, 0.9), 8, seed=99, batch_size=24)
    model.train()
    return {f"needle_{n}": round(sum(row) / len(row), 3) for n, row in zip(lengths, table.accuracy)}


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """An ordinary checkpoint folder, in bfloat16."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


@torch.inference_mode()
def perplexity(model: Any, tokenizer: Any, text: str, context: int) -> float:
    """exp of the mean nats per token over whole windows of `context` tokens, side by side."""
    ids_N = torch.tensor(tokenizer(text, verbose=False).input_ids, device=model.device)
    windows_NT = ids_N[: len(ids_N) // context * context].view(-1, context)
    nats = 0.0
    for ids_BT in windows_NT.split(16):
        logits_BTv = model(input_ids=ids_BT).logits[:, :-1].float()
        nats += float(
            functional.cross_entropy(logits_BTv.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="sum")
        )
    return math.exp(nats / windows_NT[:, 1:].numel())


def measure(choices: Choices, out: Path, device: torch.device) -> tuple[dict[str, Any], NeedleTable]:
    """The scores of the saved file, computed in float32 from its bfloat16 weights."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    table = needle_accuracy(
        model, tokenizer, choices.lengths, choices.depths, choices.samples, seed=7, batch_size=64
    )
    heldout = stories.heldout()
    scores = {
        "heldout_perplexity": perplexity(model, tokenizer, heldout, choices.context),
        "heldout_tokens": len(tokenizer(heldout, verbose=False).input_ids),
        "heldout_seed": stories.HELDOUT_SEED,
        "calibration_seed": stories.CALIBRATION_SEED,
        "parameters": model.num_parameters(),
        "bytes": (out / "model.safetensors").stat().st_size,
    }
    return scores, table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument(
        "--minutes", type=float, help="end the training after so long, if its steps take longer"
    )
    parser.add_argument("--steps", type=int, help=f"optimizer steps (default {Choices.steps})")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps of a much smaller model, on any machine"
    )
    args = parser.parse_args()
    choices = SMOKE if args.smoke else Choices()
    if args.steps is not None:
        choices = replace(choices, steps=args.steps)
    command = "python -m surgery.recipes.papers.tiny " + " ".join(sys.argv[1:])
    make(choices, args.out, args.minutes, command)


def make(choices: Choices, out: Path, minutes: float | None, command: str) -> dict[str, Any]:
    """Trains, saves and scores; writes every file of the package data into `out` and returns the record."""
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    tokenizer = build_tokenizer(choices)
    model = build_model(choices, tokenizer).to(device)
    log = train(choices, model, tokenizer, out, minutes)
    save(model, tokenizer, out)
    torch.set_float32_matmul_precision("highest")
    scores, table = measure(choices, out, device)
    record = {"choices": asdict(choices), "log": log, "scores": scores, "needle": table.to_dict()}
    (out / "training_log.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "README.md").write_text(card(asdict(choices), log, scores, table, command))
    (out / "heldout.txt").write_text(stories.heldout())
    (out / "calibration.txt").write_text(stories.calibration())
    print(json.dumps(scores), table.markdown(), sep="\n", flush=True)
    return record


if __name__ == "__main__":
    main()
