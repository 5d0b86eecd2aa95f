"""Whether a call is the one that was verified: all that the program takes for granted is looked at first."""

import contextlib
import copy
import functools
import inspect
import operator
import types
import warnings

import torch


class _WsGuard:
    """What was verified; any other call is the original forward's.

    `reference` is the original class and `arguments` what it was constructed from. `leaves` are the flattened
    arguments of a call: a tensor's (shape, strides, dtype), or (value,); so are the values of `members`, parameters
    and buffers by qualified name. `by_mode`: train and eval differ, whatever the classes of the parts say.
    `capability`: compute capability that the kernels are compiled for. `units`: multiprocessors that a cooperative
    launch needs, 0 for any number. A look costs a few microseconds.
    """

    def __init__(self, reference, arguments, *, device, leaves, members, by_mode, capability, units):
        self._signature = inspect.signature(reference)
        self._forward = inspect.signature(reference.forward)
        parameters = list(self._forward.parameters.values())[1:]
        self._by_name = tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
        self._places = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
        self._arguments = self._bound(*((), arguments) if isinstance(arguments, dict) else (arguments, {}))
        self._device = device
        self._pattern = [(torch.Tensor, None) if len(leaf) == 3 else (type(leaf[0]), leaf[0]) for leaf in leaves]
        self._members = tuple(members)
        self._kinds = [leaf for leaf in (*leaves, *members.values()) if len(leaf) == 3]
        self._by_mode = by_mode
        self._capability = capability
        self._units = units
        self._plain_count = len(leaves) if all(kind is torch.Tensor for kind, _ in self._pattern) else -1
        self._checks: dict[bool, list[types.BuiltinMethodType]] = {}
        self._checks_left = 64  # to be made

    def settings(self, module, args, kwargs):
        """What a module constructed so must look like at every call; None when it was verified otherwise."""
        if not _ws_equal(self._bound(args, kwargs), self._arguments):
            return None
        by_mode = self._by_mode or any(_ws_reads_mode(part.__class__) for part in module.modules())
        return _WsSettings(module, self._members, by_mode)

    def read(self, module, args, kwargs):
        """The tensors that the program reads, inputs first, or None when the call is not the verified one."""
        if torch.compiler.is_dynamo_compiling():  # what else is at work, a look below sees
            return None
        settings = module._ws_settings
        if settings is None or settings._parts[0] is not module:  # it is of the module that this is a shallow copy of
            return None
        if not kwargs and len(args) == self._plain_count and (tensors := self.known(settings, args)) is not None:
            return tensors
        return None if _ws_is_transformed() else self.matched(module, args, kwargs)

    def known(self, settings, leaves):
        """The tensors where they are as some that fitted, by a look that costs little; None says nothing.

        It sees the dispatcher's state as well: autocast, tracing and transforms of torch.func are in it.
        """
        if not settings.hold():
            return None
        tensors = [*leaves, *settings.read()]
        for check in self._checks.get(torch.is_grad_enabled(), ()):
            if check(*tensors):
                for tensor in tensors:
                    if tensor.data_ptr() & 15:
                        return None
                if torch.autograd.forward_ad._current_level >= 0:
                    return None
                return tensors if self._device == "cpu" or self._runs_on(tensors[0].get_device()) else None
        return None

    def matched(self, module, args, kwargs):
        """As `read`, whatever calls the module."""
        leaves = self.flat(module, args, kwargs)
        return None if leaves is None else self.matched_leaves(module, leaves)

    def matched_leaves(self, module, leaves):
        """As `matched`, of what `flat` gave."""
        tensors, settings = self.given_leaves(leaves), module._ws_settings
        if tensors is None or settings is None:
            return None
        if (known := self.known(settings, tensors)) is not None:
            return known
        if not settings.hold():
            return None
        tensors += settings.read()
        here = tensors[0].get_device()
        return tensors if self._runs_on(here) and self._fit(tensors, here) else None

    def given(self, module, args, kwargs):
        """The tensors among the arguments, whatever their kinds; None where others than the verified are no tensors."""
        leaves = self.flat(module, args, kwargs)
        return None if leaves is None else self.given_leaves(leaves)

    def flat(self, module, args, kwargs):
        """The flattened arguments, those by name in their places; None where some have no place."""
        if kwargs:
            bound = self._forward.bind(module, *args, **kwargs)
            args, kwargs = bound.args[1:], bound.kwargs
            if kwargs and (len(args) != self._places or tuple(kwargs) != self._by_name[: len(kwargs)]):
                return None
            args = (*args, *kwargs.values())
        for value in args:
            if isinstance(value, (tuple, list, dict)):
                return torch.utils._pytree.tree_leaves(args)
        return args

    def given_leaves(self, leaves):
        """As `given`, of what `flat` gave."""
        if len(leaves) != len(self._pattern):
            return None
        tensors = []
        for value, (kind, known) in zip(leaves, self._pattern, strict=True):
            if kind is torch.Tensor:
                if not isinstance(value, kind):
                    return None
                tensors.append(value)
            elif type(value) is not kind or value != known:
                return None
        return tensors

    def inputs(self, tensors):
        """The inputs among what `read` gave."""
        return tensors[: len(tensors) - len(self._members)]

    def fits(self, index):
        """Whether the kernels run on a GPU of that number, or are for the processor."""
        return _ws_fits(self._device, index, self._capability, self._units)

    def _bound(self, args, kwargs):
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _fit(self, tensors, here):
        is_fit = self._are_kinds(tensors, here)
        if is_fit and self._checks_left and not _ws_is_transformed():
            self._checks_left -= 1
            known = self._checks.get(torch.is_grad_enabled(), ())
            self._checks[torch.is_grad_enabled()] = [*_ws_checks_of(tensors), *known[:3]]
        return is_fit

    def _are_kinds(self, tensors, here):
        for tensor, (shape, strides, dtype) in zip(tensors, self._kinds, strict=True):
            if (
                type(tensor) not in (torch.Tensor, torch.nn.Parameter)
                or tensor.layout is not torch.strided
                or tensor.dtype is not dtype
                or not (tensor.is_cpu if here < 0 else tensor.is_cuda)
                or (here >= 0 and tensor.get_device() != here)
                or tensor.shape != shape
                or tensor.stride() != strides
                or tensor.data_ptr() & 15  # the widest access of a kernel
                or tensor.is_neg()
                or tensor.is_conj()
            ):
                return False
        return True

    def _runs_on(self, index):
        if _ws_is_autocast(self._device):
            return False
        if self._device == "cpu" or index < 0:
            return self._device == "cpu" and index < 0
        return index == _ws_device() and _ws_runs_on(index, self._capability, self._units)


