package fit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// probe is one of an engine: when it was sent and answered, in ms, and its new tokens.
type probe struct {
	sent, answered int
	tokens         float64
	void           bool
}

// stretched gives an engine's answers in their order, and returns what was learned.
func stretched(rtt time.Duration, probes ...probe) (all []Sample) {
	at := func(ms int) time.Time { return time.Unix(1000, 0).Add(time.Duration(ms) * time.Millisecond) }
	t := ComputeTimer{}
	for i, p := range probes {
		var oldest time.Time // sent before this answer, answered after it
		for _, o := range probes[i+1:] {
			if o.sent <= p.answered && (oldest.IsZero() || at(o.sent).Before(oldest)) {
				oldest = at(o.sent)
			}
		}
		answer := Answer{Sent: at(p.sent), RTT: rtt, Unusable: p.void, Sample: Sample{New: p.tokens}}
		all = append(all, t.Answered(answer, oldest, at(p.answered))...)
	}
	return all
}

func TestPrefillsAreToldApart(t *testing.T) {
	for _, tt := range []struct {
		name   string
		rtt    time.Duration
		probes []probe
		want   []Sample
	}{
		{"alone, each from its arrival", 0, []probe{{0, 100, 1, false}, {500, 700, 2, false}}, []Sample{{New: 1, Ms: 100}, {New: 2, Ms: 200}}},
		{"one behind the other", 0, []probe{{0, 100, 1, false}, {10, 300, 2, false}, {20, 350, 3, false}}, []Sample{{New: 1, Ms: 100}, {New: 2, Ms: 200}, {New: 3, Ms: 50}}},
		{"the way counts only where the engine waited for it", 40 * time.Millisecond, []probe{{0, 140, 1, false}, {10, 340, 2, false}}, []Sample{{New: 1, Ms: 100}, {New: 2, Ms: 200}}},
		{"answered in one step: one prefill", 0, []probe{{0, 100, 1, false}, {1, 102, 2, false}, {2, 104, 4, false}, {3, 300, 8, false}}, []Sample{{New: 7, Ms: 104}, {New: 8, Ms: 196}}},
		{"in one step in any order", 0, []probe{{1, 100, 1, false}, {0, 101, 2, false}, {2, 301, 4, false}}, []Sample{{New: 3, Ms: 100}, {New: 4, Ms: 200}}},
		{"overtaken: nobody knows what was done when", 0, []probe{{10, 100, 1, false}, {0, 300, 2, false}, {20, 500, 4, false}}, []Sample{{New: 4, Ms: 200}}},
		{"a void one teaches nothing, and the next is told from it", 0, []probe{{0, 100, 1, true}, {10, 300, 2, false}}, []Sample{{New: 2, Ms: 200}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			require.Equal(t, tt.want, stretched(tt.rtt, tt.probes...))
		})
	}
}

func TestWhoWaitedWithADroppedProbeTeachesNothing(t *testing.T) {
	at := func(ms int) time.Time { return time.Unix(1000, 0).Add(time.Duration(ms) * time.Millisecond) }
	s := ComputeTimer{}
	s.ProbeDropped(at(50))
	require.Empty(t, s.Answered(Answer{Sent: at(10), Sample: Sample{New: 1}}, at(60), at(200)), "it waited with it")
	require.Empty(t, s.Answered(Answer{Sent: at(60), Sample: Sample{New: 2}}, at(70), at(300)),
		"nothing of the first; others may be answered with this one")
	require.Equal(t, []Sample{{New: 2, Ms: 100}, {New: 3, Ms: 50}},
		s.Answered(Answer{Sent: at(70), Sample: Sample{New: 3}}, time.Time{}, at(350)))
}

func TestPromptsThatAreComputedTogetherHaveTheirAttentionTogether(t *testing.T) {
	s := Sample{New: 100, Hit: 900}
	s.merge(Sample{New: 300, Hit: 50})
	require.Equal(t, 400.0, s.New)
	require.InDelta(t, 100*(900+50)+300*(50+150), s.New*(s.Hit+s.New/2), 1e-6)
}
