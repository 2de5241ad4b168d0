"""Two processes of vLLM: its parallel linears with structured parts, and whole engines, whose tokens equal transformers'.

Both are joined over gloo. Each process runs an engine of its own (executor external_launcher), because engines that start
their processes themselves take minutes on a CPU.
"""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from helpers.served import converted, expected, ragged_prompts
from serving.engines import ENVIRONMENT, apart, check_equal, engine, generate, needs_vllm

pytestmark = needs_vllm

WIDTH, HEAD, HEADS, GROUPS, HIDDEN, COUNT = 32, 8, 4, 2, 64, 2
SECONDS, TOKENS = 400, 8
STRUCTURES = {
    "low_rank": {"structure": "low_rank", "rank": 6},
    "btt": {"structure": "btt", "blocks": [4, 4], "rank": 2},
    "mlr": {"structure": "mlr", "levels": 2, "ranks": [3, 2], "rank": 5},
    "kronecker": {"structure": "kronecker", "blocks": [4, 4], "rank": 2},
}


@contextmanager
def process_of_vllm(rank: int, port: int):
    """vLLM's parallel state of one of two processes, joined over gloo."""
    os.environ.update(ENVIRONMENT)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = COUNT
    with set_current_vllm_config(config):
        init_distributed_environment(COUNT, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        initialize_model_parallel(COUNT, backend="gloo")
        yield
        destroy_model_parallel()
        destroy_distributed_environment()


def in_two_processes(function: Any, *args: Any) -> None:
    """Run a function of this module in two processes, function(rank, port, *args); each checks what it computes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    processes = [context.Process(target=function, args=(rank, port, *args)) for rank in range(COUNT)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()  # one waits for another that has failed
    assert codes == [0] * COUNT


def load(layer: Any, modules: list[Any], ids: list[Any]) -> None:
    """Load the tensors of a fused linear's parts as vLLM's loaders do."""
    for module, shard in zip(modules, ids, strict=True):
        for name, tensor in module.state_dict().items():
            parameter = attrgetter(name)(layer)
            parameter.weight_loader(parameter, tensor, *([] if shard is None else [shard]))
    layer.quant_method.process_weights_after_loading(layer)


def check_linears(rank: int, port: int) -> None:
    """Check the linears of a layer, of every structure."""
    with process_of_vllm(rank, port):
        for structure in STRUCTURES:
            pairs = linears_of_a_layer(rank, structure)
            assert len(pairs) == 7
            for found, wanted in pairs:
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def linears_of_a_layer(rank: int, structure: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (found, wanted) of each linear of a layer, with the outputs or sums of both processes."""
    from vllm.distributed import tensor_model_parallel_all_gather as gather
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    from surgery.modeling.modules import build_module
    from surgery.vllm.linear import SurgeryTable

    sizes = {
        "q_proj": (WIDTH, HEADS * HEAD),
        "k_proj": (WIDTH, GROUPS * HEAD),
        "v_proj": (WIDTH, GROUPS * HEAD),
        "o_proj": (HEADS * HEAD, WIDTH),
        "gate_proj": (WIDTH, HIDDEN),
        "up_proj": (WIDTH, HIDDEN),
        "down_proj": (HIDDEN, WIDTH),
    }
    entries = {
        f"l.{name}": {**STRUCTURES[structure], "in_features": i, "out_features": o, "bias": False}
        for name, (i, o) in sizes.items()
    }
    torch.manual_seed(0)
    modules = {name: build_module(entry, "cpu") for name, entry in entries.items()}
    for module in modules.values():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    x, hidden = torch.randn(5, WIDTH), torch.randn(5, HIDDEN)
    table = SurgeryTable(entries)
    table.packed_modules_mapping = {"qkv": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate_proj", "up_proj"]}
    common = {"bias": False, "quant_config": table, "params_dtype": torch.float32}
    qkv = QKVParallelLinear(WIDTH, HEAD, HEADS, GROUPS, prefix="l.qkv", **common)
    o = RowParallelLinear(HEADS * HEAD, WIDTH, prefix="l.o_proj", **common)
    gate_up = MergedColumnParallelLinear(WIDTH, [HIDDEN, HIDDEN], prefix="l.gate_up", **common)
    down = RowParallelLinear(HIDDEN, WIDTH, prefix="l.down_proj", **common)
    load(qkv, [modules[f"l.{name}_proj"] for name in "qkv"], ["q", "k", "v"])
    load(gate_up, [modules["l.gate_proj"], modules["l.up_proj"]], [0, 1])
    load(o, [modules["l.o_proj"]], [None])
    load(down, [modules["l.down_proj"]], [None])
    pairs = []
    for layer, names in ((qkv, ("q_proj", "k_proj", "v_proj")), (gate_up, ("gate_proj", "up_proj"))):
        wanted = [modules[f"l.{name}"](x) for name in names]
        parts = layer(x)[0].split([w.shape[-1] // COUNT for w in wanted], -1)
        pairs += [(gather(part.contiguous()), w) for part, w in zip(parts, wanted, strict=True)]
    for layer, name, inputs in ((o, "o_proj", x), (down, "down_proj", hidden)):
        pairs.append((layer(inputs.chunk(COUNT, -1)[rank].contiguous())[0], modules[f"l.{name}"](inputs)))
    return pairs


def test_linears_of_a_layer_equal_those_of_one_process():
    in_two_processes(check_linears)


def check_engines(rank: int, port: int, cases: list[tuple[Path, Any]], prompts: list[list[int]]) -> None:
    """Check the tokens of one engine after another."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(COUNT))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from vllm.distributed.device_communicators import cpu_communicator

    for number, (folder, wanted) in enumerate(cases):
        # Shared memory, which vLLM names by the address where its processes meet: here all engines have one.
        name = f"surgery-{port}-{number}"
        cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(lambda _, name=name: name)
        with engine(
            folder, tensor_parallel_size=COUNT, distributed_executor_backend="external_launcher", seed=0
        ) as llm:
            check_equal(generate(llm, prompts, TOKENS), wanted)


def test_tokens_of_two_engines_equal_those_of_transformers(source, hybrid, tmp_path):
    """Linears that are cut and that are not, a structured head; and a hybrid of mixers and softmax attention."""
    rules = [
        {"match": "attention.key", "structure": "dense"},
        {"match": "mlp.up", "structure": "kronecker", "keep": 0.6},
        {"match": "mlp.down", "structure": "mlr", "levels": 2, "keep": 0.6},
        {"match": "head", "structure": "low_rank", "keep": 0.6},
    ]
    linears = apart(converted, source, tmp_path / "OUT", structure="low_rank", keep=0.4, rules=rules)
    prompts = [*ragged_prompts(3, longest=60), [7]]
    cases = [(folder, apart(expected, folder, prompts, TOKENS)) for folder in (linears, hybrid)]
    in_two_processes(check_engines, cases, prompts)
