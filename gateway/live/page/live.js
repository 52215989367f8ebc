// The live page. It reads one stream, GET /live, and shows the last document of
// it. Text from outside only ever becomes text nodes; the page's policy forbids
// anything else. gateway/live/document.go says what the fields mean.
'use strict';

const $ = (id) => document.getElementById(id);

// el makes an element. Children are elements or text.
function el(tag, props, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(props || {})) {
    if (k === 'class') e.className = v; else if (k.startsWith('on')) e[k] = v; else e.setAttribute(k, v);
  }
  e.append(...children);
  return e;
}

// put sets a text if it is another, so that nothing is laid out in vain.
function put(e, text, className) {
  if (e.textContent !== text) e.textContent = text;
  if (className !== undefined && e.className !== className) e.className = className;
}

// keyed has one child of a parent for each item, by its key, in their order.
function keyed(parent, items, key, make, update) {
  const was = [...parent.children], old = new Map(was.map((c) => [c.dataset.key, c]));
  const had = parent.contains(document.activeElement) ? document.activeElement : null;
  let at = parent.firstElementChild;
  for (const item of items) {
    const k = String(key(item));
    let c = old.get(k);
    old.delete(k);
    if (!c) { c = make(item); c.dataset.key = k; }
    if (c === at) at = at.nextElementSibling; else parent.insertBefore(c, at);
    update(c, item);
  }
  const stay = had && [...old.values()].some((c) => c.contains(had)) ? beside(was, had, new Set(old.values())) : had;
  for (const c of old.values()) c.remove();
  if (stay && document.activeElement !== stay) stay.focus({ preventScroll: true }); // what is moved loses it, too
}

// beside is where the focus goes when the child that has it goes: the same in the
// next child that stays, else in the one before, else the section.
function beside(was, had, going) {
  const i = was.findIndex((c) => c.contains(had));
  const near = was.slice(i).concat(was.slice(0, i).reverse()).find((c) => !going.has(c) && c.querySelector(had.tagName));
  return near ? near.querySelector(had.tagName) : had.closest('section');
}

// say has a screen reader read a text out, once while it is the same.
const said = new Map();
function say(what, text) {
  if (said.get(what) === text) return;
  said.set(what, text);
  put($('said'), text);
}

// cells makes a table row whose cells have these classes; fill sets their texts.
const cells = (...classes) => el('tr', null, ...classes.map((c) => el('td', c ? { class: c } : null)));
function fill(row, ...texts) {
  texts.forEach((t, i) => { if (t !== null) put(row.children[i], t); });
}

// Numbers.
const grouped = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
const whole = (n) => grouped.format(n);
function short(n) {
  const a = Math.abs(n);
  if (a >= 1e9) return (n / 1e9).toFixed(2) + 'G';
  if (a >= 1e6) return (n / 1e6).toFixed(2) + 'M';
  if (a >= 1e4) return (n / 1e3).toFixed(0) + 'k';
  if (a >= 1e3) return (n / 1e3).toFixed(1) + 'k';
  return n.toFixed(a > 0 && a < 10 ? 1 : 0);
}
const percent = (s, digits = 0) => (100 * s).toFixed(digits) + ' %';
const inMs = (ms) => (ms >= 10000 ? [(ms / 1000).toFixed(1), 's'] : ms >= 1000 ? [(ms / 1000).toFixed(2), 's'] : [ms.toFixed(ms < 100 ? 1 : 0), 'ms']);
function span(s) {
  if (s < 60) return s.toFixed(s < 10 ? 1 : 0) + ' s';
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}
const clock = (ms) => { const d = new Date(ms); return [d.getHours(), d.getMinutes(), d.getSeconds()].map((n) => String(n).padStart(2, '0')).join(':'); };

// What is known.
const most = 300; // samples
let doc = null; // the last document
let came = 0; // when, by our clock
let held = false; // the page stands still
let at = []; // Unix ms of each sample
const ranks = new Map(); // id -> KV tokens, as long as at; -1: nothing
const shadows = new Map(); // key -> {model, group, policy, values}
const lines = new Map(); // name -> values
let chosen = null; // id of the rank that is read out
const frames = []; // ms of the last renderings; tests read it
window.evenkeel = { frames, get document() { return doc; } };

function takeHistory(h) {
  at = h.at_ms.slice();
  ranks.clear(); shadows.clear(); lines.clear();
  for (const r of h.ranks) ranks.set(r.id, r.kv_tokens);
  for (const s of h.shadows) shadows.set([s.model, s.group, s.policy].join('\0'), { ...s, values: s.imbalance_tokens });
  for (const l of h.lines) lines.set(l.name, l.values);
}

