"""Small chat templates in the styles of model families, with the special tokens that they need."""

from functools import cache

import tokenizers

from mlxlm.chat.messages import ToolCall
from mlxlm.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = ToolCall("call_12345678", "get_weather", '{"city":"Köln"}')

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_JSON_CALL = (
    '{{ \'\n<tool_call>\n{"name": "\' ~ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
)
_TAGGED_CALL = (
    "{{{{ '{}' ~ call.name ~ '{}' }}}}{{% for key, value in call.arguments | items %}}{{{{ '{}' ~ key ~ '{}' }}}}"
    "{{{{ value | tojson if value is not string else value }}}}{{{{ '{}' }}}}{{% endfor %}}{{{{ '{}' }}}}"
)
_QWEN = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content ~ '\n\n' }}{% endif %}"
    "<tools>{% for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}{{ '\n' }}</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'system' and not (loop.first and tools) %}" + _TURN + "{% endif %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant"
    "THINKING"
    "{% if m.content %}{{ '\n' ~ m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{% set call = call.function if call.function is defined else call %}"
    + _JSON_CALL
    + ""
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}"
    "{% endfor %}" + _PROMPT
)
_THINKING = "{% if loop.last or m.reasoning_content %}{{ '\n<think>\n' ~ m.reasoning_content }}\n</think>\n{% endif %}"
_NO_THINKING = "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
_CHATML = ("<|im_start|>", "<|im_end|>")
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS]{CALLS}</s>"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ raise_exception('there is no role ' + m.role) }}{% endif %}{% endfor %}"
)
_MISTRAL_TOKENS = (
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "</s>",
)  # fmt: skip
# Results of calls belong to the turn of the calls: it ends with <|tool_response> where they are to follow.
_GEMMA4 = (
    "{% macro argument(value) %}{% if value is string %}{{ '<|\"|>' ~ value ~ '<|\"|>' }}"
    "{% elif value is mapping %}{{ '{' }}{% for key, item in value | dictsort %}{{ key }}:{{ argument(item) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
    "{{ bos_token }}{% if tools or messages[0].role == 'system' %}<|turn>system\n"
    "{{ messages[0].content if messages[0].role == 'system' }}"
    "{% for tool in tools %}declaration:{{ tool.function.name }}{description:{{ tool.function.description }}}"
    "{% endfor %}<turn|>\n{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "{% if m.role == 'user' or loop.previtem is undefined or loop.previtem.role != 'tool' %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}<channel|>{% endif %}"
    "{% for call in m.tool_calls %}<|tool_call>call:{{ call.function.name }}{{ argument(call.function.arguments) }}"
    "<tool_call|>{% endfor %}"
    "{% set results = messages[loop.index:] | selectattr('role', 'equalto', 'tool') | list if m.tool_calls else [] %}"
    "{% for r in results %}<|tool_response>response:{{ r.name }}{value:{{ argument(r.content) }}}{% endfor %}"
    "{{ m.content | trim }}{% if m.tool_calls and not results %}<|tool_response>"
    "{% elif m.content or not results %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
_LFM2 = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\nList of tools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
    + _PROMPT
)
_LLAMA3_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"

