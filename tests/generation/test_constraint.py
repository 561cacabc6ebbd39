"""Constrained decoding: every text matches its constraint, or the reason is reported."""

import json
import re
import time

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm import generate
from mlxlm import tokenizer as tokenizers
from mlxlm.backend.mlx import mx
from mlxlm.generation import GenerationOptions, Sampler
from mlxlm.generation.constraint import Grammar, apply_token_bitmask, stack_token_bitmasks
from mlxlm.generation.sampling import sample_batch
from mlxlm.utils.errors import GenerationError
from tests.paths import SHARED

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "ü"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": -5, "maximum": 5, "multipleOf": 0.5}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["tiny", "spaced", "gpt2", "llama2"])
def tokenizer(request, lm, make_text):
    if request.param == "tiny":
        return lm.tokenizer
    if request.param == "spaced":
        return with_dummy_prefix(tokenizers.train([make_text(3000)], 400, "sentencepiece"))
    folder = SHARED / "tokenizers" / request.param
    if not folder.is_dir():
        pytest.skip("no folder of real tokenizers beside this checkout")
    return tokenizers.load(folder)


def with_dummy_prefix(trained):
    """The same tokens, with a space put in front of every text and taken off again."""
    runtime = library.Tokenizer.from_str(trained.to_json())
    runtime.normalizer = library.normalizers.Prepend(" ")
    decoders = library.decoders
    runtime.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizers.Tokenizer(runtime, trained.special_token_names)


def compiled(options, tokenizer, padding=5):
    ends = frozenset() if tokenizer.eos_token_id is None else frozenset({tokenizer.eos_token_id})
    return Grammar.compile(options, tokenizer, tokenizer.vocab_size + padding, ends), ends


def random_text(tokenizer, options, seed, most=400):
    """The text of a model with random logits, and its sampler at the end."""
    grammar, ends = compiled(options, tokenizer)
    sampler = Sampler(options, [1], seed, tokenizer=tokenizer, grammar=grammar)
    size = tokenizer.vocab_size + 5
    ids, stream, text = [], tokenizer.detokenizer(), ""
    while not sampler.matcher.finished and not sampler.matcher.error and len(ids) < most:
        logits = mx.random.normal((1, size), key=mx.random.key(1000 * seed + len(ids))) * 3
        token = sampler(logits).item()
        assert token < tokenizer.vocab_size  # never one that is only padding
        sampler.accept(token)
        if token in ends:
            break
        ids.append(token)
        text += stream.add_token(token)
    return text + stream.finalize(), sampler


@pytest.mark.parametrize("seed", range(2))
def test_json_of_a_schema_always_parses(tokenizer, seed):
    text, sampler = random_text(tokenizer, GenerationOptions(temperature=1.0, json_schema=PERSON), seed)
    assert sampler.matcher.constraint_error is None and sampler.matcher.finished
    value = json.loads(text)
    assert {"name", "age"} <= set(value) <= {"name", "age", "tags", "more"}
    assert len(value["name"]) <= 12 and 0 <= value["age"] <= 150
    assert set(value.get("tags", [])) <= {"a", "b\n", "ü"} and abs(value.get("more") or 0) <= 5


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "regex", [r"\d{3}-\d{4}", r"[a-c]+(ü|世界)?x", r"^(yes|no)$", r" ?a b", r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)"]
)
def test_texts_match_a_regular_expression(tokenizer, regex, seed):
    text, sampler = random_text(tokenizer, GenerationOptions(temperature=1.0, regex=regex), seed, most=60)
    matches = re.fullmatch(regex.replace(r"\d", "[0-9]"), text)
    assert (matches is not None) == (sampler.matcher.constraint_error is None)
    assert matches or len(text) >= 60 or "+" in regex


def test_texts_are_one_of_the_choices(tokenizer):
    choices = ("yes", " no", "yes, of course", 'a "b"\\n\n', "世界", "\x00\x7f")
    for temperature in (0, 1.0):
        text, sampler = random_text(tokenizer, GenerationOptions(temperature=temperature, choice=choices), 1)
        assert text in choices and sampler.matcher.constraint_error is None


GRAMMAR = """
start: greeting (", " greeting)* "!"
greeting: "hello" | /[bc]{1,3}/ | %json {"type": "integer", "minimum": 0, "maximum": 9}
"""


