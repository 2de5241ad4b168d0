"""Validated configuration: strict pydantic models, safe YAML, `--set` overrides, and layer ranges such as "2:-2", ":8"
or "3".

Every problem is reported as a SurgeryError before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import check_surrogates

MAX_BYTES = 1_000_000  # largest recipe file that is read


def fields_at_default(data: BaseModel, names: Iterable[str]) -> set[str]:
    """Return those of `names` whose fields have their default: younger keys that old digests and journals do not hold
    are left out so.
    """
    return {name for name in names if getattr(data, name) == type(data).model_fields[name].default}


class _NoAliasLoader(yaml.SafeLoader):
    """A safe YAML loader without aliases: nested aliases let a few lines expand to billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            loader: Any = self  # yaml has no types
            raise yaml.YAMLError(
                f"YAML aliases are not allowed (got *{loader.peek_event().anchor}); write the value out"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            twice = next(value for tag, value in keys if keys.count((tag, value)) > 1)
            raise yaml.YAMLError(f"the key {twice!r} is given twice; give it once")
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Parse YAML into plain data. Raise ValueError for invalid YAML, aliases, deep nesting, or lone surrogates."""
    try:
        loader = _NoAliasLoader(text)
        try:
            data = loader.get_single_data()
        finally:
            loader.dispose()
        check_surrogates(data)
        return data
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_front_matter(text: str) -> dict[str, Any]:
    """Return the YAML front matter (between two `---` lines) of a model card or dataset README, {} if it has none.

    Raises ValueError if the front matter is not YAML.
    """
    parts = text.split("---\n", 2)
    data = read_yaml(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    return data if isinstance(data, dict) else {}


def check_layer_range(text: Any) -> Any:
    """Return a layer range unchanged if it is None or text such as "2:-2". Raise SurgeryError otherwise."""
    # YAML reads an unquoted 2:4 as the sexagesimal number 124, so a value that is not a string is refused.
    if text is not None and not (
        isinstance(text, str) and re.fullmatch(r"-?\d+|(-?\d+)?:(-?\d+)?", text.strip(), re.ASCII)
    ):
        raise SurgeryError(
            f'layers must be a range of layer numbers in quotes, such as "2:-2", ":8" or "3" (got {text!r})'
        )
    return text


def is_layer_selected(text: str, index: int, count: int) -> bool:
    """Return whether layer `index` of `count` lies in a range such as "2:-2" (Python slice semantics; "3" is one
    layer).
    """
    if ":" not in text:
        return int(text) in (index, index - count)
    start, stop = (int(bound) if bound.strip() else None for bound in text.split(":"))
    return index in range(count)[start:stop]


COUNT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class CommandLine:
    """How a field of a model is written on the command line, where its type does not say so
    (surgery/cli/model_options.py).

    Attributes:
        metavar: name of the value in the help text, e.g. DIR; None: that of the type.
        is_repeatable: whether the option may be given several times; the field then gets the list of texts.
    """

    metavar: str | None = None
    is_repeatable: bool = False


class StrictModel(BaseModel):
    """Base of recipe models: immutable, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def parse_count(value: Any) -> Any:
    """Return the integer for text such as 100M, 2.5B or 512k. Return any other value unchanged."""
    match = (
        re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)([kmb]?)", value.strip().lower()) if isinstance(value, str) else None
    )
    return round(float(match[1]) * COUNT_SUFFIXES[match[2]]) if match else value


def parse_length(value: Any) -> Any:
    """Return the number of tokens for a length as people write it: 32k or 32K is 32,768, 1M 1,048,576.

    Return any other value unchanged.

    Lengths of contexts are powers of two, so a unit is 1,024 here and 1,000 in `parse_count`, for amounts of training
    text.
    """
    match = re.fullmatch(r"(\d{1,15})([km])", value.strip().lower()) if isinstance(value, str) else None
    return int(match[1]) * {"k": 2**10, "m": 2**20}[match[2]] if match else value


def parse_float(value: Any) -> Any:
    """Return the float for text such as 1e-3, which YAML reads as a string. Return any other value unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Count = Annotated[int, BeforeValidator(parse_count)]
Length = Annotated[int, BeforeValidator(parse_length)]
Real = Annotated[float, BeforeValidator(parse_float)]


def section_keys(model: type[BaseModel], location: Iterable[Any]) -> list[str]:
    """Return the valid keys of the section that an error's location, of pydantic, is in.

    model: of the whole document.
    """
    *sections, _ = location
    for key in sections:
        field = model.model_fields.get(key)
        model = model if field is None else next(_models_in(field.annotation), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation such as tuple[Rule, ...] or SpeedRecipe | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def validation_error(
    error: ValidationError, where: str, model: type[BaseModel], further: Iterable[str] = ()
) -> SurgeryError:
    """Return a SurgeryError with one clause per invalid field, which names the nearest key of its section for an unknown
    one.

    where: the file or object, for the message. model: what was validated. further: valid keys beside the model's.
    """
    sentences = []
    for e in error.errors():
        path = ".".join(str(key) for key in e["loc"]) or "it"
        if e["type"] == "extra_forbidden":
            known = [*section_keys(model, e["loc"]), *(further if len(e["loc"]) == 1 else ())]
            sentences.append(f"unknown key {path!r}{suggestion(str(e['loc'][-1]), known)}")
        elif e["type"] == "missing":
            sentences.append(f"{path} is missing")
        else:
            rule = e["msg"].removeprefix("Value error, ").replace("Input should ", "must ", 1)
            sentences.append(f"{path}: {rule}" + ("" if "(got " in rule else f" (got {e['input']!r})"))
    return SurgeryError(f"{where}: " + "; ".join(dict.fromkeys(sentences)))


def deep_merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` put over it, merging nested mappings key by key."""
    both = dict(below)
    for key, value in above.items():
        inside = both.get(key)
        both[key] = deep_merge(inside, value) if isinstance(inside, dict) and isinstance(value, dict) else value
    return both


def set_by_path(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a nested value in place: the path stages.0.rate sets data["stages"][0]["rate"]; stages.*.rate sets it in
    every item.
    """
    first, _, rest = path.partition(".")
    container: Any = data
    keys: list[Any] = list(range(len(container))) if first == "*" and isinstance(container, list) else [first]
    try:
        for key in keys:
            key = int(key) if isinstance(container, list) else key
            if not rest:
                container[key] = value
            else:
                if isinstance(container, dict) and not isinstance(container.get(key), (dict, list)):
                    container[key] = {}
                set_by_path(container[key], rest, value)
    except (IndexError, ValueError, TypeError, AttributeError):
        raise SurgeryError(f"--set {path}: the recipe has no such key") from None


def apply_override(data: dict[str, Any], text: str) -> None:
    """Apply a `--set key.path=value` override in place. The value is parsed as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise SurgeryError(f"--set {text!r}: write key=value, for example --set stages.0.tokens=20M")
    try:
        read = read_yaml(value)
    except ValueError:
        raise SurgeryError(f"--set {text[:100]!r}: not a YAML value") from None
    set_by_path(data, path.strip(), read)
