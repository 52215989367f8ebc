package livepage

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/heapprofiler"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/advice"
	"evenkeel/gateway/detect"
)

var soak = flag.Duration("soak", 0, "how long a page is kept open to see whether it grows")

var axe = flag.String("axe", "", "file axe.min.js of axe-core, which looks for what keeps people from using the page")

// module evaluates an expression of m, a module of the page.
func (b *browser) module(name, expression string) string {
	b.t.Helper()
	b.eval(fmt.Sprintf(`(window.told = undefined, import('/page/%s').then((m) => { window.told = JSON.stringify(%s); }, (e) => { window.told = 'failed: ' + e; }), '')`, name, expression))
	b.eventually("the module "+name, "window.told !== undefined")
	return b.eval("window.told")
}

// What the modules compute without a document.
func TestModulesOfThePage(t *testing.T) {
	b, s := chromium(t), newSite(t, 4).open()
	b.visit(s)
	b.eventually("the first document", "!!evenkeel.document")
	ranks := func(hosts, each int) string {
		return fmt.Sprintf(`Array.from({ length: %d }, (_, i) => ({ id: i, name: 'h' + Math.floor(i / %d) + ':8000/' + i %% %d, steps: i %% 3 > 0 }))`, hosts*each, each, each)
	}
	for _, tt := range []struct{ module, expression, want string }{
		{"words.js", "[0, 7.25, 999, 1234, 45678, 1.5e6, 2e9].map(m.short)", `["0","7.3","999","1.2k","46k","1.50M","2.00G"]`},
		{"words.js", "[0.5, 59, 61, 3700, 90000].map(m.span)", `["0.5 s","59 s","1 min","1 h 1 min","1 d 1 h"]`},
		{"words.js", "[0, 7, 110, 9.6].map((v) => m.nice(v))", `[1,8,120,10]`},
		{"layout.js", "['a:1/2', '[::1]:8/0', 'bare'].map(m.hostOf)", `["a","[::1]","bare"]`},
		{"layout.js", "m.byHost([{ name: 'a:1' }, { name: 'b:1' }, { name: 'a:2' }]).map((h) => [h.name, h.ranks.length])", `[["a",2],["b",1]]`},
		{"layout.js", "[[1330, 9, 16], [300, 4, 8], [300, 9, 16]].map(([w, h, n]) => m.place(" + ranks(9, 16) + ".slice(0, h * n), 40, w).length)", `[1,1,3]`},
		{"layout.js", "m.place(" + ranks(9, 16) + ", 40, 1330).flat().flatMap((h) => h.columns).every((c, i, all) => c.x + c.w <= 1370.01 && c.w > 7 && (!i || c.x > all[i - 1].x))", `true`},
		{"layout.js", "m.place(" + ranks(9, 16) + ", 40, 300).flat().flatMap((h) => h.columns).every((c) => c.x + c.w <= 340.01 && c.w >= 4)", `true`},
		{"layout.js", "m.place([], 40, 300).length", `0`},
		{"layout.js", "m.runs([{ rank: 1 }, { rank: 1 }, { rank: 0 }, { rank: 1 }, { rank: 2 }], (r) => r || null).map((r) => [r.what, r.columns.length])", `[[1,2],[1,1],[2,1]]`},
		{"layout.js", "m.ceiling({ most_tokens: 100, ranks: [{ steps: true, kv_tokens: 150 }, { kv_tokens: 900 }] }).toFixed(0)", `"171"`},
		{"strip.js", "[[44, 1044, 900000], [540, 1044, 900000], [1036, 1044, 900000], [0, 1044, 900000]].map((a) => m.momentAt(...a))", `[0,450000,null,0]`},
		{"strip.js", "[m.stepped(null, -5000, 1e6), m.stepped(999000, 5000, 1e6), m.stepped(101000, -5000, 1e6)]", `[995000,null,100000]`},
		{"marks.js", "((m) => ['a:1/0', 'a:1/1', 'a:1', 'b:1/0', 'c:1/0', 'd:1/0'].map((n) => m.of(n)?.text ?? ''))(m.marksOf([{ where: ['a:1'], severity: 'warn', headline: 'Slow' }, { where: ['a:1/1', 'b:1/0'], severity: 'bad', headline: 'Empty' }, { where: ['c:1'], severity: 'warn', headline: 'Away', last_ms: 5 }, { where: ['d:1'], severity: 'bad', until_ms: 7 }]))", `["! Slow","✕ Empty, Slow","! Slow","✕ Empty","! Away (paused)",""]`},
		{"marks.js", "m.legendOf([{ name: 'a:1/0' }, { name: 'b:1/0' }, { name: 'b:1/1' }, { name: 'c:1/0' }], m.marksOf([{ where: ['b:1'], severity: 'bad', headline: 'Out' }, { where: ['a:1/0'], severity: 'warn', headline: 'Slow' }])).map((k) => k.words)", `["wrong: Out","worth a look: Slow"]`},
		{"verdict.js", "[{ severity: 'bad' }, { severity: 'warn' }, { severity: 'bad', last_ms: 5 }, { severity: 'warn', last_ms: 5 }, { severity: 'bad', until_ms: 5, last_ms: 5 }].map((i) => m.signOf(i).join('|'))", `["✕ bad|sev bad","! look|sev warn","✕ paused|sev bad","! paused|sev warn","✓ over|sev soft"]`},
		{"verdict.js", "[{ since_ms: 1000 }, { since_ms: 1000, last_ms: 9000, times: 3, first_ms: 0 }, { since_ms: 1000, until_ms: 5000, last_ms: 4000 }].map((i) => m.timesOf(i, 181000).replace(/\\d\\d:\\d\\d:\\d\\d/g, 'T'))", `["since T, 3 min","since T, 3 min; not found since T, and over if it stays so; 3 times since T","T to T"]`},
		{"words.js", "[new Date(2026, 10, 26, 7, 44, 9), new Date(2026, 10, 27, 7, 44, 9)].map((at) => m.dated(at.getTime(), new Date(2026, 10, 27, 8).getTime()))", `["Nov 26 07:44:09","07:44:09"]`},
		{"verdict.js", "[m.entryOf('# R\\n\\n## A\\n\\none\\n\\n## B\\ntwo', 'A'), m.entryOf('\\n## B\\ntwo', 'B'), m.entryOf('', 'C')]", `["one","two",""]`},
		{"verdict.js", "m.blocks('**Means** a `code` [link](x.md).\\n\\n1. one\\n   more\\n2. *two*').map((e) => e.tagName + e.textContent)", `["PMeans a code link.","OLone moretwo"]`},
		{"requests.js", "[m.query({ find: '', outcome: '' }), m.query({ find: ' ab ', outcome: 'failed', slow: '500' }), m.query({ outcome: 'running' }), m.query({ find: '  ', key: ' ' })]", `["","/decisions?brief=1&n=200&find=ab&outcome=failed&slow_ms=500","/decisions?brief=1&n=200&running=1",""]`},
		{"requests.js", "m.bars({ attempts: [{ n: 1, at_ms: 5, state: 'ended', waits_ms: { queue: 10, pool: 2 } }, { n: 2, at_ms: 20, since_ms: 30, state: 'pool', waits_ms: { prefill: 10 } }] }, 35.5).map((b) => [b.n, b.name, b.from, b.ms])", `[[1,"queue",5,10],[1,"pool",15,2],[2,"prefill",20,10],[2,"pool",30,5.5]]`},
		{"requests.js", "m.runnerUp([{ name: 'a', score: 5, chosen: true }, { name: 'b', score: 9 }, { name: 'c', score: null }], true)", `"a scored 5.00; the runner-up b 9.00, worse by 4.00 (less is better)"`},
		{"requests.js", "m.runnerUp([{ name: 'a', score: 5, chosen: true }], true)", `""`},
		{"verdict.js", "m.verdictOf({ incidents: [{ id: 3, severity: 'bad', until_ms: 0, headline: 'Requests fail', what: '1,200 of the 3,000 requests that ended in the last minute failed' }, { id: 2, severity: 'bad', until_ms: 9, what: 'x' }], engines: [], proxy: {} }).aloud", `"Requests fail: 1 thing is wrong. Requests that ended in the last minute failed"`},
		{"requests.js", "['p:1/0', 'q:1/0', 'd:1/0', '', undefined].map(m.engineNames({ engines: [{ id: 'p:1', role: 'prefill', ranks: 1 }, { id: 'q:1', role: 'prefill', ranks: 2 }, { id: 'd:1', role: 'decode', ranks: 1 }] })).join('|')", `"p:1|q:1/0|d:1/0||"`},
		{"panels.js", "[m.keysOf([]), m.keysOf([{ key: '', requests: 3 }]), m.keysOf([{ key: 'batch', requests: 1308 }, { key: '', requests: 100 }])]", `["","","Of 1,408 that wait for prefill or for a rank: 1,308 of key batch."]`},
		{"picture.js", "[m.noModel({}), m.noModel({ model_why: 'a few steps' }), m.noModel({ model_why: 'one group?' })]", `["","","There is no step model: one group?"]`},
		{"picture.js", "[[8.8, 93, 5], [44, 93, 5], [44, 43, 5], [8.8, 93, 0], [0, 43, 5]].map(([step_ms, p50_ms, samples]) => m.stepTime({ step_ms }, { tpot: { p50_ms, samples } }))", `["","a step takes 44.0 ms","a step takes 44.0 ms","a step takes 8.8 ms",""]`},
		{"panels.js", "[0, 9].map((until_ms) => m.stepOf({ kind: 'none', reason: 'balanced' }, m.crowded({ incidents: [{ crowded: true, until_ms }] })))", `["Not known: many requests wait now, though the ranks were not too busy in the mean of the last minute","There are enough ranks, by the mean of the last minute"]`},
		{"panels.js", "[m.stepOf({ kind: 'none', reason: 'balanced' }), m.stepOf({ kind: 'none', reason: 'ranks_down' }), m.stepOf({ kind: 'add_decode', reason: 'busy' }), m.stepOf({ kind: 'none', reason: 'new' })]", `["There are enough ranks, by the mean of the last minute","Not known while ranks are down","Add decode ranks","none, new"]`},
	} {
		require.Equal(t, tt.want, b.module(tt.module, tt.expression), "%s: %s", tt.module, tt.expression)
	}
	b.calm(s)
}

