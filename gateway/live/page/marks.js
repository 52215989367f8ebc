// Marks of what incidents that last name, so that the picture shows which ranks their words are about.
import { ink } from './charts.js';
import { runs } from './layout.js';

export const signs = { bad: '✕', warn: '!' };

const engineOf = (rank) => rank.split('/')[0];

// marksOf returns what is marked: of(name, ...) is the mark of names together, {severity, says, text}, or null.
// A rank is marked if it is named, or if its engine is.
export function marksOf(incidents) {
  const lasting = incidents.filter((i) => !i.until_ms).map((i) => ({ bad: i.severity === 'bad', names: new Set([...i.where, ...(i.ranks || [])]), says: i.headline + (i.last_ms ? ' (paused)' : '') }));
  lasting.sort((a, b) => b.bad - a.bad);
  const of = (...names) => {
    const named = lasting.filter((i) => names.some((n) => i.names.has(n) || i.names.has(engineOf(n))));
    if (!named.length) return null;
    const severity = named[0].bad ? 'bad' : 'warn', says = [...new Set(named.map((i) => i.says))].join(', ');
    return { severity, says, text: `${signs[severity]} ${says}` };
  };
  return { of };
}

// markRow shows the mark of a row of a table, and why it has one.
export function markRow(row, mark) {
  row.dataset.named = mark ? mark.severity : '';
  row.title = mark ? mark.text : '';
}

// drawMarks draws above columns, whose top this is, a bar over those that are named, and beside its sign the incident where there
// is room up to the right edge. What is wrong has a thick line and a filled sign, what is worth a look has a dashed line and an outline.
export function drawMarks(x, columns, marks, top, right) {
  const named = runs(columns, (r) => marks.of(r.name)?.text ?? null);
  let free = 0; // the sign and the words before end here
  named.forEach((run, i) => {
    const first = run.columns[0], last = run.columns[run.columns.length - 1], mark = marks.of(first.rank.name), bad = mark.severity === 'bad';
    x.strokeStyle = ink[mark.severity]; x.lineWidth = bad ? 3 : 1.5; x.setLineDash(bad ? [] : [3, 2]);
    x.beginPath(); x.moveTo(first.x, top - 2.5); x.lineTo(last.x + last.w, top - 2.5); x.stroke(); x.setLineDash([]);
    if (first.x < free) return;
    const at = Math.min(first.x, right - side), next = named[i + 1]?.columns[0].x ?? right, wide = x.measureText(mark.says).width + 6;
    drawSign(x, mark.severity, at, top - 17);
    const behind = at + side + wide <= next, before = !behind && at - wide >= free;
    x.fillStyle = ink[mark.severity]; x.textBaseline = 'middle'; x.textAlign = before ? 'right' : 'left';
    if (behind) x.fillText(mark.says, at + side + 4, top - 11); else if (before) x.fillText(mark.says, at - 4, top - 11);
    free = at + side + 2 + (behind ? wide : 0);
  });
}

const side = 12; // of a sign

export function drawSign(x, severity, at, y) {
  x.fillStyle = x.strokeStyle = ink[severity];
  if (severity === 'bad') {
    x.fillRect(at, y, side, side);
    x.strokeStyle = ink.panel; x.lineWidth = 2; x.beginPath();
    x.moveTo(at + 3, y + 3); x.lineTo(at + 9, y + 9); x.moveTo(at + 9, y + 3); x.lineTo(at + 3, y + 9); x.stroke();
    return;
  }
  x.lineWidth = 1.5; x.strokeRect(at + 0.75, y + 0.75, side - 1.5, side - 1.5);
  x.fillRect(at + 5, y + 2.5, 2, 4.5); x.fillRect(at + 5, y + 8, 2, 2);
}

// legendOf says which incidents the signs over some ranks mean: {words, draw}.
export function legendOf(ranks, marks) {
  const all = ranks.map((r) => marks.of(r.name)).filter(Boolean);
  return [['bad', 'wrong'], ['warn', 'worth a look']].flatMap(([severity, word]) => {
    const says = [...new Set(all.filter((m) => m.severity === severity).map((m) => m.says))];
    return says.length ? [{ words: `${word}: ${says.join('; ')}`, draw: (x, at, y) => drawSign(x, severity, at, y) }] : [];
  });
}
