"""Where a tokenizer comes from. Owns: reading a Hugging Face directory or GGUF metadata into one record.

Rules: every source becomes a `TokenizerSource`: the bare BPE, which knows no added token (tokenizer.py alone
decides where those apply), and the facts beside it. If anything is missing, damaged or unsupported, a
ModelLoadError names the file or key. The pre-tokenizer expressions are facts of the vocabularies, named by
GGUF's `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from hotprefix.engine.text.gguf_meta import read_metadata
from hotprefix.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in the text before the BPE runs. special: the model's files call it a control
    token."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What a model's files say of its tokenizer.

    bpe: the BPE without added tokens.
    inner: the same for text that does not begin the prompt. It differs if the vocabulary puts a blank before
    the first word only.
    byte_level: tokens are written in GPT-2's byte alphabet; if false, in SentencePiece's way, with ▁ and
    <0xNN>.
    eos_id: the tokenizer's own end token.
    eos_ids: all tokens that end an output.
    templates: chat templates by name.
    """

    bpe: Tokenizer
    inner: Tokenizer
    byte_level: bool
    added: tuple[AddedToken, ...]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    templates: Mapping[str, str] = field(default_factory=dict)


# -- Hugging Face directory -----------------------------------------------------------------------


def from_directory(path: Path) -> TokenizerSource:
    """Read tokenizer.json and the configuration files beside it. Raises ModelLoadError."""
    spec = _load(path / "tokenizer.json")
    if spec is None:
        raise ModelLoadError(f"{path} has no tokenizer.json: convert the tokenizer to it (a `fast` one)")
    config = _load(path / "tokenizer_config.json") or {}
    try:
        model = spec["model"]
        if model.get("type") != "BPE":
            raise ModelLoadError(
                f"{path}/tokenizer.json: model type {model.get('type')!r}, only BPE is known"
            )
        added = tuple(_added(spec, config))
        ids = {a.content: a.id for a in added}
        bos_id, eos_id = (ids.get(_content(config.get(f"{name}_token"))) for name in ("bos", "eos"))
        bpe, inner = _bare(spec, {a.content for a in added})
        return TokenizerSource(
            bpe=bpe,
            inner=inner,
            byte_level="ByteLevel" in _types(spec.get("decoder")),
            added=added,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=_eos_ids(path, eos_id),
            add_bos=bos_id is not None and bool(config.get("add_bos_token", _puts_first(spec, bos_id))),
            templates=_templates(path, config),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path}: the tokenizer files are malformed ({error!r})") from error


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


def _content(token: Any) -> str:
    """The text of a token that a configuration gives as a string or an object; "" if it gives none."""
    return str(token["content"]) if isinstance(token, dict) else token or ""


def _added(spec: dict[str, Any], config: dict[str, Any]) -> Iterator[AddedToken]:
    tokens = {int(i): dict(t) for i, t in (config.get("added_tokens_decoder") or {}).items()}
    tokens.update({int(t["id"]): t for t in spec.get("added_tokens") or ()})
    for i, t in sorted(tokens.items()):
        yield AddedToken(
            i, t["content"], bool(t.get("special")), bool(t.get("lstrip")), bool(t.get("rstrip"))
        )


def _bare(spec: dict[str, Any], added: set[str]) -> tuple[Tokenizer, Tokenizer]:
    """The BPE without added tokens, for a prompt's beginning and for other text. If whole words may be looked
    up in the vocabulary (`ignore_merges`), added tokens leave the vocabulary too, so that no plain text can
    become one."""
    model = spec["model"]
    if model.get("ignore_merges"):
        model = model | {"vocab": {t: i for t, i in model["vocab"].items() if t not in added}}
    spec = spec | {"model": model, "added_tokens": []}
    spec |= {"post_processor": None, "truncation": None, "padding": None}
    pre = spec.get("pre_tokenizer") or {}
    bpe = _build(spec)
    if pre.get("type") == "Metaspace" and pre.get("prepend_scheme") == "first":
        return bpe, _build(spec | {"pre_tokenizer": pre | {"prepend_scheme": "never"}})
    return bpe, bpe


