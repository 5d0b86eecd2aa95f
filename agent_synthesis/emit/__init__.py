"""Schedules: the ways to run a nest on a target, one room a target; `registry` lists them.

What lies here all targets share: the form of nests, expressions and their spelling.
"""
