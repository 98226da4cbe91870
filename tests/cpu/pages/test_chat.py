"""Conversations on the page at `/`: what is sent, shown, followed, kept and forgotten."""

from __future__ import annotations

import json
from statistics import median

import pytest

from tests.cpu.pages.browser import Browser
from tests.cpu.pages.chatting import LAST, ask, begin, click, ended, fill, reload
from tests.cpu.server.predicting_engine import PredictingEngine
from tests.cpu.server.running import serving
from tests.fakes_engine import FakeEngine, Script

SLOW = Script(text="word " * 400, seconds_per_step=0.01, tokens_per_step=5)
KEPT = "localStorage.getItem('onbeat/')"


def prompt(engine: FakeEngine) -> str:
    """Return the text that the last request asked with."""
    return bytes(each for each in engine.requests[-1].prompt_token_ids if each < 256).decode()


async def test_what_is_cleared_while_it_streams_is_gone(browser: Browser) -> None:
    engine = PredictingEngine(script=SLOW)
    async with serving(engine) as served, browser.tab(served.url) as tab:
        await begin(tab, "my SECRET")
        await tab.until(f"{LAST}.innerText.includes('word')")
        await click(tab, "Clear")
        await fill(tab, "most", 5)
        assert "cut off at 5 tokens" in await ask(tab, "Second")
        assert prompt(engine) == "[user]Second\n[assistant]"
        assert await tab.js("document.querySelectorAll('.message').length") == 2
        kept = await tab.js(KEPT)
        assert "Second" in kept
        assert "SECRET" not in kept


async def test_a_phone_follows_the_answer_above_the_form(browser: Browser) -> None:
    lines = "".join(f"Paragraph {number} of it.\n\n" for number in range(60))
    script = Script(text=lines, seconds_per_step=0.005, tokens_per_step=20)
    engine = PredictingEngine(script=script, max_model_len=8192)
    async with serving(engine) as served, browser.tab(served.url, width=390, height=844) as tab:
        await fill(tab, "most", 1900)
        await ask(tab, "tell")
        last = "[...document.querySelectorAll('.verdict')].at(-1).getBoundingClientRect()"
        form = "document.getElementById('form').getBoundingClientRect()"
        assert 0 < await tab.js(f"{last}.bottom") <= await tab.js(f"{form}.top + 1")
        assert await tab.js(f"{form}.bottom") <= 844
        assert await tab.js("document.getElementById('chat').scrollTop") > 500
        # one who reads further up is left there
        await tab.js("document.getElementById('chat').scrollTop = 0")
        await tab.until("!document.getElementById('latest').hidden")
        await begin(tab, "more")
        await tab.until(f"{LAST}.innerText.includes('Paragraph 30')")
        await tab.js("document.getElementById('chat').scrollTop = 0")
        await ended(tab)
        assert await tab.js("document.getElementById('chat').scrollTop") == 0
        await click(tab, "↓ Latest")
        assert await tab.js(f"{last}.bottom") <= await tab.js(f"{form}.top + 1")


async def test_an_answer_that_is_cut_off_says_so_and_goes_on(browser: Browser) -> None:
    engine = PredictingEngine(script=Script(answers=["Once upon a time", " there was"]))
    async with serving(engine) as served, browser.tab(served.url) as tab:
        await fill(tab, "most", 9)
        assert "cut off at 9 tokens · Go on" in await ask(tab, "tell")
        await fill(tab, "most", 50)
        await click(tab, "Go on")
        await tab.until(f"{LAST}.querySelectorAll('.verdict').length === 2")
        assert "cut off" not in await ended(tab)
        assert prompt(engine) == "[user]tell\n[assistant]Once upon"
        assert await tab.js(f"{LAST}.querySelector('.text').textContent") == "Once upon there was"
        await ask(tab, "and then?")
        assert prompt(engine) == ("[user]tell\n[assistant]Once upon there was\n[user]and then?\n[assistant]")