// The focus stays where it was as rows come, move and go.
func TestPageKeepsTheFocus(t *testing.T) {
	b, s := chromium(t), newSite(t, 16).open()
	b.visit(s)
	b.eventually("the first document", "!!evenkeel.document")
	rows := func(ids string) string {
		return b.module("dom.js", `(() => {
			const list = document.getElementById('mine') || document.getElementById('history').appendChild(m.el('ul', { id: 'mine' }));
			m.keyed(list, '`+ids+`'.split(''), (i) => i, (i) => m.el('li', null, m.el('button', null, i)), () => {});
			if (!list.contains(document.activeElement) && '`+ids+`' === 'abc') list.children[1].firstChild.focus();
			return document.activeElement.id || document.activeElement.textContent;
		})()`)
	}
	require.Equal(t, `"b"`, rows("abc"))
	require.Equal(t, `"b"`, rows("dbac"), "it moves along")
	require.Equal(t, `"a"`, rows("dac"), "b is gone: the next has it")
	require.Equal(t, `"d"`, rows("d"), "there is no next")
	require.Equal(t, `"history"`, rows(""), "there is none at all")
	b.calm(s)
}

// An incident says what to do, by keys alone, and keeps what is open and focused.
func TestIncidentsSayWhatToDo(t *testing.T) {
	b, s := chromium(t), newSite(t, 144)
	s.fake.Change(troubled)
	s.open()
	b.visit(s)
	b.eventually("the incidents", "document.getElementById('problem-list').children.length === 4")
	b.press("0")
	b.press(kb.Tab)
	require.Equal(t, "SUMMARY", b.eval("document.activeElement.tagName"))
	b.press(kb.Enter)
	b.eventually("it opens", "document.querySelector('#problem-list details').open")
	require.Contains(t, b.eval("document.querySelector('#problem-list .command code').textContent"), "$ADMIN/workers")
	b.press(kb.Tab)
	require.Equal(t, "Copy", b.eval("document.activeElement.textContent"))
	b.press(kb.Tab)
	require.Equal(t, "Runbook: engine_out", b.eval("document.activeElement.textContent"))
	b.press(kb.Enter)
	b.eventually("the entry", "document.querySelector('#problem-list .entry').innerText.includes('Clients')")
	b.shoot("incident-open")
	before := b.eval("evenkeel.document.at_ms")
	s.fake.Change(nil)
	b.eventually("they are over", "evenkeel.document.at_ms > "+before+" && document.querySelectorAll('#problem-list li.over').length === 4")
	require.Equal(t, "Runbook: engine_out", b.eval("document.activeElement.textContent"), "the focus stayed")
	require.Equal(t, "true", b.eval("document.querySelector('#problem-list details').open"), "what was open stays open")
	// On a busy machine the page may say for a moment that no news come.
	b.eventually("nothing is wrong", "document.getElementById('problems').className === 'ok'")
	b.shoot("incident-over")
	hidden := "document.querySelectorAll('#problem-list li[hidden]').length + document.getElementById('problem-more').textContent"
	require.Equal(t, "11 more that is over", b.eval(hidden), "the fourth line in grey is folded")
	b.eval("(document.getElementById('problem-more').click(), '')")
	require.Equal(t, "0Hide the older ones", b.eval(hidden))
	b.calm(s)
}

