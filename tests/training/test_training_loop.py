"""The training loop: runs, resumes bit-equal after a kill, refuses, stops at bad steps."""

from __future__ import annotations

import json
import os
import signal
import traceback

import pytest
import torch
from helpers.small_training import TINY_CHECKPOINT, healing_recipe, interrupt_at_step, read_losses

from surgery.core.errors import SurgeryError
from surgery.training.finetune import finetune

pytestmark = pytest.mark.usefixtures("without_curves")

DISTILL = {"kind": "distill", "trains": ["structured"], "ce_weight": 0.1}
LM = {"kind": "lm", "trains": ["all"], "ema": 0.9}


@pytest.fixture(scope="session")
def whole(btt, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "healed"
    return out, finetune(str(btt), healing_recipe(texts, DISTILL, LM), out, teacher=str(TINY_CHECKPOINT))


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_healing_brings_the_loss_down(whole):
    out, record = whole
    assert record["validation"]["after"]["loss"] < record["validation"]["before"]["loss"]
    assert record["validation"]["original"]["loss"] < record["validation"]["before"]["loss"]
    assert [stage["steps"] for stage in record["stages"]] == [4, 4]
    assert len(read_losses(out / "training")) == 8


def test_the_result_is_a_checkpoint_like_the_one_before(whole, btt):
    from transformers import AutoModelForCausalLM

    import surgery  # noqa: F401

    out, _ = whole
    before, after = weights(btt), weights(out)
    assert before.keys() == after.keys()
    assert all(before[n].dtype == after[n].dtype for n in before)
    assert any(not torch.equal(before[n], after[n]) for n in before)
    assert json.loads((btt / "config.json").read_text()) == json.loads((out / "config.json").read_text())
    assert json.loads((out / "surgery_report.json").read_text())["training"][0]["stages"]
    assert not out.with_name("healed.partial").exists()
    AutoModelForCausalLM.from_pretrained(out)


def test_what_is_not_trained_stays_as_it_was(btt, texts, tmp_path):
    finetune(str(btt), healing_recipe(texts, {"kind": "lm", "trains": ["mlp.up"], "tokens": 512}), tmp_path / "out")
    before, after = weights(btt), weights(tmp_path / "out")
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed and all(".mlp.up_proj." in n for n in changed)


def test_a_killed_run_goes_on_with_the_same_losses(whole, btt, texts, tmp_path, monkeypatch):
    """Killed in each stage, between two checkpoints."""
    from surgery.training.loop import TrainingLoop

    out = tmp_path / "healed"
    for resume, place in ((False, (0, 3)), (True, (1, 3)), (True, None)):
        pid = os.fork()
        if pid == 0:
            step = TrainingLoop._step

            def dying(self, taken, step=step, place=place):
                if (self.at.stage, self.at.step) == place:
                    os.kill(os.getpid(), signal.SIGKILL)
                step(self, taken)

            TrainingLoop._step = dying
            code = 1
            try:
                finetune(str(btt), healing_recipe(texts, DISTILL, LM), out, teacher=str(TINY_CHECKPOINT), resume=resume)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert status == (signal.SIGKILL if place else 0)
    assert read_losses(out / "training") == read_losses(whole[0] / "training")
    assert all(torch.equal(a, b) for a, b in zip(weights(out).values(), weights(whole[0]).values()))


def test_data_read_by_a_process_beside_is_the_same(btt, texts, tmp_path, monkeypatch):
    """As on a GPU; checkpoints hold where the data goes on as well."""
    from surgery.training import loop
    from surgery.training.data.prefetch import ProcessPrefetcher

    stage = {"kind": "lm", "trains": ["new"], "tokens": 1024}
    finetune(str(btt), healing_recipe(texts, stage), tmp_path / "thread")
    monkeypatch.setattr(loop, "prefetch", lambda items, ahead, device: ProcessPrefetcher(items, ahead))
    with monkeypatch.context() as patch:
        interrupt_at_step(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            finetune(str(btt), healing_recipe(texts, stage), tmp_path / "process")
    finetune(str(btt), healing_recipe(texts, stage), tmp_path / "process", resume=True)
    assert read_losses(tmp_path / "process" / "training") == read_losses(tmp_path / "thread" / "training")


def test_accumulation_changes_nothing_but_rounding(btt, texts, tmp_path):
    stage = {"kind": "lm", "trains": ["new"], "tokens": 512}
    runs = []
    for rows in (4, 1):
        finetune(str(btt), healing_recipe(texts, {**stage, "rows": rows}), tmp_path / f"rows{rows}")
        runs.append(torch.tensor([loss for _, _, loss in read_losses(tmp_path / f"rows{rows}" / "training")]))
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_changes_nothing(btt, texts, tmp_path):
    stage = {"kind": "lm", "trains": ["new"], "tokens": 512}
    for memory in ("keep", "checkpoint"):
        finetune(str(btt), healing_recipe(texts, {**stage, "memory": memory}), tmp_path / memory)
    pair = [torch.tensor(read_losses(tmp_path / m / "training")) for m in ("keep", "checkpoint")]
    torch.testing.assert_close(*pair)


def test_every_stage_is_in_the_precision_asked_for(btt, texts, tmp_path, monkeypatch):
    """Accelerate takes a model that it has met for prepared, and leaves its precision out."""
    from surgery.training.stages.lm import LMStage

    seen, plain = [], LMStage.losses

    def losses(self, models, batch):
        linear = models.student.get_submodule("model.layers.0.self_attn.q_proj")
        hook = linear.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
        parts = plain(self, models, batch)
        hook.remove()
        return parts

    monkeypatch.setattr(LMStage, "losses", losses)
    stage = {"kind": "lm", "trains": ["new"], "tokens": 256, "rows": 4}
    for name in ("one", "two"):  # two stages, two runs
        told = healing_recipe(texts, stage, stage, precision="bf16")
        finetune(str(btt), told, tmp_path / name, device="cpu", track="none")
    assert seen == [torch.bfloat16] * 4


def test_weight_normalised_cores_end_as_ordinary_ones(btt, texts, tmp_path):
    finetune(str(btt), healing_recipe(texts, {"kind": "lm", "tokens": 512, "weight_norm": "cores"}), tmp_path / "out")
    assert weights(btt).keys() == weights(tmp_path / "out").keys()


@pytest.mark.parametrize(
    "stage, options, said",
    [
        ({"kind": "distill"}, {}, "--teacher SRC"),
        ({"kind": "lm", "length": 4096}, {}, "max_position_embeddings"),
        ({"kind": "lm", "trains": ["structurd"]}, {}, "did you mean 'structured'"),
        ({"kind": "lm", "rows": 3}, {}, "divisor of 4"),
        ({"kind": "lm", "rates": {"mixer": 1e-3}}, {}, "did you mean 'mixers'"),
        ({"kind": "lm"}, {"track": "wandbb"}, "choose one of"),
        ({"kind": "lm"}, {"teacher": "nowhere/at/all"}, "does not exist"),
    ],
)
def test_refusals(btt, texts, tmp_path, stage, options, said):
    with pytest.raises(SurgeryError, match=said):
        finetune(str(btt), healing_recipe(texts, stage), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir()), "what is refused leaves nothing"


def test_an_interrupted_run_is_not_overwritten(btt, texts, tmp_path):
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(SurgeryError, match="--resume"):
        finetune(str(btt), healing_recipe(texts, {"kind": "lm"}), tmp_path / "out")


# -- bad steps ---------------------------------------------------------------------------------------------------
@pytest.fixture
def poison_loss(monkeypatch):
    """The loss of the step that begins with this example is no number, in the second layer's MLP or of itself."""
    from surgery.training.stages.lm import LMStage

    plain = LMStage.losses

    def poison(where: str, example: int):
        def losses(self, models, batch):
            hit = example in batch["index"].tolist()
            module = models.student.model.layers[1].mlp
            hook = (
                module.register_forward_hook(lambda *a: a[-1] * float("nan"), prepend=True)
                if hit and where == "mlp"
                else None
            )
            parts = plain(self, models, batch)
            if hook is not None:
                hook.remove()
            if hit and where == "loss":
                parts = {**parts, "total": parts["total"] * float("inf")}
            return parts

        monkeypatch.setattr(LMStage, "losses", losses)

    return poison


def test_a_step_of_no_numbers_stops_the_run_before_it_does_harm(btt, texts, tmp_path, poison_loss):
    """Though the loop looks only every fourth step; the message names step, module and checkpoint."""
    poison_loss("mlp", 13)  # the fourth step of four rows
    told = healing_recipe(texts, {"kind": "lm", "trains": ["new"], "tokens": 2048}, log=4, checkpoint=2)
    with pytest.raises(SurgeryError, match=r"step 4.*model\.layers\.1\.mlp\b.*step-0000002.*--skip-bad-steps") as error:
        finetune(str(btt), told, tmp_path / "out")
    assert "first NaN or infinite activations" in str(error.value)
    record = finetune(str(btt), told, tmp_path / "out", resume=True, skip_bad_steps=True)
    assert record["stages"][0]["steps"] == 8
    assert all(bool(torch.isfinite(t).all()) for t in weights(tmp_path / "out").values())


def test_skipping_a_step_is_not_taking_it(btt, texts, tmp_path, poison_loss):
    """Weights after a bad last step are those before it."""
    stage = {"kind": "lm", "trains": ["new"], "schedule": {"name": "constant", "warmup": 0}}
    finetune(str(btt), healing_recipe(texts, {**stage, "tokens": 512}), tmp_path / "two")
    poison_loss("loss", 9)
    finetune(str(btt), healing_recipe(texts, {**stage, "tokens": 768}), tmp_path / "three", skip_bad_steps=True)
    assert all(
        torch.equal(a, b) for a, b in zip(weights(tmp_path / "two").values(), weights(tmp_path / "three").values())
    )


def test_a_loss_that_runs_away_stops_the_run(btt, texts, tmp_path):
    stage = {
        "kind": "lm",
        "trains": ["new"],
        "tokens": 8192,
        "rate": 0.3,
        "schedule": {"name": "constant", "warmup": 0},
    }
    with pytest.raises(SurgeryError, match=r"diverged.*largest activations"):
        finetune(str(btt), healing_recipe(texts, stage, guard={"diverged": 1.2}), tmp_path / "out")


def test_a_damaged_checkpoint_is_named(btt, texts, tmp_path):
    from surgery.training.checkpoints import CheckpointManager

    state = tmp_path / "checkpoints" / "stage-00-step-0000002" / "state.json"
    state.parent.mkdir(parents=True)
    (state.parent.with_name("stage-00-step-0000004.tmp")).mkdir()
    state.write_text("{")
    found = CheckpointManager(tmp_path / "checkpoints", 2)
    assert found.latest() == state.parent
    with pytest.raises(SurgeryError, match="damaged"):
        found.read_position(state.parent)


@pytest.mark.parametrize("file", ["optimiser.safetensors", "weights.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_file_of_a_checkpoint_says_how_to_go_on(file, damage, tmp_path):
    from surgery.training.checkpoints import CheckpointManager, TrainPosition, TrainState

    manager = CheckpointManager(tmp_path / "checkpoints", 2)
    state = TrainState({"weight": torch.zeros(64, 64)}, ema={"weight": torch.zeros(64, 64)})
    path = manager.save(TrainPosition(step=2), state) / file
    path.unlink() if damage == "removed" else path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(
        SurgeryError, match=rf"{file} is missing or damaged\. Remove the folder .*step-0000002 to resume"
    ):
        manager.restore_weights(path.parent, state.parameters)
        manager.restore(path.parent, state)


def test_another_recipe_does_not_go_on(btt, texts, tmp_path, poison_loss):
    poison_loss("loss", 9)
    with pytest.raises(SurgeryError, match="NaN or infinite"):
        finetune(str(btt), healing_recipe(texts, {"kind": "lm"}), tmp_path / "out")
    with pytest.raises(SurgeryError, match="another recipe"):
        finetune(str(btt), healing_recipe(texts, {"kind": "lm", "rate": 2e-4}), tmp_path / "out", resume=True)


def test_a_cache_stands_in_for_the_teacher(btt, texts, tmp_path):
    """The same losses, to the precision its targets are stored in."""
    from surgery.training.data.dataset import make_data
    from surgery.training.models import load_causal_lm, load_source_tokenizer, open_trainable
    from surgery.training.recipe import stage_data_config
    from surgery.training.teacher_cache.write_read import write_teacher_cache

    stage = {"kind": "distill", "top_k": 8, "tokens": 768}
    told = healing_recipe(texts, stage)
    source = open_trainable(str(TINY_CHECKPOINT))
    data = make_data(stage_data_config(told, told.stages[0]), load_source_tokenizer(source), 64, told.seed)
    teacher = load_causal_lm(source, torch.float32).eval()
    write_teacher_cache(teacher, data, tmp_path / "cache", top_k=8, examples=12)
    finetune(str(btt), told, tmp_path / "model", teacher=str(TINY_CHECKPOINT))
    cached = healing_recipe(texts, stage, teacher={"cache": str(tmp_path / "cache")})
    finetune(str(btt), cached, tmp_path / "cached")
    pair = [torch.tensor(read_losses(tmp_path / name / "training")) for name in ("model", "cached")]
    torch.testing.assert_close(*pair, rtol=5e-3, atol=1e-3)
    hot = healing_recipe(texts, {**stage, "temperature": 2.0}, teacher={"cache": str(tmp_path / "cache")})
    with pytest.raises(SurgeryError, match="temperature must be 1"):
        finetune(str(btt), hot, tmp_path / "hot")
