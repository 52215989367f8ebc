package ledger

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Whatever order the calls on charges come in, an account holds what its charges weigh, each is
// released once, and the audit counts each call that came too late.
func TestEveryChargeHasOneEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := New(Config{KVThreshold: 0.9, Interval: time.Second})
		loads := []EngineLoad{l.NewLoad("p0"), l.NewLoad("p1")}
		now := time.Unix(1000, 0)
		type held struct {
			*InFlight
			at      *EngineLoad
			sent    bool
			settled bool
		}
		var all []*held
		misuses, expired := uint64(0), uint64(0)
		for range rapid.IntRange(1, 60).Draw(t, "calls") {
			now = now.Add(time.Duration(rapid.IntRange(0, 3).Draw(t, "seconds")) * time.Second)
			if len(all) == 0 || rapid.IntRange(0, 3).Draw(t, "new") == 0 {
				h := &held{InFlight: &InFlight{}, at: &loads[rapid.IntRange(0, 1).Draw(t, "account")], sent: rapid.Bool().Draw(t, "sent")}
				w := Weight{Tokens: int64(rapid.IntRange(1, 1000).Draw(t, "tokens")), Work: 7, NewTokens: 5, PredictedUs: 3, Attention: 2}
				if h.sent {
					h.at.Charge(h.InFlight, w, nil, now)
				} else {
					h.at.Reserve(h.InFlight, w, nil, now)
				}
				all = append(all, h)
				continue
			}
			h := all[rapid.IntRange(0, len(all)-1).Draw(t, "charge")]
			was := h.Phase()
			switch rapid.SampledFrom([]string{"send", "answer", "dispatch", "orphan", "release", "expire"}).Draw(t, "call") {
			case "send":
				if h.settled || h.sent || was != Probing {
					misuses++
				} else {
					h.sent = true
				}
				h.MarkSent(now)
			case "answer":
				if h.settled || !h.sent || was != Probing {
					misuses++
					require.False(t, h.CheckAnswerable())
				} else {
					require.True(t, h.CheckAnswerable())
					h.Answer(100, now.Add(5*time.Second), now)
				}
			case "dispatch":
				if h.settled || was == Probing {
					misuses++
				}
				h.Dispatch(now)
			case "orphan", "release":
				if h.settled {
					misuses++
					require.False(t, h.ClaimEnd())
					break
				}
				h.settled = true
				if last := h.ClaimEnd(); last != (was != Ended) {
					t.Fatalf("settling in phase %v changes something: %v", was, last)
				} else if last && rapid.Bool().Draw(t, "leave") {
					h.Orphan(4*time.Second, now)
				} else if last {
					h.Release(now)
				}
			case "expire":
				for l.Expire(now) != nil {
					expired++
				}
			}
			live := int64(0)
			for i := range loads {
				e, want := &loads[i], [Phases]int64{}
				leases := [Phases]int{}
				for _, h := range all {
					if h.at == e && h.Phase() != Ended {
						want[h.Phase()] += h.Weight.Tokens
						leases[h.Phase()]++
						live++
					}
				}
				require.Equal(t, want, e.Tokens)
				require.Equal(t, leases, e.Leases)
				require.Equal(t, leases[Probing] > 0, e.NewTokens > 0, "what a prefill computes is held as long as it runs")
			}
			require.Equal(t, Audit{Drift: live, Misuses: misuses, Expired: expired}, l.Audit())
		}
	})
}

// A charge that its holder has lost stays on the account, and the audit shows it.
func TestALostChargeIsDrift(t *testing.T) {
	l, now := New(Config{}), time.Unix(1000, 0)
	e := l.NewLoad("p0")
	var kept, lost, passed InFlight
	var o LeaseOwner
	for _, f := range []*InFlight{&kept, &lost, &passed} {
		e.Charge(f, Weight{Tokens: 10}, &o, now)
	}
	kept.ClaimEnd()
	kept.Release(now)
	passed.DetachOwner()
	require.Equal(t, 1, l.OwnerEnded(&o))
	require.Equal(t, 1, l.OwnerEnded(&o), "again")
	require.EqualValues(t, 2+1, l.Audit().Drift, "what is held, and once more what was lost")
	lost.ClaimEnd()
	lost.Release(now)
	passed.ClaimEnd()
	passed.Release(now)
	require.Zero(t, l.Audit().Drift)
}

