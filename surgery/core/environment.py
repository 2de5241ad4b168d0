"""Tell a broken installation from a broken file: which package could not be imported, and why.

transformers imports most of itself when it is used, so a package that does not import (a torchvision built for another
torch, a missing shared library) raises inside a call that reads a checkpoint, often behind errors that name neither the
package nor the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from surgery.core.errors import SurgeryError

# Compiled against one version of torch each; transformers and vLLM import them whenever they are installed.
BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")
NOT_INSTALLED = (
    "surgery",
    "transformers_modules",
)  # this package, and code of a checkpoint: their errors are not the environment's


def check_environment(error: BaseException) -> None:
    """Raise SurgeryError if an import failed underneath `error`; call it before the error is blamed on a file."""
    if (broken := explain_broken_import(error)) is not None:
        raise SurgeryError(f"this Python environment is broken: {broken}") from None


def explain_broken_import(error: BaseException) -> str | None:
    """Return which package cannot be imported, the reason and the remedy, if that caused `error`; else None.

    An import of this package's own that fails is a defect of this package, and gives None.
    """
    for cause in reversed(list(causes(error))):
        if isinstance(cause, SurgeryError):
            return None
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            package = cause.name.partition(".")[0]
            return (
                None
                if package in NOT_INSTALLED
                else f"the package {package} is not installed. Run pip install {package}"
            )
        imported = _imported_package(cause)
        if imported is not None:
            return None if imported in NOT_INSTALLED else _describe(imported, cause)
    return None


def _describe(package: str, error: BaseException) -> str:
    reason = (" ".join(str(error).split()) or "no message")[:200]
    said = f"importing {package} failed ({type(error).__name__}: {reason}). "
    if package in BUILT_FOR_TORCH:
        return said + (
            f"It was built for another torch. Install the {package} of the installed torch, or, as text models need "
            "none of it: "
            f"pip uninstall {package}"
        )
    return (
        said + f"Install {package} again in a version that fits the other packages (pip check names those that do not)"
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and what caused it, the outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _imported_package(error: BaseException) -> str | None:
    """Return the package whose import raised `error`; None if the error was raised outside an import.

    The traceback of an import has the frame of the module that was being executed, below the frame that caught the
    error. The last of them counts: a package's import of a broken one is not its own fault. `cannot import name ..`
    names the package itself.
    """
    package = None
    trace: TracebackType | None = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "<module>":
            package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] or None
        trace = trace.tb_next
    if isinstance(error, ImportError) and error.name and "cannot import name" in str(error):
        return error.name.partition(".")[0]
    return package
