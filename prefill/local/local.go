// Package local remembers how much of a prompt the prefix cache of each decode rank should hold, and so how little of
// it is new there. This is for ranks that may compute prompts themselves, and for ranks that pull only the KV that
// they lack. Which rank gets the request is the dispatcher's decision, because only the dispatcher knows the slots.
package local

import (
	"cmp"
	"maps"
	"math"
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

// Rank is a decode rank whose prefix cache counts.
type Rank struct {
	ID       int32
	Name     string
	Model    string // its board
	Engine   string // the API server that it is part of
	Capacity int64  // KV tokens; 0: not known
	Up       bool
	Computes bool                // it may compute prompts; if not, it pulls the KV that it lacks
	Events   prefill.EventSource // where its engine publishes what its cache holds; zero: only answers show it
}

// Prompt is a prompt that some engine is to compute.
type Prompt struct {
	prefill.Prompt
	Model  string // board
	Tokens int    // counted or estimated; 0: not known
}

// Offer is a rank with the work that the prompt would be for it.
type Offer struct {
	Rank int32
	Hit  int // tokens that its prefix cache should have
	New  int // tokens to be computed, 1 at least
}

// Ranks is what is known of the ranks' prefix caches. One lock guards it,
// held for a look-up and never for I/O.
type Ranks struct {
	setting   sync.Mutex // held while Set or Close runs, which may wait for streams to end
	closed    bool       // Close was called: no more streams begin; under setting
	mu        sync.Mutex
	cache     *cache.Cache
	ranks     map[int32]*rank
	engines   map[string]*trust
	transfers map[string]*fit.Calibration // by model
}

type rank struct {
	Rank
	cache   cache.Holdings
	feed    cache.Feed // its stream of KV events; zero: there is none
	emptied time.Time  // when Forget emptied its prefix cache; zero: never
}

// engineBlock is the tokens of a KV block of an engine that does not say: vLLM's default.
const engineBlock = 16

// block is how many tokens a block of the rank's engine has.
func (r *rank) block() int {
	if r.feed.Stream == nil {
		return engineBlock
	}
	return cmp.Or(r.feed.BlockTokens(), engineBlock)
}

// New returns a Ranks without ranks, whose index takes so many bytes.
func New(maxBytes int64) *Ranks {
	return &Ranks{
		cache: cache.New(index.Config{MaxBytes: maxBytes}), ranks: map[int32]*rank{}, engines: map[string]*trust{},
		transfers: map[string]*fit.Calibration{},
	}
}

// Set replaces the ranks. A rank that comes back up has an empty cache. It follows the KV events of ranks whose
// engines publish them.
func (l *Ranks) Set(ranks []Rank) {
	l.setting.Lock()
	defer l.setting.Unlock()
	wanted := map[int32]prefill.EventSource{}
	for i := range ranks {
		wanted[ranks[i].ID] = ranks[i].Events
	}
	l.unfollow(func(r *rank) bool { return wanted[r.ID] != r.feed.Source })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.replace(ranks)
	for _, r := range l.ranks {
		if r.feed.Stream == nil && r.Events.Exists() && !l.closed {
			r.feed = r.cache.Listen(&l.mu, r.Events, engineBlock, r.Capacity, time.Now())
		}
	}
}

// unfollow ends the streams of KV events of the ranks for which selected returns true.
func (l *Ranks) unfollow(selected func(*rank) bool) {
	l.mu.Lock()
	var ended []*rank
	for _, r := range l.ranks {
		if r.feed.Stream != nil && selected(r) {
			ended = append(ended, r)
		}
	}
	l.mu.Unlock()
	for _, r := range ended {
		r.feed.Close() // not under the lock, which its last event may wait for
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range ended {
		r.feed = cache.Feed{}
		r.cache.Unfollow()
	}
}

// Close ends all streams.
func (l *Ranks) Close() {
	l.setting.Lock()
	defer l.setting.Unlock()
	l.closed = true
	l.unfollow(func(*rank) bool { return true })
}

// BlockTokens is how many tokens a KV block of the model's ranks has, by their KV events; 0: the events have not
// shown it.
func (l *Ranks) BlockTokens(model string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.ranks {
		if r.feed.Stream != nil && r.Events.Model == model && r.feed.BlockTokens() > 0 {
			return r.feed.BlockTokens()
		}
	}
	return 0
}

// Events describes the ranks whose KV events are followed, by name.
func (l *Ranks) Events() (all []prefill.RankEvents) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.ranks {
		if r.feed.Stream != nil {
			all = append(all, prefill.RankEvents{ID: r.Name, Mode: r.cache.Mode(time.Now()), Events: r.feed.Status()})
		}
	}
	slices.SortFunc(all, func(a, b prefill.RankEvents) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// replace sets the ranks, and forgets what is known of engines and models that have no rank any more. mu must be held.
func (l *Ranks) replace(ranks []Rank) {
	present, engines, models := map[int32]bool{}, map[string]bool{}, map[string]bool{}
	for _, given := range ranks {
		present[given.ID], engines[given.Engine], models[given.Model] = true, true, true
		r := l.ranks[given.ID]
		if r == nil {
			r = &rank{cache: l.cache.Holdings(given.Name)}
			l.ranks[given.ID] = r
		} else if given.Up && !r.Up {
			r.cache.Drop()
			delete(l.engines, given.Engine)
		}
		r.Rank = given
		if l.engines[given.Engine] == nil {
			l.engines[given.Engine] = &trust{}
		}
	}
	for id, r := range l.ranks {
		if !present[id] {
			r.cache.Close()
			delete(l.ranks, id)
		}
	}
	maps.DeleteFunc(l.engines, func(name string, _ *trust) bool { return !engines[name] })
	l.cache.Forget(func(model string) bool { return !models[model] })
	maps.DeleteFunc(l.transfers, func(model string, _ *fit.Calibration) bool { return !models[model] })
}

// Serve says whether any rank may compute prompts of the model.
func (l *Ranks) Serve(model string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.ranks {
		if r.Model == model && r.Computes {
			return true
		}
	}
	return false
}

// Remember says whether this remembers what ranks of the model hold.
func (l *Ranks) Remember(model string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.ranks {
		if r.Model == model {
			return true
		}
	}
	return false
}

// Length is how many tokens the prompt has; by the learned ratio if they were not counted.
func (l *Ranks) Length(p *Prompt) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.length(p)
}

// length is Length; mu must be held.
func (l *Ranks) length(p *Prompt) int {
	if p.Tokens > 0 {
		return p.Tokens
	}
	return l.cache.Length(&p.Prompt, p.Model, 0)
}

// Offers lists, by ID, the ranks that may compute the prompt, are up and are not in avoid. What an engine's cache
// should hold counts only while its answers confirm it, or its events say it.
func (l *Ranks) Offers(p *Prompt, avoid []int32) (offers []Offer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	tokens := l.length(p)
	now := time.Now()
	found := l.cache.Match(&p.Prompt, &cache.Lookup{}, now)
	for _, r := range l.ranks {
		if r.Model != p.Model || !r.Computes || !r.Up || slices.Contains(avoid, r.ID) {
			continue
		}
		offer := Offer{Rank: r.ID, Hit: r.holds(found, p, tokens), New: tokens}
		if l.engines[r.Engine].holds() || r.cache.Told(&p.Prompt, now) {
			offer.New = max(1, tokens-offer.Hit)
		}
		offers = append(offers, offer)
	}
	slices.SortFunc(offers, func(a, b Offer) int { return int(a.Rank - b.Rank) })
	return offers
}

// holds is how many tokens of a prompt the rank should have in its cache, by the blocks that were found.
func (r *rank) holds(found []int32, p *Prompt, tokens int) int {
	held := float64(r.cache.Blocks(found, &p.Prompt)) * p.BlockSize(tokens)
	return index.Usable(int(held), tokens, r.block())
}

// Held lists, by ID, the ranks that should have more of the prompt in their cache than the rank with the least has,
// and how much more: they need not pull it.
func (l *Ranks) Held(p *Prompt) (held []Offer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	tokens, least := l.length(p), math.MaxInt
	found := l.cache.Match(&p.Prompt, &cache.Lookup{}, time.Now())
	for _, r := range l.ranks {
		if r.Model != p.Model || !r.Up {
			continue
		}
		hit := r.holds(found, p, tokens)
		least = min(least, hit)
		held = append(held, Offer{Rank: r.ID, Hit: hit})
	}
	for i := range held {
		held[i].Hit -= least
	}
	held = slices.DeleteFunc(held, func(o Offer) bool { return o.Hit == 0 })
	slices.SortFunc(held, func(a, b Offer) int { return int(a.Rank - b.Rank) })
	return held
}

// Holds says that a rank has the prompt's KV, because it computed or pulled it for a request that was sent at the
// time sent. The prompt has so many tokens; 0: the engine did not say.
func (l *Ranks) Holds(id int32, p *Prompt, tokens int, sent time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.ranks[id]
	if r == nil {
		return
	}
	l.cache.Learn(&p.Prompt, p.Model, tokens)
	if len(p.Keys) > 0 && r.emptied.Before(sent) && !r.cache.Told(&p.Prompt, time.Now()) {
		r.cache.Stored(r.cache.Place(&p.Prompt, r.Model, r.Capacity, time.Now()), p.Keys)
	}
}

// Computed takes what an engine said of a prompt that one of its ranks computed: it found cached tokens in its prefix
// cache, -1 if it did not say, and hit were expected. The request was sent at the time sent. turned reports that
// trust in the engine has changed: from here on it is believed to hold what it should (holds), or no longer.
func (l *Ranks) Computed(id int32, p *Prompt, tokens, hit, cached int, sent time.Time) (turned, holds bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.ranks[id]
	if r == nil || tokens <= 0 || !r.emptied.Before(sent) { // the cache was emptied since, so the expectation was about another content
		return false, false
	}
	engine := l.engines[r.Engine]
	trustedBefore := engine.holds()
	engine.learn(hit, cached)
	now := time.Now()
	r.cache.Heard(tokens-max(0, cached) > r.block(), now)
	if r.cache.Told(&p.Prompt, now) {
		return trustedBefore != engine.holds(), engine.holds()
	}
	if at, wrong := r.cache.Correct(&p.Prompt, tokens, hit, cached); wrong {
		r.cache.Stored(at, p.Keys) // it has them now
	}
	return trustedBefore != engine.holds(), engine.holds()
}

// Forget drops what is known of the prefix caches of ranks. Results of requests that were sent before are ignored,
// too.
func (l *Ranks) Forget(ids []int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for _, id := range ids {
		if r := l.ranks[id]; r != nil {
			r.cache.Drop()
			r.emptied = now
		}
	}
}

// IDs are those of all ranks.
func (l *Ranks) IDs() []int32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Keys(l.ranks))
}

// Moved takes how long a hand-off of so many tokens took, from the decode request to the first event.
func (l *Ranks) Moved(model string, tokens int, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	times := l.transfers[model]
	if times == nil {
		times = fit.NewCalibration(policy.Line{}, 500)
		l.transfers[model] = times
	}
	times.Add(fit.Sample{New: float64(tokens), Ms: took.Seconds() * 1000})
}

// BreakEven is how many tokens an idle rank can compute in the time that a hand-off of the prompt takes: to compute fewer
// there is sooner done than to fetch the KV. line is the line of the model's prefill times, rtt the round trip to the
// prefill engine.
func (l *Ranks) BreakEven(p *Prompt, line policy.Line, rtt time.Duration) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	handoff := rtt.Seconds()*1000 + line.T0Ms/2
	if times := l.transfers[p.Model]; times != nil {
		transfer, _ := times.Law()
		handoff += transfer.Ms(float64(l.length(p)), 0) - transfer.T0Ms
	}
	return handoff / line.TPMs
}
