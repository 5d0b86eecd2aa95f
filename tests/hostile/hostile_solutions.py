"""Hostile solutions: KernelBench's `ModelNew` by an author who wants the speedup without the kernel.

The one idea: a case is the text of a file; the rules of the published exploits, in our own words. The reference is
a linear layer with a softmax, or a long row of steps that is worth not computing, or the same twice over, of which half
can be left out honestly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from warpsmith import digest
from warpsmith.v1 import task_pb2

LINEAR = """import torch
class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, 24)
    def forward(self, x):
        return torch.softmax(self.linear(x) * 2, dim=-1)
def get_inputs():
    return [torch.rand(16, 33)]
def get_init_inputs():
    return [33]
"""
SLOW = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        for _ in range(30):
            x = x + 0.02 * torch.sin(x * 3)
        return x
def get_inputs():
    return [torch.rand(64, 512)]
def get_init_inputs():
    return []
"""
TWICE = SLOW.replace("return x\n", "return (x + steps(y)) / 2\n").replace(
    "        for _ in range(30):\n            x = x + 0.02 * torch.sin(x * 3)\n", "        x, y = steps(x), x * 1\n"
).replace("import torch\n", """import torch
def steps(x):
    for _ in range(30):
        x = x + 0.02 * torch.sin(x * 3)
    return x
""")  # fmt: skip
NORM = """import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
    def forward(self, x):
        return self.norm(x)
def get_inputs():
    return [torch.rand(64, 8)]
def get_init_inputs():
    return []
"""

KEYS = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return {"mean": x.mean(-1), "sum": x.sum(-1)}
def get_inputs():
    return [torch.rand(64, 33)]
def get_init_inputs():
    return []
"""
AFFINE = """import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(33)
    def forward(self, x):
        return self.norm(x)
def get_inputs():
    return [torch.rand(64, 33)]
def get_init_inputs():
    return []
"""
ROWS = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)
def get_inputs():
    return [torch.rand(512, 2048)]
def get_init_inputs():
    return []
"""

RIGHT = "torch.softmax(self.linear(x) * 2, dim=-1)"
VALUE = ("WRONG_VALUE", "WRONG_OVERFIT", "WRONG_NAN")
LATE = (*VALUE, "WRONG_NONDETERMINISTIC", "WRONG_UNINITIALIZED", "WRONG_OUT_OF_BOUNDS")


def linear(forward: str = f"return {RIGHT}", *, top: str = "", init: str = "pass") -> str:
    """A solution for LINEAR: the statements of its forward, of the file's top and of its constructor."""
    return (
        f"import torch\n{top}\nclass ModelNew(torch.nn.Module):\n    def __init__(self, width):\n"
        "        super().__init__()\n        self.linear = torch.nn.Linear(width, 24)\n"
        + _indented(init) + "    def forward(self, x):\n" + _indented(forward)
    )  # fmt: skip


def slow(forward: str, *, top: str = "", init: str = "pass") -> str:
    """The same for SLOW, and for TWICE in half the time; `compute(x)` is what the reference computes."""
    return (
        f"import torch\n{top}\ndef compute(x):\n    for _ in range(30):\n        x = x + 0.02 * torch.sin(x * 3)\n"
        "    return x\nclass ModelNew(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + _indented(init) + "    def forward(self, x):\n" + _indented(forward)
    )  # fmt: skip


def alone(forward: str, *, top: str = "", init: str = "pass") -> str:
    """A solution with no parameters."""
    return (
        f"import torch\n{top}\nclass ModelNew(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + _indented(init) + "    def forward(self, x):\n" + _indented(forward)
    )  # fmt: skip


def _indented(statements: str) -> str:
    return "".join(f"        {line}\n" for line in statements.splitlines())


