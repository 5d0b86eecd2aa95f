"""How a reference is made and called, without its code: what a solution's process is told of it, and makes of that.

The one idea: literals and shapes only, so that nothing of the reference can be had from them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpu_bench.judging.loaded import Args, LoadedTask
from gpu_bench.values.keys import Key
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


def arguments_of(signature: judging_pb2.Signature, sources: Mapping[Key, torch.Tensor]) -> tuple[Any, ...]:
    """The arguments of forward, on the memory of the sources; a tensor that is passed twice is one tensor."""
    tensors = iter(sources[Key.input(first)] for first in signature.same_as)
    flat = [ast.literal_eval(text) if text else next(tensors) for text in signature.leaves]
    args: tuple[Any, ...] = pytree.tree_unflatten(flat, pytree.treespec_loads(signature.tree))
    return args


def _literal(value: object) -> str:
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{text[:60]} is no literal") from error
    return text
