package policy

import (
	"fmt"
	"go/build"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestImportsArePure(t *testing.T) { // a policy that can reach the network or the clock is no longer a policy
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	pure := []string{"cmp", "fmt", "math", "slices", "strconv", "strings", "github.com/cespare/xxhash/v2", "evenkeel/internal/namedargs",
		"evenkeel/prefill/policy"}
	require.Subset(t, pure, pkg.Imports, "let the owner of the queue read it and put it in Candidate or Request")
}

func acts(p *Policy, drainMs float64, places []Candidate, requests ...*Request) []string {
	var got []string
	p.Begin(places, drainMs)
	for _, r := range requests {
		if p.Done() {
			got = append(got, "-")
			continue
		}
		d := p.Next(r)
		at := "nowhere"
		if d.Candidate >= 0 {
			at = places[d.Candidate].ID
		}
		got = append(got, d.Act.String()+" "+at)
	}
	return got
}

func TestARoundAnswersInTheOrderOfArrival(t *testing.T) {
	one := func(x Candidate) Candidate { return with(x, func(x *Candidate) { x.MaxSends = 1 }) }
	waited := func(ms float64) *Request { return &Request{ID: "waited", Tokens: 100, WaitedMs: ms} }
	stay, may := &Request{ID: "stay", Tokens: 100, LocalOnly: true}, &Request{ID: "may", Tokens: 100}
	for _, row := range []struct {
		name     string
		policy   string
		places   []Candidate
		requests []*Request
		want     []string
	}{
		{
			"local capacity goes to the oldest, the next one to the peer, and then nobody goes", "skylb",
			[]Candidate{one(replica("l")), one(peer("p", 100))},
			[]*Request{may, may, may, may},
			[]string{"local l", "forward p", "-", "-"},
		},
		{
			"one that may not be forwarded does not block one that may", "skylb",
			[]Candidate{full(replica("l")), one(peer("p", 100))},
			[]*Request{stay, may, may},
			[]string{"wait nowhere", "forward p", "-"},
		},
		{
			"what gorgo does not forward, blocks those behind it", "gorgo",
			[]Candidate{full(replica("l")), one(peer("p", 100))},
			[]*Request{may, may},
			[]string{"wait nowhere", "-"},
		},
		{
			"local-only never forwards", "local-only",
			[]Candidate{one(replica("l")), one(peer("p", 100))},
			[]*Request{may, may},
			[]string{"local l", "-"},
		},
		{
			"round-robin goes round, and skips who is full", "round-robin",
			[]Candidate{replica("a"), full(replica("b")), replica("c")},
			[]*Request{may, may, may},
			[]string{"local a", "local c", "local a"},
		},
		{
			"least-load counts what the round has sent", "least-load",
			[]Candidate{with(replica("a"), func(x *Candidate) { x.Outstanding = 1.5 }), replica("b")},
			[]*Request{may, stay, may},
			[]string{"local b", "local b", "local a"},
		},
		{
			"who waits for the best is charged to it, until another place is better", "finish:load=0",
			[]Candidate{full(replica("l")), with(one(peer("p", 15)), func(x *Candidate) { x.MaxSends = 2 })},
			[]*Request{may, may, may, may},
			[]string{"wait l", "wait l", "wait l", "forward p"}, // 3 times 9.38 ms is more than 15 + 10
		},
		{
			"finish waits for a busy peer if that is the best", "finish",
			[]Candidate{with(replica("l"), func(x *Candidate) { x.QueuedTokens = 9000 }), full(peer("p", 15))},
			[]*Request{may, stay},
			[]string{"wait p", "local l"},
		},
		{
			"a peer that stays full is not waited for without end", "finish",
			[]Candidate{with(one(replica("l")), func(x *Candidate) { x.QueuedTokens = 9000 }), full(peer("p", 15))},
			[]*Request{waited(9_999), waited(10_000), waited(10_000)},
			[]string{"wait p", "local l", "-"},
		},
		{
			"it is waited for while our replica would take longer", "finish",
			[]Candidate{with(replica("l"), func(x *Candidate) { x.QueuedTokens = 200_000 }), full(peer("p", 15))},
			[]*Request{waited(18_000), waited(19_000)},
			[]string{"wait p", "local l"},
		},
		{
			"it is waited for where no replica of ours serves", "finish",
			[]Candidate{with(replica("l"), func(x *Candidate) { x.Why = Unhealthy }), full(peer("p", 15)), peer("q", 90_000)},
			[]*Request{waited(60_000)},
			[]string{"wait p"},
		},
	} {
		require.Equal(t, row.want, acts(must(t, row.policy), 0, row.places, row.requests...), row.name)
	}
}

func TestResidencyBarsPeersOnlyForItsRequest(t *testing.T) {
	places := []Candidate{full(replica("l")), peer("eu", 100), peer("us", 10)}
	for _, name := range []string{"skylb", "gorgo:min_gain_ms=0", "skylb-ch", "least-load", "round-robin"} {
		p := must(t, name)
		places[0].QueuedTokens = 1e6
		got := acts(p, 0, places, &Request{ID: "a", Tokens: 10, Barred: []bool{false, false, true}},
			&Request{ID: "b", Tokens: 10, Barred: []bool{false, true, true}}, &Request{ID: "c", Tokens: 10, Barred: []bool{false, true, false}})
		require.Equal(t, []string{"forward eu", "wait nowhere", "forward us"}, got, name)
	}
	p := must(t, "finish")
	got := acts(p, 0, places, &Request{ID: "a", Tokens: 10, Barred: []bool{false, false, true}},
		&Request{ID: "b", Tokens: 10, Barred: []bool{false, true, true}})
	require.Equal(t, []string{"forward eu", "wait l"}, got)
}

func TestAPeerThatWasTooOptimisticMustGainMore(t *testing.T) {
	local := with(replica("l"), func(x *Candidate) { x.QueuedTokens = 3000 }) // 281 ms
	p := must(t, "finish")
	r := &Request{ID: "r", Tokens: 100}
	require.Equal(t, Forward, next(p, r, 0, local, peer("p", 100)).Act)
	var d Distrust
	for range 100 {
		d.Add(0, 400)
	}
	require.Equal(t, Send, next(p, r, 0, local, with(peer("p", 100), func(x *Candidate) { x.DistrustMs = d.Ms(0) })).Act)
	require.InDelta(t, 400, d.Ms(0), 10)
	var noise Distrust
	for i := range 100 {
		noise.Add(0, float64(i%3-1)*80)
	}
	require.Zero(t, noise.Ms(0))
}

func TestDistrustFadesWhereNothingComesAnyMore(t *testing.T) {
	var d Distrust
	for i := range 100 {
		d.Add(float64(i)*50_000, 800) // seldom, but often enough to be sure
	}
	const last = 99 * 50_000
	require.InDelta(t, 800, d.Ms(last), 10)
	require.InDelta(t, 800, d.Ms(last+59_000), 10)
	require.InDelta(t, 400, d.Ms(last+60_000), 10)
	require.InDelta(t, 400, d.Ms(last+61_000), 10, "asked twice, it fades once")
	require.InDelta(t, 200, d.Ms(last+120_000), 10)
	require.Zero(t, d.Ms(last+240_000), "it is believed again")
}

func TestAPeerHasAsManyUnansweredAsItHasEarned(t *testing.T) {
	var liar, honest Trust
	require.Equal(t, 64, liar.Window(0))
	for range 31 {
		liar.FirstEvent(0, 5000, 200)
	}
	require.Equal(t, 2, liar.Window(0))
	liar.FirstEvent(0, 5000, 200)
	liar.Failed(0)
	require.Equal(t, 1, liar.Window(0), "it can always show that it has mended its ways")
	for range 10 {
		liar.FirstEvent(0, 400, 200)
	}
	require.Equal(t, 11, liar.Window(0))
	for i := range 1000 {
		took := 200.0
		if i%5 == 0 {
			took = 700 // now and then somebody is late
		}
		honest.FirstEvent(0, took, 200)
	}
	require.Greater(t, honest.Window(0), 400)

	p := must(t, "finish")
	x := Peer{ID: "p", Probed: true, Major: Protocol, IntervalMs: 500, OffersModel: true, Offer: Offer{Replicas: 1, NAvail: 1, Free: 1000},
		Window: 64, Unanswered: 60}
	require.Equal(t, Available, p.Judge(&x))
	require.Equal(t, 4, p.PeerCandidate(&x).MaxSends)
	x.Unanswered = 64
	require.Equal(t, Full, p.Judge(&x))
}

func TestWhatAWindowHasShrunkByIsForgotten(t *testing.T) {
	var p Trust
	for range 40 {
		p.FirstEvent(1000, 5000, 200)
	}
	require.Equal(t, 1, p.Window(60_000))
	require.Equal(t, 33, p.Window(61_000), "one minute without a first event halves it")
	require.Equal(t, 33, p.Window(62_000), "asked twice, it fades once")
	p.FirstEvent(100_000, 300, 200)
	require.Equal(t, 34, p.Window(159_000), "the minute counts from the last first event")
	require.Equal(t, 64, p.Window(600_000), "no peer is held back for ever")
	for range 36 {
		p.FirstEvent(600_000, 300, 200)
	}
	require.Equal(t, 100, p.Window(6_000_000), "what it has earned stays")
}

func TestAnAnswerInOnePieceIsNeverLate(t *testing.T) {
	var p Trust
	for range 10 {
		p.FirstEvent(0, 5000, 200)
	}
	for range 20 {
		p.WholeAnswer(0)
	}
	require.Equal(t, 64, p.Window(0), "it wins back what was lost")
	p.WholeAnswer(0)
	require.Equal(t, 64, p.Window(0), "and no more: nobody knows when its first token was there")
}

func TestAnOfferSaysWhatANextRequestWouldMeet(t *testing.T) {
	a := with(replica("a"), func(x *Candidate) { x.QueuedTokens, x.Running, x.Outstanding = 500, 10, 12 })
	b := with(replica("b"), func(x *Candidate) { x.QueuedTokens, x.Running, x.Outstanding, x.MaxSends = 100, 20, 21, 3 })
	o := NewOffer([]Candidate{a, b, peer("p", 3)}, 0, 0, 50, 100)
	require.Equal(t, Offer{Replicas: 2, NAvail: 2, Free: 11, QueuedTokens: 100, QueueWaitMs: 100 * b.TPMs, Running: 10, Load: 0.33,
		TPMs: 0.0938, T0Ms: 150.72}, o)
	o = NewOffer([]Candidate{full(a), full(b)}, 3, 400, 50, 100)
	require.Equal(t, Offer{Replicas: 2, Queue: 3, QueuedTokens: 500, QueueWaitMs: 200, Running: 10, Load: 0.36, TPMs: 0.0938, T0Ms: 150.72}, o,
		"none available: all of it, shared")
	require.Equal(t, Offer{Queue: 2}, NewOffer(nil, 2, 100, 50, 0))
}

func TestAnOfferCountsOnlyReplicasForWhichARequestMayWait(t *testing.T) {
	dead := func(id string) Candidate {
		return with(replica(id), func(x *Candidate) { x.MaxSends, x.Why = 0, Unhealthy })
	}
	busy := with(replica("a"), func(x *Candidate) { x.QueuedTokens, x.Outstanding = 50_000, 5 })
	o := NewOffer([]Candidate{busy, dead("b")}, 0, 0, 50, 100)
	require.Equal(t, []float64{1, 1, 50_000}, []float64{float64(o.Replicas), float64(o.NAvail), o.QueuedTokens}, "of the live one")
	o = NewOffer([]Candidate{full(busy), dead("b")}, 3, 400, 50, 100)
	require.Equal(t, 50_400.0, o.QueuedTokens, "the requests that wait are shared by the replicas that work")

	x := fresh("p")
	x.Offer = NewOffer([]Candidate{dead("a"), dead("b")}, 0, 0, 0, 100)
	p := must(t, "finish")
	places := []Candidate{with(replica("l"), func(x *Candidate) { x.QueuedTokens = 1e5 }), p.PeerCandidate(&x)}
	require.Equal(t, []string{"local l"}, acts(p, 0, places, &Request{ID: "r", Tokens: 1000}), "the peer has no working replica")
}

// filled is a replica whose KV gate opens in so many ms, and then gets room for a token in
// each ms.
func filled(id string, opensMs float64) Candidate {
	return with(replica(id), func(x *Candidate) { x.MaxSends, x.Why, x.KVRoomMs, x.KVTokenMs = 0, NoRoom, opensMs, 1 })
}

func TestMemoryIsWaitedForWhereThatIsSooner(t *testing.T) {
	r := &Request{ID: "r", Tokens: 1000, Hits: []int32{900, 0, 0}} // 94 ms of prefill where nothing is cached
	for _, row := range []struct {
		name     string
		places   []Candidate
		requests []*Request
		want     []string
	}{
		{"a gate that opens soon is waited for", []Candidate{filled("a", 50), peer("p", 100)}, []*Request{r}, []string{"wait a"}},
		{"one that opens late is not", []Candidate{filled("a", 500), peer("p", 100)}, []*Request{r}, []string{"forward p"}},
		{"one of which nobody knows when it opens is none", []Candidate{with(filled("a", 50), func(x *Candidate) { x.Why = GateClosed }), peer("p", 100)}, []*Request{r}, []string{"forward p"}},
		{"who waits for it takes its room from those behind", []Candidate{filled("a", 50), peer("p", 100)}, []*Request{r, r}, []string{"wait a", "forward p"}},
		{"an open gate before a full memory is no room either", []Candidate{with(replica("a"), func(x *Candidate) { x.KVRoomMs, x.KVTokenMs = -500, 1 }), replica("b")}, []*Request{r}, []string{"local b"}},
		{"a prompt that fits waits for nothing", []Candidate{with(replica("a"), func(x *Candidate) { x.KVRoomMs, x.KVTokenMs = -1000, 1 }), replica("b")}, []*Request{r}, []string{"local a"}},
		{
			"a peer's memory is waited for like ours",
			[]Candidate{filled("a", 300), with(peer("p", 10), func(x *Candidate) { x.KVRoomMs, x.KVTokenMs = 0, 1 })}, []*Request{r},
			[]string{"wait a"},
		},
	} {
		require.Equal(t, row.want, acts(must(t, "finish"), 5000, row.places, row.requests...), row.name)
	}
}

func TestAnOfferSaysWhenThereIsRoom(t *testing.T) {
	roomy := with(replica("c"), func(x *Candidate) { x.KVRoomMs, x.KVTokenMs = -800, 2 })
	o := NewOffer([]Candidate{filled("a", 300), filled("b", 200), roomy}, 0, 0, 50, 100)
	require.Equal(t, []float64{-800, 2}, []float64{o.KVRoomMs, o.KVTokenMs}, "of the replicas that take a request")
	o = NewOffer([]Candidate{filled("a", 300), filled("b", 200)}, 3, 400, 50, 100)
	require.Equal(t, []float64{200 + 400/2, 0.5}, []float64{o.KVRoomMs, o.KVTokenMs}, "of the first to have some, behind what waits")
	require.True(t, o.plausible())
	x := fresh("p")
	x.UnseenTokens, x.Offer.KVRoomMs, x.Offer.KVTokenMs = 1000, -100, 0.5
	p := must(t, "finish")
	require.Equal(t, 400.0, p.PeerCandidate(&x).KVRoomMs, "behind what its probe has not seen")
	x.Offer.KVRoomMs = math.NaN()
	require.Equal(t, Nonsense, p.Judge(&x))
	x = fresh("p") // one that says nothing of its memory
	require.Zero(t, next(p, &Request{ID: "r", Tokens: 1000}, 0, p.PeerCandidate(&x)).Terms.Wait)
}

// The product of two huge numbers is infinite. An infinite cost equals every other cost by
// sameCost, and is no number when it is multiplied by a weight of 0.
func TestAPeerWithHugeNumbersIsNotUsed(t *testing.T) {
	honest := fresh("honest")
	honest.RTTMs, honest.Offer.TPMs, honest.Offer.T0Ms = 50, 0.001, 1
	for _, policy := range []string{"finish", "gorgo", "finish:qs=0", "gorgo:qs=0,w=0"} {
		p := must(t, policy)
		huge := fresh("huge")
		huge.RTTMs, huge.Offer.TPMs, huge.Offer.QueuedTokens, huge.Offer.Replicas = 1, 1e200, 1e200, 4
		local := full(with(replica("l"), func(x *Candidate) { x.QueuedTokens = 1e5 }))
		places := []Candidate{local, p.PeerCandidate(&huge), p.PeerCandidate(&honest)}
		p.Begin(places, 1000)
		d := p.Next(&Request{ID: "r", Tokens: 1000})
		require.Equal(t, Forward, d.Act, policy)
		require.Equal(t, "honest", places[d.Candidate].ID, policy)
		require.Equal(t, Nonsense, p.Judge(&huge), policy)
	}
}

func TestAPlaceIsCorrectedByWhatWasMispredicted(t *testing.T) {
	p := must(t, "finish")
	corrected := func(ms float64) Candidate { return with(replica("a"), func(x *Candidate) { x.ResidualMs = ms }) }
	r := &Request{ID: "r", Tokens: 1000}
	plain := next(p, r, 0, replica("a")).Terms.Total()
	require.InDelta(t, plain+40, next(p, r, 0, corrected(40)).Terms.Total(), 1e-9)
	require.InDelta(t, plain-40, next(p, r, 0, corrected(-40)).Terms.Total(), 1e-9)
	require.InDelta(t, plain/4, next(p, r, 0, corrected(-1e6)).Terms.Total(), 1e-9, "a quarter always counts")
	require.Equal(t, []string{"local b"}, acts(p, 0, []Candidate{corrected(20), replica("b")}, r))
}

func TestADrainIsTheTimeBetweenDepartures(t *testing.T) {
	var d DepartureGap
	d.Departed(1000, 0)
	require.Zero(t, d.Ms(), "one that did not wait says nothing")
	d.Entered(2000)
	d.Departed(2100, 1)
	require.Equal(t, 100.0, d.Ms())
	d.Departed(2300, 0)
	require.Equal(t, 120.0, d.Ms())
	d.Departed(9000, 0)
	require.Equal(t, 120.0, d.Ms(), "an idle queue is not a slow one")
}

func TestAutoUnanswered(t *testing.T) {
	require.Equal(t, 8, AutoUnanswered(0, 0))
	require.Equal(t, 8, AutoUnanswered(math.NaN(), 5))
	require.Equal(t, 30, AutoUnanswered(20, 1000))
	require.Equal(t, 64, AutoUnanswered(1e9, 1e9))
}

func TestAFewPlacesMoveWithOneOfARing(t *testing.T) {
	ids := []string{"eu", "us", "asia", "af"}
	all, fewer := NewRing(ids), NewRing(ids[:3])
	moved, total, counts := 0, 20_000, map[int]int{}
	for i := range total {
		k := RingKey(fmt.Sprint("session ", i), "", "")
		a := all.Find(k, func(int) bool { return true })
		counts[a]++
		if b := fewer.Find(k, func(int) bool { return true }); a != b {
			moved++
			require.Equal(t, 3, a, "only what was on the one that left moves")
		}
	}
	require.Equal(t, counts[3], moved)
	for owner, n := range counts {
		require.InDelta(t, total/4, n, float64(total)/8, ids[owner])
	}
	require.Equal(t, RingKey("s", "u", "a"), RingKey("s", "", ""), "a session before a user before an address")
	require.Equal(t, RingKey("", "u", "a"), RingKey("u", "", ""))
}

func drawPlaces(t *rapid.T) []Candidate {
	var places []Candidate
	for i := range rapid.IntRange(0, 4).Draw(t, "replicas") {
		places = append(places, Candidate{ID: fmt.Sprint("r", i)})
	}
	for i := range rapid.IntRange(0, 3).Draw(t, "peers") {
		places = append(places, Candidate{ID: fmt.Sprint("p", i), Peer: true, Replicas: 2, RTTMs: rapid.Float64Range(0, 300).Draw(t, "rtt")})
	}
	for i := range places {
		x := &places[i]
		x.TPMs, x.T0Ms = 0.1, 10
		x.QueuedTokens = rapid.Float64Range(0, 5000).Draw(t, "queued")
		x.Running = rapid.Float64Range(0, 40).Draw(t, "running")
		if x.Why = Reason(rapid.IntRange(0, int(BudgetSpent)).Draw(t, "why")); x.Why > Full+4 || x.Why == Available {
			x.Why, x.MaxSends = Available, rapid.IntRange(1, 3).Draw(t, "left")
		}
	}
	return places
}

func TestNoPlaceTakesMoreThanItHasLeft(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, err := parse(rapid.SampledFrom(Names()).Draw(t, "policy"))
		require.NoError(t, err)
		places := drawPlaces(t)
		taken := make([]int, len(places))
		passed := map[int]bool{} // places that an older forwardable request is held for
		p.Begin(places, 20)
		for i := range 12 {
			r := &Request{ID: fmt.Sprint(i), Key: uint64(i) << 60, Tokens: 1000, LocalOnly: rapid.Bool().Draw(t, "stay")}
			for range places {
				r.Hits = append(r.Hits, rapid.Int32Range(0, 999).Draw(t, "hit"))
			}
			done := p.Done()
			d := p.Next(r)
			if d.Act == Hold {
				if p.name == "finish" && d.Candidate >= 0 {
					passed[d.Candidate] = true
				}
				continue
			}
			require.False(t, done, "a round that is done sends nobody")
			x := &places[d.Candidate]
			taken[d.Candidate]++
			require.LessOrEqual(t, taken[d.Candidate], x.MaxSends)
			require.Equal(t, d.Act == Forward, x.Peer)
			require.False(t, x.Peer && (r.LocalOnly || p.name == "local-only"), "it may not be forwarded")
			require.False(t, passed[d.Candidate], "an older one waits for that place")
			if p.name != "finish" && x.Peer {
				for k := range places {
					require.False(t, !places[k].Peer && taken[k] < places[k].MaxSends, "local first")
				}
			}
		}
	})
}

