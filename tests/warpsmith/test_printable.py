"""Text of others as people see it: nothing is hidden, nothing is obeyed, and a line stays one line."""

from __future__ import annotations

import io
import logging
import unicodedata

from rich.console import Console

from orchestrator.commands import report
from warpsmith import printable
from warpsmith.printable import ACTING
from warpsmith.v1 import run_pb2, task_pb2


def test_what_a_terminal_would_obey_is_written_out() -> None:
    text = "a\x1b[2J\x9b1m\x1b]0;title\x07 \u202eevil\u2066\u200b\x00\ud800\r\nnext\tcell é 漢"
    shown = printable.lines(text)
    assert shown == "a\\x1b[2J\\x9b1m\\x1b]0;title\\x07 \\u202eevil\\u2066\\u200b\\x00\\ud800\nnext\tcell é 漢"


def test_any_character_can_be_met() -> None:
    everything = "".join(map(chr, range(0x110000)))
    shown = printable.lines(everything, 1 << 24)
    assert {c for c in shown if unicodedata.category(c) in ACTING} == {"\n", "\t"}


def test_long_text_loses_its_middle_and_says_so() -> None:
    assert printable.lines("begin" + "x" * 500 + "end", 20) == "beginxxxxx\n[cut: 508 characters in all]\nxxxxxxxend"
    assert printable.line("word " * 50, 20) == "word word word word…"


def test_a_line_stays_one_line() -> None:
    assert printable.line("a\nwarpsmith: PASS\r\x0b\x85b\u2028c") == "a warpsmith: PASS\\r\\x0b\\x85b\\u2028c"


def test_a_row_keeps_its_columns_and_stays_one_line() -> None:
    assert printable.row("ok      disk\nwarpsmith: PASS\r\tx") == "ok      disk warpsmith: PASS\\r x"


def test_only_the_first_line_of_a_block_begins_at_the_margin() -> None:
    assert printable.block("x\r\nwarpsmith: PASS\n\u2028y") == "x\n    warpsmith: PASS\n    \\u2028y"


def test_a_quotation_is_marked_and_cannot_end_itself() -> None:
    assert printable.quotation("fast” PASS “x") == '“fast" PASS "x”'


def test_a_log_record_begins_one_line_and_the_rest_of_it_is_indented() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(printable.LogFormatter("INFO %(message)s"))
    handler.handle(logging.makeLogRecord({"msg": "x\nINFO forged \x1b[31m", "levelno": logging.INFO}))
    assert out.getvalue() == "INFO x\n    INFO forged \\x1b[31m\n"


def test_a_name_in_a_table_is_no_markup_and_no_control() -> None:
    run = run_pb2.Run(
        task=task_pb2.Task(name="[red]evil[/red][link=http://x]\x1b[31m\u202e"), message="[bold]boo[/bold]\x1b]0;t\x07"
    )
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=True).print(report.table([run]))
    assert "[red]evil[/red][link=http://x]\\x1b[31m\\u202e" in out.getvalue()
    assert "\x1b[31m" not in out.getvalue()
    assert "\x1b]" not in out.getvalue()
    assert "[bold]boo[/bold]" in out.getvalue()
