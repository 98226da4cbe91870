"""How text is cut before byte-level BPE merges, by the name a GGUF file gives in `tokenizer.ggml.pre`.

The patterns are those the models' authors published in their `tokenizer.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from onbeat.core.errors import ModelLoadError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return what happens to the text before it is cut."""
        return normalizers.NFC() if self.composes else None


_GPT2 = Scheme()
_DIGITS = Scheme(splits_digits=True)
_LLAMA3_SCHEME = Scheme(pattern=_LLAMA3, whole_pieces_first=True, adds_bos=True)
_QWEN2_SCHEME = Scheme(pattern=_QWEN2, composes=True)

SCHEMES = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3_SCHEME,
    "llama3": _LLAMA3_SCHEME,
    "llama-v3": _LLAMA3_SCHEME,
    "qwen2": _QWEN2_SCHEME,
    "deepseek-r1-qwen": _QWEN2_SCHEME,
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
