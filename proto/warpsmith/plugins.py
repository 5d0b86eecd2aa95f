"""Finds the plugins that fill a role, by entry point; built-ins come through the same door.

A package adds one with, for example,

    [project.entry-points."warpsmith.reasoner"]
    oracle = "my_package:OracleReasoner"

The object is called without arguments to make the plugin; a schedule's with the card that it is for. The one idea: a
plugin that is only installed is never used; it is chosen by name. Of a reasoner and a synthesizer a service has one,
which `--plugin reasoner=oracle` or `WARPSMITH_REASONER=oracle` names; a search and an exporter are named in each call.
Of the other roles `WARPSMITH_<ROLE>` names those that join the built-in ones: toolchains and executors go before them,
checks, schedules and lowerings after. Roles are Protocols; `warpsmith.testing` says whether a plugin fits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from warpsmith.errors import UnknownPlugin

ROLES = ("reasoner", "synthesizer", "toolchain", "check", "executor", "search", "exporter", "schedule", "lowering")
"""Every role; the entry-point group of a role is `warpsmith.<role>`."""
JOINING = ("toolchain", "check", "executor", "schedule", "lowering")
"""Roles of which several plugins can join the built-in ones: `WARPSMITH_<ROLE>` names them, with commas between."""


def names(role: str) -> tuple[str, ...]:
    """Names installed for a role, sorted."""
    return tuple(sorted(_found(role)))


def chosen(role: str) -> tuple[str, ...]:
    """Names of the plugins of a role of `JOINING` that are to join the built-in ones, each once, in the order given."""
    named = os.environ.get(variable(role), "").replace(",", " ").split()
    return tuple(dict.fromkeys(named))


def choices() -> dict[str, str]:
    """What chooses plugins here, as the environment of a process that is to have the same."""
    return {name: os.environ[name] for name in map(variable, JOINING) if name in os.environ}


def variable(role: str) -> str:
    """The variable that chooses plugins of a role."""
    return f"WARPSMITH_{role.upper()}"


def load(role: str, name: str) -> Any:
    """Makes the plugin of that name. Raises what `find` raises."""
    return find(role, name)()


def find(role: str, name: str) -> Any:
    """What the entry point of that name is: what makes the plugin.

    Raises:
        UnknownPlugin: none of that name is installed, two packages have one, or it does not import; says which are
            installed.
    """
    point = _one(role, name)
    try:
        return point.load()
    except Exception as error:  # it is another's module
        told = f"{type(error).__name__}: {error}"
        raise UnknownPlugin(f"{role} {name!r} ({point.value}) does not import: {told}") from error


def require(role: str, name: str) -> None:
    """Raises what `find` raises for a name, without importing anything."""
    _one(role, name)


def versions(role: str) -> list[str]:
    """What tells the chosen plugins of a role from others: their names, and the text of the modules they are in."""
    parts = []
    for name in sorted(chosen(role)):
        point = _one(role, name)
        spec = importlib.util.find_spec(point.module)
        text = Path(spec.origin).read_bytes() if spec is not None and spec.origin else b""
        parts += [name, point.value, hashlib.sha256(text).hexdigest()]
    return parts


def _one(role: str, name: str) -> EntryPoint:
    found = _found(role)
    match found.get(name, ()):
        case [point]:
            return point
        case []:
            raise UnknownPlugin(f"no {role} is called {name!r}; installed: {', '.join(sorted(found)) or 'none'}")
        case several:
            owners = " and ".join(f"{point.dist.name if point.dist else '?'} ({point.value})" for point in several)
            raise UnknownPlugin(f"the {role} {name!r} is in several packages: {owners}; uninstall all but one")


def _found(role: str) -> dict[str, list[EntryPoint]]:
    """By name; of a distribution that is found twice on the path, the first counts."""
    if role not in ROLES:
        raise UnknownPlugin(f"no role is called {role!r}; roles: {', '.join(ROLES)}")
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"warpsmith.{role}"):
        found.setdefault(point.name, []).append(point)
    return found