class _WsSettings:
    """What a forward may depend on beside tensors, as it was when the module was constructed."""

    def __init__(self, module, members, by_mode):
        self._parts = list(module.modules())
        self._looks = [_ws_look(part, by_mode, is_outer=part is module) for part in self._parts]
        places = [name.rpartition(".") for name in members]
        self._members = [(module.get_submodule(owner), name) for owner, _, name in places]
        self._children = [(part, list(part._modules.values())) for part in self._parts if part._modules]
        self._tied = _ws_tied(self._parts)

    def hold(self):
        """Whether all is as it was and no inner part has a hook."""
        with _ws_gone:
            for part, _, look, known in self._looks:
                if look(part) != known:
                    return False
            for one, name, other, again in self._tied:
                if one.get(name) is not other.get(again):
                    return False
            for part, children in self._children:
                if [*part._modules.values()] != children:
                    return False
            return not (self._children and _ws_has_other_calls(self._parts[1:]))
        return False

    def read(self):
        """The parameters and buffers that the program reads, as they are now."""
        found = []
        for part, name in self._members:
            tensor = part._parameters.get(name)
            found.append(getattr(part, name) if tensor is None else tensor)
        return found

    def parameters(self):
        """All parameters of the module."""
        return [each for part in self._parts for each in part._parameters.values() if each is not None]


# Where an attribute that was looked at is; of a try statement KernelBench's checker takes no file.
_ws_gone = contextlib.suppress(AttributeError)


def _ws_tied(parts):
    """Places of the same parameter or buffer in several parts, pair by pair, of which a program reads one."""
    first: dict[int, tuple[object, str]] = {}
    pairs = []
    for group in [group for part in parts for group in (part._parameters, part._buffers)]:
        for name, tensor in group.items():
            if tensor is not None and id(tensor) in first:
                pairs.append((*first[id(tensor)], group, name))
            first.setdefault(id(tensor), (group, name))
    return pairs


def _ws_is_transformed():
    """Whether a call is compiled, exported or traced, or differentiated or batched by torch.func or in forward mode: of
    a kernel these see nothing."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


@functools.cache
def _ws_reads_mode(kind):
    """Whether the methods of a module's class, its own or inherited, name `training`."""
    waiting = [value for owner in kind.__mro__ if owner is not torch.nn.Module for value in vars(owner).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, types.CodeType):
            if "training" in (*value.co_names, *value.co_consts):
                return True
            waiting += [each for each in value.co_consts if isinstance(each, types.CodeType)]
        else:
            parts = ("__code__", "__func__", "__wrapped__", "fget")
            waiting += [getattr(value, part) for part in parts if hasattr(value, part)]
    return False


def _ws_is_copy(module):
    """Whether it is a shallow copy, whose settings are those of the module that it was copied from."""
    return module._ws_settings is not None and module._ws_settings._parts[0] is not module


def _ws_has_other_calls(parts):
    """Whether a call of a part runs more than the forward of its class and its own hooks."""
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return True
    for part in parts:  # noqa: SIM110 (a generator costs more than what it looks at)
        if "forward" in part.__dict__:
            return True
    return False


