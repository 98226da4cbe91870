"""The file with classes of objectives and the defaults of API keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLO_CLASSES, ShedMode
from onbeat.server.slo_defaults import (
    ClassDefaults,
    KeyDefaults,
    KeyLimits,
    SLODefaults,
    key_digest,
    read_classes_file,
)

DIGEST = key_digest("team-b")


def read(tmp_path: Path, text: str, **environment: str) -> SLODefaults:
    path = tmp_path / "classes.yaml"
    path.write_text(text)
    return read_classes_file(path, environment)


def test_a_full_file(tmp_path: Path) -> None:
    file = read(
        tmp_path,
        f"""
        classes:
          - {{name: chat, ttft_ms: 800, tbt_ms: 60, e2e_ms: 30000, weight: 2, shed: true}}
          - {{name: batch, weight: 0.5, shed: false}}
          - {{name: interactive, ttft_ms: 300}}
        api_keys:
          - {{key_env: TEAM_A_KEY, class: chat}}
          - {{key_sha256: "{DIGEST.upper()}", class: batch, weight: 3, tenants: true}}
        """,
        TEAM_A_KEY="team-a",
    )
    assert file.classes == {
        "interactive": ClassDefaults(slo=SLO(ttft=0.3)),
        "standard": ClassDefaults(slo=SLO_CLASSES["standard"]),
        "batch": ClassDefaults(slo=SLO_CLASSES["batch"], weight=0.5, shed=ShedMode.RELEGATE),
        "offline": ClassDefaults(slo=SLO(), weight=0.5),
        "chat": ClassDefaults(slo=SLO(ttft=0.8, tbt=0.06, e2e=30.0), weight=2.0, shed=ShedMode.REJECT),
    }
    assert file.keys == {
        key_digest("team-a"): KeyDefaults(slo_class="chat"),
        DIGEST: KeyDefaults(slo_class="batch", weight=3.0, names_tenants=True),
    }


def test_limits_of_a_key(tmp_path: Path) -> None:
    text = f"api_keys: [{{key_sha256: '{DIGEST}', tokens_per_minute: 900, max_open_requests: 8}}]"
    limits = KeyLimits(tokens_per_minute=900, max_open_requests=8)
    assert read(tmp_path, text).keys == {DIGEST: KeyDefaults(limits=limits)}


def test_either_section_may_be_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, "classes: [{name: a, e2e_ms: 5}]").keys == {}
    assert read(tmp_path, f"api_keys: [{{key_sha256: '{DIGEST}', weight: 2}}]").classes.keys() == {
        *SLO_CLASSES,
        "offline",
    }


BAD_FILES = {
    "": "must be a mapping with classes, api_keys",
    "[1, 2]": "must be a mapping with classes, api_keys",
    "classes: [{name: a, e2e_ms: 5}]\nkeys: []": "unknown field 'keys'",
    "classes: {name: a}": "classes is {'name': 'a'}; it must be a list",
    "classes: []": "at least one value",
    "classes: [a]": "classes[0] is 'a'; it must be a mapping with ttft_ms",
    "classes: [{ttft_ms: 5}]": "classes[0] lacks name",
    "classes: [{name: 5, ttft_ms: 5}]": "classes[0].name is 5; it must be a text",
    "classes: [{name: '', ttft_ms: 5}]": "classes[0].name is ''",
    "classes: [{name: a, ttft_ms: 5}, {name: a, ttft_ms: 6}]": "class 'a' has a name that another has",
    "classes: [{name: a, ttft: 5}]": "classes[0] has an unknown field 'ttft': did you mean ttft_ms",
    "classes: [{name: a, share: 1, ttft_ms: 5}]": "unknown field 'share'",
    "classes: [{name: a}]": "class 'a' has no objectives, and none are built in",
    "classes: [{name: a, ttft_ms: 0.5}]": "class 'a': the ttft objective is 0.5 ms",
    "classes: [{name: a, ttft_ms: .nan}]": "classes[0].ttft_ms is nan; it must be a number",
    "classes: [{name: a, ttft_ms: .inf}]": "classes[0].ttft_ms is inf",
    "classes: [{name: a, ttft_ms: true}]": "classes[0].ttft_ms is True; it must be a number",
    "classes: [{name: a, ttft_ms: '5'}]": "classes[0].ttft_ms is '5'; it must be a number",
    "classes: [{name: a, ttft_ms: 5, weight: 0}]": "class 'a': the weight is 0",
    "classes: [{name: a, ttft_ms: 5, weight: yes}]": "classes[0].weight is True; it must be a number",
    "classes: [{name: a, ttft_ms: 5, shed: reject}]": "classes[0].shed is 'reject'; it must be true or false",
    "classes: [{name: a, ttft_ms: 5, shed: 1}]": "classes[0].shed is 1; it must be true or false",
    "classes: [": "cannot read",
    "api_keys: [secret]": "api_keys[0] is wrong (not shown here); it must be a mapping",
    f"api_keys: [{{key_env: SET, key_sha256: '{DIGEST}', class: b}}]": "must have either key_sha256",
    "api_keys: [{class: batch}]": "api_keys[0] must have either key_sha256 or key_env",
    "api_keys: [{key_env: SET, key_sha256: a, class: b}]": "must be 64 hexadecimal digits",
    "api_keys: [{key: secret, class: batch}]": "unknown field 'key'",
    "api_keys: [{key_sha256: secret, class: batch}]": "must be 64 hexadecimal digits",
    "api_keys: [{key_sha256: 123, class: batch}]": "must be 64 hexadecimal digits",
    "api_keys: [{key_env: UNSET, class: batch}]": "key_env of api_keys[0] names no environment variable",
    "api_keys: [{key_env: EMPTY, class: batch}]": "environment variable that is set; set it to the key",
    "api_keys: [{key_env: [a], class: batch}]": "api_keys[0].key_env is wrong",
    "api_keys: [{key_env: SET}]": "gives its key nothing",
    "api_keys: [{key_env: SET, class: 5}]": "api_keys[0].class is 5; it must be a text",
    "api_keys: [{key_env: SET, weight: true}]": "api_keys[0].weight is True; it must be a number",
    "api_keys: [{key_env: SET, tenants: 1}]": "api_keys[0].tenants is 1; it must be true or false",
    "api_keys: [{key_env: SET, tenants: false}]": "gives its key nothing",
    "api_keys: [{key_env: SET, tokens_per_minute: 0}]": "api_keys[0].tokens_per_minute is 0; it must be",
    "api_keys: [{key_env: SET, requests_per_minute: 1.5}]": "api_keys[0].requests_per_minute is 1.5",
    "api_keys: [{key_env: SET, max_open_requests: true}]": "api_keys[0].max_open_requests is True",
    "api_keys: [{key_env: SET, weight: -1}]": "api_keys[0]: the weight is -1",
    "api_keys: [{key_env: SET, weight: 1}, {key_env: SAME, weight: 2}]": "api_keys[1] is the same API key",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_files_name_the_place(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text, SET="secret", SAME="secret", EMPTY="")
    message = str(refused.value)
    assert BAD_FILES[text] in message
    assert "classes.yaml" in message
    assert "secret" not in message  # a key in the wrong place is not repeated


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml"):
        read_classes_file(tmp_path / "none.yaml", {})
    with pytest.raises(ConfigError, match=r"class interactive\b"):
        read_classes_file(Path("interactiv"), {})
