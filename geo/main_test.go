package geo

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/geo/policy"
	"evenkeel/prefill"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1")) // one for the process
}

// queue is an arrival queue that serves nobody and counts who wakes it.
type queue struct{ wakes atomic.Int64 }

func (q *queue) Offers(f func(string, *prefill.Local)) {
	l := prefill.Local{Waiting: 3, Tokens: 600, Prefillers: []prefill.Prefiller{{Live: true, Open: true, Unanswered: 2, Samples: 7}}}
	l.Prefillers[0].ID, l.Prefillers[0].TPMs = "a/0", 0.1
	f("m", &l)
}

func (q *queue) Wake() { q.wakes.Add(1) }

// far is a proxy of another region, as a test wants it.
type far struct {
	*httptest.Server
	change atomic.Pointer[func(a *answer)] // of its answers
	asked  atomic.Int64
}

func newFar(t *testing.T) *far {
	t.Helper()
	f := &far{}
	f.says(func(*answer) {})
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.asked.Add(1)
		var q question
		_ = json.NewDecoder(r.Body).Decode(&q)
		a := answer{Version: "1.0", ID: "eu-1", Boot: "b", Seq: q.Seq, Models: map[string]policy.Offer{"m": {Replicas: 2, NAvail: 2, Free: 8}}}
		(*f.change.Load())(&a)
		text, _ := json.Marshal(a)
		_, _ = w.Write(text)
	}))
	t.Cleanup(f.Close)
	return f
}

func (f *far) says(change func(a *answer)) { f.change.Store(&change) }

// node is us-1 with peers.
func node(t *testing.T, change func(c *Config), peers ...PeerConfig) (*Peers, *queue) {
	t.Helper()
	q := &queue{}
	c := Default()
	// A peer that a busy machine keeps from answering for three intervals is stale.
	c.Self, c.Probe.Interval, c.PromptIndexBytes = Self{"us-1", "us"}, 500*time.Millisecond, 1<<20
	c.FirstByte, c.Idle, c.Connect, c.WholeBytes, c.EventBytes = time.Minute, time.Minute, time.Minute, 1<<20, 1<<20
	c.Peers, c.Queue, c.Log = peers, q, zap.NewNop()
	c.Running, c.Draining = func(string) (float64, int) { return 5, 64 }, func() bool { return false }
	if change != nil {
		change(&c)
	}
	ps, err := New(c)
	require.NoError(t, err)
	ps.Start()
	t.Cleanup(ps.Close)
	return ps, q
}

func entry(t *testing.T, id, at string) PeerConfig {
	t.Helper()
	u, err := url.Parse(at)
	require.NoError(t, err)
	return PeerConfig{ID: id, Region: id[:2], Target: &engine.Target{ID: id, URL: u, Rank: -1}}
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, time.Minute, 2*time.Millisecond)
}

func first(ps *Peers) PeerStatus { return ps.Status().Peers[0] }

func TestAPeerComesUpGoesDownAndIsForgottenWhenItRestarts(t *testing.T) {
	f, asked := newFar(t), make(chan struct{})
	f.says(func(*answer) { <-asked })
	ps, q := node(t, nil, entry(t, "eu-1", f.URL))
	require.Equal(t, -1.0, first(ps).AgeMs)
	require.False(t, ps.Offered("m"), "before the first answer")
	close(asked)
	eventually(t, func() bool { return first(ps).Up })
	require.True(t, ps.Offered("m"))
	require.False(t, ps.Offered("other"))
	ps.cfg.Residency = map[string][]string{"acme": {"us"}, "globex": {"us", "eu"}}
	for tenant, offered := range map[string]bool{"": true, "acme": false, "globex": true} {
		require.Equal(t, offered, ps.OfferedTo(tenant, "m"), tenant)
		require.Equal(t, offered, ps.NewQuery(Ask{Tenant: tenant, Model: "m"}).Offered(), tenant)
	}
	require.False(t, ps.NewQuery(Ask{Model: "m", RegionOnly: true}).Offered(), "it may not leave its region")
	require.Equal(t, []string{"m"}, ps.Models())
	require.True(t, ps.AllUp())
	eventually(t, func() bool { return first(ps).RTTMs > 0 }) // not by the probe that dialled
	require.Positive(t, q.wakes.Load())

	ps.mu.Lock()
	ps.peers[0].reserved.Book(1, 100)
	ps.mu.Unlock()
	f.says(func(a *answer) { a.Boot = "another" })
	eventually(t, func() bool { return first(ps).Reserved == 0 })

	f.CloseClientConnections()
	f.Close()
	eventually(t, func() bool { return !first(ps).Up })
	require.NotEmpty(t, first(ps).Fault)
	require.False(t, ps.Offered("m"))
}

