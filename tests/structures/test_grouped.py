"""Low-rank linears that are computed together: same outputs, and separate calls wherever keeping an output would be
wrong.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import surgery
from surgery.modeling.fuse import fuse_projections
from surgery.structures import STRUCTURES
from surgery.structures.grouped import group_linears, low_rank_group
from surgery.structures.low_rank import FEW_TOKENS, LowRank


def low_rank(in_, out, rank=4, bias=False):
    return STRUCTURES[LowRank](in_, out, LowRank(rank=rank), bias=bias)


def replace_linears(model):
    for path, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear):
            made = low_rank(linear.in_features, linear.out_features, bias=linear.bias is not None)
            model.set_submodule(path, made)
    return model


@pytest.fixture
def linears():
    torch.manual_seed(0)
    return [low_rank(16, out).requires_grad_(False) for out in (12, 8, 8)]


@pytest.fixture
def counted(monkeypatch):
    """The number of linears in each call of the group."""
    calls, reference = [], low_rank_group.reference

    def count(x, rights, lefts, biases):
        calls.append(len(rights))
        return reference(x, rights, lefts, biases)

    monkeypatch.setattr(low_rank_group, "reference", count)
    return calls


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_are_the_same(counted, bias):
    torch.manual_seed(0)
    linears = [low_rank(16, out, bias=bias) for out in (12, 8, 8)]
    for linear in linears if bias else ():
        nn.init.normal_(linear.bias)
    x = torch.randn(2, 1, 16)
    with torch.no_grad():
        alone = [linear(x) for linear in linears]
        group_linears(linears)
        for order in ((0, 1, 2), (2, 0, 1)):
            for place in order:
                assert torch.equal(linears[place](x), alone[place])
    assert counted == [3, 3]


def test_prompts_gradients_and_inference_mode_run_alone(linears, counted):
    group_linears(linears)
    with torch.no_grad():
        linears[0](torch.randn(FEW_TOKENS + 1, 16))
    linears[0](torch.randn(1, 16))
    linears[0].requires_grad_(True)
    linears[0](torch.randn(1, 16)).sum().backward()
    with torch.inference_mode():
        linears[0](torch.randn(1, 16))
    assert counted == [] and linears[0].right.grad is not None and not linears[0].group[0].kept.outputs


@torch.no_grad()
def test_an_output_is_not_kept_after_a_write(linears, counted):
    x = torch.randn(1, 16)
    group_linears(linears)
    linears[0](x)
    linears[1].right.mul_(2)
    assert torch.equal(linears[1](x), linears[1].product(x))
    group_linears(linears)
    linears[0](x)
    x.mul_(2)
    assert torch.equal(linears[1](x), linears[1].product(x))


@torch.no_grad()
def test_nothing_is_kept_after_the_call_of_the_module(counted):
    """Autograd counts no writes through `.data`, so in a model an output must not outlive the call that computed it."""
    torch.manual_seed(0)
    block = nn.ModuleDict({name: low_rank(16, 8) for name in ("q_proj", "k_proj")})
    block.forward = lambda x: (block["q_proj"](x), block["k_proj"](x))
    assert fuse_projections(block) == 1
    x, (q, k) = torch.randn(1, 16), block.values()
    q(x)
    k.right.data.mul_(2)
    assert torch.equal(k(x), k.product(x)) and counted == []
    assert all(torch.equal(y, linear.product(x)) for y, linear in zip(block(x), (q, k))) and counted == [2]
    handle = q.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        block(x)
    handle.remove()
    x.data.mul_(2)
    assert torch.equal(k(x), k.product(x)) and k.group is not None
    block.forward = lambda x: (block["q_proj"](x),)
    block(x)
    assert k.group is None  # a whole call did not take an output: the linears do not read one tensor


@torch.no_grad()
def test_linears_of_different_inputs_leave_their_group(linears, counted):
    group_linears(linears[:2])
    for _ in range(3):
        x, y = torch.randn(1, 16), torch.randn(1, 16)
        assert torch.equal(linears[0](x), linears[0].product(x)) and torch.equal(linears[1](y), linears[1].product(y))
    assert counted == [2] and linears[0].group is None


def test_groups_that_cannot_be():
    for linears in (
        [low_rank(16, 8)],
        [low_rank(16, 8), low_rank(12, 8)],
        [low_rank(16, 8), low_rank(16, 8, bias=True)],
    ):
        with pytest.raises(ValueError, match="at least two linears"):
            group_linears(linears)


@torch.no_grad()
def test_a_model_decodes_the_same(counted):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    replace_linears(model.model.layers)
    ids = torch.randint(0, 64, (2, 7))
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert surgery.fuse_projections(model) == 4 and fuse_projections(model) == 0
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert counted == [3, 2, 3, 2] * 5
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    other = copy.deepcopy(model)
    linear = other.model.layers[0].self_attn.k_proj
    assert linear.group[0].linears[1] is linear
    counted.clear()
    logits = model(ids[:1, :1]).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(ids[:1, :1]).logits, logits, atol=1e-6)
    assert counted[:4] == [3, 2, 3, 2]


def test_attention_over_an_encoder_is_left_alone():
    model = nn.ModuleDict({"encoder_attn": nn.ModuleDict({"q_proj": low_rank(8, 8), "k_proj": low_rank(8, 8)})})
    assert fuse_projections(model) == 0
