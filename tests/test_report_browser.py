"""The report in a real browser: it works, asks for nothing, and can be used on a phone."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import unsum
from report_nets import IDS, Sequences, batch, net, next_token, squares

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser to try the page in")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.xdist_group("browser"),  # one browser, one process
]
SHOTS = Path(__file__).parent.parent / "build" / "screenshots"


class Deep(nn.Module):
    """Blocks with names of many lengths, whose gradients fade."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a_very_long_name_of_an_embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(9))
        self.a_very_long_name_of_a_head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.a_very_long_name_of_an_embedding(ids)
        for block in self.blocks:
            x = block(x) * 0.3
        return self.a_very_long_name_of_a_head(x)


@pytest.fixture(scope="module")
def report_path(tmp_path_factory):
    torch.manual_seed(0)
    model = Sequences()
    ids = torch.cat([IDS, torch.full((1, 7), 3)])
    text = [[f"<w{k}> " for k in row] for row in ids.tolist()]
    path = tmp_path_factory.mktemp("report") / "report.html"
    with torch.no_grad():
        model.mix.bias[2] = float("nan")  # so that there is a flag
    healthy = path.with_name("healthy.html")
    unsum.report(model, next_token, ids, path, text=text)
    unsum.report(Sequences(), next_token, ids, healthy, text=text)
    deep = path.with_name("deep.html")
    unsum.report(Deep(), next_token, ids, deep, text=text)
    return healthy, path, deep


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser):
    """Opens a page; at the end, nothing may have been logged or asked for."""
    contexts, troubles = [], []

    def open_one(path, **options):
        context = browser.new_context(**({"viewport": {"width": 1440, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith(("file:", "data:", "about:")) or troubles.append(request.url),
        )
        page.goto(path.as_uri())
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert troubles == []


def column(page, table, index):
    """What is seen in one column, from top to bottom."""
    return page.eval_on_selector_all(
        f"#{table} tbody tr:not([hidden])", f"rows => rows.map(row => row.cells[{index}].innerText.trim())"
    )


def shot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_is_seen(open_page, report_path, scheme):
    page = open_page(report_path[0], color_scheme=scheme)
    box = page.locator("#picture svg").first.bounding_box()
    assert box["width"] > 100 and box["height"] > 100
    shot(page, f"report_desktop_{scheme}")


def test_the_picture_folds(open_page, report_path):
    page = open_page(report_path[0])
    page.locator("#picture summary", has_text="Fold and unfold").click()
    inside = page.frame_locator("#picture iframe")
    group = lambda folded: inside.locator(f"[data-role=group][data-name=mix][data-folded={folded}]")
    inside.locator("[data-role=group][data-name=mix]").first.wait_for()  # the frame is filled when it is opened
    first = "true" if group("true").count() else "false"
    other = {"true": "false", "false": "true"}[first]
    group(first).first.press("Enter")
    group(other).first.wait_for(timeout=2000)
    group(other).first.press("Enter")
    group(first).first.wait_for(timeout=2000)


def test_a_heading_sorts_by_click_and_by_key(open_page, report_path):
    page = open_page(report_path[0])
    given = column(page, "sample-table", 2)
    number = lambda text: float(text.replace("−", "-"))
    losses = page.locator("#sample-table thead th").nth(1)
    losses.locator("button").click()
    assert losses.get_attribute("aria-sort") == "descending"
    first = [number(text) for text in column(page, "sample-table", 1)]
    assert first == sorted(first, reverse=True) and len(set(first)) > 2
    losses.locator("button").focus()
    page.keyboard.press("Enter")
    assert losses.get_attribute("aria-sort") == "ascending"
    assert [number(text) for text in column(page, "sample-table", 1)] == sorted(first)
    page.keyboard.press("Enter")
    assert losses.get_attribute("aria-sort") is None and column(page, "sample-table", 2) == given


def test_layers_are_sorted_by_numbers_not_by_their_text(open_page, report_path):
    page = open_page(report_path[0])
    page.locator("#layer-table thead tr:last-child th").nth(6).locator("button").click()  # the activation's norm
    norms = page.eval_on_selector_all(
        "#layer-table tbody tr", "rows => rows.map(row => Number(row.cells[6].dataset.value))"
    )
    assert norms == sorted(norms, reverse=True) and len(set(norms)) == len(norms) - 1  # the head's is the model's


def test_the_filters(open_page, report_path):
    page = open_page(report_path[1])
    everything = column(page, "layer-table", 0)
    assert len(everything) == 4
    page.fill("#layer-filter", "LINEAR mix")
    assert [name.split()[0] for name in column(page, "layer-table", 0)] == ["mix"]
    assert page.inner_text("#layer-count") == "1 of 4"
    page.fill("#layer-filter", "")
    page.select_option("#flag-filter", "nan")
    assert [name.split()[0] for name in column(page, "layer-table", 0)] == ["embed", "mix", "head", "Sequences"]
    page.check("#leaf-filter")
    assert [name.split()[0] for name in column(page, "layer-table", 0)] == ["embed", "mix", "head"]
    page.locator("#findings a", has_text="mix:output").click()
    assert column(page, "layer-table", 0) == everything
    assert page.evaluate("document.querySelector(':target').cells[0].innerText").startswith("mix")


def test_a_picked_sample_is_marked_everywhere(open_page, report_path):
    page = open_page(report_path[0])
    page.locator("button.pick[data-sample='4']").click()
    assert page.locator("#picker").input_value() == "4"
    assert page.locator("tr.chosen").get_attribute("data-sample") == "4"
    assert page.locator(".bars rect.chosen").get_attribute("data-sample") == "4"
    assert page.locator(".line.chosen").get_attribute("data-sample") == "4"
    told = page.inner_text("#picked")
    assert "Sample 4" in told and "Most alike" in told and "head.weight" in told
    page.locator("#after").click()
    assert page.locator("tr.chosen").get_attribute("data-sample") == "5"
    page.locator(".bars rect[data-sample='1']").click()
    assert "Sample 1" in page.inner_text("#picked")
    page.locator("#picked button").first.click()  # the sample that is most alike
    assert "Sample 1" not in page.inner_text("#picked").splitlines()[0]
    shot(page, "report_picked")


def test_the_matrix_can_be_pointed_at_and_walked_by_keys(open_page, report_path):
    page = open_page(report_path[0])
    matrix = page.locator("#matrix")
    matrix.scroll_into_view_if_needed()
    box = matrix.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] * 0.1)
    assert page.inner_text("#tip") == "samples 0 and 0: 1.00"
    matrix.focus()
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#cell").startswith("samples 1 and 0: ")
    page.keyboard.press("Enter")
    assert page.locator("#picker").input_value() == "1"
    page.check("#alike")
    assert page.locator("#picker").input_value() == "1"


def test_tokens_have_colours_and_tell_their_numbers(open_page, report_path):
    page = open_page(report_path[0])
    tokens = page.locator(".line[data-sample='0'] .token")
    assert tokens.count() == 7 and tokens.first.inner_text() == f"<w{int(IDS[0, 0])}> "
    assert tokens.last.get_attribute("class") == "token plain"  # the last is a target only
    before = tokens.nth(1).evaluate("token => token.style.background")
    page.select_option("#token-scale", "each")
    assert tokens.nth(1).evaluate("token => token.style.background") != before
    tokens.nth(1).hover()
    assert "position 1" in page.inner_text("#tip")


def test_sections_fold(open_page, report_path):
    page = open_page(report_path[0])
    table = page.locator("#coverage-table")
    assert not table.is_visible()
    page.locator("#coverage > summary").click()
    assert table.is_visible()
    page.locator("#coverage > summary").press("Enter")
    assert not table.is_visible()


def open_all(page):
    folded = page.locator("details.section:not([open]) > summary")
    while folded.count():
        folded.first.click()


WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 780}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["healthy", "with NaN", "deep"])
def test_only_tables_scroll_sideways_and_no_words_of_a_chart_overlap(open_page, report_path, which, size, scheme):
    is_phone = size is PHONE
    page = open_page(report_path[which], viewport=size, color_scheme=scheme, has_touch=is_phone, is_mobile=is_phone)
    open_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    assert page.evaluate(OVERLAPPING) == []
    shot(page, f"report_{which}_{size['width']}_{scheme}")


