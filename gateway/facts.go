package gateway

import (
	"cmp"
	"context"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/receipt"
	"evenkeel/prefill"
)

// observer collects the facts about a proxy from which package detect finds incidents.
type observer struct{ *Gateway }

// reporter is a part of the proxy that fills in the facts that it knows.
type reporter interface{ Facts(*detect.Facts) }

// Facts returns the status of all parts of the proxy, in which package detect looks for incidents.
func (g observer) Facts(ctx context.Context) detect.Facts {
	s, overview, now := g.Status(ctx), g.scheduler.Overview(), time.Now()
	recent, conf := g.Recent(), g.Config()
	f := detect.Facts{
		At: now,
		Proxy: detect.Proxy{
			ID: cmp.Or(conf.Geo.Self.ID, hostname()), Region: conf.Geo.Self.Region, UptimeS: now.Sub(s.Started).Seconds(),
			Ready: s.Ready, Why: s.Why, Draining: s.Drain != nil, Policy: s.Dispatch.Policy, PrefillPolicy: overview.Policy,
			ReloadedMs: reloadedMs(s.Config.Since, s.Started),
			Open:       s.Open, Places: s.PoolPlaces, PlacesUsed: s.PoolUsed, DriftSlots: s.Dispatch.Drift.Slots,
			DriftTokens: s.Dispatch.Drift.KVTokens,
		},
		Traffic: detect.Traffic{TTFT: recent.TTFT, TPOT: recent.TPOT},
		Prefill: detect.Prefill{
			Policy: overview.Policy, Waiting: overview.Waiting, Batch: detect.BatchStatus(s.Batch), QueueMax: conf.Prefill.Queue.Max,
			ScrapeEveryMs: float64(conf.Prefill.Scrape.Interval.Milliseconds()),
			HitShare:      share(float64(overview.Index.ActualTokens), float64(overview.Index.PromptTokens)),
		},
		Advice: s.Advice,
	}
	if s.Config.Last != nil {
		f.Proxy.ConfigError = s.Config.Last.Error
	}
	for key, ends := range g.config.Certificates() {
		f.Proxy.Certificates = append(f.Proxy.Certificates, detect.Certificate{Key: key, EndsS: ends.Sub(now).Seconds()})
	}
	for i := range s.Dispatch.Models {
		f.Models = append(f.Models, g.modelFacts(&s.Dispatch.Models[i], conf.Pool.TTL.Seconds()))
	}
	for i := range overview.Candidates {
		if c := &overview.Candidates[i]; c.Aggregated {
			id, _ := roster.DisplayName(c.ID)
			f.Prefill.Groups = append(f.Prefill.Groups, detect.PrefillGroup{ID: id, State: c.State, Inflight: c.Inflight})
		} else {
			f.Prefill.Engines = append(f.Prefill.Engines, prefillFacts(c, conf.Prefill.KVThreshold))
		}
	}
	for _, e := range s.Engines {
		f.Engines = append(f.Engines, detect.Engine{
			ID: e.ID, Role: e.Role, Models: firstModels(e.Models), Group: e.Group, State: e.State, Why: e.Error, SinceS: age(now, e.Since),
			Draining: e.Draining, OwnedByOther: e.OwnedByOther,
			Paused: e.Paused, Hangs: e.Hangs, Moved: movedFact(e.Moved, now), Share: e.Share, Ranks: e.Ranks, Version: e.Version,
			ReadLate: readLateFact(g.monitor.Expiries(e.Role+" "+e.ID), now),
		})
	}
	g.fillInCallers(&f)
	g.fillInFailingHost(&f, now)
	g.fillInHits(&f, now)
	for _, part := range g.reporters {
		part.Facts(&f)
	}
	return f
}

// movedFact describes the change of an engine's address; nil: the address has not changed.
func movedFact(m *engine.Moved, now time.Time) *detect.Moved {
	if m == nil {
		return nil
	}
	return &detect.Moved{From: m.From, To: m.To, AgoS: age(now, m.At)}
}

// readLateFact describes the hand-offs that were read too late; nil: this proxy has seen none.
func readLateFact(e engine.Expiries, now time.Time) *detect.ReadLate {
	if e.ReadLateAt.IsZero() {
		return nil
	}
	return &detect.ReadLate{HandOffs: e.ReadLate, AgoS: age(now, e.ReadLateAt)}
}

