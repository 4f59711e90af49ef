// Draws the curves of the page's data, and lets samples be looked at step by step. Names in the
// data come from strangers: they become text nodes (of uPlot's labels, too), never markup.
(() => {
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const HEIGHT = {main: 260, small: 190};
const WINDOWS = [1, 2, 3, 5, 10, 20, 50, 100, 200, 500];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, name, text) => {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
};

// a figure in few characters, as the tables have them
const figure = (value, nats) => {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (nats && size < 5e-4) return "0.000";  // of an estimated KL, what rounds to nothing is nothing
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return Number.isInteger(value) ? String(value) : size >= 1000 ? value.toFixed(0)
    : value.toFixed(3);
};
// labels of an axis: as many decimals as tell neighbours apart
const ticks = (u, splits, axis, space, step) => {
  const size = Math.max(...splits.map(Math.abs));
  if (size >= 1e5 || size < 1e-3) return splits.map(v => v === 0 ? "0" : v.toExponential(1));
  const decimals = (String(+step.toPrecision(3)).split(".")[1] || "").length;
  return splits.map(v => v.toFixed(decimals));
};

// the mean of the values of the last `steps` steps at every point
const smoothed = ([xs, ys], steps) => {
  if (steps < 2) return [xs, ys];
  let first = 0, sum = 0;
  return [xs, ys.map((y, i) => {
    sum += y;
    while (xs[first] <= xs[i] - steps) sum -= ys[first++];
    return sum / (i - first + 1);
  })];
};
// the newest value at a step or before it, and where it was measured
const upTo = ([xs, ys], x) => {
  let i = xs.length - 1;
  if (x != null) while (i >= 0 && xs[i] > x) i--;
  return i < 0 ? [null, null] : [xs[i], ys[i]];
};

const paint = name => () => css(name);
const axis = more => ({stroke: paint("--soft"), font: "12px system-ui, sans-serif",
  grid: {stroke: paint("--line"), width: 1}, ticks: {stroke: paint("--line"), width: 1, size: 4},
  gap: 4, ...more});
// a range with an extent, and zero at its end where that is near
const around = (u, low, high) => {
  if (low == null) return [0, 1];
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
    const room = Math.abs(high) / 2 || 1;
    return [low - room, high + room];
  }
  const room = (high - low) * 0.06;
  return [low >= 0 && low < (high - low) / 2 ? 0 : low - room,
          high <= 0 && -high < (high - low) / 2 ? 0 : high + room];
};

// a card with a heading, a chart as wide as it, and a note
const card = (parent, title, unit, notes, height, options, table) => {
  const box = parent.appendChild(make("figure", "chart", ""));
  const head = box.appendChild(make("h3", "", title));
  if (unit) head.append(make("span", "soft", unit));
  const room = box.appendChild(make("div", "plot", ""));
  if (notes) box.append(make("figcaption", "", notes));
  const size = {padding: [8, 14, 0, 0], width: room.clientWidth || 320, height};
  const chart = new uPlot({...options, ...size}, table, room);
  new ResizeObserver(() => {
    if (room.clientWidth && room.clientWidth !== chart.width)
      chart.setSize({width: room.clientWidth, height});
  }).observe(room);
  return chart;
};

