"""surgery: replace the expensive parts of a pretrained Hugging Face transformer by structured ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from surgery.core.version import __version__

# In a checkout the packages kernels/, eval/ and recipes/ lie beside this one and are imported as surgery.kernels etc.
# They have no __init__.py, because a top-level package named `kernels` would hide the library of that name; so the
# root of the checkout is added to this package's search path.
_root = Path(__file__).resolve().parents[1]
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():
    __path__.append(str(_root))

from surgery.modeling.register import register  # noqa: E402

if TYPE_CHECKING:
    from surgery.api import apply as apply
    from surgery.api import bench as bench
    from surgery.api import compare as compare
    from surgery.api import convert as convert
    from surgery.api import densify as densify
    from surgery.api import drafter as drafter
    from surgery.api import evaluate as evaluate
    from surgery.api import fetch_eval_data as fetch_eval_data
    from surgery.api import finetune as finetune
    from surgery.api import fuse_projections as fuse_projections
    from surgery.api import inspect as inspect
    from surgery.api import load as load
    from surgery.api import parameter_groups as parameter_groups
    from surgery.api import plan as plan
    from surgery.api import pretrain as pretrain
    from surgery.api import push as push
    from surgery.api import quantize as quantize
    from surgery.api import recipes as recipes
    from surgery.api import report as report
    from surgery.api import run as run
    from surgery.api import search as search
    from surgery.api import teacher_cache as teacher_cache
    from surgery.api import toeplitz as toeplitz
    from surgery.api import verify as verify

register()

# The commands as functions. api.py is imported on first access, to keep `import surgery` light.
COMMANDS = (
    *("apply", "bench", "compare", "convert", "densify", "drafter", "evaluate", "fetch_eval_data", "finetune"),
    *(
        "fuse_projections",
        "inspect",
        "load",
        "parameter_groups",
        "plan",
        "pretrain",
        "push",
        "quantize",
        "recipes",
        "report",
        "run",
        "search",
        "teacher_cache",
    ),
    *("toeplitz", "verify"),
)
__all__ = ["__version__", *COMMANDS]


def __getattr__(name: str) -> Any:
    """Import a command from `surgery.api` on first access (PEP 562)."""
    if name in COMMANDS:
        from surgery import api

        return getattr(api, name)
    raise AttributeError(f"module 'surgery' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(COMMANDS)


class _Package(ModuleType):
    """The class of this module.

    `recipes` is the command also after the package of that name was imported, which sets an attribute.
    """

    @property
    def recipes(self) -> Any:
        """The command of that name; `import surgery.recipes.tiny` finds the package all the same."""
        return __getattr__("recipes")

    @recipes.setter
    def recipes(self, package: ModuleType) -> None:
        """Ignore the package: the import system sets it as an attribute of this module."""


sys.modules[__name__].__class__ = _Package
