"""Renders a self-contained HTML page, which can be read without network and without scripts."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from markupsafe import Markup

_HERE = Path(__file__).parent


def render_html(template: Path, script: str = "", **values: Any) -> str:
    """Render a template in the style of reports.

    It gets `style`, `script` and `script_hash`, for a content security policy that forbids everything else, and can
    import the macros of `table.html`. Every other text is escaped.

    Args:
        template: The file.
        script: JavaScript of the page.
        values: Variables of the template.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader([template.parent, _HERE]),
        autoescape=True,
        finalize=_displayed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def _displayed(value: Any) -> Any:
    """Round floats to seven digits, and replace unprintable characters by U+FFFD."""
    if isinstance(value, Markup):
        return value
    text = f"{float(f'{value:.7g}')}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
