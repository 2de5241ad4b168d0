"""Full and read-only disks, and two commands in one folder: old files stay, no partly written file gets a final
name.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.small import make_recipe

from surgery.cli.main import main
from surgery.conversion.convert import convert
from surgery.conversion.densify import densify
from surgery.core.errors import SurgeryError
from surgery.core.files import (
    acquire_lock,
    atomic_path,
    atomic_write,
    exclusive_lock,
    explain_disk_errors,
    partial_path,
    write_json,
)
from surgery.publish.html.page import write_page


class Disk:
    """Lets so many writes below `home` through; refuses all after that."""

    def __init__(self, monkeypatch, home: Path, number: int = errno.ENOSPC):
        self.home, self.number, self.left, self.count = str(home), number, 10**9, 0
        for owner, name in ((builtins, "open"), (os, "replace"), (os, "mkdir"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._asking(getattr(owner, name), name))

    def _asking(self, do, name):
        def count_write(what, *rest, **more):
            mode = str(more.get("mode", rest[0] if rest and name == "open" else "r"))
            if (name == "fsync" or str(what).startswith(self.home)) and (name != "open" or set("wax+") & set(mode)):
                self.count += 1
                self.left -= 1
                if self.left < 0:
                    raise OSError(self.number, os.strerror(self.number), None if name == "fsync" else str(what))
            return do(what, *rest, **more)

        return count_write


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def spread_indices(count: int, most: int = 7) -> list[int]:
    """The first, the last, and some between."""
    return sorted({0, 1, count - 1, *range(0, count, -(-count // most))})


# -- full ----------------------------------------------------------------------------------------------
def test_a_conversion_on_a_full_disk_goes_on(checkpoints, tmp_path, monkeypatch):
    home, source = tmp_path / "disk", checkpoints("llama")
    home.mkdir()
    before, recipe, disk = files_of(source), make_recipe(structure="low_rank"), Disk(monkeypatch, home)
    convert(str(source), recipe, home / "whole")
    for lets in spread_indices(disk.count):
        disk.left, out = lets, home / f"out-{lets}"
        with pytest.raises(
            SurgeryError, match=r"No space left on device; its disk has [\d.,]+ [kMGT]?B free of .*--resume"
        ):
            convert(str(source), recipe, out)
        assert not out.exists() and not list(home.rglob("*.tmp"))
        disk.left = 10**9
        convert(str(source), recipe, out, resume=True)
        assert (out / "model.safetensors").read_bytes() == (home / "whole" / "model.safetensors").read_bytes()
        assert not partial_path(out).exists()
    assert files_of(source) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_undoing_it_leaves_nothing(converted, tmp_path, monkeypatch, number):
    home, source = tmp_path / "disk", converted("llama")
    home.mkdir()
    before, disk = files_of(source), Disk(monkeypatch, home, number)
    densify(str(source), home / "whole")
    for lets in spread_indices(disk.count):
        disk.left = lets
        with pytest.raises(SurgeryError, match="cannot be written: " + os.strerror(number)):
            densify(str(source), home / "out")
        assert [p.name for p in home.iterdir()] == ["whole"]
    disk.left = 10**9
    densify(str(source), home / "out")
    assert files_of(source) == before


def test_a_page_and_results_stay_as_they_were(converted, tmp_path, monkeypatch):
    from surgery.eval.results.store import ResultStore
    from surgery.eval.suite import EvalMetric, Sample, SuiteResult

    home = tmp_path / "disk"
    home.mkdir()
    store = ResultStore(home / "eval")
    store.open()
    place = store.result_folder("it", "0" * 64, "ppl")
    results = [SuiteResult([Sample("ppl", "1", {"nll": n})], {"nll": EvalMetric("nll")}) for n in (1.0, 2.0)]

    def all_of_it(result):
        write_page(str(converted("llama")), home / "report.html")
        store.save(place, {"n": 1}, result)
        store.write("results.json", json.dumps(result.samples[0].to_dict()))
        write_json(home / "bench.json", {})

    all_of_it(results[0])
    before, disk = files_of(home), Disk(monkeypatch, home)
    all_of_it(results[1])
    for lets in range(disk.count):
        shutil.rmtree(home)
        for name, data in before.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(data)
        disk.left = lets
        with pytest.raises(SurgeryError, match="No space left"), explain_disk_errors(home):
            all_of_it(results[1])
        disk.left = 10**9
        assert set(files_of(home)) == set(before)  # whole ones, the earlier or the new
        assert store.load(place, {"n": 1}) in results


def test_a_healing_goes_on(monkeypatch, tmp_path):
    """Its checkpoints: the one before is there while the next is written."""
    import torch

    from surgery.training.checkpoints import CheckpointManager, TrainPosition, TrainState

    disk = Disk(monkeypatch, tmp_path)
    where, held = CheckpointManager(tmp_path / "checkpoints", 1), TrainState({"w": torch.ones(3)})
    where.save(TrainPosition(0, 1), held)
    disk.count = 0
    where.save(TrainPosition(0, 2), held)
    for lets in range(disk.count - 2):  # the last two: the folder's own entry on disk, and what is old moved away
        disk.left = lets
        with pytest.raises(OSError, match="No space left"):
            where.save(TrainPosition(0, 3), held)
        disk.left = 10**9
        assert where.read_position(where.latest()).step == 2 and not list(tmp_path.rglob("*.tmp"))


def test_the_command_ends_with_two(checkpoints, tmp_path, monkeypatch, capsys):
    Disk(monkeypatch, tmp_path, errno.EROFS).left = 0
    with pytest.raises(SystemExit) as left:
        main(["convert", str(checkpoints("llama")), "--recipe", "low-rank-half", "--out", str(tmp_path / "out")])
    said = " ".join(capsys.readouterr().err.split())
    assert left.value.code == 2 and "Read-only file system" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    ["I/O error: No space left on device (os error 28)", 'IoError(Os { code: 28, kind: StorageFull, message: "" })'],
)
def test_libraries_in_rust_say_it_their_way(tmp_path, text):
    with pytest.raises(SurgeryError, match="No space left on device"), explain_disk_errors(tmp_path / "x"):
        raise RuntimeError(text)


def test_other_errors_are_left_alone(tmp_path):
    with pytest.raises(ValueError, match="x"), explain_disk_errors(tmp_path):
        raise ValueError("x")
    with pytest.raises(FileNotFoundError), explain_disk_errors(tmp_path):
        (tmp_path / "nothing").read_text()


def test_whole_or_absent(tmp_path):
    path = tmp_path / "x"
    with atomic_write(path, "w") as file:
        file.write("first")
    for attempt in (atomic_write(path, "w"), atomic_path(path)):
        with pytest.raises(KeyboardInterrupt), attempt as place:
            place.write("half") if hasattr(place, "fileno") else place.write_text("half")
            raise KeyboardInterrupt
    assert files_of(tmp_path) == {"x": b"first"}


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="not on this system")
def test_spilt_states_are_refused_before_they_are_mapped(tmp_path, monkeypatch):
    """A mapped page that the disk has no room for would kill the process."""
    import torch

    from surgery.calibration.layer_runner import LayerRunner

    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full))
    stream = object.__new__(LayerRunner)
    stream.limit, stream.hidden_bytes, stream.scratch = 0, 0, tmp_path
    with pytest.raises(OSError, match="No space left"):
        stream.copy_hidden(torch.ones(2, 2, 2))
    assert not list(tmp_path.iterdir())


# -- two at once -----------------------------------------------------------------------------------------
def test_the_lock_names_its_holder_and_outlives_nobody(tmp_path):
    with (
        exclusive_lock(tmp_path, "evaluation"),
        pytest.raises(SurgeryError, match=rf"another evaluation is .* \(process {os.getpid()} on"),
    ):
        acquire_lock(tmp_path, "conversion")
    assert not list(tmp_path.iterdir())
    (tmp_path / "lock").write_text("conversion, process 1 on a machine that was switched off")
    acquire_lock(tmp_path, "conversion").close()


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    acquire_lock(tmp_path, "conversion").close()


def test_commands_exclude_each_other(converted, tmp_path):
    """At OUT.partial: convert, finetune, pretrain, densify; what was interrupted there is nobody else's to remove."""
    from surgery.training.finetune import check_run
    from surgery.training.recipe import parse_healing_recipe

    out, source = tmp_path / "out", str(converted("llama"))
    recipe = parse_healing_recipe({"data": {"sources": "x"}, "stages": [{"kind": "lm", "tokens": 64, "rate": 1e-4}]})
    partial_path(out).mkdir()
    (partial_path(out) / "journal.jsonl").write_text('{"step": "start", "source": "x"}\n')
    commands = [
        lambda: densify(source, out),
        lambda: check_run(out, source, recipe, None, False),
        lambda: convert(str(tmp_path), make_recipe(structure="btt"), out),
    ]
    with exclusive_lock(partial_path(out), "conversion"):
        for command in commands:
            with pytest.raises(SurgeryError, match="another conversion"):
                command()
    for command in commands:
        with pytest.raises(SurgeryError, match="interrupted"):
            command()
    assert (partial_path(out) / "journal.jsonl").is_file()


