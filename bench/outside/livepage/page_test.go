// Package livepage opens the live page (gateway/live/page) in a browser, in front of proxies that
// tests make up.
package livepage

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/gateway/detect"
	"evenkeel/gateway/live"
	"evenkeel/gateway/live/livetest"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/watch"
	"evenkeel/internal/stats"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var shots = flag.String("shots", "", "folder to write pictures of the page to")

// site is the page and its stream, as the admin listener has them, on an address
// that stays when it is started again.
type site struct {
	t      *testing.T
	fake   *livetest.Proxy
	watch  *watch.Watch
	live   *live.Live
	addr   string
	token  string
	server *httptest.Server
	stop   context.CancelFunc
	done   chan struct{}

	mu       sync.Mutex
	receipts []string // ids that were asked for
}

func newSite(t *testing.T, ranks int) *site {
	s := &site{t: t, fake: livetest.New(ranks), addr: "127.0.0.1:0"}
	s.fake.Age(time.Hour)
	t.Cleanup(func() { s.close() })
	return s
}

// open starts the server with a quarter of an hour behind it.
func (s *site) open() *site {
	s.watch = s.fake.Watch()
	s.live = s.fake.Live(s.watch)
	for i := range 900 { // a quarter of an hour, with a bad time in it
		if bad := uint64(max(0, min(120, i-500))); bad > 0 {
			s.fake.Fail(map[detect.Outcome]uint64{{Name: "queue_full", Status: 429}: 60 * bad, {Name: "upstream_broken", Status: 502}: 9 * bad}, nil,
				0)
		}
		sample := s.fake.At(3600 - float64(900-i))
		sample.At, sample.Examined, sample.Policy = time.Now().Add(time.Duration(i-900)*time.Second), true, "evenkeel"
		sample.Engines = map[detect.EngineName]string{{Role: "decode", Name: "10.0.3.13:8000"}: "up"}
		if i <= 300 {
			sample.Policy = "br0"
		}
		if i > 500 && i < 620 {
			sample.Engines = map[detect.EngineName]string{{Role: "decode", Name: "10.0.3.13:8000"}: "down"}
		}
		group := detect.GroupAt{GroupName: detect.GroupName{Model: "deepseek-r1", Group: "dp"}}
		for _, r := range sample.Ranks {
			group.MostTokens = max(group.MostTokens, r.KVTokens)
		}
		sample.Groups = []detect.GroupAt{group}
		s.watch.With(func(w *detect.Watch) { w.Add(sample) })
	}
	mux := http.NewServeMux()
	for path, page := range live.Page() {
		mux.Handle("GET "+path, page)
	}
	mux.HandleFunc("GET /live", func(w http.ResponseWriter, r *http.Request) {
		if s.token != "" && r.Header.Get("Authorization") != "Bearer "+s.token {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		s.live.ServeHTTP(w, r)
	})
	mux.HandleFunc("GET /decisions", func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.receipts = append(s.receipts, cmp.Or(r.URL.Query().Get("id"), r.URL.RawQuery))
		s.mu.Unlock()
		if r.URL.Query().Has("brief") {
			_ = json.NewEncoder(w).Encode(map[string]any{"kept": 9000, "running": 12, "receipts": []any{},
				"decisions": []live.Decision{{ID: "found", AtMs: 1, Outcome: "queue_full", Why: "it was refused"}}})
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"receipts": []any{aReceipt(r.URL.Query().Get("id"))}})
	})
	listener, err := net.Listen("tcp", s.addr)
	require.NoError(s.t, err)
	s.addr = listener.Addr().String()
	s.server = &httptest.Server{Listener: listener, Config: &http.Server{Handler: mux}}
	s.server.Start()
	var ctx context.Context
	ctx, s.stop = context.WithCancel(context.Background())
	s.done = make(chan struct{})
	go func() {
		defer close(s.done)
		s.watch.Run(ctx)
	}()
	return s
}

func (s *site) close() {
	if s.server != nil {
		s.stop()
		<-s.done
		s.server.CloseClientConnections()
		s.server.Close()
		s.server = nil
	}
}

