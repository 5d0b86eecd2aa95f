"""Reductions over parts of rows on CUDA."""
