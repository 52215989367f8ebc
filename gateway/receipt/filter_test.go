package receipt

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFilter(t *testing.T) {
	g := NewRing(10, 1<<20)
	for _, r := range []Receipt{
		{ID: "aa1", Model: "m", Key: "team-a", Outcome: "ok", TTFT: 900, Total: 5000, Attempts: []Attempt{{Prefill: &Prefill{Candidate: "p1:8000/0"}, Decode: &Decode{Rank: "d1:8000/3"}}}},
		{ID: "aa2", Model: "m", ClientID: "their-own", Outcome: "ok", TTFT: 90},
		{ID: "bb3", Model: "n", Outcome: "upstream_broken", Status: 502, Total: 7000},
		{ID: "bb4", Model: "n", Outcome: "queue_full", Status: 429},
		{ID: "bb5", Model: "n", Outcome: "invalid_json", Status: 400},
		{ID: "bb6", Model: "n", Outcome: "client_closed", Status: 499},
	} {
		r.Arrival = time.Unix(int64(r.ID[2]), 0)
		g.Open(&r).End(func(*Receipt) {})
	}
	for name, tt := range map[string]struct {
		f    Filter
		want string
	}{
		"all":                   {Filter{}, "654321"},
		"a model":               {Filter{Model: "m"}, "21"},
		"a key":                 {Filter{Key: "team-a"}, "1"},
		"what failed":           {Filter{Outcome: Failed}, "43"},
		"how it ended":          {Filter{Outcome: "client_closed"}, "6"},
		"a rank":                {Filter{Engine: "d1:8000/3"}, "1"},
		"a prefill engine":      {Filter{Engine: "p1"}, "1"},
		"part of an id":         {Filter{ID: "bb"}, "6543"},
		"the client's id":       {Filter{ID: "their"}, "2"},
		"slow, or slow to fail": {Filter{SlowMs: 500}, "31"},
		"all of it":             {Filter{Outcome: Failed, SlowMs: 500, Model: "n"}, "3"},
		"there is none":         {Filter{Key: "team-b"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := ""
			for _, r := range g.Last(9, tt.f, false) {
				got += r.ID[2:]
			}
			require.Equal(t, tt.want, got)
		})
	}
	require.Len(t, g.Last(1, Filter{Model: "n"}, false), 1, "and no more than are asked for")
}

func TestRequestsThatRunAreSlowSinceTheyCame(t *testing.T) {
	g := NewRing(10, 1<<20)
	for id, r := range map[string]Receipt{"stuck": {Arrival: time.Now().Add(-time.Hour)}, "new": {Arrival: time.Now()},
		"answered": {Arrival: time.Now().Add(-time.Hour), TTFT: 90}} {
		r.ID = id
		g.Open(&r)
	}
	list := g.Last(9, Filter{SlowMs: 600_000}, true)
	require.Len(t, list, 1)
	require.Equal(t, "stuck", list[0].ID)
}
