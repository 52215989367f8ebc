// Package local predicts how many tokens of a prompt are in the prefix cache of each rank that
// decodes and may compute prompts itself. The dispatcher chooses the rank, because only it knows
// the free slots.
package local

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel/prefill"
	"evenkeel/prefill/cache"
	"evenkeel/prefill/fit"
	"evenkeel/prefill/index"
	"evenkeel/prefill/policy"
)

// Rank is a rank that decodes and may compute prompts.
type Rank struct {
	ID       int32
	Name     string
	Model    string // base model of the board on which the rank is
	Engine   string // API server of the rank; ranks of one API server share their trust
	Capacity int64  // KV tokens that fit on the rank; 0: not known
	Up       bool
	Events   prefill.EventSource // where the rank publishes KV events; zero: its cache is known only from answers
}

type Prompt struct {
	prefill.Prompt
	Model  string // base model of the board
	Tokens int    // counted or estimated; 0: not known
}

// Offer is the work that a prompt would cause on a rank.
type Offer struct {
	Rank int32
	Hit  int // tokens predicted to be in the prefix cache
	New  int // tokens to compute, at least 1
}

// Ranks predicts the prefix caches of all ranks that may compute prompts. mu guards the state; it
// is never held during I/O.
type Ranks struct {
	setMu         sync.Mutex // serialises Set and Close: they wait for streams to end, and so cannot hold mu, which streams take
	closed        bool       // no more streams begin; guarded by setMu
	mu            sync.Mutex
	cache         *cache.Cache
	ranks         map[int32]*rank
	engines       map[string]*cacheTrust
	transferTimes map[string]*fit.Calibration // durations of hand-offs, by model
}

type rank struct {
	Rank
	cache     cache.CachedBlocks
	stream    cache.Feed // the stream of the rank's KV events; zero: none
	emptiedAt time.Time  // when Forget was called for the rank; zero: never
}

// engineBlock is the number of tokens per KV block if the engine does not report it: vLLM's
// default.
const engineBlock = 16

func (r *rank) blockTokens() int {
	if r.stream.Stream == nil {
		return engineBlock
	}
	return cmp.Or(r.stream.BlockTokens(), engineBlock)
}

// New returns a Ranks without ranks. maxBytes bounds the memory of its index.
func New(maxBytes int64) *Ranks {
	return &Ranks{
		cache: cache.New(index.Config{MaxBytes: maxBytes}), ranks: map[int32]*rank{}, engines: map[string]*cacheTrust{},
		transferTimes: map[string]*fit.Calibration{},
	}
}

// Set replaces the ranks. One that comes back up is assumed to have an empty cache.
func (l *Ranks) Set(ranks []Rank) {
	l.setMu.Lock()
	defer l.setMu.Unlock()
	wanted := map[int32]prefill.EventSource{}
	for i := range ranks {
		wanted[ranks[i].ID] = ranks[i].Events
	}
	l.unfollow(func(r *rank) bool { return wanted[r.ID] != r.stream.Source }) // gone, or publishing elsewhere now
	l.mu.Lock()
	defer l.mu.Unlock()
	l.replaceRanks(ranks)
	for _, r := range l.ranks {
		followed := r.stream.Stream != nil
		if !followed && r.Events.Exists() && !l.closed {
			r.stream = r.cache.Follow(&l.mu, r.Events, engineBlock, r.Capacity, time.Now())
		}
	}
}

