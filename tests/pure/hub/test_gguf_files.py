from __future__ import annotations

import pytest

from onbeat.core.errors import ModelLoadError
from onbeat.hub.gguf_files import choose_gguf, parts_of


def test_parts_are_counted_in_names() -> None:
    assert parts_of("m-00002-of-00002.gguf") == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for alone in (
        "m.gguf",
        "m-2-of-3.gguf",
        "m-00004-of-00003.gguf",
        "m-00000-of-00002.gguf",
        "m-00001-of-99999.gguf",
    ):
        assert parts_of(alone) == [alone]


@pytest.mark.parametrize(
    ("names", "tag", "chosen"),
    [
        (["a.gguf"], None, "a.gguf"),
        (["a.gguf", "mmproj-a.gguf", "a.imatrix.gguf"], None, "a.gguf"),
        (["a-F16.gguf", "a-BF16.gguf"], "f16", "a-F16.gguf"),
        (["a-Q4_0.gguf", "a-Q4_0_4_4.gguf", "a-IQ4_0.gguf"], "Q4_0", "a-Q4_0.gguf"),
        (["a-Q2_K.gguf", "a-UD-Q2_K.gguf"], "Q2_K", "a-Q2_K.gguf"),
        (["a-UD-Q2_K_XL.gguf", "a-Q2_K_L.gguf"], "Q2_K_XL", "a-UD-Q2_K_XL.gguf"),
        (["a.Q6_K.gguf", "a.i1-Q5_K.gguf"], "i1-q5_k", "a.i1-Q5_K.gguf"),
        (
            ["Q8_0/part-00001-of-00001.gguf", "Q6_K/part-00001-of-00001.gguf"],
            "Q6_K",
            "Q6_K/part-00001-of-00001.gguf",
        ),
        (["a-4bit.gguf", "b-4bit.gguf"], "b-4bit", "b-4bit.gguf"),
    ],
)
def test_the_file_of_a_tag(names: list[str], tag: str | None, chosen: str) -> None:
    assert choose_gguf(names, tag, source="it") == [chosen]


@pytest.mark.parametrize(
    ("names", "tag", "message"),
    [
        ([], None, "it has no GGUF model; it has none at all"),
        (["a-Q8_0.gguf", "a-Q6_K.gguf"], None, "it has no GGUF model; choose one of :Q6_K, :Q8_0"),
        (
            ["a-Q8_0.gguf", "b-Q8_0.gguf", "a-F16.gguf"],
            "Q8_0",
            "it has 2 GGUF models for 'Q8_0'; choose one of :a-Q8_0.gguf, :b-Q8_0.gguf",
        ),
    ],
)
def test_what_is_not_clear_is_listed(names: list[str], tag: str | None, message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        choose_gguf(names, tag, source="it")
    assert str(caught.value) == message
