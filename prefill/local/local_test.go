package local

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/bench/lab/refengine"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
	"evenkeel/prefill/policy"
)

func two() *Ranks {
	l := New(1 << 20)
	l.Set(pair(true, true))
	return l
}

func pair(a, b bool) []Rank {
	return []Rank{{ID: 1, Name: "d/0", Model: "m", Engine: "d", Capacity: 100_000, Up: a},
		{ID: 2, Name: "e/0", Model: "m", Engine: "e", Capacity: 100_000, Up: b}}
}

// ids is a prompt of so many token ids that begins as all of the same seed do.
func ids(seed, tokens int) *Prompt {
	list := make([]int32, tokens)
	for i := range list {
		list[i] = int32(seed*100_000 + i)
	}
	var h index.Hasher
	keys := h.Tokens(nil, index.Scope{Model: "m"}.Root(index.Tokens, 16), list, 16)
	return &Prompt{Prompt: prefill.Prompt{Keys: keys, BlockTokens: 16}, Model: "m", Tokens: tokens}
}

func TestARankIsOfferedWhatItDoesNotHold(t *testing.T) {
	l := two()
	l.NoteHeld(1, ids(7, 2816), 2816, time.Now())
	require.Equal(t, []Offer{{1, 2816, 184}, {2, 0, 3000}}, l.Offers(ids(7, 3000), nil))
	require.Equal(t, []Offer{{1, 0, 200}, {2, 0, 200}}, l.Offers(ids(8, 200), nil))
	require.Equal(t, []Offer{{2, 0, 3000}}, l.Offers(ids(7, 3000), []int32{1}))
	require.Equal(t, Offer{1, 2800, 16}, l.Offers(ids(7, 2816), nil)[0], "the last block is always computed")
	require.Empty(t, l.Offers(&Prompt{Model: "other", Tokens: 5}, nil))
	require.True(t, l.AnyComputes("m"))
	require.False(t, l.AnyComputes("other"))
}

func TestARankThatComesBackHoldsNothing(t *testing.T) {
	l := two()
	l.NoteHeld(1, ids(7, 2816), 2816, time.Now())
	l.Set(pair(false, true))
	require.Equal(t, []Offer{{2, 0, 3000}}, l.Offers(ids(7, 3000), nil))
	l.Set(pair(true, true))
	require.Equal(t, 3000, l.Offers(ids(7, 3000), nil)[0].New)
	l.Set(pair(true, true)[1:])
	require.Len(t, l.Offers(ids(7, 3000), nil), 1)
	l.NoteHeld(1, ids(7, 2816), 2816, time.Now()) // what it still ran ends
	l.Computed(1, ids(7, 2816), 2816, 2800, 0, time.Now())
}

func TestAnEngineIsTakenAtItsWord(t *testing.T) {
	l := two()
	l.NoteHeld(1, ids(7, 2816), 2816, time.Now())
	l.Computed(1, ids(7, 3000), 3000, 2816, -1, time.Now())
	require.Equal(t, Offer{1, 2816, 3000}, l.Offers(ids(7, 3000), nil)[0], "it does not say what it found: no long prompt for it")
	for range 60 { // short prompts show that it has a cache
		l.Computed(1, ids(9, 100), 100, 96, 96, time.Now())
	}
	require.Equal(t, 184, l.Offers(ids(7, 3000), nil)[0].New)

	l.NoteHeld(2, ids(5, 960), 960, time.Now())
	l.Computed(2, ids(5, 1000), 1000, 960, 480, time.Now())
	require.Equal(t, 992, l.Offers(ids(5, 1000), nil)[1].Hit, "it had half of it and has all of it now")
	require.Equal(t, 8, l.Offers(ids(5, 1000), nil)[1].New)
}

func TestTheLengthOfAPromptIsLearned(t *testing.T) {
	l := two()
	p := &Prompt{Prompt: prefill.Prompt{Bytes: 4000}, Model: "m"}
	require.Equal(t, 1000, l.Length(p))
	for range 200 {
		l.NoteHeld(1, p, 500, time.Now())
	}
	require.InDelta(t, 500, l.Length(p), 2)
	require.Equal(t, 700, l.Length(&Prompt{Model: "m", Tokens: 700}))
}

func TestBreakEvenCountsWhatAHandoffTakes(t *testing.T) {
	l := two()
	latency := policy.Latency{TPMs: 0.1, T0Ms: 20}
	p := &Prompt{Model: "m", Tokens: 1000}
	require.InDelta(t, 150, l.BreakEven(p, latency, 5*time.Millisecond), 1e-9)
	for i := range 40 {
		tokens := 100 * (1 + i%10)
		l.Moved("m", tokens, time.Duration(tokens)*20*time.Microsecond+3*time.Millisecond)
	}
	require.InDelta(t, 350, l.BreakEven(p, latency, 5*time.Millisecond), 1, "and 20 µs a token of the pull")
}