func (l *Ranks) unfollow(selected func(*rank) bool) {
	l.mu.Lock()
	var ended []*rank
	for _, r := range l.ranks {
		if r.stream.Stream != nil && selected(r) {
			ended = append(ended, r)
		}
	}
	l.mu.Unlock()
	for _, r := range ended {
		r.stream.Close() // without the lock: Close waits for the stream, which takes it
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range ended {
		r.stream = cache.Feed{}
		r.cache.StopFollowing()
	}
}

// Close ends all streams of KV events. A later Set starts no new ones.
func (l *Ranks) Close() {
	l.setMu.Lock()
	defer l.setMu.Unlock()
	l.closed = true
	l.unfollow(func(*rank) bool { return true })
}

// BlockTokens is the number of tokens per KV block of the model's ranks; 0: no event has said it.
func (l *Ranks) BlockTokens(model string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.ranks {
		followed := r.stream.Stream != nil
		if !followed || r.Events.Model != model {
			continue
		}
		if blockTokens := r.stream.BlockTokens(); blockTokens > 0 {
			return blockTokens
		}
	}
	return 0
}

// Events describes the ranks whose KV events are followed, by name.
func (l *Ranks) Events() (all []prefill.RankEvents) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.ranks {
		if r.stream.Stream != nil {
			all = append(all, prefill.RankEvents{ID: r.Name, Mode: r.cache.Mode(time.Now()), Events: r.stream.Status()})
		}
	}
	slices.SortFunc(all, func(a, b prefill.RankEvents) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// replaceRanks also drops what was learned of engines and models that have no rank any more. mu
// must be held.
func (l *Ranks) replaceRanks(ranks []Rank) {
	present, engines, models := map[int32]bool{}, map[string]bool{}, map[string]bool{}
	for _, given := range ranks {
		present[given.ID], engines[given.Engine], models[given.Model] = true, true, true
		r := l.ranks[given.ID]
		if r == nil {
			r = &rank{cache: l.cache.CachedBlocks(given.Name)}
			l.ranks[given.ID] = r
		} else if given.Up && !r.Up { // its engine may have restarted, with an empty cache and other settings
			r.cache.DropAll()
			delete(l.engines, given.Engine)
		}
		r.Rank = given
		if l.engines[given.Engine] == nil {
			l.engines[given.Engine] = &cacheTrust{} // trusted at first
		}
	}
	for id, r := range l.ranks {
		if !present[id] {
			r.cache.Close()
			delete(l.ranks, id)
		}
	}
	maps.DeleteFunc(l.engines, func(name string, _ *cacheTrust) bool { return !engines[name] })
	l.cache.DropModels(func(model string) bool { return !models[model] })
	maps.DeleteFunc(l.transferTimes, func(model string, _ *fit.Calibration) bool { return !models[model] })
}

func (l *Ranks) AnyComputes(model string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.ranks {
		if r.Model == model {
			return true
		}
	}
	return false
}

// Length is the length of the prompt in tokens, estimated by the model's learned ratio if it was
// not counted.
func (l *Ranks) Length(p *Prompt) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.length(p)
}

// length is Length with mu held by the caller.
func (l *Ranks) length(p *Prompt) int {
	if p.Tokens > 0 {
		return p.Tokens
	}
	return l.cache.PromptTokens(&p.Prompt, p.Model, 0)
}

// Offers lists, by ID, the ranks that may compute the prompt, are up and are not in avoid. A
// predicted hit reduces New only if the engine is trusted, or if its KV events report the blocks.
func (l *Ranks) Offers(p *Prompt, avoid []int32) (offers []Offer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	tokens := l.length(p)
	now := time.Now()
	found := l.cache.Match(&p.Prompt, &cache.Lookup{}, now)
	for _, r := range l.ranks {
		mayCompute := r.Model == p.Model && r.Up
		if !mayCompute || slices.Contains(avoid, r.ID) {
			continue
		}
		offer := Offer{Rank: r.ID, Hit: r.hitTokens(found, p, tokens), New: tokens}
		hitIsReliable := l.engines[r.Engine].trusted() || r.cache.NamesBlocksOf(&p.Prompt, now)
		if hitIsReliable {
			offer.New = max(1, tokens-offer.Hit)
		}
		offers = append(offers, offer)
	}
	slices.SortFunc(offers, func(a, b Offer) int { return int(a.Rank - b.Rank) })
	return offers
}

func (r *rank) hitTokens(found []int32, p *Prompt, tokens int) int {
	heldTokens := float64(r.cache.Blocks(found, &p.Prompt)) * p.BlockSize(tokens)
	return index.UsableHit(int(heldTokens), tokens, r.blockTokens())
}

// NoteHeld notes that a rank has the prompt's KV, because it computed or pulled the KV for a
// request sent at that time. If KV events name the blocks, nothing is noted, because they are more
// exact. tokens is the engine's count of the prompt's tokens; 0: not reported.
func (l *Ranks) NoteHeld(id int32, p *Prompt, tokens int, sent time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.ranks[id]
	if r == nil {
		return
	}
	l.cache.LearnRatio(&p.Prompt, p.Model, tokens)
	now := time.Now()
	emptiedSince := !r.emptiedAt.Before(sent) // Forget was called meanwhile, so that the KV may be gone
	switch {
	case len(p.Keys) == 0 || emptiedSince:
	case r.cache.NamesBlocksOf(&p.Prompt, now):
		r.cache.DropLearnedFromAnswers()
	default:
		indexSlot := r.cache.EnsureSlot(&p.Prompt, r.Model, r.Capacity, now)
		r.cache.AddFromAnswer(indexSlot, &p.Prompt)
	}
}

// Computed learns from an engine's answer about a prompt that a rank computed. cached is -1 if not
// reported. trusted reports whether the predictions for this engine count now, and turned whether
// this has changed; if turned is false, trusted may say nothing.
func (l *Ranks) Computed(id int32, p *Prompt, tokens, hit, cached int, sent time.Time) (turned, trusted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.ranks[id]
	emptiedSince := r != nil && !r.emptiedAt.Before(sent) // hit was predicted for a cache that no longer exists
	if r == nil || tokens <= 0 || emptiedSince {
		return false, false
	}
	engine := l.engines[r.Engine]
	trustedBefore := engine.trusted()
	engine.addAnswer(hit, cached)
	trusted = engine.trusted()
	r.learnBlocks(&p.Prompt, tokens, hit, cached)
	return trustedBefore != trusted, trusted
}

func (r *rank) learnBlocks(p *cache.Prompt, tokens, hit, cached int) {
	now := time.Now()
	computedTokens := tokens - max(0, cached)
	if computedTokens > r.blockTokens() { // with fewer tokens, the engine may have filled no block, and then no event follows
		r.cache.ExpectEvent(now)
	}
	if r.cache.NamesBlocksOf(p, now) {
		return
	}
	// If the prediction was too high, Correct drops the blocks that the engine did not find. The rank
	// has computed them now.
	if indexSlot, hitTooHigh := r.cache.Correct(p, tokens, hit, cached); hitTooHigh {
		r.cache.AddFromAnswer(indexSlot, p)
	}
}

// Forget drops all blocks of some ranks. Later results of requests that were sent before are
// ignored.
func (l *Ranks) Forget(ids []int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for _, id := range ids {
		if r := l.ranks[id]; r != nil {
			r.cache.DropAll()
			r.emptiedAt = now
		}
	}
}

func (l *Ranks) IDs() []int32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Keys(l.ranks))
}

