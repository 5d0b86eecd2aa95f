"""Row reductions on CUDA: one schedule, and a writer for each of its strategies."""
