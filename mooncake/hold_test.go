package mooncake

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// lease is NIXL's hold of one hand-off, and the core of the decode engine that is to renew it.
type lease struct {
	expires time.Duration // of the prefill engine, after the end of the prefill
	beats   int           // that named the request
}

// core steps from one moment to another and sends heartbeats meanwhile, as vLLM's scheduler does. p and d are the profiles of the prefill
// and of the decode engine.
func (l *lease) core(p, d *Profile, from, to, step, taken time.Duration, beat *time.Duration, now func(time.Duration)) {
	for at := from; at < to; at += step {
		if at-*beat >= d.KVHoldTimeout/6 {
			*beat = at
			if at >= taken {
				l.beats++
			}
			if l.beats > 1 && at < l.expires { // the first one opened the connection
				l.expires = max(l.expires, at+p.KVHoldTimeout*2/3)
			}
		}
		now(at)
	}
}

// Whatever the core of a decode engine does, KV that was read after the prefill engine had given it away counts as lost. The two engines
// may have leases of different lengths.
func TestKVThatWasGivenAwayIsNeverBelieved(t *testing.T) {
	zero := time.Unix(1000, 0)
	ms := func(t *rapid.T, from, to int, name string) time.Duration {
		return time.Duration(rapid.IntRange(from, to).Draw(t, name)) * time.Millisecond
	}
	late := 0
	rapid.Check(t, func(t *rapid.T) {
		p := Profile{Connector: NIXLPull, HoldMargin: ms(t, 0, 20_000, "margin")}.WithDefaults()
		d := Profile{Connector: NIXLPull, KVHoldTimeout: ms(t, 1, 4, "the decode engine's lease") * 15_000}.WithDefaults()
		sent := ms(t, 0, int((p.KVHoldTimeout - max(p.HoldMargin, time.Second)).Milliseconds()), "sent")
		taken := sent + ms(t, 0, int(p.clockMargin().Milliseconds()/6), "taken in after")
		kept := p.Hold(zero.Add(sent), zero.Add(p.PulledWithin()), &d)
		l, beat := &lease{expires: p.KVHoldTimeout}, -ms(t, 0, int(d.KVHoldTimeout.Milliseconds()/6), "heartbeat before")
		now, sign := time.Duration(0), time.Duration(0)
		pull := taken + ms(t, 0, 90_000, "its turn to be pulled comes after")
		read, end := time.Duration(0), pull+ms(t, 1, 60_000, "first event after")
		for now < end {
			run := min(ms(t, 1, 20_000, "runs for"), end-now)
			l.core(&p, &d, now, now+run, ms(t, 5, 3000, "step"), taken, &beat, func(at time.Duration) {
				if at >= pull && read == 0 {
					read = at
				}
				if rapid.Bool().Draw(t, "sign") {
					kept.RecordGap(zero.Add(sign), zero.Add(at))
					sign = at
				}
			})
			if now += run; now < end {
				now = min(end, now+ms(t, 0, 60_000, "stands still for"))
			}
		}
		if read == 0 {
			read = now
		}
		kept.RecordGap(zero.Add(sign), zero.Add(now))
		if read >= l.expires {
			late++
			require.True(t, kept.Lost(), "read %v after the prefill, given away after %v", read, l.expires)
		}
	})
	require.NotZero(t, late, "no case in which the KV was given away")
}

// As long as the core goes on, the KV is kept while the request waits.
func TestKVIsBelievedAsLongAsTheCoreGivesSigns(t *testing.T) {
	zero := time.Unix(1000, 0)
	p := Profile{Connector: NIXLPull}.WithDefaults()
	for _, sent := range []time.Duration{0, 14_750 * time.Millisecond} { // at once, and in the last moment
		kept := p.Hold(zero.Add(sent), zero.Add(p.PulledWithin()), &p)
		last := zero
		for at := time.Duration(0); at < 10*time.Minute; at += 200 * time.Millisecond {
			kept.RecordGap(last, zero.Add(at))
			last = zero.Add(at)
		}
		require.False(t, kept.Lost())
		kept.RecordGap(last, last.Add(p.KVHoldTimeout))
		require.True(t, kept.Lost(), "it stood still")
	}
}

// Without renewals, and without signs, the hold's own time counts.
func TestKVWithoutSignsIsKeptForItsHold(t *testing.T) {
	zero := time.Unix(1000, 0)
	for name, row := range map[string]struct {
		p    Profile
		kept time.Duration
	}{
		"a lease that nobody renews":     {Profile{Connector: NIXLPull}, 30*time.Second - 3750*time.Millisecond},
		"a hold without renewals":        {Profile{Connector: AscendMooncakeV1}, 450 * time.Second},
		"a margin of the operator's own": {Profile{Connector: NIXLPull, HoldMargin: 4 * time.Second}, 29 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			p := row.p.WithDefaults()
			require.Equal(t, row.kept, p.PulledWithin())
			kept := p.Hold(zero, zero.Add(p.PulledWithin()), &p)
			kept.RecordGap(zero, zero.Add(row.kept))
			require.False(t, kept.Lost())
			kept.RecordGap(zero, zero.Add(row.kept+1))
			require.True(t, kept.Lost())
		})
	}
}

// A decode engine with a far longer lease than the prefill engine sends heartbeats too seldom for a sign to show that the KV is kept. Such
// a hold must not make the engine count as silent between two readings of its gauges.
func TestNoHoldAllowsOnlyAMomentOfSilence(t *testing.T) {
	p := Profile{Connector: NIXLPull, KVHoldTimeout: 30 * time.Second}.WithDefaults()
	for lease := 30 * time.Second; lease < 4*time.Minute; lease += time.Second {
		d := Profile{Connector: NIXLPull, KVHoldTimeout: lease}.WithDefaults()
		hold := p.Hold(time.Now(), time.Now(), &d)
		if silence := hold.MaxSilence(); silence != 0 {
			require.Greater(t, silence, 2*time.Second, "with a lease of %s", lease)
		} else {
			require.Greater(t, lease, time.Minute)
		}
	}
}
