package step

// Model computes how long a step of a barrier group takes. A rank needs time for its requests, their KV tokens and its prompts, and the
// other ranks wait for the slowest rank:
//
//	C0Ms + the largest of (RequestMs*requests + C1Ms*KV tokens + OwnPromptMs*prompt tokens) of a rank + SharedPromptMs*mean prompt tokens
//
// and PrefillMs more if there are prompt tokens. If C1Ms is 0, no model is known.
type Model struct {
	C0Ms           float64 `yaml:"c0_ms"`             // ms of a step without any load
	C1Ms           float64 `yaml:"c1_ms"`             // ms per KV token of a rank
	RequestMs      float64 `yaml:"request_ms"`        // ms per request that decodes on a rank
	OwnPromptMs    float64 `yaml:"own_prefill_ms"`    // ms that a prompt token adds to the time of the rank that computes it
	SharedPromptMs float64 `yaml:"shared_prefill_ms"` // ms per prompt token that a rank computes on average over all ranks
	PrefillMs      float64 `yaml:"prefill_step_ms"`   // ms that a step takes longer if any rank computes a prompt
}

// Rank is what one rank did in a step. All numbers are multiplied by the rank's cost, which is above 1 on a rank that is slower than the
// others.
type Rank struct {
	Requests float64 // requests that decoded
	KV       float64 // KV tokens that these requests read
	Prompt   float64 // prompt tokens that the rank computed
}

// Weight returns how many KV tokens of a rank make a step as much longer as one of its requests does; 0: not known.
func (m *Model) Weight() float64 {
	if m.C1Ms <= 0 {
		return 0
	}
	return m.RequestMs / m.C1Ms
}

// RequestCost are how many KV tokens policies count for each request, in addition to its own.
type RequestCost struct {
	Request float64 // for each request, in the load of its rank
	Row     float64 // in addition, for each request on the rank with most requests, whatever the KV of this rank
}

// SplitWeight divides a weight equally between Request and Row. Boards use it unless an event sets the weights. If the engine pads all
// ranks to the rank with most requests (Unmasked), Row alone would be right. But a search that moves one request at a time also needs
// Request: only moves from the one rank with most requests would lower Row, so the search would not find most of the others. If the engine
// does not pad, halves lose the least.
func SplitWeight(weight float64) RequestCost { return RequestCost{weight / 2, weight / 2} }

// Ms returns how long a step of these ranks takes, in ms.
func (m *Model) Ms(ranks []Rank) float64 {
	if len(ranks) == 0 {
		return m.C0Ms
	}
	slowest, mean := m.slowest(ranks), meanPrompt(ranks)
	ms := m.C0Ms + m.ownMs(&ranks[slowest]) + m.SharedPromptMs*mean
	if mean > 0 {
		ms += m.PrefillMs
	}
	return ms
}

// ownMs returns how many ms a rank's own work takes.
func (m *Model) ownMs(r *Rank) float64 {
	return m.RequestMs*r.Requests + m.C1Ms*r.KV + m.OwnPromptMs*r.Prompt
}

// slowest returns the index of the rank whose own work takes longest.
func (m *Model) slowest(ranks []Rank) (slowest int) {
	for i := range ranks {
		if m.ownMs(&ranks[i]) > m.ownMs(&ranks[slowest]) {
			slowest = i
		}
	}
	return slowest
}

// meanPrompt returns how many prompt tokens a rank computed on average.
func meanPrompt(ranks []Rank) (mean float64) {
	for i := range ranks {
		mean += ranks[i].Prompt
	}
	return mean / float64(len(ranks))
}

// Bottleneck says which ranks' requests make a step longer.
type Bottleneck string

// The bottlenecks. Steps of the forms Eager and OwnBuckets wait for OneRank, and steps of the other forms for TwoRanks.
const (
	UnknownBottleneck Bottleneck = ""             // the measured steps do not show which
	OneRank           Bottleneck = "fullest rank" // the step waits for the rank whose KV and requests together are largest
	TwoRanks          Bottleneck = "two ranks"    // the step depends on the most KV of any rank and on the most requests of any rank
)

// requestWeight says how much requests count in the length of a step, and on which ranks.
type requestWeight struct {
	tokens  float64 // a request counts as so many KV tokens
	oneRank bool    // the bottleneck is OneRank; false: TwoRanks
}

// slowestOf returns the rank with the largest load. If the bottleneck is TwoRanks, it returns a made-up rank that has the most KV of any
// rank and the most requests of any rank. If no rank has a load, it returns the zero Rank.
func (w requestWeight) slowestOf(ranks []Rank) (slowest Rank) {
	for i := range ranks {
		switch r := &ranks[i]; {
		case !w.oneRank:
			slowest.KV, slowest.Requests = max(slowest.KV, r.KV), max(slowest.Requests, r.Requests)
		case r.load(w.tokens) > slowest.load(w.tokens):
			slowest = *r
		}
	}
	return slowest
}

// load returns the load of a rank in KV tokens, if a request counts as so many KV tokens (weight).
func (r *Rank) load(weight float64) float64 { return r.KV + weight*r.Requests }
