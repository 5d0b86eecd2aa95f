"""Convolutions and the memory formats that suit them.

The one idea: a library's convolutions may be faster where the channels of a pixel lie side by side, which a user has by
converting the weights once and the inputs in each call. Times nothing.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of a tensor's dimensions."""


def can_matter(module: nn.Module) -> bool:
    """Whether the module has a weight with spatial dimensions that are not all 1."""
    return any(each.dim() in _FORMATS and math.prod(each.shape[2:]) > 1 for each in module.parameters())


def convolves(module: nn.Module) -> bool:
    """Whether the module has convolutions, of one dimension and of single pixels too."""
    return can_matter(module) or any(isinstance(each, _ConvNd) for each in module.modules())


def converted_copy(module: nn.Module) -> nn.Module:
    """A copy of the module with channels-last weights."""
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        if parameter.dim() in _FORMATS:
            parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.dim()])
    return module


def converted(args: Any) -> Any:
    """A tree of arguments with channels-last tensors."""
    return pytree.tree_map(_converted, args)


def _converted(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim() in _FORMATS:
        return leaf.contiguous(memory_format=_FORMATS[leaf.dim()])
    return leaf
