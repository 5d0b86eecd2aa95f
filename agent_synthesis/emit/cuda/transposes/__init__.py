"""Nests on CUDA whose loads and stores run along different axes."""
