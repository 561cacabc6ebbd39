"""What requests for other servers have: other names and values of our fields, and fields that this server lacks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from mlxlm.server.errors import invalid

# Other names of our fields, in any object that has such a field.
NAMES = {
    "max_completion_tokens": "max_tokens",  # chat completions
    "max_output_tokens": "max_tokens",  # the Responses API
    "num_predict": "max_tokens",  # ollama
    "n_predict": "max_tokens",  # llama.cpp
    "max_new_tokens": "max_tokens",  # transformers
    "min_new_tokens": "min_tokens",  # transformers
    "stop_sequences": "stop",  # Anthropic
    "random_seed": "seed",  # Mistral
    "repeat_penalty": "repetition_penalty",  # ollama, llama.cpp
    "repeat_last_n": "repetition_context_size",  # ollama, llama.cpp
    "typical": "typical_p",  # llama.cpp
    "guided_json": "json_schema",  # vLLM, whose structured_outputs.json is guided_json, and so on
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "reasoning": "reasoning_content",  # of a message: OpenRouter, vLLM
    "thinking": "reasoning_content",  # of a message: ollama
    "tool_name": "name",  # of a result: ollama
}

# Other values of our fields. None: as if the field were missing.
VALUES: dict[str, dict[float | str, Any]] = {
    "max_tokens": {-2: -1},  # -1: no limit but the context
    "seed": {-1: None},
    "top_k": {-1: 0},
    "top_p": {0: 1e-6},  # only the most likely token
    "repetition_penalty": {0: 1.0},
    "repetition_context_size": {-1: 1 << 14},
    "dry_penalty_last_n": {-1: 1 << 14},
    "grammar": {"": None},
}

# Fields that would change the text, with the value that has no effect, besides false, 0 and empty ones.
UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("n", "best_of", "num_beams", "use_beam_search", "length_penalty"), 1),
    **dict.fromkeys(("tfs_z", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dynatemp_range", "top_a", "smoothing_factor", "penalty_alpha")),
    **dict.fromkeys(("no_repeat_ngram_size", "negative_prompt", "bad_words", "allowed_token_ids")),
    **dict.fromkeys(("guided_json_object", "guided_structural_tag", "guided_whitespace_pattern")),
    **dict.fromkeys(("structured_outputs", "json_object", "structural_tag", "whitespace_pattern")),
    **dict.fromkeys(("echo", "suffix", "prompt", "conversation", "background", "chat_template", "documents")),
    **dict.fromkeys(("images", "template", "mcp_servers", "include_stop_str_in_output", "logits_processors", "lora")),
    "truncate_prompt_tokens": None,
}

# Fields that don't change the text, or that clients send back from an answer. They aren't worth a line in the log, and
# a strict server accepts them, too.
WITHOUT_EFFECT = frozenset(
    # OpenAI's accounting, storage and speed.
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "client_metadata"]
    + ["prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "include_obfuscation", "max_tool_calls"]
    # Answers that are sent back.
    + ["id", "index", "status", "phase", "annotations", "provider_specific_fields", "reasoning_details"]
    + ["audio", "encrypted_content", "signature", "data", "citations", "caller"]
    # The model decides how long it reasons, all of it is returned, and there are no summaries.
    + ["summary", "generate_summary", "budget_tokens", "display"]
    # Prompts are always cached, arguments always streamed, and all tools are in the prompt.
    + ["cache_control", "cache_prompt", "eager_input_streaming", "defer_loading", "input_examples", "inference_geo"]
    # The context is always the model's.
    + ["num_ctx", "timings_per_token", "guided_decoding_backend"]
)

_FORMATS = ("response_format", "text.format", "output_config.format", "output_format", "format")  # with a json_schema


def translate(value: Mapping[str, Any], fields: Container[str]) -> dict[str, Any]:
    """The fields of an object with our names and values. A null is like a missing field, and 5.0 is a whole number.

    Args:
        value: The object as the client has sent it.
        fields: The names of the fields that it can have.

    Raises:
        ApiError: If two names of a field have different values.
    """
    translated: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for given, ours, item in _with_our_names(value):
        name = ours if ours in fields else given
        if type(item) in (int, float, str):
            item = VALUES.get(name, {}).get(item, item)
        if type(item) is float and item.is_integer() and abs(item) < 2**53:
            item = int(item)
        if item is None:
            continue
        if translated.setdefault(name, item) != item:
            raise invalid(f"{given_as[name]} and {given} differ (try: one of them)", given)
        given_as[name] = given
    return translated


def given_names(body: Mapping[str, Any]) -> dict[str, str]:
    """{our name of an option: the name in the body of a request}, for those that differ."""
    names: dict[str, str] = {}
    for holder in (body, body.get("options")):  # ollama has an object for options
        fields = _with_our_names(holder) if isinstance(holder, dict) else ()
        names |= {ours: given for given, ours, item in fields if given != ours and item is not None}
    for path in _FORMATS:
        outer, _, inner = path.partition(".")
        if isinstance(found := body.get(outer), dict) and (not inner or inner in found):
            names.setdefault("json_schema", path)
    return names


def given_path(body: Any, path: Iterable[int | str]) -> str:
    """The path of a field as the client has written it, such as "messages.0.thinking".

    Args:
        body: The body of the request.
        path: Its path with our names. Parts that the body doesn't have, such as the types of a union, are left out.
    """
    found: list[str] = []
    for part in path:
        if isinstance(body, dict):
            fields = {ours: (given, item) for given, ours, item in _with_our_names(body) if item is not None}
            fields |= {given: (given, item) for given, item in body.items() if item is not None}
            given, body = fields.get(str(part), ("", body))
            found += [given[:100]] if given else []
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            found.append(str(part))
            body = body[part]
    return ".".join(found)


def _with_our_names(value: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The fields of an object: their names as given, our names, and values."""
    for name, item in value.items():
        if name == "structured_outputs" and isinstance(item, dict):
            for key, part in item.items():
                given = f"{name}.{key}"
                yield given, NAMES.get(f"guided_{key}", given), part
        else:
            yield name, NAMES.get(name, name), item
