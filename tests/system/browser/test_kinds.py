"""The playground of models that do not compare texts by a vector each, in a real browser, of real servers."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.multi_vector_checkpoints import save_bge_m3
from tests.support.score_checkpoints import save_classifier
from tests.support.serving import Server, running_server

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs playwright").expect

pytestmark = pytest.mark.timeout(300)


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60).raise_for_status().json()


def ask_in(page: Any, texts: list[str], query: str | None = None) -> list[str]:
    """The text of each item that is then shown."""
    page.fill("#texts", "\n".join(texts))
    if query is not None:
        page.fill("#query", query)
    page.press("#texts", "Control+Enter")
    expect(page.locator("#embed-state")).to_contain_text(f"Answered for {len(texts)} text")
    found: list[str] = page.locator("#found > li").all_inner_texts()
    return found


def wait_for_card(page: Any) -> None:
    expect(page.locator("#model-cards")).to_be_visible()


def test_a_reranker_sorts_documents_and_its_errors_are_shown(tmp_path: Path, open_page: Any) -> None:
    save_classifier(tmp_path, activation_fn="torch.nn.modules.activation.Sigmoid")
    documents = ["w4 w5", "w9 w10 w11", "w30"]
    with running_server(str(tmp_path), "--workers", "1", "--max-inputs", "4") as server:
        body = {"query": "w7", "documents": documents, "raw_scores": True}
        expected = post(server, "/rerank", body)["results"]
        labels = post(server, "/predict", {"inputs": [[text] for text in documents]})
        with open_page(server.url, expected=("413", "400", "422")) as page:
            wait_for_card(page)
            assert page.locator("#mode option").all_inner_texts() == ["Rank documents", "Classify texts"]
            page.fill("#texts", documents[0])
            page.press("#texts", "Control+Enter")
            expect(page.locator("#embed-state")).to_have_text("There is no query yet.")
            shown = ask_in(page, documents, "w7")
            assert all(text.startswith(str(each["index"] + 1)) for text, each in zip(shown, expected, strict=True))
            for text, each in zip(shown, expected, strict=True):
                assert f"(raw {each['relevance_score']:.4f})" in text
                assert documents[each["index"]] in text
            assert json.dumps(documents[0]) in page.inner_text("#snippet")
            assert "/rerank" in page.inner_text("#snippet")
            page.select_option("#mode", "classify")
            expect(page.locator("#query")).to_have_value("")  # a query is no second text
            for text, [label] in zip(ask_in(page, documents), labels, strict=True):
                assert f"{label['score']:.4f}" in text
            ask_in(page, documents, "w8")
            page.select_option("#mode", "rank")
            expect(page.locator("#query")).to_have_value("w7")
            assert ask_in(page, documents) == shown
            page.select_option("#mode", "classify")
            expect(page.locator("#query")).to_have_value("w8")
            assert '"w8"' in page.inner_text("#snippet")
            page.fill("#texts", "w4\n" * 9)
            page.press("#texts", "Control+Enter")
            expect(page.locator("#embed-error")).to_contain_text("--max-inputs")


def test_entities_are_marked_where_they_are(tmp_path: Path, open_page: Any) -> None:
    save_classifier(tmp_path, labels=["O", "B-PER", "I-PER", "B-LOC", "I-LOC"], is_of_tokens=True)
    texts = ["w5 \U0001f600 w9 w40 <b>w6</b>", "w90 w7"]
    with running_server(str(tmp_path), "--workers", "1") as server:
        expected = post(server, "/predict", {"inputs": texts})
        assert any(expected), "the model marks nothing"
        with open_page(server.url) as page:
            wait_for_card(page)
            ask_in(page, texts)
            marked = page.locator("#found mark").evaluate_all("(all) => all.map((one) => one.firstChild.textContent)")
            assert marked == [text[each["start"] : each["end"]] for text, own in zip(texts, expected, strict=True)
                              for each in own]  # fmt: skip
            groups = page.locator("#found mark small").all_inner_texts()
            assert groups == [each["entity_group"] for own in expected for each in own]


def test_bge_m3_shows_its_three_outputs_and_ranks(tmp_path: Path, open_page: Any) -> None:
    save_bge_m3(tmp_path)
    texts = ["the cat sat", "moon"]
    with running_server(str(tmp_path), "--workers", "1") as server:
        body = {"input": texts, "output": ["dense", "sparse", "multi-vector"], "return_tokens": True}
        expected = post(server, "/v1/embeddings", body)["data"]
        ranked = post(server, "/rerank", {"query": "cat", "documents": texts})["results"]
        with open_page(server.url) as page:
            wait_for_card(page)
            page.evaluate("document.querySelector('#dimensions').value = 8")  # as for a model that had the field
            page.fill("#texts", texts[0])
            assert texts[0] in page.inner_text("#snippet")
            assert "dimensions" not in page.inner_text("#snippet")
            page.select_option("#mode", "vectors")
            for text, each in zip(ask_in(page, texts), expected, strict=True):
                assert f"{len(each['embedding'])} dimensions" in text
                assert f"{len(each['embeddings'])} vectors of 32 dimensions" in text
                weights = each["sparse"]
                assert f"{len(weights['indices'])} weight" in text
                for token, value in zip(weights["tokens"], weights["values"], strict=True):
                    assert f"{token}\n{value:.4f}" in text
            page.select_option("#mode", "rank")
            for text, each in zip(ask_in(page, texts, "cat"), ranked, strict=True):
                assert f"{each['relevance_score']:.4f}" in text


def test_one_of_several_models_is_picked_and_each_has_its_row(tmp_path: Path, open_page: Any) -> None:
    save_bge_m3(tmp_path / "a")
    save_classifier(tmp_path / "b", activation_fn="torch.nn.modules.activation.Sigmoid")
    documents = ["w4 w5", "w9 w10 w11"]
    models = f"first={tmp_path / 'a'}", f"org/second={tmp_path / 'b'}"
    with running_server("--workers", "1", *models) as server:
        body = {"model": "org/second", "query": "w7", "documents": documents, "raw_scores": True}
        expected = post(server, "/rerank", body)["results"]
        with open_page(server.url) as page:
            wait_for_card(page)
            assert page.locator("#picked option").all_inner_texts() == ["first", "org/second"]
            expect(page.locator("#models tbody tr")).to_have_count(2)
            expect(page.locator("#models tbody tr").nth(1)).to_contain_text("org/second")
            expect(page.locator("#models .badge").first).to_have_text("ready")
            expect(page.locator("#state")).to_have_text("Serving, 2 of 2 models loaded")
            assert "/m/first/v1/embeddings" in page.inner_text("#snippet")
            page.select_option("#picked", "org/second")
            expect(page.locator("#model-name")).to_have_text("org/second")
            expect(page.locator("#mode option")).to_have_text(["Rank documents", "Classify texts"])
            for text, each in zip(ask_in(page, documents, "w7"), expected, strict=True):
                assert f"(raw {each['relevance_score']:.4f})" in text
            assert "/m/org/second/rerank" in page.inner_text("#snippet")
            page.select_option("#mode", "classify")  # whose body names no model
            ask_in(page, documents)


def test_who_may_not_see_the_figures_picks_among_the_models_own_names(tmp_path: Path, open_page: Any) -> None:
    save_bge_m3(tmp_path)
    models = f"a={tmp_path}", f"b={tmp_path}"
    hidden = "404"  # /stats is on the admin listener
    with (
        running_server("--workers", "1", "--admin-port", "0", *models) as server,
        open_page(server.url, expected=(hidden,)) as page,
    ):
        wait_for_card(page)
        assert page.locator("#picked option").all_inner_texts() == ["a", "b"]
        expect(page.locator("#dimensions-field")).to_be_hidden()  # the models have one number of them
        page.select_option("#picked", "b")
        expect(page.locator("#model-name")).to_have_text("b")
        page.select_option("#mode", "rank")
        assert len(ask_in(page, ["one", "two"], "cat")) == 2
