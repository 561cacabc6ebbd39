"""What the package says about itself, and what it contains."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from runpy import run_path

import pytest

from mlxlm import __version__
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A source distribution and a wheel, built in this environment as in GitHub Actions."""
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    env = {"PATH": "/usr/bin:/bin", "GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v1"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def metadata(dist):
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return HeaderParser().parsestr(archive.read(name).decode())


def test_the_metadata_has_urls_and_a_page_without_relative_links(metadata):
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert urls["Source"] == "https://github.com/owner/name"
    assert urls["Changelog"] == "https://github.com/owner/name/blob/v1/CHANGELOG.md"
    page = metadata.get_payload()
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert len(targets) > 10 and all(target.startswith("https://") for target in targets)
    assert "https://github.com/owner/name/raw/v1/docs/images/chat.svg" in targets
    assert "https://github.com/owner/name/tree/v1/examples" in targets
    assert "<!--" not in page and "pip install" in page


def test_without_a_repository_the_page_has_no_links_to_files():
    hook = run_path(str(ROOT / "hatch_build.py"))
    page = hook["absolute_links"](README, None, "main")
    assert not re.search(r"\]\((?!https://)", page) and "![" not in page and "[Chat]" not in page and "Chat" in page


def test_the_license_names_those_of_vendored_libraries(metadata):
    table = (ROOT / "mlxlm/server/page/vendor/README.md").read_text(encoding="utf-8")
    licenses = [row.split("|")[3].strip() for row in table.splitlines() if row.startswith("| `")]
    named = PROJECT["license"].split(" AND ")
    assert licenses and all(license.split(" or ")[0] in named for license in licenses)
    assert metadata["License-Expression"] == PROJECT["license"]
    assert "mlxlm/server/page/vendor/purify.LICENSE.txt" in metadata.get_all("License-File")


def test_the_source_distribution_has_what_the_tests_and_the_docs_need(dist):
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "SECURITY.md", "hatch_build.py", "tests/test_packaging.py", "docs/index.md"} <= names


def test_the_homebrew_formula(dist):
    [sdist] = dist.glob("*.tar.gz")
    text = run_path(str(ROOT / "packaging" / "homebrew.py"))["formula"](sdist)
    assert 'homepage "https://github.com/owner/name"' in text
    assert f"/mlxlm-{__version__}.tar.gz" in text and re.search(r'sha256 "[0-9a-f]{64}"', text)
    assert 'license all_of: ["MIT", "Apache-2.0"' in text
    opened = re.findall(r"^\s*(?:class|def|test do)\b", text, re.MULTILINE)
    assert len(opened) == len(re.findall(r"^\s*end$", text, re.MULTILINE))
    assert "{" not in text.replace("#{bin}", "")


def test_the_changelog_has_sections_by_version():
    sections = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sections[0] == "Unreleased" or sections[0].startswith(__version__)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+, \d{4}-\d\d-\d\d", section) for section in sections[1:]) and sections[1:]
