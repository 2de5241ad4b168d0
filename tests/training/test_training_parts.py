"""Weight normalization, moving average, shares of a batch, the log, devices."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.small_training import healing_recipe, read_losses

from surgery.core.errors import SurgeryError
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT
from surgery.training.batches import BatchLayout
from surgery.training.data.prefetch import ProcessPrefetcher, ThreadPrefetcher, limit_tokenizer_threads
from surgery.training.logging import TrainingLog, draw_curve, result_table, tracker_names
from surgery.training.optim import WeightEMA
from surgery.training.weight_norm import add_core_norms, fold_core_norms, rms

pytestmark = pytest.mark.usefixtures("without_curves")


def layer():
    torch.manual_seed(0)
    return torch.nn.Sequential(STRUCTURES[BTT](32, 32, BTT(blocks=(4, 4), rank=2)))


def test_cores_may_shrink_but_not_outgrow_their_start():
    """gamma min(1, size / rms) M, section 5.1 of Qiu et al. 2024."""
    model, x = layer(), torch.randn(5, 32)
    before, y = model[0].weight.detach().clone(), model(x)
    names = add_core_norms(model, {"0.weight", "0.bias"})
    assert names == {"0.bias", "0.parametrizations.weight.original", "0.parametrizations.weight.0.gamma"}
    torch.testing.assert_close(model(x), y)
    with torch.no_grad():
        model[0].parametrizations["weight"].original.mul_(5)
        torch.testing.assert_close(rms(model[0].weight), rms(before))
        model[0].parametrizations["weight"].original.mul_(0.02)
        torch.testing.assert_close(model[0].weight, 0.1 * before)
        model[0].parametrizations["weight"][0].gamma.fill_(2)
    fold_core_norms(model)
    assert {n for n, _ in model.named_parameters()} == {"0.weight", "0.right", "0.bias"}
    torch.testing.assert_close(model[0].weight, 0.2 * before)


@pytest.mark.slow
def test_a_normalised_stage_resumes_with_the_same_losses(btt, texts, tmp_path, monkeypatch):
    """In the second stage, where the size that holds is that of the first one's end."""
    from surgery.training import finetune as verb
    from surgery.training.loop import TrainingLoop

    stages = {"kind": "lm", "tokens": 512}, {"kind": "lm", "tokens": 1024, "weight_norm": "cores"}
    verb.finetune(str(btt), healing_recipe(texts, *stages), tmp_path / "whole")
    step = TrainingLoop._step

    def dying(self, taken):
        if (self.at.stage, self.at.step) == (1, 3):
            raise KeyboardInterrupt
        step(self, taken)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingLoop, "_step", dying)
        verb.finetune(str(btt), healing_recipe(texts, *stages), tmp_path / "again")
    verb.finetune(str(btt), healing_recipe(texts, *stages), tmp_path / "again", resume=True)
    assert read_losses(tmp_path / "whole" / "training") == read_losses(tmp_path / "again" / "training")


def test_the_running_mean_is_a_mean():
    p = torch.nn.Parameter(torch.zeros(2))
    mean = WeightEMA({"p": p}, 0.5)
    expected = 0.0
    for step in range(30):
        p.data.fill_(float(step))
        mean.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    mean.swap()
    assert p.tolist() == pytest.approx([expected] * 2) and mean.means["p"].tolist() == [29.0, 29.0]


def test_shares_of_a_batch():
    assert BatchLayout.create(32, 8, 1, 2).accumulation_steps == 2
    assert BatchLayout.create(4, 8, 0, 2).rows == 2
    for batch, rows, world in ((5, 1, 2), (12, 5, 1)):
        with pytest.raises(SurgeryError, match="batch"):
            BatchLayout.create(batch, rows, 0, world)


@pytest.mark.parametrize("way", [lambda items: ThreadPrefetcher(items(), 1), lambda items: ProcessPrefetcher(items, 1)])
def test_reading_ahead_tells_of_errors_and_ends(way):
    def items():
        yield from (1, 2)
        raise SurgeryError("the shard is damaged")

    with way(items) as ready:
        assert next(ready) == 1 and next(ready) == 2
        with pytest.raises(SurgeryError, match="damaged"):
            next(ready)
    with way(lambda: iter(range(10**9))) as ready:
        assert [next(ready) for _ in range(9)] == list(range(9))
    with way(lambda: iter(range(3))) as ready:
        assert list(ready) == [0, 1, 2]


def test_a_reading_process_that_is_killed_is_named():
    import os
    import signal

    def dying():
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)
        yield 2

    with ProcessPrefetcher(dying, 1) as ready, pytest.raises(SurgeryError, match="the data process exited"):
        list(ready)


@pytest.mark.parametrize("parallel", [None, "true"])
def test_a_process_reads_what_a_thread_reads(texts, monkeypatch, parallel):
    """Steps with tensors, states and all; also where a command follows on threads of the tokenizer that have run, which
    a forked process would wait for."""
    if parallel is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
    from helpers.small_training import TINY_CHECKPOINT

    from surgery.calibration.data import load_tokenizer
    from surgery.training.batches import iter_steps
    from surgery.training.data.dataset import DataConfig, make_data

    def steps():
        data = make_data(DataConfig(sources=[{"path": str(texts)}]), load_tokenizer(TINY_CHECKPOINT), 32, 0)
        return iter_steps(data, 0, BatchLayout(4, 2), lambda told: int(told["valid"].sum()))

    load_tokenizer(TINY_CHECKPOINT)(["one text", "and another"] * 100)
    limit_tokenizer_threads()
    with ThreadPrefetcher(steps(), 2) as one, ProcessPrefetcher(steps, 2) as other:
        for _, a, b in zip(range(40), one, other):
            assert (a.num_counted, a.tokens, a.data_state) == (b.num_counted, b.tokens, b.data_state)
            same = [torch.equal(x[n], y[n]) for x, y in zip(a.batches, b.batches) for n in x]
            assert len(same) == 10 and all(same)


