"""Fixtures: a browser, a server with canned answers, and the page."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.server.conftest import running
from tests.server.page.fake_chat_server import FakeChatServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC_BROWSERS = ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


@pytest.fixture(scope="package")
def browser():
    """Chromium, only as long as needed: Playwright's event loop keeps `asyncio.run` from working here."""
    installed = [shutil.which(name) for name in BROWSERS] + [path for path in MAC_BROWSERS if os.path.exists(path)]
    path = next(filter(None, installed), None)
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if path is None:
        pytest.skip("no Chromium or Chrome is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def server():
    server = FakeChatServer()
    with running(server.app(), shutdown_timeout=1) as address:
        server.url = address + "/"
        yield server


@pytest.fixture
def open_page(browser, server):
    """`open_page(path, **options of the browser context)`. Any request to another origin fails the test."""
    contexts = []
    elsewhere = []
    errors = []

    def open_page(path="", **options):
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: request.url.startswith(server.url) or elsewhere.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url + path)
        page.locator("#model").wait_for()
        return page

    yield open_page
    server.go_on()
    for context in contexts:
        context.close()
    assert not [url for url in elsewhere if not url.startswith("blob:")]
    assert not errors


@pytest.fixture
def page(open_page):
    return open_page()
