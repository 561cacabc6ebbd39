"""The harmony format of GPT-OSS: how an answer is split, constrained, and read again by the model."""

from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mlxlm import generate, tokenizer
from mlxlm.backend.mlx import mx
from mlxlm.chat.answer_parser import AnswerParser
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.messages import Message, Tool, ToolCall
from mlxlm.chat.reasoning import HARMONY, split
from mlxlm.chat.session import Chat
from mlxlm.chat.tool_calls import JSON_FORMAT
from mlxlm.chat.tool_grammar import tool_grammar
from mlxlm.families import config_from_hf
from mlxlm.generation import LoadedModel
from mlxlm.utils.errors import GenerationError
from tests.chat.conftest import TEXT
from tests.chat.test_session import Scripted
from tests.chat.test_tool_grammar import accepts_text
from tests.chat.tool_templates import tokenizer_for
from tests.small_models import random_decoder

ANALYSIS, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
FINAL, COMMENTARY = "<|channel|>final<|message|>", "<|channel|>commentary"
CALL = f'{COMMENTARY} to=functions.f <|constrain|>json<|message|>{{"a": "<b|>"}}'


def parse(chunks, has_tools=True, reason="eos"):
    parser = AnswerParser(JSON_FORMAT if has_tools else None, HARMONY)
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)] + parser.push("", reason)
    for part in parser.parts:
        assert "".join(piece.text for piece in pieces if piece.part is part) == part.text
    return [(part.name or part.kind, part.text) for part in parser.parts]


ANSWERS = {
    f"{ANALYSIS}Hm.{NEXT}{FINAL}Hello.": [("reasoning", "Hm."), ("text", "Hello.")],
    f"{FINAL}Hello.": [("text", "Hello.")],
    f"{ANALYSIS}Hm.{NEXT}{ANALYSIS}So.{NEXT}{FINAL}Hi": [("reasoning", "Hm.\n\nSo."), ("text", "Hi")],
    f"{ANALYSIS}Hm.{NEXT}{CALL}": [("reasoning", "Hm."), ("f", '{"a": "<b|>"}')],
    f'{ANALYSIS}Hm.{NEXT} to=functions.f{COMMENTARY} json<|message|>{{"a": 1}}': [
        ("reasoning", "Hm."), ("f", '{"a": 1}')
    ],
    f" to=functions.f{COMMENTARY}<|message|>{{}}": [("f", "{}")],
    f"{COMMENTARY}<|message|>I look.{NEXT}{CALL}": [("text", "I look."), ("f", '{"a": "<b|>"}')],
    f"{COMMENTARY}<|message|>I look.{NEXT}{FINAL}Hi": [("text", "I look.\n\nHi")],
    f"{FINAL}{NEXT}{FINAL}Hi": [("text", "Hi")],
    f"{ANALYSIS}cut o": [("reasoning", "cut o")],
    f"{ANALYSIS}Hm.{NEXT}<|channel|>fin": [("reasoning", "Hm.")],
    f"{ANALYSIS}a{FINAL}b": [("reasoning", "a"), ("text", "b")],
    "no header": [("text", "no header")],
    " to a": [("text", " to a")],
    "t": [("text", "t")],
    f"to{NEXT}{FINAL}Hi": [("text", "to\n\nHi")],
    f" {FINAL}Hi": [("text", "Hi")],
    "": [],
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_parts_of_an_answer(answer):
    assert parse([answer]) == parse(answer) == ANSWERS[answer]


def test_without_tools_a_call_is_not_shown():
    assert parse([f"{ANALYSIS}Hm.{NEXT}{CALL}"], has_tools=False) == [("reasoning", 'Hm.\n\n{"a": "<b|>"}')]


@given(
    st.lists(
        st.sampled_from(["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|", " to=functions.f", "a", "to", " "])
        | st.sampled_from(list(ANSWERS))
    ),
    st.lists(st.integers(0, 200)),
)
def test_chunks_do_not_matter_and_no_markup_is_shown(parts, cuts):
    answer = "".join(parts)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(answer)), len(answer)]
    found = parse([answer[a:b] for a, b in zip(bounds, bounds[1:], strict=False)])
    assert found == parse([answer])
    assert not any(token in text for _, text in found for token in ("<|start|>", "<|channel|>", "<|message|>"))


TOOLS = [Tool("f", parameters={"properties": {"a": {"type": "string"}}, "required": ["a"]}), Tool("f2")]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(scope="module")
def tokens():
    words = "analysis final commentary to=functions.f assistant json " * 9  # are tokens
    return tokenizer_for("gpt-oss", tokenizer.train([*TEXT, words], 330))


