"""Finds the plugins that fill a role, by entry point; built-ins come through the same door.

A package adds one with, for example,

    [project.entry-points."warpsmith.reasoner"]
    oracle = "my_package:OracleReasoner"

The object is called without arguments to make the plugin; a schedule's with the card that it is for. Of a reasoner and
a synthesizer a service has one, which `--plugin reasoner=oracle` or `WARPSMITH_REASONER=oracle` names; a search and an
exporter are named in each call; of toolchains and executors the first that fits the target is used, installed ones
before built-in ones; every check is made; schedules and lowerings are added to the built-in ones. Roles are Protocols;
`warpsmith.testing` and the `conformance` modules say whether a plugin fits.
"""

from __future__ import annotations

import hashlib
import importlib.util
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from warpsmith.errors import UnknownPlugin

ROLES = ("reasoner", "synthesizer", "toolchain", "check", "executor", "search", "exporter", "schedule", "lowering")
"""Every role; the entry-point group of a role is `warpsmith.<role>`."""


def names(role: str) -> tuple[str, ...]:
    """Names installed for a role, sorted."""
    return tuple(sorted(_found(role)))


def load(role: str, name: str) -> Any:
    """Makes the plugin of that name. Raises what `find` raises."""
    return find(role, name)()


def find(role: str, name: str) -> Any:
    """What the entry point of that name is: what makes the plugin.

    Raises:
        UnknownPlugin: none of that name is installed, or it does not import; says which are installed.
    """
    found = _found(role)
    if name not in found:
        installed = ", ".join(sorted(found)) or "none"
        raise UnknownPlugin(f"no {role} is called {name!r}; installed: {installed}")
    try:
        return found[name].load()
    except ImportError as error:
        raise UnknownPlugin(f"{role} {name!r} ({found[name].value}) does not import: {error}") from error


def versions(role: str) -> list[str]:
    """What tells the installed plugins of a role from others: their names, and the text of the modules they are in."""
    parts = []
    for name, point in sorted(_found(role).items()):
        spec = importlib.util.find_spec(point.module)
        text = Path(spec.origin).read_bytes() if spec is not None and spec.origin else b""
        parts += [name, point.value, hashlib.sha256(text).hexdigest()]
    return parts


def _found(role: str) -> dict[str, EntryPoint]:
    if role not in ROLES:
        raise UnknownPlugin(f"no role is called {role!r}; roles: {', '.join(ROLES)}")
    return {point.name: point for point in entry_points(group=f"warpsmith.{role}")}