// fillInCallers fills in which API keys have requests that wait, and which key sends the most
// prompt tokens. It fills in nothing while no request waits and no prefill engine is full.
func (g observer) fillInCallers(f *detect.Facts) {
	requestsWait := f.Prefill.Waiting > 0 || slices.ContainsFunc(f.Models, func(m detect.Model) bool { return m.Pool.Entries > 0 })
	engineIsFull := slices.ContainsFunc(f.Prefill.Engines, func(e detect.PrefillEngine) bool {
		return e.State == "closed" // the engine has as many prompts as it may have, and takes no more
	})
	if requestsWait || engineIsFull {
		loads := g.Receipts().Loads()
		f.Prefill.Heaviest = heaviestKey(loads)
		if requestsWait {
			f.Waiting = waitingOf(loads)
		}
	}
}

// fillInFailingHost fills in the host on which nearly all requests that failed had a failed
// attempt. It only names a host whose engines all have others that can take their requests
// (hasStandIns).
func (g observer) fillInFailingHost(f *detect.Facts, now time.Time) {
	host, failedThere, failed := g.Receipts().FailedOn(now)
	mostFailedThere := failed >= failedAtLeast && float64(failedThere) >= failedShare*float64(failed)
	if mostFailedThere && hasStandIns(f.Engines, host) {
		f.Traffic.FailedOn = host
	}
}

// fillInHits fills in the longest backlog of prefills of all models, in seconds. While it is long,
// fillInHits also fills in what share of the prompts of the key with the most waiting requests was
// found in prefix caches, in the last minute and in the 14 minutes before. It is called after
// fillInCallers, which sets f.Waiting.
func (g observer) fillInHits(f *detect.Facts, now time.Time) {
	for i := range f.Advice {
		f.Prefill.BacklogS = max(f.Prefill.BacklogS, f.Advice[i].Prefill.BacklogSeconds)
	}
	if f.Prefill.IsBacklogLong() && len(f.Waiting) > 0 {
		key := f.Waiting[0].Key // the key with the most waiting requests
		lately, before := g.Receipts().Hits(key, now)
		if lately.Prompt > 0 && before.Prompt > 0 { // without prompts in a span, it has no share to compare
			f.Prefill.Hits = &detect.Hits{Key: key, Share: share(float64(lately.Cached), float64(lately.Prompt)),
				Before: share(float64(before.Cached), float64(before.Prompt))}
		}
	}
}

// mostKeys is how many API keys are named at most. The requests of all other keys are added up.
const mostKeys = 5

// waitingOf lists the API keys that have requests waiting, those with the most first. Its last
// entry, without a key, adds up all keys after the first mostKeys.
func waitingOf(keys map[string]receipt.Load) []detect.Waiting {
	list := make([]detect.Waiting, 0, len(keys))
	for key, load := range keys {
		if load.Waiting > 0 {
			list = append(list, detect.Waiting{Key: key, Requests: load.Waiting})
		}
	}
	slices.SortFunc(list, func(a, b detect.Waiting) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Key, b.Key))
	})
	if len(list) > mostKeys {
		others := detect.Waiting{}
		for _, w := range list[mostKeys:] {
			others.Requests += w.Requests
		}
		list = append(list[:mostKeys], others)
	}
	return list
}

// heaviestKey returns the key with the most prompt tokens, its share of the tokens of all keys, and
// the mean length of its prompts, in tokens; nil: no key has any tokens. Ties go to the key that
// comes first in the alphabet, because a map has no order.
func heaviestKey(keys map[string]receipt.Load) *detect.Heaviest {
	totalTokens := 0
	var heaviest receipt.Load
	var heaviestName string
	for key, load := range keys {
		totalTokens += load.Tokens
		winsTie := load.Tokens == heaviest.Tokens && key < heaviestName
		if load.Tokens > heaviest.Tokens || winsTie {
			heaviest, heaviestName = load, key
		}
	}
	if heaviest.Prompts == 0 || totalTokens == 0 { // no key has any tokens; both are divisors below
		return nil
	}
	return &detect.Heaviest{Key: heaviestName, Share: float64(heaviest.Tokens) / float64(totalTokens),
		Mean: heaviest.Tokens / heaviest.Prompts}
}

// mostModelsNamed is how many models of an engine are named. LoRA adapters are models, too, and
// there may be thousands.
const mostModelsNamed = 16

