"""Draws docs/images/report.png: the beginning of a report as Chromium shows it.

`warpsmith report RUN --html page.html && python docs/report_picture.py page.html`. The picture is of whatever run the
page is of; docs/report.md says which command made that.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parent / "images" / "report.png"
WIDTH, HEIGHT = 1000, 1180
MOST_BYTES = 200_000
"""So that a clone stays small."""


def main() -> int:
    """Draws the page that is named."""
    (page,) = map(Path, sys.argv[1:])
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is missing: make system-deps (as root; on Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "report.png"
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        size, target = f"--window-size={WIDTH},{HEIGHT}", page.resolve().as_uri()
        subprocess.run([*command, size, f"--screenshot={drawn}", target], check=True, timeout=60, capture_output=True)
        content = drawn.read_bytes()
    if len(content) > MOST_BYTES:
        raise SystemExit(f"the picture has {len(content)} bytes; {MOST_BYTES} at most: make it smaller")
    PICTURE.write_bytes(content)
    print(f"{PICTURE}: {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
