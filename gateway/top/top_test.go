package top

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/x/ansi"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/live"
)

// document is a proxy with so many ranks, some of which are not well.
func document(ranks int) *live.Document {
	d := &live.Document{
		Form: live.Form, AtMs: 1_767_225_600_000, EveryMs: 1000,
		Proxy:   live.Proxy{ID: "proxy-a", Version: "v1.2.3", UptimeS: 7300, Ready: true, Places: 1024, PlacesUsed: 17, Open: 512},
		Traffic: live.Traffic{RequestsPerS: 14.2, TokensPerS: 12_345, TTFT: live.Latency{P50Ms: 692.4, P99Ms: 2628, Samples: 9}},
		Incidents: []live.Incident{
			{ID: 2, Severity: "bad", What: "Prefill engine p2:8100 is down: connection refused", SinceMs: 1_767_225_588_000, Clients: "Prompts go elsewhere."},
			{ID: 1, Severity: "warn", What: "Decode rank d0:8200/1 of group dp drains", SinceMs: 1_767_225_000_000, UntilMs: 1_767_225_030_000},
		},
		Failures: []live.Failed{{Outcome: "queue_full", Status: 429, Last5Min: 12, LastHour: 1200, SinceStart: 34_000}},
		Advice:   []live.Advice{{Model: "big-moe", Says: "Decode has 2 ranks, and 4 are advised."}},
		Models: []live.Model{{
			Name: "big-moe", Pool: live.Pool{Entries: 17, OldestS: 2.8, UpToS: []float64{1, 2}, Ages: []int{8, 4, 5}},
			Groups: []live.Group{{
				GroupLoads: board.GroupLoads{Name: "main", Barrier: true, Policy: "evenkeel", ImbalanceTokens: 9744, IdleShare: .054},
				StepMs:     9.48, ModelMs: 9.2, LostShare: .051,
				Twin: live.Twin{
					Says: []string{"against jsq-kv: 3.1 ms of every 44 ms step saved, 2.6 rank-hours saved today"}, Note: "Replayed: the 4.0 min until 12 s ago; error 0.8 % of a step.",
				},
			}},
		}},
		Prefill: live.Prefill{Policy: "finish", Waiting: 3, QueueMax: 1000, HitShare: .41, Engines: []live.PrefillEngine{{ID: "p1:8100/0", State: "open", KVShare: .5, GateShare: .9, Inflight: 2, NewTokens: 4096}}},
		Engines: []live.Engine{{ID: "p1:8100", Role: "prefill", State: "up", SinceS: 7000, Ranks: 1}, {ID: "p2:8100", Role: "prefill", State: "down", Why: "connection refused", SinceS: 12}},
		Decisions: []live.Decision{
			{ID: "r3", AtMs: 1_767_225_600_000, Prompt: 20, Why: "queue"},
			{ID: "r2", AtMs: 1_767_225_600_000, Prompt: 10, Prefill: "p1:8100", WaitMs: 4200, Why: "best F 12"},
			{ID: "r1", AtMs: 1_767_225_600_000, Prompt: 4000, Prefill: "p1:8100/0", Rank: "d0:8200", WaitMs: 120, Outcome: "ok", Why: "best F 12"},
		},
	}
	g := &d.Models[0].Groups[0]
	for i := range ranks {
		r := live.Rank{ID: int32(i), Name: fmt.Sprintf("decode-%d.engines.svc:8200/%d", i/16, i%16), State: live.RankUp, Steps: true, KVTokens: int64(50_000 + 100*i), Capacity: 100_000, Used: 20, Slots: 32}
		if i == 1 {
			r.State = live.RankDraining
		}
		g.Ranks = append(g.Ranks, r)
		g.SteppingRanks, g.MostTokens = i+1, r.KVTokens
	}
	return d
}

// shown is a screen of a size after these messages, without colours.
func shown(width, height int, msgs ...tea.Msg) (screen, string) {
	var m tea.Model = screen{url: "http://proxy:9090", width: 80, height: 24}
	for _, msg := range append([]tea.Msg{tea.WindowSizeMsg{Width: width, Height: height}}, msgs...) {
		m, _ = m.Update(msg)
	}
	return m.(screen), ansi.Strip(m.View())
}

func key(k string) tea.Msg {
	switch k {
	case "tab":
		return tea.KeyMsg{Type: tea.KeyTab}
	case "pgdown":
		return tea.KeyMsg{Type: tea.KeyPgDown}
	}
	return tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune(k)}
}

