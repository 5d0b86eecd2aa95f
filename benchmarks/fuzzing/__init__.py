"""Random modules, and spoiled plans, programs and replies."""
