package board

import (
	"cmp"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

func (b *board) runPolicy(g *group, p *policyInUse, now time.Time) {
	b.addPredictions(g, p)
	b.assignments, b.policyFailure = callPolicy(p, &b.snapshot, b.assignments[:0])
	b.writeTraces(g, p)
	b.round = Round{
		Tick: b.ticks, At: now, Group: b.label(g), Policy: p.name, Survival: b.survival,
		Snapshot: b.snapshot, Assign: b.assignments,
	}
	b.emit(Effect{Kind: EffectRound, Group: b.key(g), Policy: p.name, Err: b.policyFailure, Round: &b.round})
}

func (b *board) fillSnapshot(g *group, p *policyInUse, now time.Time) {
	s := &b.snapshot
	s.Early = slices.ContainsFunc(g.steppingRanks, func(r *rank) bool { return r.Early })
	s.Aggregated = b.ranksPrefill
	b.fillStepCosts(g)
	b.fillWorkers(g, p, now)
	b.fillPool(g, p, now)
	s.MaxAgeMs = b.guardAgeMs(p)
	s.Budget = g.searchBudget.evaluations()
}

// fillPool leaves out entries that are too large for every rank of the group that is up, because
// the starvation guard would keep a rank free for them in vain. It also leaves out those that must
// not go to some ranks.
func (b *board) fillPool(g *group, p *policyInUse, now time.Time) {
	s := &b.snapshot
	s.Pool, s.Waits = s.Pool[:0], s.Waits[:0]
	largest := g.largestPrompt(policy.Watermark(p.Policy))
	for _, e := range b.pool.Entries() {
		if tooLarge := int64(e.Prompt) > largest; tooLarge {
			continue
		}
		if hidden := b.restrictedCount > 0 && (b.hiddenFrom(e, g) || b.mustAvoid(e, now)); hidden {
			continue
		}
		b.addToSnapshot(e, now)
	}
}

// guardAgeMs is the policy's own MaxAgeMs, but not less than several mean waits, because most
// entries of a saturated pool wait for longer; 0: no guard.
func (b *board) guardAgeMs(p *policyInUse) float32 {
	age := p.MaxAgeMs()
	if age > 0 {
		age = max(age, guardWaits*b.waitTimes.meanMs())
	}
	return age
}

// fillStepCosts: RowTokens exists because some engines compute a row for each request, and fill up
// the batches of all ranks with empty rows to the length of the longest batch.
func (b *board) fillStepCosts(g *group) {
	s := &b.snapshot
	model, _, _ := g.steps.Model()
	s.C0Ms, s.C1Ms = float32(model.C0Ms), float32(model.C1Ms)
	s.StepMs = g.steps.Ms(model, g.largestLoad)
	costs := g.policyWeights()
	s.RequestTokens, s.RowTokens = int64(math.Round(costs.Request)), int64(math.Round(costs.Row))
	s.OwnPromptMs = float32(g.promptTokenMs(&model))
	s.NotStarted, s.PromptRate = g.recentSteps.means()
}

// fillWorkers shares the lists of running requests with the ranks. sortDecidingGroups has refreshed
// their loads.
func (b *board) fillWorkers(g *group, p *policyInUse, now time.Time) {
	s := &b.snapshot
	s.Workers = s.Workers[:0]
	watermark := policy.Watermark(p.Policy)
	longestPrompt := int64(0) // of those that wait
	for _, e := range b.pool.Entries() {
		longestPrompt = max(longestPrompt, int64(e.Prompt))
	}
	for _, r := range g.steppingRanks {
		free := r.maxNewRequests(p)
		switch {
		case !r.takesRequests():
			free = min(free, 0) // below 0 tells the policy that more slots are in use than allowed
		case r.onTrial(now):
			free = min(free, 1)
		}
		s.Workers = append(s.Workers, policy.Worker{
			ID: r.ID, Free: int32(free), Up: r.takesRequests(), Cost: r.Cost, Running: r.running, Backlog: r.backlog,
			// A rank without requests has room for the longest prompt.
			Capacity: r.policyCapacity(watermark, now, longestPrompt),
			// KV of requests that are not in Running.
			Others: r.Others + r.kvFromOtherRanks,
		})
	}
}

func (b *board) addToSnapshot(e *pool.Entry, now time.Time) {
	s := &b.snapshot
	s.Pool = append(s.Pool, policy.Entry{
		ID: e.ID, Prompt: clampTokens(e.Prompt), Key: e.Key, Urgent: e.Urgent(now),
		Age:     clampTokens(e.Age),                         // tokens that earlier ranks generated
		WaitMs:  float32(e.GuardWait(now).Seconds() * 1000), // for the starvation guard
		Express: e.Express,                                  // the policy must not hold the entry back
	})
	if b.ranksPrefill {
		w := b.waiting[e.ID]
		s.Waits = append(s.Waits, w.details(now))
	}
}

// callPolicy recovers, so that a bug in a policy does not end the program. The failure has the
// stack.
func callPolicy(p *policyInUse, s *policy.Snapshot, dst []policy.Assignment) (out []policy.Assignment, failure error) {
	defer func() {
		if r := recover(); r != nil {
			out, failure = dst, fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return p.Decide(s, dst), nil
}

// sortDecidingGroups finds the groups that can take an entry. The fewest KV tokens per rank decide
// first; in a tie, the prefix caches that have more of what waits, and then the turns. No group
// decides until beginRounds.
func (b *board) sortDecidingGroups() {
	b.decidingGroups = b.decidingGroups[:0]
	for _, g := range b.groups {
		if !g.admitsAny() {
			g.heldEntries = 0 // the entries wait for a slot now, not for the policy
			continue
		}
		b.refreshGroupLoads(g)
		b.decidingGroups = append(b.decidingGroups, g)
	}
	slices.SortFunc(b.decidingGroups, func(x, y *group) int {
		// KV tokens per rank, without a division.
		order := cmp.Compare(x.kv*int64(len(y.steppingRanks)), y.kv*int64(len(x.steppingRanks)))
		if order == 0 && b.entriesWithHits > 0 {
			order = cmp.Compare(b.cachedTokens(y), b.cachedTokens(x))
		}
		return cmp.Or(order, b.compareTurns(x, y))
	})
	b.endRounds() // nextGroup was for the list before this one
}
