"""Captured graphs: made from a module in a jail, indexed, their calls taken apart."""