// Who drags on the strip sees the whole page as it was.
func TestStripMovesThePage(t *testing.T) {
	b, s := chromium(t), newSite(t, 16).open()
	s.fake.Change(func(d *detect.Facts) { d.Proxy.Open = 111_111 })
	b.visit(s)
	wait := func(what, script string, ms int) {
		b.eventually(what, script)
		b.eventually("some more", fmt.Sprintf("evenkeel.document.at_ms > %d + %s", ms, b.eval("evenkeel.document.at_ms")))
	}
	wait("then", text+".includes('111,111')", 11_000)
	s.fake.Change(func(d *detect.Facts) { d.Proxy.Open = 222_222 })
	wait("now", text+".includes('222,222')", 2500) // pages are kept in steps of five seconds
	b.press("7")
	require.Equal(t, "strip", b.eval("document.activeElement.id"))
	b.press(kb.ArrowLeft)
	b.eventually("it goes back", text+".includes('111,111') && document.body.classList.contains('then')")
	require.Contains(t, b.eval("document.getElementById('seen').textContent"), "The page as it was at")
	require.Contains(t, b.eval("document.getElementById('strip').getAttribute('aria-valuetext')"), "ago")
	last := b.eval("evenkeel.latest.at_ms")
	b.eventually("news come all the same", "evenkeel.latest.at_ms > "+last)
	require.Contains(t, b.eval(text), "111,111")
	b.shoot("strip-then")
	b.press("n")
	b.eventually("back to now", text+".includes('222,222') && !document.body.classList.contains('then')")
	b.press(kb.Home)
	b.eventually("too long ago", "document.getElementById('seen').textContent.includes('nothing is kept of that moment')")
	require.Equal(t, "true", b.eval("!document.body.classList.contains('then') && "+text+".includes('222,222')"),
		"what is shown is not told to be of that moment")
	b.press(kb.End)
	b.eventually("now again", "!document.body.classList.contains('then')")

	box := b.eval("JSON.stringify((({ x, y, width, height }) => [x, y, width, " +
		"height])(document.getElementById('strip').getBoundingClientRect()))")
	var x, y, w, h float64
	_, err := fmt.Sscanf(box, "[%g,%g,%g,%g]", &x, &y, &w, &h)
	require.NoError(t, err)
	b.eval(`(() => {
		const c = document.getElementById('strip'), at = (type, x) => c.dispatchEvent(new PointerEvent(type, { pointerId: 1, clientX: c.getBoundingClientRect().x + x, clientY: c.getBoundingClientRect().y + 40, bubbles: true }));
		c.setPointerCapture = () => {};
		at('pointerdown', c.clientWidth - 8 - 3 * (c.clientWidth - 52) / 900); at('pointermove', c.clientWidth - 8 - 2 * (c.clientWidth - 52) / 900); at('pointerup', 0);
	})()`)
	b.eventually("dragged", "document.body.classList.contains('then')")
	b.calm(s, "404 (Not Found)")
}

