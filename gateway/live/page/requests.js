// The last requests: searched, filtered, held still while somebody looks at them, and
// each opened as a waterfall.
import { $, cells, el, fill, keyed, put } from './dom.js';
import { ask } from './stream.js';
import { clock, inMs, whole } from './words.js';

const words = (ms) => inMs(ms).join(' ');
let latest = null; // the document
let found = null; // what the proxy answered to the filter; null: there is none
let asked = ''; // the filter it was asked
let timer = 0, number = 0;

// query is the question that the filter's fields ask; empty: all of them are empty.
export function query(fields) {
  const f = Object.fromEntries(Object.entries(fields).map(([name, value]) => [name, value.trim()]));
  const q = new URLSearchParams();
  if (f.find) q.set('find', f.find);
  if (f.outcome === 'running') q.set('running', '1'); else if (f.outcome) q.set('outcome', f.outcome);
  if (Number(f.slow) > 0) q.set('slow_ms', f.slow);
  for (const name of ['key', 'engine', 'model']) if (f[name]) q.set(name, f[name]);
  return q.size ? `/decisions?brief=1&n=200&${q}` : '';
}

const fields = () => Object.fromEntries(['find', 'outcome', 'slow', 'key', 'engine', 'model'].map((n) => [n, $('filter-' + n).value]));
const held = () => $('receipt').open || $('decision-scroll').matches(':hover') || $('decision-rows').contains(document.activeElement);

export function initRequests() {
  $('filter').oninput = () => { clearTimeout(timer); timer = setTimeout(askAgain, 200); };
  $('filter').onsubmit = (e) => { e.preventDefault(); askAgain(); };
  $('filter').onreset = () => setTimeout(askAgain);
  setInterval(() => { if (asked && !held() && !document.hidden) askAgain(); }, 3000);
  $('decision-scroll').onpointerleave = () => showRequests(latest);
}

async function askAgain() {
  const q = query(fields()), n = ++number;
  asked = q;
  if (!q) { found = null; showRequests(latest, true); return; }
  try {
    const r = await ask(q), body = await r.json();
    if (n !== number) return; // another question was asked meanwhile
    found = r.ok ? { list: body.decisions, kept: body.kept, running: body.running } : { list: [], error: body.error?.message ?? `the proxy answers ${r.status}` };
  } catch (e) {
    if (n === number) found = { list: [], error: 'the proxy does not answer: ' + e.message };
  }
  if (n === number) showRequests(latest, true);
}

// engineNames gives the rank of a prefill engine the engine's name where it is its only
// one, as incidents do.
export function engineNames(d) {
  const alone = new Set(d.engines.filter((e) => e.role === 'prefill' && e.ranks === 1).map((e) => e.id + '/0'));
  return (rank) => (alone.has(rank) ? rank.slice(0, -2) : rank);
}

export function showRequests(d, anew) {
  if (!d) return;
  latest = d;
  const still = !anew && held();
  put($('decisions-note'), still ? 'held still while you look at them' : found ? found.error || `${whole(found.list.length)}${found.list.length === 200 ? ' or more' : ''} of ${whole(found.kept)} that ended and ${whole(found.running)} that run` : 'the last ones; choose one for its waterfall');
  if (still) return;
  const list = found ? found.list : d.decisions, alone = engineNames(d);
  $('decisions-none').hidden = list.length > 0;
  put($('decisions-none'), found ? 'No receipt passes the filter.' : 'No request has been decided yet.');
  keyed($('decision-rows'), list, (c) => c.id,
    (c) => {
      const row = cells('', '', '', 'n', 'id', 'id', 'n', '', 'why');
      row.children[1].append(el('button', { type: 'button', class: 'link', onclick: () => receipt(c.id) }, c.id.slice(0, 12)));
      row.children[1].title = c.id;
      return row;
    },
    (row, c) => {
      const wait = words(c.wait_ms);
      fill(row, clock(c.at_ms), null, c.model, c.prompt_tokens ? whole(c.prompt_tokens) : '–', alone(c.prefill) || '–', c.rank || '–', c.rank ? wait : c.wait_ms && !c.outcome ? wait + ' so far' : '–', c.outcome || 'runs', c.why);
      row.children[7].className = !c.outcome || c.outcome === 'ok' ? '' : 'bad';
    });
}

const phases = [['parse', 'parse'], ['queue', 'queue'], ['prefill', 'prefill'], ['pool', 'pool'], ['transfer', 'pull'], ['relay', 'decode'], ['backoff', 'backoff']];

// bars are the steps of a receipt on one time line: {n, name, from, ms}; now is in ms
// since its arrival.
export function bars(r, now) {
  const list = [];
  for (const a of r.attempts) {
    let at = a.at_ms;
    for (const [field, name] of phases) {
      const ms = a.waits_ms[field] || 0;
      if (ms > 0) { list.push({ n: a.n, name, from: at, ms }); at += ms; }
    }
    if (a.state !== 'ended') list.push({ n: a.n, name: a.state, from: a.since_ms, ms: Math.max(0, (now || 0) - a.since_ms), runs: true });
  }
  return list;
}

