"""Classes named by the `auto_map` of converted checkpoints: they register us, then hand over to the Auto class
of the same name, which finds transformers' own model class."""

from __future__ import annotations

from typing import Any

AUTO_CLASSES = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForImageClassification",
)


def auto_class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


class Shim:
    """from_pretrained of an Auto class, without remote code."""

    auto: str

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing to register: the native class is what is loaded."""

    @classmethod
    def from_pretrained(cls, name: str, *args: Any, **kwargs: Any) -> Any:
        import surgery  # noqa: F401 - registers the quantizer

        kwargs.pop("_from_auto", None)
        return auto_class(cls.auto).from_pretrained(name, *args, **{**kwargs, "trust_remote_code": False})


_shims = {f"Shim{name}": type(f"Shim{name}", (Shim,), {"auto": name}) for name in ("AutoConfig", *AUTO_CLASSES)}
globals().update(_shims)
__all__ = list(_shims)
