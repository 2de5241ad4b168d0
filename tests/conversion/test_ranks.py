"""Conversions by several processes: the bytes of a single process, also after resuming; an error of one process ends
all.
"""

from __future__ import annotations

import copy
import math
import os
import signal

import pytest
from conversion.test_convert import Crash, bytes_of
from helpers.forked import run_processes
from helpers.slow import slow_where
from helpers.small import choose_layers_quickly, make_recipe

import surgery.calibration.partition
from surgery.conversion.aligned import AlignedStudent
from surgery.conversion.convert import convert
from surgery.conversion.sequential import SequentialConverter
from surgery.core import distributed
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path
from surgery.core.journal import Journal

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
MIXED = {
    "structure": "btt",
    "blocks": [2, 2],
    "rules": [{"match": "attention.value", "structure": "pivoted_low_rank"}],
    "sweeps": 1,
}
GATED, RESTORED, HEADS = (
    {
        "structure": "dense",
        "attention": {
            "mixer": "linear",
            "mask": "gates",
            "steps": 4,
            "hybrid": {"softmax": 0.5, "choose_by": choose_by, "unit": unit},
        },
    }
    for choose_by, unit in (("measured", "layers"), ("restored", "layers"), ("measured", "heads"))
)

# The projection of the delta rule's step sizes may stay as it was drawn, after trials in which each process draws others.
DELTA = copy.deepcopy(HEADS)
DELTA["attention"] |= {"scores": "delta", "start": "copied"}


@pytest.fixture
def no_heartbeats(monkeypatch):
    """A lost process is not noticed by its missing heartbeats, so a test ends only where it is noticed at once."""
    monkeypatch.setattr(distributed, "HEARTBEAT_TIMEOUT", math.inf)


