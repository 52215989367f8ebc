package request

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/lab/trace"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
)

// Decode engines of vllm-ascend give chats back for want of KV memory. With the profile that a
// config has without another word, every chat goes on to its last token.
func TestNoChatBreaksOnAscend(t *testing.T) {
	t.Parallel()
	const mostGivenBack = 3 // how often an answer goes on (recompute_max)
	for _, row := range []struct{ version, connector string }{
		{"0.26.0", mooncake.AscendMooncakeV1}, {"0.27.1", mooncake.AscendMooncakeV1}, {"0.27.1", mooncake.AscendLayerwise},
	} {
		t.Run(row.connector+" "+row.version, func(t *testing.T) {
			t.Parallel()
			e := []refengine.Config{{Version: row.version}}
			b := start(t, setup{prefill: e, decode: e, profile: mooncake.Profile{Connector: row.connector}.WithDefaults()})
			for range 30 {
				require.NoError(t,
					b.d[0].SetFaults(refengine.Rule{Fault: refengine.Recomputed, Leg: refengine.LegDecode, AfterTokens: 7, Count: mostGivenBack}))
				require.Equal(t, map[string]int{"right": mostGivenBack}, <-b.judgeAll(mostGivenBack))
			}
			b.settle()
			require.Positive(t, b.metric(t, "evenkeel_recomputes_total", "2"), "chats were given back in their middle")
			require.Zero(t, b.metric(t, "evenkeel_recomputes_total", "4"))
		})
	}
}

// A decode engine dies under 200 streams. All go on, to the last token.
func TestADecodeEngineDiesUnderManyStreams(t *testing.T) {
	t.Parallel()
	// What the one that dies has begun is far from its end.
	b := start(t, setup{
		prefill: []refengine.Config{{Prompts: refengine.Prompts{Concurrency: 16}}}, waits: true,
		profile: mooncake.Profile{ChatResume: mooncake.ChatResumeVLLM},
		decode: []refengine.Config{{Slots: 128, DPSize: 2, Steps: refengine.Steps{C0: time.Second}},
			{Slots: 256, DPSize: 2, Steps: refengine.Steps{C0: 5 * time.Millisecond}}},
		configure: func(c *config.Config, _ *Deps) {
			c.Pool.Size, c.Dispatch.Policy, c.Prefill.Retry.Base = 1024, "prr", 50*time.Millisecond
		},
	})
	streams := 200
	if race.Enabled {
		streams = 100
	}
	verdicts := make(chan string, streams)
	for i := range streams {
		go func() {
			got := "no verdict"
			defer func() { verdicts <- got }()
			prompt := reftext.MakePrompt(uint64(i), 50)
			if i%2 == 1 {
				got = b.judge(prompt, `"stream":true,`)
				return
			}
			s := readSeamless(t, b.post(mooncake.Completions.Path(), completion(prompt, `"stream":true,"max_tokens":300,`)))
			key := reftext.Of(prompt).Answer
			if got = s.fail; got == "" && right(t, key, s.texts[0]) == min(300, reftext.NaturalLength(key)) {
				got = "right"
			}
		}()
	}
	b.eventually("many have begun there", func() bool {
		return b.begun() >= b.decodes() && b.d[0].Stats().Running > int64(streams/8)
	})
	b.d[0].Kill()
	b.only(2, 3)
	for range streams {
		require.Equal(t, "right", <-verdicts)
	}
	b.settle()
	require.Positive(t, b.metric(t, "evenkeel_decode_losses_total", "1"))
}

