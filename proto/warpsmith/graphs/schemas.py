"""What a call does beside computing: which arguments it writes, and whether it draws. Schemas alone do not say."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._ops import OpOverload

from warpsmith.graphs import aten

# Operations tagged random that are not when this argument has this value.
_STILL_WHEN: Final = (("train", False), ("training", False), ("dropout_p", 0.0), ("dropout", 0.0))
# Those that give their input, and draw nothing, where this is their probability; the fused one draws all the same.
_DROPOUTS: Final = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
_STILL_AT: Final = ("p", 0.0)


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
