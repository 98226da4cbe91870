"""Questions that several test modules ask, and what is checked of every error."""

from __future__ import annotations

from typing import Any

from tests.cpu.server.running import HELLO, Answer, Served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


def check(answer: Answer, status: int, code: str, param: str | None = None) -> str:
    """Check an error answer and return its message."""
    assert answer.status == status, answer.body
    error = answer.error
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    assert answer.headers["Content-Type"] == "application/json"
    assert "x-request-id" in answer.headers
    message: str = error["message"]
    return message


async def ask_text(served: Served, **fields: Any) -> dict[str, Any]:
    answer = await served.post(TEXT, {"prompt": "x", **fields})
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json
    return body


async def ask_chat(served: Served, **fields: Any) -> dict[str, Any]:
    answer = await served.post(CHAT, {"messages": HELLO, **fields})
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json
    return body