def test_what_a_killed_densify_left_is_removed(converted, tmp_path):
    out = tmp_path / "out"
    (partial_path(out) / "pieces").mkdir(parents=True)
    (partial_path(out) / "journal.jsonl").write_text('{"step": "start", "rewrite": "x"}\n')
    densify(str(converted("llama")), out)
    assert (out / "model.safetensors").is_file() and not partial_path(out).exists()


def test_evaluations_and_pretrainings(checkpoints, tmp_path):
    from surgery.eval.run import evaluate
    from surgery.eval.suite import EvalOptions
    from surgery.training.pretrain.pretrain import pretrain
    from surgery.training.pretrain.recipe import parse_pretrain_recipe

    (tmp_path / "eval").mkdir()
    with exclusive_lock(tmp_path / "eval", "evaluation"), pytest.raises(SurgeryError, match="another evaluation"):
        evaluate(str(checkpoints("llama")), ["ppl"], EvalOptions(text="x"), out=tmp_path / "eval")
    stages = [{"kind": "lm", "tokens": 64, "rate": 1e-4}]
    recipe = parse_pretrain_recipe({"model": {"model_type": "gpt2"}, "data": {"sources": "x"}, "stages": stages})
    with (
        exclusive_lock(tmp_path, "pretraining of out", "out.lock"),
        pytest.raises(SurgeryError, match="another pretraining of out"),
    ):
        pretrain(recipe, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval"]
