package request

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/journal"
	"evenkeel/mooncake"
)

// A parting is how far a request is when its client leaves.
type parting struct {
	name    string
	path    string        // of the API; empty: chats and completions
	phase   journal.Phase // that metrics tell of
	o       setup
	hold    func(b *bed) (free func()) // what is in its way, until the proxy has noticed that the client left; nil: nothing is
	here    func(b *bed, legs int64)   // waits until it is so far
	engines work                       // for each leg
}

// work is what engines did: probes, decodes that a client waited for, discarded hand-offs, and
// pulls.
type work struct{ probes, decodes, discarded, pulls int64 }

func (b *bed) work() work {
	drained := int64(b.metric(b.t, "evenkeel_drains_total", "drained"))
	w := work{probes: int64(b.probes()), decodes: int64(b.decodes()) - drained, discarded: drained}
	for _, p := range b.p {
		w.pulls += p.Stats().Pulls
	}
	return w
}

// leaves has the client of a request of legs leave.
func (p parting) leaves(t *testing.T, body string, legs int64) {
	p.o.waits = true
	b, free := start(t, p.o), func() {}
	if p.hold != nil {
		free = p.hold(b)
	}
	before := b.work()
	want := work{
		probes: before.probes + legs*p.engines.probes, decodes: before.decodes + legs*p.engines.decodes,
		discarded: before.discarded + legs*p.engines.discarded, pulls: before.pulls + legs*p.engines.pulls,
	}
	send := b.send
	if p.path != "" {
		send = func(body string) (leave, wait func()) { return b.sendTo(p.path, body) }
	}
	leave, wait := send(body)
	p.here(b, legs)
	leave()
	wait()
	b.eventually("the proxy notices", func() bool { return b.metric(t, "evenkeel_requests_total", "client_closed") == 1 })
	if p.engines.discarded == 0 {
		require.Equal(t, want, b.work(), "what was on its way was not cut")
	} else if p.phase == journal.Pooled {
		require.EqualValues(t, legs, b.pins(), "there is no slot to discard them with")
	}
	free()
	b.eventually("hand-offs are discarded", func() bool { return b.work().discarded == want.discarded })
	b.clean()
	require.Equal(t, want, b.work())
	require.Len(t, b.discarded(), int(want.discarded), "each was pulled")
	require.EqualValues(t, legs, b.metric(t, "evenkeel_cancels_total", string(p.phase)))
	require.EqualValues(t, legs, b.metric(t, "evenkeel_cancel_release_seconds", string(p.phase)))
}

// Where requests are.
func computed(b *bed, legs int64) {
	b.eventually("it is computed", func() bool { return b.p[0].Stats().Running == legs })
}

func pooled(b *bed, legs int64) {
	b.eventually("it waits for a slot", func() bool { return int64(b.pooled()) == legs })
}

func pulled(b *bed, legs int64) {
	b.eventually("its KV is on its way", func() bool { return b.d[0].Stats().Waiting == legs })
}

func decoded(b *bed, legs int64) {
	b.eventually("its first events are here", func() bool { return int64(b.begun()) == legs && b.d[0].Stats().Running == legs })
}