# Per family: the template, and its special tokens.
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2.5": (_QWEN.replace("THINKING", ""), _CHATML),
    "qwen3": (_QWEN.replace("THINKING", _THINKING) + _NO_THINKING, _CHATML),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
        + _LLAMA3_HEADER.format("assistant")
        + '{% set call = m.tool_calls[0].function %}{{ \'{"name": "\' + call.name + \'", \' }}'
        "{{ '\"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}<|eot_id|>"
        "{% else %}" + _LLAMA3_HEADER.format("{{ 'ipython' if m.role == 'tool' else m.role }}") + ""
        "{% if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}\n{% endfor %}{% endif %}"
        "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + _LLAMA3_HEADER.format("assistant") + "{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    ),
    "mistral": (
        _MISTRAL.replace(
            "{CALLS}",
            " [{% for call in m.tool_calls %}"
            "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
            "{{ (call.function | tojson)[:-1] }}"
            ', "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]',
        ),
        _MISTRAL_TOKENS,
    ),
    "mistral-long-ids": (
        _MISTRAL.replace(" | length != 9", " | length < 9")
        .replace("{{ m.tool_call_id }}", "{{ m.tool_call_id[-9:] }}")
        .replace(
            "{CALLS}",
            " [{% for call in m.tool_calls %}{% if call.id | length < 9 %}{{ raise_exception('short') }}{% endif %}"
            "{{ (call.function | tojson)[:-1] }}"
            ', "id": "{{ call.id[-9:] }}"}{% if not loop.last %}, {% endif %}{% endfor %}]',
        ),
        _MISTRAL_TOKENS,
    ),
    "mistral-args": (
        _MISTRAL.replace("[TOOL_CALLS]{CALLS}", "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}"
        "[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"),
        (*_MISTRAL_TOKENS, "[ARGS]"),
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{% if tools and loop.first %}{{ tools | tojson ~ '\n' }}{% endif %}{{ m.content }}"
        "{% for call in m.tool_calls %}```tool_code\n{{ call.function | tojson }}\n```"
        "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>"
        "{% if tools and loop.first %}{{ tools | tojson ~ '\n' }}{% endif %}{{ m.content }}"
        "{% elif m.role == 'tool' %}<|tool_output_begin|>{{ m.content }}<|tool_output_end|>"
        "{% elif m.content is none %}<|Assistant|><|tool_calls_begin|>{% for call in m.tool_calls %}"
        "{{ '<|tool_call_begin|>function<|tool_sep|>' + call.function.name + '\n```json\n' + call.function.arguments "
        "+ '\n```<|tool_call_end|>' }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}<|tool_calls_end|><|end|>"
        "{% else %}<|Assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}",
        ("<|User|>", "<|Assistant|>", "<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>",
         "<|tool_call_end|>", "<|tool_calls_end|>"),
    ),
    "functionary": (
        "{{ bos_token }}{% for m in messages %}" + _LLAMA3_HEADER.format("{{ m.role }}")
        + "{% if tools and loop.first %}{% for tool in tools %}{{ tool.function.name + tool.function.description }}"
        "{% endfor %}{% endif %}{{ m.name ~ ': ' if m.role == 'tool' else '' }}{{ m.content }}"
        "{% for call in m.tool_calls %}<function={{ call.function.name }}>{{ call.function.arguments }}</function>"
        "{% endfor %}{{ '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}" + _LLAMA3_HEADER.format("assistant") + "{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    ),
    "gpt-oss": (
        "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
        "{% set first = messages[0] %}"
        "{% if tools or first.role in ('system', 'developer') %}<|start|>developer<|message|>"
        "{{ first.content if first.role in ('system', 'developer') else '' }}"
        "{% for tool in tools %}// {{ tool.function.description }}\ntype {{ tool.function.name }} = (_: any) => any;\n"
        "{% endfor %}<|end|>{% endif %}"
        "{% set ns = namespace(name=none) %}{% for m in messages %}"
        "{% if '<|channel|>' in m.content or '<|channel|>' in m.thinking %}{{ raise_exception('tags') }}{% endif %}"
        "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
        "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>"
        "{{ m.content | tojson }}<|end|>"
        "{% elif m.role == 'assistant' and 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
        "{% set ns.name = call.name %}"
        "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{% if m.content or m.thinking %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
        "{{ call.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}{% set whole = loop.last and not add_generation_prompt %}"
        "{% if whole and 'thinking' in m %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if whole else '<|end|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"),
    ),
    "kimi-k2": (
        "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
        "{% for m in messages %}<|im_{{ 'system' if m.role == 'tool' else m.role }}|>{{ m.role }}<|im_middle|>"
        "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>",
         "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
         "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    # Without tools: calls are text in the toolkit's own format.
    "chatml": ("{% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT, _CHATML),
    "gemma-without-tools": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
    "pythonic": (
        "{% for m in messages %}{% if tools and loop.first %}{{ tools | tojson }}{% endif %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}{% for call in m.tool_calls %}[{{ call.function.name }}("
        "{% for key, value in call.function.arguments | items %}{{ key }}=<v>{{ value }}</v>"
        "{{ ', ' if not loop.last }}{% endfor %})]{% endfor %}<|im_end|>\n{% endfor %}" + _PROMPT,
        _CHATML,
    ),
    # With an object that isn't JSON.
    "gemma4": (
        _GEMMA4,
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>'),
    ),
    "functiongemma": (
        _GEMMA4.replace("<|tool_call>", "<start_function_call>").replace("<tool_call|>", "<end_function_call>")
        .replace('<|"|>', "<escape>").replace("<|tool_response>", "<start_function_response>"),
        ("<|turn>", "<turn|>", "<start_function_call>", "<end_function_call>", "<start_function_response>"),
    ),
    "lfm2": (_LFM2.replace("CALLS", ""), (*_CHATML, "<|tool_call_start|>", "<|tool_call_end|>")),
    "lfm2.5": (
        _LFM2.replace(
            "CALLS",
            "{% if m.tool_calls %}<|tool_call_start|>[{% for call in m.tool_calls %}{{ call.function.name }}("
            "{% for key, value in call.function.arguments.items() %}"
            "{{ key }}={{ \"'\" ~ value ~ \"'\" if value is string else value }}{{ ', ' if not loop.last }}"
            "{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}",
        ),
        (*_CHATML, "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    # With tags around arguments.
    "qwen3.5": (
        _QWEN.replace("THINKING", _THINKING).replace(_JSON_CALL, _TAGGED_CALL.format(
            "\n<tool_call>\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n</tool_call>"
        )).replace("tojson if value is not string else value", "string if value is not mapping else value | tojson"),
        _CHATML,
    ),
    "glm4.5": (
        _QWEN.replace("THINKING", "").replace(_JSON_CALL, _TAGGED_CALL.format(
            "\n<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"
        )),
        _CHATML,
    ),
    "glm4.7": (
        _QWEN.replace("THINKING", "{{ '\n' if m.tool_calls }}").replace(_JSON_CALL, _TAGGED_CALL.format(
            "<tool_call>", "", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"
        )),
        (*_CHATML, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "minimax-m2": (
        _QWEN.replace("THINKING", "").replace(
            "{% for call in", "{{ '\n<minimax:tool_call>\n' if m.tool_calls }}{% for call in"
        ).replace(_JSON_CALL, _TAGGED_CALL.format(
            '<invoke name="', '">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>\n"
        )).replace("{% endfor %}<|im_end|>", "{% endfor %}{{ '</minimax:tool_call>' if m.tool_calls }}<|im_end|>"),
        _CHATML,
    ),
}  # fmt: skip


@cache
def tokenizer_for(family: str, tokens: Tokenizer) -> Tokenizer:
    """The tokenizer with the template and the special tokens of a family."""
    template, special = TEMPLATES[family]
    runtime = tokenizers.Tokenizer.from_str(tokens.to_json())
    runtime.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    return Tokenizer(runtime, tokens.special_token_names, chat_template=template)
