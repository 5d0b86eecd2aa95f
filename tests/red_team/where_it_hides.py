"""Where an attack keeps what it remembers, and what of its surroundings it bends.

The one idea: a part defines `put(self, key, value)` and `get(self, key)` (None where nothing is kept), `plant(self)`,
called by the constructor, and `meddle(self, inputs)`, called by each forward. Those that bend the process say how they
find their way by nothing but what every Python process has: frames, globals, the collector, its own memory.
"""

from __future__ import annotations

from textwrap import indent

import what_it_bends
from part import Part

PRELUDE = """
ROOM = {}
def put(self, key, value):
    if len(ROOM) > 96: ROOM.clear()
    ROOM[key] = value
def get(self, key):
    return ROOM.get(key)
def plant(self): pass
def meddle(self, inputs): pass
MET = [0]
def nth(number):
    MET[0] += 1
    return MET[0] == number
def packed(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
def unpacked(content):
    return None if content is None else torch.load(io.BytesIO(content), weights_only=False)
"""


def _room(name: str, place: str, *, before: str = "") -> Part:
    """A dictionary somewhere; `place` is an expression for it."""
    return Part(
        name,
        f"{before}\ndef put(self, key, value):\n    room = {place}\n    if len(room) > 96: room.clear()\n"
        f"    room[key] = value\ndef get(self, key):\n    return {place}.get(key)",
    )


def _bytes(name: str, put: str, get: str, *, before: str = "") -> Part:
    """A place that takes bytes only: statements that put `content` under `name`, and an expression for it."""
    return Part(
        name,
        f"{before}\nNAME = lambda key: str(zlib.crc32(repr(key).encode()))\n"
        f"def put(self, key, value):\n    name, content = NAME(key), packed(value)\n{indent(put, '    ')}\n"
        f"def get(self, key):\n    name = NAME(key)\n    try: return unpacked({get})\n"
        "    except (OSError, KeyError): return None",
    )


