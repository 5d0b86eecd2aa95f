"""Which programs are refused before a compiler sees them, and which binaries before a process loads them."""

from __future__ import annotations

from typing import Any

import pytest

from agent_compile import policy
from agent_compile.elf import Elf
from agent_compile.toolchains.toolchain import Rejected
from warpsmith.v1 import candidate_pb2, task_pb2, verdict_pb2

REJECT = verdict_pb2.FAILURE_KIND_POLICY_REJECT


def refused(made: candidate_pb2.Program) -> str:
    outcome = policy.check_sources(made)
    assert isinstance(outcome, Rejected)
    assert outcome.kind == REJECT
    return outcome.diagnostics


@pytest.mark.parametrize(
    "text",
    [
        '#include "/etc/passwd"',
        "#include </etc/passwd>",
        '#include "../secret.hpp"',
        "#include <fstream>",
        "#include <unistd.h>",
        "#include FILE_NAME",
        "#  /* a comment */ include <thread>",
        "#/* two\nlines */include <thread>",
        "#inc\\\nlude <thread>",
        "#inc\\  \nlude <thread>",
        "%:include <thread>",
        "??=include <thread>",
        "#include_next <cmath>",
        '#import "x.hpp"',
        '#embed "/etc/passwd"',
        "#if __has_include(</root/.ssh/id_rsa>)\n#endif",
        '#line 1 "/etc/passwd"',
        '#line 1 "../kernel.cpp"',
        "#line 1 FILE_NAME",
        '# 1 "/etc/passwd"',
        '/* a comment */ # 1 "/etc/passwd"',
        '#/* two\nlines */line 1 "/etc/passwd"',
        '#inclu\\u0064e "/etc/passwd"',
        '#ident "text"',
        '#pragma GCC dependency "/etc/passwd"',
        '_Pragma("GCC dependency \\"/etc/passwd\\"")',
        'asm(".incbin \\"/etc/passwd\\"");',
        "import <vector>;",
        "export module m;",
        "int a = 1;\0",
        "int a;\r#include <thread>",
        "int a = 1; // \x1b[2J",
    ],
)
def test_sources_that_reach_for_other_files_are_refused(program: Any, text: str) -> None:
    assert refused(program(f"int first;\n{text}\n")).startswith("kernel.cpp:")


def test_a_refusal_says_in_which_line(program: Any) -> None:
    assert refused(program("int a;\nint b;\n#include <thread>\n")).startswith("kernel.cpp:3: error: #include <thread>")


def test_headers_of_the_program_are_read_as_strictly(program: Any) -> None:
    made = program('#include "ws_math.hpp"\n', ws_math__hpp="#include <filesystem>\n")
    assert refused(made).startswith("ws_math.hpp:1:")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("cpu", '#include <cmath>\n#include <cstdint>\n#include <immintrin.h>\n#include "ws_math.hpp"\n'),
        ("cuda", "#include <cuda_fp16.h>\n#include <cuda/std/limits>\n#include <cooperative_groups.h>\n"),
        ("cpu", "int important; // imports and modules are words too\nint include = 1;\n"),
    ],
)
def test_known_headers_and_plain_words_pass(program: Any, target: str, text: str) -> None:
    assert policy.check_sources(program(text, target=target, ws_math__hpp="")) is None


def test_cuda_headers_are_not_for_the_cpu_and_folders_are_not_climbed(program: Any) -> None:
    assert "cuda_fp16" in refused(program("#include <cuda_fp16.h>\n"))
    assert "cuda/" in refused(program("#include <cuda/../../../etc/passwd>\n", target="cuda"))


@pytest.mark.parametrize(
    "name",
    [
        "../kernel.cpp",
        "/tmp/kernel.cpp",
        "-fplugin=x.cpp",
        "kernel.cpp;x.cpp",
        "kernel.so",
        "a b.cpp",
        "k.cpp\n",
        "@x.cpp",
    ],
)
def test_names_that_are_not_plain_file_names_are_refused(name: str) -> None:
    made = candidate_pb2.Program(target=task_pb2.TARGET_CPU)
    made.sources.add(name=name, text="")
    assert "plain file name" in refused(made)


def test_the_same_name_twice_and_headers_first_are_refused() -> None:
    made = candidate_pb2.Program(target=task_pb2.TARGET_CPU)
    made.sources.add(name="kernel.hpp", text="")
    assert "first source" in refused(made)
    made.sources.add(name="Kernel.hpp", text="")
    assert "same name" in refused(made)


def test_more_than_four_mebibytes_of_sources_are_refused(program: Any) -> None:
    assert str(policy.SOURCE_BYTES) in refused(program("int a;\n", ws__hpp="//" + "x" * policy.SOURCE_BYTES))


def test_an_entry_that_is_no_name_is_refused(program: Any) -> None:
    assert "not the name of a function" in refused(program("", entry="kernel; rm -rf /"))


def test_assembly_of_the_source_itself_is_refused_and_the_compilers_is_not() -> None:
    assert policy.check_assembly("kernel.cpp", '\t.text\nkernel:\n\tret\n\t.string "a"\n') is None
    for text in ("#APP\n\tnop\n#NO_APP\n", '\tnop; .incbin "x"\n', '\t.include "x"\n', "name: .macro m\n"):
        assert policy.check_assembly("kernel.cpp", text) is not None


def test_a_launched_function_that_is_not_there_is_a_compile_error() -> None:
    missing = policy.check_entries(Elf(frozenset({"a"}), frozenset(), ()), ["a", "b"])
    assert missing is not None
    assert missing.kind == verdict_pb2.FAILURE_KIND_COMPILE_ERROR
    assert "'b'" in missing.diagnostics


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 200, b"\x7fELF\x02\x01" + b"\0" * 200]
)
def test_a_malformed_binary_is_refused_or_empty(content: bytes) -> None:
    assert policy.check_shared_object(content, ["kernel"]) is not None
