package request

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	stdlog "log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"

	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/openai"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/local"
)

func TestMain(m *testing.M) {
	at := "24" // these tests wait more than they compute
	if race.Enabled {
		at = "10"
	}
	if err := flag.Set("test.parallel", at); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// A bed is a server with reference engines and a listener. No monitor looks at the engines, and no
// door stands in front of it: what a request may be is checked elsewhere.
type bed struct {
	*server
	t     *testing.T
	p, d  []*refengine.Engine // they prefill, and decode
	route roster.Route
	url   string
	ln    *edge.Listener
	drain func() error // ends the listener, and the server behind it

	fill    []*engine.Target // the ranks that prefill
	workers []board.Worker   // the decode ranks

	late bool // as in setup

	mu      sync.Mutex
	asked   []*Incoming
	paid    atomic.Int64 // tokens by which the estimates of callers were corrected
	options Options      // of the next request
	key     string       // of the caller
	shown   []byte       // what clients have read since there was no stream
	streams int          // clients that are to read one

	lateness func() time.Duration // see refclient.Lateness; nil: nobody has asked yet
}

// setup is what a bed is made of. The zero value is one prefill engine and one decode engine of one
// rank, with the connector that profiles have if nobody says another.
type setup struct {
	prefill, decode []refengine.Config
	mixed           []refengine.Config // engines that prefill and decode; with any, there are no others unless they are named
	groups          []string           // of those; nil: they are of one group
	second          string             // the kind of engines that comes second, if there are both; empty: those that prefill and decode
	profile         mooncake.Profile
	configure       func(*config.Config, *Deps)
	route           roster.Route
	// ranks behind one address heed their name at each endpoint
	pins bool
	// requests wait for a free slot; else each goes on to a rank at once
	waits bool
	// decode engines may pull KV that was given away: the test says that no answer is made of it
	late    bool
	gauged  bool                                                              // the gauges of decode engines are read, all the time
	address func(at string) string                                            // where an engine is reached instead; nil: where it is
	front   func(w http.ResponseWriter, r *http.Request, engine http.Handler) // stands in front of each engine; nil: nothing does
}

const refModel = "ref"

// patience is how long a test waits for what takes milliseconds, unless the machine has much else
// to do.
const patience = time.Minute

func start(t *testing.T, o setup) *bed {
	t.Helper()
	if o.prefill == nil && o.mixed == nil {
		o.prefill = []refengine.Config{{}}
	}
	if o.decode == nil && o.mixed == nil {
		o.decode = []refengine.Config{{}}
	}
	b := &bed{t: t, route: o.route, late: o.late}
	b.route.Name, b.route.Board, b.route.Prefill, b.route.Decode = refModel, refModel, true, true
	b.route.AllAggregated = o.prefill == nil && o.decode == nil
	b.server = newServer(t, func(cfg *config.Config, deps *Deps) {
		cfg.Dispatch.Window, cfg.Prefill.Retry.Base = 100*time.Microsecond, time.Millisecond
		cfg.Dispatch.TickLimit = patience                             // on a busy machine no other policy stands in
		cfg.Limits.ConnectTimeout = patience                          // a busy machine accepts connections late
		cfg.Prefill.Policy, cfg.Dispatch.Policy = "round-robin", "rr" // whoever failed is not asked again at once
		if o.profile.Connector == mooncake.AscendLayerwise {
			deps.Callbacks = metaserver.New(metaserver.Config{
				Listen: "127.0.0.1:0", Advertise: func() string { return "" }, Allowed: func(netip.Addr) bool { return true }, Connections: 100,
				Registerer: deps.Registerer, Log: deps.Log,
			})
			require.NoError(t, deps.Callbacks.Start())
			t.Cleanup(deps.Callbacks.Close)
		}
		if o.waits {
			cfg.Dispatch.Policy = "pjsq-kv"
		}
		if o.configure != nil {
			o.configure(cfg, deps)
		}
	})
	o.profile.ChatResume = cmp.Or(o.profile.ChatResume, mooncake.ChatResumeNone) // a test whose chats go on says how
	profile := o.profile.WithDefaults()
	for _, c := range o.prefill {
		c.Role = refengine.Prefill
		b.p = append(b.p, b.engine(c, &profile))
	}
	for _, c := range o.decode {
		c.Role = refengine.Decode
		b.d = append(b.d, b.engine(c, &profile))
	}
	var candidates []prefill.Candidate
	for i, e := range b.p {
		p := profile
		if p.Connector == mooncake.SGLang || p.Connector == mooncake.VLLMMooncake { // a reference engine is met at its own port
			_, port, _ := strings.Cut(strings.TrimPrefix(e.URLs()[0], "http://"), ":")
			p.BootstrapPort, _ = strconv.Atoi(port)
		}
		id := fmt.Sprintf("p%d", i)
		b.engines.prefills = e.Config().DPSize
		for rank := range b.engines.prefills {
			c := prefill.Candidate{
				ID: fmt.Sprintf("%s/%d", id, rank), Instance: "prefill " + id, Target: b.target(id, e.URLs()[0], o), Profile: &p,
				Models: []string{refModel}, Board: refModel, Live: true,
				Fallback: o.second == config.PreferPD, CapacityTokens: int64(o.prefill[i].KV.Tokens),
			}
			if e.Config().DPSize > 1 {
				c.Target.Rank = rank
			}
			b.fill = append(b.fill, c.Target)
			candidates = append(candidates, c)
		}
	}
	b.engines.ranks = map[int32]*roster.Rank{}
	for i, e := range b.d {
		b.ranksOf(e, roster.Rank{Instance: fmt.Sprintf("decode d%d", i), Profile: &profile, Board: refModel}, board.Worker{
			Engine: fmt.Sprintf("d%d", i), Early: profile.Early(), KeepsKVFor: profile.Keeps(), Barrier: o.waits,
			Capacity: int64(o.decode[i].KV.Tokens),
		}, o)
	}
	alone := mooncake.Profile{Connector: mooncake.None, ChatResume: profile.ChatResume,
		FirstEventTimeout: profile.FirstEventTimeout}.WithDefaults()
	for i, c := range o.mixed {
		c.Role = refengine.Aggregated
		e, group := b.engine(c, &mooncake.Profile{}), "main"
		b.d = append(b.d, e)
		if o.groups != nil {
			group = o.groups[i]
		}
		b.ranksOf(e, roster.Rank{Instance: fmt.Sprintf("aggregated m%d", i), Profile: &alone, Board: mixedBoard, Group: group}, board.Worker{
			Engine: fmt.Sprintf("m%d", i), Group: group, Mixed: true, Barrier: o.waits,
		}, o)
		if known := func(c prefill.Candidate) bool { return c.ID == group }; !slices.ContainsFunc(candidates, known) {
			first := b.engines.ranks[b.workers[len(b.workers)-1].ID]
			candidates = append(candidates, prefill.Candidate{
				ID: group, Instance: group, Target: first.Target, Profile: &alone, Models: []string{refModel}, Board: mixedBoard, Live: true,
				Aggregated: true, Fallback: o.prefill != nil && o.second != config.PreferPD,
			})
		}
	}
	if o.gauged {
		b.readGauges()
	}
	b.Prefill.SetCandidates(candidates)
	b.Dispatcher.SetWorkers(b.workers)
	if profile.AllowLocalPrefill || o.mixed != nil {
		var ranks []local.Rank
		for _, w := range b.workers {
			if profile.AllowLocalPrefill || w.Mixed {
				ranks = append(ranks, local.Rank{ID: w.ID, Name: w.Name, Model: w.Model, Engine: w.Engine, Up: true})
			}
		}
		b.LocalRanks.Set(ranks)
	}
	b.listen()
	return b
}

// mixedBoard is the board of the ranks that prefill and decode.
const mixedBoard = refModel + "+aggregated"

// ranksOf has the ranks of an engine take requests: all are like this rank and this worker.
func (b *bed) ranksOf(e *refengine.Engine, like roster.Rank, w board.Worker, o setup) {
	n := e.Config().DPSize
	like.Context = 131072
	for i := range n {
		r, name, at := like, w.Engine, e.URLs()[0]
		if n > 1 {
			name = fmt.Sprintf("%s/%d", w.Engine, i)
		}
		if e.Config().DPMode != "internal" {
			at = e.URLs()[i]
		}
		r.Worker, r.Target = int32(len(b.workers)), b.target(name, at, o)
		if e.Config().DPMode == "internal" && n > 1 {
			r.Target.Rank = i
		}
		r.Traffic, r.Signs, r.PinsResponses = &engine.Traffic{}, engine.NewLiveness(), o.pins
		b.engines.ranks[r.Worker] = &r
		w.Unpinned = !r.EngineHonoursRank(mooncake.Responses)
		w.ID, w.Name, w.Model, w.Slots, w.Up = r.Worker, name, r.Board, e.Config().Slots, true
		b.workers = append(b.workers, w)
	}
}

// engine is a reference engine whose times do not hold a test up.
func (b *bed) engine(c refengine.Config, p *mooncake.Profile) *refengine.Engine {
	c.Connector = cmp.Or(refengine.Connector(p.Connector), c.Connector)
	for _, d := range []*time.Duration{&c.Steps.C0, &c.Prompts.Base} {
		*d = cmp.Or(*d, time.Millisecond)
	}
	c.Steps.C1, c.Prompts.PerToken, c.KV.TransferPer = cmp.Or(c.Steps.C1, 1), cmp.Or(c.Prompts.PerToken, 1), 1
	c.KV.TransferBase = max(c.KV.TransferBase, 100*time.Microsecond)
	c.Answers.PromptTokensDetails = true
	c.Hooks.OnBreak = b.untilRead
	e, err := refengine.Start(c)
	require.NoError(b.t, err)
	b.t.Cleanup(e.Close)
	return e
}

func (b *bed) target(id, at string, o setup) *engine.Target {
	if o.address != nil {
		at = o.address(at)
	}
	u, err := url.Parse(at)
	require.NoError(b.t, err)
	if front := o.front; front != nil {
		through := httputil.NewSingleHostReverseProxy(u)
		through.Transport, through.FlushInterval, through.ErrorLog = &http.Transport{DisableKeepAlives: true}, -1, stdlog.New(io.Discard, "", 0)
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { front(w, r, through) }))
		b.t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
		u, err = url.Parse(srv.URL)
		require.NoError(b.t, err)
	}
	return &engine.Target{ID: id, URL: u, Rank: -1}
}

