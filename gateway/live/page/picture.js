// The picture of a group that steps together: a column of KV tokens for each rank, and
// the line at the fullest, which every step waits for.
import { $, el, keyed, put, say, cells, fill } from './dom.js';
import { ink, canvasFor, fit, font, sparkline } from './charts.js';
import { past } from './history.js';
import { drawMarks, legendOf, markRow, marksOf } from './marks.js';
import { byHost, ceiling, place, runs } from './layout.js';
import { inMs, percent, short, span, whole } from './words.js';

export const groupKey = (m, g) => m.name + '\0' + g.name + '\0' + g.barrier;
export const groupName = (m, g) => (g.name ? `${m.name} · ${g.name}` : `${m.name} · ${groupsOf(g)}without barrier`);
const groupsOf = (g) => [...new Set(g.ranks.map((r) => r.group).filter(Boolean))].map((n) => `${n}, `).join('');
export const letters = { up: '', draining: 'D', out: 'O', down: 'X', removed: 'R', foreign: 'F' };

// why is what is known of a rank that is not up, and of its engine if that is not up either.
function why(r, engines) {
  const e = engines.get(r.name.split('/')[0]), engine = ['down', 'out'].includes(r.state) && e && e.state !== 'up';
  return engine ? `${e.state} for ${span(e.since_s)}: ${reasonOf(e)}` : r.why ? `${r.state}: ${r.why}` : r.state;
}

// reasonOf leaves the engine's own address out of its reason.
const reasonOf = (e) => (e.why || 'no reason told').replace(/\b(engine|dial tcp) \S+:\d+: /g, '').replace(/^connect: connect: /, '');

// cause is the same for ranks that are gone for the same reason; null for the others.
function cause(r, engines) {
  if (r.steps) return null;
  const e = engines.get(r.name.split('/')[0]);
  return e && e.state !== 'up' ? e.state + reasonOf(e) : r.state;
}

// read are the KV tokens that steps read: those of prompts that are not computed yet are not among them.
const read = (r) => r.kv_tokens - (r.unread_kv_tokens || 0);

// kvFull says that a rank has hardly any KV memory left.
const kvFull = (r) => r.steps && r.capacity_tokens > 0 && r.kv_tokens >= 0.95 * r.capacity_tokens;

// stepTime says how long a step takes; nothing where a token takes so much longer that the streams
// cannot have come in common steps.
export const stepTime = (g, t) => (g.step_ms && !(t.tpot.samples && t.tpot.p50_ms > 3 * g.step_ms) ? `a step takes ${g.step_ms.toFixed(1)} ms` : '');

// lost is what the waste costs, in words; empty while that is not known.
function lost(g) {
  if (!g.barrier || g.stepping_ranks < 2) return '';
  if (g.model_ms > 0) return `${g.lost_ms.toFixed(1)} ms of each step are spent waiting for the fullest rank`;
  const taking = g.ranks.filter((r) => r.steps && r.state !== 'draining'); // a rank that drains is meant to be empty
  const held = taking.reduce((sum, r) => sum + read(r), 0), most = taking.length * g.most_tokens;
  return most ? `${percent(Math.max(0, 1 - held / most), 1)} of what the ranks could hold is empty below the line` : '';
}

function hatch(x, colour) {
  const p = document.createElement('canvas');
  p.width = p.height = 8;
  const c = p.getContext('2d');
  c.strokeStyle = colour; c.lineWidth = 1.4;
  for (const d of [-8, 0, 8]) { c.beginPath(); c.moveTo(d - 1, 9); c.lineTo(d + 9, -1); c.stroke(); }
  return x.createPattern(p, 'repeat');
}