func TestEveryPageFitsTheTerminal(t *testing.T) {
	for _, size := range [][2]int{{80, 24}, {60, 10}, {200, 60}, {20, 5}, {1, 1}} {
		for _, page := range []string{"1", "2", "3", "4", "?"} {
			for _, ranks := range []int{0, 2, 144} {
				_, view := shown(size[0], size[1], seen{document(ranks), time.Now()}, key(page), key("G"))
				lines := strings.Split(view, "\n")
				require.LessOrEqual(t, len(lines), max(2, size[1]), "page %s, %d ranks", page, ranks)
				for _, l := range lines {
					require.LessOrEqual(t, ansi.StringWidth(l), size[0], "page %s, %d ranks: %q", page, ranks, l)
				}
			}
		}
	}
}

func TestTheOverviewAnswersTheFirstQuestions(t *testing.T) {
	_, view := shown(80, 60, seen{document(144), time.Now()})
	for _, want := range []string{
		"proxy-a v1.2.3  up 2h  ready", "14.2 req/s", "12k tok/s", "692/2628", "! bad for 12s: Prefill engine p2:8100 is down: connection refused", "✓ over after 30s: Decode rank d0:8200/1 of group dp drains", "failures 10 s/5 min/1 h/start  queue_full 0/12/1200/34k", "advice  big-moe: Decode has 2 ranks, and 4 are advised.", "pool 17 of 1024, oldest 2.8 s",
		"main  144 ranks  evenkeel  imbalance 9744  idle 5.4%  5.1% of 9.2 ms lost", "1 draining",
		"\n  against jsq-kv: 3.1 ms of every 44 ms step saved, 2.6 rank-hours saved today\n  Replayed: the 4.0 min until 12 s ago; error 0.8 % of a step.\n", "prefill finish  3 waiting of 1000", "50% of 90% KV",
		"prefill    p2:8100", "connection refused", "p1:8100 → d0:8200  waited 120ms  ok", "p1:8100 → –  has waited 4s  runs", "20 tok  – → –  runs",
	} {
		require.Contains(t, view, want)
	}
	require.NotContains(t, view, "prefill    p1:8100 ", "what is well is not listed")
	well := document(8)
	well.Incidents = nil
	_, view = shown(80, 40, seen{well, time.Now()})
	require.Contains(t, view, "nothing is wrong")
}

// Whoever reads the terminal is told what the page tells.
func TestTheTerminalSaysWhatThePageSays(t *testing.T) {
	d := document(8)
	d.Prefill.Batch = live.BatchStatus{Waiting: 1308, Ran: 40, HeldS: 100}
	d.Advice[0].Says = "Both sides have enough ranks."
	require.NoError(t, json.Unmarshal([]byte(`[{"kind":"none","reason":"balanced"}]`), &d.Advice[0].Steps))
	g := &d.Models[0].Groups[0]
	see := func() string {
		_, view := shown(160, 60, seen{d, time.Now()})
		return view
	}
	require.Contains(t, see(), "batch: 1308 wait, 40 ran, held back for 2s on average")
	require.Contains(t, see(), "step 9.5 ms")
	require.Contains(t, see(), "Both sides have enough ranks.")
	d.Traffic.TPOT = live.Latency{P50Ms: 93, P99Ms: 95, Samples: 3}
	d.Incidents[0].Crowded = true
	g.ModelMs, g.ModelWhy = 0, "step time does not follow the fullest rank (R2 0.00 of 47,707 steps): does its load hardly matter, or are they no barrier group?"
	view := see()
	require.NotContains(t, view, "step 9.5 ms", "answers get a token ten times as late")
	require.NotContains(t, view, "Both sides have enough ranks.")
	require.Contains(t, view, "not known: many requests wait now")
	require.Contains(t, view, "There is no step model: step time does not follow the fullest rank")
	d.Incidents[0].LastMs = d.AtMs - 9000
	require.Contains(t, see(), "! bad for 12s, seen last 9s ago: Prefill engine")
	d.Incidents[0].UntilMs = d.AtMs
	require.Contains(t, see(), "Both sides have enough ranks.", "when it is over")
	d.Prefill.Engines, d.Prefill.Groups = nil, []live.PrefillGroup{{ID: "main", State: "open"}}
	require.Contains(t, see(), "batch: 1308 wait", "where ranks prefill, too")
	d.Prefill.Batch = live.BatchStatus{}
	require.NotContains(t, see(), "batch:")
}

