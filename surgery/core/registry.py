"""Registries that map a frozen config's type to the class that implements it.

A name is looked for in the module of that name first (`low_rank` in surgery/structures/low_rank.py), and only then in
the whole package: a conversion imports the structures that its recipe names, and adding a structure or a mixer takes
one new file. Modules are imported by a string here, because a registry cannot know the files that are added to its
package; only files that lie in the package are imported. Classes of users' own register from outside: see plugins.py.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, get_origin, get_type_hints

from surgery.core.errors import SurgeryError, UnknownNameError, suggestion
from surgery.core.plugins import HOW_TO_REGISTER, REGISTERED, load_entry_points, warn_of_broken_entry_points

T = TypeVar("T")
MAX_OPTION = 2**31  # largest absolute value of a numeric option


def validate_config(config_type: Any, options: dict[str, Any]) -> Any:
    """Build a config from JSON or YAML options, checking each against the type of its field.

    Raises SurgeryError with the name of the option. Options that are configs themselves (typed Any) are checked by the
    config.
    """
    from pydantic import ValidationError

    options = {k: _lists_to_tuples(v) for k, v in options.items()}
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
            raise SurgeryError(
                f"{config_type.name!r}: {name} must be at most {MAX_OPTION:,} in absolute value (got {str(value)[:50]})"
            )
    return config_type(**options)


def _lists_to_tuples(value: Any) -> Any:
    """Return a list as a tuple, and lists inside of it too; deeper ones stay, which no option has."""
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _validate_by_constructor(config_type: Any, options: dict[str, Any]) -> None:
    """Raise the config's own message, if its constructor refuses the options."""
    try:
        config_type(**options)
    except ValueError as error:
        raise SurgeryError(f"{config_type.name!r}: {error}") from None
    except (TypeError, ArithmeticError, AttributeError):
        pass


@cache
def _field_adapters(config_type: Any) -> dict[str, Any]:
    """Return a pydantic validator per field; {} for a config defined inside a function, whose annotations cannot be
    resolved.
    """
    from pydantic import TypeAdapter

    try:
        hints = get_type_hints(config_type)
    except NameError:
        return {}
    return {name: TypeAdapter(hint) for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def _is_shipped(config_type: type) -> bool:
    return config_type.__module__.startswith("surgery.")


def _missing_methods(cls: type) -> list[str]:
    """Return the methods that a class must define and only its base class has: those in the base's REQUIRED."""
    base: Any = next((c for c in reversed(cls.__mro__) if "REQUIRED" in vars(c)), None)
    names = () if base is None else base.REQUIRED
    return [name for name in names if inspect.getattr_static(cls, name) is inspect.getattr_static(base, name)]


class Registry(Generic[T]):
    """A map from config type to class. The config's `name` is its name in recipes and checkpoints.

    elsewhere: name -> module of the package that registers it, where that has another name.
    """

    def __init__(self, what: str, package: str, elsewhere: Mapping[str, str] | None = None):
        self.what, self.package, self.elsewhere = what, package, dict(elsewhere or {})
        self._by_config: dict[type, type[T]] = {}
        self._by_name: dict[str, type] = {}
        self._scanned = False

    def register(self, config_type: type) -> Callable[[type[T]], type[T]]:
        """Register a class under its config type (decorator).

        A module may register a name again, as a cell of a notebook does that is run twice. Raises SurgeryError for a
        name that another module has registered, and for a config type without a name.
        """

        def add(cls: type[T]) -> type[T]:
            name = getattr(config_type, "name", None)
            if not isinstance(name, str) or not name:
                raise SurgeryError(
                    f"the config {config_type.__name__} of a {self.what} must have a name (got {name!r}). Add name: "
                    'ClassVar[str] = ".."'
                )
            is_own = not self._is_built_in(cls)
            if is_own:
                self._scan()  # the names of this package are taken, whoever comes first
            earlier = self._by_name.get(name)
            if earlier is not None:
                module = self._by_config[earlier].__module__
                if module != cls.__module__:
                    raise SurgeryError(
                        f"the name {name!r} of the {self.what} {cls.__name__} is taken: {module} has registered it. "
                        "Choose another name"
                    )
                del self._by_config[earlier]
            if is_own and (missing := _missing_methods(cls)):
                raise SurgeryError(
                    f"the {self.what} {name!r} ({cls.__name__}) does not define {', '.join(missing)}. docs/extend.md "
                    "has a "
                    "complete example"
                )
            self._by_config[config_type] = cls
            self._by_name[name] = config_type
            cls.config_type = config_type  # type: ignore[attr-defined]
            if is_own:
                REGISTERED.append(f"{self.what} {name!r}")
            return cls

        return add

    def _is_built_in(self, cls: type) -> bool:
        return cls.__module__ == self.package or cls.__module__.startswith(f"{self.package}.")

    def plugin_names(self) -> list[str]:
        """Return the names that users' own modules have registered so far, sorted."""
        return sorted(name for name, config in self._by_name.items() if not self._is_built_in(self._by_config[config]))

    def _module_names(self) -> list[str]:
        return [info.name for info in pkgutil.iter_modules(importlib.import_module(self.package).__path__)]

    def _scan(self) -> None:
        """Import all modules of the package."""
        if not self._scanned:
            self._scanned = True
            for name in self._module_names():
                importlib.import_module(f"{self.package}.{name}")

    def _find(self, name: str) -> None:
        """Import what may register a name: the module of that name, then all modules."""
        module = self.elsewhere.get(name, name)
        if name not in self._by_name and module in self._module_names():
            importlib.import_module(f"{self.package}.{module}")
        if name not in self._by_name:
            self._scan()

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        self._scan()
        return sorted(self._by_name)

    def __iter__(self) -> Iterator[type]:
        """Yield all config types in the order of their names, whatever was imported first."""
        self._scan()
        return iter(sorted(self._by_config, key=lambda config_type: config_type.name))  # type: ignore[attr-defined]

    def __contains__(self, config: Any) -> bool:
        """Return whether a class is registered for a config or its type."""
        config_type = config if isinstance(config, type) else type(config)
        if config_type not in self._by_config:
            self._find(getattr(config_type, "name", ""))
        return config_type in self._by_config

    def config_type(self, name: str) -> type:
        """Return the config type of a name. An unknown name imports the installed plugins.

        Raises UnknownNameError, with the nearest valid name, if no plugin has registered it either.
        """
        if name not in self._by_name:
            self._find(name)
        if name not in self._by_name:
            broken = load_entry_points()
            if name not in self._by_name:
                near = suggestion(name, self._by_name)
                stop = "" if near.endswith("?") else "."
                failures = "".join(f". Besides, {sentence}" for sentence in broken)
                raise UnknownNameError(
                    f"unknown {self.what} {name!r}{near}{stop} For a {self.what} of your own, "
                    f"{HOW_TO_REGISTER}{failures}"
                )
            warn_of_broken_entry_points()
        return self._by_name[name]

    def __getitem__(self, config: Any) -> type[T]:
        config_type = config if isinstance(config, type) else type(config)
        if config_type not in self:
            raise KeyError(config_type)
        return self._by_config[config_type]
