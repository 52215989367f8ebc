// Package advice says how many prefill and decode ranks a model needs, and why:
// a function of what both sides looked like over the last minutes. It moves
// nothing; an autoscaler or a person does.
package advice

import (
	"math"
	"time"
)

// Sample is what one model's two sides look like at one instant.
type Sample struct {
	At       time.Time
	Prefill  Prefill
	Decode   Decode
	PoolFull bool // hand-offs fill the pool: what waits in the arrival queue waits for decode
}

// Prefill is the side that computes prompts.
type Prefill struct {
	Live     int     // ranks that answer
	Down     int     // ranks that do not
	Busy     int     // of them, those with a probe unanswered
	Requests int     // in the arrival queue
	Waiting  float64 // seconds one rank would compute for: the arrival queue, and what stands behind the probe that runs
	Begun    float64 // the same of the probes that run
	KVTokens int64   // held
	Capacity int64   // 0: unknown
}

// Decode is the side that makes answers.
type Decode struct {
	Live     int // ranks that answer
	Down     int // ranks that do not
	Slots    int // of them all
	Used     int
	KVTokens int64
	Capacity int64 // 0: unknown
	Pool     int   // hand-offs that wait for a rank
	Oldest   time.Duration
	Ended    uint64 // answers, ever: what gives slots back
}

// kvShare is the part of the KV budget in use, 0 where nobody knows it.
func kvShare(tokens, capacity int64) float64 {
	if capacity <= 0 {
		return 0
	}
	return float64(tokens) / float64(capacity)
}

func share(part, whole int) float64 {
	if whole <= 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// drain is how soon what waits should be gone: a rank is asked for where that
// takes more than the ranks there are.
const drain = time.Minute

// need is how many ranks of each side a sample asks for, as a fraction.
type need struct {
	at              time.Time
	prefill, decode float64
	// What the side would be asked for, were the other one not short.
	prefillThen, decodeThen float64
}

// needOf turns a sample into ranks. A side's ranks should be used to target of
// what they can do, and what waits be gone within drain. serves is how many
// seconds an answer keeps its slot.
func needOf(s *Sample, target, serves float64) need {
	n := need{at: s.At}
	queued := 0.0 // for decode, though still in the arrival queue
	if d := s.Decode; d.Live > 0 {
		perRank := float64(d.Slots) / float64(d.Live)
		used := max(share(d.Used, d.Slots), kvShare(d.KVTokens, d.Capacity))
		if s.PoolFull {
			queued = float64(s.Prefill.Requests)
		}
		more := (float64(d.Pool) + queued) * min(1, serves/drain.Seconds())
		n.decode = float64(d.Live) * used / target
		if perRank > 0 {
			n.decode += more / perRank
		}
	}
	if p := s.Prefill; p.Live > 0 {
		work := float64(p.Busy)
		if queued == 0 {
			work += p.Waiting / drain.Seconds()
		}
		n.prefill = work / target
		if kv := float64(p.Live) * kvShare(p.KVTokens, p.Capacity); s.Decode.Pool == 0 {
			n.prefill = max(n.prefill, kv/target) // hand-offs that wait for decode hold KV, too: that is decode's
		}
	}
	n.prefillThen = n.prefill * shortage(n.decode, s.Decode.Live)
	n.decodeThen = n.decode * shortage(n.prefill, s.Prefill.Live)
	return n
}

// shortage is by how much more would pass a side that is short, were it not.
func shortage(need float64, live int) float64 {
	if live == 0 {
		return 1
	}
	return max(1, need/float64(live))
}

func ranks(need float64) int { return max(1, int(math.Ceil(need-1e-9))) }
