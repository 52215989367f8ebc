// Command peers asks whether the reference engines take what other routers send: it starts proxies
// that serve vLLM, vllm-ascend and SGLang today in front of reference engines, checks each answer
// that clients get, and holds the bodies that engines get against evenkeel's.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/page"
)

type options struct {
	testbed.Options
	cache, ascend, only, out string
	requests                 int
}

func main() {
	testbed.Main("peers", testbed.Page(testbed.Judged(func(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
		var o options
		f := o.Flags("peers")
		f.StringVar(&o.cache, "cache", "", "folder in which routers are installed; empty: one in the user's cache folder")
		f.StringVar(&o.ascend, "ascend", "", "a clone of vllm-ascend, whose example proxies are run; empty: these are left out")
		f.StringVar(&o.only, "only", "", "only the routers whose names contain this")
		f.StringVar(&o.out, "out", "", "document to write the tables into; empty: they are printed")
		f.IntVar(&o.requests, "requests", 200, "how many each router gets")
		if err := testbed.Parse(f, args); err != nil {
			return false, err
		}
		return o.run(ctx, out)
	}), []string{"-out", "docs/results/real.md"}))
}

// bench is a run.
type bench struct {
	options
	world *testbed.World
	out   io.Writer
}

func (o options) run(ctx context.Context, out io.Writer) (ok bool, err error) {
	w, err := testbed.New(ctx, "peers", o.Options)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, w.Close(ok)) }()
	b := &bench{o, w, out}
	answers := page.Markdown{Text: 4,
		Head: []string{"router", "connector", "answers", "clients that left", "what engines hold then", "complaints of engines"}}
	bodies := page.Markdown{Text: 4, Head: []string{"router", "leg", "only it sends", "only evenkeel sends", "what differs: its, evenkeel's"}}
	peers, err := b.peers(ctx)
	if err != nil {
		return false, err
	}
	ok = true
	for _, p := range peers {
		if !strings.Contains(p.name, o.only) {
			continue
		}
		if p.missing != "" {
			answers.Add(p.name, string(p.connector), "not run: "+p.missing, "", "", "")
			continue
		}
		s, err := b.try(ctx, p)
		if err != nil {
			return false, fmt.Errorf("%s: %w; %s has its log", p.name, err, w.Dir)
		}
		answers.Add(strings.TrimSpace(p.name+" "+p.version), string(p.connector), s.answered(), s.left(), s.holds(), s.complaints())
		if p.command != nil {
			for _, leg := range legs {
				bodies.Add(append([]string{p.name, leg}, told(leg, s.differences)...)...)
			}
		}
		ok = ok && s.whole.OK == s.whole.Sent
	}
	text := answers.String() + "\n" + bodies.String()
	return ok, page.Show(out, o.out, "claim NAME=peers", "peers", "Other routers with the reference engines", text)
}

// seen is what a router made of its requests.
type seen struct {
	whole, leaving *load.Result
	held           error // nil: nothing, some seconds after the last client had left
	engines        []string
	differences    []difference
}

// ranks are the engines: two that prefill and two that decode.
func (b *bench) ranks(c refengine.Connector) (list []*refengine.Engine, err error) {
	one := refengine.Config{Connector: c, Slots: 16, Answers: refengine.Answers{PromptTokensDetails: true},
		KV: refengine.KV{HoldTimeout: keeps}, SGLang: refengine.SGLangOptions{WaitingTimeout: keeps, BootstrapTimeout: keeps}}
	for _, role := range []refengine.Role{refengine.Prefill, refengine.Prefill, refengine.Decode, refengine.Decode} {
		one.Role = role
		e, err := b.world.Engines(one)
		if err != nil {
			return nil, err
		}
		list = append(list, e...)
	}
	return list, nil
}

// keeps is how long engines keep what nobody fetches, and settles how long they get to let go of
// everything else.
const (
	keeps   = 20 * time.Second
	settles = 5 * time.Second
)