function takeDocument(d) {
  doc = d;
  came = performance.now();
  if (at.length && d.at_ms - at[at.length - 1] < d.every_ms / 2) return; // the history has it
  at.push(d.at_ms);
  const append = (map, key, value, fresh) => {
    let v = map.get(key);
    if (!v) { v = fresh ? fresh() : []; map.set(key, v); }
    const values = Array.isArray(v) ? v : v.values;
    while (values.length < at.length - 1) values.push(-1);
    values.push(Math.round(value));
  };
  for (const m of d.models) {
    for (const g of m.groups) {
      for (const r of g.ranks) if (r.steps) append(ranks, r.id, r.kv_tokens);
      for (const c of g.compared) {
        append(shadows, [m.name, g.name, c.policy].join('\0'), c.imbalance_tokens, () => ({ model: m.name, group: g.name, policy: c.policy, values: [] }));
      }
    }
  }
  const t = d.traffic;
  const now = {
    requests_per_ks: 1000 * t.requests_per_s, tokens_per_s: t.tokens_per_s, pool_entries: d.models.reduce((n, m) => n + m.pool.entries, 0),
  };
  for (const [name, l] of [['ttft', t.ttft], ['tpot', t.tpot]]) {
    if (l.samples) { now[name + '_p50_us'] = 1000 * l.p50_ms; now[name + '_p99_us'] = 1000 * l.p99_ms; }
  }
  for (const [name, v] of Object.entries(now)) append(lines, name, v);
  const over = at.length - most;
  if (over > 0) at.splice(0, over);
  for (const map of [ranks, shadows, lines]) {
    for (const [key, v] of map) {
      const values = Array.isArray(v) ? v : v.values;
      while (values.length < at.length + Math.max(0, over)) values.push(-1);
      if (over > 0) values.splice(0, over);
      if (values.every((x) => x < 0)) map.delete(key);
    }
  }
}

// Drawing. Colours come from the style sheet, so that both themes hold.
let ink = {};
function readColours() {
  const s = getComputedStyle(document.documentElement);
  for (const name of ['ink', 'soft', 'line', 'faint', 'panel', 'bad', 'warn', 'accent', 'l0', 'l1', 'l2', 'l3', 'l4']) ink[name] = s.getPropertyValue('--' + name).trim();
}
const dashes = [[], [6, 3], [2, 2], [8, 3, 2, 3], [1, 3]];

// canvasFor sizes a canvas to its box and the screen, and returns its context.
function canvasFor(c, height) {
  const w = Math.max(1, c.clientWidth), h = height || c.clientHeight, dpr = window.devicePixelRatio || 1;
  if (height && c.style.height !== height + 'px') c.style.height = height + 'px';
  if (c.width !== Math.round(w * dpr) || c.height !== Math.round(h * dpr)) { c.width = Math.round(w * dpr); c.height = Math.round(h * dpr); }
  const x = c.getContext('2d');
  x.setTransform(dpr, 0, 0, dpr, 0, 0);
  x.clearRect(0, 0, w, h);
  x.font = '11px system-ui, "DejaVu Sans", sans-serif';
  return [x, w, h];
}

// viridis, as 256 colours between its published ones.
const viridis = (() => {
  const stops = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37]];
  const out = new Uint8ClampedArray(256 * 4);
  for (let i = 0; i < 256; i++) {
    const p = i / 255 * (stops.length - 1), k = Math.min(stops.length - 2, Math.floor(p)), f = p - k;
    for (let j = 0; j < 3; j++) out[4 * i + j] = stops[k][j] + f * (stops[k + 1][j] - stops[k][j]);
    out[4 * i + 3] = 255;
  }
  return out;
})();
const shade = (share) => { const i = 4 * Math.max(0, Math.min(255, Math.round(255 * share))); return `rgb(${viridis[i]} ${viridis[i + 1]} ${viridis[i + 2]})`; };

// nice rounds a largest value up to one that reads well.
function nice(v, steps = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10]) {
  if (v <= 0) return 1;
  const p = 10 ** Math.floor(Math.log10(v));
  return steps.find((m) => m * p >= v) * p;
}
const fine = [...Array.from({ length: 10 }, (_, i) => 1 + i / 5), ...Array.from({ length: 15 }, (_, i) => 3 + i / 2)]; // colours want all of their scale

// column is where a sample stands among the columns of five minutes; gaps in
// the samples are gaps on the page.
const column = (i) => most - 1 - Math.round((at[at.length - 1] - at[i]) / 1000);

const letters = { up: '', draining: 'D', out: 'O', down: 'X', removed: 'R', foreign: 'F' };
const maps = new WeakMap(); // canvas -> what its rows are, for the pointer and the keys

