"""Laws of every structure, over the whole registry, which includes new ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from helpers.small import matrix_structures
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from surgery.core.errors import SurgeryError
from surgery.core.registry import validate_config
from surgery.modeling.modules import build_module
from surgery.structures import STRUCTURES, Metric, add_damping
from surgery.structures.base import StructureConfig, balance_factors, config_from_dict
from surgery.structures.btt import BTT, BTTLinear, btt_dense, btt_mvm, rows_in_order
from surgery.structures.kronecker import Kronecker
from surgery.structures.low_rank import LowRank, orthonormalize
from surgery.structures.metric import add_moment_, damp_output_gram
from surgery.structures.monarch import Monarch
from surgery.structures.pivoted_low_rank import maximal_volume_rows

NAMES = matrix_structures()
# Odd, prime, square, wide, tall, one row.
DIMS = st.sampled_from([(48, 64), (64, 48), (37, 53), (31, 16), (7, 120), (121, 11), (64, 64), (5, 5)])
LAWS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


METRICS = {
    "plain": lambda metric: Metric(),
    "inputs": lambda metric: Metric(metric.c_II),
    "both": lambda metric: Metric(metric.c_II, metric.g_OO),
    "diagonal": lambda metric: Metric(metric.c_II, metric.g_OO.diagonal().clone()),
}


def fit_config(name: str, out: int, in_: int, keep: float):
    """Return the default config fitted to keep * out * in_ parameters; None where the shape or the budget is
    refused.
    """
    config_type = STRUCTURES.config_type(name)
    try:
        return STRUCTURES[config_type].fit(config_type(), out, in_, keep * out * in_)
    except SurgeryError as error:  # the reason names the numbers and what to raise
        assert "Raise keep to" in str(error) or "would be a single number" in str(error)
        return None


def resolve_config(name: str, out: int, in_: int):
    """Return the default config resolved for an (out, in) matrix; None where the shape is refused."""
    config_type = STRUCTURES.config_type(name)
    try:
        return STRUCTURES[config_type].resolve(config_type(), out, in_)
    except SurgeryError as error:
        assert "would be a single number" in str(error)
        return None


def moments(out: int, in_: int, seed: int) -> tuple[torch.Tensor, Metric]:
    """Return a random weight (out, in) and a metric with correlated inputs and outputs."""
    torch.manual_seed(seed)
    mix_II = torch.randn(in_, in_) * torch.logspace(0, -1.5, in_)
    gram_OO = torch.randn(out, out)
    metric = Metric(add_damping(mix_II @ mix_II.mT / in_, 0.01), add_damping(gram_OO @ gram_OO.mT / out, 0.05))
    return torch.randn(out, in_), metric


def squared_norm_in_float64(matrix_OI: torch.Tensor, metric: Metric) -> float:
    """Return tr(G M C M^T)."""
    matrix = matrix_OI.double()
    right = matrix if metric.c_II is None else matrix @ metric.c_II.double()
    if metric.g_OO is None:
        return float((right * matrix).sum())
    gram = metric.g_OO.double()
    return float(((torch.diag(gram) if gram.dim() == 1 else gram) @ right * matrix).sum())


@pytest.mark.parametrize("name", NAMES)
@LAWS
@given(
    dims=DIMS, keep=st.sampled_from([0.3, 0.5, 0.8]), seed=st.integers(0, 99), rows=st.sampled_from([(), (1,), (3, 5)])
)
def test_forward_is_the_dense_product(name, dims, keep, seed, rows):
    config = fit_config(name, *dims, keep)
    assume(config is not None)
    weight, metric = moments(*dims, seed)
    linear = STRUCTURES[config].project(weight, config, metric).requires_grad_(False)
    linear.bias = torch.nn.Parameter(torch.randn(dims[0]), requires_grad=False)
    x = torch.randn(*rows, dims[1])
    expected = x.double() @ linear.dense().double().mT + linear.bias.double()
    assert linear(x).shape == (*rows, dims[0])
    assert torch.allclose(linear(x).double(), expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("name", NAMES)
@LAWS
@given(dims=DIMS, seed=st.integers(0, 99), how=st.sampled_from(sorted(METRICS)))
def test_exact_at_full_rank(name, dims, seed, how):
    weight, metric = moments(*dims, seed)
    metric = METRICS[how](metric)
    cls = STRUCTURES[STRUCTURES.config_type(name)]
    assume(resolve_config(name, *dims) is not None)
    config = cls.fit(replace(cls.config_type(), rank="full"), *dims, budget=0)
    assert Metric().relative_error(weight, cls.project(weight, config, metric).dense()) < 2e-6


# MLR and MLBTC have no closed form: their fits are descents, whose own laws are in test_mlr.py and test_mlbtc.py.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mlr", "mlbtc")])
@LAWS
@given(dims=DIMS, keep=st.sampled_from([0.4, 0.7]), seed=st.integers(0, 99))
def test_projecting_twice_changes_nothing(name, dims, keep, seed):
    config = fit_config(name, *dims, keep)
    assume(config is not None)
    weight, _ = moments(*dims, seed)
    once = STRUCTURES[config].project(weight, config).dense()
    assert Metric().relative_error(once, STRUCTURES[config].project(once, config).dense()) < 1e-3


@pytest.mark.parametrize("name", [name for name in NAMES if name != "monarch"])  # Monarch's grids are not nested
@LAWS
@given(dims=DIMS, seed=st.integers(0, 99))
def test_a_larger_rank_never_fits_worse(name, dims, seed):
    cls = STRUCTURES[STRUCTURES.config_type(name)]
    weight, _ = moments(*dims, seed)
    start = resolve_config(name, *dims)
    assume(start is not None)
    curve = cls.rank_error_curve(weight, start, Metric())
    errors = [Metric().relative_error(weight, cls.project(weight, config).dense()) for config, _ in curve]
    assert all(b <= a + 1e-5 for a, b in itertools.pairwise(errors))
    assert errors[-1] < 2e-6


@pytest.mark.parametrize("name", NAMES)
@LAWS
@given(dims=DIMS, seed=st.integers(0, 99))
def test_the_ladder_estimates_the_plain_error(name, dims, seed):
    """Without correlations the estimate is the error of the projection itself."""
    cls = STRUCTURES[STRUCTURES.config_type(name)]
    weight, _ = moments(*dims, seed)
    start = resolve_config(name, *dims)
    assume(start is not None)
    for config, square in cls.rank_error_curve(weight, start, Metric(), steps=4):
        left = weight - cls.project(weight, config).dense()
        assert float(left.square().sum()) == pytest.approx(square, rel=1e-2, abs=1e-3 * float(weight.square().sum()))


@pytest.mark.parametrize("name", NAMES)
@LAWS
@given(dims=DIMS, keep=st.sampled_from([0.4, 0.7]), seed=st.integers(0, 99))
def test_sweeps_never_hurt(name, dims, keep, seed):
    config = fit_config(name, *dims, keep)
    assume(config is not None)
    weight, metric = moments(*dims, seed)
    linear = STRUCTURES[config].project(weight, config, metric)
    for moment in (metric, Metric(metric.c_II)):
        for _ in range(3):
            before = moment.relative_error(weight, linear.dense())
            if not linear.sweep(weight, moment):
                break
            assert moment.relative_error(weight, linear.dense()) <= before + 1e-4


@pytest.mark.parametrize("name", NAMES)
@settings(LAWS, max_examples=10)
@given(dims=DIMS, keep=st.sampled_from([0.4, 0.7]), seed=st.integers(0, 99), how=st.sampled_from(sorted(METRICS)))
def test_a_sweep_returns_the_error_of_what_it_leaves(name, dims, keep, seed, how):
    """In the whole metric, tr(G (W - B) C (W - B)^T), evaluated apart in float64."""
    config = fit_config(name, *dims, keep)
    assume(config is not None)
    weight, metric = moments(*dims, seed)
    metric = METRICS[how](metric)
    linear = STRUCTURES[config].project(weight, config, metric)
    for _ in range(2):
        found = linear.sweep(weight, metric)
        if found is None:
            break
        whole = squared_norm_in_float64(weight, metric)
        assert found == pytest.approx(
            squared_norm_in_float64(weight - linear.dense().detach(), metric), rel=1e-3, abs=1e-6 * whole
        )


@pytest.mark.parametrize("order", ["contiguous", "strided"])
@pytest.mark.parametrize("dims", [(48, 64), (37, 53)])
def test_sweeps_of_btt_use_the_whole_of_g(dims, order):
    """Sweeps end in the minimum of the metric, where its gradients in both cores vanish, and not in that of blocks of
    G.
    """
    weight, metric = moments(*dims, 0)
    linear = BTTLinear.project(weight, BTT(blocks=(4, 3), rank=3, order=order), metric)
    for _ in range(400):
        linear.sweep(weight, metric)
    cores = [linear.weight.detach().requires_grad_(True), linear.right.detach().requires_grad_(True)]
    blocks = btt_dense(cores[1], cores[0])
    dense = rows_in_order(blocks, 4, order)[: dims[0], : dims[1]]
    gap = dense - weight
    grads = torch.autograd.grad((metric.apply(gap.detach()) * gap).sum(), cores)
    assert all(float(g.norm()) < 2e-2 * metric.squared_norm(weight) ** 0.5 for g in grads)


# Powers of two of the weight, C and G. Those of 1e-30 occur: the loss may hardly depend on a matrix.
UNITS = [(-40, 0, 0), (24, 0, 0), (0, 0, -100), (0, -60, 0), (-20, 0, -60), (0, 40, -80)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["both", "diagonal"])
def test_a_fit_does_not_depend_on_the_units(name, how):
    """In other units of the weight, of inputs and of the loss a fit is the same, and its error as much larger or
    smaller.
    """
    config = fit_config(name, 48, 64, 0.4)
    weight, metric = moments(48, 64, 0)
    metric = METRICS[how](metric)

    def fitted(of_w: int, of_c: int, of_g: int):
        moved, there = weight * 2.0**of_w, Metric(metric.c_II * 2.0**of_c, metric.g_OO * 2.0**of_g)
        linear = STRUCTURES[config].project(moved, config, there)
        for _ in range(2):
            left = linear.sweep(moved, there)
        start = STRUCTURES[config].resolve(type(config)(), 48, 64)
        curve = [error for _, error in STRUCTURES[config].rank_error_curve(moved, start, there, steps=3)]
        unit = 2.0 ** (2 * of_w + of_c + of_g)
        return linear, (linear.dense().detach() * 2.0**-of_w), [e / unit for e in [left or 0.0, *curve]]

    _, expected, errors = fitted(0, 0, 0)
    for units in UNITS:
        linear, found, scaled = fitted(*units)
        assert metric.relative_error(expected, found) < 1e-3, units
        assert scaled == pytest.approx(errors, rel=1e-3, abs=1e-6 * metric.squared_norm(weight)), units
        sizes = [float(core.detach().abs().max()) for core in linear.parameters()]
        if name != "pivoted_low_rank":  # whose right core is rows of the matrix
            assert max(sizes) < 1e3 * min(sizes), (units, sizes)


def test_balanced_factors_have_equal_norms_at_any_size():
    """Also where the squares of entries underflow; a factor of zeros leaves the other with a norm of about 1."""
    torch.manual_seed(0)
    left, right = torch.randn(8, 6), torch.randn(6, 10)
    left *= torch.tensor([1e15, 1e-25, 1.0, 1e15, 0.0, 0.0])
    right *= torch.tensor([1e-17, 1e-6, 1e-25, 0.0, 1e-20, 0.0])[:, None]
    one, other = balance_factors(left, right)
    assert torch.equal(one.double() @ other.double(), left.double() @ right.double())
    norms = [m.double().norm(dim=dim) for m, dim in ((one, 0), (other, 1))]
    assert ((norms[0] / norms[1])[:3].log2().abs() <= 1.01).all()
    assert norms[0][3].log2().abs() <= 0.51 and norms[1][4].log2().abs() <= 0.51
    assert all(bool(m.isfinite().all()) for m in (one, other))


@pytest.mark.parametrize("full", [True, False])
def test_errors_of_a_dead_matrix_cost_nothing(full):
    """A G of zeros, and a C of zeros, must not make a matrix dearer than those that matter."""
    weight, metric = moments(12, 20, 0)
    dead = damp_output_gram(torch.zeros(12, 12) if full else torch.zeros(12))
    silent = add_damping(torch.zeros(20, 20), 0.01)
    whole = metric.squared_norm(weight)
    for there in (Metric(metric.c_II, dead), Metric(silent, metric.g_OO), Metric(silent, dead)):
        assert 0 < there.squared_norm(weight) < 1e-9 * whole
        for name in NAMES:
            config = fit_config(name, 12, 20, 0.7)
            linear = STRUCTURES[config].project(weight, config, there)
            linear.sweep(weight, there)
            assert Metric().relative_error(weight, linear.dense().detach()) < 0.9, name


@pytest.mark.parametrize("name", NAMES)
@LAWS
@given(dims=DIMS, keep=st.floats(0.05, 1.0))
def test_a_budget_is_kept_and_counted_on_what_is_stored(name, dims, keep):
    config = fit_config(name, *dims, keep)
    assume(config is not None)
    cls = STRUCTURES[config]
    linear = cls(dims[1], dims[0], config, bias=False)
    stored = sum(t.numel() for t in linear.state_dict().values())
    assert stored == linear.cost().params == cls.params(config, *dims) <= keep * dims[0] * dims[1]
    bigger = replace(config, rank=config.rank + 1)
    if name != "monarch" and bigger.rank <= cls.full_rank(config, *dims):
        assert cls.params(bigger, *dims) > keep * dims[0] * dims[1]


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_is_bit_equal(name, tmp_path):
    from safetensors.torch import load_file, save_file

    config = fit_config(name, 48, 64, 0.5)
    linear = STRUCTURES[config].project(*[torch.randn(48, 64), config])
    save_file(linear.state_dict(), tmp_path / "a.safetensors")
    # The linear's own config, as tables store it: projection may fill in options, such as the ranks of levels.
    again = STRUCTURES[linear.config](64, 48, config_from_dict(linear.config.to_dict()), bias=False)
    again.load_state_dict(load_file(tmp_path / "a.safetensors"))
    x = torch.randn(3, 64)
    assert torch.equal(linear(x), again(x))


@pytest.mark.parametrize("name", NAMES)
def test_no_weight_looks_dense(name):
    """A library that does not know us must meet a shape that does not fit."""
    linear = STRUCTURES[(config := fit_config(name, 48, 64, 0.5))](64, 48, config)
    assert linear.weight.dim() >= 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", [(256, 256), (512, 128), (128, 512)])
def test_mup_initialisation_keeps_the_scale(name, dims):
    """Outputs of unit inputs have entries of about sqrt(min(1, out/in)), whatever the structure and its rank."""
    torch.manual_seed(0)
    config = fit_config(name, *dims, 0.5)
    linear = STRUCTURES[config](dims[1], dims[0], config, bias=False)
    rms = float(linear(torch.randn(512, dims[1])).square().mean().sqrt())
    assert 0.2 < rms / min(1.0, dims[0] / dims[1]) ** 0.5 < 2.5
    assert set(linear.mup()) == {name for name, p in linear.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_half_precision(name, dtype, tol):
    config = fit_config(name, 48, 64, 0.5)
    linear = STRUCTURES[config].project(torch.randn(48, 64), config)
    x = torch.randn(9, 64)
    expected = x @ linear.dense().mT
    found = linear.to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    assert float((found.float() - expected).norm() / expected.norm()) < tol


@pytest.mark.parametrize("name", NAMES)
def test_gradients_against_float64_differences(name):
    config = fit_config(name, 12, 18, 0.6)
    linear = STRUCTURES[config].project(torch.randn(12, 18), config).double()
    linear.requires_grad_(True)
    x = torch.randn(4, 18, dtype=torch.float64, requires_grad=True)
    cores = tuple(linear.parameters())
    names = [n for n, _ in linear.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(linear, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(run, (x, *cores))


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_graph_break(name):
    config = fit_config(name, 48, 64, 0.5)
    linear = STRUCTURES[config](64, 48, config)
    x = torch.randn(5, 64)
    torch.compiler.reset()  # what other tests compiled counts towards the limit of recompilations
    assert torch.allclose(torch.compile(linear, fullgraph=True, backend="aot_eager")(x), linear(x), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_exports_with_any_number_of_rows(name):
    """One exported program serves one row and many."""
    config = fit_config(name, 48, 64, 0.5)
    linear = STRUCTURES[config](64, 48, config)
    rows = torch.export.Dim("rows", min=1, max=4096)
    program = torch.export.export(linear, (torch.randn(7, 64),), dynamic_shapes=({0: rows},))
    for count in (1, 500):
        x = torch.randn(count, 64)
        assert torch.allclose(program.module()(x), linear(x), atol=1e-5)


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("N, c, d, b, a, s", [(64, 16, 64, 16, 64, 4), (63, 5, 7, 3, 11, 1), (1, 1, 9, 4, 2, 2)])
def test_btt_mvm(N, c, d, b, a, s, dtype, tol):
    x, right, left = (torch.randn(shape) for shape in ((N, c, d), (c, d, b, s), (b, c, s, a)))
    x, right, left = (t.to(dtype) for t in (x, right, left))
    blocks = torch.einsum("cdbs,bcsa->bacd", right.double(), left.double())
    expected = torch.einsum("bacd,ncd->nba", blocks, x.double())
    assert float((btt_mvm(x, right, left).double() - expected).norm() / expected.norm()) < tol


def test_low_rank_is_optimal_in_the_metric():
    """No gradient step lowers the two-sided error: the closed form is stationary, and beats plain SVD."""
    weight, metric = moments(24, 40, 0)
    config = LowRank(rank=6)
    linear = STRUCTURES[config].project(weight, config, metric)
    left = linear.weight.detach().clone().requires_grad_(True)
    right = linear.right.detach().clone().requires_grad_(True)
    gap = left[0] @ right - weight
    loss = (metric.apply(gap.detach()) * gap).sum()
    scale = metric.squared_norm(weight)
    assert all(float(g.norm()) < 1e-3 * scale for g in torch.autograd.grad(loss, (left, right)))
    plain = STRUCTURES[config].project(weight, config)
    assert metric.relative_error(weight, linear.dense()) < metric.relative_error(weight, plain.dense())


def test_als_reaches_the_stationary_point_of_each_core():
    """After sweeps with the full C, the gradients of left and right vanish."""
    weight, metric = moments(30, 42, 3)
    metric = Metric(metric.c_II)
    config = BTT(blocks=(3, 3), rank=3)
    linear = BTTLinear.project(weight, config, metric)
    for _ in range(300):
        linear.sweep(weight, metric)
    cores = [linear.weight.detach().requires_grad_(True), linear.right.detach().requires_grad_(True)]
    blocks = torch.einsum("cdbs,bcsa->bacd", cores[1], cores[0]).reshape(30, 42)
    gap = blocks - weight
    grads = torch.autograd.grad((metric.apply(gap.detach()) * gap).sum(), cores)
    assert all(float(g.norm()) < 2e-2 * metric.squared_norm(weight) ** 0.5 for g in grads)


def test_monarch_chooses_the_squarest_full_grid():
    config = STRUCTURES[Monarch].fit(Monarch(), 512, 512, 0.5 * 512 * 512)
    assert STRUCTURES[config].block_shape(config, 512, 512) == (4, 4)


@pytest.mark.parametrize("name", ["btt", "monarch", "kronecker"])
@pytest.mark.parametrize("blocks", ["sqrt", "budget", 4])
def test_a_checkpoint_s_table_has_grids_in_numbers(name, blocks):
    """Words that only a recipe may say end in a refusal, not in arithmetic with them."""
    entry = {"structure": name, "blocks": blocks, "rank": 1, "in_features": 32, "out_features": 32, "bias": False}
    with pytest.raises(SurgeryError):
        build_module(entry, device="meta", dtype=torch.float32)


def test_pivots_have_small_coefficients():
    torch.manual_seed(0)
    tall = torch.linalg.qr(torch.randn(200, 40))[0]
    pivots, coefficients = maximal_volume_rows(tall, bound=1.5)
    assert float(coefficients.abs().max()) <= 1.5 + 1e-4
    assert torch.allclose(coefficients @ tall[pivots], tall, atol=1e-5)
    assert len(set(pivots.tolist())) == 40


def test_kronecker_recovers_a_sum_of_products():
    torch.manual_seed(0)
    weight = sum(torch.kron(torch.randn(4, 6), torch.randn(3, 5)) for _ in range(3))
    config = Kronecker(blocks=(4, 6), rank=3)
    assert Metric().relative_error(weight, STRUCTURES[config].project(weight, config).dense()) < 1e-5


@pytest.mark.parametrize(
    "config, says",
    [
        (BTT(blocks=(0, 4), rank=1), "0 blocks along out; use 1 to 10"),
        (BTT(blocks=(4, 40), rank=1), "40 blocks along in; use 1 to 12"),
        (Monarch(rank=3), "rank must be 1 or full"),
        (LowRank(), "rank 1 already stores 22. Raise keep to 0.184"),
    ],
)
def test_refusals_name_the_numbers(config, says):
    with pytest.raises(SurgeryError, match=says.replace("(", r"\(")):
        STRUCTURES[config].fit(config, 10, 12, budget=5)


@pytest.mark.parametrize("data, says", [({"structure": "bt"}, "did you mean 'btt'"), ({"structure": "btt", "rnk": 3}, "no option 'rnk'; did you mean 'rank'")])  # fmt: skip
def test_unknown_words_are_refused_with_the_nearest(data, says):
    with pytest.raises(SurgeryError, match=says):
        config_from_dict(data)


@pytest.mark.parametrize("width", [1, 1023, 1024, 2049])
def test_a_moment_by_halves(width):
    rows = torch.randn(9, width)
    found = torch.ones(width, width)
    add_moment_(found, rows)
    assert torch.equal(found, found.mT) or width < 1024
    assert torch.allclose(found, 1 + rows.mT @ rows, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_orthonormal_columns_even_where_they_depend(rank):
    y = torch.randn(4, 20, rank) @ torch.randn(4, rank, 7)
    q = orthonormalize(y)
    assert torch.allclose(q.mT @ q, torch.eye(7).expand(4, 7, 7), atol=1e-5)
    assert torch.allclose(q @ (q.mT @ y), y, atol=1e-4)


def test_options_of_a_config_made_inside_a_function_are_trusted():
    """Its annotations name what no module has."""

    class Kind: ...

    @dataclass(frozen=True)
    class Local(StructureConfig):
        name: ClassVar[str] = "local"
        kind: Kind | None = None

    assert validate_config(Local, {"kind": 3}) == Local(kind=3)  # type: ignore[arg-type]