@pytest.mark.parametrize("seed", range(2))
def test_texts_match_a_grammar(tokenizer, seed):
    text, sampler = random_text(tokenizer, GenerationOptions(temperature=1.0, grammar=GRAMMAR), seed, most=100)
    complete = re.fullmatch(r"(hello|[bc]{1,3}|[0-9])(, (hello|[bc]{1,3}|[0-9]))*!", text)
    assert (complete is not None) == (sampler.matcher.constraint_error is None)
    assert complete or len(text) >= 100


def test_a_grammar_can_ask_for_special_tokens(lm):
    """They are part of the text, and match nothing else; a constraint that doesn't name them can't have them."""
    name, id = next((name, id) for name, id in lm.tokenizer.special_tokens.items() if id not in lm.eos_token_ids)
    for spelled in (name, f"<[{id}]>"):
        result = generate(lm, "x", grammar=f'start: "a" {spelled} "b"', temperature=0, logprobs=0)
        assert result.text == f"a{name}b" and result.tokens[1] == id
        assert result.logprobs[1].bytes == name.encode() and result.constraint_error is None
    result = generate(lm, "x", grammar=f'start: "{name}"', temperature=0)
    assert result.text == name and id not in result.tokens
    matcher = Grammar.compile(GenerationOptions(regex="(.|\n)*"), lm.tokenizer, 300, lm.eos_token_ids).matcher()
    assert token_bitmask(matcher) & set(lm.tokenizer.special_tokens.values()) <= lm.eos_token_ids


@pytest.mark.parametrize("text", [" no", "no", "  two spaces"])
def test_leading_spaces_of_a_choice(tokenizer, text):
    """Also where the tokenizer takes one off the front of every text (Llama 2)."""
    assert random_text(tokenizer, GenerationOptions(temperature=1.0, choice=text), 1)[0] == text


some_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@settings(max_examples=25)
@given(st.lists(some_text, min_size=1, max_size=4), st.integers(0, 99))
def test_any_text_can_be_a_choice(lm, choices, seed):
    text, sampler = random_text(lm.tokenizer, GenerationOptions(temperature=1.0, choice=tuple(choices)), seed)
    assert text in choices and sampler.matcher.constraint_error is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=15)
@given(json_values, st.integers(0, 99))
def test_any_json_can_be_a_constant(lm, value, seed):
    options = GenerationOptions(temperature=1.0, json_schema={"const": value})
    text, sampler = random_text(lm.tokenizer, options, seed)
    assert sampler.matcher.constraint_error is None and json.loads(text) == value


def test_an_end_token_is_allowed_exactly_where_the_text_may_end(lm):
    """Also one that stands for text: it would end the text inside a string."""
    letter = lm.tokenizer.encode("a", add_special_tokens=False, continues=True)[0]
    ends = frozenset({lm.tokenizer.eos_token_id, letter, 10_000})
    matcher = Grammar.compile(GenerationOptions(regex="[ab]+"), lm.tokenizer, 310, ends).matcher()
    assert not token_bitmask(matcher) & ends
    matcher.consume(next(iter(token_bitmask(matcher))))
    assert token_bitmask(matcher) >= {lm.tokenizer.eos_token_id, letter}
    assert matcher.constraint_error is None and not matcher.finished
    eos, mark, other, *_ = lm.tokenizer.special_tokens.values()
    options = GenerationOptions(grammar=f'start: "b" ("c" | <[{mark}]>)')
    matcher = Grammar.compile(options, lm.tokenizer, 310, frozenset({eos, other})).matcher()
    matcher.consume(next(iter(token_bitmask(matcher))))
    assert mark in token_bitmask(matcher) and not token_bitmask(matcher) & {eos, other}


def test_forced_text_is_never_encoded_with_an_end_token(lm):
    spelt = lm.tokenizer.encode("The quick", add_special_tokens=False)
    merged = next(id for id in spelt if len(lm.tokenizer.token_bytes(id)) > 1)
    options = GenerationOptions(choice="The quick")
    matcher = Grammar.compile(options, lm.tokenizer, 300, frozenset({merged})).matcher()
    text = b""
    while not matcher.finished:
        assert matcher.error is None and merged not in token_bitmask(matcher)
        token = min(token_bitmask(matcher))
        text += lm.tokenizer.token_bytes(token)
        matcher.consume(token)
    assert text == b"The quick" and matcher.constraint_error is None


