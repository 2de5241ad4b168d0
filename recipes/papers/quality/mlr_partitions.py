"""Table of docs/measurements/quality.md: MLR matrices with blocks of neighboring rows and columns, of clustered ones, and
of random ones, at equal ranks.

python -m recipes.papers.quality.mlr_partitions SRC --calibration FILE [--layers 0 14 29] [--levels 3] [--keep 0.5]

Parshakova et al. 2023 ("Factor fitting, rank allocation, and partitioning in multilevel low rank matrices", section 5)
search for an order of rows and columns whose diagonal blocks hold much of the matrix. Here rows and columns of the
residual of level 1 are halved again and again:

    A[i,j] = (W - B_1)[i,j]^2 C[j,j]       B_1: the best low-rank matrix of level 1    C: second moment of the inputs
    start: the second singular vectors of D_r^(-1/2) A D_c^(-1/2), sorted (Dhillon 2001)
    then: rows, and columns, by the difference of their sums over both halves of the others, while the halves hold more

Errors are tr((W - B) C (W - B)^T) / tr(W C W^T), of fits by the same block descent as in a conversion.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.papers.script import run_script
from surgery.structures.low_rank import LowRank, LowRankLinear
from surgery.structures.metric import Metric, add_damping
from surgery.structures.mlr import MLR, MLRLinear, halved_ranks, rank_limits

ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
ROUNDS = 20  # of the exchange between both halves
ORDERS = ("contiguous", "clustered", "random")


def halve(a_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return orders of the rows and of the columns of a nonnegative matrix whose first and second halves hold much of it
    in the two diagonal blocks.
    """
    root_O, root_I = (a_OI.sum(dim).clamp_min(1e-30).rsqrt() for dim in (1, 0))
    u_OK, _, v_KI = torch.linalg.svd(root_O[:, None] * a_OI * root_I, full_matrices=False)
    rows, columns = (u_OK[:, 1] * root_O).argsort(), (v_KI[1] * root_I).argsort()
    held = -1.0
    for _ in range(ROUNDS):
        first, second = columns.tensor_split(2)
        new_rows = (a_OI[:, first].sum(1) - a_OI[:, second].sum(1)).argsort(descending=True)
        upper, lower = new_rows.tensor_split(2)
        new_columns = (a_OI[upper].sum(0) - a_OI[lower].sum(0)).argsort(descending=True)
        now = held_share(a_OI[new_rows][:, new_columns], 2)
        if now <= held:
            break
        rows, columns, held = new_rows, new_columns, now
    return rows, columns


def cluster(a_OI: Tensor, halvings: int) -> tuple[Tensor, Tensor]:
    """Return orders of the rows and of the columns, halved `halvings` times, for 2^halvings diagonal blocks."""
    rows, columns = halve(a_OI)
    if halvings > 1:
        parts = []
        for some_rows, some_columns in zip(rows.tensor_split(2), columns.tensor_split(2)):
            inner_rows, inner_columns = cluster(a_OI[some_rows][:, some_columns], halvings - 1)
            parts.append((some_rows[inner_rows], some_columns[inner_columns]))
        rows, columns = (torch.cat(some) for some in zip(*parts))
    return rows, columns


def held_share(a_OI: Tensor, blocks: int) -> float:
    """Return the share of a nonnegative matrix that its diagonal blocks hold."""
    pairs = zip(a_OI.tensor_split(blocks, 0), range(blocks))
    return float(sum(row.tensor_split(blocks, 1)[i].sum() for row, i in pairs) / a_OI.sum())


def relative_error(weight_OI: Tensor, approximate_OI: Tensor, moment_II: Tensor) -> float:
    """Return tr((W - B) C (W - B)^T) / tr(W C W^T)."""
    difference = weight_OI - approximate_OI
    return float(((difference @ moment_II) * difference).sum() / ((weight_OI @ moment_II) * weight_OI).sum())