func (b *bench) try(ctx context.Context, p *peer) (*seen, error) {
	ranks, err := b.ranks(p.connector)
	if err != nil {
		return nil, err
	}
	at, urls := testbed.FreeAddresses(1)[0], urlsOf(ranks)
	end, err := p.run(ctx, b, at, engines{urls[:2], urls[2:], portsOf(ranks[:2])})
	if err != nil {
		return nil, err
	}
	defer end()
	s := &seen{}
	one := load.Config{URLs: []string{"http://" + at}, Model: "ref", Requests: requests(b.requests), Concurrency: 8,
		Chat: 0.5, Stream: 0.5, Usage: 0.5, Chunked: true, Timeout: time.Minute, Seed: 1}
	if s.whole, err = load.Run(ctx, one); err != nil {
		return nil, err
	}
	one.Cancel, one.Seed = load.Cancel{Share: 0.5}, 2
	if s.leaving, err = load.Run(ctx, one); err != nil {
		return nil, err
	}
	s.held = testbed.Idle(ctx, settles, func() (held []string) {
		for i, e := range ranks {
			held = append(held, testbed.HeldBy(role(i), e.Stats())...)
		}
		return held
	})
	for i, e := range ranks {
		s.engines = append(s.engines, complaints(role(i), e.Stats().Events)...)
	}
	if p.command != nil {
		s.differences, err = b.differ(ctx, p)
	}
	return s, err
}

func urlsOf(ranks []*refengine.Engine) (urls []string) {
	for _, e := range ranks {
		urls = append(urls, e.URLs()[0])
	}
	return urls
}

func portsOf(ranks []*refengine.Engine) (ports []string) {
	for _, u := range urlsOf(ranks) {
		_, port, _ := strings.Cut(strings.TrimPrefix(u, "http://"), ":")
		ports = append(ports, port)
	}
	return ports
}

// role names the i-th engine.
func role(i int) string { return []string{"prefill 1", "prefill 2", "decode 1", "decode 2"}[i] }

func requests(n int) []trace.Request {
	r := rand.New(rand.NewPCG(1, 1))
	list := make([]trace.Request, n)
	for i := range list {
		list[i] = trace.Request{Prompt: 20 + r.IntN(1500), Output: 1 + r.IntN(60)}
	}
	return list
}

func (s *seen) answered() string {
	text := fmt.Sprintf("%d of %d right", s.whole.OK, s.whole.Sent)
	for _, f := range s.whole.Failures[:min(1, len(s.whole.Failures))] {
		text += "; the first that is not: " + string(f.Kind) + ", " + f.Detail
	}
	return text
}

func (s *seen) left() string {
	return fmt.Sprintf("%d of %d; of the others %d right", s.leaving.Cancelled, s.leaving.Sent, s.leaving.OK)
}

func (s *seen) holds() string {
	if s.held == nil {
		return "nothing"
	}
	return s.held.Error()
}

func (s *seen) complaints() string {
	if len(s.engines) == 0 {
		return "none"
	}
	return strings.Join(s.engines, "; ")
}

// complaints are what an engine counted that a router should not do to it.
func complaints(who string, e refengine.Events[int64]) (list []string) {
	for _, c := range []struct {
		n    int64
		what string
	}{
		{e.Leaks, "hand-offs that nobody fetched"}, {e.Replays, "hand-offs fetched twice"}, {e.ExpiredPulls, "hand-offs fetched too late"},
		{e.BadHits, "hits of another prompt's KV"}, {e.WrongBlocks, "other blocks named"}, {e.KeyMismatches, "KV of another prompt"}, {e.Unknown, "unknown hand-offs"},
		{e.FailedPulls, "failed pulls"}, {e.LocalPrefills, "prompts computed by a decode engine"}, {e.OverAdmitted, "requests beyond the slots"},
		{e.Crashes, "requests that kill a real engine"}, {e.DuplicateIDs, "request ids used again"}, {e.LostPushes, "KV written for nobody"},
		{e.MixedPushes, "requests with KV of two engines"}, {e.FreedWrites, "KV written into freed pages"}, {e.RoomTimeouts, "rooms that nobody came to"},
	} {
		if c.n > 0 {
			list = append(list, fmt.Sprintf("%s: %d %s", who, c.n, c.what))
		}
	}
	return list
}
