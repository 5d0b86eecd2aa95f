"""Settings: steps in the order of fields, words and numbers on the wire, refusals that say what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import pytest

from agent_synthesis.emit import registry
from agent_synthesis.emit.cuda.pointwise import CudaPointwise, PointwiseSettings
from agent_synthesis.schedule import Offered
from agent_synthesis.settings import Loads, Settings, setting
from agent_synthesis.testing import gelu
from warpsmith.errors import BadInput, IllegalMove
from warpsmith.hardware import H200
from warpsmith.v1 import task_pb2

Often = StrEnum("Often", "ONCE TWICE")


@dataclass(frozen=True)
class Few(Settings):
    loads: Loads = setting(Loads.CACHED, "whether what is read is kept for others")
    dependent_launch: bool = setting(True, "whether a kernel may start early")
    threads: int = setting(256, "threads of a block", (128, 256, 512))
    promote: int | None = setting(None, "of floats: stages between promotions", (1, 2))


@dataclass(frozen=True)
class Packed(Settings):
    pack: int = setting(1, "the old name of a setting of ours")


@dataclass(frozen=True)
class Kept(Settings):
    loads: Often = setting(Often.ONCE, "a setting of ours, that may be an old word")


def test_steps_are_taken_in_the_order_of_the_fields_or_of_the_names() -> None:
    assert list(map(str, Few().one_change_away(threads=(64,)))) == [
        "loads = evict_first, dependent_launch = yes, threads = 256",
        "loads = cached, dependent_launch = no, threads = 256",
        "loads = cached, dependent_launch = yes, threads = 64",
    ]
    assert Few().changes(threads=..., loads=()) == [Few(threads=128), Few(threads=512)]


def test_a_setting_that_a_nest_does_not_have_is_not_on_the_wire() -> None:
    assert Few().to_wire() == ({"loads": "cached", "dependent_launch": "yes"}, {"threads": 256})
    assert Few(promote=1).one_change_away(loads=(), dependent_launch=(), threads=()) == [Few(promote=2)]
    for settings in (Few(), Few(Loads.EVICT_FIRST, False, 64, 2)):
        assert Few.from_wire(*settings.to_wire()) == settings


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"hats": 3}, "there is no setting 'hats'; there are: loads, dependent_launch, threads"),
        ({"promote": 1}, "there is no setting 'promote'; there are: loads, dependent_launch, threads"),
        ({"loads": "often"}, "loads = often: it may be evict_first, cached"),
        ({"dependent_launch": 1}, "dependent_launch = 1: it may be yes, no"),
        ({"threads": -1}, "threads = -1: it may be a whole number from 0 on"),
    ],
)
def test_a_word_that_is_none_is_refused_with_what_is_allowed(words: Mapping[str, str | int], says: str) -> None:
    with pytest.raises(IllegalMove, match=says):
        Few().changed(words)


def test_a_schedule_takes_no_settings_of_another() -> None:
    with pytest.raises(IllegalMove, match="cuda_pointwise has settings of its own, no Few"):
        Offered(CudaPointwise(H200)).emit(gelu(64), Few())


@pytest.mark.parametrize(("settings", "name"), [(Packed, "pack"), (Kept, "loads")])
def test_a_schedule_calls_no_setting_what_another_was_called(settings: type[Settings], name: str) -> None:
    own = type("Own", (CudaPointwise,), {"settings": settings})
    with pytest.raises(BadInput, match=f"schedule cuda_pointwise: '{name}'"):
        Offered(own(H200))


def test_what_an_archive_has_of_settings_is_read_again() -> None:
    choices = {"loads": "cached", "stores": "plain", "exp": "accurate", "dependent_launch": "yes"}
    integers = {"threads": 512, "vectors": 1, "vector_width": 4}
    settings = PointwiseSettings.from_wire(choices, integers)
    assert settings == PointwiseSettings(threads=512, vector_width=4)
    assert tuple(map(list, settings.to_wire())) == ([*choices, "by_rows"], list(integers)), "what it has not is as ever"


@pytest.mark.parametrize("target", [task_pb2.TARGET_CUDA, task_pb2.TARGET_CPU])
def test_every_setting_of_ours_is_explained(target: task_pb2.Target.ValueType) -> None:
    for schedule in registry.every_schedule(target):
        assert schedule.settings.declared() or schedule.name in {
            registry.PIECES,
            registry.APART,
            *registry.BUNDLES,
        }  # parts have
        assert all(each.doc and not each.doc.endswith(".") for each in schedule.settings.declared().values())
