"""Groups of calls that differ in names only are lowered once: a network of equal blocks has few problems.

The one idea: the form of a group is its calls with their tensors numbered as they come. Groups of one form have one
nest, but for what its buffers are called. Whether the nest is right is the business of `groups` and the verifier.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.ir import Call, Expression, Load, Memory, Nest
from agent_synthesis.nests.tailed import Tailed
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2, tensor_pb2

FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class Form:
    """A group of calls without its names."""

    key: Hashable
    """Equal for groups that compute the same in the same way."""
    names: tuple[str, ...]
    """Its tensors, by number."""


@dataclass(frozen=True)
class _CallForm:
    content: bytes
    """All but names."""
    tensors: tuple[str, ...]
    """Arguments, results, what results lie in and what is written, in order."""
    argument_count: int


class Forms:
    """The forms of one graph's groups."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._calls: dict[str, _CallForm] = {}

    def of(self, order: Sequence[str], nodes: Sequence[str], outputs: Sequence[str]) -> Form:
        """The form of `nodes`, which store `outputs`; `order`: they and the views between, as they run."""
        index, numbers, inside = self._index, dict[str, int](), set(nodes)
        made = {result for name in order for result in index.results(name)}
        parts: list[Hashable] = [index.allows_tf32]
        for name in order:
            call = self._call(name)
            for tensor in call.tensors[: call.argument_count]:
                if tensor not in numbers and tensor not in made:
                    parts.append((index.spec(tensor).SerializeToString(), repr(index.constant_value(tensor))))
                    numbers[tensor] = len(numbers)
            numbered = tuple(numbers.setdefault(tensor, len(numbers)) for tensor in call.tensors)
            parts.append((call.content, numbered, name in inside, index.is_pure(name), index.writes_back(name)))
        parts.append(tuple(numbers[output] for output in outputs))
        return Form(tuple(parts), tuple(numbers))

    def _call(self, name: str) -> _CallForm:
        if name not in self._calls:
            blank = graph_pb2.Node()
            blank.CopyFrom(self._index.nodes[name])
            arguments = [tensor for value in aten.arguments_of(blank) for tensor in _taken_out(value)]
            results = [getattr(result, which) for which in ("name", "alias_of") for result in blank.results]
            tensors = (*arguments, *results, *blank.mutates)
            for result in blank.results:
                result.name = "named" if result.name else ""
                result.alias_of = "lies there" if result.alias_of else ""
            blank.name = ""
            del blank.mutates[:]
            self._calls[name] = _CallForm(blank.SerializeToString(deterministic=True), tensors, len(arguments))
        return self._calls[name]


def _taken_out(value: tensor_pb2.Value) -> list[str]:
    """The names of an argument's tensors, which it has no more."""
    match value.WhichOneof("kind"):
        case "tensor":
            name, value.tensor = value.tensor, ""
            return [name]
        case "list":
            return [name for element in value.list.values for name in _taken_out(element)]
    return []


class FormMemory(Generic[FoundT]):
    """What was found for forms, the last used of them, with the names of the group that it was found for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, tuple[FoundT, tuple[str, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, form: Form) -> tuple[FoundT, tuple[str, ...]] | None:
        """What was found, and the names in it."""
        with self._lock:
            found = self._found.get(form.key)
            if found is not None:
                self._found.move_to_end(form.key)
            return found

    def put(self, form: Form, found: FoundT) -> None:
        """Remembers what was found."""
        with self._lock:
            self._found[form.key] = found, form.names
            while len(self._found) > self._most:
                self._found.popitem(last=False)


def renamed(nest: Nest, name: str, names: Mapping[str, str]) -> Nest:
    """The nest of another name with its buffers called otherwise. Shared expressions stay shared."""
    if isinstance(nest, Tailed):
        between = nest.result.name  # which is nobody else's
        members = tuple(renamed(each, name, {between: between, **names}) for each in nest.members)
        buffers = tuple(replace(each, name=names[each.name]) for each in nest.buffers)
        return replace(nest, name=name, members=members, buffers=buffers).stood_for_by(nest)
    done: dict[int, Expression] = {}

    def renew(expression: Expression) -> Expression:
        if id(expression) not in done:
            match expression:
                case Load(buffer) | Memory(buffer):
                    done[id(expression)] = replace(expression, buffer=names[buffer])
                case Call(_, arguments):
                    done[id(expression)] = replace(expression, arguments=tuple(map(renew, arguments)))
                case _:
                    done[id(expression)] = expression
        return done[id(expression)]

    return replace(
        nest,
        name=name,
        reductions=tuple(replace(each, value=renew(each.value)) for each in nest.reductions),
        stores=tuple(replace(each, buffer=names[each.buffer], value=renew(each.value)) for each in nest.stores),
        buffers=tuple(replace(each, name=names[each.name]) for each in nest.buffers),
    ).stood_for_by(nest)
