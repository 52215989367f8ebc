package ledger

import (
	"math"
	"time"
)

// freedHalfLife is the time after which freed tokens count half in the pace at which an engine frees KV memory.
const freedHalfLife = 10 * time.Second

// freedPace measures the pace at which an engine frees KV tokens: the tokens freed and the time that passed, both weighted by
// age, so that old ones count less.
type freedPace struct {
	tokens, ms float64
	at         time.Time // when tokens and ms were last brought up to date
}

// fadeTo brings tokens and ms up to date. What was counted before loses half its weight in each freedHalfLife that has
// passed since the last call. The time that has passed is then added to ms, with weights that fall in the same way.
func (f *freedPace) fadeTo(now time.Time) {
	if f.at.IsZero() { // the first call: the measurement begins now
		f.at = now
	}
	passed := now.Sub(f.at)
	if passed <= 0 {
		return
	}
	f.at = now
	decay := math.Exp2(-float64(passed) / float64(freedHalfLife))
	f.tokens *= decay
	// The last term is the integral of the weight, which falls from 1 to decay, over the time that passed.
	f.ms = f.ms*decay + (1-decay)*float64(freedHalfLife)/float64(time.Millisecond)/math.Ln2
}

func (f *freedPace) add(tokens int64, now time.Time) {
	f.fadeTo(now)
	f.tokens += float64(tokens)
}

// perMs is the pace in tokens per ms; 0: not known, because nothing was freed or less than a millisecond was measured.
func (f *freedPace) perMs(now time.Time) float64 {
	f.fadeTo(now)
	if f.tokens < 1 || f.ms < 1 {
		return 0
	}
	return f.tokens / f.ms
}

// Room predicts when an engine's KV memory has room for a prompt: InMs, plus TokenMs for each of its tokens.
type Room struct {
	InMs    float64 // ms until a prompt of 0 tokens has room; negative: some room is there already
	TokenMs float64 // ms in which one token is freed
}

const (
	// Hysteresis is how far usage, a share from 0 to 1, must fall below the threshold before a closed gate opens. It keeps
	// the gate from flapping.
	Hysteresis = 0.02

	// CanaryEvery is how long a candidate must be idle, with a KV cache that only orphans fill, before one probe may pass
	// its closed gate as a canary. It is also the shortest time between two canaries.
	CanaryEvery = 5 * time.Second
)

// kvState is the state on which a gate depends.
type kvState struct {
	own     float64 // share of the KV cache that the charges use, 0 to 1
	scraped float64 // share of the KV cache in use as the engine's gauge shows it; NaN: unknown, or too old to count
	// promptsOnEngine counts this proxy's prompts whose KV a decode engine may still fetch, and unanswered probes of other dispatchers.
	promptsOnEngine int

	gaugeCountsUntil time.Time // when the gauge becomes too old to count; zero: never
}

// gate keeps new probes from a candidate whose KV cache is full, as the charges or the engine's gauge show.
//
// The gauge changes only while the engine steps: an idle engine may report 0.97 for ever. The gauge therefore counts only
// while the engine has prompts of this proxy, or probes of other dispatchers. It also does not count when it is too old,
// because a busy engine may answer prompts although its metrics take seconds. A gate that only the gauge has closed
// therefore opens by itself when the gauge becomes too old.
type gate struct {
	closed bool // the gate is closed, unless opensAt has passed
	// opensAt is when a gate that only the gauge has closed opens by itself, because the gauge is then too old to count; zero: it
	// stays closed.
	opensAt time.Time
	// idleSince is since when the gate has been closed without a prompt or canary on the engine (promptsOnEngine); zero: the gate is
	// open, or there is one.
	idleSince time.Time
}

// updateState opens or closes the gate for a new state of the KV cache. The gate closes when usage reaches threshold, by the charges or by
// the engine's gauge. The gauge counts only while the engine has prompts, because an idle engine does not update it. A gate that only the
// gauge keeps closed opens by itself when the gauge becomes too old to count. updateState must be called after every change of the state,
// because hysteresis depends on the order of the changes.
func (g *gate) updateState(s kvState, threshold float64, now time.Time) {
	usage := s.own
	if s.promptsOnEngine > 0 && s.scraped > usage { // the comparison is false if scraped is NaN
		usage = s.scraped
	}
	limit := threshold
	if g.Closed(now) { // usage must fall further before the gate opens
		limit -= Hysteresis
	}
	g.closed, g.opensAt = usage >= limit, time.Time{}
	ownKeepsClosed := s.own >= threshold-Hysteresis // then the gate stays closed even without the gauge
	if g.closed && !ownKeepsClosed {
		g.opensAt = s.gaugeCountsUntil
	}
	g.updateIdleSince(s.promptsOnEngine > 0, now)
}

// updateIdleSince notes since when the gate has been closed while the engine has no prompts. Only orphans then fill the KV cache: the KV of
// hand-offs that no decode engine will fetch. After CanaryEvery, MayPassAt lets one probe pass, the canary, because only a probe can show
// whether the engine still holds them.
func (g *gate) updateIdleSince(hasPrompts bool, now time.Time) {
	switch {
	case !g.closed || hasPrompts:
		g.idleSince = time.Time{}
	case g.idleSince.IsZero():
		g.idleSince = now
	}
}

// Closed reports whether the gate keeps new probes from the candidate.
func (g *gate) Closed(now time.Time) bool {
	return g.closed && (g.opensAt.IsZero() || now.Before(g.opensAt))
}

// MayPassAt is when a probe may pass the closed gate even if the state does not change. exists is false if there is no such time. At that
// time either one probe may pass as a canary (updateIdleSince), or the gauge that closed the gate becomes too old.
func (g *gate) MayPassAt() (at time.Time, exists bool) {
	switch {
	case !g.closed: // any probe may pass
		return time.Time{}, false
	case !g.idleSince.IsZero(): // the engine has had no prompts since then
		return g.idleSince.Add(CanaryEvery), true
	}
	return g.opensAt, !g.opensAt.IsZero() // zero: not only the gauge keeps the gate closed
}

// MayPass reports whether a probe may pass now, and whether it passes as a canary, which means that the gate is closed.
func (g *gate) MayPass(now time.Time) (ok, canary bool) {
	if !g.Closed(now) {
		return true, false
	}
	at, exists := g.MayPassAt()
	return exists && !now.Before(at), true
}
