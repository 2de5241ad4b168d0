"""The key `speed` of a conversion recipe: the target of a choice of structures by time.

speed: {prefill: 1.4, tokens: 8192, device: NVIDIA H200}    # times of kernels/tuning.json
speed: {decode: 1.4, measured: linear.json}                 # times of a file of `surgery bench linear --out`
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from surgery.core.errors import SurgeryError

Ratio = Annotated[float, Field(gt=1, le=1000)]


class SpeedRecipe(BaseModel):
    """How much faster the replaced linears shall be, and on which GPU.

    prefill, decode: time of the dense linears / time of the replaced ones, for a prompt of `tokens` tokens or for a
    decoding step of one token in a CUDA graph. device, dtype: of the measured times; None where only one was measured.
    measured: a file of `surgery bench linear --out`; None: the times of kernels/tuning.json.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill: Ratio | None = None
    decode: Ratio | None = None
    tokens: int = Field(4096, ge=1, lt=2**31, strict=True)
    device: str | None = Field(None, max_length=200)
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    measured: str | None = None

    @model_validator(mode="after")
    def _check_target(self) -> SpeedRecipe:
        if (self.prefill is None) == (self.decode is None):
            raise SurgeryError(
                "speed: give either prefill or decode, a ratio over 1, for example {prefill: 1.4, tokens: 8192, "
                "device: NVIDIA H200}"
            )
        if self.device is None and self.measured is None:
            raise SurgeryError(
                "speed: name the device whose included times count, for example device: NVIDIA H200, or a file of "
                "`surgery bench linear "
                "--out` as measured"
            )
        return self

    @property
    def phase(self) -> Literal["prefill", "decode"]:
        """The kind of call whose time counts."""
        return "decode" if self.prefill is None else "prefill"

    @property
    def ratio(self) -> float:
        """The target: time of the dense linears / time of the replaced ones."""
        ratio = self.decode if self.prefill is None else self.prefill
        assert ratio is not None
        return ratio

    @property
    def call_tokens(self) -> int:
        """The tokens of the call whose time counts."""
        return 1 if self.prefill is None else self.tokens