// firstModels returns the first mostModelsNamed of an engine's models, the base model first, and
// "other" in place of the rest.
func firstModels(models []string) []string {
	if len(models) <= mostModelsNamed {
		return models
	}
	return append(slices.Clone(models[:mostModelsNamed]), "other")
}

// modelFacts returns the facts about a model: its pool, and its groups with their ranks. ttl is how
// long a pool entry may wait, in s.
func (g observer) modelFacts(m *board.ModelStatus, ttl float64) detect.Model {
	out := detect.Model{
		Pairs: m.Pairs, NoneArriveSince: m.NoneArriveSince,
		Pool: detect.Pool{
			Entries: m.Pool, OldestS: m.OldestSeconds, TTLS: ttl,
			UpToS: board.PoolAgeSeconds, Ages: m.PoolAges, // a histogram of ages: upper bounds in s, and a count for each class
		},
	}
	out.Name, out.Aggregated = roster.DisplayName(m.Model)
	for i := range m.Groups {
		out.Groups = append(out.Groups, g.groupFacts(&m.Groups[i], m.Workers))
	}
	return out
}

// groupFacts returns the facts about a group: its loads, its steps, and those of the model's ranks
// that are in the group. The engines' gauges are among them only if the ranks step together and do
// not prefill, because package detect compares only such ranks by them.
func (g observer) groupFacts(from *board.GroupStatus, ranks []board.WorkerStatus) detect.Group {
	group := detect.Group{GroupLoads: from.GroupLoads, Rounds: from.Rounds, Held: from.Held}
	if step := from.Step; step != nil {
		group.StepModel = detect.StepModel{BaseMs: step.C0Ms, PerTokenMs: step.C1Ms, PerRequestMs: step.RequestMs}
		group.StepMs, group.ModelMs = float64(step.MeanMs), step.ModelMs
		group.PromptTokenMs = step.OwnPromptMs // what a prompt token adds to a step if the slowest rank computes it
		group.ModelWhy = step.Why
		group.LostShare, group.LostMs, group.SyncWaitMs = step.LostShare, step.LostMs, step.SyncWaitMs
	}
	for _, w := range ranks {
		inGroup := w.Barrier == from.Barrier && (!from.Barrier || w.Group == from.Name) // all ranks without a barrier are one group
		if !inGroup {
			continue
		}
		rank := rankFacts(&w)
		isOfAnother := func(other board.WorkerStatus) bool { return !other.Barrier && other.Group != w.Group }
		if !from.Barrier && slices.ContainsFunc(ranks, isOfAnother) {
			rank.Group = w.Group
		}
		group.Ranks = append(group.Ranks, rank)
	}
	if group.StepsAreComparable() {
		group.Gauges = g.gaugesOf(group.Ranks)
	}
	return group
}

// rankFacts returns the facts about a decode rank.
func rankFacts(w *board.WorkerStatus) detect.Rank {
	return detect.Rank{
		ID: w.ID, Name: w.Name, State: stateOnLivePage(w.State), Why: w.Why, InSteps: !w.Down && !w.Removed,
		KVTokens: w.KVTokens, Unread: w.Unread, Capacity: w.Capacity,
		Used: w.Used, Slots: w.Limit, // Limit: the slots that may be used now, and not all that the rank has
		Running: w.Running, Output: w.Output, Answers: w.Answers, Empty: w.Empty, Tight: w.Tight, Backlog: w.Backlog,
		Prompts: w.Prompts, Kept: w.Kept,
	}
}

// gaugesOf returns the engines' metrics of each rank; an entry is nil if they could not be read.
func (g observer) gaugesOf(ranks []detect.Rank) []*detect.Gauges {
	list := make([]*detect.Gauges, len(ranks))
	for i := range ranks {
		if gauges, ok := g.Gauges(ranks[i].ID); ok {
			list[i] = &detect.Gauges{Running: gauges.Running, Waiting: gauges.Waiting, KVShare: gauges.KVShare, Preempted: gauges.Preempted,
				Computed: gauges.Computed}
		}
	}
	return list
}

// stateOnLivePage returns the state of a rank as the live page shows it. The page has fewer states
// than the roster.
func stateOnLivePage(state string) string {
	switch state {
	case roster.Up.String():
		return detect.RankUp
	case roster.Draining.String():
		return detect.RankDraining
	case roster.Unowned.String():
		return detect.RankForeign
	case roster.Absent.String():
		return detect.RankRemoved
	case roster.Down.String(), roster.Late.String(), roster.Lost.String():
		return detect.RankDown
	}
	return detect.RankOut
}

