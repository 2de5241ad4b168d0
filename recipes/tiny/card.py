"""Model card of the embedded checkpoint: description, training, scores, limits."""

import re
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
{head_dim} dimensions, SwiGLU, tied embeddings, {layers} layers of width {hidden}), with its own byte-level BPE of
{vocabulary} tokens, trained from scratch at length {context}. It is a test model: large enough to tell stories
and to retrieve facts from its context, small enough to convert, heal and evaluate on a laptop. All of its
training text is generated: `eval/stories/__init__.py` (with `world.py` and `lexicon.py`) writes stories, facts,
lists and questions.

| file | content |
| --- | --- |
| `model.safetensors` | the weights, bfloat16, {bytes:,} bytes |
| `heldout.txt` | evaluation text, {heldout_tokens:,} tokens: from `eval/stories/__init__.py`, seed {heldout_seed} |
| `calibration.txt` | calibration text, {calibration_tokens:,} tokens: from the same generator, seed {calibration_seed} |
| `training_log.json` | all settings, the loss curve and the scores |

In these files, too, documents end with a line `<|endoftext|>`.

## Scores of this file
Perplexity on `heldout.txt`, in adjacent windows of {context} tokens: **{heldout_perplexity:.3f}**.

Needle retrieval: a sentence like "The code of the red lantern is 7 3." stands at one depth of a story (0: start,
1: end), among one to seven codes of other things (half of them share a word with the requested one). The prompt
ends with "Question: What is the code of the red lantern? Answer:". The table gives the percentage of {samples}
questions with both digits correct (chance: 1%), by length in tokens. Mean {mean:.2f}, lowest {worst:.1f}; the
standard error of a cell is at most {error:.1f}.

{table}

The scores are those of the bfloat16 weights, computed in float32.

## Training
Seed {seed}, {total:.0f} million tokens in {minutes:.1f} minutes on one {chip} (torch {torch}):

    {command}

AdamW (0.9, 0.95), peak learning rate {rate}, weight decay {decay}, initial standard deviation {init}. The first
{drill_share:.0%} of {steps:,} steps train retrieval, with {drill_tokens:,} tokens per step in rows of
{drill_context}, mostly lists of facts that are repeated or asked for. The other steps, with {batch_tokens:,}
tokens per step in rows of {context}, use the mixture of stories, needles and lists. Tokens of answers have weight
{answer_weight:g} in the loss. The batches depend on the seed only; GPU arithmetic makes runs differ in detail.
The table gives nats per token of the training text (`loss`) and of its answers, and needle scores on 24 questions
each:

{curve}

## Limits
It knows a few hundred words and no facts about the world. It was never trained beyond {context} tokens.
Questions have one wording; it retrieves codes of two digits and single words, nothing longer.
"""


def format_card(record: dict[str, Any]) -> str:
    """Return the card's text from training_log.json, with about sixteen points of the loss curve."""
    choices, log, needle = record["choices"], record["log"], record["needle"]
    # The log names the training script as it was named when it ran.
    command = re.sub(r"-m \S+", "-m surgery.recipes.tiny.train", record["made"]["command"])
    table = NeedleTable(*(needle[name] for name in ("lengths", "depths", "samples", "accuracy")))
    stride = max(1, len(log) // 16)
    shown = log[:-1:stride] + log[-1:]
    rows = [list(log[-1]), ["---"] * len(log[-1]), *(line.values() for line in shown)]
    return CARD.format(
        **choices,
        **record["scores"],
        **record["made"] | {"command": command},
        head_dim=choices["hidden"] // choices["heads"],
        table=table.markdown(),
        mean=100 * table.mean,
        worst=100 * table.worst,
        error=100 * max(map(max, table.errors)),
        curve="\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows),
        total=log[-1]["tokens"] / 1e6,
        minutes=log[-1]["seconds"] / 60,
    )
