"""The files of the chat page, as they are served."""

from __future__ import annotations

import hashlib
import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from mlxlm.server.app import PAGE_FOLDER, page_routes

VENDORED = PAGE_FOLDER / "vendor"


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes()))


def test_the_page_and_all_it_refers_to_are_served(client):
    html = client.get("/")
    assert html.headers["content-type"] == "text/html; charset=utf-8"
    references = re.findall(r'(?:href|src)="(page/[^"]+)"', html.text)
    modules = list(PAGE_FOLDER.glob("*.js"))
    imports = {match for path in modules for match in re.findall(r' from "\./([^"]+)"', path.read_text("utf-8"))}
    assert len(references) == 5 and len(imports) > 10
    for path in [*references, *(f"page/{name}" for name in imports)]:
        response = client.get(f"/{path}")
        assert response.status_code == 200, path
        assert response.headers["content-type"].partition(";")[0] in ("text/javascript", "text/css", "image/svg+xml")


def test_nothing_else_is_served(client):
    for path in ("/page", "/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/index.html"):
        assert client.get(path).status_code == 404, path


def test_every_file_has_the_security_headers(client):
    for path in ("/", "/page/main.js", "/page/vendor/purify.min.js"):
        headers = client.get(path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["font-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_unchanged_files_are_not_sent_again(client):
    first = client.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert client.get("/page/dom.js", headers={"If-None-Match": first.headers["etag"]}).status_code == 200


def test_the_page_loads_nothing_from_elsewhere():
    for path in (*PAGE_FOLDER.glob("*.js"), PAGE_FOLDER / "index.html", PAGE_FOLDER / "style.css"):
        urls = set(re.findall(r"https?://[\w.]+", path.read_text("utf-8")))
        assert urls <= {"https://html.spec.whatwg.org", "http://www.w3.org"}, path.name


def test_vendored_files_are_those_of_the_readme():
    table = dict(re.findall(r"^\| `(\S+)` \|.*`([0-9a-f]{64})` \|$", (VENDORED / "README.md").read_text("utf-8"), re.M))
    files = {path.name: path.read_bytes() for path in VENDORED.iterdir() if path.suffix in (".mjs", ".js", ".css")}
    files["fonts/*"] = b"".join(path.read_bytes() for path in sorted((VENDORED / "fonts").iterdir()))
    assert {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} == table
    licensed = {path.name.split(".")[0] for path in VENDORED.glob("*.LICENSE.txt")}
    assert {re.split("[./]", name)[0] for name in files} == licensed


def test_the_fonts_of_formulas_are_served(client):
    style = (VENDORED / "katex.min.css").read_text("utf-8")
    fonts = set(re.findall(r"url\((fonts/[^)]+\.woff2)\)", style))
    assert len(fonts) == 20
    for font in fonts:
        response = client.get(f"/page/vendor/{font}")
        assert response.headers["content-type"] == "font/woff2" and response.content[:4] == b"wOF2"