// One engine of each side dies under a hundred requests. A client that has nothing of an answer yet
// gets a right one, whatever became of the attempts before.
func TestAnEngineOfEachSideDiesUnderManyRequests(t *testing.T) {
	t.Parallel()
	b := start(t, setup{
		prefill: []refengine.Config{
			{Prompts: refengine.Prompts{Concurrency: 4, Base: 40 * time.Millisecond}},
			{Prompts: refengine.Prompts{Concurrency: 16, Base: 20 * time.Millisecond}},
		},
		decode: []refengine.Config{
			{DPSize: 2, Slots: 32, KV: refengine.KV{TransferBase: 20 * time.Millisecond}, Steps: refengine.Steps{C0: 10 * time.Millisecond}},
			{DPSize: 2, Slots: 32, KV: refengine.KV{TransferBase: 20 * time.Millisecond}, Steps: refengine.Steps{C0: 2 * time.Millisecond}},
		},
	})
	const requests = 100
	verdicts := make(chan string, requests)
	for i := range requests {
		go func() {
			got := "no verdict"
			defer func() { verdicts <- got }()
			got = b.judge(reftext.MakePrompt(uint64(i), 50), []string{"", `"stream":true,`, `"stream":true,`}[i%3])
		}()
	}
	b.eventually("they are everywhere", func() bool {
		d := b.d[0].Stats()
		return d.Waiting > 0 && d.Running > 0 && b.p[0].Stats().Running > 0
	})
	var dead sync.WaitGroup
	dead.Go(b.p[0].Kill)
	dead.Go(b.d[0].Kill)
	dead.Wait()
	b.only(2, 3)
	all := map[string]int{}
	for range requests {
		all[<-verdicts]++
	}
	broken := all["upstream_broken"] + all["upstream_incomplete"] // they had begun
	require.Equal(t, requests, all["right"]+broken, "%v", all)
	require.Greater(t, all["right"], requests/2)
	b.settle()
	again := 0
	for _, in := range b.asked {
		again += in.Record.Attempts - 1
	}
	require.Positive(t, again)
}

// boundFaults are what engines of a connector can do wrong besides.
var boundFaults = map[string][]refengine.Fault{
	mooncake.AscendLayerwise: {refengine.NoCallback, refengine.CallbackTwice, refengine.CallbackLate, refengine.CallbackBadHost,
		refengine.CallbackShortID, refengine.CallbackNewKey, refengine.CallbackEmpty, refengine.DoneLost, refengine.FailedSent},
	mooncake.SGLang: {refengine.PrefillAbort200, refengine.DoneLost, refengine.FailedSent, refengine.TransferFails, refengine.BootstrapSlow},
}

// Random lives: engines fail in every way, clients leave in every phase. No answer is wrong, no id
// or room is used twice, and nothing is held in the end.
func TestRandomLivesOfBoundRequests(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			fills := refengine.Config{Prompts: refengine.Prompts{Concurrency: 8}, SGLang: refengine.SGLangOptions{BootstrapTimeout: time.Second}}
			b := start(t, setup{
				prefill: []refengine.Config{fills, fills},
				// At its own timeout an engine of SGLang frees blocks to which a prefill engine may still
				// write, so no wait lasts that long here.
				decode: []refengine.Config{{DPSize: 2, SGLang: refengine.SGLangOptions{WaitingTimeout: patience}},
					{SGLang: refengine.SGLangOptions{WaitingTimeout: patience}}}, waits: true,
				profile: mooncake.Profile{Connector: connector, FirstEventTimeout: 2 * time.Second},
				configure: func(c *config.Config, _ *Deps) {
					c.Limits.ProbeTimeout = 3 * time.Second
					c.Bind.CallbackTimeout, c.Bind.Grace = 500*time.Millisecond, 500*time.Millisecond
					c.Bind.Confirm = patience // on a busy machine a prefill's answer comes late
					// After the grace a decode call is ended although the prefill engine may still write to its
					// blocks. On a busy machine an engine may need longer than half a second to answer an abort.
					// Layerwise uses up the grace for callbacks that never come.
					if connector != mooncake.AscendLayerwise {
						c.Bind.Grace = patience
					}
					c.Prefill.Retry.Attempts = 4
				},
			})
			seed := time.Now().UnixNano()
			t.Logf("seed %d", seed)
			r := rand.New(rand.NewPCG(uint64(seed), 0))
			faults := func(engines []*refengine.Engine, list []refengine.Fault) {
				for _, e := range engines {
					var rules []refengine.Rule
					for _, f := range list {
						rule := refengine.Rule{Fault: f, Probability: 0.03, AfterTokens: r.IntN(5), DelayMS: r.IntN(100)}
						if f == refengine.Reset || f == refengine.Hang {
							rule.Phase = []string{refengine.PhaseBeforeHeaders, refengine.PhaseAfterHeaders, refengine.PhaseMidStream}[r.IntN(3)]
						}
						rules = append(rules, rule)
					}
					require.NoError(t, e.SetFaults(rules...))
				}
			}
			faults(b.p, append([]refengine.Fault{refengine.Internal, refengine.Busy, refengine.Reset, refengine.Reject}, boundFaults[connector]...))
			faults(b.d, append([]refengine.Fault{refengine.Internal, refengine.Busy, refengine.Throttle, refengine.Reset, refengine.ErrorEvent,
				refengine.SilentEnd}, boundFaults[connector]...))
			lives := int64(300)
			if race.Enabled {
				lives = 100
			}
			var wg sync.WaitGroup
			var next atomic.Int64
			for range 12 {
				own := rand.New(rand.NewPCG(r.Uint64(), 0))
				wg.Go(func() {
					for i := next.Add(1); i <= lives; i = next.Add(1) {
						prompt := fmt.Sprintf("life %d of %s", i, strings.Repeat("words ", own.IntN(40)))
						if own.IntN(4) > 0 {
							b.judge(prompt, []string{`"stream":true,`, ``, `"stream":true,"n":2,"seed":5,`}[own.IntN(3)])
							continue
						}
						leave, wait := b.send(chat(prompt, `"stream":true,"max_tokens":30,`))
						time.Sleep(time.Duration(own.IntN(20)) * time.Millisecond) // its client leaves at any moment
						leave()
						wait()
					}
				})
			}
			wg.Wait()
			b.says(append(b.p, b.d...))
			b.eventually("all is well again", func() bool { return b.judge("and now", `"stream":true,`) == "right" })
			b.settle()
		})
	}
}

