"""Runs the synthesis service: `python -m agent_synthesis`."""

from agent_synthesis.servicer import make_servicer
from warpsmith.service import serve
from warpsmith.v1.synthesis_service_pb2_grpc import add_SynthesisServiceServicer_to_server

if __name__ == "__main__":
    serve("synthesis", add_SynthesisServiceServicer_to_server, make_servicer)