// prefillFacts returns the facts about a prefill engine. gate is the largest share of its KV memory
// that prompts may fill.
func prefillFacts(c *prefill.CandidateStatus, gate float64) detect.PrefillEngine {
	p := detect.PrefillEngine{
		ID: c.ID, State: c.State, KVTokens: c.KVTokens, Budget: int64(gate * float64(c.CapacityTokens)), KVShare: c.OwnUsage, GateShare: gate,
		Inflight: c.Inflight, NewTokens: c.QueuedNewTokens, Waiting: c.Waiting, Pooled: c.Pooled, Dispatched: c.Dispatched,
		HitShare: c.HitShare, LosesHandoffs: c.LosesHandoffs, ScrapeAgeMs: -1, // -1: the engine's metrics were not read yet
	}
	if c.State == "out" { // the engine takes no requests, and Why is the first line of the reason
		p.Why, _, _ = strings.Cut(c.Fault, "\n")
	}
	if c.ScrapedUsage != nil { // the engine may hold KV that this proxy does not know of
		p.KVShare = max(p.KVShare, *c.ScrapedUsage)
	}
	if c.ScrapeAgeMs != nil {
		p.ScrapeAgeMs = *c.ScrapeAgeMs
	}
	return p
}

// reloadedMs returns when the config in force was loaded, in Unix milliseconds; 0: at the start of
// the proxy.
func reloadedMs(since, started time.Time) int64 {
	if !since.After(started) {
		return 0
	}
	return since.UnixMilli()
}

// share returns part as a share of the whole; 0 if the whole is 0.
func share(part, whole float64) float64 {
	if whole == 0 {
		return 0
	}
	return part / whole
}

// age returns how long ago a time was, in seconds; 0: the time is not known, or is later than now.
func age(now, then time.Time) float64 {
	if then.IsZero() {
		return 0
	}
	return max(0, now.Sub(then).Seconds())
}

// hostname is the name of this machine; "evenkeel" if it is not known.
func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return "evenkeel"
	}
	return name
}

const (
	failedAtLeast = 5   // requests that must have failed in the last minute before a host is named as the cause
	failedShare   = 0.9 // share of the failed requests that must have had a failed attempt on that host
)

// hasStandIns says whether each engine of a host has a healthy engine of the same role on another
// host, which can take its requests. It is false for a host without engines.
func hasStandIns(engines []detect.Engine, host string) bool {
	hostOf := func(e *detect.Engine) string {
		h, _, _ := net.SplitHostPort(e.ID)
		return h
	}
	hasEngines := false
	for i := range engines {
		e := &engines[i]
		if hostOf(e) != host {
			continue
		}
		hasEngines = true
		canReplace := func(other detect.Engine) bool {
			takesRequests := other.State == "up" && !other.Draining && !other.OwnedByOther
			return takesRequests && hostOf(&other) != host && other.Role == e.Role
		}
		if !slices.ContainsFunc(engines, canReplace) {
			return false
		}
	}
	return hasEngines
}

// Sample returns the figures that the watch stores each second. ok is false if ctx ends first.
func (g observer) Sample(ctx context.Context) (s detect.Sample, ok bool) {
	loads, ok := g.dispatcher.Loads(ctx)
	if !ok {
		return s, false
	}
	r := g.Recent()
	return sampleOf(&loads, &r), true
}

// sampleOf makes a sample from the loads of the ranks and the figures about recent requests.
func sampleOf(loads *board.Loads, r *journal.Recent) detect.Sample {
	s := detect.Sample{
		At: time.Now(), Ended: r.Ended, Failed: r.Failed, ByKeyLimit: r.ByKeyLimit, Tokens: loads.OutputTokens,
		Failures: r.Failures, Whys: r.Whys, TTFT: r.TTFT, TPOT: r.TPOT,
		Pool: loads.Pool, Ranks: make([]detect.RankAt, len(loads.Ranks)),
	}
	for i, l := range loads.Ranks {
		s.Ranks[i] = detect.RankAt{
			ID: l.Worker, Running: l.Running, KVTokens: l.KVTokens,
			Output:       l.Output - int64(l.Answers), // not the first token of each answer, because the wait for it is no time between tokens
			AnswerCounts: detect.AnswerCounts{Answers: l.Answers, Empty: l.Empty},
		}
	}
	return s
}