def test_which_answers_a_grammar_accepts(tokens):
    def grammar(tools=TOOLS, reasoning="", **options):
        return tool_grammar(JSON_FORMAT, tools, tokens, tags=HARMONY, reasoning=reasoning, **options)

    def accepts(answer, **options):
        return accepts_text(grammar(**options), tokens, answer)

    named = {"type": "function", "function": {"name": "f"}}
    grammars = [grammar(tool_choice=choice) for choice in ("auto", "required", named, "none")]
    grammars += [grammar(json_schema=SCHEMA), grammar((), json_schema=SCHEMA)]
    swapped = f' to=functions.f{COMMENTARY} json<|message|>{{"a": "b"}}'
    json, other = f'{FINAL}{{"ok": true}}', f"{COMMENTARY} to=functions.f2<|message|>{{}}"
    expected = {  # with auto, required, a named function, none, JSON or calls, JSON
        f"{FINAL}Hello.": (True, False, False, True, False, False),
        CALL: (True, True, True, False, True, False),
        swapped: (True, True, True, False, True, False),
        other: (True, True, False, False, True, False),
        CALL.replace('"a"', '"b"'): (False,) * 6,
        CALL.replace(".f ", ".g "): (False,) * 6,
        json: (True, False, False, True, True, True),
        json.replace("true", "5"): (True, False, False, True, False, False),
        json.replace("<|message|>", " <|constrain|>json<|message|>"): (False, False, False, False, True, True),
        "Hello.": (False,) * 6,
    }
    for case, lark in enumerate(grammars):
        for before in ("", f"{ANALYSIS}Hm. final{NEXT}", f"{ANALYSIS}Hm.{NEXT}{COMMENTARY}<|message|>I look.{NEXT}"):
            for answer, accepted in expected.items():
                assert accepts_text(lark, tokens, before + answer) == accepted[case], (case, before + answer)
    assert not accepts(f"{ANALYSIS}Hm.{NEXT}") and not accepts(f"{ANALYSIS}Hm.")
    # A prompt that ends inside a final message is continued.
    assert accepts("lo.", reasoning=FINAL) and accepts("lo.", reasoning=FINAL, tool_choice="none")
    assert accepts(f"lo.{NEXT}{CALL}", reasoning=FINAL, tool_choice="required")
    assert accepts('{"ok": true}', tools=(), reasoning=FINAL, json_schema=SCHEMA)


SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def gpt_oss(tokens, tmp_path_factory):
    """A GPT-OSS with random weights, which can be made to say something by `Scripted`."""
    values = {"model_type": "gpt_oss", "vocab_size": tokens.vocab_size, **SIZES}
    values["eos_token_id"] = [tokens.special_tokens[token] for token in ("<|return|>", "<|end|>")]
    model = random_decoder(config_from_hf(values))
    mx.eval(model.parameters())
    return LoadedModel(model, tokens, model.config, tmp_path_factory.getbasetemp())


def scripted(lm, answer, end="<|return|>", begins="<|start|>assistant"):
    return replace(lm, model=Scripted(lm, answer, begins, end))


THOUGHT = f"{ANALYSIS}Hm, a fox.{NEXT}{FINAL}The fox."


def shown(chat, question="Why?"):
    """The reasoning and the text of the answer; without a question, of what continues the last one."""
    chunks = list(chat.ask(question) if question else chat.continue_answer())
    return ["".join(chunk.text for chunk in chunks if chunk.reasoning is kind) for kind in (True, False)]


def test_a_chat(gpt_oss):
    chat = Chat(scripted(gpt_oss, THOUGHT), temperature=0, max_tokens=None)
    assert shown(chat) == ["Hm, a fox.", "The fox."]
    assert chat.stats.last.finish_reason == "eos" and split(chat.messages[-1].content) == ("Hm, a fox.", "The fox.")
    assert shown(chat, "How?") == ["Hm, a fox.", "The fox."]
    decode = chat.lm.tokenizer.decode
    prompt = decode(chat.context_ids[: chat.prompt_tokens], skip_special_tokens=False)
    assert f"Why?<|end|><|start|>assistant{FINAL}The fox.<|end|><|start|>user<|message|>How?" in prompt
    assert "Hm, a fox" not in prompt
    chat.lm = scripted(gpt_oss, " It was.", begins="The fox.")
    assert shown(chat, "") == ["", " It was."]
    assert split(chat.messages[-1].content) == ("Hm, a fox.", "The fox. It was.")


def test_the_reasoning_effort_of_a_chat(gpt_oss, tmp_path):
    lm = scripted(gpt_oss, THOUGHT)
    chat = Chat(lm, reasoning_effort="low", temperature=0)
    chat.lm = lm
    shown(chat)
    assert "Reasoning: low<|end|>" in lm.tokenizer.decode(lm.model.text, skip_special_tokens=False)
    chat.save(tmp_path / "chat.jsonl")
    assert Chat.open(tmp_path / "chat.jsonl", lm).reasoning_effort == "low"
    assert Chat.open(tmp_path / "chat.jsonl", lm, reasoning_effort="none").reasoning_effort == "none"
    with pytest.raises(GenerationError, match="reasoning_effort is 'much'"):
        chat.reasoning_effort = "much"
    text = (tmp_path / "chat.jsonl").read_text().replace('"reasoning_effort": "low"', '"reasoning_effort": "much"')
    (tmp_path / "other.jsonl").write_text(text)
    with pytest.raises(GenerationError, match="line 1: reasoning_effort is 'much'"):
        Chat.open(tmp_path / "other.jsonl", lm)


