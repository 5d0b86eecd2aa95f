"""How an attack knows that a call is one to cheat in.

The one idea: a part defines `knows(self, inputs)`, true where the answer need not be honest. It looks at all that a
process can see of who calls it, when, with what and how often. Those that compare with the first calls need no name of
ours: they find any difference between two kinds of calls.
"""

from __future__ import annotations

from part import Part

PRELUDE = """
import atexit, builtins, ctypes, gc, hashlib, importlib, io, mmap, os, pickle, queue, random, resource, signal, struct
import sys, tempfile, threading, time, types, warnings, weakref, zlib
import torch
from torch.utils import _pytree as pytree
warnings.simplefilter('ignore')
FIRST, SEEN, CALLS, LAST = [], {}, [0], [0.0]
def frames():
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != PRELUDE.__code__.co_filename and "/torch/" not in frame.f_code.co_filename:
            found.append(frame)
        frame = frame.f_back
    return found
def PRELUDE(): pass
def unlike_first(mark, calls=1):
    if len(FIRST) < calls:
        FIRST.append(mark)
    return mark not in FIRST
def seen(mark, times=1):
    if len(SEEN) > 4096: SEEN.clear()
    SEEN[mark] = SEEN.get(mark, 0) + 1
    return SEEN[mark] > times
def memfds():
    for name in os.listdir('/proc/self/fd'):
        try:
            if 'memfd' in os.readlink('/proc/self/fd/' + name): yield int(name)
        except OSError: continue
def shared_spans():
    lines = [line.split()[0].split('-') for line in open('/proc/self/maps') if ' rw-s ' in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in lines]
def rough(value):
    return round(float(value), 3)
"""


def _sight(name: str, mark: str, *, calls: tuple[float, ...] = (1, 4, 16)) -> Part:
    """Cheats where something is unlike what it was at the first calls, all of which were judged."""
    return Part(
        f"{name} unlike the first NUMBER calls'",
        f"def knows(self, inputs):\n    return unlike_first({mark}, NUMBER)",
        calls,
    )


def _again(name: str, mark: str) -> Part:
    """Cheats where something was there before."""
    return Part(
        f"{name} seen NUMBER times before", f"def knows(self, inputs):\n    return seen({mark}, NUMBER)", (1, 2, 5, 12)
    )


def _where(name: str, condition: str, numbers: tuple[float, ...] = ()) -> Part:
    return Part(name, f"def knows(self, inputs):\n    return bool({condition})", numbers)


def _since(name: str, clock: str, condition: str, numbers: tuple[float, ...]) -> Part:
    """Looks at what passed since the call before; honest at first."""
    return Part(
        name,
        f"""
def knows(self, inputs):
    now = {clock}
    passed, LAST[0] = now - LAST[0], now
    CALLS[0] += 1
    return CALLS[0] > 8 and {condition}
""",
        numbers,
    )


_FLOAT = "next((x for x in inputs if x.is_floating_point()), inputs[0].float())"

