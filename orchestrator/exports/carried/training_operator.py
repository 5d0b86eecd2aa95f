"""A training step as two operators of PyTorch's: a forward, and the backward that autograd finds for it."""

import torch

from orchestrator.exports.carried.guard import _ws_fits
from orchestrator.exports.carried.operator import _ws_seen, _WsOperator
from orchestrator.exports.carried.training import _ws_given


class _WsStepOperator(_WsOperator):
    """The first half: gives the distinct outputs of `training` and then what is kept. `backward` is the second's.

    Outputs have first derivatives, what is kept has none.
    """

    def __init__(self, name, schema, guard, *, made, training, backward):
        self._training, self._second = training, backward.overload()
        super().__init__(name, schema, guard, made=made, run=training.forward, original=None)

    def _register(self, schema):
        space, _, name = self._name.partition("::")
        if not hasattr(getattr(torch.ops, space), name):  # a file may be imported under several names
            super()._register(schema)

    def _keep(self, ctx, inputs, output):
        training = self._training
        ctx.set_materialize_grads(False)
        constant = [place for place in range(len(output)) if place >= training.outputs or place in training.constant]
        ctx.mark_non_differentiable(*[output[place] for place in constant])
        ctx.save_for_backward(*training.kept(inputs, output))

    def _backward(self, ctx, gradients):
        run = self._second
        return self._training.derivative(ctx.saved_tensors, gradients, _ws_given, lambda tensors: run(*tensors))

    def _originals(self, tensors):
        raise RuntimeError(
            f"{self._name} was verified for another GPU than {tensors[0].device}: call ModelNew, which runs the "
            "original there"
        )


class _WsBackwardOperator(_WsStepOperator):
    """The second half: reads what the first has kept and the outputs' gradients, of the kinds `given`."""

    def __init__(self, name, schema, guard, *, given, made, training):
        _WsOperator.__init__(self, name, "", guard, made=made, run=training.backward, original=None)
        self._given = given
        self._register(schema)

    def _keep(self, ctx, inputs, output):
        """Nothing: there is no second derivative."""

    def _backward(self, *_):
        raise RuntimeError(
            f"{self._name}: trying to differentiate twice what has a kernel for its first derivatives alone. Call the "
            "original module for others"
        )


def _ws_seen_step(training, guard, module, args, kwargs):
    """As `_ws_seen`, where a compiler looks at a call of a training step."""
    tensors = _ws_seen(guard, module, args, kwargs)
    if tensors is None or not training.serves(tensors):
        return None
    is_here = _ws_fits(tensors[0].device.type, tensors[0].device.index, guard._capability, guard._units)
    return tensors if is_here else None
