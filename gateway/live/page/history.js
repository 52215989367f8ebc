// The last five minutes, a sample a second. gateway/live/document.go says what the
// fields mean.
const most = 300; // samples
let at = []; // Unix ms of each sample
const ranks = new Map(); // id -> KV tokens, as long as at; -1: nothing
const lines = new Map(); // name -> values

export const past = {
  most,
  rank: (id) => ranks.get(id) || [],
  line: (name) => lines.get(name) || [],

  // column is where a sample stands among the columns of five minutes; gaps in the
  // samples are gaps on the page.
  column: (i) => most - 1 - Math.round((at[at.length - 1] - at[i]) / 1000),

  // size is how many numbers are kept.
  size: () => at.length + [...ranks.values(), ...lines.values()].reduce((n, v) => n + v.length, 0),

  // imbalances are a group's over time: what its ranks lack to the fullest.
  imbalances: (g) => at.map((_, i) => {
    let sum = 0, top = 0, n = 0;
    for (const r of g.ranks) {
      const v = (ranks.get(r.id) || [])[i];
      if (v >= 0) { sum += v; n++; if (v > top) top = v; }
    }
    return n ? n * top - sum : -1;
  }),
};

export function takeHistory(h) {
  at = h.at_ms.slice();
  ranks.clear(); lines.clear();
  for (const r of h.ranks) ranks.set(r.id, r.kv_tokens);
  for (const l of h.lines) lines.set(l.name, l.values);
}

export function addToHistory(d) {
  if (at.length && d.at_ms - at[at.length - 1] < d.every_ms / 2) return; // the history has it
  at.push(d.at_ms);
  const append = (map, key, value) => {
    if (!map.has(key)) map.set(key, []);
    const values = map.get(key);
    while (values.length < at.length - 1) values.push(-1);
    values[at.length - 1] = Math.round(value);
  };
  for (const m of d.models) {
    for (const g of m.groups) {
      for (const r of g.ranks) if (r.steps) append(ranks, r.id, r.kv_tokens);
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
  for (const map of [ranks, lines]) {
    for (const [key, values] of map) {
      while (values.length < at.length + Math.max(0, over)) values.push(-1);
      if (over > 0) values.splice(0, over);
      if (values.every((x) => x < 0)) map.delete(key);
    }
  }
}
