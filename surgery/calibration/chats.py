"""Conversations as text: messages of a table's row, rendered by the chat template of the tokenizer."""

from __future__ import annotations

from typing import Any

from surgery.core.errors import SurgeryError

CHAT_COLUMNS = ("messages", "conversations")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}  # ShareGPT role -> role of chat templates
Message = dict[str, Any]


def parse_messages(content: Any, where: str) -> list[Message]:
    """Return messages as [{"role": .., "content": ..}, ..]; also accepts ShareGPT's keys `from` and `value`.

    where: names the data in the message of a SurgeryError.
    """
    messages = []
    for message in content if isinstance(content, (list, tuple)) else [content]:
        if isinstance(message, dict) and "role" in message and "content" not in message:
            raise SurgeryError(f"{where}: a message has no content: {str(message)[:80]}")
        if isinstance(message, dict) and "role" in message:
            # Columns of a table that this message does not have are None.
            messages.append({key: value for key, value in message.items() if value is not None or key == "content"})
        elif isinstance(message, dict) and {"from", "value"} <= set(message):
            messages.append({"role": SHAREGPT_ROLES.get(message["from"], message["from"]), "content": message["value"]})
        else:
            raise SurgeryError(
                f"{where}: a conversation must be a list of messages "
                f'{{"role": "user", "content": ".."}} (got {str(message)[:80]!r}).'
            )
    return messages


def chat_template(tokenizer: Any, where: str) -> str:
    """Return the chat template of a tokenizer. Raises SurgeryError if it has none."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise SurgeryError(
            f"{where} holds conversations, but the tokenizer has no chat template. Add a "
            "chat_template.jinja to its folder, or convert the conversations to text."
        ) from None


def apply_chat_template(tokenizer: Any, messages: list[Message], where: str, **options: Any) -> Any:
    """Return `tokenizer.apply_chat_template` of a conversation. Raises SurgeryError if the template rejects it."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template can raise any exception
        raise SurgeryError(
            f"{where}: the chat template rejects a conversation "
            f"({' '.join(str(error).split())[:160]}): {str(messages)[:160]}"
        ) from None
