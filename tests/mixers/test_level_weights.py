"""Forms of lambda and matrix-valued Lambda of log-linear attention: the equations token by token in float64, and the
mixer's laws.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.conversion.mixer_init.linear import set_term_weights, single_term_copies
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerInputs
from surgery.mixers.linear import LinearMixer, l2_normalize
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.masks.base import MASKS
from surgery.mixers.masks.level_weights import FORMS, LevelMatrices, invert_lambdas
from surgery.mixers.masks.log_linear import Hierarchical
from surgery.publish.speed_notes import speed_notes
from surgery.publish.summary import describe_mixer, mixer_notes

SHAPE = AttentionShape(dim=12, heads=4, groups=2, key=6, value=5, scaling=6**-0.5, rotary=6)
MATRICES = ("diagonal", "static", "low_rank")
EITHER = pytest.mark.parametrize("scores", ["kernel", "delta"])
LEVELS, LENGTH = 5, 17


def mixer_with(matrix: str = "scalar", form: str = "softplus", shape: AttentionShape = SHAPE, **options) -> LinearMixer:
    """Return a mixer in float64 whose parameters differ from their initial values."""
    torch.manual_seed(1)
    more = {name: options.pop(name) for name in ("admissibility", "gates") if name in options}
    mask = {"name": "hierarchical", "levels": LEVELS, "form": form, "matrix": matrix, "rank": 2, **more}
    mixer = LinearMixer(LinearAttention(mask=mask, chunk=8, **options), shape).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer.requires_grad_(False)


def random_inputs(length: int = LENGTH, batch: int = 2, valid_BT: Tensor | None = None) -> MixerInputs:
    torch.manual_seed(0)
    sizes = [(SHAPE.heads, length, 6), (SHAPE.groups, length, 6), (SHAPE.groups, length, 5), (length, 12)]
    return MixerInputs(*(torch.randn(batch, *size, dtype=torch.float64) for size in sizes), valid_BT)


def piece(inputs: MixerInputs, a: int, b: int) -> MixerInputs:
    valid = None if inputs.valid_BT is None else inputs.valid_BT[:, a:b]
    heads = (x[:, :, a:b] for x in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV))
    return MixerInputs(*heads, inputs.x_BTD[:, a:b], valid)


def lambdas_by_form(mixer: LinearMixer, x_TD: Tensor) -> Tensor:
    """lambda (T, H, L) by the four formulas."""
    mask, form = mixer.mask, mixer.config.mask.form
    z = (x_TD @ mask.level.weight.T + mask.level.bias).view(-1, SHAPE.heads, LEVELS)
    c = mask.scale_HL
    if form == "softplus":
        return torch.log1p(z.exp())
    if form == "linear":
        return c * z
    return torch.log1p((c * z).exp()) if form == "positive" else torch.exp(-c.exp() * torch.log1p(z.exp()))


def matrices_by_form(mixer: LinearMixer, x_TD: Tensor) -> Tensor:
    """Lambda / lambda (T, H, L, F, F)."""
    parts, eye = mixer.mask.matrices, torch.eye(6, dtype=torch.float64)
    if parts is None:
        return eye.expand(len(x_TD), SHAPE.heads, LEVELS, 6, 6)
    if parts.matrix == "static":
        return parts.matrix_GJLFF.flatten(0, 1).expand(len(x_TD), -1, -1, -1, -1)
    if parts.matrix == "diagonal":
        raw = (x_TD @ parts.down.weight.T) @ parts.up.weight.T + parts.up.bias
        return torch.diag_embed(1 + raw.view(-1, SHAPE.heads, LEVELS, 6))
    return (eye + (parts.left_GJLFR @ parts.right_GJLFR.mT).flatten(0, 1)).expand(len(x_TD), -1, -1, -1, -1)


def by_the_equation(mixer: LinearMixer, inputs: MixerInputs) -> Tensor:
    """Appendix A: P_ts = q_t^T Lambda_t^(level(t, s)) C_t .. C_(s+1) k_s with C = alpha I or alpha (I - beta k k^T)."""
    delta, mask = mixer.config.scores == "delta", mixer.mask
    out_BHTV = torch.zeros_like(inputs.q_BHTK[..., :5])
    eye, root = torch.eye(6, dtype=torch.float64), SHAPE.scaling**0.5
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(SHAPE.heads)).tolist():
        g, x_TD = h // 2, inputs.x_BTD[b]
        q_TF, k_TF, v_TV = inputs.q_BHTK[b, h] * root, inputs.k_BGTK[b, g] * root, inputs.v_BGTV[b, g]
        beta_T = torch.ones(LENGTH, dtype=torch.float64)
        if delta:
            q_TF, k_TF, beta_T = l2_normalize(q_TF), l2_normalize(k_TF), mixer.beta_proj(x_TD)[:, g].sigmoid()
        alpha_T = mask.gates.log_gates(torch.zeros(1), torch.zeros(1), LENGTH, mask.gates.signals(x_TD[None]))
        alpha_T = alpha_T.expand(1, 1, SHAPE.groups, LENGTH)[0, 0, g].exp()
        lambda_TL, matrix_TLFF = lambdas_by_form(mixer, x_TD)[:, h], matrices_by_form(mixer, x_TD)[:, h]
        for t in range(LENGTH):
            through = eye
            for s in range(t, -1, -1):
                level = (t ^ s).bit_length()
                if mixer.config.mask.strong and s < t:
                    level = next(k for k in range(9) if (t >> k) - (s >> k) <= 1) + 1
                level = min(level, LEVELS - 1)
                score = lambda_TL[t, level] * (q_TF[t] @ matrix_TLFF[t, level] @ through @ k_TF[s])
                out_BHTV[b, h, t] += mixer.linear_weight_H[h] * score * beta_T[s] * v_TV[s]
                step = eye - beta_T[s] * torch.outer(k_TF[s], k_TF[s]) if delta else eye
                through = alpha_T[s] * through @ step
    return out_BHTV


@EITHER
@pytest.mark.parametrize("matrix", ["scalar", *MATRICES])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_the_equation_s(matrix, form, scores):
    mixer, inputs = mixer_with(matrix, form, scores=scores), random_inputs()
    expected = by_the_equation(mixer, inputs)
    torch.testing.assert_close(mixer.dense(inputs), expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(mixer.mix(inputs)[0], expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("matrix", MATRICES)
def test_strong_levels_have_matrices_too(matrix):
    mixer, inputs = mixer_with(matrix, "bounded", scores="delta", admissibility="strong"), random_inputs()
    torch.testing.assert_close(mixer.mix(inputs)[0], by_the_equation(mixer, inputs), rtol=1e-10, atol=1e-11)


LAWS = [
    {"scores": "delta"},
    {"features": "elu"},
    {"features": "hedgehog", "states": "per_head", "gates": "decay"},
    {"scores": "delta", "window": 3, "sinks": 2, "rope": "both"},
    {"scores": "delta", "window": 4, "sinks": 1, "near_tokens": "chunks"},
    {"scores": "delta", "admissibility": "strong", "window": 2, "convolution": 3},
]


@pytest.mark.parametrize("options", LAWS, ids=str)
@pytest.mark.parametrize("matrix", MATRICES)
def test_dense_pieces_and_steps_agree(matrix, options):
    """On padded rows, with gradients; states that are cropped by going back to an earlier one, and reordered."""
    valid_BT = torch.tensor([[True] * 17, [False] * 5 + [True] * 9 + [False] * 3])
    mixer, inputs = mixer_with(matrix, "linear", **options), random_inputs(valid_BT=valid_BT)
    angle_BTR = torch.randn(2, LENGTH, 3, dtype=torch.float64).repeat(1, 1, 2)
    rope = (angle_BTR.cos(), angle_BTR.sin())
    inputs = replace(inputs, rope=rope)

    def cut(a: int, b: int, rows: list[int]) -> MixerInputs:
        part = piece(inputs, a, b)
        parts = {n: t[rows] for n, t in vars(part).items() if isinstance(t, Tensor)}
        return replace(part, **parts, rope=tuple(t[rows, a:b] for t in rope))

    leaves = [t.requires_grad_() for t in (inputs.q_BHTK, inputs.k_BGTK, inputs.x_BTD)]
    truth = mixer.dense(inputs)
    direction = torch.randn_like(truth)
    slopes = torch.autograd.grad((truth * direction).sum(), leaves)
    state, outs, states = mixer.empty_state(2, "cpu"), [], {}
    for a, b in [(0, 1), (1, 3), (3, 6), (6, 13), (13, 14), (14, 15), (15, 16), (16, 17)]:
        out, state = mixer.mix(cut(a, b, [0, 1]), state)
        outs.append(out)
        states[b] = state
    for out in (mixer.mix(inputs)[0], torch.cat(outs, 2)):
        torch.testing.assert_close(out, truth, rtol=1e-9, atol=1e-10)
        for ours, slope in zip(torch.autograd.grad((out * direction).sum(), leaves), slopes):
            torch.testing.assert_close(ours, slope, rtol=1e-8, atol=1e-9)
    with torch.no_grad():
        again = mixer.mix(cut(13, 17, [1, 0, 1]), states[13].rows(torch.tensor([1, 0, 1])))[0]
    torch.testing.assert_close(again, truth[[1, 0, 1], :, 13:], rtol=1e-9, atol=1e-10)
    if not options.get("window"):
        length = int(states[17].seen_B.max())
        assert mixer.cost(mixer.config, SHAPE, length).cache * 2 == sum(t.numel() for t in states[17].tensors.values())


@pytest.mark.parametrize("matrix", MATRICES)
def test_bidirectional_attention_has_matrices_too(matrix):
    valid_BT = torch.tensor([[True] * 17, [True] * 9 + [False] * 8])
    mixer, inputs = mixer_with(matrix, "positive", replace(SHAPE, causal=False)), random_inputs(valid_BT=valid_BT)
    torch.testing.assert_close(mixer.mix(inputs)[0], mixer.dense(inputs), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("matrix", MATRICES)
def test_matrices_begin_as_the_identity(matrix):
    """And add nothing to the state."""
    inputs, options = random_inputs(), {"scores": "delta", "chunk": 8}
    configs = [
        LinearAttention(mask={"name": "hierarchical", "levels": LEVELS, "matrix": m}, **options)
        for m in ("scalar", matrix)
    ]
    plain, mixer = (MIXERS[c](c, SHAPE).double() for c in configs)
    mixer.beta_proj.load_state_dict(plain.beta_proj.state_dict())
    torch.testing.assert_close(mixer.mix(inputs)[0], plain.mix(inputs)[0], rtol=1e-12, atol=1e-12)
    costs = [LinearMixer.cost(c, SHAPE, 1000) for c in configs]
    assert costs[0].cache == costs[1].cache and costs[0].macs < costs[1].macs and costs[0].params < costs[1].params
    added = sum(p.numel() for p in mixer.mask.matrices.parameters())
    assert costs[1].params - costs[0].params == added
    linears = sum(m.weight.numel() for m in mixer.mask.matrices.modules() if isinstance(m, torch.nn.Linear))
    each = {"diagonal": 6, "static": 36, "low_rank": 2 * 6 * 4}[matrix] * LEVELS
    assert costs[1].macs - costs[0].macs == SHAPE.heads * each + linears
    assert LevelMatrices.macs(matrix, 4, 6, LEVELS) == each


@pytest.mark.parametrize("form", FORMS)
def test_forms_begin_as_the_gates(form):
    """All lambdas are 1 and do not depend on the input; 0.99 in the form that cannot reach 1."""
    config = Hierarchical(form=form, levels=LEVELS)
    mask = MASKS[config](config, SHAPE).double()
    lambdas = mask.signals(torch.randn(2, 7, SHAPE.dim, dtype=torch.float64))["level"]
    torch.testing.assert_close(lambdas, torch.full_like(lambdas, 0.99 if form == "bounded" else 1.0), rtol=1e-6, atol=0)


def test_the_default_is_the_softplus_of_scalars():
    """The same parameters and bits as without the options."""
    mask = MASKS[Hierarchical()](Hierarchical(), SHAPE)
    assert set(mask.state_dict()) == {
        "level.weight",
        "level.bias",
        "gates.log_scale_G",
        "gates.rate.weight",
        "gates.rate.bias",
    }
    x = torch.randn(1, 5, SHAPE.dim)
    with torch.no_grad():
        mask.level.weight.normal_()
        expected = F.softplus(mask.level(x)).unflatten(-1, (2, 2, 20))
        assert torch.equal(mask.signals(x)["level"], expected)
        q = torch.randn(1, 2, 2, 5, 6)
        same, signals = mask.expand_queries(q, {"level": expected})
    assert same is q and signals["level"] is expected and mask.sum_queries(q) is q


@pytest.mark.parametrize("form", FORMS)
def test_fitted_weights_of_levels_are_the_lambdas(form):
    """What the conversion solves for: levels outside the sample share the nearest, and a bounded lambda keeps its ratio
    to the others.
    """
    mixer = mixer_with(form=form).float()
    config = mixer.config
    mixer = MIXERS[config](config, SHAPE).requires_grad_(False)
    weight_HN = torch.tensor([[0.5, 3.0], [0.1, 0.2], [0.0, 1.0], [2.0, 2.0]])
    set_term_weights(mixer, [1, 3], weight_HN)
    x = torch.randn(1, 1, SHAPE.dim)
    lambda_HL = mixer.mask.signals(x)["level"].flatten(2, 3)[0, 0] * mixer.linear_weight_H[:, None]
    expected = weight_HN[:, [0, 0, 1, 1, 1]]
    expected[:, 1] = weight_HN[:, 0]
    torch.testing.assert_close(lambda_HL, expected, rtol=1e-4, atol=1e-5)
    for level, variant in zip((1, 3), single_term_copies(mixer, [1, 3])):
        alone = variant.mask.signals(x)["level"][0, 0].flatten(0, 1)
        torch.testing.assert_close(
            alone, F.one_hot(torch.tensor(level), LEVELS).float().expand(4, -1), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("form", FORMS)
def test_lambdas_are_inverted(form):
    lambdas = torch.tensor([0.01, 0.5, 0.98], dtype=torch.float64)
    config = Hierarchical(form=form, levels=3)
    mask = MASKS[config](config, replace(SHAPE, heads=1, groups=1)).double()
    with torch.no_grad():
        mask.level.bias.copy_(invert_lambdas(form, lambdas))
    found = mask.signals(torch.zeros(1, 1, SHAPE.dim, dtype=torch.float64))["level"].flatten()
    torch.testing.assert_close(found, lambdas)


@pytest.mark.parametrize(
    "options", [{"form": "linear"}, {"matrix": "static"}, {"matrix": "diagonal", "form": "positive"}]
)
def test_weights_that_may_be_negative_are_not_normalised(options):
    config = LinearAttention(mask={"name": "hierarchical", **options}, features="elu", normalise=True)
    with pytest.raises(SurgeryError, match=r"form: \w+ and matrix: \w+ may be negative.* use normalise: false"):
        LinearMixer.check_config(config, SHAPE)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"levels": "strong"}, "strong admissibility: training, prefill and decoding run in plain torch"),
        ({"form": "bounded"}, "bounded lambda: decoding steps run in plain torch"),
        (
            {"form": "linear", "matrix": "low_rank"},
            "linear lambda and low rank Lambda: decoding steps run in plain torch",
        ),
    ],
)
def test_plans_say_what_has_no_fused_kernel(options, words):
    """And give no speeds, which were measured with kernels."""
    config = LinearAttention(mask={"name": "hierarchical", **options})
    assert mixer_notes(config) == [f"no fused kernel computes log-linear attention with {words}"]
    assert mixer_notes(LinearAttention(mask="hierarchical")) == []
    assert speed_notes([], [describe_mixer(LinearAttention(mask="hierarchical"))], 1024)
    assert not speed_notes([], [describe_mixer(config)], 1024)
