"""The benchmarking service: the only place that loads candidate code and holds a device."""
