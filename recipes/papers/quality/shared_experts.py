"""Table of docs/measurements/quality.md: experts of a layer with a basis each, or with one basis for all, at equal
parameters.

python -m recipes.papers.quality.shared_experts SRC --calibration FILE --text FILE [--keep 0.5] [--json OUT]

    each      W_e ~ L_e R_e        low rank, the best in the metric C_e
    shared    W_e ~ L_e R          gate and up, which read one input: alternating least squares over L_e and R
              W_e ~ L R_e          down, which adds to one output: closed form
    input     gate and up as in `shared`, down as in `each`

All minimize sum_e <(W_e - B_e) C_e, W_e - B_e> with C_e = sum w^2 x x^T over the calibration rows that the original's
router sends to expert e, w the routing weight (surgery.calibration.routing). Nothing else is replaced. E experts of O x
I matrices with rank r store E r (O + I) numbers with a basis each, and E r O + r I or r O + E r I with a shared one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.papers.script import run_script
from surgery.architectures.experts import RoutedExperts, split_experts
from surgery.calibration.data import document_stream, text_windows
from surgery.calibration.routing import RoutedTokens, routed_arguments
from surgery.core.device import choose_device
from surgery.eval.run import load
from surgery.eval.suite import EvalOptions
from surgery.eval.suites import perplexity as ppl
from surgery.structures import Metric
from surgery.structures.low_rank import leading_eigenvectors, low_rank_factors
from surgery.structures.metric import damp_
from surgery.structures.shared_basis import shared_factors, sum_of

KINDS = ("each", "shared", "input")
BATCH = 16  # windows in one forward


# -- statistics ------------------------------------------------------------------------------------------------
@torch.no_grad()
def expert_moments(model: Any, windows_NT: Tensor) -> dict[str, list[tuple[Tensor, Tensor, int]]]:
    """Return, by path of the experts, (C of gate and up (D, D), C of down (F, F), calibration rows) of each expert.

    Sums, not means.
    """
    found: dict[str, list[tuple[Tensor, Tensor, int]]] = {}

    def record(path: str) -> Any:
        def hook(experts: RoutedExperts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x_ND, index_Nk, weight_Nk = routed_arguments(args, kwargs)
            tokens = RoutedTokens(x_ND, x_ND, index_Nk, weight_Nk)
            sums = found.setdefault(path, [])
            for number in range(experts.num_experts):
                x_MD, _, weight_M1 = tokens.rows_of(number)
                inner_MF = experts.expert(number).inner(x_MD, experts.gating) * weight_M1
                x_MD = x_MD * weight_M1
                c_DD, c_FF = x_MD.mT @ x_MD, inner_MF.mT @ inner_MF
                if number < len(sums):
                    before = sums[number]
                    sums[number] = (before[0] + c_DD, before[1] + c_FF, before[2] + len(x_MD))
                else:
                    sums.append((c_DD, c_FF, len(x_MD)))

        return hook

    routed = [(path, module) for path, module in model.named_modules() if isinstance(module, RoutedExperts)]
    handles = [module.register_forward_pre_hook(record(path), with_kwargs=True) for path, module in routed]
    for rows in windows_NT.split(BATCH):
        model(rows.to(model.device))
    for handle in handles:
        handle.remove()
    return found


# -- fits ------------------------------------------------------------------------------------------------------
def each_low_rank(weights: Sequence[Tensor], moments: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return B_e (O, I) of the given rank with a basis of its own for each expert, the optimum."""
    fits = (low_rank_factors(w_OI, rank, Metric(c_II)) for w_OI, c_II in zip(weights, moments))
    return [left_OR @ right_RI for left_OR, right_RI in fits]