// drawGroup is the heat map of a group and, on the same rows, its bars now.
const scratch = document.createElement('canvas');
function drawGroup(c, g) {
  const n = g.ranks.length, row = n ? Math.max(3, Math.min(18, Math.floor(432 / n))) : 3, top = 16, high = top + n * row + 20;
  const [x, w] = canvasFor(c, high);
  const names = w > 700 ? 126 : 0, marks = 12, gap = 14, bars = Math.round((w - names) * (w > 700 ? 0.3 : 0.34));
  const left = names + marks, wide = w - left - gap - bars, right = left + wide + gap;
  let largest = 1, capacity = 0;
  for (const r of g.ranks) {
    capacity = Math.max(capacity, r.capacity_tokens);
    for (const v of ranks.get(r.id) || []) if (v > largest) largest = v;
    largest = Math.max(largest, r.kv_tokens);
  }
  const scale = nice(largest, fine);
  scratch.width = most; scratch.height = Math.max(1, n);
  const sx = scratch.getContext('2d'), image = sx.createImageData(most, Math.max(1, n));
  const columns = at.map((_, i) => column(i));
  g.ranks.forEach((r, y) => {
    const values = ranks.get(r.id) || [];
    for (let i = 0; i < values.length; i++) {
      if (values[i] < 0 || columns[i] < 0) continue;
      const to = 4 * (y * most + columns[i]), from = 4 * Math.min(255, Math.round(255 * values[i] / scale));
      for (let j = 0; j < 4; j++) image.data[to + j] = viridis[from + j];
    }
  });
  sx.putImageData(image, 0, 0);
  x.fillStyle = ink.faint;
  x.fillRect(left, top, wide, n * row);
  x.imageSmoothingEnabled = false;
  x.drawImage(scratch, 0, 0, most, Math.max(1, n), left, top, wide, n * row);

  // Bars now: load, and where capacity ends.
  const end = capacity > 0 ? capacity : scale, per = bars / Math.max(end, largest);
  x.fillStyle = ink.faint;
  x.fillRect(right, top, bars, n * row);
  g.ranks.forEach((r, y) => {
    x.fillStyle = r.state === 'up' ? shade(r.kv_tokens / scale) : ink.soft;
    x.fillRect(right, top + y * row, Math.max(r.kv_tokens > 0 ? 1 : 0, r.kv_tokens * per), row > 4 ? row - 1 : row);
  });
  if (capacity > 0) { x.fillStyle = ink.ink; x.fillRect(right + capacity * per - 1, top, 1.5, n * row); }
  if (g.stepping_ranks) {
    const mean = right + g.mean_tokens * per;
    x.strokeStyle = ink.ink; x.setLineDash([3, 3]); x.lineWidth = 1;
    x.beginPath(); x.moveTo(mean, top); x.lineTo(mean, top + n * row); x.stroke(); x.setLineDash([]);
  }

  // Engines' names, and a letter at every rank that is not up.
  let last = '';
  x.textBaseline = 'middle';
  g.ranks.forEach((r, y) => {
    const engine = r.name.split('/')[0], first = engine !== last;
    if (first) {
      last = engine;
      if (y > 0) { x.fillStyle = ink.panel; x.fillRect(left, top + y * row - 0.5, w - left, 1); }
      const many = g.ranks.filter((o) => o.name.split('/')[0] === engine).length;
      if (names && many * row >= 11) { x.fillStyle = ink.soft; x.textAlign = 'left'; x.fillText(fit(x, engine, names - 4), 0, top + y * row + Math.min(row, 14) / 2 + (row < 10 ? 3 : 0)); }
    }
    if (letters[r.state]) {
      const mild = r.state === 'draining' || r.state === 'foreign';
      x.textAlign = 'center'; x.fillStyle = mild ? ink.warn : ink.bad;
      if (row >= 9) x.fillText(letters[r.state], left - 6, top + y * row + row / 2); else x.fillRect(left - 8, top + y * row, mild ? 3 : 7, row);
    }
  });

  // Axes.
  x.textBaseline = 'alphabetic'; x.fillStyle = ink.soft;
  x.textAlign = 'left'; x.fillText('−5 min', left, top + n * row + 14);
  x.textAlign = 'right'; x.fillText('now', left + wide, top + n * row + 14);
  x.textAlign = 'left'; x.fillText('0', right, top + n * row + 14);
  x.textAlign = 'right'; x.fillText(capacity > 0 ? 'capacity ' + short(capacity) : short(end), right + bars, top + n * row + 14);
  x.textAlign = 'left'; x.fillText(w > 700 ? 'KV tokens now; dashes: mean' : 'now', right, 11);
  const legend = Math.min(150, wide / 2);
  for (let i = 0; i < legend; i++) { x.fillStyle = shade(i / legend); x.fillRect(left + i + 10, 3, 1, 9); }
  x.fillStyle = ink.soft; x.fillText('0', left, 11); x.fillText(short(scale) + ' KV tokens', left + legend + 14, 11);

  const pick = g.ranks.findIndex((r) => r.id === chosen);
  if (pick >= 0) {
    x.strokeStyle = ink.ink; x.lineWidth = 1.5;
    x.strokeRect(left - 1, top + pick * row - 1, w - left, row + 2);
  }
  maps.set(c, { ids: g.ranks.map((r) => r.id), top, row });
}

// fit cuts a text to a width.
function fit(x, text, width) {
  if (x.measureText(text).width <= width) return text;
  let t = text;
  while (t.length > 1 && x.measureText('…' + t).width > width) t = t.slice(1);
  return '…' + t;
}

// drawLines draws lines over the last five minutes with names at their ends.
// A line is {name, values, colour, dash, wide}.
function drawLines(c, all, unit) {
  const [x, w, h] = canvasFor(c, 0);
  const left = 44, right = 8, top = 8, bottom = 18, wide = w - left - right, high = h - top - bottom;
  let largest = 0;
  for (const l of all) for (const v of l.values) if (v > largest) largest = v;
  const scale = nice(largest);
  x.fillStyle = ink.soft; x.strokeStyle = ink.line; x.lineWidth = 1; x.textAlign = 'right'; x.textBaseline = 'middle';
  for (const s of [0, 0.5, 1]) {
    const y = top + high * (1 - s);
    x.beginPath(); x.moveTo(left, Math.round(y) + 0.5); x.lineTo(left + wide, Math.round(y) + 0.5); x.stroke();
    x.fillText(unit(scale * s), left - 6, y);
  }
  x.textBaseline = 'alphabetic';
  x.textAlign = 'left'; x.fillText('−5 min', left, h - 4); x.textAlign = 'right'; x.fillText('now', left + wide, h - 4);
  for (const l of all.slice().reverse()) stroke(x, l, left, top, wide, high, scale);
}

