"""The page at / in Chromium: chat, stop button, figures, keys, hostile texts, both themes; no other requests."""

from __future__ import annotations

import json
import re
import shutil
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit import CHAT, QUESTIONS, Server, user
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

Truth = Callable[..., dict[str, Any]]
Open = Callable[..., Page]
PATIENCE = 60_000  # milliseconds
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script> & <b>bold</b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    assert found, "Chromium is needed, and was not found (Debian: apt-get install chromium)"
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=found[0])
        yield one
        one.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server; whatever it asks another one for, or complains of, fails the test."""
    wrong: list[str] = []
    pages: list[Page] = []

    def open_it(server: Server, expected: str = "connected", **options: Any) -> Page:
        page = browser.new_context(**options).new_page()
        page.on("request", lambda r: None if r.url.startswith((f"{server.url}/", "data:")) else wrong.append(r.url))
        page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("dialog", lambda d: wrong.append(d.message))
        page.goto(f"{server.url}/")
        expect(page.get_by_role("status")).to_have_text(expected)
        pages.append(page)
        page.wrong = wrong  # type: ignore[attr-defined]
        return page

    yield open_it
    for page in pages:
        page.context.close()
    assert not wrong


def say(page: Page, text: str) -> None:
    """Type a message, and send it from the keyboard."""
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def answer(page: Page) -> Any:
    """The text of the last answer."""
    return page.locator(".assistant > .text").last


def ended(page: Page) -> None:
    """The last answer is whole, or was stopped."""
    expect(page.locator(".assistant").last.locator(".note")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()


def test_a_conversation_is_what_the_model_says(open_server: Server, opened: Open, truth: Truth) -> None:
    page = opened(open_server)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("60")
    page.get_by_label("System prompt").fill("You are brief.")
    talk = [{"role": "system", "content": "You are brief."}]
    for question in QUESTIONS[:2]:
        talk += user(question)
        say(page, question)
        ended(page)
        true = truth(messages=talk, max_tokens=60)
        expect(answer(page)).to_have_text(true["text"], use_inner_text=False)
        assert answer(page).text_content() == true["text"]
        expect(page.locator(".note").last).to_contain_text(f"{len(true['token_ids'])} tokens")
        talk.append({"role": "assistant", "content": true["text"]})
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".message").count() == 0
    say(page, QUESTIONS[0])
    ended(page)
    assert answer(page).text_content() == truth(messages=[talk[0], talk[1]], max_tokens=60)["text"]


def test_a_stream_is_seen_grow_and_can_be_stopped(slow_server: Server, opened: Open) -> None:
    """A second's tenth a token: figures move meanwhile, and Escape ends it as the button does."""
    page, server = opened(slow_server), slow_server
    for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
        page.get_by_role("button", name="New conversation").click()
        before = server.figure("request_disconnects_total")
        say(page, "On and on")
        expect(page.locator("#messages")).to_have_attribute("aria-busy", "true")
        for length in (1, 4, 8):
            expect(answer(page)).to_have_text(re.compile(rf"\S(.|\s){{{length},}}"))
        expect(page.locator(".figure", has_text="Running").locator(".value")).to_have_text("1")
        expect(page.locator(".figure", has_text="Tokens a second").locator(".value")).to_have_text(
            re.compile(r"[1-9]\d*")
        )
        stop()
        ended(page)
        expect(page.locator(".note").last).to_have_text("stopped")
        server.rest()
        assert server.figure("request_disconnects_total") == before + 1
        expect(page.locator(".figure", has_text="Running").locator(".value")).to_have_text("0")
    drawn = page.locator(".figure", has_text="KV cache").locator("polyline").get_attribute("points")
    assert drawn and len({point.split(",")[1] for point in drawn.split()}) > 1


