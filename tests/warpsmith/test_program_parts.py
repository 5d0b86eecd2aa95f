"""A source in parts: what compiles alone has its headers and its launches, and what is no such source stays whole."""

from __future__ import annotations

import pytest

from warpsmith.contract import program_parts
from warpsmith.v1 import candidate_pb2, task_pb2

COUNT = program_parts.LEAST
HEADERS = {"one.cuh": '#include "two.cuh"\n', "two.cuh": "", "three.cuh": ""}


def program(
    parts: list[str], head: str = "// made so", target: int = task_pb2.TARGET_CUDA, others: tuple[str, ...] = ()
) -> candidate_pb2.Program:
    made = candidate_pb2.Program(target=target, architecture="sm_90a")  # type: ignore[arg-type]
    made.sources.add(name="kernel.cu", text=program_parts.joined(head, parts))
    for name, text in HEADERS.items():
        made.sources.add(name=name, text=text)
    for entry in (*(f"k{number}" for number in range(len(parts))), "k0", *others):
        made.steps.add().launch.entry = entry
    made.steps.add().memset.buffer = "x"
    return made


def replaced(made: candidate_pb2.Program) -> candidate_pb2.Program:
    made.sources[0].text = "// by others\n" + made.sources[0].text
    return made


def part(number: int) -> str:
    header = "one" if number == 0 else "three"
    return f'#include "{header}.cuh"\n// k{number + 1} of another part\nvoid k{number}(int a) {{}}\n'


def test_each_part_has_what_it_includes_and_the_launches_of_its_kernels() -> None:
    whole = program([part(number) for number in range(COUNT)])
    found = program_parts.apart(whole)
    assert [each.sources[0].text.strip() for each in found] == [part(number).strip() for number in range(COUNT)]
    assert {(each.target, each.architecture, each.sources[0].name) for each in found} == {
        (whole.target, "sm_90a", "kernel.cu")
    }
    assert [source.name for source in found[0].sources[1:]] == ["one.cuh", "two.cuh"]
    assert [source.name for source in found[1].sources[1:]] == ["three.cuh"]
    launched = [[step.launch.entry for step in each.steps] for each in found]
    assert launched == [["k0", "k0"], *([f"k{number}"] for number in range(1, COUNT))]


@pytest.mark.parametrize(
    "whole",
    [
        program([part(number) for number in range(COUNT - 1)]),
        program([part(number) for number in range(COUNT)], head="#define k0 k1"),
        program([part(number) for number in range(COUNT)], head="int k0;"),
        program([*(part(number) for number in range(COUNT)), "#ifdef X\nvoid f();\n#endif\n"]),
        program([part(number) for number in range(COUNT)], others=("nowhere",)),
        program([*(part(number) for number in range(COUNT)), "// unlike k2(x)\n"]),
        replaced(program([part(number) for number in range(COUNT)])),
        program([part(number) for number in range(COUNT)], target=task_pb2.TARGET_CPU),
        candidate_pb2.Program(target=task_pb2.TARGET_CUDA),
    ],
    ids=[
        "few parts",
        "a macro before them",
        "text before them",
        "a macro in one",
        "a kernel in none",
        "a kernel in two",
        "others' text",
        "for a processor",
        "no source",
    ],
)
def test_anything_else_is_compiled_as_a_whole(whole: candidate_pb2.Program) -> None:
    assert program_parts.apart(whole) == [whole]