@pytest.mark.parametrize("given, kept", [(None, ""), ("true", ""), ("1", ""), ("false", "false"), ("0", "0")])
def test_commands_start_no_threads_of_the_tokenizer(monkeypatch, given, kept):
    """A value that asks for threads would let a forked process wait for ever; the data process uses all cores anyway."""
    import os
    import sys

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", given or "")
    if given is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    monkeypatch.delitem(sys.modules, "tokenizers")
    limit_tokenizer_threads()
    assert os.environ["TOKENIZERS_PARALLELISM"] == kept


def test_the_log_forgets_what_will_be_done_again(tmp_path):
    log = TrainingLog(tmp_path)
    for stage, step in ((0, 1), (0, 2), (1, 1), (1, 2)):
        log.add({"stage": stage, "step": step, "kind": "lm", "loss": float("nan"), "tokens": step})
    with open(log.path, "a") as file:
        file.write('{"stage": 1, "st')
    log.truncate_after(1, 1)
    assert [(line["stage"], line["step"]) for line in map(json.loads, log.path.open())] == [(0, 1), (0, 2), (1, 1)]
    assert log.lines()[0]["loss"] is None
    assert draw_curve(log.lines(), tmp_path / "curve.png") and not draw_curve([], tmp_path / "none.png")
    assert tracker_names("none") == []


def test_a_curve_is_never_empty(tmp_path, monkeypatch):
    """One point has a marker, and a stage without a finite loss says so."""
    from matplotlib.axes import Axes

    drawn: list[str] = []
    plot, text = Axes.plot, Axes.text
    monkeypatch.setattr(Axes, "plot", lambda self, *a, **k: drawn.append(a[2]) or plot(self, *a, **k))
    monkeypatch.setattr(Axes, "text", lambda self, *a, **k: drawn.append(a[2]) or text(self, *a, **k))
    line = {"stage": 0, "step": 1, "kind": "lm", "tokens": 1}
    assert draw_curve([{**line, "loss": 0.5}], tmp_path / "one.png")
    assert draw_curve([{**line, "loss": None}], tmp_path / "none.png")
    assert drawn == ["o-", "no finite loss was logged"]


@pytest.mark.parametrize("last, shown", [(0.2766, "loss 0.2766,"), (0.25, "loss 0.2766 -> 0.2500,")])
def test_one_loss_is_shown_once(last, shown):
    stage = {
        "kind": "distill",
        "steps": 1,
        "tokens": 8,
        "first_loss": 0.2766,
        "last_loss": last,
        "tokens_per_second": 1.0,
    }
    parts = result_table({"validation": {}, "stages": [stage], "delivered": {"says": "x"}})
    assert shown in "\n".join(map(str, parts))


def test_what_spreads_otherwise_is_refused():
    from types import SimpleNamespace

    from accelerate.utils import DistributedType

    from surgery.training.distributed.accelerator import _check_supported

    for kind in (DistributedType.MEGATRON_LM, DistributedType.FSDP):
        with pytest.raises(SurgeryError, match=r"fsdp2\.yaml"):
            _check_supported(SimpleNamespace(distributed_type=kind, is_fsdp2=False))


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"zero_optimization": {"stage": 0}}, "stage 0 shards nothing"),
        ({"optimizer": {"type": "Adam"}}, "set the optimizer in the recipe"),
        ({"bf16": {"enabled": True}}, "set precision: bf16"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "weights cannot be offloaded"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "only device: cpu is supported"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "unquantized"),
    ],
)
def test_settings_of_deepspeed_that_a_healing_cannot_keep(settings, why):
    from types import SimpleNamespace

    from accelerate.utils import DistributedType

    from surgery.training.distributed.accelerator import _check_supported

    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2}, **settings})
    state = SimpleNamespace(deepspeed_plugin=plugin)
    with pytest.raises(SurgeryError, match=why):
        _check_supported(SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, state=state))


def test_a_run_may_have_another_precision_than_the_one_before(tmp_path):
    """Accelerate remembers its first for the whole process."""
    from surgery.training.distributed.accelerator import make_accelerator

    assert make_accelerator("cpu", "bf16", "none", tmp_path).mixed_precision == "bf16"
    assert make_accelerator("cpu", "float32", "none", tmp_path).mixed_precision == "no"


def test_the_engine_s_loss_scale_follows_torch_s():
    """Halved at an overflow, doubled after 2,000 good steps, in words that torch's scaler goes on from."""
    from types import SimpleNamespace

    from surgery.training.distributed.deepspeed import INITIAL_SCALE, ZeroOptimizerStep

    told = []
    descent = ZeroOptimizerStep.__new__(ZeroOptimizerStep)
    descent.zero = SimpleNamespace(override_loss_scale=told.append)
    descent.restore_scale(INITIAL_SCALE)
    for overflow in [True, *[False] * 2000]:
        descent._rescale(overflow)
    assert told == [2.0**16, *[2.0**15] * 2000, 2.0**16]
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(descent.scaler_state())
    assert scaler.state_dict() == descent.scaler_state() == INITIAL_SCALE
