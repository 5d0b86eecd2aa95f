"""Kernels of one fused group that a language model wrote: asked for, read, composed with the rest of a plan."""
