"""Serves the orchestrator."""

import os

from orchestrator.servicer import make_servicer
from warpsmith.service import serve
from warpsmith.v1.optimization_service_pb2_grpc import add_OptimizationServiceServicer_to_server

serve("orchestrator", add_OptimizationServiceServicer_to_server, make_servicer)
os._exit(0)  # all is archived: threads that still wait for an agent's answer, for minutes perhaps, are not waited for
