"""What an exported forward returns: the module's own structure, classes of the user's own included."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from orchestrator.exports import export
from orchestrator.exports.carried.reference import _ws_class
from warpsmith.contract.structures import OWN_CLASS
from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2


class Pair(NamedTuple):
    """What a module may return."""

    one: Any
    two: Any


@dataclass
class Out:
    """The same."""

    x: Any
    y: Any


class Far(NamedTuple):
    """A named tuple of a library, which registered it."""

    one: Any
    two: Any


pytree._register_namedtuple(Far, serialized_type_name="somewhere.else.Far")
pytree._register_namedtuple(Pair, serialized_type_name=f"{OWN_CLASS}Pair")
torch.export.register_dataclass(Out, serialized_type_name=f"{OWN_CLASS}Out")


@pytest.mark.parametrize(
    ("tree", "leaves", "wanted"),
    [
        ((1, None, {"b": 2.5}), ["a", "None", "2.5"], "(a, None, {'b': 2.5})"),
        (Pair(1, [2]), ["a", "b"], "Pair(one=a, two=[b])"),
        (
            {"pair": Pair(1, 2), "out": Out(3, (4,))},
            list("abcd"),
            "{'pair': Pair(one=a, two=b), 'out': Out(x=c, y=(d,))}",
        ),
        (1, ["a"], "a"),
        (Out(1, None), ["a"], "Out(x=a, y=None)"),
        ([(), 1, {}], ["a"], "[(), a, {}]"),
        ({1: 1, "'": 2, None: 3, 0.5: 4}, list("abcd"), '{1: a, "\'": b, None: c, 0.5: d}'),
        (
            OrderedDict(b=1, a=Out(2, deque([3], maxlen=4))),
            list("abc"),
            "OrderedDict(b=a, a=Out(x=b, y=deque([c], maxlen=4)))",
        ),
        (defaultdict(list, {"k": 1}), ["a"], "defaultdict(list, {'k': a})"),
        (torch.Size([1, 2]), ["a", "3"], "(a, 3)"),
        (Far(1, 2), ["a", "b"], "Far(one=a, two=b)"),
    ],
)
def test_an_exported_forward_gives_what_the_module_gives_in_its_own_classes(
    tree: Any, leaves: list[str], wanted: str
) -> None:
    program = candidate_pb2.Program(output_tree=pytree.treespec_dumps(pytree.tree_structure(tree)))
    tensors = [leaf for leaf in leaves if leaf.isidentifier() and leaf != "None"]
    program.outputs.extend(tensors)
    if len(tensors) < len(leaves):
        program.output_leaves.extend("" if leaf in tensors else leaf for leaf in leaves)
    text = export.outputs(program, {name: name for name in tensors})

    class Reference:
        def forward(self) -> None:
            """Its globals hold the classes, as those of the user's file do."""

    values = {name: number for number, name in enumerate(tensors)}
    known = {"torch": torch, "_WsReference": Reference, "_ws_class": _ws_class, **values}
    assert repr(eval(text, known)) == repr(eval(wanted, {**globals(), **values}))


ENUM = {"__enum__": True, "fqn": "antigravity:fly", "name": "x"}
"""What pytree imports a module for."""


@pytest.mark.parametrize(
    ("kind", "context", "why"),
    [
        ("builtins.dict", json.dumps([ENUM]), "keys that are no plain values"),
        ("builtins.dict", "[[1]]", "keys that are no plain values"),
        ("builtins.dict", "[NaN]", "keys that are no plain values"),
        ("builtins.dict", '["a", "b"]', "none that pytree writes"),
        ("collections.OrderedDict", json.dumps([ENUM]), "more than plain data"),
        ("collections.deque", json.dumps(ENUM), "more than plain data"),
        ("collections.defaultdict", {"default_factory_module": "os", "default_factory_name": "abort"}, "defaultdict"),
        ("collections.defaultdict", {"default_factory_module": "builtins", "default_factory_name": "input"}, "input"),
        ("collections.namedtuple", ENUM, "none that pytree writes"),
        ("collections.namedtuple", f"{OWN_CLASS}Pair'](print())", "no names"),
        (f"{OWN_CLASS}Out", '[["x=print(), y"], []]', "no names"),
        (f"{OWN_CLASS}Out", '[["x"], ["lambda"]]', "no names"),
        (f"{OWN_CLASS}Out", '[["x", "y"], []]', "none that pytree writes"),
        (f"{OWN_CLASS}Out'](print())['", '[["x"], []]', "no names"),
        ("a.B')(print", "[]", "no name"),
        ("transformers.ModelOutput", json.dumps([ENUM]), "more than plain data"),
    ],
)
def test_a_structure_that_is_more_than_a_structure_is_refused(kind: str, context: Any, why: str) -> None:
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])
    with pytest.raises(BadInput, match=why):
        export.outputs(candidate_pb2.Program(output_tree=tree, outputs=["a"]), {"a": "a"})


@pytest.mark.parametrize(
    ("leaves", "why"),
    [
        (['__import__("os").getcwd()', ""], "is no literal"),
        (["1) or print(", ""], "is no literal"),
        (["", ""], "2 leaves for 1 tensors"),
        ([], "2 leaves instead of 1"),
        (["1", "2", ""], "2 leaves instead of 3"),
    ],
)
def test_leaves_of_outputs_are_tensors_and_literals_as_many_as_the_structure_has(leaves: list[str], why: str) -> None:
    tree = pytree.treespec_dumps(pytree.tree_structure((1, 2)))
    with pytest.raises(BadInput, match=why):
        export.outputs(candidate_pb2.Program(output_tree=tree, outputs=["a"], output_leaves=leaves), {"a": "a"})


def test_an_exported_forward_calls_no_function_of_the_users_file_in_place_of_a_class() -> None:
    class Reference:
        def forward(self) -> None:
            """Its globals hold functions too."""

    assert _ws_class(Reference, "Out") is Out
    assert _ws_class(Reference, "Pair") is Pair
    for name in ("pytest", "BadInput", "test_leaves_of_outputs_are_tensors_and_literals_as_many_as_the_structure_has"):
        with pytest.raises(TypeError, match="is no dataclass or named tuple"):
            _ws_class(Reference, name)


def test_outputs_of_which_nobody_said_how_they_stand_are_one_or_a_tuple() -> None:
    names = {"a": "a", "b": "b"}
    assert export.outputs(candidate_pb2.Program(outputs=["a"]), names) == "a"
    assert export.outputs(candidate_pb2.Program(outputs=["a", "b"]), names) == "(a, b,)"
    assert export.outputs(candidate_pb2.Program(outputs=["a"], output_leaves=["None", ""]), names) == "(None, a,)"
    with pytest.raises(BadInput, match="there is no output"):
        export.outputs(candidate_pb2.Program(), names)