// listen serves requests to a path of an endpoint as they come.
func (b *bed) listen() {
	limits := &b.Settings().Limits
	ln, err := edge.Listen("127.0.0.1:0", edge.ListenOptions{
		MaxConns: 1000, Log: b.Log, WriteTimeout: limits.WriteTimeout, MaxLag: limits.ClientLag, SendBuffer: limits.ClientBacklog,
	})
	require.NoError(b.t, err)
	s := edge.NewServer(edge.Options{Handler: b.handle, Log: b.Log, MaxBody: 1 << 20, Concurrency: 1000, IdleTimeout: limits.IdleTimeout})
	over := make(chan struct{})
	go func() { defer close(over); _ = s.Serve(ln) }()
	b.drain = sync.OnceValue(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		err := edge.Drain(ctx, s, ln)
		<-over
		return err
	})
	b.t.Cleanup(func() { require.NoError(b.t, b.drain()) })
	b.ln, b.url = ln, "http://"+ln.Addr().String()
}

func (b *bed) handle(ctx *fasthttp.RequestCtx) {
	b.mu.Lock()
	in := b.BeginRequest(journal.LogEntry{ID: NewID(), Arrival: time.Now(), Key: b.key})
	in.CorrectEstimate, in.Options = func(tokens int) { b.paid.Add(int64(tokens)) }, b.options
	b.asked = append(b.asked, in)
	b.mu.Unlock()
	endpoint := mooncake.Chat
	for _, e := range []mooncake.Endpoint{mooncake.Completions, mooncake.Responses, mooncake.Messages, mooncake.Tokens, mooncake.Generate} {
		if string(ctx.Path()) == e.Path() {
			endpoint = e
		}
	}
	req, fail := openai.Parse(endpoint, bytes.Clone(ctx.PostBody()), openai.Limits{})
	in.Record.OpenViews(func(string) string { return "" }, false, endpoint.Path())
	in.Record.Report(journal.Event{Kind: journal.Parsed, Req: req})
	if fail == nil && !b.route.AllAggregated {
		fail = req.CheckSplit(b.route.PromptLogprobs)
	}
	if fail == nil {
		fail = b.Prompts.CheckBeforePrefill(b.route, req, req.Parts())
	}
	if fail == nil {
		fail = b.Serve(ctx, in, req, b.route, req.Parts())
	}
	if fail != nil {
		b.Refuse(ctx, in, fail)
	}
}

