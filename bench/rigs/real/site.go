package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel/bench/rigs/real/vllm"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/mooncake"
)

// site is the engines, and evenkeel in front of them.
type site struct {
	*testbed.World
	options
	said    io.Writer // where progress is told
	engines map[string]*engine
	version string // of the engines
	proxy   *testbed.Proxy
	now     setting // what the proxy runs with

	behind []string // the engines behind evenkeel, in most rows

	ranks map[string]int // by the URL of a way to an engine that breaks something

	kept map[string]string // of the row that runs: what engines keep for ever and the proxy counts as lost, by engine
}

// setting is what differs between the proxies of the rows.
type setting struct {
	decode []string // URLs of engines, or of what is in front of them
	slots  int

	onePiece bool // answers that are no streams come from the engines in one piece
}

// usual is the setting of most rows.
func (w *site) usual() setting {
	return setting{decode: []string{w.engines["d0"].url(), w.engines["d1"].url()}, slots: slots}
}

func newSite(ctx context.Context, o options, installed *vllm.Installation, said io.Writer) (_ *site, err error) {
	w := &site{options: o, said: said, kept: map[string]string{}, ranks: map[string]int{}}
	if w.World, err = testbed.New(ctx, "real", o.Options); err != nil {
		return nil, err
	}
	if err := w.place(ctx, installed); err != nil {
		return nil, errors.Join(err, w.Close(true))
	}
	w.proxy = w.Proxies("evenkeel")[0]
	w.proxy.Clients, w.proxy.Address = fmt.Sprintf("127.0.0.1:%d", w.at(0)), fmt.Sprintf("127.0.0.1:%d", w.at(1))
	for name, e := range w.engines {
		e.name, e.installed, e.log = name, installed, w.File(name+".log")
	}
	if o.over != "" {
		over, err := installed.Over(ctx, o.over)
		if err != nil {
			return nil, errors.Join(err, w.Close(true))
		}
		for _, e := range w.engines {
			e.plugins += ":" + over
		}
	}
	w.AtEnd(w.stopEngines)
	if err := w.portsFree(); err != nil {
		return nil, errors.Join(err, w.Close(true))
	}
	return w, nil
}

// place says which engines there are.
func (w *site) place(ctx context.Context, installed *vllm.Installation) error {
	if w.connector == mooncake.None {
		return w.placeTogether(ctx, installed)
	}
	events := fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:%d","replay_endpoint":"tcp://127.0.0.1:%d"}`, w.at(50), w.at(51))
	w.behind = []string{"p0", "d0", "d1"}
	w.engines = map[string]*engine{
		"plain": {port: w.at(10), side: w.at(60)},
		"p0":    {port: w.at(11), side: w.at(62), flags: append(w.handsOver("kv_producer"), "--kv-events-config", events)},
		"d0":    {port: w.at(12), side: w.at(64), flags: w.handsOver("kv_consumer")},
		"d1":    {port: w.at(13), side: w.at(66), flags: w.handsOver("kv_consumer")},
		"dp":    {port: w.at(14), side: w.at(68), ranks: 2, flags: w.handsOver("kv_consumer")},

		embedding: {port: w.at(15), side: w.at(72), flags: []string{"--runner", "pooling", "--served-model-name", embedder}},
	}
	return nil
}

func (w *site) at(offset int) int { return w.port + offset }

// portsFree says which port is taken, before an engine takes a minute to find
// out.
func (w *site) portsFree() error {
	ports := []int{w.at(0), w.at(1), w.at(50), w.at(51)}
	for _, e := range w.engines {
		ports = append(ports, e.port, e.side)
	}
	slices.Sort(ports)
	for _, port := range ports {
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return fmt.Errorf("a port that this needs is taken (%w); choose others with -port", err)
		}
		_ = ln.Close()
	}
	return nil
}

// need starts those of the engines that do not run, and waits for them.
func (w *site) need(ctx context.Context, names ...string) error {
	began, missing := time.Now(), []string{}
	for _, name := range names {
		e := w.engines[name]
		if !e.Running() {
			if err := e.start(); err != nil {
				return err
			}
		}
		if !e.answered {
			missing = append(missing, name)
		}
	}
	for _, name := range missing {
		if err := w.engines[name].ready(ctx); err != nil {
			return err
		}
	}
	if len(missing) > 0 {
		fmt.Fprintf(w.said, "       %s started in %.0f s\n", strings.Join(missing, ", "), time.Since(began).Seconds())
	}
	if w.version == "" {
		var v struct{ Version string }
		got := ask(ctx, "GET", w.engines[names[0]].url()+"/version", nil)
		if err := json.Unmarshal(got.Body, &v); err != nil {
			return fmt.Errorf("the engine does not tell its version: %w", errors.Join(got.Err, err))
		}
		w.version = "vLLM " + v.Version
	}
	return nil
}

