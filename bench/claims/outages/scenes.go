package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"evenkeel/bench/rigs/testbed"
)

// outages are staged in this order. The first five and the eleventh are from people who did not
// know the page; so are the next four, in other words.
var outages = []outage{
	{
		title: "A prefill engine gives out a wrong address",
		staged: "One of two prefill engines is started again with an address for its KV cache at which nobody listens. " +
			"Its own health check and metrics are fine, and every decode rank fails to pull from it.",
		build: oneGroup(clients{rate: 6, prompt: 1500, answer: 150}),
		begin: func(ctx context.Context, s *stage) error {
			return s.again(ctx, "prefill1", 1, append(slices.Clone(prefills), "--advertise=127.0.0.9")...)
		},
		mend: func(ctx context.Context, s *stage) error { return s.again(ctx, "prefill1", 1, prefills...) },
	},
	{
		title: "A rank answers everything at once, with nothing",
		staged: "One of six ranks ends its answers with the first token, finish_reason stop and no text, as with broken weights. " +
			"No request fails, and the rank is the fastest one.",
		look: 2 * time.Minute, build: withShim, begin: func(_ context.Context, s *stage) error { empty.Store(true); return nil },
		mend: func(context.Context, *stage) error { empty.Store(false); return nil },
	},
	{
		title: "A caller's release makes the beginning of each prompt differ",
		staged: "The key agents sends 20 conversations of 8,000 tokens, which prefill engines have in their caches. " +
			"From one moment on each of its prompts begins with a time. Rates and sizes stay as they are, and the key chat pays for it.",
		look: 2 * time.Minute,
		build: func(ctx context.Context, s *stage) error {
			if err := s.key("agents", "chat"); err != nil {
				return err
			}
			slow := []string{"--role=prefill", "--prefill-per-token=90us", "--kv-tokens=262144"}
			if err := s.fleet(ctx, slow, nil, 6); err != nil {
				return err
			}
			if err := s.serve(ctx, s.usual(6, "")); err != nil {
				return err
			}
			s.ask(ctx, clients{key: "chat", rate: 4, prompt: 300, answer: 120})
			s.calm = s.ask(ctx, clients{key: "agents", rate: 3.5, prompt: 8150, answer: 60, shared: 8000})
			return nil
		},
		begin: func(ctx context.Context, s *stage) error {
			s.calm()
			s.calm = s.ask(ctx, clients{key: "agents", rate: 3.5, prompt: 8150, answer: 60})
			return nil
		},
		mend: func(ctx context.Context, s *stage) error {
			s.calm()
			s.ask(ctx, clients{key: "agents", rate: 3.5, prompt: 8150, answer: 60, shared: 8000})
			return nil
		},
	},
	{
		title: "A move to other engines whose config never came into force",
		staged: "The config file is given the addresses of a new group, and a misspelt key in another section, so the proxy keeps the config " +
			"before. " +
			"A minute later the old group is switched off, as planned.",
		build: func(ctx context.Context, s *stage) error {
			if err := s.twoGroups(ctx, nil); err != nil {
				return err
			}
			return s.start(ctx, "new", "127.0.0.13", 3, decodes...)
		},
		steady: 45 * time.Second, look: 2 * time.Minute,
		begin: func(ctx context.Context, s *stage) error {
			b, err := s.of("b")
			if err != nil {
				return err
			}
			text := s.config
			for i := range 3 {
				text = strings.ReplaceAll(text, b.url(i), s.engines["new"].url(i))
			}
			if err := s.world.Write(s.proxy.Config(), text+"limits: {max_bodies: 3}\n"); err != nil {
				return err
			}
			if err := testbed.Pause(ctx, time.Minute); err != nil {
				return err
			}
			return b.End(30 * time.Second)
		},
		mend: func(_ context.Context, s *stage) error {
			text := s.config
			for i := range 3 {
				text = strings.ReplaceAll(text, s.engines["b"].url(i), s.engines["new"].url(i))
			}
			return s.world.Write(s.proxy.Config(), text)
		},
	},
	{
		title: "Speculative decoding is off in one group after a restart",
		staged: "One of two groups comes back from a restart with one token per step in place of three. Its steps take as long as before, and " +
			"nothing fails.",
		steady: 6*time.Minute + 30*time.Second, look: 3 * time.Minute,
		build: func(ctx context.Context, s *stage) error { return s.twoGroups(ctx, []string{"--tokens-per-chunk=3"}) },
		begin: func(ctx context.Context, s *stage) error { return s.again(ctx, "b", 3, decodes...) },
		mend: func(ctx context.Context, s *stage) error {
			return s.again(ctx, "b", 3, append(slices.Clone(decodes), "--tokens-per-chunk=3")...)
		},
	},
	{
		title:  "The ranks of a group get a fifth of their time",
		staged: "The process of a group of six ranks is stopped for four fifths of every second, as beside a neighbour that takes the cores.",
		steady: 6*time.Minute + 30*time.Second, look: 90 * time.Second, build: oneGroup(clients{concurrency: 40, prompt: 600, answer: 150}),
		begin: func(ctx context.Context, s *stage) error {
			return slowed(ctx, s.engines["decode"], 85*time.Second)
		},
		mend: func(context.Context, *stage) error { return nil },
	},
	{
		title:  "A host hangs, comes back, and half a minute later another process of it is killed",
		staged: "Group b stands still for 20 seconds and goes on. Then group c on the same host is killed.",
		look:   75 * time.Second,
		build:  threeOnTwoHosts,
		begin: func(ctx context.Context, s *stage) error {
			_ = s.engines["b"].Signal(syscall.SIGSTOP)
			if err := testbed.Pause(ctx, 20*time.Second); err != nil {
				return err
			}
			_ = s.engines["b"].Signal(syscall.SIGCONT)
			if err := testbed.Pause(ctx, 30*time.Second); err != nil {
				return err
			}
			s.engines["c"].Kill()
			return nil
		},
		mend: func(ctx context.Context, s *stage) error {
			return s.again(ctx, "c", 2, append(slices.Clone(decodes), "--group", "c")...)
		},
	},
	{
		title:  "One caller floods",
		staged: "The key batch sends 600 long prompts at once, beside 20 calm requests of the key chat.",
		build: func(ctx context.Context, s *stage) error {
			if err := s.key("batch", "chat"); err != nil {
				return err
			}
			if err := s.fleet(ctx, prefills, nil, 6); err != nil {
				return err
			}
			if err := s.serve(ctx, s.usual(6, "")); err != nil {
				return err
			}
			s.ask(ctx, clients{key: "chat", concurrency: 20, prompt: 400, answer: 100})
			return nil
		},
		begin: func(ctx context.Context, s *stage) error {
			s.calm = s.ask(ctx, clients{key: "batch", concurrency: 600, prompt: 4000, answer: 300})
			return nil
		},
		mend: func(_ context.Context, s *stage) error { s.calm(); return nil },
	},
	{
		title:  "The KV caches are full while slots are free",
		staged: "Clients turn to prompts of 6,000 tokens at ranks that hold 40,000 tokens and have 16 slots.",
		build: func(ctx context.Context, s *stage) error {
			if err := s.fleet(ctx, prefills, []string{"--kv-tokens=40000"}, 6); err != nil {
				return err
			}
			if err := s.serve(ctx, s.usual(6, ", kv_tokens: 40000")); err != nil {
				return err
			}
			s.calm = s.ask(ctx, clients{concurrency: 30, prompt: 400, answer: 100})
			return nil
		},
		begin: func(ctx context.Context, s *stage) error {
			s.calm()
			s.calm = s.ask(ctx, clients{concurrency: 120, prompt: 6000, answer: 400})
			return nil
		},
		mend: func(ctx context.Context, s *stage) error {
			s.calm()
			s.ask(ctx, clients{concurrency: 30, prompt: 400, answer: 100})
			return nil
		},
	},
	{
		title:  "The proxy is killed under load and started again",
		staged: "The proxy's process is killed, and its supervisor starts it again two seconds later. Clients try again.",
		look:   45 * time.Second, build: oneGroup(clients{concurrency: 60, prompt: 600, answer: 150}),
		begin: func(ctx context.Context, s *stage) error {
			s.proxy.Kill()
			if err := testbed.Pause(ctx, 2*time.Second); err != nil {
				return err
			}
			return s.proxy.Serve()
		},
		mend: func(context.Context, *stage) error { return nil },
	},
	{
		title: "Every request on one host gets a 500",
		staged: "The three ranks of one of two hosts answer each request with status 500 at once, so they are always free. Their health checks " +
			"and metrics are fine. " +
			"Somebody who tried to find and drain a failing host met it.",
		build: func(ctx context.Context, s *stage) error { return s.twoGroups(ctx, nil) },
		begin: func(ctx context.Context, s *stage) error {
			return s.again(ctx, "b", 3, append(slices.Clone(decodes), "--group=b", `--fault={"fault":"internal"}`)...)
		},
		mend: func(ctx context.Context, s *stage) error {
			return s.again(ctx, "b", 3, append(slices.Clone(decodes), "--group=b")...)
		},
	},
	{
		title: "The name of a prefill engine leads to a host that is not there",
		staged: "One of two prefill engines is known by a name. Its DNS record is changed to an address at which nothing answers, and the " +
			"engine goes on at the old one. " +
			"Somebody who had not read the list of outages met it.",
		build: func(ctx context.Context, s *stage) error {
			if err := s.fleet(ctx, prefills, nil, 6); err != nil {
				return err
			}
			e := s.engines["prefill2"]
			if err := s.resolves("prefill2.test", e.host); err != nil {
				return err
			}
			if err := s.serve(ctx,
				strings.ReplaceAll(s.usual(6, ""), e.url(0), "http://"+net.JoinHostPort("prefill2.test", strconv.Itoa(e.port)))); err != nil {
				return err
			}
			s.ask(ctx, clients{rate: 6, prompt: 1500, answer: 150})
			return nil
		},
		begin: func(_ context.Context, s *stage) error { return s.resolves("prefill2.test", "127.0.0.99") },
		mend: func(_ context.Context, s *stage) error {
			return s.resolves("prefill2.test", s.engines["prefill2"].host)
		},
	},
	{
		title: "One of several addresses of a group is slow",
		staged: "One of four decode engines, which are a group with barrier: dp in the config, comes back from a restart with tokens of 300 ms " +
			"in place of 55. " +
			"The engines do not really step together.",
		look: 90 * time.Second,
		build: func(ctx context.Context, s *stage) error {
			if err := s.prefillTwo(ctx, prefills); err != nil {
				return err
			}
			var decode []string
			for i := range 4 {
				name := "d" + strconv.Itoa(i+1)
				if err := s.start(ctx, name, "127.0.0.1"+strconv.Itoa(i+1), 1, steady55...); err != nil {
					return err
				}
				decode = append(decode, s.ranks(name, 1, ", slots: 16, group: main, barrier: dp")...)
			}
			if err := s.serve(ctx, s.configure(append(s.ranks("prefill1", 1, ""), s.ranks("prefill2", 1, "")...), decode, "")); err != nil {
				return err
			}
			s.ask(ctx, clients{concurrency: 30, prompt: 600, answer: 150})
			return nil
		},
		begin: func(ctx context.Context, s *stage) error {
			return s.again(ctx, "d3", 1, "--role=decode", "--c0=300ms", "--c1=0ns", "--slots=16")
		},
		mend: func(ctx context.Context, s *stage) error { return s.again(ctx, "d3", 1, steady55...) },
	},
	{
		title: "One key sends only prompts of 100,000 tokens",
		staged: "The key batch sends prompts of 100,000 tokens to two prefill engines whose KV caches hold 262,144, beside 20 calm requests of " +
			"the key chat.",
		build: func(ctx context.Context, s *stage) error {
			if err := s.key("batch", "chat"); err != nil {
				return err
			}
			if err := s.fleet(ctx, append(slices.Clone(prefills), "--kv-tokens=262144"), []string{"--kv-tokens=2000000"}, 6); err != nil {
				return err
			}
			if err := s.serve(ctx, s.usual(6, ", kv_tokens: 2000000")); err != nil {
				return err
			}
			s.ask(ctx, clients{key: "chat", concurrency: 20, prompt: 400, answer: 100})
			return nil
		},
		begin: func(ctx context.Context, s *stage) error {
			s.calm = s.ask(ctx, clients{key: "batch", concurrency: 12, prompt: 100_000, answer: 20})
			return nil
		},
		mend: func(_ context.Context, s *stage) error { s.calm(); return nil },
	},
	{
		title:  "A certificate ends within a day",
		staged: "The certificate of the listener of clients ends in 20 hours.",
		steady: time.Second, look: 10 * time.Second,
		build: func(ctx context.Context, s *stage) error {
			if err := s.certificate(30 * 24 * time.Hour); err != nil {
				return err
			}
			if err := s.fleet(ctx, prefills, nil, 2); err != nil {
				return err
			}
			return s.serve(ctx,
				s.usual(2, "")+fmt.Sprintf("tls: {cert_file: %q, key_file: %q}\n", s.world.File(s.name+".crt"), s.world.File(s.name+".key")))
		},
		begin: func(_ context.Context, s *stage) error { return s.certificate(20 * time.Hour) },
		mend:  func(_ context.Context, s *stage) error { return s.certificate(30 * 24 * time.Hour) },
	},
	{
		title: "A host hangs, is well for 40 seconds, and hangs again with a second engine",
		staged: "Group b stands still for 20 seconds. After 40 seconds in which all is well, groups b and c of the same host stand still " +
			"together.",
		look: 90 * time.Second, build: threeOnTwoHosts,
		begin: func(ctx context.Context, s *stage) error {
			_ = s.engines["b"].Signal(syscall.SIGSTOP)
			if err := testbed.Pause(ctx, 20*time.Second); err != nil {
				return err
			}
			_ = s.engines["b"].Signal(syscall.SIGCONT)
			if err := testbed.Pause(ctx, 40*time.Second); err != nil {
				return err
			}
			_, _ = s.engines["b"].Signal(syscall.SIGSTOP), s.engines["c"].Signal(syscall.SIGSTOP)
			return nil
		},
		mend: func(_ context.Context, s *stage) error {
			return errors.Join(s.engines["b"].Signal(syscall.SIGCONT), s.engines["c"].Signal(syscall.SIGCONT))
		},
	},
	{
		title:  "An engine comes and goes every 20 seconds for five minutes",
		staged: "A group of two ranks is killed, started 20 seconds later, killed again 20 seconds after that, and so on.",
		look:   5 * time.Minute, build: threeOnTwoHosts,
		begin: func(ctx context.Context, s *stage) error {
			for range 7 {
				s.engines["c"].Kill()
				if err := testbed.Pause(ctx, 20*time.Second); err != nil {
					return err
				}
				if err := s.again(ctx, "c", 2, append(slices.Clone(decodes), "--group", "c")...); err != nil {
					return err
				}
				if err := testbed.Pause(ctx, 20*time.Second); err != nil {
					return err
				}
			}
			return nil
		},
		mend: func(context.Context, *stage) error { return nil },
	},
	{
		title:  "Each of two groups has an outage of its own at once",
		staged: "The engines of group a are killed in the moment in which those of group b get a fifth of their time.",
		steady: 6*time.Minute + 30*time.Second, look: 90 * time.Second,
		build: func(ctx context.Context, s *stage) error { return s.twoGroups(ctx, nil) },
		begin: func(ctx context.Context, s *stage) error {
			s.engines["a"].Kill()
			return slowed(ctx, s.engines["b"], 85*time.Second)
		},
		mend: func(ctx context.Context, s *stage) error {
			return s.again(ctx, "a", 3, append(slices.Clone(decodes), "--group=a")...)
		},
	},
	{
		title:  "An engine comes and goes every 10 seconds",
		staged: "A group of two ranks is killed, started 10 seconds later, killed again 10 seconds after that, nine times.",
		look:   3 * time.Minute, build: threeOnTwoHosts, labels: "engine_down c", pages: true,
		begin: func(ctx context.Context, s *stage) error {
			for range 9 {
				s.engines["c"].Kill()
				if err := testbed.Pause(ctx, 10*time.Second); err != nil {
					return err
				}
				if err := s.again(ctx, "c", 2, append(slices.Clone(decodes), "--group", "c")...); err != nil {
					return err
				}
				if err := testbed.Pause(ctx, 10*time.Second); err != nil {
					return err
				}
			}
			return nil
		},
		mend: func(context.Context, *stage) error { return nil },
	},
	{
		title: "A prefill engine whose hand-offs fail everywhere",
		staged: "Each decode rank of two groups answers 500 to the hand-offs of one of four prefill engines, " +
			"as when its RDMA state is dead after the decode engines were restarted. Its own answers are fine.",
		look: 2 * time.Minute, labels: "handoffs_lost prefill1",
		build: func(ctx context.Context, s *stage) error {
			var prefill, decode []string
			for i := range 4 {
				name := "prefill" + strconv.Itoa(i+1)
				if err := s.start(ctx, name, "127.0.0."+strconv.Itoa(i+1), 1, prefills...); err != nil {
					return err
				}
				prefill = append(prefill, s.ranks(name, 1, "")...)
			}
			for i, name := range []string{"a", "b"} {
				flags := append(slices.Clone(decodes), "--group", name)
				if err := s.start(ctx, name, "127.0.0.1"+strconv.Itoa(i+1), 3, flags...); err != nil {
					return err
				}
				decode = append(decode, s.ranks(name, 3, ", slots: 16, group: "+name)...)
			}
			if err := s.serve(ctx, s.configure(prefill, decode, "")); err != nil {
				return err
			}
			s.ask(ctx, clients{concurrency: 50, prompt: 300, answer: 60})
			return nil
		},
		begin: func(ctx context.Context, s *stage) error {
			from := strings.TrimPrefix(s.engines["prefill1"].url(0), "http://")
			return s.faults(ctx, fmt.Sprintf(`[{"fault":"internal","leg":"decode","from":%q}]`, from), "a", "b")
		},
		mend: func(ctx context.Context, s *stage) error { return s.faults(ctx, "[]", "a", "b") },
	},
	{
		title: "An engine of each of two groups is killed",
		staged: "Two groups without a barrier have two engines each, on four hosts. One engine of each group is " +
			"killed in the same moment.",
		labels: "engine_down a1",
		build: func(ctx context.Context, s *stage) error {
			if err := s.prefillTwo(ctx, prefills); err != nil {
				return err
			}
			var decode []string
			for i, name := range []string{"a1", "a2", "b1", "b2"} {
				if err := s.start(ctx, name, "127.0.0.1"+strconv.Itoa(i+1), 1, decodes...); err != nil {
					return err
				}
				decode = append(decode, s.ranks(name, 1, ", slots: 16, barrier: none, group: "+name[:1])...)
			}
			prefill := append(s.ranks("prefill1", 1, ""), s.ranks("prefill2", 1, "")...)
			if err := s.serve(ctx, s.configure(prefill, decode, "")); err != nil {
				return err
			}
			s.ask(ctx, clients{concurrency: 20, prompt: 300, answer: 150})
			return nil
		},
		begin: func(_ context.Context, s *stage) error {
			s.engines["a1"].Kill()
			s.engines["b1"].Kill()
			return nil
		},
		mend: func(ctx context.Context, s *stage) error {
			return errors.Join(s.again(ctx, "a1", 1, decodes...), s.again(ctx, "b1", 1, decodes...))
		},
	},
	{
		title: "The proxy's machine is busy",
		staged: "The proxy, and nothing else, runs for 100 ms and stands still for a second, again and again, as " +
			"under a processor limit that is far too low.",
		look: 2 * time.Minute, labels: "proxy_busy", pages: true,
		build: func(ctx context.Context, s *stage) error { return s.twoGroups(ctx, nil) },
		begin: func(ctx context.Context, s *stage) error {
			return inTurns(ctx, s.proxy, time.Second, 100*time.Millisecond, 115*time.Second)
		},
		mend: func(context.Context, *stage) error { return nil },
	},
	{
		title: "A rank is slow for long prompts behind a barrier",
		staged: "A step of a group takes twelve times as long for each KV token of its fullest rank, as one rank " +
			"whose attention is slow makes it. Short prompts are as fast as before, and the clients' prompts are long.",
		steady: 6*time.Minute + 30*time.Second, look: 90 * time.Second, labels: "steps_slow main",
		build: oneGroup(clients{concurrency: 30, prompt: 5000, answer: 150}),
		begin: func(ctx context.Context, s *stage) error {
			return s.again(ctx, "decode", 6, "--role=decode", "--c0=30ms", "--c1=3600ns", "--slots=16")
		},
		mend: func(ctx context.Context, s *stage) error { return s.again(ctx, "decode", 6, decodes...) },
	},
	{
		title:  "Five minutes of healthy bursts",
		staged: "Nothing is wrong. Every 30 seconds 80 requests come at once, and end within 20 seconds.",
		look:   5 * time.Minute, labels: none,
		build: func(ctx context.Context, s *stage) error {
			if err := s.fleet(ctx, prefills, nil, 6); err != nil {
				return err
			}
			return s.serve(ctx, s.usual(6, ""))
		},
		begin: func(ctx context.Context, s *stage) error {
			for range 9 {
				stop := s.ask(ctx, clients{concurrency: 80, prompt: 400, answer: 100})
				if err := testbed.Pause(ctx, 4*time.Second); err != nil {
					return err
				}
				stop()
				if err := testbed.Pause(ctx, 26*time.Second); err != nil {
					return err
				}
			}
			return nil
		},
		mend: func(context.Context, *stage) error { return nil },
	},
}

