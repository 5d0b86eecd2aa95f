"""The prompt for a kernel: rules of the target, what the group computes, how fast it is now, and what went wrong.

The one idea: a question about one group holds what one person would need to write it, and no more. Everything that the
module, a compiler or a check said stands in delimited blocks without control characters, cut to sizes; a model with a
short context gets smaller sizes, and the prompt says what was left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template

from agent_synthesis.free_form import compose, definition
from agent_synthesis.free_form.kernel import Kernel, Signature
from agent_synthesis.free_form.known import Best
from agent_synthesis.plans import cost
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan
from warpsmith.contract import words
from warpsmith.models.language_model import Message
from warpsmith.models.untrusted import one_line, plain, quoted
from warpsmith.v1 import task_pb2, timing_pb2, trial_pb2, verdict_pb2

VERSION = "write_kernel_v2"
"""Name of the prompt files; a change of their text that changes answers is a new version."""
CHARACTERS_PER_TOKEN = 3.0
"""As of real tokenizers on source text, or fewer: the estimate errs towards a shorter prompt."""


@dataclass(frozen=True)
class Size:
    """How much of each part is shown, in characters."""

    definition: int
    kernel: int
    said: int


SIZES = (Size(8000, 16000, 4000), Size(3000, 6000, 1500), Size(1500, 2500, 600), Size(800, 0, 300))
"""From the whole to the least that can be asked."""


@dataclass(frozen=True)
class Subject:
    """The group to write, in the plan that is to become faster; the trial that timed that plan, or one before it,
    if one did; and the best kernel of the group that is known from any plan."""

    plan: Plan
    group: Group
    signature: Signature
    precision: task_pb2.Precision.ValueType
    parent: trial_pb2.Trial | None = None
    best: Best | None = None


@dataclass(frozen=True)
class Failure:
    """A kernel that failed, and how."""

    kernel: Kernel
    verdict: verdict_pb2.Verdict
    diagnostics: str


def question(subject: Subject, size: Size) -> tuple[Message, ...]:
    """Asks for a kernel."""
    signature, plan, group = subject.signature, subject.plan, subject.group
    names = [*signature.inputs, *signature.outputs]
    system = _file("system_cuda" if signature.is_cuda else "system_cpu").substitute(
        entry=signature.entry, arguments=", ".join(names), quoted=", ".join(f'"{name}"' for name in names)
    )
    user = _file("user").substitute(
        group=one_line(group.name, 100),
        entry=signature.entry,
        precision=words.precision(subject.precision) or "unspecified",
        inputs=quoted("inputs", definition.inputs_text(plan, group), size.definition // 2),
        outputs=quoted("outputs", definition.outputs_text(plan, group), size.definition // 4),
        steps=quoted("steps", definition.steps_text(plan, group), size.definition),
        profile=_profile(subject),
        current=_current(subject, size),
    )
    return Message("system", system.strip()), Message("user", user.strip())


def repair(subject: Subject, failure: Failure, size: Size) -> tuple[Message, ...]:
    """Asks for the kernel again, with what was wrong with it."""
    text = _file("repair").substitute(
        kind=words.failure_kind(failure.verdict.kind),
        found=_place(subject, failure.verdict.detail),
        said=quoted("said", failure.diagnostics or failure.verdict.detail, size.said),
        entry=subject.signature.entry,
    )
    # As it was answered: a compiler's lines count from the first one of the source.
    code = _code(failure.kernel.source, max(size.kernel, 2 * size.said)).rstrip("\n")
    said = f"```{'cuda' if subject.signature.is_cuda else 'cpp'}\n{code}\n```\n```json\n{failure.kernel.record}\n```"
    return (*question(subject, size), Message("assistant", said), Message("user", text.strip()))


def again(asked: Sequence[Message], answer: str, complaint: str, entry: str) -> tuple[Message, ...]:
    """The question again, with what was wrong with the form of the answer."""
    said = Message("assistant", one_line(answer, 400) or "(nothing)")
    return (*asked, said, Message("user", _file("again").substitute(complaint=complaint, entry=entry).strip()))


def token_estimate(messages: Sequence[Message]) -> int:
    """Tokens of the messages, guessed high."""
    return int(sum(len(message.content) for message in messages) / CHARACTERS_PER_TOKEN)


def _file(part: str) -> Template:
    place = resources.files("agent_synthesis.free_form") / "prompts" / f"{VERSION}.{part}.txt"
    return Template(place.read_text(encoding="utf-8"))


def _profile(subject: Subject) -> str:
    """What the group must move at least, and what the trial measured."""
    work = cost.of_group(subject.plan, subject.group)
    lines = [f"It reads at least {work.read_bytes} bytes and writes {work.write_bytes}."]
    timing = subject.parent.timing if subject.parent is not None else timing_pb2.Timing()
    whole = next((arm.median_ns for arm in timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE), 0.0)
    own = _own_ns(subject)
    if whole > 0 and own > 0:
        of_whole = f"{own / 1e3:.4g} microseconds of the {whole / 1e3:.4g} that the whole plan takes."
        lines.append(f"{_who_takes(subject)} {of_whole}")
    fastest = next((arm.median_ns for arm in timing.arms if arm.kind == timing.fastest_arm), 0.0)
    if fastest > 0:
        lines.append(f"PyTorch's fastest way takes {fastest / 1e3:.4g} microseconds for the whole module.")
    return "\n".join(lines)


def _is_own_plan(subject: Subject) -> bool:
    """Whether the trial timed the very plan that the group is in, rather than one before it."""
    return subject.parent is not None and list(subject.parent.candidate.moves) == list(subject.plan.moves)


def _who_takes(subject: Subject) -> str:
    if _is_own_plan(subject):
        return "Now it takes"
    if subject.parent is not None and subject.parent.candidate.moves:
        return "In the plan before, its parts take"
    return "As PyTorch's own calls it takes"


def _own_ns(subject: Subject) -> float:
    """What the group took in the trial; in a plan before its own, all that it is made of. 0 where that is unknown."""
    steps = subject.parent.timing.steps if subject.parent is not None else ()
    names = {subject.group.name} if _is_own_plan(subject) else set(subject.plan.all_nodes(subject.group))
    return sum(step.median_ns for step in steps if step.group in names)


def _current(subject: Subject, size: Size) -> str:
    """The best kernel so far."""
    best, own = subject.best, _own_ns(subject)
    if best is not None and size.kernel and (not own or best.nanoseconds < own or subject.group.engine == "library"):
        took = f"The best kernel so far, which took {best.nanoseconds / 1e3:.4g} microseconds:\n"
        return took + _whole_headers(quoted("kernel", best.text, size.kernel))
    if subject.group.engine == "library":
        return "It is computed by PyTorch's own library calls now."
    if not size.kernel:
        return "It is one kernel now, too long to be shown here."
    text = compose.text_of(subject.plan, subject.group)
    return "The best kernel so far:\n" + _whole_headers(quoted("kernel", text, size.kernel))


def _code(text: str, most_characters: int) -> str:
    """Source as `plain` leaves it, with the names of headers whole again."""
    return _whole_headers(plain(text, most_characters))


def _whole_headers(text: str) -> str:
    return re.sub(r"(#[ \t]*include[ \t]*<) ", r"\1", text)


def _place(subject: Subject, detail: str) -> str:
    """Where the element that a verdict names lies, in terms of rows and columns."""
    named = re.search(r"output (\d{1,6})\D.{0,200}?element (\d{1,18})", detail)
    shape = definition.shape_of(subject.plan, subject.group, int(named.group(1))) if named else []
    if not named or not shape:
        return ""
    rest, index = int(named.group(2)), list[int]()
    for extent in reversed(shape):
        rest, place = divmod(rest, extent)
        index.insert(0, place)
    return f" Element {named.group(2)} of output {named.group(1)}, of shape {shape}, is {index}."
