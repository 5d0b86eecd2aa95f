"""The flavour `hub`: a folder in the layout of Hugging Face's kernels, which their loader reads as it is.

The one idea: kernels are built at the first call, by NVRTC or g++, which the layout has a section for (`torch-noarch`):
one Python module serves every PyTorch and Python. It stands twice: as the source from which kernel-builder builds, in
`torch-ext/`, and built, in `build/torch-cuda/` or `build/torch-cpu/`. The operator is in the namespace that the build
names, so that several versions are one process's. This writes texts and runs nothing.

It writes no `layers`, whose forward is put into any module: a kernel is verified for a module as it was constructed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from string import Template

from orchestrator.exports import export_module, export_operator, export_package, export_training
from orchestrator.exports.export import ExportedFolder
from warpsmith.v1 import run_pb2

_BUILD = Template("""[general]
name = "$name"
version = 1
edition = 5
# Of the module and its kernels together; nobody but you can say which: https://hf.co/docs/hub/repositories-licenses
license = "$license"
backends = ["$backend"]

# Where `kernel-builder build-and-upload` puts it:
# [general.hub]
# repo-id = "you/$name"

[torch-noarch]
$capabilities""")

_FLAKE = """{
  description = "A kernel that Warpsmith made, built for the Hugging Face Hub";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    inputs:
    inputs.kernel-builder.lib.genKernelFlakeOutputs {
      self = inputs.self;
      path = ./.;
    };
}
"""

_INIT = '''"""A module with a verified kernel; importing it registers the operator."""

from .kernel import ModelNew

__all__ = ["ModelNew"]
'''

_OPS = Template('''"""The namespace of this build's operators."""

import torch

ops = torch.ops.$id


def add_op_namespace_prefix(op_name):
    """The full name of an operator of this build."""
    return f"$id::{op_name}"
''')

_FLAT = Template('''"""The kernel, for loaders that look for it in a folder of its name: it lies one folder above."""

import importlib.util
import pathlib
import sys

_ABOVE = "$id"

if _ABOVE not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_ABOVE, pathlib.Path(__file__).parent.parent / "__init__.py")
    sys.modules[_ABOVE] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_ABOVE])

ModelNew = sys.modules[_ABOVE].ModelNew

