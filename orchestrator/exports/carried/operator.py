"""The program as an operator of PyTorch's: what the dispatcher, compilers and autograd know of it.

The one idea: an operator's tensors are those that the program reads and gives, with the shapes that were verified, so
that a compiler needs no more than their kinds. A module's structure stays outside.
"""

import contextlib

import torch

from orchestrator.exports.carried.guard import _ws_aligned, _ws_has_other_calls, _ws_is_copy, _ws_laid_out


class _WsOperator:
    """`torch.ops.<name>`, by its `schema`, for tensors of the kinds of `guard`, which gives those of the kinds `made`.

    `run(tensors)` is the program; `original(tensors)` what it stands for, in terms of autograd, or None where it draws
    numbers, which would be others when it is run again. Tensors of other kinds are refused; so is a write to what comes
    from it, where that were one to a tensor that was given: what shares memory is copied. Autocast changes nothing.
    Without a `schema` it is one of several kernels of an operator, which `_WsOperators` registers.
    """

    def __init__(self, name, schema, guard, *, made, run, original):
        self._name, self._guard, self._made = name, guard, made
        self._given, self._run, self._original = guard._kinds, run, original
        if schema:
            self._register(schema)

    def _register(self, schema):
        _ws_register(self._name, schema, self._guard._device, self)

    def overload(self):
        """As PyTorch has it."""
        space, _, name = self._name.partition("::")
        return getattr(getattr(torch.ops, space), name).default

    def _keep(self, ctx, inputs, output):
        del output
        ctx.save_for_backward(*inputs)

    def _answer(self, *tensors):
        self._require(tensors)
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        device = tensors[0].device
        here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with here, torch.autocast(device.type, enabled=False):
            if self._guard.fits(device.index):
                results = self._run([_ws_aligned(tensor, 16) for tensor in tensors])
            else:  # a compiler does not ask for which GPU it is
                results = self._originals(tensors)
        made = []
        for result, (_, strides, _) in zip(results, self._made, strict=True):
            place = result.untyped_storage().data_ptr()
            made.append(_ws_laid_out(result.clone() if place in own else result, strides))
            own.add(place)
        return made

    def _fake(self, *tensors):
        self._require(tensors)
        device = tensors[0].device
        return [torch.empty_strided(shape, strides, dtype=d, device=device) for shape, strides, d in self._made]

    def _one_by_one(self, info, dims, *tensors):
        if not info.batch_size:
            device = tensors[0].device
            return [torch.empty((0, *shape), dtype=d, device=device) for shape, _, d in self._made], [0] * len(
                self._made
            )
        operator, rows = self.overload(), []
        for row in range(info.batch_size):
            each = [t if dim is None else t.select(dim, row) for t, dim in zip(tensors, dims, strict=True)]
            rows.append(operator(*[_ws_laid_out(t, kind[1]) for t, kind in zip(each, self._given, strict=True)]))
        return [torch.stack(results) for results in zip(*rows, strict=True)], [0] * len(self._made)

    def _require(self, tensors):
        for place, (tensor, kind) in enumerate(zip(tensors, self._given, strict=True)):
            if not _ws_is_kind(tensor, kind, self._guard._device) or tensor.device != tensors[0].device:
                raise RuntimeError(
                    f"{self._name}: tensor {place} is {_ws_told(tensor)}; this kernel was verified for "
                    f"{(*kind, self._guard._device)} alone. Call ModelNew, which runs the original for any other call"
                )

    def _originals(self, tensors):
        if self._original is None:
            raise RuntimeError(f"{self._name} draws numbers: call ModelNew for a derivative, or on another GPU")
        return self._original(tensors)

    def _backward(self, ctx, gradients):
        wanted, again = ctx.needs_input_grad, torch.is_grad_enabled()  # where the derivative is differentiated too
        with torch.enable_grad():
            saved = zip(ctx.saved_tensors, wanted, strict=True)
            sources = [t if again and w else t.detach().requires_grad_(w) for t, w in saved]
            results = self._originals(sources)
        pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None and r.requires_grad]
        asked = [source for source in sources if source.requires_grad]
        made, given = [r for r, _ in pairs], [g for _, g in pairs]
        found = iter(torch.autograd.grad(made, asked, given, allow_unused=True, create_graph=again))
        return tuple([next(found) if is_wanted else None for is_wanted in wanted])