// transferHalfLife is the number of newer hand-offs after which a duration counts half.
const transferHalfLife = 500

// Moved learns how long a hand-off took, from the decode request to the first event.
func (l *Ranks) Moved(model string, tokens int, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	times := l.transferTimes[model]
	if times == nil {
		times = fit.NewCalibration(policy.Latency{}, transferHalfLife)
		l.transferTimes[model] = times
	}
	times.Add(fit.Sample{New: float64(tokens), Ms: took.Seconds() * 1000}) // a time as a function of the tokens, as for prefills
}

// BreakEven is how many tokens an idle rank can compute in the time of a hand-off of the prompt. If
// fewer are new, computing them is faster than fetching the KV. A hand-off takes rtt, the round
// trip to the prefill engine; half of T0Ms, which stands for all other fixed costs and is not
// measured; and the part of measured hand-offs that grows with the prompt.
func (l *Ranks) BreakEven(p *Prompt, latency policy.Latency, rtt time.Duration) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	handoffMs := rtt.Seconds()*1000 + latency.T0Ms/2
	if times := l.transferTimes[p.Model]; times != nil {
		transfer, _ := times.Latency()
		handoffMs += transfer.Ms(float64(l.length(p)), 0) - transfer.T0Ms // only the part that grows with the prompt
	}
	return handoffMs / latency.TPMs
}