// Requests are searched where all receipts are, held still while somebody looks, and
// opened as a waterfall.
func TestRequests(t *testing.T) {
	b, s := chromium(t), newSite(t, 16).open()
	b.visit(s)
	b.eventually("rows", "document.querySelectorAll('#decision-rows button').length === 12")
	const slash = "document.body.dispatchEvent(new KeyboardEvent('keydown', { key: '/', bubbles: true, cancelable: true })) === false"
	require.Equal(t, "true", b.eval(slash), "the key is taken: the browser does not type it into the field")
	require.Equal(t, "filter-find", b.eval("document.activeElement.id"))
	b.do(chromedp.SetValue("#filter-find", "abc"))
	b.eval(`(() => { const o = document.getElementById('filter-outcome'); o.value = 'failed'; o.dispatchEvent(new Event('input', { bubbles: true })); })()`)
	b.eventually("what was found", "document.querySelectorAll('#decision-rows button').length === 1 && "+
		"document.getElementById('decisions-note').textContent === '1 of 9,000 that ended and 12 that run'")
	s.mu.Lock()
	require.Equal(t, "brief=1&n=200&find=abc&outcome=failed", s.receipts[len(s.receipts)-1])
	s.mu.Unlock()
	b.eval("document.querySelector('#filter button').click()")
	b.eventually("all again", "document.querySelectorAll('#decision-rows button').length === 12")

	b.eval("document.querySelector('#decision-rows button').focus()")
	b.eventually("it is held", "document.getElementById('decisions-note').textContent.includes('held still')")
	rows := b.eval("document.getElementById('decision-rows').textContent")
	before := b.eval("evenkeel.document.at_ms")
	b.eventually("news", "evenkeel.document.at_ms > 2500 + "+before)
	require.Equal(t, rows, b.eval("document.getElementById('decision-rows').textContent"))
	b.press(kb.Enter)
	b.eventually("the waterfall", "document.querySelectorAll('#receipt-bars tr').length === 7")
	require.Equal(t, "1: queue,1: prefill,2: queue,2: prefill,2: pool,2: pull,2: decode",
		b.eval("[...document.querySelectorAll('#receipt-bars td:first-child')].map((e) => e.textContent).join()"))
	why := b.eval("document.getElementById('receipt-why').innerText")
	for _, says := range []string{"the runner-up p3:8000/0 180, worse by 60.0", "It failed: connection refused; another attempt followed.",
		"Decode on d1:8000/3: evenkeel chose it of 7 with room", "worse by 1,000,000"} {
		require.Contains(t, why, says)
	}
	b.shoot("receipt")
	b.press(kb.Escape)
	b.eventually("it closes, and the focus is back", "!document.getElementById('receipt').open && document.activeElement.tagName === "+
		"'BUTTON' && document.getElementById('decision-rows').contains(document.activeElement)")
	b.calm(s)
}

