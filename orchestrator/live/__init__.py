"""Modules that live in the caller's process: `warpsmith.optimize(module, (x,))` from Python.

Data flows `calls` (one call of the module as a graph of flat tensors) → `written` (that graph as a file in
KernelBench's format, which any orchestrator can take) → `optimize` (a run of it, or an earlier one's result) →
`grafted` (the module with the exported kernel as its forward). Torch is imported here: in the caller's process, and in
no service's. `compiler` does the same for the graphs of `torch.compile`.
"""
