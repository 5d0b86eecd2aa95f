"""CUDA programs run on a CPU, under sanitizers."""
