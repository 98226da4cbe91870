"""Whether a draft model's token ids stand for the same text as those of the model that it guesses for."""

from __future__ import annotations

from onbeat.core.errors import ConfigError
from onbeat.core.tokenizer import Tokenizer
from onbeat.hub.files import ModelFiles
from onbeat.text.tokenizer import load_tokenizer


def check_same_tokenizer(target: ModelFiles, draft: ModelFiles) -> None:
    """Compare two models' vocabularies.

    Raises
    ------
    ConfigError : some token id stands for different bytes.
    ModelLoadError : a tokenizer cannot be read.
    """
    if target.path.resolve() == draft.path.resolve():
        return
    theirs, ours = load_tokenizer(draft.path), load_tokenizer(target.path)
    token_id = first_difference(ours, theirs)
    if token_id is not None:
        raise ConfigError(
            f"the draft model {draft.name} has another tokenizer than {target.name}: token {token_id} is "
            f"{theirs.token_bytes(token_id)!r} there and {ours.token_bytes(token_id)!r} here; take a draft "
            "model of the same family"
        )


def first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """Return the first token id that both vocabularies have and that stands for different bytes.

    One may be longer: some files list padding, or special tokens that others leave out. A token that only
    one model knows is never proposed, or read as another one, which costs a wrong guess and no more.
    """
    for token_id in range(min(one.vocab_size, other.vocab_size)):
        if one.token_bytes(token_id) != other.token_bytes(token_id):
            return token_id
    return None
