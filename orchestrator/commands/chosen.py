"""Which agents and plugins a command's services use, by the options that name them."""

from __future__ import annotations

import os
from pathlib import Path

from warpsmith import plugins, settings
from warpsmith.errors import BadInput
from warpsmith.sandbox import jail

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def agents(plugins_: list[str] | None, reasoner: str, synthesizer: str) -> list[str]:
    """All that --plugin, --reasoner and --synthesizer choose, as --plugin would have it."""
    named = {"reasoner": reasoner, "synthesizer": synthesizer}
    return [*(plugins_ or []), *(f"{role}={name}" for role, name in named.items() if name)]


def environment(chosen: list[str], search: str, server: str, trust_input: bool) -> dict[str, str]:
    """Environment of local services; the chosen plugins are installed. Trust holds for this process too.

    Raises:
        BadInput: an unknown role, or an unknown plugin: says which are installed.
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
        _require("search", search)
    for text in chosen:
        role, _, name = text.partition("=")
        if role not in settings.CHOSEN_ROLES:
            roles = ", ".join(settings.CHOSEN_ROLES)
            raise BadInput(f"--plugin {text}: write ROLE=NAME or ROLE=HOST:PORT; a role is one of {roles}")
        if ":" in name:
            environment[f"WARPSMITH_{settings.CHOSEN_ROLES[role].upper()}_ADDRESS"] = name
            continue
        _require(role, name)
        environment[f"WARPSMITH_{role.upper()}"] = name
    return environment


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


def _require(role: str, name: str) -> None:
    installed = plugins.names(role)
    if name not in installed:
        raise BadInput(f"no {role} is called {name!r}; installed: {', '.join(installed) or 'none'}")
