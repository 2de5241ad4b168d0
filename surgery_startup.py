"""Registers surgery with transformers and peft when a program imports them, so that no program needs `import surgery`.

The file surgery_startup.pth, installed beside this module (see build_backend.py), makes Python import this module at
every start. It puts one finder on `sys.meta_path` and imports nothing. transformers has no entry points for quantizers;
without this file, commands such as `lm_eval` and `transformers serve` load a converted checkpoint only with
`trust_remote_code`. SURGERY_STARTUP=off in the environment leaves the finder out.
"""

from __future__ import annotations

import os
import sys

# Imports of these load surgery. They are the modules that surgery.modeling.register extends.
MODULES = ("transformers.quantizers.auto", "peft.tuners.lora.model")


class StartupFinder:
    """A finder on `sys.meta_path` that imports surgery right before the first of MODULES, and then removes itself."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> object:
        """Return the spec of one of MODULES as the remaining finders give it, and None for every other module."""
        if name not in MODULES:
            return None
        from importlib.util import find_spec

        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not cls]
        import_surgery()
        return find_spec(name)


def import_surgery() -> None:
    """Import the package that lies beside this file. An error becomes a warning, because transformers must stay usable.

    Another module of that name that comes first on `sys.path`, such as a user's script surgery.py, is not imported.
    """
    import warnings
    from importlib.util import find_spec
    from pathlib import Path

    try:
        found = find_spec("surgery")
        ours = Path(__file__).resolve().parent / "surgery" / "__init__.py"
        if found is not None and found.origin is not None and Path(found.origin).resolve() == ours:
            import surgery  # noqa: F401  registers
    except Exception as error:
        warnings.warn(
            "surgery could not register with transformers, so converted checkpoints cannot be loaded "
            f"({type(error).__name__}: {error}). "
            "Install transformer-surgery again",
            stacklevel=2,
        )


if os.environ.get("SURGERY_STARTUP") != "off":
    sys.meta_path.insert(0, StartupFinder)
