"""Pictures as a browser draws them: texts that overlap, that leave their box or the picture, arrows through texts."""

import shutil
from contextlib import contextmanager

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Letters do not fill the box that a browser gives them: its upper and lower edge are for accents and the next line.
_TROUBLES = """
svg => {
  const found = [];
  const frame = svg.getBoundingClientRect();
  const placed = (element, dx = 0, dy = 0) => {
    const box = element.getBoundingClientRect();
    return {left: box.left - frame.left + dx, right: box.right - frame.left - dx,
            top: box.top - frame.top + dy, bottom: box.bottom - frame.top - dy};
  };
  const texts = [...svg.querySelectorAll("text")].map(element =>
    ({element, said: element.textContent, ...placed(element, 0.5, 2)}));
  for (const text of texts) {
    if (text.left < 0 || text.top < 0 || text.right > frame.width || text.bottom > frame.height)
      found.push(`'${text.said}' leaves the picture`);
    const holder = text.element.closest(".tensor, .op, .folded, .event");
    const own = holder && holder.querySelector(":scope > rect.box");
    if (own) {
      const box = placed(own);
      if (text.left < box.left || text.right > box.right || text.top < box.top || text.bottom > box.bottom)
        found.push(`'${text.said}' leaves its box`);
    }
  }
  texts.forEach((one, k) => texts.slice(k + 1).forEach(other => {
    if (one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom)
      found.push(`'${one.said}' overlaps '${other.said}'`);
  }));
  const boxes = [...svg.querySelectorAll("g:is(.tensor, .op, .folded, .event) > rect.box")].map(element =>
    ({said: element.parentElement.textContent.trim().slice(0, 40), ...placed(element, 2.5, 2.5)}));
  for (const path of svg.querySelectorAll("path.forward, path.backward, path.lane")) {
    if (path.closest(".legend")) continue;
    const matrix = path.getScreenCTM(), length = path.getTotalLength(), through = new Set();
    for (let at = 0; at <= length; at += 1.5) {
      const {x: px, y: py} = path.getPointAtLength(at).matrixTransform(matrix);
      const x = px - frame.left, y = py - frame.top;
      const hit = (things, what) => things.forEach(box => {
        if (box.left < x && x < box.right && box.top < y && y < box.bottom) through.add(`${what} '${box.said}'`);
      });
      hit(texts, "the text");
      if (!path.matches(".lane")) hit(boxes, "the box");
    }
    const label = path.parentElement.getAttribute("aria-label") || path.getAttribute("d");
    through.forEach(what => found.push(`an arrow (${label.slice(0, 60)}) goes through ${what}`));
  }
  return found;
}
"""


@contextmanager
def reader():
    """A function that gives the troubles of a picture, given as SVG; all of them in one browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()

        def troubles(svg):
            natural = svg.replace("max-width:100%;height:auto", "")
            page.set_content(f"<body style='margin:0'>{natural}</body>")
            return page.eval_on_selector("svg", _TROUBLES)

        yield troubles
        browser.close()
