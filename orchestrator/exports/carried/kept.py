"""Keeps what depends on constants, parameters and buffers alone, for as long as these are the same and unchanged."""

import threading
import weakref

import torch


class _WsKept:
    """Gives what `prepare(tensors)` makes, made once for the module's own tensors: `tensors` after the first `inputs`.

    PyTorch counts the writes to each tensor; it is made anew after one, or for another tensor. Writes by way of
    `.data` are not counted. Of several modules each has its own; it goes with the module.
    """

    MOST = 64

    def __init__(self, prepare, inputs):
        self._prepare, self._inputs = prepare, inputs
        self._kept = {}
        self._lock = threading.Lock()

    def __call__(self, tensors):
        own = tensors[self._inputs :]
        is_cuda = tensors[0].is_cuda
        if any(map(torch.is_inference, own)) or (is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._prepare(tensors)  # writes are not counted, or what is made belongs to the caller's graph
        key = (tensors[0].get_device(), *[tensor.data_ptr() for tensor in own])
        versions = [tensor._version for tensor in own]
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0] == versions and all(r() is t for r, t in zip(found[1], own, strict=True)):
                return found[2]
            made = self._prepare(tensors)
            if is_cuda:
                torch.cuda.current_stream(tensors[0].device).synchronize()  # calls on other streams read it
            gone = lambda _, key=key: self._kept.pop(key, None)  # noqa: E731
            self._kept[key] = versions, [weakref.ref(tensor, gone) for tensor in own], made
            while len(self._kept) > self.MOST:
                del self._kept[next(iter(self._kept))]
        return made
