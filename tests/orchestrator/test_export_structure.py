"""What an exported forward returns: the module's own structure, classes of the user's own included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from orchestrator.exports import export
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


pytree._register_namedtuple(Pair, serialized_type_name=f"{export.OWN_CLASS}Pair")
torch.export.register_dataclass(Out, serialized_type_name=f"{export.OWN_CLASS}Out")


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
    ],
    ids=["numbers", "a named tuple", "dataclasses within"],
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
    known = {"torch": torch, "_WsReference": Reference, **values}
    assert repr(eval(text, known)) == repr(eval(wanted, {"Pair": Pair, "Out": Out, **values}))
