"""Loading of tokenizer files.

The tokenizers library allocates whatever the steps of a normalizer or decoder need, and aborts the process when memory
is full. Replace steps multiply: ten that each replace "a" by ten of them turn a letter into 10 GB. So how much a
tokenizer.json can lengthen a text is checked before the library runs it. Lengths are UTF-8 bytes of the compatibility
decomposition (NFKD), which no other Unicode normal form lengthens.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from mlxlm.tokenizer import sentencepiece, tiktoken
from mlxlm.tokenizer.tokenizer import ROLES, Tokenizer, library_errors
from mlxlm.utils.bounded_reads import decode_utf8, read_bytes
from mlxlm.utils.errors import MissingTokenizerError, TokenizerError
from mlxlm.utils.json_files import read_json_object

# Usual names of special tokens, for files that don't name them.
_USUAL_NAMES = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>", "[CLS]"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "[SEP]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
}
_MAX_TEMPLATE = 256  # tokens and texts of a post-processor; known ones have about 10
_FILE_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_MAX_BYTES = 128 << 20  # of a file; a tokenizer.json of 260,000 tokens has 33 MB

# Encoded once, since some malformed files load but fail on the first text. The emoji is in few vocabularies.
_PROBE = " a\n\U0001f9a1 "


def load(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a folder or one of its files.

    In a folder, tokenizer.json has precedence over tokenizer.model (SentencePiece BPE or tiktoken), then vocab.json
    with merges.txt (GPT-2), then a .tiktoken file. Special tokens are those of tokenizer_config.json, else
    special_tokens_map.json, else those with usual names. No code in the files is executed.

    Raises:
        TokenizerError: A file is missing or malformed; the message names it.
    """
    path = Path(path)
    source = _find_source(path)
    folder = source.parent
    config = _read_object(folder / "tokenizer_config.json")
    model = None
    model_names: dict[str, str] = {}
    if source.suffix == ".json" and source.name != "vocab.json":
        runtime = _from_json(source)
        if (folder / "tokenizer.model").is_file() and not tiktoken.is_tiktoken(_read(folder / "tokenizer.model")):
            model = _read(folder / "tokenizer.model")
    elif source.suffix == ".tiktoken" or (source.suffix == ".model" and tiktoken.is_tiktoken(_read(source))):
        runtime = tiktoken.convert(_read(source), str(source))
    elif source.suffix == ".model":
        model = _read(source)
        proto = sentencepiece.parse(model, str(source))
        model_names = sentencepiece.special_names(proto)
        add_bos, add_eos = config.get("add_bos_token", True), config.get("add_eos_token", False)
        runtime = sentencepiece.convert(proto, add_bos=bool(add_bos), add_eos=bool(add_eos))
    else:
        runtime = _from_vocab_and_merges(folder / "vocab.json", folder / "merges.txt")
    names, template = _special_names(runtime, folder, config, model_names), _chat_template(folder, config)
    try:
        tokenizer = Tokenizer(runtime, names, chat_template=template, sentencepiece_model=model)
        tokenizer.decode(tokenizer.encode(_PROBE))
        return tokenizer
    except TokenizerError as error:
        raise error.prefixed(source) from None


def _find_source(path: Path) -> Path:
    """The file with the vocabulary."""
    if path.is_dir():
        for name in _FILE_NAMES:
            if (path / name).is_file():
                return path / name
        if len(files := list(path.glob("*.tiktoken"))) == 1:
            return files[0]
        raise MissingTokenizerError(f"no tokenizer in {path}", f"a folder with {' or '.join(_FILE_NAMES)}")
    if not path.exists():
        raise TokenizerError(f"cannot read {path}: no such file or folder", "check the path")
    if path.suffix not in (".json", ".model", ".tiktoken") and path.name != "merges.txt":
        raise TokenizerError(f"{path} is not a tokenizer file", " or ".join(_FILE_NAMES))
    return path


