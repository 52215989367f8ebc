package receipt

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHitsOfAKey(t *testing.T) {
	now := time.Date(2026, 1, 1, 3, 0, 0, 0, time.UTC)
	g := NewRing(100, 1<<20)
	add := func(key string, ended time.Duration, prompt, cached int) {
		l := g.Open(&Receipt{ID: strconv.Itoa(g.count), Key: key, Arrival: now.Add(-ended - time.Second)})
		l.End(func(r *Receipt) { r.PromptTokens, r.CachedTokens, r.Total = prompt, cached, 1000 })
	}
	add("agents", 20*time.Minute, 1000, 0) // too long ago
	add("agents", 5*time.Minute, 1000, 900)
	add("agents", 2*time.Minute, 1000, 980)
	add("chat", 30*time.Second, 1000, 500)
	add("agents", 20*time.Second, 1000, 10)
	add("agents", 10*time.Second, 1000, -1)                                           // nobody knows
	add("agents", time.Second, 0, 0)                                                  // it failed before its prefill
	l := g.Open(&Receipt{ID: "index", Key: "agents", Arrival: now.Add(-time.Second)}) // its engine does not say
	l.End(func(r *Receipt) {
		r.PromptTokens, r.CachedTokens, r.Attempts = 1000, -1, []Attempt{{Prefill: &Prefill{Hit: 5}}}
	})
	lately, before := g.Hits("agents", now)
	require.Equal(t, Hits{3000, 15}, lately)
	require.Equal(t, Hits{2000, 1880}, before)
	lately, before = (*Ring)(nil).Hits("agents", now)
	require.Zero(t, lately)
	require.Zero(t, before)
}

// The hits of a quarter of an hour do not depend on how many receipts are kept.
func TestHitsOfMoreRequestsThanAreKept(t *testing.T) {
	now := time.Date(2026, 1, 1, 3, 0, 40, 0, time.UTC)
	g := NewRing(10, 1<<20)
	for s := 899; s >= 0; s-- { // 100 a second, and since 40 s nothing is in the caches
		for i := range 100 {
			g.Open(&Receipt{ID: strconv.Itoa(i), Key: "agents", Arrival: now.Add(-time.Duration(s) * time.Second)}).End(func(r *Receipt) {
				if r.PromptTokens = 10; s > 40 {
					r.CachedTokens = 9
				}
			})
		}
	}
	lately, before := g.Hits("agents", now)
	require.Equal(t, Hits{41_000, 0}, lately)
	require.Equal(t, Hits{14 * 60_000, 14 * 54_000}, before)
	lately, before = g.Hits("agents", now.Add(5*time.Minute))
	require.Zero(t, lately)
	require.Equal(t, Hits{9*60_000 + 41_000, 9 * 54_000}, before)
	lately, before = g.Hits("agents", now.Add(time.Hour))
	require.Zero(t, lately)
	require.Zero(t, before)
}

// Keys are bounded: one more finds room once another has sent nothing for a quarter of an hour.
func TestKeysThatHaveHits(t *testing.T) {
	now := time.Date(2026, 1, 1, 3, 0, 0, 0, time.UTC)
	g := NewRing(10, 1<<20)
	add := func(key string, at time.Time) Hits {
		g.Open(&Receipt{ID: key, Key: key, Arrival: at}).End(func(r *Receipt) { r.PromptTokens, r.CachedTokens = 10, 5 })
		last, _ := g.Hits(key, at)
		return last
	}
	for i := range maxKeys {
		require.Equal(t, Hits{10, 5}, add(strconv.Itoa(i), now))
	}
	require.Zero(t, add("another", now))
	require.Equal(t, Hits{20, 10}, add("0", now), "who is known is counted on")
	now = now.Add(minutesKept * time.Minute)
	require.Equal(t, Hits{10, 5}, add("0", now))
	require.Equal(t, Hits{10, 5}, add("another", now))
	require.Len(t, g.hits, 2)
}

// A clock that is set back leaves sums of minutes that have not come yet. They belong to the past,
// and their places are free.
func TestHitsAfterTheClockWasSetBack(t *testing.T) {
	now := time.Date(2026, 1, 1, 3, 0, 0, 0, time.UTC)
	g := NewRing(10, 1<<20)
	add := func(key string, ended time.Time, cached int) {
		g.Open(&Receipt{ID: "r", Key: key, Arrival: ended}).End(func(r *Receipt) { r.PromptTokens, r.CachedTokens = 10, cached })
	}
	for i := range maxKeys {
		add(strconv.Itoa(i), now, 0)
	}
	now = now.Add(-time.Hour) // the same place in the ring of minutes
	last, before := g.Hits("0", now)
	require.Zero(t, last)
	require.Zero(t, before)
	add("0", now, 9)
	last, before = g.Hits("0", now)
	require.Equal(t, Hits{10, 9}, last)
	require.Zero(t, before)
	add("another", now, 5)
	last, _ = g.Hits("another", now)
	require.Equal(t, Hits{10, 5}, last, "the keys that sent nothing since make room")
}
