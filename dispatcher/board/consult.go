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

// runPolicy adds predictions to the board's snapshot, calls the policy with it, and emits the round: the snapshot and what the policy
// decided. It also writes into the traces of the entries why their ranks were chosen. The assignments are not bound yet.
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

// fillSnapshot writes into the board's Snapshot what the policy reads: the ranks of the group, the costs of its steps, and the pool.
func (b *board) fillSnapshot(g *group, p *policyInUse, now time.Time) {
	s := &b.snapshot
	// Early: requests get their ranks before their prefill. All ranks of a model are early, or none is.
	s.Early = slices.ContainsFunc(g.steppingRanks, func(r *rank) bool { return r.Early })
	s.Aggregated = b.ranksPrefill // the ranks prefill and decode
	b.fillStepCosts(g)
	b.fillWorkers(g, p, now)
	b.fillPool(g, p, now)
	s.MaxAgeMs = b.guardAgeMs(p)
	s.Budget = g.searchBudget.evaluations() // how many changes of its assignments the policy may try in this round
}

// fillPool writes the waiting entries into the snapshot. It leaves out two kinds of entries. The first kind is too large for every rank of
// this group that is up: such an entry waits for another group, and the starvation guard would keep a rank of this group free for it in
// vain. The second kind must not go to some ranks, and policies do not know to which.
func (b *board) fillPool(g *group, p *policyInUse, now time.Time) {
	s := &b.snapshot
	s.Pool, s.Waits = s.Pool[:0], s.Waits[:0]
	largest := g.largestPrompt(policy.Watermark(p.Policy))
	for _, e := range b.pool.Entries() {
		if tooLarge := int64(e.Prompt) > largest; tooLarge {
			continue
		}
		// restrictedCount is the number of waiting entries that may not go to every rank; with 0, no entry need be checked.
		if hidden := b.restrictedCount > 0 && (b.hiddenFrom(e, g) || b.mustAvoid(e, now)); hidden {
			continue
		}
		b.addToSnapshot(e, now)
	}
}

// guardAgeMs returns after which wait, in ms, the policy's starvation guard serves an entry first; 0: the policy has no such guard. It is
// the policy's own MaxAgeMs, but not less than several mean waits, because most entries of a saturated pool wait for longer than MaxAgeMs.
func (b *board) guardAgeMs(p *policyInUse) float32 {
	age := p.MaxAgeMs()
	if age > 0 {
		age = max(age, guardWaits*b.waitTimes.meanMs())
	}
	return age
}

// fillStepCosts writes into the snapshot how long the group's steps take: without load (C0Ms), per KV token (C1Ms), and on average at the
// present loads (StepMs). It also writes what one more request costs apart from its own KV, in KV tokens: on any rank (RequestTokens), and
// in addition on the rank with the most requests (RowTokens). The latter exists because some engines compute a row for each request, and
// fill up the batches of all ranks with empty rows to the length of the longest batch. The other fields are what a prompt token costs on
// the rank that computes it, how many requests wait for their first token, and how many prompt tokens are computed per second.
func (b *board) fillStepCosts(g *group) {
	s := &b.snapshot
	model, _, _ := g.steps.Model() // the other results, the source and the quality of the model, do not matter to policies
	s.C0Ms, s.C1Ms = float32(model.C0Ms), float32(model.C1Ms)
	s.StepMs = g.steps.Ms(model, g.largestLoad)
	costs := g.policyWeights()
	s.RequestTokens, s.RowTokens = int64(math.Round(costs.Request)), int64(math.Round(costs.Row))
	s.OwnPromptMs = float32(g.promptTokenMs(&model))
	s.NotStarted, s.PromptRate = g.recentSteps.means()
}

// fillWorkers writes the ranks of the group into the snapshot. The snapshot shares the lists of running requests with the ranks, whose
// loads were updated when the tick began. A rank that takes no requests gets no free slot in the snapshot. A rank on trial after refusals
// (spare.go) gets at most one.
func (b *board) fillWorkers(g *group, p *policyInUse, now time.Time) {
	s := &b.snapshot
	s.Workers = s.Workers[:0]
	watermark := policy.Watermark(p.Policy) // share of a rank's KV room that the policy keeps empty
	longestPrompt := int64(0)               // longest prompt that waits
	for _, e := range b.pool.Entries() {
		longestPrompt = max(longestPrompt, int64(e.Prompt))
	}
	for _, r := range g.steppingRanks {
		free := r.maxNewRequests(p)
		switch {
		case !r.takesRequests():
			free = min(free, 0) // the number may be below 0, which tells the policy that more slots are in use than allowed
		case r.onTrial(now):
			free = min(free, 1)
		}
		s.Workers = append(s.Workers, policy.Worker{
			ID: r.ID, Free: int32(free), Up: r.takesRequests(), Cost: r.Cost, Running: r.running, Backlog: r.backlog,
			// Some ranks must stay emptier than others, but a rank without requests has room for the longest prompt.
			Capacity: r.policyCapacity(watermark, now, longestPrompt),
			// KV of requests that are not in Running: of other proxies, and with slots on other ranks of the engine.
			Others: r.Others + r.kvFromOtherRanks,
		})
	}
}

// addToSnapshot adds an entry to the snapshot, and its details to Waits if the ranks prefill.
func (b *board) addToSnapshot(e *pool.Entry, now time.Time) {
	s := &b.snapshot
	s.Pool = append(s.Pool, policy.Entry{
		ID: e.ID, Prompt: clampTokens(e.Prompt), Key: e.Key, Urgent: e.Urgent(now),
		Age:     clampTokens(e.Age),                         // tokens of the answer that earlier ranks have generated
		WaitMs:  float32(e.GuardWait(now).Seconds() * 1000), // wait by which the starvation guard finds the overdue entries
		Express: e.Express,                                  // the policy must not hold the entry back
	})
	if b.ranksPrefill {
		w := b.waiting[e.ID]
		s.Waits = append(s.Waits, w.details(now))
	}
}

// callPolicy calls the policy and returns its assignments, appended to dst. If the policy panics, out is dst, and failure has the panic
// with its stack. So a bug in a policy does not end the program.
func callPolicy(p *policyInUse, s *policy.Snapshot, dst []policy.Assignment) (out []policy.Assignment, failure error) {
	defer func() {
		if r := recover(); r != nil {
			out, failure = dst, fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return p.Decide(s, dst), nil
}

// sortDecidingGroups finds the groups that can take an entry, updates their loads, and sorts them into the order in which their policies
// decide: the group with the fewest KV tokens per rank first. In a tie, the group comes first whose prefix caches have more of what waits,
// and then the one whose turn it is. It begins no round: no group decides until the caller calls beginRounds, and
// the caller may find that no round is needed.
func (b *board) sortDecidingGroups() {
	b.decidingGroups = b.decidingGroups[:0]
	for _, g := range b.groups {
		if !g.admitsAny() {
			g.heldEntries = 0 // the entries wait for a free slot now, so none of them is held back by the policy
			continue
		}
		b.refreshGroupLoads(g)
		b.decidingGroups = append(b.decidingGroups, g)
	}
	slices.SortFunc(b.decidingGroups, func(x, y *group) int {
		order := cmp.Compare(x.kv*int64(len(y.steppingRanks)), y.kv*int64(len(x.steppingRanks))) // KV tokens per rank, without a division
		if order == 0 && b.entriesWithHits > 0 {
			order = cmp.Compare(b.cachedTokens(y), b.cachedTokens(x))
		}
		return cmp.Or(order, b.compareTurns(x, y))
	})
	b.endRounds() // nextGroup was an index into the list before this one
}
