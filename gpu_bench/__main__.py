"""Runs the benchmarking service: `python -m gpu_bench`."""

from gpu_bench.servicer import BenchmarkServicer
from warpsmith.service import serve
from warpsmith.v1.benchmark_service_pb2_grpc import add_BenchmarkServiceServicer_to_server

if __name__ == "__main__":
    serve("benchmark", add_BenchmarkServiceServicer_to_server, lambda _: BenchmarkServicer())
