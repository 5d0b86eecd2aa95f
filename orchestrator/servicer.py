"""OptimizationService over gRPC: translates requests for `hosting`, nothing else."""
# ruff: noqa: ARG002 (gRPC fixes the signatures)

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from orchestrator.agents import Leases
from orchestrator.archive import Archive
from orchestrator.archiving.spool import Spool
from orchestrator.exports import export_files, export_training
from orchestrator.exports.export import Exported, ExportedFolder, Exporter
from orchestrator.pipeline import without_bulk
from orchestrator.search import Search
from orchestrator.search.memory import NOTHING_KNOWN, Memory
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate, most_ahead
from orchestrator.serving.dialing import Devices, agents_of, endpoints
from orchestrator.serving.hosting import RunHost
from orchestrator.serving.ownership import Owner
from orchestrator.serving.quotas import Quotas
from orchestrator.serving.story import Story, light
from orchestrator.tasks.intake import accept
from orchestrator.trust import seal
from orchestrator.trust.seal import Signer, signer_of
from warpsmith import plugins
from warpsmith.errors import NotFound
from warpsmith.permissions import UNASKED, Caller
from warpsmith.service.admission import Admission
from warpsmith.service.handlers import Call
from warpsmith.settings import Settings
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import optimization_service_pb2_grpc, run_pb2, trial_pb2

audit = logging.getLogger("warpsmith.audit")

DEFAULT_EXPORTER = "module"
PAGE_BYTES = 1 << 20
MOST_TRIALS = 256
"""Of a page of trials, and how large it may be; one trial is a page, whatever it takes."""
PROGRAMS_AT_ONCE = 16


class OptimizationServicer(optimization_service_pb2_grpc.OptimizationServiceServicer):
    """Starts, watches and exports runs."""

    def __init__(
        self,
        host: RunHost,
        devices: Devices | None = None,
        gate: DeviceGate | None = None,
        admission: Admission | None = None,
        signer: Signer | None = None,
    ) -> None:
        self._host, self._devices, self._gate, self.admission = host, devices, gate, admission
        self._signer = signer

    def CreateRun(self, request: messages.CreateRunRequest, context: object) -> messages.CreateRunResponse:
        """Starts a run and returns at once."""
        accept(request.task)
        caller = _caller(context)
        run = self._host.create(request.task, request.budget, request.search, request.fresh, caller)
        _note("CreateRun", run, caller)
        return messages.CreateRunResponse(run=run)

    def GetRun(self, request: messages.GetRunRequest, context: object) -> messages.GetRunResponse:
        """Gives one run."""
        return messages.GetRunResponse(run=self._host.run(request.run_id))

    def ListRuns(self, request: messages.ListRunsRequest, context: object) -> messages.ListRunsResponse:
        """Lists runs, newest first."""
        found, size = messages.ListRunsResponse(), 0
        for run in self._host.runs(request.limit, request.task_digest, request.before):
            shown = light(run) if request.light else run
            size += shown.ByteSize()
            if found.runs and size > PAGE_BYTES:
                break
            found.runs.append(shown)
        return found

    def ListTrials(self, request: messages.ListTrialsRequest, context: object) -> messages.ListTrialsResponse:
        """Lists the trials of a run in order, or a page of them."""
        found, size, limit = messages.ListTrialsResponse(), 0, min(request.limit, MOST_TRIALS) or None
        for trial in self._trials(request, limit):
            shown = without_bulk(trial, keep_sources=request.with_sources)
            size += shown.ByteSize()
            if limit and found.trials and size > PAGE_BYTES:
                break
            found.trials.append(shown)
        return found

    def _trials(self, request: messages.ListTrialsRequest, limit: int | None) -> Iterator[trial_pb2.Trial]:
        """All that a page may have; of trials with programs only a few are read at once, since few fill a page."""
        after, at_once = request.after, PROGRAMS_AT_ONCE if limit and request.with_sources else limit
        while trials := self._host.trials(request.run_id, after, at_once, with_programs=request.with_sources):
            yield from trials[:limit]
            limit, after = limit and limit - len(trials), trials[-1].number
            if limit is None or limit <= 0:
                return

    async def WatchRun(
        self, request: messages.WatchRunRequest, context: object
    ) -> AsyncIterator[messages.WatchRunResponse]:
        """Streams what happens in a run until it ends."""
        async for event in self._host.watch(request.run_id, request.after):
            yield messages.WatchRunResponse(event=event)

    def CancelRun(self, request: messages.CancelRunRequest, context: object) -> messages.CancelRunResponse:
        """Asks a run to stop."""
        return messages.CancelRunResponse(run=self._host.cancel(self._own(request.run_id, "CancelRun", context)))

    def ResumeRun(self, request: messages.ResumeRunRequest, context: object) -> messages.ResumeRunResponse:
        """Takes up a run again that was left, cancelled or failed."""
        return messages.ResumeRunResponse(run=self._host.resume(self._own(request.run_id, "ResumeRun", context)))

    def _own(self, run_id: str, method: str, context: object) -> str:
        """The identifier of a run that the caller may change; raises NotPermitted where it is another's."""
        run, caller = self._host.run(run_id), _caller(context)
        caller.require_own(run.user, f"run {run.id}")
        _note(method, run, caller)
        return run.id

    def ExportBest(self, request: messages.ExportBestRequest, context: object) -> messages.ExportBestResponse:
        """Writes the best kernel of a run, or of several runs of one module, as a file or a folder of files."""
        exporter: Exporter = plugins.load("exporter", request.flavour or DEFAULT_EXPORTER)
        runs = [self._host.run(run_id) for run_id in (request.run_id, *request.other_run_ids)]
        for run in runs:
            if not run.HasField("best") or not run.best.timing.faster:
                raise NotFound(f"run {run.id} found nothing faster, so there is nothing to export: {run.message}")
        match export_training.export_all(exporter, request.flavour or DEFAULT_EXPORTER, runs):
            case Exported(name, text):
                return messages.ExportBestResponse(file_name=export_files.own_name(name), text=text)
            case ExportedFolder(name, files):
                made = [messages.ExportedFile(path=path, text=text) for path, text in files.items()]
                return messages.ExportBestResponse(file_name=export_files.own_name(name), files=made)

    def DescribeQueue(self, request: messages.DescribeQueueRequest, context: object) -> messages.DescribeQueueResponse:
        """Says which runs have not ended, and what the devices do."""
        made = messages.DescribeQueueResponse(runs=self._host.under_way(), change_count=self._host.change_count)
        if self._gate is not None:
            use = self._gate.use()
            made.devices.extend(use.devices)
            made.device_count, made.timing_count = use.device_count, use.timing_count
            made.aside_count, made.waiting_count = use.aside_count, use.waiting_count
        return made

    def GetSigningKey(self, request: messages.GetSigningKeyRequest, context: object) -> messages.GetSigningKeyResponse:
        """Gives the public key."""
        if self._signer is None:
            raise NotFound(f"this orchestrator signs nothing: {seal.VARIABLE} names no key")
        return messages.GetSigningKeyResponse(public_key=self._signer.public())

    def leave(self) -> None:
        """Leaves runs under way to the next orchestrator, and ends who watches them; called before the drain."""
        self._host.leave()

    def close(self) -> None:
        """Closes the archive; called after the drain."""
        if self._devices is not None:
            self._devices.close()
        self._host.close()


