"""From a plan to a Program: buffers, steps and one translation unit, all of it data.

The one idea: buffers are named as the graph's tensors, so steps are the plan read aloud. Library groups
become the module's own calls; authored groups become the text and launches that their schedule emits. Views
run as library calls only where a library call or an output needs them.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from agent_synthesis.emit.registry import INCLUDE_DIRECTORY
from agent_synthesis.free_form import compose as free_form
from agent_synthesis.lowering.groups import form_key
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan
from agent_synthesis.schedule import Emission
from warpsmith import arguments, digest, plugins
from warpsmith.contract import program_parts, words
from warpsmith.errors import IllegalMove
from warpsmith.graphs.library.attention import library_call
from warpsmith.program_steps import is_in_list, kept_steps, made_by
from warpsmith.v1 import candidate_pb2, graph_pb2, task_pb2

_INCLUDE = re.compile(r'^\s*#include "([\w.]+)"', re.MULTILINE)
_WIDEST_ACCESS = {task_pb2.TARGET_CUDA: 16}
"""Bytes that an authored kernel reads at once, from an address that is a multiple of them; processors need none."""
_UNIT_NAME = {task_pb2.TARGET_CPU: "kernel.cpp", task_pb2.TARGET_CUDA: "kernel.cu"}


def generate(plan: Plan) -> candidate_pb2.Program:
    """The program of a plan, with its digest.

    Raises:
        IllegalMove: a schedule cannot run its nest as it is set.
    """
    return _Generator(plan).program()


@functools.cache
def emitter_digest() -> str:
    """Digest over everything that turns a plan into text: this package's sources and headers, and chosen plugins."""
    root = Path(__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".hpp", ".cuh"))
    parts = [(str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    chosen = [part for role in ("schedule", "lowering") for part in plugins.versions(role)]
    return digest.digest("emitter", *(part for pair in parts for part in pair), *chosen)


class _Generator:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._index = plan.index
        graph = plan.index.graph
        self._program = candidate_pb2.Program(
            target=plan.target,
            output_tree=graph.output_tree,
            output_leaves=graph.output_leaves,
            architecture=plan.hardware.architecture if plan.target == task_pb2.TARGET_CUDA else "",
            cuda_graph=plan.cuda_graph,
        )
        self._buffers: dict[str, candidate_pb2.Buffer] = {}
        self._viewed: set[str] = set()  # views whose step has been written
        self._emitted: dict[Hashable, tuple[Nest, Emission]] = {}
        """By what makes a kernel, the first nest that it was made for."""
        self._written: list[str] = []  # kept apart and last: macros in them reach no text of ours
        self._headers: dict[str, None] = {}
        self._fresh = self._memory_of_outputs()

    def program(self) -> candidate_pb2.Program:
        for group in self._plan.groups:
            if group.engine == "authored":
                self._author(group)
            elif group.engine == "written":
                self._write(group)
            else:
                self._call_library(group)
        self._need(self._index.graph.outputs, self._plan.groups[-1].name if self._plan.groups else "outputs")
        self._program.outputs.extend(self._index.graph.outputs)
        self._program.buffers.extend(self._buffers.values())
        self._prepare()
        self._program.sources.extend(self._sources())
        self._program.digest = digest.of_program(self._program)
        return self._program

    def _memory_of_outputs(self) -> set[str]:
        """Tensors whose memory the caller keeps: outputs, and whatever outputs view."""
        roots = {self._index.root[tensor] for tensor in self._index.graph.outputs}
        return {tensor for tensor, root in self._index.root.items() if root in roots}

    # -- steps

    def _call_library(self, group: Group) -> None:
        (name,) = group.nodes
        node = self._index.nodes[name]
        self._need(self._index.reads(name), group.name)
        self._append_call(node, group.name)

    def _append_call(self, node: graph_pb2.Node, group: str) -> None:
        call, unread = library_call(node, self._index.spec, is_gpu=self._plan.target == task_pb2.TARGET_CUDA)
        call.result_in_list = is_in_list(node)
        for result in node.results:
            wanted = bool(result.name) and (bool(self._index.users(result.name)) or result.name in self._index.outputs)
            call.results.append(result.name if wanted else "")
            if wanted:
                self._buffers[result.name] = candidate_pb2.Buffer(
                    name=result.name, role=candidate_pb2.ROLE_LIBRARY, spec=result.spec
                )
        call.results.extend([""] * unread)
        self._program.steps.append(candidate_pb2.Step(group=group, library=call))

    def _author(self, group: Group) -> None:
        nest = self._plan.nest(group)
        assert isinstance(nest, Nest), nest
        # Groups that are alike launch one kernel: of a network's 67 twenty-three are compiled.
        form = form_key(self._index, self._plan.all_nodes(group), self._plan.outputs(group))
        key = (form, group.schedule, group.settings, group.arrangement)
        if key not in self._emitted:
            self._emitted[key] = nest, self._plan.schedule(group).emit(nest, group.settings)
        first, emission = self._emitted[key]
        made = [buffer.name for buffer in nest.buffers if buffer.written and buffer.name not in self._index.sources]
        names = {its.name: own.name for its, own in zip(first.buffers, nest.buffers, strict=True)}
        self._launch(group, emission, [buffer.name for buffer in nest.buffers], made, names)

    def _write(self, group: Group) -> None:
        emission, outputs = free_form.emission(self._plan, group), self._plan.outputs(group)
        self._launch(group, emission, [*self._plan.reads(group), *outputs], outputs)
        self._written.append(emission.text)

    def _launch(
        self,
        group: Group,
        emission: Emission,
        tensors: Iterable[str],
        made: Sequence[str],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Declares what an emission reads and makes, and appends its launches. `names`: other than the emission has."""
        for tensor in tensors:
            if tensor in made:
                self._declare_written(tensor)
            else:
                self._need([tensor], group.name)
                self._buffers[tensor].alignment_bytes = _WIDEST_ACCESS.get(self._plan.target, 0)
        names = {**names, **self._workspaces(group.name, emission)}
        for launch in emission.launches:
            copy = candidate_pb2.Launch()
            copy.CopyFrom(launch)
            for argument in copy.arguments:
                if (name := arguments.buffer_of(argument)) is not None:
                    arguments.rename(argument, names.get(name, name))
            copy.writes[:] = [names.get(name, name) for name in copy.writes]
            self._program.steps.append(candidate_pb2.Step(group=group.name, launch=copy))
        self._headers.update(dict.fromkeys(emission.headers))

    def _workspaces(self, group: str, emission: Emission) -> Mapping[str, str]:
        """Declares an emission's workspaces; gives each a name that is free in the program."""
        names = {}
        for workspace in emission.workspaces:
            wanted = f"{group}_{workspace.name}" if workspace.name in self._taken() else workspace.name
            names[workspace.name] = wanted
            buffer = self._buffers.setdefault(wanted, candidate_pb2.Buffer())
            buffer.CopyFrom(workspace)
            buffer.name = wanted
        return names

    def _taken(self) -> set[str]:
        return {*self._buffers, *self._index.root}

    def _prepare(self) -> None:
        """Marks the steps whose results are kept, and has them come first."""
        steps = self._program.steps
        for position in kept_steps(self._program, self._may_be_kept, prepared=self._plan.prepared):
            steps[position].prepared = True
        ordered = sorted(steps, key=lambda step: not step.prepared)
        del steps[:]
        steps.extend(ordered)

    def _may_be_kept(self, step: candidate_pb2.Step) -> bool:
        """Whether the results of a step may be kept if what it reads is: kernels of ours draw nothing at random."""
        makers = {self._index.producer(name) for name in made_by(step) if name in self._index.root}
        if step.HasField("library"):
            return bool(makers) and self._plan.kept_calls.issuperset(makers)
        return self._plan.prepared and self._plan.kept_calls.issuperset(makers)

    # -- buffers

    def _declare_written(self, tensor: str) -> None:
        role = candidate_pb2.ROLE_OUTPUT if tensor in self._fresh else candidate_pb2.ROLE_WORKSPACE
        self._buffers[tensor] = candidate_pb2.Buffer(name=tensor, role=role, spec=self._index.spec(tensor))

    def _need(self, tensors: Iterable[str], group: str) -> None:
        """Makes tensors exist before the next step: declares sources, runs views that were not needed until
        now."""
        bases, views = self._index.base_tensors(tensors)
        for tensor in bases:
            source = self._index.sources.get(tensor)
            if source is not None and tensor not in self._buffers:
                self._buffers[tensor] = candidate_pb2.Buffer(
                    name=tensor, role=candidate_pb2.ROLE_SOURCE, spec=source.spec, source=source
                )
        for view in views:
            if view not in self._viewed:
                self._viewed.add(view)
                self._append_call(self._index.nodes[view], group)

    # -- text

    def _sources(self) -> Sequence[candidate_pb2.DeviceSource]:
        emissions = [emission for _, emission in self._emitted.values()]
        if not emissions and not self._written:
            return []
        if self._plan.target == task_pb2.TARGET_CUDA and not self._written:
            text = program_parts.joined(self._comment(), map(_part, emissions))
        else:  # headers come before whatever kernels of others define
            includes = "".join(f'#include "{header}"\n' for header in self._headers)
            texts = [*(emission.text for emission in emissions), *self._written]
            text = f"{self._comment()}\n{includes}\n" + "\n".join(texts)
        unit = candidate_pb2.DeviceSource(name=_UNIT_NAME[self._plan.target], text=text)
        return [unit, *_with_includes(self._headers)]

    def _comment(self) -> str:
        lines = ["// Made by Warpsmith by these moves:"]
        lines += [f"//   {words.move(move)}" for move in self._plan.moves]
        return "\n".join(re.sub(r"[^\x20-\x7e]", "?", line).rstrip("\\") for line in lines)


def _part(emission: Emission) -> str:
    includes = "".join(f'#include "{header}"\n' for header in emission.headers)
    return f"{includes}\n{emission.text}"


def _with_includes(headers: Iterable[str]) -> list[candidate_pb2.DeviceSource]:
    """The headers and all that they include, each once."""
    found: dict[str, str] = {}
    pending = list(headers)
    while pending:
        name = pending.pop(0)
        if name in found:
            continue
        path = INCLUDE_DIRECTORY / name
        if not path.is_file():
            raise IllegalMove(f"a schedule includes {name}, which is not among the headers")
        found[name] = path.read_text()
        pending += _INCLUDE.findall(found[name])
    return [candidate_pb2.DeviceSource(name=name, text=text) for name, text in found.items()]
