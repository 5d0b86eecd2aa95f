"""Translates between the compile service's messages and `compiler.Compiler`."""

from __future__ import annotations

from agent_compile.cache import Cache, default_directory
from agent_compile.compiler import Compiler
from agent_compile.explainer import Explainer
from agent_compile.toolchains.toolchain import Rejected
from warpsmith import plugins
from warpsmith.settings import Settings
from warpsmith.v1 import artifact_pb2, compile_service_pb2, compile_service_pb2_grpc, verdict_pb2

TOOLCHAINS = ("gxx", "nvrtc", "nvcc")
"""Built-in plugins in order of preference, after chosen ones; of one target the first that can compile is used."""


class CompileServicer(compile_service_pb2_grpc.CompileServiceServicer):
    """Serves CompileCandidate."""

    def __init__(self, compiler: Compiler | None = None, explainer: Explainer | None = None) -> None:
        self._compiler = compiler or _of_toolchains()
        self._explainer = explainer

    @staticmethod
    def of(settings: Settings) -> CompileServicer:
        """With the built-in and chosen toolchains, and a language model where the settings allow one.

        Raises:
            BadInput: the settings of the model are wrong. UnknownPlugin: no toolchain of a chosen name is installed.
        """
        return CompileServicer(explainer=Explainer.of(settings))

    def CompileCandidate(
        self, request: compile_service_pb2.CompileCandidateRequest, context: object
    ) -> compile_service_pb2.CompileCandidateResponse:
        """Compiles the program of the request."""
        del context
        answer = self._compiler.compile(request.program)
        match answer.outcome:
            case Rejected(kind, text):
                rejection = compile_service_pb2.CompileRejection(kind=kind, diagnostics=text)
                if self._explainer and kind == verdict_pb2.FAILURE_KIND_COMPILE_ERROR:
                    rejection.explanation = self._explainer.explain(request.program, text)
                return compile_service_pb2.CompileCandidateResponse(rejection=rejection, cached=answer.cached)
            case artifact_pb2.Artifact() as artifact:
                return compile_service_pb2.CompileCandidateResponse(artifact=artifact, cached=answer.cached)

    def close(self) -> None:
        """Ends the compilers."""
        self._compiler.close()


def _of_toolchains() -> Compiler:
    wanted = dict.fromkeys((*plugins.chosen("toolchain"), *TOOLCHAINS))
    return Compiler([plugins.load("toolchain", name) for name in wanted], Cache(default_directory()))
