"""A browser: Debian's Chromium, or whichever is installed, driven by Playwright's Python package, which brings none of
its own here.

Owns the browser and its pages' ends. A page that has asked another host for anything, or written an error that no test
expected to its console, fails its test.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import pytest

DEADLINE_MS = 20_000
"""For everything that a test waits for in a page."""
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_FLAGS = (
    # In a container there is no sandbox to be had; the pages are ours.
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

# Of a package that need not be there.
Browser: TypeAlias = Any
Page: TypeAlias = Any
OpenPage: TypeAlias = Callable[..., AbstractContextManager[Page]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for each file of tests; every page has a profile of its own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="make test-browser installs playwright")
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed")
    sync_api.expect.set_options(timeout=DEADLINE_MS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_page(browser: Browser) -> OpenPage:
    @contextmanager
    def opened(url: str, *, expected: tuple[str, ...] = (), **options: Any) -> Iterator[Page]:
        """A page that is shown, in a profile of its own. `expected`: words, one of which every error in its console
        must have; `options`: of the profile."""
        origin = "/".join(url.split("/")[:3])
        context = browser.new_context(base_url=origin, **options)
        context.set_default_timeout(DEADLINE_MS)
        problems: list[str] = []
        page = context.new_page()
        page.on("request", lambda request: problems.extend(_other_hosts(request.url, origin)))
        page.on("console", lambda line: problems.extend([line.text] * (line.type in ("error", "warning"))))
        page.on("pageerror", lambda error: problems.append(f"uncaught: {error}"))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        try:
            page.goto(url)
            yield page
        finally:
            context.close()
        unexpected = [problem for problem in problems if not any(word in problem for word in expected)]
        assert not unexpected, unexpected

    return opened


def _other_hosts(url: str, origin: str) -> list[str]:
    return [] if url.startswith((f"{origin}/", "data:")) else [f"asked another host: {url}"]