function stroke(x, l, left, top, wide, high, scale) {
  x.strokeStyle = l.colour; x.lineWidth = l.wide || 1.5; x.setLineDash(l.dash || []); x.lineJoin = 'round';
  x.beginPath();
  let pen = false, before = -2;
  l.values.forEach((v, i) => {
    const k = column(i);
    if (v < 0 || k < 0) { pen = false; return; }
    const px = left + wide * k / (most - 1), py = top + high * (1 - Math.min(1, v / scale));
    if (pen && k - before < 4) x.lineTo(px, py); else x.moveTo(px, py);
    pen = true; before = k;
  });
  x.stroke(); x.setLineDash([]);
}

function sparkline(c, all) {
  const [x, w, h] = canvasFor(c, 0);
  let largest = 0;
  for (const l of all) for (const v of l.values) if (v > largest) largest = v;
  x.strokeStyle = ink.line; x.lineWidth = 1; x.beginPath(); x.moveTo(0, h - 0.5); x.lineTo(w, h - 0.5); x.stroke();
  for (const l of all) stroke(x, l, 0, 2, w, h - 4, largest || 1);
}

// The parts of the page.
const severity = { bad: ['✕ bad', 'sev bad'], warn: ['! look', 'sev warn'] };

function showProblems(d) {
  const bad = d.problems.filter((p) => p.severity === 'bad').length, rest = d.problems.length - bad;
  const words = [];
  if (bad) words.push(`${bad} ${bad === 1 ? 'thing is' : 'things are'} wrong`);
  if (rest) words.push(`${rest} worth a look`);
  const up = d.engines.filter((e) => e.state === 'up').length;
  put($('problems-title'), words.length ? (bad ? '✕ ' : '! ') + words.join(', ') : `✓ Nothing is wrong: ${up} of ${d.engines.length} engines up, ${whole(d.proxy.open_requests)} requests open`);
  say('verdict', words.join(', ') || 'Nothing is wrong'); // without the numbers that change with every document
  $('problems').className = bad ? 'bad' : rest ? 'warn' : 'ok';
  keyed($('problem-list'), d.problems, (p) => [p.severity, p.panel, p.where, p.what.replace(/[\d.]+/g, '#')].join('\0'),
    () => el('li', null, el('a', { href: '#problems' }, el('span'), el('span', { class: 'where' }), el('span', { class: 'what' }))),
    (li, p) => {
      const a = li.firstElementChild;
      a.setAttribute('href', $(p.panel) ? '#' + p.panel : '#problems');
      put(a.children[0], ...severity[p.severity] || [p.severity, 'sev']);
      put(a.children[1], p.where || 'this proxy');
      put(a.children[2], p.what);
    });
  document.title = (bad ? `(${bad}) ` : '') + 'evenkeel ' + d.proxy.id;
}

function showTiles(d) {
  const t = d.traffic, pool = d.models.reduce((n, m) => n + m.pool.entries, 0), oldest = Math.max(0, ...d.models.map((m) => m.pool.oldest_s));
  const groups = d.models.flatMap((m) => m.groups), worst = groups.reduce((a, g) => (!a || g.lost_share > a.lost_share ? g : a), null);
  const line = (name, colour, dash) => ({ values: lines.get(name) || [], colour: ink[colour], dash });
  const latency = (l, name) => {
    const [p99, unit] = inMs(l.p99_ms), p50 = inMs(l.p50_ms);
    return l.samples ? [p99, unit + ' p99', `p50 ${p50.join(' ')}`, [line(name + '_p99_us', 'l1'), line(name + '_p50_us', 'l0', [3, 2])]]
      : ['–', '', 'none in the last minute', []];
  };
  const tiles = [
    ['Time to first token', ...latency(t.ttft, 'ttft')],
    ['Time per token', ...latency(t.tpot, 'tpot')],
    ['Requests', short(t.requests_per_s), '/s', `${short(t.failures_per_s)} /s fail, ${whole(d.proxy.open_requests)} open`, [line('requests_per_ks', 'l0')]],
    ['Tokens out', short(t.tokens_per_s), '/s', worst && worst.step_ms ? `a step takes ${worst.step_ms.toFixed(1)} ms` : 'step time not known', [line('tokens_per_s', 'l0')]],
    ['Pool', whole(pool), 'wait', pool ? `oldest ${span(oldest)}` : `${whole(d.proxy.pool_places_used)} of ${whole(d.proxy.pool_places)} places`, [line('pool_entries', 'l0')]],
    ['Arrival queue', whole(d.prefill.waiting_requests), 'wait', d.prefill.queue_max ? `of ${whole(d.prefill.queue_max)} that may` : '', []],
    ['Lost to imbalance', worst && worst.model_ms ? percent(worst.lost_share, 1) : '–', 'of a step', worst && worst.model_ms ? `${worst.lost_ms.toFixed(1)} ms of ${worst.model_ms.toFixed(1)} ms, by the step model` : 'step model not known', []],
  ];
  keyed($('tiles'), tiles, (x) => x[0],
    (x) => el('div', null, el('dt', null, x[0]), el('dd', null, el('span'), el('small')), el('dd', { class: 'note' }), el('canvas', { 'aria-hidden': 'true' })),
    (e, [, value, unit, note, all]) => {
      put(e.children[1].children[0], value); put(e.children[1].children[1], unit); put(e.children[2], note);
      e.children[2].title = note;
      sparkline(e.children[3], all);
    });
}

