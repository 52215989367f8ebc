package gateway_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/lab/trace"
	"evenkeel/gateway/config"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
)

// disconnects is how many clients leave in TestDisconnectsStrandNothing.
// EVENKEEL_DISCONNECTS=10000 is the proof; the default keeps the tests quick.
func disconnects(t *testing.T) (n int, proof bool) {
	s := os.Getenv("EVENKEEL_DISCONNECTS")
	switch {
	case s != "":
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		return n, true
	case race.Enabled || testing.Short():
		return 800, false
	}
	return 1500, false
}

// A leaver is one client that goes away, in the middle of its own request, of
// the wait or of the answer.
type leaver struct {
	path, body string
	upload     float64       // share of the request it sends
	bytes      int           // of the answer it waits for, 0: none
	pause      time.Duration // then, or without bytes at once, it waits so long
	how        string        // close, reset, half: shuts down its sending side, and closes later
}

func newLeaver(seed uint64) leaver {
	rng := rand.New(rand.NewPCG(20, seed))
	prompt := func(i uint64) string { return reftext.MakePrompt(seed<<8|i, 10+rng.IntN(400)) }
	more := fmt.Sprintf(`"ignore_eos":true,"max_tokens":%d,`, 5+rng.IntN(40))
	if rng.IntN(3) > 0 {
		more += `"stream":true,`
	}
	l := leaver{path: refclient.ChatPath, upload: 1}
	switch rng.IntN(8) {
	case 0:
		l.body = chat(prompt(0), more+`"n":3,`)
	case 1:
		l.path = "/v1/completions"
		l.body = fmt.Sprintf(`{%s"model":%q,"prompt":[%q,%q]}`, more, model, prompt(0), prompt(1))
	case 2, 3, 4:
		l.path, l.body = "/v1/completions", completion(prompt(0), more)
	default:
		l.body = chat(prompt(0), more)
	}
	l.how = []string{"close", "reset", "half"}[rng.IntN(3)]
	switch rng.IntN(10) {
	case 0:
		l.upload = rng.Float64()
	case 1:
		l.bytes = 1
	case 2, 3:
		l.bytes, l.pause = 1, time.Duration(rng.IntN(120))*time.Millisecond
	default:
		l.pause = time.Duration(rng.ExpFloat64() * float64(40*time.Millisecond))
	}
	return l
}

func (l leaver) run(addr string) error {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	tcp := conn.(*net.TCPConn)
	request := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: evenkeel\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", l.path,
		len(l.body), l.body)
	if _, err := io.WriteString(conn, request[:int(l.upload*float64(len(request)))]); err != nil {
		return err
	}
	if l.bytes > 0 {
		if _, err := io.ReadFull(conn, make([]byte, l.bytes)); err != nil {
			return err
		}
	}
	time.Sleep(l.pause)
	switch l.how {
	case "reset":
		return tcp.SetLinger(0)
	case "half":
		if err := tcp.CloseWrite(); err != nil {
			return nil //nolint:nilerr // the answer was whole and the proxy closed first
		}
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		_, _ = io.Copy(io.Discard, conn) // until the proxy has closed, or not even that long
	}
	return nil
}

// eachDriver runs a test once with event loops and once with a goroutine per answer.
func eachDriver(t *testing.T, f func(t *testing.T, driver func(*config.Config))) {
	for name, loops := range map[string]int{"event loops": 2, "goroutines": -1} {
		t.Run(name, func(t *testing.T) {
			f(t, func(cfg *config.Config) { cfg.EventLoops = loops })
		})
	}
}

// Clients leave at random, in every phase and in every way, beside others that stay and whose every
// token is checked. Meanwhile answers are given back, so that some are in their second leg. At the
// end the engines' own books are empty, and no rank ever had more than its slots.
func TestDisconnectsStrandNothing(t *testing.T) { eachDriver(t, disconnectsStrandNothing) }

