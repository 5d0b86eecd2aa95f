"""Messages as people and models get them."""

from __future__ import annotations

from agent_compile import diagnostics, resources

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 86 registers, used 1 barriers, 32 bytes smem
ptxas info    : Compile time = 81.014 ms
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for helper
    640 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, 400 bytes cmem[0]
"""


def test_resources_are_read_for_each_entry() -> None:
    first, second = resources.parse(PTXAS)
    assert (first.entry, first.register_count, first.shared_bytes) == ("first", 86, 32)
    assert (first.spill_bytes, first.stack_bytes) == (8, 16)
    assert (second.entry, second.register_count, second.shared_bytes) == ("second", 20, 0)
    assert (second.spill_bytes, second.stack_bytes) == (0, 0)


def test_a_log_without_notes_has_no_resources() -> None:
    assert resources.parse("kernel.cu(3): error: no\n") == []


def test_locations_have_one_form() -> None:
    assert diagnostics.tidy('kernel.cu(41): error: identifier "q" is undefined') == (
        'kernel.cu:41: error: identifier "q" is undefined'
    )


def test_our_directory_control_characters_and_notes_are_left_out() -> None:
    text = f"{PTXAS}\x1b[1;31m/tmp/x1/kernel.cpp:3:1: error: bad\x07 \u202ename\x1b[0m\r\n\r\ncompilation terminated.\n"
    assert diagnostics.tidy(text, directory="/tmp/x1") == "kernel.cpp:3:1: error: bad name"


def test_a_flood_is_cut_at_the_limit_with_the_first_errors_kept() -> None:
    text = diagnostics.tidy("\n".join(f"kernel.cpp:{i}:1: error: again" for i in range(100_000)))
    assert len(text) <= diagnostics.LIMIT
    assert text.startswith("kernel.cpp:0:1")
    assert text.endswith("[...]")
