package engine

import (
	"net/url"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/mooncake"
)

// Requests come, are answered and leave while their rank stands still now and then, for less or more than the hold of their KV.
// Whatever the order: no answer is believed that was asked for under a salt under which KV has been lost, and no request is sent
// under such a salt.
func TestNoAnswerIsBelievedUnderASaltThatLostKV(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := NewLiveness()
		p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
		now, spoiled := l.epoch, map[string]bool{}
		var pulls []*PendingPull
		end := func(i int) {
			pulls[i].End()
			pulls[i] = pulls[len(pulls)-1]
			pulls = pulls[:len(pulls)-1]
		}
		one := func(t *rapid.T) int {
			if len(pulls) == 0 {
				t.Skip("nothing waits")
			}
			return rapid.IntRange(0, len(pulls)-1).Draw(t, "wait")
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) { require.Len(t, l.pendingPulls, len(pulls)) },
			"time passes": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(1, 40_000).Draw(t, "ms")) * time.Millisecond)
			},
			"the core goes on for a second": func(*rapid.T) {
				for range 10 {
					now = now.Add(100 * time.Millisecond)
					l.RecordSign(now)
				}
			},
			"a request is sent": func(t *rapid.T) {
				pull := l.AddPull(now, p.Hold(now, now.Add(p.PulledWithin()), &p))
				require.False(t, spoiled[pull.Salt()], "it is sent under a salt that lost KV")
				pulls = append(pulls, pull)
			},
			"an answer begins": func(t *rapid.T) {
				i := one(t)
				p := pulls[i]
				held := p.RecordFirstEvent(now)
				require.False(t, held && spoiled[p.Salt()], "it is believed, and others with its salt had lost their KV")
				spoiled[p.Salt()] = spoiled[p.Salt()] || !held
				end(i)
			},
			"a wait is looked at": func(t *rapid.T) {
				p := pulls[one(t)]
				spoiled[p.Salt()] = p.CheckExpired(now) || spoiled[p.Salt()]
			},
			"KV is known to be lost": func(t *rapid.T) {
				p := pulls[one(t)]
				p.MarkLost()
				spoiled[p.Salt()] = true
			},
			"a client leaves": func(t *rapid.T) { end(one(t)) },
		})
	})
}

// A reload corrects how many ranks an engine has behind its address, and so gives them other numbers. What a core has read too late under
// its number before is not found under the new one.
func TestAReloadOfTheNumberOfRanksKeepsTheSalt(t *testing.T) {
	for _, numbers := range [][2]int{{-1, 0}, {-1, 1}, {1, -1}} {
		var traffic Traffic
		before := traffic.Liveness(numbers[0]).AddPull(time.Now(), kept())
		require.Empty(t, before.Salt())
		before.MarkLost()
		before.End()
		after := traffic.Liveness(numbers[1]).AddPull(time.Now(), kept())
		require.NotEmpty(t, after.Salt())
		require.True(t, after.RecordFirstEvent(time.Now()))
		after.End()
	}
}

// The requests that wait under the old number may read wrong KV only after the reload. Until then they are not lost by it.
func TestARankGetsItsSaltBeforeARequestUnderItsOldNumberIsLost(t *testing.T) {
	var traffic Traffic
	waits, anywhere := traffic.Liveness(0).AddPull(time.Now(), kept()), traffic.Liveness(0).AddPull(time.Now(), kept())
	anywhere.RunsOnAnyRank()
	after := traffic.Liveness(1).AddPull(time.Now(), kept())
	require.NotEqual(t, waits.Salt(), after.Salt())
	require.True(t, anywhere.RecordFirstEvent(time.Now()), "no KV is lost")
	waits.MarkLost()
	require.True(t, after.RecordFirstEvent(time.Now()), "what the rank reads now has the salt of before")

	anywhere = traffic.Liveness(0).AddPull(time.Now(), kept())
	anywhere.RunsOnAnyRank()
	traffic.Liveness(2)
	require.True(t, anywhere.RecordFirstEvent(time.Now()), "a new rank loses no KV")
}

// A reload gives an engine another role, so that it counts as a new one. Its process is the same, with the same prefix cache.
func TestAnEngineKeepsItsSaltInAnotherRole(t *testing.T) {
	m := NewMonitor(MonitorConfig{Registerer: prometheus.NewRegistry()})
	at := func(role, host string) Instance {
		target := &Target{ID: host, URL: &url.URL{Scheme: "http", Host: host}, Rank: -1}
		return Instance{ID: role + " " + host, Role: role, Target: target}
	}
	salt := func(in Instance) string {
		pull := m.Traffic(in.ID).Liveness(-1).AddPull(time.Now(), mooncake.HeldUntil(time.Now().Add(time.Hour)))
		defer pull.End()
		return pull.Salt()
	}
	before, after, other := at("decode", "a:1"), at("aggregated", "a:1"), at("aggregated", "b:1")
	m.Set([]Instance{before})
	late := m.Traffic(before.ID).Liveness(-1).AddPull(time.Now(), mooncake.HeldUntil(time.Now()))
	late.MarkLost()
	late.End()
	m.Traffic(after.ID).Liveness(-1) // the fleet asks for it before the monitor has the engine
	m.Set([]Instance{after, other})
	require.NotEmpty(t, salt(after))
	require.Equal(t, salt(after), salt(after), "later requests find what earlier ones with the salt have left")
	require.Empty(t, salt(other))

	waits := m.Traffic(other.ID).Liveness(-1).AddPull(time.Now(), kept())
	later := at("decode", "b:1")
	m.Set([]Instance{later})
	require.NotEmpty(t, salt(later), "the request that waits may be lost only now")
	waits.End()
}

// An engine may have two roles at once. A reload that changes its settings loses none of its requests that wait.
func TestAnEngineOfTwoRolesLosesNoRequestByAReload(t *testing.T) {
	m := NewMonitor(MonitorConfig{Registerer: prometheus.NewRegistry()})
	target := &Target{ID: "a:1", URL: &url.URL{Scheme: "http", Host: "a:1"}, Rank: -1}
	prefill := Instance{ID: "prefill a:1", Role: "prefill", Target: target}
	decode := Instance{ID: "decode a:1", Role: "decode", Target: target}
	m.Set([]Instance{decode})
	waits := m.Traffic(decode.ID).Liveness(-1).AddPull(time.Now(), kept())
	m.Set([]Instance{prefill, decode})
	decode.Ready = "/ready"
	m.Set([]Instance{prefill, decode})
	require.True(t, waits.RecordFirstEvent(time.Now()))
	waits.End()
}
