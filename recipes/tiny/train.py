"""Train the embedded checkpoint, a tiny Llama that reads stories and retrieves facts from its context.

    python -m surgery.recipes.tiny.train --out runs/tiny                  # one GPU, some ten minutes
    python -m surgery.recipes.tiny.train --out runs/smoke --smoke         # a few steps on a CPU

Training data and settings are in recipes/tiny/data.py. One process, AdamW, bfloat16 autocast on a GPU; tokens of
answers have a higher weight in the loss. All scores of the model card are measured on the saved file. B: batch, T:
tokens, N: tokens of the flattened batch, v: vocabulary.
"""

import argparse
import copy
import json
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from surgery.eval import stories
from surgery.eval.suite import EvalOptions
from surgery.eval.suites import perplexity as ppl
from surgery.eval.suites.needle import NeedleTable, needle_accuracy
from surgery.recipes.tiny.card import format_card
from surgery.recipes.tiny.data import SMOKE, TrainingChoices, build_tokenizer, load_batches


def build_model(choices: TrainingChoices, tokenizer: Any) -> LlamaForCausalLM:
    """Return the untrained model."""
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


def weighted_loss(
    model: Any, ids_BT: torch.Tensor, answers_BT: torch.Tensor, weight: float
) -> tuple[torch.Tensor, ...]:
    """Return the weighted loss and, without gradients, the mean nats per token and per answer token."""
    device = ids_BT.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        logits_BTv = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
    nats_N = functional.cross_entropy(logits_BTv.float().flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    answer_N = answers_BT[:, 1:].flatten().float()
    weight_N = 1 + (weight - 1) * answer_N
    asked = (nats_N * answer_N).sum() / answer_N.sum().clamp(min=1)
    return (nats_N * weight_N).sum() / weight_N.sum(), nats_N.mean().detach(), asked.detach()


def learning_rate_factor(progress: float) -> float:
    """Return the share of the peak rate: warm-up over the first 2% of the steps, then a cosine down to zero."""
    return min(1.0, progress / 0.02) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(choices: TrainingChoices, model: Any) -> torch.optim.AdamW:
    """Return AdamW without weight decay on norm weights."""
    flat = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.ndim > 1]}, flat]
    fused = model.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=choices.rate, betas=(0.9, 0.95), weight_decay=choices.decay, fused=fused)


def train(choices: TrainingChoices, model: Any, tokenizer: Any, out: Path, minutes: float | None) -> list[dict]:
    """Train in place for `choices.steps`, or until `minutes` are over; the schedule follows whichever ends first."""
    adam, start, log, tokens = make_optimizer(choices, model), time.time(), [], 0
    loss_fn = torch.compile(weighted_loss, dynamic=False) if model.device.type == "cuda" else weighted_loss
    for step, (ids_BT, answers_BT) in enumerate(load_batches(choices, tokenizer, model.device)):
        spent = (time.time() - start) / (60 * minutes) if minutes else 0.0
        for group in adam.param_groups:
            group["lr"] = choices.rate * learning_rate_factor(max(step / choices.steps, spent))
        loss, nats, asked = loss_fn(model, ids_BT, answers_BT, choices.answer_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        tokens += answers_BT[:, 1:].numel()
        over = spent >= 1 or step == choices.steps - 1
        if over or step % max(1, choices.steps // 40) == 0:
            line = {"step": step, "tokens": tokens, "seconds": round(time.time() - start, 1)}
            line |= {"loss": round(float(nats), 4), "answer_loss": round(float(asked), 4)}
            log.append(line | quick_needle_scores(choices, model, tokenizer))
            print(json.dumps(log[-1]), flush=True)
            save(model, tokenizer, out)
        if over:
            break
    return log


def quick_needle_scores(choices: TrainingChoices, model: Any, tokenizer: Any) -> dict[str, float]:
    """Return retrieval scores for the log: 24 questions at each of up to three lengths."""
    lengths = sorted({choices.lengths[0], choices.drill_context, choices.context})
    table = needle_accuracy(model, tokenizer, lengths, (0.0, 0.5, 1.0), 8, seed=99, batch_size=24)
    model.train()
    return {f"needle_{n}": round(sum(row) / len(row), 3) for n, row in zip(lengths, table.accuracy)}


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Save an ordinary checkpoint folder in bfloat16."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def measure(choices: TrainingChoices, out: Path, device: torch.device) -> tuple[dict[str, Any], NeedleTable]:
    """Score the saved checkpoint, in float32 computed from its bfloat16 weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=False)
    model = model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    table = needle_accuracy(model, tokenizer, choices.lengths, choices.depths, choices.samples, seed=7, batch_size=64)
    tokens = len(tokenizer(stories.heldout(), verbose=False).input_ids)
    options = EvalOptions(text=str(out / "heldout.txt"), tokens=tokens, length=choices.context)
    scores = {
        "heldout_perplexity": ppl.summarize(ppl.measure(model, tokenizer, options))["perplexity"],
        "heldout_tokens": tokens,
        "heldout_seed": stories.HELDOUT_SEED,
        "calibration_tokens": len(tokenizer(stories.calibration(), verbose=False).input_ids),
        "calibration_seed": stories.CALIBRATION_SEED,
        "parameters": model.num_parameters(),
        "bytes": (out / "model.safetensors").stat().st_size,
    }
    return scores, table


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="Checkpoint folder to write.")
    parser.add_argument(
        "--minutes", type=float, help="Stop training after this many minutes. Default: after all steps."
    )
    parser.add_argument("--steps", type=int, help=f"Optimizer steps. Default: {TrainingChoices.steps}.")
    parser.add_argument(
        "--smoke", action="store_true", help="Train a much smaller model for a few steps, on any machine."
    )
    args = parser.parse_args()
    choices = SMOKE if args.smoke else TrainingChoices()
    if args.steps is not None:
        choices = replace(choices, steps=args.steps)
    command = "python -m surgery.recipes.tiny.train " + " ".join(sys.argv[1:])
    train_and_save(choices, args.out, args.minutes, command)


def train_and_save(choices: TrainingChoices, out: Path, minutes: float | None, command: str) -> dict[str, Any]:
    """Train, save and score; write all package data to `out` and return the record."""
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    tokenizer = build_tokenizer(choices)
    model: Any = build_model(choices, tokenizer)
    model.to(device)
    log = train(choices, model, tokenizer, out, minutes)
    save(model, tokenizer, out)
    torch.set_float32_matmul_precision("highest")
    (out / "heldout.txt").write_text(stories.heldout())
    scores, table = measure(choices, out, device)
    chip = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    made = {"command": command, "chip": chip, "torch": torch.__version__}
    record = {
        "choices": asdict(choices),
        "made": made,
        "log": log,
        "scores": scores,
        "needle": table.to_dict(),
    }
    (out / "training_log.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "README.md").write_text(format_card(record))
    (out / "calibration.txt").write_text(stories.calibration())
    print(json.dumps(scores), table.markdown(), sep="\n", flush=True)
    return record


if __name__ == "__main__":
    main()
