package geo

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/geo/policy"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// served is a peer eu-1 with so many free places that serves requests as a test
// wants and answers probes as long as it is alive.
func served(t *testing.T, free int, serve http.HandlerFunc) (url string, alive *atomic.Bool) {
	t.Helper()
	alive = &atomic.Bool{}
	alive.Store(true)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path != ProbePath:
			serve(w, r)
		case !alive.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		default:
			var q question
			_ = json.NewDecoder(r.Body).Decode(&q)
			text, _ := json.Marshal(answer{Version: "1.0", ID: "eu-1", Boot: "b", Seq: q.Seq,
				Models: map[string]policy.Offer{"m": {Replicas: 1, NAvail: 1, Free: free, TPMs: 0.01, T0Ms: 1}}})
			_, _ = w.Write(text)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, alive
}

// nobody is a region without prefillers.
func nobody(round uint64) *prefill.Here {
	now := time.Now()
	return &prefill.Here{Model: "m", Now: now, Since: now, Round: round, Tokens: 100}
}

// forwarded asks for a request's place until it is the peer.
func forwarded(t *testing.T, ps *Peers) *Forward {
	t.Helper()
	q := ps.NewQuery(Ask{ID: "r", Model: "m", Tenant: "acme"})
	for round := uint64(1000); ; round++ {
		if q.Where(nobody(round)) == prefill.ToThere {
			return q.Forward()
		}
		require.Less(t, round, uint64(4000), "it is never forwarded")
		time.Sleep(time.Millisecond)
	}
}

func hang(_ http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body) // else the server does not notice that the caller left
	<-r.Context().Done()
}

var stream = &Request{Method: http.MethodPost, Target: "/v1/chat/completions", Body: [][]byte{[]byte(`{"stream":true}`)}, Stream: true}

func TestASilentPeerGivesTheRequestBack(t *testing.T) {
	url, _ := served(t, 8, hang)
	ps, _ := node(t, func(c *Config) { c.FirstByte = 50 * time.Millisecond }, entry(t, "eu-1", url))
	_, fail := forwarded(t, ps).Send(stream)
	require.Equal(t, causeTimeout, fail.Reason)
	require.Equal(t, OutcomeFallback, ps.Receipts(1)[0].Outcome)
	require.Zero(t, first(ps).InFlight)
}