def _read(path: Path) -> bytes:
    data = read_bytes(path, _MAX_BYTES, TokenizerError)
    if not data:
        raise TokenizerError(f"{path} is empty", "the complete file")
    return data


def _read_object(path: Path) -> dict[str, Any]:
    """The object in an optional JSON file; {} if there is no such file."""
    return read_json_object(path, _MAX_BYTES, TokenizerError, "the complete file") if path.exists() else {}


def _from_json(path: Path) -> tokenizers.Tokenizer:
    content = _read_object(path)
    if "model" not in content:
        raise TokenizerError(f"{path} has no field 'model'", "a tokenizer.json from the tokenizers library")
    check_expansion(content, str(path))
    with library_errors(f"{path} is not a tokenizer"):
        runtime = tokenizers.Tokenizer.from_buffer(_read(path))
    _check_template(content.get("post_processor"), path)  # well-formed, or the library would have failed
    return runtime


def _check_template(step: Any, path: Path) -> None:
    """Check that a post-processor adds few tokens to one text, all of them in its table (else the library panics)."""
    if not isinstance(step, dict):
        return
    for nested in step.get("processors") or ():
        _check_template(nested, path)
    if step.get("type") != "TemplateProcessing":
        return
    pieces, tokens = step["single"], step["special_tokens"]  # `pair` is never used
    num_ids = sum(len(token["ids"]) for token in tokens.values())
    if len(pieces) + num_ids > _MAX_TEMPLATE or sum("Sequence" in piece for piece in pieces) > 1:
        raise TokenizerError(f"{path}: post_processor.single repeats a text, or adds more than {_MAX_TEMPLATE} tokens")
    for piece in pieces:
        if "SpecialToken" in piece and (name := piece["SpecialToken"]["id"]) not in tokens:
            raise TokenizerError(f"{path}: post_processor.single has '{name}', which is not in special_tokens")


def _from_vocab_and_merges(vocabulary: Path, merges: Path) -> tokenizers.Tokenizer:
    """GPT-2's two files: byte-level BPE with GPT-2's word pattern, without BOS and EOS."""
    for path in (vocabulary, merges):
        if not path.is_file():
            raise TokenizerError(f"{path} is missing", "vocab.json and merges.txt in one folder")
        _read(path)
    content = _read_object(vocabulary)
    for token, id in content.items():
        if type(id) is not int or not 0 <= id < 2**32:
            raise TokenizerError(f"{vocabulary}: the id of '{token}' is not an integer from 0 up")
    with library_errors(f"{vocabulary} and {merges.name} are not a tokenizer"):
        runtime = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    special = [name for names in _USUAL_NAMES.values() for name in names if name in content]
    runtime.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    runtime.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    runtime.post_processor = processors.ByteLevel(trim_offsets=False)
    runtime.decoder = decoders.ByteLevel()
    return runtime


def _special_names(
    runtime: tokenizers.Tokenizer, folder: Path, config: dict[str, Any], model_names: dict[str, str]
) -> dict[str, str]:
    """Texts of special tokens by role.

    A field in a configuration file has precedence, even if it is null, then `model_names` from a SentencePiece model,
    then usual names.
    """
    token_map = _read_object(folder / "special_tokens_map.json")
    names: dict[str, str] = {}
    for role in ROLES:
        field = f"{role}_token"
        if field in config or field in token_map:
            file = "tokenizer_config.json" if field in config else "special_tokens_map.json"
            value = config.get(field, token_map.get(field))  # the text, an object with "content", or null
            name = value.get("content") if isinstance(value, dict) else value
            if not isinstance(name, str | None):
                raise TokenizerError(f"{folder / file}: '{field}' is not a token's text")
        else:
            usual = (name for name in _USUAL_NAMES[role] if runtime.token_to_id(name) is not None)
            name = model_names.get(role) or next(usual, None)
        if name is not None:
            names[role] = name
    return names


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return decode_utf8(_read(path), str(path), TokenizerError, "a template in UTF-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{folder / 'tokenizer_config.json'}: 'chat_template' is not text")
    return template


