"""The page at `/`, in a real browser, of a real server: figures that are the server's, vectors that are the API's."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.serving import Server, exact_server, running_server

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs playwright").expect

AXE = Path(__file__).parents[3] / "build" / "browser" / "node_modules" / "axe-core" / "axe.min.js"
DUMMY = ("--engine", "dummy", "--workers", "1")
NASTY = [
    "It's \"quoted\" with 'both', and a \\ at its end \\",
    "$HOME `id` $(id) !! %s {} ${x} <<EOF",
    "two lines\nin one text\n  EOF\nEOF",
    "Größe, 東京, \u202eright to left\u202c, a \u200bblank that nobody sees, 🦀🏳️‍🌈",
    "<img src=x onerror=\"alert('hacked')\"><script>alert(1)</script>",
    "tab\there, and \u2028 a separator",
    "</script><!-- ]]> ' OR 1=1; --",
]
"""Without an empty line, which would end a text."""
SIMILAR = [
    "The cat sleeps in the sun.",
    "A kitten is napping in the sunshine.",
    "Interest rates were raised.",
    "x " * 400,
]


@pytest.fixture(scope="module")
def server():
    """Exact, because its vectors are compared however they were batched."""
    with exact_server("--workers", "2") as running:
        yield running


def number_in(page, element: str) -> float:
    return float(page.inner_text(element).replace(",", ""))


def wait_for_figures(page) -> None:
    expect(page.locator("#figures")).to_be_visible()


def embed_in(page, texts: list[str]) -> None:
    page.check('input[name="split"][value="block"]', force=True)
    page.fill("#texts", "\n\n".join(texts))
    page.press("#texts", "Control+Enter")
    expect(page.locator("#embed-state")).to_contain_text(f"Embedded {len(texts)} text")


def cosines_of(vectors: list[list[float]]) -> np.ndarray:
    rows = np.array(vectors, dtype=np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows @ rows.T


def stats_of(server: Server) -> dict:
    return httpx.get(f"{server.url}/stats").raise_for_status().json()


def num_requests(stats: dict) -> int:
    """Of callers, as the page counts them: not its own, nor probes, nor what went nowhere."""
    return sum(entry["count"] for entry in stats["requests"] if entry["dialect"] not in ("vecd", "none"))


def put_load_on(server: Server, num: int) -> None:
    def post(n: int) -> int:
        texts = [f"text {i} of request {n}, " + "word " * (n % 40) for i in range(1 + n % 5)]
        body = {"input": texts if n % 10 else []}
        return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).status_code

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(post, range(num))) == {200, 400}


def quantile(counts: list[int], bounds: list[float], q: float) -> float:
    """As Prometheus' histogram_quantile has it."""
    rank, below, low = q * sum(counts), 0, 0.0
    for n, high in zip(counts, bounds, strict=False):
        if below + n >= rank:
            return low + (high - low) * (rank - below) / n
        below, low = below + n, high
    return bounds[-1]


def seconds_of(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"ms": 1e-3, "s": 1.0}[unit]


# --- live -------------------------------------------------------------------------------------------------------------