// paint draws a group from a corner on, w wide, and returns its height and where its
// columns are. With x null it only measures.
function paint(x, g, engines, w, chosen) {
  const axis = w > 700 ? 52 : 38, right = 4;
  const bands = place(g.ranks, axis, w - axis - right), top = 22, lane = g.rounds ? 34 : 0, slots = 20 + lane, names = 16;
  const high = bands.length > 1 ? 120 : w > 700 ? 230 : 190, each = high + slots + names + (bands.length > 1 && g.ranks.some((r) => marks.of(r.name)) ? 20 : 10), map = [];
  const keys = legend(g, w - axis - right), scale = ceiling(g), total = top + bands.length * each + (keys[keys.length - 1].row + 1) * keyRow;
  if (!x) return { height: total };
  x.font = font; x.lineJoin = 'round';
  const waste = hatch(x, ink.waste), dead = hatch(x, ink.line);
  bands.forEach((hosts, b) => {
    const base = top + b * each + high, y = (tokens) => base - high * Math.min(1, tokens / scale), line = y(g.most_tokens), last = hosts[hosts.length - 1], end = last.x + last.w;
    x.textBaseline = 'middle'; x.textAlign = 'right'; x.fillStyle = ink.soft;
    x.fillText('0', axis - 6, base - 4); x.fillText('slots', axis - 4, base + 3 + (slots - lane) / 2);
    const columns = hosts.flatMap((h) => h.columns);
    for (const c of columns) {
      const r = c.rank, lives = r.steps, level = y(read(r)), brim = y(r.kv_tokens);
      map.push({ id: r.id, x: c.x, w: c.w, top: base - high, bottom: base + slots });
      x.fillStyle = ink.faint;
      if (lives) {
        x.fillRect(c.x, base - high, c.w, high);
        if (r.state === 'draining') drains(x, c, base - high, high, level, line);
        else if (g.barrier) { x.fillStyle = ink.panel; x.fillRect(c.x, line, c.w, level - line); x.fillStyle = waste; x.fillRect(c.x, line, c.w, level - line); }
        x.fillStyle = r.state === 'up' ? ink.fill : r.state === 'draining' || r.state === 'foreign' ? ink.warn : ink.bad;
        x.fillRect(c.x, level, c.w, base - level);
        if (brim < level) { x.fillStyle = ink.panel; x.fillRect(c.x, brim, c.w, level - brim); x.fillStyle = dots(x, ink.fill); x.fillRect(c.x, brim, c.w, level - brim); x.strokeStyle = ink.fill; x.lineWidth = 1; x.strokeRect(c.x + 0.5, brim + 0.5, Math.max(1, c.w - 1), level - brim); }
        if (r.capacity_tokens && r.capacity_tokens <= scale) {
          x.fillStyle = ink.ink; x.fillRect(c.x, y(r.capacity_tokens), c.w, 1);
          if (c === columns[0]) { x.textAlign = 'right'; x.fillStyle = ink.soft; x.fillText(w > 700 ? 'capacity' : 'full', axis - 4, beside(y(r.capacity_tokens), g.barrier && g.stepping_ranks ? line : -99)); }
        }
        if (kvFull(r)) { x.fillStyle = ink.warn; x.fillRect(c.x, brim, c.w, 4); }
        tickSlots(x, r, c, base + 3, slots - lane - 4);
      } else {
        x.fillStyle = dead; x.fillRect(c.x, base - high, c.w, high);
      }
      if (letters[r.state] && c.w >= 6) {
        x.textAlign = 'center'; x.fillStyle = r.state === 'draining' || r.state === 'foreign' ? ink.warn : ink.bad;
        x.font = 'bold ' + font; x.fillText(letters[r.state], c.x + c.w / 2, r.state === 'draining' ? base - high + 8 : lives ? Math.max(base - high + 7, level - 7) : base - 7); x.font = font;
      }
    }
    if (lane) prompts(x, g, columns, axis, base + slots - lane, lane, w);
    for (const h of hosts) {
      x.fillStyle = ink.line; x.fillRect(h.x, base + slots + 1, h.w - 1, 1);
      x.fillStyle = ink.soft; x.textAlign = 'center'; x.fillText(fit(x, h.name, h.w), h.x + h.w / 2, base + slots + 9);
    }
    if (g.stepping_ranks) {
      if (g.barrier) {
        x.strokeStyle = ink.accent; x.lineWidth = 2; x.beginPath(); x.moveTo(axis - 4, line); x.lineTo(end, line); x.stroke();
        x.fillStyle = ink.accent; x.textAlign = 'right'; x.fillText(short(g.most_tokens), axis - 7, line);
      }
      const mean = y(g.mean_tokens);
      x.fillStyle = ink.soft;
      if (Math.abs(mean - line) > 12 || !g.barrier) { x.textAlign = 'right'; x.fillText(short(g.mean_tokens), axis - 7, mean); x.fillRect(axis - 4, mean, 4, 1); }
      if (b === 0 && lost(g)) tellLost(x, g, columns, line, axis, w - right);
    }
    for (const h of hosts) for (const run of runs(h.columns, (r) => cause(r, engines))) tellDead(x, { ...run, what: why(run.columns[0].rank, engines) }, base - high, high);
    drawMarks(x, columns, marks, base - high, w - right);
    const pick = map.find((m) => m.id === chosen);
    if (pick && pick.bottom === base + slots) { x.strokeStyle = ink.ink; x.lineWidth = 1.5; x.strokeRect(pick.x - 1, base - high - 1, pick.w + 2, high + slots + 2); }
  });
  x.textBaseline = 'middle';
  for (const k of keys) { k.draw(x, axis + k.x, top + bands.length * each + k.row * keyRow, waste, dead); x.fillStyle = ink.soft; x.textAlign = 'left'; x.fillText(k.words, axis + k.x + 18, top + bands.length * each + k.row * keyRow + 6); }
  x.textBaseline = 'alphabetic';
  return { height: total, map };
}

