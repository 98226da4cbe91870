"""The page at `/`: what it loads, and what a real browser makes of it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from onbeat.bench.bench_load import BenchLoad
from onbeat.cli.capacity_output import capacity_result
from onbeat.core.errors import SLOUnattainable
from onbeat.report.result import write_page
from tests.cpu.pages.browser import Browser
from tests.cpu.pages.chatting import LAST, ask
from tests.cpu.server.predicting_engine import PredictingEngine
from tests.cpu.server.running import Served, serving
from tests.pure.bench.results import result_of
from tests.pure.bench.test_report import with_classes
from tests.pure.cli.test_answers import found, page_report


async def test_the_page_loads_nothing_and_runs_its_own_script_alone() -> None:
    async with serving(PredictingEngine()) as served, served.session.get(f"{served.url}/") as answer:
        policy, page = answer.headers["content-security-policy"], await answer.text()
    assert len(page.encode()) < 40_000
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|\bon[a-z]+=|style=", page)
    for tag in ("script", "style"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")


async def test_a_chat_with_an_objective_shows_its_verdict_gaps_and_refusal(browser: Browser) -> None:
    engine = PredictingEngine(predicted_ttft=0.05)
    async with serving(engine) as served, browser.tab(served.url) as tab:
        await tab.until("document.title.startsWith('fake/model')")
        assert "tokens" in await ask(tab, "hi")
        await tab.js(
            "document.getElementById('ttft').value = 5000; document.getElementById('tbt').value = 1000"
        )
        said = await ask(tab, "again")
        assert said.startswith("objective kept · first token ")
        assert "(predicted 50.0 ms)" in said
        assert await tab.js(f"{LAST}.querySelector('.text').textContent") == "Hello, world!"
        assert await tab.js(f"{LAST}.querySelectorAll('.strip rect').length") > 5
        assert await tab.js(f"{LAST}.querySelectorAll('.strip rect.late').length") == 0
        engine.refusals[""] = SLOUnattainable("too late", predicted_ttft=0.8125, retry_after=1.25)
        said = await ask(tab, "now")
        assert "refused · The server cannot keep this objective now." in said
        assert "It predicts the first token after 813 ms. Try again in 1250 ms." in said
        never = "this server cannot keep the objective even when idle: ask for at least 60 ms"
        engine.refusals[""] = SLOUnattainable(never, predicted_ttft=0.05, retry_after=None)
        assert await ask(tab, "never") == f"refused · {never}. Ask again"
        engine.refusals.clear()
        await tab.js(f"{LAST}.querySelector('button').click()")
        await tab.until(f"{LAST}.querySelector('.verdict').innerText.startsWith('objective kept')")
        assert await tab.js("document.querySelectorAll('.message').length") == 8
        await tab.until("document.getElementById('classes').innerText.includes('%')")
        complaints = [each for each in tab.complaints if "429" not in each]
        assert not complaints


async def test_a_server_with_keys_is_asked_with_the_key(browser: Browser) -> None:
    async with serving(PredictingEngine(), api_keys=("secret",)) as served, browser.tab(served.url) as tab:
        assert "wants an API key" in await ask(tab, "hi")
        await tab.js("document.getElementById('key').focus()")
        await tab.keys("secret")
        await tab.js("document.getElementById('key').dispatchEvent(new Event('change'))")
        assert "first token" in await ask(tab, "hi")


@pytest.mark.parametrize("width", [360, 1280])
async def test_nothing_is_wider_than_the_screen(browser: Browser, width: int) -> None:
    async with serving(PredictingEngine()) as served, browser.tab(served.url, width=width, height=740) as tab:
        await ask(tab, "word" * 60)
        assert await tab.js("document.documentElement.scrollWidth") <= width


async def test_all_of_it_is_reached_by_keyboard_and_has_a_name(browser: Browser) -> None:
    kinds = "'button, input, textarea, a, svg, section, aside'"
    name = "each.labels?.length || each.getAttribute('aria-label') || each.textContent.trim()"
    unnamed = (
        f"[...document.querySelectorAll({kinds})].filter((each) => !({name})).map((each) => each.outerHTML)"
    )
    async with serving(PredictingEngine()) as served, browser.tab(served.url) as tab:
        await ask(tab, "hi")
        assert await tab.js(unnamed) == []
        assert await tab.js("document.querySelectorAll('[tabindex]:not([tabindex=\"0\"])').length") == 0


CUT = """[...document.querySelectorAll('svg.main-svg text')].filter((text) => {
  const box = text.getBoundingClientRect(), card = text.closest('.card').getBoundingClientRect();
  return box.width && (box.left < card.left || box.right > card.right || box.top < card.top);
}).map((text) => text.textContent)"""
"""Texts of charts that reach over their cards."""
WIDE = """[...document.querySelectorAll('h1, h2, h3, p, summary, .tile, .card:not(.scroll)')]
  .filter((each) => each.scrollWidth > each.clientWidth + 1 && each.clientWidth)
  .map((each) => each.outerHTML)"""


async def test_no_text_of_a_report_is_cut_on_screens_and_paper(browser: Browser, tmp_path: Path) -> None:
    levels = [BenchLoad(request_rate=float(rate)) for rate in (1, 4)]
    cases = page_report(found(policy="prefill-first"), found(policy="slo"))
    write_page(capacity_result(cases), tmp_path / "capacity.html")
    write_page(result_of(*(with_classes(2.0, load) for load in levels)), tmp_path / "sweep.html")
    async with browser.tab("about:blank#") as tab:
        for page in ("capacity", "sweep"):
            for width in (1280, 390):
                await tab.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=900,
                    deviceScaleFactor=1,
                    mobile=width < 600,
                )
                await tab.call("Page.navigate", url=(tmp_path / f"{page}.html").as_uri())
                await tab.until("document.querySelector('[data-drawn]')")
                await tab.js("for (const each of document.querySelectorAll('details')) each.open = true")
                await tab.until("!document.querySelector('[data-figure]:not([data-drawn])')")
                assert await tab.js(CUT) == [], (page, width)
                assert await tab.js(WIDE) == [], (page, width)
                aligned = await tab.js(
                    "getComputedStyle(document.querySelector('.facts') ?? document.body).alignItems"
                )
                assert (page == "capacity") == (
                    aligned == "stretch"
                )  # cards in a row are as high as each other
                assert await tab.js("document.documentElement.scrollWidth") <= width
            await tab.js("for (const each of document.querySelectorAll('details')) each.open = false")
            await tab.js("window.dispatchEvent(new Event('beforeprint'))")
            assert await tab.js("document.querySelectorAll('details:not([open])').length") == 0
            assert await tab.js(CUT) == [], (page, "paper")
        assert not tab.complaints


async def test_the_docs_page_needs_no_other_host() -> None:
    async with serving(PredictingEngine()) as served:
        page = await _text(served, "/docs")
        for path in re.findall(r'(?:src|href)="([^"]+)"', page):
            assert path.startswith("/docs/static/"), path
            await _text(served, path)


async def _text(served: Served, path: str) -> Any:
    async with served.session.get(f"{served.url}{path}") as answer:
        assert answer.status == 200, path
        return (await answer.read()).decode(errors="replace")
