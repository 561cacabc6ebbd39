"""JSONL requests: parsing and errors."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.backend.mlx import tree_flatten
from mlxlm.cache import KVOptions
from mlxlm.generation import GenerationOptions, Request, get_engine, run_batch
from mlxlm.generation.gumbel_noise import derive_seed
from mlxlm.generation.jsonl import MAX_LINE_BYTES, BadRequest, EncodedPrompt, PromptEncoder, RequestReader
from mlxlm.utils.errors import GenerationError, MlxlmError, TokenizerError

DEFAULTS = GenerationOptions(temperature=0.5, max_tokens=7)
SYSTEM, QUESTION = ([{"role": role, "content": "a"}] for role in ("system", "user"))


@pytest.fixture
def reader(lm):
    """`reader(**settings)`: messages become the ids of their contents, with 1 as the end token."""

    def encode_messages(messages):
        text = "|".join(f"{m['role']}:{m['content']}" for m in messages)
        return EncodedPrompt(lm.tokenizer.encode(text), frozenset([1]))

    def make(defaults=DEFAULTS, as_chat=False, system_prompt=None, **settings):
        encoder = PromptEncoder(lm, encode_messages, as_chat=as_chat, system_prompt=system_prompt)
        return RequestReader(lm, defaults, encoder, **settings)

    return make


@pytest.fixture
def read(reader):
    """`read(line, **settings)`: the rows of one line, which is the fifth."""

    def read(line, **settings):
        line = json.dumps(line) if isinstance(line, dict) else line
        return list(reader(**settings).read(5, line if isinstance(line, bytes) else line.encode()).pending_samples())

    return read


@pytest.fixture
def refused(read):
    """`refused(line)`: its error."""

    def refused(line, **settings):
        with pytest.raises(BadRequest) as error:
            read(line, **settings)
        assert error.value.line == 5
        return error.value

    return refused


def test_a_prompt(read, lm):
    (row,) = read({"prompt": "The quick"})
    assert (row.task.id, row.task.line, row.number, row.task.num_samples) == (5, 5, 0, 1)
    assert row.request.prompt == lm.tokenizer.encode("The quick")
    assert row.request.options == DEFAULTS.with_seed(derive_seed(0, "5", 0))
    assert row.request.eos_token_ids is None


def test_options_replace_the_defaults(read):
    (row,) = read({"prompt": "x", "temperature": 1.5, "stop": ["a", "b"], "logit_bias": {"7": -3}, "logprobs": 2})
    options = row.request.options
    assert (options.temperature, options.max_tokens, options.stop) == (1.5, 7, ("a", "b"))
    assert options.logit_bias == {7: -3} and options.logprobs == 2
    assert read({"prompt": "x", "max_tokens": None})[0].request.options.max_tokens is None
    schema = {"type": "object"}
    assert json.loads(read({"prompt": "x", "json_schema": schema})[0].request.options.json_schema) == schema
    assert read({"prompt": "x", "choice": ["a", "b"]})[0].request.options.choice == ("a", "b")


def test_messages(read, lm):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    messages.append({"role": "user", "content": "And?"})
    (row,) = read({"messages": messages})
    assert row.request.prompt == lm.tokenizer.encode("user:Hi|assistant:Ho|user:And?")
    assert row.request.eos_token_ids == {1}


def test_the_system_prompt(read, lm):
    def text(request, **settings):
        return lm.tokenizer.decode(read(request, **settings)[0].request.prompt).strip()

    messages = [{"role": "user", "content": "Hi"}]
    assert text({"messages": messages, "system_prompt": "S"}) == "system:S|user:Hi"
    assert text({"messages": messages}, system_prompt="T") == "system:T|user:Hi"
    assert text({"messages": messages, "system_prompt": "S"}, system_prompt="T") == "system:S|user:Hi"
    assert text({"messages": messages, "system_prompt": ""}, system_prompt="T") == "user:Hi"
    assert text({"messages": [{"role": "system", "content": "S"}, *messages]}, system_prompt="T") == "system:S|user:Hi"
    assert text({"prompt": "Hi"}, as_chat=True, system_prompt="T") == "system:T|user:Hi"
    assert text({"prompt": "Hi", "system_prompt": "S"}, as_chat=True) == "system:S|user:Hi"


def test_seeds(read):
    def seeds(request, **settings):
        return [row.request.options.seed for row in read(request, **settings)]

    assert seeds({"id": "a", "prompt": "x"}) == [derive_seed(0, "a", 0)]
    assert seeds({"id": "a", "prompt": "x"}, defaults=replace(DEFAULTS, seed=9)) == [derive_seed(9, "a", 0)]
    assert seeds({"id": "a", "prompt": "x"}, num_samples=2) == [derive_seed(0, "a", 0), derive_seed(0, "a", 1)]
    assert seeds({"id": 3, "prompt": "x", "seed": 8}) == [8]
    assert seeds({"id": 3, "prompt": "x", "seed": 8, "num_samples": 2}) == [derive_seed(8, "3", n) for n in (0, 1)]
    assert seeds({"id": 3, "prompt": "x", "seed": None}) == [derive_seed(0, "3", 0)]


def test_a_request_with_its_own_seed_is_deterministic(read):
    def deterministic(**request):
        return {row.request.options.is_deterministic for row in read({"prompt": "x", **request})}

    assert deterministic(seed=8) == deterministic(deterministic=True) == {True}
    for others in ({}, {"seed": 8, "num_samples": 2}, {"seed": 8, "deterministic": False}):
        assert deterministic(**others) == {False}


def test_finished_samples_are_skipped(read):
    digest = read({"id": "a", "prompt": "x"})[0].task.digest
    done = {("a", 0): digest, ("a", 2): digest}
    rows = read({"id": "a", "prompt": "x", "num_samples": 4}, done=lambda *row: done.get(row))
    assert [(row.number, row.task.num_samples) for row in rows] == [(1, 4), (3, 4)]
    assert rows[1].request.options.seed == derive_seed(0, "a", 3)
    assert read({"id": "a", "prompt": "x"}, done=lambda *row: done.get(row)) == []


def test_results_of_another_request_are_an_error(read):
    with pytest.raises(
        GenerationError, match='line 5: the results for the id "a" are those of another request'
    ) as error:
        read({"id": "a", "prompt": "x"}, done=lambda id, sample: "0" * 12)
    assert not isinstance(error.value, BadRequest)


def test_the_digest_covers_all_that_determines_the_text(read, lm, reader):
    """But of the id, which is compared itself, and of how many samples there are."""

    def digest(value, **settings):
        [row, *_] = read({"prompt": "x", **value}, **settings)
        assert len(row.task.digest) == 12 and int(row.task.digest, 16) >= 0
        return row.task.digest

    plain = digest({})
    same = [{"id": "a"}, {"num_samples": 3}, {"temperature": 0.5}, {"max_tokens": 7}, {"top_p": 1}, {"seed": None}]
    assert {digest(value) for value in same} == {plain}
    others = [
        {"prompt": "y"},
        {"prompt": [5]},
        {"temperature": 1},
        {"seed": 0},
        {"seed": 1},
        {"seed": 1, "num_samples": 2},
        {"logit_bias": {"3": 1}},
        {"logit_bias": {"3": 2}},
        {"json_schema": {"type": "object"}},
        {"choice": ["a"]},
    ]
    found = [plain, digest({}, kv=KVOptions(size=99)), digest({}, defaults=replace(DEFAULTS, seed=9))]
    found += [digest(value) for value in others]
    weights = [(name, value + 1) for name, value in tree_flatten(lm.model.parameters())]
    other = replace(lm, model=type(lm.model)(lm.config))
    other.model.load_weights(weights)
    found.append(RequestReader(other, DEFAULTS, PromptEncoder(other, None)).read(1, b'{"prompt": "x"}').digest)
    assert len(set(found)) == len(found)
    assert digest({"temperature": 1}) == digest({"temperature": 1.0})


@pytest.mark.parametrize("id", ["", "a/ü 世", 0, -3, 2.5, 10**30, "1\u2028\n"])
def test_ids(read, id):
    assert read({"id": id, "prompt": "x"})[0].task.id == id


def test_ids_are_unique_as_texts(reader):
    lines = reader()
    lines.read(1, b'{"id": 7, "prompt": "x"}')
    lines.read(2, b'{"id": 8, "prompt": "x"}')
    with pytest.raises(BadRequest, match='line 1 has the id "7", too') as error:
        lines.read(3, b'{"id": "7", "prompt": "x"}')
    assert (error.value.id, error.value.line) == ("7", 3)
    with pytest.raises(BadRequest, match="line 2 has the id 8, too"):
        lines.read(8, b'{"prompt": "x"}')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff", "the line is not UTF-8: invalid start byte at byte 0"),
        ("{", "the line is not JSON: Expecting property name enclosed in double quotes at character 2"),
        ('{"prompt": "a"} x', "the line is not JSON: Extra data at character 17"),
        ("[]", "the line is not a JSON object"),
        ("null", "the line is not a JSON object"),
        ('"text"', "the line is not a JSON object"),
        ('{"prompt": "a", "top_p": NaN}', "the line has NaN, which is not a JSON value"),
        ('{"prompt": "a", "prompt": "b"}', 'the line has "prompt" twice'),
        ('{"prompt": "a", "seed": ' + "1" * 5000 + "}", "the line can't be read: Exceeds the limit"),
        ('{"prompt": ' + "[" * 100_000, "the line can't be read: maximum recursion depth"),
        ('{"prompt": "\\ud800"}', "the text has a lone surrogate"),
        ('{"id": true, "prompt": "a"}', "the id is neither a string nor a number"),
        ('{"id": null, "prompt": "a"}', "the id is neither a string nor a number"),
        ('{"id": 1e999, "prompt": "a"}', "the line has 1e999, which is too large for a number"),
        ('{"id": ["a"], "prompt": "a"}', "the id is neither a string nor a number"),
    ],
)
def test_lines_without_an_id_that_can_be_read(refused, line, message):
    error = refused(line)
    assert error.id is None and error.message.startswith(message) and error.hint


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({}, "a request has either a prompt or messages", '{"prompt"'),
        ({"prompt": "x", "messages": []}, "a request has either a prompt or messages", '{"prompt"'),
        ({"prompt": 3}, "the prompt is not a string", "a string"),
        ({"prompt": [1, "a"]}, "the prompt is not a string", "a string"),
        ({"prompt": [1, True]}, "the prompt is not a string", "a string"),
        ({"prompt": "x", "temprature": 1}, 'there is no field "temprature"', "temperature"),
        ({"prompt": "x", "Top-K": 1, "max_token": 2}, 'there is no field "Top-K", "max_token"', "top_k, max_tokens"),
        (
            {"prompt": "x", "zzz": 1},
            'there is no field "zzz"',
            "id, prompt, messages, system_prompt, num_samples, or an option",
        ),
        ({"prompt": "x", "temperature": -1}, "invalid options: temperature is -1", None),
        ({"prompt": "x", "temperature": "1", "top_p": 2}, "invalid options: temperature is '1'", None),
        ({"prompt": "x", "num_samples": 0}, "num_samples is 0", "a whole number from 1"),
        ({"prompt": "x", "num_samples": 1.0}, "num_samples is 1.0", "a whole number from 1"),
        ({"prompt": "x", "num_samples": 10**12}, "num_samples is 1000000000000", "a whole number from 1"),
        ({"prompt": "x", "seed": -1}, "invalid options: seed is -1", None),
        (
            {"prompt": "x", "system_prompt": "s"},
            "a prompt without a chat can't have a system prompt",
            "messages, or --chat",
        ),
        ({"messages": [], "system_prompt": 3}, "system_prompt is not a string", '"Be brief."'),
        ({"messages": "hello"}, "messages is not a list of messages", '[{"role"'),
        ({"messages": []}, "messages is not a list of messages", '[{"role"'),
        ({"messages": ["hello"]}, "message 1 must have a role and a content", '{"role": "user"'),
        ({"messages": [{"role": "user"}]}, "message 1 must have a role and a content", '{"role": "user"'),
        ({"messages": [{"role": "bot", "content": ""}]}, "message 1 has the role 'bot'", "one of system, user"),
        (
            {"messages": [{"role": "user", "content": [1]}]},
            "the content of message 1 is not a string",
            '{"role": "user"',
        ),
        ({"messages": [{"role": "system", "content": "a"}]}, "the last message is not the user's", '{"role": "user"'),
        ({"messages": [*SYSTEM, *QUESTION], "system_prompt": "c"}, "there are two system prompts", "system_prompt, or"),
        ({"prompt": "x", "settings": {"system_prompt": "s"}}, "a prompt without a chat can't have", "messages, or"),
        ({"prompt": [1], "settings": {"system_prompt": "s"}}, "a prompt without a chat can't have", "messages, or"),
        ({"prompt": [1, 2], "settings": {"as_chat": True}}, "the prompt is not a string", "a string; or without"),
    ],
)
def test_requests_that_cant_be_served(refused, fields, message, hint):
    settings = fields.pop("settings", {})
    error = refused({"id": "a", **fields}, **settings)
    assert error.id == "a" and error.message.startswith(message)
    assert error.hint is None if hint is None else error.hint.startswith(hint)


def test_template_errors_are_errors_of_their_line(lm):
    def refuse(messages):
        raise TokenizerError("roles must alternate", "a question")

    reader = RequestReader(lm, DEFAULTS, PromptEncoder(lm, refuse))
    with pytest.raises(BadRequest, match=r"roles must alternate \(try: a question\)"):
        reader.read(1, b'{"messages": [{"role": "user", "content": "x"}]}')


def test_a_line_that_is_too_long(refused):
    assert "longer than 64 MiB" in refused(b'{"prompt": "' + b"x" * MAX_LINE_BYTES).message


def test_a_byte_order_mark_and_spaces(reader):
    assert reader().read(1, b'\xef\xbb\xbf {"id": "a", "prompt": "x"} \r').id == "a"
    with pytest.raises(BadRequest, match="not JSON"):
        reader().read(2, b'\xef\xbb\xbf{"id": "a", "prompt": "x"}')


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_line_is_a_request_or_a_bad_request(lm, line):
    reader = RequestReader(lm, DEFAULTS, PromptEncoder(lm, lambda messages: ([], frozenset())))
    with pytest.raises(BadRequest):
        reader.read(1, line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("id", "prompt", "messages", "system_prompt", "num_samples", *GenerationOptions.__dataclass_fields__)


@given(st.dictionaries(st.sampled_from(NAMES), json_values, max_size=4), st.sampled_from(["x", [2**31], [10**30], 0]))
def test_any_value_is_a_request_or_a_bad_request(lm, value, prompt):
    reader = RequestReader(lm, DEFAULTS, PromptEncoder(lm, lambda messages: ([], frozenset())))
    try:
        task = reader.read(1, json.dumps({"prompt": prompt} | value).encode())
    except GenerationError:
        return
    served(lm, [row.request for _, row in zip(range(3), task.pending_samples(), strict=False)])


def served(lm, wanted):
    """Every one has a result, and so has one that is good."""
    short = [replace(request, options=replace(request.options, max_tokens=2)) for request in wanted]
    good = Request([5, 6], GenerationOptions(max_tokens=1, seed=1))
    results = dict(run_batch(get_engine(lm), [*short, good]))
    assert len(results) == len(short) + 1 and not isinstance(results[len(short)], MlxlmError)