__all__ = ["ModelNew"]
''')

_LOADED = """import pathlib

import kernels
import pytest
import torch

package = kernels.get_local_kernel(pathlib.Path(__file__).parent.parent)
kernel = package.kernel"""
"""How tests come to the kernel: as its users do."""

_CARD = Template("""---
library_name: kernels
tags:
- kernels
license: $license
---

# $name

A PyTorch module with $count that Warpsmith found and verified: same constructor, same `state_dict`.

```python
from kernels import get_kernel

model = get_kernel("you/$name", version=1, trust_remote_code=True).ModelNew()  # the arguments of your Model
```

`trust_remote_code` is what loaders ask for publishers that the Hub does not list as trusted.

$numbers

## What is promised

Calls like $verified run $kernels: these shapes, strides, types and device, the module as it was constructed,
$gradient, no autocast. Any other call runs the original forward, which is in the module. Under `torch.compile` (also
`fullgraph=True`) a verified call is $operators; there, results are copies where the
original would give views of its inputs. $derivative

It has no `layers` for `kernelize`: a kernel is verified for this module as it is constructed, not for a forward that is
put into another.

## What it needs

$needs

## Build and check

`build/$variant` is loadable as it is: `kernels.get_local_kernel(pathlib.Path("."))`. `kernel-builder build-and-upload`
makes it anew from `torch-ext/` and uploads it to the `repo-id` of `build.toml`. `python -m pytest tests` checks it
here, and `warpsmith verify $records` judges the claim again.
""")

_NEEDS = {
    "cuda": "A GPU of compute capability $capability, and PyTorch 2.11 or later for CUDA 13, which brings all else: "
    "cuda-bindings and NVRTC. The kernel is compiled at the first call, in well under a second.",
    "none": "PyTorch alone: the program makes calls of its own, and nothing is compiled.",
    "cpu": "g++ or clang++ at the first call, where the kernel is compiled for the processor that it is on and kept in "
    "the user's cache folder.",
}


_OPERATORS = {
    False: "one operator in this build's namespace",
    True: "two operators in this build's namespace, of the forward and of the backward",
}
"""What a compiled call is, of a forward and of a training step."""


class HubExporter(export_operator.FolderExporter):
    """A folder for the Kernel Hub."""

    def __init__(self) -> None:
        super().__init__(_folder)


def _folder(runs: Sequence[run_pb2.Run], records: Sequence[str]) -> ExportedFolder:
    for run in runs:
        export_operator.require_pure(run.best.candidate.program)
    words = _words(runs)
    package = words["package"]
    sources = {"__init__.py": _INIT, "kernel.py": export_training.module_of(runs, _way(runs))}
    built = {**sources, "_ops.py": _OPS.substitute(words), f"{package}/__init__.py": _FLAT.substitute(words)}
    built["metadata.json"] = _metadata(words, built)
    files = {
        "build.toml": _BUILD.substitute(words),
        "flake.nix": _FLAKE,
        "CARD.md": _CARD.substitute(words),
        **dict(zip(export_package.record_names(runs), records, strict=True)),
        **{f"torch-ext/{package}/{path}": text for path, text in sources.items()},
        **{f"build/{words['variant']}/{path}": text for path, text in built.items()},
        "tests/__init__.py": '"""Tests of the kernel."""\n',
        f"tests/test_{package}.py": export_package.tests(runs, words),
    }
    return ExportedFolder(package, files)


def _way(runs: Sequence[run_pb2.Run]) -> export_operator.Way:
    """Kernels' texts are in the module: the build copies Python files alone."""
    shared = export_module.shared_texts(runs) if len(runs) > 1 else {}
    return export_operator.Way(
        name='add_op_namespace_prefix("call")',
        call="ops.call.default",
        texts=lambda run, _: export_module.texts(run, shared),
        code=lambda *_: "",
        imports=["from ._ops import add_op_namespace_prefix, ops"],
        shared=export_module.shared_part(shared) if shared else "",
    )


def _words(runs: Sequence[run_pb2.Run]) -> dict[str, str]:
    """What the texts are filled with."""
    words = export_package.words(runs)
    backend, has_kernels = words["device"], any(run.best.candidate.program.sources for run in runs)
    own = f"_{words['package']}_{backend}_{words['operator'].rpartition('_')[2]}"
    capability = _capability(words["architecture"]) if backend == "cuda" else ""
    return {
        **words,
        "name": words["distribution"],
        "id": own,
        "operator": f"{own}.call",
        "operators": _OPERATORS[export_training.is_step(runs[0])],
        "backend": backend,
        "variant": f"torch-{backend}",
        "license": "unknown",
        "capability": capability,
        "capabilities": f'cuda_capabilities = ["{capability}"]\n' if capability else "",
        "count": "a kernel" if len(runs) == 1 else f"kernels for {len(runs)} kinds of inputs",
        "numbers": _plain(words["numbers"]),
        "needs": Template(_NEEDS[backend if has_kernels else "none"]).substitute(capability=capability),
        "records": export_package.record_names(runs)[0],
        "imports": _LOADED,
    }


def _capability(architecture: str) -> str:
    """A compute capability as the builder writes it: 9.0a for sm_90a."""
    (major, minor, suffix) = re.findall(r"(\d+)(\d)([a-z]?)$", architecture)[0]
    return f"{major}.{minor}{suffix}"


def _plain(text: str) -> str:
    """Text that kernel-builder, which fills the card in as a template, takes for text."""
    return re.sub(r"\{(?=[{%#])", "{ ", text)


def _metadata(words: Mapping[str, str], built: Mapping[str, str]) -> str:
    """What a loader reads first; its digest is over all other files."""
    hashes = {path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in built.items()}
    archs = {"archs": [words["capability"]]} if words["capability"] else {}
    content = {
        "name": words["name"],
        "id": words["id"],
        "version": 1,
        "license": words["license"],
        "python-depends": [],
        "backend": {"type": words["backend"], **archs},
        "digest": {"algorithm": "sha256", "files": dict(sorted(hashes.items()))},
    }
    return json.dumps(content, indent=2) + "\n"
