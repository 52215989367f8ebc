package policy

import (
	"math"

	"evenkeel/dispatcher/subset"
)

// envelope has the projected load of every rank at each step from 0 (now) to the horizon H, and the
// largest of these loads (the peaks). The margin of a rank at a step is the peak less its own load.
// Loads are KV tokens, scaled by the rank's cost per token.
type envelope struct {
	steps      int     // number of projected steps: the horizon H and the present step
	load       []int64 // projected load of rank g at step h, at the index g*steps+h; P_g(h) in the paper
	peaks      []int64 // largest load at step h; E(h) in the paper
	heldTokens []int64 // by rank: KV tokens now, not scaled, because they stand for memory and not for step time

	// The smallest margin of each rank over all steps when it was last measured, and its step, or
	// notComputed.
	leastMargin     []int64
	leastMarginStep []int32
}

func (e *envelope) build(s *Snapshot, horizon int) {
	e.reset(len(s.Workers), horizon+1)
	for g := range s.Workers {
		w := &s.Workers[g]
		loads := e.loadsOf(g)
		e.heldTokens[g] = w.KVTokens()
		if horizon == 0 {
			loads[0] = e.heldTokens[g]
		} else {
			projectWorker(loads, w)
		}
		scale(loads, w.Cost)
		peaks := e.peaks[:len(loads)]
		for h, load := range loads {
			peaks[h] = max(peaks[h], load)
		}
	}
}

func (e *envelope) reset(n, steps int) {
	e.steps = steps
	e.load, e.peaks = sized(e.load, n*steps), sized(e.peaks, steps)
	e.leastMargin, e.leastMarginStep, e.heldTokens = sized(e.leastMargin, n), sized(e.leastMarginStep, n), sized(e.heldTokens, n)
	clear(e.peaks)
	for g := range e.leastMarginStep {
		e.leastMarginStep[g] = notComputed
	}
}

// projectWorker is Project for a worker, whose Others stay at each step.
func projectWorker(dst []int64, w *Worker) {
	Project(dst, w.Running)
	if w.Others > 0 {
		for h := range dst {
			dst[h] += w.Others
		}
	}
}

func scale(loads []int64, cost float32) {
	if cost == 0 || cost == 1 {
		return
	}
	for h, load := range loads {
		loads[h] = subset.Scaled(load, float64(cost))
	}
}

func (e *envelope) loadsOf(g int) []int64 { return e.load[g*e.steps:][:e.steps] }

// minMargin returns the smallest margin of rank g over all steps. While requests are placed on
// other ranks, margins can only rise. So if the margin at the step where it was smallest has not
// changed, it still is the smallest.
func (e *envelope) minMargin(g int) int64 {
	if at := int(e.leastMarginStep[g]); at != notComputed && e.peaks[at]-e.load[g*e.steps+at] == e.leastMargin[g] {
		return e.leastMargin[g]
	}
	return e.measureMargin(g)
}

func (e *envelope) measureMargin(g int) int64 {
	loads := e.loadsOf(g)
	least, at, peaks := int64(math.MaxInt64), 0, e.peaks[:len(loads)]
	for h, load := range loads {
		if margin := peaks[h] - load; margin < least {
			least, at = margin, h
		}
	}
	e.leastMargin[g], e.leastMarginStep[g] = least, int32(at)
	return least
}

// margins needs room for all steps in dst.
func (e *envelope) margins(g int, dst []int64) []int64 {
	loads := e.loadsOf(g)
	dst = dst[:len(loads)]
	for h, peak := range e.peaks[:len(loads)] {
		dst[h] = peak - loads[h]
	}
	return dst
}

// addLoad adds size, KV tokens times the rank's cost, at every step, and raises the peaks.
func (e *envelope) addLoad(g int, size int64) {
	loads := e.loadsOf(g)
	peaks := e.peaks[:len(loads)]
	for h, load := range loads {
		load += size
		loads[h] = load
		peaks[h] = max(peaks[h], load)
	}
	e.leastMarginStep[g] = notComputed // the margins may have become smaller
}

// KVTokens counts Others, and all requests, even those that do not decode yet.
func (w *Worker) KVTokens() int64 {
	tokens := w.Others
	for i := range w.Running {
		tokens += w.Running[i].Tokens()
	}
	return tokens
}

// Project writes to dst[h] how many KV tokens the running requests will have h steps from now. Each
// grows by one token per step, and is gone after Rhat steps; without Rhat, it lasts through all
// steps.
func Project(dst []int64, running []Request) {
	const one = 1 << 40 // a sum counts requests in its bits from 40 on, and their tokens below
	last := len(dst) - 1
	clear(dst)
	horizon := float32(last)
	for i := range running {
		r := &running[i]
		lastStep := last // last step at which the request still runs
		if r.Rhat < horizon && r.Rhat > 0 {
			lastStep = int(r.Rhat)
			if float32(lastStep) == r.Rhat { // it ends exactly at this step, so it no longer counts there
				lastStep--
			}
		}
		dst[lastStep] += one + r.Tokens()
	}
	var sum int64
	for h := last; h >= 0; h-- {
		sum += dst[h] // now dst[h] covers all requests that still run at step h
		tokens, requests := sum&(one-1), sum>>40
		dst[h] = tokens + int64(h)*requests
	}
}