// beside is where a word of the axis stands, so that it is not written over the number at the line.
const beside = (y, line) => (Math.abs(y - line) >= 12 ? y : y <= line ? line - 12 : line + 12);

// drains is the look of a rank that drains: an outline and dots, and the word where there
// is room. What is empty above it is meant to be.
function drains(x, c, top, high, level, line) {
  x.fillStyle = ink.panel; x.fillRect(c.x, top, c.w, level - top);
  x.fillStyle = dots(x, ink.warn); x.fillRect(c.x, top, c.w, level - top);
  x.strokeStyle = ink.warn; x.lineWidth = 1.5; x.strokeRect(c.x + 0.75, top + 0.75, Math.max(1, c.w - 1.5), high - 1.5);
  const word = 'drains', wide = x.measureText(word).width;
  if (c.w < 12 || level - line < wide + 28) return; // below what is written into the waste
  x.save();
  x.translate(c.x + c.w / 2, line + 24); x.rotate(-Math.PI / 2); x.textAlign = 'right';
  x.fillStyle = ink.panel; x.fillRect(-wide - 3, -7, wide + 6, 14);
  x.fillStyle = ink.warn; x.fillText(word, 0, 0);
  x.restore();
}

function dots(x, colour) {
  const p = document.createElement('canvas');
  p.width = p.height = 6;
  const c = p.getContext('2d');
  c.fillStyle = colour; c.fillRect(2, 2, 1.5, 1.5);
  return x.createPattern(p, 'repeat');
}

// legend says what the looks in a group's picture mean, in rows as wide as there is room:
// {words, x, row, draw}.
const keyRow = 16, ruler = document.createElement('canvas').getContext('2d');
const box = (fill) => (x, at, y, waste, dead) => { x.fillStyle = ink.faint; x.fillRect(at, y, 12, 12); x.fillStyle = fill(waste, dead); x.fillRect(at, y, 12, 12); };
function legend(g, wide) {
  const has = (s) => g.ranks.some((r) => r.state === s);
  const list = [
    ...legendOf(g.ranks, marks),
    { words: 'KV tokens', draw: box(() => ink.fill) },
    ...(g.barrier && g.stepping_ranks ? [{ words: 'the fullest rank, which every step waits for', draw: (x, at, y) => { x.fillStyle = ink.accent; x.fillRect(at, y + 5, 12, 2); } }, { words: 'time lost to waiting for it', draw: box((waste) => waste) }] : []),
    ...(g.ranks.some((r) => r.unread_kv_tokens) ? [{ words: 'KV of prompts that are not computed yet', draw: (x, at, y) => { x.fillStyle = dots(x, ink.fill); x.fillRect(at, y, 12, 12); x.strokeStyle = ink.fill; x.lineWidth = 1; x.strokeRect(at + 0.5, y + 0.5, 11, 11); } }] : []),
    ...(g.rounds ? [{ words: 'prompt tokens to compute', draw: box(() => ink.l1) }, { words: 'got prompts in a round of the last second', draw: (x, at, y) => { x.fillStyle = ink.l2; x.fillRect(at, y + 5, 12, 3); } }] : []),
    ...(g.ranks.some((r) => r.steps && r.slots && r.slots_used >= r.slots) ? [{ words: 'all slots of a rank are taken', draw: box(() => ink.warn) }] : []),
    ...(g.ranks.some(kvFull) ? [{ words: 'the KV cache of a rank is full', draw: (x, at, y) => { x.fillStyle = ink.fill; x.fillRect(at, y, 12, 12); x.fillStyle = ink.warn; x.fillRect(at, y, 12, 4); } }] : []),
    ...(has('draining') ? [{ words: 'D drains: takes no new requests', draw: (x, at, y) => drains(x, { x: at, w: 11 }, y, 12, y + 12, y) }] : []),
    ...(g.ranks.some((r) => !r.steps) ? [{ words: 'does not step: ' + Object.keys(letters).filter((s) => g.ranks.some((r) => !r.steps && r.state === s)).map((s) => `${letters[s]} ${s}`).join(', '), draw: box((waste, dead) => dead) }] : []),
    ...(has('foreign') ? [{ words: 'F is served by another proxy', draw: box(() => ink.warn) }] : []),
  ];
  let at = 0, row = 0;
  ruler.font = font;
  for (const k of list) {
    const need = 18 + ruler.measureText(k.words).width;
    if (at > 0 && at + need > wide) { at = 0; row++; }
    k.x = at; k.row = row;
    at += need + 14;
  }
  return list;
}