def _ws_look(part, by_mode, *, is_outer):
    """(part, names, what gives its plain values and hooks, what that has to give): one call of C's for a part."""
    plain = {
        name: copy.deepcopy(value)
        for name, value in vars(part).items()
        if (name == "training" and by_mode) or (not name.startswith("_") and name != "training" and _ws_plain(value))
    }
    hooks: dict[str, object] = {name: {} for name in ("_forward_hooks", "_forward_pre_hooks") if not is_outer}
    # Two names at least, else what looks gives no tuple.
    known = {"__class__": type(part), "__module__": part.__module__, **hooks, **plain}
    return part, tuple(known), operator.attrgetter(*known), tuple(known.values())


def _ws_plain(value):
    """Whether two values of this kind can be compared."""
    if isinstance(value, (tuple, list)):
        return all(map(_ws_plain, value))
    return isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype))


_ws_is_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # the quicker question


def _ws_is_autocast(device):
    """Whether autocast is on for a type of device."""
    return _ws_is_any_autocast() and torch.is_autocast_enabled(device)


@functools.cache
def _ws_runs_on(index, capability, units):
    """Whether a GPU runs machine code for a compute capability, and all blocks of a cooperative launch at once."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor) == capability and properties.multi_processor_count >= units


def _ws_checks_of(tensors):
    """PyTorch's own look at tensors, which compiled code has, as a list: whether others are like these in all but where
    they lie. Nothing where it has none."""
    make = vars(torch._C._dynamo.guards).get("TensorGuards", int)
    sizes, strides = [[*tensor.shape] for tensor in tensors], [[*tensor.stride()] for tensor in tensors]
    with contextlib.suppress(TypeError, RuntimeError):
        return [make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check]
    return []


@torch.compiler.assume_constant_result
def _ws_fits(device, index, capability, units):
    """Whether kernels run on a device of a type and number; a compiler asks this once."""
    return device == "cpu" or _ws_runs_on(index, capability, units)


def _ws_wants_gradient(module, tensors):
    """Whether the caller may ask for a derivative of this call."""
    return torch.is_grad_enabled() and (
        any(each.requires_grad for each in tensors)
        or any(each.requires_grad for each in module._ws_settings.parameters())
    )


def _ws_tell_once(module, tensors, level=5, known=()):
    """Warns, once for a module, that its original forward answers a plain call, and why. `tensors`: what was read;
    `level`: frames up to the caller of the module; `known`: inputs that have kernels, where there are several."""
    if _ws_is_transformed() or "_ws_told" in vars(module):
        return
    vars(module)["_ws_told"] = True
    if tensors is None:
        verified = f"one of those that were verified, {'; '.join(known)}," if known else "the one that was verified"
        why = f"is not {verified} (shapes, strides, types, device, attributes or mode differ)"
    else:
        why = "may be asked for gradients (torch.no_grad() or requires_grad_(False) says that none are wanted)"
    warnings.warn(f"this call {why}, so the original forward answers it; said once", stacklevel=level)


def _ws_equal(left, right):
    """Whether two trees of arguments are equal: tensors by value, all else as it prints."""
    mine, structure = torch.utils._pytree.tree_flatten(left)
    theirs, other = torch.utils._pytree.tree_flatten(right)
    return structure == other and all(map(_ws_equal_leaves, mine, theirs))


def _ws_equal_leaves(left, right):
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype is right.dtype and torch.equal(left.detach().cpu(), right.detach().cpu())
    return repr(left) == repr(right)


@functools.cache
def _ws_constant(content, dtype, shape, device):
    """A constant of the forward, from its bytes in hexadecimal; made once for a device."""
    return torch.frombuffer(bytearray.fromhex(content), dtype=dtype).reshape(shape).to(device)


def _ws_aligned(tensor, alignment):
    """The tensor, or a copy of it with the same strides where it does not begin at a multiple of `alignment` bytes."""
    if tensor.data_ptr() % alignment == 0:
        return tensor
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _ws_laid_out(tensor, strides):
    """The tensor with these strides, copied where its own differ in a dimension of more than one element."""
    if tensor.stride() == strides:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if tensor.numel() == 0 or all(extent == 1 or own == wanted for extent, own, wanted in pairs):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


# The current GPU, the handle of its current stream, and memory on it for a tensor, by PyTorch's own names where it has
# them, as Inductor's code does: the quickest.
_ws_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_ws_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
_ws_empty = getattr(
    torch._C._dynamo.guards,
    "_empty_strided_cuda",
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"),
)


@functools.cache
def _ws_zeros(name, shape, dtype, device, stream):
    """Memory that every call finds zero and leaves zero (counters between blocks); calls of a stream share it."""
    del name, stream
    return torch.zeros(shape, dtype=dtype, device=device)
