"""Lets pages link to files of the repository: the site has a copy of each such file, as text.

mkdocs calls this while it builds (`hooks` in mkdocs.yml). The one idea: a link out of docs/ works on a code host
as it is, and on the site it leads to `source/…txt`. One to a folder, or to a file that is not there, stays as it is
and fails the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTWARD = re.compile(r"(?<=\]\()(?:\.\./)+[^)#\s]+")
"""The target of a Markdown link that begins by going up."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files out of docs/ that pages link to."""
    for file in list(files.documentation_pages()):
        for target in OUTWARD.findall(file.content_string):
            path = _outside(file.src_uri, target)
            if path and (name := _copy(path)) not in files.src_uris:
                content = (Path(config.docs_dir).parent / path).read_bytes()
                files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page with links out of docs/ led to those copies."""

    def led(match: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, match.group())
        return posixpath.relpath(_copy(path), posixpath.dirname(page.file.src_uri) or ".") if path else match.group()

    return OUTWARD.sub(led, markdown)


def _outside(page: str, target: str) -> str:
    """The path in the repository that a page's link leads to, where that is a file out of docs/; else nothing."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return path if not path.startswith(("docs/", "..")) and Path(path).is_file() else ""


def _copy(path: str) -> str:
    return f"source/{path}.txt"
