// The other panels of the page.
import { $, cells, el, fill, keyed, put } from './dom.js';
import { drawLine, ink, sparkline } from './charts.js';
import { past } from './history.js';
import { markRow, marksOf } from './marks.js';
import { groupKey, groupName, stepTime } from './picture.js';
import { inMs, percent, short, span, whole } from './words.js';

export function showTiles(d) {
  const t = d.traffic, pool = d.models.reduce((n, m) => n + m.pool.entries, 0), oldest = Math.max(0, ...d.models.map((m) => m.pool.oldest_s));
  const groups = d.models.flatMap((m) => m.groups), worst = groups.reduce((a, g) => (!a || g.lost_share > a.lost_share ? g : a), null);
  const line = (name, colour, dash) => ({ values: past.line(name), colour: ink[colour], dash });
  const latency = (l, name) => {
    const [p99, unit] = inMs(l.p99_ms), p50 = inMs(l.p50_ms);
    return l.samples ? [p99, unit + ' p99', `p50 ${p50.join(' ')}`, [line(name + '_p99_us', 'l1'), line(name + '_p50_us', 'l0', [3, 2])]]
      : ['–', '', 'no request in the last minute', []];
  };
  const tiles = [
    ['Time to first token', ...latency(t.ttft, 'ttft')],
    ['Time per token', ...latency(t.tpot, 'tpot')],
    ['Requests, 10 s mean', short(t.requests_per_s), '/s', `${failsNow(t) ? '✕ ' : ''}${short(t.failures_per_s)} /s fail, ${whole(d.proxy.open_requests)} open`, [line('requests_per_ks', 'l0')], failsNow(t)],
    ['Tokens out', short(t.tokens_per_s), '/s', worst && stepTime(worst, t) || 'step time not known', [line('tokens_per_s', 'l0')]],
    ['Pool', whole(pool), 'wait for a rank', pool ? `the oldest for ${span(oldest)}` : `${whole(d.proxy.pool_places_used)} of ${whole(d.proxy.pool_places)} places taken`, [line('pool_entries', 'l0')]],
    ['Arrival queue', whole(d.prefill.waiting_requests), 'wait for prefill', (d.prefill.queue_max ? `of ${whole(d.prefill.queue_max)} per model` : '') + batch(d.prefill.batch), []],
    ['Lost to imbalance', worst && worst.model_ms ? percent(worst.lost_share, 1) : '–', 'of a step', (worst && worst.model_ms ? `${worst.lost_ms.toFixed(1)} ms of each step, by the step model` : worst?.model_why ? 'no step model: ' + worst.model_why : 'step model not known') + own(worst), []],
  ];
  keyed($('tiles'), tiles, (x) => x[0],
    (x) => el('div', null, el('dt', null, x[0]), el('dd', null, el('span'), el('small')), el('dd', { class: 'note' }), el('canvas', { 'aria-hidden': 'true' })),
    (e, [, value, unit, note, all, bad]) => {
      put(e.children[1].children[0], value); put(e.children[1].children[1], unit); put(e.children[2], note, bad ? 'note bad' : 'note');
      e.children[2].title = note;
      sparkline(e.children[3], all);
    });
}

// failsNow says that requests fail, and as many as the verdict counts as wrong.
const failsLately = (t) => t.failures_per_s > 0.01 * t.requests_per_s, failsNow = (t) => failsLately(t) && !t.recovered;

// own is how long ranks wait for each other by what their engines count; empty where no engine tells it.
const own = (g) => (g?.sync_wait_ms ? `; engines count ${g.sync_wait_ms.toFixed(1)} ms` : '');

export function showBalance(d) {
  const groups = d.models.flatMap((m) => m.groups.filter((g) => g.barrier).map((g) => ({ m, g })));
  keyed($('balances'), groups, ({ m, g }) => groupKey(m, g),
    () => el('div', { class: 'group' }, el('h3'), el('canvas', { class: 'chart', role: 'img' }), el('p')),
    (e, { m, g }) => {
      put(e.children[0], groupName(m, g));
      drawLine(e.children[1], { values: past.imbalances(g), colour: ink.l0, wide: 2.2 }, short);
      e.children[1].setAttribute('aria-label', `${g.policy}: ${short(g.imbalance_tokens)}`);
      put(e.children[2], `${g.policy}: imbalance ${whole(g.imbalance_tokens)}, idle share ${percent(g.idle_share, 1)}`);
    });
}

// keysOf says whose requests wait; empty where callers have no keys.
export function keysOf(waiting) {
  const all = waiting.reduce((n, w) => n + w.requests, 0), named = waiting.filter((w) => w.key);
  return named.length ? `Of ${whole(all)} that wait for prefill or for a rank: ${named.map((w) => `${whole(w.requests)} of key ${w.key}`).join(', ')}.` : '';
}

