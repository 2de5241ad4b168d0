"""An environment in which this checkout is installed, .pth files included: programs in it find surgery without
importing it.

The environment of the tests may have an older install, or none at all (PYTHONPATH), so a new one is made beside it,
which takes no download: the packages are those of the running interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import build_backend

ROOT = Path(__file__).resolve().parents[2]


class Installed:
    """A virtual environment with the .pth files of an editable install of this checkout."""

    def __init__(self, folder: Path):
        venv.create(folder, symlinks=True, with_pip=False)
        self.bin = folder / "bin"
        site = Path(sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})["purelib"])
        paths = [str(ROOT), *(path for path in sys.path if Path(path).name.endswith("-packages"))]
        # Python does not read the .pth files of folders that a .pth file names, so an install of surgery there has no
        # effect.
        (site / "__paths__.pth").write_text("\n".join([*paths, ""]))
        for name, content in build_backend.STARTUP.items():
            (site / name).write_bytes(content)
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

    def start(self, *words: str, **options: object) -> subprocess.Popen[str]:
        """Start `python words ..`."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [str(self.bin / "python"), *words]
        return subprocess.Popen(command, **{"env": self.environment, **pipes, **options})  # type: ignore[call-overload]

    def run(self, *words: str, **options: object) -> str:
        """Run `python words ..` and return what it printed. Raises AssertionError with its errors if it fails."""
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, f"{words}\n{out}\n{err}"
        return out