// The sentence on what another policy would have cost is never cut: its end may say that it lost.
func TestTheTwinIsNotCut(t *testing.T) {
	d := document(2)
	_, view := shown(50, 40, seen{d, time.Now()})
	require.Contains(t, view, "\n  against jsq-kv: 3.1 ms of every 44 ms step\n    saved, 2.6 rank-hours saved today\n  Replayed: the 4.0 min until 12 s ago; error\n    0.8 % of a step.\n")
	d.Models[0].Groups[0].Twin = live.Twin{Note: "The twin has replayed nothing yet."}
	_, view = shown(80, 40, seen{d, time.Now()})
	require.Contains(t, view, "\n  The twin has replayed nothing yet.\n")
}

// Ranks whose engine is down are shown as dead. What an engine told before it died is
// no measure for those that live.
func TestDeadRanksAreShownAsDead(t *testing.T) {
	d := document(5)
	g := &d.Models[0].Groups[0]
	for i := 3; i < 5; i++ {
		r := &g.Ranks[i]
		r.State, r.Steps, r.KVTokens, r.Capacity = live.RankDown, false, 1_000_000, 0
	}
	g.SteppingRanks, g.MostTokens = 3, g.Ranks[2].KVTokens
	g.Ranks[2].Capacity = 0
	_, view := shown(80, 40, seen{d, time.Now()})
	for _, want := range []string{"main  3 of 5 ranks  evenkeel", "\n              D       x   x\n", "\n  1 draining\n", "\n  2 down\n"} {
		require.Contains(t, view, want)
	}
	_, view = shown(100, 40, seen{d, time.Now()}, key("2"))
	rank := func(i int) string {
		for line := range strings.Lines(view) {
			if strings.Contains(line, g.Ranks[i].Name) {
				return line
			}
		}
		return ""
	}
	require.Contains(t, rank(2), " up ")
	require.Contains(t, rank(2), " 100% ", "it is the fullest that lives")
	require.Contains(t, rank(3), " down ")
	require.Contains(t, rank(4), " down ")
}

func TestKeys(t *testing.T) {
	see := seen{document(144), time.Now()}
	_, view := shown(80, 24, see, key("2"))
	require.Contains(t, view, "decode-0.engines")
	require.NotContains(t, view, "decode-8.engines.svc:8200/15")
	_, view = shown(80, 24, see, key("2"), key("s"))
	require.Contains(t, view, "decode-8.engines.svc:8200/15", "the fullest first")
	_, view = shown(80, 24, see, key("2"), key("G"))
	require.Contains(t, view, "decode-8.engines.svc:8200/15")
	s, _ := shown(80, 24, see, key("2"), key("pgdown"), key("k"))
	require.Equal(t, s.room()-1, s.scroll)
	s, _ = shown(80, 24, see, key("2"), key("k"))
	require.Zero(t, s.scroll, "no line is before the first")
	s, _ = shown(80, 24, see, key("tab"), key("tab"))
	require.Equal(t, pagePrefill, s.page)
	_, view = shown(80, 24, see, key("?"))
	require.Contains(t, view, "pause and go on")
	later := document(2)
	later.Proxy.ID = "later"
	_, view = shown(80, 24, see, key("p"), seen{later, time.Now()})
	require.Contains(t, view, "proxy-a")
	require.Contains(t, view, "PAUSED")
	_, cmd := screen{}.Update(key("q"))
	require.Equal(t, tea.Quit(), cmd())
}

func TestOldNumbersSaySo(t *testing.T) {
	at := time.Now()
	_, view := shown(80, 24, seen{document(2), at}, lost{errors.New("refused")}, tick(at.Add(9*time.Second)))
	require.Contains(t, view, "LOST, 9s old: refused")
	_, view = shown(80, 24, seen{document(2), at}, tick(at.Add(9*time.Second)))
	require.Contains(t, view, "LOST, 9s old", "a stream that is silent is no better")
	_, view = shown(80, 24, lost{errors.New("refused")})
	require.Contains(t, view, "refused")
}

