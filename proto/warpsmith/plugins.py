"""Finds the plugins that fill a role, by entry point; built-ins come through the same door.

A package adds one with, for example,

    [project.entry-points."warpsmith.reasoner"]
    oracle = "my_package:OracleReasoner"

The object is called without arguments to make the plugin. Of a reasoner and a synthesizer a service has one, which
`--plugin reasoner=oracle` or `WARPSMITH_REASONER=oracle` names; a search and an exporter are named in each call; of
toolchains and executors the first that fits the target is used, installed ones before built-in ones; every check is
made. Roles are Protocols; `warpsmith.testing` says whether a plugin fits.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from warpsmith.errors import UnknownPlugin

ROLES = ("reasoner", "synthesizer", "toolchain", "check", "executor", "search", "exporter")
"""Every role; the entry-point group of a role is `warpsmith.<role>`."""


def names(role: str) -> tuple[str, ...]:
    """Names installed for a role, sorted."""
    return tuple(sorted(_found(role)))


def load(role: str, name: str) -> Any:
    """Makes the plugin of that name.

    Raises:
        UnknownPlugin: none of that name is installed, or it does not import; says which are installed.
    """
    found = _found(role)
    if name not in found:
        installed = ", ".join(sorted(found)) or "none"
        raise UnknownPlugin(f"no {role} is called {name!r}; installed: {installed}")
    try:
        return found[name].load()()
    except ImportError as error:
        raise UnknownPlugin(f"{role} {name!r} ({found[name].value}) does not import: {error}") from error


def _found(role: str) -> dict[str, EntryPoint]:
    if role not in ROLES:
        raise UnknownPlugin(f"no role is called {role!r}; roles: {', '.join(ROLES)}")
    return {point.name: point for point in entry_points(group=f"warpsmith.{role}")}
