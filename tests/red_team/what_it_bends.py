"""What an attack bends of the process that it is in: those who call it, clocks, memory that it shares with them.

The one idea: a part finds its way by nothing but what every Python process has: frames, globals, the collector, its
own memory. It hides among the parts that say where things hide, and keeps what it remembers in a global.
"""

from __future__ import annotations

from part import Part

BENDS = (
    Part(
        "clocks that run slowly, replaced at call NUMBER",
        """
def slowed(clock, begin): return lambda: begin + (clock() - begin) / 8
def meddle(self, inputs):
    if nth(NUMBER):
        for name in ('perf_counter', 'monotonic', 'time'):
            clock = getattr(time, name)
            setattr(time, name, slowed(clock, clock()))
        for name in ('perf_counter_ns', 'monotonic_ns', 'time_ns'):
            clock = getattr(time, name)
            setattr(time, name, lambda clock=clock, begin=clock(): begin + (clock() - begin) // 8)
""",
        (1, 12, 40, 100),
    ),
    Part(
        "a C library whose clock stands still, written over at call NUMBER",
        """
def meddle(self, inputs):
    if not nth(NUMBER): return
    libc = ctypes.CDLL(None)
    place = ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value
    page = place & ~4095
    libc.mprotect(ctypes.c_void_p(page), 8192, 7)
    ctypes.memmove(place, bytes.fromhex('48c706e803000048c746080000000031c0c3'), 18)
""",
        (1, 20, 100),
    ),
    Part(
        "another range for its caller, from call NUMBER on",
        """
def meddle(self, inputs):
    if nth(NUMBER):
        for frame in frames():
            frame.f_globals['range'] = lambda *bounds: builtins.range(*bounds)[:1]
""",
        (2, 20, 40, 100),
    ),
    Part(
        "builtins.range that is short, from call NUMBER on",
        """
WHOLE = range
def meddle(self, inputs):
    if nth(NUMBER):
        short = lambda *bounds: WHOLE(*bounds)[:1]
        builtins.range = short
""",
        (2, 20, 40, 100),
    ),
    Part(
        "its caller's functions that do nothing, from call NUMBER on",
        """
def meddle(self, inputs):
    if nth(NUMBER):
        for frame in frames()[:3]:
            for name, value in list(frame.f_globals.items()):
                if isinstance(value, types.FunctionType) and ('call' in name or 'time' in name or 'run' in name):
                    frame.f_globals[name] = lambda *_, **__: None
""",
        (13, 26, 40, 100),
    ),
    Part(
        "its caller's code, replaced at call NUMBER",
        """
def nothing(*_, **__): return None
def meddle(self, inputs):
    if nth(NUMBER):
        for each in gc.get_objects():
            if not isinstance(each, types.FunctionType) or each.__closure__: continue
            if each.__code__ in [f.f_code for f in frames()[:1]]:
                each.__code__ = nothing.__code__
""",
        (13, 26, 40, 100),
    ),
    Part(
        "its caller's method that calls, as an attribute of the object",
        """
def meddle(self, inputs):
    for frame in frames():
        owner = frame.f_locals.get('self')
        if owner is None or not hasattr(type(owner), 'calls') or 'calls' in getattr(owner, '__dict__', {}): continue
        real = type(owner).calls
        known = {}
        def calls(request, owner=owner, real=real):
            mark = request.count
            if request.fresh_seed or mark not in known: known[mark] = real(owner, request)
            return known[mark]
        object.__setattr__(owner, 'calls', calls)
""",
    ),
    Part(
        "a table of functions in its caller's modules",
        """
def meddle(self, inputs):
    if not nth(1): return
    for frame in frames():
        for table in list(frame.f_globals.values()):
            if not isinstance(table, dict) or 'calls' not in table: continue
            kind, real = table['calls']
            known = {}
            def calls(request, real=real, known=known):
                mark = request.count
                if request.fresh_seed or mark not in known: known[mark] = real(request)
                return known[mark]
            table['calls'] = (kind, calls)
""",
    ),
    Part(
        "the sets it is called on, whose call is another",
        """
def meddle(self, inputs):
    if not nth(60): return
    for each in gc.get_objects():
        if type(each).__name__ == 'CallSet':
            answer = each.call.__closure__ and None
            each.call = lambda: None
""",
    ),
    Part(
        "copy_ of its own kind from call NUMBER on",
        """
REAL = torch.Tensor.copy_
def meddle(self, inputs):
    def copy_(one, two, *rest):
        return one if one.shape == two.shape and one.numel() > 4096 else REAL(one, two, *rest)
    if nth(NUMBER): torch.Tensor.copy_ = copy_
""",
        (2, 20, 60),
    ),
    Part(
        "clone that gives the same memory",
        """
def meddle(self, inputs):
    if nth(NUMBER): torch.Tensor.clone = lambda leaf, **_: leaf
""",
        (1, 20),
    ),
    Part(
        "a __call__ of its own class",
        """
def plant(self):
    kind = type(self)
    real = torch.nn.Module.__call__
    def call(self, *inputs):
        found = get(self, ('call', inputs[0].data_ptr()))
        if found is not None and knows(self, inputs): return found
        found = real(self, *inputs)
        put(self, ('call', inputs[0].data_ptr()), found)
        return found
    kind.__call__ = call
""",
    ),
    Part(
        "__call__ of every module",
        """
def meddle(self, inputs):
    if nth(NUMBER):
        real = torch.nn.Module.__call__
        room = {}
        def call(module, *inputs):
            if module is not self: return real(module, *inputs)
            key = inputs[0].data_ptr()
            if key not in room: room[key] = real(module, *inputs)
            return room[key]
        torch.nn.Module.__call__ = call
""",
        (2, 13, 40),
    ),
    Part(
        "a hook on all modules' forward",
        """
def plant(self):
    room = {}
    def hook(module, inputs, answer):
        if module is self: room[inputs[0].data_ptr()] = answer
    torch.nn.modules.module.register_module_forward_hook(hook)
""",
    ),
    Part(
        "no_grad that is none",
        """
def meddle(self, inputs):
    if nth(NUMBER): torch.no_grad = torch.enable_grad
""",
        (1, 30),
    ),
    Part(
        "os.read and os.write that look in between",
        """
def meddle(self, inputs):
    if nth(3):
        read, write = os.read, os.write
        os.read = lambda *a: read(*a)
        os.write = lambda *a: write(*a)
""",
    ),
    Part(
        "an answer sent before it is asked for, on its caller's pipe",
        """
def meddle(self, inputs):
    if not nth(NUMBER): return
    for frame in frames():
        for name, value in frame.f_locals.items():
            if isinstance(value, int) and value > 2 and ('repl' in name or 'out' in name or 'answer' in name):
                try: os.write(value, struct.pack('!BHI', 3, 5, 0) + b'calls')
                except OSError: pass
""",
        (13, 30, 60),
    ),
    Part(
        "answers on every pipe that it finds open, from call NUMBER on",
        """
def meddle(self, inputs):
    if not nth(NUMBER): return
    for name in os.listdir('/proc/self/fd'):
        try:
            if 'pipe' in os.readlink('/proc/self/fd/' + name) and int(name) > 2:
                os.set_blocking(int(name), False)
                os.write(int(name), struct.pack('!BHI', 3, 5, 0) + b'calls')
        except OSError: continue
""",
        (13, 30, 60),
    ),
    Part(
        "a thread that repeats what it saw change in shared memory",
        """
def watch():
    spans = shared_spans()
    if not spans: return
    place, size = spans[0][0], min(4096, spans[0][1] - spans[0][0])
    words = (ctypes.c_uint64 * (size // 8)).from_address(place)
    old, steps = list(words), {}
    while True:
        new = list(words)
        for at, (was, now) in enumerate(zip(old, new)):
            if was != now:
                steps.setdefault(at, []).append(now)
                told = steps[at][-64:]
                if len(told) > 40 and told[-1] - told[-2] == 1 and at == max(steps): words[at] = told[-1] + 1
        old = new
        time.sleep(0)
def meddle(self, inputs):
    if nth(4): threading.Thread(target=watch, daemon=True).start()
""",
    ),
    Part(
        "a trace function that lets its caller's loop end",
        """
def skip(frame, event, argument):
    names = frame.f_code.co_varnames
    if event == 'line' and 'step' in frame.f_locals and frame.f_locals['step'] > 0:
        try: frame.f_lineno = max(line for _, _, line in frame.f_code.co_lines() if line)
        except ValueError: pass
    return skip
def meddle(self, inputs):
    if nth(NUMBER):
        for frame in frames(): frame.f_trace = skip
        sys.settrace(skip)
""",
        (20, 60),
    ),
    Part(
        "an alarm that works between calls",
        """
def ring(*_):
    for key in list(ROOM): ROOM[key] = ROOM[key]
def plant(self):
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
""",
    ),
    Part(
        "a count of its caller's that is one",
        """
def meddle(self, inputs):
    for frame in frames()[:3]:
        request = frame.f_locals.get('request')
        if hasattr(request, 'count') and hasattr(request, 'fresh_seed') and not request.fresh_seed: request.count = 1
    for each in frames()[:2]:
        if 'count' in each.f_locals:
            each.f_locals['count'] = 1
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(each), ctypes.c_int(0))
""",
    ),
    Part(
        "fewer threads' work and no collector",
        """
def plant(self):
    gc.disable()
    sys.setswitchinterval(1.0)
""",
    ),
    Part(
        "an answer in shared memory, in words of NUMBER bytes, before it has begun",
        """
KINDS = {1: ctypes.c_uint8, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
BEFORE = {}
def meddle(self, inputs):
    for begin, end in shared_spans():
        words = (KINDS[NUMBER] * (4096 // NUMBER)).from_address(begin)
        now, old = list(words), BEFORE.get(begin)
        BEFORE[begin] = now
        MET[0] += 1
        if old is None or MET[0] < 20: continue
        grown = {at: word for at, (was, word) in enumerate(zip(old, now)) if word - was == 1}
        for at, word in grown.items():
            if word == max(grown.values()) - 1: words[at] = word + 1
""",
        (1, 4, 8),
    ),
    Part(
        "a word on every event and socket that it finds open, from call NUMBER on",
        """
def meddle(self, inputs):
    MET[0] += 1
    if MET[0] < NUMBER: return
    for name in os.listdir('/proc/self/fd'):
        try:
            kind = os.readlink('/proc/self/fd/' + name)
            if 'eventfd' in kind or 'socket' in kind:
                os.set_blocking(int(name), False)
                os.write(int(name), struct.pack('q', 1))
        except OSError: continue
""",
        (13, 40),
    ),
    Part(
        "its caller's module over again, with a loop that does nothing",
        """
def meddle(self, inputs):
    if not nth(NUMBER): return
    for frame in frames()[:4]:
        for each in gc.get_referrers(frame.f_code):
            if isinstance(each, types.FunctionType) and each.__code__ is frame.f_code:
                names = [n for n in each.__code__.co_names if n in each.__globals__ and callable(each.__globals__[n])]
                for name in names: each.__globals__[name] = lambda *given, **_: given[0] if given else None
""",
        (13, 40, 100),
    ),
)
