"""A real browser on a real board."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aligner.board.runs import Board
from aligner.board.tabs import PAGES


@pytest.fixture
def look(browser, serve, tmp_path):
    """look(url, width=..., scheme=...): a page of the browser, which may not complain of anything. A screenshot of each
    as it was at last is kept in the test's folder."""
    pages, messages = [], []

    def opened(url: str, width: int = 1280, scheme: str = "light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(300_000)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
        pages.append(page)
        page.goto(url)
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield opened
    for number, page in enumerate(pages):
        page.screenshot(path=tmp_path / f"screenshot-{number}.png", full_page=True)
        page.close()
    assert messages == []


@pytest.fixture
def serve():
    """serve(folder): the address of a board of it."""
    from aligner.board.server import make_app
    from aligner.environments.endpoint import Listener, loopback

    opened = []

    def start(folder) -> str:
        address = loopback(0)
        listener = Listener(make_app(Board([folder]), PAGES, "token"))
        thread = threading.Thread(target=lambda: asyncio.run(listener.serve(sockets=[address])))
        thread.start()
        opened.append((listener, thread))
        return f"http://127.0.0.1:{address.getsockname()[1]}/token/"

    yield start
    for listener, thread in opened:
        listener.should_exit = True
        thread.join()
