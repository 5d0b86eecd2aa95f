"""Writes docs/reference/: the contract, the commands, the settings and the metrics, as the code has them.

`python docs/reference_pages.py` writes the pages again; `--check` only says which are not as the code now is. No page
there is written by hand: what one lacks is missing where the code says what a thing is.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference"
SERVICES = (
    "orchestrator",
    "agent_synthesis",
    "agent_compile",
    "agent_correctness",
    "agent_reasoning",
    "gpu_bench",
    "proto",
)
_HEADER = "<!-- Written by docs/reference_pages.py. -->\n\n"


def pages() -> dict[str, str]:
    """File name → text."""
    made = {
        "contract.md": contract(),
        "commands.md": commands(),
        "settings.md": settings(),
        "schedules.md": schedules(),
        "metrics.md": metrics(),
    }
    return {name: _HEADER + text.rstrip() + "\n" for name, text in made.items()}


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") or " " for cell in cells) + " |"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return ["", _row(*head), _row(*("---" for _ in head)), *(_row(*row) for row in rows), ""]


def _sources() -> Iterator[Path]:
    for service in SERVICES:
        yield from sorted(path for path in (ROOT / service).rglob("*.py") if "_pb2" not in path.name)


# ---- contract --------------------------------------------------------------------------------------------------


def contract() -> str:
    """Services, messages and enums, with their comments."""
    lines = [
        "# Contract",
        "",
        "What services say to each other: `proto/warpsmith/v1`. Numbers of fields never change; a field that is not",
        "set has its type's zero.",
    ]
    files = _descriptors()
    for file in sorted(files, key=lambda each: (not each.service, each.name)):
        said = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}
        lines += ["", f"## {Path(file.name).stem}"]
        for at, service in enumerate(file.service):
            lines += ["", f"### service {service.name}", "", _text(said.get((6, at), ""))]
            lines += _table(
                ("call", "request → response", ""),
                (
                    (f"`{call.name}`", f"{_type_name(call.input_type)} → {_streamed(call.server_streaming)}"
                     f"{_type_name(call.output_type)}", said.get((6, at, 2, number), ""))
                    for number, call in enumerate(service.method)
                ),
            )  # fmt: skip
        for at, message in enumerate(file.message_type):
            lines += _message(message, (4, at), said)
        for at, enum in enumerate(file.enum_type):
            lines += _enum(enum, (5, at), said)
    return "\n".join(lines)


def _descriptors() -> list[FileDescriptorProto]:
    import grpc_tools
    from grpc_tools import protoc

    names = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").glob("warpsmith/v1/*.proto"))
    with tempfile.NamedTemporaryFile() as made:
        includes = [f"-I{ROOT / 'proto'}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
        if protoc.main(["protoc", *includes, "--include_source_info", f"--descriptor_set_out={made.name}", *names]):
            raise SystemExit("protoc failed: see its message above")
        return list(FileDescriptorSet.FromString(Path(made.name).read_bytes()).file)


def _text(comment: str) -> str:
    return " ".join(comment.split())


def _streamed(is_streamed: bool) -> str:
    return "stream of " if is_streamed else ""


def _type_name(full: str) -> str:
    return full.removeprefix(".warpsmith.v1.").removeprefix(".google.protobuf.")


def _message(message: DescriptorProto, path: tuple[int, ...], said: Mapping[tuple[int, ...], str]) -> list[str]:
    entries = {each.name: each for each in message.nested_type if each.options.map_entry}
    rows = []
    for at, field in enumerate(message.field):
        entry = entries.get(_type_name(field.type_name).rpartition(".")[2])
        kind = f"map of {_kind(entry.field[0])} to {_kind(entry.field[1])}" if entry else _kind(field)
        if field.label == FieldDescriptorProto.LABEL_REPEATED and not entry:
            kind = f"list of {kind}"
        one_of = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
        choice = f" (one of `{one_of}`)" if one_of and not field.proto3_optional else ""
        rows.append((str(field.number), f"`{field.name}`", kind + choice, said.get((*path, 2, at), "")))
    lines = ["", f"### {message.name}", "", _text(said.get(path, ""))]
    lines += _table(("", "field", "type", ""), rows) if rows else []
    for at, inner in enumerate(message.nested_type):
        if inner.name not in entries:
            lines += _message(inner, (*path, 3, at), said)
    for at, enum in enumerate(message.enum_type):
        lines += _enum(enum, (*path, 4, at), said)
    return lines


def _kind(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _type_name(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], said: Mapping[tuple[int, ...], str]) -> list[str]:
    rows = ((str(value.number), f"`{value.name}`", said.get((*path, 2, at), "")) for at, value in enumerate(enum.value))
    return ["", f"### {enum.name}", "", _text(said.get(path, "")), *_table(("", "value", ""), rows)]


# ---- commands --------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command of `warpsmith` with its arguments and options."""
    from orchestrator.commands.cli import app

    group = typer.main.get_command(app)
    lines = ["# Commands", "", "`warpsmith COMMAND --help` says the same.", *_commands(group, "warpsmith")]
    return "\n".join(lines)


