package detect

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The labels of the metric are of the finding that the page tells first, and of one that is there.
func TestThePagerNamesWhatThePageTells(t *testing.T) {
	out := Finding{Kind: EngineOut, Severity: Bad, WhereKind: "decode engine", Where: "h:1", What: "Decode engine h:1 is out"}
	var b Book
	for s, found := range [][]Finding{{out}, {out, down("h:2", refused)}, {down("h:2", refused)}} {
		b.Observe(noon.Add(time.Duration(s)*time.Second), found)
	}
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, down("h:2", refused).What, in[0].What)
	require.Equal(t, EngineDown, in[0].Kind)
	require.Equal(t, "h:2", in[0].Subject, "h:1 is up again")
}

// In any sequence of findings, what an incident is named by is found now, or comes and goes.
func TestThePagerNamesWhatIsThere(t *testing.T) {
	kindsThere := slices.Sorted(maps.Keys(kinds))
	rapid.Check(t, func(t *rapid.T) {
		var b Book
		foundAt := map[subject]time.Time{}
		at := noon
		for range rapid.IntRange(1, 60).Draw(t, "looks") {
			at = at.Add(time.Duration(rapid.SampledFrom([]int{1, 5, 20, 70}).Draw(t, "seconds")) * time.Second)
			var found []Finding
			for range rapid.IntRange(0, 4).Draw(t, "findings") {
				f := Finding{
					Kind: rapid.SampledFrom(kindsThere).Draw(t, "kind"), Severity: rapid.SampledFrom([]string{Bad, Warn}).Draw(t, "severity"),
					WhereKind: "decode engine", Where: rapid.SampledFrom([]string{"h:1", "h:2", "g:1", ""}).Draw(t, "where"),
				}
				f.What = fmt.Sprintf("It is %s at %q", f.Kind, f.Where)
				foundAt[f.subject()] = at
				found = append(found, f)
			}
			b.Observe(at, found)
			for _, in := range b.Incidents() {
				if in.UntilMs > 0 {
					continue
				}
				named := subject{in.Kind, in.Subject}
				if absent := at.Sub(foundAt[named]); absent > 0 {
					mayComeBack := max(kinds[in.Kind].toleratedAbsence, 90*time.Second)
					require.Less(t, absent, mayComeBack, "%v is named, and is over", named)
				}
				require.Contains(t, append(in.Where, ""), in.Subject)
			}
		}
	})
}

// An engine that is killed and started again and again, with what is found in between: one
// incident, which counts, and which the metric has from the third time on without a gap.
func TestWhatComesAndGoesIsOneIncident(t *testing.T) {
	between := map[string]func(down int) []Finding{
		"nothing": func(int) []Finding { return nil },
		"it is slow when it is back": func(down int) []Finding {
			if down > 0 {
				return []Finding{amiss("h:1")}
			}
			return nil
		},
		"its requests fail": func(down int) []Finding {
			if down > 1 {
				return []Finding{{Kind: EngineOut, Severity: Bad, WhereKind: "decode engine", Where: "h:1", What: "It is out"}, failing2()}
			}
			return nil
		},
	}
	for name, also := range between {
		for _, span := range []int{5, 7, 10, 20, 30, 60} {
			for _, every := range []int{1, 5} {
				t.Run(fmt.Sprint(name, ", spans of ", span, " s, looks of ", every, " s"), func(t *testing.T) {
					var b Book
					times := 0 // that it was killed
					for s := 0; s < 18*span; s += every {
						var found []Finding
						if s/span%2 == 0 {
							times = s/span/2 + 1
							found = []Finding{down("h:1", refused)}
						} else {
							found = also(times)
						}
						b.Observe(noon.Add(time.Duration(s)*time.Second), found)
						if times < 3 {
							continue
						}
						in := b.Incidents()
						lead := in[0]
						require.Equal(t, subject{EngineDown, "h:1"}, subject{lead.Kind, lead.Subject}, "after %d s", s)
						require.Equal(t, []any{int64(0), Bad, times}, []any{lead.UntilMs, lead.Severity, lead.Times}, "after %d s", s)
						require.Equal(t, noon.UnixMilli(), lead.SinceMs, "after %d s", s)
						for _, other := range in[1:] {
							require.NotEqual(t, EngineDown, other.Kind, "after %d s", s)
						}
					}
					end := noon.Add(time.Duration(18*span) * time.Second)
					b.Observe(end.Add(2*time.Minute), nil)
					require.NotZero(t, b.Incidents()[0].UntilMs)
				})
			}
		}
	}
}

// Requests that failed at two restarts are over, and no alert is kept for them.
func TestTwoRestartsDoNotComeAndGo(t *testing.T) {
	var b Book
	for s := range 200 {
		var found []Finding
		if s < 10 || s >= 90 && s < 100 {
			found = []Finding{down("h:1", refused), failing2()}
		}
		b.Observe(noon.Add(time.Duration(s)*time.Second), found)
		in := b.Incidents()
		require.Len(t, in, 1)
		require.Equal(t, len(found) > 0, in[0].UntilMs == 0, "after %d s", s)
	}
}

// An engine that is restarted once, or each engine once after the other, does not come and go.
func TestARestartDoesNotComeAndGo(t *testing.T) {
	var b Book
	for s := range 240 {
		var found []Finding
		if engine := s / 60; s%60 < 40 {
			found = []Finding{down(fmt.Sprint("h:", engine), refused)}
		}
		b.Observe(noon.Add(time.Duration(s)*time.Second), found)
		lasting := 0
		for _, in := range b.Incidents() {
			require.Equal(t, 1, in.Times)
			if in.UntilMs == 0 {
				lasting++
			}
		}
		require.Equal(t, len(found), lasting, "after %d s", s)
	}
}

// What is over is told by what led for most of the time.
func TestWhatIsOverIsToldByWhatLedLongest(t *testing.T) {
	lost := Finding{Kind: HandoffsLost, Severity: Bad, WhereKind: "prefill engine", Where: "p:1", What: "Hand-offs of p:1 do not arrive"}
	out := Finding{Kind: EngineOut, Severity: Bad, WhereKind: "prefill engine", Where: "p:1", What: "Prefill engine p:1 is out"}
	var b Book
	for s := range 60 {
		found := []Finding{lost}
		if s < 6 || s >= 54 {
			found = []Finding{out}
		}
		b.Observe(noon.Add(time.Duration(s)*time.Second), found)
	}
	b.Observe(noon.Add(time.Minute), nil)
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, lost.What, in[0].What)
	require.Equal(t, HandoffsLost, in[0].Kind)
}
