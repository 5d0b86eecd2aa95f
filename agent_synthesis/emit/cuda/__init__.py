"""Schedules of CUDA: what all of them share, and those of one file; the others have a room each."""
