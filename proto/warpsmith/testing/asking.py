"""Asks a plugin what its role promises, and says in one sentence what it does instead.

The one idea: whatever a plugin lacks is a finding: a member that is missing, that takes other arguments, that raises,
or that gives something else. It knows no role: the suites do, in `warpsmith.testing` and the `conformance` modules.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from warpsmith import printable
from warpsmith.errors import Infrastructure, WarpsmithError

T = TypeVar("T")
MOST_CHARACTERS = 400
"""Of a finding: some errors hold a whole trace."""


class Unfit(Exception):
    """What a plugin does instead of its role; ends the questions that it was one of."""


def made(make: Callable[..., Any], *arguments: object) -> Any:
    """The plugin that an entry point's object makes. Raises Unfit where it makes none."""
    plugin = ask(make, *arguments, gives=object, name="it")
    if plugin is None:
        raise Unfit("it gives None where it is called to make the plugin")
    return plugin


def member(plugin: object, name: str, kind: type[T], *, of: str = "it") -> T:
    """A member that is no method, of a kind; `of`: how a sentence calls its owner.

    Raises Unfit where it is missing, or of another kind.
    """
    found = _found(plugin, name, of)
    if not isinstance(found, kind):
        raise Unfit(f"{name} is {_a(found)}, not {kind.__name__}")
    return found


def method(plugin: object, name: str, *arguments: object, gives: type[T] | tuple[type[Any], ...], of: str = "it") -> T:
    """What a method gives. Raises Unfit where it is missing, and as `ask` does."""
    return ask(_found(plugin, name, of), *arguments, gives=gives, name=name)


def ask(call: Callable[..., Any], *arguments: object, gives: type[T] | tuple[type[Any], ...], name: str = "") -> T:
    """What a call gives: something of a type, or of one of several.

    Raises:
        Unfit: it takes other arguments, raises what is no `WarpsmithError`, or gives something of another type.
        WarpsmithError: as it raises it.
    """
    name = name or getattr(call, "__name__", "the call")
    if not callable(call):
        raise Unfit(f"{name} is {_a(call)}, and cannot be called")
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError as error:
        raise Unfit(f"{name} does not take {_counted(arguments)}: {error}") from error
    except ValueError:  # it does not say what it takes
        pass
    try:
        found = call(*arguments)
    except WarpsmithError:
        raise
    except (Exception, SystemExit) as error:
        raise Unfit(f"{name} {_raises(error)}") from error
    if not isinstance(found, gives):
        wanted = " or ".join(each.__name__ for each in (gives if isinstance(gives, tuple) else (gives,)))
        raise Unfit(f"{name} gives {_a(found)}, not {wanted}")
    return found


def refuses(call: Callable[[], object], expected: type[WarpsmithError], what: str) -> Iterator[str]:
    """A finding where a call does not raise what it should."""
    try:
        call()
    except expected:
        return
    except (WarpsmithError, Unfit) as error:
        said = str(error) if isinstance(error, Unfit) else f"it gives {type(error).__name__}"
        yield f"{what}: {said} instead of {expected.__name__}"
    else:
        yield f"{what} is not refused"


def findings(questions: Iterator[str], *, of_server: bool = False) -> list[str]:
    """All findings, each once and in one line; what ends the questions is the last.

    Raises:
        Infrastructure: the questions are to a server, and it does not answer.
    """
    found: dict[str, None] = {}
    try:
        for finding in questions:
            found[finding] = None
    except Unfit as unfit:
        found[str(unfit)] = None
    except Exception as error:
        if of_server and isinstance(error, Infrastructure):
            raise
        found[f"it {_raises(error)}"] = None
    return [printable.line(finding, MOST_CHARACTERS) for finding in found]


def _found(plugin: object, name: str, of: str) -> Any:
    try:
        return getattr(plugin, name)
    except AttributeError:
        raise Unfit(f"{of} has no {name}") from None
    except Exception as error:
        raise Unfit(f"{name} {_raises(error)}") from error


def _raises(error: BaseException) -> str:
    """With the line of the plugin's, or of what it called, that raised."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"raises {type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def _a(found: object) -> str:
    return "None" if found is None else f"of type {type(found).__name__}"


def _counted(arguments: tuple[object, ...]) -> str:
    kinds = ", ".join(type(each).__name__ for each in arguments)
    return f"({kinds})" if arguments else "no arguments"