// conversation is n requests of a few hundred tokens that are answered by 30 to 60.
func conversation(n int) []trace.Request {
	rng := rand.New(rand.NewPCG(1, 2))
	all := make([]trace.Request, n)
	for i := range all {
		all[i] = trace.Request{Prompt: 20 + rng.IntN(300), Output: 30 + rng.IntN(31)}
	}
	return all
}

// A third of the clients leave, in every phase.
func TestManyThatLeave(t *testing.T) {
	t.Parallel()
	fills := refengine.Config{Prompts: refengine.Prompts{Concurrency: 4}}
	b := start(t, setup{prefill: []refengine.Config{fills, fills},
		decode: []refengine.Config{{DPSize: 4, Slots: 8, Steps: refengine.Steps{C0: 4 * time.Millisecond}}},
		waits:  true})
	requests := 600
	if race.Enabled {
		requests = 200
	}
	got, err := load.Run(t.Context(), load.Config{
		URLs: []string{b.url}, Requests: conversation(requests), Concurrency: 64, Chat: 0.5, Stream: 0.7, Seed: 3, Model: refModel,
		Cancel: load.Cancel{Share: 0.35},
	})
	require.NoError(t, err)
	require.Zero(t, got.Failed, "%v %v", got.Kinds, got.Failures)
	require.Positive(t, got.Cancelled)
	b.clean()
	for _, outcome := range []string{"unplaced", "expired", "failed", "refused"} {
		require.Zero(t, b.metric(t, "evenkeel_drains_total", outcome))
	}
	ended := b.metric(t, "evenkeel_requests_total", "ok") + b.metric(t, "evenkeel_requests_total", "client_closed")
	require.EqualValues(t, len(b.asked), ended, "each is counted once, and as nothing else")
	require.LessOrEqual(t, len(b.asked), got.Sent)
}

