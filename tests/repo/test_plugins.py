"""Plugins: packages with structures of their own are found by entry point, and named in errors."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

import pytest

from surgery.architectures import get_architecture
from surgery.architectures.base import Architecture, _plugin_families, add_family
from surgery.core.errors import SurgeryError
from surgery.core.registry import PLUGINS, load_plugins


@pytest.fixture
def plugins(monkeypatch):
    """plugins("module", ..): what is installed."""

    def install(*modules: str) -> None:
        points = [importlib.metadata.EntryPoint(name=m, value=m, group=PLUGINS) for m in modules]
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: points if group == PLUGINS else pytest.fail(group)
        )
        load_plugins.cache_clear()

    yield install
    load_plugins.cache_clear()


def test_a_family_of_a_plugin(plugins, monkeypatch):
    architecture = Architecture(
        model_types=("plugged",), layers=("blocks",), attention=("attn",), mlp=("mlp",), query="wq"
    )
    module = ModuleType("plugged_family")
    monkeypatch.setitem(sys.modules, "plugged_family", module)
    plugins("plugged_family")
    assert get_architecture("plugged") is None
    add_family(architecture)
    try:
        assert get_architecture("plugged") is architecture and get_architecture("llama") is not None
    finally:
        _plugin_families.clear()


def test_a_plugin_that_fails_is_named(plugins):
    plugins("no_such_module_of_a_plugin")
    with pytest.raises(SurgeryError, match=r"plugin no_such_module_of_a_plugin .* ModuleNotFoundError"):
        get_architecture("llama")
