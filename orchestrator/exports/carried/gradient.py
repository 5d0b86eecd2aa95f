"""Lets a program's result be differentiated: the backward runs the original forward again, and differentiates that."""

import torch


def _ws_differentiable(module, sources, program, original):
    """What `program()` returns, as a function of the tensors `sources`; `original()` computes the same."""
    structure: list[torch.utils._pytree.TreeSpec] = []
    distinct = {id(source): source for source in sources}.values()  # tied parameters are one
    result = _WsGradient.apply(module, structure, program, original, *distinct)
    return torch.utils._pytree.tree_unflatten(result, structure[0]) if structure else result


class _WsGradient(torch.autograd.Function):
    """Forward by the program, backward by the original."""

    @staticmethod
    def forward(ctx, module, structure, program, original, *sources):
        ctx.module, ctx.original = module, original
        ctx.save_for_backward(*sources)
        result = program()
        if isinstance(result, torch.Tensor):
            return result
        leaves, shape = torch.utils._pytree.tree_flatten(result)
        structure.append(shape)
        return tuple(leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        sources = ctx.saved_tensors
        state = [(buffer, buffer.clone()) for buffer in ctx.module.buffers()]
        with torch.enable_grad():
            outputs = torch.utils._pytree.tree_leaves(ctx.original())
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        wanted = [source for source in sources if source.requires_grad]
        found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        with torch.no_grad():  # running statistics were updated when the forward was called
            for buffer, value in state:
                buffer.copy_(value)
        return None, None, None, None, *(next(found) if source.requires_grad else None for source in sources)