def _commands(command: Any, name: str) -> list[str]:
    inner = getattr(command, "commands", None)
    if inner is not None:
        return [line for each in sorted(inner) for line in _commands(inner[each], f"{name} {each}")]
    lines = ["", f"## {name}", "", *(command.help or "").splitlines()]
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        spelled = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            spelled = f"`{parameter.metavar or parameter.name.upper()}`"
        default = parameter.default if parameter.default not in (None, "", False, ()) else ""
        rows.append((spelled, getattr(parameter, "help", "") or "", f"`{default}`" if default != "" else ""))
    return [*lines, *(_table(("", "", "default"), rows) if rows else [])]


# ---- settings --------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "WARPSMITH_ALONE": "`1`: no other user has an account on this machine, so folders need not be closed to others",
    "WARPSMITH_CACHE_DIR": "folder of compiled programs and of torch's compiler; `~/.cache/warpsmith`",
    "WARPSMITH_LOG": "least level of a service's log: `debug`, `info`, `warning` or `error`",
    "WARPSMITH_WEB_LISTEN": "where the live page listens, as `--web-listen`",
    "WARPSMITH_WEB_NAMES": "host names of a proxy in front of the live page, with spaces between them, as `--web-name`",
    "WARPSMITH_WEB_TOKEN_FILE": "file with the live page's token, as `--token-file`",
    "WARPSMITH_VLLM": "the `vllm` command that `warpsmith up --with-vllm` starts",
}
"""Variables that are read where they are needed, not by `warpsmith.settings`."""
INTERNAL = frozenset({
    "WARPSMITH_CALL_FDS", "WARPSMITH_COMPILED_HEADERS", "WARPSMITH_PASSAGE_FD", "WARPSMITH_SECRET",
    "WARPSMITH_SHARED_FD",
})  # fmt: skip
"""What processes of ours tell each other; no user sets them."""
_VARIABLE = re.compile(r"WARPSMITH_[A-Z]+(?:_[A-Z]+)*(?!\w)")