// aReceipt is of a request that was tried twice.
func aReceipt(id string) *receipt.Receipt {
	score := func(v float64) *float64 { return &v }
	return &receipt.Receipt{
		ID: id, Model: "<b>finishes first</b>", State: receipt.Ended, Outcome: "ok", PromptTokens: 900, OutputTokens: 40, TTFT: 700, Total: 2100,
		Attempts: []receipt.Attempt{
			{N: 1, State: receipt.Ended, Waits: receipt.Waits{Queue: 20, Prefill: 80}, Cause: "connection refused", Again: true, Prefill: &receipt.Prefill{Candidate: "p1:8000/0", Policy: "finish", Eligible: 3}},
			{
				N: 2, At: 100, State: receipt.Ended, Waits: receipt.Waits{Queue: 100, Prefill: 400, Pool: 60, Transfer: 40, Relay: 1400},
				Prefill: &receipt.Prefill{Candidate: "p2:8000/0", Policy: "finish", Eligible: 2, Hit: 512,
					Best: []receipt.Choice{{Name: "p2:8000/0", Score: score(120), Chosen: true}, {Name: "p3:8000/0", Score: score(180)}}},
				Decode: &receipt.Decode{Rank: "d1:8000/3", Policy: "evenkeel", Able: 7, KVTokens: 1000, Fullest: 9000, Better: "less",
					Best: []receipt.Choice{{Name: "d1:8000/3", Score: score(1e6), Chosen: true}, {Name: "d1:8000/4", Score: score(2e6)}}},
			},
		},
	}
}

const text = "document.body.innerText"

func TestPageShows144RanksAndKeepsUp(t *testing.T) {
	b, s := chromium(t), newSite(t, 144).open()
	b.visit(s)
	b.eventually("the verdict", `document.getElementById('problems-title').textContent.startsWith('✓ Nothing is wrong: 21 of 21 engines are up')`)
	for _, says := range []string{"144 of 144 ranks up", "deepseek-r1 · dp", "eu-1", "decode policy evenkeel", "prefill policy finish",
		"evenkeel: imbalance ", "10.0.1.10:8000/0", "10.0.3.18:8000"} {
		require.Equal(t, "true", b.eval(text+`.includes(`+fmt.Sprintf("%q", says)+`)`), says)
	}
	require.Equal(t, "300", b.eval("evenkeel.document && document.querySelectorAll('canvas.map').length && 300"))
	require.Equal(t, "true", b.eval(`(() => { // columns, and the waste above them
		const c = document.querySelector('canvas.map'), x = c.getContext('2d'), seen = new Map();
		const d = x.getImageData(c.width * 0.2, 0, c.width * 0.4, c.height).data;
		for (let i = 0; i < d.length; i += 4) { const k = d[i] << 16 | d[i + 1] << 8 | d[i + 2]; seen.set(k, (seen.get(k) || 0) + 1); }
		return [...seen.values()].filter((n) => n > 300).length >= 4;
	})()`), "the picture is empty")

	before := b.eval("evenkeel.document.at_ms")
	b.eventually("another document", "evenkeel.document.at_ms > "+before)
	s.fake.Change(func(d *detect.Facts) { d.Proxy.Open = 777_123 })
	b.eventually("what changed", text+`.includes('777,123')`)
	s.fake.Change(nil)
	b.scheme("light")
	b.shoot("live-light")
	b.scheme("dark")
	b.shoot("live-dark")
	b.eventually("some frames", "evenkeel.frames.length > 4")
	t.Logf("a frame with 144 ranks takes (ms, each): %s", b.eval("evenkeel.frames.map((f) => f.toFixed(1)).join(' ')"))
	b.calm(s)
}

func TestPageSaysWhatIsWrong(t *testing.T) {
	b, s := chromium(t), newSite(t, 144)
	s.fake.Change(troubled)
	s.open()
	b.visit(s)
	b.eventually("the verdict", `document.getElementById('problems').className === 'bad' && document.getElementById('problem-list').children.length === 4`)
	first := b.eval("document.getElementById('problem-list').children[0].innerText")
	require.Contains(t, first, "Decode engine 10.0.3.13:8000 is out and gets no requests: three requests failed in a row")
	require.Contains(t, first, "A finished prefill of model deepseek-r1 has waited 33.0 s", "what clients see stands with its cause")
	require.Equal(t, "true", b.eval("document.title.startsWith('(1) ')"))
	require.Equal(t, "✕ out", b.eval("document.getElementById('engine-rows').children[0].children[2].textContent"),
		"who is not well stands first")
	b.scheme("light")
	b.shoot("live-wrong-light")
	b.scheme("dark")
	b.shoot("live-wrong-dark")
	b.calm(s)
}

