package owner

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/geo"
)

func TestATakerIsCautiousUntilStrandedHandOffsAreGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &Scope{Name: "us", maxShare: 0.5, othersMayRunFor: 30 * time.Second, othersLoad: map[string]geo.Resident{}}
		o := &Set{}
		o.all.Store(&map[string]*Scope{"us": a})
		room := func(rank string) [2]int {
			limit, others := o.RankQuota("us", rank, 10)
			return [2]int{limit, int(others)}
		}
		require.Equal(t, [2]int{0, 0}, room("d/0"), "it is not ours, so nothing is held back")
		a.ownedSince = time.Now()
		require.Equal(t, [2]int{1, 0}, room("d/0"), "what runs there is not known yet")
		a.othersLoad = map[string]geo.Resident{"d/0": {Requests: 2, KVTokens: 700}, "d/1": {Requests: 8, KVTokens: 900}, "d/2": {Requests: 12}}
		require.Equal(t, [2]int{5, 700}, room("d/0"), "half of the slots")
		require.Equal(t, [2]int{2, 900}, room("d/1"), "what the others leave")
		require.Equal(t, [2]int{1, 0}, room("d/2"))
		gone := a.ownedSince.Add(a.othersMayRunFor)
		time.Sleep(time.Until(gone) - 1)
		require.Equal(t, [2]int{5, 700}, room("d/0"))
		time.Sleep(time.Until(gone))
		require.Equal(t, [2]int{0, 0}, room("d/0"), "the hand-offs of the one that died have run out")

		a.home, a.maxShare, a.ownedSince = true, 1, time.Now()
		require.Equal(t, [2]int{8, 700}, room("d/0"), "at home it is what the taker left")
		a.home, a.maxShare, a.othersMayRunFor = false, 0.5, withoutEnd
		time.Sleep(time.Hour)
		require.Equal(t, [2]int{5, 700}, room("d/0"), "without a lease the other may be there at any time")
	})
}

func TestATakerIsCautiousForAsLongAsPrefillersHoldByThen(t *testing.T) {
	s, a := setOf(t, Regions, &lent{})
	s.deps.KVHoldTimeout = func() time.Duration { return time.Hour } // a reload raised it
	now := time.Now()
	s.recordOwnership(a, 2, now)
	require.True(t, a.othersMayRun(now.Add(59*time.Minute)))
	require.False(t, a.othersMayRun(now.Add(time.Hour)))

	s.deps.KVHoldTimeout = func() time.Duration { return 0 } // no engine has a profile any more
	s.recordOwnership(a, 3, now)
	require.False(t, a.othersMayRun(now), "nothing can be held for the owner before")

	a.othersMayRunFor = withoutEnd
	s.recordOwnership(a, 4, now)
	require.EqualValues(t, withoutEnd, a.othersMayRunFor, "without a lease it does not end")
}
