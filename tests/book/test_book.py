"""The rendered book: every page there, whole, and readable without a network."""

import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from attnlib.runner import notebook_names, project_root

ROOT = project_root()
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
PAGES = [TOC["root"], *(c["file"] for part in TOC["parts"] for c in part["chapters"])]


class Page(HTMLParser):
    """What a page loads and links to, its ids, and its text."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.links, self.ids, self.images, self.words = [], [], set(), 0, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if attributes.get("id"):
            self.ids.add(attributes["id"])
        if tag in ("script", "img", "iframe", "source"):
            self.loads.append(attributes.get("src") or "")
        if tag == "link" and attributes.get("rel") in ("stylesheet", "preload", "icon"):
            self.loads.append(attributes.get("href") or "")
        if tag == "a":
            self.links.append(attributes.get("href") or "")
        self.images += tag == "img"

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def html(smoke):
    return ROOT / "build" / "book" / "smoke" / "_build" / "html"


@pytest.fixture(scope="module")
def pages(html):
    return {name: Page(html / f"{name}.html") for name in PAGES}


def test_the_book_names_every_notebook():
    assert [p for p in PAGES if p.startswith("notebooks/")] == [
        f"notebooks/{name}" for name in notebook_names()
    ]


def test_nothing_comes_from_a_network(pages, html):
    for name, page in pages.items():
        outside = [url for url in page.loads if urlsplit(url).netloc]
        assert not outside, (name, outside)
        for url in page.loads:
            path = unquote(urlsplit(url).path)
            if path and not url.startswith("data:"):
                assert (html / name).parent.joinpath(path).resolve().is_file(), (name, url)


def test_equations_have_their_renderer(pages, html):
    assert (html / "_static" / "mathjax" / "tex-chtml.js").is_file()
    assert list((html / "_static" / "mathjax").rglob("*.woff"))
    theory = pages["book/theory_pod"]
    assert any("mathjax" in url for url in theory.loads)


def test_links_inside_the_book_lead_somewhere(pages, html):
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (html / name).parent.joinpath(unquote(parts.path)).resolve()
            if not parts.path:
                assert parts.fragment in page.ids, (name, link)
            elif target.suffix == ".html":
                assert target.is_file(), (name, link)
                key = str(target.relative_to(html)).removesuffix(".html")
                if parts.fragment and key in pages:
                    assert parts.fragment in pages[key].ids, (name, link)


@pytest.mark.parametrize("name", [p for p in PAGES if p.startswith("notebooks/")])
def test_notebooks_show_pictures_and_findings_without_noise(pages, name):
    page = pages[name]
    words = "".join(page.words)
    assert page.images >= 1
    for wanted in (
        "Question.",
        "What the paper says",
        "What we found",
        "What would change our mind",
    ):
        # Three chapters test no claim, and the ledger only gathers what the others found.
        own = any(number in name for number in ("02_", "14_", "18_"))
        there = "20_" in name or (own and wanted == "What the paper says")
        assert wanted in words or there, wanted
    for noise in ("tok/s", "cell/s", "it/s]", "%|", "Traceback", "Warning:"):
        assert noise not in words, noise
    assert not re.search(r"\{(cite|eq|doc|func)", words)  # no role left unrendered


@pytest.mark.parametrize("name", [p for p in PAGES if p.startswith("book/theory")])
def test_theory_pages_have_equations_and_citations(html, name):
    text = (html / f"{name}.html").read_text()
    assert text.count('class="math notranslate') > 10
    assert "references.html#" in text


def test_every_public_name_is_documented(pages):
    import attnlib

    documented = pages["book/api"].ids
    public = {n for names in attnlib.ROOMS.values() for n in names}
    assert {f"attnlib.{n}" for n in public} <= documented


def test_every_cited_work_is_listed_and_the_other_way_round(pages):
    bib = (ROOT / "book" / "references.bib").read_text()
    keys = set(re.findall(r"^@\w+\{(\w+),", bib, re.MULTILINE))
    sources = [*(ROOT / "book").glob("*.md"), *(ROOT / "notebooks").glob("*.md")]
    cited = set()
    for path in sources:
        for group in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", path.read_text()):
            cited |= {key.strip() for key in group.split(",")}
    assert cited == keys


@pytest.mark.parametrize("name", [n for n in notebook_names() if n[:2] >= "04"])
def test_closing_tables_are_tables(html, name):
    text = (html / "notebooks" / f"{name}.html").read_text()
    assert "<p>verdict</p>" in text
    assert "|—|" not in text  # what a rule becomes in a paragraph
    assert "<p>|---|" not in text
