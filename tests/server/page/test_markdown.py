"""Markdown of models on the page, hostile and other."""

from __future__ import annotations

import re

from tests.server.page.actions import answers, ask, expect, finished
from tests.server.page.fake_chat_server import Answer

HOSTILE = """\
<script>window.ran = 1</script><img src=x onerror="window.ran = 2"><svg onload="window.ran = 3"><circle/></svg>

<iframe src="https://elsewhere.invalid/"></iframe><style>body { display: none }</style>
<meta http-equiv=refresh content="0"><base href="//elsewhere.invalid"><link rel=stylesheet href="//elsewhere.invalid/x">

<form action="https://elsewhere.invalid/"><input name=key autofocus onfocus=alert(1)></form><object data=x></object>

[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](java&#x0A;script:alert(1)) [d](&#106;avascript:alert(1))
[e](data:text/html,<script>alert(1)</script>) [f](vbscript:x) [g](file:///etc/passwd) [h](\u0001javascript:alert(1))
[i](//elsewhere.invalid/x) [j](/v1/models) [k](https://example.org/" onmouseover="alert(1)) <javascript:alert(1)>
[m](<javascript:alert(1)> "title") ![n](https://elsewhere.invalid/pixel.png)
![o](data:image/svg+xml,<svg/onload=alert(1)>) [l] ![p](x" onerror="window.ran=4) [q](https://example.org\u202e/gpj.exe)
https://example.org/<b>x</b> [r](\uff4aavascript:alert(1))
[s](https:javascript:alert(1)) [t](mailto:a@b.c?subject=<svg>)

[l]: javascript:alert(1)

| <img src=x onerror=alert(1)> | `<script>` |
| :-- | --: |
| <a href="javascript:alert(1)">x</a> | <div style="position:fixed;inset:0">x</div> |

```html" onload="alert(1)
</code></pre><script>window.ran = 5</script><img src=x onerror=alert(1)>
if (admin\u202e) { /* \u2066
```

$<img src=x onerror=alert(1)>$ \\(<script>window.ran = 6</script>\\) \\[<svg/onload=alert(1)>\\]

$$
</div><script>window.ran = 7</script>
$$
"""
NESTED = ">" * 3000 + "* " * 2000 + "[" * 3000 + "**_" * 2000 + "\\(" * 3000 + "`" * 999 + "<" * 3000
TAGS = {"a", "br", "button", "code", "div", "em", "hr", "li", "ol", "p", "pre", "span", "strong", "svg", "use"}
TAGS |= {"blockquote", "table", "tbody", "td", "th", "thead", "tr", "ul"}
ATTRIBUTES = {"class", "href", "start", "target", "rel", "title", "type", "aria-label", "aria-hidden"}


def test_hostile_output_does_nothing(page, server):
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.evaluate(
        "window.violations = [];"
        "document.addEventListener('securitypolicyviolation', (event) => violations.push(event.violatedDirective))"
    )
    pieces = [HOSTILE[i : i + 7] for i in range(0, len(HOSTILE), 7)]
    server.answers = [Answer([*pieces, None, "\n\nend"], reasoning=pieces), Answer([NESTED, "\n\nend of nesting"])]
    ask(page, HOSTILE)
    expect(answers(page)).to_contain_text("if (admin")
    page.click("summary")
    server.go_on()
    finished(page)
    ask(page, "More")
    finished(page)
    expect(answers(page).last).to_contain_text("end of nesting")

    elements = "[...document.querySelectorAll('.text :not(.math *)')]"
    assert set(page.evaluate(f"{elements}.map((element) => element.localName)")) <= TAGS
    assert set(page.evaluate(f"{elements}.flatMap((element) => element.getAttributeNames())")) <= ATTRIBUTES
    assert not page.evaluate("document.querySelectorAll('.math :is(a, img, script, [onerror], [onload])').length")
    links = page.evaluate(
        "[...document.querySelectorAll('.text a')].map(a => [a.getAttribute('href'), a.target, a.rel])"
    )
    assert links
    for href, target, rel in links:
        assert href is None or re.match("https?://|mailto:", href), href
        assert (target, rel) == ("_blank", "noopener noreferrer")
    assert "⟨U+202E⟩" in page.locator(".code code").first.text_content()
    assert page.evaluate("window.ran") is None
    assert not dialogs
    assert not page.evaluate("violations")  # nothing was left for the policy to stop


