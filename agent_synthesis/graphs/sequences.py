"""Convolutions of sequences as convolutions of images of one row, for which there is a channels-last layout.

The one idea: PyTorch convolves a sequence so itself, but it has no name for a sequence whose channels lie side by side;
for an image it has. A row more is a view, so nothing moves.
"""

from __future__ import annotations

from typing import Any, Final

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named, arguments, rename
from warpsmith.v1 import graph_pb2

_OF_IMAGES: Final = {
    "aten.conv1d.default": "aten.conv2d.default",
    "aten.conv1d.padding": "aten.conv2d.padding",
    "aten.conv_transpose1d.default": "aten.conv_transpose2d.input",
    "aten.convolution.default": "aten.convolution.default",
}
_WITH_A_ROW: Final = ("input", "weight")
_ALONG_A_ROW: Final = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
"""What an argument is in the direction that has one row."""
_ROW: Final = 2
"""The dimension of the row: behind batch and channels."""


def as_images(index: GraphIndex) -> GraphIndex:
    """The graph with each convolution of a batch of sequences as one of images; itself where there is none.

    Calls keep their names; what reads a result reads a view of it.
    """
    made = graph_pb2.Graph()
    made.CopyFrom(index.graph)
    del made.nodes[:]
    draft, sequences = Draft(index), dict[str, str]()
    rows: dict[str, Named] = {}
    for node in index.graph.nodes:
        read = made.nodes.add()
        read.CopyFrom(node)
        rename(read, sequences)
        if not _is_of_sequences(index, node):
            continue
        del made.nodes[-1]
        given, count = arguments(read), len(draft.nodes)
        for name, tensor in arguments(node).items():
            if name in _WITH_A_ROW and tensor.name not in rows:
                wanted = draft.free(f"{tensor.name}_rows")
                rows[tensor.name] = draft.view(wanted, "aten.unsqueeze.default", given[name], _ROW)
            given[name] = rows[tensor.name] if name in _WITH_A_ROW else _of_two_directions(name, given[name])
        image = draft.call(node.results[0].name, _OF_IMAGES[node.target], *given.values())
        draft.nodes[-1].name = node.name
        sequences[image.name] = draft.free(f"{image.name}_sequence")
        draft.view(sequences[image.name], "aten.squeeze.dim", image, _ROW)
        made.nodes.extend(draft.nodes[count:])
    made.outputs[:] = [sequences.get(name, name) for name in made.outputs]
    return GraphIndex(made, allows_tf32=index.allows_tf32) if sequences else index


def _is_of_sequences(index: GraphIndex, node: graph_pb2.Node) -> bool:
    if node.target not in _OF_IMAGES:
        return False
    given = arguments(node)
    return {len(index.spec(given[name].name).shape) for name in _WITH_A_ROW} == {3}


def _of_two_directions(name: str, given: Any) -> Any:
    """An argument along the sequence as one of rows and columns; the name of a padding holds for both."""
    if name not in _ALONG_A_ROW or isinstance(given, str):
        return given
    return [_ALONG_A_ROW[name], *(given if isinstance(given, list) else [given])]