const groupKey = (m, g) => m.name + '\0' + g.name + '\0' + g.barrier;
const groupName = (m, g) => (g.name ? `${m.name} · ${g.name}` : `${m.name} · without barrier`);

function showRanks(d) {
  const groups = d.models.flatMap((m) => m.groups.map((g) => ({ m, g })));
  keyed($('groups'), groups, ({ m, g }) => groupKey(m, g),
    () => {
      const c = el('canvas', { class: 'map', tabindex: '0', role: 'img' });
      c.onpointermove = (e) => choose(c, Math.floor((e.offsetY - maps.get(c).top) / maps.get(c).row));
      c.onpointerleave = () => { if (document.activeElement !== c) read(null); };
      c.onkeydown = (e) => {
        const map = maps.get(c), i = map.ids.indexOf(chosen);
        const to = { ArrowDown: i + 1, ArrowUp: i < 0 ? map.ids.length - 1 : i - 1, Home: 0, End: map.ids.length - 1 }[e.key];
        if (to !== undefined) { choose(c, Math.max(0, Math.min(map.ids.length - 1, to))); e.preventDefault(); }
        if (e.key === 'Escape') read(null);
      };
      return el('div', { class: 'group' }, el('div', { class: 'say' }, el('h3'), el('span', { class: 'soft' })), c, el('div', { class: 'read' }));
    },
    (e, { m, g }) => {
      const say = e.children[0], up = g.ranks.filter((r) => r.state === 'up').length, used = g.ranks.reduce((n, r) => n + r.slots_used, 0), slots = g.ranks.reduce((n, r) => n + r.slots, 0);
      put(say.children[0], groupName(m, g));
      const not = Object.entries(letters).filter(([s]) => s !== 'up').map(([s, l]) => [l, s, g.ranks.filter((r) => r.state === s).length]).filter(([, , k]) => k).map(([l, s, k]) => `${l}: ${k} ${s}`);
      put(say.children[1], [`${up} of ${g.ranks.length} ranks up`, ...not, `${whole(used)} of ${whole(slots)} slots`, `${short(g.kv_tokens)} KV tokens`].join(' · '));
      drawGroup(e.children[1], g);
      e.children[1].setAttribute('aria-label', `${groupName(m, g)}: ${up} of ${g.ranks.length} ranks up, KV tokens from ${short(g.least_tokens)} to ${short(g.most_tokens)}, mean ${short(g.mean_tokens)}. Arrow keys read out a rank.`);
      const r = g.ranks.find((o) => o.id === chosen), out = e.children[2];
      if (!r) {
        const of = (tokens) => g.ranks.find((o) => o.steps && o.kv_tokens === tokens), high = of(g.most_tokens), low = of(g.least_tokens);
        if (out.firstChild && out.firstChild.nodeType !== Node.TEXT_NODE) out.replaceChildren();
        put(out, high && low ? `fullest ${high.name} ${short(high.kv_tokens)}, mean ${short(g.mean_tokens)}, emptiest ${low.name} ${short(low.kv_tokens)}` : '');
        return;
      }
      const fullness = r.capacity_tokens ? ` of ${whole(r.capacity_tokens)} (${percent(r.kv_tokens / r.capacity_tokens)})` : '';
      out.replaceChildren(el('b', null, r.name), ` ${r.state}${r.tight ? ', kept emptier' : ''} · ${whole(r.kv_tokens)}${fullness} KV tokens · ${r.slots_used} of ${r.slots} slots, ${r.running} running`);
    });
  if ($('rank-details').open) {
    keyed($('rank-rows'), groups.flatMap(({ g }) => g.ranks), (r) => r.id, () => cells('id', '', 'n', 'n', 'n', 'n'), (row, r) => {
      fill(row, r.name, r.state + (r.tight ? ', kept emptier' : ''), whole(r.kv_tokens), r.capacity_tokens ? percent(r.kv_tokens / r.capacity_tokens) : '–', `${r.slots_used} / ${r.slots}`, String(r.running));
      row.children[1].className = r.state === 'up' ? '' : r.state === 'draining' ? 'warn' : 'bad';
    });
  }
}

function choose(c, i) {
  const map = maps.get(c);
  read(i >= 0 && i < map.ids.length ? map.ids[i] : null);
}
function read(id) {
  if (chosen === id) return;
  chosen = id;
  const r = doc && doc.models.flatMap((m) => m.groups.flatMap((g) => g.ranks)).find((o) => o.id === id);
  if (r) say('rank', `${r.name} ${r.state}, ${whole(r.kv_tokens)} KV tokens, ${r.slots_used} of ${r.slots} slots`);
  draw();
}

