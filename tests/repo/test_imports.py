"""Modules of `surgery.modeling` that run while transformers or peft is imported can be the first of the package to be
imported.

A test over all modules of the package would take minutes.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The heavy libraries are imported once, without this package; each module is then imported in a fork of that process.
IMPORT_EACH = """
import importlib, os, sys
import torch, transformers
assert "surgery" not in sys.modules
failed = False
for name in sys.argv[1:]:
    if (child := os.fork()) == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    failed |= os.waitpid(child, 0)[1] != 0
sys.exit(failed)
"""


MODULES = ("attention", "lora", "quantization_config", "quantizer")


def test_each_module_can_be_imported_first() -> None:
    command = [sys.executable, "-c", IMPORT_EACH, *(f"surgery.modeling.{name}" for name in MODULES)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
