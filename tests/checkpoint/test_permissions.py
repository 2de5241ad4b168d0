"""Files have the permissions that the umask gives new files, whichever library writes them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from helpers.small import make_recipe, tiny_config
from helpers.small_mixers import random_model_with_mixers
from transformers import DynamicCache

import surgery
from surgery.conversion.convert import convert
from surgery.core import files
from surgery.core.files import atomic_path, follow_umask
from surgery.mixers.sliding_window import Window
from surgery.modeling.cache_io import save_cache


@pytest.fixture(params=[0o022, 0o007, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def permissions(folder: Path) -> dict[str, int]:
    """Return the permissions of all files and folders in a folder."""
    return {path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def test_conversions_models_and_caches_follow_the_umask(umask, tmp_path):
    torch.manual_seed(0)
    cls, config = tiny_config("llama")
    source = tmp_path / "source"
    cls(config).save_pretrained(source)
    for path in source.iterdir():
        path.chmod(0o600)
    recipe = make_recipe(structure="low_rank", keep=0.5)
    convert(str(source), recipe, tmp_path / "converted")
    surgery.densify(str(tmp_path / "converted"), tmp_path / "dense")
    live = cls(config).eval()
    surgery.apply(live, recipe)
    live.save_pretrained(tmp_path / "live")
    live.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    model, cache = random_model_with_mixers("llama", Window(6)), DynamicCache()
    model(torch.arange(9)[None], past_key_values=cache)
    save_cache(cache, tmp_path / "cache.safetensors")
    found = permissions(tmp_path)
    written = {name: mode for name, mode in found.items() if not name.startswith("source/")}
    wanted = {name: (0o777 if (tmp_path / name).is_dir() else 0o666) & ~umask for name in written}
    assert written == wanted and sum(name.endswith(".safetensors") for name in written) > 5


def test_only_private_files_change_and_links_do_not(tmp_path, monkeypatch):
    """Permissions that somebody chose stay; so does the umask where the system does not show it."""
    before = os.umask(0o022)
    try:
        for name, mode in (("private", 0o600), ("shared", 0o664), ("target", 0o600)):
            (tmp_path / name).touch()
            (tmp_path / name).chmod(mode)
        (tmp_path / "link").symlink_to(tmp_path / "target")
        monkeypatch.setattr(files, "Path", lambda *parts: Path("/nothing"))
        follow_umask(*(Path(tmp_path, name) for name in ("private", "shared", "link")))
        assert permissions(tmp_path) | {"link": 0} == {"private": 0o644, "shared": 0o664, "target": 0o600, "link": 0}
        assert os.umask(0o022) == 0o022
        monkeypatch.undo()
        with atomic_path(tmp_path / "new") as partial:
            partial.touch(mode=0o600)
        assert permissions(tmp_path)["new"] == 0o644
    finally:
        os.umask(before)
