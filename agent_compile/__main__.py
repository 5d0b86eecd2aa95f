"""Runs the compile service: `python -m agent_compile`."""

from agent_compile.servicer import CompileServicer
from warpsmith.service import serve
from warpsmith.v1.compile_service_pb2_grpc import add_CompileServiceServicer_to_server

if __name__ == "__main__":
    serve("compile", add_CompileServiceServicer_to_server, CompileServicer.of)
