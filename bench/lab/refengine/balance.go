package refengine

import "sync"

// anyRank is the rank of a request that names none.
const anyRank = -1

// balance chooses ranks as the API server of vLLM 0.32 does behind one port: by what it has sent to
// them and by the requests that they report, and not by tokens.
type balance struct {
	mu     sync.Mutex
	flying []int // requests of each rank that have no whole answer yet
}

// take books a request on its rank, or on the one with the least to do if it names none. landed
// ends that.
func (b *balance) take(rank int, stats func(rank int) (running, waiting int64, kvUsage float64)) (taken int, landed func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if rank == anyRank {
		least := 0.0
		for i, flying := range b.flying {
			running, waiting, kv := stats(i)
			score := float64(max(int64(flying), running+waiting)) + 6*float64(waiting)*max(0, kv-0.5)
			if rank == anyRank || score < least {
				rank, least = i, score
			}
		}
	}
	b.flying[rank]++
	return rank, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.flying[rank]--
	}
}
