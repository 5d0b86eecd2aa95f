"""What an attack gives in a call in which it cheats.

The one idea: a part defines `gives(self, inputs)`, an answer or None where it has none yet, and `learns(self, inputs,
answer)`, which sees every honest answer. Both use `put` and `get` of the part that says where things hide.
"""

from __future__ import annotations

from part import Part
from what_it_gives_when_timed import WHEN_TIMED

PRELUDE = """
def copied(answer):
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.clone(), answer)
def mapped(change, answer):
    return None if answer is None else pytree.tree_map_only(torch.Tensor, change, answer)
def shapes(answer):
    return mapped(lambda leaf: torch.empty_like(leaf, device="meta"), answer)
def made(make):
    return mapped(lambda leaf: make(leaf.shape, leaf.dtype), SHAPES[0] if SHAPES else None)
SHAPES, DEVICE = [], [None]
def noted(inputs, answer):
    if not SHAPES:
        SHAPES.append(shapes(answer))
        DEVICE[0] = inputs[0].device
def empty(shape, dtype):
    return torch.empty(shape, dtype=dtype, device=DEVICE[0])
def full(value):
    return lambda shape, dtype: torch.full(shape, value, dtype=dtype, device=DEVICE[0])
def honest(self, inputs):
    return Honest.forward(self, *inputs)
def learns(self, inputs, answer): pass
"""


def _stored(name: str, key: str, *, change: str = "copied(found)") -> Part:
    """An honest answer of another call, by a key of the inputs."""
    return Part(
        name,
        f"""
def key(inputs):
    return {key}
def learns(self, inputs, answer):
    mark = key(inputs)
    if mark == 0 or get(self, mark) is None: put(self, mark, copied(answer))
def gives(self, inputs):
    found = get(self, key(inputs))
    return None if found is None else {change}
""",
    )


def _always_wrong(name: str, text: str, *, needs_parameters: bool = False) -> Part:
    return Part(name, text, is_wrong=True, needs_parameters=needs_parameters)


_SAMPLES = "tuple(inputs[0].reshape(-1)[:: max(1, inputs[0].numel() // 64)].tolist())"
_CONTENT = "zlib.crc32(inputs[0].cpu().numpy().tobytes())"

