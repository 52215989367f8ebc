package policy

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// runs is a rank that decodes one request and has room for so many KV tokens more.
func runs(id int32, tokens, room int64) Worker {
	w := Worker{ID: id, Up: true, Free: 1, Running: []Request{{ID: 1000 + uint64(id), Prompt: int32(tokens) - 1, Generated: 1, Age: 1}}}
	if room > 0 {
		w.Capacity = tokens + room
	}
	return w
}

// A rank has to have room for an entry from its bind on, whenever it starts to decode.
func TestAnEntryCountsFromItsBindOn(t *testing.T) {
	for _, spec := range []string{"evenkeel:watermark=0", "pjsq-kv:watermark=0"} {
		for _, c := range []struct {
			name    string
			workers []Worker
			want    int
		}{
			{"it goes where least is held", []Worker{runs(0, 3000, 5000), runs(1, 4000, 9000)}, 0},
			{"with room without end, too", []Worker{runs(0, 4000, 0), runs(1, 3000, 0)}, 1},
		} {
			s := &Snapshot{Workers: c.workers, Pool: []Entry{{ID: 1, Prompt: 2000}}, MeanOutput: 160}
			require.Equal(t, [][2]int{{1, c.want}}, pairs(decide(t, spec, s)), "%s: %s", spec, c.name)
		}
	}
}

func TestWhatIsBoundHasItsRoomAndCounts(t *testing.T) {
	s := &Snapshot{
		Workers:    []Worker{{ID: 0, Up: true, Free: 1, Capacity: 5500, Running: []Request{{ID: 9, Prompt: 4000}}}},
		MeanOutput: 100,
	}
	p, err := Parse("evenkeel:watermark=0")
	require.NoError(t, err)
	s.Pool = []Entry{{ID: 1, Prompt: 2000}}
	require.Empty(t, p.Decide(s, nil), "1500 tokens of room")
	require.EqualValues(t, (4000+25)<<fixedBits, p.(*evenkeel).loads.load[0])
	s.Pool[0].Prompt = 1500
	require.Len(t, p.Decide(s, nil), 1)

	var e envelope
	e.build(s, 0)
	require.EqualValues(t, 4000, e.heldTokens[0])
	require.EqualValues(t, 4000, e.loadsOf(0)[0])
	for _, spec := range []string{"br0:watermark=0", "brh:watermark=0", "pjsq:watermark=0"} {
		s.Pool = []Entry{{ID: 1, Prompt: 2000}}
		require.Empty(t, decide(t, spec, s), spec)
	}
}

// Each step of a projection is what the plain rule gives.
func TestAProjectionCountsARequestUntilItsEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		horizon := rapid.IntRange(0, 40).Draw(t, "horizon")
		running := make([]Request, rapid.IntRange(1, 5).Draw(t, "running"))
		for i := range running {
			running[i] = Request{
				Prompt: rapid.Int32Range(0, 50).Draw(t, "prompt"),
				Rhat:   float32(rapid.IntRange(0, 90).Draw(t, "rhat")) / 2,
			}
		}
		got := make([]int64, horizon+1)
		Project(got, running)
		for h, x := range got {
			want := int64(0)
			for _, r := range running {
				if r.Rhat == 0 || r.Rhat >= float32(horizon) || float32(h) < r.Rhat {
					want += int64(r.Prompt) + int64(h)
				}
			}
			require.Equal(t, want, x, "step %d", h)
		}
	})
}

// A request that is bound counts as the entry did that it was.
func TestABoundRequestCountsAsItsEntry(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := Entry{ID: rapid.Uint64().Draw(t, "id"), Prompt: rapid.Int32Range(1, 5000).Draw(t, "prompt")}
		s := &Snapshot{Workers: []Worker{{Up: true, Free: 1}}, Pool: []Entry{e}, MeanOutput: rapid.Float64Range(0, 300).Draw(t, "mean output")}
		parsed, err := Parse("evenkeel")
		require.NoError(t, err)
		p := parsed.(*evenkeel)
		require.Len(t, p.Decide(s, nil), 1)
		entry := p.candidates.all[0].load

		s.Workers[0].Running = []Request{{ID: e.ID, Prompt: e.Prompt}}
		p.loads.build(s, 0)
		require.Equal(t, entry, p.loads.load[0])
		require.Equal(t, int64(e.Prompt), p.loads.heldTokens[0])
	})
}
