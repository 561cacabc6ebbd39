"""Adds what depends on the repository to the metadata: URLs, and README.md with absolute links, for PyPI.

GitHub Actions names the repository and the tag. Elsewhere there are no URLs, and links stay relative.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://)([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Adds `readme` and `urls`."""

    def update(self, metadata):
        """Add them to the metadata of the project."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if repository := os.environ.get("GITHUB_REPOSITORY"):
            url, tag = f"https://github.com/{repository}", os.environ["GITHUB_REF_NAME"]
            files = {"": f"{url}/blob/{tag}", "!": f"{url}/raw/{tag}"}  # the key begins the link of an image
            text = _LINK.sub(lambda link: f"{link[1]}{link[2]}({files[link[1]]}/{link[3]})", text)
            metadata["urls"] = {
                "Source": url,
                "Documentation": f"{files['']}/docs/index.md",
                "Issues": f"{url}/issues",
                "Changelog": f"{files['']}/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