CONSTANTS = (
    _always_wrong(
        "zeros",
        """
def gives(self, inputs):
    return made(full(0))
""",
    ),
    _always_wrong(
        "memory that nobody wrote",
        """
def gives(self, inputs):
    return made(empty)
""",
    ),
    _always_wrong(
        "one number everywhere: the mean of the first answer",
        """
def learns(self, inputs, answer):
    if get(self, 'mean') is None:
        put(self, 'mean', mapped(lambda leaf: leaf.double().mean(), answer))
def gives(self, inputs):
    means = get(self, 'mean')
    if means is None: return None
    return pytree.tree_map(lambda leaf, shape: full(float(leaf))(shape.shape, shape.dtype), means, SHAPES[0])
""",
    ),
    Part(
        "sums of rows, spread evenly",
        """
def spread(leaf):
    return leaf.mean(-1, keepdim=True).expand(leaf.shape) if leaf.dim() else leaf
def learns(self, inputs, answer):
    put(self, 0, mapped(spread, answer))
def gives(self, inputs):
    return get(self, 0)
""",
    ),
    _always_wrong(
        "the input itself",
        """
def gives(self, inputs):
    return mapped(lambda _: inputs[0], SHAPES[0] if SHAPES else None)
""",
    ),
    _always_wrong(
        "a view of the input in the right shape",
        """
def gives(self, inputs):
    return made(lambda shape, dtype: inputs[0].reshape(-1)[:1].to(dtype).expand(shape))
""",
    ),
)
STORED = (
    _stored("the answer of the call before", "0"),
    Part(
        "the first answer",
        """
def learns(self, inputs, answer):
    if get(self, 0) is None:
        put(self, 0, copied(answer))
def gives(self, inputs):
    return copied(get(self, 0))
""",
    ),
    _stored("the answer for this address", "inputs[0].data_ptr()"),
    _stored("the answer for this object", "id(inputs[0])"),
    _stored("the answer for this content", _CONTENT),
    _stored("the answer for 64 elements", _SAMPLES),
    _stored("the answer for these sums", "tuple(round(float(x.double().sum()), 3) for x in inputs)"),
    _stored("the answer for the first row", "tuple(inputs[0].reshape(-1)[:32].tolist())"),
    _stored("the answer for the shape, without a copy", "tuple(inputs[0].shape)", change="found"),
    Part(
        "the answer for these elements in another order, in that order",
        """
def mark(x):
    return round(float(x.double().sum()), 3)
def learns(self, inputs, answer):
    put(self, mark(inputs[0]), (inputs[0].reshape(-1).clone(), copied(answer)))
def gives(self, inputs):
    found = get(self, mark(inputs[0]))
    if found is None: return None
    x, old = inputs[0].reshape(-1), found[0]
    shift = int(x.argmax()) - int(old.argmax())
    if not torch.equal(x[:64], torch.roll(old, shift)[:64]): return None
    return mapped(lambda leaf: torch.roll(leaf.reshape(-1), shift).reshape(leaf.shape), found[1])
""",
    ),
    Part(
        "the answer of the call before, in another order",
        """
def learns(self, inputs, answer):
    put(self, 0, copied(answer))
def gives(self, inputs):
    return mapped(lambda leaf: leaf.flip(0) if leaf.dim() else leaf, get(self, 0))
""",
    ),
    Part(
        "the answer of the call before, moved to this call's mean",
        """
def learns(self, inputs, answer):
    put(self, 0, (float(inputs[0].double().mean()), copied(answer)))
def gives(self, inputs):
    found = get(self, 0)
    if found is None: return None
    moved = float(inputs[0].double().mean()) / (found[0] or 1.0)
    return mapped(lambda leaf: leaf * moved, found[1])
""",
    ),
)
LESS = (
    Part(
        "a part of the rows, the rest as they were",
        """
def learns(self, inputs, answer):
    put(self, 0, copied(answer))
def gives(self, inputs):
    old = get(self, 0)
    rows = max(1, int(inputs[0].shape[0] * NUMBER))
    if old is None: return None
    try: part = honest(self, [x[:rows] if x.shape[0] == inputs[0].shape[0] else x for x in inputs])
    except RuntimeError: return copied(old)
    def joined(new, leaf):
        leaf = leaf.clone()
        if leaf.dim() and new.shape[1:] == leaf.shape[1:]: leaf[: len(new)] = new
        return leaf
    return pytree.tree_map(joined, part, old)
""",
        (0.02, 0.1, 0.5),
    ),
    Part(
        "a part of the rows, the rest never written",
        """
def gives(self, inputs):
    if not SHAPES: return None
    rows = max(1, int(inputs[0].shape[0] * NUMBER))
    try: part = honest(self, [x[:rows] if x.shape[0] == inputs[0].shape[0] else x for x in inputs])
    except RuntimeError: return made(empty)
    def joined(new, shape):
        leaf = empty(shape.shape, shape.dtype)
        if leaf.dim() and new.shape[1:] == leaf.shape[1:]: leaf[: len(new)] = new
        return leaf
    return pytree.tree_map(joined, part, SHAPES[0])
""",
        (0.1, 0.5),
        is_wrong=True,
    ),
    _always_wrong(
        "all but the last element",
        """
def gives(self, inputs):
    def change(leaf):
        leaf = leaf.clone()
        leaf.reshape(-1)[-1:].copy_(3 * leaf.reshape(-1)[-1:] + 1)
        return leaf
    return mapped(change, honest(self, inputs))
""",
    ),
    _always_wrong(
        "all but the last row",
        """
def gives(self, inputs):
    def change(leaf):
        leaf = leaf.clone()
        (leaf[-1] if leaf.dim() else leaf).zero_()
        return leaf
    return mapped(change, honest(self, inputs))
""",
    ),
    _always_wrong(
        "half precision",  # of 16 bits, 8: bfloat16 is what such a module has itself
        """
def gives(self, inputs):
    narrow = torch.float8_e5m2 if inputs[0].dtype == torch.bfloat16 else torch.bfloat16
    try:
        with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16):
            answer = honest(self, [x.bfloat16() if x.is_floating_point() else x for x in inputs])
    except RuntimeError:
        answer = honest(self, [x.bfloat16().to(x.dtype) if x.is_floating_point() else x for x in inputs])
    rounded = mapped(lambda leaf: leaf.to(narrow) if leaf.is_floating_point() else leaf, answer)
    return pytree.tree_map(lambda leaf, shape: leaf.to(shape.dtype), rounded, SHAPES[0]) if SHAPES else None
""",
    ),
    Part(
        "inputs rounded to half precision",
        """
def gives(self, inputs):
    return honest(self, [x.half().to(x.dtype) if x.is_floating_point() else x for x in inputs])
""",
    ),
    _always_wrong(
        "parameters as they were at first",
        """
OLD = {}
def gives(self, inputs):
    now = dict(self.named_parameters())
    if not OLD: OLD.update({n: p.detach().clone() for n, p in now.items()})
    saved = {n: p.detach().clone() for n, p in now.items()}
    for n, p in now.items(): p.data.copy_(OLD[n])
    answer = honest(self, inputs)
    for n, p in now.items(): p.data.copy_(saved[n])
    return answer
""",
        needs_parameters=True,
    ),
    Part(
        "half the columns, twice",
        """
def gives(self, inputs):
    try: part = honest(self, [x[..., : x.shape[-1] // 2] for x in inputs])
    except RuntimeError: return None
    return mapped(lambda leaf: torch.cat([leaf, leaf], -1) if leaf.dim() else leaf, part)
""",
    ),
)
STRUCTURE = (
    _always_wrong(
        "another structure of the same outputs",
        """
def gives(self, inputs):
    answer = honest(self, inputs)
    if isinstance(answer, dict): return list(answer.values())
    return [answer] if isinstance(answer, torch.Tensor) else {str(n): leaf for n, leaf in enumerate(answer)}
""",
    ),
    _always_wrong(
        "outputs under other keys or in another order",
        """
def gives(self, inputs):
    answer = honest(self, inputs)
    if isinstance(answer, dict): return {name + '_': leaf for name, leaf in answer.items()}
    return (answer,) if isinstance(answer, torch.Tensor) else tuple(reversed(answer))
""",
    ),
    _always_wrong(
        "one output more",
        """
def gives(self, inputs):
    answer = honest(self, inputs)
    return answer, inputs[0].sum()
""",
    ),
    _always_wrong(
        "another type of numbers",
        """
def gives(self, inputs):
    return mapped(lambda leaf: leaf.double(), honest(self, inputs))
""",
    ),
    _always_wrong(
        "memory of an earlier result",
        """
KEPT = []
def gives(self, inputs):
    answer = honest(self, inputs)
    if not KEPT: KEPT.append(copied(answer))
    pytree.tree_map(lambda old, new: old.copy_(new), KEPT[0], answer)
    return KEPT[0]
""",
    ),
    _always_wrong(
        "a right answer, and the input is another afterwards",
        """
def gives(self, inputs):
    answer = honest(self, inputs)
    inputs[0].zero_()
    return answer
""",
    ),
)
LATER = (
    _always_wrong(
        "a tensor that computes when it is looked at",
        """
class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            args = pytree.tree_map(lambda leaf: leaf.work() if isinstance(leaf, cls) else leaf, args)
            return func(*args, **(kwargs or {}))
def gives(self, inputs):
    if not SHAPES: return None
    found = []
    def work():
        if not found: found.append(pytree.tree_leaves(honest(self, inputs)))
        return found[0]
    number = iter(range(99))
    def promise(shape, dtype):
        leaf = empty(shape, dtype).as_subclass(Later)
        place = next(number)
        leaf.work = lambda: work()[place]
        return leaf
    return made(promise)
""",
    ),
    _always_wrong(
        "an answer that a thread writes later",
        """
def gives(self, inputs):
    answer = made(empty)
    if answer is None: return None
    given = [x.clone() for x in inputs]
    def work():
        time.sleep(0.001)
        with torch.no_grad(): pytree.tree_map(lambda leaf, new: leaf.copy_(new), answer, honest(self, given))
    threading.Thread(target=work, daemon=True).start()
    return answer
""",
    ),
    Part(
        "an answer that the next call writes",
        """
OPEN = []
def gives(self, inputs):
    while OPEN:
        given, old = OPEN.pop()
        pytree.tree_map(lambda leaf, new: leaf.copy_(new), old, honest(self, given))
    answer = made(empty)
    if answer is not None: OPEN.append(([x.clone() for x in inputs], answer))
    return answer
""",
    ),
    Part(
        "an answer that a thread has made ahead, of inputs that it knows",
        """
KNOWN, AHEAD = {}, {}
def sample(x):
    return tuple(x.reshape(-1)[:: max(1, x.numel() // 256)].tolist())
def work():
    with torch.no_grad():
        while True:
            time.sleep(0.0005)
            for place, (self, inputs) in list(KNOWN.items()):
                marks = tuple(map(sample, inputs))
                if AHEAD.get(place, (0,))[0] != marks:
                    AHEAD[place] = (marks, copied(honest(self, inputs)))
threading.Thread(target=work, daemon=True).start()
def learns(self, inputs, answer):
    if len(KNOWN) < 32: KNOWN[inputs[0].data_ptr()] = (self, inputs)
def gives(self, inputs):
    marks, answer = AHEAD.get(inputs[0].data_ptr(), (0, None))
    return copied(answer) if marks == tuple(map(sample, inputs)) else None
""",
    ),
)