function showBalance(d) {
  const groups = d.models.flatMap((m) => m.groups.filter((g) => g.barrier).map((g) => ({ m, g })));
  const compared = groups.some(({ g }) => g.compared.length);
  put($('balance-note'), compared ? 'imbalance in KV tokens after each round, mean; shadows decide the same rounds' : 'imbalance in KV tokens; list policies in dispatch.shadow to see how they would have decided the same rounds');
  keyed($('balances'), groups, ({ m, g }) => groupKey(m, g),
    () => el('div', { class: 'group' }, el('h3'), el('canvas', { class: 'chart', role: 'img' }),
      el('div', { class: 'scroll' }, el('table', null, el('thead', null, el('tr', null, el('th', null, 'policy'), el('th', { class: 'n' }, 'imbalance'), el('th', { class: 'n' }, 'idle share'), el('th', { class: 'n' }, 'to that in force'))), el('tbody'))),
      el('p', { class: 'fine' }), el('div', { class: 'twin' }, el('h4', null, 'What another policy would have cost'), el('ul'), el('p', { class: 'fine' }))),
    (e, { m, g }) => {
      put(e.children[0], groupName(m, g));
      const now = { policy: g.policy, in_force: true, imbalance_tokens: g.imbalance_tokens, idle_share: g.idle_share };
      const rows = g.compared.length ? g.compared : [now];
      const all = rows.map((c, i) => ({ colour: ink['l' + i % 5], dash: dashes[i % dashes.length], wide: c.in_force ? 2.2 : 1.5, values: g.compared.length ? (shadows.get([m.name, g.name, c.policy].join('\0')) || { values: [] }).values : imbalances(g) }));
      drawLines(e.children[1], all, short);
      e.children[1].setAttribute('aria-label', rows.map((c) => `${c.policy}: ${short(c.imbalance_tokens)}`).join(', '));
      const mine = rows[0].imbalance_tokens;
      keyed(e.querySelector('tbody'), rows, (c) => c.policy,
        () => el('tr', null, el('td', null, el('span', { class: 'swatch' }), el('span')), ...Array.from({ length: 3 }, () => el('td', { class: 'n' }))),
        (row, c) => {
          const i = rows.indexOf(c), swatch = row.children[0].children[0];
          swatch.style.borderTopColor = ink['l' + i % 5];
          swatch.style.borderTopStyle = ['solid', 'dashed', 'dotted', 'double', 'dotted'][i % 5];
          put(row.children[0].children[1], c.policy + (c.in_force ? ', in force' : ''));
          put(row.children[1], whole(c.imbalance_tokens)); put(row.children[2], percent(c.idle_share, 1));
          put(row.children[3], c.in_force || !mine ? '' : (c.imbalance_tokens >= mine ? '+' : '−') + percent(Math.abs(c.imbalance_tokens / mine - 1)));
        });
      put(e.children[3], g.compared.length ? oneRound : '');
      showTwin(e.children[4], g.twin);
    });
}

const oneRound = 'Each shadow starts every round from the real ranks, so it differs by that one round only. This shows where it would decide otherwise, and how level it would leave the ranks at once, but not what the policy is worth.';
const asTheyCame = 'Requests are replayed as they came: clients that wait for an answer would have sent more or fewer under another policy.';

// showTwin says what the last minutes would have been under other policies.
function showTwin(e, twin) {
  keyed(e.children[1], twin.says.map((says, i) => ({ says, i })), (s) => s.i, () => el('li'), (li, s) => put(li, s.says));
  put(e.children[2], twin.verdict ? `${twin.note} ${asTheyCame}` : twin.note);
}

// imbalances are a group's over time: what its ranks lack to the fullest.
function imbalances(g) {
  return at.map((_, i) => {
    let sum = 0, top = 0, n = 0;
    for (const r of g.ranks) {
      const v = (ranks.get(r.id) || [])[i];
      if (v >= 0) { sum += v; n++; if (v > top) top = v; }
    }
    return n ? n * top - sum : -1;
  });
}

function showPools(d) {
  keyed($('pools'), d.models, (m) => m.name,
    () => el('div', { class: 'group' }, el('h3'), el('div', { class: 'ages' })),
    (e, m) => {
      const p = m.pool, top = Math.max(1, ...p.ages), late = p.ttl_s ? p.ttl_s / 2 : 10;
      put(e.children[0], `${m.name}: ${p.entries ? `${whole(p.entries)} wait, the oldest for ${span(p.oldest_s)}` : 'nobody waits'}${p.ttl_s ? ` (of ${span(p.ttl_s)} at most)` : ''}`);
      const items = p.ages.map((n, i) => ({ n, i, word: i < p.up_to_s.length ? `up to ${p.up_to_s[i]} s` : 'older', old: (i ? p.up_to_s[i - 1] : 0) >= late })).flatMap((a) => [{ ...a, part: 0 }, { ...a, part: 1 }, { ...a, part: 2 }]);
      keyed(e.children[1], items, (a) => a.i + '/' + a.part,
        (a) => el('div', { class: ['soft', '', 'n'][a.part] }),
        (cell, a) => {
          if (a.part === 0) put(cell, a.word);
          if (a.part === 1) { cell.className = a.old ? 'bar old' : 'bar'; cell.style.width = 100 * a.n / top + '%'; }
          if (a.part === 2) put(cell, whole(a.n));
        });
    });
}

const gates = { open: ['● open', 'good'], closed: ['■ full', 'warn'], out: ['✕ out', 'bad'], down: ['✕ down', 'bad'], unknown: ['? unknown', 'warn'], removed: ['– removed', 'soft'] };

