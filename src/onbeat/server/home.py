"""The page at `/`: a chat with an objective, and the server's state beside it."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response


def home_routes() -> APIRouter:
    """Return the route of the page; it is open, and asks for a key where the API wants one."""
    router = APIRouter(include_in_schema=False)
    text = (files("onbeat.server") / "assets/index.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": content_policy(text),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def home() -> Response:
        """Return the page."""
        return HTMLResponse(text, headers=headers)

    router.add_api_route("/", home, methods=["GET", "HEAD"])
    return router


def content_policy(page: str) -> str:
    """Return a policy under which a page runs its own script and style, and talks to its own server alone."""
    digests = {
        tag: base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        for tag in ("script", "style")
        if (found := re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
    }
    return (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; "
        f"style-src 'sha256-{digests['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
