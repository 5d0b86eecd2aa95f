"""Reductions along a strided axis on CUDA."""
