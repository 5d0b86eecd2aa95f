"""A small transformer trains with exports in place of its layers and its loss as it does without them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.training import small_transformer

OPTIONS = argparse.Namespace(steps=30, seeds=3, layers=2, target="cpu", compiled=False)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder, patch = tmp_path_factory.mktemp("pieces"), pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr(sys, "meta_path", sys.meta_path[:])
    yield small_transformer.exported(folder, "module", "cpu")
    patch.undo()


def test_losses_are_within_eagers_spread_over_seeds(pieces: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    for name, piece in pieces.items():
        half = piece._ws_training.backward
        monkeypatch.setattr(
            piece._ws_training, "backward", lambda given, half=half, name=name: [said.append(name), half(given)][1]
        )
    eager, ours = small_transformer.curves(pieces, OPTIONS)
    assert small_transformer.is_within(eager, ours)
    assert (eager - ours).abs().amax() < 1e-3, "and much nearer to eager of the same seed"
    assert eager[:, -1].mean() < 0.8 * eager[:, 0].mean(), "it learns"
    assert (said.count("layer"), said.count("loss")) == (2 * 30 * 3, 30 * 3), "the kernels answer"
    rows = small_transformer.table(eager, ours)
    assert [row.split("|")[1].strip() for row in rows] == ["step", "---", "10", "25", "30"]


Fault = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
FAULTS: dict[str, Fault] = {
    "none of a weight": lambda found: (*found[:4], torch.zeros_like(found[4]), *found[5:]),
    "another sign": lambda found: (-found[0], *found[1:]),
    "another order": lambda found: (found[0].flip(0), *found[1:]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_gradient_shows(pieces: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    half = pieces["layer"]._ws_training.backward
    monkeypatch.setattr(pieces["layer"]._ws_training, "backward", lambda given: FAULTS[fault](half(given)))
    eager, ours = small_transformer.curves(pieces, OPTIONS)
    assert (eager - ours).abs().amax() > 1e-3
    if fault != "none of a weight":  # which is one of twenty
        assert not small_transformer.is_within(eager, ours)


def test_an_original_in_an_exports_place_is_an_error(pieces: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces["loss"]._ws_training, "serves", lambda _: False)
    with pytest.raises(UserWarning, match="the original forward answers"):
        small_transformer.curves(pieces, OPTIONS)
