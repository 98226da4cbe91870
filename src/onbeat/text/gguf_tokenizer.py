"""Build a tokenizer from the metadata of a GGUF file.

Three kinds are known: `gpt2`, byte-level BPE whose merges are in the file, `llama`, SentencePiece BPE with
byte fallback, whose merges follow from the scores, and `gemma4`, the same with merges in the file.

Notes
-----
With a SentencePiece vocabulary that adds a space prefix (Llama 2, Mistral), the prefix goes before every
stretch of text between tokens that match whole, as in the published `tokenizer.json` files.

How text is cut before byte-level BPE merges, by the name a GGUF file gives in `tokenizer.ggml.pre`.

The patterns are those the models' authors published in their `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from onbeat.core.errors import ModelLoadError
from onbeat.text.gguf_header import Metadata

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENDING|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENDING"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""A capital behind small letters begins a word, so `myServer` is cut."""
_TEKKEN = _BY_CASE.replace("ENDING", "").replace("DIGITS", r"\p{N}")
_GPT_4O = _BY_CASE.replace("ENDING", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to cut text.

    Parameters
    ----------
    pattern : what a piece looks like; None takes GPT-2's own pattern, which is built into the library.
    splits_digits : every digit is a piece of its own, before the pattern is applied.
    whole_pieces_first : a piece that is a token is taken as it stands, whatever the merges say.
    composes : text is put in Unicode's composed form (NFC) first.
    adds_bos : the beginning-of-sequence token is added unless the file says otherwise.
    """

    pattern: str | None = None
    splits_digits: bool = False
    whole_pieces_first: bool = False
    composes: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self, *, add_space_prefix: bool) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer that cuts so and spells the pieces in the byte alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=add_space_prefix, use_regex=self.pattern is None)
        )
        return pre_tokenizers.Sequence(steps)


SCHEMES = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "phi-2"), Scheme()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), Scheme(splits_digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"), Scheme(pattern=_LLAMA3, whole_pieces_first=True, adds_bos=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Scheme(pattern=_LLAMA3)),
    "glm4": Scheme(pattern=_LLAMA3, whole_pieces_first=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Scheme(pattern=_QWEN2, composes=True)),
    "qwen35": Scheme(pattern=_QWEN35, composes=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Scheme(pattern=_GPT_4O)),
    "tekken": Scheme(pattern=_TEKKEN, whole_pieces_first=True, adds_bos=True),
}


def scheme_named(name: str) -> Scheme:
    """Return the scheme of `tokenizer.ggml.pre`.

    Raises
    ------
    ModelLoadError : the name is not in the table.
    """
    if name not in SCHEMES:
        raise ModelLoadError(
            f"the file's tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(SCHEMES))}. "
            "Use the model's Hugging Face directory (tokenizer.json) instead"
        )
    return SCHEMES[name]


_T = TypeVar("_T")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece writes a space so."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_gguf_tokenizer(metadata: Metadata, path: Path) -> Tokenizer:
    """Build the tokenizer that a file describes.

    Parameters
    ----------
    metadata : all of the file's keys.
    path : the file, for messages only.

    Raises
    ------
    ModelLoadError : the kind of vocabulary is not supported, or its parts are missing or do not fit together.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.model is {kind!r}; supported are {', '.join(sorted(_BUILDERS))}. "
            "Use the model's Hugging Face directory (tokenizer.json) instead"
        )
    source = _Source(metadata, path)
    try:
        tokenizer = _BUILDERS[kind](source)
        _add_whole_tokens(tokenizer, source)
        _add_sequence_marks(tokenizer, source)
    except (ModelLoadError, MemoryError):
        raise
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ModelLoadError(
            f"{path}: the vocabulary does not fit together ({error}); fetch or convert the file again"
        ) from error
    return tokenizer


class _Source:
    """Checked access to what the builders need."""

    def __init__(self, metadata: Metadata, path: Path) -> None:
        self.metadata = metadata
        self.path = path
        self.tokens = self.strings("tokens")
        self.types: Sequence[int] = self.get("token_type", [TokenType.NORMAL] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise ModelLoadError(
                f"{path}: {len(self.tokens)} tokens but {len(self.types)} token types; convert the file again"
            )

    def get(self, key: str, default: _T) -> _T:
        """Return a key of the vocabulary, which must be of the default's type."""
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, type(default)):
            raise ModelLoadError(
                f"{self.path}: tokenizer.ggml.{key} is {value!r:.60}, not {type(default).__name__}"
            )
        return value

    def strings(self, key: str) -> list[str]:
        strings: list[str] = self.get(key, [])
        if not strings or not isinstance(strings[0], str):
            raise ModelLoadError(
                f"{self.path} has no tokenizer.ggml.{key}; use a file that carries its tokenizer"
            )
        return strings

    def token(self, key: str) -> tuple[str, int] | None:
        """Return the token and id that a key such as `bos_token_id` names."""
        token_id = self.metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise ModelLoadError(
                f"{self.path}: tokenizer.ggml.{key} is {token_id!r}, outside the vocabulary of "
                f"{len(self.tokens)} tokens"
            )
        return self.tokens[token_id], token_id

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self.strings("merges"):
            left, _, right = merge.partition(" ")
            pairs.append((left, right))
        return pairs

    def adds(self, mark: str) -> bool:
        """Return whether encoding adds the `bos` or `eos` token."""
        default = False
        if mark == "bos":
            is_sentencepiece = self.metadata["tokenizer.ggml.model"] in ("llama", "gemma4")
            default = is_sentencepiece or scheme_named(self.get("pre", "default")).adds_bos
        return self.get(f"add_{mark}_token", default)


