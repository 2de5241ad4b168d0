"""`surgery bench train`: the training loop beside a bare one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler_util import Kernel

from surgery.core.errors import SurgeryError
from surgery.eval.speed import kernel_split
from surgery.eval.speed.model import SHAPES, make_llama
from surgery.eval.speed.run import bench
from surgery.eval.speed.tables import kernel_lines, lost_share, result_tables
from surgery.eval.speed.train_distill import (
    MODELS,
    TINY,
    flops_per_token,
    install_recipe,
    select_cases,
)
from surgery.modeling.cache import mixer_modules


def test_training_runs_in_both_loops(tmp_path):
    """The same model, by a bare loop and by surgery's, and both are timed."""
    out = tmp_path / "out.json"
    result = bench("train", sizes="small", device="cpu", only="original", out=out)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result)) and result["complete"]
    (row,) = result["rows"]
    assert row["ours_ms"] > 0 and row["bare_ms"] > 0 and len(row["losses"]) == 2
    assert all(6 < loss < 8 for loss in row["losses"]) and lost_share(row) < 1
    assert result_tables(result)
    with pytest.raises(SurgeryError, match="no case"):
        bench("train", sizes="small", device="cpu", only="nothing")


def test_no_time_for_a_case_is_an_incomplete_result():
    result = bench("train", sizes="small", device="cpu", only="original", time_limit=1e-6)
    assert result["rows"] == [] and not result["complete"]
    assert result_tables(result) is not None


# -- healing ---------------------------------------------------------------------------------------
def test_healing_is_measured_with_a_teacher_beside_the_trainer(tmp_path):
    out = tmp_path / "out.json"
    result = bench("train", sizes="small", device="cpu", stage="distill", only="tiny,-gated,-sharded", out=out)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result)) and result["complete"]
    trainer, healed, step = result["rows"]
    assert (trainer["change"], healed["change"]) == ("original, Trainer", "hybrid-25")
    for row in (trainer, healed):
        assert row["ms"] > 0 and row["tokens_per_second"] == pytest.approx(TINY.positions / row["ms"] * 1e3)
        assert row["seconds_to_full_speed"] > 0
    assert healed["losses"][0] > 0 and healed["references"] == {} and not healed["graph"]
    assert healed["start"] in ("cold", "warm", "same process")
    assert step["ratio"] == pytest.approx(step["ms"] / step["original_ms"])
    assert any("x its time" in line for line in result_tables(result) if isinstance(line, str))


def test_cases_of_several_devices_say_that_one_process_is_too_few():
    (row, *_) = bench("train", sizes="small", device="cpu", stage="distill", only="sharded,-gated,-trainer")["rows"]
    assert row["note"] == "needs several GPUs: accelerate launch"


@pytest.mark.slow
def test_a_model_sharded_by_fsdp2_is_measured(tmp_path):
    """The command of docs/performance.md for 8B, here with two processes on the CPU; each phase is a line."""
    root = Path(__file__).parents[2]
    config = (root / "recipes" / "accelerate" / "fsdp2.yaml").read_text()
    (tmp_path / "fsdp2.yaml").write_text(config + "use_cpu: true\n")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp2.yaml")]
    words = ["bench", "train", "--stage", "distill", "--sizes", "small", "--device", "cpu", "--only", "sharded,-gated"]
    done = subprocess.run(
        [*launch, "--num_processes", "2", "-m", "surgery", *words, "--out", str(tmp_path / "rows.json")],
        cwd=root, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["processes"] == 2 and rows["rows"][-1]["change"] == "hybrid-25" and rows["rows"][-1]["losses"][0] > 0
    assert "tiny, sharded, hybrid-25: weights divided over the devices" in done.stdout + done.stderr


def test_stages_and_cases_that_do_not_exist():
    with pytest.raises(SurgeryError, match="--stage 'distil' is not one of lm, distill"):
        bench("train", sizes="small", device="cpu", stage="distil")
    with pytest.raises(SurgeryError, match="--stage is an option of bench train"):
        bench("linear", sizes="small", device="cpu", stage="distill")
    with pytest.raises(SurgeryError, match="no case of bench train --stage distill"):
        select_cases("full", "7b")
    assert [(case.name, change) for case, change in select_cases("full", "135m,-64k,-gated,-step,-compiled")] == [
        ("135M, 8K tokens", "original, Trainer"),
        ("135M, 8K tokens", "hybrid-25"),
    ]


def test_three_quarters_of_the_layers_have_mixers():
    with torch.device("meta"):
        model = make_llama({**SHAPES["small"], "num_hidden_layers": 8}, "meta", torch.float32)
    install_recipe(model, "hybrid-25")
    assert [path for path, _ in mixer_modules(model)] == [f"model.layers.{i}.self_attn" for i in (0, 1, 3, 4, 5, 7)]


def test_operations_a_token():
    """8 N + 8 D V for student and teacher: 0.85 + 0.23 GFLOP for the layers and heads of 135M, 7.8 + 2.1 for 1B."""
    assert flops_per_token(MODELS["135M"], True) / 1e9 == pytest.approx(0.85 + 0.23, abs=0.01)
    assert flops_per_token(MODELS["1B"], True) / 1e9 == pytest.approx(7.8 + 2.1, abs=0.1)
    assert flops_per_token(MODELS["1B"], False) == 0.75 * flops_per_token(MODELS["1B"], True)


def test_kernels_of_both_passes_belong_to_the_part_that_launched_them():
    """On a CPU operators stand for kernels: every product of matrices takes one microsecond."""
    torch.manual_seed(0)
    student, teacher = (make_llama(TINY.shape, "cpu", torch.float32) for _ in range(2))
    install_recipe(student, "hybrid-25")
    ids_BT = torch.randint(256, (2, 64))
    with kernel_split.label_modules(student, teacher), kernel_split.profile_gpu(torch.device("cpu")) as recorded:
        with torch.profiler.record_function(kernel_split.PREFIX + "loss"):
            with torch.no_grad():
                target = teacher(ids_BT, use_cache=False).logits
            loss = (student(ids_BT, use_cache=False).logits - target).square().mean()
        loss.backward()
    products = [event for event in recorded.events() if event.name == "aten::mm"]
    for event in products:
        event.kernels.append(Kernel("gemm", 0, 1.0))
    times = kernel_split.part_times(recorded)
    layers, linears = 2, 7
    assert (
        times["teacher"] == layers * linears and times["loss"] == 4
    )  # heads of both, and two of the student's backwards
    assert times["linears"] == 3 * layers * linears and times["mixer"] > 0
    assert sum(times.values()) == len(products)


def test_kernels_are_known_by_name():
    triton = {"wy_forward": "mixer"}
    names = {
        "wy_forward": "mixer",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1": "softmax attention",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "products",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8": "float32 products",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..FusedAdamMathFunctor..>": "optimizer",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise and others",
    }
    for name, kind in names.items():
        assert kernel_split.kernel_kind(name, triton) == kind
    times = dict.fromkeys(names, 2.0)
    assert sum(kernel_split.kind_shares(times).values()) == pytest.approx(1)
    row = {
        "case": "135M",
        "change": "hybrid-25",
        "kernels": kernel_split.kernel_rows(times, 2),
        "gpu_ms": 1.0,
        "ms": 2.0,
    }
    lines = kernel_lines({**row, "kinds": kernel_split.kind_shares(times), "launches": 5})
    assert len(lines) == 3 and "5 launches" in lines[0]
