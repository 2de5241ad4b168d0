"""Mixers under autocast, as training runs them: what reaches the kernels, and what a layer keeps for its backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.architectures.attention import attention_paths
from surgery.core.dispatch import DispatchedOp, load_kernels
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.projections import split_linear
from surgery.modeling.attention import install

HYBRID = LinearAttention(  # the mixer of the recipes hybrid-25 and log-linear
    mask={"name": "hierarchical", "block": 512}, scores="delta", features="hedgehog", rope="both", output_gate="value",
    window=64, sinks=4,
)  # fmt: skip
GDN = LinearAttention(mask="gates", scores="delta", features="identity", rope="keep", window=64, sinks=4)
TOKENS = 96


def one_layer(config: Any, head_dim: int, heads: tuple[int, int] = (3, 1)) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    llama = LlamaConfig(
        hidden_size=21 * 4,
        intermediate_size=64,
        num_hidden_layers=1,
        vocab_size=64,
        max_position_embeddings=4096,
        **shape,
    )
    model = LlamaForCausalLM(llama)
    install(model, dict.fromkeys(attention_paths(model), config))
    return model.train()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DispatchedOp, Any, Any]]:
    """Collect the calls of all functions that a kernel may replace."""
    made: list[tuple[DispatchedOp, Any, Any]] = []
    run = DispatchedOp.__call__

    def record(op: DispatchedOp, *args: Any, **kwargs: Any) -> Any:
        made.append((op, args, kwargs))
        return run(op, *args, **kwargs)

    monkeypatch.setattr(DispatchedOp, "__call__", record)
    return made


def train_step(model: LlamaForCausalLM, tokens: int = TOKENS) -> None:
    ids_BT = torch.randint(0, 64, (2, tokens))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
    loss.backward()


@pytest.mark.parametrize("config", [HYBRID, GDN], ids=["hybrid", "gdn"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (7, 1)])
def test_kernels_accept_what_training_gives_them(
    config: Any, head_dim: int, heads: tuple[int, int], calls: list[Any]
) -> None:
    if not load_kernels():
        pytest.skip("needs Triton")
    train_step(one_layer(config, head_dim, heads))
    mask = "log_linear" if config is HYBRID else "semiseparable"
    names = {op.reference.__name__ for op, _, _ in calls}
    assert names == {"local_attention", "linear_features", "join_and_gate", mask}
    for op, args, kwargs in calls:
        if op.reference.__name__ in {"log_linear", "semiseparable"}:  # on a GPU, in bfloat16 (to_matmul_dtype)
            args = (*(t.bfloat16() for t in args[:3]), *args[3:])
        assert any(kernel.accepts(*args, **kwargs) for kernel in op.kernels), op.reference.__name__


def test_lambdas_of_levels_that_no_token_reaches_are_not_computed(calls: list[Any]) -> None:
    model = one_layer(HYBRID, 64)
    train_step(model, 1100)  # levels 0 .. 2 of blocks of 512 tokens
    (level,) = (args[5] for op, args, _ in calls if op.reference.__name__ == "log_linear")
    assert level.shape[-1] == 9 + 3
    gradient = model.model.layers[0].self_attn.mixer.mask.level.bias.grad.view(3, -1)
    assert gradient[:, :3].abs().min() > 0 and gradient[:, 3:].abs().max() == 0


def test_outputs_do_not_depend_on_the_levels_left_out() -> None:
    model, ids_BT = one_layer(HYBRID, 64), torch.randint(0, 64, (2, 1100))
    mask = model.model.layers[0].self_attn.mixer.mask
    torch.nn.init.normal_(mask.level.weight, std=0.3)
    trained = model(ids_BT, use_cache=False).logits
    with torch.no_grad():
        plain = model(ids_BT, use_cache=False).logits
    assert torch.allclose(trained, plain, atol=1e-5)


def test_split_products_have_the_values_and_gradients_of_float32() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 50, 64).bfloat16().requires_grad_()
    weight, bias = torch.randn(5, 64).requires_grad_(), torch.randn(5).requires_grad_()
    out = split_linear(x, weight, bias)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.linear(*wide)
    assert (out - expected).abs().max() < 1e-4 * expected.abs().max()
    down = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, weight, bias), down)
    theirs = torch.autograd.grad(expected, wide, down.double())
    for mine, other in zip(ours, theirs):
        assert (mine.double() - other).norm() < 5e-3 * other.norm()
