"""Visible faults of a page that is open in a browser: overflow, contrast, small text, empty pictures."""

from pathlib import Path

from tests.chromium import Page

_PICTURES = "svg:not(svg svg, a svg, svg:has(> use, > symbol))"
"""Selector of the pictures drawn in the page, without icons."""

_FIND_FAULTS = """
(() => {
const faults = [];
const width = document.documentElement.scrollWidth;
if (width > innerWidth) faults.push(`scrolls sideways: ${width} px wide in a window of ${innerWidth}`);

const rgb = text => {
  const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
  return {rgb: [r, g, b], a};
};
const luminance = colour => colour
  .map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const contrast = (one, two) => {
  const [dark, light] = [luminance(one), luminance(two)].sort((a, b) => a - b);
  return (light + .05) / (dark + .05);
};
const paper = element => {
  for (let e = element; e; e = e.parentElement) {
    const colour = rgb(getComputedStyle(e).backgroundColor);
    if (colour.a > 0) return colour.rgb;
  }
  return [255, 255, 255];
};
const inside = (part, whole, room) => part.left >= whole.left - room && part.right <= whole.right + room
  && part.top >= whole.top - room && part.bottom <= whole.bottom + room;
const name = svg => svg.querySelector('title')?.textContent || 'a nameless picture';

for (const svg of document.querySelectorAll(PICTURES)) {
  const box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('.mark')];
  if (box.width < 100 || box.height < 30) faults.push(`${name(svg)} has no size`);
  if (!svg.querySelector('title')?.textContent || !svg.querySelector('desc')?.textContent)
    faults.push(`${name(svg)} lacks a title or a description`);
  if (!marks.some(mark => mark.getTotalLength() > 0 || mark.classList.contains('dots')))
    faults.push(`${name(svg)} is empty`);
  for (const mark of marks) {
    if (/NaN|Infinity|undefined/.test(mark.getAttribute('d'))) faults.push(`${name(svg)} draws at no number`);
    if (!inside(mark.getBoundingClientRect(), box, 3)) faults.push(`${name(svg)} draws outside its box`);
    const {stroke, fill} = getComputedStyle(mark), colour = stroke === 'none' ? fill : stroke;
    if (colour === 'none' || contrast(rgb(colour).rgb, paper(svg)) < 1.4) faults.push(`${name(svg)} draws invisibly`);
  }
  const ticks = [...svg.querySelectorAll('.tick')].map(tick => [tick.textContent, tick.getBoundingClientRect()]);
  ticks.forEach(([word, one], i) => ticks.slice(i + 1).forEach(([other, two]) => {
    if (one.left < two.right && two.left < one.right && one.top < two.bottom - 2 && two.top < one.bottom - 2)
      faults.push(`${name(svg)}: '${word}' and '${other}' lie upon each other`);
  }));
}

const scrolled = element => {
  for (let e = element; e !== document.body; e = e.parentElement)
    if (/auto|scroll/.test(getComputedStyle(e).overflowX)) {
      const box = e.getBoundingClientRect();
      return box.left >= -1 && box.right <= innerWidth + 1;
    }
  return false;
};
const drawn_out = element => {  // a menu that waits beside the window
  for (let e = element; e; e = e.parentElement) {
    const box = e.getBoundingClientRect();
    if (getComputedStyle(e).position === 'fixed') return box.right <= 0 || box.left >= innerWidth;
  }
  return false;
};

const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const parent = node.parentElement, style = getComputedStyle(parent), word = node.textContent.trim().slice(0, 30);
  if (!word || parent.closest('script,style,title,desc') || !parent.checkVisibility() || drawn_out(parent)) continue;
  const upon_colour = parent.closest('[class^="t-"]');  // tests of the palette hold these to the colour below them
  const drawn = parent instanceof SVGElement, matrix = drawn ? parent.getScreenCTM() : {a: 1, d: 1};
  const size = parseFloat(style.fontSize) * Math.min(matrix.a, matrix.d);
  if (size < 10) faults.push(`'${word}' is ${size} px small`);
  const ratio = contrast(rgb(drawn ? style.fill : style.color).rgb, paper(parent));
  if (!upon_colour && ratio < 4.5) faults.push(`'${word}' has a contrast of ${ratio.toFixed(2)}`);
  const range = document.createRange();
  range.selectNodeContents(node);
  const box = range.getBoundingClientRect();
  if (!scrolled(parent) && (box.left < -1 || box.right > innerWidth + 1))
    faults.push(`'${word}' is cut off at the side`);
}
return [...new Set(faults)];
})()
"""


def audit(page: Page, pictures: int, site: Path | None = None) -> list[str]:
    """Return every fault of the page in words; it should have so many pictures. A site may read its other files."""
    faults = page.complaints(site) + page.evaluate(_FIND_FAULTS.replace("PICTURES", f"'{_PICTURES}'"))
    count = page.evaluate(f"document.querySelectorAll('{_PICTURES}').length")
    return faults if count == pictures else [*faults, f"{count} pictures instead of {pictures}"]


def blank_pictures(page: Page) -> list[str]:
    """Return the titles of pictures that look the same with hidden marks."""
    titles = page.evaluate(
        f"[...document.querySelectorAll('{_PICTURES}')].map(svg => svg.querySelector('title').textContent)"
    )
    return [title for index, title in enumerate(titles) if not _shows_something(page, index)]


def _shows_something(page: Page, index: int) -> bool:
    box = page.evaluate(
        "(r => ({x: r.left + scrollX, y: r.top + scrollY, width: Math.min(r.width, 1000), height: r.height}))"
        f"(document.querySelectorAll('{_PICTURES}')[{index}].getBoundingClientRect())"
    )
    looks = []
    for visibility in ("hidden", "visible"):
        page.evaluate(f"document.querySelectorAll('.mark').forEach(m => m.style.visibility = '{visibility}')")
        looks.append(page.screenshot(box))
    return looks[0] != looks[1]
