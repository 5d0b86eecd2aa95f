"""Which of several kernels of a module answers a call: a table of inputs, looked up by shapes and types.

The one idea: the look-up finds a row, and the row's guard decides, as strictly as where it is the only one.
"""

import torch

from orchestrator.exports.carried.guard import _ws_is_copy, _ws_is_transformed


class _WsShapes:
    """Verified calls of one module. `rows`: for each the inputs as people read them, its guard, and what answers it.

    Guards differ in what they say of inputs alone. A look costs the same whatever row it finds.
    """

    def __init__(self, rows):
        self.rows = rows
        self.known = tuple([text for text, *_ in rows])
        self._first = rows[0][1]
        self._by_kind: dict[object, list[tuple[object, object]]] = {}
        for _, guard, *answers in rows:  # several of one kind differ in strides
            self._by_kind.setdefault(_ws_kind_of_guard(guard), []).append((guard, answers[0]))

    def settings(self, module, args, kwargs):
        """As any of the guards'."""
        return self._first.settings(module, args, kwargs)

    def read(self, module, args, kwargs):
        """What answers the call and the tensors that it reads, inputs first; None twice when the call is in no row."""
        if not (_ws_is_transformed() or _ws_is_copy(module)):
            leaves = self._first.flat(module, args, kwargs)
            for guard, answer in () if leaves is None else self._rows_of(leaves):
                tensors = guard.matched_leaves(module, leaves)
                if tensors is not None:
                    return answer, tensors
        return None, None

    def _rows_of(self, leaves):
        try:
            kind = tuple([
                (leaf.shape, leaf.dtype) if type(leaf) in _WS_TENSORS else (type(leaf), leaf) for leaf in leaves
            ])  # fmt: skip
            return self._by_kind.get(kind, ())
        except (TypeError, RuntimeError):  # an argument without a hash, or a tensor without a shape
            return ()


_WS_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])


def _ws_kind_of_guard(guard):
    """What the table knows the inputs of a guard by."""
    tensors = iter(guard._kinds)
    kinds = []
    for kind, known in guard._pattern:
        if kind is torch.Tensor:
            shape, _, dtype = next(tensors)
            kinds.append((shape, dtype))
        else:
            kinds.append((kind, known))
    return tuple(kinds)