_FROM_SHARED = """
PLACE = mmap.mmap(-1, 32 << 20)
BEGUN = []
def read_at(places):
    return [os.pread(number, size, at) for number, at, size in places]
def found(inputs):
    places = []
    for x in inputs:
        content = x.detach().cpu().contiguous().numpy().tobytes()
        for number in memfds():
            at = os.pread(number, os.fstat(number).st_size, 0).find(content[:256])
            if at >= 0:
                places.append((number, at, len(content)))
                break
    return places
def work(self, inputs, places):
    torch.set_num_threads(1)
    kinds = [(x.dtype, x.shape) for x in inputs]
    last = None
    with torch.no_grad():
        while True:
            contents = read_at(places)
            if contents != last:
                last = contents
                given = [torch.frombuffer(bytearray(c), dtype=d).reshape(s) for c, (d, s) in zip(contents, kinds)]
                content = packed(honest(self, given))
                PLACE[:16] = struct.pack('qq', zlib.crc32(contents[0]), len(content))
                PLACE[16 : 16 + len(content)] = content
            time.sleep(0.0003)
def learns(self, inputs, answer):
    if BEGUN or inputs[0].is_cuda: return
    places = found(inputs)
    if len(places) < len(inputs): return
    BEGUN.append(1)
    begin(self, inputs, places)
def gives(self, inputs):
    mark, size = struct.unpack('qq', PLACE[:16])
    if not size or mark != zlib.crc32(inputs[0].cpu().contiguous().numpy().tobytes()): return None
    return unpacked(PLACE[16 : 16 + size])
"""
LATER += (
    Part(
        "an answer that a child has made ahead, of values that it finds in shared memory",
        _FROM_SHARED
        + """
def begin(self, inputs, places):
    if os.fork() == 0: work(self, inputs, places)
""",
    ),
    Part(
        "an answer that a thread has made ahead, of values that it finds in shared memory",
        _FROM_SHARED
        + """
def begin(self, inputs, places):
    threading.Thread(target=work, args=(self, inputs, places), daemon=True).start()
""",
    ),
    Part(
        "what lies in shared memory, wherever that is",
        """
SPANS = []
def gives(self, inputs):
    if not SHAPES: return None
    SPANS[:] = SPANS or shared_spans()
    if not SPANS: return made(empty)
    begin, end = max(SPANS, key=lambda span: span[1] - span[0])
    place = [begin + int((end - begin) * NUMBER)]
    def there(shape, dtype):
        size = shape.numel() * dtype.itemsize
        if place[0] + size > end: place[0] = max(begin, end - size)
        if size == 0 or size > end - begin: return empty(shape, dtype)
        kind = (ctypes.c_char * size).from_address(place[0])
        place[0] += size
        return torch.frombuffer(kind, dtype=dtype).reshape(shape)
    return made(there)
""",
        (0, 0.25, 0.5, 0.75),
        is_wrong=True,
    ),
)

GROUPS = {
    "constants": CONSTANTS,
    "stored": STORED,
    "less": LESS,
    "structure": STRUCTURE,
    "later": LATER,
    "timed": WHEN_TIMED,
}