// runnerUp says what was taken, and what the next best would have cost more.
export function runnerUp(best, less) {
  const scored = (best || []).filter((c) => c.score !== null), chosen = scored.find((c) => c.chosen), other = scored.filter((c) => !c.chosen).sort((a, b) => (less ? a.score - b.score : b.score - a.score))[0];
  if (!chosen || !other) return '';
  const by = less ? other.score - chosen.score : chosen.score - other.score, n = (v) => (Math.abs(v) >= 1000 ? whole(v) : v.toPrecision(3));
  return `${chosen.name} scored ${n(chosen.score)}; the runner-up ${other.name} ${n(other.score)}, ${by >= 0 ? `worse by ${n(by)}` : `better by ${n(-by)} when the round was over`} (${less ? 'less' : 'more'} is better)`;
}

function reasons(a) {
  const list = [];
  if (a.prefill) {
    const p = a.prefill, up = runnerUp(p.best, true);
    list.push(`Prefill on ${latest ? engineNames(latest)(p.candidate) : p.candidate}: ${{ only: 'the only one left', affinity: 'its conversation was there', canary: 'a trial of an engine that is back', fallback: 'the policy failed' }[p.reason] || `${p.policy} chose it of ${p.eligible || 1}`}, ${whole(p.hit_tokens)} tokens thought to be cached, ${p.probes_ahead} prompts ahead.${up ? ` ${up}.` : ''}`);
  }
  if (a.decode) {
    const d = a.decode, up = runnerUp(d.best, d.better !== 'more');
    list.push(`Decode on ${d.rank}: ${d.policy} chose it${d.able ? ` of ${d.able} with room` : ''}; it held ${whole(d.kv_tokens)} KV tokens, the fullest ${whole(d.fullest_kv_tokens)}.${up ? ` ${up}.` : ''}`);
  }
  if (a.peer) list.push(`It was sent to ${a.peer}.`);
  if (a.cause) list.push(`It failed${a.failed_on ? ` on ${a.failed_on}` : ''}: ${a.cause}${a.again ? '; another attempt followed' : ''}.`);
  return list;
}

export function drawReceipt(r) {
  const all = bars(r, latest ? latest.at_ms - Date.parse(r.arrival) : 0), end = Math.max(1, r.total_ms || 0, ...all.map((b) => b.from + b.ms));
  const several = r.attempts.length > 1;
  $('receipt-bars').replaceChildren(...all.map((b) => {
    const bar = el('i', { class: 'phase ' + (phases.some(([, n]) => n === b.name) ? b.name : 'relay') });
    bar.style.left = 100 * b.from / end + '%';
    bar.style.width = Math.max(0.3, 100 * b.ms / end) + '%';
    return el('tr', null, el('td', null, (several ? `${b.n}: ` : '') + b.name), el('td', { class: 'n' }, b.runs ? 'runs' : words(b.ms)), el('td', { class: 'lane' }, bar));
  }));
  const facts = [r.model, r.key && `key ${r.key}`, r.class, r.priority && `priority ${r.priority}`, r.deadline_ms && `first token wanted within ${words(r.deadline_ms)}`, r.outcome ? (r.status ? `${r.outcome} (${r.status})` : r.outcome) : `runs: ${r.state}`, r.ttft_ms && `first token after ${words(r.ttft_ms)}`, r.total_ms && `all of it ${words(r.total_ms)}`, `${whole(r.prompt_tokens)} prompt tokens, ${whole(r.cached_tokens)} cached, ${whole(r.output_tokens)} out`];
  put($('receipt-facts'), facts.filter(Boolean).join(' · '));
  $('receipt-why').replaceChildren(...r.attempts.flatMap((a) => reasons(a).map((text) => el('li', null, (several ? `Attempt ${a.n}: ` : '') + text))));
}

export async function receipt(id) {
  put($('receipt-title'), 'Receipt of ' + id);
  for (const part of ['receipt-bars', 'receipt-why']) $(part).replaceChildren();
  put($('receipt-facts'), 'asking …');
  put($('receipt-text'), '');
  $('receipt').showModal();
  try {
    const r = await ask('/decisions?id=' + encodeURIComponent(id)), text = await r.text();
    if (!r.ok) { put($('receipt-facts'), r.status === 404 ? 'There is no receipt of it any more: only the last ones are kept.' : `The proxy answered ${r.status}: ${text}`); return; }
    const one = JSON.parse(text).receipts[0];
    put($('receipt-text'), JSON.stringify(one, null, 2));
    drawReceipt(one);
  } catch (e) {
    put($('receipt-facts'), 'The proxy did not answer: ' + e.message);
  }
}