// over waits until every request is told of.
func (b *bed) over() {
	b.t.Helper()
	b.eventually("no request is open", func() bool { return b.Open() == 0 })
}

// settle waits until nothing is under way, and holds that nothing is held then. The bed takes no
// requests any more.
func (b *bed) settle() {
	b.t.Helper()
	b.over()
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	b.Finish(ctx)()
	require.NoError(b.t, ctx.Err())
	b.eventually("no place is taken", func() bool { return b.Places.Used() == 0 }) // it is given back just after its entry is answered
	require.Zero(b.t, b.move(""), "no call is kept")
	require.Zero(b.t, b.monitor.accused)
	require.Zero(b.t, b.resumeBytes.Load())
	b.eventually("no callback is expected", func() bool { return b.Callbacks.Expected() == 0 })
	for _, c := range b.Prefill.Status() {
		require.Zero(b.t, c.Inflight+c.Pooled+c.Dispatched, c.ID)
	}
	status := b.Dispatcher.Status(ctx)
	for _, m := range status.Models {
		require.Zero(b.t, m.Pool)
		for _, w := range m.Workers {
			require.Zero(b.t, w.Used, w.Name)
		}
	}
	require.Zero(b.t, status.Drift)
	require.Zero(b.t, b.metric(b.t, "evenkeel_audit_drift", "handoffs"))
	require.Zero(b.t, b.metric(b.t, "evenkeel_double_releases_total", "")+b.metric(b.t, "evenkeel_prefill_double_releases_total", ""))
	for _, e := range slices.Concat(b.p, b.d) {
		b.eventually("nothing runs on an engine", func() bool { st := e.Stats(); return st.Running+st.Waiting == 0 })
		st := e.Stats()
		if b.late {
			st.ExpiredPulls, st.OutlivedWrites, st.FreedWrites = 0, 0, 0
		}
		type harm struct{ Replays, ExpiredPulls, WrongBlocks, BadHits, Crashes, DuplicateIDs, RankMismatch int64 }
		require.Zero(b.t, harm{
			Replays: st.Replays, ExpiredPulls: st.ExpiredPulls, WrongBlocks: st.WrongBlocks, BadHits: st.BadHits, Crashes: st.Crashes,
			DuplicateIDs: st.DuplicateIDs, RankMismatch: st.RankMismatch,
		})
		type mix struct{ MixedPushes, FreedWrites, SampledApart, OutlivedWrites int64 }
		require.Zero(b.t, mix{
			MixedPushes: st.MixedPushes, FreedWrites: st.FreedWrites, SampledApart: st.SampledApart, OutlivedWrites: st.OutlivedWrites,
		})
	}
}

