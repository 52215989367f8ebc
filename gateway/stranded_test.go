package gateway_test

import (
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

// A way leads to an engine. The connections on it can be stranded: their end is gone without a word, as after a power cut of
// the engine's host, and the first byte that is sent on one is answered with a reset.
type way struct {
	ln      net.Listener
	to      string
	age     atomic.Int64 // how often its connections were stranded
	once    atomic.Bool  // each is, as soon as it has brought an answer
	resets  atomic.Int64
	dialled atomic.Int64
	all     sync.WaitGroup
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
			w.dialled.Add(1)
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

// marked sets a mark when something is written.
type marked struct {
	io.Writer
	mark *atomic.Bool
}

func (m marked) Write(p []byte) (int, error) {
	m.mark.Store(true)
	return m.Writer.Write(p)
}

// ways puts a way in front of each engine of a config.
func ways(t *testing.T, cfg *config.Config) (all []*way) {
	for _, list := range [][]config.Engine{cfg.Engines.Prefill, cfg.Engines.Decode, cfg.Engines.Aggregated} {
		for i := range list {
			var w *way
			w, list[i].URL = over(t, list[i].URL)
			all = append(all, w)
		}
	}
	return all
}

// All connections to all engines end at once without a word while no request is on them, and then as many requests come as
// there are connections. A connection that had ended before it was used is nobody's failure, so no request fails.
func TestConnectionsThatEndUnseenFailNoRequest(t *testing.T) {
	t.Parallel()
	const requests = 46
	const slots = 64
	const pair = "a prefill and a decode engine"
	one := func(c refengine.Config) []refengine.Config {
		c.Slots, c.PrefillConcurrency, c.PrefillBase, c.C0 = slots, slots, 100*time.Millisecond, 2*time.Millisecond
		return []refengine.Config{c}
	}
	begin := map[string]func(t *testing.T, o options) *cluster{
		pair: func(t *testing.T, o options) *cluster {
			o.prefill, o.decode = one(refengine.Config{}), one(refengine.Config{})
			return start(t, o)
		},
		"two of each": func(t *testing.T, o options) *cluster {
			o.prefill, o.decode = append(one(refengine.Config{}), one(refengine.Config{})...), append(one(refengine.Config{}), one(refengine.Config{})...)
			return start(t, o)
		},
		"a rank that does both": func(t *testing.T, o options) *cluster {
			o.mixed = one(refengine.Config{})
			return start(t, o)
		},
	}
	for _, connector := range earlyConnectors {
		begin["a pair that is bound early by "+string(connector)] = func(t *testing.T, o options) *cluster {
			o.prefill, o.decode = one(refengine.Config{}), one(refengine.Config{})
			return early(t, connector, o)
		}
	}
	strand := func(c *cluster, all []*way) {
		for _, w := range all {
			w.age.Add(1)
		}
	}
	strands := map[string]func(c *cluster, all []*way){
		"at once": strand,
		"after each answer": func(c *cluster, all []*way) {
			for _, w := range all {
				w.once.Store(true)
			}
		},
		"at once with their engines, which start again": func(c *cluster, all []*way) {
			strand(c, all)
			for _, e := range append(c.prefill, c.decode...) {
				e.Kill()
				require.NoError(c, e.Revive())
			}
		},
	}
	for name, begin := range begin {
		for when, strand := range strands {
			if strings.Contains(when, "engines") && name != pair {
				continue
			}
			t.Run(name+", "+when, func(t *testing.T) {
				t.Parallel()
				var all []*way
				c := begin(t, options{
					dirty: true, // what an engine may have read is not used again, so some KV waits for its timeout
					configure: func(cfg *config.Config) {
						cfg.Health.Interval, cfg.Prefill.Scrape.Interval = time.Hour, 0 // else these would find out first
						cfg.Prefill.Push.MaxUnanswered = slots
						all = ways(t, cfg)
					},
				})
				require.Equal(t, map[string]int{"right": requests}, c.judgeBoth(requests))
				strand(c, all)
				require.Equal(t, map[string]int{"right": requests}, c.judgeBoth(requests))
				resets := int64(0)
				for _, w := range all {
					resets += w.resets.Load()
				}
				require.Positive(t, resets, "connections had ended")
				require.Zero(t, c.sum("evenkeel_engine_outages_total"))
				require.Zero(t, c.metric(`evenkeel_prefill_attempts_total{outcome="failed"}`))
				c.settledRequests(2 * requests)
				for _, r := range c.records() {
					require.LessOrEqual(t, r.Attempts, 2, "after the first one all calls dial")
				}
			})
		}
	}
}

// judgeBoth is judgeAll of requests half of which are streamed.
func (c *cluster) judgeBoth(n int) map[string]int {
	var wg sync.WaitGroup
	var streams, wholes map[string]int
	wg.Go(func() { streams = c.judgeAll(n/2, streamed) })
	wg.Go(func() { wholes = c.judgeAll(n-n/2, "") })
	wg.Wait()
	for v, k := range wholes {
		streams[v] += k
	}
	return streams
}

// reset ends a connection with a RST.
func reset(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
}