@pytest.fixture
def one_is_killed(monkeypatch, no_heartbeats):
    """The process that is left does not wait for the killed one to read its error."""
    monkeypatch.setattr(distributed, "ERROR_GRACE_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """As if the windows were many and long."""
    choose_layers_quickly(monkeypatch)
    monkeypatch.setattr(surgery.calibration.partition, "MIN_SHARD_TOKENS", 48)


def run_conversion(checkpoint, inputs, out, recipe, count=1, resume=False):
    keys = recipe if inputs is None else {**recipe, "calibration": inputs}
    run = lambda rank=0: convert(str(checkpoint), make_recipe(**keys), out, device="cpu", resume=resume)  # noqa: E731
    if count == 1:
        run()
    else:
        assert run_processes(count, run) == [0] * count
    assert not partial_path(out).exists()
    return bytes_of(out)


@pytest.mark.parametrize(
    "recipe, family, count",
    slow_where(
        lambda recipe, *_: recipe is HEADS or recipe.get("order") == "strided",
        [
            (MIXED, None, 2),
            (RESTORED, "llama", 3),
            (GATED, "llama", 2),
            (HEADS, "llama", 2),
            (DELTA, "llama", 2),
            ({**MIXED, "allocate": "measured"}, "llama", 2),
            ({"structure": "btt", "blocks": [2, 2], "order": "strided", "keep": 0.6, "sweeps": 1}, "llama", 2),
        ],
    ),
    ids=["without text", "restored", "layers", "heads", "drawn", "trials", "strided"],
)
def test_the_same_bytes_as_one_process(recipe, family, count, checkpoints, calibration, tmp_path):
    checkpoint, inputs = checkpoints(family or "llama"), calibration(family) if family else None
    alone = run_conversion(checkpoint, inputs, tmp_path / "alone", recipe)
    assert run_conversion(checkpoint, inputs, tmp_path / "shared", recipe, count) == alone


def test_a_resumed_conversion_draws_as_if_it_had_not_been_interrupted(checkpoints, calibration, tmp_path, monkeypatch):
    """Killed when the choice of heads is done: the trials, which draw too, are not repeated."""
    checkpoint, inputs, add = checkpoints("llama"), calibration("llama"), Journal.add
    alone = run_conversion(checkpoint, inputs, tmp_path / "alone", DELTA)

    def crash(self, step, **what):
        add(self, step, **what)
        if step == "hybrid":
            raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Journal, "add", crash)
        run_conversion(checkpoint, inputs, tmp_path / "out", DELTA)
    assert run_conversion(checkpoint, inputs, tmp_path / "out", DELTA, resume=True) == alone


def dying(rank, at, signalled, counted="piece"):
    """Process `rank` ends like this as soon as it has written down its `at`-th piece, or another step."""
    add, pieces = Journal.add, []

    def adding(self, step, **what):
        add(self, step, **what)
        pieces.extend([step] if step == counted else [])
        if self.ranks.index == rank and len(pieces) == at:
            os.kill(os.getpid(), signalled)

    Journal.add = adding


def test_killed_and_resumed_by_another_number_of_processes(checkpoints, calibration, tmp_path, one_is_killed):
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    recipe, out = make_recipe(**MIXED, calibration=inputs), tmp_path / "out"
    alone = run_conversion(checkpoint, inputs, tmp_path / "alone", MIXED)  # before forking: all is imported then

    def kill_conversion(rank):
        dying(1, 1, signal.SIGKILL)
        convert(str(checkpoint), recipe, out, device="cpu")

    assert run_processes(2, kill_conversion) == [1, -signal.SIGKILL], "the other ends with a sentence"
    kept = partial_path(out)
    assert (kept / "pieces" / "model.layers.1.safetensors").is_file() and (kept / "journal-1.jsonl").is_file()

    def once(self, path, finished=SequentialConverter.convert_layer):
        assert path.path != "model.layers.1", "process 1 has written it down"
        return finished(self, path)

    SequentialConverter.convert_layer, before = once, SequentialConverter.convert_layer
    try:
        resumed = run_conversion(checkpoint, inputs, out, MIXED, count=3, resume=True)
    finally:
        SequentialConverter.convert_layer = before
    assert resumed == alone


def test_a_choice_by_restoring_goes_on_after_a_kill(checkpoints, calibration, tmp_path, monkeypatch, one_is_killed):
    """Process 1 dies after it has written its aligned layer, which the next run reads from its journal."""
    checkpoint, inputs = checkpoints("llama"), calibration("llama")
    recipe, out = make_recipe(**RESTORED, calibration=inputs), tmp_path / "out"
    alone = run_conversion(checkpoint, inputs, tmp_path / "alone", RESTORED)

    def kill_conversion(rank):
        dying(1, 1, signal.SIGKILL, "aligned")
        convert(str(checkpoint), recipe, out, device="cpu")

    assert run_processes(2, kill_conversion) == [1, -signal.SIGKILL]
    aligned = partial_path(out) / "aligned"
    assert sorted(file.name for file in aligned.iterdir()) == [f"model.layers.{i}.safetensors" for i in range(2)]
    assert (partial_path(out) / "journal-1.jsonl").is_file()
    monkeypatch.setattr(AlignedStudent, "_align_layer", None)  # both layers are finished
    assert run_conversion(checkpoint, inputs, out, RESTORED, count=3, resume=True) == alone


@pytest.mark.parametrize("refused", [True, False])
def test_an_error_of_one_process_ends_all_with_its_sentence(refused, checkpoints, tmp_path, no_heartbeats):
    """What would be refused again leaves nothing; after anything else --resume goes on."""
    from surgery.conversion import data_free as datafree

    checkpoint, out = checkpoints("llama"), tmp_path / "out"

    def run(rank):
        if rank == 1:

            def fails(*_):
                raise SurgeryError("tensor 'x' holds 3 NaN") if refused else OSError(28, "No space left on device", "y")

            datafree._convert_layer = fails
        try:
            convert(str(checkpoint), make_recipe(**MIXED), out, device="cpu")
        except Exception as error:
            (tmp_path / f"said-{rank}").write_text(f"{getattr(error, 'reported_by_peer', False)} {error}")
            raise

    assert run_processes(2, run) == [1, 1]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    sentence = "tensor 'x' holds 3 NaN" if refused else "No space left on device"
    assert said[0].startswith("True ") and said[1].startswith("False ") and all(sentence in one for one in said)
    assert partial_path(out).exists() is not refused
    assert not out.exists()
