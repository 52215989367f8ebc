package selftest

import (
	"context"
	"fmt"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// numbering finds out what the header X-data-parallel-rank must say for the first rank of a node under hybrid load
// balancing. The node's metrics tell the number that this rank has in the deployment. Rust front ends of vLLM want
// this number, and Python front ends count the ranks of each node from 0. Each answers 400 to the other's number. If the
// config has another number than the engine takes, the test goes on with the engine's number.
func (t *tester) numbering(ctx context.Context, s *subject, e config.Engine, sample *engine.Sample) {
	if sample == nil || sample.FirstRank == 0 || e.Ranks == 0 || s.profile.DPMode != mooncake.DPHybrid || len(s.models) == 0 {
		return
	}
	local, global := t.takes(ctx, s, 0), t.takes(ctx, s, sample.FirstRank)
	if local == global { // it fails for another reason, or looks at no header
		return
	}
	first := 0
	if global {
		first = sample.FirstRank
	}
	if first != e.First {
		t.report(s.name, Bad, "it refuses the ranks that evenkeel names: its ranks begin at %d in the header X-data-parallel-rank, and not at %d; set first_rank: %d of this engine", first, e.First, first)
		target := *s.target
		target.First = first
		s.target = &target
	}
}

// takes says whether an engine serves a request of one token under this number in the header.
func (t *tester) takes(ctx context.Context, s *subject, number int) bool {
	target, named := *s.target, *s
	target.First, target.Rank = number, 0
	named.target = &target
	body := fmt.Appendf(nil, `{"model":%q,"prompt":"evenkeel self test","max_tokens":1}`, s.models[0])
	_, err := t.probe(ctx, named, &query{endpoint: mooncake.Completions}, fmt.Sprintf("%s-n%d", t.id(), number), [][]byte{body})
	return err == nil
}
