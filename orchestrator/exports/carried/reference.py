"""Imports the sources that an export carries as modules of a package of their own."""

import builtins
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import sys


class _WsEmbedded(importlib.abc.Loader):
    """Finds and loads `sources`, texts by path, below `package`, a name that nothing else has.

    An import statement in them finds the others first, also one that runs later, within a function; so does
    `import_module` with a relative name, but not with an absolute one. Modules of the same names that the process has,
    before or after, are neither read nor replaced.
    """

    def __init__(self, package, sources):
        self._package = package
        self._sources = {f"{package}/{path}": text for path, text in sources.items()}
        self._names = {path.split("/")[0].removesuffix(".py") for path in sources}

    def find_spec(self, name, *_):
        """The spec of a source, or of a folder that holds some."""
        place = name.replace(".", "/")
        for file in (f"{place}/__init__.py", f"{place}.py"):
            if file in self._sources:
                spec = importlib.machinery.ModuleSpec(name, self, origin=file, is_package=file.endswith("/__init__.py"))
                spec.has_location = True
                return spec
        if any(file.startswith(f"{place}/") for file in self._sources):
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return None

    def exec_module(self, module):
        """Runs a source."""
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._import}
        exec(compile(self._sources[module.__file__], module.__file__, "exec"), vars(module))

    def get_source(self, name):
        """A source as text, for `inspect` and tracebacks."""
        return self._sources[self.find_spec(name).origin]

    def _import(self, name, globals=None, locals=None, fromlist=(), level=0):
        top = name.partition(".")[0]
        if level or top not in self._names:
            return builtins.__import__(name, globals, locals, fromlist, level)
        found = builtins.__import__(f"{self._package}.{name}", globals, locals, fromlist)
        return found if fromlist else sys.modules[f"{self._package}.{top}"]


def _ws_original(package, sources, entry, class_name):
    """The original class, and what it was constructed from when the kernel was verified."""
    if package not in sys.modules:
        # The entry has a second name, as where it was verified: its own may hold dots, or be imported by the others.
        sys.meta_path.insert(0, _WsEmbedded(package, {**sources, "__entry__.py": sources[entry]}))
    original = importlib.import_module(f"{package}.__entry__")
    return getattr(original, class_name), getattr(original, "get_init_inputs", tuple)()


@functools.cache
def _ws_class(reference, name):
    """A class that the original forward returns, by its name in the file: a dataclass or a named tuple."""
    kind = reference.forward.__globals__[name]
    is_named = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    if not is_named and not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise TypeError(f"{name} is no dataclass or named tuple")
    return kind
