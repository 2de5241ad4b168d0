"""Mixtures of experts: experts as linears of their own, calibrated on the tokens that the router sends to them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import killing
from helpers.forked import run_processes
from helpers.small import checkpoint_logits, make_recipe
from helpers.small_experts import KINDS, MERGED, SPLIT, STORED_MERGED, write_experts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import surgery
import surgery.calibration.partition
from surgery.architectures.experts import RoutedExperts
from surgery.calibration.moments import InputMoments
from surgery.calibration.routing import RoutedTokens, shared_weight
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.structures import StructuredLinear

EXPERTS = [{"match": f"expert.{role}", "structure": "low_rank"} for role in ("gate", "up", "down")]
ONLY_EXPERTS = {"structure": "dense", "keep": 0.5, "rules": EXPERTS}
QUICK = {"allocate": "uniform", "curvature": "none", "sweeps": 1}


def random_ids(rows: int, length: int = 32, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.safetensors"
    save_file({"input_ids": random_ids(16)}, path)
    return str(path)


@pytest.mark.parametrize("kind", SPLIT)
def test_exact_at_full_rank_and_back(kind, experts, tmp_path):
    """Every expert is replaced, the router is not; the model loads, generates, is saved again and multiplied out."""
    source, out = experts(kind), tmp_path / "out"
    report = surgery.convert(str(source), {"structure": "low_rank", "rank": "full"}, out)
    roles = [role for record in report["modules"] for role in record["roles"]]
    assert {"expert.gate", "expert.up", "expert.down"} <= set(roles)
    ids = random_ids(2)
    wanted, model = checkpoint_logits(source, ids), AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)
    routed = [m for m in model.modules() if isinstance(m, RoutedExperts)]
    assert routed and all(
        isinstance(m, StructuredLinear) for r in routed for n, m in r.named_modules() if n.count(".") == 1
    )
    stored, before = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    routers = [
        n
        for n in before
        if n.endswith((".gate.weight", "shared_expert_gate.weight", "router.weight", "router.layer.weight"))
    ]
    assert routers and all(torch.equal(stored[name], before[name]) for name in routers)
    assert model.generate(ids[:1, :5], max_new_tokens=3, do_sample=False).shape == (1, 8)
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == stored.keys()
    surgery.densify(out, tmp_path / "dense")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    assert {n: t.shape for n, t in dense.items()} == {n: t.shape for n, t in before.items()}
    torch.testing.assert_close(checkpoint_logits(tmp_path / "dense", ids), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_calibrated_experts_are_closer_on_the_tokens_routed_to_them(kind, experts, inputs, tmp_path):
    """On text that was not used, the output of the experts has a smaller error than with truncated singular values."""
    source = experts(kind)
    surgery.convert(str(source), ONLY_EXPERTS, tmp_path / "free")
    fitted = {**ONLY_EXPERTS, **QUICK, "calibrate": "independent"}
    report = surgery.convert(str(source), fitted, tmp_path / "fitted", calibration=inputs)
    original = AutoModelForCausalLM.from_pretrained(source).eval()
    calls = {}
    handles = [
        module.register_forward_hook(lambda _, args, out, path=path: calls.__setitem__(path, (args, out)))
        for path, module in original.named_modules()
        if path.endswith("mlp.experts")
    ]
    with torch.no_grad():
        original(random_ids(16, seed=2))
    [handle.remove() for handle in handles]
    errors = {}
    for name in ("free", "fitted"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            gaps = [(model.get_submodule(path)(*args) - out).norm() / out.norm() for path, (args, out) in calls.items()]
        errors[name] = max(gaps)
    assert errors["fitted"] < 0.97 * errors["free"], errors
    layers, selected = len(calls), 2
    gate = [record for record in report["modules"] if record["roles"] == ["expert.gate"]]
    assert sum(record["rows"] for record in gate) == layers * selected * 14 * 32  # 14 of 16 windows are fitted to


def test_sequential_calibration_of_a_mixture_lowers_the_loss(experts, inputs, tmp_path):
    recipe = {"structure": "low_rank", "keep": 0.5, "sweeps": 2, "allocate": "measured"}
    fitted = surgery.convert(str(experts("olmoe")), recipe, tmp_path / "fitted", calibration=inputs)
    surgery.convert(str(experts("olmoe")), recipe, tmp_path / "free")
    ids = random_ids(8, seed=3)
    wanted = checkpoint_logits(experts("olmoe"), ids)
    errors = [(checkpoint_logits(tmp_path / name, ids) - wanted).norm() for name in ("fitted", "free")]
    assert errors[0] < errors[1], errors
    assert fitted["allocation"]["kept"] in ("uniform", "measured") and "measured" in fitted["allocation"]
    shown = repr(surgery.inspect(tmp_path / "fitted"))
    assert "calibration rows that were routed to it" in shown
    macs = surgery.inspect(tmp_path / "fitted")["macs_per_token"]
    attention, expert, head = 2 * 3072, 2 * 3 * 32 * 48, 32 * 96
    assert macs["before"] == 2 * 2 * expert // 2 + attention + head


def test_padding_is_no_row_of_an_expert(experts, tmp_path):
    mask = torch.ones(16, 32, dtype=torch.int64)
    mask[:, 20:] = 0
    save_file({"input_ids": random_ids(16), "attention_mask": mask}, tmp_path / "padded.safetensors")
    recipe = {**ONLY_EXPERTS, "sweeps": 1, "allocate": "measured"}
    report = surgery.convert(
        str(experts("qwen3_moe")), recipe, tmp_path / "out", calibration=str(tmp_path / "padded.safetensors")
    )
    for role in ("gate", "down"):
        rows = [record["rows"] for record in report["modules"] if record["roles"] == [f"expert.{role}"]]
        assert sum(rows) == 2 * 2 * 14 * 20


def test_an_expert_without_tokens_borrows_and_is_named(inputs, tmp_path):
    source = write_experts("mixtral", tmp_path / "source", num_local_experts=5)
    state = load_file(source / "model.safetensors")
    for name in state:
        if name.endswith("block_sparse_moe.gate.weight"):  # scores 0, s, 1.5 s, -s, -1.5 s: expert 0 is never among two
            state[name] = state[name][1:2] * torch.tensor([[0.0], [1.0], [1.5], [-1.0], [-1.5]])
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    recipe = {"structure": "low_rank", "keep": 0.5, "sweeps": 1}
    report = surgery.convert(str(source), recipe, tmp_path / "out", calibration=inputs)
    rare = [record for record in report["modules"] if ".experts.0." in record["name"]]
    sizes = {"expert.gate": 32, "expert.up": 32, "expert.down": 48}
    for record in rare:
        assert (record["rows"], record["shared_rows"]) == (0, sizes[record["roles"][0]])
    assert len(rare) == 6 and all(r["rows"] for r in report["modules"] if ".experts.1." in r["name"])
    assert "average rows of all experts" in repr(surgery.inspect(tmp_path / "out"))
    assert checkpoint_logits(tmp_path / "out", random_ids(2)).isfinite().all()


def test_borrowed_moments_are_average_rows():
    """Moments with rows of the pool added, each with the weight rows / pool, equal the borrowed ones."""
    generator = torch.Generator().manual_seed(0)
    x, x0, pool, pool0 = (torch.randn(n, 6, generator=generator) for n in (3, 3, 40, 40))
    for shape in ((4, 6), (9, 6)):  # K is stored, or computed from E[x0 x^T]
        weight = torch.randn(*shape, generator=generator)
        moments, shared = InputMoments({"w": (weight, False)}), InputMoments({"all": (shared_weight(6, weight), False)})
        moments.add(x, x0)
        shared.add(pool, pool0)
        moments.borrow(shared, 5)
        moments.means()
        scale = (5 / 40) ** 0.5
        wanted = InputMoments({"w": (weight, False)})
        wanted.add(torch.cat([x, scale * pool]), torch.cat([x0, scale * pool0]))
        wanted.count = 8
        wanted.means()
        assert (moments.count, moments.borrowed) == (8, 5)
        torch.testing.assert_close(moments.c_II, wanted.c_II)
        torch.testing.assert_close(moments.cross("w"), wanted.cross("w"))
        assert moments.energy("w") == pytest.approx(wanted.energy("w"), rel=1e-5)


def test_rows_of_experts_divide_the_tokens():
    index, weight = torch.tensor([[0, 2], [1, 0], [2, 1]]), torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]])
    tokens = RoutedTokens(torch.arange(3.0)[:, None], torch.arange(3.0)[:, None] + 10, index, weight)
    x, x0, w = tokens.rows_of(0)
    assert (x.flatten().tolist(), x0.flatten().tolist()) == ([0, 1], [10, 11])
    torch.testing.assert_close(w, torch.tensor([[0.7], [0.4]]))
    summed = sum((tokens.rows_of(e)[0] * tokens.rows_of(e)[2]).square().sum() for e in range(3))
    x, _, w = tokens.rows_of_all()
    torch.testing.assert_close((x * w).square().sum(), summed)


def test_merged_tensors_on_disk_are_read_expert_by_expert(experts, tmp_path):
    """A checkpoint that stores 3-D tensors gives the same converted checkpoint as one that stores a tensor for each
    matrix.
    """
    source, merged = experts("qwen3_moe"), tmp_path / "merged"
    shutil.copytree(source, merged)
    model, state = AutoModelForCausalLM.from_pretrained(source), load_file(source / "model.safetensors")
    plain = {name: t.contiguous() for name, t in model.state_dict().items()}
    assert any(t.dim() == 3 for t in plain.values()) and not any(t.dim() == 3 for t in state.values())
    save_file(plain, merged / "model.safetensors", metadata={"format": "pt"})
    for folder in (source, merged):
        surgery.convert(str(folder), ONLY_EXPERTS, tmp_path / f"{folder.name}-out")
    one, other = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in ("model", "merged"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", MERGED)
def test_experts_in_another_layout_stay_dense_and_are_named(kind, experts, tmp_path):
    plan = surgery.plan(str(experts(kind)), {"structure": "low_rank", "keep": 0.5})
    note = next(note for note in plan["notes"] if "stay dense" in note)
    model = AutoModelForCausalLM.from_pretrained(experts(kind))
    inside = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert f"{inside:,} parameters" in note and ".experts" in note
    assert not any("router" in target["name"] for target in plan["targets"])


def test_killed_and_resumed_to_the_same_bytes(experts, inputs, tmp_path, capfd):
    recipe = make_recipe(structure="low_rank", keep=0.5, calibration=inputs, sweeps=1, allocate="measured")
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(experts("deepseek_v2")), recipe, out, resume=resume), tmp_path, kills=3
    )
    names = ("model.safetensors", "config.json")
    assert resumed
    for out in resumed:
        assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in names)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_give_the_bytes_of_one(inputs, tmp_path, monkeypatch):
    """Row shards of two windows, so that some experts get rows in one of the processes only."""
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 64)
    source = write_experts("qwen3_moe", tmp_path / "source", num_hidden_layers=1, num_experts=12)
    recipe = make_recipe(**{**ONLY_EXPERTS, "calibration": inputs, "allocate": "measured", "sweeps": 1})
    for count in (1, 2):
        out = tmp_path / f"out-{count}"
        assert run_processes(count, lambda _, out=out: convert(str(source), recipe, out, device="cpu")) == [0] * count
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out-1" / name).read_bytes() == (tmp_path / "out-2" / name).read_bytes()


def test_a_model_in_memory_gets_the_bits_of_the_command(experts, inputs, tmp_path):
    source, recipe = experts("mixtral"), {"structure": "low_rank", "keep": 0.5, **QUICK}
    surgery.convert(str(source), recipe, tmp_path / "command", calibration=inputs)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    surgery.apply(model, recipe, calibration=inputs)
    model.save_pretrained(tmp_path / "applied")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("command", "applied"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    ids = random_ids(2)
    with torch.no_grad():
        before = model(ids).logits
        torch.testing.assert_close(checkpoint_logits(tmp_path / "applied", ids), before, rtol=1e-5, atol=1e-6)
        surgery.densify(model)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 1
    torch.testing.assert_close(checkpoint_logits(tmp_path / "dense", ids), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe"])
def test_mixers_and_experts_together(kind, experts, tmp_path):
    """A window that covers the text equals softmax attention; experts at full rank beside it stay exact, also step by
    step.
    """
    recipe = {
        "structure": "low_rank",
        "rank": "full",
        "rules": [{"match": "attention.*", "structure": "dense"}],
        "attention": {"mixer": "window", "window": 64},
    }
    surgery.convert(str(experts(kind)), recipe, tmp_path / "out")
    ids = random_ids(2)
    wanted, model = checkpoint_logits(experts(kind), ids), AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)
        first = model(ids[:, :20], use_cache=True)
        step = model(ids[:, 20:21], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(step.logits[:, 0], wanted[:, 20], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("live", [False, True], ids=["command", "in memory"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_mixers_beside_dense_experts(kind, live, experts, tmp_path):
    """Experts that all stay dense are stored one by one, and load as such."""
    recipe = {"structure": "dense", "attention": {"mixer": "window", "window": 64}}
    if live:
        model = AutoModelForCausalLM.from_pretrained(experts(kind))
        surgery.apply(model, recipe).save_pretrained(tmp_path / "out")
    else:
        surgery.convert(str(experts(kind)), recipe, tmp_path / "out")
    ids = random_ids(2)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, checkpoint_logits(experts(kind), ids), rtol=1e-4, atol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, loaded(ids).logits)
    with pytest.raises(SurgeryError, match="no structured linears"):
        surgery.densify(str(tmp_path / "out"), tmp_path / "dense")
    rules = [{"match": "attention.output", "structure": "low_rank", "keep": 0.5}]
    surgery.convert(str(experts(kind)), {**recipe, "rules": rules}, tmp_path / "structured")
    surgery.densify(str(tmp_path / "structured"), tmp_path / "dense")
    dense, structured = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("dense", "structured")
    )
    with torch.no_grad():
        torch.testing.assert_close(dense(ids).logits, structured(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", STORED_MERGED)
def test_experts_of_merged_files_in_memory_and_in_the_command(kind, experts, inputs, tmp_path):
    """Calibrated, both give the same bits, closer than without data; the live model, multiplied out, is saved as merged
    tensors.
    """
    source, recipe = experts(kind), {**ONLY_EXPERTS, **QUICK}
    surgery.convert(str(source), recipe, tmp_path / "command", calibration=inputs)
    surgery.convert(str(source), recipe, tmp_path / "free")
    model, ids = AutoModelForCausalLM.from_pretrained(source).eval(), random_ids(8, seed=3)
    surgery.apply(model, recipe, calibration=inputs)
    model.save_pretrained(tmp_path / "applied")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("command", "applied"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    wanted = checkpoint_logits(source, ids)
    fitted, free = ((checkpoint_logits(tmp_path / name, ids) - wanted).norm() for name in ("command", "free"))
    assert fitted < free
    with torch.no_grad():
        before = model(ids).logits
        surgery.densify(model)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "dense")
    dense, stored = (load_file(folder / "model.safetensors") for folder in (tmp_path / "dense", source))
    assert {name: t.shape for name, t in dense.items()} == {name: t.shape for name, t in stored.items()}
    torch.testing.assert_close(checkpoint_logits(tmp_path / "dense", ids), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", STORED_MERGED)
def test_experts_of_merged_files_are_resumed_to_the_same_bytes(kind, experts, inputs, tmp_path, capfd):
    recipe = make_recipe(
        structure="low_rank", keep=0.5, calibration=inputs, sweeps=1, allocate="uniform", curvature="none"
    )
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(experts(kind)), recipe, out, resume=resume), tmp_path, kills=1
    )
    for out in resumed:
        for name in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_mixers_are_refused_on_latent_attention(kind, experts):
    with pytest.raises(SurgeryError, match="multi-head latent attention"):
        surgery.plan(str(experts(kind)), {"structure": "dense", "attention": {"mixer": "linear"}})


def test_rules_for_roles_and_single_experts(experts):
    rules = [{"match": "expert.down", "keep": 0.25}, {"match": "*.experts.0.*", "structure": "dense"}]
    plan = surgery.plan(str(experts("mixtral")), {"structure": "low_rank", "keep": 0.5, "rules": rules})
    keep = {target["name"]: target["keep"] for target in plan["targets"]}
    assert keep["model.layers.0.mlp.experts.1.w2"] == 0.25 and keep["model.layers.0.mlp.experts.1.w1"] == 0.5
    assert not any(".experts.0." in name for name in keep)
    with pytest.raises(SurgeryError, match=r"unknown role 'expert.middle'"):
        make_recipe(structure="low_rank", rules=[{"match": "expert.middle", "keep": 0.5}])


def write_big_config(folder: Path, layers: int) -> Path:
    from helpers import random_llama

    folder.mkdir()
    config = {**random_llama.make_config("30b-a3b"), "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("layers", [1, pytest.param(48, marks=pytest.mark.slow)])
def test_plan_of_a_30b_mixture_from_the_config_alone(layers, tmp_path):
    """Sizes of Qwen3-30B-A3B: 30.5 billion parameters, 3.4 billion active."""
    plan = surgery.plan(str(write_big_config(tmp_path / "big", layers)), "btt-half")
    expert, attention, width = 3 * 768 * 2048, 2 * 2048 * (4096 + 512), 2048
    rest = 2 * 151936 * width + width + layers * (2 * width + 2 * 128 + 128 * width)
    totals = plan["totals"]
    assert totals["modules"] == layers * (128 * 3 + 4)
    assert totals["model_before"] == rest + layers * (128 * expert + attention)
    assert totals["active_before"] == rest + layers * (8 * expert + attention)
    assert totals["model_before"] - totals["model_after"] == totals["params_before"] - totals["params_after"]
    assert any("config.json alone" in note for note in plan["notes"])
    if layers == 48:
        assert totals["model_before"] == 30_532_122_624 and totals["active_before"] == 3_353_032_704
    with pytest.raises(SurgeryError, match=r"has neither model\.safetensors nor"):
        surgery.convert(str(tmp_path / "big"), "btt-half", tmp_path / "out")


def test_too_many_experts_are_refused(tmp_path):
    folder = write_big_config(tmp_path / "big", 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "num_experts": 2**14, "moe_intermediate_size": 8, "hidden_size": 64})
    )
    with pytest.raises(SurgeryError, match=r"49,152 experts in 3 layers, over 32,768"):
        surgery.plan(str(folder), "btt-half")


def test_a_damaged_table_of_experts_is_refused(experts, tmp_path):
    out = tmp_path / "out"
    surgery.convert(str(experts("qwen3_moe")), ONLY_EXPERTS, out)
    config = json.loads((out / "config.json").read_text())
    modules = config["quantization_config"]["modules"]
    modules["model.layers.0.mlp.experts.99.up_proj"] = modules.pop("model.layers.0.mlp.experts.0.up_proj")
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(SurgeryError, match=r"no module 'model.layers.0.mlp.experts.99.up_proj'"):
        AutoModelForCausalLM.from_pretrained(out)


def test_every_kind_is_tested():
    assert set(KINDS) == {*SPLIT, *MERGED}
