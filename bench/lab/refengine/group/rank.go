package group

import (
	"slices"
	"time"

	"evenkeel/bench/lab/refengine/cache"
)

type decodeRank struct {
	waiting  []*Job        // arrival order, phases queued to ready
	running  []*Job        // order of admission
	stranded []*Job        // hold blocks for nobody
	answered []*Job        // are finished, and hold blocks for a next turn
	pressed  bool          // preempted in this step
	prefills time.Duration // its own part of the group's
	gauges   Gauges
}

// within is how many requests are there for which the proxy saw a slot. One that it sent beyond the
// slots may come before another that it sent earlier.
func (r *decodeRank) within() (n int) {
	for _, jobs := range [...][]*Job{r.waiting, r.running} {
		for _, j := range jobs {
			if !j.Beyond {
				n++
			}
		}
	}
	return n
}

func (r *decodeRank) remove(j *Job) {
	drop := func(jobs []*Job) []*Job {
		if i := slices.Index(jobs, j); i >= 0 {
			return slices.Delete(jobs, i, i+1)
		}
		return jobs
	}
	r.waiting, r.running, r.stranded, r.answered = drop(r.waiting), drop(r.running), drop(r.stranded), drop(r.answered)
	j.phase = gone
}

// used counts the KV blocks a rank's requests hold.
func (r *decodeRank) used() int {
	n := r.kept()
	for _, j := range r.answered {
		n += cache.Blocks(j.prompt + j.want) // Made says so only when its slot is free
	}
	for _, j := range r.running {
		n += cache.Blocks(j.kvTokens())
	}
	for _, j := range r.waiting {
		if j.phase != queued {
			n += cache.Blocks(j.kvTokens())
		}
	}
	return n
}

// kept counts the KV blocks that are held for nobody.
func (r *decodeRank) kept() (n int) {
	for _, j := range r.stranded {
		n += cache.Blocks(j.kvTokens())
	}
	return n
}

// growth counts the blocks that the coming step's tokens open.
func (r *decodeRank) growth(cfg Config) (n int) {
	for _, j := range r.running {
		n += cache.Blocks(j.kvTokens()+cfg.TokensPerChunk) - cache.Blocks(j.kvTokens())
	}
	return n
}

// full says whether slots keep a request from its blocks. SGLang has two more for each that runs,
// unless it has many.
func (r *decodeRank) full(cfg Config, remote bool) bool {
	switch {
	case !remote || cfg.Waits == WaitsForSlot:
		return len(r.running) >= cfg.Slots
	case cfg.Waits == WaitsForBlocks:
		return false
	}
	slots := cfg.Slots
	if slots <= 32 {
		slots *= 3
	}
	held := len(r.running)
	for _, j := range r.waiting {
		if j.phase != queued {
			held++
		}
	}
	return held >= slots
}
