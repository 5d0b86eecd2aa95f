"""Reads a kernel from whatever a model answered: fences right or wrong, thoughts, words before and after.

The one idea: an answer becomes a kernel or a complaint with a reason, never an exception, in time that grows with its
length and no faster. Of several sources the last one with the wanted function counts: models correct themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.free_form.kernel import Complaint, Fault, Kernel, Signature, from_text, made
from warpsmith.models.json_answer import last_object, without_thoughts
from warpsmith.models.language_model import Answer

_FENCE = re.compile(r"[ \t>]{0,8}(`{3,40}|~{3,40})[ \t]*([^`~]{0,80})")
_CODE = re.compile(r"^[ \t]*(?:#\s*(?:include|pragma|define|if)\b|//|/\*|extern\b|template\b|static\b|namespace\b|"
                   r"constexpr\b|__global__\b|__device__\b|using\b|inline\b|void\b|struct\b)")  # fmt: skip
_FUNCTION = re.compile(r'extern\s+"C"|__global__')
_RECORD_KEYS = ("launches", "grid", "block", "workspaces", "entry", "arguments")


@dataclass
class _Block:
    """Lines between two fences, or outside of all."""

    fenced: bool
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def read(answer: Answer, signature: Signature) -> Kernel | Complaint:
    """The kernel of an answer, or what is wrong with it."""
    text = without_thoughts(answer).replace("\r\n", "\n")
    if not text.strip():
        return Complaint(Fault.CUT_OFF if answer.is_cut_off else Fault.EMPTY, "it was empty")
    blocks = _blocks(text)
    code = _source(blocks, signature)
    if answer.is_cut_off and (code is None or code is blocks[-1]):
        return Complaint(Fault.CUT_OFF, "it was cut off before its end; write a shorter kernel, with few comments")
    if code is None:
        return Complaint(Fault.NO_CODE, f"it held no source in a ``` fence with the function {signature.entry}")
    record = _record(blocks, code)
    source = code.text if code.fenced else _code_lines(code.lines)
    kernel = from_text(source, signature) if record is None else made(source, record, signature)
    if isinstance(kernel, Kernel) and any(not each.entry.startswith(signature.entry) for each in kernel.launches):
        said = f"the names of all functions that are launched must begin with {signature.entry}"
        return Complaint(Fault.BAD_LAUNCH, said)
    return kernel


def _blocks(text: str) -> list[_Block]:
    """The text cut at its fences. A fence that was not closed ends with the next one of any kind."""
    blocks = [_Block(False, [])]
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line) if line.lstrip(" \t>")[:1] in ("`", "~") else None
        if fence is None:
            blocks[-1].lines.append(line)
        elif blocks[-1].fenced and not fence.group(2).strip():
            blocks.append(_Block(False, []))
        else:
            blocks.append(_Block(True, []))
    return blocks


def _source(blocks: Sequence[_Block], signature: Signature) -> _Block | None:
    """The last fenced block with the entry, else with any function of ours, else text outside of fences likewise."""
    with_entry = re.compile(rf"\b{re.escape(signature.entry)}\s*\(")
    for fenced in (True, False):
        candidates = [block for block in blocks if block.fenced is fenced and _FUNCTION.search(block.text)]
        for block in reversed(candidates):
            if with_entry.search(block.text):
                return block
        if candidates:
            return candidates[-1]
    return None


def _code_lines(lines: Sequence[str]) -> str:
    """The part of bare text that looks like source: from the first such line to the last closing brace."""
    first = next((place for place, line in enumerate(lines) if _CODE.match(line)), 0)
    last = max((place for place, line in enumerate(lines) if line.rstrip().endswith(("}", "};"))), default=len(lines))
    return "\n".join(lines[first : last + 1])


def _record(blocks: Sequence[_Block], code: _Block) -> object:
    """The launch record outside of the source: of a block that is one, the last first, else an object in the text."""
    others = [block for block in reversed(blocks) if block is not code]
    fenced = [block for block in others if block.fenced and block.text.lstrip().startswith("{")]
    for block in (*fenced, *(block for block in others if not block.fenced)):
        record = last_object(block.text, *_RECORD_KEYS)
        if record is not None:
            return record
    return None
