"""Packages that look as if they were not installed."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make `importlib.util.find_spec` miss these packages and all that is in them."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.split(".")[0] in names else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
