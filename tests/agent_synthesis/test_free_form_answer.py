"""Kernels that a model writes: what is read from its answers, whatever they are."""

from __future__ import annotations

import json

import pytest

from agent_synthesis.free_form import answer
from agent_synthesis.free_form.kernel import Complaint, Fault, Kernel, Launch, Signature, Workspace, from_text
from warpsmith.models.language_model import Answer

CPU = Signature("written_y", ("x", "bias"), ("y",), frozenset({"x", "bias", "y", "t"}), is_cuda=False)
CUDA = Signature("written_y", ("x", "bias"), ("y",), frozenset({"x", "bias", "y", "t"}), is_cuda=True)
SOURCE = 'extern "C" void written_y(void* const* arguments) {\n}\n'
DEVICE = 'extern "C" __global__ void written_y(const float* x, const float* bias, float* y) {\n}\n'


def read(text: str, signature: Signature = CPU, *, cut_off: bool = False) -> Kernel | Complaint:
    return answer.read(Answer(text, cut_off), signature)


@pytest.mark.parametrize(
    "text",
    [
        f"```cpp\n{SOURCE}```",
        f"Words.\n```\n{SOURCE}```\nMore words with `code` and {{braces}}.",
        f"~~~~c++\n{SOURCE}~~~~",
        f"```python\n{SOURCE}~~~\nA fence that another one ends.",
        f"```cpp\n{SOURCE}",
        f"<think>```cpp\nextern \"C\" void written_y(int) {{ wrong }}\n```</think>\n```cpp\n{SOURCE}```",
        f"First:\n```cpp\nextern \"C\" void written_y(int) {{ wrong }}\n```\nBetter:\n```cpp\n{SOURCE}```",
        f"```cpp\n{SOURCE}```\n```cpp\nint main() {{}}\n```",
        f"> quoted\n  ```cpp\n{SOURCE}  ```",
        f"Here it is:\n\n{SOURCE}\nThat is all.",
        SOURCE,
        SOURCE.replace("\n", "\r\n"),
        f"```json\n{{\"note\": 1}}\n```\n```cpp\n{SOURCE}```",
    ],
)  # fmt: skip
def test_the_last_source_with_the_function_is_found_however_it_is_fenced(text: str) -> None:
    found = read(text)
    assert isinstance(found, Kernel), found
    assert found.source == SOURCE
    assert found.launches == (Launch("written_y", ("x", "bias", "y")),)


@pytest.mark.parametrize(
    ("text", "cut_off", "fault"),
    [
        ("", False, Fault.EMPTY),
        ("", True, Fault.CUT_OFF),
        ("I cannot help with that. ```", False, Fault.NO_CODE),
        ("```python\nprint(1)\n```", False, Fault.NO_CODE),
        (f"```cpp\n{SOURCE[:40]}", True, Fault.CUT_OFF),
        ('```cpp\nextern "C" void other(void* const*) {}\n```', False, Fault.NO_ENTRY),
        (f"```cpp\n{SOURCE}{'// more' * 9000}\n```", False, Fault.TOO_LONG),
        (f"```cpp\n// \x00\n{SOURCE}```", False, Fault.CONTROL_CHARACTERS),
        (f"```cpp\n// \ud800\n{SOURCE}```", False, Fault.CONTROL_CHARACTERS),
        (f"```cpp\n{SOURCE}```\n```json\n{{\"launches\": 5}}\n```", False, Fault.BAD_LAUNCH),
        (f"```cpp\n{SOURCE}```\n```json\n{{\"launches\": [{{\"arguments\": [\"z\"]}}]}}\n```", False, Fault.BAD_LAUNCH),
        (f"```cpp\n{SOURCE}```\n```json\n{{\"launches\": [{{\"arguments\": [\"x\"]}}]}}\n```", False, Fault.BAD_LAUNCH),
        (f"```cpp\n{SOURCE}```\n```json\n{{\"workspaces\": [{{\"name\": \"t\"}}]}}\n```", False, Fault.BAD_LAUNCH),
        ("[" * 100_000, False, Fault.NO_CODE),
        ("```\n" * 50_000, False, Fault.NO_CODE),
    ],
)  # fmt: skip
def test_an_answer_without_a_kernel_has_a_reason(text: str, cut_off: bool, fault: Fault) -> None:
    found = read(text, cut_off=cut_off)
    assert isinstance(found, Complaint)
    assert found.fault is fault
    assert found.text.isprintable()


def test_an_answer_that_was_cut_off_after_its_source_is_used() -> None:
    assert isinstance(read(f"```cpp\n{SOURCE}```\nThis kernel is fast beca", cut_off=True), Kernel)


def test_a_launch_record_gives_extents_shared_memory_and_workspaces() -> None:
    record = {
        "workspaces": [{"name": "partial", "dtype": "float32", "count": 1024, "zero": True}],
        "launches": [
            {"grid": 132, "block": [256], "arguments": ["x", "partial"], "entry": "written_y_first"},
            {"grid": [1, 1, 1], "block": [32, 4], "shared_bytes": 4096, "cluster": [2]},
        ],
    }
    text = f"```cuda\n__global__ void written_y_first() {{}}\n{DEVICE}```\n```json\n{json.dumps(record)}\n```"
    found = read(text, CUDA)
    assert isinstance(found, Kernel), found
    first, second = found.launches
    assert (first.entry, first.grid, first.block, first.arguments) == (
        "written_y_first",
        (132, 1, 1),
        (256, 1, 1),
        ("x", "partial"),
    )
    assert (second.block, second.shared_bytes, second.cluster) == ((32, 4, 1), 4096, (2, 1, 1))
    assert second.arguments == ("x", "bias", "y", "partial")
    assert found.workspaces == (Workspace("partial", "float32", 1024, zero=True),)
    assert from_text(found.text, CUDA) == found


@pytest.mark.parametrize(
    "launch",
    [{}, {"grid": 0, "block": 1}, {"grid": 1}, {"grid": [1, 1, 1, 1], "block": 1}, {"grid": 1.5, "block": 1},
     {"grid": True, "block": 1}, {"grid": "1", "block": 1}, {"grid": 1, "block": 1, "shared_bytes": -1},
     {"grid": 1, "block": 1, "entry": "a b"}, {"grid": 1, "block": 1, "arguments": []}, {"grid": 2**31, "block": 1}],
)  # fmt: skip
def test_a_launch_of_wrong_types_or_sizes_is_refused(launch: object) -> None:
    found = read(f"```cuda\n{DEVICE}```\n```json\n{json.dumps({'launches': [launch]})}\n```", CUDA)
    assert isinstance(found, Complaint)
    assert found.fault is Fault.BAD_LAUNCH


def test_no_function_is_launched_that_the_kernel_of_another_group_may_have_too() -> None:
    text = f'```cpp\nextern "C" void sum(void* const*) {{}}\n{SOURCE}```\n'
    found = read(text + '```json\n{"launches": [{"entry": "sum"}, {}]}\n```')
    assert isinstance(found, Complaint)
    assert found.text == "the names of all functions that are launched must begin with written_y"
    assert isinstance(read(text.replace(" sum(", " written_y_sum(")), Kernel)


def test_a_kernel_for_cuda_needs_its_launches() -> None:
    found = read(f"```cuda\n{DEVICE}```", CUDA)
    assert isinstance(found, Complaint)
    assert found.fault is Fault.BAD_LAUNCH
