"""An ended run; databases for the archive, SQLite and a PostgreSQL of the test's own (marked `postgres`); a browser
(marked `web`); and what becomes of an exported package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.archiving.testing import PostgreSql
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.story import Story
from warpsmith.errors import BadInput
from warpsmith.v1 import analysis_pb2, run_pb2, timing_pb2, trial_pb2, verdict_pb2


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A runs directory with one ended run."""
    archive = Archive.in_directory(tmp_path)
    agents = testing.World().agents()
    run = run_pb2.Run(id="20260101-000000-abc", task=testing.task("softmax"), created_at=1.0)
    archive.put_run(run)
    SearchRun(run, agents, DeviceGate(agents.benchmarks), Beam(), Story(archive, run)).execute()
    archive.close()
    return tmp_path


@pytest.fixture
def ended(kept: Path) -> tuple[run_pb2.Run, list[trial_pb2.Trial]]:
    """A run that found a faster kernel, with work and ceilings as real services tell them."""
    archive = Archive.reading(kept)
    run = archive.run("last")
    trials = archive.trials(run.id)
    archive.close()
    run.device.MergeFrom(timing_pb2.Device(copy_bytes_per_second=2e10, operation_flops=3e10, launch_ns=900))
    analysis = trials[0].candidate.analysis
    analysis.minimum.MergeFrom(analysis_pb2.Cost(read_bytes=10**6, write_bytes=10**6, operation_count=10**6))
    analysis.groups[0].cost.CopyFrom(analysis.minimum)
    return run, trials


@pytest.fixture
def long_search(ended: tuple[run_pb2.Run, list[trial_pb2.Trial]]) -> tuple[run_pb2.Run, list[trial_pb2.Trial]]:
    """The same with 500 trials, with reasons as long as real ones, each grown from one half as far on."""
    run, trials = ended
    made = []
    for number in range(1, 501):
        trial = trial_pb2.Trial()
        trial.CopyFrom(trials[number % len(trials)])
        trial.number, trial.parent = number, number // 2
        trial.hypothesis.rationale = f"softmax_{number} and mul in one kernel: 402 MB less traffic, " * 3
        if number % 3:
            trial.ended_at = trial_pb2.STAGE_VERIFY
            trial.verdict.state = verdict_pb2.VERDICT_STATE_FAIL
            trial.verdict.kind = verdict_pb2.FAILURE_KIND_WRONG_VALUE
            trial.verdict.detail = f"output 0 is {number} times as far off as PyTorch at index {number}; " * 4
        made.append(trial)
    return run, made


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSql]:
    try:
        server = PostgreSql()
    except BadInput as error:
        pytest.fail(str(error))
    yield server
    server.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind that is supported."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'warpsmith.sqlite3'}"
    server: PostgreSql = request.getfixturevalue("postgresql")
    return server.url("conformance")


@pytest.fixture
def archive(database_url: str) -> Iterator[Archive]:
    made = Archive(database_url)
    yield made
    made.close()


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium that the machine has."""
    from playwright.sync_api import sync_playwright  # only tests in a browser need it

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.fail("Chromium is missing: make system-deps (as root; on Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def wheel_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Builds the wheel of a package without a network."""

    def build(package: Path) -> Path:
        into = tmp_path / "wheels"
        wheel = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(into), str(package)]
        subprocess.run([sys.executable, "-m", "pip", "-q", *wheel], check=True)
        (made,) = into.glob("*.whl")
        return made

    return build


@pytest.fixture
def installed(tmp_path: Path, wheel_of: Callable[[Path], Path]) -> Callable[[Path], tuple[Path, str]]:
    """Installs a package into a clean folder and runs its own tests there: the folder, and what pytest said."""

    def install(package: Path) -> tuple[Path, str]:
        clean = tmp_path / "clean"
        into = ["install", "--no-deps", "--no-index", "--target", str(clean), str(wheel_of(package))]
        subprocess.run([sys.executable, "-m", "pip", "-q", *into], check=True)
        environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        environment |= {"PYTHONPATH": str(clean), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package / "tests")]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-3000:]
        return clean / package.name, ran.stdout

    return install
