"""Callbacks that run when another package imports a heavy module.

`import surgery` must stay light, but transformers and peft must know this package's classes as soon as they are
imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def run_after_import(name: str, callback: Callable[[], object]) -> None:
    """Call `callback` now if module `name` is loaded, otherwise right after its import."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, callback: Callable[[], object]):
        self.name, self.callback = name, callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.callback)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, callback: Callable[[], object]):
        self.loader, self.callback = loader, callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.callback()

    def __getattr__(self, name: str) -> Any:  # get_source, is_package and the like
        return getattr(self.loader, name)
