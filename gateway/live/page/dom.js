// Elements. Text from outside only ever becomes text nodes; the page's policy
// forbids anything else.
export const $ = (id) => document.getElementById(id);

// el makes an element. Children are elements or text.
export function el(tag, props, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(props || {})) {
    if (k === 'class') e.className = v; else if (k.startsWith('on')) e[k] = v; else e.setAttribute(k, v);
  }
  e.append(...children);
  return e;
}

// put sets a text if it is another, so that nothing is laid out in vain.
export function put(e, text, className) {
  if (e.textContent !== text) e.textContent = text;
  if (className !== undefined && e.className !== className) e.className = className;
}

// keyed has one child of a parent for each item, by its key, in their order. Items may
// have one key by mistake; each still has a child of its own.
export function keyed(parent, items, key, make, update) {
  const was = [...parent.children], old = new Map(was.map((c) => [c.dataset.key, c]));
  const had = parent.contains(document.activeElement) ? document.activeElement : null;
  const used = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    let k = String(key(item));
    while (used.has(k)) k += '\0';
    used.add(k);
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
export function say(what, text) {
  if (said.get(what) === text) return;
  said.set(what, text);
  put($('said'), text);
}

// cells makes a table row whose cells have these classes; fill sets their texts.
export const cells = (...classes) => el('tr', null, ...classes.map((c) => el('td', c ? { class: c } : null)));
export function fill(row, ...texts) {
  texts.forEach((t, i) => { if (t !== null) put(row.children[i], t); });
}

// copyButton copies a text, and says so on itself for a moment.
export function copyButton(text) {
  const b = el('button', { type: 'button' }, 'Copy');
  b.onclick = async () => {
    put(b, await toClipboard(text()) ? 'Copied' : 'Select it and copy');
    setTimeout(() => put(b, 'Copy'), 2000);
  };
  return b;
}

// toClipboard works on loopback and over TLS; elsewhere browsers have no clipboard.
async function toClipboard(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { return false; }
}
