package step

// Model computes how long a step of a barrier group takes. A rank needs time for its requests,
// their KV tokens and its prompts, and the other ranks wait for the slowest rank:
//
//	C0Ms + the largest of (RequestMs*requests + C1Ms*KV tokens + OwnPromptMs*prompt tokens) of a rank + SharedPromptMs*mean prompt tokens
//
// and PrefillMs more if there are prompt tokens. If C1Ms is 0, no model is known.
type Model struct {
	C0Ms           float64 `yaml:"c0_ms"`             // ms of a step without any load
	C1Ms           float64 `yaml:"c1_ms"`             // ms per KV token of a rank
	RequestMs      float64 `yaml:"request_ms"`        // ms per request that decodes on a rank
	OwnPromptMs    float64 `yaml:"own_prefill_ms"`    // ms per prompt token, on the rank that computes it
	SharedPromptMs float64 `yaml:"shared_prefill_ms"` // ms per prompt token of the mean over all ranks
	PrefillMs      float64 `yaml:"prefill_step_ms"`   // ms that a step takes longer if any rank computes a prompt
}

// Rank is the work of one rank in a step. All numbers are multiplied by the rank's cost factor,
// which is above 1 on a rank that is slower than the others.
type Rank struct {
	Requests float64 // requests that decoded
	KV       float64 // KV tokens that these requests read
	Prompt   float64 // prompt tokens that the rank computed
}

// Weight returns how many KV tokens take a rank as long as one request does; 0: not known.
func (m *Model) Weight() float64 {
	if m.C1Ms <= 0 {
		return 0
	}
	return m.RequestMs / m.C1Ms
}

// RequestCost is what policies count for each request in addition to its own KV tokens.
type RequestCost struct {
	Request float64 // KV tokens added to the load of its rank for each request
	Row     float64 // KV tokens added to the largest load for each request on the rank with most requests
}

// SplitWeight divides a request's weight equally between Request and Row. If the engine pads all
// ranks to the rank with most requests (Unmasked), Row alone would be right. But only moves from
// that one rank would lower Row, so a search that moves one request at a time would miss most good
// moves. If the engine does not pad, halves lose the least.
func SplitWeight(weight float64) RequestCost { return RequestCost{weight / 2, weight / 2} }

// Ms returns how long a step takes in which the ranks do this work; C0Ms if there are no ranks.
// Expert layers compute the rows of all ranks together, so a part of the cost of prompts grows with
// their mean (SharedPromptMs).
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

func (m *Model) ownMs(r *Rank) float64 {
	return m.RequestMs*r.Requests + m.C1Ms*r.KV + m.OwnPromptMs*r.Prompt
}

func (m *Model) slowest(ranks []Rank) (slowest int) {
	for i := range ranks {
		if m.ownMs(&ranks[i]) > m.ownMs(&ranks[slowest]) {
			slowest = i
		}
	}
	return slowest
}

func meanPrompt(ranks []Rank) (mean float64) {
	for i := range ranks {
		mean += ranks[i].Prompt
	}
	return mean / float64(len(ranks))
}

// Bottleneck says which ranks' requests make a step longer.
type Bottleneck string

// A step waits for OneRank if no rank is padded to another rank's batch (Eager, OwnBuckets), else
// for TwoRanks.
const (
	UnknownBottleneck Bottleneck = ""             // the measured steps do not show it
	OneRank           Bottleneck = "fullest rank" // the step waits for the rank whose KV and requests together are largest
	TwoRanks          Bottleneck = "two ranks"    // the step depends on the most KV of any rank, and on the most requests of any rank
)

type requestWeight struct {
	tokensPerRequest float64 // how many KV tokens a request counts for
	waitsForOneRank  bool    // the bottleneck is OneRank; false: TwoRanks
}

// slowestOf returns the work for which a step waits: with TwoRanks a made-up rank. It is zero if no
// rank has a load.
func (w requestWeight) slowestOf(ranks []Rank) (slowest Rank) {
	for i := range ranks {
		switch r := &ranks[i]; {
		case !w.waitsForOneRank:
			slowest.KV, slowest.Requests = max(slowest.KV, r.KV), max(slowest.Requests, r.Requests)
		case r.load(w.tokensPerRequest) > slowest.load(w.tokensPerRequest):
			slowest = *r
		}
	}
	return slowest
}

func (r *Rank) load(weight float64) float64 { return r.KV + weight*r.Requests }