func TestPictureCanBeCopied(t *testing.T) {
	b, s := chromium(t), newSite(t, 32).open()
	b.visit(s)
	b.eventually("the button", "!!document.querySelector('button.copy')")
	b.eval("document.querySelector('button.copy').click()")
	b.eventually("it is copied or saved", "['Copied', 'Saved as a file'].includes(document.querySelector('button.copy').textContent)")
	b.calm(s)
}

// hurt are what a fleet may be in.
var hurt = map[string]func(*detect.Facts){
	"well": func(*detect.Facts) {},
	"half-dead": func(d *detect.Facts) {
		g := &d.Models[0].Groups[0]
		for i := range g.Ranks {
			if r := &g.Ranks[i]; i < len(g.Ranks)/2 {
				r.State, r.InSteps, r.KVTokens, r.Used, r.Slots, r.Running = detect.RankDown, false, 0, 0, 0, 0
			}
		}
		g.SteppingRanks = len(g.Ranks) - len(g.Ranks)/2
		n := 0
		for i := range d.Engines {
			if e := &d.Engines[i]; e.Role == "decode" && n < (len(g.Ranks)/2+15)/16 {
				e.State, e.Why, e.SinceS = "down", "dial tcp "+e.ID+": connect: connection refused", 74
				n++
			}
		}
		d.Traffic.RequestsPerS, d.Traffic.FailuresPerS = 410, 37
	},
	"flood": func(d *detect.Facts) {
		d.Prefill.Waiting = 1000
		for i := range d.Prefill.Engines {
			d.Prefill.Engines[i].State, d.Prefill.Engines[i].KVShare, d.Prefill.Engines[i].ScrapeAgeMs = "closed", 0.97, 9000
		}
		d.Prefill.ScrapeEveryMs = 100
		g := &d.Models[0].Groups[0]
		for i := range g.Ranks {
			g.Ranks[i].Used, g.Ranks[i].Running = g.Ranks[i].Slots, g.Ranks[i].Slots
		}
		d.Traffic.RequestsPerS, d.Traffic.FailuresPerS = 2100, 1500
		d.Models[0].Pool.Entries = 9000
		d.Advice = []advice.Advice{{Model: "deepseek-r1",
			Says: "Prefill has 12 ranks, and 16 are advised. Decode has 32 ranks, and 32 are advised."}}
		d.Advice[0].Steps = append(d.Advice[0].Steps, advice.Step{Kind: "add_prefill", Reason: "backlog"})
	},
	"draining": func(d *detect.Facts) {
		g := &d.Models[0].Groups[0]
		for i := range g.Ranks {
			if i%4 == 1 {
				g.Ranks[i].State, g.Ranks[i].Slots = detect.RankDraining, 0
			}
		}
	},
}