def _build(spec: dict[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"tokenizer.json: {error}") from error


def _types(part: Any) -> set[str]:
    """The type names of a component and, if it is a sequence, of the components in it."""
    if not isinstance(part, dict):
        return set()
    inner = [p for value in part.values() if isinstance(value, list) for p in value]
    return {str(part.get("type"))}.union(*(_types(p) for p in inner))


def _puts_first(spec: dict[str, Any], bos_id: int) -> bool:
    """Whether the post-processor puts BOS before a text."""
    processor = spec.get("post_processor") or {}
    for part in [processor, *(processor.get("processors") or ())]:
        first = (part.get("single") or [{}])[0].get("SpecialToken")
        if first is not None:
            return bos_id in part["special_tokens"][first["id"]]["ids"]
    return False


def _eos_ids(path: Path, own: int | None) -> frozenset[int]:
    ids = set() if own is None else {own}
    for name in ("generation_config.json", "config.json"):
        given = (_load(path / name) or {}).get("eos_token_id")
        ids.update([given] if isinstance(given, int) else given or ())
    return frozenset(ids)


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. If a file and the configuration give a template of the same name, the file's
    counts."""
    given = config.get("chat_template") or []
    named = given if isinstance(given, list) else [{"name": "default", "template": given}]
    templates = {t["name"]: t["template"] for t in named}
    file = path / "chat_template.jinja"
    if file.is_file():
        templates = {"default": _text(file)}
    files = sorted((path / "additional_chat_templates").glob("*.jinja"))
    return templates | {extra.stem: _text(extra) for extra in files}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


# -- GGUF -----------------------------------------------------------------------------------------

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = frozenset((_LLAMA3, _QWEN2, _TEKKEN))
_GPT2_LIKE = ("gpt-2", "gpt2", "olmo", "mpt")
_DIGITS_FIRST = ("smollm", "starcoder", "refact", "codeshell")
_SPLITS = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "stablelm2": _QWEN2, "tekken": _TEKKEN,
}  # fmt: skip
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


def from_gguf(path: Path) -> TokenizerSource:
    """The tokenizer that a GGUF file's metadata describes. Raises ModelLoadError."""
    return from_metadata(read_metadata(path))


def from_metadata(meta: Mapping[str, Any]) -> TokenizerSource:
    """The same, if the metadata has been read already."""
    try:
        tokens: list[str] = meta["tokenizer.ggml.tokens"]
        kinds: Sequence[int] = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        kind = meta["tokenizer.ggml.model"]
        added = tuple(
            AddedToken(i, text, k == _CONTROL)
            for i, (text, k) in enumerate(zip(tokens, kinds, strict=True))
            if k in (_CONTROL, _USER_DEFINED) and text
        )
        pre = meta.get("tokenizer.ggml.pre", "default")
        if kind == "gpt2":
            bpe = inner = _byte_level(tokens, meta["tokenizer.ggml.merges"], pre, {a.content for a in added})
        elif kind == "llama":
            first = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
            bpe, inner = _sentence_pieces(tokens, meta["tokenizer.ggml.scores"], kinds, first)
        else:
            raise ModelLoadError(f"GGUF tokenizer model {kind!r} is not supported: only gpt2 and llama are")
    except (KeyError, ValueError) as error:
        raise ModelLoadError(f"the GGUF file's tokenizer metadata is incomplete: {error!r}") from error
    bos_id = meta.get("tokenizer.ggml.bos_token_id")
    ends = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    default_bos = kind == "llama" or pre in _WHOLE_WORDS
    return TokenizerSource(
        bpe=bpe,
        inner=inner,
        byte_level=kind == "gpt2",
        added=added,
        bos_id=bos_id,
        eos_id=meta.get("tokenizer.ggml.eos_token_id"),
        eos_ids=frozenset(i for i in ends if i is not None),
        add_bos=bos_id is not None and bool(meta.get("tokenizer.ggml.add_bos_token", default_bos)),
        templates=dict(_gguf_templates(meta)),
    )


def _gguf_templates(meta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The file's own template, and those that it names in `tokenizer.chat_templates`."""
    head = "tokenizer.chat_template"
    for name in ("default", *meta.get(f"{head}s", ())):
        template = meta.get(head if name == "default" else f"{head}.{name}")
        if template:
            yield name, template


def _byte_level(tokens: list[str], merges: list[str], pre: str, added: set[str]) -> Tokenizer:
    whole_words = pre in _WHOLE_WORDS
    vocab = {t: i for i, t in enumerate(tokens) if not (whole_words and t in added)}
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre in _DIGITS_FIRST:
        digits = pre_tokenizers.Digits(individual_digits=True)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in _GPT2_LIKE:
        bpe.pre_tokenizer = byte_level
    else:
        known = ", ".join(sorted({*_SPLITS, *_DIGITS_FIRST, *_GPT2_LIKE}))
        raise ModelLoadError(f"GGUF pre-tokenizer {pre!r} is not supported: only {known}")
    if _SPLITS.get(pre) is _QWEN2:
        bpe.normalizer = normalizers.NFC()
    return bpe


def _sentence_pieces(
    tokens: list[str], scores: list[float], kinds: Sequence[int], first: bool
) -> tuple[Tokenizer, Tokenizer]:
    """SentencePiece's BPE as merges: a piece that consists of two known pieces is a merge; the best score
    comes first."""
    vocab = {t: i for i, t in enumerate(tokens)}
    ranked = []
    for i, piece in enumerate(tokens):
        if kinds[i] not in (_CONTROL, _BYTE):
            cuts = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
            ranked += [(-scores[i], vocab[a], vocab[b], a, b) for a, b in cuts if a in vocab and b in vocab]
    ranked.sort()
    merges = [(a, b) for *_, a, b in ranked]

    def build(prefix: bool) -> Tokenizer:
        bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
        blanks = normalizers.Replace(" ", "▁")
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prefix else blanks
        bpe.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return bpe

    bpe = build(first)
    return bpe, bpe if not first else build(False)