OVERLAPPING = """() => {
    const found = [];
    for (const chart of document.querySelectorAll(".curve, .chart, #similarity .tools")) {
        const walker = document.createTreeWalker(chart, NodeFilter.SHOW_TEXT);
        const boxes = [];
        for (let node; (node = walker.nextNode());) {
            const range = document.createRange();
            range.selectNodeContents(node);
            for (const box of range.getClientRects()) if (box.width > 1) boxes.push([node.textContent.trim(), box]);
        }
        boxes.forEach(([one, a], k) => boxes.slice(k + 1).forEach(([other, b]) => {
            const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (across > 1 && down > 3) found.push(`${one} | ${other}`);
        }));
        for (const [text, box] of boxes) if (box.right > innerWidth || box.left < 0) found.push(`${text} is cut`);
    }
    return found;
}"""


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["desktop", "phone"])
def test_the_contents_bar_stays_in_sight_and_leads_to_every_section(open_page, report_path, size):
    page = open_page(report_path[2], viewport=size)
    sections = page.eval_on_selector_all("details.section", "all => all.map(each => each.id)")
    links = page.locator(".contents a")
    assert [link.get_attribute("href") for link in links.all()] == [f"#{key}" for key in sections]
    assert sections[:2] == ["samples", "tokens"] and {"depth", "layers", "picture"} <= set(sections)
    for key, link in zip(sections, links.all(), strict=True):
        link.click()
        section, bar = page.locator(f"#{key}").bounding_box(), page.locator(".contents").bounding_box()
        assert page.locator(f"#{key}").get_attribute("open") is not None
        assert bar["y"] == pytest.approx(0, abs=1)
        at_end = page.evaluate("innerHeight + scrollY >= document.documentElement.scrollHeight - 2")
        assert section["y"] >= bar["height"] - 1 and (at_end or section["y"] < bar["height"] + 40), key


