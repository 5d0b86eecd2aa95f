"""Sources of our own in C++, built for this machine when they are first needed.

The one idea: a build takes a quarter of a second and is kept as long as this process lives, so nothing that depends on
the machine is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

from warpsmith.errors import Infrastructure


def built(source: Path, flags: tuple[str, ...], headers: Mapping[str, str], needs: str = "") -> str:
    """The path of what g++ makes of a source with these flags; `headers` lie beside it, by name.

    Raises Infrastructure; `needs` says what a build wants of the system.
    """
    compiler = next((path for name in ("g++", "c++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise Infrastructure("kernels for the CPU need g++ where they are timed (Debian: apt-get install g++)")
    directory = tempfile.mkdtemp(prefix=f"{source.stem}-")
    weakref.finalize(built, shutil.rmtree, directory, ignore_errors=True)
    for name, text in headers.items():
        Path(directory, name).write_text(text)
    linked, output = Path(directory, f"{source.stem}.linked"), str(Path(directory, source.stem))
    command = [compiler, *flags, f"-I{directory}", "-x", "c++", str(source), "-o", str(linked)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if ran.returncode:
        raise Infrastructure(f"{source.name} does not build{needs}: {ran.stderr}")
    # A file that may be executed from its first byte on: in a jail without namespaces no linker may change modes.
    with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as file:
        file.write(linked.read_bytes())
    linked.unlink()
    return output