// A stream begins where an engine publishes, and ends with its rank, with its source, and at the
// end.
func TestWhoPublishesIsFollowed(t *testing.T) {
	l := New(1 << 20)
	ranks := pair(true, true)
	followed := func() (ids []string) {
		for _, e := range l.Events() {
			ids = append(ids, e.ID+" at "+e.Events.Source)
		}
		return ids
	}
	set := func(sources ...string) {
		for i := range ranks {
			ranks[i].Events = prefill.EventSource{Place: kvevents.Place{Events: sources[i]}, Model: "m"}
		}
		l.Set(ranks)
	}
	set("127.0.0.1:1", "")
	require.Equal(t, []string{"d/0 at 127.0.0.1:1"}, followed())
	set("127.0.0.1:1", "127.0.0.1:2")
	require.Equal(t, []string{"d/0 at 127.0.0.1:1", "e/0 at 127.0.0.1:2"}, followed())
	require.Equal(t, "approximate", l.Events()[0].Mode, "nobody answers")
	set("127.0.0.1:3", "")
	require.Equal(t, []string{"d/0 at 127.0.0.1:3"}, followed())
	l.NoteHeld(1, ids(7, 2816), 2816, time.Now())
	require.Equal(t, 2816, l.Offers(ids(7, 3000), nil)[0].Hit, "then answers tell")
	l.Forget(l.IDs())
	require.Zero(t, l.Offers(ids(7, 3000), nil)[0].Hit)
	l.Set(ranks[1:])
	require.Empty(t, followed())
	set("127.0.0.1:1", "127.0.0.1:2")
	l.Close()
	require.Empty(t, followed())
	l.Set(ranks)
	require.Empty(t, followed(), "none begins any more")
	require.Zero(t, l.BlockTokens("m"))
}

// What answers have told of a rank is dropped once its events are precise, because they never name
// these blocks as removed.
func TestPreciseEventsReplaceWhatAnswersTold(t *testing.T) {
	engine, err := refengine.Start(refengine.Config{Role: refengine.Prefill, KVEvents: refengine.KVEvents{Address: "127.0.0.1:0"},
		KV: refengine.KV{PrefixCache: 100}})
	require.NoError(t, err)
	t.Cleanup(engine.Close)
	l, ranks := New(1<<20), pair(true, true)
	t.Cleanup(l.Close)
	l.Set(ranks)
	l.NoteHeld(1, ids(7, 2816), 2816, time.Now())
	events, replay := engine.KVEvents(0)
	ranks[0].Events = prefill.EventSource{Place: kvevents.Place{Events: events, Replay: replay}, Model: "m"}
	l.Set(ranks)
	require.Equal(t, 2816, l.Offers(ids(7, 3000), nil)[0].Hit, "until then, answers tell")
	require.Eventually(t, func() bool { return l.Events()[0].Mode == "precise" }, 10*time.Second, 2*time.Millisecond)
	l.NoteHeld(1, ids(8, 2816), 2816, time.Now())
	require.Equal(t, []Offer{{1, 0, 3000}, {2, 0, 3000}}, l.Offers(ids(7, 3000), nil), "the engine's cache is empty")
}

// Whatever is held, told and taken away: an offer is within the prompt, and one
// for every rank that is up.
func TestOffersAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := two()
		up := []bool{true, true}
		for range rapid.IntRange(1, 40).Draw(t, "events") {
			rank := rapid.Int32Range(1, 3).Draw(t, "rank")
			p := ids(rapid.IntRange(1, 3).Draw(t, "seed"), rapid.IntRange(1, 600).Draw(t, "tokens"))
			switch rapid.IntRange(0, 3).Draw(t, "event") {
			case 0:
				l.NoteHeld(rank, p, p.Tokens, time.Now())
			case 1:
				l.Computed(rank, p, p.Tokens, rapid.IntRange(0, p.Tokens).Draw(t, "hit"), rapid.IntRange(-1, p.Tokens).Draw(t, "cached"), time.Now())
			case 2:
				up[rapid.IntRange(0, 1).Draw(t, "which")] = rapid.Bool().Draw(t, "up")
				l.Set(pair(up[0], up[1]))
			}
			offers := l.Offers(p, nil)
			n := 0
			for _, u := range up {
				if u {
					n++
				}
			}
			require.Len(t, offers, n)
			for _, o := range offers {
				require.GreaterOrEqual(t, o.Hit, 0)
				require.Less(t, o.Hit, p.Tokens)
				require.Contains(t, []int{p.Tokens, p.Tokens - o.Hit}, o.New)
			}
		}
	})
}

func BenchmarkOffers(b *testing.B) {
	l := New(64 << 20)
	var ranks []Rank
	for i := range int32(144) {
		ranks = append(ranks, Rank{ID: i, Name: string('a' + i), Model: "m", Engine: string('a' + i/16), Up: true})
	}
	l.Set(ranks)
	for i := range int32(144) {
		l.NoteHeld(i, ids(int(i%9), 4000), 4000, time.Now())
	}
	p := ids(3, 4100)
	b.ReportAllocs()
	for b.Loop() {
		l.Offers(p, nil)
	}
}

// A cache that was emptied is not believed to hold what requests tell later that were sent before.
func TestWhatIsToldLateOfACacheThatWasEmptied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(1 << 20)
		l.Set([]Rank{{ID: 1, Name: "d/0", Model: "m", Engine: "d", Up: true},
			{ID: 2, Name: "e/0", Model: "m", Engine: "e", Up: true}})
		sent := time.Now()
		l.NoteHeld(1, ids(7, 2816), 2816, sent)
		l.NoteHeld(2, ids(7, 2816), 2816, sent)
		time.Sleep(time.Second)
		l.Forget([]int32{1, 99})
		l.NoteHeld(1, ids(7, 2816), 2816, sent)
		l.Computed(1, ids(7, 2816), 2816, 2800, 0, sent)
		require.Zero(t, l.Offers(ids(7, 3000), nil)[0].Hit)
		require.Equal(t, 2816, l.Offers(ids(7, 3000), nil)[1].Hit, "another cache is as it was")
		time.Sleep(time.Second)
		l.NoteHeld(1, ids(7, 2816), 2816, time.Now())
		require.Equal(t, 2816, l.Offers(ids(7, 3000), nil)[0].Hit)
	})
}
