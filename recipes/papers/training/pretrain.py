"""`surgery pretrain` with the stages and tasks on continuous values of values.py.

python -m recipes.papers.training.pretrain --recipe RECIPE --out OUT
"""

from __future__ import annotations

import sys

from recipes.papers.script import run_script
from recipes.papers.training import values  # noqa: F401  the import registers them
from surgery.cli.main import main

if __name__ == "__main__":
    run_script(lambda: main(["pretrain", *sys.argv[1:]]))
