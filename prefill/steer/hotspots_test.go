package steer

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const hot = uint64(7)

// crowd is a detector that has seen n requests, own of them of the hot class.
func crowd(n, own int) (*Hotspots, time.Time) {
	h, now := NewHotspots(), time.Unix(1000, 0)
	for i := range n {
		class := uint64(0)
		if i < own {
			class = hot
		}
		h.CountRequest(now, class)
	}
	return h, now
}

func TestAClassIsAlarmedWhenItsShareExceedsThatOfItsHolders(t *testing.T) {
	for _, tt := range []struct {
		name            string
		n, own          int
		holders, others int
		want            State
	}{
		{"below: 120 > 160", 100, 20, 2, 6, OK},
		{"equal: 150 > 150", 100, 25, 2, 6, OK},
		{"above: 156 > 148", 100, 26, 2, 6, Alarm},
		{"too few requests to say", 19, 19, 2, 6, OK},
		{"just enough requests", 20, 20, 2, 6, Alarm},
		{"nobody holds it", 100, 90, 0, 8, OK},
		{"all hold it", 100, 90, 8, 0, OK},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h, now := crowd(tt.n, tt.own)
			require.Equal(t, tt.want, h.UpdateState(now, hot, tt.holders, tt.others))
		})
	}
}

func TestAnAlarmedClassIsFilteredWhenItStaysWithItsHolders(t *testing.T) {
	h, now := crowd(100, 30)
	require.Equal(t, Alarm, h.UpdateState(now, hot, 2, 6))
	for i, stays := range []bool{true, true, true, true, false, true, true, true, true, true} {
		rest := 1.0 // equal scores stay: ties go to the side with the cache
		if !stays {
			rest = 0.5
		}
		want := Alarm
		if i == 9 {
			want = Filter
		}
		require.Equal(t, want, h.RecordScores(now, hot, 1, rest), "request %d", i+1)
	}
	// One more holds it now.
	require.Equal(t, OK, h.UpdateState(now, hot, 3, 5))
	require.Zero(t, h.classes[hot].holderWinsInRow)
	var to []State
	for _, change := range h.Changes() {
		to = append(to, change.To)
	}
	require.Equal(t, []State{Alarm, Filter, OK}, to)
	require.Empty(t, h.Changes())
}

func TestReplicationStopsAtTheClassesShare(t *testing.T) {
	h, now := crowd(100, 60)
	h.UpdateState(now, hot, 2, 6)
	for range 5 {
		h.RecordScores(now, hot, 0, 1)
	}
	holders, filtered := 2, 0
	for h.UpdateState(now, hot, holders, 8-holders) == Filter {
		filtered++
		holders++ // each filtered request makes its target one
	}
	require.Equal(t, 3, filtered)
	require.Equal(t, 5, holders)
}

func TestAFilterEndsAfterItsTime(t *testing.T) {
	h, now := crowd(100, 60)
	h.UpdateState(now, hot, 2, 6)
	for range 5 {
		h.RecordScores(now, hot, 0, 1)
	}
	for later := time.Second; later < time.Minute; later += time.Second {
		for i := range 4 { // the crowd goes on
			h.CountRequest(now.Add(later), hot*uint64(i&1))
		}
		require.Equal(t, Filter, h.UpdateState(now.Add(later), hot, 2, 6), "after %v", later)
	}
	require.Equal(t, OK, h.UpdateState(now.Add(time.Minute), hot, 2, 6))
	require.Equal(t, Alarm, h.UpdateState(now.Add(time.Minute), hot, 2, 6), "and begins anew")
}

func TestOnlyTheLastMinuteCounts(t *testing.T) {
	h, now := crowd(100, 60)
	require.Equal(t, 100, h.allRequests.sum)
	h.CountRequest(now.Add(30*time.Second), hot)
	require.Equal(t, Alarm, h.UpdateState(now.Add(50*time.Second), hot, 2, 6))
	require.Equal(t, OK, h.UpdateState(now.Add(61*time.Second), hot, 2, 6))
	require.Equal(t, 1, h.allRequests.sum)
	h.UpdateState(now.Add(time.Hour), hot, 2, 6)
	require.Zero(t, h.allRequests.sum)
	require.Zero(t, h.classes[hot].requests.sum)
}

// Nobody looks at a class of which nothing comes any more.
func TestAClassThatIsGoneIsNeitherAlarmedNorRemembered(t *testing.T) {
	h, now := crowd(100, 60)
	h.UpdateState(now, hot, 2, 6)
	require.Equal(t, 1, h.States(now)[Alarm])
	require.Empty(t, h.States(now.Add(time.Hour)))
	require.Empty(t, h.List(now.Add(time.Hour)))
	require.Empty(t, h.classes)
	changes := h.Changes()
	require.Equal(t, OK, changes[len(changes)-1].To)
}

func TestAFilterEndsThoughNobodyIsFiltered(t *testing.T) {
	h, now := crowd(100, 60)
	h.UpdateState(now, hot, 2, 6)
	for range 5 {
		h.RecordScores(now, hot, 0, 1)
	}
	h.CountRequest(now.Add(50*time.Second), hot)
	require.Equal(t, 1, h.States(now.Add(59 * time.Second))[Filter])
	require.Equal(t, map[State]int{OK: 1}, h.States(now.Add(time.Minute)))
}

func TestClassesAreBoundedAndTheFrequentStay(t *testing.T) {
	h, now := NewHotspots(), time.Unix(1000, 0)
	h.maxClasses = 8
	for n := range 5000 {
		h.CountRequest(now, hot)
		h.CountRequest(now, 1000+uint64(n)) // each only once
		require.LessOrEqual(t, len(h.classes), 8)
	}
	require.Equal(t, 5000, h.classes[hot].requests.sum)
	require.Equal(t, "7", h.List(now)[0].Class)
	require.InDelta(t, 0.5, h.List(now)[0].Share, 1e-3)
}

func TestAClassThatIsPushedOutIsNotFilteredAnyMore(t *testing.T) {
	h, now := NewHotspots(), time.Unix(1000, 0)
	h.maxClasses = 1
	for range 30 {
		h.CountRequest(now, hot)
	}
	h.UpdateState(now, hot, 1, 7)
	for range 3 {
		h.RecordScores(now, hot, 0, 1)
	}
	require.Equal(t, Filter, h.stateOf(hot))
	h.CountRequest(now, 8)
	require.Equal(t, OK, h.stateOf(hot))
	changes := h.Changes()
	require.Equal(t, OK, changes[len(changes)-1].To)
}

// After the wall clock was set back, the window has the requests of the last minute, and not of an
// hour.
func TestTheWindowMovesOnAfterTheClockWasSetBack(t *testing.T) {
	h, now := NewHotspots(), time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	arrive := func(seconds int) {
		for range seconds {
			h.CountRequest(now, 7)
			now = now.Add(time.Second)
		}
	}
	arrive(300)
	whole := h.Requests()
	now = now.Add(-time.Hour)
	arrive(300)
	require.Equal(t, whole, h.Requests())
}