// tickSlots shows the slots of a rank below its column: those in use are filled, with
// a tick between two where there is room, else at each quarter.
function tickSlots(x, r, c, top, high) {
  const share = r.slots ? Math.min(1, r.slots_used / r.slots) : 0, ticks = r.slots && high / r.slots >= 3 ? r.slots : 4;
  x.fillStyle = ink.faint; x.fillRect(c.x, top, c.w, high);
  x.fillStyle = share >= 1 ? ink.warn : ink.soft; x.fillRect(c.x, top + high * (1 - share), c.w, high * share);
  x.fillStyle = ink.panel;
  for (let i = 1; i < ticks; i++) x.fillRect(c.x, Math.round(top + high * i / ticks), c.w, 1);
}

// prompts shows below the slots what each rank has yet to compute, and above it the rounds of the last
// second: one stroke from the first rank to the last, thick over those that got prompts.
function prompts(x, g, columns, axis, top, high, w) {
  const most = Math.max(leastBacklog, ...g.ranks.map(backlog)), base = top + high - 1, full = high - 9, got = lately.get(g)?.ranks;
  x.textAlign = 'right'; x.fillStyle = ink.soft; x.fillText(w > 700 ? 'prompts' : 'new', axis - 4, base - full / 2);
  for (const c of columns) {
    if (!c.rank.steps) continue;
    x.fillStyle = ink.faint; x.fillRect(c.x, base - full, c.w, full);
    const part = full * backlog(c.rank) / most;
    x.fillStyle = ink.l1; x.fillRect(c.x, base - part, c.w, part);
  }
  const some = got ? columns.filter((c) => got.has(c.rank.id)) : [];
  if (!some.length) return;
  const first = some[0], last = some[some.length - 1];
  x.fillStyle = ink.l2; x.fillRect(first.x, top + 4, last.x + last.w - first.x, 1);
  for (const c of some) x.fillRect(c.x, top + 3, c.w, 3);
}
const leastBacklog = 2048; // tokens that fill the lane where no rank has more
const backlog = (r) => r.backlog_tokens || 0;

// lately has for each group of the document the rounds of the second before it.
let lately = new Map();
function compare(d, before) {
  lately = new Map();
  const sooner = before ? d.at_ms - before.at_ms : 0;
  if (sooner <= 0 || sooner > 2.5 * d.every_ms) return; // an earlier moment, or a gap
  const were = new Map(before.models.flatMap((m) => m.groups.map((g) => [groupKey(m, g), g])));
  for (const m of d.models) {
    for (const g of m.groups) {
      const was = were.get(groupKey(m, g)), sent = g.rounds && was?.rounds ? g.rounds.sent - was.rounds.sent : 0;
      if (sent <= 0) continue;
      const had = new Map(was.ranks.map((r) => [r.id, r.prompts || 0]));
      lately.set(g, { sent, ranks: new Set(g.ranks.filter((r) => (r.prompts || 0) > (had.get(r.id) ?? 0)).map((r) => r.id)) });
    }
  }
}

