"""What a call does beside computing: which arguments it writes, and whether it draws. Schemas alone do not say."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._ops import OpOverload, OpOverloadPacket

from warpsmith.graphs import aten

# Operations tagged random that are not when this argument has this value.
_STILL_WHEN: Final = (("train", False), ("training", False), ("dropout_p", 0.0), ("dropout", 0.0))
# Those that give their input, and draw nothing, where this is their probability; the fused one draws all the same.
_DROPOUTS: Final = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
_STILL_AT: Final = ("p", 0.0)
_FOREACH: Final = "_foreach_"
# What the same is called of one tensor, where that is another name.
_OF_ONE: Final = {"maximum": "clamp_min", "minimum": "clamp_max", "norm": "linalg_vector_norm"}


def written(overload: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a call writes in place."""
    given, schema = by_name(overload, args, kwargs), overload._schema
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    flag, hidden = aten.HIDDEN_WRITES.get(schema.name.removeprefix("aten::"), ("", ()))
    if flag and given.get(flag):
        names += hidden
    return [given.get(name) for name in names]


def by_name(overload: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, defaults among them."""
    arguments = overload._schema.arguments
    given: dict[str, Any] = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= {a.name: value for a, value in zip(arguments, args, strict=False)}
    given.update(kwargs)
    return given


def of_each(overload: OpOverload, args: Any, kwargs: Any) -> list[tuple[OpOverloadPacket, list[Any], dict[str, Any]]]:
    """A call on lists of tensors (`torch._foreach_*`) as PyTorch's slow path makes it: a call on each; else none."""
    name = overload._schema.name.removeprefix("aten::")
    if not name.startswith(_FOREACH):
        return []
    base = name.removeprefix(_FOREACH)
    stem = base.removesuffix("_")
    packet = getattr(torch.ops.aten, _OF_ONE.get(stem, stem) + base.removeprefix(stem), None)
    values = by_name(overload, args, kwargs)
    given = {argument.name: values[argument.name] for argument in overload._schema.arguments}
    lists = {a.name for a in overload._schema.arguments if isinstance(a.type, torch.ListType)}
    count = max((len(given[name]) for name in lists), default=0)
    if packet is None or any(len(given[name]) != count for name in lists):
        return []
    named = {a.name: a.name for a in overload._schema.arguments if a.kwarg_only}
    if stem.startswith("addc"):  # whose factor comes last in a list's call
        named |= {"scalars": "value", "value": "value"}
    found = []
    for number in range(count):
        each = {name: value[number] if name in lists else value for name, value in given.items()}
        by_name_alone = {named[name]: value for name, value in each.items() if name in named and value is not None}
        found.append((packet, [value for name, value in each.items() if name not in named], by_name_alone))
    return found


def is_random(overload: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    given = by_name(overload, args, kwargs)
    name = overload._schema.name.removeprefix("aten::").removesuffix("_")
    still = (*_STILL_WHEN, _STILL_AT) if name in _DROPOUTS else _STILL_WHEN
    return not any(name in given and given[name] == value for name, value in still)


def with_cudnn(overload: OpOverload, args: Any) -> Any:
    """A CPU-only torch records cudnn_enabled=False; eager on a GPU would say True, and the CPU does not
    look."""
    names = [argument.name for argument in overload._schema.arguments]
    if "cudnn_enabled" not in names:
        return args
    position = names.index("cudnn_enabled")
    return tuple(True if index == position else value for index, value in enumerate(args))
