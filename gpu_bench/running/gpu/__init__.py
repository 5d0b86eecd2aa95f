"""Programs on a GPU: loaded through the driver, launched one by one or as a graph; what they need beside kernels."""
