"""Somebody else's `ModelNew`, judged and timed from outside its process."""
