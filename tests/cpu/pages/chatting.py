"""A chat on the page at `/`, as a visitor has it."""

from __future__ import annotations

from tests.cpu.pages.browser import Tab

LAST = "[...document.querySelectorAll('.message')].at(-1)"


async def begin(tab: Tab, question: str) -> None:
    """Type a question and Enter, and wait until both messages stand there."""
    count = await tab.js("document.querySelectorAll('.message').length")
    await tab.js("document.getElementById('prompt').focus()")
    await tab.keys(f"{question}\n")
    await tab.until(f"document.querySelectorAll('.message').length === {count + 2}")


async def ask(tab: Tab, question: str) -> str:
    """Ask; return what stands below the answer in the end."""
    await begin(tab, question)
    return await ended(tab)


async def ended(tab: Tab) -> str:
    """Wait for the end of an answer; return what stands below it, its parts with dots between."""
    await tab.until("document.getElementById('send').textContent === 'Send'")
    note = f"[...{LAST}.querySelectorAll('.verdict')].at(-1)"
    said: str = await tab.js(
        f"{note}.classList.contains('said') ? {note}.innerText "
        f": [...{note}.children].map((part) => part.innerText).join(' · ')"
    )
    return said


async def fill(tab: Tab, name: str, value: str | float) -> None:
    """Set a field of the form, as typing does."""
    place = f"document.getElementById('{name}')"
    await tab.js(f"{place}.value = '{value}'; {place}.dispatchEvent(new Event('input', {{bubbles: true}}))")


async def click(tab: Tab, text: str) -> None:
    """Click on the last button with a text."""
    buttons = "[...document.querySelectorAll('button')]"
    await tab.js(f"{buttons}.filter((each) => each.textContent === '{text}').at(-1).click()")


async def reload(tab: Tab) -> None:
    await tab.js("window.isOld = true")
    await tab.call("Page.reload")
    await tab.until("!window.isOld && document.readyState === 'complete'")