var (
	prefills = []string{"--role=prefill", "--prefill-per-token=25us"}
	decodes  = []string{"--role=decode", "--c0=30ms", "--c1=300ns", "--slots=16"}
	steady55 = []string{"--role=decode", "--c0=55ms", "--c1=0ns", "--slots=16"} // tokens take as long whatever runs
)

// threeOnTwoHosts are three groups of two ranks each, of which b and c are on the same host.
func threeOnTwoHosts(ctx context.Context, s *stage) error {
	if err := s.prefillTwo(ctx, prefills); err != nil {
		return err
	}
	var decode []string
	for name, host := range map[string]string{"a": "127.0.0.11", "b": "127.0.0.12", "c": "127.0.0.12"} {
		if err := s.start(ctx, name, host, 2, append(slices.Clone(decodes), "--group", name)...); err != nil {
			return err
		}
		decode = append(decode, s.ranks(name, 2, ", slots: 16, group: "+name)...)
	}
	slices.Sort(decode)
	if err := s.serve(ctx, s.configure(append(s.ranks("prefill1", 1, ""), s.ranks("prefill2", 1, "")...), decode, "")); err != nil {
		return err
	}
	s.ask(ctx, clients{concurrency: 30, prompt: 600, answer: 150})
	return nil
}

// slowed gives an engine a fifth of its time for so long.
func slowed(ctx context.Context, e *engine, lasts time.Duration) error {
	return inTurns(ctx, e, 200*time.Millisecond, 50*time.Millisecond, lasts)
}

