"""Runs the correctness service: `python -m agent_correctness`."""

from agent_correctness.servicer import CorrectnessServicer
from warpsmith.service import serve
from warpsmith.v1.correctness_service_pb2_grpc import add_CorrectnessServiceServicer_to_server

if __name__ == "__main__":
    serve("correctness", add_CorrectnessServiceServicer_to_server, CorrectnessServicer.of)