def _build_byte_level(source: _Source) -> Tokenizer:
    scheme = scheme_named(source.get("pre", "default"))  # the format's rule: a missing name means "default"
    vocab = {token: token_id for token_id, token in enumerate(source.tokens)}
    merges = source.merges()
    for left, right in merges:
        if left + right not in vocab:  # the library would panic, not raise
            raise ModelLoadError(
                f"{source.path}: the merge of {left!r} and {right!r} is no token of the vocabulary; fetch or "
                "convert the file again"
            )
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=scheme.whole_pieces_first))
    if scheme.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = scheme.pre_tokenizer(add_space_prefix=source.get("add_space_prefix", False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(source: _Source) -> Tokenizer:
    vocab = _sentencepiece_vocab(source)
    has_merges = "tokenizer.ggml.merges" in source.metadata
    merges = (
        source.merges()
        if has_merges
        else merges_from_scores(vocab, source.get("scores", [0.0]), source.types)
    )
    unknown = source.token("unknown_token_id")
    model = models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    to_text: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    spaces: normalizers.Normalizer = normalizers.Replace(" ", _SPACE)
    if source.get("add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _sentencepiece_vocab(source: _Source) -> dict[str, int]:
    """Map tokens to ids, with runs of spaces spelled as text is spelled when it is looked up."""
    vocab = {token: token_id for token_id, token in enumerate(source.tokens)}
    for token_id, token in enumerate(source.tokens):
        if token.isspace() and token == " " * len(token) and _SPACE * len(token) not in vocab:
            del vocab[token]
            vocab[_SPACE * len(token)] = token_id
    return vocab


def merges_from_scores(
    vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Recover the merges that SentencePiece's scores stand for, best first.

    SentencePiece joins the neighbours whose union is the token of the highest score. As a list of merges this
    is every cut of every token into two tokens, in the order of the scores; user-defined tokens come first,
    since SentencePiece takes them whole before it looks at any score. Bytes and control tokens are never made
    from text.

    Raises
    ------
    ModelLoadError : there is not one score for each token.
    """
    if len(scores) != len(types):
        raise ModelLoadError(
            f"the file has {len(scores)} tokenizer.ggml.scores for {len(types)} tokens and no merges; "
            "convert it again"
        )
    user_defined = [item for item in vocab.items() if types[item[1]] == TokenType.USER_DEFINED]
    normal = [item for item in vocab.items() if types[item[1]] == TokenType.NORMAL]
    user_defined.sort(key=lambda item: item[1])
    normal.sort(key=lambda item: (-scores[item[1]], item[1]))
    merges = []
    for token, _ in user_defined + normal:
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in vocab:
                right = token[cut:]
                if right in vocab:
                    merges.append((left, right))
    return merges


def _add_whole_tokens(tokenizer: Tokenizer, source: _Source) -> None:
    """Make control and user-defined tokens match whole in the text; only the former are special."""
    whole = []
    for token, kind in zip(source.tokens, source.types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            whole.append(AddedToken(token, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED and tokenizer.token_to_id(token) is not None:
            whole.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_tokens(whole)


def _add_sequence_marks(tokenizer: Tokenizer, source: _Source) -> None:
    """Make encoding add the beginning- and end-of-sequence tokens that the file asks for."""
    marks = {}
    for name in ("bos", "eos"):
        if source.adds(name):
            token = source.token(f"{name}_token_id")
            if token is None:
                raise ModelLoadError(
                    f"{source.path}: tokenizer.ggml.add_{name}_token is set without {name}_token_id; "
                    "convert it again"
                )
            marks[name] = token
    set_sequence_marks(tokenizer, bos=marks.get("bos"), eos=marks.get("eos"))


def set_sequence_marks(
    tokenizer: Tokenizer, *, bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> None:
    """Make `encode` put these tokens (name, id) before and after the text, and nothing else."""
    pieces = ["$A"]
    if bos is not None:
        pieces.insert(0, bos[0])
    if eos is not None:
        pieces.append(eos[0])
    special_tokens = sorted({token for token in (bos, eos) if token is not None})
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pieces, pair=None, special_tokens=special_tokens
    )


_BUILDERS = {"gpt2": _build_byte_level, "llama": _build_sentencepiece, "gemma4": _build_sentencepiece}