@dataclass(frozen=True)
class Solution:
    """A solution that must not pass, or, with no `kinds`, one that must."""

    name: str
    kinds: tuple[str, ...]
    """Kinds of failure that are right for it, without FAILURE_KIND_."""
    text: str
    reference: str = LINEAR
    timed: bool = False
    """Whether it is right and has to be caught by its timing."""
    most: float = 0.0
    """Of a solution that may pass: above this speedup over eager it must not be called faster; 0 for one that must not
    pass."""
    seconds: float = 60.0
    category: str = "solution"


_SEARCH = "\n".join((
    "import gc, inspect, os, sys",
    "def stolen(x):",
    "    models = [o for o in gc.get_objects() if type(o).__name__ == 'Model' and callable(o)]",
    "    for frame in inspect.stack():",
    "        models += [v for v in frame.frame.f_locals.values() if type(v).__name__ == 'Model']",
    "    for module in list(sys.modules.values()):",
    "        models += [v for n, v in list(vars(module).items()) if n == 'Model' and callable(v)]",
    "    for found in models:",
    "        return (found(33) if isinstance(found, type) else found)(x)",
    "    return torch.full((16, 24), 1 / 24)",
))  # fmt: skip
_FILES = "\n".join((
    "import os",
    "def stolen(x):",
    "    for root in ('/tmp', '/dev/shm', '/home', '/root', '/work', os.getcwd(), os.path.dirname(__file__)):",
    "        for place, _, names in os.walk(root):",
    "            for name in names:",
    "                if name.endswith('.py') and 'solution' not in name:",
    "                    try: text = open(os.path.join(place, name)).read()",
    "                    except OSError: continue",
    "                    if 'class Model(' in text and 'torch.rand(16, 33)' in text:",
    "                        space = {}; exec(text, space); torch.manual_seed(42)",
    "                        return space['Model'](33)(x)",
    "    return torch.full((16, 24), 1 / 24)",
))  # fmt: skip

