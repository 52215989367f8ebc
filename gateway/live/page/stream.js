// The stream of documents, and questions to the proxy.
import { $, put } from './dom.js';

export const ask = (path, signal) => {
  const token = sessionStorage.getItem('evenkeel-token');
  return fetch(path, { signal, cache: 'no-store', redirect: 'error', headers: token ? { Authorization: 'Bearer ' + token } : {} });
};

// follow reads the stream for ever. take gets every event, lost a reason each time
// there is none any more.
export async function follow(take, lost) {
  for (let pause = 500; ; pause = Math.min(5000, pause * 1.6)) {
    const gone = new AbortController();
    let watch = 0, why = 'the proxy ended the stream';
    const alive = () => { clearTimeout(watch); watch = setTimeout(() => gone.abort(), 8000); }; // a dead link tells nothing
    try {
      alive();
      const r = await ask('/live', gone.signal);
      if (r.status === 401) { clearTimeout(watch); await askToken(); pause = 300; continue; }
      if (!r.ok) throw new Error((await r.json().catch(() => null))?.error?.message ?? `the proxy answers ${r.status}`); // why, where it says so
      await events(r.body, (name, data) => {
        alive();
        pause = 500;
        take(name, data);
      });
    } catch (e) {
      why = e.name === 'AbortError' ? 'nothing came for 8 s' : e.message === 'Failed to fetch' ? 'the proxy does not answer' : e.message;
    }
    clearTimeout(watch);
    gone.abort();
    lost(why);
    await new Promise((done) => setTimeout(done, pause * (0.8 + 0.4 * Math.random())));
  }
}

// events reads a stream of them to its end.
async function events(body, on) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf('\n\n')) >= 0; rest = rest.slice(end + 2)) {
      let name = 'message', data = '';
      for (const line of rest.slice(0, end).split('\n')) {
        if (line.startsWith('event: ')) name = line.slice(7);
        if (line.startsWith('data: ')) data += line.slice(6);
      }
      on(name, JSON.parse(data));
    }
  }
}

let wrong = false;
function askToken() {
  put($('token-wrong'), wrong || sessionStorage.getItem('evenkeel-token') ? 'That token is not the one.' : '');
  $('token').value = '';
  if (!$('token-dialog').open) $('token-dialog').showModal();
  return new Promise((done) => {
    $('token-form').onsubmit = (e) => {
      e.preventDefault();
      sessionStorage.setItem('evenkeel-token', $('token').value);
      wrong = true;
      $('token-dialog').close();
      done();
    };
    $('token-dialog').oncancel = (e) => e.preventDefault(); // without one there is nothing to see
  });
}