// roundsOf is how a group gets its prompts, in words; empty where its ranks do not prefill.
function roundsOf(g) {
  if (!g.rounds) return '';
  const of = lately.get(g);
  return g.rounds.says + (of ? ` In the last second ${of.sent === 1 ? '1 round' : `${whole(of.sent)} rounds`} went to ${of.ranks.size} of ${g.ranks.length} ranks.` : '');
}

// noModel asks what keeps steps from following the load; empty where they do, or were not told yet.
export const noModel = (g) => (g.model_why?.endsWith('?') ? `There is no step model: ${g.model_why}` : '');

// tellLost writes what the waste costs into it, where there is most of it.
function tellLost(x, g, columns, line, axis, end) {
  const says = end - axis < 500 ? lost(g).replace('spent waiting for the fullest rank', 'lost').replace('of what the ranks could hold is empty below the line', 'of the room below the line is empty') : lost(g);
  const words = fit(x, says, end - axis - 12, true), wide = x.measureText(words).width + 10;
  let best = axis, most = -1;
  for (const c of columns) {
    const from = Math.min(Math.max(axis, c.x), Math.max(axis, end - wide));
    let sum = 0;
    for (const o of columns) if (o.rank.steps && o.rank.state !== 'draining' && o.x + o.w > from && o.x < from + wide) sum += g.most_tokens - read(o.rank);
    if (sum > most) { most = sum; best = from; }
  }
  const at = line + 4;
  x.fillStyle = ink.panel; x.fillRect(best, at, wide, 17);
  x.strokeStyle = ink.waste; x.lineWidth = 1; x.strokeRect(best + 0.5, at + 0.5, wide - 1, 16);
  x.fillStyle = ink.ink; x.textAlign = 'left'; x.fillText(words, best + 5, at + 9);
}

// tellDead writes why ranks are gone into their gap, upright where it is thin.
function tellDead(x, run, top, high) {
  const first = run.columns[0], last = run.columns[run.columns.length - 1], wide = last.x + last.w - first.x;
  x.save();
  x.textAlign = 'left';
  if (wide < 90) {
    if (wide >= 9) {
      x.translate(first.x + wide / 2, top + high - 16); x.rotate(-Math.PI / 2);
      const words = fit(x, run.what, high - 24, true);
      x.fillStyle = ink.panel; x.fillRect(-3, -7, x.measureText(words).width + 6, 14);
      x.fillStyle = ink.bad; x.fillText(words, 0, 0);
    }
    x.restore();
    return;
  }
  const words = run.what.split(' ');
  let at = top + 12, text = '';
  const put = () => { if (!text) return; x.fillStyle = ink.panel; x.fillRect(first.x + 3, at - 8, x.measureText(text).width + 6, 15); x.fillStyle = ink.bad; x.fillText(text, first.x + 6, at); at += 15; text = ''; };
  for (const word of words) {
    if (text && x.measureText(text + ' ' + word).width > wide - 14) put();
    if (at > top + high - 24) { text = ''; break; }
    text = fit(x, text ? text + ' ' + word : word, wide - 14, true);
  }
  put();
  x.restore();
}

// The part of the page.
const maps = new WeakMap(); // canvas -> where its columns are
let chosen = null; // id of the rank that is read out
let now = null; // the document that is shown
let marks = marksOf([]); // of its incidents

const few = 16; // ranks: groups of so many stand side by side

