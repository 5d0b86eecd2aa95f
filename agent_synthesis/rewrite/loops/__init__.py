"""Recurrent networks that a module writes as a loop, found in the graph of all its steps and called as one."""
