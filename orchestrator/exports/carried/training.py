"""A module that trains: the forward by one program, and the backward by another when gradients are asked for."""

import torch

from orchestrator.exports.carried.guard import _ws_aligned, _ws_laid_out


class _WsTraining:
    """A verified training step, as an autograd function makes it of its two halves.

    `forward(tensors)` gives the outputs, then what is kept; `backward(tensors)` gives the gradients. Tensors are the
    inputs and the members that the step reads; `of_forward` and `of_backward` are the places of those that a half
    reads, the latter followed by what is kept, and by the gradients of the outputs at `given`, each brought into its
    (shape, strides, dtype). `shared` are places of outputs that the backward reads. `found`: for each of the tensors
    the place of its gradient, or None.
    """

    def __init__(self, forward, backward, *, of_forward, of_backward, outputs, shared, given, found):
        self.forward, self.backward = forward, backward
        self.of_forward, self.of_backward = of_forward, of_backward
        self.outputs, self.shared, self.given, self.found = outputs, shared, given, found

    def serves(self, tensors):
        """Whether every gradient that may be asked for is one of the step's."""
        return not torch.is_grad_enabled() or not any(
            tensor.requires_grad and place is None for tensor, place in zip(tensors, self.found, strict=True)
        )

    def __call__(self, tensors):
        """The outputs, which can be differentiated."""
        return _WsStep.apply(self, *tensors)


class _WsStep(torch.autograd.Function):
    """One call of a step."""

    @staticmethod
    def forward(ctx, step, *tensors):
        made = step.forward([tensors[place] for place in step.of_forward])
        outputs = made[: step.outputs]
        ctx.step, ctx.count = step, len(tensors)
        ctx.save_for_backward(*tensors, *(outputs[place] for place in step.shared), *made[step.outputs :])
        differentiated = {place for place, _ in step.given}
        ctx.mark_non_differentiable(*(each for place, each in enumerate(outputs) if place not in differentiated))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        step, saved = ctx.step, ctx.saved_tensors
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        given = [_ws_given(gradients[place], *kind) for place, kind in step.given]
        inputs = [tensors[place] for place in step.of_backward[0]]
        found = step.backward([*inputs, *kept, *given, *(tensors[place] for place in step.of_backward[1])])
        return None, *(None if place is None else found[place] for place in step.found)


def _ws_given(gradient, shape, strides, dtype):
    """A gradient as the backward was verified with: one of a sum comes expanded, one of a view in another layout."""
    return _ws_aligned(_ws_laid_out(gradient.to(dtype).reshape(shape), strides), 16)