function showPrefill(d) {
  const p = d.prefill;
  put($('prefill-note'), `policy ${p.policy} · ${whole(p.waiting_requests)} in the arrival queue · ${percent(p.hit_share, 1)} of all prompt tokens found in caches`);
  keyed($('prefill-rows'), p.engines, (e) => e.id,
    () => {
      const row = cells('id', '', '', 'n', 'n', 'n', 'n', 'n', 'n');
      row.children[2].append(el('span', { class: 'gauge', role: 'img' }, el('i'), el('s')));
      return row;
    },
    (row, e) => {
      fill(row, e.id, null, null, e.budget_tokens ? `${short(e.kv_tokens)} of ${short(e.budget_tokens)}` : short(e.kv_tokens), String(e.inflight_requests), whole(e.queued_new_tokens), e.scrape_age_ms < 0 ? '–' : e.waiting.toFixed(0), String(e.pooled + e.dispatched), percent(e.hit_share));
      put(row.children[1], ...gates[e.state] || [e.state, '']);
      const gauge = row.children[2].firstElementChild;
      gauge.className = e.kv_share >= e.gate_share ? 'gauge over' : 'gauge';
      gauge.children[0].style.width = 100 * Math.min(1, e.kv_share) + '%';
      gauge.children[1].style.left = 100 * e.gate_share + '%';
      gauge.title = `${percent(e.kv_share)} of its KV cache; its gate closes at ${percent(e.gate_share)}`;
      gauge.setAttribute('aria-label', gauge.title);
    });
}

const states = { up: ['● up', 'good'], out: ['✕ out', 'bad'], wedged: ['✕ wedged', 'bad'], down: ['✕ down', 'bad'] };

function showEngines(d) {
  const rank = (e) => (e.state !== 'up' ? 0 : e.draining || e.why ? 1 : 2);
  const sorted = d.engines.map((e, i) => [rank(e), i, e]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map((x) => x[2]); // who is not well stands first
  put($('engines-note'), `${d.engines.filter((e) => e.state === 'up').length} of ${d.engines.length} up`);
  keyed($('engine-rows'), sorted, (e) => e.role + ' ' + e.id, () => cells('id', '', '', 'n', 'n', '', 'why'), (row, e) => {
    const [word, tone] = states[e.state] || [e.state, ''];
    fill(row, e.id, e.role, null, span(e.since_s), String(e.ranks), e.version || '', e.why || (e.share < 1 ? `fresh in service: ${percent(e.share)} of its slots` : ''));
    put(row.children[2], e.draining && e.state === 'up' ? 'D draining' : word, e.draining && e.state === 'up' ? 'warn' : tone);
  });
}

function showGeo(d) {
  const peers = d.geo ? d.geo.peers : [];
  $('geo').hidden = !d.geo && !d.areas.length;
  put($('geo-note'), d.geo ? `policy ${d.geo.policy}` : '');
  const rows = [
    ...peers.map((p) => ['peer ' + p.id, p.region, p.up ? (p.draining ? ['D draining', 'warn'] : p.circuit === 'open' ? ['✕ out', 'bad'] : ['● up', 'good']) : ['✕ not up', 'bad'], p.rtt_ms.toFixed(1) + ' ms', String(p.in_flight), p.fault || '']),
    ...d.areas.map((a) => [a.group ? 'group ' + a.group : 'region ' + a.region, a.region, a.admits ? ['● ours', 'good'] : ['– ' + a.phase, 'soft'], '', '', a.holder ? `held by ${a.holder}, epoch ${a.epoch}` : 'held by nobody']),
  ];
  keyed($('geo-rows'), rows, (r) => r[0], () => cells('id', '', '', 'n', 'n', 'why'), (row, r) => {
    fill(row, r[0], r[1], null, r[3], r[4], r[5]);
    put(row.children[2], ...r[2]);
  });
}

function showDecisions(d) {
  $('decisions-none').hidden = d.decisions.length > 0;
  keyed($('decision-rows'), d.decisions, (c) => c.id,
    (c) => {
      const row = cells('', '', '', 'n', 'id', 'id', 'n', '', 'why');
      row.children[1].append(el('button', { type: 'button', class: 'link', onclick: () => receipt(c.id) }, c.id.slice(0, 12)));
      row.children[1].title = c.id;
      return row;
    },
    (row, c) => {
      const wait = inMs(c.wait_ms);
      fill(row, clock(c.at_ms), null, c.model, c.prompt_tokens ? whole(c.prompt_tokens) : '–', c.prefill || '–', c.rank || '–', c.rank ? wait.join(' ') : c.wait_ms && !c.outcome ? wait.join(' ') + ' so far' : '–', c.outcome || 'runs', c.why);
      row.children[7].className = !c.outcome || c.outcome === 'ok' ? '' : 'bad';
    });
}

async function receipt(id) {
  put($('receipt-title'), 'Receipt of ' + id);
  put($('receipt-text'), 'asking …');
  $('receipt').showModal();
  try {
    const r = await ask('/decisions?id=' + encodeURIComponent(id)), text = await r.text();
    put($('receipt-text'), r.ok ? JSON.stringify(JSON.parse(text).receipts[0], null, 2) : r.status === 404 ? 'There is no receipt of it any more: only the last ones are kept.' : `The proxy answered ${r.status}: ${text}`);
  } catch (e) {
    put($('receipt-text'), 'The proxy did not answer: ' + e.message);
  }
}

// render shows the document, once a frame at most.
let due = false;
function draw() {
  if (due || !doc) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const began = performance.now();
    const d = doc, p = d.proxy;
    put($('who'), [p.id, p.region, p.role, p.version, 'up ' + span(p.uptime_s), 'decode ' + p.policy, 'prefill ' + p.prefill_policy].filter(Boolean).join(' · '));
    for (const show of [showProblems, showTiles, showRanks, showBalance, showPools, showPrefill, showEngines, showGeo, showDecisions]) show(d);
    frames.push(performance.now() - began);
    if (frames.length > 240) frames.shift();
    tell();
  });
}