// troubled is a bad night.
func troubled(d *detect.Facts) {
	g := &d.Models[0].Groups[0]
	for i := range g.Ranks {
		switch r := &g.Ranks[i]; {
		case i/16 == 3:
			r.State, r.KVTokens, r.Used, r.Running = detect.RankOut, 0, 0, 0
		case i == 70 || i == 71:
			r.State = detect.RankDraining
		case i == 100:
			r.KVTokens, r.Tight = r.Capacity, true
		}
	}
	for i := range d.Engines {
		if e := &d.Engines[i]; e.ID == "10.0.3.13:8000" {
			e.State, e.Why, e.SinceS = "out", "three requests failed in a row: the engine closed the connection before its first event", 41
		}
	}
	p := &d.Prefill
	p.Engines[4].State, p.Engines[4].KVShare, p.Engines[4].KVTokens = "closed", 0.94, 940_000
	pool := &d.Models[0].Pool
	pool.Entries, pool.OldestS, pool.Ages = 212, 33, []int{4, 9, 30, 60, 61, 40, 8}
	d.Scopes = []detect.Scope{{Region: "eu", Home: true, Phase: "holding", Admits: true, Holder: "eu-1", Epoch: 4}}
	d.Geo = &detect.Geo{Policy: "sp-p", Peers: []detect.Peer{{ID: "us-1", Region: "us", Up: true, RTTMs: 84, InFlight: 3, Circuit: "closed"}}}
}

