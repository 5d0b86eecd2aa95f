"""What PyTorch makes of the user's module: the reference and the baselines."""
