"""Scans on CUDA: along rows and down columns."""