// Clients leave in every phase; with a stream or without, alone or as the legs of a fan-out.
func TestClientsThatLeave(t *testing.T) {
	t.Parallel()
	for _, p := range []parting{
		{
			name: "in the arrival queue", phase: journal.Queued, o: setup{configure: func(c *config.Config, _ *Deps) { c.Pool.Size = 1 }},
			hold: func(b *bed) func() {
				require.NoError(b.t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.Hang}))
				leave, _ := b.send(chat("first", ""))
				b.eventually("the place is taken", func() bool { return b.probes() == 1 })
				return leave
			},
			here: func(b *bed, _ int64) { b.eventually("it waits", func() bool { return b.Open() == 2 }) },
		},
		{
			name: "in prefill", phase: journal.Prefill,
			o:    setup{prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: time.Hour, Concurrency: 3}}}},
			here: computed, engines: work{probes: 1},
		},
		{
			name: "at the end of prefill", phase: journal.Prefill,
			o: setup{
				prefill:   []refengine.Config{{Prompts: refengine.Prompts{Base: time.Second, Concurrency: 3}}},
				configure: func(c *config.Config, _ *Deps) { c.Limits.ProbeGrace = patience },
			},
			here: computed, engines: work{probes: 1, discarded: 1, pulls: 1},
		},
		{
			name: "pooled", phase: journal.Pooled, o: setup{decode: []refengine.Config{{Slots: 1}}},
			hold: (*bed).endless, here: pooled, engines: work{probes: 1, discarded: 1, pulls: 1},
		},
		{
			name: "pooled, of engines whose hand-offs name no request", phase: journal.Pooled,
			o:    setup{prefill: []refengine.Config{{Version: "0.13.0"}}, decode: []refengine.Config{{Slots: 1, Version: "0.13.0"}}},
			hold: (*bed).endless, here: pooled, engines: work{probes: 1, discarded: 1, pulls: 1},
		},
		{
			name: "in transfer", phase: journal.Transfer, o: setup{decode: []refengine.Config{{KV: refengine.KV{TransferBase: time.Second}}}},
			here: pulled, engines: work{probes: 1, decodes: 1, pulls: 1},
		},
		{
			name: "while it is decoded", phase: journal.Streaming, here: decoded, engines: work{probes: 1, decodes: 1, pulls: 1},
		},
	} {
		for _, row := range []struct {
			name, body string
			legs       int64
		}{
			{"streamed", chat("a b c", `"stream":true,"ignore_eos":true,`), 1},
			{"not streamed", chat("a b c", `"ignore_eos":true,`), 1},
			{"three answers", chat("a b c", `"n":3,"ignore_eos":true,`), 3},
			{"three answers, streamed", chat("a b c", `"n":3,"stream":true,"ignore_eos":true,`), 3},
			{"two prompts", twoPrompts(""), 2},
			{"two prompts, streamed", twoPrompts(`"stream":true,`), 2},
		} {
			t.Run(row.name+", "+p.name, func(t *testing.T) {
				t.Parallel()
				p.leaves(t, row.body, row.legs)
			})
		}
	}
}

func twoPrompts(more string) string {
	return fmt.Sprintf(`{%s"ignore_eos":true,"max_tokens":4000,"model":%q,"prompt":["a b c","d e f"]}`, more, refModel)
}

// An answer that goes on elsewhere is left in its second leg.
func TestClientsThatLeaveASecondLeg(t *testing.T) {
	t.Parallel()
	once := refengine.Config{Faults: []refengine.Rule{{Fault: refengine.Recomputed, AfterTokens: 20, Count: 1}}}
	slowly := once
	slowly.KV.TransferBase = time.Second
	for _, p := range []parting{
		{
			name: "in prefill", phase: journal.Prefill,
			o: setup{decode: []refengine.Config{once},
				prefill: []refengine.Config{{Faults: []refengine.Rule{{Fault: refengine.Hang, Skip: 1}}}}},
			here:    func(b *bed, _ int64) { b.eventually("it is prefilled again", func() bool { return b.probes() == 2 }) },
			engines: work{probes: 2, decodes: 1, pulls: 1},
		},
		{
			name: "pooled", phase: journal.Pooled, o: setup{decode: []refengine.Config{{Slots: 1}, {Slots: 1}}},
			hold: func(b *bed) func() {
				b.only(1)
				defer b.only(0)
				return b.endless()
			},
			here: func(b *bed, legs int64) {
				b.eventually("it is decoded", func() bool { return b.begun() == 2 })
				b.only(1)
				b.move("decode d0")
				pooled(b, legs)
			},
			engines: work{probes: 2, decodes: 1, discarded: 1, pulls: 2},
		},
		{
			name: "in transfer", phase: journal.Transfer, o: setup{decode: []refengine.Config{slowly}},
			here: func(b *bed, _ int64) {
				b.eventually("its KV is on its way again", func() bool { return b.decodes() == 2 && b.d[0].Stats().Waiting == 1 })
			},
			engines: work{probes: 2, decodes: 2, pulls: 2},
		},
		{
			name: "while it is decoded", phase: journal.Streaming, o: setup{decode: []refengine.Config{once}},
			here: func(b *bed, _ int64) {
				b.eventually("it goes on", func() bool { return b.metric(b.t, "evenkeel_recomputes_total", "1") == 1 })
			},
			engines: work{probes: 2, decodes: 2, pulls: 2},
		},
	} {
		for _, more := range []string{`"stream":true,`, ``} {
			t.Run(fmt.Sprintf("%s, stream %t", p.name, more != ""), func(t *testing.T) {
				t.Parallel()
				p.leaves(t, completion("a b c", more+`"ignore_eos":true,"max_tokens":4000,`), 1)
			})
		}
	}
}