func disconnectsStrandNothing(t *testing.T, driver func(*config.Config)) {
	n, proof := disconnects(t)
	n /= 2 // for each driver
	// Engines that cut streams would cut drains as well: those hand-offs stay on
	// the budget, as they must.
	lossy := []refengine.Rule{{Fault: refengine.Recomputed, AfterTokens: 3, Probability: 0.15}}
	p := refengine.Config{Prompts: refengine.Prompts{Concurrency: 2, Base: 3 * time.Millisecond, PerToken: 5 * time.Microsecond},
		KV: refengine.KV{Tokens: 16384}}
	d := refengine.Config{DPSize: 2, Slots: 4, Steps: refengine.Steps{C0: 3 * time.Millisecond},
		KV: refengine.KV{TransferBase: 2 * time.Millisecond}, Faults: lossy}
	c := start(t, options{
		prefill: []refengine.Config{p, p, p}, decode: []refengine.Config{d, d},
		profile: mooncake.Profile{RecomputeMax: new(20)}, // one in 2000 is given back four times in a row, and goes on all the same
		configure: func(cfg *config.Config) {
			driver(cfg)
			cfg.Prefill.Scrape.Interval = 500 * time.Millisecond
			cfg.Prefill.Queue.Timeout = time.Hour // a slow machine takes long, and refuses nobody for it
			cfg.Limits.ProbeGrace = patience      // nor does it abort a prefill at the moment of its end, when nobody is told of its KV
		},
		dirty: true, // what decode cuts on purpose is counted as such
	})
	before := runtime.NumGoroutine()
	stay := make(chan *load.Result, 1)
	go func() {
		got, err := load.Run(t.Context(), load.Config{
			URLs: []string{c.URL}, Requests: conversation(n / 10), Concurrency: 8, Chat: 0, Stream: 0.7, Usage: 0.5, Seed: 11,
		})
		if err != nil {
			t.Error(err)
		}
		stay <- got
	}()
	seeds := make(chan uint64)
	var clients sync.WaitGroup
	for range 64 {
		clients.Go(func() {
			for seed := range seeds {
				if err := newLeaver(seed).run(c.gw.Addr()); err != nil {
					t.Errorf("seed %d: %v", seed, err)
				}
			}
		})
	}
	const burst = 100 // the last ones, who leave when nobody else is there
	phases := []string{"queued", "prefill", "pooled", "transfer", "streaming"}
	left := func(phase string) float64 { return c.Metric(fmt.Sprintf("evenkeel_cancels_total{phase=%q}", phase)) }
	resumed := func() float64 {
		return c.Metric(`evenkeel_decode_losses_total{tier="1"}`) + c.Metric(`evenkeel_recomputes_total{tier="1"}`)
	}
	seed := uint64(0)
	for end := time.Now().Add(patience); ; { // on a busy machine it takes more of them until every phase was left
		for range n - burst {
			seeds <- seed
			seed++
		}
		if !slices.ContainsFunc(phases, func(p string) bool { return left(p) == 0 }) && resumed() > 0 || time.Now().After(end) {
			break
		}
	}
	got := <-stay
	require.Zero(t, got.Failed, "%v %v", got.Kinds, got.Failures)
	for range burst {
		seeds <- seed
		seed++
	}
	close(seeds)
	clients.Wait()
	last := time.Now()
	var held []string
	for progress := last; ; time.Sleep(5 * time.Millisecond) {
		now := c.busy(false)
		if len(now) == 0 {
			break
		}
		if !slices.Equal(now, held) {
			held, progress = now, time.Now()
		}
		require.Less(t, time.Since(progress), patience, "still held: %v", held)
		require.False(t, proof && time.Since(last) > 2*time.Second, "still held: %v", held)
	}
	empty := time.Since(last)
	lost, surplus := int64(0), int64(0)
	for _, e := range append(c.Prefill, c.Decode...) {
		st := e.Stats()
		lost += st.LostHandoffs
		surplus += st.OverAdmitted
		type harm struct{ Leaks, Pins, KVUsed, InTransfer, Unknown, LocalPrefills int64 }
		require.Zero(t, harm{
			Leaks: st.Leaks, Pins: int64(st.Pins), KVUsed: st.KVUsed, InTransfer: st.InTransfer, Unknown: st.Unknown,
			LocalPrefills: st.LocalPrefills,
		})
	}
	require.LessOrEqual(t, float64(surplus), c.Metric("evenkeel_heedless_engines_total"),
		"no rank had more than its slots but where the engine had not let go in time")
	require.Zero(t, lost, "hand-offs of which nobody was told")
	var cancels []string
	for _, phase := range phases {
		count := left(phase)
		require.True(t, count > 0, "nobody left while %s", phase)
		cancels = append(cancels, fmt.Sprintf("%.0f %s", count, phase))
	}
	slow := 0.0
	for _, phase := range phases {
		series := fmt.Sprintf("evenkeel_cancel_release_seconds_%%s{phase=%q%%s}", phase)
		slow += c.Metric(fmt.Sprintf(series, "count", "")) - c.Metric(fmt.Sprintf(series, "bucket", `,le="2.5"`))
	}
	if proof { // idle workers and kept-alive connections take up to ten seconds to end
		for end := time.Now().Add(30 * time.Second); runtime.NumGoroutine() > before+8; time.Sleep(50 * time.Millisecond) {
			require.True(t, time.Now().Before(end), "%d goroutines before, %d after", before, runtime.NumGoroutine())
		}
	}
	require.Positive(t, resumed(), "nobody was in a second leg")
	t.Logf("%d left (%s), %.0f resumed, %.0f drained, %d stayed and were right; %.0f took over 2.5 s to free; nothing was held %v after the "+
		"last; %d goroutines before, %d after",
		seed, strings.Join(cancels, ", "), resumed(), c.Metric(`evenkeel_drains_total{outcome="drained"}`),
		got.OK, slow, empty.Round(time.Microsecond), before, runtime.NumGoroutine())
}

// conversation is n requests of a few hundred tokens that are answered by 30
// to 60.
func conversation(n int) []trace.Request {
	rng := rand.New(rand.NewPCG(1, 2))
	all := make([]trace.Request, n)
	for i := range all {
		all[i] = trace.Request{Prompt: 20 + rng.IntN(300), Output: 30 + rng.IntN(31)}
	}
	return all
}