def test_the_policy_stops_what_a_sanitizer_could_miss(page):
    insert = "(html) => { try { document.body.insertAdjacentHTML('beforeend', html); } catch (e) { return e.name; } }"
    assert page.evaluate(insert, "<img src=x onerror='window.ran = 1'>") == "TypeError"  # a string is no TrustedHTML
    blocked = page.evaluate(
        """() => new Promise((resolve) => {
          document.addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective));
          document.body.setAttribute("style", "color: red");
        })"""
    )
    assert blocked == "style-src-attr"


MARKDOWN = [
    ("a\nb", "<p>a<br>\nb</p>"),
    ("x *y* `z<`", "<p>x <em>y</em> <code>z&lt;</code></p>"),
    ("| a | b |\n| - | -: |\n| 1 | 2 |", '<td class="align-right">2</td>'),
    ("costs $5 or $6", "<p>costs $5 or $6</p>"),
    ("so $a_1 * b_2 * c$.", '<p>so <span class="math"><span class="katex">'),
    ("\\[\na\n- b\n\\]", '<div class="math"><span class="katex-display">'),
    ("- \\(x\\)", '<ul>\n<li><span class="math"><span class="katex">'),
    ("so $\\frac{a$.", '<p>so <span class="math">$\\frac{a$</span>.</p>'),
    (
        "- [x] *a*\n- [ ] b",
        '<li class="task done"><input type="checkbox" disabled="" checked="" aria-label="done"> <em>a',
    ),
    (
        "1. [ ] a\n\n   b",
        '<li class="task">\n<p><input type="checkbox" disabled="" aria-label="to do"> a</p>\n<p>b</p>',
    ),
    ("- [x]a", "<li>[x]a</li>"),
    ("3. c", '<ol start="3">\n<li>c</li>\n</ol>'),
    ("main.py", "<p>main.py</p>"),
    ("![cat](https://a.b/c.png)", ">🖼 cat</a>"),
    ("```js\nlet x\n```", '<span class="hljs-keyword">let</span> x\n</code></pre>'),
    ("```nothing\n<x>\n```", "<code>&lt;x&gt;\n</code></pre>"),
    ("[a]\n\n[a]: https://b.c", '<a href="https://b.c" target="_blank"'),
]


def test_markdown_grows_to_the_same_as_at_once(page):
    rendered = page.evaluate(
        """async (sources) => {
          const { renderMarkdown } = await import("/page/markdown.js");
          return sources.map((source) => {
            const [grown, whole] = [document.createElement("div"), document.createElement("div")];
            for (let end = 1; end <= source.length; end += 1) renderMarkdown(grown, source.slice(0, end));
            renderMarkdown(whole, source);
            return [grown.innerHTML, whole.innerHTML];
          });
        }""",
        [source for source, _ in MARKDOWN],
    )
    for (grown, whole), (_, html) in zip(rendered, MARKDOWN, strict=True):
        assert html in whole
        assert grown == whole


def test_streaming_keeps_what_does_not_change(page):
    kept = page.evaluate(
        """async ([before, after]) => {
          const { renderMarkdown } = await import("/page/markdown.js");
          const element = document.createElement("div");
          const parts = () => [element.firstChild, ...element.querySelectorAll("button, pre")];
          renderMarkdown(element, before);
          const old = parts();
          renderMarkdown(element, after);
          return parts().map((node, i) => node === old[i]);
        }""",
        ["One\n\n```python\nx = 1\n", "One\n\n```python\nx = 1\ny = 2\n```\n\nTwo"],
    )
    assert kept == [True, True, True]


def test_code_is_highlighted_and_copied(page, server):
    code = "def f():\n    return '<b>'\n"
    server.answers = [Answer(["```python\n", *code, "```"])]
    ask(page, "Code")
    finished(page)
    expect(page.locator(".hljs-keyword").first).to_have_text("def")
    page.get_by_role("button", name="Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == code
