"""How a reference is made and called, without its code: what a solution's process is told of it.

The one idea: literals and shapes only, so that nothing of the reference can be had from them.
"""

from __future__ import annotations

import ast

import torch
from torch.utils import _pytree as pytree

from gpu_bench.loaded import Args, LoadedTask
from warpsmith.v1 import judging_pb2


def signature_of(loaded: LoadedTask, args: Args) -> judging_pb2.Signature:
    """How the module is made and called; empty where that cannot be said in literals, which a solution needs."""
    leaves, tree = pytree.tree_flatten(args)
    try:
        texts = ["" if isinstance(leaf, torch.Tensor) else _literal(leaf) for leaf in leaves]
        constructor = _literal(loaded.user.init_inputs())
        return judging_pb2.Signature(tree=pytree.treespec_dumps(tree), leaves=texts, constructor=constructor)
    except (NotImplementedError, ValueError):
        return judging_pb2.Signature()


def _literal(value: object) -> str:
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{text[:60]} is no literal") from error
    return text
