"""Which agents and plugins a command's services use, by the options that name them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path

from warpsmith import plugins, settings
from warpsmith.errors import BadInput
from warpsmith.sandbox import jail

ROLES = (*settings.CHOSEN_ROLES, *plugins.JOINING)
"""What --plugin can choose."""
SERVED = {**settings.CHOSEN_ROLES, "toolchain": "compile"}
"""Roles that a server can fill, with its service."""
_ELSEWHERE = {
    "search": "a strategy is chosen by --search NAME",
    "exporter": "an exporter is chosen when a run is exported: warpsmith export --flavour NAME",
}
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def agents(plugins_: list[str] | None, reasoner: str, synthesizer: str) -> list[str]:
    """All that --plugin, --reasoner and --synthesizer choose, as --plugin would have it."""
    named = {"reasoner": reasoner, "synthesizer": synthesizer}
    return [*(plugins_ or []), *(f"{role}={name}" for role, name in named.items() if name)]


def environment(chosen: list[str], search: str, server: str, trust_input: bool) -> dict[str, str]:
    """Environment of local services; the chosen plugins are installed. Trust holds for this process too.

    Raises:
        BadInput: an unknown role, two plugins where one is used, or an unknown plugin: says which are installed.
    """
    environment: dict[str, str] = {}
    if trust_input:
        jail.trust_input()
        environment["WARPSMITH_TRUST_INPUT"] = "1"
    if server:
        if chosen:
            raise BadInput("--plugin is for services that the command starts; set it where the server runs")
        return environment
    if search:
        plugins.require("search", search)
    by_role: dict[str, list[str]] = {}
    for text in dict.fromkeys(chosen):
        role, _, name = text.partition("=")
        by_role.setdefault(role, []).append(name)
    return environment | dict(starmap(_choice, by_role.items()))


def gpus(count: int, server: str, target: str, devices: Path = Path("/dev")) -> list[dict[str, str]]:
    """What each of several sets of local services sees of the GPUs, as variables: one each; for one set, all.

    Raises:
        BadInput: fewer are visible, the services run elsewhere, or the target is the processor.
    """
    if count == 1:
        return [{}]
    if server or target == "cpu":
        raise BadInput(f"--gpus is for services that the command starts on GPUs, not for {server or 'the cpu target'}")
    visible = [str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*"))]
    if visible and (named := os.environ.get(_VISIBLE)) is not None:
        names = [name.strip() for name in named.split(",")]
        # As CUDA reads it: what is no device ends the list.
        is_device = [name in visible or name.startswith(("GPU-", "MIG-")) for name in names]
        visible = list(dict.fromkeys(names[: [*is_device, False].index(False)]))
    if len(visible) < max(count, 1):
        raise BadInput(f"--gpus {count}: this command can see {len(visible)}")
    return [{_VISIBLE: name} for name in visible[: count or None]]


def _choice(role: str, names: Sequence[str]) -> tuple[str, str]:
    """The variable that chooses these plugins of a role, and its value."""
    said = f"--plugin {role}={names[0]}" if any(names) else f"--plugin {role}"
    if elsewhere := _ELSEWHERE.get(role):
        raise BadInput(f"{said}: {elsewhere}")
    if role not in ROLES or not all(names):
        raise BadInput(f"{said}: write ROLE=NAME or ROLE=HOST:PORT; a role is one of {', '.join(ROLES)}")
    is_server = role in SERVED and any(":" in name for name in names)
    if len(names) > 1 and (is_server or role in settings.CHOSEN_ROLES):
        raise BadInput(f"{said}: a run has one {role}, and {', '.join(names)} are named")
    if is_server:
        return f"WARPSMITH_{SERVED[role].upper()}_ADDRESS", names[0]
    for name in names:
        plugins.require(role, name)
    return plugins.variable(role), ",".join(names)
