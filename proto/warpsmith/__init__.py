"""Warpsmith's contract and the kit to speak it: the one folder that a plugin author needs."""
