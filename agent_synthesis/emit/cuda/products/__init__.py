"""Matrix products on CUDA: recognised, put on tensor cores, and what their results go into."""
