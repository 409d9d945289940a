"""Style sheet and script of pages."""

from muster.report.palette import PAINTS, SERIES

_BASE = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;overflow-wrap:break-word;background:var(--paper);color:var(--ink);
 font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:56px 32px 40px}
h1,h2{font-family:"Iowan Old Style","Palatino Linotype",Palatino,Charter,"Bitstream Charter",Georgia,serif;
 font-weight:500;letter-spacing:-.01em}
h1{font-size:38px;line-height:1.15;margin:0 0 8px;overflow-wrap:anywhere}
h2{font-size:24px;margin:0 0 18px}
h3{font-size:14px;font-weight:600;margin:0}
section{margin-top:52px;border-top:1px solid var(--rule);padding-top:22px}
p{margin:0 0 10px;max-width:72ch}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
figure{margin:0;min-width:0}
.status{margin:4px 0 0;font-weight:600;overflow-wrap:anywhere}
.plan{font-size:14px;color:var(--quiet);overflow-wrap:anywhere}
.quiet,.unit{color:var(--quiet);font-size:13px}
.figures{display:flex;flex-wrap:wrap;gap:22px 48px;margin:34px 0 0}
.figures div{display:flex;flex-direction:column-reverse}
.figures dt,.facts dt{color:var(--quiet);font-size:13px}
.figures dd{margin:0;font-size:27px;line-height:1.25;letter-spacing:-.015em;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:40px 44px}
.charts .chart:first-child{grid-column:1/-1}
figcaption{display:flex;flex-wrap:wrap;align-items:baseline;gap:2px 12px;margin-bottom:8px}
.plot{position:relative;touch-action:pan-x pan-y}
.plot svg{display:block;pointer-events:none;overflow:visible}
.chart .plot>svg{width:100%;height:220px;padding:6px 0 40px 48px}
.charts .chart:first-child .plot>svg{height:320px}
.frame{fill:none}
.grid{stroke:var(--rule)}
.axis{stroke:var(--axis)}
.tick,.number,.broken{font-size:11px;fill:var(--quiet);font-variant-numeric:tabular-nums}
.start{text-anchor:start}.middle{text-anchor:middle}.end{text-anchor:end}
.mark{fill:none;stroke-linejoin:round}
.chart .mark{stroke-width:2;stroke-linecap:round}
.chart .faint{stroke-width:1;opacity:.42}
.chart .dots{stroke-width:5.5}
.chart .dashed:not(.dots){stroke-dasharray:8 5}
.chart .dotted:not(.dots){stroke-dasharray:.1 5}
.broken{fill:var(--alarm);color:var(--alarm);font-size:14px;font-weight:700}
.skipped{fill:var(--quiet);color:var(--quiet);font-size:11px}
.cursor{position:absolute;width:1px;background:var(--axis);pointer-events:none;display:none}
.key{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--quiet)}
.key span{display:inline-flex;align-items:center;gap:6px}
.swatch{display:inline-block;width:14px;height:12px;border-radius:2px}
.swatch.line{height:3px;border-radius:2px;background:currentColor}
.swatch.faint{opacity:.42}
.swatch.dashed{background:linear-gradient(90deg,currentColor 40%,transparent 40% 60%,currentColor 60%)}
.swatch.dotted{background:radial-gradient(circle,currentColor 1.5px,transparent 1.6px) 0 0/5px 3px}
.legend{max-width:none;margin-bottom:6px}
.key:not(.legend){margin-bottom:24px}
.timelines{overflow-x:auto;margin:22px 0 0;padding-bottom:6px}
.gantt{display:grid;grid-template-columns:112px minmax(0,1fr);min-width:max-content;margin-bottom:26px}
.gantt:last-of-type{margin-bottom:0}
.gantt figcaption{grid-column:1/-1;position:sticky;left:0;width:fit-content;max-width:min(100vw - 40px,1116px)}
.names{position:sticky;left:0;z-index:1;background:var(--paper);font-size:12px;color:var(--quiet);white-space:nowrap}
.names div{overflow:hidden}
.gantt .plot>svg{width:100%}
.box,.idle{fill:none}
.number{pointer-events:none}
svg .idle{stroke:var(--idle)}.swatch.idle{background:var(--idle)}
.edge{stroke:var(--paper);stroke-width:1}
table{border-collapse:collapse;width:100%;max-width:760px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:8px 0 8px 14px;border-bottom:1px solid var(--rule);vertical-align:baseline}
th:first-child,td:first-child{text-align:left;padding-left:0}
.texts{max-width:none}
.texts th{white-space:nowrap;color:var(--quiet);width:1%}
.texts td{white-space:normal;text-align:left;overflow-wrap:anywhere}
.wide{overflow-x:auto}
.wide table{max-width:none;width:auto}
.wide th,.wide td{white-space:nowrap;padding-left:26px}
.wide th:first-child,.wide td:first-child{padding-left:0}
.wide th:first-child{position:sticky;left:0;background:var(--paper)}
thead th{font-weight:500;font-size:13px;color:var(--quiet)}
tbody th{font-weight:400}
td{white-space:nowrap}
.far{font-weight:650}
pre.sample{margin:0;padding:20px 24px;background:var(--leaf);border-radius:6px;font-size:13px;line-height:1.6;
 white-space:pre-wrap;overflow-wrap:anywhere;max-height:420px;overflow-y:auto}
