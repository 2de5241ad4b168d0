"""Softmax attention with a structured score, against its definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.pieces import relative_error, run_in_pieces, slice_inputs
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, mixer_config
from surgery.mixers.common import softmax as engine
from surgery.mixers.head_hybrid import HeadHybrid
from surgery.mixers.mlr import MLR
from surgery.mixers.sliding_window import GlobalWindow, Window
from surgery.mixers.softmax import Softmax

SHAPE = AttentionShape(dim=24, heads=4, groups=2, key=8, value=6, scaling=8**-0.5, rotary=8)
NESTED = MLR(ranks=(3, 2, 2), extents=(8, 3), form="nested")
SLIDING = MLR(ranks=(3, 2, 1), extents=(9, 4), form="sliding")
LEVELS = [NESTED, SLIDING]
CONFIGS = {
    "nested": NESTED,
    "sliding": SLIDING,
    "window": Window(6),
    "sinks": Window(4, sinks=3),
    "global window": GlobalWindow((3, 4), 6),
    "centered": replace(SLIDING, basis="centered"),
    "softmax": Softmax(),
    "softmax without RoPE": Softmax("drop"),
    "heads": HeadHybrid((1,), Window(4, sinks=3)),
}
# A row of left padding, one of right padding, one with holes, one whole.
RAGGED = ["00000111111111111111111", "11111111111111110000000", "00110110001111110101110", "11111111111111111111111"]


def make_mixer(config, shape=SHAPE, dtype=torch.float64):
    torch.manual_seed(0)
    if config == CONFIGS["centered"]:
        shape = replace(shape, rotary=4)  # the other dims have a basis
    mixer = MIXERS[config](config, shape).to(dtype)
    if hasattr(mixer, "order"):
        mixer.order.copy_(torch.stack([torch.randperm(shape.key) for _ in range(shape.groups)]))
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    for name in ("query_basis", "key_basis", "key_center"):
        if hasattr(mixer, name):
            getattr(mixer, name).copy_(torch.randn(getattr(mixer, name).shape, dtype=torch.float64))
    return mixer


def random_inputs(batch=2, length=23, shape=SHAPE, dtype=torch.float64, valid=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return MixerInputs(
        2 * draw(batch, shape.heads, length, shape.key),
        draw(batch, shape.groups, length, shape.key),
        draw(batch, shape.groups, length, shape.value),
        draw(batch, length, shape.dim),
        None if valid is None else torch.tensor([[c == "1" for c in row] for row in valid]),
    )


def rows(inputs, row):
    """One row without its padding."""
    keep = inputs.valid_BT[row]
    parts = {n: getattr(inputs, n)[row : row + 1, :, keep] for n in ("q_BHTK", "k_BGTK", "v_BGTV")}
    return replace(inputs, **parts, x_BTD=inputs.x_BTD[row : row + 1, keep], valid_BT=None)


@pytest.fixture(params=[5, 512])
def queries(request, monkeypatch):
    monkeypatch.setattr(engine, "QUERIES_PER_PASS", request.param)


SHAPES = {
    "causal": SHAPE,
    "both ways": replace(SHAPE, causal=False),
    "window": replace(SHAPE, window=6),
    "capped": replace(SHAPE, softcap=3.0, groups=4),
    "window both ways": replace(SHAPE, causal=False, window=5, groups=1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), MLR((8,)), MLR((5,)), MLR((0, 8), (5,))], ids=[*CONFIGS, "plain", "fewer", "no far"]
)
@pytest.mark.parametrize("valid", [None, RAGGED])
def test_mix_is_its_definition(config, shape, valid, queries):
    if isinstance(config, HeadHybrid):  # chooses among key/value heads
        shape = replace(shape, groups=max(2, shape.groups))
    mixer, inputs = make_mixer(config, shape), random_inputs(4, shape=shape, valid=valid)
    assert relative_error(mixer.mix(inputs)[0], mixer.dense(inputs), inputs.valid_BT) < 1e-12


@torch.no_grad()
def test_the_definition_by_hand():
    """eq. 9 pair by pair."""
    shape = replace(SHAPE, heads=1, groups=1)
    for config in LEVELS:
        mixer, x = make_mixer(config, shape), random_inputs(1, 11, shape)
        q, k, v = (x.q_BHTK[0, 0][:, mixer.order[0]], x.k_BGTK[0, 0][:, mixer.order[0]], x.v_BGTV[0, 0])
        out = mixer.mix(x)[0][0, 0]
        for t in range(11):
            score = torch.zeros(t + 1, dtype=torch.float64)
            for s in range(t + 1):
                start = 0
                for level, (rank, extent) in enumerate(zip(config.ranks, (100, *config.extents))):
                    if (t // extent == s // extent) if config.form == "nested" else (t - s < extent):
                        score[s] += q[t, start : start + rank] @ k[s, start : start + rank]
                        score[s] += mixer.near[0, level - 1] if level else 0.0
                    start += rank
            assert torch.allclose(out[t], torch.softmax(score * shape.scaling, 0) @ v[: t + 1], atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["window"], SHAPES["capped"]], ids=["causal", "window", "capped"])
@pytest.mark.parametrize("valid", [None, RAGGED])
def test_pieces_and_steps_are_the_whole(config, shape, valid, queries):
    mixer, inputs = make_mixer(config, shape), random_inputs(4, shape=shape, valid=valid)
    whole = mixer.dense(inputs)
    for lengths in ([23], [1] * 23, [10, 1, 1, 7, 4], [7, 16], [1, 2, 3, 17], [2, 21], [3, 20]):
        out, state = run_in_pieces(mixer, inputs, lengths)
        assert relative_error(out, whole, inputs.valid_BT) < 1e-12
        assert state.seen_B.tolist() == ([23] * 4 if valid is None else inputs.valid_BT.sum(1).tolist())


@pytest.mark.parametrize("config", [*CONFIGS.values(), MLR((8,))], ids=[*CONFIGS, "plain"])
def test_ragged_rows_are_each_alone(config):
    mixer, inputs = make_mixer(config), random_inputs(4, valid=RAGGED)
    out = run_in_pieces(mixer, inputs, [9, 14])[0]
    for row in range(4):
        alone = mixer.mix(rows(inputs, row))[0]
        assert relative_error(out[row : row + 1][:, :, inputs.valid_BT[row]], alone) < 1e-12
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_masks_of_the_library_are_kept(config, queries):
    """Packed documents, as booleans and as numbers, beside padding."""
    mixer, inputs = make_mixer(config), random_inputs(4, valid=RAGGED)
    document = torch.arange(23) // 8
    allowed = (document[:, None] == document).tril()[None, None]
    got = mixer.mix(replace(inputs, mask_BHTS=allowed))[0]
    added = torch.zeros(4, 1, 23, 23).masked_fill(~allowed, torch.finfo(torch.float32).min)
    assert relative_error(mixer.mix(replace(inputs, mask_BHTS=added))[0], got, inputs.valid_BT) < 1e-12
    assert relative_error(got, mixer.dense(replace(inputs, mask_BHTS=allowed)), inputs.valid_BT) < 1e-12
    first = mixer.mix(slice_inputs(inputs, 0, 8))[0]
    assert relative_error(got[:, :, :8], first, inputs.valid_BT[:, :8]) < 1e-12


@torch.no_grad()
def test_logits_grow_with_the_position_beyond_the_trained_length():
    """f_t = max(1, log(t + 1) / log(L)) on the scores of query t, with t over the real tokens of a row."""
    config = Softmax("drop", "length", 6)
    mixer, x = make_mixer(config), random_inputs(4, valid=RAGGED)
    mixer.sharpness_H.uniform_(0.5, 2)
    plain = make_mixer(Softmax())
    position_BT = x.valid_BT.cumsum(1) - 1
    factor_BT = ((position_BT.clamp_min(0) + 1.0).double().log() / torch.tensor(6.0).double().log()).clamp_min(1)
    assert factor_BT[3, :6].tolist() == [1] * 6 and factor_BT[3, 22] == pytest.approx(1.75, abs=0.01)
    q = x.q_BHTK * factor_BT[:, None, :, None] * mixer.sharpness_H[:, None, None]
    wanted = plain.dense(replace(x, q_BHTK=q))
    assert relative_error(mixer.mix(x)[0], wanted, x.valid_BT) < 1e-12
    for lengths in ([23], [1] * 23, [10, 1, 1, 7, 4], [1, 2, 3, 17], [2, 21], [3, 20]):
        assert relative_error(run_in_pieces(mixer, x, lengths)[0], wanted, x.valid_BT) < 1e-12
    with pytest.raises(SurgeryError, match="bidirectional"):
        make_mixer(Softmax("keep", "length", 6), SHAPES["both ways"])


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"rope": "none"}, "rope must be keep or drop"),
        ({"scale": "log"}, "scale must be none or length"),
        ({"scale": "length"}, r"2 or more tokens \(got trained_length: 0\)"),
        ({"trained_length": 8}, "read by scale: length only"),
    ],
)
def test_options_of_softmax_that_are_refused(keys, said):
    with pytest.raises(SurgeryError, match=said):
        mixer_config({"mixer": "softmax", **keys})


def test_states_are_values():
    """An old state goes on as if nothing had come after it; rows of a state are rows of a batch."""
    mixer, inputs = make_mixer(SLIDING), random_inputs(4, valid=RAGGED)
    _, state = mixer.mix(slice_inputs(inputs, 0, 12), mixer.empty_state(4, "cpu"))
    kept = {name: t.clone() for name, t in state.tensors.items()}
    once = mixer.mix(slice_inputs(inputs, 12, 23), state)[0]
    assert all(torch.equal(kept[name], t) for name, t in state.tensors.items())
    assert torch.equal(once, mixer.mix(slice_inputs(inputs, 12, 23), state)[0])
    beams = torch.tensor([3, 0, 0, 2])
    again = mixer.mix(
        replace(
            slice_inputs(inputs, 12, 23),
            **{
                n: getattr(slice_inputs(inputs, 12, 23), n)[beams]
                for n in ("q_BHTK", "k_BGTK", "v_BGTV", "x_BTD", "valid_BT")
            },
        ),
        state.rows(beams),
    )[0]
    assert relative_error(again, once[beams], inputs.valid_BT[beams][:, 12:]) < 1e-12


def key_numbers(state):
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in state.tensors.values())
    return sum(t.numel() for name, t in state.tensors.items() if name.startswith("keys"))


@pytest.mark.parametrize("ranks, share", [((32, 8, 6, 4, 4, 4, 4, 2), 0.60), ((8,) * 8, 0.25)])
def test_live_key_cache(ranks, share):
    """The paper's shares: over the growth to T where blocks open and close, at T itself where they slide."""
    length, shape = 256, AttentionShape(8, 1, 1, 64, 1, 0.125)
    extents = tuple(length // 2**level for level in range(1, 8))
    inputs = random_inputs(1, length, shape, torch.float32)
    for form in ("nested", "sliding"):
        mixer = MIXERS[MLR](MLR(ranks, extents, form), shape)
        state, live = mixer.empty_state(1, "cpu"), []
        for t in range(length):
            _, state = mixer.mix(slice_inputs(inputs, t, t + 1), state)
            live.append(key_numbers(state))
        full = 64 * length
        measured = sum(live) / sum(64 * (t + 1) for t in range(length)) if form == "nested" else live[-1] / full
        assert measured == pytest.approx(share, abs=0.012)
        assert mixer.cost(mixer.config, shape, length).cache - length <= share * full * 1.01


def test_windows_keep_their_windows():
    for config, slots in ((Window(6), 5), (Window(4, sinks=3), 3)):
        mixer, inputs = make_mixer(config), random_inputs(4, valid=RAGGED)
        tensors = run_in_pieces(mixer, inputs, [13, 1, 9])[1].tensors
        assert tensors["keys"].shape[2] == tensors["values"].shape[2] == slots
        assert tensors["sink_keys"].shape[2] == config.sinks
        assert mixer.cost(config, mixer.shape, 23).cache == sum(t[0].numel() for t in tensors.values())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_costs_count_what_is_there(config):
    mixer, inputs = make_mixer(config), random_inputs(1)
    state = mixer.mix(inputs, mixer.empty_state(1, "cpu"))[1]
    live = sum(t.numel() for t in state.tensors.values())
    assert live == mixer.cost(config, mixer.shape, 23).cache
    assert mixer.cost(config, mixer.shape, 23).params == sum(t.numel() for t in mixer.state_dict().values())


def test_ragged_states_are_tight():
    for config in LEVELS:
        mixer, inputs = make_mixer(config), random_inputs(4, valid=RAGGED)
        state = run_in_pieces(mixer, inputs, [13, 10])[1]
        assert state.tensors["values"].shape[2] == 23 and key_numbers(state) > 0
        counts = inputs.valid_BT.sum(1)
        for level, extent in enumerate(config.extents, 1):
            live = int((counts % extent).max()) if config.form == "nested" else extent - 1
            assert state.tensors[f"keys{level}"].shape[2] == live


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_gradients_go_through_states(config, monkeypatch):
    monkeypatch.setattr(engine, "QUERIES_PER_PASS", 4)
    mixer, inputs = make_mixer(config), random_inputs(2, 11, valid=["00111111111", "11111111011"])
    valid = inputs.valid_BT[:, None, :, None]

    def through(q, k, v, *_):
        out, _ = run_in_pieces(mixer, replace(inputs, q_BHTK=q, k_BGTK=k, v_BGTV=v), [6, 1, 4])
        return torch.where(valid, out, 0.0).sum((0, 1))

    leaves = [x.requires_grad_() for x in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV)] + list(mixer.parameters())
    assert torch.autograd.gradcheck(through, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_small_dtypes(config, dtype, tolerance):
    inputs = random_inputs(4, dtype=dtype, valid=RAGGED)
    exact = replace(inputs, **{n: getattr(inputs, n).double() for n in ("q_BHTK", "k_BGTK", "v_BGTV", "x_BTD")})
    out, state = run_in_pieces(make_mixer(config, dtype=dtype), inputs, [12, 1, 10])
    assert out.dtype == dtype and all(t.dtype == dtype for t in state.tensors.values())
    assert relative_error(out.double(), make_mixer(config).dense(exact), inputs.valid_BT) < tolerance


# -- one level is the library's attention -------------------------------------------------------------------------
def llama(implementation, groups=2, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=groups, head_dim=8, max_position_embeddings=64, **options
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.config._attn_implementation = implementation
    return model


def one_level(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):
    shape = AttentionShape(32, query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], scaling)
    x_BTD = query.new_empty(query.shape[0], query.shape[2], 32)
    valid = None if mask is None else mask[:, 0].diagonal(dim1=1, dim2=2)  # what is real, beside the library's mask
    out = MIXERS[MLR](MLR((key.shape[-1],)), shape).mix(MixerInputs(query, key, value, x_BTD, valid, mask))[0]
    return out.transpose(1, 2), None


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_one_level_is_bit_equal_to_the_library(groups, padded, dtype):
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("one-level", one_level)
    AttentionMaskInterface.register("one-level", sdpa_mask)
    ids, keep = torch.randint(64, (3, 19)), torch.ones(3, 19, dtype=torch.long)
    if padded:
        keep[0, :5], keep[1, :1] = 0, 0
    ours = llama("one-level", groups).to(dtype)(ids, attention_mask=keep).logits
    theirs = llama("sdpa", groups).to(dtype)(ids, attention_mask=keep).logits
    assert torch.equal(ours[keep > 0], theirs[keep > 0])
    eager = llama("eager", groups).to(dtype)(ids, attention_mask=keep).logits
    assert relative_error(ours[keep > 0], eager[keep > 0]) < (1e-6 if dtype == torch.float32 else 1e-2)


@torch.no_grad()
def test_one_level_under_a_cap_is_bit_equal_to_eager():
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    shape = replace(SHAPE, softcap=2.5)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = random_inputs(2, dtype=dtype)
        mask = torch.zeros(1, 1, 23, 23, dtype=dtype).masked_fill(
            ~torch.ones(23, 23, dtype=torch.bool).tril(), torch.finfo(dtype).min
        )
        module = torch.nn.Module().eval()
        module.num_key_value_groups = 2
        arguments = (module, inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV, mask)
        theirs = eager_attention_forward(*arguments, scaling=shape.scaling, softcap=2.5)[0].transpose(1, 2)
        mixer = MIXERS[MLR](MLR((8,)), shape)
        assert torch.equal(mixer.mix(inputs)[0], theirs)
        assert torch.equal(mixer.mix(replace(inputs, mask_BHTS=mask))[0], theirs)


# -- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, words",
    [
        ({"ranks": [4, 4]}, "need 1 extents"),
        ({"ranks": []}, "must be the score dims"),
        ({"ranks": [4, 2, 2], "extents": [8, 16]}, "not increase"),
        ({"ranks": [4, 4], "extents": [8], "form": "spiral"}, "'nested' or 'sliding'"),
        ({"rank": [4]}, "did you mean 'ranks'"),
        ({"mixer": "window", "window": 0}, "must be 1 or more"),
        ({"mixer": "global_window", "ranks": [4]}, "for example ranks"),
    ],
)
def test_configs_are_refused_with_the_reason(options, words):
    with pytest.raises(SurgeryError, match=words):
        mixer_config({"mixer": "mlr"} | options)


def test_shapes_are_refused_with_the_reason():
    with pytest.raises(SurgeryError, match="take 12 score dims and a head has 8"):
        MIXERS[MLR].check_config(MLR((8, 4), (4,)), SHAPE)
    MIXERS[MLR].check_config(SLIDING, SHAPE)
    assert mixer_config(SLIDING.to_dict()) == SLIDING