def _caller(context: object) -> Caller:
    """Who calls; a command that reads its own directory is its user."""
    return context.caller if isinstance(context, Call) else UNASKED


def _note(method: str, run: run_pb2.Run, caller: Caller) -> None:
    """A line for each write: who did what to which run."""
    audit.info("%s run=%s user=%s project=%s right=%s", method, run.id, caller.name, caller.project, caller.right.word)


def make_servicer(settings: Settings) -> OptimizationServicer:
    """The servicer of a process: agents by the settings' addresses, archive in the runs directory.

    Raises:
        BadInput: an address is missing, or the archive cannot be written.
    """
    url = settings.database_url
    archive = Archive(url) if url else Archive.in_directory(settings.runs_directory)
    found = endpoints(settings.address("benchmark"))
    agents = agents_of(settings, found)
    gate = DeviceGate(agents.benchmarks)
    devices = Devices(settings, dict(zip(found, agents.benchmarks, strict=True)), gate.renew)

    def make_run(run: run_pb2.Run, search: Search, story: Story, fresh: bool) -> SearchRun:
        known = Memory(
            archive.known_moves,
            lambda task, device: archive.known_reference(task.digest, device.environment),
            archive.known_groups,
        )
        memory, past = NOTHING_KNOWN if fresh else known, tuple(story.trials) if story.attempt else None
        own = replace(agents, lease=Leases(archive.owner, run.id, story.epoch))
        return SearchRun(run, own, gate, search, story, memory=memory, past=past, seal=sign)

    signer = signer_of(settings.signing_key_file)
    sign = signer.seal if signer else lambda _: None
    archive.patience_seconds = settings.archive_patience_seconds
    if settings.spool_bytes:
        archive.spool = Spool(settings.spool_directory or settings.runs_directory / "spool", settings.spool_bytes)
    owner, at_once = Owner(archive, stays=settings.takes_up), 1 + most_ahead(os.cpu_count() or 1)
    admission, quotas = Admission(settings.limits), Quotas(archive, settings.quota_file)

    def may_begin(caller: Caller, run_count: int) -> None:
        admission.require_run(caller, run_count)
        quotas.require_room(caller.project)

    host = RunHost(archive, make_run, at_once, owner, may_begin)
    return OptimizationServicer(host, devices, gate, admission, signer)
