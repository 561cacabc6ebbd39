"""Tokenizer files: which are read, in which order, and which are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from mlxlm.tokenizer import expansion_check, sentencepiece
from mlxlm.tokenizer.tokenizer import ROLES, Tokenizer, library_errors
from mlxlm.utils.bounded_reads import decode_utf8, read_bytes
from mlxlm.utils.errors import MissingTokenizerError, TokenizerError

# Where no file names a special token: the names in use, best known first.
WELL_KNOWN = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>", "[CLS]"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "[SEP]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
}
_MOST_AROUND = 256  # tokens and texts; those in use have about 10
SOURCES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LARGEST = 128 << 20  # bytes of one file; a tokenizer.json of 260,000 tokens has 33 MB

# Some files load and fail on the first text. It has spaces, a line end, and a character that few vocabularies have.
_TRIAL = " a\n\U0001f9a1 "


def load(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a folder or from one of its files.

    In a folder tokenizer.json comes first, else tokenizer.model (SentencePiece BPE), else vocab.json with
    merges.txt (GPT-2). Special tokens are named by tokenizer_config.json, else special_tokens_map.json, else
    by well-known names. The files are data: nothing in them is executed.

    Raises TokenizerError, naming the file, if one is missing or malformed.
    """
    path = Path(path)
    source = _source(path)
    folder = source.parent
    config = _json_object(folder / "tokenizer_config.json")
    model = None
    own_names: dict[str, str | None] = {}
    if source.suffix == ".json" and source.name != "vocab.json":
        runtime = _from_json(source)
        if (folder / "tokenizer.model").is_file():
            model = _read(folder / "tokenizer.model")
    elif source.suffix == ".model":
        model = _read(source)
        proto = sentencepiece.parse(model, str(source))
        own_names = sentencepiece.special_names(proto)
        add_bos, add_eos = config.get("add_bos_token", True), config.get("add_eos_token", False)
        runtime = sentencepiece.convert(proto, add_bos=bool(add_bos), add_eos=bool(add_eos))
    else:
        runtime = _from_vocab_and_merges(folder / "vocab.json", folder / "merges.txt")
    names, template = _special_names(runtime, folder, config, own_names), _chat_template(folder, config)
    try:
        tokenizer = Tokenizer(runtime, names, chat_template=template, sentencepiece_model=model)
        tokenizer.decode(tokenizer.encode(_TRIAL))
        return tokenizer
    except TokenizerError as error:
        raise TokenizerError(f"{source}: {error.message}", error.hint) from None


def _source(path: Path) -> Path:
    """The file that holds the vocabulary."""
    if path.is_dir():
        for name in SOURCES:
            if (path / name).is_file():
                return path / name
        raise MissingTokenizerError(f"no tokenizer in {path}", f"a folder with {' or '.join(SOURCES)}")
    if not path.exists():
        raise TokenizerError(f"cannot read {path}: no such file or folder", "check the path")
    if path.suffix not in (".json", ".model") and path.name != "merges.txt":
        raise TokenizerError(f"{path} is not a tokenizer file", " or ".join(SOURCES))
    return path


def _read(path: Path) -> bytes:
    data = read_bytes(path, _LARGEST, TokenizerError)
    if not data:
        raise TokenizerError(f"{path} is empty", "the complete file")
    return data


def _json_object(path: Path) -> dict[str, Any]:
    """The object in an optional JSON file; {} if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}", "the complete file") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is not a JSON object", "the complete file")
    return content


def _from_json(path: Path) -> tokenizers.Tokenizer:
    content = _json_object(path)
    if "model" not in content:
        raise TokenizerError(f"{path} has no field 'model'", "a tokenizer.json of the tokenizers library")
    expansion_check.check_expansion(content, str(path))
    with library_errors(f"{path} is not a tokenizer"):
        runtime = tokenizers.Tokenizer.from_buffer(_read(path))
    _check_template(content.get("post_processor"), path)  # whose shape the library has checked
    return runtime


def _check_template(step: Any, path: Path) -> None:
    """The tokens that a post-processor puts around a text are in its own table, the library panics otherwise; and they
    are few, around one text."""
    if not isinstance(step, dict):
        return
    for inner in step.get("processors") or ():
        _check_template(inner, path)
    if step.get("type") != "TemplateProcessing":
        return
    for field in ("single", "pair"):
        sequences = [piece["Sequence"]["id"] for piece in step[field] if "Sequence" in piece]
        ids = sum(len(token["ids"]) for token in step["special_tokens"].values())
        if len(step[field]) + ids > _MOST_AROUND or len(set(sequences)) < len(sequences):
            raise TokenizerError(f"{path}: post_processor.{field} repeats a text, or puts {_MOST_AROUND} tokens around")
        for piece in step[field]:
            name = piece.get("SpecialToken", {}).get("id")
            if name is not None and name not in step["special_tokens"]:
                raise TokenizerError(f"{path}: post_processor.{field} has '{name}', which special_tokens lacks")


def _from_vocab_and_merges(vocabulary: Path, merges: Path) -> tokenizers.Tokenizer:
    """GPT-2's two files: byte-level BPE with GPT-2's word pattern, no tokens around a text."""
    for path in (vocabulary, merges):
        if not path.is_file():
            raise TokenizerError(f"{path} is missing", "vocab.json and merges.txt in one folder")
        _read(path)
    content = _json_object(vocabulary)
    for token, id in content.items():
        if type(id) is not int or not 0 <= id < 2**32:
            raise TokenizerError(f"{vocabulary}: the id of '{token}' is not a number from 0 up")
    with library_errors(f"{vocabulary} and {merges.name} are not a tokenizer"):
        runtime = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    special = [name for names in WELL_KNOWN.values() for name in names if name in content]
    runtime.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    runtime.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    runtime.post_processor = processors.ByteLevel(trim_offsets=False)
    runtime.decoder = decoders.ByteLevel()
    return runtime


def _special_names(
    runtime: tokenizers.Tokenizer, folder: Path, config: dict[str, Any], own: dict[str, str | None]
) -> dict[str, str | None]:
    """Texts by role. A configuration file that has the field decides, even with null; then `own`, the names
    in the model file; then the well-known names."""
    path = folder / "special_tokens_map.json"
    token_map = _json_object(path)
    names: dict[str, str | None] = {}
    for role in ROLES:
        field = f"{role}_token"
        if field in config:
            names[role] = _token_text(config[field], folder / "tokenizer_config.json", field)
        elif field in token_map:
            names[role] = _token_text(token_map[field], path, field)
        else:
            known = (name for name in WELL_KNOWN[role] if runtime.token_to_id(name) is not None)
            names[role] = own.get(role) or next(known, None)
    return names


def _token_text(value: Any, path: Path, field: str) -> str | None:
    """A token is written as its text, as an object with "content", or as null."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise TokenizerError(f"{path}: '{field}' is not a token's text")
    return text


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
