"""What a tensor is to its module: an output, an input, a parameter, state, or a value on the way.

The one idea: tensors of a task are held by key everywhere, and a message's region carries the same three things; the
words that people read ("output 0", "state bn.running_mean") are made here, and are never parsed.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpsmith.contract import words
from warpsmith.v1 import graph_pb2, judging_pb2, tensor_pb2


@dataclass(frozen=True)
class Key:
    """One tensor of a task. `str` gives the words that comparisons and sentences have for it."""

    kind: judging_pb2.RegionKind.ValueType
    position: int = 0
    """Of an output or of an input."""
    name: str = ""
    """The qualified name of a parameter or of state; the name in the captured graph of a value."""

    def __str__(self) -> str:
        is_counted = self.kind in (judging_pb2.REGION_KIND_OUTPUT, judging_pb2.REGION_KIND_INPUT)
        return f"{words.region_kind(self.kind)} {self.position if is_counted else self.name}"

    @property
    def is_output(self) -> bool:
        """Whether the module returns it."""
        return self.kind == judging_pb2.REGION_KIND_OUTPUT

    @property
    def is_input(self) -> bool:
        """Whether the module is called with it; else a source is the module's own."""
        return self.kind == judging_pb2.REGION_KIND_INPUT

    @staticmethod
    def output(position: int) -> Key:
        """An output."""
        return Key(judging_pb2.REGION_KIND_OUTPUT, position)

    @staticmethod
    def input(position: int) -> Key:
        """A tensor input."""
        return Key(judging_pb2.REGION_KIND_INPUT, position)

    @staticmethod
    def parameter(name: str) -> Key:
        """A parameter, by its qualified name."""
        return Key(judging_pb2.REGION_KIND_PARAMETER, name=name)

    @staticmethod
    def state(name: str) -> Key:
        """A buffer of the module, by its qualified name."""
        return Key(judging_pb2.REGION_KIND_STATE, name=name)

    @staticmethod
    def given(name: str) -> Key:
        """A value that a group is given, by its name in the captured graph."""
        return Key(judging_pb2.REGION_KIND_GIVEN, name=name)

    @staticmethod
    def made(name: str) -> Key:
        """A value that a group makes, by its name in the captured graph."""
        return Key(judging_pb2.REGION_KIND_MADE, name=name)

    @staticmethod
    def of(region: judging_pb2.Region) -> Key:
        """What lies in a region."""
        return Key(region.kind, region.position, region.name)

    @staticmethod
    def of_source(source: graph_pb2.Source) -> Key | None:
        """A source of a graph or of a program; None for a constant."""
        match source.origin:
            case graph_pb2.ORIGIN_INPUT:
                return Key.input(source.input_index)
            case graph_pb2.ORIGIN_PARAMETER:
                return Key.parameter(source.qualified_name)
            case graph_pb2.ORIGIN_STATE:
                return Key.state(source.qualified_name)
        return None

    def region(self, spec: tensor_pb2.TensorSpec, offset_bytes: int) -> judging_pb2.Region:
        """Where it lies."""
        return judging_pb2.Region(
            kind=self.kind, position=self.position, name=self.name, spec=spec, offset_bytes=offset_bytes
        )
