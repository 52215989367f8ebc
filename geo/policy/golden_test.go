package policy

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/prefill/fit"
	prefillpolicy "evenkeel/prefill/policy"
)

// parse makes a policy with the defaults for what its text does not name.
func parse(text string) (*Policy, error) {
	s := Defaults()
	return s.Parse(text)
}

func must(t testing.TB, text string) *Policy {
	t.Helper()
	p, err := parse(text)
	require.NoError(t, err)
	return p
}

// replica is a local place that takes requests.
func replica(id string) Candidate { return Candidate{ID: id, MaxSends: 8, TPMs: 0.0938, T0Ms: 150.72} }

func peer(id string, rtt float64) Candidate {
	return Candidate{ID: id, Peer: true, MaxSends: 8, RTTMs: rtt, TPMs: 0.0938, T0Ms: 150.72, Replicas: 1}
}

func with(x Candidate, change func(x *Candidate)) Candidate {
	change(&x)
	return x
}

func full(x Candidate) Candidate { return with(x, func(x *Candidate) { x.MaxSends, x.Why = 0, Full }) }

// next is the decision for one request alone.
func next(p *Policy, r *Request, drainMs float64, places ...Candidate) Decision {
	p.Begin(places, drainMs)
	return p.Next(r)
}

func TestTheCentralBalancerWeighsDistanceQueueAndCache(t *testing.T) {
	for _, row := range []struct {
		name string
		tp   float64
		want [3]float64
	}{
		{"at the slope that the source's figures imply", 0.0466, [3]float64{320.07, 295.91, 391.40}},
		{"at the slope of its table", 0.0938, [3]float64{641.22, 311.02, 602.47}},
	} {
		place := func(id string, rtt, queued float64) Candidate {
			return Candidate{ID: id, MaxSends: 8, RTTMs: rtt, TPMs: row.tp, QueuedTokens: queued}
		}
		p := must(t, "finish:load=0")
		r := &Request{ID: "r", Tokens: 320, Hits: []int32{16, 0, 48}}
		places := []Candidate{place("us", 3, 6500), place("de", 281, 0), place("il", 183, 4200)}
		p.Begin(places, 0)
		for i, want := range row.want {
			require.InDelta(t, want, p.predictCost(r, i).Total(), 0.006, "%s: %s", row.name, places[i].ID)
		}
		d := p.Next(r)
		require.Equal(t, Decision{Act: Send, Candidate: 1, Terms: d.Terms, LocalMs: d.LocalMs}, d, row.name)
	}
}

func TestGorgoGoesOnlyWhereItGains(t *testing.T) {
	for _, row := range []struct {
		name string
		rtt  float64
		cost float64
		act  Act
	}{
		{"48 ms sooner: it goes", 150, 675.92, Forward},
		{"4 ms sooner, less than min_gain: it stays", 195, 720.92, Hold},
	} {
		p := must(t, "gorgo")
		local := with(full(replica("l")), func(x *Candidate) { x.QueuedTokens = 2000 })
		places := []Candidate{local, peer("p", row.rtt)}
		p.Begin(places, 120)
		for range 3 {
			require.Equal(t, Hold, p.Next(&Request{ID: "before", Tokens: 10, LocalOnly: true}).Act)
		}
		r := &Request{ID: "r", Tokens: 4000, Hits: []int32{3000}}
		require.InDelta(t, 724.52, p.predictCost(r, 0).Total(), 1e-6, row.name)
		require.InDelta(t, row.cost, p.predictCost(r, 1).Total(), 1e-6, row.name)
		require.Equal(t, row.act, p.Next(r).Act, row.name)
	}
}

func TestLocalFirst(t *testing.T) {
	for _, name := range []string{"skylb", "gorgo", "skylb-ch", "least-load", "round-robin"} {
		p := must(t, name)
		d := next(p, &Request{ID: "r", Tokens: 8000, Hits: []int32{0, 7936}}, 0, replica("l"),
			with(peer("p", 20), func(x *Candidate) { x.MaxSends = 5 }))
		require.Equal(t, Send, d.Act, "%s takes a local replica that is available, whatever a peer has cached", name)
		require.Zero(t, d.Candidate, name)
	}
}

