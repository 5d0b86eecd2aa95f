"""Results in the formats of others: KernelBench's checkout, run folders and times; CSV; OpenMetrics."""
