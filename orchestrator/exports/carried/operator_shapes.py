"""One operator of PyTorch's for the kernels of several shapes: the tensors say which."""

from orchestrator.exports.carried.operator import _ws_is_kind, _ws_register, _ws_seen, _ws_told


class _WsOperators:
    """`torch.ops.<name>`, by its `schema`, for tensors of the kinds of any of the `kernels`, each a `_WsOperator`."""

    def __init__(self, name, schema, *kernels):
        self._name, self._kernels = name, kernels
        _ws_register(name, schema, kernels[0]._guard._device, self)

    def _answer(self, *tensors):
        return self._of(tensors)._answer(*tensors)

    def _fake(self, *tensors):
        return self._of(tensors)._fake(*tensors)

    def _keep(self, ctx, inputs, output):
        self._of(inputs)._keep(ctx, inputs, output)

    def _backward(self, ctx, gradients):
        return self._of(ctx.saved_tensors)._backward(ctx, gradients)

    def _one_by_one(self, info, dims, *tensors):
        pairs = [(tuple(tensor.shape), dim) for tensor, dim in zip(tensors, dims, strict=True)]
        shapes = [shape if dim is None else (*shape[:dim], *shape[dim + 1 :]) for shape, dim in pairs]
        for kernel in self._kernels:  # a row is laid out as its kernel wants it
            kinds = zip(shapes, tensors, kernel._given, strict=True)
            if all(shape == kind[0] and tensor.dtype is kind[2] for shape, tensor, kind in kinds):
                return kernel._one_by_one(info, dims, *tensors)
        raise self._refusal(tensors)

    def _of(self, tensors):
        for kernel in self._kernels:
            device = kernel._guard._device
            pairs = zip(tensors, kernel._given, strict=True)
            if all(_ws_is_kind(t, kind, device) and t.device == tensors[0].device for t, kind in pairs):
                return kernel
        raise self._refusal(tensors)

    def _refusal(self, tensors):
        known = "; ".join(str(kernel._given) for kernel in self._kernels)
        return RuntimeError(
            f"{self._name}: the tensors are {[*map(_ws_told, tensors)]}; kernels were verified for {known} on "
            f"{self._kernels[0]._guard._device} alone. Call ModelNew, which runs the original for any other call"
        )


def _ws_seen_row(shapes, module, args, kwargs):
    """What answers a call that a compiler looks at, and its tensors, as `shapes.read` gives them."""
    for _, guard, answer in shapes.rows:
        tensors = _ws_seen(guard, module, args, kwargs)
        if tensors is not None:
            return answer, tensors
    return None, None
