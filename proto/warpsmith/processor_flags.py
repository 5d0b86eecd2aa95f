"""How C++ kernels are compiled: by the toolchain that they are measured with, and by the file that a user imports.

The one idea: a kernel that is compiled otherwise is another kernel. Without the three flags that change no value, g++
makes no vectors of a loop with a condition, and an exported softmax with a mask took five times as long as was told.
"""

from __future__ import annotations

from typing import Final

FLAGS: Final = (
    "-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC",
    # None of these changes a value: products may fuse with sums (as on the GPU), and no kernel reads errno or traps.
    # -ffast-math is absent: it would drop NaN, infinities and the order of sums.
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    # Nothing throws: the tables of exceptions would bring a writable word along.
    "-fno-exceptions",
    "-w",
)  # fmt: skip
"""Time is headers, not optimisation: -O0 saves 15 ms of 250, leaving out <algorithm> saves 85 (g++ 12, a softmax)."""
LINKED: Final = ("-shared", "-fPIC", "-nostartfiles", "-Wl,--as-needed,-O1,-z,relro,-z,now")
"""How a library is made of the assembly: without -fopenmp, so that no second libgomp is asked for; without start files,
which would add code that runs on loading. What the loader alone writes is protected before a kernel runs."""
