"""Our words in plain ones: what a verdict, a label, an arm, a move and an end of a trial mean.

The one idea: one sentence for each word of the contract; what has none (a later version's) is shown as its word alone.
"""

from __future__ import annotations

from orchestrator.commands.report import KEPT
from orchestrator.pages.rendering import words
from warpsmith.contract import words as contract
from warpsmith.v1 import analysis_pb2, timing_pb2, trial_pb2

VERDICTS = {
    "PASS": "A faster kernel was found and checked.",
    "NO_FASTER": "No faster kernel was found.",
    "AT_FLOOR": "The module is already about as fast as this machine allows.",
    "CANCELLED": "The run was stopped before its end.",
    "BAD_INPUT": "The module cannot be optimised as it is.",
    "FAILED": "A machine or a service failed, so the run has no answer.",
    "QUEUED": "The run has not begun yet.",
    "PREPARING": "The run goes on: the module is captured and its baselines are timed.",
    "SEARCHING": "The run goes on: kernels are tried.",
    "FINISHING": "The run goes on: the best kernels are judged once more.",
    "WAITING_LLM": "The run goes on without the language model, whose server is away.",
}
"""By verdict, what happened."""

REMEDIES = {
    "NO_FASTER": (
        "Search longer: `warpsmith optimize … --budget 5m`. A second run begins with what this one found.",
        "Look at the search below: it says why each branch ended.",
    ),
    "AT_FLOOR": (
        "Less work has a lower floor: another precision (`--precision tf32`, or a module in bf16), or `--prepared` "
        "where parameters stay as they are.",
    ),
    "CANCELLED": ("Run it again: it begins with what was found.",),
    "BAD_INPUT": ("Correct what the message names, and run it again.",),
    "FAILED": ("`warpsmith doctor` says what this machine has and lacks. Then run it again.",),
}
"""By verdict, what would help."""
UNDER_WAY = ("This page is of the moment at which it was written: write it again when the run has ended.",)
UNSTEADY = "Here even equal programs differ by {noise:.1%}: run it again when the machine does nothing else."

FLAGS = {
    timing_pb2.FLAG_FLOOR_REJECT: "It took less time than physics allows, so it is not believed.",
    timing_pb2.FLAG_FLOOR_SUSPECT: "It took less time than any sweep of this machine, and no audit has cleared it.",
    timing_pb2.FLAG_FLOOR_AUDITED: "It took less time than any sweep of this machine; an audit cleared it.",
    timing_pb2.FLAG_SLOWER_ON_FRESH_VALUES: "First calls on new values do not show the speedup, so it is not believed.",
    timing_pb2.FLAG_FASTEST_UNPROVEN: "A baseline could not run: the fastest that did may not be the fastest there is.",
    timing_pb2.FLAG_BASELINE_WAS_FASTER: "A baseline was faster during the search; the speedup is against that time.",
    timing_pb2.FLAG_UNSTEADY_MACHINE: "The machine was busy: more than half of the readings drifted.",
    timing_pb2.FLAG_FEW_BLOCKS: "Few readings were made, so the interval is their whole range.",
    timing_pb2.FLAG_PERSISTING_LINES_STAY: "Lines kept in the L2 cache outlive the flush before a reading.",
    timing_pb2.FLAG_HOST_BOUND: "The host's time could not be hidden behind the device's.",
    timing_pb2.FLAG_TIMED_AS_CALLED: "Times are of whole calls, host time included, for every arm.",
    timing_pb2.FLAG_OUTPUT_CONSTANT: "The module gives the same whatever it is given: no speedup of it means anything.",
    timing_pb2.FLAG_OUTPUT_ZERO: "The module gives zeros whatever it is given: no speedup of it means anything.",
    timing_pb2.FLAG_INPUT_UNUSED: "Some input does not influence any output.",
    timing_pb2.FLAG_TASK_VALUES_FIXED: "The module draws the same inputs from every seed; they were varied here.",
    timing_pb2.FLAG_REFERENCE_WASTEFUL: "The module makes more than twice the products that it needs.",
    timing_pb2.FLAG_REFERENCE_UNTRACED: "torch.export cannot trace the module: it is judged by itself in float64.",
    timing_pb2.FLAG_LOOKED_AT_TWICE: "A first final left it in doubt; this is the second.",
    timing_pb2.FLAG_INPUT_UNRESOLVED: "The output is too coarse to show whether a part of an input was read.",
}
"""By flag, what a reader has to know."""

LABELS = {
    KEPT: "The times of the baselines but eager are an earlier run's, scaled to this one.",
    "kernelbench_check_fails": "KernelBench's own check (allclose against eager) does not hold.",
    "prepared": "Prepared track: what depends on parameters alone is computed once and kept.",
    "tf32": "Products may be in TF32, for the baselines too.",
    "fp16": "Inputs are fp16; sums are fp32.",
    "bf16": "Inputs are bf16; sums are fp32.",
}

