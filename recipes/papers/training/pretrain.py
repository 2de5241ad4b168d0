"""`surgery pretrain` with the stages and tasks on continuous values of values.py.

python -m recipes.papers.training.pretrain --recipe RECIPE --out OUT

A recipe of in-context linear regression:

    model: {model_type: llama, hidden_size: 64, intermediate_size: 256, num_hidden_layers: 4, num_attention_heads: 8,
      num_key_value_heads: 8}
    data: {generated: {task: regression, dims: 8, grow: 460800}}
    common: {length: 32, batch: 256, rows: 256, optimiser: {base_width: 64}}
    stages: [{kind: regress, inputs: 8, tokens: 245M, rate: 3e-3}]
"""

from __future__ import annotations

import sys

from recipes.papers.script import run_script
from recipes.papers.training import values  # noqa: F401  the import registers them
from surgery.cli.main import main

if __name__ == "__main__":
    run_script(lambda: main(["pretrain", *sys.argv[1:]]))
