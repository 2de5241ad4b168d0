"""How the programs of this folder end: an error that the user can correct is one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from surgery.core.errors import SurgeryError

UNREADABLE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def run_script(main: Callable[[], int | None]) -> None:
    """Run a program and exit with the code that it returns.

    A SurgeryError, a file or folder that is missing or must not be read or written, and a checkpoint that transformers
    does not find end it with one line and exit code 2.
    """
    try:
        code = main()
    except SurgeryError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if isinstance(error, UNREADABLE) and error.filename is not None:
            print(f"cannot open {error.filename}: {error.strerror}", file=sys.stderr)
        elif error.errno is None and str(error).strip():  # of from_pretrained
            print(" ".join(str(error).split()), file=sys.stderr)
        else:
            raise
        raise SystemExit(2) from None
    if code:
        raise SystemExit(code)
