"""Fixtures shared by all tests: tiny checkpoints made once per session, and the location of real ones."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from helpers.small import make_recipe, tiny_config, tiny_inputs
from helpers.small_training import btt, mixed, student, texts, without_curves, words  # noqa: F401  fixtures: here they are made once for all files
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file

# The same examples in every run, and no limits of time. Other examples: pytest --hypothesis-profile=default.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read as kernels are imported: here they run on the CPU

# transformers copies the code of checkpoints here by the name of their folder. Each test process has a place of its
# own: two that load folders of one name at the same time would take each other's code.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="surgery-tests-modules-")  # read as transformers is imported
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

# torch makes its threads anew in a forked process when they are first asked for; where several ask at once, as they do
# that load a checkpoint's weights, all but one find none ("Invalid thread pool!").
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))

# A file that was written survives the end of a process without this, and no test ends the machine. Thousands of waits for
# the disk take minutes.
os.fsync = lambda _: None

SHARED = Path(__file__).resolve().parents[2] / "shared"


# Collections of garbage traverse, over and over, the hundreds of thousands of objects that imports, syntax trees and compilers keep:
# a sixth of the time of collecting the tests, a twentieth of running them. They come later here.
gc.disable()


def pytest_collection_finish() -> None:
    """Exempt everything imported so far from garbage collection, which would traverse it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def seed_all(name: str) -> None:
    """Seed the global generators of torch, NumPy and Python with a number made of `name`."""
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    """Give every fixture random numbers of its own, whichever tests ran before in this process."""
    seed_all(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Give every test random numbers of its own: which tests ran before in this process differs from run to run."""
    seed_all(item.nodeid)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """checkpoints(family) -> folder of a tiny random checkpoint, made once; weights are larger than usual, so that
    layers matter.
    """
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            torch.manual_seed(0)
            cls, config = tiny_config(family)
            model = cls(config)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(
                            (2.0 if family.startswith("t5") else 4.0)
                            if "embed" not in name and "shared" not in name
                            else 20.0
                        )
                    else:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            inputs = tiny_inputs(family, 24)
            save_file(inputs, folder.parent / f"{folder.name}-calibration.safetensors")
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(scope="session")
def calibration(checkpoints):
    """calibration(family) -> file of prepared model inputs."""
    return lambda family: checkpoints(family).parent / f"{checkpoints(family).name}-calibration.safetensors"


# Structures by role, and fused linears are split. OTHERS: the remaining structures, in the first layer.
MIXED = {
    "structure": "btt",
    "blocks": [2, 2],
    "fused": "split",
    "rules": [
        {"match": "attention.value", "structure": "low_rank"},
        {"match": "attention.output", "structure": "kronecker"},
        {"match": "mlp.up", "structure": "monarch"},
        {"match": "mlp.down", "structure": "pivoted_low_rank"},
    ],
}
OTHERS = [
    {"match": "attention.query", "layers": "0", "structure": "mlr"},
    {"match": "attention.key", "layers": "0", "structure": "tensor_train"},
    {"match": "attention.value", "layers": "0", "structure": "block_tensor_train"},
    {"match": "attention.output", "layers": "0", "structure": "mlbtc", "levels": [1, 2], "ranks": [3, 2]},
]


@pytest.fixture(scope="session")
def converted(checkpoints, tmp_path_factory):
    """converted(family) -> folder of its checkpoint with half of the parameters, made once; must not be modified."""
    from surgery.conversion.convert import convert

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            out = tmp_path_factory.mktemp("converted") / family
            convert(str(checkpoints(family)), make_recipe(**{**MIXED, "rules": [*MIXED["rules"], *OTHERS]}), out)
            made[family] = out
        return made[family]

    return make


@pytest.fixture
def shared() -> Path:
    """Folder with real checkpoints; skips the test without it."""
    if not (SHARED / "models").is_dir():
        pytest.skip(f"{SHARED} with real checkpoints is not here")
    return SHARED


@pytest.fixture
def loops_of_tensors(monkeypatch):
    """Let Triton's interpreter run kernel loops whose bounds are tensors."""
    from helpers.kernel_rows import patch_tensor_loops

    patch_tensor_loops(monkeypatch)
