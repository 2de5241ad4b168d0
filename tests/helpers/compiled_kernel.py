"""A stand-in for a kernel of Triton, for tests of launches."""

from __future__ import annotations

from typing import Any


class CompiledKernel:
    """Counts launches found anew, with their options, and launches of what was compiled.

    refuses: launches of what was compiled raise TypeError, as by a Triton version that takes other arguments.
    """

    def __init__(self, arg_names: tuple[str, ...], do_not_specialize: tuple[str, ...] = (), refuses: bool = False):
        self.arg_names, self.do_not_specialize, self.refuses = arg_names, do_not_specialize, refuses
        self.found: list[Any] = []
        self.again: list[Any] = []

    def __getitem__(self, grid):
        def launch(*args, **options):
            if options:
                self.found.append((grid, args, options))
                return self
            if self.refuses:
                raise TypeError("function takes exactly 9 arguments")
            self.again.append((grid, args))
            return None

        return launch
