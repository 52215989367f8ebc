package ledger

import (
	"math"
	"time"
)

// freedHalfLife is the age at which freed tokens count half in freedPace.
const freedHalfLife = 10 * time.Second

// freedPace measures how fast an engine frees KV tokens: the tokens freed and the time that passed,
// both weighted by age.
type freedPace struct {
	tokens, ms float64
	at         time.Time // of the last fadeTo
}

func (f *freedPace) fadeTo(now time.Time) {
	if f.at.IsZero() {
		f.at = now
	}
	passed := now.Sub(f.at)
	if passed <= 0 {
		return
	}
	f.at = now
	decay := math.Exp2(-float64(passed) / float64(freedHalfLife))
	f.tokens *= decay
	// The last term is the integral of the weight, which falls from 1 to decay, over the time that
	// passed.
	f.ms = f.ms*decay + (1-decay)*float64(freedHalfLife)/float64(time.Millisecond)/math.Ln2
}

func (f *freedPace) add(tokens int64, now time.Time) {
	f.fadeTo(now)
	f.tokens += float64(tokens)
}

// perMs is the pace in tokens per ms; 0: nothing was freed, or less than a millisecond was
// measured.
func (f *freedPace) perMs(now time.Time) float64 {
	f.fadeTo(now)
	if f.tokens < 1 || f.ms < 1 {
		return 0
	}
	return f.tokens / f.ms
}

type Room struct {
	InMs    float64 // for a prompt of 0 tokens; negative: some room is there already
	TokenMs float64 // in which one token is freed: so much more for each token of the prompt
}

const (
	// Hysteresis is how far usage, 0 to 1, must fall below the threshold before a closed gate opens,
	// so that it does not flap.
	Hysteresis = 0.02

	// CanaryEvery is how long a candidate must be idle, with a KV cache that only orphans fill, before
	// one probe may pass its closed gate as a canary. It is also the shortest time between two
	// canaries.
	CanaryEvery = 5 * time.Second
)

type kvState struct {
	own     float64 // share of the KV cache that the charges use, 0 to 1
	scraped float64 // share in use by the engine's gauge; NaN: unknown, or too old to count
	// promptsOnEngine counts this proxy's prompts whose KV may still be fetched, and unanswered probes
	// of other dispatchers.
	promptsOnEngine int

	gaugeCountsUntil time.Time // zero: never
}

// gate keeps new probes from a candidate whose KV cache is full, as the charges or the engine's
// gauge show.
//
// The gauge changes only while the engine steps: an idle engine may report 0.97 for ever. It
// therefore counts only while the engine has prompts of dispatchers. It also does not count when it
// is too old, because a busy engine may answer prompts although its metrics take seconds.
type gate struct {
	closed bool // unless opensAt has passed
	// opensAt is when a gate that only the gauge has closed opens, because the gauge is then too old;
	// zero: it stays closed.
	opensAt time.Time
	// idleSince is since when the gate has been closed without a prompt or canary on the engine; zero:
	// it is open, or there is one.
	idleSince time.Time
}

// updateState must be called after every change of the state, because hysteresis depends on the
// order of the changes.
func (g *gate) updateState(s kvState, threshold float64, now time.Time) {
	usage := s.own
	if s.promptsOnEngine > 0 && s.scraped > usage { // false if scraped is NaN
		usage = s.scraped
	}
	limit := threshold
	if g.Closed(now) {
		limit -= Hysteresis
	}
	g.closed, g.opensAt = usage >= limit, time.Time{}
	ownKeepsClosed := s.own >= threshold-Hysteresis // then the gate stays closed even without the gauge
	if g.closed && !ownKeepsClosed {
		g.opensAt = s.gaugeCountsUntil
	}
	g.updateIdleSince(s.promptsOnEngine > 0, now)
}

// updateIdleSince: without prompts on the engine, only orphans fill the KV cache. Only a probe, the
// canary, can show whether the engine still holds them.
func (g *gate) updateIdleSince(hasPrompts bool, now time.Time) {
	switch {
	case !g.closed || hasPrompts:
		g.idleSince = time.Time{}
	case g.idleSince.IsZero():
		g.idleSince = now
	}
}

func (g *gate) Closed(now time.Time) bool {
	return g.closed && (g.opensAt.IsZero() || now.Before(g.opensAt))
}

// MayPassAt is when a probe may pass the closed gate even if the state does not change: as a
// canary, or because the gauge becomes too old.
func (g *gate) MayPassAt() (at time.Time, exists bool) {
	switch {
	case !g.closed:
		return time.Time{}, false
	case !g.idleSince.IsZero():
		return g.idleSince.Add(CanaryEvery), true
	}
	return g.opensAt, !g.opensAt.IsZero() // zero: not only the gauge keeps the gate closed
}

// MayPass reports whether a probe may pass now; canary: although the gate is closed.
func (g *gate) MayPass(now time.Time) (ok, canary bool) {
	if !g.Closed(now) {
		return true, false
	}
	at, exists := g.MayPassAt()
	return exists && !now.Before(at), true
}