def token_bitmask(matcher):
    bits = np.unpackbits(matcher.token_bitmask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_apply_token_bitmask():
    rng = np.random.default_rng(0)
    for size in (1, 31, 32, 33, 300):
        words = rng.integers(0, 2**32, (3, -(-size // 32)), dtype=np.uint32)
        logits = rng.normal(size=(3, size)).astype(np.float32)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :size].astype(bool)
        ours = np.array(apply_token_bitmask(mx.array(logits), mx.array(words)))
        assert (ours == np.where(bits, logits, -np.inf)).all()
        fewer = [words[0], words[1, :-1], np.append(words[2], 7).astype(np.uint32)]  # a word that stands for no logits
        bits[1, (words.shape[1] - 1) * 32 :] = False
        ours = np.array(apply_token_bitmask(mx.array(logits), stack_token_bitmasks(fewer, size)))
        assert (ours == np.where(bits, logits, -np.inf)).all()


def test_a_text_without_end_tokens_ends_where_nothing_can_follow(lm):
    grammar = Grammar.compile(GenerationOptions(choice=("ab",)), lm.tokenizer, 300, frozenset())
    matcher = grammar.matcher()
    for token in lm.tokenizer.encode("ab", continues=True):
        assert not matcher.finished and matcher.error is None
        matcher.consume(token)
    assert matcher.finished and matcher.constraint_error is None and not any(id < 300 for id in token_bitmask(matcher))


def test_an_incomplete_text_has_a_constraint_error(lm):
    result = generate(lm, "x", json_schema={"type": "string", "minLength": 200}, max_tokens=5, temperature=1.0)
    assert result.finish_reason == "length"
    assert result.constraint_error == "the text ended before it matched json_schema"
    assert generate(lm, "x", choice="yes", temperature=0).constraint_error is None


@pytest.mark.parametrize("pattern", ["^x$", "^[ab]$"])
def test_json_with_a_repeated_key_has_a_constraint_error(lm, pattern):
    """llguidance allows repeated keys unless the schema names them."""
    least = len(pattern) - 1  # one more than there are such keys
    schema = {"type": "object", "patternProperties": {pattern: {"enum": [1]}}, "additionalProperties": False}
    options = GenerationOptions(temperature=1.0, json_schema={**schema, "minProperties": least})
    for seed in range(2):
        text, sampler = random_text(lm.tokenizer, options, seed)
        assert sampler.matcher.finished and len(json.loads(text)) < least
        assert re.fullmatch(r'json_schema: it has "[abx]" twice', sampler.matcher.constraint_error)
    options = GenerationOptions(temperature=1.0, json_schema={**schema, "minProperties": 1, "maxProperties": 1})
    assert random_text(lm.tokenizer, options, 0)[1].matcher.constraint_error is None


def test_grammars_are_cached(lm):
    options = GenerationOptions(choice=("once", "twice"))
    assert compiled(options, lm.tokenizer)[0] is compiled(options, lm.tokenizer)[0]


def test_batched_rows_with_different_constraints(lm):
    def samplers():
        constraints = {"choice": ("yes", "no")}, {}, {"regex": "[0-9]{1,5}"}, {"json_schema": PERSON}
        for i, constraint in enumerate(constraints):
            options = GenerationOptions(temperature=1.0, **constraint)
            grammar = compiled(options, lm.tokenizer, padding=0)[0]
            yield Sampler(options, [1], i, tokenizer=lm.tokenizer, grammar=grammar)

    together, alone = list(samplers()), list(samplers())
    live = list(range(4))
    for step in range(8):
        logits = mx.random.normal((4, lm.tokenizer.vocab_size), key=mx.random.key(step))
        tokens = sample_batch([together[row] for row in live], logits[mx.array(live)]).tolist()
        assert tokens == [alone[row](logits[row : row + 1]).item() for row in live]
        for row, token in zip(live, tokens, strict=True):
            together[row].accept(token), alone[row].accept(token)
        ended = {row for row, token in zip(live, tokens, strict=True) if token == lm.tokenizer.eos_token_id}
        live = [row for row in live if not together[row].ended and row not in ended]


@pytest.mark.parametrize("seed", range(3))
def test_verify_draft_equals_single_steps(lm, seed):
    """Through the end of the text; a draft that the grammar refuses changes nothing before it."""
    options = GenerationOptions(temperature=1.0, json_schema=PERSON)
    grammar, ends = compiled(options, lm.tokenizer, padding=0)
    plain, verify_draft = (Sampler(options, [1], seed, tokenizer=lm.tokenizer, grammar=grammar) for _ in range(2))
    logits = mx.random.normal((200, lm.tokenizer.vocab_size), key=mx.random.key(seed))
    wanted = []
    while not plain.matcher.finished and not (wanted and wanted[-1] in ends):
        wanted.append(plain(logits[len(wanted)][None]).item())
        plain.accept(wanted[-1])
    rng, done = np.random.default_rng(seed), 0
    while done < len(wanted):
        draft = wanted[done : done + 4]
        wrong = rng.integers(0, 5)
        draft = draft[:wrong] + [0] * (4 - min(wrong, len(draft)))
        pairs = zip(draft, wanted[done:], strict=False)
        right = next((i for i, (a, b) in enumerate(pairs) if a != b), min(4, len(wanted) - done))
        tokens, _ = verify_draft.verify_draft(logits[done : done + 5], mx.array(draft), 0.002)
        taken = min(right + 1, len(wanted) - done)
        assert tokens.tolist()[:taken] == wanted[done : done + taken]
        verify_draft.accept_draft(logits[done : done + 5], tokens[:taken])
        for token in wanted[done : done + taken]:
            verify_draft.accept(token)
        done += taken


def test_a_fork_is_independent(lm):
    options = GenerationOptions(temperature=0, choice=("ab", "cd"))
    sampler = Sampler(options, [1], 0, tokenizer=lm.tokenizer, grammar=compiled(options, lm.tokenizer, 0)[0])
    fork = sampler.fork()
    a, c = (lm.tokenizer.encode(text, continues=True)[0] for text in "ac")
    fork.accept(a)
    sampler.accept(c)
    b, d = (lm.tokenizer.encode(text, continues=True)[0] for text in "bd")
    assert (fork(mx.zeros((1, 300))).item(), sampler(mx.zeros((1, 300))).item()) == (b, d)


def nested(depth):
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json_schema": {"not": {"type": "string"}}}, '"not" can\'t be enforced while a text is generated'),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, '"uniqueItems" can\'t be enforced'),
        ({"json_schema": {"if": {}, "then": {}}}, '"if", "then" can\'t be enforced'),
        ({"json_schema": {"$ref": "http://example.com/schema"}}, "http://example.com/schema"),
        ({"json_schema": {"$ref": "file:///etc/passwd"}}, "file:///etc/passwd"),
        ({"json_schema": {"$ref": "#/$defs/none"}}, "points to /$defs/none, which the schema doesn't have"),
        ({"json_schema": {"$ref": "#"}}, "no text matches it"),
        ({"json_schema": {"type": "word"}}, 'there is no type "word" (try: string, number'),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        ({"json_schema": "false"}, "no JSON matches false (try: true, for any JSON)"),
        ({"json_schema": nested(200)}, "recursion limit"),
        ({"json_schema": nested(3_000)}, "recursion"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)"}}, "look-around"),
        ({"json_schema": {"type": "string", "pattern": "(a"}}, "the pattern (a: unclosed group"),
        ({"json_schema": {"type": "string", "minLength": 10**12}}, "json_schema"),
        ({"grammar": "root: /a/"}, "grammar: no start rule found (try: a Lark grammar in llguidance's dialect"),
        ({"grammar": "start: a"}, 'grammar: at line 1, column 8: unknown name: "a"'),
        ({"grammar": "start: /(/"}, "grammar: unclosed group"),
        ({"grammar": "start: <unknown>"}, 'unknown special token: "<unknown>"'),
        ({"grammar": "start: <[1000000]>"}, "grammar: at line 1, column 8: Token range end too large"),
        ({"grammar": 'start: start "a"'}, "grammar: no text matches it"),
        ({"grammar": 'start: "a" %json {"not": {}}'}, 'grammar: "not" can\'t be enforced'),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "a(?!b)"}, "look-around"),
        ({"json_schema": "{" + " " * 2**18 + "}"}, "more than 262144 characters"),
        ({"regex": "a^b"}, "it matches the whole text, so that ^ and $ aren't needed"),
        ({"regex": r"[^\x00-\x{10FFFF}]"}, "no text matches it"),
    ],
)  # fmt: skip
def test_unsupported_constraints_are_refused_in_one_line(lm, constraint, message):
    started = time.process_time()
    with pytest.raises(GenerationError) as caught:
        compiled(GenerationOptions(**constraint), lm.tokenizer)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(a{200}){200}"},
        {"regex": "((a|b)*a(a|b){18})"},
        {"regex": "(.*a){60}"},
        {"regex": "(((((a*)*)*)*)*)*b"},
        {"regex": "x" * 20_000},
        {"json_schema": {"type": "string", "maxLength": 10**9}},
        {"json_schema": {"type": "array", "minItems": 10**9}},
        {"json_schema": {"enum": list(range(20_000))}},
        {"json_schema": {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
                         | {"d40": {"type": "string"}}, "$ref": "#/$defs/d0"}},
        {"json_schema": {"allOf": [{"properties": {str(i): {"type": "string"}}} for i in range(300)]}},
        {"choice": tuple(str(i) for i in range(5000))},
    ],
)  # fmt: skip
def test_large_constraints_end_in_bounded_time(lm, constraint):
    """They work, or are refused in one line at the beginning, or the text says why it can't go on."""
    started = time.process_time()
    try:
        _, sampler = random_text(lm.tokenizer, GenerationOptions(temperature=1.0, **constraint), 0, most=20)
        assert "\n" not in (sampler.matcher.constraint_error or "")
    except GenerationError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
    assert time.process_time() - started < 20