// inTurns has a process stand still and run in turns.
func inTurns(ctx context.Context, p interface{ Signal(os.Signal) error }, still, runs, lasts time.Duration) error {
	for end := time.Now().Add(lasts); time.Now().Before(end); {
		_ = p.Signal(syscall.SIGSTOP)
		if err := testbed.Pause(ctx, still); err != nil {
			return errors.Join(err, p.Signal(syscall.SIGCONT))
		}
		_ = p.Signal(syscall.SIGCONT)
		if err := testbed.Pause(ctx, runs); err != nil {
			return err
		}
	}
	return nil
}

// faults has all ranks of some engines fail by these rules from now on.
func (s *stage) faults(ctx context.Context, rules string, engines ...string) error {
	for _, name := range engines {
		e, err := s.of(name)
		if err != nil {
			return err
		}
		a, err := testbed.Do(ctx, http.DefaultClient, http.MethodPost, e.url(0)+"/faults", []byte(rules))
		if err != nil || a.Status != http.StatusOK && a.Status != http.StatusNoContent {
			return fmt.Errorf("faults of %s: %d %s %w", name, a.Status, a.Body, err)
		}
	}
	return nil
}

func (s *stage) prefillTwo(ctx context.Context, flags []string) error {
	for i := range 2 {
		if err := s.start(ctx, "prefill"+strconv.Itoa(i+1), "127.0.0."+strconv.Itoa(i+1), 1, flags...); err != nil {
			return err
		}
	}
	return nil
}