def test_the_chart_by_depth_tells_and_leads_to_the_layer(open_page, report_path):
    page = open_page(report_path[2])
    slot = page.locator("#depth a.slot").nth(2)
    slot.hover()
    assert page.inner_text("#tip") == slot.get_attribute("aria-label")
    slot.click()
    assert page.evaluate("document.querySelector(':target').id") == slot.get_attribute("href")[1:]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_notebook_the_page_lives_in_its_frame_and_styles_nothing_else(open_page, report_path, tmp_path, scheme):
    made = unsum.report(net(), squares, batch(), tmp_path / "r.html")
    shown = made._repr_html_(), unsum.check(net(), squares, batch())._repr_html_(), unsum.sites(net())._repr_html_()
    plain = "<h2>mine</h2><table><tr><td>mine</td></tr></table><details><summary>mine</summary></details>"
    with_it, without = tmp_path / "with.html", tmp_path / "without.html"
    with_it.write_text(f"<!doctype html><meta charset=utf-8>{plain}{''.join(shown)}")
    without.write_text(f"<!doctype html><meta charset=utf-8>{plain}")
    look = """() => ["h2", "td", "summary", "body"].map((tag) => {
        const style = getComputedStyle(document.querySelector(tag));
        return [style.color, style.font, style.padding, style.margin, style.backgroundColor, style.borderBottom];
    })"""
    pages = [open_page(path, color_scheme=scheme, viewport=WIDE) for path in (with_it, without)]
    assert pages[0].evaluate(look) == pages[1].evaluate(look)
    assert pages[0].evaluate("document.documentElement.scrollWidth") == 1280
    inside = pages[0].frame_locator("iframe")
    inside.locator(".contents a", has_text="Check").click()
    assert inside.locator("#check-table").is_visible()  # and not the notebook once more, in its own frame
    inside.locator("#depth a.slot").first.click()
    assert inside.locator("#layer-table").is_visible()
    shot(pages[0], f"notebook_{scheme}")


def test_everything_has_a_name_that_can_be_read_aloud(open_page, report_path):
    page = open_page(report_path[0])
    assert page.locator("h1").count() == 1 and page.locator("html").get_attribute("lang") == "en"
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas, [role=region], [role=img]")].filter(
            (thing) => !(thing.getAttribute("aria-label") || thing.getAttribute("aria-labelledby")
                || thing.textContent.trim() || thing.closest("label")?.textContent.trim())
        ).map((thing) => thing.outerHTML)"""
    )
    assert unnamed == []
    assert page.locator("table:not(:has(caption))").count() == 0


def test_models_of_other_shapes_do_not_break_the_page(open_page, tmp_path):
    one = tmp_path / "one.html"
    unsum.report(nn.Linear(3, 1), lambda m, x: m(x).sum(1), torch.randn(1, 3), one)
    assert open_page(one).locator("#layer-table tbody tr").count() == 1
    frozen = tmp_path / "frozen.html"
    unsum.report(nn.Linear(3, 1).requires_grad_(False), lambda m, x: m(x).sum(1), torch.randn(4, 3), frozen)
    page = open_page(frozen)
    page.locator("#layer-table thead tr:last-child th").nth(9).locator("button").click()
    assert "Not here" in page.inner_text("#samples")


WORDS = ["alpha", "beta", "gamma", "\u202e", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


@pytest.fixture(scope="module")
def words_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "report.html"
    labels = ["planted", "", "", "", ""]
    unsum.report(Sequences(), next_token, IDS, path, text=lambda k: WORDS[k], ahead=1, labels=labels)
    return path


def test_colours_are_on_what_is_predicted(open_page, words_path):
    page = open_page(words_path)
    tokens = page.locator(".line[data-sample='0'] .token")
    assert tokens.count() == 7
    assert tokens.first.get_attribute("class") == "token plain"  # nothing predicts it
    assert "rgba" in tokens.last.evaluate("token => token.style.background")
    tokens.nth(1).hover()
    assert "position 0" in page.inner_text("#tip")
    assert page.locator(".line[data-sample='0'] .chip").inner_text() == "planted"
    assert page.locator(".line[data-sample='1'] .chip").count() == 0
    assert "0, planted" in page.locator("#picker").inner_text()


def test_words_break_between_them_and_run_one_way(open_page, words_path):
    page = open_page(words_path, viewport={"width": 250, "height": 800})
    broken = "tokens => tokens.filter(token => token.getClientRects().length > 1).map(token => token.textContent)"
    assert page.eval_on_selector_all("#token-map .token", broken) == []
    lines = page.eval_on_selector_all(
        "#token-map .line",
        """lines => lines.map(line => [...line.querySelectorAll(".token")].map(token => {
            const box = token.getBoundingClientRect(); return [Math.round(box.top), box.left]; }))""",
    )
    assert any(len({top for top, _ in places}) > 1 for places in lines)  # some are broken at all
    assert all(places == sorted(places) for places in lines)
    assert "⟨202E⟩" in page.inner_text("#token-map")