.prompt{color:var(--quiet)}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:16px 32px;margin:0}
.facts dd{margin:0;overflow-wrap:anywhere}
ul{padding-left:1.1em;margin:0}li{margin-bottom:6px;max-width:72ch}
footer{margin-top:56px;color:var(--quiet);font-size:13px}
#tip{position:absolute;z-index:2;pointer-events:none;display:none;background:var(--ink);color:var(--paper);
 font-size:12px;line-height:1.5;padding:6px 10px;border-radius:5px;max-width:260px;white-space:pre-line;
 font-variant-numeric:tabular-nums}
@media (max-width:860px){.charts{grid-template-columns:minmax(0,1fr)}}
@media (max-width:560px){main{padding:32px 18px 28px}h1{font-size:29px}section{margin-top:40px}
 .figures{gap:18px 32px}.figures dd{font-size:23px}.charts .chart:first-child .plot>svg{height:260px}
 .gantt{grid-template-columns:100px minmax(0,1fr)}.names{font-size:11px}
 .facts{grid-template-columns:repeat(2,minmax(0,1fr))}
 table{font-size:13px}th,td{padding-left:8px}.wide th,.wide td{padding-left:10px}
 .wide tbody th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:110px}}
"""
"""Rules of all pages, in terms of colour variables."""

_LIGHT = {
    "paper": "#fcfbf9",
    "leaf": "#f4f2ed",
    "ink": "#1d2126",
    "quiet": "#5b626c",
    "rule": "#e6e3dd",
    "axis": "#a7a59f",
    "idle": "#e9e6e0",
    "alarm": "#b3261e",
}
"""Colour variables of light mode."""
_DARK = {
    "paper": "#14161a",
    "leaf": "#1c1f24",
    "ink": "#e7e5e1",
    "quiet": "#a0a6af",
    "rule": "#2b2f36",
    "axis": "#656b75",
    "idle": "#272b32",
    "alarm": "#ff8a80",
}
"""Colour variables of dark mode."""


def style_sheet() -> str:
    """Return the style sheet: colours as variables for light and dark mode, then the rules."""
    light, dark = dict(_LIGHT), dict(_DARK)
    rules = []
    for paint in PAINTS:
        light |= {paint.key: paint.light, f"{paint.key}-text": paint.light_text}
        dark |= {paint.key: paint.dark, f"{paint.key}-text": paint.dark_text}
        rules.append(f".paint-{paint.key}{{stroke:var(--{paint.key})}}")
        rules.append(f".on-{paint.key}{{fill:var(--{paint.key}-text);background:var(--{paint.key})}}")
    for index, (on_light, on_dark) in enumerate(SERIES):
        light[f"run-{index}"] = on_light
        dark[f"run-{index}"] = on_dark
        rules.append(f".run-{index}{{stroke:var(--run-{index});color:var(--run-{index})}}")
    dark_rule = f"@media (prefers-color-scheme:dark){{:root{{{_names(dark)}}}}}"
    return f":root{{{_names(light)}}}{dark_rule}{_BASE}{''.join(rules)}"


def _names(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


SCRIPT = """
const tip = document.getElementById('tip');
function show(event, text) {
  tip.textContent = text;
  tip.style.display = 'block';
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = Math.max(8, Math.min(event.clientX + 14, room)) + scrollX + 'px';
  tip.style.top = event.clientY + scrollY + 18 + 'px';
}
function hide() { tip.style.display = 'none'; }

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
}
for (const plot of document.querySelectorAll('.chart .plot')) {
  const data = JSON.parse(plot.querySelector('script').textContent);
  const frame = plot.querySelector('.frame');
  const cursor = plot.appendChild(document.createElement('div'));
  cursor.className = 'cursor';
  plot.addEventListener('pointermove', event => {
    const box = frame.getBoundingClientRect(), own = plot.getBoundingClientRect();
    const part = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    const lines = [];
    let step = data.low + part * (data.high - data.low);
    for (const [label, steps, words] of data.curves) {
      if (!steps.length) continue;
      const i = nearest(steps, step);
      if (!lines.length) { step = steps[i]; lines.push(data.across + ' ' + step); }
      lines.push(label + '  ' + words[i]);
    }
    const at = (step - data.low) / (data.high - data.low);
    Object.assign(cursor.style, {display: 'block', left: box.left - own.left + at * box.width + 'px',
      top: box.top - own.top + 'px', height: box.height + 'px'});
    show(event, lines.join('\\n'));
  });
  plot.addEventListener('pointerleave', () => { cursor.style.display = 'none'; hide(); });
}