// fleet starts two prefill engines and a group of decode ranks.
func (s *stage) fleet(ctx context.Context, prefill, decode []string, ranks int) error {
	if err := s.prefillTwo(ctx, prefill); err != nil {
		return err
	}
	return s.start(ctx, "decode", "127.0.0.11", ranks, append(slices.Clone(decodes), decode...)...)
}

// usual is the config of such a fleet.
func (s *stage) usual(ranks int, rest string) string {
	return s.configure(append(s.ranks("prefill1", 1, ""), s.ranks("prefill2", 1, "")...), s.ranks("decode", ranks, ", slots: 16"+rest), "")
}

func oneGroup(c clients) func(context.Context, *stage) error {
	return func(ctx context.Context, s *stage) error {
		if err := s.fleet(ctx, prefills, nil, 6); err != nil {
			return err
		}
		if err := s.serve(ctx, s.usual(6, "")); err != nil {
			return err
		}
		s.ask(ctx, c)
		return nil
	}
}

// twoGroups have three ranks each, on two hosts.
func (s *stage) twoGroups(ctx context.Context, flags []string) error {
	if err := s.prefillTwo(ctx, prefills); err != nil {
		return err
	}
	var decode []string
	for i, name := range []string{"a", "b"} {
		if err := s.start(ctx, name, "127.0.0.1"+strconv.Itoa(i+1), 3, slices.Concat(decodes, flags, []string{"--group", name})...); err != nil {
			return err
		}
		decode = append(decode, s.ranks(name, 3, ", slots: 16, group: "+name)...)
	}
	if err := s.serve(ctx, s.configure(append(s.ranks("prefill1", 1, ""), s.ranks("prefill2", 1, "")...), decode, "")); err != nil {
		return err
	}
	if flags == nil {
		s.ask(ctx, clients{concurrency: 50, prompt: 300, answer: 150})
	} else {
		s.ask(ctx, clients{rate: 17, prompt: 300, answer: 400})
	}
	return nil
}

