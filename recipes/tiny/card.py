"""Model card of the embedded checkpoint: description, training, scores, limits."""

from typing import Any

from surgery.eval.suites.needle import NeedleTable

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny: a small Llama that retrieves

{parameters:,} parameters (`LlamaForCausalLM`: RoPE, {heads} query and {kv_heads} key/value heads of
{head_dim} dimensions, SwiGLU, tied embeddings, {layers} layers of width {hidden}), a byte-level BPE of
{vocabulary} tokens of its own, trained from scratch to length {context}. It exists to be operated on: large
enough to tell stories and to find what was said in its context, small enough to convert, heal and measure on
a laptop. No text from elsewhere went into it: `eval/stories/__init__.py` (with `world.py` and `lexicon.py`)
invents stories, facts, lists and questions.

| file | what it is |
| --- | --- |
| `model.safetensors` | the weights, bfloat16, {bytes:,} bytes |
| `heldout.txt` | text to measure on, {heldout_tokens:,} tokens: of `eval/stories/__init__.py`, seed {heldout_seed} |
| `calibration.txt` | text to calibrate on, {calibration_tokens:,} tokens: likewise, seed {calibration_seed} |
| `training_log.json` | every choice, the loss curve and the scores |

Documents end with a line `<|endoftext|>`, in these files too.

## Scores of this file
Perplexity on `heldout.txt`, windows of {context} tokens side by side: **{heldout_perplexity:.3f}**.

Needles: "The code of the red lantern is 7 3." said at one depth of a story (0 its beginning, 1 its end),
among one to seven codes of other things (half of them share a word with the one asked for), and at the end
"Question: What is the code of the red lantern? Answer:". Percent of {samples} questions answered exactly (two
digits: chance is 1%), by length in tokens. Mean {mean:.2f}, lowest {worst:.1f};
the standard error of a cell is at most {error:.1f}.

{table}

Scores are of the bfloat16 weights, computed in float32.

## Training
Seed {seed}, {total:.0f} million tokens in {minutes:.1f} minutes on one {chip} (torch {torch}):

    {command}

AdamW (0.9, 0.95), peak rate {rate}, weight decay {decay}, initial weights of deviation {init}. The first
{drill_share:.0%} of {steps:,} steps drill retrieval, {drill_tokens:,} tokens a step in rows of
{drill_context}, mostly lists of facts said again or asked for; the rest, {batch_tokens:,} tokens a step in
rows of {context}, is the mixture of stories, needles and lists. Tokens of answers weigh {answer_weight:g}
times in the loss. The batches depend on the seed alone; GPU arithmetic makes another run differ in detail.
Nats per token of the training text (`loss`) and of its answers alone, and quick needle scores on 24 questions
each:

{curve}

## Limits
It knows a few hundred words and nothing of the world. It was never trained beyond {context} tokens. Questions
come in one wording; it retrieves codes of two digits and single words, nothing longer.
"""


def format_card(record: dict[str, Any]) -> str:
    """Return the card's text from training_log.json, with about sixteen points of the loss curve."""
    choices, log, needle = record["choices"], record["log"], record["needle"]
    table = NeedleTable(*(needle[name] for name in ("lengths", "depths", "samples", "accuracy")))
    stride = max(1, len(log) // 16)
    shown = log[:-1:stride] + log[-1:]
    rows = [list(log[-1]), ["---"] * len(log[-1]), *(line.values() for line in shown)]
    return CARD.format(
        **choices,
        **record["scores"],
        **record["made"],
        head_dim=choices["hidden"] // choices["heads"],
        table=table.markdown(),
        mean=100 * table.mean,
        worst=100 * table.worst,
        error=100 * max(map(max, table.errors)),
        curve="\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows),
        total=log[-1]["tokens"] / 1e6,
        minutes=log[-1]["seconds"] / 60,
    )
