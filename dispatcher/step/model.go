package step

// Model is the law of the steps of a barrier group: how long one takes. A rank takes its time for its requests, their KV
// tokens and its prompts, and the slowest rank holds the others up. C1Ms 0: unknown.
type Model struct {
	C0Ms      float64 `yaml:"c0_ms"`             // whatever the load
	C1Ms      float64 `yaml:"c1_ms"`             // per KV token of a rank
	RequestMs float64 `yaml:"request_ms"`        // per request that decodes on a rank
	OwnMs     float64 `yaml:"own_prefill_ms"`    // per token of a prompt that a rank computes
	SharedMs  float64 `yaml:"shared_prefill_ms"` // per token of the prompts that all ranks compute, divided by how many ranks there are
	PrefillMs float64 `yaml:"prefill_step_ms"`   // more, where any rank computes a prompt
}

// Rank is what one rank did in a step. On a rank that is slower than the others each counts for more.
type Rank struct {
	Requests float64 // that decode
	KV       float64 // tokens that these read
	Prompt   float64 // tokens of prompts that it computed
}

// Weight is how many KV tokens a request weighs as much as; 0 where nobody knows.
func (m *Model) Weight() float64 {
	if m.C1Ms <= 0 {
		return 0
	}
	return m.RequestMs / m.C1Ms
}

// Weights are what policies count a request as, in KV tokens.
type Weights struct {
	Request float64 // in the load of its rank
	Row     float64 // and more, on the rank with most requests, whatever the KV of that one
}

// Halves counts one half as the one and one half as the other, as if the engine padded its ranks to the one with most requests (Unmasked):
// least is lost where that is wrong. A search that moves one request at a time finds level counts by a weight, and by the largest
// count alone it does not.
func Halves(weight float64) Weights { return Weights{weight / 2, weight / 2} }

// Ms is how long a step of these ranks takes.
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

// of is what a rank takes by itself.
func (m *Model) of(r *Rank) float64 { return m.RequestMs*r.Requests + m.C1Ms*r.KV + m.OwnMs*r.Prompt }

func (m *Model) slowest(ranks []Rank) (at int) {
	for i := range ranks {
		if m.of(&ranks[i]) > m.of(&ranks[at]) {
			at = i
		}
	}
	return at
}

// meanPrompt is how many tokens of prompts a rank computed in the mean.
func meanPrompt(ranks []Rank) (mean float64) {
	for i := range ranks {
		mean += ranks[i].Prompt
	}
	return mean / float64(len(ranks))
}

// Way is how a step takes what requests cost.
type Way string

// The ways. Of the forms, eager and own buckets are the first one, and graphs the second.
const (
	Untold   Way = ""             // steps do not tell the two apart
	Fullest  Way = "fullest rank" // KV and requests of the rank that has most of both
	TwoRanks Way = "two ranks"    // the most KV, and the most requests of whichever rank
)

// weighing is what a request counts as.
type weighing struct {
	weight  float64 // KV tokens
	fullest bool    // KV and requests are those of the fullest rank; false: of the rank with most KV, and of that with most requests
}

// fullestOf is the rank with the largest load, or one that has the most KV and the most requests of any; the zero Rank where none has
// anything.
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

// load of a rank in KV tokens, where a request weighs so many.
func (r *Rank) load(weight float64) float64 { return r.KV + weight*r.Requests }