def shared_left(weights: Sequence[Tensor], moments: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return B_e = L L^T W_e, the optimum with one left basis: L are the leading eigenvectors of sum_e W_e C_e
    W_e^T.
    """
    basis_OR = leading_eigenvectors(sum_of(w_OI @ c_II @ w_OI.mT for w_OI, c_II in zip(weights, moments)), rank)
    return [basis_OR @ (basis_OR.mT @ w_OI) for w_OI in weights]


def shared_right(weights: Sequence[Tensor], moments: Sequence[Tensor], rank: int, sweeps: int = 10) -> list[Tensor]:
    """Return B_e = L_e R after `sweeps` sweeps of alternating least squares, none of which increases the error
    (surgery.structures.shared_basis).
    """
    metrics = [Metric(c_II) for c_II in moments]
    *_, (lefts, right_RI) = shared_factors(weights, metrics, [1.0] * len(metrics), rank, sweeps, min_gain=0.0)
    return [left_OR @ right_RI for left_OR in lefts]


def squared_error(weights: Sequence[Tensor], moments: Sequence[Tensor], fits: Sequence[Tensor]) -> float:
    """Return sum_e <(W_e - B_e) C_e, W_e - B_e>."""
    gaps = ((w_OI - b_OI, c_II) for w_OI, b_OI, c_II in zip(weights, fits, moments))
    return float(sum((((gap_OI @ c_II) * gap_OI).sum() for gap_OI, c_II in gaps), torch.zeros(())))


def rank_of(kind: str, down: bool, experts: int, shape: tuple[int, int], keep: float) -> tuple[int, int]:
    """Return (the largest rank whose numbers are at most `keep` of the matrices', how many numbers that is)."""
    out, in_ = shape
    one = experts * (out + in_) if kind == "each" else out + experts * in_ if down else experts * out + in_
    rank = int(min(out, in_, keep * experts * out * in_ // one))
    return rank, rank * one


# -- the table ---------------------------------------------------------------------------------------------------
@torch.no_grad()
def replace_experts(model: Any, moments: Any, kind: str, keep: float, damping: float = 0.01) -> dict[str, Any]:
    """Replace the weights of all experts by their fits, in place.

    Return stored numbers, ranks, and the relative error of each role.
    """
    stored, ranks, lost = 0, {}, {"gate": [0.0, 0.0], "up": [0.0, 0.0], "down": [0.0, 0.0]}
    for path, sums in moments.items():
        experts: Any = model.get_submodule(path)
        for role in lost:
            name, down = getattr(experts.names, role), role == "down"
            linears = [experts.expert(number).get_submodule(name) for number in range(experts.num_experts)]
            weights = [linear.weight.float() for linear in linears]
            metrics = [(c_FF if down else c_DD).clone() for c_DD, c_FF, _ in sums]
            for c_II in metrics:
                damp_(c_II, damping)
            bases = "each" if kind == "each" or (down and kind == "input") else "shared"
            rank, numbers = rank_of(bases, down, len(linears), tuple(weights[0].shape), keep)
            fit = each_low_rank if bases == "each" else shared_left if down else shared_right
            fits = fit(weights, metrics, rank)
            lost[role][0] += squared_error(weights, metrics, fits)
            lost[role][1] += squared_error(weights, metrics, [torch.zeros_like(w_OI) for w_OI in weights])
            stored, ranks[role] = stored + numbers, rank
            for linear, b_OI in zip(linears, fits):
                linear.weight.copy_(b_OI)
    return {
        "numbers": stored,
        "ranks": ranks,
        "errors": {role: (gap / all_) ** 0.5 for role, (gap, all_) in lost.items()},
    }


def load_split(source: str, device: torch.device) -> tuple[Any, Any]:
    """Return (the model with its experts as linears, in float32, the tokenizer)."""
    model, tokenizer = load(source, device, "float32", False)
    split_experts(model)
    return model.float().eval(), tokenizer


def main() -> None:
    """Print the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", help="Checkpoint of a mixture of experts.")
    add("--calibration", required=True, help="Calibration text.")
    add("--text", required=True, help="Text to score.")
    add(
        "--keep",
        type=float,
        action="append",
        help="Share of the experts' parameters; may be repeated. Default: 0.75, 0.5 and 0.25.",
    )
    add("--tokens", type=int, default=32768, help="Tokens to calibrate on, and to score. Default: %(default)s.")
    add("--length", type=int, default=128, help="Length of the windows in tokens. Default: %(default)s.")
    add("--device", help="Compute on this device. Default: a GPU if there is one.")
    add("--json", type=Path, help="Write the rows to this file.")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    options = EvalOptions(text=arguments.text, tokens=arguments.tokens, length=arguments.length)
    model, tokenizer = load_split(arguments.source, device)
    stream = document_stream(arguments.calibration)
    windows_NT = text_windows(stream, tokenizer, arguments.tokens, arguments.length, arguments.calibration)
    moments = expert_moments(model, windows_NT)
    counts = {path: [rows for *_, rows in sums] for path, sums in moments.items()}
    base = ppl.measure(model, tokenizer, options)
    found: list[dict[str, Any]] = [{"kind": "original", "rows": counts, **ppl.summarize(base, base)}]
    print(f"calibration rows of an expert: {min(map(min, counts.values())):,} to {max(map(max, counts.values())):,}")
    print("| experts kept | bases | ranks of gate, up, down | relative errors | perplexity | ratio to the original |")
    print("| --- " * 6 + "|")
    print(f"| all | original | | | {found[0]['perplexity']:.4g} ± {found[0]['se']:.2g} | |", flush=True)
    for keep in arguments.keep or [0.75, 0.5, 0.25]:
        for kind in KINDS:
            model, tokenizer = load_split(arguments.source, device)
            row = {"keep": keep, "kind": kind, **replace_experts(model, moments, kind, keep)}
            found.append({**row, **ppl.summarize(ppl.measure(model, tokenizer, options), base)})
            print(format_row(found[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def format_row(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    ranks = ", ".join(str(rank) for rank in row["ranks"].values())
    errors = ", ".join(f"{error:.3f}" for error in row["errors"].values())
    perplexity = f"{row['perplexity']:.4g} ± {row['se']:.2g}"
    return (
        f"| {row['keep']:.0%} | {row['kind']} | {ranks} | {errors} | {perplexity} | "
        f"{ppl.format_interval(row['ratio'])} |"
    )


if __name__ == "__main__":
    run_script(main)