func TestAnswersThatAreNotThePeersOwnAreMisses(t *testing.T) {
	for name, row := range map[string]struct {
		change func(a *answer)
		fault  string
	}{
		"of another proxy":          {func(a *answer) { a.ID = "as-1" }, "it calls itself"},
		"to another question":       {func(a *answer) { a.Seq++ }, "to question"},
		"our own":                   {func(a *answer) { a.ID = "us-1" }, "this proxy's own"},
		"without a name":            {func(a *answer) { a.ID = "" }, "its id, boot"},
		"larger than it may be":     {func(a *answer) { a.Region = string(make([]byte, maxProbe)) }, "larger than"},
		"with a load below nothing": {func(a *answer) { a.Prefill = map[string]prefill.Share{"a/0": {NewTokens: -5000}} }, "below 0"},
		"of more models than it is": {func(a *answer) { many(a, maxModels+1) }, "number of models"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFar(t)
			f.says(row.change)
			ps, _ := node(t, nil, entry(t, "eu-1", f.URL))
			eventually(t, func() bool { return first(ps).Fault != "" })
			require.Contains(t, first(ps).Fault, row.fault)
			require.False(t, first(ps).Up)
		})
	}
}

// What a peer says of itself may be nonsense, or be of a version that is not known here. It gets
// nothing then.
func TestAnOfferThatCannotBeIsNotTaken(t *testing.T) {
	for name, row := range map[string]struct{ version, offer, available string }{
		"a queue below nothing":         {"1.7", `{"replicas":4,"n_avail":4,"free":30,"queue":-5}`, ""},
		"more available than there are": {"1.7", `{"replicas":1,"n_avail":9,"free":30,"queue":0}`, ""},
		"a wait below nothing":          {"1.7", `{"replicas":4,"n_avail":4,"free":30,"queue_wait_ms":-1e9}`, ""},
		"a number nobody can read":      {"1.7", `{"replicas":4,"n_avail":4,"free":30,"load":1e999}`, ""},
		"text for a number":             {"1.7", `{"replicas":"many"}`, ""},
		"of another version":            {"2.0", honest, "version"},
		"of a later version, and sound": {"1.7", honest, "available"},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				var q question
				_ = json.NewDecoder(r.Body).Decode(&q)
				_, _ = fmt.Fprintf(w, `{"v":%q,"id":"eu-1","region":"eu","boot":"b","seq":%d,"proc_us":5,"later":true,"models":{"m":%s}}`, row.version, q.Seq, row.offer)
			}))
			t.Cleanup(s.Close)
			ps, _ := node(t, nil, entry(t, "eu-1", s.URL))
			eventually(t, func() bool {
				p := first(ps)
				return p.Fault != "" || p.Up && p.AgeMs >= 0 || p.Available["m"] == "version"
			})
			taken := ps.NewQuery(Ask{ID: "one", Model: "m"}).Where(nobody(5000)) == prefill.ToThere
			require.Equal(t, row.available == "available", taken)
			if row.available != "" {
				require.Equal(t, row.available, first(ps).Available["m"])
			}
			require.Equal(t, row.available == "available", first(ps).Up && first(ps).Available["m"] == "available")
			if row.available == "version" {
				require.False(t, ps.Offered("m"), "a request for the model would wait until its time in the queue is over")
				require.False(t, ps.AllUp(), "the model may be there")
			}
		})
	}
}

// The answer of a sibling changes which prefill engines look busy, and who owns a region or a
// group.
func TestAPeerIsOfTheRegionThatTheConfigSays(t *testing.T) {
	f := newFar(t)
	f.says(func(a *answer) { a.Region = "us" })
	heard := make(chan ProbeReport, 1)
	node(t, func(c *Config) {
		c.OnProbe = func(h ProbeReport) {
			select {
			case heard <- h:
			default:
			}
		}
	}, entry(t, "eu-1", f.URL))
	require.Equal(t, "eu", (<-heard).Region)
}

// Its process is not known yet, so that it would refuse every request but a probe.
func TestAPeerThatHasNotAnsweredIsAskedNothing(t *testing.T) {
	calls := make(chan string, 100)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls <- r.URL.Path
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	t.Cleanup(s.Close)
	ps, _ := node(t, func(c *Config) { c.Probe.Interval = time.Minute }, entry(t, "eu-1", s.URL))
	require.ErrorContains(t, ps.AskVote(t.Context(), "eu-1", Vote{}), "not among the peers that answer")
	require.Equal(t, ProbePath, <-calls)
	require.Empty(t, calls)
}

