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
from gpu_bench.running.straight_line import row
from gpu_bench.solutions import structure
from gpu_bench.solutions.structure_text import Node
from gpu_bench.values.keys import Key
from warpsmith.errors import BadInput
from warpsmith.graphs.task_module import seed_generators
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


def described_call(loaded: LoadedTask, args: Args, seed: int) -> Node:
    """The structure of what the reference returns, its generators seeded; all that it changes is put back.

    Raises:
        BadInput: it returns tensors where PyTorch's pytree finds none, so that nobody would compare them.
    """
    before = {key: row(tensor).clone() for key, tensor in loaded.sources(args).by_key().items()}
    seed_generators(seed)
    with torch.no_grad():
        returned = loaded.module(*args)
    loaded.keep_places()
    sources = loaded.sources(args).by_key()
    described, tensors = structure.describe(returned, sources)
    for key, tensor in sources.items():
        if tensor.numel():
            row(tensor).copy_(before[key])
    if len(tensors) != len(loaded.output_leaves(returned)):
        raise BadInput(
            "forward returns tensors in a container that PyTorch does not open (torch.utils._pytree): return a tuple, "
            "a list, a dict or a registered class"
        )
    return described


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