def test_figures_are_the_server_s_while_it_works(server, open_page):
    before = stats_of(server)
    with open_page(server.url) as page:
        wait_for_figures(page)
        page.check('input[name="window"][value="300"]', force=True)
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(put_load_on, server, 30)
            for worker in range(2):
                expect(page.locator(f"[data-worker='{worker}'] .batch .run").first).to_be_attached()
            load.result()
        after = stats_of(server)
        for name, expected in {
            "requests": num_requests(after),
            "inputs": after["totals"]["inputs"],
            "tokens": after["totals"]["tokens"],
        }.items():
            expect(page.locator(f"#{name}-total")).to_have_text(f"{int(expected):,}")
        assert number_in(page, "#requests-rate") > 0
        assert page.locator("#requests-spark path.line").get_attribute("d")
        widths = page.locator(".batch:not(.open) .run").evaluate_all(
            "(runs) => runs.map((run) => Number(run.getAttribute('width')))"
        )
        assert len(widths) >= 2
        assert all(0 < width < 60 for width in widths)
        # What was wrong with some of them, and how long the others took.
        assert re.search(r"400 wrong request\s+[\d.]+\s+3\b", page.inner_text("#errors"))
        shown = page.locator("#stages tbody tr").evaluate_all("(rows) => rows.map((row) => row.innerText.split('\\t'))")
        for name, *texts in shown:
            counts = np.subtract(after["stages"][name]["counts"], before["stages"][name]["counts"]).tolist()
            for text, q in zip(texts, (0.5, 0.9, 0.99), strict=False):
                expected = quantile(counts, after["stage_bounds_s"], q)
                assert math.isclose(seconds_of(text), expected, rel_tol=0.01, abs_tol=6e-6), (name, q)
        assert [row[0] for row in shown] == ["parse", "tokenize", "queue", "compute", "encode", "total"]
        assert page.inner_text("#state") == "Serving, 2 workers"
        card = page.inner_text("#agreement")
        agreement = server.info()["workers"][0]["agreement"]
        assert f"{agreement['max_abs_diff']:.1e}".replace("e-0", "e-") in card
        facts = page.locator("#card dt").all_inner_texts()
        assert {"kind", "dimensions", "pooling"} <= set(facts)
        assert "labels" not in facts, "the model has none"


CHANGED = "document.dispatchEvent(new Event('visibilitychange'))"


def test_a_page_that_nobody_sees_asks_nothing(server, open_page):
    with open_page(server.url) as page:
        page.clock.install()
        page.reload()
        wait_for_figures(page)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
        page.evaluate(CHANGED)
        page.clock.run_for(10_000)
        page.wait_for_load_state("networkidle")
        assert len(asked) <= 1, "one may have been on its way"
        with page.expect_request("**/stats"):
            page.evaluate("delete document.hidden")
            page.evaluate(CHANGED)


def test_a_restart_is_told_and_recovered_from(open_page):
    with running_server(*DUMMY) as first:
        port = first.port
        for _ in range(3):
            first.embed("text")
        with open_page(
            first.url, expected=("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET", "503")
        ) as page:
            expect(page.locator("#requests-total")).to_have_text("3")
            first.process.terminate()
            first.process.wait(30)
            expect(page.locator("#banner")).to_be_visible()
            assert "cannot be reached" in page.inner_text("#banner")
            assert page.inner_text("#state") == "Away"
            # The last flag counts, and the first port is asked for.
            with running_server(*DUMMY, command=("sh", "-c", f'exec "$@" --port {port}', "sh")) as second:
                assert second.port == port
                expect(page.locator("#banner")).to_be_hidden()
                second.embed("text")
                expect(page.locator("#requests-total")).to_have_text("1")
                assert page.inner_text("#state") == "Serving, 1 worker"


def order_of(page) -> list[str]:
    return page.locator("main > section").evaluate_all("(parts) => parts.map((part) => part.id)")


def test_the_playground_comes_first_where_nothing_is_computed_and_the_figures_where_something_is(open_page):
    with running_server(*DUMMY) as idle, open_page(idle.url) as page:
        wait_for_figures(page)
        assert order_of(page) == ["playground", "live", "model"]
        idle.embed("text")
        expect(page.locator("#latency-p99")).to_contain_text("s")
        assert re.fullmatch(r"p50 [\d.]+ m?s · p99 [\d.]+ m?s", page.inner_text(".figure:has(#latency-p50)"))
        assert order_of(page) == ["playground", "live", "model"], "nothing moves while it is read"
        idle.embed("text")
        page.reload()
        wait_for_figures(page)
        assert order_of(page) == ["live", "playground", "model"]
        assert page.locator("nav a").all_inner_texts() == ["Live", "Playground", "Model", "API"]
        # All that the selector changes follows it, and nothing else up to the next heading.
        assert (
            page.locator("#window")
            .evaluate("(choice) => choice.closest('.part').innerText")
            .startswith("LATENCIES, BATCHES, ERRORS AND ROUTES OVER THE LAST")
        )
        panels = page.locator("#figures > *:visible").all_inner_texts()
        titles = [text.partition("\n")[0] for text in panels]
        assert titles[6:10] == ["WHERE TIME GOES", "BATCHES", "ERRORS", "ROUTES"]
        assert titles[10] == "NOW"


