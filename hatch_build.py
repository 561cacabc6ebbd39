"""What the package says about itself on PyPI: the addresses of its repository, and README.md with absolute links.

GitHub Actions says which repository it builds. Elsewhere the address is unknown: there are no URLs, and links to files
of the repository become plain text, since on PyPI they would lead nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://)(?P<path>[^)\s]+)\)")
_COMMENT = re.compile(r"<!--.*?-->\n", re.DOTALL)  # which tests read


def repository_url() -> str | None:
    """The address of the repository, or None outside of GitHub Actions."""
    name = os.environ.get("GITHUB_REPOSITORY")
    return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else None


def absolute_links(markdown: str, url: str | None, revision: str) -> str:
    """Make the links of a page in the root of a repository absolute; without a `url`, leave out their targets."""

    def replace(match: re.Match[str]) -> str:
        if url is None:
            return "" if match["image"] else match["text"]
        kind = "raw" if match["image"] else "tree" if "." not in match["path"] else "blob"
        return f"{match['image']}[{match['text']}]({url}/{kind}/{revision}/{match['path']})"

    return _LINK.sub(replace, _COMMENT.sub("", markdown))


class CustomMetadataHook(MetadataHookInterface):
    """Adds `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the metadata of the project."""
        url, revision = repository_url(), os.environ.get("GITHUB_REF_NAME", "main")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, url, revision)}
        pages = {
            "Source": "",
            "Documentation": f"/tree/{revision}/docs",
            "Issues": "/issues",
            "Changelog": f"/blob/{revision}/CHANGELOG.md",
        }
        metadata["urls"] = {name: url + page for name, page in pages.items()} if url else {}
