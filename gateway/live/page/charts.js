// Drawing on canvases. Colours come from the style sheet, so that both themes hold.
import { nice } from './words.js';
import { past } from './history.js';

export const ink = {};
export function readColours() {
  const s = getComputedStyle(document.documentElement);
  for (const name of ['ink', 'soft', 'line', 'faint', 'panel', 'bad', 'warn', 'accent', 'fill', 'waste', 'l0', 'l1', 'l2', 'l3', 'l4']) ink[name] = s.getPropertyValue('--' + name).trim();
}
export const dashes = [[], [6, 3], [2, 2], [8, 3, 2, 3], [1, 3]];
export const font = '11px system-ui, "DejaVu Sans", sans-serif';

// canvasFor sizes a canvas to its box and the screen, and returns its context.
export function canvasFor(c, height) {
  const w = Math.max(1, c.clientWidth), h = height || c.clientHeight, dpr = window.devicePixelRatio || 1;
  if (height && c.style.height !== height + 'px') c.style.height = height + 'px';
  if (c.width !== Math.round(w * dpr) || c.height !== Math.round(h * dpr)) { c.width = Math.round(w * dpr); c.height = Math.round(h * dpr); }
  const x = c.getContext('2d');
  x.setTransform(dpr, 0, 0, dpr, 0, 0);
  x.clearRect(0, 0, w, h);
  x.font = font;
  return [x, w, h];
}

// fit cuts a text to a width, at its end or at its begin.
export function fit(x, text, width, end) {
  if (x.measureText(text).width <= width) return text;
  let t = text;
  while (t.length > 1 && x.measureText('…' + t).width > width) t = end ? t.slice(0, -1) : t.slice(1);
  return end ? t + '…' : '…' + t;
}

// drawLine draws a line over the last five minutes. A line is {values, colour, dash, wide}.
export function drawLine(c, line, unit) {
  const [x, w, h] = canvasFor(c, 0);
  const left = 44, right = 8, top = 8, bottom = 18, wide = w - left - right, high = h - top - bottom;
  const scale = nice(line.values.reduce((a, v) => Math.max(a, v), 0));
  x.fillStyle = ink.soft; x.strokeStyle = ink.line; x.lineWidth = 1; x.textAlign = 'right'; x.textBaseline = 'middle';
  for (const s of [0, 0.5, 1]) {
    const y = top + high * (1 - s);
    x.beginPath(); x.moveTo(left, Math.round(y) + 0.5); x.lineTo(left + wide, Math.round(y) + 0.5); x.stroke();
    x.fillText(unit(scale * s), left - 6, y);
  }
  x.textBaseline = 'alphabetic';
  x.textAlign = 'left'; x.fillText('−5 min', left, h - 4); x.textAlign = 'right'; x.fillText('now', left + wide, h - 4);
  stroke(x, line, left, top, wide, high, scale);
}

function stroke(x, l, left, top, wide, high, scale) {
  x.strokeStyle = l.colour; x.lineWidth = l.wide || 1.5; x.setLineDash(l.dash || []); x.lineJoin = 'round';
  x.beginPath();
  let pen = false, before = -2;
  l.values.forEach((v, i) => {
    const k = past.column(i);
    if (v < 0 || k < 0) { pen = false; return; }
    const px = left + wide * k / (past.most - 1), py = top + high * (1 - Math.min(1, v / scale));
    if (pen && k - before < 4) x.lineTo(px, py); else x.moveTo(px, py);
    pen = true; before = k;
  });
  x.stroke(); x.setLineDash([]);
}

export function sparkline(c, all) {
  const [x, w, h] = canvasFor(c, 0);
  let largest = 0;
  for (const l of all) for (const v of l.values) if (v > largest) largest = v;
  x.strokeStyle = ink.line; x.lineWidth = 1; x.beginPath(); x.moveTo(0, h - 0.5); x.lineTo(w, h - 0.5); x.stroke();
  for (const l of all) stroke(x, l, 0, 2, w, h - 4, largest || 1);
}
