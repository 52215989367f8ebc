package pool

import (
	"cmp"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time {
	return start.Add(time.Duration(seconds * float64(time.Second)))
}

func TestExpiry(t *testing.T) {
	for _, c := range []struct {
		name     string
		ttl      time.Duration
		deadline time.Time
		want     time.Time
		why      error
		urgent   time.Time
	}{
		{"the TTL counts from the entry", 40 * time.Second, time.Time{}, at(50), ErrTimeout, at(40)},
		{"an earlier hand-off deadline wins", 40 * time.Second, at(30), at(30), ErrExpired, at(25)},
		{"a later hand-off deadline does not", 40 * time.Second, at(60), at(50), ErrTimeout, at(40)},
		{"at the same instant it is the TTL", 40 * time.Second, at(50), at(50), ErrTimeout, at(40)},
		{"without a TTL only the hand-off counts", 0, at(30), at(30), ErrExpired, at(25)},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, e := New(c.ttl), &Entry{Arrival: at(3), Entered: at(10), Deadline: c.deadline}
			p.Add(e, at(11))
			expires, why := e.Expiry()
			require.Equal(t, c.want, expires)
			require.Equal(t, c.why, why)
			require.Equal(t, c.want, p.NextDeadline())

			require.False(t, e.Urgent(c.urgent.Add(-1)), "urgent before three quarters of its time")
			require.True(t, e.Urgent(c.urgent))

			require.Empty(t, p.Expire(c.want.Add(-1), nil), "expired before its time")
			require.Equal(t, []*Entry{e}, p.Expire(c.want, nil))
			require.Zero(t, p.Len())
		})
	}
}

func TestADrainIsSoonUrgent(t *testing.T) {
	p := New(40 * time.Second)
	long, short := &Entry{Entered: at(10), Discard: true}, &Entry{Entered: at(10), Deadline: at(10).Add(400 * time.Millisecond), Discard: true}
	p.Add(long, at(10))
	p.Add(short, at(10))
	require.False(t, long.Urgent(at(10).Add(discardPatience-1)))
	require.True(t, long.Urgent(at(10).Add(discardPatience)))
	require.True(t, short.Urgent(at(10).Add(300*time.Millisecond)), "never later than any other entry")
}

// No client waits for a drain, and its KV is held until it is done: the TTL for
// clients does not apply to it.
func TestADrainOutlivesTheTTL(t *testing.T) {
	p := New(time.Second)
	held := &Entry{Entered: at(10), Deadline: at(50), Discard: true}
	p.Add(held, at(10))
	require.Empty(t, p.Expire(at(50).Add(-1), nil))
	require.Equal(t, []*Entry{held}, p.Expire(at(50), nil))
	_, why := held.Expiry()
	require.Equal(t, ErrExpired, why)
}

func TestAnEntryWithoutAnyDeadlineWaitsForEver(t *testing.T) {
	p, e := New(0), &Entry{}
	p.Add(e, at(0))
	require.Equal(t, at(0), e.Arrival, "times the caller left zero are those of Add")
	require.True(t, p.NextDeadline().IsZero())
	require.Empty(t, p.Expire(at(1e6), nil))
	require.False(t, e.Urgent(at(1e6)))
}

func TestAResumedRequestKeepsItsPlaceAndItsAge(t *testing.T) {
	p := New(0)
	fresh := &Entry{ID: 1, Arrival: at(100), Entered: at(101)}
	resumed := &Entry{ID: 2, Age: 50, Arrival: at(20), Entered: at(102)}
	p.Add(fresh, at(101))
	p.Add(resumed, at(102))
	require.Equal(t, []*Entry{resumed, fresh}, p.Entries(), "it stands where its first arrival puts it")
	require.Equal(t, 90*time.Second, resumed.GuardWait(at(110)), "the guard sees its whole life")
	require.Equal(t, 8*time.Second, resumed.Wait(at(110)), "wait statistics start anew")
	require.Equal(t, 9*time.Second, fresh.GuardWait(at(110)), "prefill is no wait for a rank")
	require.Equal(t, 9*time.Second, p.Oldest(at(110)))
}

func TestRemoveTakesOnlyWhatIsThere(t *testing.T) {
	p, in, out := New(0), &Entry{ID: 1}, &Entry{ID: 1}
	p.Add(in, at(0))
	require.False(t, p.Remove(out), "another entry with the same ID")
	require.True(t, p.Remove(in))
	require.False(t, p.Remove(in), "a second time")
}

