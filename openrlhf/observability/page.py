"""The page of `report.py`: a Jinja template with its styles and its script inside."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root {
  color-scheme: light dark;
  --ink: #1b1f24; --soft: #667080; --rule: #e4e7eb; --ground: #ffffff; --raised: #f6f7f9;
  --bad: #b4231f;
  --line-0: #2f6fde; --line-1: #d9622b; --line-2: #12855a; --line-3: #8250c8;
  --line-4: #b08800; --line-5: #5b6673;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ee; --soft: #8d97a5; --rule: #2a3038; --ground: #12151a; --raised: #1a1f26;
    --bad: #ff7b72;
    --line-0: #6ea8fe; --line-1: #f2935c; --line-2: #4cc38a; --line-3: #b692f6;
    --line-4: #d9b44a; --line-5: #9aa5b1;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: 48px 28px 80px; background: var(--ground);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -0.015em; margin: 0; font-weight: 650; }
h2 { font-size: 20px; letter-spacing: -0.01em; margin: 0; font-weight: 650; }
h3 { font-size: 15px; margin: 40px 0 12px; font-weight: 650; }
a { color: inherit; text-underline-offset: 3px; text-decoration-color: var(--soft); }
.quiet { color: var(--soft); font-size: 13px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 20px; margin-top: 12px; font-size: 14px; }
section { margin-top: 56px; padding-top: 28px; border-top: 1px solid var(--rule); }
table { border-collapse: collapse; margin-top: 28px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 28px 7px 0; text-align: right; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-size: 13px; font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
.tiles { display: flex; flex-wrap: wrap; gap: 16px 44px; margin: 24px 0 8px; }
.tile .quiet { display: block; }
.tile b { font-size: 22px; font-weight: 620; font-variant-numeric: tabular-nums; }
.tile i { font-style: normal; color: var(--soft); font-size: 15px; }
.panels {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); gap: 30px 32px;
  margin-top: 28px;
}
figure { margin: 0; min-width: 0; display: flex; flex-direction: column; }
figcaption { display: flex; align-items: baseline; gap: 8px; font-size: 14px; font-weight: 600; }
figcaption span { white-space: nowrap; font-weight: 400; }
.key { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 12.5px; color: var(--soft); }
.key b { color: var(--ink); font-weight: 560; font-variant-numeric: tabular-nums; }
.key span::before {
  content: ""; display: inline-block; width: 10px; height: 3px; border-radius: 2px;
  background: var(--dot); margin-right: 6px; vertical-align: middle;
}
.at { margin-left: auto; font-size: 12.5px; color: var(--soft); }
svg.chart { width: 100%; height: auto; margin-top: auto; padding-top: 4px; overflow: visible; }
.chart text { fill: var(--soft); font-size: 10.5px; font-variant-numeric: tabular-nums; }
.chart .grid { stroke: var(--rule); stroke-width: 1; }
.chart path:not(.band) { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.chart .curve { stroke-width: 1.7; }
.chart .faint { stroke-width: 1; opacity: 0.32; }
.chart .band { opacity: 0.12; }
.chart .pointer { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
details { margin-top: 32px; }
summary { cursor: pointer; font-weight: 600; font-size: 14px; }
pre {
  margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
details > pre, .sample { padding: 14px 18px; background: var(--raised); border-radius: 8px; }
details > pre { margin-top: 12px; }
.pairs { display: grid; grid-template-columns: 1fr 1fr; gap: 14px 20px; }
.pairs h4 { margin: 0; font-size: 13px; font-weight: 560; color: var(--soft); }
.sample { min-width: 0; }
.meta { display: flex; gap: 14px; font-size: 12.5px; color: var(--soft); margin-bottom: 8px; }
.meta b { color: var(--ink); font-variant-numeric: tabular-nums; }
.sample pre { max-height: 320px; overflow: auto; }
.sample .prompt { color: var(--soft); }
.failures { border-left: 3px solid var(--bad); padding: 2px 0 2px 16px; margin-top: 24px; }
.failures ul { margin: 0; padding: 0; list-style: none; }
footer { margin-top: 64px; padding-top: 16px; border-top: 1px solid var(--rule); }
@media (max-width: 700px) { .pairs { grid-template-columns: 1fr; } body { padding-top: 28px; } }
</style>
</head>
<body>

{% macro panels(list) %}
<div class="panels">
{% for panel in list %}
<figure>
<figcaption{% if panel.definition %} title="{{ panel.definition }}"{% endif %}>
{{ panel.title }} <span class="quiet">{{ panel.unit }}</span><span class="at"></span>
</figcaption>
<div class="key">
{% for label in panel.labels %}
<span style="--dot: var(--line-{{ loop.index0 % 6 }})">{{ label }}
<b data-last="{{ panel.last[loop.index0] }}">{{ panel.last[loop.index0] }}</b></span>
{% endfor %}
</div>
{{ panel.chart }}
</figure>
{% endfor %}
</div>
{% endmacro %}

{% macro sample(row) %}
<div class="sample">
{% if row %}
<div class="meta">
<span>reward <b>{{ row.get("reward")|cell }}</b></span>
<span>ended by {{ row.stop_reason }}{% if row.filtered %}, filtered{% endif %}</span>
</div>
<pre><span class="prompt">{{ row.prompt }}</span>{{ row.response }}</pre>
{% else %}
<span class="quiet">no further sample</span>
{% endif %}
</div>
{% endmacro %}

<header>
<h1>{{ title }}</h1>
<div class="quiet">written {{ written }}</div>
{% if stages|length > 1 %}
<nav>{% for stage in stages %}<a href="#{{ stage.anchor }}">{{ stage.name }}</a>{% endfor %}</nav>
{% endif %}
{% if summary %}
<table>
<thead><tr>{% for head in summary[0] %}<th>{{ head }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in summary[1:] %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endif %}
</header>

{% for stage in stages %}
<section id="{{ stage.anchor }}">
<h2>{{ stage.name }}</h2>
<div class="quiet">{{ (stage.facts + [stage.folder])|join(" · ") }}</div>

{% if stage.tiles %}
<div class="tiles">
{% for tile in stage.tiles %}
<div class="tile"><span class="quiet">{{ tile.label }}</span>
<i>{{ tile.first }} →</i> <b>{{ tile.last }}</b></div>
{% endfor %}
</div>
{% endif %}

{% if stage.failures %}
<div class="failures"><ul>
{% for failure in stage.failures %}<li>{{ failure }}</li>{% endfor %}
</ul></div>
{% endif %}

{% if stage.panels or stage.more %}
{{ panels(stage.panels) }}
{% else %}
<p class="quiet">No metrics were logged in this folder.</p>
{% endif %}

{% if stage.samples.pairs %}
<h3>Samples{% if stage.samples.last_step is not none %}, before and after{% endif %}</h3>
<div class="pairs">
<h4>step {{ stage.samples.first_step }}</h4>
<h4>{% if stage.samples.last_step is not none %}step {{ stage.samples.last_step }}{% endif %}</h4>
{% for before, after in stage.samples.pairs %}
{{ sample(before) }}
{% if stage.samples.last_step is not none %}{{ sample(after) }}{% else %}<span></span>{% endif %}
{% endfor %}
</div>
{% endif %}

{% if stage.samples.errors %}
<details>
<summary>Newest errors</summary>
{% for row in stage.samples.errors %}
<pre>step {{ row.step }}, prompt {{ row.prompt_index }}, sample {{ row.sample_index }}

{{ row.error }}</pre>
{% endfor %}
</details>
{% endif %}

{% if stage.more %}
<details>
<summary>More metrics</summary>
{{ panels(stage.more) }}
</details>
{% endif %}

{% if stage.config %}
<details>
<summary>Configuration</summary>
<pre>{{ stage.config }}</pre>
</details>
{% endif %}
</section>
{% endfor %}

<footer class="quiet">
Pale lines are single steps, bands the range of steps that share a point, strong lines moving means.
Numbers at the head of a stage compare its beginning with its end.
</footer>

<script>
// Values under the pointer, at the same step in every chart of the stage.
const format = y => y && Math.abs(y) < 1e-3 ? y.toExponential(1)
  : Math.abs(y) >= 1e4 ? Math.round(y).toLocaleString("en") : String(+y.toPrecision(4));
const nearest = (xs, x) => xs.reduce((b, v, i) => Math.abs(v - x) < Math.abs(xs[b] - x) ? i : b, 0);
const charts = [...document.querySelectorAll("svg.chart")].map(svg => {
  const figure = svg.closest("figure");
  return { svg, data: JSON.parse(svg.dataset.chart), at: figure.querySelector(".at"),
    values: [...figure.querySelectorAll(".key b")], section: svg.closest("section") };
});
function show(chart, step) {
  const { data, svg } = chart, [first, last] = data.range;
  svg.querySelector(".pointer")?.remove();
  chart.at.textContent = step === null ? "" : "step " + Math.round(step).toLocaleString("en");
  chart.values.forEach((value, i) => {
    const line = data.lines[i];
    value.textContent = step === null ? value.dataset.last : format(line.y[nearest(line.x, step)]);
  });
  if (step === null || step < first || step > last) return;
  const x = data.left + (step - first) / (last - first) * (data.right - data.left);
  const mark = document.createElementNS("http://www.w3.org/2000/svg", "line");
  mark.setAttribute("class", "pointer");
  for (const [k, v] of [["x1", x], ["x2", x], ["y1", data.top], ["y2", data.bottom]])
    mark.setAttribute(k, v);
  svg.append(mark);
}
for (const chart of charts) {
  const { svg, data, section } = chart, near = charts.filter(other => other.section === section);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const part = (x - data.left) / (data.right - data.left);
    const wanted = data.range[0] + Math.min(1, Math.max(0, part)) * (data.range[1] - data.range[0]);
    const xs = data.lines[0].x, step = xs[nearest(xs, wanted)];
    near.forEach(other => show(other, step));
  });
  svg.addEventListener("pointerleave", () => near.forEach(other => show(other, null)));
}
</script>
</body>
</html>
"""