// What the proxy believes a rank holds is what the engine's step log says, but for the tokens on
// their way: a chunk for each running request. It is never ahead of the engine; on a busy machine
// it may now and then be further behind.
func TestTheBoardAgreesWithTheStepLog(t *testing.T) {
	t.Parallel()
	for name, engine := range map[string]refengine.Config{
		"a token a chunk":                  {},
		"three tokens a chunk":             {Steps: refengine.Steps{TokensPerChunk: 3}},
		"a chunk every four steps":         {Steps: refengine.Steps{StreamInterval: 4}},
		"engines that tell token ids":      {Steps: refengine.Steps{TokensPerChunk: 2}, Answers: refengine.Answers{NoContinuousUsage: true}},
		"engines that tell nothing at all": {Answers: refengine.Answers{NoContinuousUsage: true, NoTokenIDs: true}},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "a token a chunk" {
				race.Alone(t)
			}
			t.Parallel()
			engine.DPSize, engine.Steps.C0 = 2, 250*time.Millisecond // so long that events come before the next step does
			b := start(t, setup{decode: []refengine.Config{engine}, waits: true})
			const clients = 10
			for i := range clients {
				b.send(chat(reftext.MakePrompt(uint64(i), 50+37*i), `"stream":true,"ignore_eos":true,`))
			}
			b.eventually("all are decoded", func() bool { return b.begun() == clients })
			made := int64(b.d[0].Config().Steps.TokensPerChunk) // by a request in a step
			chunk := made * int64(b.d[0].Config().Steps.StreamInterval)
			agreed, compared := 0, 0
			b.eventually("they agree", func() bool {
				time.Sleep(20 * time.Millisecond) // so that fifty comparisons see several steps
				before := b.Dispatcher.Status(t.Context()).Models[0].Workers
				steps := b.d[0].Steps()
				after := b.Dispatcher.Status(t.Context()).Models[0].Workers
				log := steps[len(steps)-1] // the load when the step began; its tokens are made by now
				behind := false
				for i, rank := range log.Ranks {
					if rank.Running != before[i].Running { // the step in which the last one began
						return false
					}
					n := int64(rank.Running)
					require.LessOrEqual(t, before[i].KVTokens, int64(rank.KVTokens)+n*made, "ahead of rank %d", i)
					behind = behind || after[i].KVTokens < int64(rank.KVTokens)+n*made-n*chunk
				}
				compared++
				if !behind {
					agreed++
				}
				return compared >= 50 && agreed > compared/2
			})
		})
	}
}

// A client that is served by a connection of its own leaves between requests: nothing of it may
// reach the engine's connection, which is another's by then.
func TestLateLeaversHarmNobody(t *testing.T) {
	t.Parallel()
	b := start(t, setup{})
	for range 50 {
		own := &http.Transport{}
		resp, err := (&http.Client{Transport: own}).Post(b.url+mooncake.Chat.Path(), "application/json", strings.NewReader(chat("x", `"max_tokens":2,`)))
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		require.NoError(t, resp.Body.Close())
		own.CloseIdleConnections()
		require.Equal(t, 200, b.post(mooncake.Chat.Path(), chat("y", `"max_tokens":2,`)).status)
	}
	b.clean()
}

// A way leads to an engine. The connections on it can be stranded: their end is gone without a
// word, as after a power cut of the engine's host, and the first byte that is sent on one is
// answered with a reset.
type way struct {
	ln     net.Listener
	to     string
	age    atomic.Int64 // how often its connections were stranded
	once   atomic.Bool  // each is, as soon as it has brought an answer
	resets atomic.Int64
	all    sync.WaitGroup
}

// over returns the address of a new way to the engine at u.
func over(t *testing.T, u string) (*way, string) {
	t.Helper()
	to, err := url.Parse(u)
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	w := &way{ln: ln, to: to.Host}
	w.all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			w.all.Go(func() { w.carry(c, w.age.Load()) })
		}
	})
	return w, "http://" + ln.Addr().String()
}

func (w *way) carry(c net.Conn, age int64) {
	defer c.Close()
	e, err := net.Dial("tcp", w.to)
	if err != nil {
		reset(c)
		return
	}
	var answered atomic.Bool
	stranded := func() bool { return w.age.Load() != age || w.once.Load() && answered.Load() }
	back := make(chan struct{})
	go func() {
		defer close(back)
		_, _ = io.Copy(marked{c, &answered}, e)
		if !stranded() { // else nobody is there who could say so
			c.Close()
		}
	}()
	defer func() { e.Close(); <-back }()
	buf := make([]byte, 64<<10)
	for {
		n, err := c.Read(buf)
		switch {
		case n > 0 && stranded():
			w.resets.Add(1)
			reset(c)
			return
		case err != nil:
			return
		}
		answered.Store(false)
		if _, err := e.Write(buf[:n]); err != nil {
			return
		}
	}
}

