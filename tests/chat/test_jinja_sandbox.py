"""Limits on chat templates: hostile ones end in an error, long conversations render as without limits."""

import jinja2.ext
import jinja2.sandbox
import pytest

from mlxlm.chat import jinja_sandbox
from mlxlm.chat.chat_formats import CHAT_FORMATS
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.messages import Message
from mlxlm.utils.errors import TokenizerError

GROWN = "{% set ns = namespace(a=['x'], b=['x']) %}{% for i in range(60) %}{% set ns.a = MORE %}{% endfor %}{{ ns.a }}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10 ** 10 ** 10 }}{{ (10 ** 2000) ** 2000 }}",
        "{{ [0] * 10**10 }}",
        GROWN.replace("MORE", "ns.a + ns.a"),
        GROWN.replace("MORE", "[ns.a, ns.a]"),
        GROWN.replace("['x']", "'x'").replace("MORE", "ns.a ~ ns.a"),
        GROWN.replace("MORE", "[ns.a, ns.a]").replace("}{{ ns.a", "}{{ ns.a|tojson|length"),
        GROWN.replace("MORE", "[ns.a, ns.a]").replace("{{ ns.a", "{% set ns.b = [ns.b, ns.b] %}{{ ns.a == ns.b"),
        GROWN.replace("MORE", "dict(a=ns.a, b=ns.a)").replace("{{ ns.a", "{{ ns.a|string|length"),
        "{% set s = 'a' * 1000000 %}" + "".join(f"{{% set s{i} = s[1:] %}}" for i in range(50)),
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(9) recursive %}{{ loop(range(100000)) }}{% endfor %}",
        "{% for i in range(100000) %}" + "x" * 10_000 + "{% endfor %}",
        "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n else 'x' }}{% endmacro %}{{ m(40) }}",
        "{{ range(100000)|select('in', range(100000)|list)|list|length }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
        "{{ (['a' * 100000] * 100000)|join }}",
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'|attr('ljust')(10**10) }}",
        "{{ 'a\n'|indent(10**9) }}",
        "{{ [1]|batch(10**9, 'x')|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ ([[1] * 9] * 9)|sum(start=[]) }}",
        "{% set s = 'a' * 1000000 %}{% set ns = namespace(l=[{'x': s}]) %}{% for i in range(18) %}"
        "{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l|map(attribute='x')|join }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10**9) }}",
        "{{ ('%s' * 1000)|format(*['a' * 10000] * 1000) }}",
        "{{ (1).to_bytes(10**10) }}",
        "{% set ns = namespace(l=[]) %}{% set s = 'a' * 100000 %}"
        "{% for i in range(100000) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
        "{% set s = 'a' * 400000 %}{% for i in range(90000) %}{{ 'b' in s }}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_much_is_refused(tokens, template, monkeypatch):
    monkeypatch.setattr(jinja_sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(
        TokenizerError,
        match=r"chat template failed.*: (it (makes|takes|formats)|.*unsafe).*try: another template",
    ):
        ChatTemplate(tokens, template)


def test_filters_that_pad_group_and_sum(tokens):
    source = (
        "{{ 'a'|center(5) }}{{ 2000|filesizeformat }}{{ [1, 2, 3]|batch(2, 'x')|list }}{{ [1, 2, 3]|slice(2)|list }}"
        "{{ messages|map(attribute='content')|map('length')|sum }}{{ {'a': 1}|xmlattr }}{{ (1, 2)[::-1] }}"
        "{% set a, b = 1, 2 %}{% for k, v in {'x': b}.items() %}{{ k ~ v }}{% endfor %}"
    )
    expected = "  a  2.0 kB[[1, 2], [3, 'x']][[1, 2], [3]]5 a=\"1\"(2, 1)x2"
    assert ChatTemplate(tokens, source).render([Message("user", "Hello")]) == expected


THINKING = """
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}{% break %}
    {%- endif %}
{%- endfor %}
{%- set asked = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
    {%- set content = message['content'] %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip() %}
    {%- endif %}
    {%- if loop.index0 > ns.last or message == asked[-1] %}{{- '<last>' }}{%- endif %}
    {{- '<' ~ message.role ~ '>' + content | trim + (loop.index0 % 2)|string }}
    {%- if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize(("count", "size"), [(3_000, 20), (3, 1_000_000)])
@pytest.mark.parametrize("source", [THINKING, *(form.template for form in CHAT_FORMATS.values())])
def test_long_conversations_are_rendered_as_without_limits(tokens, source, count, size):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    content = ("<think>a</think> word " * (size // 20 + 1))[:size]
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i in range(count)]
    names = {f"{role}_token": name for role, name in tokens.special_token_names.items()}
    expected = plain.from_string(source).render(messages=messages, add_generation_prompt=True, **names)
    assert ChatTemplate(tokens, source).render([Message(**message) for message in messages]) == expected
