"""Plugins are found by entry point, and an unknown one says what there is."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from warpsmith import plugins
from warpsmith.errors import UnknownPlugin


@pytest.fixture(autouse=True)
def _two_reasoners(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("plain", "collections:OrderedDict", "warpsmith.reasoner"),
        EntryPoint("absent", "no_such_package:Thing", "warpsmith.reasoner"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point for point in points if point.group == group])


def test_a_plugin_is_made_by_name() -> None:
    assert plugins.load("reasoner", "plain") == {}


def test_an_unknown_plugin_says_which_are_installed() -> None:
    with pytest.raises(UnknownPlugin, match="no reasoner is called 'oracle'; installed: absent, plain"):
        plugins.load("reasoner", "oracle")


def test_a_plugin_that_does_not_import_says_why() -> None:
    with pytest.raises(UnknownPlugin, match="no_such_package"):
        plugins.load("reasoner", "absent")


def test_an_unknown_role_says_which_there_are() -> None:
    with pytest.raises(UnknownPlugin, match="roles: reasoner, synthesizer"):
        plugins.names("wizard")