export function showGroups(d, redraw) {
  if (d !== now) compare(d, now);
  now = d;
  marks = marksOf(d.incidents);
  const groups = d.models.flatMap((m) => m.groups.map((g) => ({ m, g })));
  const engines = new Map(d.engines.filter((e) => e.role !== 'prefill').map((e) => [e.id, e]));
  keyed($('groups'), groups, ({ m, g }) => groupKey(m, g), () => makeGroup(redraw), tellGroup);
  groups.forEach(({ m, g }, i) => drawGroup($('groups').children[i], m, g, engines)); // once all stand side by side, and are as wide as they stay
  if ($('rank-details').open) {
    keyed($('rank-rows'), groups.flatMap(({ g }) => byHost(g.ranks).flatMap((h) => h.ranks)), (r) => r.id, () => cells('id', '', 'n', 'n', 'n', 'n', 'n', 'n'), (row, r) => {
      fill(row, r.name + ofGroup(r), (r.state === 'up' ? 'up' : why(r, engines)) + (r.tight ? ', kept emptier' : ''), whole(r.kv_tokens), r.capacity_tokens ? percent(r.kv_tokens / r.capacity_tokens) : '–', `${r.slots_used} / ${r.slots}`, String(r.running), r.token_ms ? inMs(r.token_ms).join(' ') : '–', r.prompts ? whole(backlog(r)) : '–');
      row.children[1].className = r.state === 'up' ? '' : r.state === 'draining' ? 'warn' : 'bad';
      markRow(row, marks.of(r.name));
    });
  }
}

const upOf = (g) => g.ranks.filter((r) => r.state === 'up').length;

// tellGroup writes the name and the numbers of a group above its picture.
function tellGroup(e, { m, g }) {
  const [name, facts] = e.children[0].children, up = upOf(g), used = g.ranks.reduce((n, r) => n + r.slots_used, 0), slots = g.ranks.reduce((n, r) => n + r.slots, 0);
  e.className = g.ranks.length <= few ? 'group small' : 'group';
  const mark = marks.of(g.name, groupName(m, g), m.name);
  put(name.firstChild, groupName(m, g));
  put(name.lastChild, mark ? mark.text : '', mark ? mark.severity : '');
  const not = Object.entries(letters).filter(([s]) => s !== 'up').map(([s, l]) => [l, s, g.ranks.filter((r) => r.state === s).length]).filter(([, , k]) => k).map(([l, s, k]) => `${l}: ${k} ${s}`);
  put(facts, [`${up} of ${g.ranks.length} ranks up`, ...not, `${whole(Math.min(used, slots))} of ${whole(slots)} slots`, used > slots && slots ? `${whole(used - slots)} more in engines' queues` : '', `${short(g.kv_tokens)} KV tokens`, up ? stepTime(g, now.traffic) : ''].filter(Boolean).join(' · '));
}

function drawGroup(e, m, g, engines) {
  const c = e.children[1], { height } = paint(null, g, engines, c.clientWidth), [x, w] = canvasFor(c, height);
  maps.set(c, paint(x, g, engines, w, chosen).map);
  c.setAttribute('aria-label', describe(m, g));
  e.children[2].onclick = () => copyImage(e.children[2], m, g, engines);
  showRead(e.children[3], g, engines);
  put(e.children[4], [roundsOf(g), noModel(g)].filter(Boolean).join(' '));
  e.children[4].classList.toggle('soft', !roundsOf(g)); // why there is no step model is no fault
}

// describe is the picture for those who do not see it.
function describe(m, g) {
  return `${groupName(m, g)}: ${upOf(g)} of ${g.ranks.length} ranks up, KV tokens from ${short(g.least_tokens)} to ${short(g.most_tokens)}, mean ${short(g.mean_tokens)}.` +
    (lost(g) ? ` ${lost(g)}.` : '') + (g.rounds ? ` ${g.rounds.says}` : '') + legendOf(g.ranks, marks).map((k) => ` Marked as ${k.words}.`).join('') + ' Arrow keys read out a rank.';
}

function makeGroup(redraw) {
  const c = el('canvas', { class: 'map', tabindex: '0', role: 'img' });
  const choose = (id) => { if (chosen !== id) { chosen = id; speak(); redraw(); } };
  c.onpointermove = (e) => {
    const hit = maps.get(c).find((m) => e.offsetX >= m.x && e.offsetX <= m.x + m.w + 1 && e.offsetY >= m.top && e.offsetY <= m.bottom);
    choose(hit ? hit.id : null);
  };
  c.onpointerleave = () => { if (document.activeElement !== c) choose(null); };
  c.onkeydown = (e) => {
    const ids = maps.get(c).map((m) => m.id), i = ids.indexOf(chosen);
    const to = { ArrowDown: i + 1, ArrowRight: i + 1, ArrowUp: i < 0 ? ids.length - 1 : i - 1, ArrowLeft: i < 0 ? ids.length - 1 : i - 1, Home: 0, End: ids.length - 1 }[e.key];
    if (to !== undefined) { choose(ids[Math.max(0, Math.min(ids.length - 1, to))]); e.preventDefault(); }
    if (e.key === 'Escape') choose(null);
  };
  return el('div', { class: 'group' }, el('div', { class: 'say' }, el('h3', null, '', el('span')), el('span', { class: 'soft' })), c, el('button', { type: 'button', class: 'copy' }, 'Copy as image'),
    el('div', { class: 'read' }, el('span'), el('canvas', { class: 'spark', 'aria-hidden': 'true', hidden: '' })), el('p', { class: 'rounds' }));
}