# --- the playground ---------------------------------------------------------------------------------------------------


def test_the_playground_shows_what_the_api_answers(server, open_page):
    texts = [*NASTY, *SIMILAR]
    expected = cosines_of(server.embed(texts))
    with open_page(server.url, expected=("400",)) as page:
        wait_for_figures(page)
        embed_in(page, texts)
        shown = page.locator("#heat td[data-row]").evaluate_all(
            "(cells) => cells.map((cell) => Number(cell.dataset.value))"
        )
        assert np.abs(np.array(shown).reshape(expected.shape) - expected).max() < 1e-5
        labels = page.locator("#heat td[data-row]").evaluate_all("(cells) => cells.map((cell) => cell.ariaLabel)")
        assert labels[1] == f"texts 1 and 2: {expected[0, 1]:.2f}"

        others = expected - 2 * np.eye(len(texts))
        pair = sorted(int(i) for i in np.unravel_index(others.argmax(), others.shape))
        nearest = page.locator("#pairs li").first
        assert [int(nearest.get_attribute(f"data-{side}") or "") for side in "ab"] == pair
        assert pair == [len(NASTY), len(NASTY) + 1]

        tokens = [int(row.get_attribute("data-tokens") or "") for row in page.locator("#inputs tbody tr").all()]
        in_full = [len(ids) for ids in httpx.post(f"{server.url}/tokenize", json={"inputs": texts}).json()]
        assert tokens[:-1] == in_full[:-1]
        assert tokens[-1] < in_full[-1]
        assert "cut" in page.locator("#inputs tbody tr").last.inner_text()
        assert f"{sum(tokens)} tokens in all" in page.inner_text("#usage")
        stages = page.locator("#timing i").evaluate_all("(parts) => parts.map((part) => part.dataset.stage)")
        assert stages == ["parse", "tokenize", "queue", "compute", "encode", "outside"]
        ends = page.locator("#timing, #timing i").evaluate_all(
            "(all) => all.map((one) => one.getBoundingClientRect().right)"
        )
        assert math.isclose(ends[0], ends[-1], abs_tol=1), "the parts fill the bar"
        assert page.locator("#results img").count() == 0

        page.select_option("#overflow", "error")
        page.press("#texts", "Control+Enter")
        expect(page.locator("#embed-error")).to_be_visible()
        assert "256" in page.inner_text("#embed-error")
        assert "Request: req_" in page.inner_text("#embed-error")


