"""Generates the gRPC stubs from the contract: at install (as a build hook), or by `python proto/generate.py`.

Message stubs come for every noun, service stubs only for `*_service.proto`. Nothing generated is committed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent


def generate() -> None:
    """Writes `warpsmith/v1/*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` beside the protos.

    Raises:
        SystemExit: protoc failed; its own message has been printed.
    """
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    nouns = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("warpsmith/v1/*.proto"))
    services = [name for name in nouns if name.endswith("_service.proto")]
    common = ["protoc", f"-I{ROOT}", f"-I{well_known}"]
    for options, files in (
        ([f"--python_out={ROOT}", f"--mypy_out={ROOT}"], nouns),
        ([f"--grpc_python_out={ROOT}", f"--mypy_grpc_out={ROOT}"], services),
    ):
        if protoc.main([*common, *options, *files]) != 0:
            raise SystemExit("generating stubs failed: see protoc's message above")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, outside a build
    pass
else:

    class GenerateStubs(BuildHookInterface):  # type: ignore[type-arg,misc]
        """Build hook: every wheel and every editable install has fresh stubs."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Generates before files are collected."""
            del version
            generate()
            build_data["artifacts"].extend(["proto/warpsmith/v1/*_pb2*.py", "proto/warpsmith/v1/*.pyi"])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # protoc's plugins lie beside the interpreter, which need not be on the path.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    generate()
