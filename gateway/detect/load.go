package detect

import (
	"fmt"

	"evenkeel/internal/stats"
)

// Kinds of findings about the load of a model.
const (
	Overload Kind = "overload"
	KVFull   Kind = "kv_full"
)

var loadDetectors = []Detector{
	{
		Kind: Overload, find: findOverload, nextForKey: limitKeyOrAddDecode,
		harm: failing, effect: true, overload: true, manyWait: true, toleratedAbsence: togetherWithin, headline: "Overload",
		pluralText: "are overloaded: their slots are taken, and many requests wait", runbook: "overload", command: showAdvice,
		clients: "Clients wait for their first token until a slot is free. Those that wait too long get a 503, and new ones get a 429 while a " +
			"queue is full.",
		next: "Add decode ranks, or find the caller that sends too much and limit its key. A larger pool.size or prefill.queue.max only lets " +
			"more clients wait.",
	},
	{
		Kind: KVFull, find: findKVFull, nextForKey: limitKeyOrAddDecode,
		harm: failing, effect: true, overload: true, manyWait: true, toleratedAbsence: togetherWithin, headline: "Full KV caches",
		runbook: "kv_full", command: showAdvice,
		pluralText: "have full KV caches, and many requests wait",
		clients: "Clients wait for their first token until an answer ends and frees KV memory. " +
			"Those that wait too long get a 503, and new ones get a 429 while a queue is full.",
		next: "Add decode ranks. More slots do not help. " +
			"Look whether prompts are longer than usual, and whether the capacity of a rank is what its engine logs.",
	},
}

const (
	allTakenShare = 0.95 // the rest will be taken in the next round
	kvFullShare   = 0.85 // running answers need the rest to grow
)

// load is a finding if the model has no free slot or no KV memory, and if about as many requests
// wait as run, so that each waits for one answer to end. A short burst is no finding, unless
// requests are refused.
type load struct {
	crowded            bool // about as many wait as run now
	hasFreeSlots       bool
	kind               Kind // empty: no finding
	used, slots        int
	kvTokens, capacity int64
	waiting            int
	where              string // where the requests wait, in words
}

// modelLoad counts only ranks that take requests.
func (f *Facts) modelLoad(m *Model) (l load) {
	for i := range m.Groups {
		for j := range m.Groups[i].Ranks {
			if r := &m.Groups[i].Ranks[j]; r.State == RankUp {
				l.used += r.Used
				l.slots += r.Slots
				l.kvTokens += r.KVTokens
				l.capacity += r.Capacity
			}
		}
	}
	l.waiting, l.where = f.waitingForRanks(m)
	queueRefuses := f.manyFail() && f.queueFullFailures() != nil
	l.judge(queueRefuses, m.CrowdedS > 0)
	return l
}

// judge: a crowd counts only once it has lasted (crowdedForLong). But if requests are refused
// because a queue is full, the load is a finding at once.
func (l *load) judge(queueRefuses, crowdedForLong bool) {
	// 0: not known
	kvIsFull := l.capacity > 0 && float64(l.kvTokens) >= kvFullShare*float64(l.capacity)
	l.hasFreeSlots = float64(l.used) < allTakenShare*float64(l.slots)
	hasRoom := l.hasFreeSlots && !kvIsFull
	if l.slots == 0 || l.waiting == 0 || hasRoom { // without slots, other findings say why
		return
	}
	asManyWaitAsRun := l.waiting >= min(l.used, l.slots)
	// One long answer that ends may make KV room for two.
	manyWaitForKV := l.hasFreeSlots && 2*l.waiting >= l.used
	l.crowded = asManyWaitAsRun || manyWaitForKV
	isLastingCrowd := l.crowded && crowdedForLong
	switch {
	case !queueRefuses && !isLastingCrowd:
	case l.hasFreeSlots:
		l.kind = KVFull
	default: // more KV memory would not help
		l.kind = Overload
	}
}

func (f *Facts) waitingForRanks(m *Model) (waiting int, where string) {
	waiting, where = m.Pool.Entries, "in the pool"
	// While the pool is empty and has free places, the arrival queue waits for prefill engines.
	queueWaitsForRanks := waiting > 0 || f.Proxy.PlacesUsed >= f.Proxy.Places
	// With several models, the share of this one in the arrival queue is not known.
	if len(f.Models) == 1 && f.Prefill.Waiting > 0 && queueWaitsForRanks {
		where = "in the arrival queue"
		if waiting > 0 {
			where = "in the pool and in the arrival queue"
		}
		waiting += f.Prefill.Waiting
	}
	return waiting, where
}

