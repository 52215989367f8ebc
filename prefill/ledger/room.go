package ledger

import (
	"math"
	"time"
)

// freedHalf is the half-life of what is known of the pace at which an engine's KV memory is freed.
const freedHalf = 10 * time.Second

// freed is the pace at which prompts give KV tokens back: tokens over the time in which they were freed, both fading.
type freed struct {
	tokens, ms float64
	at         time.Time
}

// fadeTo fades the tokens and the time to the present, and adds the time that has passed.
func (f *freed) fadeTo(now time.Time) {
	if f.at.IsZero() {
		f.at = now
	}
	passed := now.Sub(f.at)
	if passed <= 0 {
		return
	}
	f.at = now
	kept := math.Exp2(-float64(passed) / float64(freedHalf))
	f.tokens *= kept
	// The integral over the time that passed, of a weight that fades.
	f.ms = f.ms*kept + (1-kept)*float64(freedHalf)/float64(time.Millisecond)/math.Ln2
}

// add counts tokens that were given back.
func (f *freed) add(tokens int64, now time.Time) {
	f.fadeTo(now)
	f.tokens += float64(tokens)
}

// perMs is the pace in tokens per ms; 0: nothing was given back, or not for long enough.
func (f *freed) perMs(now time.Time) float64 {
	f.fadeTo(now)
	if f.tokens < 1 || f.ms < 1 {
		return 0
	}
	return f.tokens / f.ms
}

// Room is when an engine's KV memory has room for more prompts.
type Room struct {
	InMs    float64 // until a prompt of 0 tokens has room; below 0: it has had room for so long
	TokenMs float64 // ms in which one token is freed
}

const (
	// Hysteresis is how far usage must fall below the threshold before a closed gate opens, so that the gate does not
	// flap.
	Hysteresis = 0.02

	// CanaryEvery is how long a candidate, whose KV cache only orphans fill, must be idle before one probe may pass
	// as a canary. It is also the least time between two canaries.
	CanaryEvery = 5 * time.Second
)

// kvState is what a gate depends on.
type kvState struct {
	own     float64 // share of the KV cache by our accounts
	scraped float64 // share by the engine's gauge, NaN: unknown, or too old to count
	live    int     // prompts in flight or waiting for decode

	until time.Time // when the gauge becomes too old to count; zero: never
}

// gate keeps new probes from a candidate whose KV cache is full.
//
// The engine's gauge moves only while the engine steps: an idle one may report 0.97 for ever. It therefore counts
// only while we have something there, which makes the engine step. An engine whose gauge cannot be read in time is
// gated by our accounts alone: a busy engine answers prompts while its metrics take seconds, and a slow scrape must
// not stop its work. A gate that only the gauge has closed therefore opens by itself when the gauge becomes too old.
type gate struct {
	closed    bool      // closed, but not any more once opens has come
	opens     time.Time // the time at which a gate that only the gauge has closed opens, because the gauge is too old; zero: none
	idleSince time.Time // since when the gate is closed and nothing of ours is live there, no canary either; zero: it is not so
}

// update opens or closes the gate by the state of the KV cache; threshold is the share of it from which the gate is
// closed. It must be called after every change of the state, because hysteresis depends on the order of the changes.
func (g *gate) update(s kvState, threshold float64, now time.Time) {
	usage := s.own
	if s.live > 0 && s.scraped > usage { // never true of NaN
		usage = s.scraped
	}
	limit := threshold
	if g.Closed(now) {
		limit -= Hysteresis
	}
	g.closed, g.opens = usage >= limit, time.Time{}
	if g.closed && s.own < threshold-Hysteresis {
		g.opens = s.until
	}

	switch {
	case !g.closed || s.live > 0:
		g.idleSince = time.Time{}
	case g.idleSince.IsZero():
		g.idleSince = now
	}
}

// Closed reports whether new probes are kept from the candidate.
func (g *gate) Closed(now time.Time) bool {
	return g.closed && (g.opens.IsZero() || now.Before(g.opens))
}

// PassesAt is when time alone lets a probe pass the closed gate; false: never. Either the gauge that closed it
// becomes too old then, or one probe passes as a canary: an idle candidate can be full only of orphans, and only a
// try shows whether the engine still has them.
func (g *gate) PassesAt() (time.Time, bool) {
	switch {
	case !g.closed:
		return time.Time{}, false
	case !g.idleSince.IsZero():
		return g.idleSince.Add(CanaryEvery), true
	}
	return g.opens, !g.opens.IsZero()
}

// Passes says whether a probe may pass now, and whether it passes as a canary.
func (g *gate) Passes(now time.Time) (ok, canary bool) {
	if !g.Closed(now) {
		return true, false
	}
	at, ok := g.PassesAt()
	return ok && !now.Before(at), true
}
