"""Matrices that cannot be factored, or only by a fallback: a clear error or a correct result."""

from __future__ import annotations

import ast
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small import make_recipe, tiny_inputs
from safetensors.torch import load_file, save_file

from surgery.conversion.convert import convert
from surgery.conversion.fit import Candidate, fit_result
from surgery.core.errors import NumericalError, SurgeryError, naming
from surgery.core.files import os_error_number
from surgery.structures import linalg
from surgery.structures.metric import spd_factor

ROOT = Path(__file__).resolve().parents[2]
FACTORING = {
    "eig",
    "eigh",
    "eigvalsh",
    "svd",
    "svdvals",
    "qr",
    "cholesky",
    "cholesky_ex",
    "lu",
    "lu_factor",
    "solve",
    "inv",
}
FACTORING |= {"solve_triangular", "cholesky_solve", "lstsq", "pinv", "inverse"}
# The first call on a GPU, inside a try; and steps of a mixer's forward, which are differentiated and compiled.
DIRECT = {("surgery/core/device.py", "eigh")}
DIRECT |= {(f"surgery/mixers/masks/{name}.py", "solve_triangular") for name in ("delta_rule", "channel_gates")}


def test_2_7_every_factorisation_goes_through_one_helper():
    found = set()
    for path in sorted((ROOT / "surgery").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(f".{name}" in text for name in FACTORING) else ():
            if (
                isinstance(node, ast.Attribute)
                and node.attr in FACTORING
                and ast.unparse(node.value).startswith("torch")
            ):
                found.add((path.relative_to(ROOT).as_posix(), node.attr))
    assert {each for each in found if each[0] != "surgery/structures/linalg.py"} == DIRECT


# -- falling back ------------------------------------------------------------------------------------------
def spd(*batch: int, n: int = 5) -> torch.Tensor:
    x = torch.randn(*batch, n, 2 * n, generator=torch.Generator().manual_seed(0))
    return x @ x.mT


def rhs(*batch: int) -> torch.Tensor:
    return torch.randn(*batch, 5, 3, generator=torch.Generator().manual_seed(1))


CALLS = {
    "eigh": lambda: linalg.eigh(spd(2, 3)),
    "eigvalsh": lambda: linalg.eigvalsh(spd(4)),
    "svd": lambda: linalg.svd(rhs(4), full_matrices=False),
    "qr": lambda: linalg.qr(rhs(2, 2)),
    "cholesky_ex": lambda: linalg.cholesky_ex(spd(4)),
    "lu_factor": lambda: linalg.lu_factor(rhs(4)),
    "solve": lambda: linalg.solve(spd(4), rhs()),
    "solve_triangular": lambda: linalg.solve_triangular(spd(4).tril(), rhs(2, 4), upper=False),
    "cholesky_solve": lambda: linalg.cholesky_solve(rhs(4), spd(4).tril()),
}


def parts_of(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("works", ["one at a time", "float64"])
def test_2_7_a_failing_batched_solver_is_gone_round(monkeypatch, name, works):
    """As cuSOLVER fails on a crowded GPU: the same numbers, in the same dtype, and one warning."""
    expected = parts_of(CALLS[name]())
    home = torch if name == "cholesky_solve" else torch.linalg
    real = getattr(home, name)

    def fails(*given, **how):
        wide = any(tensor.dim() > 2 for tensor in given)
        if wide if works == "one at a time" else given[0].dtype != torch.float64:
            raise RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnXsyevBatched`")
        return real(*given, **how)

    monkeypatch.setattr(home, name, fails)
    monkeypatch.setattr(linalg, "_warned", set())
    monkeypatch.setattr(linalg, "_too_many", {})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = parts_of(CALLS[name]())
        CALLS[name]()
    assert (
        len(said) == 1 and "CUSOLVER_STATUS_INTERNAL_ERROR" in str(said[0].message) and "slower" in str(said[0].message)
    )
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a.abs(), b.abs(), rtol=1e-3, atol=1e-4)  # vectors are known up to a sign


def test_a_batch_that_is_too_large_is_computed_in_few_parts(monkeypatch):
    """98,304 matrices of 2 x 2 are more than cuSOLVER's batched solver takes; one at a time they took minutes."""
    matrices, real, sizes = spd(5, 7, n=2), torch.linalg.eigvalsh, []
    expected = real(matrices)

    def fails(matrix):
        sizes.append(matrix.shape[:-2].numel())
        if sizes[-1] > 10:
            raise RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR")
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigvalsh", fails)
    monkeypatch.setattr(linalg, "_warned", set())
    monkeypatch.setattr(linalg, "_too_many", {})
    with pytest.warns(RuntimeWarning, match="computed in parts of the batch"):
        torch.testing.assert_close(linalg.eigvalsh(matrices), expected)
    assert sizes == [35, 18, 9, 9, 17, 9, 8]
    sizes.clear()
    torch.testing.assert_close(linalg.eigvalsh(matrices), expected)
    assert sizes == [18, 9, 9, 17, 9, 8]  # the whole batch is not tried again


def test_2_7_what_nobody_can_factor_is_said():
    with pytest.raises(NumericalError, match=r"eigh of a matrix of shape \(4, 4\): the matrix holds NaN or Inf"):
        linalg.eigh(torch.full((4, 4), float("inf")))
    with pytest.raises(NumericalError, match=r"solve of a matrix of shape .* is singular"):
        linalg.solve(torch.zeros(4, 4), torch.ones(4, 1))
    with pytest.raises(NumericalError, match="second moment is not positive semidefinite"):
        spd_factor(torch.full((4, 4), float("nan")))


@pytest.mark.parametrize("code", [13, 28, 30])
def test_2_7_a_solver_s_error_code_is_not_the_disk_s(code):
    """`error code: 30` of eigh was told as a read-only file system, 28 would have been a full disk."""
    text = (
        "linalg.eigh: The algorithm failed to converge because the input matrix is ill-conditioned (error code: "
        f"{code})."
    )
    assert os_error_number(torch.linalg.LinAlgError(text)) is None
    assert os_error_number(RuntimeError(f'IoError(Os {{ code: {code}, kind: StorageFull, message: "" }})')) == code


# -- conversions -------------------------------------------------------------------------------------------
UP = "model.layers.0.mlp.up_proj"
STRUCTURES = (
    "low_rank",
    "btt",
    "monarch",
    "kronecker",
    "pivoted_low_rank",
    "mlr",
    "mlbtc",
    "tensor_train",
    "block_tensor_train",
)


@pytest.fixture
def scaled_checkpoint(checkpoints, tmp_path):
    """changed(tensor, factor) -> a checkpoint with that tensor scaled."""

    def make(name: str, factor: float) -> str:
        folder = shutil.copytree(checkpoints("llama"), tmp_path / "source")
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = tensors[name] * factor
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return make


def text(tmp_path) -> str:
    save_file(tiny_inputs("llama", 4), tmp_path / "inputs.safetensors")
    return str(tmp_path / "inputs.safetensors")


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_2_7_weights_of_1e30_are_named(scaled_checkpoint, tmp_path, structure, calibrated):
    calibration = {"calibration": text(tmp_path)} if calibrated else {}
    recipe = make_recipe(structure=structure, keep=0.5, **calibration)
    with pytest.raises(SurgeryError, match=rf"{UP} holds values up to .*e\+\d\d; .*structure: dense"):
        convert(scaled_checkpoint(f"{UP}.weight", 1e30), recipe, tmp_path / "out")


def test_2_7_the_advice_given_there_works(scaled_checkpoint, tmp_path):
    recipe = make_recipe(structure="low_rank", keep=0.5, rules=[{"match": UP, "structure": "dense"}])
    report = convert(scaled_checkpoint(f"{UP}.weight", 1e30), recipe, tmp_path / "out")
    assert UP not in {record["name"] for record in report["modules"]}


def test_2_7_activations_that_overflow_are_named(scaled_checkpoint, tmp_path):
    recipe = make_recipe(
        structure="low_rank", keep=0.5, curvature="none", allocate="uniform", calibration=text(tmp_path)
    )
    with pytest.raises(SurgeryError, match=r"the input of model\.layers\.0\.self_attn.q_proj.*overflows float32"):
        convert(scaled_checkpoint("model.layers.0.input_layernorm.weight", 1e25), recipe, tmp_path / "out")


def test_2_7_nan_is_named_by_tensor(scaled_checkpoint, tmp_path):
    with pytest.raises(SurgeryError, match=rf"tensor '{UP}.weight' in model.safetensors holds .* NaN or Inf"):
        convert(
            scaled_checkpoint(f"{UP}.weight", float("nan")),
            make_recipe(structure="low_rank", keep=0.5),
            tmp_path / "out",
        )


def test_2_7_a_fit_beyond_the_stored_dtype():
    """Float16 ends at 65,504: a refitted matrix beyond it was written as Inf."""
    cut: Any = SimpleNamespace(name=UP, linear=SimpleNamespace(path=UP))
    best = Candidate(None, torch.ones(2, 2), torch.full((2, 2), 1e5), 0.0, 0.0, True)
    with (
        pytest.raises(SurgeryError, match=rf"{UP}: its fit holds NaN or Inf in float16 \(numbers up to 6.6e\+04\)"),
        naming(UP),
    ):
        fit_result(cut, best, torch.float16, 0.0)
