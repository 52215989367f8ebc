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

// Room predicts when the KV cache has room, by the pace at which it was freed lately;
// false: nobody knows its capacity or its pace. The pace is that of our own prompts: what
// others free, others use.
func (a *Account) Room(now time.Time) (r Room, known bool) {
	capacity, pace := float64(a.Capacity()), a.freed.perMs(now)
	if capacity == 0 || pace == 0 {
		return r, false
	}
	own := float64(a.KVTokens())
	used, told := own+float64(a.Shared.KVTokens), a.Told(now)*capacity
	if a.Live() > 0 && !math.IsNaN(told) { // else the gauge is frozen, or there is none
		used = max(used, told+own-a.sampledTokens)
	}
	limit := capacity
	if a.Closed(now) {
		limit *= a.ledger.cfg.KVThreshold - Hysteresis
	}
	r = Room{InMs: (used - limit) / pace, TokenMs: 1 / pace}
	if a.Closed(now) { // the engine must also say that it has
		r.InMs = max(r.InMs, float64(a.ledger.cfg.Interval-now.Sub(a.Sampled))/float64(time.Millisecond), 0)
	}
	return r, true
}
