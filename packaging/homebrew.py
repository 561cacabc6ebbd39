"""Writes the Homebrew formula of a release, for a tap.

    python packaging/homebrew.py dist/mlxlm-X.tar.gz > mlxlm.rb

The formula installs from PyPI into a virtual environment of its own, as MLX's wheels need. Its facts are those of
the source distribution.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tarfile
from email.parser import HeaderParser
from pathlib import Path

PYTHON = "python@3.13"
FORMULA = """\
class Mlxlm < Formula
  desc "{summary}"
{homepage}  url "https://files.pythonhosted.org/packages/source/m/mlxlm/mlxlm-{version}.tar.gz"
  sha256 "{sha256}"
  license all_of: [{licenses}]

  depends_on arch: :arm64
  depends_on :macos
  depends_on "{python}"

  def install
    system Formula["{python}"].opt_libexec/"bin/python", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--no-cache-dir", buildpath
    bin.install_symlink libexec/"bin/mlxlm"
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/mlxlm --version")
    system bin/"mlxlm", "chat", "small-world", "--offline", "-p", "What is 7 plus 5?"
  end
end
"""


def formula(sdist: Path) -> str:
    """The formula for a source distribution."""
    with tarfile.open(sdist) as archive:
        file = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        facts = HeaderParser().parsestr(file.read().decode())
    urls = dict(url.split(", ", 1) for url in facts.get_all("Project-URL", []))
    return FORMULA.format(
        summary=facts["Summary"],
        homepage=f'  homepage "{urls["Source"]}"\n' if urls else "",
        version=facts["Version"],
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        licenses=", ".join(f'"{name}"' for name in re.split(" AND ", facts["License-Expression"])),
        python=PYTHON,
    )


if __name__ == "__main__":
    sys.stdout.write(formula(Path(sys.argv[1])))
