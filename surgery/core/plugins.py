"""Users' own structures, mixers, masks, feature maps and model families: classes that register themselves when their
module is imported.

    surgery convert SRC --recipe r.yaml --plugin mine.py --out OUT     a file, named on the command line, for one run
    [project.entry-points."surgery.plugins"]                           a module of an installed package, for every program
    mine = "mypackage.parts"

Entry points are imported when a name is asked for that surgery does not have, so that `import surgery` imports none of
them. Code is never taken from a recipe or from the folder of a checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import linecache
import sys
import traceback
import warnings
from functools import cache
from pathlib import Path

from surgery.core.errors import SurgeryError

PLUGINS = "surgery.plugins"  # group of entry points
REGISTERED: list[str] = []  # what users' modules have registered, e.g. "structure 'grouped_rows'"
HOW_TO_REGISTER = f"give --plugin FILE.py, or install its package (entry point {PLUGINS})"


def load_plugin_file(path: Path) -> None:
    """Import a Python file that the user has named; its decorators register what it defines. A file is imported once.

    Raises SurgeryError if the file is absent or not a .py file, if it raises, and if it registers nothing.
    """
    if path.suffix != ".py":
        raise SurgeryError(f"--plugin {path} must be a Python file, whose name ends in .py. Give FILE.py")
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise SurgeryError(f"--plugin {path} {what}. Give the path of a Python file")
    resolved = path.resolve()
    if any(getattr(module, "__file__", None) == str(resolved) for module in list(sys.modules.values())):
        return
    # Not the bare stem: a file named torch.py must not become the module torch.
    name = f"surgery_plugin_{path.stem}"
    while name in sys.modules:
        name += "_"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look up annotations in the module of a class
    before = len(REGISTERED)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise SurgeryError(f"--plugin {path}{_place(error, resolved)}: {_describe(error)}") from error
    if len(REGISTERED) == before:
        del sys.modules[name]
        raise SurgeryError(
            f"--plugin {path} registers nothing. A plugin registers a structure, mixer, mask, feature map or family "
            "when it is imported. "
            "Put a decorator before the class, such as @STRUCTURES.register(Config) or @MIXERS.register(Config)"
        )


def _place(error: BaseException, path: Path) -> str:
    """Return ", line 7 (`raise ValueError()`)" for the last line of the file that led to the error, "" if there is
    none.
    """
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno or 0]
    else:
        lines = [f.lineno or 0 for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if not lines:
        return ""
    text = linecache.getline(str(path), lines[-1]).strip()
    return f", line {lines[-1]}" + (f" (`{text}`)" if text else "")


def _describe(error: BaseException) -> str:
    """Return a one-line description of what a user's module raised."""
    if isinstance(error, SurgeryError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''}"


@cache
def load_entry_points() -> tuple[str, ...]:
    """Import the modules of the entry points `surgery.plugins`, once.

    Return one sentence for each that cannot be imported.
    """
    broken = []
    for point in importlib.metadata.entry_points(group=PLUGINS):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            package = f" of the package {point.dist.name}" if point.dist is not None else ""
            broken.append(
                f"the plugin {point.name} ({point.value}){package} cannot be imported, {_describe(error)}; mend or "
                "uninstall it"
            )
    return tuple(broken)


def warn_of_broken_entry_points() -> None:
    """Import the entry points, and warn of those that cannot be imported."""
    for sentence in load_entry_points():
        warnings.warn(sentence, UserWarning, stacklevel=2)
