"""Handlers of ATen operations: what each element of a result is, one family a module.

Importing one registers its operations, and importing this folder imports all that lie in it.
"""

from importlib import import_module
from pkgutil import iter_modules

from agent_synthesis.nests.symbolic import HANDLERS

__all__ = ("HANDLERS",)

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