def settings() -> str:
    """Environment variables."""
    from warpsmith import plugins
    from warpsmith import settings as module

    tree = ast.parse(Path(str(module.__file__)).read_text())
    fields = {
        (owner.name, field.target.id): (_said_after(owner, field), _default(field))
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
        for field in owner.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    rows = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        owner = call.func.id if isinstance(call.func, ast.Name) else ""
        for keyword in call.keywords:
            for variable in _named(keyword.value, tree):
                rows[variable] = fields[owner, str(keyword.arg)]
    for service in module.SERVICES:
        rows[f"WARPSMITH_{service.upper()}_ADDRESS"] = (
            f"Address of the {service} service: host:port or unix:/path.",
            "",
        )
    for role, service in module.CHOSEN_ROLES.items():
        rows[f"WARPSMITH_{role.upper()}"] = (f"Plugin that the {service} service runs as its {role}.", "")
    for role in plugins.JOINING:
        said = f"Plugins that join the built-in ones as {role}, with commas between; none that is only installed does."
        rows[plugins.variable(role)] = (said, "")
    for variable in module.TLS_VARIABLES:
        rows[variable] = ("PEM file of mutual TLS; all three or none.", "")
    rows |= {name: (f"{text[0].upper()}{text[1:]}.", "") for name, text in ELSEWHERE.items()}
    lines = [
        "# Settings",
        "",
        "Environment variables; a service reads them once, at its start. `none` stands for no port.",
    ]
    table = ((f"`{name}`", said, f"`{default}`" if default else "") for name, (said, default) in sorted(rows.items()))
    return "\n".join([*lines, *_table(("variable", "", "default"), table)])


# ---- schedules -------------------------------------------------------------------------------------------------


def schedules() -> str:
    """What can be set of each schedule."""
    from agent_synthesis.emit import registry
    from warpsmith.v1 import task_pb2

    lines = [
        "# Schedules",
        "",
        "What can be set of each way to run a nest, by the move `set`. A search goes to the values that are named,",
        "one change at a time, as far as they are legal; where none are named, the schedule works them out.",
    ]
    for target in (task_pb2.TARGET_CUDA, task_pb2.TARGET_CPU):
        for schedule in registry.every_schedule(target):
            rows = [
                (f"`{name}`", f"{each.doc[0].upper()}{each.doc[1:]}.", each.words)
                for name, each in schedule.settings.declared().items()
            ]
            table = _table(("setting", "", "values"), rows) if rows else ["", "Nothing."]
            lines += ["", f"## `{schedule.name}`", *table]
    return "\n".join(lines)


def unexplained(text: str) -> set[str]:
    """Variables that services name and a page does not."""
    named = {
        name
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in _VARIABLE.findall(node.value)
    }
    return {name for name in named - INTERNAL if f"`{name}`" not in text}


def _named(value: ast.expr, tree: ast.Module) -> list[str]:
    """Variables that an expression reads, by itself, through a local name or in a function of the module."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    local = {
        name.id: part
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name, part in _pairs(target, node.value)
    }
    found = []
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += _VARIABLE.findall(node.value)
        elif isinstance(node, ast.Name) and (place := functions.get(node.id) or local.get(node.id)):
            texts = (each.value for each in ast.walk(place) if isinstance(each, ast.Constant))
            found += [name for text in texts if isinstance(text, str) for name in _VARIABLE.findall(text)]
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from (
            (each, part) for each, part in zip(target.elts, value.elts, strict=True) if isinstance(each, ast.Name)
        )
    elif isinstance(target, ast.Name):
        yield target, value


def _said_after(owner: ast.ClassDef, field: ast.AnnAssign) -> str:
    after = owner.body[owner.body.index(field) + 1]
    assert isinstance(after, ast.Expr)
    assert isinstance(after.value, ast.Constant)
    return str(after.value.value)


def _default(field: ast.AnnAssign) -> str:
    if isinstance(field.value, ast.Constant):
        return "" if field.value.value in (None, "", False) else str(field.value.value)
    return ast.literal_eval(field.value.args[0]) if isinstance(field.value, ast.Call) and field.value.args else ""


# ---- metrics ---------------------------------------------------------------------------------------------------


def metrics() -> str:
    """Every Prometheus metric, by the module that defines it."""
    lines = ["# Metrics", "", "Prometheus metrics, with their labels."]
    rows = []
    for path in _sources():
        if not re.search(r"^from prometheus_client import .*[A-Z]", path.read_text(), re.MULTILINE):
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("proto.")
        for made in vars(importlib.import_module(name)).values():
            if isinstance(made, MetricWrapperBase) and made in REGISTRY._collector_to_names:
                labels = ", ".join(f"`{label}`" for label in made._labelnames)
                ending = "_total" if made._type == "counter" else ""
                rows.append((f"`{made._name}{ending}`", made._type, labels, made._documentation, f"`{name}`"))
    unique = {row[0]: row for row in sorted(rows, reverse=True)}
    return "\n".join([*lines, *_table(("metric", "kind", "labels", "", "module"), sorted(unique.values()))])


def main() -> int:
    """Writes the pages, or with --check tells which would change."""
    changed = 0
    for name, text in pages().items():
        page = PAGES / name
        if page.is_file() and page.read_text(encoding="utf-8") == text:
            continue
        changed += 1
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)} is not as the code is now: python docs/reference_pages.py")
        else:
            PAGES.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
    return 1 if changed and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
