// Package live shows the present state of a proxy. The page on the admin listener and `evenkeel top` get the same document, once a second.
// Package live also shows the last minutes of some values as lines.
//
// GET /live answers with a stream of events. The first is `history`, a History. Then comes a `document` each second, a whole Document, so
// that a reader needs only the last one, and every five seconds a `strip`, a whole Strip. GET /live?once answers with one Document, GET
// /live?at= with the Document of a moment of the last 15 minutes. With text, both answer with a page of text.
package live

import (
	"evenkeel/dispatcher/verdict"
	"evenkeel/gateway/detect"
)

// Form is the version of the format of Document. New fields do not change it. If a field is removed or gets another meaning, Form must
// change.
const Form = 2

// Document is everything that the page shows at one instant. Names end in their unit: _ms, _s, _tokens, _per_s; a _share is from 0 to 1.
// Lists are never null.
type Document struct {
	Form    int   `json:"form"`
	AtMs    int64 `json:"at_ms"`    // Unix, by the proxy's clock
	EveryMs int64 `json:"every_ms"` // interval between two documents; without one for three intervals, the last one is out of date
	detect.Facts
	Incidents []detect.Incident `json:"incidents"` // what is wrong, by cause: those that last, the most harmful first, then those that were resolved in the last 15 minutes
	Models    []Model           `json:"models"`
	Decisions []Decision        `json:"decisions"` // the last ones, latest first
}

// Model is one board: the ranks that serve a model, and the pool before them. A model has one board for its decode ranks, and one for its
// aggregated ranks.
type Model struct {
	detect.Model
	Groups []Group `json:"groups"`
}

// Group has the ranks that step together, or all ranks of a model without a barrier.
type Group struct {
	detect.Group
	Rounds          *Rounds          `json:"rounds,omitempty"` // nil where the ranks do not prefill
	Twin            Twin             `json:"twin"`
	Counterfactuals []Counterfactual `json:"ghosts"` // where other policies would have the line, the lowest first; empty while there is no verdict that claims a difference
}

// Rounds is how an aggregated group gets its prompts. If Sent has grown since the last document, a round was sent in between, to the ranks
// whose Prompts have grown.
type Rounds struct {
	Sent         uint64  `json:"sent"`          // rounds since the start; 0 for policies without rounds
	RanksFilled  float64 `json:"ranks_filled"`  // mean number of ranks that had a prompt to compute when a round was sent, since the start
	PrefillShare float64 `json:"prefill_share"` // share of the steps since the start in which a rank computed a prompt
	EmptyShare   float64 `json:"empty_share"`   // share of ranks that computed no prompt in such a step
	HeldS        float64 `json:"held_s"`        // how long the oldest held entry has been held; 0: none is held
	MaxHoldS     float64 `json:"max_hold_s"`    // the policy holds no request longer than this
	Says         string  `json:"says"`          // the same in words
}

// Twin says how the last minutes of a group would have been under other policies, in words and in numbers.
type Twin struct {
	Says    []string      `json:"says"`              // a sentence for each policy of dispatch.twin; empty while there is no verdict
	Note    string        `json:"note"`              // which minutes were replayed, and how far the replay is from what was; or why there is no verdict; empty without barrier
	Verdict *verdict.Twin `json:"verdict,omitempty"` // nil: there is none
}

// Counterfactual is the load that the fullest rank would have under a policy that the twin replayed. By the step model, a longer step
// stands for a larger load.
type Counterfactual struct {
	Policy     string  `json:"policy"`
	MostTokens int64   `json:"most_tokens"`
	SavedMs    float64 `json:"saved_ms"` // by how much its steps would be longer; below 0: shorter
}

// Decision is where one request was sent, and the reasons in short.
type Decision struct {
	ID      string  `json:"id"` // of the request; GET /decisions?id= has all of it
	AtMs    int64   `json:"at_ms"`
	Model   string  `json:"model"`
	Prompt  int     `json:"prompt_tokens"`
	Prefill string  `json:"prefill"` // prefill engine; empty: none, or an aggregated rank
	Rank    string  `json:"rank"`    // rank that answers; empty: none yet
	WaitMs  float64 `json:"wait_ms"` // time in the pool; it still grows while rank is empty
	Outcome string  `json:"outcome"` // empty: the request still runs
	Why     string  `json:"why"`
}

// History has a sample for each EveryMs of the last minutes, oldest first. Every line has as many values as AtMs; -1: nothing is known.
type History struct {
	Form    int           `json:"form"`
	EveryMs int64         `json:"every_ms"`
	AtMs    []int64       `json:"at_ms"` // Unix, of each sample
	Ranks   []RankLine    `json:"ranks"`
	Lines   []NumbersLine `json:"lines"`
}

// RankLine is the load of a rank over time.
type RankLine struct {
	ID       int32   `json:"id"` // Rank.ID
	KVTokens []int64 `json:"kv_tokens"`
}

// NumbersLine is one value over time; lineNames lists them.
type NumbersLine struct {
	Name   string  `json:"name"`
	Values []int64 `json:"values"`
}

// lineNames are the names of all NumbersLines, with their units. Requests are counted per 1000 s (ks), so that a whole number is precise
// enough.
var lineNames = [...]string{"pool_entries", "requests_per_ks", "tokens_per_s", "tpot_p50_us", "tpot_p99_us", "ttft_p50_us", "ttft_p99_us"}
