"""A file that gives the linears of a model their bits, for `surgery quantize --rules`.

rules:
  - {match: "mlp.*", layers: "0:8", bits: 4}    # match, layers: as in a conversion recipe; later rules win
  - {match: "*.down_proj", bits: 8, group: 64}  # group: inputs that share a scale

Linears that no rule matches keep their numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator

from surgery.architectures.linears import LinearInfo
from surgery.core.config import (
    MAX_BYTES,
    StrictModel,
    check_layer_range,
    is_layer_selected,
    read_yaml,
    validation_error,
)
from surgery.core.errors import SurgeryError
from surgery.planning.plan import matches_pattern


class BitsRule(StrictModel):
    """Bits of the linears that match. bits: 16 leaves them as they are. group: None for the default of the bits."""

    match: Annotated[str, Field(max_length=1000)]
    layers: str | None = None
    bits: Literal[16, 8, 4]
    group: Literal[8, 16, 32, 64, 128, 256] | None = None

    _layers = field_validator("layers", mode="before")(check_layer_range)

    def applies(self, linear: LinearInfo) -> bool:
        """Return whether the rule matches a linear, in its layer."""
        if self.layers is not None and (
            linear.index is None or not is_layer_selected(self.layers, linear.index, linear.count)
        ):
            return False
        return any(matches_pattern(self.match, linear, role) for role in linear.roles or ("",))


class BitsRecipe(StrictModel):
    """Bits of the linears of a model."""

    rules: Annotated[tuple[BitsRule, ...], Field(min_length=1, max_length=10_000)]

    def rule_of(self, linear: LinearInfo) -> BitsRule | None:
        """Return the rule that gives a linear fewer bits, None if it keeps its numbers."""
        rule = next((rule for rule in reversed(self.rules) if rule.applies(linear)), None)
        return None if rule is None or rule.bits == 16 else rule


def read_bits(path: Path) -> BitsRecipe:
    """Return the rules of a YAML file. Raises SurgeryError if it is no such file."""
    if not path.is_file():
        raise SurgeryError(f"--rules: the file {path} does not exist")
    if path.stat().st_size > MAX_BYTES:
        raise SurgeryError(f"--rules: {path} must have at most {MAX_BYTES:,} bytes (got {path.stat().st_size:,})")
    try:
        data = read_yaml(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise SurgeryError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise SurgeryError(
            f"--rules: {path} must be a mapping with a list of rules (got {data!r:.60}). Write one, for example rules: "
            "[{match: mlp.down, bits: 4, group: 64}]"
        )
    try:
        return BitsRecipe.model_validate(data)
    except ValidationError as error:
        raise validation_error(error, str(path), BitsRecipe) from None