@torch.no_grad()
def compare(weight_OI: Tensor, moment_II: Tensor, levels: int, keep: float) -> dict[str, Any]:
    """Return the errors of low rank and of MLR with blocks of each order, and the share that the smallest blocks hold."""
    out, in_ = weight_OI.shape
    ranks = halved_ranks(max(1, int(keep * out * in_ / (out + in_))), rank_limits(levels, out, in_))
    metric = Metric(moment_II)
    whole = LowRankLinear.project(weight_OI, LowRank(rank=sum(ranks)), metric).dense()
    level_1 = LowRankLinear.project(weight_OI, LowRank(rank=ranks[0]), metric).dense()
    a_OI = (weight_OI - level_1).square() * moment_II.diagonal()
    generator = torch.Generator().manual_seed(0)
    orders = {
        "contiguous": (torch.arange(out), torch.arange(in_)),
        "clustered": cluster(a_OI, levels - 1),
        "random": (torch.randperm(out, generator=generator), torch.randperm(in_, generator=generator)),
    }
    found: dict[str, Any] = {"ranks": list(ranks), "low_rank": relative_error(weight_OI, whole, moment_II)}
    for name, (rows, columns) in orders.items():
        ordered_OI, ordered_II = weight_OI[rows][:, columns], moment_II[columns][:, columns]
        fit = MLRLinear.project(ordered_OI, MLR(levels=levels, ranks=ranks), Metric(ordered_II)).dense()
        found[name] = relative_error(ordered_OI, fit, ordered_II)
        found[f"{name}_share"] = held_share(a_OI[rows][:, columns], 2 ** (levels - 1))
    return found


@torch.no_grad()
def input_moments(model: Any, ids_BT: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Return the damped second moment of the inputs of each linear."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def add(module: Any, inputs: tuple[Tensor]) -> None:
            x_NI = inputs[0].float().flatten(0, -2)
            found[name] = found.get(name, 0.0) + x_NI.mT @ x_NI

        return add

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    for row_T in ids_BT:
        model(row_T[None])
    for handle in handles:
        handle.remove()
    return {name: add_damping(moment_II / ids_BT.numel(), 1e-3) for name, moment_II in found.items()}


def main() -> None:
    """Print a line for each matrix, and the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Folder of a Llama checkpoint.")
    add("--calibration", type=Path, required=True, help="Calibration text.")
    add("--layers", type=int, nargs="+", default=[0], help="Layers whose linears are fitted. Default: 0.")
    add("--levels", type=int, default=3, help="Levels of the MLR matrices. Default: %(default)s.")
    add("--keep", type=float, default=0.5, help="Share of the parameters to keep. Default: %(default)s.")
    add("--tokens", type=int, default=4096, help="Tokens of calibration text, in rows of 512. Default: %(default)s.")
    add("--json", type=Path, help="Write the rows to this file.")
    arguments = parser.parse_args()
    if not arguments.calibration.is_file():
        parser.error(f"--calibration {arguments.calibration} is not a file. Give a text file in UTF-8.")
    if not (Path(arguments.source) / "config.json").is_file():
        parser.error(f"{arguments.source} has no config.json. Give the folder of a Llama checkpoint.")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(arguments.source, dtype=torch.float32, trust_remote_code=False)
    text = arguments.calibration.read_text(encoding="utf-8")[: 16 * arguments.tokens]
    ids = AutoTokenizer.from_pretrained(arguments.source, trust_remote_code=False)(text, return_tensors="pt").input_ids[
        0, : arguments.tokens
    ]
    length = min(512, len(ids))
    modules = {name for name, _ in model.named_modules()}
    names = [n for layer in arguments.layers for n in sorted(modules) if f".{layer}." in n and n.endswith(ROLES)]
    moments = input_moments(model, ids[: len(ids) // length * length].view(-1, length), names)
    rows = []
    for name in names:
        weight_OI = model.get_parameter(f"{name}.weight").detach()
        rows.append({"name": name, **compare(weight_OI, moments[name], arguments.levels, arguments.keep)})
        print(format_line(rows[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))
    keys = [key for key in rows[0] if key not in ("name", "ranks")]
    print(format_line({"name": f"mean of {len(rows)}", **{k: sum(row[k] for row in rows) / len(rows) for k in keys}}))


def format_line(row: dict[str, Any]) -> str:
    """Format a row as a line."""
    errors = ", ".join(f"{name} {row[name]:.4f} (blocks hold {row[f'{name}_share']:.1%})" for name in ORDERS)
    return f"{row['name']}: low rank {row['low_rank']:.4f}, {errors}"


if __name__ == "__main__":
    run_script(main)