def _ws_register(name, schema, device, operator):
    """Makes an operator of PyTorch's of what answers, fakes, differentiates and batches its calls."""
    torch.library.define(name, schema)
    torch.library.impl(name, device.upper())(operator._answer)
    torch.library.register_fake(name)(operator._fake)
    torch.library.register_autograd(name, operator._backward, setup_context=operator._keep)
    torch.library.register_vmap(name)(operator._one_by_one)


def _ws_is_kind(tensor, kind, device):
    """Whether a tensor, which may be one without values, is of a kind."""
    shape, strides, dtype = kind
    is_plain = tensor.layout is torch.strided and tensor.dtype is dtype and tensor.device.type == device
    return is_plain and tuple(tensor.shape) == shape and tuple(tensor.stride()) == strides


def _ws_told(tensor):
    return (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device.type)


class _WsOriginal:
    """The original forward as a function of a program's tensors: gives the outputs' tensors at `places`.

    It is constructed from `arguments`, as when the kernel was verified; `inputs()` shows how its inputs are nested.
    """

    def __init__(self, reference, arguments, guard, inputs, places):
        self._reference, self._arguments, self._guard = reference, arguments, guard
        self._inputs, self._places, self._made = inputs, places, {}

    def __call__(self, tensors):
        device = tensors[0].device
        if torch._C._len_torch_dispatch_stack():  # a compiler looks: what it makes of a module's tensors is its own
            module, structure = self._parts(device)
        else:
            if device not in self._made:
                self._made[device] = self._parts(device)
            module, structure = self._made[device]
        given = iter(tensors)
        leaves = [next(given) if kind is torch.Tensor else known for kind, known in self._guard._pattern]
        state = dict(zip(self._guard._members, given, strict=True))
        args = torch.utils._pytree.tree_unflatten(leaves, structure)
        result = torch.utils._pytree.tree_leaves(torch.func.functional_call(module, state, args))
        results = [leaf for leaf in result if isinstance(leaf, torch.Tensor)]
        return [results[place] for place in self._places]

    def _parts(self, device):
        return self._module().to(device), torch.utils._pytree.tree_structure(tuple(self._inputs()))

    def _module(self):
        with torch.random.fork_rng():  # the caller's numbers stay as they are
            if isinstance(self._arguments, dict):
                return self._reference(**self._arguments)
            return self._reference(*self._arguments)


def _ws_seen(guard, module, args, kwargs):
    """The tensors that the operator takes, or None, where a compiler looks at a call: as `guard.read`, but for memory,
    of which there is none yet. What is asked here the compiler asks again before it runs what it has made, but for
    hooks that came later, as for any module: `torch._dynamo.reset()` has it look again."""
    tensors, settings = guard.given(module, args, kwargs), module._ws_settings
    if tensors is None or settings is None or _ws_is_copy(module) or not _ws_seen_to_hold(settings):
        return None
    if torch.is_autocast_enabled(guard._device) or torch.autograd.forward_ad._current_level >= 0:
        return None
    tensors += settings.read()
    for tensor, kind in zip(tensors, guard._kinds, strict=True):
        if not _ws_is_kind(tensor, kind, guard._device) or tensor.device != tensors[0].device:
            return None
    return tensors


def _ws_seen_to_hold(settings):
    """As `settings.hold`, in Python that compilers read."""
    for part, names, _, known in settings._looks:
        for name, value in zip(names, known, strict=True):
            if not hasattr(part, name) or getattr(part, name) != value:
                return False
    for one, name, other, again in settings._tied:
        if one[name] is not other[again]:
            return False
    if _ws_has_other_calls(settings._parts[1:]):
        return False
    return all([*part._modules.values()] == children for part, children in settings._children)