// manyFail uses the rates over the last ten seconds.
func (f *Facts) manyFail() bool { return f.Traffic.FailuresPerS > failShare*f.Traffic.RequestsPerS }

func (f *Facts) onlyKeyLimits() bool {
	return f.Traffic.FailuresPerS-f.Traffic.ByKeyLimitPerS <= failShare*f.Traffic.RequestsPerS
}

// eachLoaded: apiKey is the key with more than half of the waiting requests, if any, and apiKeyText
// says so.
func (v *view) eachLoaded(kind Kind, report func(m *Model, l *load, apiKey, apiKeyText string)) {
	apiKey, apiKeyText := v.keyOfMostWaiting()
	for i := range v.loads {
		if v.loads[i].kind == kind {
			report(&v.Models[i], &v.loads[i], apiKey, apiKeyText)
		}
	}
}

func findOverload(v *view, report reportFunc) {
	v.eachLoaded(Overload, func(m *Model, l *load, apiKey, apiKeyText string) {
		slot, _ := m.nouns()
		taken := fmt.Sprintf("All %s %ss of model %s are", stats.Grouped(l.slots), slot, m.Name)
		switch {
		case l.used < l.slots: // from allTakenShare on, all slots count as taken
			taken = fmt.Sprintf("%s of the %s %ss of model %s are", stats.Grouped(l.used), stats.Grouped(l.slots), slot, m.Name)
		case l.slots == 1:
			taken = fmt.Sprintf("The only %s of model %s is", slot, m.Name)
		}
		waiting := waits(l.waiting) + " " + l.where + apiKeyText
		report(place{"model", m.Name, "pool"}, noReason, "%s taken, and %s%s", taken, waiting, slotsHeldLonger(m)).Key = apiKey
	})
}

func findKVFull(v *view, report reportFunc) {
	v.eachLoaded(KVFull, func(m *Model, l *load, apiKey, apiKeyText string) {
		slotNoun, rankNoun := m.nouns()
		fullPercent := 100 * float64(l.kvTokens) / float64(l.capacity)
		freeSlots := fmt.Sprintf("%s of %s %ss", stats.Grouped(l.slots-l.used), stats.Grouped(l.slots), slotNoun)
		waiting := waits(l.waiting) + " " + l.where + apiKeyText
		report(place{"model", m.Name, ranksPanel}, noReason,
			"The KV caches of the %ss of model %s are %.0f %% full, so that %s stay free, and %s",
			rankNoun, m.Name, fullPercent, freeSlots, waiting).Key = apiKey
	})
}

func (m *Model) nouns() (slot, rank string) {
	if m.Aggregated {
		return "slot", "rank"
	}
	return "decode slot", "decode rank"
}

// slotsHeldLonger names the first group whose steps give fewer tokens or are slower, which explains
// an overload.
func slotsHeldLonger(m *Model) string {
	for i := range m.Groups {
		g := &m.Groups[i]
		switch {
		case g.FewTokensS > 0:
			return fmt.Sprintf(". Answers of group %s hold their slots for longer, because a step gives %.1f tokens and gave %.1f before", g.Name,
				g.StepTokens, g.UsualTokens)
		case g.SlowStepsS > 0:
			return fmt.Sprintf(". Answers of group %s hold their slots for longer, because a step takes %.0f ms and took %.0f ms before", g.Name,
				g.StepMs, g.UsualMs)
		}
	}
	return ""
}

// keyOfMostWaiting returns the API key with more than half of the waiting requests; empty: no key
// has so many.
func (f *Facts) keyOfMostWaiting() (key, text string) {
	if len(f.Waiting) == 0 {
		return "", ""
	}
	all := 0
	for _, w := range f.Waiting {
		all += w.Requests
	}
	largest := f.Waiting[0] // sorted by count
	hasMajority := 2*largest.Requests > all
	if largest.Key == "" || !hasMajority { // an empty name stands for several callers
		return "", ""
	}
	if largest.Requests == all {
		return largest.Key, ", all of API key " + largest.Key
	}
	return largest.Key, fmt.Sprintf(": %s of the %s that wait are of API key %s", stats.Grouped(largest.Requests), stats.Grouped(all),
		largest.Key)
}

// queueFullFailures returns the requests that were refused because a queue is full; nil: none in
// the last 10 s, or a limit of one key is the reason, so that other keys are served.
func (f *Facts) queueFullFailures() *Failed {
	for i := range f.Failures {
		failed := &f.Failures[i]
		failsNow := failed.Last10S > 0
		if failed.Outcome == "queue_full" && failsNow && !failed.ByKeyLimit {
			return failed
		}
	}
	return nil
}