// Every size, theme and state is without overflow; with -axe also without findings.
func TestPageInEverySizeAndState(t *testing.T) {
	b := chromium(t)
	for _, ranks := range []int{8, 32, 144} {
		for name, change := range hurt {
			s := newSite(t, ranks)
			s.fake.Change(change)
			s.open()
			for i, width := range []int64{390, 1024, 1440} {
				b.do(chromedp.EmulateViewport(width, 900))
				b.scheme([]string{"dark", "light"}[(i+ranks/8)%2])
				b.visit(s)
				b.eventually("the picture", "!!evenkeel.document && !!document.querySelector('canvas.map')")
				require.Equal(t, "true", b.eval("document.documentElement.scrollWidth <= innerWidth"), "%s, %d ranks, %d px: it scrolls sideways", name,
					ranks, width)
				b.shoot(fmt.Sprintf("all-%s-%d-%d", name, ranks, width))
				b.accessible(name)
			}
			b.do(chromedp.Navigate("about:blank"))
			b.mu.Lock()
			delete(b.hosts, s.addr)
			require.Empty(t, b.complaints)
			b.mu.Unlock()
			s.close()
		}
	}
}

// accessible has axe-core look, in both themes, where it is there.
func (b *browser) accessible(what string) {
	if *axe == "" {
		return
	}
	source, err := os.ReadFile(*axe)
	require.NoError(b.t, err)
	for _, theme := range []string{"light", "dark"} {
		b.scheme(theme)
		b.eval(`(document.querySelectorAll('details').forEach((d) => { d.open = true; }), '')`)
		if _, err := chromedp.Run(b, chromedp.Evaluate[string](string(source)+"; ''")); err != nil {
			require.NoError(b.t, err)
		}
		b.eval(`(window.told = undefined, axe.run(document, { resultTypes: ['violations'] }).then((r) => { window.told = r.violations.map((v) => v.id + ': ' + v.help + ' ' + v.nodes.slice(0, 2).map((n) => n.html.slice(0, 160) + ' ' + n.failureSummary).join(' | ')).join('\\n'); }), '')`)
		b.eventually("axe", "window.told !== undefined")
		require.Empty(b.t, b.eval("window.told"), "%s, %s", what, theme)
	}
}