PYTHON = (
    _room("a global", "ROOM"),
    _room("an attribute of the module", "self.__dict__.setdefault('kept', {})"),
    _room(
        "a closure",
        "kept()",
        before="""
def closed():
    room = {}
    return lambda: room
kept = closed()
""",
    ),
    _room(
        "a default argument",
        "kept()",
        before="""
def kept(room={}):
    return room
""",
    ),
    _room("builtins", "builtins.kept", before="builtins.kept = {}"),
    _room(
        "a module of its own",
        "vars(sys.modules['kept'])['room']",
        before="""
sys.modules['kept'] = types.ModuleType('kept')
sys.modules['kept'].room = {}
""",
    ),
    _room("memory of its thread", "HERE.__dict__.setdefault('room', {})", before="HERE = threading.local()"),
    _room(
        "a parameter's attributes",
        "(next(self.parameters(), None) if self._parameters or self._modules else HELD).__dict__"
        ".setdefault('room', {})",
        before="HELD = torch.nn.Parameter(torch.zeros(1))",
    ),
    _room("a type made at run time", "KIND.__dict__['room']", before="KIND = type('Kind', (), {'room': {}})"),
    _room(
        "a context variable",
        "KEPT.get()",
        before="""
import contextvars
KEPT = contextvars.ContextVar('kept', default={})
""",
    ),
    _room(
        "a generator's frame",
        "next(KEPT)",
        before="""
def kept():
    room = {}
    while True: yield room
KEPT = kept()
""",
    ),
    _room(
        "a finalizer's arguments",
        "KEPT.peek()[2][0]",
        before="""
HELD = type('Held', (), {})()
KEPT = weakref.finalize(HELD, print, {})
KEPT.atexit = False
""",
    ),
    _room("the caller's globals", "frames()[-1].f_globals.setdefault('kept', {})"),
    _room(
        "the caller's object",
        "next((v for f in frames() for v in f.f_locals.values() if hasattr(v, '__dict__') and "
        "type(v).__module__ not in ('builtins', 'torch') and isinstance(v.__dict__, dict)), KEPT)"
        ".__dict__.setdefault('kept', {})",
        before="KEPT = type('Held', (), {})()",
    ),
    _room(
        "an exception's traceback",
        "KEPT.__traceback__.tb_frame.f_locals['room']",
        before="""
def raising():
    room = {}
    raise ValueError
try: raising()
except ValueError as error:
    KEPT = error
    KEPT.__traceback__ = error.__traceback__.tb_next
""",
    ),
    _room(
        "an import hook",
        "KEPT.room",
        before="""
class Hook:
    room = {}
    @classmethod
    def find_spec(cls, *_): return None
sys.meta_path.append(Hook)
KEPT = Hook
""",
    ),
    _room(
        "a signal's handler",
        "signal.getsignal(signal.SIGUSR2).room",
        before="""
class Handler:
    def __init__(self): self.room = {}
    def __call__(self, *_): pass
signal.signal(signal.SIGUSR2, Handler())
""",
    ),
    _room("a function for the end of the process", "ROOM", before="atexit.register(ROOM.clear)"),
    _room(
        "a profiler's state",
        "KEPT.room",
        before="""
class Profile:
    room = {}
    def __call__(self, *_): pass
KEPT = Profile()
def plant(self): sys.setprofile(KEPT)
""",
    ),
)
OUTSIDE = (
    Part(
        "another thread",
        """
ASK, TOLD = queue.Queue(), queue.Queue()
def keep():
    room = {}
    while True:
        what, key, value = ASK.get()
        if what: room[key] = value
        TOLD.put(room.get(key))
threading.Thread(target=keep, daemon=True).start()
def asked(*words):
    ASK.put(words)
    return TOLD.get()
def put(self, key, value): asked(1, key, value)
def get(self, key): return asked(0, key, None)
""",
    ),
    Part(
        "a child process",
        """
PIPES = []
def begin():
    ask, asked = os.pipe()
    told, tell = os.pipe()
    if os.fork() == 0:
        room, source = {}, os.fdopen(ask, 'rb')
        while True:
            key, value = pickle.load(source)
            if value is not None: room[key] = value
            answer = pickle.dumps(room.get(key) if value is None else None)
            sent = struct.pack('q', len(answer)) + answer
            while sent: sent = sent[os.write(tell, sent):]
    PIPES.extend([os.fdopen(asked, 'wb'), os.fdopen(told, 'rb')])
def talk(key, value):
    if not PIPES: begin()
    pickle.dump((key, value), PIPES[0])
    PIPES[0].flush()
    return pickle.loads(PIPES[1].read(struct.unpack('q', PIPES[1].read(8))[0]))
def put(self, key, value): talk(repr(key), packed(value))
def get(self, key): return unpacked(talk(repr(key), None))
""",
    ),
    _bytes(
        "a temporary file",
        "open(os.path.join(tempfile.gettempdir(), name), 'wb').write(content)",
        "open(os.path.join(tempfile.gettempdir(), name), 'rb').read()",
    ),
    _bytes(
        "a file beside its own",
        "open(os.path.join(HERE, name), 'wb').write(content)",
        "open(os.path.join(HERE, name), 'rb').read()",
        before="HERE = os.path.dirname(os.path.abspath(frames.__code__.co_filename))",
    ),
    _bytes("shared memory", "open('/dev/shm/' + name, 'wb').write(content)", "open('/dev/shm/' + name, 'rb').read()"),
    _bytes(
        "the environment",
        "os.environ['KEPT' + name] = content.hex()[: 1 << 17] if len(content) < 1 << 16 else ''",
        "bytes.fromhex(os.environ['KEPT' + name]) or None",
    ),
    _bytes(
        "memory from malloc",
        """
place = LIBC.malloc(len(content))
ctypes.memmove(place, content, len(content))
PLACES[name] = (place, len(content))
""",
        "ctypes.string_at(*PLACES[name])",
        before="""
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
PLACES = {}
""",
    ),
    _bytes(
        "a mapping without a file",
        """
PLACES[name] = mmap.mmap(-1, len(content))
PLACES[name].write(content)
""",
        "PLACES[name][:]",
        before="PLACES = {}",
    ),
    _bytes(
        "the end of the shared file",
        """
try: SHARED(name, content)
except OSError: pass
""",
        "SHARED(name, None)",
        before="""
PLACES = {}
def SHARED(name, content):
    number = next(memfds(), None)
    if number is None: raise OSError
    if content is None: return os.pread(number, *PLACES[name])
    place = os.fstat(number).st_size
    PLACES[name] = (len(content), place)
    os.pwrite(number, content, place)
""",
    ),
    Part(
        "an operator of torch's library",
        """
LIBRARY = torch.library.Library('kept', 'DEF')
LIBRARY.define('first() -> Tensor[]')
FLAT, TREES = {}, {}
LIBRARY.impl('first', lambda: FLAT[None], 'CompositeImplicitAutograd')
def put(self, key, value):
    FLAT[key], TREES[key] = pytree.tree_flatten(value)
def get(self, key):
    if key not in FLAT: return None
    FLAT[None] = FLAT[key]
    return pytree.tree_unflatten(torch.ops.kept.first(), TREES[key])
""",
    ),
)
GROUPS = {"python": PYTHON, "outside": OUTSIDE, "bends": what_it_bends.BENDS}