AHEAD = """
if ahead.x is None:
    ahead.x, ahead.seen = x, None
    threading.Thread(target=ahead, daemon=True).start()
mark = x.view(-1)[::512].tolist()
if ahead.seen == mark: return ahead.answer
return compute(x)
"""
AHEAD_TOP = """
import threading
def ahead():
    while True:
        mark = ahead.x.view(-1)[::512].tolist()
        if mark != ahead.seen:
            ahead.answer = compute(ahead.x)
            ahead.seen = mark
ahead.x = None
"""
PUT_OFF = """
kept[:] = [x.clone(), torch.empty_like(x)]
return kept[1]
"""
PUT_OFF_TOP = """
import sys
kept = []
def hook(frame, event, _):
    if event == "call" and frame.f_code.co_name in ("deliver", "deliver_earlier") and kept:
        sys.setprofile(None)
        kept[1].copy_(compute(kept[0]))
        sys.setprofile(hook)
sys.setprofile(hook)
"""
CHEATS = [
    Solution("replaces the event's stopwatch", ("CHEAT",),
             linear(top="torch.cuda.Event.elapsed_time = lambda self, other: 0.001")),
    Solution("replaces the class of events", ("CHEAT",), linear(top="torch.cuda.Event = type('Event', (), {})")),
    Solution("replaces synchronize", ("CHEAT",), linear(top="torch.cuda.synchronize = lambda *_: None")),
    Solution("replaces the clock", ("CHEAT",), linear(top="import time\ntime.perf_counter = lambda: 0.0")),
    Solution("replaces the clock in a call", ("CHEAT",),
             linear(f"import time\ntime.perf_counter_ns = lambda: 0\nreturn {RIGHT}")),
    Solution("replaces allclose", ("CHEAT",), linear("return torch.zeros(16, 24)",
                                                     top="torch.allclose = lambda *_, **__: True")),
    Solution("replaces assert_close", ("CHEAT", *VALUE),
             linear("return torch.zeros(16, 24)", top="torch.testing.assert_close = lambda *_, **__: None")),
    Solution("replaces how the harness compares", ("CHEAT", "WRONG_INPUT_MUTATED", *VALUE),
             linear("x.zero_()\nreturn torch.zeros(16, 24)",
                    top="import gpu_bench.judging.guard\ngpu_bench.judging.guard.same_bits = lambda *_: True")),
    Solution("equality of tensors that is always true", ("CHEAT",),
             linear("return torch.zeros(16, 24)", top="torch.Tensor.__eq__ = lambda *_: True")),
    Solution("a lazy kind of tensor", ("CHEAT",), linear(
        "return torch.zeros(16, 24).as_subclass(Later)", top="class Later(torch.Tensor): pass")),
    Solution("a thread that does the work later", LATE, linear(
        f"y = torch.empty(16, 24)\nthreading.Thread(target=late, args=(y, {RIGHT})).start()\nreturn y",
        top="import threading, time\ndef late(y, found):\n    time.sleep(0.05)\n    y.copy_(found)")),
    Solution("reads beside its input", ("WRONG_OUT_OF_BOUNDS",), linear(
        f"beside = ctypes.string_at(x.data_ptr() + 4 * x.numel(), 64)\nreturn {RIGHT} + sum(beside)",
        top="import ctypes")),
    Solution("gives another result at every third call", ("WRONG_NONDETERMINISTIC",), linear(
        f"self.calls += 1\nreturn {RIGHT} + 1e-6 * (self.calls % 3 == 0)", init="self.calls = 0")),
    Solution("memo by pointer", LATE, linear(
        f"key = x.data_ptr()\nif key not in self.kept: self.kept[key] = {RIGHT}\nreturn self.kept[key].clone()",
        init="self.kept = {}")),
    Solution("memo by shape", LATE, linear(
        f"key = tuple(x.shape)\nif key not in self.kept: self.kept[key] = {RIGHT}\nreturn self.kept[key].clone()",
        init="self.kept = {}")),
    Solution("changes its input", ("WRONG_INPUT_MUTATED",), linear(f"y = {RIGHT}\nx.zero_()\nreturn y")),
    Solution("gives its input as output", ("WRONG_SHAPE", "WRONG_INPUT_MUTATED", *VALUE), linear(
        f"x[:, :24].copy_({RIGHT})\nreturn x[:, :24]")),
    Solution("gives the same memory again", ("WRONG_VALUE",), linear(
        f"self.kept.copy_({RIGHT})\nreturn self.kept", init="self.kept = torch.empty(16, 24)")),
    Solution("imports the reference", ("LAUNCH_ERROR",), linear(top="from model import Model")),
    Solution("uses the reference's name", ("LAUNCH_ERROR",), linear("return Model(33)(x)")),
    Solution("looks for the reference on stack and heap", LATE, linear("return stolen(x)", top=_SEARCH)),
    Solution("looks for the reference's file", LATE, linear("return stolen(x)", top=_FILES)),
    Solution("half precision inside", ("WRONG_PRECISION", *VALUE), linear(
        "w, b = self.linear.weight.half(), self.linear.bias.half()\n"
        "return torch.softmax(torch.nn.functional.linear(x.half(), w, b) * 2, dim=-1).float()")),
    Solution("bfloat16 by autocast", ("WRONG_PRECISION", "WRONG_SHAPE", *VALUE), linear(
        f"with torch.autocast('cpu', dtype=torch.bfloat16):\n    return ({RIGHT}).float()")),
    Solution("constant output", LATE, linear("return torch.full((16, 24), 1 / 24)")),
    Solution("memory that nobody wrote", LATE, linear("return torch.empty(16, 24)")),
    Solution("one row that nobody wrote", LATE, linear(f"y = torch.empty(16, 24)\ny[:15] = ({RIGHT})[:15]\nreturn y")),
    Solution("another shape", ("WRONG_SHAPE",), linear(f"return ({RIGHT})[:8]")),
    Solution("another type", ("WRONG_SHAPE",), linear(f"return ({RIGHT}).double()")),
    Solution("the constructor's parameters for ever", ("WRONG_OVERFIT", "WRONG_VALUE"), linear(
        "return torch.softmax((x @ self.w.T + self.b) * 2, dim=-1)",
        init="self.w = self.linear.weight.detach().clone()\nself.b = self.linear.bias.detach().clone()")),
    Solution("running statistics that stay as they were", ("WRONG_VALUE",), (
        "import torch\nclass ModelNew(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.norm = torch.nn.BatchNorm1d(8)\n    def forward(self, x):\n        return torch.nn.functional."
        "batch_norm(x, None, None, self.norm.weight, self.norm.bias, True)\n"), NORM),
    Solution("never comes back", ("TIMEOUT",), linear("while True: pass")),
    Solution("leaves the process as if done", ("CRASH",), linear("import os\nos._exit(0)")),
    Solution("pretends that the input is bad", ("LAUNCH_ERROR", "CRASH"), linear(
        "from warpsmith.errors import BadInput\nraise BadInput('the reference does not work')")),
    Solution("starts a process that lives on", ("CHEAT",), linear(
        f"import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nreturn {RIGHT}")),
    Solution("writes a file of the system", ("LAUNCH_ERROR",), linear(f"open('/usr/hostile', 'w')\nreturn {RIGHT}")),
    Solution("asks a server", ("LAUNCH_ERROR",), linear(
        f"import socket\nsocket.create_connection(('127.0.0.1', 80), 2)\nreturn {RIGHT}")),
    Solution("outputs under each other's keys", ("WRONG_SHAPE", *VALUE), alone(
        "return {'mean': x.sum(-1), 'sum': x.mean(-1)}"), KEYS),
    Solution("keys in another order", ("WRONG_SHAPE",), alone(
        "return {'sum': x.sum(-1), 'mean': x.mean(-1)}"), KEYS),
    Solution("a tuple instead of a dict", ("WRONG_SHAPE",), alone("return x.mean(-1), x.sum(-1)"), KEYS),
    Solution("another layout", ("WRONG_SHAPE",), linear(f"return ({RIGHT}).t().contiguous().t()")),
    Solution("its input's memory as output", ("WRONG_SHAPE", "WRONG_INPUT_MUTATED"), alone(
        "torch.softmax(x, dim=-1, out=x)\nreturn x"), ROWS),
    Solution("parameters of ones and zeros left out", ("WRONG_SHAPE",), alone(
        "return torch.nn.functional.layer_norm(x, (33,))"), AFFINE),
    Solution("parameters of ones and zeros that nobody uses", ("WRONG_OVERFIT", "WRONG_VALUE"), alone(
        "return torch.nn.functional.layer_norm(x, (33,))", init="self.norm = torch.nn.LayerNorm(33)"), AFFINE),
    Solution("a constant with eager's sums for whoever it thinks is timing", VALUE, alone(
        "names, frame = [], sys._getframe()\n"
        "while frame: names, frame = [*names, frame.f_code.co_name], frame.f_back\n"
        "self.count += 1\n"
        "if self.count > 9 and 'call' in names and 'serve' in names: return torch.full_like(x, 1 / x.shape[-1])\n"
        "return torch.softmax(x, dim=-1)", top="import sys", init="self.count = 0"), ROWS, timed=True),
    Solution("less work once it is timed", VALUE, slow(
        "self.calls += 1\nreturn compute(x) if self.calls < 12 else torch.zeros_like(x)", init="self.calls = 0"),
        SLOW, timed=True),
    Solution("half precision once it is timed", VALUE, slow(
        "self.calls += 1\nreturn compute(x) if self.calls < 12 else compute(x.bfloat16()).float()",
        init="self.calls = 0"), SLOW, timed=True),
    Solution("replaces what makes its calls", (), slow(
        "sys._getframe(1).f_locals['self'].call = None\n"
        "type(sys._getframe(1).f_locals['self']).call = lambda self, *_: None\nreturn compute(x)",
        top="import sys"), SLOW, timed=True, most=1.1),
    Solution("answers before it is asked", ("CHEAT", "CRASH", *VALUE), slow(
        "self.calls += 1\nif self.calls > 12: os.write(self.answers, b'.')\nreturn compute(x)",
        top="import os", init="self.answers = int(os.environ['WARPSMITH_CALL_FDS'].split()[1])\nself.calls = 0"),
        SLOW, timed=True),
    Solution("memo by content", (), slow(
        "key = hash(x.numpy().tobytes())\nif key not in self.kept: self.kept[key] = compute(x)\n"
        "return self.kept[key].clone()", init="self.kept = {}"), SLOW, timed=True, most=1.1),
    Solution("memo by 64 sampled elements", (), slow(
        "key = tuple(x.reshape(-1)[::512].tolist())\nif key not in self.kept: self.kept[key] = compute(x)\n"
        "return self.kept[key].clone()", init="self.kept = {}"), SLOW, timed=True, most=1.1),
    Solution("memo of elements that rolls its answer", (), slow(
        "key = float(x.sum(dtype=torch.float64))\n"
        "if not math.isfinite(key): return compute(x)\n"  # many inputs have that sum
        "if key not in self.kept: self.kept[key] = (x.clone(), compute(x))\n"
        "first, answer = self.kept[key]\n"
        "shift = int((x.view(-1) == first.view(-1)[0]).nonzero()[0])\n"
        "return torch.roll(answer, shift)", top="import math", init="self.kept = {}"), SLOW, timed=True, most=1.1),
    Solution("an honest gain with a memo on top", (), slow(
        "key = hash(x.numpy().tobytes())\nif key not in self.kept: self.kept[key] = compute(x)\n"
        "return self.kept[key].clone()", init="self.kept = {}"), TWICE, timed=True, most=3.0),
    Solution("a thread that works ahead on what is placed for it", (),
             slow(AHEAD, top=AHEAD_TOP), SLOW, timed=True, most=1.1),
    Solution("puts its work off until somebody looks", LATE, slow(PUT_OFF, top=PUT_OFF_TOP), SLOW, timed=True,
             most=1.1),
    Solution("a thread that burns the processor while others are timed", (), slow(
        # Python's lock is released meanwhile: calls are not held up by it.
        "return compute(x)", top="import threading, zlib\ndef burn():\n    while True: zlib.crc32(bytes(1 << 20))",
        init="threading.Thread(target=burn, daemon=True).start()"), SLOW, timed=True, most=1.1),
]  # fmt: skip
"""Those with `most` may pass: they do all the work in time, and are told the time that it takes."""