def test_code_that_was_copied_runs_and_gives_the_same_vectors(server, open_page):
    texts = [*NASTY, SIMILAR[0]]
    with open_page(server.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        wait_for_figures(page)
        embed_in(page, texts)
        copied = {}
        for language in ("curl", "python", "js"):
            page.check(f'input[name="language"][value="{language}"]', force=True)
            page.click("#copy")
            expect(page.locator("#copy-state")).to_contain_text("Copied")
            copied[language] = page.evaluate("navigator.clipboard.readText()")
        page.check('input[name="language"][value="curl"]', force=True)
        page.fill("#texts", "it's long " * 15_000)
        page.click("#copy")
        expect(page.locator("#copy-state")).to_contain_text("Copied")
        large = page.evaluate("navigator.clipboard.readText()")
    expected = np.array(server.embed(texts))

    def check(answered: str) -> None:
        assert np.abs(np.array(json.loads(answered)) - expected).max() < 1e-5

    def run(*command: str, given: str) -> str:
        return subprocess.run(command, input=given, text=True, capture_output=True, check=True, timeout=60).stdout

    def vectors_in(answered: str) -> str:
        return json.dumps([item["embedding"] for item in json.loads(answered)["data"]])

    check(vectors_in(run("bash", "-s", given=copied["curl"])))
    assert len(json.loads(vectors_in(run("bash", "-s", given=large)))) == 1
    printing = "\nprint('VECTORS', __import__('json').dumps([item.embedding for item in answer.data]))"
    check(run(sys.executable, "-", given=copied["python"] + printing).partition("VECTORS")[2])
    if shutil.which("node"):
        printing = "\nconsole.log('VECTORS', JSON.stringify(data.map((item) => item.embedding)));"
        check(run("node", "--input-type=module", "-", given=copied["js"] + printing).partition("VECTORS")[2])


def test_everything_can_be_done_with_the_keyboard(server, open_page):
    def tab_to(page, selector: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"no way to {selector}")

    with open_page(server.url) as page:
        wait_for_figures(page)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the playground"
        tab_to(page, "#texts")
        page.keyboard.type("first text\nsecond text")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#embed-state")).to_contain_text("Embedded 2 texts")
        tab_to(page, "#heat td")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.ariaLabel").startswith("texts 1 and 2: ")
        assert "second text" in page.inner_text("#pair")


# --- looks ------------------------------------------------------------------------------------------------------------


def test_themes_a_phone_and_who_does_not_see(server, open_page):
    texts = [f"text {n} " + "averyveryverylongword" * (n % 4) for n in range(60)]
    papers = set()
    for scheme in ("light", "dark"):
        with open_page(server.url, color_scheme=scheme, viewport={"width": 360, "height": 740}) as page:
            wait_for_figures(page)
            embed_in(page, texts)
            assert "first 50" in page.inner_text("#heat-note")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            for name in ("API", "Playground"):
                assert page.get_by_role("link", name=name, exact=True).is_visible()
            assert page.get_by_role("textbox", name="Texts").is_visible()
            assert page.get_by_role("grid", name="Similarity").is_visible()
            if AXE.exists():
                embed_in(page, texts[:6])
                assert_is_accessible(page)
            other = "dark" if scheme == "light" else "light"
            while page.inner_text("#theme") != f"Theme: {other}":
                page.click("#theme")
            papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            page.reload()
            assert page.inner_text("#theme") == f"Theme: {other}"
    assert len(papers) == 2


def assert_is_accessible(page) -> None:
    """By the rules of WCAG 2 A and AA that axe can tell."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice'] })")
    assert not [(v["id"], [node["html"][:120] for node in v["nodes"]][:3]) for v in found["violations"]]


@pytest.mark.skipif(not AXE.exists(), reason="make test-browser installs axe-core")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_pages_are_accessible_before_and_after_a_key(scheme, width, tmp_path, open_page):
    keys = write_keys(tmp_path / "keys.toml")
    look = {"color_scheme": scheme, "viewport": {"width": width, "height": 844}}
    with running_server(*DUMMY, "--keys-file", str(tmp_path / "keys.toml")) as server:
        for path, waits, shows in (("/", "#key-form", "#figures"), ("/docs", "#keys", "summary")):
            with open_page(server.url + path, expected=("401",), **look) as page:
                expect(page.locator(waits)).to_be_visible()
                assert_is_accessible(page)
                page.fill("#key", "wrong-key-0123456789")
                page.keyboard.press("Enter")
                expect(page.locator("body")).to_contain_text("does not know")
                assert_is_accessible(page)
                page.fill("#key", keys["watcher"])
                page.keyboard.press("Enter")
                expect(page.locator(shows).first).to_be_visible()
                if path == "/docs":
                    page.locator("summary", has_text="/v1/embeddings").first.click()
                    page.locator("details[open] button").first.click()
                    expect(page.get_by_label("Response").first).to_contain_text("200")
                assert_is_accessible(page)
                assert_nothing_overflows(page)


# --- keys, and the admin listener -------------------------------------------------------------------------------------


def write_keys(path: Path) -> dict[str, str]:
    keys = {name: f"{name}-key-0123456789abcdef" for name in ("embedder", "watcher")}
    scopes = {"embedder": '"embed"', "watcher": '"embed", "metrics"'}
    entries = [f'[[keys]]\nname = "{name}"\nkey = "{key}"\nscopes = [{scopes[name]}]\n' for name, key in keys.items()]
    path.write_text("\n".join(entries))
    path.chmod(0o600)
    return keys


def test_keys_are_asked_for_kept_in_the_tab_and_never_shown(tmp_path, open_page):
    keys = write_keys(tmp_path / "keys.toml")
    with (
        running_server(*DUMMY, "--matryoshka", "--keys-file", str(tmp_path / "keys.toml")) as server,
        open_page(server.url, expected=("401", "403")) as page,
    ):
        expect(page.locator("#key-form")).to_be_visible()
        expect(page.locator("#snippet")).to_contain_text('-H "authorization: Bearer $VECD_API_KEY"')
        expect(page.locator("#snippet")).to_contain_text('"model": "your-model"')
        page.fill("#key", "wrong-key-0123456789")
        page.keyboard.press("Enter")
        expect(page.locator("#key-state")).to_contain_text("does not know")
        page.fill("#key", keys["embedder"])
        page.keyboard.press("Enter")
        expect(page.locator("#live-note")).to_contain_text("metrics")
        assert not page.is_visible("#figures")
        expect(page.locator("#prompt")).to_be_visible()  # whether there are any, this key may not know
        page.fill("#dimensions", "64")
        embed_in(page, ["one", "two"])
        assert "vectors of 64 dimensions" in page.inner_text("#usage")
        assert '"dimensions": 64' in page.inner_text("#snippet")
        shown = page.content() + page.url + page.inner_text("#snippet")
        assert keys["embedder"] not in shown
        assert "$VECD_API_KEY" in page.inner_text("#snippet")
        assert page.evaluate("Object.values(sessionStorage)") == [keys["embedder"]]
        assert page.evaluate("localStorage.length") == 0

        page.click("#key-change")
        page.click("#key-forget")
        expect(page.locator("#key-state")).to_contain_text("asks for an API key")
        assert page.evaluate("sessionStorage.length") == 0
        page.fill("#key", keys["watcher"])
        page.keyboard.press("Enter")
        wait_for_figures(page)
        expect(page.locator("#prompt")).to_be_hidden()
        page.reload()
        wait_for_figures(page)


def test_beside_an_admin_listener_each_page_says_where_the_other_half_is(open_page):
    with running_server(*DUMMY, "--admin-port", "0") as server:
        found = re.search(r"admin +(http:\S+)", server.stderr)
        assert found is not None
        with open_page(server.url, expected=("404",)) as page:
            expect(page.locator("#live-note")).to_contain_text("admin listener")
            embed_in(page, ["one", "two"])
        with open_page(found[1], expected=("403",)) as page:  # what may not be asked, it asks once
            wait_for_figures(page)
            expect(page.locator("#playground-note")).to_contain_text("admin listener")
            assert page.is_disabled("#embed")


# --- the API's page, and pictures -------------------------------------------------------------------------------------


def test_the_api_s_page_lists_each_operation_once_with_all_its_paths(server, open_page):
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    with open_page(f"{server.url}/docs") as page:
        page.wait_for_selector("summary")
        listed = page.locator("summary .path").all_inner_texts()
        aliases = page.locator(".alias").evaluate_all("(all) => all.map((one) => one.textContent)")
        assert {"/v1/embeddings", "/embed", "/api/embed", "/stats"} <= set(listed)
        assert {"/embeddings", "/openai/v1/embeddings", "/models"} <= set(aliases)
        assert {*listed, *aliases} == set(paths)
        assert page.locator("summary:has-text('/openai/')").count() == 0


@pytest.mark.parametrize("path", ["/docs/", "/docs"])
def test_the_api_s_page_looks_like_the_other_and_leads_back(path, server, open_page):
    colour = "getComputedStyle(document.body).backgroundColor"
    with open_page(server.url, viewport={"width": 390, "height": 844}) as page:
        page.click("#theme")
        page.click("#theme")
        dark = page.evaluate(colour)
        page.goto(f"{server.url}{path}")
        page.wait_for_selector("summary")
        assert page.evaluate(colour) == dark
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert_nothing_overflows(page)
        page.click("#back")
        wait_for_figures(page)
        assert_nothing_overflows(page)


def assert_nothing_overflows(page) -> None:
    """But what can be scrolled within."""
    outside = page.evaluate(
        """() => [...document.querySelectorAll('body *')].filter((element) => {
            const box = element.getBoundingClientRect();
            return box.width > 1 && box.right > innerWidth + 0.5 && !element.closest('.scroll, pre, .skip, svg');
        }).map((element) => element.outerHTML.slice(0, 120))"""
    )
    assert outside == []


def test_the_api_s_page_asks_for_a_key(tmp_path, open_page):
    keys = write_keys(tmp_path / "keys.toml")
    with (
        running_server(*DUMMY, "--keys-file", str(tmp_path / "keys.toml")) as server,
        open_page(f"{server.url}/docs", expected=("401",), permissions=["clipboard-read", "clipboard-write"]) as page,
    ):
        expect(page.locator("#about")).to_contain_text("asks for an API key")
        page.fill("#key", "wrong-key-0123456789")
        page.keyboard.press("Enter")
        expect(page.locator("#about")).to_contain_text("does not know")
        page.fill("#key", keys["embedder"])
        page.keyboard.press("Enter")
        page.click("summary:has-text('/v1/embeddings')")
        page.click("details[open] button:has-text('curl')")
        copied = page.evaluate("navigator.clipboard.readText()")
    assert keys["embedder"] not in copied
    assert ' -H "authorization: Bearer $VECD_API_KEY"' in copied, "in quotes within which a shell puts the key"


def test_the_api_s_page_of_several_models_tries_the_chosen_one(open_page, minilm_folder):
    models = [f"{name}={minilm_folder}" for name in ("first", "second")]
    with running_server(*DUMMY, *models) as server, open_page(f"{server.url}/docs") as page:
        page.wait_for_selector("summary")
        page.select_option("#model", "second")
        page.click("summary:has-text('/v1/embeddings')")
        page.click("details[open] button:has-text('Send')")
        expect(page.locator("details[open] pre")).to_contain_text("x-vecd-model: second")
        page.goto(f"{server.url}/m/first/docs")
        page.wait_for_selector("summary")
        assert page.is_hidden("#models")


@pytest.mark.skipif(not os.environ.get("PAGE_SCREENSHOTS"), reason="PAGE_SCREENSHOTS=1 draws docs/images/page-*.png")
@pytest.mark.timeout(600)
def test_screenshots(server, open_page):
    """Under load: the figures in the light theme and on a phone, the playground in the dark one."""
    folder = Path(__file__).parents[3] / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"light": (1280, 1130), "dark": (1280, 1240), "phone": (360, 1150)}
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(load_until, is_over, server)
        try:
            for name, (width, height) in sizes.items():
                scheme = "dark" if name == "dark" else "light"
                with open_page(server.url, color_scheme=scheme, viewport={"width": width, "height": height}) as page:
                    wait_for_figures(page)
                    if name == "dark":
                        page.click("#samples")
                        page.press("#texts", "Control+Enter")
                        expect(page.locator("#embed-state")).to_contain_text("Embedded")
                        page.locator("#heat td[data-row]").nth(1).hover()
                        page.locator("#playground").evaluate("(part) => part.scrollIntoView({ behavior: 'instant' })")
                    page.wait_for_timeout(
                        30_000 if name == "light" else 12_000
                    )  # for a history, and lanes that are full
                    page.screenshot(path=folder / f"page-{name}.png")
        finally:
            is_over.set()


def load_until(is_over: threading.Event, server: Server) -> None:
    for _ in range(1000):
        if is_over.is_set():
            return
        put_load_on(server, 10)
