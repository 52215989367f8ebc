package engine

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// In whatever order things happen, each moves the state only as its table says, an operator's hold
// survives everything but its end, and the state that is shown is the one that the facts have.
func TestStatesMoveAsTheirTableSays(t *testing.T) {
	legal := map[string]func(from, to State) bool{
		"good check": func(from, to State) bool { return to != Late && to != Down && (to != Wedged || from != Up) },
		"moved":      func(from, to State) bool { return true },
		"failed check": func(from, to State) bool {
			return to == from || to == Down || to == Late
		},
		"paused":      func(from, to State) bool { return to == Halted },
		"refused":     func(from, to State) bool { return to == Down || from == Down && to == Down },
		"refuses all": func(from, to State) bool { return to == Halted || from <= Late && to == from },
		"fails":       func(from, to State) bool { return to == from || from >= Accused && to == Out },
		"served": func(from, to State) bool {
			wasOut := from == Out || from == Wedged
			return wasOut && to >= Accused || !wasOut && to == from
		},
		"canary fails": func(from, to State) bool {
			return to == from || from > Halted && to == Wedged
		},
		"canary passes": func(from, to State) bool {
			wasOut := from == Out || from == Wedged
			return wasOut && to >= Accused || !wasOut && to == from
		},
		"accused": func(from, to State) bool { return to == from || from == Up && to == Accused },
		"settled": func(from, to State) bool { return to == from || from == Accused && to == Up },
		"hold":    func(from, to State) bool { return to == Halted || from <= Late && to == from },
		"free": func(from, to State) bool {
			return to == from && from <= Late || from == Halted && (to == Up || to == Halted)
		},
		"reload":  func(from, to State) bool { return to == Down },
		"restart": func(from, to State) bool { return to == Up },
	}
	kinds := []string{}
	for kind := range legal {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	rapid.Check(t, func(rt *rapid.T) {
		target := &Target{ID: "e:1", URL: &url.URL{Scheme: "http", Host: "e:1"}, Rank: -1}
		client := NewClient(Options{})
		defer client.Close()
		m := NewMonitor(MonitorConfig{Client: client})
		m.Set([]Instance{{ID: "e", Role: "decode", Target: target, Canaries: []*Target{target}}})
		w := m.watches["e"]
		w.facts = facts{models: []Model{{ID: "m"}}, start: 1}
		refused := &Error{Phase: PhaseConnect, Err: syscall.ECONNREFUSED}
		isHeld, accusations, ranks := false, []func(){}, 0
		check := func(r checkResult) {
			m.mu.Lock()
			defer m.mu.Unlock()
			r.reportsBefore = w.reportCount
			r.updateStatus(w)
		}
		locked := func(f func()) {
			m.mu.Lock()
			defer m.mu.Unlock()
			f()
		}
		check(checkResult{})
		did := []string{}
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			kind := rapid.SampledFrom(kinds).Draw(rt, "what")
			from, wasHeld := w.status.State(), isHeld
			did = append(did, kind)
			switch kind {
			case "good check":
				check(checkResult{})
			case "moved":
				w.addressUnproven = true
				w.moved = Moved{From: "1.1.1.1", To: fmt.Sprint("1.1.1.", len(did))}
				check(checkResult{health: rapid.SampledFrom([]error{nil, refused}).Draw(rt, "found")})
			case "failed check":
				late := &Error{Phase: PhaseHead, Timeout: true, Err: errors.New("late")}
				why := rapid.SampledFrom([]error{refused, late, errors.New("503")}).Draw(rt, "why")
				check(checkResult{health: why, eventsBefore: w.traffic.events.Load()})
			case "paused":
				check(checkResult{halt: ErrPaused})
			case "refused":
				m.ReportFailure("e", refused)
			case "refuses all":
				m.ReportFailure("e", ErrPaused)
			case "fails":
				m.RecordOutcome("e", Faulted, errors.New("500"))
			case "served":
				m.RecordOutcome("e", Served, nil)
			case "canary fails":
				locked(func() { applyCanary(w, canaryFailed, errors.New("no token")) })
			case "canary passes":
				locked(func() { applyCanary(w, canaryPassed, nil) })
			case "accused":
				accusations = append(accusations, m.Accuse("e"))
			case "settled":
				for _, settle := range accusations {
					settle()
				}
				accusations = nil
			case "hold":
				isHeld = true
				locked(func() { w.setHold(&Held{Why: "an operator"}) })
			case "free":
				isHeld = false
				locked(func() { w.setHold(nil) })
			case "reload": // with another number of ranks, so that the watch begins anew
				ranks++
				in := Instance{ID: "e", Role: "decode", Target: target, Canaries: []*Target{target}, Ranks: ranks}
				if isHeld {
					in.Held = &Held{Why: "an operator"}
				}
				before := w.facts
				m.Set([]Instance{in})
				w = m.watches["e"]
				w.facts = before
				if isHeld {
					check(checkResult{})
				}
			case "restart":
				w.facts.start++
				check(checkResult{})
			}
			to := w.status.State()
			if !isHeld && (kind != "free" || wasHeld) {
				require.True(rt, legal[kind](from, to), "%s moves %d to %d, after %q", kind, from, to, did)
			}
			if isHeld {
				require.LessOrEqual(rt, to, Halted, "an operator holds it, after %q", did)
			}
		}
	})
}