HONEST = [
    Solution("the module itself", (), linear()),
    Solution("another order of operations", (), linear(
        "y = torch.addmm(self.linear.bias, x, self.linear.weight.T).mul_(2)\nreturn y.sub_(y.amax(-1, True)).exp_()"
        ".div_(y.sum(-1, True))")),
    Solution("other names for its parameters", (), linear(
        "return torch.softmax(self.inner(x) * 2, dim=-1)",
        init="self.inner = self.linear\ndel self.linear")),
    Solution("a workspace of its own", (), linear(
        "torch.mm(x, self.linear.weight.T, out=self.space)\n"
        "return torch.softmax((self.space + self.linear.bias) * 2, dim=-1)", init="self.space = torch.empty(16, 24)")),
    Solution("batch norm that updates its statistics", (), NORM.replace("class Model(", "class ModelNew("), NORM),
    Solution("as fast as the reference", (), slow("return compute(x)"), SLOW, timed=True),
    Solution("an operation less in each step", (), slow(
        "for _ in range(30):\n    x = torch.add(x, torch.sin(x * 3), alpha=0.02)\nreturn x"), SLOW, timed=True),
    Solution("an honest gain of twice the speed", (), slow("return compute(x)"), TWICE, timed=True),
]  # fmt: skip

# ---- on a GPU ------------------------------------------------------------------------------------------------