// A page that is open for long, with -soak 12m.
func TestPageIsOpenForLong(t *testing.T) {
	if *soak == 0 {
		t.Skip("it takes minutes: -soak 12m")
	}
	b, s := chromium(t), newSite(t, 144).open()
	states := []string{"well", "half-dead", "flood", "draining"}
	b.visit(s)
	b.eventually("the first document", "!!evenkeel.document")
	heap := func() float64 {
		b.do(command(heapprofiler.CollectGarbage, cdp.Empty{}))
		var used, nodes float64
		_, err := fmt.Sscanf(b.eval("performance.memory.usedJSHeapSize + ' ' + document.querySelectorAll('*').length"), "%g %g", &used, &nodes)
		require.NoError(t, err)
		t.Logf("%.1f MiB, %.0f elements", used/(1<<20), nodes)
		return used
	}
	var first float64
	for began, i := time.Now(), 0; time.Since(began) < *soak; i++ {
		s.fake.Change(hurt[states[i%len(states)]])
		b.do(chromedp.Sleep(15 * time.Second))
		if used := heap(); i == 7 { // every state has been seen twice
			first = used
		} else if i > 7 {
			require.Less(t, used, first+8<<20, "it grows")
		}
	}
	b.calm(s)
}

// An open page does not grow with time.
func TestPageDoesNotGrow(t *testing.T) {
	b, s := chromium(t), newSite(t, 16).open()
	b.visit(s)
	b.eventually("the first document", "!!evenkeel.document")
	hour := func(from int) string {
		return b.module("history.js", fmt.Sprintf(`(() => {
			for (let i = 1; i <= 3600; i++) m.addToHistory({ ...evenkeel.document, at_ms: evenkeel.document.at_ms + 1000 * (%d + i) });
			return m.past.size();
		})()`, from))
	}
	require.Equal(t, hour(0), hour(4000))
	news := func() string {
		before := b.eval("evenkeel.document.at_ms")
		b.eventually("news", "evenkeel.document.at_ms > 6000 + "+before)
		return b.eval("document.querySelectorAll('*').length")
	}
	nodes := news()
	require.Equal(t, nodes, news())
	b.calm(s)
}

// A flood is called so in the first words, and which queue is full is told; when it is over,
// its failures are history.
func TestPageTellsOfAFlood(t *testing.T) {
	b, s := chromium(t), newSite(t, 32).open()
	b.visit(s)
	b.eventually("history", `document.getElementById('problems').className === 'ok' && document.getElementById('failures-now').textContent === 'No request fails now. These numbers are history.'`)
	require.Equal(t, "0", b.eval(`document.querySelectorAll('#failure-rows .bad').length`), "nothing is red while nothing fails")
	s.fake.Fail(map[detect.Outcome]uint64{{Name: "queue_full", Status: 429}: 90_000, {Name: "upstream_broken", Status: 502}: 1080},
		map[detect.Outcome]detect.Why{{Name: "queue_full",
			Status: 429}: {Text: "the arrival queue of model deepseek-r1 is full (prefill.queue.max: 1000)"}}, 82_800)
	s.fake.Change(hurt["flood"])
	b.eventually("the verdict", `document.getElementById('problems-title').textContent.startsWith('✕ Overload: ')`)
	first := func() string { return b.eval("document.getElementById('problem-list').children[0].innerText") }
	b.eventually("the queue", `document.getElementById('problem-list').children[0].innerText.includes('prefill.queue.max')`)
	require.Contains(t, first(),
		"All 1,536 decode slots of model deepseek-r1 are taken, and 10,000 requests wait in the pool and in the arrival queue")
	require.Contains(t, first(), "Requests are refused, because the arrival queue of model deepseek-r1 is full (prefill.queue.max: 1000). At "+
		"the last look 1,000 requests waited in the arrival queue, and 37 of 400 places of the pool were taken.")
	b.eventually("they are marked", `document.querySelectorAll('#failure-rows .bad').length === 1 && document.getElementById('failures-now').textContent === 'Requests fail now.'`)
	require.Equal(t, "true", b.eval(`[...document.querySelectorAll('#tiles .bad')].map((e) => e.textContent).join().startsWith('✕ ')`), "so is their rate")
	b.calm(s)
}