func TestParse(t *testing.T) {
	for _, text := range append(Names(), "finish:push=sp-p,load=0", "skylb:push=sp-o,max_outstanding=8,tau=0",
		"gorgo:push=sp-p,load=50,patience=2") {
		require.Equal(t, text, must(t, text).String())
	}
	require.Equal(t, "finish", must(t, " finish:load=50 ").String(), "what is the default is not said again")
	require.Zero(t, must(t, "gorgo").Settings().BatchWeight)
	for _, row := range []struct{ name, text, want string }{
		{"an unknown policy", "sky", `unknown policy "sky" (did you mean "skylb" or "skylb-ch"?); there are finish, gorgo, skylb, skylb-ch, least-load, round-robin, local-only`},
		{"a key of another policy", "skylb:load=1", `policy skylb: unknown key "load"; it takes push, max_unanswered, max_outstanding, credit_max, tau`},
		{"no value", "finish:load", `policy finish: "load" is no setting; write key=value`},
		{"twice", "finish:w=1,w=2", `policy finish: w is set twice`},
		{"a word for a number", "finish:w=x", `policy finish: w=x: want a number from 0 to 1000000`},
		{"no number", "finish:w=NaN", `policy finish: w=NaN: want a number from 0 to 1000000`},
		{"half a request", "finish:max_unanswered=1.5", `policy finish: max_unanswered=1.5: want a whole number from 1 to 1000000`},
		{"another word", "finish:push=eager", `policy finish: push=eager: want sp-e, sp-p, sp-o, blind`},
		{"patience without what makes it safe", "gorgo:patience=2", `policy gorgo: patience=2 needs push=sp-p and a load above 0: without them it waits for replicas that are full for long`},
		{"a colon and nothing", "finish:", `policy finish: "" is no setting; write key=value`},
	} {
		_, err := parse(row.text)
		require.EqualError(t, err, row.want, row.name)
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{"finish", "skylb:tau=3", "gorgo:push=sp-p,load=50,patience=2", "finish:w=1e9", ":", "finish:b_ms=0x1p-3"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := parse(text)
		if err != nil {
			return
		}
		again, err := parse(p.String())
		require.NoError(t, err)
		require.Equal(t, p.String(), again.String())
		require.Equal(t, *p.Settings(), *again.Settings())
	})
}

// crowd is a region of 64 replicas with 8 peers.
func crowd() ([]Candidate, *Request) {
	var places []Candidate
	r := &Request{ID: "0123456789abcdef", Key: 42, Tokens: 3000}
	for i := range 72 {
		x := replica(fmt.Sprint("replica ", i))
		if i >= 64 {
			x = peer(fmt.Sprint("peer ", i), float64(i))
		}
		x.Running, x.QueuedTokens, x.MaxSends = float64(i*7%40), float64(i*331%4000), unlimited
		places, r.Hits = append(places, x), append(r.Hits, int32(i*97%2048))
	}
	return places, r
}

func BenchmarkDecide(b *testing.B) {
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			p := must(b, name)
			places, r := crowd()
			b.ReportAllocs()
			for b.Loop() {
				p.Begin(places, 20)
				p.Next(r)
			}
		})
	}
}

func TestADecisionAllocatesNothing(t *testing.T) {
	for _, name := range Names() {
		p := must(t, name)
		places, r := crowd()
		require.Zero(t, testing.AllocsPerRun(50, func() {
			p.Begin(places, 20)
			p.Next(r)
			p.Next(r)
		}), name)
	}
}
