"""Runs the reasoning service: `python -m agent_reasoning`."""

from agent_reasoning.servicer import make_servicer
from warpsmith.service import serve
from warpsmith.v1.reasoning_service_pb2_grpc import add_ReasoningServiceServicer_to_server

if __name__ == "__main__":
    serve("reasoning", add_ReasoningServiceServicer_to_server, make_servicer)