// TestNamesDoNotSpeakToTheTerminal: names of models, engines and requests come
// from outside.
func TestNamesDoNotSpeakToTheTerminal(t *testing.T) {
	const evil = "x\x1b]0;owned\a\x1b[2J\u202e\u009b1m\r\n"
	text, err := json.Marshal(document(2))
	require.NoError(t, err)
	quoted, err := json.Marshal(evil)
	require.NoError(t, err)
	for _, name := range []string{"proxy-a", "v1.2.3", "big-moe", "main", "evenkeel", "jsq", "p1:8100/0", "p2:8100", "connection refused", "d0:8200", "best F 12", "decode-0.engines.svc:8200/0", "finish", "open", "down", "prefill", "up", "ok", "bad"} {
		text = bytes.ReplaceAll(text, []byte(`"`+name+`"`), quoted)
	}
	d, err := read(text)
	require.NoError(t, err)
	for _, page := range []string{"1", "2", "3", "4"} {
		s, _ := shown(120, 60, seen{d, time.Now()}, key(page))
		require.NotContains(t, s.View(), "\x1b]")
		require.NotContains(t, s.View(), "\x1b[2J")
		require.NotContains(t, s.View(), "\u202e")
		require.NotContains(t, s.View(), "\u009b")
	}
	require.NotContains(t, Once(d, 100), "\x1b]")
}

// proxy is an admin listener with one document, sent on and on.
func proxy(t *testing.T, d *live.Document) (*httptest.Server, *atomic.Int32) {
	t.Helper()
	text, err := json.Marshal(d)
	require.NoError(t, err)
	asked := &atomic.Int32{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /live", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			http.Error(w, "no token", http.StatusUnauthorized)
			return
		}
		if r.URL.Query().Has("once") {
			_, _ = w.Write(text)
			return
		}
		asked.Add(1)
		_, _ = fmt.Fprintf(w, "event: history\ndata: {\"form\":1}\n\nevent: document\ndata: %s\n\n", text)
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return srv, asked
}

func TestTheSource(t *testing.T) {
	srv, _ := proxy(t, document(2))
	s := &Source{URL: srv.URL + "/", Token: "secret", Client: srv.Client()}
	d, err := s.Once(t.Context())
	require.NoError(t, err)
	require.Equal(t, "proxy-a", d.Proxy.ID)
	n := 0
	require.ErrorIs(t, s.Watch(t.Context(), func(d *live.Document) { n++ }), io.ErrUnexpectedEOF)
	require.Equal(t, 1, n, "the history is not a document")

	s.Token = "wrong"
	_, err = s.Once(t.Context())
	require.ErrorContains(t, err, "another token")
	s.Token = ""
	_, err = s.Once(t.Context())
	require.ErrorContains(t, err, "name the file with --token-file")
	refusing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "loopback addresses only", http.StatusForbidden)
	}))
	defer refusing.Close()
	_, err = (&Source{URL: refusing.URL, Client: srv.Client()}).Once(t.Context())
	require.ErrorContains(t, err, "loopback addresses only", "no token would help")
	_, err = (&Source{URL: "http://127.0.0.1:1", Client: srv.Client()}).Once(t.Context())
	require.ErrorContains(t, err, "admin.listen")
	s.Token, s.URL = "secret", srv.URL+"/elsewhere"
	_, err = s.Once(t.Context())
	require.ErrorContains(t, err, "admin.listen")
	newer := document(2)
	newer.Form = live.Form + 1
	srv, _ = proxy(t, newer)
	s.URL = srv.URL
	_, err = s.Once(t.Context())
	require.ErrorContains(t, err, "use the same version as the proxy")
}

// TestRun drives the whole program, with keys from a pipe.
func TestRun(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent(), goleak.IgnoreTopFunction("github.com/charmbracelet/bubbletea.Tick.func1"))
	srv, asked := proxy(t, document(144))
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	keys, typed := io.Pipe()
	var out locked
	done := make(chan error, 1)
	go func() {
		done <- Run(context.Background(), &Source{URL: srv.URL, Token: "secret", Client: client}, tea.WithInput(keys), tea.WithOutput(&out))
	}()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "proxy-a") }, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return asked.Load() > 1 }, 10*time.Second, time.Millisecond, "a stream that ended is asked for anew")
	_, err := typed.Write([]byte("q"))
	require.NoError(t, err)
	require.NoError(t, <-done)
	_ = typed.Close()
	srv.Close()
}

type locked struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) { l.mu.Lock(); defer l.mu.Unlock(); return l.b.Write(p) }
func (l *locked) String() string              { l.mu.Lock(); defer l.mu.Unlock(); return ansi.Strip(l.b.String()) }

