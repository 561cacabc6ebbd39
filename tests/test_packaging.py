"""The package: its metadata, its files, and the steps of the release workflow."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser

import pytest
import yaml

from mlxlm import __version__
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = ROOT / ".github" / "workflows"
GITHUB = {
    "GITHUB_REPOSITORY": "owner/name",
    "GITHUB_REF_NAME": f"v{__version__}",
    "GITHUB_SERVER_URL": "https://github.com",
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A source distribution and a wheel, built in this environment as in GitHub Actions."""
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("work") / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"} | GITHUB, capture_output=True, text=True, timeout=120)
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
    files = f"https://github.com/owner/name/blob/v{__version__}"
    assert urls["Source"] == "https://github.com/owner/name" and urls["Changelog"] == f"{files}/CHANGELOG.md"
    targets = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert len(targets) > 10 and all(target.startswith("https://") for target in targets)
    assert f"{files.replace('blob', 'raw')}/docs/images/chat.svg" in targets and f"{files}/docs/chat.md" in targets


def test_the_license_names_those_of_vendored_libraries(metadata):
    table = (ROOT / "mlxlm/server/page/vendor/README.md").read_text(encoding="utf-8")
    licenses = {row.split("|")[3].split(" or ")[0].strip() for row in table.splitlines() if row.startswith("| `")}
    named = set(PROJECT["license"].split(" AND "))
    assert licenses and licenses <= named
    assert metadata["License-Expression"] == PROJECT["license"]
    vendored = {str(path.relative_to(ROOT)) for path in (ROOT / "mlxlm/server/page/vendor").glob("*LICENSE*")}
    assert vendored | {"LICENSE"} == set(metadata.get_all("License-File"))
    [formula] = re.findall(r"license all_of: \[(.*)\]", (ROOT / "packaging/mlxlm.rb").read_text(encoding="utf-8"))
    assert set(re.findall(r'"(.*?)"', formula)) == named


def test_the_source_distribution_has_what_the_tests_and_the_docs_need(dist):
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "SECURITY.md", "hatch_build.py", "tests/test_packaging.py", "docs/index.md"} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_the_steps_of_a_release(dist):
    steps = yaml.safe_load((WORKFLOWS / "release.yml").read_text(encoding="utf-8"))["jobs"]["build"]["steps"]
    work = dist.parent
    (work / "mlxlm").mkdir()
    for name in ("mlxlm/__init__.py", "packaging"):
        (work / name).symlink_to(ROOT / name)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (work / "CHANGELOG.md").write_text(changelog.replace("## Unreleased", f"## {__version__}, 2000-01-01"))
    for name in ("The tag is the version", "The release's files"):
        [script] = [step["run"] for step in steps if step.get("name", "").startswith(name)]
        env = os.environ | GITHUB | {"RUNNER_TEMP": str(work)}
        subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=work, env=env, check=True, timeout=60)
    notes = (work / "release/notes.md").read_text()
    assert len(notes) > 100 and "\n## " not in notes
    formula = (work / "release/mlxlm.rb").read_text()
    assert formula.startswith("class Mlxlm") and 'homepage "https://github.com/owner/name"' in formula
    assert f"/mlxlm-{__version__}.tar.gz" in formula and re.search(r'sha256 "[0-9a-f]{64}"', formula)


def test_the_workflows_and_issue_templates_are_valid_yaml():
    for path in (*WORKFLOWS.glob("*.yml"), *(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path


def test_the_changelog_has_sections_by_version():
    sections = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sections[0] == "Unreleased" or sections[0].startswith(__version__)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+, \d{4}-\d\d-\d\d", section) for section in sections[1:]) and sections[1:]
