"""Draws docs/images/NAME.png: the beginning of a page as Chromium shows it.

`warpsmith report RUN --html page.html && python docs/page_picture.py report page.html`, and for the live page the
address that was printed and the run: `python docs/page_picture.py live-page "http://…/login?token=…&to=/runs/RUN"`. The
pages that show the pictures say which run they are of.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
HEIGHTS = {"report": 1180, "live-page": 900}
"""Names of the pictures, and how much of a page they show, in pixels."""
WIDTH = 1000
MOST_BYTES = 200_000
"""So that a clone stays small."""


def main() -> int:
    """Draws the page that is named."""
    name, page = sys.argv[1:]
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is missing: make system-deps (as root; on Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "page.png"
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        # A live page goes on for ever: it is drawn after two seconds.
        command += [f"--window-size={WIDTH},{HEIGHTS[name]}", "--timeout=2000", f"--screenshot={drawn}"]
        target = page if "://" in page else Path(page).resolve().as_uri()
        subprocess.run([*command, target], check=True, timeout=60, capture_output=True)
        content = drawn.read_bytes()
    if len(content) > MOST_BYTES:
        raise SystemExit(f"the picture has {len(content)} bytes; {MOST_BYTES} at most: make it smaller")
    picture = IMAGES / f"{name}.png"
    picture.write_bytes(content)
    print(f"{picture}: {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