// The picture uses the width there is: in 200 columns all ranks stand side by side.
func TestThePicture(t *testing.T) {
	g := func(ranks int) live.Group {
		g := document(ranks).Models[0].Groups[0]
		g.Counterfactuals = []live.Counterfactual{{Policy: "jsq-kv", MostTokens: 90_000, SavedMs: 3.1}}
		for i := range g.Ranks {
			g.Ranks[i].KVTokens = int64(10_000 * (1 + i%8))
		}
		g.MostTokens = 80_000
		return g
	}
	draw := func(width, ranks int) []string {
		var lines []string
		for _, l := range (screen{width: width}).picture(g(ranks)) {
			lines = append(lines, ansi.Strip(l))
		}
		return lines
	}
	require.Equal(t, []string{
		"    90k ┄ with jsq-kv the line would be here, and a step 3.1 ms longer",
		"    80k ─ ░░░ ··· ░░░ ░░░ ░░░ ░░░ ▂▂▂ ███ ",
		"          ░░░ ··· ░░░ ░░░ ░░░ ▄▄▄ ███ ███ ",
		"          ░░░ ··· ░░░ ░░░ ▆▆▆ ███ ███ ███ ",
		"          ░░░ ··· ▂▂▂ ███ ███ ███ ███ ███ ",
		"          ░░░ ▄▄▄ ███ ███ ███ ███ ███ ███ ",
		"      0 ─ ▆▆▆ ███ ███ ███ ███ ███ ███ ███ ",
		"              D",
		"          decode-0.engines.svc",
	}, draw(80, 8))
	for width, lines := range map[int]int{200: 1 + 6 + 2, 80: 1 + 3*(3+1) + 1} {
		got := draw(width, 144)
		require.Len(t, got, lines, "%d columns:\n%s", width, strings.Join(got, "\n"))
		for _, l := range got {
			require.LessOrEqual(t, ansi.StringWidth(l), width)
		}
	}
	require.Empty(t, (screen{width: 80}).picture(live.Group{}))
}

// Ranks that prefill and decode have a row for what they have to compute. No step reads the KV of prompts that are not computed.
func TestRoundsInTheTerminal(t *testing.T) {
	d := document(4)
	g := &d.Models[0].Groups[0]
	g.Rounds = &live.Rounds{Says: "Since the start 31 % of steps had a prefill, and 26 % of ranks were empty in them. 2 requests are held for a round now, for 720 ms at most."}
	g.MostTokens, g.Held = 80_000, 2
	for i := range g.Ranks {
		r := &g.Ranks[i]
		r.State, r.KVTokens, r.Unread, r.Prompts, r.Backlog = live.RankUp, 80_000, int64(20_000*i), 9, int64(1000*i)
	}
	s := screen{width: 80, doc: d}
	text := ansi.Strip(strings.Join(s.overview(), "\n"))
	require.Contains(t, text, `
    80k ─ ███ ░░░ ░░░ ░░░ `+`
          ███ ▄▄▄ ░░░ ░░░ `+`
          ███ ███ ░░░ ░░░ `+`
          ███ ███ ███ ░░░ `+`
          ███ ███ ███ ▄▄▄ `+`
      0 ─ ███ ███ ███ ███ `+`
    new ─ ··· ▃▃▃ ▆▆▆ ███ `+`
          …e-0.engines.svc
  Since the start 31 % of steps had a prefill, and 26 % of ranks were empty in
    them. 2 requests are held for a round now, for 720 ms at most.
`)
	require.Contains(t, ansi.Strip(strings.Join(s.ranks(), "\n")), "80k  80%   20/32       -  3000 new")
}

// A host that dies is an incident, and not a screen of engines.
func TestTheOverviewNamesAFewEngines(t *testing.T) {
	d := document(2)
	for i := range 20 {
		d.Engines = append(d.Engines, live.Engine{ID: fmt.Sprintf("d%d:8200", i), Role: "decode", State: "down", Why: "connection refused"})
	}
	_, view := shown(80, 60, seen{d, time.Now()})
	require.Equal(t, 4, strings.Count(view, "connection refused")-1, "the incident has it, too")
	require.Contains(t, view, "17 more on page 3")
	_, view = shown(80, 60, seen{d, time.Now()}, key("3"))
	require.Contains(t, view, "d19:8200")
}

// A low terminal names what harms most.
func TestALowTerminalNamesTheFirstIncident(t *testing.T) {
	d := document(2)
	for range 3 {
		d.Incidents = append([]live.Incident{{Severity: "bad", What: "a rather long sentence of what is wrong with it", SinceMs: 1}}, d.Incidents...)
	}
	_, view := shown(40, 7, seen{d, time.Now()})
	require.Contains(t, view, "a rather")
	require.Contains(t, view, "(+3)")
	require.NotContains(t, view, "! 4 more")
}

func TestHelpFitsATerminalOf80Columns(t *testing.T) {
	for _, line := range help {
		require.LessOrEqual(t, ansi.StringWidth(line), 80, line)
	}
}
