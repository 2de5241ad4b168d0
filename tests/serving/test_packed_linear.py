"""Fused linears with parts of different structure: products, loading, and slices for several processes.

Needs no vLLM.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers.forked import run_processes
from helpers.slow import slow_where

from surgery.core.errors import SurgeryError
from surgery.modeling.joined import connect_joined
from surgery.modeling.modules import build_module, quantized_entry
from surgery.modeling.quantize import quantize_module
from surgery.structures.quantized import Storage
from surgery.vllm.packed_linear import PackedLinear, Shard

IN = 48
SHIPPED = {
    "low_rank": {"structure": "low_rank", "rank": 8},
    "pivoted_low_rank": {"structure": "pivoted_low_rank", "rank": 8},
    "btt": {"structure": "btt", "blocks": [4, 4], "rank": 3},
    "monarch": {"structure": "monarch", "blocks": [4, 6], "rank": 1},
    "kronecker": {"structure": "kronecker", "blocks": [4, 4], "rank": 3},
    "mlr": {"structure": "mlr", "levels": 3, "ranks": [3, 0, 2], "rank": 5},
    "mlbtc": {"structure": "mlbtc", "levels": [1, [4, 4], 2], "ranks": [3, 1, 2], "rank": 9},
    "tensor_train": {"structure": "tensor_train", "cores": 3, "rank": 3},
    "block_tensor_train": {"structure": "block_tensor_train", "cores": 3, "rank": 2},
    "folded": {"structure": "folded"},
    "dense": {"structure": "dense"},
}


def entry(structure: str, out: int, in_: int = IN) -> dict:
    return {**SHIPPED[structure], "in_features": in_, "out_features": out, "bias": False}


def random_module(spec: dict) -> torch.nn.Module:
    module = build_module(spec, "cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        if spec["structure"] == "pivoted_low_rank":
            module.place.copy_(torch.randperm(spec["out_features"]))
    return module


def fill(packed: PackedLinear, modules: list, skip: tuple = ()) -> dict[str, torch.Tensor]:
    flats = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in packed.tensors.items()}
    for part, module in enumerate(modules):
        for name, tensor in module.state_dict().items():
            if (part, name) not in skip:
                packed.copy_part(flats[name], name, part, tensor)
    return flats


@pytest.mark.parametrize("structure", SHIPPED)
def test_one_part_is_its_module(structure):
    module, x = random_module(entry(structure, 32)), torch.randn(5, IN)
    packed = PackedLinear([entry(structure, 32)], IN, (32,), torch.float32)
    flats = fill(packed, [module])
    packed.check_complete("layer", flats)
    assert torch.equal(packed(flats, x), module(x))


def test_linears_of_a_pruned_mlp_have_fewer_features():
    """gate and up of 24 neurons beside each other where the model has 32, and down, which reads them."""
    gate = {"structure": "pruned", "in_features": IN, "out_features": 24, "bias": False}
    down = {"structure": "pruned", "in_features": 24, "out_features": IN, "bias": False}
    modules, x = [random_module(gate) for _ in range(2)], torch.randn(5, IN)
    packed = PackedLinear([gate, gate], IN, (32, 32), torch.float32)
    flats = fill(packed, modules)
    packed.check_complete("layer", flats)
    neurons = packed(flats, x)
    torch.testing.assert_close(neurons, torch.cat([module(x) for module in modules], -1))
    last = random_module(down)
    packed = PackedLinear([down], 32, (IN,), torch.float32)
    assert torch.equal(packed(fill(packed, [last]), neurons[:, :24]), last(neurons[:, :24]))
    with pytest.raises(SurgeryError, match="maps 48 features to 24"):
        PackedLinear([gate], IN, (16,), torch.float32)


def test_parts_of_different_structure_rank_and_dtype_lie_side_by_side():
    outs = (32, 16, 16, 8, 24, 16, 16, 16, 24, 32, 16)
    specs = [entry(name, out) for name, out in zip(SHIPPED, outs)]
    modules, x = [random_module(spec) for spec in specs], torch.randn(2, 3, IN)
    packed = PackedLinear([*specs[:-1], None], IN, outs, torch.float32)
    flats = fill(packed, modules)
    packed.check_complete("layer", flats)
    assert flats["place"].dtype == torch.int32
    torch.testing.assert_close(packed(flats, x), torch.cat([module(x) for module in modules], -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "names",
    [
        ("low_rank", "low_rank", "low_rank"),
        ("low_rank", "dense", "low_rank"),
        ("btt", "low_rank", "low_rank"),
        ("low_rank", "low_rank", "mlr", "low_rank"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_low_rank_parts_with_stacked_right_factors_give_the_parts_outputs(names, compiled):
    outs, ranks = (32, 16, 24, 16), (8, 3, 5, 2)
    specs = [
        {**entry(name, out), **({"rank": rank} if name == "low_rank" else {})}
        for name, out, rank in zip(names, outs, ranks)
    ]
    modules = [random_module(spec).double() for spec in specs]
    packed = PackedLinear(specs, IN, outs[: len(names)], torch.float64)
    flats = fill(packed, modules)
    run = torch.compile(packed.__call__, backend="eager") if compiled else packed
    for tokens in ((), (1,), (5,), (2, 3)):
        x = torch.randn(*tokens, IN, dtype=torch.float64)
        wanted = torch.cat([module(x) for module in modules], -1).detach()
        torch.testing.assert_close(run(flats, x), wanted, rtol=1e-12, atol=1e-12)


def test_a_run_of_low_rank_parts_has_one_product_with_the_input(monkeypatch):
    import torch.nn.functional as F

    products, linear = [], F.linear
    specs = [entry("low_rank", 32), entry("low_rank", 16), entry("low_rank", 16)]
    packed = PackedLinear(specs, IN, (32, 16, 16), torch.float32)
    flats = fill(packed, [random_module(spec) for spec in specs])
    monkeypatch.setattr(F, "linear", lambda x, w, *b: products.append(tuple(w.shape)) or linear(x, w, *b))
    packed(flats, torch.randn(5, IN))
    assert products == [(24, IN)]


def test_a_split_linear_keeps_its_order_and_biases():
    parts = {"query": {**entry("btt", 32), "bias": True}, "key": {**entry("low_rank", 16), "bias": True}}
    spec = {"structure": "split", "parts": parts, "order": ["query", "key"], "heads": 4}
    module, x = build_module(spec, "cpu"), torch.randn(5, IN)
    packed = PackedLinear([spec], IN, (48,), torch.float32)
    flats = fill(packed, [module])
    packed.check_complete("layer", flats)
    assert packed.has_biases and torch.equal(packed(flats, x), module(x))


def joined_entries(structure: str, outs: tuple[int, ...]) -> list[dict]:
    sizes = {"in_features": IN, "bias": False, "structure": "joined"}
    starts = [sum(outs[:i]) for i in range(len(outs))]
    matrix = {**SHIPPED[structure], "in_features": IN, "out_features": sum(outs), "bias": False}
    first = {**sizes, "out_features": outs[0], "matrix": matrix, "members": ["q", "k", "v"][: len(outs)]}
    return [first, *({**sizes, "out_features": o, "first": "q", "start": s} for o, s in zip(outs[1:], starts[1:]))]


@pytest.mark.parametrize("structure", [name for name in SHIPPED if name not in ("dense", "folded", "monarch")])
def test_joined_parts_are_one_product(structure):
    outs = (32, 16, 16)
    specs, x = joined_entries(structure, outs), torch.randn(2, 3, IN)
    modules = [build_module(spec, "cpu") for spec in specs]
    modules[0].joined = random_module({**specs[0]["matrix"]})
    connect_joined(dict(zip(("q", "k", "v"), modules)))
    packed = PackedLinear(specs, IN, outs, torch.float32)
    flats = fill(packed, modules)
    packed.check_complete("layer", flats)
    torch.testing.assert_close(packed(flats, x), torch.cat([module(x) for module in modules], -1))
    own, rest = random_module(entry("btt", 32)), joined_entries(structure, (16, 16))
    modules = [build_module(spec, "cpu") for spec in rest]
    modules[0].joined = random_module(rest[0]["matrix"])
    connect_joined(dict(zip(("q", "k"), modules)))
    packed = PackedLinear([entry("btt", 32), *rest], IN, outs, torch.float32)
    flats = fill(packed, [own, *modules])
    torch.testing.assert_close(packed(flats, x), torch.cat([module(x) for module in (own, *modules)], -1))


@pytest.mark.parametrize(
    ("structure", "bits"),
    slow_where(
        lambda structure, bits: bits == 4 and structure not in ("dense", "low_rank", "btt"),
        [(name, bits) for name in SHIPPED if name != "folded" for bits in (8, 4)],
    ),
)
def test_parts_stored_as_integers(structure, bits):
    outs, x = (32, 16), torch.randn(2, 3, IN)
    specs = [entry(structure, out) for out in outs]
    modules = [quantize_module(random_module(spec), Storage(bits, 16)) for spec in specs]
    stored = [quantized_entry(spec, Storage(bits, 16)) for spec in specs]
    packed = PackedLinear(stored, IN, outs, torch.float32)
    flats = fill(packed, modules)
    packed.check_complete("layer", flats)
    assert packed.tensors["weight"][1] == (torch.int8 if bits == 8 else torch.uint8)
    wanted = torch.cat([module(x) for module in modules], -1)
    torch.testing.assert_close(packed(flats, x), wanted)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(packed.__call__, backend="eager", fullgraph=True)(flats, x), wanted)
    with pytest.raises(SurgeryError, match=r"is torch\.float32 in the checkpoint, and torch\.u?int8 by its table"):
        packed.copy_part(flats["weight"], "weight", 0, torch.zeros(packed.shapes[0]["weight"]))


def test_parts_with_different_bits_or_none_lie_in_one_tensor_of_bytes():
    names, outs, x = ("low_rank", "low_rank", "dense", "btt", "low_rank"), (32, 17, 24, 16, 8), torch.randn(5, IN)
    storages = [Storage(8), None, Storage(4, 16), Storage(4), None]
    specs = [entry(name, out) for name, out in zip(names, outs)]
    modules = [random_module(spec) for spec in specs]
    modules = [m if s is None else quantize_module(m, s) for m, s in zip(modules, storages)]
    stored = [spec if s is None else quantized_entry(spec, s) for spec, s in zip(specs, storages)]
    packed = PackedLinear(stored, IN, outs, torch.float32)
    flats = fill(packed, modules)
    packed.check_complete("layer", flats)
    assert packed.tensors["weight"][1] == torch.uint8
    wanted = torch.cat([module(x) for module in modules], -1)
    torch.testing.assert_close(packed(flats, x), wanted)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(packed.__call__, backend="eager", fullgraph=True)(flats, x), wanted)


FP8_PARTS = {
    "low_rank": (Storage(8, format="fp8"), Storage(8, format="fp8")),
    "pivoted_low_rank": (Storage(8, format="fp8"), Storage(8, format="fp8")),
    "btt": (Storage(8, format="fp8"), Storage(8, format="fp8")),
    "monarch": (Storage(8, format="fp8"), Storage(8, format="fp8")),
    "dense": (Storage(8, format="fp8"), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("structure", FP8_PARTS)
def test_parts_in_fp8_round_their_inputs_as_their_modules_do(structure, dtype):
    """Bit for bit, and unlike the product of the stored values without rounded inputs."""
    torch.manual_seed(0)
    outs, x = (32, 16), torch.randn(2, 3, IN, dtype=dtype)
    specs = [entry(structure, out) for out in outs]
    modules = [random_module(spec).to(dtype) for spec in specs]
    modules = [m if s is None else quantize_module(m, s) for m, s in zip(modules, FP8_PARTS[structure])]
    stored = [spec if s is None else quantized_entry(spec, s) for spec, s in zip(specs, FP8_PARTS[structure])]
    packed = PackedLinear(stored, IN, outs, dtype)
    flats = fill(packed, modules)
    packed.check_complete("layer", flats)
    with torch.no_grad():
        found, wanted = packed(flats, x), torch.cat([module(x) for module in modules], -1)
        assert torch.equal(found, wanted)
        plain = x @ modules[0].dense().mT
        assert float((found[..., :32] - plain).norm() / plain.norm()) > 1e-3
        torch.compiler.reset()
        assert torch.equal(torch.compile(packed.__call__, backend="eager", fullgraph=True)(flats, x), wanted)
    with pytest.raises(
        SurgeryError, match=r"is torch\.float32 in the checkpoint, and torch\.float8_e4m3fn by its table"
    ):
        packed.copy_part(flats["weight"], "weight", 0, torch.zeros(packed.shapes[0]["weight"]))


def test_joined_and_split_parts_in_fp8():
    torch.manual_seed(0)
    storage, outs, x = Storage(8, format="fp8"), (32, 16, 16), torch.randn(5, IN)
    specs = joined_entries("low_rank", outs)
    specs[0]["matrix"] = quantized_entry(specs[0]["matrix"], storage)
    modules = [build_module(spec, "cpu") for spec in specs]
    modules[0].joined = quantize_module(random_module(joined_entries("low_rank", outs)[0]["matrix"]), storage)
    connect_joined(dict(zip(("q", "k", "v"), modules)))
    packed = PackedLinear(specs, IN, outs, torch.float32)
    with torch.no_grad():
        assert torch.equal(packed(fill(packed, modules), x), torch.cat([module(x) for module in modules], -1))


def test_fp8_is_cut_along_outputs_only():
    torch.manual_seed(0)
    storage, x = Storage(8, format="fp8"), torch.randn(5, IN)
    module = quantize_module(random_module(entry("low_rank", 32)), storage)
    stored = quantized_entry(entry("low_rank", 32), storage)
    packed = [PackedLinear([stored], IN, (32,), torch.float32, Shard(rank, 2, "out")) for rank in range(2)]
    with torch.no_grad():
        assert torch.equal(torch.cat([p(fill(p, [module]), x) for p in packed], -1), module(x))
    with pytest.raises(SurgeryError, match="low_rank matrix stored in fp8 is not cut along its inputs"):
        PackedLinear([stored], IN, (32,), torch.float32, Shard(0, 2, "in"))


def test_a_joined_linear_alone_in_its_layer():
    outs = (32, 16, 16)
    specs, x = joined_entries("btt", outs), torch.randn(5, IN)
    modules = [build_module(spec, "cpu") for spec in specs]
    modules[0].joined = random_module(specs[0]["matrix"])
    connect_joined(dict(zip(("q", "k", "v"), modules)))
    alone = [PackedLinear([spec], IN, (out,), torch.float32) for spec, out in zip(specs, outs)]
    flats = [fill(packed, [module]) for packed, module in zip(alone, modules)]
    assert [packed.follows for packed in alone] == ["", "q", "q"]
    whole = alone[0].whole(flats[0], x)
    torch.testing.assert_close(alone[0](flats[0], x), modules[0](x))
    for packed, module in zip(alone, modules):
        torch.testing.assert_close(packed.local_rows(whole), module(x))


def test_joined_parts_in_another_order_are_refused():
    specs = joined_entries("low_rank", (32, 16, 16))
    for wrong, outs in (
        ([None, *specs[1:]], (32, 16, 16)),
        (specs[::-1], (16, 16, 32)),
        ([specs[0], specs[2]], (32, 16)),
    ):
        with pytest.raises(SurgeryError, match="in another order than vLLM's model computes them"):
            PackedLinear(wrong, IN, outs, torch.float32)


def test_every_missing_tensor_is_noticed():
    specs = [entry("btt", 32), entry("pivoted_low_rank", 16), None]
    modules = [random_module(spec) for spec in [*specs[:2], entry("dense", 16)]]
    packed = PackedLinear(specs, IN, (32, 16, 16), torch.float32)
    for part, name in sorted(packed.missing):
        fresh = copy.deepcopy(packed)
        flats = fill(fresh, modules, skip=((part, name),))
        with pytest.raises(SurgeryError, match=f"lacks 1 of its tensors.*'{name}' of part {part}"):
            fresh.check_complete("layer", flats)


def test_unmatched_misshapen_and_repeated_tensors_are_refused():
    packed = PackedLinear([entry("low_rank", 32)], IN, (32,), torch.float32)
    flat = torch.zeros(packed.tensors["right"][0])
    with pytest.raises(SurgeryError, match="'scale' for part 0, which its table does not describe"):
        packed.copy_part(flat, "scale", 0, torch.zeros(3))
    with pytest.raises(SurgeryError, match=r"shape \[48, 8\] in the checkpoint, and \[8, 48\]"):
        packed.copy_part(flat, "right", 0, torch.zeros(48, 8))
    packed.copy_part(flat, "right", 0, torch.zeros(8, 48))
    with pytest.raises(SurgeryError, match="twice"):
        packed.copy_part(flat, "right", 0, torch.zeros(8, 48))
    with pytest.raises(SurgeryError, match="maps 48 features to 32, where the model has a linear from 48 to 40"):
        PackedLinear([entry("low_rank", 32)], IN, (40,), torch.float32)


def test_an_index_table_that_is_no_permutation_is_refused():
    spec = entry("pivoted_low_rank", 16)
    module = random_module(spec)
    module.place.zero_()
    packed = PackedLinear([spec], IN, (16,), torch.float32)
    flats = fill(packed, [module])
    with pytest.raises(SurgeryError, match="permutation"):
        packed.check_complete("layer", flats)


def run_slices(rank: int, count: int) -> None:
    """Run column and row parallel products on this process's slices, joined over gloo, and compare with the whole."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    for structure in ("low_rank", "btt", "dense", "folded"):
        outs = (32, 16)
        specs = [entry(structure, out) for out in outs]
        modules, x = [random_module(spec) for spec in specs], torch.randn(5, IN)
        packed = PackedLinear(specs, IN, outs, torch.float32, Shard(rank, count, "out"))
        local = packed(fill(packed, modules), x)
        gathered = [torch.empty_like(local) for _ in range(count)]
        dist.all_gather(gathered, local)
        halves = [part.split([out // count for out in outs], -1) for part in gathered]
        for number, module in enumerate(modules):
            whole = torch.cat([half[number] for half in halves], -1)
            torch.testing.assert_close(whole, module(x), rtol=0, atol=1e-4)
        packed = PackedLinear(specs[:1], IN, outs[:1], torch.float32, Shard(rank, count, "in"))
        partial = packed(fill(packed, modules[:1]), x.chunk(count, -1)[rank])
        dist.all_reduce(partial)
        torch.testing.assert_close(partial, modules[0](x), rtol=0, atol=1e-4)
        assert sum(size for size, _ in packed.tensors.values()) < sum(t.numel() for t in modules[0].parameters())
    dist.destroy_process_group()


def test_two_processes_compute_the_whole_product():
    assert run_processes(2, lambda rank: run_slices(rank, 2)) == [0, 0]


def computed_by(count: int, side: str, specs: list, modules: list, outs: tuple, segments: tuple = ()) -> list:
    """The linears of `count` processes, each with what it holds of the modules' tensors."""
    dtype = torch.float64
    shards = [Shard(rank, count, side, segments) for rank in range(count)]
    packed = [PackedLinear(specs, IN, outs, dtype, shard) for shard in shards]
    return [(p, fill(p, modules)) for p in packed]


def check_slices(specs: list, modules: list, outs: tuple, segments: tuple = ()) -> list:
    """Check that slices of outputs, and sums over slices of inputs, are the whole product; return the processes'
    linears."""
    modules = [module.double() for module in modules]
    x, found = torch.randn(5, IN, dtype=torch.float64), []
    for count in (2, 4):
        ranks = computed_by(count, "out", specs, modules, outs, segments)
        parts = segments or outs
        slices = [packed(flats, x).split([out // count for out in parts], -1) for packed, flats in ranks]
        whole = torch.cat([torch.cat(part, -1) for part in zip(*slices, strict=True)], -1)
        wanted = torch.cat([module(x) for module in modules], -1)
        torch.testing.assert_close(whole, wanted, rtol=0, atol=1e-9)
        found += ranks
    for spec, module, out in zip(specs, modules, outs, strict=True):
        for count in (2, 4):
            ranks = computed_by(count, "in", [spec], [module], (out,))
            total = sum(packed(flats, part) for (packed, flats), part in zip(ranks, x.chunk(count, -1), strict=True))
            torch.testing.assert_close(total, module(x), rtol=0, atol=1e-9)
            found += ranks
    return found


@pytest.mark.parametrize("structure", SHIPPED)
def test_slices_of_every_structure_are_the_whole_product(structure):
    torch.manual_seed(0)
    outs = (32, 16)
    specs = [entry(structure, out) for out in outs]
    ranks = check_slices(specs, [random_module(spec) for spec in specs], outs)
    assert ranks[0][0].is_whole[0] == (structure not in ("low_rank", "btt", "monarch", "dense", "folded"))


def test_where_blocks_or_ranks_do_not_divide_each_process_has_the_whole_matrix():
    torch.manual_seed(0)
    strided = {**entry("btt", 32), "order": "strided"}
    for spec in (
        strided,
        {**entry("btt", 32), "blocks": [1, 3], "rank": 2},
        {**entry("low_rank", 32), "rank": 20},
    ):
        outs = (spec["out_features"],)
        assert any(packed.is_whole[0] for packed, _ in check_slices([spec], [random_module(spec)], outs))


def test_q_k_and_v_in_one_matrix_are_cut_one_by_one():
    torch.manual_seed(0)
    spec = entry("low_rank", 64)
    check_slices([spec], [random_module(spec)], (64,), segments=(32, 16, 16))


@pytest.mark.parametrize("bits", [8, 4])
def test_slices_of_matrices_stored_as_integers(bits):
    torch.manual_seed(0)
    spec, x = entry("low_rank", 32), torch.randn(5, IN)
    module = quantize_module(random_module(spec), Storage(bits, 16))
    stored, flats = quantized_entry(spec, Storage(bits, 16)), []
    for side in ("out", "in"):
        packed = [PackedLinear([stored], IN, (32,), torch.float32, Shard(rank, 2, side)) for rank in range(2)]
        flats = [fill(p, [module]) for p in packed]
        parts = (x, x) if side == "out" else x.chunk(2, -1)
        found = [p(flat, part) for p, flat, part in zip(packed, flats, parts, strict=True)]
        whole = torch.cat(found, -1) if side == "out" else sum(found)
        torch.testing.assert_close(whole, module(x), rtol=0, atol=1e-4)


def test_slices_of_joined_parts():
    torch.manual_seed(0)
    outs = (32, 16, 16)
    specs, x = joined_entries("low_rank", outs), torch.randn(5, IN, dtype=torch.float64)
    modules = [build_module(spec, "cpu") for spec in specs]
    modules[0].joined = random_module(specs[0]["matrix"])
    connect_joined(dict(zip(("q", "k", "v"), [module.double() for module in modules])))
    slices = [packed(flats, x).split([16, 8, 8], -1) for packed, flats in computed_by(2, "out", specs, modules, outs)]
    for number, module in enumerate(modules):
        whole = torch.cat([part[number] for part in slices], -1)
        torch.testing.assert_close(whole, module(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("spec", "segments", "count", "side", "message"),
    [
        (entry("low_rank", 33), (), 2, "out", "2 processes must divide the 33 out features of a low_rank matrix"),
        (entry("kronecker", 32), (), 5, "in", "5 processes must divide the 48 in features of a kronecker matrix"),
        (entry("low_rank", 32), (25, 7), 2, "out", "2 processes must divide the 25 out features"),
    ],
)
def test_features_that_do_not_divide_are_refused(spec, segments, count, side, message):
    with pytest.raises(SurgeryError, match=message):
        PackedLinear([spec], IN, (spec["out_features"],), torch.float32, Shard(0, count, side, segments))
