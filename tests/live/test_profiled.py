"""Inner modules that a profile chooses: blocks that come several times, else what costs most, as whole as can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_modules import served, won
from torch import nn

import warpsmith
from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.exports.export_module import ModuleExporter
from orchestrator.live import profiled
from orchestrator.live.profiled import Part
from warpsmith.errors import BadInput


def part(name: str, kind: str, seconds: float, *parts: Part) -> Part:
    return Part(name, kind, seconds, list(parts))


def layer(number: int) -> Part:
    place = f"model.layers.{number}"
    return part(place, "layer", 2.0, part(f"{place}.attention", "attention", 1.2), part(f"{place}.mlp", "mlp", 0.8))


def names(whole: Part, *within: Part) -> list[list[str]]:
    return [[each.name for each in group.parts] for group in profiled.groups(within or [whole], whole)]


def test_blocks_that_come_several_times_are_taken_through_what_holds_them() -> None:
    inner = part("model", "inner", 9.0, part("model.embed", "embed", 0.1), *(layer(number) for number in range(4)))
    whole = part("", "whole", 12.0, inner, part("head", "head", 2.9))
    assert names(whole) == [[f"model.layers.{number}" for number in range(4)], ["head"]]


def test_what_has_no_blocks_is_taken_as_a_whole_and_equal_leaves_do_not_break_it_up() -> None:
    linears = [part(f"block.{name}", "linear", 3.0) for name in ("query", "key", "value")]
    whole = part("", "whole", 10.0, part("block", "block", 9.8, *linears))
    assert names(whole) == [["block"]]


def test_what_takes_next_to_nothing_is_left() -> None:
    pairs = [part(f"small.{n}", "pair", 0.2, part(f"small.{n}.0", "leaf", 0.1)) for n in range(2)]
    whole = part("", "whole", 100.0, part("main", "main", 95.0), *pairs)
    assert names(whole) == [["main"]]


def test_blocks_of_a_small_share_do_not_break_up_what_they_are_in() -> None:
    gates = [part(f"main.gate.{n}", "gate", 1.0, part(f"main.gate.{n}.0", "leaf", 0.5)) for n in range(2)]
    whole = part("", "whole", 10.0, part("main", "main", 9.0, *gates))
    assert names(whole) == [["main"]]


def test_within_a_part_blocks_are_told_by_how_often_the_whole_model_has_them() -> None:
    layers = [layer(number) for number in range(2)]
    whole = part("", "whole", 5.0, *layers)
    assert names(whole, *layers) == [
        ["model.layers.0.attention", "model.layers.1.attention"],
        ["model.layers.0.mlp", "model.layers.1.mlp"],
    ]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.relu(self.up(self.norm(x)))
        return y


class Deciding(nn.Module):
    """What cannot be captured, with something within it that can."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x) if float(x.sum()) == float(x.sum()) else x
        return y


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(512, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x[:1])
        return y


X = torch.randn(2048, 512)


def optimized(model: Stack, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    archive, world = Archive.in_directory(folder), testing.World()
    text = ModuleExporter().export(won(Block(512), (X,), {})).text
    monkeypatch.setattr(client, "searching", lambda *_: served(archive, world, text))
    fast = warpsmith.optimize_submodules(model, X, runs=folder / "none")
    archive.close()
    return fast


def test_a_model_without_a_match_is_profiled_and_its_blocks_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Stack(*(Block(512) for _ in range(3)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = optimized(model, tmp_path, monkeypatch)
    assert [*fast.warpsmith] == ["blocks.0", "blocks.1", "blocks.2"]
    shares = [outcome.share for outcome in fast.warpsmith.values()]
    assert all(0.0 < share < 1.0 for share in shares)
    assert "blocks.0 and 2 more like it (Block): " in capsys.readouterr().err
    assert fast.head is model.head
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_what_cannot_be_captured_is_left_for_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = optimized(Stack(Deciding(512), Deciding(512)), tmp_path, monkeypatch)
    assert [*fast.warpsmith] == ["blocks.0.block", "blocks.1.block"]


def test_a_model_of_which_no_part_can_be_taken_is_refused_with_the_reason() -> None:
    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    with pytest.raises(BadInput, match=r"no inner module of Whole is worth a search.*warpsmith.optimize\(model"):
        warpsmith.optimize_submodules(Whole(), X)