// evenkeel has the proxy run with this setting, and waits until it is ready.
func (w *site) evenkeel(ctx context.Context, s setting) error {
	same := slices.Equal(s.decode, w.now.decode) && s.slots == w.now.slots && s.onePiece == w.now.onePiece
	if w.proxy.Running() && same {
		return w.ready(ctx)
	}
	if w.proxy.Running() {
		_ = w.proxy.End(10 * time.Second) // one that does not end is killed
		w.proxy.Kill()
	}
	at := s
	at.decode = slices.Clone(s.decode)
	for i, url := range s.decode {
		var err error
		if at.decode[i], err = w.spoiled(url); err != nil {
			return err
		}
		w.ranks[at.decode[i]] = w.ranksAt(url)
	}
	if err := errors.Join(w.Write(w.proxy.Config(), w.config(at)), w.proxy.Serve()); err != nil {
		return err
	}
	w.now = s
	return w.ready(ctx)
}

// config is the proxy's config file.
func (w *site) config(s setting) string {
	if w.connector == mooncake.None {
		return w.configTogether(s)
	}
	mode := ""
	if slices.ContainsFunc(s.decode, func(url string) bool { return w.ranksAt(url) > 0 }) {
		mode = ", dp_mode: internal"
	}
	selfTest := "" // its requests would be among those that a row counts right after a start
	if s.onePiece {
		mode, selfTest = mode+", nonstream: passthrough", "self_test: false\n"
	}
	return fmt.Sprintf(`listen: %q
admin: {listen: %q}
profiles:
  nixl: {connector: %s, kv_hold_timeout: 30s, chat_resume: vllm_prompt_token_ids%s}
prefill:
  kv_events: {enabled: true, port: %d, replay_port: %d}
  index: {tokenize: engine, tokenize_timeout: 2s}
  scrape: {timeout: 5s}
  queue: {timeout: 5m}
expose_route_headers: true
%s%s`, w.proxy.Clients, w.proxy.Address, w.connector, mode, w.at(50), w.at(51), selfTest, testbed.Engines(
		testbed.EnginesAt([]string{w.engines["p0"].url()}, ", profile: nixl"),
		w.listed(s, ", profile: nixl, group: main")))
}

// listed is what the config file says of the engines that decode.
func (w *site) listed(s setting, more string) (list []string) {
	for _, url := range s.decode {
		list = append(list, fmt.Sprintf("url: %q, slots: %d, ranks: %d%s", url, s.slots, w.ranksAt(url), more))
	}
	return list
}

// ranksAt is how many ranks share a URL; 0: it is one.
func (w *site) ranksAt(url string) int {
	if n, spoiled := w.ranks[url]; spoiled {
		return n
	}
	for _, e := range w.engines {
		if e.url() == url {
			return e.ranks
		}
	}
	return 0
}

// ready waits until the proxy is ready and has slots on all decode ranks.
func (w *site) ready(ctx context.Context) error {
	want := 0.0
	for _, url := range w.now.decode {
		want += float64(w.now.slots * max(1, w.ranksAt(url)))
	}
	return testbed.Await(ctx, time.Minute, "evenkeel is ready, with free slots on every rank", func() bool {
		if !w.proxy.IsReady() {
			return false
		}
		free := 0.0
		for name, v := range w.books() {
			if strings.HasPrefix(name, "evenkeel_rank_slots{") && strings.Contains(name, `state="free"`) {
				free += v
			}
		}
		return free == want
	})
}

// books are the proxy's metrics; none if it does not answer.
func (w *site) books() map[string]float64 {
	all, _ := w.proxy.Series()
	return all
}

// idle waits until no engine has a request or holds KV, and the proxy's books
// agree. Its limit is less than the 30 s after which a prefill engine gives up
// KV that was not fetched, so what is free was given back.
func (w *site) idle(ctx context.Context, engines ...string) error {
	return testbed.Idle(ctx, 20*time.Second, func() (left []string) {
		clear(w.kept)
		books := w.books()
		for _, name := range engines {
			series, err := w.engines[name].series(ctx)
			if err != nil {
				left = append(left, err.Error())
				continue
			}
			for _, g := range held {
				v := gauge(series, g)
				if g == kvUsage && v != 0 && w.lost(name, series, books) {
					continue
				}
				if v != 0 {
					left = append(left, fmt.Sprintf("%s %s %v", name, g, v))
				}
			}
		}
		return append(left, testbed.Held("evenkeel", books,
			"evenkeel_audit_drift", "evenkeel_rank_kv_tokens", "evenkeel_double_releases_total", "evenkeel_prefill_double_releases_total")...)
	})
}

// lost says whether the proxy counts what an engine keeps of its KV cache as lost, and notes it. It
// counts prompts; the engine's blocks are whole, so that each of at most as many requests as there
// are slots may have a block more.
func (w *site) lost(name string, series, books map[string]float64) bool {
	tokens := 0.0
	for key, v := range books {
		if strings.HasPrefix(key, "evenkeel_bind_orphan_tokens{") && strings.Contains(key, strings.TrimPrefix(w.engines[name].url(), "http://")) {
			tokens += v
		}
	}
	held := blocksUsed(series)
	if tokens == 0 || held > tokens/blockSize+slots {
		return false
	}
	w.kept[name] = fmt.Sprintf("%s keeps %.0f blocks for ever, of which evenkeel's books say %.0f tokens", name, held, tokens)
	return true
}

// stopEngines ends all engines at once.
func (w *site) stopEngines() {
	var all sync.WaitGroup
	for _, e := range w.engines {
		all.Go(func() { e.Stop() })
	}
	all.Wait()
}
