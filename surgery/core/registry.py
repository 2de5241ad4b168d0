"""Registries: a frozen config goes in, a class comes out. They fill by scanning their folder, so that a
new structure or family is one new file."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Generic, TypeVar, get_type_hints

from surgery.core.errors import SurgeryError, suggestion

T = TypeVar("T")
PLUGINS = "surgery.plugins"


@cache
def load_plugins() -> None:
    """Imports what installed packages bring: each entry point of the group `surgery.plugins` is a module that
    registers structures, mixers, masks, feature maps or families as it is imported."""
    for point in importlib.metadata.entry_points(group=PLUGINS):
        try:
            point.load()
        except Exception as error:
            raise SurgeryError(
                f"plugin {point.name} ({point.value}) fails as it is imported, {type(error).__name__}: {error}; mend it or "
                "uninstall the package that brings it"
            ) from error


MAX_OPTION = 2**31  # of a number among options


def validate_config(config_type: Any, options: dict[str, Any]) -> Any:
    """A config from options as JSON or YAML have them, each of the type that its field says; SurgeryError, by name,
    otherwise. Options that are configs themselves are the config's own business (Any)."""
    from pydantic import ValidationError

    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    for name, value in options.items():
        try:
            if name in (types := _field_adapters(config_type)):
                types[name].validate_python(value, strict=True)
        except ValidationError as error:
            _validate_by_constructor(config_type, options)
            reasons = " or ".join(dict.fromkeys(e["msg"].lower() for e in error.errors()))
            raise SurgeryError(f"{config_type.name!r}: {name}: {reasons} (got {str(value)[:100]!r})") from None
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(n, (int, float)) and not abs(n) <= MAX_OPTION for n in numbers):
            raise SurgeryError(f"{config_type.name!r}: {name}: no option is as large as {str(value)[:50]}")
    return config_type(**options)


def _validate_by_constructor(config_type: Any, options: dict[str, Any]) -> None:
    """With the config's own words, where it has some."""
    try:
        config_type(**options)
    except ValueError as error:
        raise SurgeryError(f"{config_type.name!r}: {error}") from None
    except (TypeError, ArithmeticError, AttributeError):
        pass


@cache
def _field_adapters(config_type: Any) -> dict[str, Any]:
    """None of a config whose annotations name what its module has not, as one made inside a function: it is trusted."""
    from pydantic import TypeAdapter

    try:
        hints = get_type_hints(config_type)
    except NameError:
        return {}
    return {name: TypeAdapter(hint) for name, hint in hints.items() if name != "name"}


class Registry(Generic[T]):
    """Config type -> class, with the config's `name` as the word used in recipes and checkpoints."""

    def __init__(self, what: str, package: str):
        self.what, self.package = what, package
        self._by_config: dict[type, type[T]] = {}
        self._by_name: dict[str, type] = {}
        self._scanned = False

    def register(self, config_type: type) -> Callable[[type[T]], type[T]]:
        def add(cls: type[T]) -> type[T]:
            self._by_config[config_type] = cls
            self._by_name[config_type.name] = config_type  # type: ignore[attr-defined]
            cls.config_type = config_type  # type: ignore[attr-defined]
            return cls

        return add

    def _scan(self) -> None:
        if not self._scanned:
            self._scanned = True
            folder = importlib.import_module(self.package)
            for info in pkgutil.iter_modules(folder.__path__):
                importlib.import_module(f"{self.package}.{info.name}")
            load_plugins()

    def names(self) -> list[str]:
        self._scan()
        return sorted(self._by_name)

    def __iter__(self) -> Iterator[type]:
        self._scan()
        return iter(self._by_config)

    def config_type(self, name: str) -> type:
        """The config type of that name; SurgeryError with the nearest valid name otherwise."""
        self._scan()
        if name not in self._by_name:
            raise SurgeryError(f"unknown {self.what} {name!r}{suggestion(name, self._by_name)}")
        return self._by_name[name]

    def __getitem__(self, config: Any) -> type[T]:
        self._scan()
        return self._by_config[config if isinstance(config, type) else type(config)]
