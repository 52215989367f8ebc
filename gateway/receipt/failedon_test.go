package receipt

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTheHostOnWhichRequestsFail(t *testing.T) {
	now := time.Date(2026, 1, 1, 3, 0, 0, 0, time.UTC)
	type request struct {
		status   int
		ended    time.Duration
		attempts []Attempt
	}
	on := func(names ...string) (list []Attempt) {
		for _, name := range names {
			list = append(list,
				Attempt{Cause: "status 500", FailedOn: name, Prefill: &Prefill{Candidate: "p:7000/0"}, Decode: &Decode{Rank: "d:8000"}})
		}
		return list
	}
	of := func(n int, names ...string) []request {
		return slices.Repeat([]request{{502, time.Second, on(names...)}}, n)
	}
	for name, tt := range map[string]struct {
		requests  []request
		host      string
		most, all int
	}{
		"most fail on one host": {[]request{
			{502, time.Hour, on("b:8000")},
			{502, time.Second, on("b:8000", "b:8001/3")},
			{502, time.Second, on("a:8000", "b:8001/3")},
			{0, time.Second, on("a:8000")},
			{429, time.Second, on("a:8000")},
			{503, time.Second, on("")},
			{502, time.Second, on("b:7000/0")},
		}, "b", 3, 4},
		"both hosts fail every request": {of(9, "a:8000", "b:8000"), "", 0, 9},
		"the second host fails some":    {append(of(7, "a:8000"), of(3, "a:8001", "b:8000")...), "a", 10, 10},
		"the second host fails half":    {append(of(5, "a:8000"), of(5, "b:8000", "a:8001")...), "", 0, 10},
		"no rank had room":              {of(9, ""), "", 0, 9},
		"a group of ranks is no host":   {of(9, "main of m+aggregated"), "", 0, 9},
		"one request fails there twice": {of(1, "a:8000", "a:8001"), "a", 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewRing(100, 1<<20)
			for i, r := range tt.requests {
				g.Open(&Receipt{ID: strconv.Itoa(i), Arrival: now.Add(-r.ended)}).End(func(x *Receipt) { x.Status, x.Attempts = r.status, r.attempts })
			}
			host, most, all := g.FailedOn(now)
			require.Equal(t, tt.host, host)
			require.Equal(t, tt.most, most)
			require.Equal(t, tt.all, all)
		})
	}
	_, _, all := (*Ring)(nil).FailedOn(now)
	require.Zero(t, all)
}