func TestWhatIsAtAPeerThatGoesDownComesBackAtOnce(t *testing.T) {
	url, alive := served(t, 8, hang)
	ps, _ := node(t, func(c *Config) { c.FirstByte = time.Minute }, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	alive.Store(false)
	_, fail := f.Send(stream)
	require.Equal(t, causeDown, fail.Reason)
	require.Equal(t, "closed", first(ps).Circuit)
}

func TestAClientThatLeavesEndsTheForward(t *testing.T) {
	left := make(chan struct{})
	url, _ := served(t, 8, func(w http.ResponseWriter, r *http.Request) {
		hang(w, r)
		close(left)
	})
	ps, _ := node(t, func(c *Config) { c.FirstByte = time.Minute }, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	time.AfterFunc(20*time.Millisecond, f.AbortByClient)
	_, fail := f.Send(stream)
	require.True(t, fail.ClientLeft)
	<-left
	require.Equal(t, OutcomeGone, ps.Receipts(1)[0].Outcome)
	f.DropUnsent() // too late: it changes nothing
	require.Len(t, ps.Receipts(9), 1)
}

// The time until a first event would be late is more than a time.Duration can hold.
func TestARequestThatIsPredictedToTakeForeverStaysUnanswered(t *testing.T) {
	asked := make(chan struct{})
	url, _ := served(t, 8, func(w http.ResponseWriter, r *http.Request) {
		close(asked)
		hang(w, r)
	})
	ps, _ := node(t, func(c *Config) { c.Policy, c.FirstByte = "skylb", time.Minute }, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	f.predicted.Prefill = 1e15
	go func() {
		<-asked
		time.Sleep(20 * time.Millisecond) // longer than a timer of no time needs
		if unanswered := first(ps).Unanswered; unanswered != 1 {
			t.Errorf("%d requests are unanswered, want 1", unanswered)
		}
		f.AbortByClient()
	}()
	_, fail := f.Send(&Request{Method: http.MethodPost, Target: "/v1/completions"})
	require.True(t, fail.ClientLeft)
}

// The next probe would wake the queue, too, but only after an interval.
func TestAForwardThatEndsWithoutAnAnswerMakesRoomAtOnce(t *testing.T) {
	url, _ := served(t, 8, hang)
	ps, q := node(t, func(c *Config) { c.Probe.Interval = time.Second }, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	ps.mu.Lock()
	for range 100 {
		f.peer.trust.Failed(ps.sinceStartMs(time.Now()))
	}
	ps.mu.Unlock()
	require.Equal(t, []int{1, 1}, []int{first(ps).Unanswered, first(ps).Window})
	wakes := q.wakes.Load()
	f.DropUnsent()
	require.Greater(t, q.wakes.Load(), wakes)
}

func TestAPlaceIsTakenUntilAProbeHasSeenIt(t *testing.T) {
	url, _ := served(t, 1, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	ps, _ := node(t, func(c *Config) { c.Probe.Interval = time.Second }, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	require.Equal(t, 1, first(ps).Reserved)
	q := ps.NewQuery(Ask{ID: "second", Model: "m"})
	require.NotEqual(t, prefill.ToThere, q.Where(nobody(5000)), "there was one place")
	f.DropUnsent()
}

func TestFiveFallbacksTakeAPeerOut(t *testing.T) {
	url, _ := served(t, 100, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
	ps, _ := node(t, nil, entry(t, "eu-1", url))
	for range 5 {
		require.Equal(t, "closed", first(ps).Circuit)
		_, fail := forwarded(t, ps).Send(stream)
		require.Equal(t, causeStatus, fail.Reason)
	}
	require.Equal(t, "open", first(ps).Circuit)
	require.Equal(t, policy.CircuitOpen.String(), first(ps).Available["m"])
}

// A peer that has unloaded an adapter says so until its next probe does. That speaks against none
// of its other models.
func TestAPeerWithoutTheModelIsNotTakenOut(t *testing.T) {
	url, _ := served(t, 100, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(RejectHeader, RejectModel)
		w.WriteHeader(http.StatusNotFound)
	})
	ps, _ := node(t, nil, entry(t, "eu-1", url))
	for range 6 {
		_, fail := forwarded(t, ps).Send(stream)
		require.Equal(t, RejectModel, fail.Reason)
		require.Nil(t, fail.Relay, "the request comes back")
		require.Equal(t, "closed", first(ps).Circuit)
	}
}

func TestTheDaysBudgetEndsForwards(t *testing.T) {
	url, _ := served(t, 100, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
	e := entry(t, "eu-1", url)
	e.PriceOut = 1e9 // a dollar a byte
	ps, _ := node(t, func(c *Config) { c.Egress.DailyUSD = 10 }, e)
	_, fail := forwarded(t, ps).Send(stream)
	require.NotNil(t, fail)
	require.Greater(t, ps.Receipts(1)[0].USD, 10.0)
	require.Equal(t, policy.BudgetSpent.String(), first(ps).Available["m"])
}

func TestNoClientTakesAPeerOut(t *testing.T) {
	url, _ := served(t, 100, hang)
	ps, _ := node(t, nil, entry(t, "eu-1", url))
	for name, row := range map[string]struct {
		ask   Request
		cause string
	}{
		"by a path that nobody takes": {Request{Method: http.MethodPost, Target: "http://eu/v1", Stream: true}, causeUnfit},
		"by having no patience":       {Request{Method: http.MethodPost, Target: "/v1/completions", Stream: true, Deadline: time.Now().Add(time.Millisecond)}, RejectDeadline},
	} {
		for range 6 {
			_, fail := forwarded(t, ps).Send(&row.ask)
			require.Equal(t, row.cause, fail.Reason, name)
		}
		require.Equal(t, "closed", first(ps).Circuit, name)
	}
}

func TestAPeerThatOffersWhatItHasNotGotGetsFewRequests(t *testing.T) {
	url, _ := served(t, 1<<16, hang)
	ps, _ := node(t, nil, entry(t, "eu-1", url))
	sent := []*Forward{forwarded(t, ps)}
	ask := func(asked int) {
		for i := range asked {
			q := ps.NewQuery(Ask{ID: fmt.Sprint(i), Model: "m", Tenant: "acme"})
			if q.Where(nobody(uint64(10_000+i))) == prefill.ToThere {
				sent = append(sent, q.Forward())
			}
		}
	}
	ask(500)
	require.Len(t, sent, 64)
	require.Equal(t, 64, first(ps).Unanswered)
	require.Equal(t, "full", first(ps).Available["m"])
	for _, f := range sent {
		f.decidedAt = f.decidedAt.Add(-time.Minute) // so late do their first events come
		f.AnswerBegun(false, 0)
	}
	require.Equal(t, 1, first(ps).Window)
	for _, f := range sent {
		f.end(OutcomeOK, "")
	}
	require.Zero(t, first(ps).Unanswered)
	sent = nil
	ask(100)
	require.Len(t, sent, 1, "one at a time")
	sent[0].AnswerBegun(false, 0)
	require.Equal(t, 2, first(ps).Window, "in time, it earns more")
	sent[0].DropUnsent()
	require.Zero(t, first(ps).InFlight)
}

func TestAnswersInOnePieceDoNotCountAsLate(t *testing.T) {
	url, _ := served(t, 8, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, `{"usage":{}}`)
	})
	ps, _ := node(t, nil, entry(t, "eu-1", url))
	for range 25 {
		f := forwarded(t, ps)
		f.decidedAt = f.decidedAt.Add(-time.Minute) // so long was it generated
		whole, fail := f.Send(&Request{Method: http.MethodPost, Target: "/v1/completions"})
		require.Nil(t, fail)
		require.NotNil(t, whole)
		f.Close()
	}
	require.Equal(t, 64, first(ps).Window)
	require.Zero(t, first(ps).Unanswered)
	require.Zero(t, first(ps).MinGainUp, "its promise was not broken either")
}

func TestAnAnswerInOnePieceDoesNotHoldASmallWindow(t *testing.T) {
	asked := make(chan struct{})
	rest := make(chan struct{})
	url, _ := served(t, 8, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		asked <- struct{}{}
		<-rest
		_, _ = io.WriteString(w, `{"usage":{}}`)
	})
	release := sync.OnceFunc(func() { close(rest) })
	t.Cleanup(release) // also where the test fails, or the server's end waits for ever
	ps, q := node(t, func(c *Config) { c.FirstByte = time.Minute }, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	ps.mu.Lock()
	for range 40 {
		ps.peers[0].trust.Failed(ps.sinceStartMs(time.Now()))
	}
	ps.mu.Unlock()
	require.Equal(t, 1, first(ps).Window)
	require.Equal(t, "full", first(ps).Available["m"])
	wakes := q.wakes.Load()
	got := make(chan *Failure, 1)
	go func() {
		_, fail := f.Send(&Request{Method: http.MethodPost, Target: "/v1/completions"})
		got <- fail
	}()
	<-asked
	eventually(t, func() bool { return first(ps).Unanswered == 0 })
	require.Greater(t, q.wakes.Load(), wakes)
	next := forwarded(t, ps) // while the first is still generated
	next.DropUnsent()
	release()
	require.Nil(t, <-got)
	f.Close()
	require.Zero(t, first(ps).Unanswered)
}

func TestTheHeadOfARequestTellsWhoCannotBeAPeer(t *testing.T) {
	keys, now := goldenKeys(t), time.UnixMilli(golden.Time)
	stranger, err := ParseKeys("a " + strings.Repeat("f", 32))
	require.NoError(t, err)
	for name, row := range map[string]struct {
		keys   *Keys
		hop    func(h *Hop)         // before it is signed
		head   func(k *Credentials) // after that
		late   time.Duration
		reject string
	}{
		"one that might be":         {},
		"no hop":                    {head: func(k *Credentials) { k.Hop = "" }, reject: RejectHop},
		"the version before":        {head: func(k *Credentials) { k.Hop = "v2" + k.Hop[2:] }, reject: RejectVersion},
		"nobody's name":             {hop: func(h *Hop) { h.Origin, h.Via = "mars", []string{"mars"} }, reject: RejectPeer},
		"a key that is not ours":    {keys: stranger, reject: RejectSignature},
		"no signature":              {head: func(k *Credentials) { k.Signature = "" }, reject: RejectSignature},
		"another path":              {head: func(k *Credentials) { k.Target = "/v1/completions" }, reject: RejectSignature},
		"another tenant":            {head: func(k *Credentials) { k.Headers[0].Value = "rich" }, reject: RejectSignature},
		"another recipient":         {hop: func(h *Hop) { h.To = "asia-1" }, reject: RejectRecipient},
		"an earlier run":            {hop: func(h *Hop) { h.Boot = "another" }, reject: RejectRecipient},
		"one recorded long ago":     {late: 31 * time.Second, reject: RejectStale},
		"one of a time yet to come": {late: -31 * time.Second, reject: RejectStale},
	} {
		if row.keys == nil {
			row.keys = keys
		}
		d, m, h, k := door(keys, 1), goldenMessage(), golden, Credentials{}
		if row.hop != nil {
			row.hop(&h)
		}
		k = Credentials{Message: m, Hop: h.String(), Signature: row.keys.Sign(&m, &h)}
		if row.head != nil {
			row.head(&k)
		}
		got := ""
		if x := d.CheckHead(&k, now.Add(row.late)); x != nil {
			got = x.Reject
		}
		require.Equal(t, row.reject, got, name)
	}
	d, m, h := door(keys, 1), goldenMessage(), golden
	k := Credentials{Message: m, Body: goldenBody(), Hop: h.String(), Signature: keys.Sign(&m, &h)}
	require.Nil(t, d.CheckHead(&k, now))
	require.Nil(t, d.CheckHead(&k, now), "to look changes nothing")
	_, refusal := d.Verify(&k, now)
	require.Nil(t, refusal)
	require.Equal(t, RejectSignature, d.CheckHead(&k, now).Reject, "it was here before")
}

func TestWhatEndedBeforeItWasSentIsNotSent(t *testing.T) {
	var asked atomic.Int32
	url, _ := served(t, 8, func(http.ResponseWriter, *http.Request) { asked.Add(1) })
	ps, _ := node(t, nil, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	f.abandon(causeDown)
	_, fail := f.Send(stream)
	require.Equal(t, causeDown, fail.Reason)
	f = forwarded(t, ps)
	f.AbortByClient()
	_, fail = f.Send(stream)
	require.True(t, fail.ClientLeft)
	require.Zero(t, asked.Load())
	require.Zero(t, first(ps).InFlight)
}

func TestAnAnswerThatHasBegunOutlastsProbesThatAreMissed(t *testing.T) {
	rest := make(chan struct{})
	url, _ := served(t, 8, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {}\n\n")
		w.(http.Flusher).Flush()
		<-rest
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	})
	ps, _ := node(t, nil, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	_, fail := f.Send(stream)
	require.Nil(t, fail)
	f.abandon(causeDown)
	close(rest)
	all, err := io.ReadAll(f)
	require.NoError(t, err)
	require.Equal(t, "data: {}\n\ndata: [DONE]\n\n", string(all))
	f.Close()
	require.Equal(t, OutcomeOK, ps.Receipts(1)[0].Outcome)
}

func TestASiblingHasTheTimeThatARequestHasHere(t *testing.T) {
	url, _ := served(t, 8, func(w http.ResponseWriter, _ *http.Request) {
		time.Sleep(100 * time.Millisecond) // beyond FirstByte, which sockets keep in real time
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	})
	ps, _ := node(t, func(c *Config) { c.FirstByte, c.Whole = 20*time.Millisecond, time.Minute }, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	f.peer.sibling = true
	_, fail := f.Send(stream)
	require.Nil(t, fail)
	f.Close()
}

func TestAForwardThatEndsGivesItsPlaceBackAtOnce(t *testing.T) {
	url, _ := served(t, 8, hang)
	ps, _ := node(t, func(c *Config) { c.Probe.Interval = time.Minute }, entry(t, "eu-1", url))
	ps.mu.Lock()
	p := ps.peers[0]
	ps.mu.Unlock()
	eventually(t, func() bool { ps.mu.Lock(); defer ps.mu.Unlock(); return p.probed })
	ps.mu.Lock()
	p.up = true // a second probe is a minute away
	ps.mu.Unlock()
	f := forwarded(t, ps)
	require.Equal(t, 1, first(ps).Reserved)
	f.DropUnsent()
	require.Zero(t, first(ps).Reserved)
	f.DropUnsent()
	require.Zero(t, first(ps).Reserved, "once")
}

// drips sends a text until nobody reads any more.
func drips(w http.ResponseWriter, r *http.Request, first, text string) {
	w.Header().Set("Content-Type", "text/event-stream")
	_, err := io.WriteString(w, first)
	for err == nil && r.Context().Err() == nil {
		w.(http.Flusher).Flush()
		time.Sleep(5 * time.Millisecond) // one read finds one text
		_, err = io.WriteString(w, text)
	}
}

// What keeps a connection alive is no event, and nobody waits for the end of a
// body behind [DONE].
func TestAPeerThatOnlySeemsToGoOn(t *testing.T) {
	const event = "data: {}\n\n"
	for name, row := range map[string]struct {
		first, text string
		most        int64
		begins      bool
		err         error
	}{
		"comments and no event":  {": c\n\n", ": c\n\n", 0, false, nil},
		"an event without end":   {"data: ", "x", 0, false, nil},
		"comments behind events": {event, ": c\n\n", 0, true, ErrPeerLost},
		"an event that stops":    {event, "x", 0, true, ErrPeerLost},
		"more than it may have":  {event, event, 1000, true, ErrPeerLost},
		"a drip behind the end":  {event + sse.Done, ":", 0, true, io.EOF},
		"a flood behind the end": {event + sse.Done, ": " + strings.Repeat("x", 64<<10) + "\n\n", 0, true, io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ended := make(chan struct{})
			url, _ := served(t, 8, func(w http.ResponseWriter, r *http.Request) {
				defer close(ended)
				drips(w, r, row.first, row.text)
			})
			ps, _ := node(t, func(c *Config) { c.FirstByte, c.Idle = 2*time.Second, 300*time.Millisecond }, entry(t, "eu-1", url))
			request := *stream
			request.MaxBytes = row.most
			f := forwarded(t, ps)
			_, fail := f.Send(&request)
			if !row.begins {
				require.Equal(t, causeTimeout, fail.Reason)
				<-ended
				return
			}
			require.Nil(t, fail)
			got, err := io.ReadAll(f)
			if row.err == io.EOF { //nolint:errorlint // as it came
				require.NoError(t, err)
				require.Equal(t, row.first, string(got))
			} else {
				require.ErrorIs(t, err, row.err)
				require.Contains(t, string(got), `"code":"peer_lost"`)
			}
			f.Close()
			<-ended
		})
	}
}

// A connection whose body ends soon serves the next forward.
func TestTheTailOfAForwardIsWorthItsConnection(t *testing.T) {
	addresses := make(chan string, 100)
	url, _ := served(t, 8, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {}\n\n"+sse.Done)
		w.(http.Flusher).Flush()
		time.Sleep(20 * time.Millisecond) // before the last chunk
		addresses <- r.RemoteAddr
	})
	ps, _ := node(t, nil, entry(t, "eu-1", url))
	used := map[string]int{}
	for range 8 {
		f := forwarded(t, ps)
		_, fail := f.Send(stream)
		require.Nil(t, fail)
		_, err := io.ReadAll(f)
		require.NoError(t, err)
		f.Close()
		used[<-addresses]++
		time.Sleep(50 * time.Millisecond) // nothing tells that the tail is read and the connection is free
	}
	require.Less(t, len(used), 8, "%v", used)
}

func TestTheErrorBehindABrokenEventIsAnEventOfItsOwn(t *testing.T) {
	url, _ := served(t, 8, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: 1\n\ndata: "+strings.Repeat("x", 5000))
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	ps, _ := node(t, func(c *Config) { c.EventBytes = 1000 }, entry(t, "eu-1", url))
	f := forwarded(t, ps)
	whole, fail := f.Send(stream)
	require.Nil(t, fail)
	require.Nil(t, whole)
	defer f.Close()
	got, err := io.ReadAll(f)
	require.ErrorIs(t, err, ErrPeerLost)
	require.True(t, strings.HasPrefix(string(got), "data: 1\n\ndata: "+strings.Repeat("x", 5000)+"\n\ndata: {\"error\""), "%.100q",
		got[len(got)-200:])
}
