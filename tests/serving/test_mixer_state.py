"""Mixers in a server's cache: any schedule of pieces and steps, in any row, gives the output of the whole sequence.

Needs no vLLM.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, mixer_config
from surgery.planning.recipe import load_recipe
from surgery.vllm.mixer_state import Batch, StateLayout, Tokens, mix_batch
from surgery.vllm.servable import check_mixer

SHAPE = AttentionShape(dim=24, heads=4, groups=2, key=8, value=8, scaling=0.35, rotary=8)
RECIPES = (
    *("log-linear", "log-linear-gdn", "log-linear-mamba2", "hybrid-25", "gated-deltanet", "ssd", "retnet", "tbm"),
    *("lolcats", "hedgehog", "block-diagonal-mask"),
)
GATED = {"mixer": "linear", "mask": {"name": "gates"}, "scores": "delta"}
OTHERS = {  # what no shipped recipe combines
    "strong": {"mixer": "linear", "mask": {"name": "hierarchical", "admissibility": "strong"}, "scores": "delta"},
    "matrix": {"mixer": "linear", "mask": {"name": "hierarchical", "matrix": "diagonal", "block": 4}, "window": 6},
    "sinks": {**GATED, "window": 0, "sinks": 2},
    "normalised": {**GATED, "scores": "kernel", "features": "elu", "normalise": True, "window": 6, "sinks": 2},
    "blocks-delta": {"mixer": "linear", "mask": {"name": "toeplitz_blocks", "block": 4}, "scores": "delta"},
    "convolution": {**GATED, "convolution": 4, "window": 6},
    "negative": {**GATED, "negative_eigenvalues": True, "window": 6},
}
LENGTHS = (37, 20, 3)
SMALLER = {"window": 6, "sinks": 2}  # than the shortest sequences


def recipe_mixer(name: str):
    """Return the mixer of a shipped recipe or of OTHERS, with random parameters and a window and blocks that short sequences
    leave.
    """
    data = OTHERS.get(name) or load_recipe(name, []).attention.config_for(SHAPE, 0, 1).to_dict()
    data = data | {k: v for k, v in SMALLER.items() if data.get(k)}
    if data["mask"].get("block", 1) > 1:
        data["mask"] = {**data["mask"], "block": 4}
    torch.manual_seed(0)
    mixer = MIXERS[mixer_config(data)](mixer_config(data), SHAPE)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer.requires_grad_(False).eval()


def random_tokens(length: int) -> Tokens:
    angle = torch.arange(length)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat(2)
    heads = (torch.randn(length, n, 8) for n in (SHAPE.heads, SHAPE.groups, SHAPE.groups))
    return Tokens(*heads, torch.randn(length, SHAPE.dim), (angle.cos(), angle.sin()))


def joined(parts: list[Tokens]) -> Tokens:
    rope = (torch.cat([p.rope[0] for p in parts]), torch.cat([p.rope[1] for p in parts]))
    return Tokens(*(torch.cat([p[i] for p in parts]) for i in range(4)), rope)


def piece(tokens: Tokens, start: int, stop: int) -> Tokens:
    return Tokens(*(t[start:stop] for t in tokens[:4]), (tokens.rope[0][start:stop], tokens.rope[1][start:stop]))


@pytest.fixture(scope="module", params=(*RECIPES, *OTHERS))
def served(request):
    mixer = recipe_mixer(request.param)
    torch.manual_seed(1)
    sequences = [random_tokens(length) for length in LENGTHS]
    whole = [mixer.mix(tokens.as_rows(1))[0][0].transpose(0, 1) for tokens in sequences]
    return mixer, StateLayout(mixer, max(LENGTHS)), sequences, whole


def test_a_layout_is_made_on_the_mixer_s_device(served):
    """vLLM builds models on the GPU, so that no other device may be assumed."""
    mixer, layout, _, _ = served
    assert StateLayout(copy.deepcopy(mixer).to("meta"), max(LENGTHS)).shapes == layout.shapes


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_schedule_gives_the_output_of_the_whole_sequence(served, data):
    mixer, layout, sequences, whole = served
    rows = data.draw(st.permutations(range(5)))
    cache = torch.full((5, layout.size), float("nan"))  # a row that is read before it is written spoils the output
    seen = [0] * len(sequences)
    outs: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(n < len(s.x_ND) for n, s in zip(seen, sequences)):
        left = [i for i, s in enumerate(sequences) if seen[i] < len(s.x_ND)]
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        counts = {i: data.draw(st.sampled_from([1, 1, 2, 7, 40])) for i in chosen}
        counts = {i: min(n, len(sequences[i].x_ND) - seen[i]) for i, n in counts.items()}
        steps = [i for i in chosen if counts[i] == 1]  # first pieces too, as vLLM's linear attention has them
        order = steps + [i for i in chosen if i not in steps]
        parts = [piece(sequences[i], seen[i], seen[i] + counts[i]) for i in order]
        starts = [0, *torch.tensor([counts[i] for i in order]).cumsum(0).tolist()]
        lengths = [seen[i] + counts[i] for i in order]
        batch = Batch.of(len(steps), starts, lengths, torch.tensor([rows[i] for i in order], dtype=torch.int32))
        out = mix_batch(mixer, layout, cache, batch, joined(parts))
        for number, i in enumerate(order):
            outs[i].append(out[starts[number] : starts[number + 1]])
            seen[i] += counts[i]
    for got, wanted in zip(outs, whole):
        torch.testing.assert_close(torch.cat(got), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


def test_a_restarted_request_does_not_read_its_old_row(served):
    mixer, layout, sequences, whole = served
    cache = torch.zeros(2, layout.size)
    for _ in range(2):
        batch = Batch.of(0, [0, 20], [20], torch.tensor([1]))
        out = mix_batch(mixer, layout, cache, batch, piece(sequences[1], 0, 20))
        torch.testing.assert_close(out, whole[1], rtol=0, atol=2e-4 * float(whole[1].abs().max()))


def count_calls(mixer, monkeypatch) -> list[str]:
    """Return a list that gets an entry for each call of the mixer with pieces of prompts."""
    calls: list[str] = []
    for name in ("mix", "mix_packed_in_pool"):
        call = getattr(mixer, name)
        monkeypatch.setattr(mixer, name, lambda *args, call=call, name=name: (calls.append(name), call(*args))[1])
    return calls


def test_pieces_of_several_requests_share_a_call(served, monkeypatch):
    """Pieces of different lengths, at the beginning of a sequence and within one, in rows out of order."""
    mixer, layout, sequences, whole = served
    cache = torch.full((5, layout.size), float("nan"))
    rows = torch.tensor([3, 0, 4])
    calls = count_calls(mixer, monkeypatch)
    seen, outs = [0, 0, 0], [[], [], []]
    for counts in ([9, 0, 2], [11, 5, 1], [17, 15, 0]):
        chosen = [i for i, count in enumerate(counts) if count]
        parts = [piece(sequences[i], seen[i], seen[i] + counts[i]) for i in chosen]
        starts = [0, *torch.tensor([counts[i] for i in chosen]).cumsum(0).tolist()]
        batch = Batch.of(0, starts, [seen[i] + counts[i] for i in chosen], rows[chosen])
        out = mix_batch(mixer, layout, cache, batch, joined(parts))
        for number, i in enumerate(chosen):
            outs[i].append(out[starts[number] : starts[number + 1]])
            seen[i] += counts[i]
    assert calls == ["mix_packed_in_pool"] * 3
    for got, wanted in zip(outs, whole):
        torch.testing.assert_close(torch.cat(got), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


RAGGED = (1, 2, 63, 64, 65, 200)


@pytest.mark.parametrize("seen", [(0,) * 6, (70,) * 6, (0, 70, 1, 7, 5, 0), (65, 0, 64, 0, 7, 100)])
def test_ragged_pieces_in_one_call_equal_one_call_each(served, seen, monkeypatch):
    """Without a state, with one inside the window, and with one behind it; the states after the pieces go on equally."""
    mixer, _, _, _ = served
    layout, count = StateLayout(mixer, max(RAGGED) + max(seen) + 2), len(RAGGED)
    torch.manual_seed(3)
    caches, rows = torch.full((2, count, layout.size), float("nan")), torch.randperm(count)

    def run(cache, requests, tokens, seen):
        counts = [len(t.x_ND) for t in tokens]
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        batch = Batch.of(0, starts, [seen[i] + n for i, n in zip(requests, counts)], rows[requests])
        return mix_batch(mixer, layout, cache, batch, joined(tokens)).split(counts)

    for i in range(count):
        if seen[i]:
            run(caches[0], [i], [random_tokens(seen[i])], [0] * count)
    caches[1] = caches[0]
    for counts in (RAGGED, (1, 2, 1, 1, 1, 1)):
        tokens = [random_tokens(n) for n in counts]
        calls = count_calls(mixer, monkeypatch)
        together = run(caches[0], list(range(count)), tokens, seen)
        assert len(calls) == 1
        monkeypatch.undo()
        for i in range(count):
            (alone,) = run(caches[1], [i], [tokens[i]], seen)
            largest = max(1.0, float(alone.abs().max()))
            torch.testing.assert_close(together[i], alone, rtol=0, atol=1e-6 * largest)
        seen = [a + b for a, b in zip(seen, counts)]
    states = [layout.read(cache[rows], seen, torch.tensor(seen)).tensors for cache in caches]
    for name, t in states[1].items():
        largest = float(t.abs().max()) if t.numel() else 0
        torch.testing.assert_close(states[0][name], t, rtol=0, atol=1e-6 * max(1.0, largest), msg=name)


@pytest.mark.parametrize("first", [1, 6, 20])
def test_a_first_piece_among_the_decodes_does_not_read_what_another_request_left(served, first):
    """The first request goes on; the second begins with one token in the row of a request that ended."""
    mixer, layout, sequences, whole = served
    cache = torch.zeros(2, layout.size)
    for row in range(2):
        mix_batch(
            mixer, layout, cache, Batch.of(0, [0, first], [first], torch.tensor([row])), piece(sequences[0], 0, first)
        )
    parts = [piece(sequences[0], first, first + 1), piece(sequences[1], 0, 1)]
    out = mix_batch(mixer, layout, cache, Batch.of(2, [0, 1, 2], [first + 1, 1], torch.tensor([0, 1])), joined(parts))
    rest = Batch.of(0, [0, 19], [20], torch.tensor([1]))
    out = torch.cat([out, mix_batch(mixer, layout, cache, rest, piece(sequences[1], 1, 20))])
    wanted = torch.cat([whole[0][first : first + 1], whole[1]])
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


def test_the_empty_state_is_zeros_wherever_it_is_served(served):
    mixer, layout, _, _ = served
    assert not layout.write(mixer.empty_state(1, "cpu")).any()


def test_the_state_of_log_linear_attention_grows_by_one_sum_for_each_doubling():
    mixer = recipe_mixer("log-linear-mamba2")
    sizes = [StateLayout(mixer, 2**bits).size for bits in (4, 5, 6)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == SHAPE.groups * 8 * 8
    layout = StateLayout(mixer, 8)
    cache = torch.zeros(1, layout.size)
    torch.manual_seed(1)
    with pytest.raises(SurgeryError, match="longer than the 4 sums"):
        mix_batch(mixer, layout, cache, Batch.of(0, [0, 20], [20], torch.tensor([0])), random_tokens(20))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"mixer": "window", "sinks": 4}, "sees the first 4 tokens besides the last 256"),
        (
            {"mixer": "mlr", "ranks": [4, 4], "extents": [8]},
            "mixer 'mlr' combines scores of 2 levels.*lacks two things",
        ),
        ({"mixer": "global_window", "ranks": [4, 4]}, "mixer 'global_window' combines scores of 2 levels"),
        ({"mixer": "bilinear_btt", "rank": 1}, "mixer 'bilinear_btt' scores hidden states by matrices of its own"),
        ({"mixer": "linear", "mask": "toeplitz"}, "state of mask 'toeplitz' grows"),
        ({"mixer": "linear", "mask": "blocks"}, "state of mask 'blocks' grows"),
        ({"mixer": "linear", "mask": "fourier"}, "state of mask 'fourier' grows"),
        ({"mixer": "linear", "window": 8, "near_tokens": "chunks"}, "near_tokens: chunks moves a whole block"),
        ({"mixer": "linear", "window": 8, "near": "chunks"}, "near_tokens: chunks moves a whole block"),  # an old name
    ],
)
def test_mixers_without_a_bounded_state_are_refused(entry, message):
    with pytest.raises(SurgeryError, match=message):
        check_mixer(mixer_config(entry), "layer")


def test_inputs_keep_their_axes():
    tokens = random_tokens(5)
    one: MixerInputs = tokens.one_each(3)
    assert one.q_BHTK.shape == (3, 4, 1, 8) and one.rope[0].shape == (3, 1, 8)
    assert tokens.from_token(1).as_rows(2).k_BGTK.shape == (2, 2, 2, 8)
