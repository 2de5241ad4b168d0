"""Command-line options from the fields of a pydantic model, so that an option is declared once: in the model.

    @options_of(load_eval_options)
    def evaluate(out: Out = None, *, as_json: Json = False, **asked: Any) -> None:  # asked: value by field, None if not given
        ..

    app.command(name="eval", cls=ModelCommand)(evaluate)

A field batch_size becomes the option --batch-size: its type, bounds, default and description are the field's. The
options stand where the function has its `*`. Numbers, paths and switches are parsed by Typer; other values are given to
the model as text. Pydantic is imported only when the command runs, shows its help or is completed, because `surgery
--help` would otherwise take twice as long.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

LoadModel = Callable[[], "type[BaseModel]"]


def options_of(load_model: LoadModel, *fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the `**` parameter of a command by options.

    load_model: imports and returns the model. fields: those that become options; none: all.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        written = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]

        def with_model_options() -> Callable[..., None]:
            return _with_parameters(function, _insert(written, _model_parameters(load_model(), fields)))

        stub: Any = _with_parameters(function, written)
        stub.with_model_options = with_model_options
        return stub

    return decorate


class ModelCommand(TyperCommand):
    """A command whose function is decorated with `options_of`. Its parameters are made when they are first needed."""

    @functools.cached_property
    def complete(self) -> Any:
        """The command with all its options."""
        app = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
        callback: Any = self.callback
        app.command(name=self.name, help=self.help)(callback.with_model_options())
        return typer.main.get_command(app)

    @property
    def params(self) -> Any:
        """All parameters of the command."""
        return self.complete.params

    @params.setter
    def params(self, written: Any) -> None:
        """Ignore the parameters of the function alone, which Typer sets."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments. The context is that of the complete command."""
        return self.complete.make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the complete command."""
        return self.complete.invoke(ctx)


def _with_parameters(function: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Return the function with another signature, which Typer reads."""

    @functools.wraps(function)
    def call(**values: Any) -> None:
        function(**values)

    described: Any = call
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _insert(written: list[inspect.Parameter], generated: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return all parameters, the generated ones before those that are keywords only."""
    first = [p for p in written if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    return [*first, *generated, *written[len(first) :]]


def _model_parameters(model: type[BaseModel], fields: tuple[str, ...]) -> list[inspect.Parameter]:
    return [_field_parameter(name, field) for name, field in model.model_fields.items() if not fields or name in fields]


def _field_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter of a field, annotated as Typer expects it."""
    from surgery.core.config import CommandLine

    style = next((item for item in field.metadata if isinstance(item, CommandLine)), CommandLine())
    default = field.get_default(call_default_factory=True)
    default = None if default in ((), {}) else default
    value_type: Any = list[str] if style.is_repeatable else _value_type(field.annotation)
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=field.description,
        metavar=style.metavar,
        min=next((item.ge for item in field.metadata if hasattr(item, "ge")), None),
        max=next((item.le for item in field.metadata if hasattr(item, "le")), None),
        autocompletion=_completion(field.annotation),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[value_type if default is not None else value_type | None, option],
    )


def _value_type(annotation: Any) -> Any:
    """Return the type that Typer parses: that of the field without None if it is a simple one, else text."""
    kinds = [kind for kind in _alternatives(annotation) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and kinds[0] in (bool, int, float, str, Path) else str


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _completion(annotation: Any) -> Callable[[str], list[str]] | None:
    """Return a function that completes the words of a field's literals in the shell; None if it has none."""
    literals = [kind for kind in _alternatives(annotation) if typing.get_origin(kind) is Literal]
    words = [str(word) for kind in literals for word in typing.get_args(kind)]

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete if words else None
