"""Machine code of the kernels for a Hopper GPU, compiled on any machine: no read of unwritten registers
(kernels/ptxas.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from helpers.machine_code import unwritten_reads

from surgery.kernels import ptxas as assembler

CODE = Path(__file__).resolve().parents[1] / "helpers" / "machine_code.py"


def compile_kernels(folder, *names):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, str(CODE), *names],
        env=clean | {"TRITON_CACHE_DIR": str(folder)},
        cwd=CODE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *found, last = done.stdout.splitlines()
    return found, last


@pytest.mark.parametrize(
    ("names", "number"),
    [
        pytest.param(("mixing", "local", "levels"), 10, marks=pytest.mark.slow),
        pytest.param(("mlr", "window", "features", "quantized", "delta"), 20, marks=pytest.mark.slow),
        pytest.param(("pages",), 12, marks=pytest.mark.slow),
    ],
)
def test_kernels_read_what_was_written(names, number, tmp_path):
    assert assembler.nvidia_knobs() is not None
    found, last = compile_kernels(tmp_path, *names)
    assert found == [] and int(last.split()[0]) >= number


def test_what_ptxas_does_wrong_is_seen(tmp_path):
    found, last = compile_kernels(tmp_path, "two")
    assert bool(found) == last.endswith(assembler.BROKEN_VERSION), (found, last)


def test_reads_are_followed_along_every_way():
    code = """
        ISETP.NE.AND P0, PT, R1, RZ, PT ;
    @P0 BRA `(.L_x_0) ;
        ULDC.64 UR4, c[0x0][0x208] ;
    .L_x_0:
        LDG.E R2, desc[UR4][R2.64] ;
        UMOV UR8, 0x10 ;
        UIADD3 UR8, UR8, 0x20, URZ ;
        EXIT ;
        UMOV UR9, UR10 ;
    """
    assert unwritten_reads(code) == ["UR4 in LDG.E R2, desc[UR4][R2.64]"]


# -- which ptxas is taken --------------------------------------------------------------------------
class Tool(SimpleNamespace):
    @staticmethod
    def from_path(path):
        return Tool(path=path, version="12.9" if "good" in path else "13.0")


@pytest.fixture
def hopper(monkeypatch):
    """A machine with such a GPU, Triton's ptxas wrong, one for Blackwell beside it; what was taken."""
    taken = []
    own, beside = Tool(path="own", version="12.8"), Tool(path="beside", version="12.9")
    nvidia = SimpleNamespace(ptxas=own, ptxas_blackwell=beside)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: assembler.HOPPER)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(assembler, "nvidia_knobs", lambda: nvidia)
    monkeypatch.setattr(assembler, "set_ptxas", lambda _, path: taken.append(path))
    monkeypatch.setattr(assembler.shutil, "which", lambda _: None)
    for name in ("TRITON_PTXAS_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(nvidia=nvidia, taken=taken)


def test_the_one_beside_is_taken(hopper):
    assert assembler.use_sound_ptxas() and hopper.taken == ["beside"]


def test_a_right_one_stays(hopper):
    hopper.nvidia.ptxas.version = "12.4"
    assert assembler.use_sound_ptxas() and hopper.taken == []


def test_the_machine_s_own_where_triton_has_none(hopper, monkeypatch):
    """But none of a newer CUDA than torch's, whose driver need not load what it makes."""
    del hopper.nvidia.ptxas_blackwell
    monkeypatch.setenv("CUDA_HOME", "/good")
    assert assembler.use_sound_ptxas() and hopper.taken == ["/good/bin/ptxas"]


@pytest.mark.parametrize("named", [False, True])
def test_without_a_right_one_kernels_stay_off(hopper, monkeypatch, named):
    if named:
        monkeypatch.setenv("TRITON_PTXAS_PATH", "own")
    else:
        del hopper.nvidia.ptxas_blackwell
    with pytest.warns(UserWarning, match="ptxas 12.8, which compiles them wrongly"):
        assert not assembler.use_sound_ptxas()
    assert hopper.taken == []