export function showPools(d) {
  put($('pool-keys'), keysOf(d.waiting || []));
  keyed($('pools'), d.models, (m) => m.name,
    () => el('div', { class: 'group' }, el('h3'), el('div', { class: 'ages' })),
    (e, m) => {
      const p = m.pool, top = Math.max(1, ...p.ages), late = p.ttl_s ? p.ttl_s / 2 : 10;
      put(e.children[0], `${m.name}: ${p.entries === 1 ? `1 request waits, for ${span(p.oldest_s)}` : p.entries ? `${whole(p.entries)} requests wait, the oldest for ${span(p.oldest_s)}` : 'no request waits'}${p.ttl_s ? `; one may wait for ${span(p.ttl_s)}` : ''}`);
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

// What batch requests got: nothing is said where there are none.
function batch(b) {
  if (!b || !b.waiting_requests && !b.ran_requests) return '';
  return `; batch: ${whole(b.waiting_requests)} wait, ${whole(b.ran_requests)} ran` + (b.ran_requests ? `, held back for ${span(b.held_s / b.ran_requests)} on average` : '');
}

export function showPrefill(d) {
  const p = d.prefill, marks = marksOf(d.incidents);
  const engines = [...p.engines.filter((e) => marks.of(e.id)), ...p.engines.filter((e) => !marks.of(e.id))]; // those that are named stand first
  $('prefill').hidden = !p.engines.length && p.groups.length > 0; // the ranks above prefill
  put($('prefill-note'), `policy ${p.policy} · ${whole(p.waiting_requests)} in the arrival queue · ${percent(p.hit_share, 1)} of all prompt tokens found in caches`);
  keyed($('prefill-rows'), engines, (e) => e.id,
    () => {
      const row = cells('id', '', '', 'n', 'n', 'n', 'n', 'n', 'n', 'n');
      row.children[2].append(el('span', { class: 'gauge', role: 'img' }, el('i'), el('s')));
      return row;
    },
    (row, e) => {
      fill(row, e.id, null, null, e.budget_tokens ? `${short(e.kv_tokens)} of ${short(e.budget_tokens)}` : short(e.kv_tokens), String(e.inflight_requests), whole(e.queued_new_tokens), e.scrape_age_ms < 0 ? '–' : e.waiting.toFixed(0), String(e.pooled + e.dispatched), percent(e.hit_share), e.scrape_age_ms < 0 ? 'none' : span(e.scrape_age_ms / 1000));
      put(row.children[1], ...gates[e.state] || [e.state, '']);
      markRow(row, marks.of(e.id));
      const gauge = row.children[2].firstElementChild;
      gauge.className = e.kv_share >= e.gate_share ? 'gauge over' : 'gauge';
      gauge.children[0].style.width = 100 * Math.min(1, e.kv_share) + '%';
      gauge.children[1].style.left = 100 * e.gate_share + '%';
      gauge.title = `${percent(e.kv_share)} of its KV cache; its gate closes at ${percent(e.gate_share)}`;
      gauge.setAttribute('aria-label', gauge.title);
    });
}

const states = { up: ['● up', 'good'], out: ['✕ out', 'bad'], wedged: ['✕ wedged', 'bad'], halted: ['■ halted', 'warn'], down: ['✕ down', 'bad'] };

export function showEngines(d) {
  const marks = marksOf(d.incidents), rank = (e) => (e.state !== 'up' ? 0 : e.draining || e.why || marks.of(e.id) ? 1 : 2);
  const sorted = d.engines.map((e, i) => [rank(e), i, e]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map((x) => x[2]); // who is not well stands first
  put($('engines-note'), `${d.engines.filter((e) => e.state === 'up').length} of ${d.engines.length} up`);
  keyed($('engine-rows'), sorted, (e) => e.role + ' ' + e.id, () => cells('id', '', '', 'n', 'n', '', 'why'), (row, e) => {
    const [word, tone] = states[e.state] || [e.state, ''];
    fill(row, e.id, e.role, null, span(e.since_s), String(e.ranks), e.version || '', e.why || (e.share < 1 ? `fresh in service: ${percent(e.share)} of its slots` : ''));
    markRow(row, marks.of(e.id));
    put(row.children[2], e.draining && e.state === 'up' ? 'D draining' : word, e.draining && e.state === 'up' ? 'warn' : tone);
  });
}

export function showGeo(d) {
  const peers = d.geo ? d.geo.peers : [];
  $('geo').hidden = !d.geo && !d.areas.length;
  put($('geo-note'), d.geo ? `policy ${d.geo.policy}` : '');
  const marks = marksOf(d.incidents), rows = [ // each with the name that an incident would have for it first
    ...peers.map((p) => [p.id, 'peer ' + p.id, p.region, p.up ? (p.draining ? ['D draining', 'warn'] : p.circuit === 'open' ? ['✕ out', 'bad'] : ['● up', 'good']) : ['✕ not up', 'bad'], p.rtt_ms.toFixed(1) + ' ms', String(p.in_flight), p.fault || '']),
    ...d.areas.map((a) => [a.group || a.region, a.group ? 'group ' + a.group : 'region ' + a.region, a.region, a.admits ? ['● ours', 'good'] : ['– ' + a.phase, 'soft'], '', '', a.holder ? `held by ${a.holder}, epoch ${a.epoch}` : 'no proxy owns it']),
  ];
  keyed($('geo-rows'), rows, (r) => r[1], () => cells('id', '', '', 'n', 'n', 'why'), (row, [name, what, region, state, trip, flying, why]) => {
    fill(row, what, region, null, trip, flying, why);
    put(row.children[2], ...state);
    markRow(row, marks.of(name));
  });
}

// showFailures has every way in which requests failed; none is forgotten. Only what fails
// now, and as often as the verdict counts as wrong, is marked: the rest is history.
export function showFailures(d) {
  const t = d.traffic, lately = failsLately(t), now = failsNow(t);
  $('failures-none').hidden = d.failures.length > 0;
  $('failures-table').hidden = !d.failures.length;
  put($('failures-now'), !d.failures.length ? '' : now ? 'Requests fail now.' : lately ? 'Requests failed some seconds ago, and those that ended since then went well.' : d.failures.some((f) => f.last_10_s) ? 'Less than 1 % of the requests fail now. The other columns are history.' : 'No request fails now. These numbers are history.');
  keyed($('failure-rows'), d.failures, (f) => f.outcome + f.status, () => cells('id', 'n', 'n', 'n', 'n', 'n'), (row, f) => {
    fill(row, f.outcome, String(f.status), whole(f.last_10_s), whole(f.last_5_min), whole(f.last_hour), whole(f.since_start));
    row.className = f.last_10_s ? '' : 'past';
    row.title = f.why ? 'The last one: ' + f.why : '';
    row.children[2].className = f.last_10_s && now ? 'n bad' : 'n';
  });
}

const steps = { add_prefill: 'Add prefill ranks', add_decode: 'Add decode ranks', remove_prefill: 'Prefill ranks can be spared', remove_decode: 'Decode ranks can be spared', rebalance: 'Turn ranks of one side into the other' };
const none = { balanced: 'There are enough ranks, by the mean of the last minute', too_little_data: 'Not known yet', prefill_down: 'Not known while no prefill rank takes prompts', decode_down: 'Not known while no decode rank takes requests', ranks_down: 'Not known while ranks are down' };

// crowded says that requests wait in numbers now, of which the mean of the last minute may not tell.
export const crowded = (d) => d.incidents.some((i) => !i.until_ms && i.crowded);

// stepOf is a step of an advice in words. waits says that requests wait for ranks now.
export const stepOf = (s, waits) => (waits && s.reason === 'balanced' ? 'Not known: many requests wait now, though the ranks were not too busy in the mean of the last minute' : s.kind === 'none' ? none[s.reason] : steps[s.kind]) || `${s.kind}, ${s.reason}`;

// showAdvice is how many ranks of each side there should be.
export function showAdvice(d) {
  $('advice-none').hidden = d.advice.length > 0;
  keyed($('advices'), d.advice, (a) => a.model, () => el('div', { class: 'group' }, el('h3'), el('p', { class: 'fine' }), el('p', { class: 'fine' })), (e, a) => {
    const down = a.prefill.down_ranks + a.decode.down_ranks > 0 && a.steps[0].kind !== 'none';
    put(e.children[0], `${a.model}: ${down ? 'Bring back the ranks that are down first' : a.steps.map((s) => stepOf(s, crowded(d))).join(', ')}`);
    const side = (name, s) => `${name}: ${s.live_ranks} ${s.live_ranks === 1 ? 'rank answers' : 'ranks answer'}${s.down_ranks ? `, ${s.down_ranks} ${s.down_ranks === 1 ? 'does' : 'do'} not` : ''}, ${percent(s.busy_share)} busy`;
    put(e.children[1], a.says);
    put(e.children[2], `${side('Prefill', a.prefill)}. ${side('Decode', a.decode)}.`);
  });
}