// The pool against the plainest model: a list that is sorted and filtered anew
// at every step.
func TestPoolAgainstAList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var (
			ttl     = time.Duration(rapid.IntRange(0, 20).Draw(t, "ttl")) * time.Second
			p       = New(ttl)
			now     = 0
			waiting []*Entry
		)
		expires := func(e *Entry) (time.Time, bool) {
			end, err := e.Expiry()
			return end, err != nil && !end.IsZero()
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				e := &Entry{Arrival: at(float64(now - rapid.IntRange(0, 5).Draw(t, "before"))), Entered: at(float64(now))}
				if life := rapid.IntRange(-1, 30).Draw(t, "life"); life >= 0 {
					e.Deadline = at(float64(now + life))
				}
				p.Add(e, at(float64(now)))
				waiting = append(waiting, e)
			},
			"remove": func(t *rapid.T) {
				if len(waiting) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(waiting)-1).Draw(t, "i")
				require.True(t, p.Remove(waiting[i]))
				waiting = slices.Delete(waiting, i, i+1)
			},
			"time passes": func(t *rapid.T) {
				now += rapid.IntRange(0, 10).Draw(t, "seconds")
				var want []*Entry
				waiting = slices.DeleteFunc(waiting, func(e *Entry) bool {
					end, ends := expires(e)
					if ends && !end.After(at(float64(now))) {
						want = append(want, e)
						return true
					}
					return false
				})
				require.ElementsMatch(t, want, p.Expire(at(float64(now)), nil))
			},
			"": func(t *rapid.T) {
				slices.SortStableFunc(waiting, func(a, b *Entry) int { return cmp.Compare(a.Arrival.UnixNano(), b.Arrival.UnixNano()) })
				require.Equal(t, len(waiting), p.Len())
				for i, e := range p.Entries() {
					require.Same(t, waiting[i], e, "entry %d in arrival order", i)
					if end, ends := expires(e); ends {
						require.False(t, p.NextDeadline().IsZero() || p.NextDeadline().After(end), "the timer would be late")
					}
				}
			},
		})
	})
}

func TestAnEarlyEntryWaitsFromItsArrivalOn(t *testing.T) {
	arrival := at(0)
	early := func(deadline time.Time) *Entry {
		return &Entry{ID: 1, Arrival: arrival, Entered: arrival.Add(3 * time.Second), Deadline: deadline, Early: true}
	}
	for _, c := range []struct {
		name     string
		deadline time.Time
		ttl, end time.Duration
	}{
		{"the pool's time counts from its arrival", time.Time{}, 8 * time.Second, 8 * time.Second},
		{"its client's limit comes first", arrival.Add(4 * time.Second), 8 * time.Second, 4 * time.Second},
		{"only its client has a limit", arrival.Add(12 * time.Second), 0, 12 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, e := New(c.ttl), early(c.deadline)
			p.Add(e, e.Entered)
			require.False(t, e.Urgent(arrival.Add(c.end*3/4-1)))
			require.True(t, e.Urgent(arrival.Add(c.end*3/4)))
			require.Empty(t, p.Expire(arrival.Add(c.end-1), nil))
			require.Equal(t, []*Entry{e}, p.Expire(arrival.Add(c.end), nil))
			_, why := e.Expiry()
			require.ErrorIs(t, why, ErrUnbound)
		})
	}
	p, e := New(8*time.Second), early(time.Time{})
	e.Arrival, e.Age = arrival.Add(-time.Hour), 40
	p.Add(e, e.Entered)
	require.False(t, e.Urgent(e.Entered.Add(time.Second)), "its answer has run since its arrival")
	require.Empty(t, p.Expire(e.Entered.Add(8*time.Second-1), nil))
	require.Equal(t, []*Entry{e}, p.Expire(e.Entered.Add(8*time.Second), nil))
	p, e = New(0), early(time.Time{})
	p.Add(e, e.Entered)
	require.Empty(t, p.Expire(arrival.Add(time.Hour), nil), "nothing of it perishes")
	require.False(t, e.Urgent(arrival.Add(time.Hour)))
}

// Another queue has put entries for ranks that prefill in order. Nothing of them perishes: at their
// deadline there was no rank.
func TestMixedEntriesKeepTheirOrder(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	p := New(time.Minute)
	first, second := &Entry{ID: 1, Aggregated: true, Arrival: now},
		&Entry{ID: 2, Aggregated: true, Arrival: now.Add(-time.Hour), Deadline: now.Add(8 * time.Second)}
	p.Add(first, now)
	p.Add(second, now)
	require.Equal(t, []*Entry{first, second}, p.Entries())
	require.Equal(t, now.Add(6*time.Second), second.UrgentAt())
	require.Equal(t, []*Entry{second}, p.Expire(now.Add(8*time.Second), nil))
	_, why := second.Expiry()
	require.ErrorIs(t, why, ErrTimeout)
	require.True(t, p.Remove(first))
}