// fresh is a peer that takes forwards.
func fresh(id string) Peer {
	return Peer{
		ID: id, Probed: true, Major: Protocol, AgeMs: 100, IntervalMs: 500, OffersModel: true,
		Offer: Offer{Replicas: 4, NAvail: 2, Free: 8, TPMs: 0.0938, T0Ms: 150.72}, RTTMs: 100,
	}
}

func TestAPeerIsAvailableOrSaysWhyNot(t *testing.T) {
	for _, row := range []struct {
		name   string
		policy string
		change func(x *Peer)
		want   Reason
	}{
		{"a: its queue is longer than tau", "skylb:tau=4", func(x *Peer) { x.Offer.NAvail, x.Offer.Queue = 2, 5 }, QueueTooLong},
		{"a: only skylb looks at tau", "finish", func(x *Peer) { x.Offer.NAvail, x.Offer.Queue = 2, 5 }, Available},
		{"b: none of its replicas is available", "skylb", func(x *Peer) { x.Offer.NAvail = 0 }, NoReplica},
		{"c: a queue of tau is no reason", "skylb", func(x *Peer) { x.Offer.NAvail, x.Offer.Queue = 1, 4 }, Available},
		{"d: it drains", "skylb", func(x *Peer) { x.Offer.NAvail, x.Draining = 3, true }, Draining},
		{"e: it speaks another major version", "skylb", func(x *Peer) { x.Offer.NAvail, x.Major = 3, 2 }, OtherVersion},
		{"it has not answered yet", "finish", func(x *Peer) { x.Probed = false }, NeverProbed},
		{"it missed three probes", "finish", func(x *Peer) { x.Down = true }, Down},
		{"its answer is three intervals old", "finish", func(x *Peer) { x.AgeMs = 1500 }, Stale},
		{"it has another model", "finish", func(x *Peer) { x.OffersModel = false }, NotOffered},
		{"all that was free is reserved", "finish", func(x *Peer) { x.Reserved = 8 }, Full},
		{"its circuit is open", "finish", func(x *Peer) { x.CircuitOpen = true }, CircuitOpen},
		{"the day's egress is spent", "finish", func(x *Peer) { x.BudgetSpent = true }, BudgetSpent},
		{"it says that it has a negative queue", "finish", func(x *Peer) { x.Offer.Queue = -1 }, Nonsense},
		{"it says that requests wait no number of ms", "finish", func(x *Peer) { x.Offer.QueueWaitMs = math.NaN() }, Nonsense},
		{"it has more available replicas than replicas", "finish", func(x *Peer) { x.Offer.NAvail = 5 }, Nonsense},
	} {
		x := fresh("p")
		row.change(&x)
		require.Equal(t, row.want, must(t, row.policy).Judge(&x), row.name)
	}
}

func TestSkyLBGoesWhereMostIsCached(t *testing.T) {
	local := full(replica("l"))
	eu, asia, use := peer("eu", 150), peer("asia", 180), with(full(peer("us-e", 20)), func(x *Candidate) { x.Why = NoReplica })
	p := must(t, "skylb")
	d := next(p, &Request{ID: "r", Tokens: 5000, Hits: []int32{0, 1024, 2048, 4096}}, 0, local, eu, asia, use)
	require.Equal(t, []any{Forward, 2}, []any{d.Act, d.Candidate}, "the longest match among those that are available")
	d = next(p, &Request{ID: "r", Tokens: 5000, Hits: []int32{0, 1024, 1024, 4096}}, 0, local, eu, asia, use)
	require.Equal(t, []any{Forward, 1}, []any{d.Act, d.Candidate}, "equal matches: the nearer one")
}

func TestTheRingSkipsWhoIsNotAvailable(t *testing.T) {
	const a, b, c = 0, 1, 2
	ring := newRing([]point{{10, a}, {25, b}, {40, a}, {60, c}, {80, b}})
	for _, row := range []struct {
		name string
		key  uint64
		down []int
		want int
	}{
		{"the first at or after the key", 27, nil, a},
		{"its owner is down: the next", 27, []int{a}, c},
		{"two are down: the next but one", 27, []int{a, c}, b},
		{"behind the last it begins again", 85, nil, a},
		{"a key on a point is that point's", 25, nil, b},
		{"all are down: nobody", 27, []int{a, b, c}, -1},
	} {
		got := ring.Find(row.key, func(owner int) bool {
			for _, d := range row.down {
				if d == owner {
					return false
				}
			}
			return true
		})
		require.Equal(t, row.want, got, row.name)
	}
}