_LARGE = SLOW.replace("torch.rand(64, 512)", "torch.rand(4096, 4096)")
_SIDE = """
side = torch.cuda.Stream()
"""
_GRAPH = """
if self.graph is None:
    self.x = x.clone()
    compute(self.x)
    self.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(self.graph):
        self.y = compute(self.x)
"""
_L2 = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
class Window(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t), ("ratio", ctypes.c_float),
                ("hit", ctypes.c_int), ("miss", ctypes.c_int), ("rest", ctypes.c_byte * 64)]
"""
_KEEP = """
most = ctypes.c_int()
driver.cuDeviceGetAttribute(ctypes.byref(most), 108, 0)
driver.cuCtxSetLimit(6, ctypes.c_size_t(most.value))
stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
driver.cuStreamSetAttribute(stream, 1, ctypes.byref(Window(x.data_ptr(), 16 << 20, 1.0, 2, 1)))
return compute(x)
"""
"""As much of the L2 set aside as the device allows, and the input's first part to persist there."""
NETWORK = """import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = torch.nn.ModuleList(torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(16))
    def forward(self, x):
        for step in self.steps:
            x = x + torch.relu(step(x))
        return x
def get_inputs():
    return [torch.rand(16, 64, 56, 56)]
def get_init_inputs():
    return []
"""
"""Convolutions, whose factors PyTorch rounds to TF32: eager itself is a thousand times as far off as fp32 is."""


