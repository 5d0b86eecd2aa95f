"""Launches all steps of a program at once, as a CUDA graph, where the tensors of a call lie as they lay before."""

import collections
import contextlib
import threading

import torch


class _WsGraphs:
    """Calls `run(tensors, owner)` by replaying a graph of it, kept for each set of addresses that came twice.

    Another set runs step by step. `run` gives new tensors; so does a replay, which copies out of the graph's memory.
    `owner` is the stream whose calls share memory that stays zero between them, `stream_of` gives the handle of a
    GPU's current stream. A graph belongs to the stream that it was captured for; the least recently used goes when
    there are `MOST`. Where graphs are captured again and again and hardly replayed, no more are.
    """

    MOST = 8
    REMEMBERED = 64
    PAYS_AFTER = 8
    """Replays for each capture, once `MOST` were captured."""

    def __init__(self, run, stream_of):
        self._run = run
        self._stream_of = stream_of
        self._graphs = collections.OrderedDict()
        self._seen = collections.OrderedDict()
        self._places = {}
        self._captures = self._replays = 0
        self._may_capture = True
        self._lock = threading.Lock()

    def __call__(self, tensors):
        """What `run` gives for these tensors, on the current stream of their device."""
        if torch.cuda.is_current_stream_capturing():  # the caller makes a graph of its own, with these steps in it
            return self._run(tensors, None)
        index = tensors[0].get_device()
        stream = self._stream_of(index)
        key = (index, stream, *[tensor.data_ptr() for tensor in tensors])
        with self._lock:  # a replay and the copies of its results are one
            kept = self._graphs.get(key)
            if kept is None and self._is_worth(key):
                kept = self._captured(key, tensors)
            if kept is not None:
                self._graphs.move_to_end(key)
                self._replays += 1
                graph, results = kept
                graph.replay()
                return tuple([_ws_copied(result) for result in results])
        return self._run(tensors, None)

    def _is_worth(self, key):
        pays = self._captures < self.MOST or self._replays >= self.PAYS_AFTER * self._captures
        if not (self._may_capture and pays):
            return False
        if self._seen.pop(key, False):
            return True
        self._seen[key] = True
        if len(self._seen) > self.REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _captured(self, key, tensors):
        """The graph of a call that was made once already, so that libraries are set up; None where there is none."""
        index, stream = place = key[:2]
        if place not in self._places:
            self._places[place] = torch.cuda.graph_pool_handle(), torch.cuda.Stream(index)
        graph = torch.cuda.CUDAGraph()
        try:
            pool, side = self._places[place]
            results = _ws_captured(graph, pool, side, lambda: self._run(tensors, stream))
        except RuntimeError:  # a library step that waits for the device: step by step, then
            self._may_capture = False
            return None
        self._captures += 1
        self._graphs[key] = graph, results
        if len(self._graphs) > self.MOST:
            gone, _ = self._graphs.popitem(last=False)
            if all(kept[:2] != gone[:2] for kept in self._graphs):  # memory that no graph has cannot be used again
                del self._places[gone[:2]]
        return graph, results


def _ws_captured(graph, pool, side, act):
    """What `act()` gives, captured on a stream of its own: PyTorch's for captures is one for all threads and GPUs.

    Where a capture cannot be ended, PyTorch leaves two things as they are within one, which are taken back: where
    random numbers come from, and where memory does.
    """
    torch.cuda.synchronize()
    is_open = True
    with torch.cuda.stream(side):
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = act()
            finally:
                graph.capture_end()
                is_open = False
        finally:
            if is_open:
                _ws_take_back(pool)
    return results


def _ws_take_back(pool):
    index = torch.cuda.current_device()
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    with contextlib.suppress(RuntimeError, AttributeError):  # where it has taken it back itself
        torch._C._cuda_endAllocateToPool(index, pool)


def _ws_copied(tensor):
    """A copy with the same strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
