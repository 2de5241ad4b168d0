"""The key `depth` of a conversion recipe: how many layers of the decoder are removed, and which.

depth: {keep: 0.75}           # three quarters of the layers, chosen on the calibration text
depth: {drop: 8}              # eight layers fewer
depth: {remove: "18:26"}      # these layers
depth: {remove: [3, 18]}      # these two
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator, model_validator

from surgery.core.config import check_layer_range, is_layer_selected
from surgery.core.errors import SurgeryError


class DepthRecipe(BaseModel):
    """Which layers are removed. One of keep (share of the layers that stay), drop (how many are removed) and remove
    (a range of layer numbers, or a list of them) is given.

    refit: whether the last linear before the removed layers is fitted again to what they added.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: Annotated[float, Field(gt=0, lt=1)] | None = None
    drop: Annotated[int, Field(ge=1, strict=True)] | None = None
    remove: str | tuple[Annotated[int, Field(ge=0, strict=True)], ...] | None = None
    refit: StrictBool = True

    @field_validator("remove", mode="before")
    @classmethod
    def _check_remove(cls, value: Any) -> Any:
        return value if isinstance(value, (list, tuple)) else check_layer_range(value)

    @model_validator(mode="after")
    def _check_one(self) -> DepthRecipe:
        if sum(value is not None for value in (self.keep, self.drop, self.remove)) != 1:
            raise SurgeryError(
                "depth: give one of keep (share of the layers that stay), drop (how many are removed) and remove (a "
                'range, such as "18:26"), for example {drop: 8}'
            )
        return self

    @property
    def is_measured(self) -> bool:
        """Whether the layers are chosen on the calibration text."""
        return self.remove is None

    def removed(self, count: int) -> list[int]:
        """Return the numbers of the layers that `remove` names, of `count` layers. Raises SurgeryError for others."""
        assert self.remove is not None
        if isinstance(self.remove, str):
            return [index for index in range(count) if is_layer_selected(self.remove, index, count)]
        if outside := [index for index in self.remove if index >= count]:
            raise SurgeryError(f"depth.remove: layers are 0 to {count - 1} (got {outside[0]})")
        return sorted(set(self.remove))

    def dropped(self, count: int) -> int:
        """Return how many of `count` layers are removed. Raises SurgeryError if none is, or none would stay."""
        if self.remove is not None:
            number = len(self.removed(count))
        else:
            number = self.drop if self.drop is not None else count - round(count * (self.keep or 1))
        # The first layer stays: its input are embeddings, which no other layer reads.
        most = count - 1 if self.remove is not None else count - 2
        if not 1 <= number <= most:
            raise SurgeryError(f"depth: from 1 to {most} of the {count} layers can be removed (got {number})")
        return number
