// The verdict: nothing is wrong, or incidents, each with what to do about it.
import { $, copyButton, el, keyed, put, say } from './dom.js';
import { signs } from './marks.js';
import { dated, span, whole } from './words.js';

// signOf is the sign of an incident, and its class. One that comes and goes is paused while it is not found.
export function signOf(i) {
  if (i.until_ms) return ['✓ over', 'sev soft'];
  if (!signs[i.severity]) return [i.severity, 'sev'];
  return [`${signs[i.severity]} ${i.last_ms ? 'paused' : { bad: 'bad', warn: 'look' }[i.severity]}`, 'sev ' + i.severity];
}

// timesOf says when an incident was, and how often.
export function timesOf(i, now) {
  const at = (ms) => dated(ms, now), often = i.times > 1 ? `; ${i.times} times since ${at(i.first_ms)}` : '';
  if (i.until_ms) return `${at(i.since_ms)} to ${at(i.until_ms)}${often}`;
  return `since ${at(i.since_ms)}, ${span(Math.max(0, now - i.since_ms) / 1000)}${i.last_ms ? `; not found since ${at(i.last_ms)}, and over if it stays so` : ''}${often}`;
}

// verdictOf is the title: its words, its tone, and what is said aloud, which has no
// number that changes with every document. The first words name the worst cause.
export function verdictOf(d) {
  const lasting = d.incidents.filter((i) => !i.until_ms), bad = lasting.filter((i) => i.severity === 'bad').length, rest = lasting.length - bad;
  const are = (n) => (n === 1 ? 'is' : 'are'), words = [];
  if (bad) words.push(`${bad} ${bad === 1 ? 'thing' : 'things'} ${are(bad)} wrong`);
  if (rest) words.push(bad ? `${rest} ${are(rest)} worth a look` : `${rest} ${rest === 1 ? 'thing' : 'things'} ${are(rest)} worth a look`);
  const up = d.engines.filter((e) => e.state === 'up').length;
  if (!words.length) return { bad, tone: 'ok', title: `✓ Nothing is wrong: ${up} of ${d.engines.length} engines are up, and ${d.proxy.open_requests === 1 ? '1 request is' : whole(d.proxy.open_requests) + ' requests are'} open`, aloud: 'Nothing is wrong' };
  const says = `${lasting[0].headline ? lasting[0].headline + ': ' : ''}${words.join(', and ')}`;
  return { bad, tone: bad ? 'bad' : 'warn', title: `${bad ? '✕' : '!'} ${says}`, aloud: `${says}. ${lasting[0].what.replace(/^[\d,]+ of the [\d,]+ requests/, 'Requests')}`, spoken: lasting.map((i) => i.id + i.what.replace(/[\d.,]+/g, '#')).join() };
}

let spoken = null, all = false;

// fold leaves the last few of those that are over in sight, and what somebody has opened, and
// gives the number of the rest.
const inSight = 3;
function fold() {
  const over = [...$('problem-list').querySelectorAll('li.over')], rest = over.slice(inSight).filter((li) => !li.firstElementChild.open && !li.contains(document.activeElement));
  for (const li of over) li.hidden = !all && rest.includes(li);
  const more = $('problem-more');
  more.hidden = !rest.length;
  put(more, all ? 'Hide the older ones' : `${rest.length} more that ${rest.length === 1 ? 'is' : 'are'} over`);
  more.setAttribute('aria-expanded', String(all));
  more.onclick = () => { all = !all; fold(); };
}

export function showVerdict(d) {
  const v = verdictOf(d);
  put($('problems-title'), v.title);
  if (spoken !== (v.spoken ?? '')) { spoken = v.spoken ?? ''; say('verdict', v.aloud); }
  $('problems').className = v.tone;
  keyed($('problem-list'), d.incidents, (i) => i.id, make, (li, i) => update(li, i, d.at_ms));
  fold();
  document.title = (v.bad ? `(${v.bad}) ` : '') + 'evenkeel ' + d.proxy.id;
}