func TestCreditBetweenScrapes(t *testing.T) {
	s := Defaults()
	for _, row := range []struct {
		name             string
		running, pending int
		want             int
	}{
		{"what is free in the batch", 30, 0, 2},
		{"no more than credit_max", 0, 0, 32},
		{"a batch that is full still takes one", 40, 0, 1},
		{"nothing while a request waits in the engine", 10, 1, 0},
	} {
		require.Equal(t, row.want, s.Credit(row.running, row.pending, 32), row.name)
	}
}

func TestPushModes(t *testing.T) {
	for _, row := range []struct {
		name   string
		policy string
		want   int
	}{
		{"sp-p: where nothing is pending", "least-load:push=sp-p", 1},
		{"sp-o: below the limit", "least-load:push=sp-o,max_outstanding=24", 0},
		{"blind: the fewest outstanding", "least-load:push=blind", 0},
	} {
		p := must(t, row.policy)
		states := []Replica{
			{Healthy: true, GateOpen: true, Outstanding: 10, Pending: 2, Credit: 32},
			{Healthy: true, GateOpen: true, Outstanding: 26, Credit: 32},
		}
		var places []Candidate
		for i, id := range []string{"r1", "r2"} {
			x := with(replica(id), func(x *Candidate) { x.Outstanding = float64(states[i].Outstanding) })
			x.MaxSends, x.Why = p.Settings().JudgeReplica(&states[i])
			places = append(places, x)
		}
		d := next(p, &Request{ID: "r", Tokens: 100}, 0, places...)
		require.Equal(t, []any{Send, row.want}, []any{d.Act, d.Candidate}, row.name)
	}
}

func TestAForwardIsReservedUntilAProbeHasSeenIt(t *testing.T) {
	p, x := must(t, "finish"), fresh("p")
	var v Reservations
	state := func(free int) Reason {
		x.Offer.Free = free
		x.Reserved, x.UnseenTokens = v.Reserved()
		return p.Judge(&x)
	}
	require.Equal(t, Available, state(2), "answer A: two are free")
	sent := uint64(0)
	forwarded := func(at, tokens float64) {
		sent++
		v.Book(sent, tokens)
		v.MarkWritten(sent, at)
	}
	forwarded(100, 500)
	require.Equal(t, Available, state(2), "one of them is left")
	forwarded(200, 300)
	require.Equal(t, Full, state(2), "none")
	require.Equal(t, 800.0, x.UnseenTokens)
	v.DropCounted(150)
	require.Equal(t, Full, state(1), "answer B, sent between the two forwards, counts the first")
	require.Equal(t, 300.0, x.UnseenTokens)
	v.DropCounted(250)
	require.Equal(t, Available, state(1), "answer C counts both")
	v.Clear()
	v.Book(7, 400)
	v.DropCounted(9999)
	require.Equal(t, Full, state(1), "what is not written yet is in no answer")
	v.MarkWritten(7, 10_000)
	v.DropCounted(10_001)
	require.Equal(t, Available, state(1))
	v.Book(8, 400)
	v.Withdraw(8)
	require.Equal(t, Available, state(1), "and what is never written is reserved no longer")
	forwarded(300, 1)
	v.Expire(1379, 500, 80)
	require.Equal(t, Full, state(1), "an answer that does not come: for two intervals")
	v.Expire(1381, 500, 80)
	require.Equal(t, Available, state(1), "and no longer")
}

func TestRTT(t *testing.T) {
	r := RTT{alpha: 0.3, ms: 180, known: true}
	for _, row := range []struct {
		name    string
		ms, us  float64
		dialled bool
		want    float64
	}{
		{"what the peer spent is taken off", 193.2, 3200, false, 183.0},
		{"and the rest averaged", 170, 0, false, 179.1},
		{"a dial is no round trip", 400, 0, true, 179.1},
		{"and the next one is", 181, 0, false, 179.67},
	} {
		r.Add(row.ms, row.us, row.dialled)
		got, _ := r.Ms()
		require.InDelta(t, row.want, got, 1e-9, row.name)
	}
	first := NewRTT(0.3)
	first.Add(0.001, 1000, false)
	got, known := first.Ms()
	require.True(t, known)
	require.Equal(t, 0.05, got, "no clock is so good")
}

