"""Whom an attack slows while it is not called: the baselines are timed on the same machine.

The one idea: a part defines `slow(self)`, called by the constructor, and may use `idle()`, how many seconds ago the
last call ended. None takes more of the machine than a few hundred megabytes and two processors, nor touches
a process that is no worker of ours.
"""

from __future__ import annotations

from part import Part

PRELUDE = """
ENDED = [0.0]
def idle():
    return time.perf_counter() - ENDED[0]
def slow(self): pass
BLOCK = bytes(1 << 20)
def thread(work):
    threading.Thread(target=work, daemon=True).start()
def workers():
    for process in filter(str.isdigit, os.listdir('/proc')):
        try:
            named = b'warpsmith.sandbox.worker' in open('/proc/' + process + '/cmdline', 'rb').read()
            if named and int(process) != os.getpid(): yield int(process)
        except OSError: continue
"""

_CHILD = """
def child(work):
    if os.fork() == 0:
        try: work()
        finally: os._exit(0)
"""

NOBODY = (Part("nobody", ""),)
SLOWS = (
    Part(
        "others: a thread that spins while it is not called",
        """
def spin():
    while True:
        if idle() > NUMBER * 1e-3: zlib.crc32(BLOCK)
        else: time.sleep(0.0005)
def slow(self):
    thread(spin)
    thread(spin)
""",
        (0.5, 5, 30),
    ),
    Part(
        "others: a thread that spins only for NUMBER ms after a call",
        """
def spin():
    while True:
        if idle() < NUMBER * 1e-3: zlib.crc32(BLOCK)
        else: time.sleep(0.001)
def slow(self): thread(spin)
""",
        (30, 90, 300),
    ),
    Part(
        "others: a child that spins",
        _CHILD
        + """
def spin():
    while True: zlib.crc32(BLOCK)
def slow(self): child(spin)
""",
    ),
    Part(
        "others: a child that spins in a session of its own, after NUMBER s",
        _CHILD
        + """
def spin():
    os.setsid()
    if os.fork(): os._exit(0)
    time.sleep(NUMBER)
    while True: zlib.crc32(BLOCK)
def slow(self): child(spin)
""",
        (1, 3),
    ),
    Part(
        "others: a child begun at call NUMBER",
        _CHILD
        + """
ORDER = [0]
def spin():
    while True: zlib.crc32(BLOCK)
def slower(self):
    ORDER[0] += 1
    if ORDER[0] == NUMBER: child(spin)
""",
        (13, 40, 100),
    ),
    Part(
        "others: memory copied all the time while it is not called",
        """
def hog():
    one, two = torch.zeros(1 << 22), torch.zeros(1 << 22)
    while True:
        if idle() > 0.002: two.copy_(one)
        else: time.sleep(0.0005)
def slow(self): thread(hog)
""",
    ),
    Part(
        "others: the last-level cache swept in bursts below what is watched",
        """
def sweep():
    one = torch.zeros(1 << 22)
    while True:
        time.sleep(0.06)
        if idle() > 0.002: one.add_(1)
def slow(self): thread(sweep)
""",
    ),
    Part(
        "others: files written and dropped from the page cache",
        """
def write():
    place = os.path.join(tempfile.gettempdir(), 'dropped')
    while True:
        if idle() > 0.002:
            with open(place, 'wb') as file:
                file.write(BLOCK * 8)
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else: time.sleep(0.001)
def slow(self): thread(write)
""",
    ),
    Part(
        "others: niceness and affinity of workers",
        """
def slow(self):
    for process in workers():
        try:
            os.setpriority(os.PRIO_PROCESS, process, 19)
            os.sched_setaffinity(process, {0})
        except OSError: continue
""",
    ),
    Part(
        "others: a policy of real time for itself",
        """
def slow(self):
    for policy in (os.SCHED_FIFO, os.SCHED_RR):
        try: os.sched_setscheduler(0, policy, os.sched_param(50))
        except OSError: pass
    try: os.setpriority(os.PRIO_PROCESS, 0, -20)
    except OSError: pass
""",
    ),
    Part(
        "others: huge pages",
        """
HELD = []
def slow(self):
    place = mmap.mmap(-1, 128 << 20)
    place.madvise(mmap.MADV_HUGEPAGE)
    place[:: 1 << 21] = bytes(64)
    HELD.append(place)
""",
    ),
    Part(
        "others: pages of shared memory, taken away after each call",
        """
def taken_away():
    libc = ctypes.CDLL(None)
    for begin, end in shared_spans():
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 9)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 22)
def slow(self):
    theirs = sys.modules.get('gpu_bench.solutions.solution_worker')
    if theirs is None: return
    real = theirs.Solution.deliver
    def deliver(self, *arguments):
        text = real(self, *arguments)
        taken_away()
        return text
    theirs.Solution.deliver = deliver
""",
    ),
    Part(
        "others: caches of compilers that a later run may trust",
        """
def slow(self):
    named = os.environ.get('TORCHINDUCTOR_CACHE_DIR')
    for root in (named, '/tmp/torchinductor_root', os.path.expanduser('~/.cache'), '/tmp/torchinductor_nobody'):
        if not root: continue
        try:
            os.makedirs(root, exist_ok=True)
            for place, _, names in os.walk(root):
                for name in names: open(os.path.join(place, name), 'w').write('import time; time.sleep(1)')
            open(os.path.join(root, 'sitecustomize.py'), 'w').write('import time; time.sleep(0.5)')
        except OSError: continue
""",
    ),
    Part(
        "others: signals to workers",
        """
def stop():
    while True:
        time.sleep(0.01)
        if idle() < 0.005: continue
        for process in workers():
            try:
                os.kill(process, signal.SIGSTOP)
                time.sleep(0.002)
                os.kill(process, signal.SIGCONT)
            except OSError: continue
def slow(self): thread(stop)
""",
    ),
    Part(
        "others: /dev/shm and a hundred sleeping threads",
        """
def slow(self):
    try: open('/dev/shm/filled', 'wb').write(BLOCK * 64)
    except OSError: pass
    for _ in range(100): thread(lambda: time.sleep(1000))
""",
    ),
)

SLOWS += (
    Part(
        "others: a child that continues its parent, whose threads spin",
        _CHILD
        + """
PARENT = os.getpid()
def rouse():
    while True:
        os.kill(PARENT, signal.SIGCONT)
        time.sleep(0.001)
def spin():
    while True: zlib.crc32(BLOCK)
def slow(self):
    child(rouse)
    thread(spin)
""",
    ),
    Part(
        "others: another interpreter that spins",
        """
import subprocess
HELD = []
def slow(self):
    HELD.append(subprocess.Popen([sys.executable, '-S', '-c', 'while True: pass'], start_new_session=True))
""",
    ),
    Part(
        "others: a child that spins in the half seconds when its parent sleeps",
        _CHILD
        + """
def spin():
    path = '/proc/' + str(os.getppid()) + '/stat'
    while True:
        if open(path).read().rpartition(')')[2].split()[0] in 'ST':
            for _ in range(50): zlib.crc32(BLOCK)
        else: time.sleep(0.002)
def slow(self): child(spin)
""",
    ),
)

GROUPS = {"nobody": NOBODY, "others": SLOWS}
