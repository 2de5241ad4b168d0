"""Measure the overhead of evaluation suites over a bare loop of the same forwards, on a random Llama of 1B parameters.

python -m recipes.papers.speed.eval_speed --length 32768 --samples 64 --suite needle:needle --suite niah --new 0 --new 128

The bare loop runs the same number of random prompts of that length in batches and computes the last logits (`--new 0`,
as `needle` does) or generates tokens (`--new 128`, as `niah` does). A suite without overhead takes as long. With
`accelerate launch --num_processes 2 -m recipes.papers.speed.eval_speed ..` the samples are distributed over the
processes, and the bare loop runs in all of them at the same time.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recipes.papers.script import run_script
from surgery.calibration.data import load_tokenizer
from surgery.core.device import choose_device, device_name
from surgery.core.distributed import DistContext, init_distributed, local_device
from surgery.core.progress import RichProgress
from surgery.eval.batching import BATCH_TOKENS
from surgery.eval.lm_eval.adapter import generation_tokens
from surgery.eval.suite import EvalModel, EvalOptions, find_suite

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1536},
}  # fmt: skip


def random_model(shape: str, device: torch.device, longest: int, ranks: DistContext | None = None) -> EvalModel:
    """Return a model with random weights, equal in every process, and the embedded checkpoint's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
    tokenizer = load_tokenizer(folder)
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=longest, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return EvalModel(
        "converted",
        f"random-{shape}",
        folder,
        shape,
        model,
        tokenizer,
        device,
        dtype,
        longest,
        ranks or DistContext(),
        RichProgress(),
    )


@torch.inference_mode()
def time_bare_loop(eval_model: EvalModel, length: int, batches: int, rows: int, new: int) -> list[float]:
    """Return the seconds of each batch of the model alone."""
    ids_BT = torch.randint(5, 1000, (rows, length - new), device=eval_model.device)
    seconds = []
    for _ in range(batches):
        began = time.perf_counter()
        _run_batch(eval_model.model, ids_BT, new)
        seconds.append(time.perf_counter() - began)
    return seconds


def _run_batch(model: Any, ids_BT: torch.Tensor, new: int) -> None:
    """Run a batch; `.item()` waits for the device."""
    if new:
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), **settings).sum().item()
    else:
        model(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits.sum().item()


def time_suite(
    eval_model: EvalModel, name: str, length: int, samples: int, rows: int, data_root: Path | None
) -> dict[str, Any]:
    """Time a suite."""
    suite, _, task = name.partition(":")
    options = EvalOptions(
        lengths=(length,),
        depths=(0.5,),
        limit=samples,
        tasks=(task,) if task else (),
        batch_size=rows,
        data_root=data_root,
    )
    # Warm-up, as for the bare loop: imports and compilation at the first call.
    find_suite(suite).run(eval_model, options.model_copy(update={"limit": 1, "lengths": (min(length, 512),)}))
    began = time.perf_counter()
    result = find_suite(suite).run(eval_model, options)
    seconds = time.perf_counter() - began
    return {"suite": name, "samples": len(result.samples), "seconds": seconds}


def compare_with_bare_loop(
    eval_model: EvalModel, name: str, length: int, new: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Time the bare loop before and after the suite, because clock rates drift; shares refer to the mean of both."""
    tokens = generation_tokens(eval_model.device) if new else BATCH_TOKENS.get(eval_model.device.type, 2**17)
    own = -(-arguments.samples // eval_model.ranks.count)
    rows = arguments.rows or max(1, min(own, tokens // length))
    time_bare_loop(
        eval_model, length, min(1, arguments.bare_batches), rows, new
    )  # warm-up: the allocator keeps its memory
    times = time_bare_loop(eval_model, length, arguments.bare_batches, rows, new)
    found = time_suite(eval_model, name, length, arguments.samples, rows, arguments.data_root)
    times += time_bare_loop(eval_model, length, arguments.bare_batches, rows, new)
    every = eval_model.ranks.gather(times)  # summed over processes for each batch
    rates = [sum(rows / seconds for seconds in together) for together in zip(*every)]
    mean = statistics.fmean(rates)
    error = statistics.stdev(rates) / len(rates) ** 0.5
    rate = found["samples"] / found["seconds"]
    found |= {
        "processes": eval_model.ranks.count,
        "length": length,
        "rows": rows,
        "new": new,
        "samples_per_second": rate,
    }
    return found | {"bare_samples_per_second": mean, "bare_error": error, "share": rate / mean}


def main() -> None:
    """Print one JSON line per suite and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="Shape of the model. Default: 1b.")
    parser.add_argument("--length", type=int, action="append", help="Prompt length. Repeatable. Default: 32768.")
    parser.add_argument("--samples", type=int, default=8, help="Number of prompts. Default: 8.")
    parser.add_argument("--suite", action="append", help="Suite, or suite:task. Repeatable.")
    parser.add_argument(
        "--new", type=int, action="append", help="Tokens that the bare loop generates, one value per suite."
    )
    parser.add_argument("--rows", type=int, help="Batch size of both. Default: that of --batch-size auto.")
    parser.add_argument(
        "--bare-batches", type=int, default=1, help="Batches of the bare loop before and after the suite. Default: 1."
    )
    parser.add_argument(
        "--alone", action="store_true", help="With several processes, also time the first one alone on its share."
    )
    parser.add_argument("--data-root", type=Path, help="Local mirror of data sets.")
    parser.add_argument("--device", help="Default: a GPU if there is one.")
    arguments = parser.parse_args()
    ranks = init_distributed(arguments.device)
    device = choose_device(local_device(ranks, arguments.device))
    lengths = arguments.length or [32768]
    eval_model = random_model(arguments.shape, device, max(lengths) + 1024, ranks)
    say = print if ranks.main else lambda *_, **__: None
    say(
        f"{eval_model.model.num_parameters():,} parameters, {device_name(device)}, torch {torch.__version__}",
        flush=True,
    )
    names = arguments.suite or ["needle:needle", "needle:needle-rank"]
    for length in lengths:
        for name, new in zip(names, (arguments.new or []) + [0] * len(names)):
            if arguments.alone and ranks.count > 1:
                if ranks.main:
                    share = argparse.Namespace(**{**vars(arguments), "samples": -(-arguments.samples // ranks.count)})
                    say(
                        _to_json(
                            compare_with_bare_loop(replace(eval_model, ranks=DistContext()), name, length, new, share)
                        ),
                        flush=True,
                    )
                ranks.broadcast_object(None)  # the others wait
            say(_to_json(compare_with_bare_loop(eval_model, name, length, new, arguments)), flush=True)


def _to_json(found: dict[str, Any]) -> str:
    return json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()})


if __name__ == "__main__":
    run_script(main)