const honest = `{"replicas":4,"n_avail":4,"free":30,"queue":0,"queue_wait_ms":0,"queued_new_tokens":0,"running":0,"load":0,"tp_ms":0.001,"t0_ms":0.1}`

func many(a *answer, n int) {
	for i := range n {
		a.Models[string(rune('a'+i%26))+string(rune('a'+i/26))] = policy.Offer{}
	}
}

func TestPeersAreFoundByName(t *testing.T) {
	one, two := newFar(t), newFar(t)
	one.says(func(a *answer) { a.ID, a.Boot = "eu-one", "1" })
	two.says(func(a *answer) { a.ID, a.Boot = "eu-two", "2" })
	e := entry(t, "eu", "http://eu.example:9443")
	e.Discover = ByA
	ps, _ := node(t, func(c *Config) {
		c.Lookup = func(context.Context, Discovery, string, string) ([]string, error) {
			return []string{one.Listener.Addr().String(), two.Listener.Addr().String()}, nil
		}
	}, e)
	eventually(t, func() bool { s := ps.Status(); return len(s.Peers) == 2 && s.Peers[0].Up && s.Peers[1].Up })
	_, ok := ps.certificateNames("eu-two")
	require.True(t, ok)
	_, ok = ps.certificateNames("europe")
	require.False(t, ok)
	ps.syncDiscovered(&ps.cfg.Peers[0], []string{two.Listener.Addr().String()})
	s := ps.Status()
	require.Len(t, s.Peers, 1)
	require.Equal(t, "eu-two", s.Peers[0].Name)
	require.True(t, s.Peers[0].Up, "it stays what it was")
}

func TestAPeerThatIsGoneLeavesNoSeriesBehind(t *testing.T) {
	one := newFar(t)
	one.says(func(a *answer) { a.ID = "eu-one" })
	at := one.Listener.Addr().String()
	e := entry(t, "eu", "http://eu.example:9443")
	e.Discover = ByA
	reg := prometheus.NewRegistry()
	ps, _ := node(t, func(c *Config) {
		c.Registerer = reg
		c.Lookup = func(context.Context, Discovery, string, string) ([]string, error) { return []string{at}, nil }
	}, e)
	series := func() (names []string) {
		all, err := reg.Gather()
		require.NoError(t, err)
		for _, f := range all {
			for _, m := range f.Metric {
				if strings.Contains(m.String(), at) || strings.Contains(m.String(), "eu-one") {
					names = append(names, f.GetName())
				}
			}
		}
		return names
	}
	eventually(t, func() bool { return ps.Offered("m") })
	f := forwarded(t, ps)
	ps.CountReceived("eu-one", "ok")
	require.Contains(t, series(), "evenkeel_geo_received_total")
	require.Contains(t, series(), "evenkeel_geo_forwards_inflight")
	ps.syncDiscovered(&ps.cfg.Peers[0], nil)
	require.Contains(t, series(), "evenkeel_geo_forwards_inflight", "while a forward is there")
	f.DropUnsent()
	require.Empty(t, series())

	ps.syncDiscovered(&ps.cfg.Peers[0], []string{at})
	eventually(t, func() bool { return ps.Offered("m") })
	old := forwarded(t, ps)
	ps.syncDiscovered(&ps.cfg.Peers[0], nil)
	ps.syncDiscovered(&ps.cfg.Peers[0], []string{at})
	ps.CountReceived("eu-one", "ok")
	eventually(t, func() bool { return ps.Offered("m") })
	old.DropUnsent()
	require.Contains(t, series(), "evenkeel_geo_forwards_total", "it is there again")
	require.Contains(t, series(), "evenkeel_geo_received_total")
}

func TestAPeerThatComesBackHasNoNewBudget(t *testing.T) {
	one := newFar(t)
	one.says(func(a *answer) { a.ID = "eu-one" })
	at := one.Listener.Addr().String()
	e := entry(t, "eu", "http://eu.example:9443")
	e.Discover = ByA
	ps, _ := node(t, func(c *Config) {
		c.Egress.DailyUSD = 1
		c.Lookup = func(context.Context, Discovery, string, string) ([]string, error) { return []string{at}, nil }
	}, e)
	eventually(t, func() bool { return ps.Offered("m") })
	f := forwarded(t, ps)
	ps.syncDiscovered(&ps.cfg.Peers[0], nil)
	f.updatePeer(OutcomeOK, "", 2, time.Now())
	f.DropUnsent()
	ps.syncDiscovered(&ps.cfg.Peers[0], []string{at})
	eventually(t, func() bool { return ps.Offered("m") })
	require.Equal(t, 2.0, first(ps).USDToday, "its forwards have cost this much, some of them while it was gone")
	require.Equal(t, policy.BudgetSpent.String(), first(ps).Available["m"])
}