ARMS = {
    timing_pb2.ARM_KIND_CANDIDATE: "the best program",
    timing_pb2.ARM_KIND_EAGER: "the module as it is",
    timing_pb2.ARM_KIND_COMPILE: "torch.compile",
    timing_pb2.ARM_KIND_COMPILE_MAX_AUTOTUNE: "torch.compile that tries several kernels",
    timing_pb2.ARM_KIND_EAGER_GRAPH: "the module in a CUDA graph",
    timing_pb2.ARM_KIND_CHANNELS_LAST: "the module with channels last",
    timing_pb2.ARM_KIND_REWRITTEN: "our algebra as library calls; no baseline",
    timing_pb2.ARM_KIND_AA_COPY: "the fastest baseline once more, to see the noise; no baseline",
    timing_pb2.ARM_KIND_COMPILE_REDUCE_OVERHEAD: "torch.compile with CUDA graphs",
    timing_pb2.ARM_KIND_COMPILE_CHANNELS_LAST: "torch.compile with channels last",
    timing_pb2.ARM_KIND_CUDNN_BENCHMARK: "the module, with cuDNN trying its algorithms",
    timing_pb2.ARM_KIND_COMPILE_FROZEN: "torch.compile with frozen parameters",
}
"""By kind of arm, what was timed."""

_STAGES = {
    trial_pb2.STAGE_SYNTHESIZE: "no new program was made",
    trial_pb2.STAGE_COMPILE: "did not compile",
    trial_pb2.STAGE_VERIFY: "was not right",
    trial_pb2.STAGE_MEASURE: "could not be timed",
    trial_pb2.STAGE_TIMED: "right and timed",
}


def label(text: str) -> str:
    """What a label of `report.labels_of` means; empty for one that is not known."""
    if text.startswith("algebra:"):
        return "It computes an equal value in another way; what that gains is told apart where it was timed."
    if flag := contract.flag_of(text):
        return FLAGS.get(flag, "")
    return LABELS.get(text, "")


def stage(value: trial_pb2.Stage.ValueType) -> str:
    """Where a trial ended, in words."""
    return _STAGES.get(value, contract.stage(value) or "not begun")


def move(value: analysis_pb2.Move) -> str:
    """What a move does to the plan, in one sentence without an end."""
    group, choice = words(value.group, 80), words(value.choice, 80)
    settings = ", ".join(f"{words(name, 40)} = {number}" for name, number in sorted(value.arguments.items()))
    told = _of_kind(value.kind, group, choice, ", ".join(filter(None, (choice.replace(",", ", "), settings))))
    return f"{told}; the same for {len(value.also)} groups like it" if value.also else told


def _of_kind(kind: analysis_pb2.MoveKind.ValueType, group: str, choice: str, settings: str) -> str:
    match kind:
        case analysis_pb2.MOVE_KIND_AUTHOR if group == "*":
            return "every group that can be becomes a kernel of ours"
        case analysis_pb2.MOVE_KIND_AUTHOR:
            return f"{group} becomes a kernel of ours" + (f", by the schedule {choice}" if choice else "")
        case analysis_pb2.MOVE_KIND_FUSE if choice == "*":
            return f"all that {group} reads is computed in its kernel, so nothing in between goes through memory"
        case analysis_pb2.MOVE_KIND_FUSE:
            return f"{choice} is computed in the kernel of {group}, so what lies between them stays out of memory"
        case analysis_pb2.MOVE_KIND_LIBRARY:
            return f"{group} goes back to PyTorch's own calls"
        case analysis_pb2.MOVE_KIND_REWRITE:
            return f"algebra: the calls that end at {group} become others of equal value ({choice})"
        case analysis_pb2.MOVE_KIND_SET:
            return f"the kernel of {group} gets other settings: {settings}"
        case analysis_pb2.MOVE_KIND_WRITE:
            return f"the kernel of {group} is a text that a model may have written"
        case analysis_pb2.MOVE_KIND_LAUNCH if choice == "together":
            return "small kernels that need nothing of each other run side by side, in one launch"
        case analysis_pb2.MOVE_KIND_LAUNCH if choice == "apart":
            return "kernels that were launched together are launched one by one"
        case analysis_pb2.MOVE_KIND_LAUNCH:
            return "a call launches all steps at once, as one CUDA graph"
        case analysis_pb2.MOVE_KIND_LAYOUT:
            return f"the whole graph is laid out anew ({choice})"
    return f"{contract.move_kind(kind)} {group} {choice}".strip()