_MAX_EXPANSION = 64  # factor; known tokenizers have up to about 30 by these bounds
_MAX_AFFIX = 256  # bytes of a prefix or suffix
_MAX_MAPPED = 64  # bytes for one character; known maps have up to 33
_MAX_ADDED = 1 << 26  # bytes of added tokens after normalization
_NESTED = ("normalizers", "pretokenizers", "decoders")
# Factors. A byte becomes two and a word gets a leading space; Chinese characters get spaces on both sides; a word,
# which may be one letter, gets a leading U+2581.
_STEP_EXPANSION = {"ByteLevel": 3, "BertNormalizer": 3, "Metaspace": 4}
_HINT = "a tokenizer from a source that you trust"


def check_expansion(content: dict[str, Any], name: str) -> None:
    """Check the content of a tokenizer.json. Malformed fields are left to the library.

    Args:
        content: The parsed file.
        name: Name of the file, for error messages.

    Raises:
        TokenizerError: It could make a text many times longer; the message names the field.
    """
    expansion = max(_expansion(content, fields, name) for fields in (("normalizer", "pre_tokenizer"), ("decoder",)))
    _check_affixes(content.get("model"), "model", name)
    added = content.get("added_tokens")
    texts = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if expansion * sum(map(_bytes, texts)) > _MAX_ADDED:
        raise TokenizerError(f"{name}: added_tokens are longer than {_MAX_ADDED} bytes after normalization", _HINT)


def _steps(spec: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder in order, with sequences flattened."""
    pending = [spec]
    while pending:
        step = pending.pop()
        if not isinstance(step, dict):
            continue
        nested = [step[key] for key in _NESTED if isinstance(step.get(key), list)]
        for steps in nested:
            pending += reversed(steps)
        if not nested:
            yield step


def _expansion(content: dict[str, Any], fields: tuple[str, ...], name: str) -> float:
    """An upper bound of the factor by which the steps in these fields make a text longer."""
    expansion, num_maps = 1.0, 0
    steps = [(field, step) for field in fields for step in _steps(content.get(field))]
    for field, step in steps:
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Precompiled":
            num_maps += 1
            if num_maps > 1 or _longest_mapped(step, name) > _MAX_MAPPED:
                raise TokenizerError(f"{name}: {field} maps characters to long texts", _HINT)
        elif kind == "Replace" and isinstance(pattern, dict):
            old, new = _bytes(pattern.get("String")), _bytes(step.get("content"))
            expansion *= max(1, new / old if old else 1 + new)  # a regular expression may match between characters
        else:
            expansion *= _STEP_EXPANSION.get(str(kind), 1)
        _check_affixes(step, field, name)
        if expansion > _MAX_EXPANSION:
            raise TokenizerError(f"{name}: {field} can make a text more than {_MAX_EXPANSION} times as long", _HINT)
    return expansion


def _longest_mapped(step: dict[str, Any], name: str) -> int:
    """Length of the longest text in a SentencePiece character map: a trie's size, the trie, NUL-terminated texts."""
    try:
        data = base64.b64decode(step.get("precompiled_charsmap") or b"")
    except (TypeError, ValueError):
        return 0
    size = int.from_bytes(data[:4], "little")
    if size > len(data) - 4:
        raise TokenizerError(f"{name}: precompiled_charsmap has {len(data)} bytes, its header needs {4 + size}")
    return max(map(len, data[4 + size :].split(b"\0")))


def _check_affixes(spec: Any, field: str, name: str) -> None:
    for key in ("prepend", "prefix", "suffix", "continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(spec, dict) and _bytes(spec.get(key)) > _MAX_AFFIX:
            raise TokenizerError(f"{name}: {field}.{key} is longer than {_MAX_AFFIX} bytes", _HINT)


def _bytes(text: Any) -> int:
    return len(unicodedata.normalize("NFKD", text).encode("utf-8", "replace")) if isinstance(text, str) else 0