// A column that drains looks like nothing else, and the legend says so.
func TestPageShowsWhatDrains(t *testing.T) {
	b, s := chromium(t), newSite(t, 8)
	s.open()
	b.visit(s)
	b.eventually("the picture", "!!evenkeel.document && !!document.querySelector('canvas.map')")
	orange := `(() => { // pixels of the colour that warns
		const c = document.querySelector('canvas.map'), p = document.createElement('canvas');
		p.width = c.width; p.height = c.height + 1;
		const x = p.getContext('2d', { willReadFrequently: true });
		x.drawImage(c, 0, 1);
		x.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--warn').trim(); x.fillRect(0, 0, 1, 1);
		const w = x.getImageData(0, 0, 1, 1).data, d = x.getImageData(0, 1, c.width, c.height).data;
		let n = 0;
		for (let i = 0; i < d.length; i += 4) if (d[i] === w[0] && d[i + 1] === w[1] && d[i + 2] === w[2]) n++;
		return n;
	})()`
	require.Equal(t, "0", b.eval(orange))
	height := b.eval("document.querySelector('canvas.map').clientHeight")
	s.fake.Change(func(d *detect.Facts) {
		d.Models[0].Groups[0].Ranks[3].State, d.Models[0].Groups[0].Ranks[3].KVTokens = detect.RankDraining, 9000
	})
	b.eventually("it is drawn", orange+" > 400")
	require.Equal(t, height, b.eval("document.querySelector('canvas.map').clientHeight"), "the legend has room for it")
	b.shoot("drains")
	b.calm(s)
}

// together makes the ranks of a document prefill and decode: with every document rounds are sent to
// half of them.
func together() func(*detect.Facts) {
	documents := uint64(0)
	return func(d *detect.Facts) {
		documents++
		m := &d.Models[0]
		m.Name, m.Aggregated = m.Name+" (aggregated)", true
		g := &m.Groups[0]
		g.Held, g.Rounds = 0, &board.RoundStatus{Sent: 3 * documents, MaxHoldS: 5, Steps: 100, PrefillSteps: 31, EmptyShare: 0.26}
		for i := range g.Ranks {
			r := &g.Ranks[i]
			r.Prompts, r.Backlog, r.Unread = 7, int64(300*i), int64(1500*i)
			if i%2 == 0 {
				r.Prompts += documents
			}
		}
		d.Prefill.Engines, d.Prefill.Groups = []detect.PrefillEngine{}, []detect.PrefillGroup{{ID: "dp", State: "open"}}
	}
}

// Rounds are seen as they go, and beside the KV of each rank stands what it has to compute.
func TestPageShowsRounds(t *testing.T) {
	b, s := chromium(t), newSite(t, 8)
	s.fake.Change(together())
	s.open()
	b.visit(s)
	b.eventually("the rounds of a second", `(document.querySelector('p.rounds') || {}).textContent === 'Since the start 31 % of steps had a prefill, and 26 % of ranks were empty in them. In the last second 3 rounds went to 4 of 8 ranks.'`)
	require.Equal(t, "true", b.eval("document.getElementById('prefill').hidden"), "there is no prefill engine")
	b.eval("(document.getElementById('rank-details').open = true, '')")
	b.eventually("the table", "[...document.querySelectorAll('#rank-rows tr')].map((r) => r.lastElementChild.textContent).join() === "+
		"'0,300,600,900,1,200,1,500,1,800,2,100'")
	b.eval("(document.querySelector('canvas.map').focus(), '')")
	b.press(kb.ArrowRight)
	b.press(kb.ArrowRight)
	b.eventually("a rank in words", "document.querySelector('.read span').textContent.includes('running, 300 prompt tokens to compute')")
	b.shoot("rounds")
	b.do(chromedp.EmulateViewport(390, 844))
	b.eventually("a narrow screen", "innerWidth === 390 && document.documentElement.scrollWidth <= innerWidth")
	b.shoot("rounds-narrow")
	b.calm(s)
}
