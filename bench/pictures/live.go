package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/process"
	"evenkeel/bench/refengine"
	"evenkeel/bench/trace"
)

const (
	ranks    = 32
	slots    = 12 // of a rank
	prefills = 4
	waiting  = 96 // requests in the system beyond the slots
	lost     = 21 // the rank that goes down
)

// drawLive runs a proxy before 32 decode ranks, kills one of them, and takes
// pictures of what an operator sees then.
func drawLive(ctx context.Context, o options, dir string, b *browser, out io.Writer) (err error) {
	s, err := setUp(ctx, o.binary, dir)
	defer s.close()
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "a proxy and %d ranks under load for %v\n", ranks, o.duration)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.load(ctx) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-ended)
	}()
	for _, part := range []struct {
		lasts time.Duration
		then  func()
	}{{o.duration * 6 / 7, s.lost.Kill}, {o.duration / 7, func() {}}} {
		select {
		case <-time.After(part.lasts):
			part.then()
		case err := <-ended:
			ended <- nil
			return err
		}
	}
	page := "http://" + s.admin + "/"
	for _, shot := range []struct {
		name, scheme  string
		width, height int64
		whole         bool
	}{{"page-light", "light", 1280, 900, true}, {"page-dark", "dark", 1280, 1040, false}, {"page-narrow", "light", 390, 844, false}} {
		if err := b.visit(page, shot.scheme, shot.width, shot.height); err != nil {
			return err
		}
		if err := b.await("evenkeel.document && document.querySelectorAll('canvas.map').length > 0 && evenkeel.frames.length > 2"); err != nil {
			return err
		}
		if err := b.shoot(filepath.Join(o.out, shot.name+".png"), shot.whole, out); err != nil {
			return err
		}
	}
	return drawTop(ctx, o, dir, page, b, out)
}

// setting is a proxy and its engines.
type setting struct {
	clients, admin string // addresses
	prefill        []*refengine.Engine
	decode, lost   *refengine.Engine
	proxy          *process.Process
}

// setUp returns when the proxy is ready. What it returns beside an error wants
// to be closed, too.
func setUp(ctx context.Context, binary, dir string) (*setting, error) {
	s := &setting{clients: "127.0.0.1:" + process.FreePort(), admin: "127.0.0.1:" + process.FreePort()}
	var engines strings.Builder
	engines.WriteString("  prefill:\n")
	for range prefills {
		e, err := refengine.Start(refengine.Config{Role: refengine.Prefill, PrefillBase: 20 * time.Millisecond, PrefillPerToken: 25 * time.Microsecond, PrefixCache: 2048, PromptTokensDetails: true})
		if err != nil {
			return s, err
		}
		s.prefill = append(s.prefill, e)
		fmt.Fprintf(&engines, "    - {url: %q}\n", e.URLs()[0])
	}
	urls, err := s.startDecode()
	if err != nil {
		return s, err
	}
	engines.WriteString("  decode:\n")
	for _, u := range urls {
		fmt.Fprintf(&engines, "    - {url: %q, slots: %d, kv_tokens: 40000}\n", u, slots)
	}
	config := filepath.Join(dir, "live.yaml")
	text := fmt.Sprintf("listen: %q\nadmin: {listen: %q}\nself_test: false\nhealth: {slow_start: 0s}\ndispatch: {shadow: [pjsq, pjsq-kv, prr], step_model: {c0_ms: 50, c1_ms: 0.001}}\nengines:\n%s", s.clients, s.admin, engines.String())
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return s, err
	}
	log := filepath.Join(dir, "live.log")
	if s.proxy, err = process.Start(exec.Command(binary, "serve", "--config", config), log); err != nil {
		return s, err
	}
	if err := s.proxy.Answers(ctx, "http://"+s.admin+"/readyz"); err != nil {
		said, _ := os.ReadFile(log) // without it the error says enough
		return s, fmt.Errorf("%w: %s", err, said)
	}
	return s, nil
}

// startDecode returns the ranks' URLs. The one that is to be lost is an engine of
// its own, with the same clock.
func (s *setting) startDecode() (urls []string, err error) {
	c := refengine.Config{Role: refengine.Decode, DPSize: ranks - 1, Slots: slots, C0: 50 * time.Millisecond, C1: time.Microsecond}
	if s.decode, err = refengine.Start(c); err != nil {
		return nil, err
	}
	c.DPSize = 1
	if s.lost, err = refengine.Start(c); err != nil {
		return nil, err
	}
	return slices.Insert(s.decode.URLs(), lost, s.lost.URLs()[0]), nil
}

// load has clients talk until ctx ends: a real trace, in sessions that share
// the first half of their prompts. They ask for completions, which go on
// elsewhere when their rank is lost.
func (s *setting) load(ctx context.Context) error {
	requests := trace.Azure().Requests[:8000]
	for i := range requests {
		for b := range requests[i].Prompt / 256 {
			requests[i].HashIDs = append(requests[i].HashIDs, uint64((i%50)*1000+b))
		}
	}
	got, err := load.Run(ctx, load.Config{
		URLs: []string{"http://" + s.clients}, Requests: requests, Duration: time.Hour, SharePrefixes: true, MaxPrompt: 6000,
		Concurrency: ranks*slots + waiting, Stream: 1, Cancel: load.Cancel{Share: 0.02}, Seed: 1, Backoff: 100 * time.Millisecond,
	})
	if err != nil && ctx.Err() == nil {
		return err
	}
	if got != nil && got.Failed > got.OK/100 {
		return fmt.Errorf("%d requests failed beside %d that did not: the pictures show something else than one rank that is down: %v", got.Failed, got.OK, got.Kinds)
	}
	return nil
}

func (s *setting) close() {
	s.proxy.Kill()
	for _, e := range s.prefill {
		e.Close()
	}
	for _, e := range []*refengine.Engine{s.decode, s.lost} {
		if e != nil {
			e.Close()
		}
	}
}
