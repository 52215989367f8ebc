package prefill

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

// twoRegions are candidates a and b of ours and c of eu, taken in turn.
func twoRegions(t *testing.T) *Scheduler {
	candidates := up("a", "b", "c")
	candidates[2].Region = "eu"
	return newScheduler(t, candidates, withPolicy("round-robin"))
}

func TestAPromptIsPrefilledWhereItCanBeDecoded(t *testing.T) {
	scheduler := twoRegions(t)
	chosen := func(n int) (ids string) {
		for i := range n {
			ids += acquire(t, scheduler, request(i)).Candidate.ID
		}
		return ids
	}
	require.Equal(t, "abc", chosen(3), "nobody says where slots are free")
	scheduler.SetSlots(testModel, map[string]int{"": 3, "eu": 9})
	require.Equal(t, "a", chosen(1), "two of ours are on their way")
	require.Equal(t, "cc", chosen(2), "as many as we have slots")
	scheduler.SetSlots(testModel, map[string]int{"": 0, "eu": 0})
	require.Equal(t, "ab", chosen(2), "all are full alike")
	for _, c := range scheduler.Status() {
		require.True(t, c.DecodeFull)
	}
	scheduler.SetSlots(testModel, nil)
	require.Equal(t, "cab", chosen(3))
}

func TestWhoseSlotsAreTakenIsNoPlaceForOtherRegionsEither(t *testing.T) {
	scheduler := twoRegions(t)
	scheduler.SetSlots(testModel, map[string]int{"": 0, "eu": 2})
	open := func() (list []bool) {
		scheduler.Offers(func(_ string, l *Local) {
			for i := range l.Prefillers {
				list = append(list, l.Prefillers[i].Open)
			}
		})
		return list
	}
	require.Equal(t, []bool{false, false, true}, open())
	hold(t, scheduler, "c", probing, 10, 10)
	require.Equal(t, []bool{true, true, true}, open(), "nor is eu any better now")
}

func TestAPromptInThePoolIsOnItsWayUntilARankWasAsked(t *testing.T) {
	scheduler := twoRegions(t)
	scheduler.SetSlots(testModel, map[string]int{"": 1, "eu": 9})
	first := acquire(t, scheduler, request(1))
	require.Equal(t, "a", first.Candidate.ID)
	first.Answered(Usage{}, time.Time{})
	require.Equal(t, "c", acquire(t, scheduler, request(2)).Candidate.ID)
	first.Dispatched()
	require.Equal(t, "a", acquire(t, scheduler, request(3)).Candidate.ID, "the next in turn, for the slot is free by the last count")
}

// What has its slot before the prefill waits for none after it.
func TestSlotsAreNotAskedForWhereTheyAreBoundBefore(t *testing.T) {
	candidates := up("a")
	candidates[0].Board, candidates[0].Profile = "m", &mooncake.Profile{Connector: mooncake.SGLang}
	scheduler := newScheduler(t, candidates, func(c *Config) {
		c.Decode = func(string, string, time.Duration) (int, bool) { return 0, false }
	})
	acquire(t, scheduler, request(0))
}

func TestNothingIsPrefilledThatGetsNoSlotInTime(t *testing.T) {
	room := 2
	candidates := up("a", "b", "c")
	for i := range candidates {
		candidates[i].Board, candidates[i].Profile = "m", &mooncake.Profile{KVHoldTimeout: 30 * time.Second}
	}
	candidates[2].Board = "another"
	scheduler := newScheduler(t, candidates, withPolicy("round-robin"), func(c *Config) {
		c.Decode = func(board, _ string, within time.Duration) (int, bool) {
			require.Equal(t, 15*time.Second, within, "the hold budget")
			if board != "m" {
				return 100, false
			}
			return room, false
		}
	})
	first := acquire(t, scheduler, request(0))
	acquire(t, scheduler, request(1))
	acquire(t, scheduler, request(2)) // the other board's
	mustWait(t, scheduler, request(3))
	retried := request(4)
	retried.HasPlace = true
	acquire(t, scheduler, retried)
	first.Release()
	mustWait(t, scheduler, request(5))
	room = 3
	acquire(t, scheduler, request(6))
}