function seconds(value) {
  for (const [scale, unit] of [[1, 's'], [1e-3, 'ms'], [1e-6, 'µs']])
    if (value >= scale) return (value / scale).toPrecision(3) + ' ' + unit;
  return (value * 1e6).toPrecision(3) + ' µs';
}
for (const box of document.querySelectorAll('.timelines')) {
  const kinds = JSON.parse(box.querySelector('script').textContent);
  const length = Number(box.dataset.length);
  for (const figure of box.querySelectorAll('.gantt')) {
    const frame = figure.querySelector('.frame'), names = figure.querySelectorAll('.names div');
    let paths = null;
    figure.querySelector('.plot').addEventListener('pointermove', event => {
      paths ??= [...figure.querySelectorAll('.box')].map(readPath);
      const at = frame.getBoundingClientRect();
      const x = (event.clientX - at.left) / at.width * 1e5, y = event.clientY - at.top;
      for (const path of paths) {
        if (Math.abs(y - path.y) > path.thick / 2 + .5) continue;
        const i = path.boxes.findIndex(([left, wide]) => left <= x && x < left + wide);
        if (i < 0) continue;
        const [left, wide] = path.boxes[i], name = path.names[i], kind = name.match(/[A-Z_]+/)[0];
        const row = names[Math.floor(y / at.height * names.length)];
        show(event, `${row ? row.textContent : ''}: ${name}\\n${kinds[kind] || kind}\\n` +
          `${seconds(wide / 1e5 * length)}, from ${seconds(left / 1e5 * length)} on`);
        return;
      }
      hide();
    });
    figure.querySelector('.plot').addEventListener('pointerleave', hide);
  }
}
function readPath(path) {
  const boxes = [...path.getAttribute('d').matchAll(/M(\\d+) ([\\d.]+)h(\\d+)/g)];
  return {y: Number(boxes[0][2]), thick: Number(path.getAttribute('stroke-width')),
    boxes: boxes.map(match => [Number(match[1]), Number(match[3])]), names: path.dataset.boxes.split(' ')};
}
"""
"""Script of the pointer's read-outs for charts and timelines."""