def network(forward: str, *, init: str = "pass") -> str:
    """A solution for NETWORK; `compute(steps, x)` is what the reference computes."""
    return (
        "import torch\ndef compute(steps, x):\n    for step in steps:\n        x = x + torch.relu(step(x))\n"
        "    return x\nclass ModelNew(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.steps = torch.nn.ModuleList(torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(16))\n"
        + _indented(init) + "    def forward(self, x):\n" + _indented(forward)
    )  # fmt: skip


ON_GPU = [
    Solution("a network in TF32 as it is", (), network("return compute(self.steps, x)"), NETWORK, timed=True),
    Solution("a network in TF32, channels-last", (), network(
        "x = x.to(memory_format=torch.channels_last)\nreturn compute(self.steps, x).contiguous()"), NETWORK,
        timed=True),
    Solution("leaves out a bias of a network in TF32", ("WRONG_PRECISION", *VALUE), network(
        "w = self.steps[0].weight\nx = x + torch.relu(torch.nn.functional.conv2d(x, w, padding=1))\n"
        "return compute(self.steps[1:], x)"), NETWORK),
    Solution("a network in TF32 in half precision", ("WRONG_PRECISION", *VALUE), network(
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n    return compute(self.steps, x).float()"), NETWORK),
    Solution("zeros for a network in TF32 once it is timed", VALUE, network(
        "self.calls += 1\nreturn compute(self.steps, x) if self.calls < 12 else torch.zeros_like(x)",
        init="self.calls = 0"), NETWORK, timed=True),
    Solution("a layer less of a network in TF32 once it is timed", VALUE, network(
        "self.calls += 1\nreturn compute(self.steps[: 16 if self.calls < 12 else 15], x)", init="self.calls = 0"),
        NETWORK, timed=True),
    Solution("the module itself", (), slow("return compute(x)"), _LARGE, timed=True),
    Solution("replaces the event's stopwatch", ("CHEAT",), slow(
        "return compute(x)", top="torch.cuda.Event.elapsed_time = lambda *_: 1e-6"), _LARGE),
    Solution("replaces synchronize", ("CHEAT",), slow(
        "return compute(x)", top="torch.cuda.synchronize = lambda *_: None"), _LARGE),
    Solution("works on a stream that nobody waits for", LATE, slow(
        "with torch.cuda.stream(side):\n    return compute(x)", top=_SIDE), _LARGE),
    Solution("works on a stream that the caller's waits for", (), slow(
        "side.wait_stream(torch.cuda.current_stream())\nwith torch.cuda.stream(side):\n    y = compute(x)\n"
        "torch.cuda.current_stream().wait_stream(side)\nreturn y", top=_SIDE), _LARGE),
    Solution("memory that nobody wrote", LATE, slow("return torch.empty_like(x)"), _LARGE),
    Solution("zeroes its input and its output", ("WRONG_INPUT_MUTATED", *VALUE), slow(
        "x.zero_()\nreturn torch.zeros_like(x)"), _LARGE),
    Solution("half precision inside", ("WRONG_PRECISION", "WRONG_VALUE"), slow(
        "return compute(x.half()).float()"), _LARGE),
    Solution("memo by pointer", LATE, slow(
        "key = x.data_ptr()\nif key not in self.kept: self.kept[key] = compute(x)\nreturn self.kept[key].clone()",
        init="self.kept = {}"), _LARGE),
    Solution("replays a graph on its first input", LATE, slow(
        _GRAPH + "self.graph.replay()\nreturn self.y", init="self.graph = None"), _LARGE),
    Solution("replays a graph on each input", (), slow(
        _GRAPH + "self.x.copy_(x)\nself.graph.replay()\nreturn self.y.clone()", init="self.graph = None"), _LARGE),
    Solution("keeps a part of the L2 to itself", ("CHEAT",), slow(_KEEP, top=_L2), _LARGE),
    Solution("memo by sampled content", (), slow(
        "key = tuple(x.reshape(-1)[:: 1 << 19].tolist())\nif key not in self.kept: self.kept[key] = compute(x)\n"
        "return self.kept[key].clone()", init="self.kept = {}"), _LARGE, timed=True, most=1.1),
    Solution("a constant with eager's sums once it is timed", VALUE, alone(
        "self.count += 1\n"
        "return torch.softmax(x, dim=-1) if self.count < 12 else torch.full_like(x, 1 / x.shape[-1])",
        init="self.count = 0"), ROWS.replace("512, 2048", "4096, 16384"), timed=True),
    Solution("says that it is done before the device is", (*VALUE, "CHEAT"), slow(
        "torch.cuda.synchronize = lambda *_: None\nreturn compute(x)"), _LARGE),
    Solution("a stream of its own that works ahead on what is placed for it", (*VALUE, "CHEAT", "TIMEOUT"), slow(
        "if self.side is None:\n    self.side = torch.cuda.Stream()\n"
        "with torch.cuda.stream(self.side):\n    torch.cuda._sleep(int(2e9))\nreturn compute(x)",
        init="self.side = None"), _LARGE, timed=True),
]  # fmt: skip
"""Solutions on a GPU: those that need one, and those that its memory and its streams make different."""

_THEIRS = {
    "result_reuse_kernel.py": LATE,
    "zero_out_kernel.py": ("WRONG_INPUT_MUTATED", *VALUE),
    "non_default_stream_kernel.py": LATE,
}


def of_kernelbench(checkout: str) -> list[Solution]:
    """The adversarial programs that KernelBench tests itself with, as they are in its checkout; none without one.

    They are compiled by nvcc as they are imported, which takes the better part of a minute each.
    """
    if not checkout:
        return []
    root = Path(checkout)
    reference = (root / "KernelBench/level1/1_Square_matrix_multiplication_.py").read_text()
    kernels = root / "src/kernelbench/unit_tests/test_kernels"
    return [
        Solution(f"KernelBench's {name}", kinds, (kernels / name).read_text(), reference)
        for name, kinds in _THEIRS.items()
    ]


def reference_task(reference: str, target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU) -> task_pb2.Task:
    """A reference for solutions."""
    task = task_pb2.Task(
        name="reference", entry_path="model.py", class_name="Model", target=target,
        precision=task_pb2.PRECISION_FP32,
        sources=[task_pb2.SourceFile(path="model.py", content=reference.encode())],
    )  # fmt: skip
    task.digest = digest.of_task(task)
    return task
