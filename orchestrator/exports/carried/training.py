"""A module that trains: the forward by one program, and the backward by another when gradients are asked for."""

import torch

from orchestrator.exports.carried.guard import _ws_aligned, _ws_is_any_autocast, _ws_laid_out


class _WsTraining:
    """A verified training step on `device`, whose halves are the programs `forward` and `backward`.

    Of the `tensors` that the step reads, inputs and then members, `forward(tensors)` gives what it has `made`: the
    distinct outputs, so many, and what is kept beside them; those at `constant` have no gradient. `kept(tensors, made)`
    are those that the second half reads. `derivative(kept, gradients, fit, run)` gives each tensor's gradient, or None
    where none is `wanted`, by `run`, the second half, of what was kept and the outputs' gradients, each as `fit` makes
    it of what autograd gives.
    """

    def __init__(self, forward, backward, *, device, outputs, constant, kept, derivative, wanted):
        self.forward, self.backward, self.device = forward, backward, device
        self.outputs, self.constant, self.kept, self.wanted = outputs, constant, kept, wanted
        self.derivative = derivative
        self._without = [place for place, is_wanted in enumerate(wanted) if not is_wanted]
        self._apply = _ws_applied(self)

    def serves(self, tensors):
        """Whether every gradient that may be asked for is one of the step's."""
        if self._without and torch.is_grad_enabled():
            for place in self._without:
                if tensors[place].requires_grad:
                    return False
        return True

    def __call__(self, tensors):
        """The distinct outputs, which can be differentiated."""
        return self._apply(*tensors) if torch.is_grad_enabled() else self.forward(tensors)[: self.outputs]


def _ws_applied(training):
    """The function of autograd's that joins the halves: as little of Python as can be, for most of what a small step
    costs is that."""
    kept, constant, outputs = training.kept, training.constant, training.outputs
    derivative, is_differentiated, is_autocast = training.derivative, torch.is_grad_enabled, _ws_is_any_autocast

    def forward(ctx, *tensors):
        made = training.forward(tensors)
        ctx.materialize_grads = False  # attributes, which methods of the context set
        if constant:
            ctx.non_differentiable = tuple([made[place] for place in constant])
        ctx.to_save = kept(tensors, made)
        return made[:outputs]

    def backward(ctx, *gradients):
        if is_differentiated() or is_autocast():
            with torch.autocast(training.device, enabled=False):  # which the forward was called without
                return once(ctx, *gradients)
        return derivative(ctx.saved_tensors, gradients, _ws_placed, training.backward)

    @torch.autograd.function.once_differentiable
    def once(ctx, *gradients):
        return derivative(ctx.saved_tensors, gradients, _ws_placed, training.backward)

    own = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type("WarpsmithStep", (torch.autograd.Function,), own)
    # What the engine calls: PyTorch's own finds the backward by two more functions of Python's.
    function._backward_cls.apply = backward  # type: ignore[attr-defined]
    # What its own `apply` calls where no transform of torch.func is at work, which the guard has seen: 2 of 5 µs.
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, function)


def _ws_given(gradient, gradients, shape, strides, dtype):
    """A gradient as the backward was verified with: one of a sum comes expanded, one of a view in another layout, and
    none where nothing was made of an output."""
    if gradient is None:
        device = next(each.device for each in gradients if each is not None)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
    if gradient.stride() == strides and gradient.dtype is dtype and not gradient.is_neg():
        return gradient
    made = _ws_laid_out(gradient.to(dtype).resolve_neg(), strides)
    return made if made.stride() == strides else made.as_strided(shape, strides)


def _ws_placed(gradient, gradients, shape, strides, dtype):
    """The same, where the widest access of a kernel can be made."""
    if (
        gradient is None
        or gradient.stride() != strides
        or gradient.data_ptr() & 15
        or gradient.dtype is not dtype
        or gradient.is_neg()
    ):
        return _ws_aligned(_ws_given(gradient, gradients, shape, strides, dtype), 16)
    return gradient  # mostly
