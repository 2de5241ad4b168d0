"""Library calls that would replace or resize a converted head, refused before they change anything.

transformers resizes the input embedding in place, then reads the head's weight as a matrix, which a structured head
does not hold.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from surgery.core.errors import SurgeryError
from surgery.modeling.modules import REPLACED


def converted_head(model: Any) -> nn.Module | None:
    """Return the head of a model if it was converted, also inside an adapter or a copy that PEFT trains
    (`modules_to_save`), else None.
    """
    head = model.get_output_embeddings()
    return head if head is not None and any(isinstance(submodule, REPLACED) for submodule in head.modules()) else None


class ConvertedModelMixin:
    """Mixin of the class of a model whose head may be converted."""

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Resize the embeddings as transformers does.

        Raises SurgeryError, with the model unchanged, if the head is converted.

        A call that would change no size does nothing: libraries make it for every tokenizer.
        """
        model: Any = self
        head, embedding = converted_head(model), model.get_input_embeddings()
        if head is None:
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, *args, **kwargs)  # type: ignore[misc]
        before = embedding.weight.shape[0]
        after = before if new_num_tokens is None else new_num_tokens
        if type(pad_to_multiple_of) is int and pad_to_multiple_of > 0:
            after = -(-after // pad_to_multiple_of) * pad_to_multiple_of
        if after == before:
            return embedding
        raise SurgeryError(
            f"{_name(model, head)} is structured, and rows for other tokens cannot be added to its factors or removed: "
            "resize_token_embeddings "
            f"would change {before} tokens to {after}. Resize the original model and convert it again, or multiply the "
            "structures "
            "out first (surgery.densify(model)), resize, and convert"
        )

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Set the head. Raises SurgeryError if it is converted and another module would take its place."""
        model: Any = self
        head = converted_head(model)
        if head is not None and new_embeddings is not head:
            raise SurgeryError(
                f"{_name(model, head)} is structured, and the checkpoint's table would still say so of the module that "
                "takes its place "
                f"(got a {type(new_embeddings).__name__}). Multiply the structures out first: surgery.densify(model)"
            )
        super().set_output_embeddings(new_embeddings)  # type: ignore[misc]


def _name(model: nn.Module, head: nn.Module) -> str:
    path = next((path for path, module in model.named_modules() if module is head), "the head")
    return f"{type(model).__name__}: {path}"
