"""Keeps what depends on constants, parameters and buffers alone, for as long as these are the same and unchanged."""

import threading
import weakref

import torch


class _WsKept:
    """Gives what `prepare(tensors)` makes, made once for those of the tensors at `places`, which are a module's own.

    PyTorch counts the writes to each tensor; it is made anew after one, for another tensor, and where a tensor has got
    other memory. Writes by way of `.data` are not counted. Each module has its own, which goes with it.
    """

    MOST = 64

    def __init__(self, prepare, places):
        self._prepare, self._places = prepare, places
        self._kept = {}
        self._lock = threading.Lock()

    def __call__(self, tensors):
        own = [tensors[place] for place in self._places]
        is_cuda = tensors[0].is_cuda
        if any(map(torch.is_inference, own)) or (is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._prepare(tensors)  # writes are not counted, or what is made belongs to the caller's graph
        stream = torch.cuda.current_stream(tensors[0].device) if is_cuda else None
        key = (tensors[0].get_device(), *map(id, own))
        state = [(tensor.data_ptr(), tensor._version) for tensor in own]
        with self._lock:
            found = self._kept.get(key)
            if found is None or found[0] != state or not all(r() is t for r, t in zip(found[1], own, strict=True)):
                found = self._kept[key] = self._made(key, state, own, tensors, stream)
                while len(self._kept) > self.MOST:
                    self._kept.pop(next(iter(list(self._kept))), None)
        if stream != found[3]:  # its memory may not go to another use there before this call has read it
            for tensor in found[2]:
                tensor.record_stream(stream)
        return found[2]

    def _made(self, key, state, own, tensors, stream):
        made = tuple([_ws_without_base(tensor) for tensor in self._prepare(tensors)])
        if stream is not None:
            stream.synchronize()  # calls on other streams read it
        references = [weakref.ref(tensor, lambda _: self._kept.pop(key, None)) for tensor in own]
        # While its memory is held, no other tensor can have it: the same address is the same memory.
        return state, references, made, stream, [tensor.untyped_storage() for tensor in own]


def _ws_without_base(tensor):
    """The tensor, or where it is a view another look at the same memory, which does not keep what it is a view of."""
    if not tensor._is_view():
        return tensor
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return bare.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
