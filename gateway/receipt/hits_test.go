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

func TestTheHostOnWhichRequestsFail(t *testing.T) {
	now := time.Date(2026, 1, 1, 3, 0, 0, 0, time.UTC)
	g := NewRing(100, 1<<20)
	add := func(status int, ended time.Duration, attempts ...Attempt) {
		l := g.Open(&Receipt{ID: strconv.Itoa(g.count), Arrival: now.Add(-ended)})
		l.End(func(r *Receipt) { r.Status, r.Attempts = status, attempts })
	}
	at := func(rank, cause string) Attempt { return Attempt{Cause: cause, Decode: &Decode{Rank: rank}} }
	add(502, time.Hour, at("b:8000", "status 500"))
	add(502, time.Second, at("b:8000", "status 500"), at("b:8001/3", "status 500"))
	add(502, time.Second, at("a:8000", "status 500"), at("b:8001/3", "status 500"))
	add(0, time.Second, at("a:8000", ""))
	add(429, time.Second, at("a:8000", "full"))
	add(503, time.Second, Attempt{Cause: "no room"})
	add(502, time.Second, Attempt{Cause: "status 500", Prefill: &Prefill{Candidate: "b:7000/0"}})
	host, most, all := g.FailedOn(now)
	require.Equal(t, "b", host)
	require.Equal(t, 3, most)
	require.Equal(t, 4, all)
	_, _, all = (*Ring)(nil).FailedOn(now)
	require.Zero(t, all)
}
