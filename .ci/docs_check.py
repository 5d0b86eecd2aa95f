"""Checks pages in both forms that people read: build/site in a browser, and the Markdown on a code host.

The one idea: a link is good where its file is there and its anchor too, by the rules of each form. Beside links: no
page of the site asks another host for anything, and no list or table is one in one form alone. Does not look into the
theme's scripts, and does not follow links to other hosts.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path("build/site")
REQUESTED = {"script": ("src",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset"),
             "link": ("href",), "video": ("src", "poster"), "audio": ("src",), "embed": ("src",),
             "object": ("data",)}  # fmt: skip
"""What a browser fetches by itself, by element. An `a` waits for a click."""
NO_REQUEST = {"canonical", "alternate", "next", "prev"}
"""A `link` of these relations is not fetched."""
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)(?: \"[^\"]*\")?\)")
_IN_CSS = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)")


def main() -> int:
    """Prints what is wrong; 1 when there is something."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    pages = [Path(name) for name in subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split()]
    wrong = [*of_sources(pages), *of_site(SITE)]
    for said in wrong:
        print(said)
    built = len(list(SITE.rglob("*.html")))
    print(f"docs: {len(pages)} pages as a code host shows them, {built} of the site, {len(wrong)} errors")
    return 1 if wrong else 0


class Parsed(HTMLParser):
    """A page of the site: its anchors, what it links to, and what a browser asks for to show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.requests: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keeps what an element names."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if not NO_REQUEST & set(values.get("rel", "").split()):
            self.requests += [values[name] for name in REQUESTED.get(tag, ()) if name in values]
        self.requests += _IN_CSS.findall(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        """Keeps what a style asks for."""
        if self.lasttag == "style":
            self.requests += _IN_CSS.findall(data)


def of_site(site: Path) -> Iterator[str]:
    """What is wrong in the site as it was built."""
    pages = {path.resolve(): Parsed(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no page; make docs"
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # served for any address, so its links begin at the site's root
        for link in dict.fromkeys([*page.links, *page.requests]):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.requests and url.scheme != "data":
                    yield f"{path.relative_to(site.resolve())}: asks another host for {link}"
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.is_file():
                yield f"{path.relative_to(site.resolve())}: {link} is not there"
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site.resolve())}: {link} has no such anchor"
    for style in sorted(site.rglob("*.css")):
        for url_there in _IN_CSS.findall(style.read_text(encoding="utf-8")):
            yield f"{style.relative_to(site)}: asks another host for {url_there}"


def of_sources(pages: list[Path]) -> Iterator[str]:
    """What is wrong in Markdown as a code host shows it, or shown otherwise there than on the site."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        prose = _FENCE.sub("", text)
        for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", prose)):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = page.parent / unquote(url.path) if url.path else page
            if not target.exists():
                yield f"{page}: {link} is not there"
            elif url.fragment and target.suffix == ".md" and unquote(url.fragment) not in anchors(target):
                yield f"{page}: {link} has no such anchor"
        if page.parts[0] == "docs":
            yield from (f"{page}: {said}" for said in _read_differently(prose))


def anchors(page: Path) -> set[str]:
    """The anchors that a code host gives a page: its headings in small letters, without marks, with - between words."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *#*$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        same = 0
        while (each := f"{name}-{same}" if same else name) in found:
            same += 1
        found.add(each)
    return found


def _read_differently(prose: str) -> Iterator[str]:
    """Lists and tables that a code host sees and the site does not."""
    before = ""
    for line in prose.splitlines():
        begins_list = re.match(r"([-*+]|\d+\.) ", line) and not re.match(r"\s+|([-*+]|\d+\.) ", before)
        begins_table = line.startswith("|") and not before.startswith("|")
        if before.strip() and (begins_list or begins_table):
            yield f"an empty line is missing before: {line[:60]}"
        if re.match(r" {1,3}([-*+]|\d+\.) ", line):
            yield f"an inner list has to begin four columns in: {line[:60]}"
        before = line


if __name__ == "__main__":
    sys.exit(main())