def stream(route: Route, *deltas: dict[str, Any]) -> None:
    """Answer a request of the page with a stream of our own."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    route.fulfill(status=200, content_type="text/event-stream", body=body)


def test_texts_are_never_markup(open_server: Server, opened: Open) -> None:
    page = opened(open_server)
    given = {"reasoning": HOSTILE}, {"content": HOSTILE}, {"content": "\n" + HOSTILE}
    page.route("**/v1/chat/completions", lambda route: stream(route, *given))
    say(page, HOSTILE)
    ended(page)
    assert answer(page).text_content() == f"{HOSTILE}\n{HOSTILE}"
    assert page.locator(".user > .text").text_content() == HOSTILE
    folded = page.locator("details")
    assert folded.get_attribute("open") is None and folded.locator(".text").text_content() == HOSTILE
    assert page.locator("#messages :is(img, script, b)").count() == 0 and page.title().endswith("llmc")


def test_an_error_is_reported_and_the_message_kept(open_server: Server, opened: Open) -> None:
    page = opened(open_server)
    say(page, "the " * 4000)
    expect(page.get_by_role("alert")).to_contain_text("maximum context length is exceeded")
    expect(page.get_by_label("Message", exact=True)).to_have_value("the " * 3999 + "the")
    assert page.locator(".message").count() == 0
    page.get_by_label("Max tokens").fill("8")
    say(page, "Hello")
    ended(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert all("400" in text for text in page.wrong)  # type: ignore[attr-defined]
    page.wrong.clear()  # type: ignore[attr-defined]


def status(server: Server, path: str, authorization: str) -> int:
    """Of a GET."""
    request = urllib.request.Request(server.url + path, headers={"Authorization": authorization})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as e:
        if path == "/" and e.code == 401:
            assert e.headers["WWW-Authenticate"].startswith("Basic ")
        return e.code


def test_a_password_opens_only_the_page(server: Server) -> None:
    basic = "Basic " + b64encode(f"me:{server.key}".encode()).decode()
    assert status(server, "/", basic) == status(server, "/", f"Bearer {server.key}") == 200
    wrong = b64encode(b"me:another-key").decode()
    for given in ("", f"Basic {wrong}", "Basic", "Basic !", f"Basic {server.key}", f"Digest {basic[6:]}"):
        assert status(server, "/", given) == 401
    for path in ("/v1/models", "/metrics", "//", "/?", "/%2f", "/index.html", "/openapi.json"):
        assert status(server, path, basic) == (200 if path == "/?" else 401)


def test_with_a_key(server: Server, opened: Open, truth: Truth) -> None:
    page = opened(server, "needs an API key", http_credentials={"username": "me", "password": server.key})
    expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").fill("sk-another-key")
    page.get_by_label("API key").press("Tab")
    expect(page.get_by_role("status")).to_have_text("the API key is not valid")
    assert page.wrong and all("401" in text for text in page.wrong)  # type: ignore[attr-defined]
    page.wrong.clear()  # type: ignore[attr-defined]
    page.get_by_label("API key").fill(server.key)
    page.get_by_label("API key").press("Tab")
    expect(page.get_by_role("status")).to_have_text("connected")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("40")
    say(page, CHAT[0]["content"])
    ended(page)
    assert answer(page).text_content() == truth(messages=CHAT, max_tokens=40)["text"]
    stored = "() => [localStorage.length, sessionStorage.length, document.cookie.length]"
    assert page.evaluate(stored) == [0, 0, 0]
    page.reload()
    expect(page.get_by_label("API key")).to_have_value("")


def test_both_themes(open_server: Server, opened: Open) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page = opened(open_server, color_scheme=scheme)
        of = "() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        colours.append([sum(map(int, re.findall(r"\d+", one)[:3])) for one in page.evaluate(of)])
    (light, on_light), (dark, on_dark) = colours
    assert light > 600 > 300 > on_light and dark < 200 < 500 < on_dark


def test_the_policy_forbids_what_the_page_does_not_need(open_server: Server, opened: Open) -> None:
    page = opened(open_server)
    tries = """() => Promise.all([
      (async () => { try { document.body.innerHTML = "<p>"; return "markup"; } catch { return ""; } })(),
      (async () => {
        try { document.createElement("script").textContent = "1"; return "script"; } catch { return ""; }
      })(),
      new Promise((tell) => {
        const image = document.body.appendChild(new Image());
        image.onload = () => tell("image");
        image.onerror = () => tell("");
        image.src = "https://example.invalid/image.png";
      }),
      fetch("https://example.invalid/").then(() => "fetch", () => ""),
    ])"""
    assert page.evaluate(tries) == ["", "", "", ""]
    assert page.wrong  # type: ignore[attr-defined]
    page.wrong.clear()  # type: ignore[attr-defined]
