package step

// Model is how long a step of a barrier group takes. A rank needs time for its requests, their KV
// tokens and its prompts, and the other ranks wait for the slowest. If C1Ms is 0, no model is known.
type Model struct {
	C0Ms      float64 `yaml:"c0_ms"`             // ms of a step without any load
	C1Ms      float64 `yaml:"c1_ms"`             // per KV token of a rank
	RequestMs float64 `yaml:"request_ms"`        // per request that decodes on a rank
	OwnMs     float64 `yaml:"own_prefill_ms"`    // per token of a prompt that a rank computes
	SharedMs  float64 `yaml:"shared_prefill_ms"` // per prompt token that a rank computes on average over all ranks
	PrefillMs float64 `yaml:"prefill_step_ms"`   // ms that a step takes longer if any rank computes a prompt
}

// Rank is what one rank did in a step. All numbers are multiplied by the rank's cost, which is above 1 on a slow rank.
type Rank struct {
	Requests float64 // requests that decoded
	KV       float64 // KV tokens that these requests read
	Prompt   float64 // prompt tokens that the rank computed
}

// Weight returns the weight of a request in KV tokens, which cost a step as much as the request; 0: not known.
func (m *Model) Weight() float64 {
	if m.C1Ms <= 0 {
		return 0
	}
	return m.RequestMs / m.C1Ms
}

// Weights are what policies count a request as, in KV tokens.
type Weights struct {
	Request float64 // in the load of its rank
	Row     float64 // in addition, on the rank with most requests, whatever the KV of that rank
}

// Halves divides a weight equally between Request and Row, as if the engine padded all ranks to the rank with most requests (Unmasked).
// Boards without a Law event always do so, because it loses least if the engine does not pad. A search that moves one request at a time
// needs Request to level the numbers of requests: by the largest number alone it would not find the way.
func Halves(weight float64) Weights { return Weights{weight / 2, weight / 2} }

// Ms returns how long a step of these ranks takes, in ms.
func (m *Model) Ms(ranks []Rank) float64 {
	if len(ranks) == 0 {
		return m.C0Ms
	}
	at, mean := m.slowest(ranks), meanPrompt(ranks)
	ms := m.C0Ms + m.of(&ranks[at]) + m.SharedMs*mean
	if mean > 0 {
		ms += m.PrefillMs
	}
	return ms
}

// of returns how many ms a rank's own work takes.
func (m *Model) of(r *Rank) float64 { return m.RequestMs*r.Requests + m.C1Ms*r.KV + m.OwnMs*r.Prompt }

// slowest returns the index of the rank whose own work takes longest.
func (m *Model) slowest(ranks []Rank) (at int) {
	for i := range ranks {
		if m.of(&ranks[i]) > m.of(&ranks[at]) {
			at = i
		}
	}
	return at
}

// meanPrompt returns how many prompt tokens a rank computed on average.
func meanPrompt(ranks []Rank) (mean float64) {
	for i := range ranks {
		mean += ranks[i].Prompt
	}
	return mean / float64(len(ranks))
}

// Way says how the cost of requests enters the length of a step.
type Way string

// The ways. Steps of the forms Eager and OwnBuckets are of the way Fullest, steps of the other forms of the way TwoRanks.
const (
	Untold   Way = ""             // the measured steps do not show which way it is
	Fullest  Way = "fullest rank" // by KV and requests of the rank with the largest load of both together
	TwoRanks Way = "two ranks"    // by the most KV of any rank and the most requests of any rank
)

// weighing is what a request counts as.
type weighing struct {
	weight  float64 // KV tokens
	fullest bool    // the way Fullest; false: TwoRanks
}

// fullestOf returns the rank with the largest load or, in the way TwoRanks, a made-up rank with the most KV and the most requests of any.
// It returns the zero Rank if no rank has a load.
func (w weighing) fullestOf(ranks []Rank) (most Rank) {
	for i := range ranks {
		switch r := &ranks[i]; {
		case !w.fullest:
			most.KV, most.Requests = max(most.KV, r.KV), max(most.Requests, r.Requests)
		case r.load(w.weight) > most.load(w.weight):
			most = *r
		}
	}
	return most
}

// load returns the load of a rank in KV tokens, if a request has the given weight.
func (r *Rank) load(weight float64) float64 { return r.KV + weight*r.Requests }
