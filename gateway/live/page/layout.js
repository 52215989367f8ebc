// Where things stand in the picture of a group. Pure: no canvas, no document.

// hostOf is the machine of a rank, host:port/rank.
export function hostOf(name) {
  const engine = name.split('/')[0], colon = engine.lastIndexOf(':');
  return colon > 0 ? engine.slice(0, colon) : engine;
}

// byHost has the ranks of each host together, hosts in the order they come first.
export function byHost(ranks) {
  const hosts = new Map();
  for (const r of ranks) {
    const h = hostOf(r.name);
    if (!hosts.has(h)) hosts.set(h, []);
    hosts.get(h).push(r);
  }
  return [...hosts].map(([name, list]) => ({ name, ranks: list }));
}

const leastColumn = 5;

// place gives every rank a column: bands of {x, w} columns, each with its hosts.
// Where all of them side by side would be too thin, they stand in several bands.
export function place(ranks, left, wide) {
  const hosts = byHost(ranks), gap = wide > 700 ? 7 : 4;
  const fits = Math.max(1, Math.floor(wide / leastColumn)), bands = Math.max(1, Math.ceil((ranks.length + hosts.length) / fits)), each = Math.ceil(ranks.length / bands);
  const rows = [];
  let row = null;
  for (const h of hosts) {
    for (let i = 0; i < h.ranks.length;) {
      if (!row || row.count >= each) { row = { count: 0, hosts: [] }; rows.push(row); }
      const n = Math.min(h.ranks.length - i, each - row.count);
      row.hosts.push({ name: h.name, ranks: h.ranks.slice(i, i + n) });
      row.count += n; i += n;
    }
  }
  const column = Math.min(90, ...rows.map((r) => (wide - gap * (r.hosts.length - 1)) / r.count));
  return rows.map((r) => {
    let x = left;
    return r.hosts.map((h) => {
      const columns = h.ranks.map((rank, i) => ({ rank, x: x + i * column, w: column - (column >= 4 ? 1 : 0.5) }));
      const host = { name: h.name, x, w: h.ranks.length * column, columns };
      x += host.w + gap;
      return host;
    });
  });
}

// ceiling is the largest number of KV tokens that the picture has room for: the line, and some air.
export function ceiling(g) {
  return 1.14 * Math.max(1, g.most_tokens, ...g.ranks.filter((r) => r.steps).map((r) => r.kv_tokens));
}

// runs are stretches of columns beside each other for which a test holds.
export function runs(columns, test) {
  const list = [];
  let run = null;
  for (const c of columns) {
    const what = test(c.rank);
    if (what === null) { run = null; continue; }
    if (run && run.what === what) { run.columns.push(c); continue; }
    run = { what, columns: [c] };
    list.push(run);
  }
  return list;
}
