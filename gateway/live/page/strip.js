// The strip of the last 15 minutes: how high the line stood, requests, failures, and
// flags for what happened. Who drags on it sees the page as it was then.
import { $, el, keyed, put } from './dom.js';
import { ink, canvasFor, dashes } from './charts.js';
import { clock, nice, short, span, whole } from './words.js';

const length = 15 * 60 * 1000;
const flags = { start: '•', down: '▼', up: '▲', drain: 'D', reload: 'R', policy: 'P', refused: '429' };
const flagWords = { start: 'the proxy started', down: 'an engine went down', up: 'it came back', drain: 'a drain', reload: 'another config', policy: 'another policy', refused: 'many were refused' };
const tones = { down: 'bad', up: 'l2', drain: 'warn', reload: 'accent', policy: 'accent', refused: 'bad' };
const left = 44, right = 8, top = 20, bottom = 16;

let strip = null;
let seen = null; // Unix ms that is shown; null: now
let go = () => {}; // what moves the page
let end = 0; // Unix ms at the right edge

export const takeStrip = (s) => { strip = s; };

// momentAt is the moment under an x of a strip so wide; null at its very end: now.
export function momentAt(x, width, end) {
  const share = (x - left) / (width - left - right);
  return share >= 1 ? null : Math.round(end - length * (1 - Math.max(0, share)));
}

// stepped moves a moment; null is now.
export function stepped(at, by, end) {
  const to = (at ?? end) + by;
  return to >= end ? null : Math.max(end - length, to);
}

export function initStrip(move) {
  go = move;
  const c = $('strip');
  let down = false;
  const to = (e) => go(momentAt(e.offsetX, c.clientWidth, end));
  c.onpointerdown = (e) => { if (!strip) return; down = true; c.setPointerCapture(e.pointerId); to(e); };
  c.onpointermove = (e) => { if (down) to(e); };
  c.onpointerup = c.onpointercancel = () => { down = false; };
  c.onkeydown = (e) => {
    const step = { ArrowLeft: -5000, ArrowRight: 5000, PageUp: -60000, PageDown: 60000, ArrowUp: 5000, ArrowDown: -5000 }[e.key];
    if (step) go(stepped(seen, step, end));
    else if (e.key === 'Home') go(end - length);
    else if (e.key === 'End' || e.key === 'Escape') go(null);
    else return;
    e.preventDefault();
  };
  $('to-now').onclick = () => { go(null); c.focus(); };
}