async def test_what_a_model_writes_becomes_no_html(browser: Browser) -> None:
    text = (
        "<script>window.hacked = 1</script> <img src=x onerror='window.hacked = 1'> "
        "[click](javascript:window.hacked=1) [data](data:text/html,x) ![i](https://example.org/i.png) "
        "[fine](https://example.org/?a=1&b=2)\n\n"
        "# <b>Head</b>\n\n```html\n<script>window.hacked = 1</script>\n```\n"
        "| <i>a</i> | b |\n|---|---|\n| `<b>` | **two** |\n\n- one\n  - _inner_\n"
    )
    engine = PredictingEngine(script=Script(text=text, tokens_per_step=3))
    async with serving(engine) as served, browser.tab(served.url) as tab:
        await tab.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        await ask(tab, "<img src=x onerror='window.hacked = 1'>")
        inside = f"[...{LAST}.querySelectorAll('.text *')].map((each) => each.localName)"
        assert set(await tab.js(inside)) == {
            *("p", "span", "a", "h3", "div", "button", "pre", "code"),
            *("table", "tr", "th", "td", "strong", "ul", "li", "em"),
        }
        links = f"[...{LAST}.querySelectorAll('a')].map((each) => each.href)"
        assert await tab.js(links) == ["https://example.org/i.png", "https://example.org/?a=1&b=2"]
        shown = await tab.js(f"{LAST}.querySelector('.text').textContent")
        assert "<img src=x onerror='window.hacked = 1'>" in shown
        assert "click (javascript:window.hacked=1)" in shown
        assert (
            await tab.js("document.querySelectorAll('#chat img, #chat script, #chat [onerror]').length") == 0
        )
        await tab.js(f"{LAST}.querySelector('.code button').click()")
        await tab.until("window.copied")
        assert await tab.js("window.copied") == "<script>window.hacked = 1</script>"
        assert await tab.js("window.hacked === undefined")
        assert not tab.complaints


MARKDOWN = [
    ("a **b _c_** ***d*** `e*f*` 2 * 3 * 4", "p(a strong(b em(c)) strong(em(d)) code(e*f*) 2 * 3 * 4)"),
    ("snake_case_name __x__ ~~y~~ \\*z\\*", "p(snake_case_name strong(x) s(y) *z*)"),
    ("**open `code", "p(**open `code)"),
    ("1. a\n   - b\n\n   c\n2. d", "ol(li(p(a)ul(li(p(b)))p(c))li(p(d)))"),
    ("- a\n* b\n1. c", "ul(li(p(a))li(p(b)))ol(li(p(c)))"),
    ("## A ##\ntext\n***\n> q\n> r", "h4(A)p(text)hr()blockquote(p(q\nr))"),
    ("|a|b|\n|-|-:|\n|1|2\\|3|\nend", "div(table(tr(th(a)th(b))tr(td(1)td(2|3))))p(end)"),
    ("```py\n**x**\n\n# y", "div(div(span(py)button(Copy))pre(code(**x**\n\n# y)))"),
    ("see https://a.example/b_c.", "p(see a(https://a.example/b_c).)"),
]


async def test_markdown_is_laid_out_while_it_comes(browser: Browser) -> None:
    outline = """(node) => node.nodeType === 3 ? node.data
        : node.localName + '(' + [...node.childNodes].map(outline).join('') + ')'"""
    found = []
    async with serving(PredictingEngine()) as served, browser.tab(served.url) as tab:
        await tab.js(f"window.outline = {outline}; 0")
        for source, _ in MARKDOWN:
            whole = json.dumps(source)
            await tab.js(f"window.place = document.createElement('div'); window.whole = {whole}; 0")
            await tab.js("for (let n = 1; n <= whole.length; n += 1) render(place, whole.slice(0, n))")
            found.append((source, await tab.js("[...place.childNodes].map(outline).join('')")))
    assert found == MARKDOWN


async def test_long_and_odd_answers_are_laid_out_at_once(browser: Browser) -> None:
    odd = [
        "*",
        "**a ",
        "_a ",
        "`",
        "a`",
        "[",
        "![",
        "> ",
        "- ",
        "- a\n\n",
        "| ",
        "|-",
        "~~",
        "https://a ",
        "\n",
        " ",
    ]
    async with serving(PredictingEngine()) as served, browser.tab(served.url) as tab:
        for text in odd:
            whole = json.dumps(text)
            took = await tab.js(
                "{ const began = performance.now(); "
                f"render(document.createElement('div'), {whole}.repeat(20000 / {whole}.length)); "
                "performance.now() - began }"
            )
            assert took < 5000, text


async def test_one_conversation_and_the_objective_outlive_a_reload(browser: Browser) -> None:
    engine = PredictingEngine(predicted_ttft=0.05)
    async with serving(engine) as served, browser.tab(served.url) as tab:
        await fill(tab, "ttft", 5000)
        await fill(tab, "tbt", 1000)
        await ask(tab, "first")
        said = await ended(tab)
        await reload(tab)
        assert await ended(tab) == said
        assert await tab.js(f"{LAST}.querySelectorAll('.strip rect').length") > 5
        assert await tab.js("document.getElementById('ttft').value") == "5000"
        await ask(tab, "second")
        assert prompt(engine) == "[user]first\n[assistant]Hello, world!\n[user]second\n[assistant]"
        await click(tab, "Clear")
        assert "first" not in await tab.js(KEPT)
        await reload(tab)
        assert await tab.js("document.querySelectorAll('.message').length") == 0
        await ask(tab, "third")
        assert prompt(engine) == "[user]third\n[assistant]"


