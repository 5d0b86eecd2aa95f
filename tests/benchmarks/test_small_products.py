"""What is timed of small products, without a GPU: a program for the library's call and for each tile."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.products import small_products
from orchestrator.tasks import intake


@pytest.mark.parametrize("name", small_products.CASES)
def test_every_tile_of_a_case_is_reached(tmp_path: Path, name: str) -> None:
    case, file = small_products.CASES[name], tmp_path / "product.py"
    file.write_text(
        small_products.MODULE.format(equation=case.equation, left=str(case.left)[1:-1], right=str(case.right)[1:-1])
    )
    made = list(small_products.programs(intake.read(intake.Request(str(file), target="cuda")), case))
    assert [how for how, _ in made] == [
        "library", *(f"rows={rows} columns={columns} threads={threads}" for rows, columns, threads in case.tiles)
    ]  # fmt: skip
    assert len({program.digest for _, program in made}) == len(made)
