"""What tests of the page do again and again."""

from __future__ import annotations

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


def ask(page, text):
    page.fill("#question", text)
    page.press("#question", "Enter")


def answers(page):
    return page.locator(".message.assistant")


def finished(page):
    expect(page.locator("#send")).to_be_visible()


def stored(page):
    """The conversations in the browser's storage, after all writing."""
    return page.evaluate(
        """() => new Promise((resolve) => {
          indexedDB.open("mlxlm").onsuccess = ({ target: { result: database } }) => {
            const store = database.transaction("conversations").objectStore("conversations");
            store.getAll().onsuccess = ({ target }) => resolve(target.result);
          };
        })"""
    )