func TestTheLineOfPrefillsIsLearned(t *testing.T) {
	start := prefillpolicy.Latency{TPMs: Defaults().TPMs, T0Ms: Defaults().T0Ms}
	for _, row := range []struct {
		name     string
		n        int
		y        [3]float64
		tp, t0   float64
		accepted bool
	}{
		{"30 samples on a line, more or less", 10, [3]float64{250, 330, 530}, 0.0942857, 150, true},
		{"3 samples are too few", 1, [3]float64{250, 330, 530}, 0.0938, 150.72, false},
		{"30 samples on the very line", 10, [3]float64{244.52, 338.32, 525.92}, 0.0938, 150.72, true},
	} {
		c := fit.NewCalibration(start, 1<<30)
		for range row.n {
			for i, x := range []float64{1000, 2000, 4000} {
				c.Add(fit.Sample{New: x, Ms: row.y[i]})
			}
		}
		latency, fitted := c.Latency()
		require.Equal(t, row.accepted, fitted, row.name)
		require.InDelta(t, row.tp, latency.TPMs, 1e-6, row.name)
		require.InDelta(t, row.t0, latency.T0Ms, 1e-3, row.name)
	}
}

func TestPatienceForAHit(t *testing.T) {
	p := must(t, "gorgo:push=sp-p,load=50,patience=2")
	busy := with(full(replica("r1")), func(x *Candidate) { x.Why = Pending })
	old := &Request{ID: "old", Tokens: 4100, Hits: []int32{4000, 0}}
	young := &Request{ID: "young", Tokens: 4100, Hits: []int32{0, 0}}

	p.Begin([]Candidate{busy, replica("r2")}, 0)
	d := p.Next(old)
	require.Equal(t, []any{Hold, 0}, []any{d.Act, d.Candidate}, "it waits for the replica that has its prompt")
	require.InDelta(t, 750.4, d.UntilMs, 1e-9)
	d = p.Next(young)
	require.Equal(t, []any{Send, 1}, []any{d.Act, d.Candidate}, "a younger one with nothing to gain passes at once")

	old.WaitedMs = 400
	d = next(p, old, 0, replica("r1"), replica("r2"))
	require.Equal(t, []any{Send, 0}, []any{d.Act, d.Candidate}, "the replica is free after 400 ms")
	old.WaitedMs = 750.4
	d = next(p, old, 0, busy, replica("r2"))
	require.Equal(t, []any{Send, 1}, []any{d.Act, d.Candidate}, "it never is, and patience ends")
}

func TestFinishComparesLocalAndPeerAlways(t *testing.T) {
	for _, row := range []struct {
		name   string
		queued float64
		local  float64
		act    Act
	}{
		{"local is cheaper", 2000, 552.12, Send},
		{"a longer local queue: it goes, though a replica here is free", 6000, 927.32, Forward},
	} {
		local := with(replica("l"), func(x *Candidate) { x.QueuedTokens, x.Running = row.queued, 40 })
		far := with(peer("p", 150), func(x *Candidate) { x.Running = 20 })
		d := next(must(t, "finish"), &Request{ID: "r", Tokens: 4000, Hits: []int32{3000, 0}}, 0, local, far)
		require.Equal(t, row.act, d.Act, row.name)
		require.InDelta(t, row.local, d.LocalMs, 1e-6, row.name)
		if row.act == Forward {
			require.InDelta(t, 735.92, d.Terms.Total(), 1e-6, row.name)
		}
	}
}

func TestSPECountsRequestsWithoutAFirstToken(t *testing.T) {
	s := Defaults()
	for _, row := range []struct {
		name       string
		unanswered int
		want       Reason
	}{
		{"seven: available", 7, Available},
		{"eight: not", 8, Full},
		{"eight, and one first token has just come: available", 8 - 1, Available},
	} {
		_, why := s.JudgeReplica(&Replica{Healthy: true, GateOpen: true, Unanswered: row.unanswered})
		require.Equal(t, row.want, why, row.name)
	}
}
