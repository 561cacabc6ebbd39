"""The page with the server that it is made for."""

from __future__ import annotations

from mlxlm.server.app import make_app
from mlxlm.server.security import AccessRules
from tests.server.conftest import running


def test_a_question_is_answered(browser, models):
    with running(make_app(models, AccessRules.for_host("127.0.0.1", (), (), ()))) as address:
        context = browser.new_context()
        context.set_default_timeout(10_000)
        page, errors = context.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.locator("#model").wait_for()
        assert page.locator("#model").text_content() == "tiny"
        page.get_by_role("textbox").first.fill("Hello!")
        with page.expect_response("**/v1/chat/completions") as response:
            page.keyboard.press("Enter")
        assert response.value.status == 200
        context.close()
        assert not errors