func TestWhatThisRegionOffers(t *testing.T) {
	ps, _ := node(t, nil)
	text, refusal := ps.AnswerProbe([]byte(`{"v":"1.9","id":"eu-1","boot":"x","seq":812,"t_us":1,"later":[]}`), time.Now())
	require.Nil(t, refusal)
	var a answer
	require.NoError(t, json.Unmarshal(text, &a))
	require.Equal(t, uint64(812), a.Seq)
	o := a.Models["m"]
	require.Equal(t, []int{1, 1, 6, 3, 7}, []int{o.Replicas, o.NAvail, o.Free, o.Queue, o.FitN})
	require.Equal(t, 5.0, o.Running)
	require.NotContains(t, string(text), "tenant")
	_, refusal = ps.AnswerProbe([]byte("no probe"), time.Now())
	require.Equal(t, RejectVersion, refusal.Reject)
}

// Adapters come and go, so that a proxy may see any number of names.
func TestANewModelIsOfferedAfterManyOthers(t *testing.T) {
	ps, _ := node(t, nil)
	ps.mu.Lock()
	for i := range maxModelStates {
		ps.stateOf(fmt.Sprint(i))
	}
	ps.mu.Unlock()
	require.Contains(t, ps.localOffers(), "m")
	require.Len(t, ps.models, maxModelStates)
}

func TestReceipts(t *testing.T) {
	require.InDelta(t, 0.000009262, usd(13_100, 180_000, 0.02, 0.05), 1e-15)
	var r receipts
	for i := range maxReceipts + 5 {
		r.add(&Receipt{BytesOut: int64(i)})
	}
	last := r.last(3)
	require.Equal(t, []int64{maxReceipts + 4, maxReceipts + 3, maxReceipts + 2}, []int64{last[0].BytesOut, last[1].BytesOut, last[2].BytesOut})
	require.Len(t, r.last(1<<30), maxReceipts)
}

func TestABudgetIsForADay(t *testing.T) {
	var s spending
	day := time.Date(2030, 1, 1, 23, 59, 0, 0, time.UTC)
	s.add(3, day)
	require.Equal(t, 5.0, s.add(2, day))
	require.Equal(t, 1.0, s.add(1, day.Add(2*time.Minute)))
}

func TestNamesOfAPeersModelsAreChecked(t *testing.T) {
	for _, list := range []string{`"models":{"m\u001b[2J":{}}`, `"models":{"":{}}`, `"decodes":["m\n"]`} {
		_, err := readAnswer([]byte(`{"v":"1.0","id":"eu-1","boot":"b","seq":1,` + list + `}`))
		require.ErrorIs(t, err, ErrProbe, list)
	}
}

func FuzzReadAnswer(f *testing.F) {
	f.Add([]byte(`{"v":"1.0","id":"eu-1","boot":"b","seq":1,"models":{"m":{"free":1e18,"queue":-1}}}`))
	f.Add([]byte(`{"models":{"m":null}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		a, err := readAnswer(text)
		if err != nil {
			return
		}
		for _, o := range a.Models {
			if o.Free > maxFree {
				t.Fatalf("%d places were believed", o.Free)
			}
		}
	})
}

// Adapters come and go under ever new names. Models beyond the first maxModels are never counted,
// however many rounds there are.
func TestReasonsOfManyModelsAreBounded(t *testing.T) {
	ps, _ := node(t, nil, entry(t, "eu-1", "http://127.0.0.1:1"))
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.peers[0]
	counted := func() float64 {
		var m dto.Metric
		require.NoError(t, ps.metrics.unavailable.WithLabelValues(p.id, policy.Down.String()).Write(&m))
		return m.GetCounter().GetValue()
	}
	before, recorded := counted(), len(p.reasons)
	for range 3 {
		for i := range maxModels + 10 {
			ps.recordReason(p, fmt.Sprint("adapter-", i), policy.Down)
		}
	}
	require.Equal(t, before+float64(maxModels-recorded), counted())
}

var _ io.Reader = (*Forward)(nil)
