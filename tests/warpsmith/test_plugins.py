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
        EntryPoint("twice", "collections:OrderedDict", "warpsmith.check"),
        EntryPoint("twice", "collections:Counter", "warpsmith.check"),
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


def test_a_name_in_two_packages_is_refused_and_says_in_which() -> None:
    both = r"the check 'twice' is in several packages: .*collections:OrderedDict.* and .*collections:Counter"
    with pytest.raises(UnknownPlugin, match=both):
        plugins.load("check", "twice")


def test_only_what_is_named_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (plugins.chosen("check"), plugins.versions("check")) == ((), [])
    monkeypatch.setenv("WARPSMITH_CHECK", "one, other,,one")
    assert plugins.chosen("check") == ("one", "other")
    assert plugins.choices() == {"WARPSMITH_CHECK": "one, other,,one"}


def test_an_unknown_role_says_which_there_are() -> None:
    with pytest.raises(UnknownPlugin, match="roles: reasoner, synthesizer"):
        plugins.names("wizard")
