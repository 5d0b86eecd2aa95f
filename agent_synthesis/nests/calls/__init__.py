"""Calls that no loops over independent points describe: each is said in numbers, and has schedules of its own."""
