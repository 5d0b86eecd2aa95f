"""Processes around a run: services found and started, runs hosted, devices shared, a model's server."""