// one chart of lines; returns how to draw it with another smoothing
const lines = (parent, curve, height) => {
  const floor = curve.floor ?? -1e300;  // what is farther out has no differences any more
  const below = ([xs, ys]) => [xs, ys.map(y => Math.min(Math.max(y, floor), 1e300))];
  const noisy = line => line.kind !== "dots" && line.points[0].length > 2;
  const colour = (line, at) => paint(`--c${(line.run < 0 ? at : line.run) % 8}`);
  const others = new Set(curve.lines.filter(l => l.kind === "line").map(l => l.name.split(",")[0]));
  const dash = (line, at) => line.run >= 0 && line.kind === "line" && others.size > 1
    ? [[], [6, 3], [2, 3], [10, 3, 2, 3], [1, 2], [8, 6]][at % others.size % 6] : [];
  let shown = curve.lines.map(line => line.points), steps = 1;

  const table = window => {
    steps = window;
    shown = curve.lines.map(line => !noisy(line) || window < 2 ? line.points
      : smoothed(line.points, window));
    const ghosts = curve.lines.map((line, at) => noisy(line) && window > 1 ? below(line.points)
      : [[], []]);
    const ends = [[0, Math.max(1, data.step)], [null, null]];  // every axis is the whole run
    const joined = uPlot.join([ends, ...ghosts, ...shown.map(below)]);
    joined.splice(1, 1);
    return joined;
  };
  const count = curve.lines.length;
  const series = [{label: "step", value: (u, v, s, i) => i == null ? "–" : String(Math.round(v))},
    ...curve.lines.map((line, at) => ({label: line.name, class: "ghost", stroke: colour(line, at),
      alpha: 0.25, width: 1, spanGaps: true, points: {show: false}})),
    ...curve.lines.map((line, at) => ({
      label: line.name, stroke: colour(line, at), spanGaps: true, dash: dash(line, at),
      alpha: line.kind === "thin" ? 0.75 : 1, width: line.kind === "thin" ? 1.25 : 2,
      points: {show: line.kind === "dots" || line.points[0].length === 1, size: 6,
               fill: colour(line, at)},
      value: (u, v, s, i) => {
        const x = i == null ? null : u.data[0][u.cursor.idx ?? i];
        const [where, y] = upTo(shown[at], x);
        return figure(y, curve.unit.startsWith("nats"))
          + (x != null && where != null && where !== x ? ` (step ${Math.round(where)})` : "");
      }}))];
  const chart = card(parent, curve.title, curve.unit, curve.notes, height, {
    series, scales: {x: {time: false}, y: {range: around}},
    axes: [axis({size: 26, space: 60, values: ticks, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500,
             1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7]}),
           axis({size: 56, space: 34, values: ticks})],
    cursor: {sync: {key: "steps"}, y: false, points: {size: (u, s) => s > count ? 7 : 0},
             dataIdx: (u, s, i) => {  // of a series without a value there, the newest one before
               const ys = u.data[s];
               while (s && i > 0 && ys[i] == null) i--;
               return i;
             }},
    hooks: {setSeries: [(u, s, change) => {
      if (s > count && change.show != null) u.setSeries(s - count, {show: change.show});
    }]}}, table(1));
  return window => {
    const {min, max} = chart.scales.x;
    chart.batch(() => {
      chart.setData(table(window));
      if (min != null) chart.setScale("x", {min, max});  // what is zoomed in on stays
    });
  };
};

// shares of the scores in equal ranges, before and after side by side
const spread = (parent, groups) => {
  const low = Math.min(...groups.map(g => g.lowest));
  const high = Math.max(...groups.map(g => g.highest));
  const bins = groups[0].shares.length, width = (high - low) / bins || 1;
  const middle = groups[0].shares.map((_, i) =>
    low + (high > low ? i + 0.5 : i - bins / 2) * width);
  const size = 0.9 / groups.length;
  card(parent, "Distribution of the scores", "% of responses", "", 220, {
    series: [{label: "score around", value: (u, v) => figure(v)},
      ...groups.map((group, at) => ({
        label: `${group.name} (${group.responses})`, stroke: paint(`--c${at}`),
        fill: paint(`--c${at}`), width: 0, points: {show: false},
        paths: uPlot.paths.bars({size: [size, 60], align: groups.length > 1 ? 2 * at - 1 : 0}),
        value: (u, v) => v == null ? "–" : `${v.toFixed(1)} %`}))],
    scales: {x: {time: false, range: () => [middle[0] - width / 2, middle[bins - 1] + width / 2]},
             y: {range: (u, min, max) => [0, max * 1.06 || 1]}},
    axes: [axis({size: 26, space: 60, values: ticks}), axis({size: 56, space: 34, values: ticks})],
    cursor: {y: false, x: false, drag: {x: false, y: false}, points: {show: false}},
  }, [middle, ...groups.map(group => group.shares.map(share => 100 * share))]);
};

const bar = document.getElementById("smoothing"), slide = bar.querySelector("input");
const windows = WINDOWS.filter(steps => steps === 1 || steps <= data.step / 2);
const chosen = () => windows[slide.value] || 1;
let redraw = [];
const draw = () => {
  const places = [document.getElementById("main-charts"), document.getElementById("charts")];
  const spot = document.getElementById("spread");
  for (const place of [...places, spot]) if (place) place.replaceChildren();
  const first = Math.min(2, data.curves.length);
  redraw = data.curves.map((curve, at) => at < first ? lines(places[0], curve, HEIGHT.main)
    : lines(places[1], curve, HEIGHT.small));
  if (data.shares.length) spread(spot, data.shares);
  smooth();
};
const smooth = () => {
  const steps = chosen();
  bar.querySelector("output").textContent = steps > 1 ? `mean of ${steps} steps` : "off";
  for (const one of redraw) one(steps);
};
slide.max = windows.length - 1;
slide.value = 0;
bar.hidden = windows.length < 2;
slide.addEventListener("input", smooth);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
document.getElementById("undrawn")?.remove();

const over = document.getElementById("over");
if (over) {
  const said = [...document.querySelectorAll("section[data-step]")];
  const steps = [...new Set(said.map(one => one.dataset.step))];
  const input = over.querySelector("input");
  const show = () => {
    const step = steps[input.value];
    for (const one of said) one.hidden = one.dataset.step !== step;
    over.querySelector("output").textContent = step;
  };
  input.value = steps.length - 1;
  over.hidden = false;
  input.addEventListener("input", show);
  show();
}
})();