// named tells by which incidents a rank is named.
const ofGroup = (r) => (r.group ? ` of ${r.group}` : '');
const named = (r) => (marks.of(r.name) ? ` · ${marks.of(r.name).text}` : '');

const toCompute = (r) => (r.prompts ? `, ${whole(backlog(r))} prompt tokens to compute` : '');

function speak() {
  const r = now.models.flatMap((m) => m.groups.flatMap((g) => g.ranks)).find((o) => o.id === chosen);
  if (r) say('rank', `${r.name} ${r.state}, ${whole(r.kv_tokens)} KV tokens, ${r.slots_used} of ${r.slots} slots${toCompute(r)}${named(r)}`);
}

function showRead(out, g, engines) {
  const r = g.ranks.find((o) => o.id === chosen), words = out.children[0], spark = out.children[1];
  spark.hidden = !r;
  if (!r) {
    const of = (tokens) => g.ranks.find((o) => o.steps && read(o) === tokens), high = of(g.most_tokens), low = of(g.least_tokens);
    put(words, high && low ? `fullest ${high.name} ${short(high.kv_tokens)}, mean ${short(g.mean_tokens)}, emptiest ${low.name} ${short(low.kv_tokens)}` : '');
    return;
  }
  const fullness = r.capacity_tokens ? ` of ${whole(r.capacity_tokens)} (${percent(r.kv_tokens / r.capacity_tokens)})` : '';
  words.replaceChildren(el('b', null, r.name + ofGroup(r)), ` ${r.state === 'up' ? 'up' : why(r, engines)}${r.tight ? ', kept emptier' : ''} · ${whole(r.kv_tokens)}${fullness} KV tokens${r.kept_kv_tokens ? `, ${whole(r.kept_kv_tokens)} more kept of answers` : ''} · ${r.slots_used} of ${r.slots} slots, ${r.running} running${r.token_ms ? `, a token takes ${inMs(r.token_ms).join(' ')}` : ''}${toCompute(r)}${named(r)} · `);
  sparkline(spark, [{ values: past.rank(r.id), colour: ink.l0 }]);
}

// copyImage draws the picture with its name and time, and puts it on the clipboard;
// where a browser has none for pages, it is saved as a file.
async function copyImage(button, m, g, engines) {
  const w = 1200, c = document.createElement('canvas'), { height } = paint(null, g, engines, w - 24), head = 44;
  c.width = 2 * w; c.height = 2 * (height + head + 8);
  const x = c.getContext('2d');
  x.scale(2, 2);
  x.fillStyle = ink.panel; x.fillRect(0, 0, w, height + head + 8);
  x.fillStyle = ink.ink; x.font = 'bold 14px system-ui, "DejaVu Sans", sans-serif'; x.fillText(fit(x, `${now.proxy.id}: ${groupName(m, g)}, ${g.policy}`, w - 24, true), 12, 20);
  x.fillStyle = ink.soft; x.font = font; x.fillText(new Date(now.at_ms).toISOString().replace('T', ' ').slice(0, 19) + ' UTC', 12, 36);
  x.translate(12, head);
  paint(x, g, engines, w - 24, null);
  const blob = await new Promise((done) => c.toBlob(done, 'image/png'));
  let words = 'Copied';
  try { await navigator.clipboard.write([new ClipboardItem({ 'image/png': blob })]); } catch {
    const at = URL.createObjectURL(blob);
    el('a', { href: at, download: 'evenkeel.png' }).click();
    setTimeout(() => URL.revokeObjectURL(at), 10000);
    words = 'Saved as a file';
  }
  put(button, words);
  setTimeout(() => put(button, 'Copy as image'), 2000);
}
