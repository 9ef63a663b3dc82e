"""The status page in a real browser: it renders, updates, and survives what it shows."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import feeder
from browser import Browser, browsing, find_browser
from feeder.observe.status.port import StatusPort
from figures import feed, figures, queue, worker
from small import WAIT_S, Pure, make

pytestmark = [pytest.mark.process, pytest.mark.needs("bash")]
HOSTILE = '<img src=x onerror="window.hacked=1">&amp;'
PHONE: dict[str, Any] = {"width": 390, "height": 844, "phone": True}
SMALL_PHONE: dict[str, Any] = {"width": 320, "height": 600, "phone": True}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_browser() is None:
        pytest.skip("missing tool or package: chromium")
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def leaves_no_page(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("feeder.observe.status.board.SAMPLE_S", 0.1)
    yield
    browser.close_page()


def slow_trainer(feed: Any, over: threading.Event) -> threading.Thread:
    def run() -> None:
        for _ in feed:
            if over.wait(0.02):
                return

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_it_renders_and_updates(browser: Browser) -> None:
    over = threading.Event()
    coordinator = make(Pure(100_000, 4), names=["x"], input_source_name="train")
    make(Pure(5, 4), coordinator=coordinator, input_source_name=HOSTILE)
    with coordinator, coordinator.serve_status() as port:
        trainer = slow_trainer(coordinator["train"], over)
        try:
            browser.open(port.url)
            browser.wait_for("document.querySelectorAll('.feed').length === 2")
            browser.wait_for("document.getElementById('link').dataset.state === 'live'")
            assert browser.text('[data-feed="train"] h2') == "train"
            assert browser.text('[data-feed="train"] .pill') == "running"
            browser.wait_for(
                "document.querySelector('[data-feed=train] [data-is=kind]').textContent"
                " === 'trainer-bound'"
            )
            assert "the feed keeps up" in browser.text("[data-feed=train] .verdict")
            assert "trainer-bound" in browser.run("document.title")
            before = int(browser.text("[data-feed=train] [data-is=handed]"))
            browser.wait_for(
                "Number(document.querySelector('[data-feed=train] [data-is=handed]').textContent)"
                f" > {before + 5}"
            )
            line = "document.querySelector('[data-feed=train] .flow .line').getAttribute('d')"
            browser.wait_for(f"{line}.split('L').length > 5")
            rows = browser.run(
                "[...document.querySelectorAll('[data-feed=train] tbody tr')].map(r => r.innerText)"
            )
            assert len(rows) == 1 + 2, "a queue and two workers"
            assert "in process" in rows[0]
        finally:
            over.set()
            trainer.join(WAIT_S)
    assert [told for told in browser.complaints() if "stats.json" not in told] == []
    assert {address.removeprefix(port.url) for address in browser.asked()} <= {
        "", "page.css", "page.js", "icon.svg", "stats.json"
    }  # fmt: skip


def test_names_and_errors_are_text(browser: Browser) -> None:
    failed = feed(name=HOSTILE, state="failed", failure=f"FetchError: {HOSTILE}",
                  queues=(queue(device=HOSTILE),), workers=(worker(),))  # fmt: skip
    with StatusPort(0, lambda: figures(failed)) as port:
        browser.open(port.url)
        browser.wait_for("document.querySelector('.feed h2')")
        assert browser.text(".feed h2") == HOSTILE
        browser.wait_for("document.querySelector('[data-is=kind]').textContent === 'failed'")
        assert HOSTILE in browser.text(".verdict")
        assert browser.run("document.querySelectorAll('main img').length") == 0
        assert browser.run("typeof window.hacked") == "undefined"
        assert browser.complaints() == []


def test_it_survives_the_servers_restart(browser: Browser) -> None:
    def factory() -> feeder.Coordinator:
        return make(Pure(100_000, 4), coordinator=feeder.Coordinator())

    def serving(status: Any) -> feeder.Server:
        return feeder.serve(factory, "tcp://127.0.0.1:0", status=status)

    with serving(0) as server:
        assert server.status_url is not None
        url = server.status_url
        with feeder.connect(server.addresses[0]) as consumer:
            for _ in range(20):
                next(consumer)
            browser.open(url)
            browser.wait_for("document.querySelector('[data-is=handed]').textContent === '20'")
    del server, consumer
    browser.wait_for("document.getElementById('link').dataset.state === 'lost'")
    assert "trying again" in browser.text("#link")
    assert browser.run("document.body.classList.contains('stale')")
    assert browser.text("[data-is=handed]") == "20", "what was known stays"
    with serving(url.removeprefix("http://").rstrip("/")):
        browser.wait_for("document.getElementById('link').dataset.state === 'live'")
        browser.wait_for("document.querySelector('[data-is=handed]').textContent === '0'")
        browser.wait_for("document.querySelector('.pill').textContent === 'waiting'")
    thrown = [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"]
    assert thrown == []


def test_nothing_is_wider_than_the_screen(browser: Browser) -> None:
    workers = tuple(worker(i, calls=10**i, fetch_s=10.0**i) for i in range(8))
    long = feed(name="a_long_name_" * 8, failure="x" * 400, state="failed", workers=workers,
                queues=tuple(queue(i, batches=10**i, waiting=i) for i in range(4)))  # fmt: skip
    desktop: dict[str, Any] = {}
    with StatusPort(0, lambda: figures(long)) as port:
        for size in (desktop, PHONE, SMALL_PHONE):
            browser.open(port.url, **size)
            browser.wait_for("document.querySelectorAll('tbody tr').length === 12")
            wide = browser.run("document.documentElement.scrollWidth - window.innerWidth")
            assert wide <= 0, size
            # What can be read is no smaller than 11 pixels.
            smallest = browser.run(
                "Math.min(...[...document.querySelectorAll('main *')].filter(e => e.innerText)"
                ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
            )
            assert smallest >= 11, size
            roomy = browser.run("getComputedStyle(document.querySelector('.roomy')).display")
            assert (roomy == "none") is bool(size)


def test_it_draws_a_feed_that_has_done_nothing(browser: Browser) -> None:
    with StatusPort(0, lambda: figures(feed(queues=(), workers=(), age_s=0.0))) as port:
        browser.open(port.url)
        browser.wait_for("document.querySelector('.feed h2')")
        browser.wait_for("document.getElementById('link').dataset.state === 'live'")
        assert "NaN" not in browser.text("main")
        assert "Infinity" not in browser.text("main")
        assert browser.complaints() == []


def test_a_feed_that_is_gone_is_taken_off(browser: Browser) -> None:
    shown = [feed(name="one"), feed(name="two")]
    with StatusPort(0, lambda: figures(*shown)) as port:
        browser.open(port.url)
        browser.wait_for("document.querySelectorAll('.feed').length === 2")
        shown.pop()
        browser.wait_for("document.querySelectorAll('.feed').length === 1")
        assert browser.text("main h2") == "one"


def test_it_shows_how_far_the_epoch_is_and_when_it_ends(browser: Browser) -> None:
    over = threading.Event()
    source = feeder.sources.arrays(np.arange(4000))
    coordinator = make(source, ["x"], epochs=3)
    told = "document.querySelector('[data-feed=train] [data-is=%s]').textContent"
    with coordinator, coordinator.serve_status() as port:
        trainer = slow_trainer(coordinator["train"], over)
        try:
            browser.open(port.url)
            browser.wait_for("document.querySelectorAll('.feed').length === 1")
            browser.wait_for(f"{told % 'eta'}.startsWith('ends in about ')")
            assert browser.run(told % "epoch") == "1 of 3"
            assert browser.run(told % "progress").endswith(" %")
            assert re.fullmatch(r"[\d.]+ (µs|ms|s)", browser.run(told % "p99"))
        finally:
            over.set()
            trainer.join(WAIT_S)
