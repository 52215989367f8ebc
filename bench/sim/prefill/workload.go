package prefill

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/lab/trace"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
)

// prompts are a trace's requests, ready to be sent by any number of runs.
type prompts struct {
	requests []request
	names    int           // of blocks
	quantum  time.Duration // arrivals are spread over so much
}

type request struct {
	at             time.Duration
	prompt, output int
	blocks         []int32
	keys           []index.Key // one a block
	session        uint64
}

// job is a request in a run.
type job struct {
	*request
	number   int
	arrived  time.Duration
	nameless int // blocks that nobody will find again
	hot      bool
	lease    *prefill.Lease
	refused  error
	expected int // tokens found, as the tier thinks
	cached   int // tokens found
	fresh    int // tokens computed
	engine   int
	began    time.Duration
	first    time.Duration // end of the prefill: the first token
	finished time.Duration
	last     int64 // step of the last token
}

// hotTokens is the document that the requests of a burst share, hotOwn what each
// of them has of its own at most.
const (
	hotTokens = 8192
	hotOwn    = 2048
)

// newPrompts names the blocks of a trace. The last, partial block of a prompt is
// in no cache.
func newPrompts(rs []trace.Request) *prompts {
	p := &prompts{requests: make([]request, len(rs)), quantum: quantum(rs)}
	names := map[uint64]int32{}
	talks := newSessions()
	for i, r := range rs {
		full := min(len(r.HashIDs), r.Prompt/blockTokens)
		to := &p.requests[i]
		*to = request{at: r.At, prompt: r.Prompt, output: r.Output, blocks: make([]int32, full), keys: make([]index.Key, full)}
		for k, id := range r.HashIDs[:full] {
			n, known := names[id]
			if !known {
				n = int32(len(names))
				names[id] = n
			}
			to.blocks[k], to.keys[k] = n, keyOf(n)
		}
		to.session = reftext.Mix(talks.of(to.blocks))
	}
	p.names = len(names)
	return p
}

// keyOf is a block's key in the tier's index.
func keyOf(block int32) index.Key {
	x := uint64(block)
	return index.Key{Hash: reftext.Mix(x), Check: reftext.Mix(^x)}
}

// quantum is over how much time the arrivals of a seed are spread: the clock of
// the trace, where it is coarse, else the mean gap.
func quantum(rs []trace.Request) time.Duration {
	least := time.Duration(0)
	for i := 1; i < len(rs); i++ {
		if gap := rs[i].At - rs[i-1].At; gap > 0 && (least == 0 || gap < least) {
			least = gap
		}
	}
	return max(least, rs[len(rs)-1].At/time.Duration(len(rs)))
}

// sessions tells which requests go on with a talk: those whose known part ends
// where an earlier prompt ended. Where more than one went on from there, it is
// something that many share, such as a system prompt.
type sessions struct {
	owner    map[int32]uint64 // by a prompt's last block
	branches map[int32]int    // prompts that went on from a block
	count    uint64
}

func newSessions() *sessions { return &sessions{owner: map[int32]uint64{}, branches: map[int32]int{}} }

func (s *sessions) of(blocks []int32) uint64 {
	if len(blocks) == 0 {
		s.count++
		return s.count
	}
	known := len(blocks)
	for known > 0 {
		if _, seen := s.branches[blocks[known-1]]; seen {
			break
		}
		known--
	}
	var talk uint64
	if known > 0 {
		from := blocks[known-1]
		if s.branches[from] == 0 {
			talk = s.owner[from]
		}
		if known < len(blocks) {
			s.branches[from]++
		}
	}
	if talk == 0 {
		s.count++
		talk = s.count
	}
	for _, b := range blocks[known:] {
		s.branches[b] = 1
	}
	end := blocks[len(blocks)-1]
	if known < len(blocks) {
		s.branches[end] = 0
	}
	s.owner[end] = talk
	return talk
}

// warmUp is how many requests a seed plays before those that it measures.
func (p *prompts) warmUp() int { return len(p.requests) / 8 }

// block is what a seed plays, the first of which is 1: the warm-up and then the requests that
// no other seed measures.
func (p *prompts) block(seed, seeds int) []request {
	before := p.warmUp()
	measured := len(p.requests) - before
	return p.requests[measured*(seed-1)/seeds : before+measured*seed/seeds]
}

// draw makes jobs of a block: arrivals spread over the quantum and stretched, in the second
// third of what is measured a share of them of one class.
func (p *prompts) draw(block []request, seed uint64, stretch, burst float64) []*job {
	rng := rand.New(rand.NewPCG(seed, 0x70726566696c6c))
	jobs := make([]*job, len(block))
	measured := len(block) - p.warmUp()
	for i := range block {
		r := &block[i]
		at := r.at - block[0].at + time.Duration(rng.Float64()*float64(p.quantum))
		j := &job{request: r, arrived: time.Duration(float64(at) * stretch)}
		if at := i - p.warmUp(); rng.Float64() < burst && at >= 0 && 3*at/measured == 1 {
			j.request, j.hot = p.heat(r), true
		}
		j.nameless = (j.prompt+blockTokens-1)/blockTokens - len(j.blocks)
		jobs[i] = j
	}
	slices.SortStableFunc(jobs, func(a, b *job) int { return cmp.Compare(a.arrived, b.arrived) })
	for i, j := range jobs {
		j.number = i
	}
	return jobs
}

// heat puts the burst's document in front of the end of a request.
func (p *prompts) heat(r *request) *request {
	own := min(r.prompt, hotOwn)
	hot := &request{prompt: hotTokens + own, output: r.output, session: r.session}
	for b := range hotTokens / blockTokens {
		hot.blocks = append(hot.blocks, int32(p.names+b))
	}
	if n := own / blockTokens; len(r.blocks) >= n {
		hot.blocks = append(hot.blocks, r.blocks[len(r.blocks)-n:]...)
	}
	for _, b := range hot.blocks {
		hot.keys = append(hot.keys, keyOf(b))
	}
	return hot
}

// blockNames is how many blocks there can be.
func (p *prompts) blockNames() int { return p.names + hotTokens/blockTokens }