// again ends an engine and starts it with other flags.
func (s *stage) again(ctx context.Context, name string, ranks int, flags ...string) error {
	e, err := s.of(name)
	if err != nil {
		return err
	}
	e.Kill()
	return s.start(ctx, name, e.host, ranks, flags...)
}

// empty says that answers of the rank behind the shim have no text.
var empty atomic.Bool

var (
	asked = regexp.MustCompile(`"max_(completion_)?tokens":\s*\d+`)
	ended = []byte(`"finish_reason":"length"`)
)

// withShim has the fourth of six ranks behind a proxy that can take its answers away.
func withShim(ctx context.Context, s *stage) error {
	if err := s.fleet(ctx, prefills, nil, 6); err != nil {
		return err
	}
	to, err := url.Parse(s.engines["decode"].url(3))
	if err != nil {
		return err
	}
	shim := &http.Server{Handler: &httputil.ReverseProxy{
		FlushInterval: -1,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			if !empty.Load() || !strings.Contains(r.In.URL.Path, "completions") {
				return
			}
			body, _ := io.ReadAll(r.In.Body)
			body = asked.ReplaceAll(body, []byte(`"max_${1}tokens":1`))
			r.Out.Body, r.Out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
			r.Out.Header.Set("Content-Length", strconv.Itoa(len(body)))
			r.Out.Header.Set("X-Empty", "yes")
		},
		ModifyResponse: func(r *http.Response) error {
			if r.Request.Header.Get("X-Empty") == "" {
				return nil
			}
			r.Body = &stopped{ReadCloser: r.Body}
			r.Header.Del("Content-Length")
			r.ContentLength = -1
			return nil
		},
	}, ReadHeaderTimeout: time.Minute}
	at := fmt.Sprintf("127.0.0.11:%d", ports.take(1))
	ln, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	go func() { _ = shim.Serve(ln) }()
	s.stops = append(s.stops, func() { _ = shim.Close() })
	config := strings.ReplaceAll(s.usual(6, ""), to.String(), "http://"+at)
	if err := s.serve(ctx, config); err != nil {
		return err
	}
	s.ask(ctx, clients{rate: 11, prompt: 800, answer: 250})
	return nil
}

// stopped says that answers ended by themselves, without any text.
type stopped struct {
	io.ReadCloser
	rest []byte
	ends bool
}

var says = regexp.MustCompile(`"(text|content)":"(?:[^"\\]|\\.)*"`)

// Read rewrites whole lines, since a piece may end anywhere.
func (r *stopped) Read(p []byte) (int, error) {
	for !r.ends && !bytes.Contains(r.rest, []byte("\n")) {
		piece := make([]byte, 64<<10)
		n, err := r.ReadCloser.Read(piece)
		r.rest, r.ends = append(r.rest, piece[:n]...), err != nil
	}
	whole := bytes.LastIndexByte(r.rest, '\n') + 1
	if r.ends {
		whole = len(r.rest)
	}
	if whole == 0 {
		return 0, io.EOF
	}
	lines := says.ReplaceAll(bytes.ReplaceAll(r.rest[:whole], ended, []byte(`"finish_reason":"stop"`)), []byte(`"$1":""`))
	n := copy(p, lines)
	r.rest = append(slices.Clone(lines[n:]), r.rest[whole:]...)
	return n, nil
}