function make() {
  const command = el('code'), entry = el('div', { class: 'entry', hidden: '' }), open = el('button', { type: 'button' }, 'Runbook');
  const li = el('li', null, el('details', null,
    el('summary', null, el('span'), el('span', { class: 'what' }), el('span', { class: 'since' }), el('span', { class: 'clients' }), el('span', { class: 'clients next' })),
    el('p', { class: 'where' }), el('p', { class: 'command' }, command, copyButton(() => command.textContent)), el('p', null, open, el('a', { class: 'panel-link' }, 'Its panel')), entry));
  open.onclick = () => {
    entry.hidden = !entry.hidden;
    open.setAttribute('aria-expanded', String(!entry.hidden));
    if (!entry.hidden) showEntry(entry, li.dataset.runbook);
  };
  open.setAttribute('aria-expanded', 'false');
  return li;
}

function update(li, i, now) {
  const [summary, where, command, buttons] = li.firstElementChild.children;
  li.className = i.until_ms ? 'over' : '';
  li.dataset.runbook = i.runbook;
  put(summary.children[0], ...signOf(i));
  const says = i.harm ? `${i.what}. ${i.harm}` : i.what; // of what is over, it is what was said then
  put(summary.children[1], i.until_ms ? `It was: “${says}”` : says);
  put(summary.children[2], timesOf(i, now));
  for (const line of [summary.children[3], summary.children[4]]) line.hidden = !!i.until_ms;
  put(summary.children[3], i.clients);
  where.hidden = !i.named;
  put(where, i.named);
  put(summary.children[4], 'Next: ' + i.next);
  command.hidden = !i.command;
  put(command.firstElementChild, i.command);
  buttons.children[0].hidden = !i.runbook;
  put(buttons.children[0], 'Runbook: ' + i.runbook);
  const to = document.getElementById(i.panel) ? '#' + i.panel : '#problems';
  if (buttons.children[1].getAttribute('href') !== to) buttons.children[1].setAttribute('href', to);
}

// entryOf is the text of an entry of the runbook.
export function entryOf(text, name) {
  const from = text.indexOf(`\n## ${name}\n`);
  if (from < 0) return '';
  const rest = text.slice(from + name.length + 5), to = rest.indexOf('\n## ');
  return (to < 0 ? rest : rest.slice(0, to)).trim();
}

// blocks are an entry's paragraphs and lists, as elements. An indented line goes on with the one before.
export function blocks(text) {
  return text.split(/\n\s*\n/).flatMap((block) => {
    const lines = block.replace(/\n +/g, ' ').split('\n'), items = lines.filter((l) => /^\d+\. /.test(l)), before = lines.filter((l) => !/^\d+\. /.test(l)).join(' ');
    return [...(before ? [el('p', null, ...inline(before))] : []), ...(items.length ? [el('ol', null, ...items.map((l) => el('li', null, ...inline(l.replace(/^\d+\. /, '')))))] : [])];
  });
}

// inline makes code, bold and emphasised text of a line; of a link only its words stay.
function inline(line) {
  return line.replace(/\[([^\]]*)\]\([^)]*\)/g, '$1').split(/(`[^`]*`|\*\*[^*]*\*\*|\*[^*]*\*)/).filter(Boolean).map((part) => (
    part.startsWith('`') ? el('code', null, part.slice(1, -1)) : part.startsWith('**') ? el('b', null, part.slice(2, -2)) : part.startsWith('*') && part.length > 2 ? el('em', null, part.slice(1, -1)) : part));
}

let runbook = null;
async function showEntry(e, name) {
  put(e, 'asking …');
  try {
    runbook ??= fetch('/runbook.md', { redirect: 'error' }).then((r) => (r.ok ? r.text() : Promise.reject(new Error('the proxy answers ' + r.status))));
    const text = entryOf(await runbook, name);
    e.replaceChildren(...(text ? blocks(text) : ['The runbook has no such entry.']));
  } catch (error) {
    runbook = null;
    put(e, 'The runbook did not come: ' + error.message);
  }
}
