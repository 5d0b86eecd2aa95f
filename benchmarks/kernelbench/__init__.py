"""KernelBench's levels, judged, timed and held to its own check."""