// showStrip draws it, up to the time of the last document.
export function showStrip(latest, moment) {
  seen = moment;
  const c = $('strip');
  if (!strip) return;
  end = latest.at_ms;
  const [x, w, h] = canvasFor(c, 0), wide = w - left - right, high = h - top - bottom, base = top + high;
  const px = (at) => left + wide * (1 - (end - at) / length);
  const column = Math.max(1, wide * strip.every_ms / length);
  const at = strip.at_ms, inside = at.map((t, i) => i).filter((i) => px(at[i]) >= left - column);

  // Requests as an area, failures as bars in front of it.
  let most = 0;
  for (const i of inside) most = Math.max(most, strip.requests[i]);
  const scale = nice(most);
  x.fillStyle = ink.faint; x.fillRect(left, top, wide, high);
  x.fillStyle = ink.line;
  for (const i of inside) { const y = high * strip.requests[i] / scale, from = Math.max(left, px(at[i])); x.fillRect(from, base - y, Math.min(left + wide, px(at[i]) + column) - from + 0.5, y); }
  for (const i of inside) {
    let y = base;
    strip.failures.forEach((f, k) => {
      if (!f.counts[i]) return;
      const tall = Math.max(2, high * f.counts[i] / scale), from = Math.max(left, px(at[i]));
      x.fillStyle = [ink.bad, ink.warn, ink.l3, ink.l1][k % 4];
      x.fillRect(from, Math.max(top, y - tall), Math.max(1, Math.min(left + wide, px(at[i]) + column) - from), Math.min(tall, y - top)); y -= tall;
    });
  }
  // The lines.
  let highest = 0;
  for (const l of strip.lines) for (const i of inside) highest = Math.max(highest, l.most_tokens[i]);
  const room = nice(highest);
  strip.lines.forEach((l, k) => {
    x.strokeStyle = ink['l' + (k % 5 === 0 ? 0 : k % 5)]; x.lineWidth = 1.8; x.setLineDash(dashes[k % dashes.length]);
    x.beginPath();
    let pen = false;
    for (const i of inside) {
      if (l.most_tokens[i] < 0) { pen = false; continue; }
      const to = [Math.min(left + wide, Math.max(left, px(at[i]) + column / 2)), base - high * l.most_tokens[i] / room];
      if (pen && at[i] - at[i - 1] < 3 * strip.every_ms) x.lineTo(...to); else x.moveTo(...to);
      pen = true;
    }
    x.stroke(); x.setLineDash([]);
  });
  // Axes and flags.
  x.fillStyle = ink.soft; x.textBaseline = 'middle'; x.textAlign = 'right';
  x.fillText(short(room), left - 5, top + 5); x.fillText('0', left - 5, base - 4);
  x.textBaseline = 'alphabetic'; x.textAlign = 'left'; x.fillText('−15 min', left, h - 3);
  x.textAlign = 'center'; x.fillText('−10', left + wide / 3, h - 3); x.fillText('−5', left + 2 * wide / 3, h - 3);
  x.textAlign = 'right'; x.fillText('now', left + wide, h - 3);
  x.textAlign = 'center';
  let before = -99;
  for (const e of strip.events) {
    const fx = px(e.at_ms);
    if (fx < left) continue;
    x.strokeStyle = x.fillStyle = ink[tones[e.kind]] || ink.soft; x.lineWidth = 1;
    x.beginPath(); x.moveTo(fx, top - 3); x.lineTo(fx, base); x.stroke();
    if (fx - before > 12) { x.fillText(flags[e.kind] || '•', Math.min(fx, left + wide - 8), top - 7); before = fx; }
  }
  if (seen !== null) {
    const sx = px(seen);
    x.strokeStyle = ink.ink; x.lineWidth = 2; x.beginPath(); x.moveTo(sx, top - 4); x.lineTo(sx, base + 2); x.stroke();
  }
  // Words.
  c.setAttribute('aria-valuemin', '-900'); c.setAttribute('aria-valuemax', '0');
  const ago = seen === null ? 0 : Math.round((end - seen) / 1000);
  c.setAttribute('aria-valuenow', String(-ago));
  c.setAttribute('aria-valuetext', seen === null ? 'now' : `${clock(seen)}, ${span(ago)} ago`);
  const happened = Object.keys(flags).filter((kind) => strip.events.some((e) => e.kind === kind)).map((kind) => `${flags[kind]} ${flagWords[kind]}`);
  const sums = strip.failures.map((f) => [f, inside.reduce((n, i) => n + f.counts[i], 0)]).filter(([, n]) => n);
  put($('strip-note'), [strip.lines.length ? 'line: the fullest rank' : '', `grey: requests that ended in 5 s, ${short(most)} at most`, sums.length ? 'bars: those that failed, ' + sums.map(([f, n]) => `${whole(n)} with ${f.outcome}`).join(', ') : '', happened.join(', ')].filter(Boolean).join(' · '));
  keyed($('events'), strip.events.slice().reverse(), (e) => e.at_ms + e.what, (e) => el('li', null, el('button', { type: 'button', class: 'link', onclick: () => go(e.at_ms) })),
    (li, e) => put(li.firstElementChild, `${flags[e.kind] || '•'} ${clock(e.at_ms)} ${e.what}`));
  put($('events-title'), strip.events.length ? `Events: ${strip.events.length}` : 'Events: none');
}