// clean settles what no engine was to spoil: no hand-off was lost, and no engine keeps or computed
// anything that the proxy does not know of.
func (b *bed) clean() {
	b.t.Helper()
	b.settle()
	locals := int64(b.locals())
	for _, c := range b.Prefill.Status() {
		require.Zero(b.t, c.KVTokens, c.ID)
	}
	for _, e := range slices.Concat(b.p, b.d) {
		b.eventually("no hand-off is kept", func() bool { return e.Stats().Pins == 0 })
		st := e.Stats()
		type loss struct{ Leaks, Unknown, KeyMismatches, InTransfer, Unpinned, OverAdmitted int64 }
		require.Zero(b.t, loss{
			Leaks: st.Leaks, Unknown: st.Unknown, KeyMismatches: st.KeyMismatches, InTransfer: st.InTransfer, Unpinned: st.Unpinned,
			OverAdmitted: st.OverAdmitted,
		})
		locals -= st.LocalPrefills
	}
	require.GreaterOrEqual(b.t, locals, int64(0), "prompts that decode ranks computed and the proxy did not count")
}

var verdicts = [...]string{engine.Faulted: "faulted", engine.Silent: "silent", engine.Unclear: "unclear"}

// fate says in words what became of a request, of its hand-offs and of the name of its engines: how
// often they prefilled only with prefills, and who was reported, or failed at a prefill, only with
// blame. Of two legs that run at once, either may end first, so that these may differ.
func (b *bed) fate(got string, in *Incoming, prefills, blame bool) string {
	words := []string{got}
	note := func(n int, format string, args ...any) {
		if n > 0 {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	note(in.Record.Attempts-1, "%d attempts", in.Record.Attempts)
	if n := b.probes(); prefills {
		note(n-1, "%d prefills", n)
		note(1-n, "no prefill")
	}
	words = append(words, b.discarded()...)
	note(b.orphans(), "%d left to the hold", b.orphans())
	for _, c := range b.Prefill.Status() {
		if !blame {
			break
		}
		note(c.Failures, "%s failed", strings.TrimSuffix(c.ID, "/0"))
	}
	for _, id := range slices.Sorted(maps.Keys(b.monitor.judged)) {
		for _, v := range b.monitor.judged[id] {
			if v != engine.Served {
				words = append(words, strings.TrimPrefix(id, "decode ")+" "+verdicts[v])
			}
		}
	}
	for _, id := range b.monitor.broken {
		if !blame {
			break
		}
		_, name, _ := strings.Cut(id, " ")
		words = append(words, name+" reported")
	}
	return strings.Join(words, ", ")
}

// orphans are the hand-offs that were left to prefill engines.
func (b *bed) orphans() (n int) {
	for _, c := range b.Prefill.Status() {
		n += c.Orphans
	}
	return n
}

// pins are the hand-offs that prefill engines still keep for somebody.
func (b *bed) pins() (n int) {
	for _, e := range b.p {
		n += e.Stats().Pins
	}
	return n
}

// probes are those that prefill engines had.
func (b *bed) probes() (n int) {
	for _, e := range b.p {
		n += int(e.Stats().Probes)
	}
	return n
}

// discarded says what became of discarded hand-offs.
func (b *bed) discarded() (all []string) {
	for _, outcome := range []string{"drained", "unplaced", "crowded", "expired", "failed", "refused"} {
		all = append(all, slices.Repeat([]string{outcome}, int(b.metric(b.t, "evenkeel_drains_total", outcome)))...)
	}
	return all
}

// readGauges has a monitor read the gauges of decode engines. What it says of them otherwise is not
// heard.
func (b *bed) readGauges() {
	m := engine.NewMonitor(engine.MonitorConfig{Client: b.Client, Registerer: b.registry, HealthInterval: 20 * time.Millisecond,
		FactsInterval: 50 * time.Millisecond})
	var list []engine.Instance
	for _, r := range b.engines.ranks {
		list = append(list, engine.Instance{ID: r.Instance, Role: roster.Decode, Target: r.Target, Canaries: []*engine.Target{r.Target}})
		r.Traffic = m.Traffic(r.Instance)
		r.Signs = r.Traffic.Liveness(r.Target.Rank)
	}
	m.Set(list)
	ctx, stop := context.WithCancel(b.t.Context())
	over := make(chan struct{})
	go func() { defer close(over); m.Run(ctx) }()
	b.t.Cleanup(func() { stop(); <-over })
	b.eventually("gauges are read", func() bool {
		return !slices.ContainsFunc(list, func(in engine.Instance) bool {
			_, read := m.Gauges(in.ID, in.Target.Rank)
			return !read
		})
	})
}
