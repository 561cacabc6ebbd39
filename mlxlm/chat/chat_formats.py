"""Known chat formats, for models without a template. They are recognized by the tokens that end a turn."""

from __future__ import annotations

from dataclasses import dataclass

from mlxlm.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatFormat:
    """A jinja template and its special tokens; the last of `tokens` ends a turn."""

    template: str
    tokens: tuple[str, ...]

    def has_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the tokenizer has all tokens of the format."""
        return all(token in tokenizer.special_tokens for token in self.tokens)

    def ends(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> bool:
        """Whether a model with these EOS tokens was trained on this format.

        A base model often has the tokens of its chat variant without having learned them, but another EOS token.
        """
        return self.has_tokens(tokenizer) and tokenizer.special_tokens[self.tokens[-1]] in eos_token_ids


# OpenAI's ChatML (Qwen, Yi, SmolLM and many others), and the formats in the model cards of Llama 3 and Gemma.
CHAT_FORMATS = {
    "chatml": ChatFormat(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": ChatFormat(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    # Gemma has no system role: Google puts such text in front of the first message.
    "gemma": ChatFormat(
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% else %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ ns.system }}{{ m.content }}<end_of_turn>\n"
        "{% set ns.system = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
}
