"""The site that `make docs` has built, in a real browser: nothing is too wide, code can be copied, the search
finds. questions.csv has what a reader types, and the page that answers."""

import csv
import functools
import http.server
import threading

import pytest

from tests.conftest import ROOT
from tests.site.browser import Browser, find_chromium

SITE = ROOT / "build" / "site"
FIRST = 5  # pages that a reader looks at
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
NOT_COPIED = """[...document.querySelectorAll('pre > code')]
    .filter(each => !each.parentNode.querySelector('button, nav')).length"""
SEARCH = """new Promise(done => {
  const input = document.querySelector('[data-md-component=search-query]');
  const meta = document.querySelector('.md-search-result__meta');
  const list = document.querySelector('.md-search-result__list');
  input.focus();
  input.value = %r;
  input.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
  const look = () => {
    const found = [...list.querySelectorAll('a')].map(each => new URL(each.href).pathname);
    if (found.length || meta.textContent.includes('No matching')) done([...new Set(found)]);
    else setTimeout(look, 20);
  };
  look();
})"""

pytestmark = [
    pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="the site is missing: `make docs`"),
    pytest.mark.skipif(not find_chromium(), reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def address():
    """Return the address of a server of the site."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(str(tmp_path_factory.mktemp("profile")))
    yield browser
    browser.close()


def pages():
    return sorted(
        path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if ".source." not in path.name
    )


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_screen(browser, address, width):
    too_wide = {}
    for page in pages():
        browser.open(f"{address}/{page}", width)
        if browser.run(TOO_WIDE) > 0:
            too_wide[page] = browser.run(TOO_WIDE)
    assert not too_wide


def test_code_can_be_copied(browser, address):
    browser.open(f"{address}/index.html", 1280)
    assert browser.run("document.querySelectorAll('pre > code').length") > 1
    assert browser.run(NOT_COPIED) == 0


def test_each_page_leads_to_its_other_language(browser, address):
    browser.open(f"{address}/guides/lint.html", 1280)
    assert browser.run("document.querySelector('a[hreflang=zh]').pathname") == "/guides/lint.zh-CN.html"
    browser.open(f"{address}/guides/lint.zh-CN.html", 1280)
    assert browser.run("document.documentElement.lang") == "zh"
    assert browser.run("document.querySelector('a[hreflang=en]').pathname") == "/guides/lint.html"


def test_the_search_finds_the_page_that_answers(browser, address):
    with open(ROOT / "tests" / "site" / "questions.csv", encoding="utf-8") as file:
        questions = list(csv.DictReader(file))
    assert len(questions) >= 30
    missed = {}
    for question in questions:
        browser.open(f"{address}/index.html", 1280)  # so that no answer of an earlier search is read
        found = browser.run(SEARCH % question["query"])
        expected = f"/{question['page']}.html".replace("README.html", "index.html")
        if expected not in found[:FIRST]:
            missed[question["query"]] = (expected, found[:FIRST])
    assert not missed
