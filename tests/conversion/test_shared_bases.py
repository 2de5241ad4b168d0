"""share: experts: the gate matrices of a layer's experts store one basis, and so do the up matrices."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from helpers import killing
from helpers.forked import run_processes
from helpers.small import checkpoint_logits, make_recipe, relative
from helpers.small_experts import write_experts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import surgery
import surgery.calibration.partition
from surgery.conversion.convert import convert
from surgery.core.errors import SurgeryError
from surgery.modeling.modules import build_module
from surgery.structures import Metric
from surgery.structures.shared_basis import SharedBasis, SharedLowRankLinear, basis_path, shared_factors, squared_error

SHARED = {
    "structure": "dense",
    "keep": 0.5,
    "rules": [{"match": "expert.*", "structure": "low_rank", "share": "experts"}],
    "sweeps": 3,
    "allocate": "uniform",
    "curvature": "none",
}


def random_ids(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 96, (rows, 32), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.safetensors"
    save_file({"input_ids": random_ids(16)}, path)
    return str(path)


@pytest.fixture(scope="module")
def converted(experts, inputs, tmp_path_factory):
    """A calibrated conversion of a mixtral, whose names in the files are not its paths: (report, folder)."""
    out = tmp_path_factory.mktemp("converted") / "out"
    return surgery.convert(str(experts("mixtral")), SHARED, out, calibration=inputs), out


# -- the fit -----------------------------------------------------------------------------------------------------
def make_problem(gram: str, scales=(40.0, 9.0, 3.0)):
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(7, 5, generator=g, dtype=torch.float64) for _ in scales]
    metrics = []
    for scale in scales:
        x, y = (torch.randn(int(scale) + 6, n, generator=g, dtype=torch.float64) for n in (5, 7))
        g_OO = {"none": None, "diagonal": y.square().mean(0), "full": y.mT @ y / len(y)}[gram]
        metrics.append(Metric(x.mT @ x / len(x) + 0.01 * torch.eye(5, dtype=torch.float64), g_OO))
    return weights, metrics, list(scales)


@pytest.mark.parametrize("gram", ["none", "diagonal", "full"])
def test_the_fit_is_a_minimum_over_the_basis_and_over_every_left_factor(gram):
    weights, metrics, scales = make_problem(gram)
    (start, start_RI), (lefts, right_RI) = shared_factors(weights, metrics, scales, 2, 200, min_gain=0.0)
    least = squared_error(weights, metrics, scales, lefts, right_RI)
    assert least < squared_error(weights, metrics, scales, start, start_RI)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-2, -1e-2):
        step_RI = size * torch.randn(2, 5, generator=generator, dtype=torch.float64)
        assert squared_error(weights, metrics, scales, lefts, right_RI + step_RI) > least
        moved = [left + size * torch.randn(7, 2, generator=generator, dtype=torch.float64) for left in lefts]
        assert squared_error(weights, metrics, scales, moved, right_RI) > least


@pytest.mark.parametrize("rank", [5, 8])
def test_full_rank_is_exact_to_the_bit(rank):
    weights, metrics, scales = make_problem("full")
    ((lefts, right_RI),) = shared_factors(weights, metrics, scales, rank, 3)
    assert all(torch.equal(left @ right_RI, weight) for left, weight in zip(lefts, weights))


def test_an_expert_with_more_rows_gets_the_smaller_error():
    """The same two experts, with the weights of their rows exchanged: the basis follows the one with more rows."""
    weights, metrics, _ = make_problem("none", (20.0, 20.0))

    def errors(scales):
        *_, (lefts, right_RI) = shared_factors(weights, metrics, scales, 2, 30)
        return [m.relative_error(w, left @ right_RI) for w, m, left in zip(weights, metrics, lefts)]

    often, rarely = errors([100.0, 1.0]), errors([1.0, 100.0])
    assert often[0] < rarely[0] and rarely[1] < often[1]


def test_without_statistics_the_start_is_the_best_of_its_rank():
    weights, _, scales = make_problem("none", (1.0, 1.0, 1.0))
    ((lefts, right_RI),) = shared_factors(weights, [Metric()] * 3, scales, 2, 3)
    tail = torch.linalg.svdvals(torch.cat(weights))[2:].square().sum()
    assert squared_error(weights, [Metric()] * 3, scales, lefts, right_RI) == pytest.approx(float(tail), rel=1e-9)


# -- plans ----------------------------------------------------------------------------------------------------------
def test_a_plan_counts_each_basis_once_and_gives_a_larger_rank(experts):
    source = str(experts("qwen3_moe"))
    own = surgery.plan(source, {**SHARED, "rules": [{"match": "expert.*", "structure": "low_rank"}]})
    plan = surgery.plan(source, SHARED)
    ranks = {name: {t["name"]: t["first"]["rank"] for t in p["targets"]} for name, p in (("own", own), ("plan", plan))}
    gate, down = "model.layers.0.mlp.experts.1.gate_proj", "model.layers.0.mlp.experts.1.down_proj"
    assert ranks["plan"][gate] == 24 * 32 * 6 // 2 // (6 * 24 + 32) == 13 and ranks["own"][gate] == 6
    assert ranks["plan"][down] == ranks["own"][down]
    stored = 2 * 2 * 13 * (6 * 24 + 32) + 2 * 6 * 6 * (24 + 32)  # layers, gate and up, rank; down
    assert plan["totals"]["params_after"] == stored
    active = plan["totals"]["active_before"] - plan["totals"]["active_after"]
    every, selected = 2 * 2 * 13 * 32, 2 * 2 * (2 * 13 * 24 + 6 * (24 + 32))  # the bases are read for every token
    assert active == 2 * 2 * 3 * 24 * 32 - every - selected
    assert any("share 4 bases" in note and "expert.down" in note for note in plan["notes"])
    assert any("shared basis rank 13" in row["structure"] for row in plan["rows"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"structure": "btt", "rules": [], "share": "experts"}, r"only structure low_rank has \(got structure: btt\)"),
        ({"structure": "auto", "rules": [], "share": "experts"}, r"got structure: auto"),
        ({"rules": [{"match": "expert.down", "structure": "low_rank", "share": "experts"}]}, r"no matrix of expert.gate or"),
        ({"rules": [*SHARED["rules"], {"match": "expert.gate", "keep": 0.02}]}, r"rank 1 already stores 176. Raise keep to 0.039"),
        (
            {"rules": [*SHARED["rules"], {"match": "*.experts.0.gate_proj", "rank": 3}]},
            r"must have one rank \(got 3, None\)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_share_is_refused_by_the_plan(change, message, experts):
    with pytest.raises(SurgeryError, match=message):
        surgery.plan(str(experts("qwen3_moe")), {**SHARED, **change})


def test_models_without_experts_of_their_own_are_refused(experts, tmp_path):
    with pytest.raises(SurgeryError, match=r"stay dense \(.*Experts at model.layers.0"):
        surgery.plan(str(experts("minimax_m3_vl_text")), {"structure": "low_rank", "keep": 0.5, "share": "experts"})
    from transformers import AutoConfig

    AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=32, vocab_size=96).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(SurgeryError, match="this model has no routed experts"):
        surgery.plan(str(tmp_path), {"structure": "low_rank", "keep": 0.5, "share": "experts"})


def test_rules_switch_sharing_off_and_a_single_expert_has_its_own(experts):
    rules = [{"match": "expert.up", "share": "none"}, {"match": "*.experts.[1-9].gate_proj", "structure": "dense"}]
    plan = surgery.plan(
        str(experts("qwen3_moe")), {"structure": "low_rank", "keep": 0.5, "share": "experts", "rules": rules}
    )
    assert not any("share" in target["first"] for target in plan["targets"])
    with pytest.raises(SurgeryError, match="share: write experts, input or none"):
        make_recipe(structure="low_rank", share="layers")


# -- conversions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_exact_at_full_rank_saved_again_and_back(kind, experts, tmp_path):
    source, out, ids = experts(kind), tmp_path / "out", random_ids(2)
    report = surgery.convert(str(source), {"structure": "low_rank", "rank": "full", "share": "experts"}, out)
    wanted, model = checkpoint_logits(source, ids), AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)
    stored = load_file(out / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == report["totals"]["params_after"]
    assert (
        sum("_basis.weight" in name for name in stored) == sum(isinstance(m, SharedBasis) for m in model.modules()) > 0
    )
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    surgery.densify(out, tmp_path / "dense")
    before, dense = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "dense"))
    assert {n: t.shape for n, t in dense.items()} == {n: t.shape for n, t in before.items()}
    torch.testing.assert_close(checkpoint_logits(tmp_path / "dense", ids), wanted, rtol=1e-4, atol=1e-5)


def test_calibrated_counted_and_reported(converted, experts, tmp_path):
    """Closer than a projection of the weights on text that was not used; the report counts what the files hold."""
    report, out = converted
    source, ids = experts("mixtral"), random_ids(8, seed=3)
    surgery.convert(str(source), SHARED, tmp_path / "free")
    wanted = checkpoint_logits(source, ids)
    assert relative(checkpoint_logits(out, ids), wanted) < 0.95 * relative(
        checkpoint_logits(tmp_path / "free", ids), wanted
    )
    size = {
        n: sum(t.numel() for t in load_file(f / "model.safetensors").values()) for n, f in (("a", source), ("b", out))
    }
    totals = report["totals"]
    assert size["a"] - size["b"] == totals["replaced_params_before"] - totals["replaced_params_after"]
    gate = [record for record in report["modules"] if record["roles"] == ["expert.gate"]]
    assert [record["structure"].get("share") for record in gate] == ["experts"] * 8
    assert sum(record["rows"] for record in gate) == 2 * 2 * 14 * 32 and max(record["sweeps"] for record in gate) == 3
    firsts = [record["params_after"] for record in gate if ".experts.0." in record["name"]]
    assert firsts == [gate[1]["params_after"] + 13 * 32] * 2
    assert "low_rank shared basis" in repr(surgery.inspect(out))


def test_other_structures_trials_and_tuning_beside_shared_bases(experts, inputs, tmp_path):
    recipe = {
        "structure": "low_rank",
        "keep": 0.5,
        "share": "experts",
        "sweeps": 1,
        "tune": {"layers": 1, "model": 1},
    }
    report = surgery.convert(str(experts("mixtral")), recipe, tmp_path / "out", calibration=inputs)
    assert report["allocation"]["kept"] in ("uniform", "measured") and report["tune"]["by_layer"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    bases = {module.basis for module in model.modules() if isinstance(module, SharedLowRankLinear)}
    assert len(bases) == 4
    for tuned in (*report["tune"]["by_layer"].values(), report["tune"]["whole"]):
        assert tuned["end"] <= tuned["start"]


def test_killed_and_resumed_to_the_same_bytes(experts, inputs, tmp_path, capfd):
    recipe = make_recipe(**{**SHARED, "sweeps": 1}, calibration=inputs, tune={"layers": 0, "model": 1})
    whole, *resumed = killing.convert_with_kills(
        lambda out, resume: convert(str(experts("mixtral")), recipe, out, resume=resume), tmp_path, kills=1
    )
    assert resumed
    for out in resumed:
        for name in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_give_the_bytes_of_one(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 64)
    source = write_experts("qwen3_moe", tmp_path / "source", num_hidden_layers=1, num_experts=5)
    recipe = make_recipe(**SHARED, calibration=inputs)
    for count in (1, 2):
        out = tmp_path / f"out-{count}"
        assert run_processes(count, lambda _, out=out: convert(str(source), recipe, out, device="cpu")) == [0] * count
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out-1" / name).read_bytes() == (tmp_path / "out-2" / name).read_bytes()


def test_a_model_in_memory_gets_the_bits_of_the_command(converted, experts, inputs, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(experts("mixtral")).eval()
    surgery.apply(model, SHARED, calibration=inputs)
    model.save_pretrained(tmp_path / "applied")
    one, other = (load_file(folder / "model.safetensors") for folder in (converted[1], tmp_path / "applied"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert surgery.inspect(model)["checks"] == {"stored_params": 30112, "as_reported": True, "structured_linears": 24}
    ids = random_ids(2)
    copied = copy.deepcopy(model)
    model(ids, labels=ids).loss.backward()
    assert all(m.weight.grad is not None for m in model.modules() if isinstance(m, SharedBasis))
    with torch.no_grad():
        before = copied(ids).logits
        surgery.densify(copied)
        torch.testing.assert_close(copied(ids).logits, before, rtol=1e-4, atol=1e-5)
    assert not any("basis" in name for name, _ in copied.named_modules())


def test_an_offloaded_model_computes_the_same(converted):
    from accelerate import cpu_offload

    model, ids = AutoModelForCausalLM.from_pretrained(converted[1]).eval(), random_ids(2)
    with torch.no_grad():
        wanted = model(ids).logits
        assert torch.equal(cpu_offload(model, torch.device("cpu"))(ids).logits, wanted)


def test_lora_adapts_the_linears_and_not_the_bases(converted):
    from peft import LoraConfig, get_peft_model

    from surgery.modeling.lora import all_linears

    model = AutoModelForCausalLM.from_pretrained(converted[1])
    names = all_linears(model, set())
    assert "model.layers.0.mlp.experts.0.w1" in names and not any("basis" in name for name in names)
    with pytest.raises(ValueError, match="takes no adapter"):
        get_peft_model(model, LoraConfig(target_modules=["w1_basis"]))


def test_integers_are_refused(converted, tmp_path):
    with pytest.raises(SurgeryError, match="shares its basis with the other experts"):
        surgery.quantize(str(converted[1]), tmp_path / "int8")


def test_damaged_tables_are_refused(converted, tmp_path):
    path = "model.layers.0.mlp.experts.1.w1"
    for number, (change, message) in enumerate(
        [
            ({"rank": 12}, r"experts.1.w1: a basis of rank 13 for 32 inputs does not fit an expert of rank 12"),
            ({"share": "layers"}, r"share: 'layers' of structure 'low_rank'"),
            ({"structure": "kronecker", "share": "experts"}, r"share: 'experts' of structure 'kronecker'"),
            ({"bits": 8}, r"is not stored as integers"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = json.loads((converted[1] / "config.json").read_text())
        config["quantization_config"]["modules"][path] |= change
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes((converted[1] / "model.safetensors").read_bytes())
        with pytest.raises(SurgeryError, match=message):
            AutoModelForCausalLM.from_pretrained(folder)


def test_a_basis_belongs_to_experts():
    with pytest.raises(SurgeryError, match="not the linear of an expert"):
        basis_path("model.layers.0.mlp.up_proj.")
    entry = {"structure": "low_rank", "rank": 2, "share": "experts", "in_features": 4, "out_features": 4, "bias": False}
    linear = build_module(entry, device="cpu")
    with pytest.raises(SurgeryError, match="without the basis"):
        linear(torch.ones(1, 4))
    split = {"structure": "split", "parts": {"a": entry}, "order": ["a"], "heads": 0}
    with pytest.raises(SurgeryError, match="a split entry reads"):
        build_module(split)
