"""surgery: replace the expensive parts of a pretrained Hugging Face transformer by structured ones."""

from pathlib import Path

from surgery.version import __version__

# In a checkout the rooms kernels/, eval/ and recipes/ lie beside this package and are imported under it.
# An editable install's finder does not see them (they have no __init__.py, because a top-level package
# named `kernels` would hide the library of that name), so the checkout's root joins our search path.
_root = Path(__file__).resolve().parents[1]
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():
    __path__.append(str(_root))

from surgery.checkpoint import register  # noqa: E402

register()

__all__ = ["__version__"]