// A row is three prompts of so many seconds each that were sent one second apart, of which so many
// were answered since.
func TestWhenProbesEnd(t *testing.T) {
	const s = time.Second
	for name, tt := range map[string]struct {
		answered   int
		late       time.Duration // of the last answer after the last was sent
		ends       time.Duration // after the first was sent
		known      bool
		stalls     time.Duration
		oldest     time.Duration
		firstOther time.Duration // when the oldest beside the last one was sent
	}{
		"none is answered: one after the other":                     {0, 0, 6 * s, true, 9 * s, 0, 0},
		"the first is answered: the second began then":              {1, 3 * s, 5*s + 4*s, true, 5*s + 9*s, 1 * s, 1 * s},
		"all but one are":                                           {2, 4 * s, 6*s + 2*s, true, 6*s + 9*s, 2 * s, 0},
		"all are: nothing ends, and nothing is waited for too long": {3, 4 * s, 0, false, 0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			begin := time.Unix(1000, 0)
			e := New(Config{}).NewLoad("p0")
			inFlight := make([]InFlight, 3)
			for i := range inFlight {
				e.Charge(&inFlight[i], Weight{Tokens: 10, PredictedUs: 2_000_000}, nil, begin.Add(time.Duration(i)*s))
			}
			now := begin.Add(2*s + tt.late)
			for i := range tt.answered {
				inFlight[i].Answer(10, now.Add(time.Hour), now)
			}
			ends, known := e.PrefillsDoneAt()
			require.Equal(t, tt.known, known)
			stalls, waits := e.StallsAt()
			require.Equal(t, tt.known, waits)
			if !known {
				require.True(t, e.OldestSent().IsZero())
				require.False(t, e.Stalled(now.Add(time.Hour)))
				require.Zero(t, e.Backlog(now))
				return
			}
			require.Equal(t, tt.ends, ends.Sub(begin))
			require.Equal(t, tt.stalls, stalls.Sub(begin))
			require.False(t, e.Stalled(stalls.Add(-1)))
			require.True(t, e.Stalled(stalls))
			require.Equal(t, tt.oldest, e.OldestSent().Sub(begin))
			if next := e.NextSent(&inFlight[2]); tt.answered < 2 {
				require.Equal(t, tt.firstOther, next.Sub(begin))
			} else {
				require.True(t, next.IsZero(), "it is alone")
			}
			current, rest := e.PredictEnd(&inFlight[2], func(predicted time.Duration) time.Duration { return predicted })
			require.Equal(t, tt.ends, current.Add(rest).Sub(begin), "the last one ends when all do")
		})
	}
}

// A row is which of three prompts is given up, and when. The prompts take two seconds each, and
// were sent one second apart.
func TestAProbeThatIsGivenUpIsNoAnswer(t *testing.T) {
	const s = time.Second
	for name, tt := range map[string]struct {
		givenUp   int
		after     time.Duration // since the first was sent
		stalls    time.Duration // likewise
		backlogMs float64
	}{
		"a prompt that waited: the engine still computes the first": {2, 3 * s, 9 * s, 2500},
		"the prompt that was computed: the second begins":           {0, 3 * s, 3*s + 9*s, 4000},
		"the engine stands still: it does not begin with another":   {0, 10 * s, 1*s + 9*s, 2500},
	} {
		t.Run(name, func(t *testing.T) {
			begin := time.Unix(1000, 0)
			e := New(Config{}).NewLoad("p0")
			inFlight := make([]InFlight, 3)
			for i := range inFlight {
				e.Charge(&inFlight[i], Weight{Tokens: 10, PredictedUs: 2_000_000}, nil, begin.Add(time.Duration(i)*s))
			}
			now := begin.Add(tt.after)
			inFlight[tt.givenUp].ClaimEnd()
			inFlight[tt.givenUp].Release(now)
			require.Zero(t, e.AnsweredAt, "the engine has answered nothing")
			stalls, waits := e.StallsAt()
			require.True(t, waits)
			require.Equal(t, tt.stalls, stalls.Sub(begin))
			require.InDelta(t, tt.backlogMs, e.Backlog(now), 1e-9)
		})
	}
}

func TestTheEngineFreesWhatNobodyFetches(t *testing.T) {
	l, now := New(Config{}), time.Unix(1000, 0)
	e := l.NewLoad("p0")
	var probing, pooled InFlight
	for _, f := range []*InFlight{&probing, &pooled} {
		e.Charge(f, Weight{Tokens: 10}, nil, now)
	}
	pooled.Answer(10, now.Add(30*time.Second), now)
	for _, f := range []*InFlight{&probing, &pooled} {
		require.True(t, f.ClaimEnd())
		f.Orphan(time.Minute, now.Add(10*time.Second))
	}
	next, ok := l.NextExpiry()
	require.True(t, ok)
	require.Equal(t, now.Add(30*time.Second), next, "what was answered ends when it was to end anyway")
	require.Nil(t, l.Expire(next.Add(-1)))
	require.Same(t, &e, l.Expire(next))
	next, _ = l.NextExpiry()
	require.Equal(t, now.Add(70*time.Second), next, "what was not answered ends after the hold")
	require.NotNil(t, l.Expire(next))
	require.Nil(t, l.Expire(next))
	require.Equal(t, Audit{Expired: 2}, l.Audit())
	require.Zero(t, e.HeldPrompts())
}
