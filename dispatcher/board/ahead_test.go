package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

// passing is a board of one rank on which requests of so many tokens come and go, their first token
// so many steps after the step in which they are bound.
func passing(t *testing.T, policy string, limit, lag, output int) (h *hand, most int) {
	fleet := ranks(1, 8, 0)
	fleet[0].Limit = limit
	return passingWith(t, realConfig(policy), fleet, lag, output)
}

func passingWith(t *testing.T, cfg Config, fleet []Worker, lag, output int) (h *hand, most int) {
	cfg.Window = 0
	h = newHand(t, cfg)
	h.fleet(fleet)
	b := h.boards["m"]
	g := b.groups[0]
	type request struct {
		slot  *Slot
		bound int
	}
	var waits []waiting
	var there []request
	for step := 1; step < 600; step++ {
		for b.pool.Len() < 10 {
			waits = append(waits, h.put(pool.Entry{Prompt: 100}))
		}
		for i := 0; i < len(waits); i++ {
			select {
			case r := <-waits[i].result:
				require.NoError(t, r.Err)
				there = append(there, request{r.Slot, step})
				waits = append(waits[:i], waits[i+1:]...)
				i--
			default:
			}
		}
		most = max(most, len(there))
		h.count()
		h.steps.Group, h.steps.List = b.key(g), append(h.steps.List[:0], Step{Number: uint32(step), Length: 20 * time.Millisecond})
		h.apply(&h.steps)
		var over []*Slot
		for i := 0; i < len(there) && i < 8; i++ { // the engine's slots
			if s := there[i].slot; step >= there[i].bound+lag {
				if s.first == 0 {
					s.first = uint32(step)
				}
				s.started, s.last = true, uint32(step)
				if s.generated.Add(1) >= int32(output) {
					over = append(over, s)
					there = append(there[:i], there[i+1:]...)
					i--
				}
			}
		}
		for _, s := range over {
			h.release(s)
		}
	}
	return h, most
}

func TestRequestsAreSentAheadOfTheirSlots(t *testing.T) {
	for _, c := range []struct {
		name               string
		policy             string
		limit, lag, output int
		want               int // most at once
	}{
		{"a fifth of a request's time is on the way: a fifth of the slots", "evenkeel", 0, 2, 8, 10},
		{"whatever the policy", "pjsq-kv", 0, 2, 8, 10},
		{"as the way is long", "br0", 0, 8, 8, 12},
		{"nothing is on the way", "evenkeel", 0, 0, 8, 8},
		{"a way that is short beside the answer", "evenkeel", 0, 1, 100, 8},
		{"a policy that sends none", "evenkeel:ahead=false", 0, 2, 8, 8},
		{"by the letter of the paper", "br0:paper", 0, 2, 8, 8},
		{"a rank that is limited", "evenkeel", 8, 2, 8, 8},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, most := passing(t, c.policy, c.limit, c.lag, c.output)
			require.Equal(t, c.want, most)
		})
	}
}
