"""Tell why the Hub could not be read, for every command that reads it: one place that knows the exceptions of its
libraries.

huggingface_hub, datasets, requests, httpx and aiohttp raise errors of their own for the same mishap, and wrap each
other's. They are told by their names, because none of these libraries is imported before it is needed and httpx has
other names in other releases of huggingface_hub.
"""

from __future__ import annotations

import socket
import ssl
import sys
from typing import Literal, get_args

from surgery.core.environment import causes

# The most specific first: an error of a gated data set is caused by one of a missing data set, and that by one of HTTP.
HubFailure = Literal["gated", "revision", "missing", "file", "offline", "refused", "unreachable"]

# Exceptions of huggingface_hub and datasets; a subclass stands before its base in the method resolution order.
FAILURES: dict[str, HubFailure] = {
    "GatedRepoError": "gated",
    "RepositoryNotFoundError": "missing",
    "DatasetNotFoundError": "missing",
    "RevisionNotFoundError": "revision",
    "RemoteEntryNotFoundError": "file",
    "OfflineModeIsEnabled": "offline",
    "HfHubHTTPError": "refused",
}
HUB_PACKAGES = ("huggingface_hub", "datasets")
HTTP_PACKAGES = ("requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2", "aiohttp")
NETWORK_ERRORS = (socket.gaierror, ssl.SSLError, ConnectionRefusedError)


def hub_failure(error: BaseException) -> HubFailure | None:
    """Return why the Hub could not be read if that caused `error`, else None. The most specific cause decides."""
    kinds = {_classify(cause) for cause in causes(error)}
    return next((kind for kind in get_args(HubFailure) if kind in kinds), None)


def _classify(error: BaseException) -> HubFailure | None:
    if isinstance(error, NETWORK_ERRORS):
        return "unreachable"
    if type(error) is ConnectionError:  # of datasets, which gives the name of the cause in its text
        return "offline" if "OfflineModeIsEnabled" in str(error) else "unreachable"
    for kind in type(error).__mro__:
        package = kind.__module__.partition(".")[0]
        if (
            package == "huggingface_hub" and kind.__name__ == "LocalEntryNotFoundError"
        ):  # raised without a network and offline
            offline = getattr(sys.modules.get("huggingface_hub.constants"), "HF_HUB_OFFLINE", False)
            return "offline" if offline else "unreachable"
        if kind.__name__ == "DatasetNotFoundError" and "gated" in str(error):
            return "gated"
        if package in HUB_PACKAGES and kind.__name__ in FAILURES:
            return FAILURES[kind.__name__]
        if package in HTTP_PACKAGES:
            return "unreachable"
    return None


def explain_hub_error(
    error: BaseException,
    name: str,
    instead: str,
    *,
    kinds: tuple[str, str] = ("a local folder", "a Hub id"),
    revision: str | None = None,
) -> str | None:
    """Return the message of a SurgeryError if `error` says that the Hub could not be read; None for any other error.

    Args:
        name: the checkpoint or data set as the user gave it.
        instead: what to do without the Hub, an imperative clause: "give the path of a folder".
        kinds: what the name could have been, on this machine and on the Hub.
        revision: the revision that the user asked for.
    """
    local, remote = kinds
    failure = hub_failure(error)
    if failure == "revision":
        return f"{name} on the Hub has no revision {revision!r}; give a branch, a tag or a full commit hash"
    if failure == "gated":
        return f"{name} is gated: accept its terms on its Hub page, then run `hf auth login`"
    if failure == "missing":
        return f"{name} is neither {local} nor {remote} that you may read; if it is private, run `hf auth login`"
    if failure in ("offline", "unreachable"):
        why = "HF_HUB_OFFLINE is set" if failure == "offline" else "the Hub cannot be reached"
        again = "unset HF_HUB_OFFLINE" if failure == "offline" else "try again with a network connection"
        return f"{name} is neither {local} nor {remote} in the local cache, and {why}; {instead}, or {again}"
    if failure in ("file", "refused"):
        return f"{name} could not be read from the Hub ({first_line(error)}); {instead}, or try again later"
    return None


def explain_network_error(error: BaseException) -> str | None:
    """Return a message for an error of the Hub or the network whose object is unknown; None for any other error."""
    failure = hub_failure(error)
    if failure is None:
        return None
    advice = {
        "gated": "Accept its terms on its Hub page, then run `hf auth login`",
        "missing": "Check the name; if it is private, run `hf auth login`",
        "revision": "Give a branch, a tag or a full commit hash",
        "offline": "Unset HF_HUB_OFFLINE, or give local files and folders",
        "unreachable": "Try again with a network connection, or give local files and folders",
    }.get(failure, "Try again later, or give local files and folders")
    return (
        f"the Hub or another server could not be read ({type(error).__name__}: {first_line(error)}). {advice}; data "
        "sets of evaluations are "
        "downloaded by `surgery fetch-eval-data DIR` and read with --data-root DIR"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()[:200]