// The stream.
let lostAt = 0; // since when there is none, 0: there is one
let why = '';
const ask = (path, signal) => {
  const token = sessionStorage.getItem('evenkeel-token');
  return fetch(path, { signal, cache: 'no-store', redirect: 'error', headers: token ? { Authorization: 'Bearer ' + token } : {} });
};

async function follow() {
  for (let pause = 500; ; pause = Math.min(5000, pause * 1.6)) {
    const gone = new AbortController();
    let watch = 0;
    const alive = () => { clearTimeout(watch); watch = setTimeout(() => gone.abort(), 8000); }; // a dead link tells nothing
    try {
      alive();
      const r = await ask('/live', gone.signal);
      if (r.status === 401) { clearTimeout(watch); await askToken(); pause = 300; continue; }
      if (!r.ok) throw new Error((await r.json().catch(() => null))?.error?.message ?? `the proxy answers ${r.status}`); // why, where it says so
      await events(r.body, (name, data) => {
        alive();
        pause = 500;
        if (name === 'history') takeHistory(data);
        if (name === 'document') {
          lostAt = 0;
          if (held) return;
          takeDocument(data);
          draw();
        }
      });
      why = 'the proxy ended the stream';
    } catch (e) {
      why = e.name === 'AbortError' ? 'nothing came for 8 s' : e.message === 'Failed to fetch' ? 'the proxy does not answer' : e.message;
    }
    clearTimeout(watch);
    gone.abort();
    lostAt = lostAt || performance.now();
    tell();
    await new Promise((done) => setTimeout(done, pause * (0.8 + 0.4 * Math.random())));
  }
}

// events reads a stream of them to its end.
async function events(body, on) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf('\n\n')) >= 0; rest = rest.slice(end + 2)) {
      let name = 'message', data = '';
      for (const line of rest.slice(0, end).split('\n')) {
        if (line.startsWith('event: ')) name = line.slice(7);
        if (line.startsWith('data: ')) data += line.slice(6);
      }
      on(name, JSON.parse(data));
    }
  }
}

// tell says how fresh the page is.
function tell() {
  const age = doc ? (performance.now() - came) / 1000 : 0, stale = lostAt > 0 || (doc && !held && age > 3 * doc.every_ms / 1000);
  document.body.classList.toggle('lost', !!stale);
  document.body.classList.toggle('held', held && !stale);
  const ago = doc ? `what is shown is ${span(age)} old` : 'nothing was shown yet';
  put($('link-word'), stale ? `lost: ${why || 'no news'}; ${ago}` : held ? `held still, ${ago}` : doc ? 'live' : 'connecting');
  if (doc) say('link', stale ? `lost: ${why || 'no news'}` : held ? 'held still' : 'live');
  if (stale && doc) {
    $('problems').className = 'bad';
    put($('problems-title'), `▲ No news for ${span(age)}: ${why || 'the proxy sends nothing'}. Trying again.`);
  }
}

let wrong = false;
function askToken() {
  put($('token-wrong'), wrong || sessionStorage.getItem('evenkeel-token') ? 'That token is not the one.' : '');
  $('token').value = '';
  if (!$('token-dialog').open) $('token-dialog').showModal();
  return new Promise((done) => {
    $('token-form').onsubmit = (e) => {
      e.preventDefault();
      sessionStorage.setItem('evenkeel-token', $('token').value);
      wrong = true;
      $('token-dialog').close();
      done();
    };
    $('token-dialog').oncancel = (e) => e.preventDefault(); // without one there is nothing to see
  });
}

// Theme and keys.
const themes = ['auto', 'light', 'dark'];
let theme = 'auto';
try { theme = themes.includes(localStorage.getItem('evenkeel-theme')) ? localStorage.getItem('evenkeel-theme') : 'auto'; } catch { /* a browser that keeps nothing */ }
function setTheme(to) {
  theme = to;
  if (to === 'auto') delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = to;
  put($('theme'), 'Theme: ' + to);
  try { localStorage.setItem('evenkeel-theme', to); } catch { /* as above */ }
  readColours();
  draw();
}
const nextTheme = () => setTheme(themes[(themes.indexOf(theme) + 1) % themes.length]);

function go(id) {
  const s = $(id);
  if (s.hidden) return;
  s.scrollIntoView({ block: 'start' });
  (s.querySelector('canvas.map') || s).focus({ preventScroll: true });
}

const keys = {
  '?': () => { if (!$('help').open) $('help').showModal(); }, t: nextTheme,
  h: () => { held = !held; tell(); },
  0: () => go('problems'), 1: () => go('ranks'), 2: () => go('balance'), 3: () => go('pool'), 4: () => go('prefill'), 5: () => go('engines'), 6: () => go('decisions'),
};
document.addEventListener('keydown', (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches('input, textarea') || document.querySelector('dialog[open]')) return;
  const f = keys[e.key];
  if (f) { f(); e.preventDefault(); }
});
$('theme').onclick = nextTheme;
$('keys').onclick = keys['?'];
$('rank-details').ontoggle = draw;
matchMedia('(prefers-color-scheme: dark)').onchange = () => { readColours(); draw(); };
new ResizeObserver(draw).observe(document.querySelector('main'));
setInterval(tell, 500);
setTheme(theme);
follow();
