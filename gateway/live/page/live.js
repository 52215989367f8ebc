// The live page. It reads one stream, GET /live, and shows the last document of
// it, or one of the last 15 minutes. gateway/live/document.go says what the fields
// mean.
import { $, put, say } from './page/dom.js';
import { addToHistory, past, takeHistory } from './page/history.js';
import { readColours } from './page/charts.js';
import { showGroups } from './page/picture.js';
import { showAdvice, showBalance, showEngines, showFailures, showGeo, showPools, showPrefill, showTiles } from './page/panels.js';
import { initRequests, showRequests } from './page/requests.js';
import { initStrip, showStrip, takeStrip } from './page/strip.js';
import { ask, follow } from './page/stream.js';
import { showVerdict } from './page/verdict.js';
import { clock, span } from './page/words.js';

let latest = null; // the last document
let shown = null; // the one that is shown: the last one, or an earlier one
let moment = null; // Unix ms that somebody wants to see; null: now
let came = 0; // when the last one came, by our clock
let held = false; // the page stands still
const frames = []; // ms of the last renderings; tests read it
window.evenkeel = { frames, past, get document() { return shown; }, get latest() { return latest; } };

// render shows the document, once a frame at most.
let due = false;
function draw() {
  if (due || !shown) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const began = performance.now();
    const d = shown, p = d.proxy;
    put($('who'), [p.id, p.region, p.role, p.version, 'up ' + span(p.uptime_s), 'decode policy ' + p.policy, 'prefill policy ' + p.prefill_policy].filter(Boolean).join(' · '));
    showVerdict(d);
    showGroups(d, draw);
    for (const show of [showTiles, showFailures, showAdvice, showRequests, showBalance, showPools, showPrefill, showEngines, showGeo]) show(d);
    showStrip(latest, moment);
    frames.push(performance.now() - began);
    if (frames.length > 240) frames.shift();
    tell();
  });
}

// take is an event of the stream.
function take(name, data) {
  if (name === 'history') takeHistory(data);
  if (name === 'strip') takeStrip(data);
  if (name !== 'document') return;
  lostAt = 0;
  if (held) return;
  latest = data;
  came = performance.now();
  addToHistory(data);
  if (moment === null) shown = data;
  draw();
}

// seek shows the page as it was at a moment; null: now. While one is asked for, the
// last one that was wanted comes next.
let asking = false, wanted;
let good = null; // the moment that is shown; null: now
async function seek(to) {
  if (!latest) return;
  moment = wanted = to;
  seekFault = '';
  if (to === null) { good = null; shown = latest; draw(); return; }
  draw();
  if (asking) return;
  asking = true;
  while (wanted !== null && wanted !== undefined) {
    const at = wanted;
    wanted = undefined;
    const fault = (text) => { // what is shown stays, under its own time
      if (moment === null) return;
      seekFault = `${clock(at)}: ${text}`;
      if (wanted === undefined) moment = good;
      if (moment === null) shown = latest;
      draw();
    };
    try {
      const r = await ask('/live?at=' + at);
      if (r.ok) {
        const d = await r.json();
        if (moment !== null) { shown = d; good = at; seekFault = ''; draw(); }
      } else fault(r.status === 404 ? 'nothing is kept of that moment' : `the proxy answers ${r.status}`);
    } catch (e) { fault(e.message); }
    tell();
  }
  asking = false;
}
let seekFault = '';

// tell says how fresh the page is.
let lostAt = 0; // since when there is no stream, 0: there is one
let why = '';
function tell() {
  const age = latest ? (performance.now() - came) / 1000 : 0, stale = lostAt > 0 || (latest && !held && age > 3 * latest.every_ms / 1000), then = moment !== null;
  document.body.classList.toggle('lost', !!stale);
  document.body.classList.toggle('held', held && !stale);
  document.body.classList.toggle('then', then);
  $('to-now').disabled = !then;
  put($('seen'), (seekFault ? seekFault + '. ' : '') + (then ? `The page as it was at ${clock(shown.at_ms)}.` : 'Drag on the strip, or use its arrow keys, to see the page as it was.'));
  const ago = latest ? `what is shown is ${span(age)} old` : 'nothing was shown yet';
  put($('link-word'), stale ? `lost: ${why || 'no news'}; ${ago}` : held ? `held still, ${ago}` : then ? `as it was at ${clock(moment)}` : latest ? 'live' : 'connecting');
  if (latest) say('link', stale ? `lost: ${why || 'no news'}` : held ? 'held still' : then ? 'an earlier moment' : 'live');
  if (stale && latest) {
    $('problems').className = 'bad';
    put($('problems-title'), `▲ No news for ${span(age)}: ${why || 'the proxy sends nothing'}. Trying again.`);
  }
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
  (s.querySelector('canvas.map, #strip') || s).focus({ preventScroll: true });
}

const keys = {
  '?': () => { if (!$('help').open) $('help').showModal(); }, t: nextTheme,
  h: () => { held = !held; tell(); },
  n: () => seek(null), '/': () => { go('decisions'); $('filter-find').focus(); },
  0: () => go('problems'), 1: () => go('ranks'), 2: () => go('balance'), 3: () => go('pool'), 4: () => go('prefill'), 5: () => go('engines'), 6: () => go('decisions'), 7: () => go('history'), 8: () => go('failures'),
};
document.addEventListener('keydown', (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches('input, textarea, select') || document.querySelector('dialog[open]')) return;
  const f = keys[e.key];
  if (f && (latest || '?t'.includes(e.key))) { f(); e.preventDefault(); }
});
$('theme').onclick = nextTheme;
$('keys').onclick = keys['?'];
$('rank-details').ontoggle = draw;
matchMedia('(prefers-color-scheme: dark)').onchange = () => { readColours(); draw(); };
new ResizeObserver(draw).observe(document.querySelector('main'));
setInterval(tell, 500);
setTheme(theme);
initStrip(seek);
initRequests();
follow(take, (reason) => { why = reason; lostAt = lostAt || performance.now(); tell(); });
