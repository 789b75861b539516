"""The documentation as a site: it builds strictly, and its search works from file://."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import package

ROOT = Path(__file__).parents[1]
ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//")
package("material")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, in a folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_the_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert [str(page) for page in pages if ELSEWHERE.search(page.read_text())] == []


@pytest.mark.slow
def test_the_search_works_from_files(site, browser):
    page = browser.new_page()
    page.set_default_timeout(120_000)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").fill("cuda_graphs")
    page.locator(".md-search-result__link[href*='reference/keys.html']").first.click()
    page.wait_for_url("**/reference/keys.html*")
    assert "engine.cuda_graphs" in page.content()
    assert [url for url in asked if url.startswith("http")] == []
    page.close()
