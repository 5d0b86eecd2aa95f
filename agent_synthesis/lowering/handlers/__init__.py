"""Handlers of ATen operations: what each element of a result is, one family a module. Importing them registers them."""
