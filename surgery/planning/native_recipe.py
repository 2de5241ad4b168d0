"""The recipe key `native`: level weights for the linear layers that a model has of its own."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from surgery.core.config import check_layer_range
from surgery.mixers.native_config import Native


class NativeRecipe(BaseModel):
    """Level weights of native linear layers. levels, block: see `Native`. layers: range of layer numbers, counted among
    the native linear layers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: int = Native.levels
    block: int = Native.block
    layers: str = ":"

    _layers = field_validator("layers", mode="before")(check_layer_range)

    @model_validator(mode="after")
    def _check_options(self) -> NativeRecipe:
        self.config()
        return self

    def config(self) -> Native:
        """Return the config of the mixer."""
        return Native(self.levels, self.block)