def test_a_chat_that_is_stopped_in_its_reasoning(gpt_oss):
    chat = Chat(scripted(gpt_oss, THOUGHT), temperature=0, max_tokens=15)
    reasoning, text = shown(chat)
    assert "Hm, a fox.".startswith(reasoning) and reasoning and text == ""
    assert chat.messages[-1].content == f"<think>{reasoning}</think>"
    chat.lm = scripted(gpt_oss, "Yes.", begins=FINAL)
    chat.options = chat.options.of(max_tokens=100)
    assert shown(chat, "") == ["", "Yes."]
    assert split(chat.messages[-1].content) == (reasoning, "Yes.")


def test_a_chat_with_tools(gpt_oss):
    given = []

    def f(a: str) -> str:
        """Look."""
        given.append(a)
        return "done"

    lm = scripted(gpt_oss, f"{ANALYSIS}Look.{NEXT}{CALL}", "<|call|>")
    lm.model.add(THOUGHT, '"done"<|end|><|start|>assistant', "<|return|>")
    chat = Chat(lm, tools=[f], temperature=0, max_tokens=200)
    assert shown(chat) == ["Look.Hm, a fox.", "The fox."] and given == ["<b|>"]
    _, call, result, answer = chat.messages
    assert (call.reasoning_content, result.content) == ("Look.", "done") and answer.content.endswith("The fox.")
    text = lm.tokenizer.decode(lm.model.text, skip_special_tokens=False)
    assert f'{ANALYSIS}Look.{NEXT} to=functions.f{COMMENTARY} json<|message|>{{"a": "<b|>"}}<|call|><|start|>' in text


def test_a_constrained_answer_has_no_reasoning(gpt_oss):
    chat = Chat(gpt_oss, choice=["yes"], temperature=0)
    assert shown(chat) == ["", "yes"] and chat.messages[-1].content == "yes"


def test_json_of_a_schema_comes_after_reasoning(gpt_oss):
    lm = scripted(gpt_oss, f'{ANALYSIS}Look.{NEXT}{FINAL}{{"ok": true}}')
    chat = Chat(lm, json_schema=SCHEMA, temperature=0, max_tokens=200)
    assert shown(chat) == ["Look.", '{"ok": true}']


def test_text_without_a_chat_has_the_markup_unless_it_is_constrained(gpt_oss):
    lm = scripted(gpt_oss, THOUGHT)
    result = generate(lm, messages=[{"role": "user", "content": "Why?"}], temperature=0, max_tokens=200)
    assert result.text == THOUGHT and result.finish_reason == "eos"
    lm.model.add('{"ok": true}', f"<|start|>assistant{FINAL}", "<|return|>")
    result = generate(lm, messages=[{"role": "user", "content": "Why?"}], json_schema=SCHEMA, temperature=0)
    assert result.text == '{"ok": true}' and result.constraint_error is None


def test_tags_that_are_special_tokens(gpt_oss):
    """As Mistral's: they are part of the text, also without a grammar."""
    template = (
        "{% for m in messages %}[INST]{{ m.role ~ m.content }}{% if m.role == 'assistant' %}[/INST]{% endif %}"
        "{% endfor %}{{ '[INST]assistant' if add_generation_prompt }}{# [THINK] #}"
    )
    runtime = tokenizers.Tokenizer.from_str(tokenizer.train(TEXT, 300).to_json())
    special = ("[INST]", "[/INST]", "[THINK]", "[/THINK]")
    runtime.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    lm = replace(gpt_oss, tokenizer=tokenizer.Tokenizer(runtime, {}, chat_template=template))
    script = {"begins": "[INST]assistant", "end": "[/INST]"}
    chat = Chat(scripted(lm, "[THINK]Hm.[/THINK]The fox.", **script), temperature=0)
    assert shown(chat) == ["Hm.", "The fox."] and split(chat.messages[-1].content) == ("Hm.", "The fox.")
    assert chat.context_ids == lm.tokenizer.encode(
        "[INST]userWhy?[INST]assistantThe fox.[/INST]", add_special_tokens=False, parse_special=True
    )
    chat = Chat(scripted(lm, '[THINK]Hm.[/THINK]{"ok": true}', **script), json_schema=SCHEMA, temperature=0)
    assert shown(chat) == ["Hm.", '{"ok": true}']


def test_messages_with_reasoning_calls_and_text(tokens):
    """GPT-OSS's template refuses text and reasoning in a message with a call."""
    call = ToolCall("1", "f", "{}")
    messages = [
        Message("user", "?"),
        Message("assistant", "I look.", tool_calls=(call,), reasoning_content="Hm."),
        Message("tool", "x", tool_call_id="1"),
    ]
    assert f"{ANALYSIS}Hm.\n\nI look.<|end|>" in ChatTemplate(tokens).render(messages)
