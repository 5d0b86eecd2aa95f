"""Serves the orchestrator."""

from orchestrator.servicer import make_servicer
from warpsmith.service import serve
from warpsmith.v1.optimization_service_pb2_grpc import add_OptimizationServiceServicer_to_server

serve("orchestrator", add_OptimizationServiceServicer_to_server, make_servicer)