async def test_what_was_not_answered_is_not_kept(browser: Browser) -> None:
    engine = PredictingEngine(script=SLOW)
    async with serving(engine) as served, browser.tab(served.url) as tab:
        await begin(tab, "first")
        await tab.until(f"{LAST}.innerText.includes('word')")
        await tab.js("document.getElementById('prompt').focus()")
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
        assert (await ended(tab)).startswith("stopped · ")
        engine.script = Script(first_delay=60.0)
        await begin(tab, "second")
        await tab.until("document.getElementById('send').textContent === 'Stop'")
        await click(tab, "Stop")
        assert await ended(tab) == "stopped"
        kept = json.loads(await tab.js(KEPT))["messages"]
        assert [each["role"] for each in kept] == ["user", "assistant"]
        assert kept[0]["content"] == "first"


async def test_system_message_and_temperature_are_sent(browser: Browser) -> None:
    engine = PredictingEngine()
    async with serving(engine) as served, browser.tab(served.url) as tab:
        await fill(tab, "system", "Be brief.")
        await fill(tab, "temperature", 0.25)
        assert await tab.js("document.querySelector('#more summary').textContent") == "More (set)"
        await ask(tab, "hi")
        assert prompt(engine).startswith("[system]Be brief.\n[user]hi")
        assert engine.requests[-1].sampling.temperature == 0.25


async def test_strips_share_a_labelled_scale_and_an_early_stream_is_ahead(browser: Browser) -> None:
    engine = PredictingEngine(script=Script(text="some words", seconds_per_step=0.01))
    async with serving(engine) as served, browser.tab(served.url) as tab:
        await fill(tab, "ttft", 60000)
        await fill(tab, "tbt", 1)
        said = await ask(tab, "fast")
        assert said.startswith("objective kept · ")
        assert " · ahead by 59." in said
        assert "in time" not in said
        engine.script = Script(text="some words", seconds_per_step=0.1)
        await ask(tab, "slow")
        labels = "[...document.querySelectorAll('.strip')].map((each) => each.innerText)"
        fast, slow = await tab.js(labels)
        assert fast == slow
        assert " ms" in fast
        bars = "[...each.querySelectorAll('rect')].map((bar) => bar.height.baseVal.value)"
        strips = await tab.js(f"[...document.querySelectorAll('.strip')].map((each) => {bars})")
        quick, slow = map(median, strips)  # one bar may be high where the machine stood still
        assert quick < 0.5 * slow


async def test_the_state_beside_it_speaks_to_visitors(browser: Browser) -> None:
    async with serving(PredictingEngine()) as served, browser.tab(served.url) as tab:
        await fill(tab, "ttft", 5000)
        await ask(tab, "hi")
        await tab.until("document.getElementById('classes').innerText.includes('%')")
        assert "Idle" in await tab.js("document.getElementById('busy').innerText")
        assert "unnamed" not in await tab.js("document.body.innerText")
        rows = "[...document.querySelectorAll('#steps tr')]"
        share = f"{rows}.find((row) => row.textContent.includes('bandwidth')).lastChild"
        await tab.js("live({ ...last, step_mbu_ratio: 0.5 })")
        assert await tab.js(f"{share}.textContent") == "50 %"
        await tab.js("live({ ...last, step_mbu_ratio: 1.59 })")
        assert await tab.js(f"{share}.textContent") == "all"


CONTRAST = """(() => {
  const texts = 'a, button, p, h1, h2, label, summary, td, .verdict *';
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => numbers(colour).slice(0, 3).map((value) => value / 255)
    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0.05);
  const ratio = (each) => {
    let under = each;
    while (numbers(getComputedStyle(under).backgroundColor)[3] === 0) under = under.parentElement;
    const both = [light(getComputedStyle(each).color), light(getComputedStyle(under).backgroundColor)];
    return Math.max(...both) / Math.min(...both);
  };
  return [...document.querySelectorAll(texts)].filter((each) => each.getClientRects().length)
    .filter((each) => each.textContent.trim() && ratio(each) < 4.5).map((each) => each.outerHTML);
})()"""
"""Texts whose contrast is below what WCAG asks for, 4.5 to 1."""


@pytest.mark.parametrize("dark", [False, True])
async def test_texts_can_be_read_and_the_form_keeps_its_lines(browser: Browser, dark: bool) -> None:
    async with serving(PredictingEngine()) as served, browser.tab(served.url, dark=dark) as tab:
        await fill(tab, "tbt", 0.001)
        await ask(tab, "hi")
        assert await tab.js(CONTRAST) == []
        middles = """[...document.querySelectorAll('form .row:not([hidden]) > *')].map((each) => {
          const box = each.getBoundingClientRect(); return (box.top + box.bottom) / 2; })"""
        found = await tab.js(middles)
        assert len(found) == 5
        assert max(found) - min(found) < 8
