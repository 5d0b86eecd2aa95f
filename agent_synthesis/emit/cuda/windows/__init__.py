"""Sliding windows on CUDA."""
