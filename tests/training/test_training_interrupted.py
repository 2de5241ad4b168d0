"""Runs that are interrupted by Ctrl-C and resumed, also with another number of processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from helpers.forked import run_processes, start_command
from helpers.small_training import TINY_CHECKPOINT, healing_recipe, read_losses

from surgery.training.checkpoints import CheckpointManager
from surgery.training.finetune import finetune
from surgery.training.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("without_curves")

STAGES = [
    {"kind": "lm", "trains": ["structured"], "ema": 0.9, "batch": 6, "rows": 1, "tokens": 6 * 64 * 4},
    {"kind": "lm", "trains": ["new"], "batch": 6, "rows": 1, "tokens": 6 * 64 * 2},
]


def test_ctrl_c_leaves_a_checkpoint_and_says_so(btt, texts, tmp_path):
    """The command itself: 130, a sentence, and --resume goes on from the step that was being taken."""
    out = tmp_path / "out"
    told = ["--set", f"data.sources=[{{path: {texts}}}]", "--set", "stages.*.tokens=16777216", "--set", "log=1"]
    told += ["--set", "stages.*.length=64", "--set", "stages.*.batch=4", "--set", "stages.*.rows=4"]
    words = ["finetune", str(btt), "--teacher", str(TINY_CHECKPOINT), "--out", str(out), "--recipe", "linears"]
    words += ["--tiny", *told, "--device", "cpu", "--track", "none"]
    pid = start_command(tmp_path, words)
    log = out.with_name("out.partial") / "log.jsonl"
    while not (log.is_file() and log.read_text().count('"loss"') >= 2):  # until the test's own time limit
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), (tmp_path / "output").read_text()
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = (tmp_path / "output").read_text()
    assert code == 130, said
    latest = CheckpointManager(out.with_name("out.partial") / "checkpoints", 1).latest()
    assert latest is not None and latest.name in " ".join(said.split()).replace(" ", "") and "--resume" in said
    step = CheckpointManager(latest.parent, 1).read_position(latest).step
    assert step >= 2 and log.read_text().count('"loss"') == step


# -- another number of processes -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(btt, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    told = healing_recipe(texts, *STAGES, checkpoint=1)
    assert run_processes(1, lambda _: finetune(str(btt), told, out, device="cpu", track="none")) == [0]
    return out


@pytest.mark.parametrize("before, after", [(2, 1), (1, 3)])
def test_a_run_goes_on_with_another_number_of_processes(whole, btt, texts, tmp_path, before, after):
    """Begun by some, gone on with by others: the losses of one that was never interrupted."""
    out, told = tmp_path / "out", healing_recipe(texts, *STAGES, checkpoint=1)

    def interrupt_run(rank):
        step = TrainingLoop._step

        def dying(self, taken):
            if self.at.step == 2:
                os._exit(9)
            step(self, taken)

        TrainingLoop._step = dying
        finetune(str(btt), told, out, device="cpu", track="none")

    assert set(run_processes(before, interrupt_run)) <= {9, 1, -6}  # the others lose their peer
    assert CheckpointManager(out.with_name("out.partial") / "checkpoints", 1).latest().name == "stage-00-step-0000002"
    options = {"device": "cpu", "track": "none"}
    assert run_processes(after, lambda _: finetune(str(btt), told, out, resume=True, **options)) == [0] * after
    ours, theirs = (torch.tensor(read_losses(f / "training"), dtype=torch.float64) for f in (out, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_text_is_tokenised_by_one_process_of_a_machine(whole, btt, texts, tmp_path):
    """The other only reads what it wrote, and both train as one does."""
    from surgery.training.data.tokenize import TextEncoder

    out, told = tmp_path / "out", healing_recipe(texts, *STAGES, checkpoint=1)

    def run(rank):
        if rank:
            one, tokenise = [], TextEncoder.encode_texts

            def count_documents(self, documents):
                one.append(len(documents))
                return tokenise(self, documents)

            TextEncoder.encode_texts = count_documents
        finetune(str(btt), told, out, device="cpu", track="none")
        assert not rank or sum(one) < 30, "the few for validation"

    assert run_processes(2, run) == [0, 0]
    ours, theirs = (torch.tensor(read_losses(f / "training"), dtype=torch.float64) for f in (out, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