// An answer that comes in one piece has no first event: its call goes on for as long as a pull may
// take, and no longer.
func TestAClientThatLeavesAnAnswerInOnePiece(t *testing.T) {
	t.Parallel()
	for name, here := range map[string]func(*bed, int64){
		"in transfer":         pulled,
		"while it is decoded": func(b *bed, _ int64) { b.eventually("it runs", func() bool { return b.d[0].Stats().Running == 1 }) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := parting{phase: journal.Transfer, here: here, engines: work{probes: 1, decodes: 1, pulls: 1}, o: setup{
				// The pull ends by itself well within the time of the first event, or the call would be cut in
				// it.
				decode:  []refengine.Config{{KV: refengine.KV{TransferBase: 200 * time.Millisecond}}},
				profile: mooncake.Profile{NonStream: mooncake.NonStreamPassthrough, FirstEventTimeout: 15 * time.Second},
			}}
			p.leaves(t, chat("a b c", `"ignore_eos":true,"max_tokens":30000,`), 1)
		})
	}
}

// A client that leaves while an engine computes its prompt pays what was estimated: nobody knows
// yet how long the prompt is.
func TestAClientThatLeavesDuringItsPromptPaysTheEstimate(t *testing.T) {
	t.Parallel()
	slow := []refengine.Config{{Prompts: refengine.Prompts{Base: 5 * time.Second}}}
	for name, o := range map[string]setup{"on a pair": {prefill: slow}, "on a rank that does both": {mixed: slow}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, o)
			leave, wait := b.send(chat("a long prompt", `"stream":true,`))
			b.eventually("an engine computes it", func() bool {
				for _, e := range append(b.p, b.d...) {
					if e.Stats().Running > 0 {
						return true
					}
				}
				return false
			})
			leave()
			wait()
			b.over()
			require.EqualValues(t, -1, b.paid.Load())
		})
	}
}

// A client of SGLang leaves while KV is being written. Its decode engine gives the pages away as
// soon as its call has ended, so that this call must last until the prefill engine has answered:
// else the KV would come into the pages of the next request.
func TestWhoLeavesDuringATransferSpoilsNobodysPages(t *testing.T) {
	t.Parallel()
	b := start(t, setup{
		prefill: []refengine.Config{{Prompts: refengine.Prompts{Concurrency: 4}, KV: refengine.KV{TransferBase: 700 * time.Millisecond}}},
		decode:  []refengine.Config{{Slots: 4}},
		waits:   true, profile: mooncake.Profile{Connector: mooncake.SGLang},
		configure: func(c *config.Config, _ *Deps) { c.Bind.Grace = patience },
	})
	leave, wait := b.send(chat("who leaves", `"stream":true,`))
	b.eventually("its KV is being written", func() bool { return b.p[0].Stats().Tokens == 1 })
	leave()
	wait()
	require.Equal(t, "right", b.judge("who comes next", `"stream":true,`))
	b.clean()
}