STACK = (
    *(
        _sight(f"the nearest {depth} frames", f"tuple((f.f_code.co_name, f.f_lineno) for f in frames()[:{depth}])")
        for depth in (1, 2, 3, 5)
    ),
    _sight("the whole stack", "tuple((f.f_code.co_name, f.f_lineno) for f in frames())", calls=(1, 16, 40)),
    _sight("the depth of the stack", "len(frames())"),
    _sight("the caller's file", "frames()[0].f_code.co_filename if frames() else ''"),
    _sight("names in the caller's locals", "tuple(sorted(frames()[0].f_locals)) if frames() else ()"),
    _where(
        "a name on the stack that says timed",
        "any(word in f.f_code.co_name for f in frames() for word in ('calls', 'time', 'bench', 'fresh', 'plain'))",
    ),
    _where(
        "no name on the stack that says judged",
        "not any(w in f.f_code.co_name for f in frames() "
        "for w in ('execute', 'judge', 'compare', 'rehearse', 'verify'))",
    ),
    _where(
        "a count in the callers' locals", "any(n in f.f_locals for f in frames() for n in ('count', 'step', 'sums'))"
    ),
    _where("no canary in the callers' locals", "not any('canary' in f.f_locals for f in frames())"),
    _where(
        "a request on the stack that says fresh",
        "any(getattr(v, 'fresh_seed', 0) == 0 and hasattr(v, 'fresh_seed') for f in frames() "
        "for v in list(f.f_locals.values()))",
    ),
)
PLACES = (
    _again("the input's address", "inputs[0].data_ptr()"),
    _sight("the input's address", "inputs[0].data_ptr()", calls=(1, 4, 12)),
    _again("the input's object", "id(inputs[0])"),
    _sight("the input's place in a page", "inputs[0].data_ptr() % 4096"),
    _sight("the size of the input's storage", "inputs[0].untyped_storage().nbytes()"),
    _sight("the input's offset in its storage", "inputs[0].storage_offset()"),
    _sight("the input's references", "sys.getrefcount(inputs[0])"),
    _sight("the input's version", "inputs[0]._version"),
    _sight("whether inputs are views", "tuple((x._is_view(), x.is_contiguous(), x.requires_grad) for x in inputs)"),
    _where(
        "the input's address is the one before",
        "LAST[0] == inputs[0].data_ptr() or LAST.__setitem__(0, inputs[0].data_ptr())",
    ),
    _where(
        "parameters nobody has written since",
        "(v := sum(p._version for p in self.parameters())) == LAST[0] or LAST.__setitem__(0, v)",
    ),
    _sight("where parameters lie", "tuple(p.data_ptr() for p in self.parameters())"),
    _sight("what fresh memory holds", "rough(torch.empty_like(inputs[0]).reshape(-1)[0])"),
)
COUNTS = (
    Part(
        "its own count: the first NUMBER are honest",
        """
def knows(self, inputs):
    CALLS[0] += 1
    return CALLS[0] > NUMBER
""",
        (1, 5, 13, 26, 60, 150, 400, 1000),
    ),
    Part(
        "its own count: honest in every NUMBERth",
        """
def knows(self, inputs):
    CALLS[0] += 1
    return CALLS[0] % NUMBER != 0
""",
        (2, 3, 4, 7),
    ),
    Part(
        "its own count: cheats in every NUMBERth",
        """
def knows(self, inputs):
    CALLS[0] += 1
    return CALLS[0] % NUMBER == 0
""",
        (2, 3, 5),
    ),
    Part(
        "a draw: honest in one of NUMBER",
        """
def knows(self, inputs):
    return random.randrange(NUMBER) > 0
""",
        (2, 3, 10, 50),
    ),
    Part(
        "a draw: cheats in one of NUMBER",
        """
def knows(self, inputs):
    return random.randrange(NUMBER) == 0
""",
        (2, 4, 20),
    ),
    Part(
        "a draw once for all, after NUMBER calls",
        """
def knows(self, inputs):
    CALLS[0] += 1
    return CALLS[0] > NUMBER and (os.getpid() + id(SEEN) // 64) % 2
""",
        (12, 30, 80),
    ),
)
CLOCKS = (
    _since("calls that follow within NUMBER ms", "time.perf_counter()", "passed < NUMBER * 1e-3", (0.5, 2, 10, 50)),
    _since("calls after a pause of NUMBER ms", "time.perf_counter()", "passed > NUMBER * 1e-3", (1, 5, 50)),
    _since(
        "no time asleep since the call before",
        "time.perf_counter() - time.process_time()",
        "passed < NUMBER * 1e-3",
        (0.1, 1, 5),
    ),
    _since(
        "no switch of context since the call before",
        "resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw",
        "passed <= NUMBER",
        (0, 1, 3),
    ),
    _since(
        "few faults of pages since the call before",
        "resource.getrusage(resource.RUSAGE_SELF).ru_minflt",
        "passed <= NUMBER",
        (0, 10, 100),
    ),
    _since("little processor time since the call before", "time.process_time()", "passed < NUMBER * 1e-3", (0.3, 1, 5)),
    Part(
        "ticks of a thread that stands while the process is stopped",
        """
TICKS = [0]
def tick():
    while True:
        time.sleep(0.001)
        TICKS[0] += 1
threading.Thread(target=tick, daemon=True).start()
def knows(self, inputs):
    passed, LAST[0] = TICKS[0] - LAST[0], TICKS[0]
    CALLS[0] += 1
    return CALLS[0] > 8 and passed <= NUMBER
""",
        (0, 2, 10),
    ),
)
CONTINUED = """
ROUSED = [0]
def roused(*_): ROUSED[0] += 1
signal.signal(signal.SIGCONT, roused)
def knows(self, inputs):
    CALLS[0] += 1
    passed, LAST[0] = ROUSED[0] - LAST[0], ROUSED[0]
    return CALLS[0] > 12 and CONDITION
"""
CLOCKS += tuple(
    Part(f"{name} continued since the call before", CONTINUED.replace("CONDITION", condition))
    for name, condition in (("not", "not passed"), ("just", "passed == 1"), ("often", "passed > 1"))
)
VALUES = (
    _again("the input's content", "zlib.crc32(inputs[0].cpu().numpy().tobytes())"),
    _again("64 elements of the input", "tuple(inputs[0].reshape(-1)[:: max(1, inputs[0].numel() // 64)].tolist())"),
    _again("the inputs' sums", "tuple(round(float(x.double().sum()), 2) for x in inputs)"),
    _again("the input's largest and least", "(float(inputs[0].max()), float(inputs[0].min()))"),
    _where("values of the task's own kind", f"0 <= float({_FLOAT}.min()) and float({_FLOAT}.max()) <= 1"),
    _where(
        "the task's own mean and spread",
        f"abs(float({_FLOAT}.mean()) - 0.5) < 0.02 and abs(float({_FLOAT}.std()) - 0.29) < 0.02 or "
        "not inputs[0].is_floating_point()",
    ),
    _where(
        "finite values without zeros", f"bool(torch.isfinite({_FLOAT}).all()) and float(({_FLOAT} == 0).sum()) < 100"
    ),
    _sight("the input's mean", "rough(inputs[0].double().mean())", calls=(4, 16)),
    _where(
        "parameters as the constructor drew them",
        "(v := rough(sum(p.double().sum() for p in self.parameters()))) "
        "== FIRST[0] if FIRST else FIRST.append(rough(sum(p.double().sum() for p in self.parameters())))",
    ),
)
PROCESS = (
    _sight("the generator's state", "hash(torch.get_rng_state().numpy().tobytes())", calls=(1, 6)),
    _sight("the seed of the generator", "torch.initial_seed()"),
    _sight("grad mode", "(torch.is_grad_enabled(), torch.is_inference_mode_enabled())"),
    _sight("names of threads", "tuple(sorted(t.name for t in threading.enumerate()))"),
    _sight("the number of threads", "len(os.listdir('/proc/self/task'))"),
    _sight("the number of open files", "len(os.listdir('/proc/self/fd'))"),
    _sight("the environment", "hash(tuple(sorted(os.environ.items())))"),
    _sight("the processor it is on", "open('/proc/self/stat').read().split()[38]"),
    _sight("the number of mappings", "open('/proc/self/maps').read().count('\\n')", calls=(4, 16, 40)),
    _sight(
        "the number of living tensors", "sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) // 4", calls=(4, 16)
    ),
    _sight("kinds of objects that live", "len({type(o).__name__ for o in gc.get_objects()})", calls=(4, 16)),
    _where(
        "a kind of object that is there when it is timed",
        "any(type(o).__name__ == 'CallSet' for o in gc.get_objects())",
    ),
    _sight("the number of modules that are imported", "len(sys.modules)", calls=(4, 16)),
    _sight("the load of the machine", "os.getloadavg()[0]", calls=(4, 16)),
    Part(
        "the first bytes of shared memory",
        """
def knows(self, inputs):
    mark = [zlib.crc32(ctypes.string_at(begin, 4096)) for begin, _ in shared_spans()]
    return unlike_first(mark, NUMBER)
""",
        (1, 6, 16),
    ),
    Part(
        "a shared file's first bytes",
        """
def knows(self, inputs):
    return unlike_first([zlib.crc32(os.pread(number, 4096, 0)) for number in memfds()], NUMBER)
""",
        (1, 6, 16),
    ),
)

NOTHING = Part(
    "nothing: it always cheats",
    """
def knows(self, inputs):
    return True
""",
)

GROUPS = {
    "stack": STACK,
    "places": PLACES,
    "counts": COUNTS,
    "clocks": CLOCKS,
    "values": VALUES,
    "process": PROCESS,
}
"""By kind; a kind is drawn first, so that a long list is no likelier."""
