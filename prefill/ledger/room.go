package ledger

import (
	"math"
	"time"
)

// freedHalf is the time in which what is known of the pace of an engine's memory counts
// half.
const freedHalf = 10 * time.Second

// freed is the pace at which prompts give KV tokens back: the tokens of those that
// ended over the time in which they did, both fading.
type freed struct {
	tokens, ms float64
	at         time.Time
}

// to brings both to the present.
func (f *freed) to(now time.Time) {
	if f.at.IsZero() {
		f.at = now
	}
	passed := now.Sub(f.at)
	if passed <= 0 {
		return
	}
	f.at = now
	rest := math.Exp2(-float64(passed) / float64(freedHalf))
	f.tokens *= rest
	// The integral of what fades over the time that passed.
	f.ms = f.ms*rest + (1-rest)*float64(freedHalf)/float64(time.Millisecond)/math.Ln2
}

// add counts tokens that were given back.
func (f *freed) add(tokens int64, now time.Time) {
	f.to(now)
	f.tokens += float64(tokens)
}

// perMs is the pace; 0: nothing was given back, or not for long enough.
func (f *freed) perMs(now time.Time) float64 {
	f.to(now)
	if f.tokens < 1 || f.ms < 1 {
		return 0
	}
	return f.tokens / f.ms
}

// Room is when an engine has KV for more prompts.
type Room struct {
	InMs    float64 // until a prompt without tokens has room; below 0: so long ago
	TokenMs float64 // in which a token gets free
}

const (
	// Hysteresis keeps a gate closed until usage fell this far below the
	// threshold, so that it does not flap around it.
	Hysteresis = 0.02

	// CanaryEvery is how long a candidate whose KV only orphans hold must
	// rest before one probe may pass, and the least time between two.
	CanaryEvery = 5 * time.Second
)

// kvState is what moves a gate.
type kvState struct {
	own     float64 // share of the KV cache by our accounts
	scraped float64 // share by the engine's gauge, NaN: unknown, or too old to count
	live    int     // prompts in flight or waiting for decode

	until time.Time // when the gauge becomes too old to count; zero: never
}

// gate keeps new probes from a candidate whose KV cache is full.
//
// The engine's gauge moves only while the engine steps: an idle one may report
// 0.97 for ever. It therefore counts only while we have something there, which
// makes the engine step. An engine that does not tell its
// gauge in time is gated by our accounts alone: a busy engine answers prompts while
// its metrics take seconds, and a slow scrape must not stop its work. A gate that
// the gauge alone closed therefore opens by itself when the gauge becomes too old.
type gate struct {
	closed    bool      // unless opens has come
	opens     time.Time // the gauge alone closed it, and is too old from then on; zero otherwise
	idleSince time.Time // closed with nothing live since, a canary neither; zero otherwise
}

// update must be called after every change of s: hysteresis depends on the way.
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

// PassesAt is when time alone lets a probe pass the closed gate; false: never. That is
// when the gauge that closed it becomes too old, or one probe passes as a canary: only
// orphans can be what fills an idle candidate, and whether the engine still has them is
// known only by trying.
func (g *gate) PassesAt() (time.Time, bool) {
	switch {
	case !g.closed:
		return time.Time{}, false
	case !g.idleSince.IsZero():
		return g.idleSince.Add(CanaryEvery), true
	}
	return g.opens, !g.opens.IsZero()
}

// Passes says whether a probe may go through now, and whether as a canary.
func (g *gate) Passes(now time.Time) (ok, canary bool) {
	if !g.Closed(now) {
		return true, false
	}
	at, ok := g.PassesAt()
	return ok && !now.Before(at), true
}
