"""The key `depth` of a conversion recipe: how many layers of the decoder are removed, and which.

depth: {keep: 0.75}           # three quarters of the layers, chosen on the calibration text
depth: {drop: 8}              # eight layers fewer
depth: {remove: "18:26"}      # these layers
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator, model_validator

from surgery.core.config import check_layer_range, is_layer_selected
from surgery.core.errors import SurgeryError


class DepthRecipe(BaseModel):
    """Which layers are removed. One of keep (share of the layers that stay), drop (how many are removed) and remove
    (a range of layer numbers) is given.

    refit: whether the last linear before the removed layers is fitted again to what they added.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: Annotated[float, Field(gt=0, lt=1)] | None = None
    drop: Annotated[int, Field(ge=1, strict=True)] | None = None
    remove: str | None = None
    refit: StrictBool = True

    _remove = field_validator("remove", mode="before")(check_layer_range)

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

    def dropped(self, count: int) -> int:
        """Return how many of `count` layers are removed. Raises SurgeryError if none is, or none would stay."""
        if self.remove is not None:
            number = sum(is_layer_selected(self.remove, index, count) for index in range(count))
        else:
            number = self.drop if self.drop is not None else count - round(count * (self.keep or 1))
        # The first layer stays: its input are embeddings, which no other layer reads.
        most = count - 1 if self.remove is not None else count - 2
        if not 1 <= number <= most:
            raise SurgeryError(f"depth: from 1 to {most} of the {count} layers can be removed (got {number})")
        return number
