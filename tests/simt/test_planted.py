"""Faults planted in the generator's own kernels and headers, each found by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from simulated import Subject, simulation_of
from subjects import subject

from agent_correctness.simulation.simt import Execution, Sanitizer, Simulation, Simulator
from agent_correctness.simulation.simt_findings import Finding, Kind

pytestmark = pytest.mark.simt


@dataclass(frozen=True)
class Fault:
    """What is changed in a kernel or a header, and what must be found."""

    name: str
    subject: str
    file: str
    """"kernel.cu", a header, or "launch": half the dynamic shared memory."""
    old: str
    new: str
    sanitizer: Sanitizer
    kind: Kind
    words: str
    """What the finding says."""
    which: int = 0
    """Which of several places."""


RACE, UNINITIALIZED, OUT_OF_BOUNDS = Kind.RACE, Kind.UNINITIALIZED, Kind.OUT_OF_BOUNDS
THREAD, ADDRESS = Sanitizer.THREAD, Sanitizer.ADDRESS
BLOCK_BARRIER = "    __syncthreads();\n    mine = over_array"
COLUMN_BARRIER = "    results.template put<kThreads>(box);\n    __syncthreads();"
CLUSTER_BARRIER = "  cluster_arrive();\n  cluster_wait();\n  return"
LAST_BLOCK = "  __threadfence();\n  __shared__ bool is_last;\n  __syncthreads();\n"
STATE_OF_A_WARP = "    if (threadIdx.x % 32 == 0) box[threadIdx.x / 32] = mine;\n"
PARTIALS = "if (at.is_top()) results.store_to("
MESSAGE = "    if (i * 32 + lane < kCount) write_slot("
RETURN = "kernel.number >= Kernel::kVectors) return;\n"
FAULTS = (
    # -- nothing orders two accesses
    Fault("block_barrier", "row_online_softmax", "ws_reduce.cuh",
          BLOCK_BARRIER, "    mine = over_array", THREAD, RACE, "boxes"),
    Fault("columns_barrier", "column_one_block_sum", "ws_columns.cuh",
          COLUMN_BARRIER, COLUMN_BARRIER.partition("\n")[0], THREAD, RACE, "box"),
    Fault("stream_barrier", "row_pipelined_softmax", "ws_rows_pipelined.cuh",
          "    __syncthreads();\n", "", THREAD, RACE, "boxes"),
    Fault("team_barrier", "row_ring_team_several_turns", "ws_stream.cuh",
          "  __syncthreads();\n  return kListeners", "  return kListeners", THREAD, RACE, "in shared memory"),
    Fault("cluster_barrier", "row_cluster_softmax", "ws_reduce.cuh",
          CLUSTER_BARRIER, "  return", THREAD, RACE, "boxes"),
    Fault("wait_for_previous_launch", "row_two_kernels_softmax", "ws_rows_two_kernels.cuh",
          "  wait_for_previous();\n", "", THREAD, RACE, "partials"),
    Fault("last_block_before_the_others", "column_ctas_sum", "ws_columns.cuh",
          "  if (!is_last) return false;\n", "", THREAD, RACE, "total_partials"),
    Fault("counter_after_the_partials", "column_ctas_sum", "ws_columns.cuh",
          LAST_BLOCK, "  __shared__ bool is_last;\n", THREAD, RACE, "total_partials"),
    Fault("one_box_for_all_chunks", "scan_block_sum", "ws_scan_rows.cuh",
          "chunk / Part::kChunk % 2", "0", THREAD, RACE, "boxes"),
    Fault("one_box_for_all_rows", "scan_columns_columns", "ws_scan_columns.cuh",
          "boxes[chunk / Part::kChunk % 2]", "boxes[0]", THREAD, RACE, "boxes"),
    Fault("tile_barrier", "turn_small_vectors", "ws_transpose.cuh",
          "  tile.put_into_tiles();\n  __syncthreads();", "  tile.put_into_tiles();", THREAD, RACE, "tiles"),
    Fault("tile_barrier_of_results", "turn_small_few_channels", "ws_transpose.cuh",
          "    __syncthreads();\n    tile.store_across", "    tile.store_across", THREAD, RACE, "tiles"),
    Fault("window_barrier", "window_columns_overlapping", "ws_window.cuh",
          "(columns);\n  __syncthreads();", "(columns);", THREAD, RACE, "columns"),
    # -- an access outside
    Fault("load_past_a_buffer", "pointwise_single_vectors", "kernel.cu",
          "(x + i_begin)", "(x + i_begin + 4)", ADDRESS, OUT_OF_BOUNDS, "at byte 4096 of the 4096 of x"),
    Fault("access_past_a_buffer", "pointwise_single_ragged", "ws_types.cuh", "static_cast<unsigned>(j) < kColumns",
          "static_cast<unsigned>(j) <= kColumns", ADDRESS, OUT_OF_BOUNDS, "bytes at byte 4012 of the 4012 of"),
    Fault("small_shared_memory", "row_online_softmax", "kernel.cu",
          "ws::plain_places(", "1 + 0 * ws::plain_places(", ADDRESS, OUT_OF_BOUNDS, "boxes"),
    Fault("tile_that_hangs_over", "turn_small_ragged", "ws_transpose.cuh",
          "|| j >= kAlongExtent", "|| j > kAlongExtent", ADDRESS, OUT_OF_BOUNDS, "of b"),
    Fault("window_that_hangs_over", "window_columns_padded", "ws_window.cuh",
          "ws::max<Offset>(down, 0)", "ws::max<Offset>(down, -1)", ADDRESS, OUT_OF_BOUNDS, "of x"),
    Fault("small_tile", "turn_small_vectors", "ws_transpose.cuh", "elements[kRows * kColumns];",
          "elements[kRows * kColumns / 2];", ADDRESS, OUT_OF_BOUNDS, "tiles"),
    Fault("small_ring", "row_pipelined_softmax", "launch", "", "", ADDRESS, OUT_OF_BOUNDS, "dynamic shared memory"),
    Fault("misaligned_pack", "pointwise_single_vectors", "kernel.cu",
          "(x + i_begin)", "(x + i_begin / 2)", ADDRESS, Kind.MISALIGNED, "misaligned address"),
    # -- memory that nothing wrote
    Fault("shared_state", "row_online_softmax", "ws_reduce.cuh",
          STATE_OF_A_WARP, "    if (threadIdx.x == 0) box[0] = mine;\n", ADDRESS, UNINITIALIZED, "shared memory"),
    Fault("copy_not_waited_for", "row_pipelined_softmax", "ws_rows_pipelined.cuh",
          "wait_copies<kDepth - 1 - kLag>();", "", ADDRESS, UNINITIALIZED, "shared memory"),
    Fault("part_not_waited_for", "row_ring_softmax", "ws_rows_ring.cuh",
          "wait_copies<kDepth - kLead>();", "", ADDRESS, UNINITIALIZED, "shared memory"),
    Fault("partial_results", "column_ctas_sum", "ws_columns.cuh",
          PARTIALS, PARTIALS.replace("is_top()", "is_top() && at.cta > 0"), ADDRESS, UNINITIALIZED, "total_partials"),
    Fault("part_of_a_tile", "turn_small_vectors", "ws_transpose.cuh",
          "tiles.template get<k>().put(", "if (item == 0) tiles.template get<k>().put(",
          ADDRESS, UNINITIALIZED, "shared memory"),
    Fault("output_element", "pointwise_single_ragged", "ws_pointwise.cuh",
          RETURN, RETURN.replace("kVectors", "kVectors - 1"), ADDRESS, Kind.UNWRITTEN,
          "element 1000 and 2 more of y was never written"),
    Fault("slot_not_cleared", "row_grid_softmax", "ws_reduce.cuh",
          "      clear_slot(slot);\n", "", ADDRESS, Kind.DIRTY, "is not left zero"),
    # -- threads that do not meet
    Fault("barrier_that_some_skip", "row_online_softmax", "ws_reduce.cuh",
          BLOCK_BARRIER, f"    if (threadIdx.x < 32){BLOCK_BARRIER[3:]}", ADDRESS, UNINITIALIZED, "shared memory"),
    Fault("message_that_nobody_sends", "row_grid_softmax", "ws_reduce.cuh",
          MESSAGE, MESSAGE.replace("kCount)", "kCount && rank > 0)"), ADDRESS, Kind.DEADLOCK,
          "waits for memory that another block writes"),
    Fault("lanes_of_another_mask", "row_warp_softmax", "ws_reduce.cuh", "__shfl_xor_sync(kAllLanes, value, lane)",
          "__shfl_xor_sync(1u << lane, value, lane)", ADDRESS, Kind.MISUSE, "whose mask leaves it out"),
)  # fmt: skip


def broken(fault: Fault) -> Simulation:
    """The subject with the fault in it."""
    chosen: Subject = subject(fault.subject)
    simulation = simulation_of(chosen.nest, chosen.emission())
    if fault.file == "launch":
        simulation.program.steps[0].launch.shared_bytes //= 2
        return simulation
    source = next(source for source in simulation.program.sources if source.name == fault.file)
    pieces = source.text.split(fault.old)
    assert len(pieces) > 1, f"{fault.name}: the text is not there any more\n{source.text}"
    at = fault.which % (len(pieces) - 1)
    source.text = fault.old.join(pieces[: at + 1]) + fault.new + fault.old.join(pieces[at + 1 :])
    return simulation


def found(execution: Execution) -> list[Finding]:
    return list(execution.findings)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_name(simulator: Simulator, fault: Fault) -> None:
    findings = found(simulator.execute(broken(fault), fault.sanitizer))
    assert any(finding.kind is fault.kind and fault.words in finding.detail for finding in findings), findings


def test_a_race_is_found_at_every_run_and_says_where(simulator: Simulator) -> None:
    simulation = broken(FAULTS[0])
    first, *others = (
        found(simulator.execute(replace(simulation, seed=seed), Sanitizer.THREAD)) for seed in (0, 0, 1, 2)
    )
    assert first == others[0]
    assert all(any(finding.kind is Kind.RACE for finding in findings) for findings in (first, *others))
    assert any(finding.place.startswith("row_online_softmax.cu:") for finding in first)
