"""Fills templates: every page of ours has this head, this stylesheet and this way to treat words of others.

The one idea: a page is one file that asks for nothing. Its policy forbids every request and every script, so whatever
a text of others would bring along stays text. jinja2 escapes all that is put in; a name that is missing is an error.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

import jinja2
import markupsafe

from warpsmith import printable

TEMPLATES = Path(__file__).parent / "templates"
STYLESHEET = "style.css"
_WORDS = 300
"""Characters of one text of others, where nothing else is said."""


def page(template: str, **values: object) -> str:
    """The HTML of a template."""
    style = (TEMPLATES / STYLESHEET).read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return _environment().get_template(template).render(style=style, style_digest=digest, **values)


def part(template: str, **values: object) -> str:
    """The HTML of a template that is no whole page, or of a page whose style is in a file of its own."""
    return _environment().get_template(template).render(**values)


def escaped(text: str) -> str:
    """A text as HTML."""
    return str(markupsafe.escape(text))


def words(text: str, most_characters: int = _WORDS) -> str:
    """A text of others as one line with nothing in it that acts."""
    return printable.line(text, most_characters)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
