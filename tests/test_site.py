"""The built site in a real browser: nothing sticks out, everything can be read, and the search finds the pages."""

import functools
import http.server
import threading
from urllib.parse import urlsplit

import pytest

from legible import CHROMIUM

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser to try the site in")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.xdist_group("browser"),  # one browser, one process
]
PHONE, WIDE = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(site):
    """The site on a port of this machine: its search is a worker, which a browser does not start from a file."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# What sticks out of the page to the right; tables, code and formulas may scroll in a box of their own.
STICKS_OUT = """() => {
    const width = document.documentElement.clientWidth
    const scrolls = element => {
        for (let box = element; box && box !== document.body; box = box.parentElement)
            if (/auto|scroll/.test(getComputedStyle(box).overflowX) && box.getBoundingClientRect().right <= width + 1)
                return true
        return false
    }
    const out = [...document.querySelectorAll("article, article *")].filter(
        element => element.getBoundingClientRect().right > width + 1 && !scrolls(element))
    const all = document.documentElement.scrollWidth > width ? ["the page"] : []
    return all.concat(out.slice(0, 3).map(element => element.tagName + ": " + element.innerText?.slice(0, 60)))
}"""


def test_no_page_of_the_site_is_wider_than_the_window(site, browser):
    troubles = {}
    page = browser.new_page()
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        for width, scheme in ((390, "light"), (390, "dark"), (1280, "dark"), (1280, "light")):
            page.set_viewport_size({"width": width, "height": 844})
            page.emulate_media(color_scheme=scheme)
            if found := page.evaluate(STICKS_OUT):
                troubles[path.name, width, scheme] = found
    assert troubles == {}


SEARCHED = {
    "K-FAC": {"statistics", "curvature"},
    "EK-FAC": {"curvature"},
    "Gauss-Newton": {"curvature"},
    "torch.compile": {"torch_compile"},
    "compile": {"torch_compile"},
    "site": {"sites"},
    "per-sample": {"gradients"},
    "per-sample gradients": {"gradients"},
    "ghost clipping": {"glossary", "private"},
    "activation patching": {"edit", "recipes"},
    "DP-SGD": {"private"},
    "influence functions": {"influence"},
    "hook": {"hooks"},
    "NaN": {"watch", "recipes", "debug_training"},
}


def test_the_search_finds_the_words_of_the_field(address, browser):
    page, found = browser.new_page(viewport=WIDE), {}
    page.goto(f"{address}/index.html")
    for asked in SEARCHED:
        page.fill(".md-search__input", "")
        page.locator(".md-search-result__item").first.wait_for(state="detached")
        page.locator(".md-search__input").press_sequentially(asked)
        first = page.locator(".md-search-result__item a").first
        first.wait_for()
        for _ in range(20):  # it searches at every letter, and is slow where the machine is busy
            page.wait_for_timeout(300)
            found[asked] = urlsplit(first.get_attribute("href")).path.rpartition("/")[2].removesuffix(".html")
            if found[asked] in SEARCHED[asked]:
                break
    assert {asked: name for asked, name in found.items() if name not in SEARCHED[asked]} == {}


@pytest.mark.parametrize("name", ["report", "watch", "gradient_index"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["desktop", "phone"])
def test_a_page_that_unsum_writes_is_shown_on_the_page_about_it(site, browser, name, size):
    page = browser.new_page(viewport=size)
    page.goto((site / f"{name}.html").as_uri())
    frame = page.locator("iframe.example")
    frame.scroll_into_view_if_needed()
    inside = frame.element_handle().content_frame()
    inside.locator("h1").wait_for()
    assert inside.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert (site / page.locator("a", has_text="in a window of its own").get_attribute("href")).exists()


SMALL = """() => [...document.querySelectorAll("img.picture")].map(image =>
    [image.getAttribute("src"), image.getBoundingClientRect().width, image.naturalWidth]
).filter(([, shown, natural]) => shown < 0.74 * natural)"""

SCROLLING = """() => [...document.querySelectorAll("article .wraps code, article [data-cards]")].filter(element => {
    const box = element.matches("table") ? element.closest(".md-typeset__table") || element : element
    return box.scrollWidth > box.clientWidth + 1
}).map(element => element.textContent.trim().slice(0, 60))"""


@pytest.mark.parametrize("name", ["index", "draw", "hooks", "how", "cost", "limits", "gradients", "check", "edit"])
def test_on_a_phone_pictures_keep_their_letters_and_sentences_need_no_scrolling(site, browser, name):
    page = browser.new_page(viewport=PHONE)
    page.goto((site / f"{name}.html").as_uri())
    assert page.evaluate(SMALL) == []
    assert page.evaluate(SCROLLING) == []


def test_on_a_phone_the_menu_of_the_start_page_has_all_sections(site, browser):
    page = browser.new_page(viewport=PHONE)
    page.goto((site / "index.html").as_uri())
    page.locator("label.md-header__button[for=__drawer]").click()
    for section in ("Tutorials", "Guides", "Recipes", "Reference", "Explanation", "Coming from"):
        assert page.locator(".md-nav--primary > .md-nav__list > .md-nav__item", has_text=section).first.is_visible()


CONTRAST = """(selectors) => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number)
    const over = ([r, g, b, a = 1], below) => [r, g, b].map((x, k) => a * x + (1 - a) * below[k])
    const light = colour => colour.map(x => x / 255).map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
        .reduce((sum, x, k) => sum + x * [.2126, .7152, .0722][k], 0)
    const behind = element => {
        const own = numbers(getComputedStyle(element).backgroundColor)
        return own[3] === 0 && element.parentElement ? behind(element.parentElement)
            : over(own, element.parentElement ? behind(element.parentElement) : [255, 255, 255])
    }
    return selectors.map(selector => {
        const element = document.querySelector(selector), below = behind(element)
        const one = light(over(numbers(getComputedStyle(element).color), below)), other = light(below)
        return [selector, (Math.max(one, other) + .05) / (Math.min(one, other) + .05)]
    }).filter(([, ratio]) => ratio < 4.5)
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_titles_links_and_printed_lines_have_contrast(site, browser, scheme):
    page = browser.new_page(viewport=WIDE, color_scheme=scheme)
    page.goto((site / "index.html").as_uri())
    seen = [
        "article h1",
        "article h2",
        "article p",
        "article td a",
        "article code",
        ".language-text code",
        ".md-header",
    ]
    assert page.evaluate(CONTRAST, seen) == []