// reset ends a connection with a RST.
func reset(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
}

// marked sets a mark when something is written.
type marked struct {
	io.Writer
	mark *atomic.Bool
}

func (m marked) Write(p []byte) (int, error) {
	m.mark.Store(true)
	return m.Writer.Write(p)
}

// All connections to all engines end at once without a word while no request is on them, and then
// as many requests come as there are connections. A connection that had ended before it was used is
// no engine's failure, so no request fails.
func TestConnectionsThatEndUnseenFailNoRequest(t *testing.T) {
	t.Parallel()
	const requests, slots = 46, 64
	const pair = "a prefill and a decode engine"
	e := []refengine.Config{{
		Slots: slots, Prompts: refengine.Prompts{Concurrency: slots, Base: 100 * time.Millisecond},
		Steps: refengine.Steps{C0: 2 * time.Millisecond}, Server: refengine.Server{KeepAlive: patience},
	}}
	m := []refengine.Config{{Slots: slots, Steps: refengine.Steps{C0: 2 * time.Millisecond}, Server: refengine.Server{KeepAlive: patience}}}
	beds := map[string]setup{
		pair: {prefill: e, decode: e}, "two of each": {prefill: append(e, e...), decode: append(e, e...)}, "a rank that does both": {mixed: m},
	}
	for _, connector := range earlyConnectors {
		beds["a pair that is bound early by "+connector] = setup{prefill: e, decode: e, profile: mooncake.Profile{Connector: connector}}
	}
	strand := func(_ *bed, all []*way) {
		for _, w := range all {
			w.age.Add(1)
		}
	}
	strands := map[string]func(b *bed, all []*way){
		"at once": strand,
		"after each answer": func(_ *bed, all []*way) {
			for _, w := range all {
				w.once.Store(true)
			}
		},
		"at once with their engines, which start again": func(b *bed, all []*way) {
			strand(b, all)
			for _, e := range append(b.p, b.d...) {
				e.Kill()
				require.NoError(b.t, e.Revive())
			}
		},
	}
	for name, o := range beds {
		for when, strand := range strands {
			if strings.Contains(when, "engines") && name != pair {
				continue
			}
			t.Run(name+", "+when, func(t *testing.T) {
				t.Parallel()
				o, all := o, []*way(nil)
				o.waits = true
				o.address = func(at string) string {
					w, there := over(t, at)
					all = append(all, w)
					return there
				}
				patient := engine.NewClient(engine.Options{IdleTimeout: patience}) // on a busy machine, too, none is too old to be used
				t.Cleanup(patient.Close)
				o.configure = func(c *config.Config, deps *Deps) {
					c.Prefill.Push.MaxUnanswered, deps.Client = slots, patient
					c.Limits.ConnectTimeout = patience // as long as 46 dials at once may take there
				}
				b := start(t, o)
				first := len(b.asked)
				both := func() map[string]int {
					streams := b.judgeAll(requests / 2)
					got := <-b.judgeEach(requests/2, "")
					for v, n := range <-streams {
						got[v] += n
					}
					return got
				}
				require.Equal(t, map[string]int{"right": requests}, both())
				b.over()
				strand(b, all)
				require.Equal(t, map[string]int{"right": requests}, both())
				b.settle()
				resets := int64(0)
				for _, w := range all {
					resets += w.resets.Load()
				}
				require.Positive(t, resets, "connections had ended")
				require.Zero(t, b.metric(t, "evenkeel_prefill_attempts_total", "failed"))
				for _, in := range b.asked[first:] {
					var failures []observer.LoggedEntry
					if in.Record.Attempts > 2 {
						failures = b.logs.Filter(func(e observer.LoggedEntry) bool { return e.ContextMap()["id"] == in.Record.ID }).All()
					}
					require.LessOrEqual(t, in.Record.Attempts, 2, "after the first one all calls dial: %+v", failures)
				}
			})
		}
	}
}