func TestPageFitsANarrowScreen(t *testing.T) {
	b, s := chromium(t), newSite(t, 32)
	s.fake.Change(troubledFew)
	s.open()
	b.do(chromedp.EmulateViewport(390, 844))
	b.visit(s)
	b.eventually("the verdict", `document.getElementById('problem-list').children.length > 0`)
	require.Equal(t, "true", b.eval("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways")
	require.Equal(t, "true", b.eval("document.querySelectorAll('#decision-rows tr').length > 5 && "+
		"[...document.querySelectorAll('#decision-rows tr')].every((r) => r.offsetHeight < 32)"), "a request has one line")
	b.scheme("light")
	b.shoot("live-narrow")
	b.calm(s)
}

func troubledFew(d *detect.Facts) {
	d.Models[0].Groups[0].Ranks[5].State = detect.RankDraining
	d.Engines[2].State, d.Engines[2].Why = "down", "dial tcp 10.0.1.12:8000: connection refused"
	d.Prefill.Engines[2].State = "down"
}

func TestPageIsWorkedByKeys(t *testing.T) {
	b, s := chromium(t), newSite(t, 144).open()
	b.visit(s)
	b.eventually("the first document", "!!evenkeel.document && document.querySelectorAll('canvas.map').length === 1")
	b.press("?")
	b.eventually("the keys", "document.getElementById('help').open")
	b.press(kb.Escape)
	b.eventually("no keys", "!document.getElementById('help').open")

	b.scheme("light")
	back := `getComputedStyle(document.body).backgroundColor`
	light := b.eval(back)
	b.press("t")
	require.Equal(t, "light", b.eval("document.documentElement.dataset.theme"))
	b.press("t")
	require.Equal(t, "dark", b.eval("document.documentElement.dataset.theme"))
	require.NotEqual(t, light, b.eval(back))
	b.press("t")
	require.Equal(t, light, b.eval(back))
	b.scheme("dark")
	b.eventually("auto follows the system", back+" !== '"+light+"'")

	b.press("1")
	require.Equal(t, "map", b.eval("document.activeElement.className"))
	b.press(kb.ArrowDown)
	b.eventually("a rank is read out", `document.querySelector('.read b') !== null`)
	require.Equal(t, "10.0.3.10:8000/0", b.eval(`document.querySelector('.read b').textContent`))

	b.press("h")
	b.eventually("it stands still", "document.body.classList.contains('held')")
	stood := b.eval("evenkeel.document.at_ms")
	b.do(chromedp.Sleep(1500 * time.Millisecond))
	require.Equal(t, stood, b.eval("evenkeel.document.at_ms"))
	b.press("h")
	b.eventually("it goes on", "evenkeel.document.at_ms > "+stood)

	for key, id := range map[string]string{"0": "problems", "2": "balance", "3": "pool", "4": "prefill", "5": "engines", "6": "decisions"} {
		b.press(key)
		require.Equal(t, id, b.eval("document.activeElement.id"), "key %s", key)
	}
	b.eval("document.querySelector('#decision-rows button').focus()")
	id := b.eval("document.activeElement.parentElement.title")
	b.press(kb.Enter)
	b.eventually("the receipt",
		"document.getElementById('receipt').open && document.getElementById('receipt-text').textContent.includes('finishes first')")
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Equal(t, []string{id}, s.receipts)
	b.calm(s)
}

// A screen reader reads out what changed, not every document.
func TestPageSpeaksOnlyOfWhatChanged(t *testing.T) {
	b, s := chromium(t), newSite(t, 16).open()
	b.visit(s)
	b.eventually("the verdict", `document.getElementById('said').textContent !== ''`)
	b.press("1")
	b.press(kb.ArrowDown)
	b.eventually("the rank is said", `document.getElementById('said').textContent.startsWith('10.0.3.10:8000/0 up, ')`)
	b.eval(`(window.spoken = [], new MutationObserver((l) => l.forEach((m) => { const r = (m.target.parentElement || document.body).closest('[role=status], [aria-live]'); if (r) spoken.push(r.textContent); })).observe(document.body, { subtree: true, childList: true, characterData: true }))`)
	for i := range 3 {
		open := int64(1000 + i)
		s.fake.Change(func(d *detect.Facts) { d.Proxy.Open = open })
		b.eventually("another document",
			fmt.Sprintf("evenkeel.document.proxy.open_requests === %d && document.getElementById('problems-title').textContent.includes('%s')", open,
				stats.Grouped(open)))
	}
	require.Equal(t, "0", b.eval("spoken.length"), "%s", b.eval("spoken.join(' | ')"))
	s.fake.Change(troubledFew)
	b.eventually("the verdict is said", `document.getElementById('said').textContent.startsWith('Engine outage: 2 things are worth a look. Prefill engine 10.0.1.12:8000 is down')`)
	b.calm(s)
}

// What is lost is told of one step: its share and its length are by the model, and
// so is the step they are of.
func TestPageTellsOfOneStep(t *testing.T) {
	b, s := chromium(t), newSite(t, 16)
	s.fake.Change(func(d *detect.Facts) {
		g := &d.Models[0].Groups[0]
		g.StepMs, g.ModelMs, g.LostShare, g.LostMs = 50, 20, 0.1, 2
	})
	s.open()
	b.visit(s)
	b.eventually("the tile", text+`.includes('2.0 ms of each step, by the step model')`)
	require.Equal(t, "false", b.eval(text+`.includes('engines count')`), "no engine tells how long its ranks wait")
	s.fake.Change(func(d *detect.Facts) { d.Models[0].Groups[0].SyncWaitMs = 1.84 })
	b.eventually("what the engines tell", text+`.includes("1.9 ms of each step, by the step model; engines count 1.8 ms")`)
	s.fake.Change(func(d *detect.Facts) {
		g := &d.Models[0].Groups[0]
		g.StepMs, g.ModelMs, g.LostShare, g.LostMs = 50, 0, 0, 0
	})
	b.eventually("without a model nothing is known", text+`.includes('step model not known')`)
	b.calm(s)
}

// A rank that is dead enters neither the mean nor the emptiest.
func TestPageLeavesDeadRanksOutOfTheMean(t *testing.T) {
	b, s := chromium(t), newSite(t, 4)
	s.fake.Change(func(d *detect.Facts) {
		g := &d.Models[0].Groups[0]
		for i := range g.Ranks {
			g.Ranks[i].KVTokens = int64(100_000 + i)
		}
		g.Ranks[0].State, g.Ranks[0].InSteps, g.Ranks[0].KVTokens, g.Ranks[0].Slots = detect.RankDown, false, 0, 0
		g.SteppingRanks, g.KVTokens, g.MeanTokens, g.LeastTokens, g.MostTokens = 3, 300_006, 100_002, 100_001, 100_003
	})
	s.open()
	b.visit(s)
	b.eventually("the reading", `(document.querySelector('.read') || {}).textContent === 'fullest 10.0.3.10:8000/3 100k, mean 100k, emptiest 10.0.3.10:8000/1 100k'`)
	require.Contains(t, b.eval("document.querySelector('canvas.map').getAttribute('aria-label')"),
		"3 of 4 ranks up, KV tokens from 100k to 100k, mean 100k")
	require.Contains(t, b.eval(text), "X: 1 down")
	b.calm(s)
}

func TestPageSaysThatTheStreamIsLostAndComesBack(t *testing.T) {
	b, s := chromium(t), newSite(t, 16).open()
	b.visit(s)
	b.eventually("live", `document.getElementById('link-word').textContent === 'live'`)
	s.close()
	b.eventually("lost", `document.body.classList.contains('lost') && document.getElementById('problems-title').textContent.includes('No news for')`)
	require.Equal(t, "0.5", b.eval("getComputedStyle(document.getElementById('ranks')).opacity"))
	b.shoot("live-lost")
	s.open()
	b.eventually("live again", `document.getElementById('link-word').textContent === 'live' && !document.body.classList.contains('lost')`)
	b.calm(s, "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
}

func TestPageSaysWhyItGetsNoStream(t *testing.T) {
	b, s := chromium(t), newSite(t, 16).open()
	for range 16 { // as many as there may be
		stream, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.addr+"/live", nil)
		require.NoError(t, err)
		resp, err := http.DefaultClient.Do(stream)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		go func() {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}()
	}
	b.visit(s)
	b.eventually("what the proxy says", `document.getElementById('link-word').textContent.includes('close another page')`)
	b.calm(s, "503 (Service Unavailable)")
}

func TestPageAsksForTheTokenOnce(t *testing.T) {
	b, s := chromium(t), newSite(t, 16)
	s.token = "open sesame"
	s.open()
	b.visit(s)
	b.eventually("it asks", "document.getElementById('token-dialog').open")
	enter := func(word string) {
		b.do(chromedp.SetValue("#token", word), chromedp.Click("#token-form button"))
	}
	enter("guess")
	b.eventually("a wrong one is told",
		"document.getElementById('token-dialog').open && document.getElementById('token-wrong').textContent !== ''")
	enter(s.token)
	b.eventually("live", `document.getElementById('link-word').textContent === 'live'`)
	b.do(chromedp.Reload())
	b.eventually("it is kept in the tab", `document.getElementById('link-word').textContent === 'live'`)
	require.Equal(t, "true", b.eval("sessionStorage.getItem('evenkeel-token') === 'open sesame' && localStorage.getItem('evenkeel-token') "+
		"=== null && !location.href.includes('sesame')"))
	b.calm(s, "401 (Unauthorized)")
}

// Names come from engines, clients and configs. Whatever they are, they are text.
func TestPageTakesNamesAsText(t *testing.T) {
	const evil = `<img src=x onerror="window.hit=1"><script>window.hit=1</script>"'&\u202e` + "\x00"
	b, s := chromium(t), newSite(t, 3)
	s.fake.Change(func(d *detect.Facts) {
		m := &d.Models[0]
		m.Name, m.Groups[0].Name, m.Groups[0].Policy = evil, evil, evil
		for i := range m.Groups[0].Ranks {
			m.Groups[0].Ranks[i].Name, m.Groups[0].Ranks[i].State = fmt.Sprint(evil, i), evil
		}
		d.Proxy.ID, d.Proxy.Ready, d.Proxy.Why = evil, false, evil
		e := &d.Engines[0]
		e.ID, e.Role, e.State, e.Why, e.Version = evil, evil, evil, evil, evil
		d.Prefill.Policy, d.Prefill.Engines[0].ID, d.Prefill.Engines[0].State = evil, evil, evil
		d.Geo = &detect.Geo{Policy: evil, Peers: []detect.Peer{{ID: evil, Region: evil, Fault: evil}}}
		d.Scopes = []detect.Scope{{Region: evil, Phase: evil, Holder: evil}}
	})
	s.fake.Decide(func(list []live.Decision) {
		c := &list[0]
		c.ID, c.Model, c.Prefill, c.Rank, c.Outcome, c.Why = evil, evil, evil, evil, evil, evil
	})
	s.open()
	b.visit(s)
	b.eventually("the names", text+`.includes('<img src=x onerror=')`)
	b.eval(`document.getElementById('rank-details').open = true`)
	b.eval(`document.querySelector('#decision-rows button').click()`)
	b.eventually("the receipt", "document.getElementById('receipt-text').textContent.includes('<b>finishes first</b>')")
	b.do(chromedp.Sleep(1200 * time.Millisecond))
	require.Equal(t, "undefined", b.eval("window.hit"))
	require.Equal(t, "0", b.eval("document.querySelectorAll('main img, main script, dialog img, dialog b, #receipt-text b').length"))
	require.Equal(t, "true", b.eval(`(() => { try { document.body.innerHTML = '<i>'; } catch { return true; } return false; })()`), "the page's policy lets text become markup")
	b.mu.Lock()
	b.complaints = slices.DeleteFunc(b.complaints, func(c string) bool { return strings.Contains(c, "TrustedHTML") }) // the last line's
	b.mu.Unlock()
	b.calm(s)
}
