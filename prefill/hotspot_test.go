package prefill

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var hotspotConfig = HotspotConfig{Enabled: true, Window: time.Minute, MinRequests: 20, MaxClasses: 256, MaxFilter: time.Minute}

const hot = uint64(7)

// crowd is a detector that has seen n requests, own of them of the hot class.
func crowd(n, own int) (*hotspots, time.Time) {
	h, now := newHotspots(hotspotConfig), time.Unix(1000, 0)
	for i := range n {
		class := uint64(0)
		if i < own {
			class = hot
		}
		h.arrive(now, class)
	}
	return h, now
}

// G18.
func TestAClassIsAlarmedWhenItsShareExceedsThatOfItsHolders(t *testing.T) {
	for _, tt := range []struct {
		name            string
		n, own          int
		holders, others int
		want            HotspotState
	}{
		{"below: 120 > 160", 100, 20, 2, 6, HotspotOK},
		{"equal: 150 > 150", 100, 25, 2, 6, HotspotOK},
		{"above: 156 > 148", 100, 26, 2, 6, HotspotAlarm},
		{"too few requests to say", 19, 19, 2, 6, HotspotOK},
		{"just enough requests", 20, 20, 2, 6, HotspotAlarm},
		{"nobody holds it", 100, 90, 0, 8, HotspotOK},
		{"all hold it", 100, 90, 8, 0, HotspotOK},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h, now := crowd(tt.n, tt.own)
			require.Equal(t, tt.want, h.look(now, hot, tt.holders, tt.others))
		})
	}
}

// G19.
func TestAnAlarmedClassIsFilteredWhenItStaysWithItsHolders(t *testing.T) {
	h, now := crowd(100, 30)
	require.Equal(t, HotspotAlarm, h.look(now, hot, 2, 6))
	for i, stays := range []bool{true, true, true, true, false, true, true, true, true, true} {
		rest := 1.0 // equal scores stay: ties go to the side with the cache
		if !stays {
			rest = 0.5
		}
		want := HotspotAlarm
		if i == 9 {
			want = HotspotFilter
		}
		require.Equal(t, want, h.weigh(now, hot, 1, rest), "request %d", i+1)
	}
	// G20: one more holds it now.
	require.Equal(t, HotspotOK, h.look(now, hot, 3, 5))
	require.Zero(t, h.classes[hot].k)
	var to []HotspotState
	for _, change := range h.take() {
		to = append(to, change.To)
	}
	require.Equal(t, []HotspotState{HotspotAlarm, HotspotFilter, HotspotOK}, to)
	require.Empty(t, h.take())
}

// G21.
func TestReplicationStopsAtTheClassesShare(t *testing.T) {
	h, now := crowd(100, 60)
	h.look(now, hot, 2, 6)
	for range 5 {
		h.weigh(now, hot, 0, 1)
	}
	holders, filtered := 2, 0
	for h.look(now, hot, holders, 8-holders) == HotspotFilter {
		filtered++
		holders++ // each filtered request makes its target one
	}
	require.Equal(t, 3, filtered)
	require.Equal(t, 5, holders)
}

func TestAFilterEndsAfterItsTime(t *testing.T) {
	h, now := crowd(100, 60)
	h.look(now, hot, 2, 6)
	for range 5 {
		h.weigh(now, hot, 0, 1)
	}
	for later := time.Second; later < time.Minute; later += time.Second {
		for i := range 4 { // the crowd goes on
			h.arrive(now.Add(later), hot*uint64(i&1))
		}
		require.Equal(t, HotspotFilter, h.look(now.Add(later), hot, 2, 6), "after %v", later)
	}
	require.Equal(t, HotspotOK, h.look(now.Add(time.Minute), hot, 2, 6))
	require.Equal(t, HotspotAlarm, h.look(now.Add(time.Minute), hot, 2, 6), "and begins anew")
}

func TestOnlyTheLastMinuteCounts(t *testing.T) {
	h, now := crowd(100, 60)
	require.Equal(t, 100, h.all.sum)
	h.arrive(now.Add(30*time.Second), hot)
	require.Equal(t, HotspotAlarm, h.look(now.Add(50*time.Second), hot, 2, 6))
	require.Equal(t, HotspotOK, h.look(now.Add(61*time.Second), hot, 2, 6))
	require.Equal(t, 1, h.all.sum)
	h.look(now.Add(time.Hour), hot, 2, 6)
	require.Zero(t, h.all.sum)
	require.Zero(t, h.classes[hot].seen.sum)
}

// Nobody looks at a class of which nothing comes any more.
func TestAClassThatIsGoneIsNeitherAlarmedNorRemembered(t *testing.T) {
	h, now := crowd(100, 60)
	h.look(now, hot, 2, 6)
	require.Equal(t, 1, h.states(now)[HotspotAlarm])
	require.Empty(t, h.states(now.Add(time.Hour)))
	require.Empty(t, h.list(now.Add(time.Hour)))
	require.Empty(t, h.classes)
	changes := h.take()
	require.Equal(t, HotspotOK, changes[len(changes)-1].To)
}

func TestAFilterEndsThoughNobodyIsFiltered(t *testing.T) {
	h, now := crowd(100, 60)
	h.look(now, hot, 2, 6)
	for range 5 {
		h.weigh(now, hot, 0, 1)
	}
	h.arrive(now.Add(50*time.Second), hot)
	require.Equal(t, 1, h.states(now.Add(59 * time.Second))[HotspotFilter])
	require.Equal(t, map[HotspotState]int{HotspotOK: 1}, h.states(now.Add(time.Minute)))
}

func TestClassesAreBoundedAndTheFrequentStay(t *testing.T) {
	cfg := hotspotConfig
	cfg.MaxClasses = 8
	h, now := newHotspots(cfg), time.Unix(1000, 0)
	for n := range 5000 {
		h.arrive(now, hot)
		h.arrive(now, 1000+uint64(n)) // each only once
		require.LessOrEqual(t, len(h.classes), 8)
	}
	require.Equal(t, 5000, h.classes[hot].seen.sum)
	require.Equal(t, "7", h.list(now)[0].Class)
	require.InDelta(t, 0.5, h.list(now)[0].Share, 1e-3)
}

func TestAClassThatIsPushedOutIsNotFilteredAnyMore(t *testing.T) {
	cfg := hotspotConfig
	cfg.MaxClasses = 1
	h, now := newHotspots(cfg), time.Unix(1000, 0)
	for range 30 {
		h.arrive(now, hot)
	}
	h.look(now, hot, 1, 7)
	for range 3 {
		h.weigh(now, hot, 0, 1)
	}
	require.Equal(t, HotspotFilter, h.state(hot))
	h.arrive(now, 8)
	require.Equal(t, HotspotOK, h.state(hot))
	changes := h.take()
	require.Equal(t, HotspotOK, changes[len(changes)-1].To)
}