def test_a_tokenizer_whose_tokens_are_not_bytes_is_refused(lm, monkeypatch):
    monkeypatch.setattr(type(lm.tokenizer), "has_byte_tokens", False)
    with pytest.raises(GenerationError, match="regex isn't supported with this model"):
        compiled(GenerationOptions(regex="a"), lm.tokenizer)


def test_an_error_inside_the_library_is_one_line(lm, monkeypatch):
    import llguidance

    def fails(*_, **__):
        raise ValueError("first\nsecond")

    monkeypatch.setattr(llguidance, "LLMatcher", fails)
    with pytest.raises(GenerationError, match="^regex: first "):
        compiled(GenerationOptions(regex="a"), lm.tokenizer)


TABLE = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2}, "b": {"const": {}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def whitespace_text(tokenizer, schema):
    """The text of a model that prefers whitespace wherever it is allowed."""
    options = GenerationOptions(temperature=0, json_schema=schema)
    grammar, ends = compiled(options, tokenizer, padding=0)
    sampler = Sampler(options, [1], 0, tokenizer=tokenizer, grammar=grammar)
    pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    logits = mx.where(mx.array([bool(piece) and not piece.strip() for piece in pieces]), 9.0, 0.0)[None]
    ids = []
    while not sampler.matcher.finished and len(ids) < 500 and not (ids and ids[-1] in ends):
        ids.append(sampler(logits).item())
        sampler.accept(ids[-1])
    assert sampler.matcher.constraint_error is None
    return tokenizer.decode(ids)


def test_json_has_at_most_the_white_space_of_json_dumps(tokenizer):
    assert whitespace_text(tokenizer, TABLE) == '{"a": [null, null], "b": {}}'


def test_settings_of_llguidance_are_refused(lm):
    with pytest.raises(GenerationError, match='"x-guidance" can.t be set'):
        compiled(GenerationOptions(json_schema={**TABLE, "x-guidance": {"whitespace_flexible": True}}), lm.tokenizer)


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
DEFINED = {"$defs": {"cat": CAT, "dog": DOG, "pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}}}


def closed(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def matches(value, schema, root):
    """Whether a value matches a schema of the keywords that are used here."""
    if "$ref" in schema and not matches(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root):
        return False
    counts = {name: sum(matches(value, part, root) for part in schema.get(name, ())) for name in ("oneOf", "anyOf")}
    if counts["oneOf"] != ("oneOf" in schema) or counts["anyOf"] < ("anyOf" in schema):
        return False
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if listed is not None and json.dumps(value) not in map(json.dumps, listed):
        return False
    types = {"string": str, "integer": int, "boolean": bool, "null": type(None), "array": list, "object": dict}
    if "type" in schema and type(value) not in [types[name] for name in np.atleast_1d(schema["type"])]:
        return False
    keys = set(value) if isinstance(value, dict) else set()
    inner = [(value[name], part) for name, part in schema.get("properties", {}).items() if name in keys]
    inner += [(value, part) for part in schema.get("allOf", ())]
    inner += [(item, schema["items"]) for item in value] if "items" in schema else []
    if "additionalProperties" in schema and keys - set(schema["properties"]):
        return False
    return set(schema.get("required", ())) <= keys and all(matches(*pair, root) for pair in inner)


@pytest.mark.parametrize("schema", [
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": ["integer", "null"]}]},
    {"oneOf": [{"const": 1}, {"const": "1"}, {"enum": [True, None]}]},
    {"oneOf": [{"type": "boolean"}, {"enum": [1, 2]}]},
    {"oneOf": [CAT, DOG]},
    {**DEFINED, "$ref": "#/$defs/pet"},
    {**DEFINED, "type": "array", "items": {"$ref": "#/$defs/pet"}, "minItems": 1, "maxItems": 2},
    {**DEFINED, "oneOf": [{"$ref": "#/$defs/pet"}, {"type": "null"}]},
    {**DEFINED, **closed(default={"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]})},
    {"oneOf": [closed(x={"type": "null"}), closed(y={"type": "null"})]},
    {"oneOf": [{"allOf": [{"type": "null"}]}, {"anyOf": [{"type": "boolean"}, {"const": 3}]}]},
    {"oneOf": [{"const": 1}]},
])  # fmt: skip
def test_one_of_alternatives_that_exclude_each_other(lm, schema):
    for seed in range(2):
        text, sampler = random_text(lm.tokenizer, GenerationOptions(temperature=1.0, json_schema=schema), seed)
        assert sampler.matcher.constraint_error is not None or matches(json.loads(text), schema, schema)


@pytest.mark.parametrize("schema", [
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"type": "null"}, {}]},
    {"$defs": {"x": {"$anchor": "x", "type": "string"}}, "type": "object",
     "properties": {"y": {"oneOf": [{"$ref": "#x"}, {"type": "string"}]}}},
    {"properties": {"x": {"items": {"oneOf": [DOG, {**DOG, "required": []}]}}}},
    {"oneOf": [{"properties": {"x": {"type": "string"}}}, {"properties": {"x": {"type": "null"}}}]},
    {"$defs": {"x": {"oneOf": [{"type": "null"}, {}]}}, "$ref": "#/$defs/x"},
    {"$defs": {"x": [{"oneOf": [{"type": "null"}, {}]}]}, "items": {"$ref": "#/$defs/x/0"}},
    {"$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    {"$defs": {f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(20)} | {"d20": {}},
     "$ref": "#/$defs/d0"},
])  # fmt: skip
def test_one_of_alternatives_that_may_both_match_are_refused(lm, schema):
    with pytest.raises(GenerationError, match='JSON may match several alternatives of "oneOf".*try: .*"anyOf"'):
        compiled(GenerationOptions(json_schema=schema), lm.tokenizer)


def test_errors_do_not_mention_llguidance_terms(lm):
    wrong = [
        False, {"not": {}}, {"oneOf": []}, {"anyOf": []}, {"enum": []}, {"type": []}, {"enum": 3}, {"type": 3},
        {"type": "word"}, {"type": "string", "format": "colour"}, {"minLength": -1}, {"minimum": "x"}, {"$ref": 3},
        {"properties": {"a": 3}}, {"$ref": "#/$defs/a"}, {"$ref": "#a"}, {"$ref": "b.json"}, {"$schema": "mine"},
        {"pattern": "(a"}, {"pattern": "a^b"}, {"multipleOf": 0}, {"minLength": 2**40}, {"required": "a"},
    ]  # fmt: skip
    for schema in wrong:
        with pytest.raises(GenerationError) as caught:
            compiled(GenerationOptions(json_schema=schema), lm.tokenizer)
        said = str(caught.value)
        assert re.match("json_schema: .* \\(try: .*\\)$", said), said
        assert not re.search("Unimplemented|Unsatisfiable|coerce|registry|Pointer|f64|regex", said), said
