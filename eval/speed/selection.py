"""Which cases and models of a benchmark `--only` names."""

from __future__ import annotations


def is_selected(name: str, only: str | None) -> bool:
    """Return whether a name contains one of the comma-separated words of --only, and no word after a minus sign.

    Case does not matter. Without a word to contain, every name does.
    """
    words = [word.strip() for word in (only or "").lower().split(",") if word.strip()]
    without = [word[1:] for word in words if word.startswith("-")]
    among = [word for word in words if not word.startswith("-")] or [""]
    name = name.lower()
    return any(word in name for word in among) and not any(word in name for word in without)
