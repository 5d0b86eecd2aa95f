"""What stands in for calls of PyTorch where it has none: on another device, or in float64."""
