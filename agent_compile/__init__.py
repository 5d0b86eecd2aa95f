"""The compile agent: turns the sources of a program into a binary, in a jail, with or without a GPU."""
