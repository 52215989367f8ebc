// Package live shows the present state of a proxy. The page on the admin listener
// and `evenkeel top` read the same document.
//
// GET /live answers with a stream of events. The first is `history`, a History: the
// last minutes of the values that are drawn as lines. Then a `document` follows every second,
// a Document, and a `strip` every five seconds, a Strip. Each one is complete,
// so a reader needs only the last one. GET /live?once answers with one Document,
// and GET /live?at= with the Document of a moment in the last 15 minutes. With the parameter text, both answer with a page of text.
package live

import (
	"evenkeel/dispatcher/verdict"
	"evenkeel/gateway/detect"
)

// Form is the version of the Document's format. New fields keep the version. A field that is
// removed or changes its meaning raises it.
const Form = 2

// Document has everything that the page shows at one instant. Names of fields end in their unit:
// _ms, _s, _tokens, _per_s. A _share is between 0 and 1. Lists are never null.
type Document struct {
	Form    int   `json:"form"`
	AtMs    int64 `json:"at_ms"`    // Unix, by the proxy's clock
	EveryMs int64 `json:"every_ms"` // time between two documents; a page without a new one for three times as long is out of date
	detect.Facts
	Incidents []detect.Incident `json:"incidents"` // lasting ones, the most harmful first, then those resolved in the last 15 minutes
	Models    []Model           `json:"models"`
	Decisions []Decision        `json:"decisions"` // of the last requests, the latest first
}

// Model is detect.Model with the groups in the form of this package.
type Model struct {
	detect.Model
	Groups []Group `json:"groups"`
}

// Group is detect.Group with the values that only people read.
type Group struct {
	detect.Group
	Rounds          *Rounds          `json:"rounds,omitempty"` // nil: the ranks do not prefill
	Twin            Twin             `json:"twin"`
	Counterfactuals []Counterfactual `json:"ghosts"` // load under other policies, the lowest first; empty: the twin claims no difference
}

// Rounds describes how a group of ranks that prefill and decode gets its prompts. If Sent has grown since the document before, rounds
// were sent in this second, to the ranks whose Prompts have grown.
type Rounds struct {
	Sent         uint64  `json:"sent"`          // rounds since the start; 0 for policies without rounds
	RanksFilled  float64 `json:"ranks_filled"`  // mean number of ranks with a prompt to compute when a round was sent, since the start
	PrefillShare float64 `json:"prefill_share"` // share of the steps since the start in which some rank computed a prompt
	EmptyShare   float64 `json:"empty_share"`   // mean share of ranks that computed no prompt in these steps
	HeldS        float64 `json:"held_s"`        // how long the oldest held request has been held back for a round; 0: none is held
	MaxHoldS     float64 `json:"max_hold_s"`    // the policy holds no request longer than this
	Says         string  `json:"says"`          // the same in words
}

// Twin says how the last minutes of a group would have gone under other policies. The twin finds out by a replay.
type Twin struct {
	Says    []string      `json:"says"`              // a sentence for each policy of dispatch.twin; empty while there is no verdict
	Note    string        `json:"note"`              // replayed time and error, or why there is no verdict; empty: the group has no barrier
	Verdict *verdict.Twin `json:"verdict,omitempty"` // nil: there is no verdict yet
}

// Counterfactual is the load of the fullest rank under another policy. It is the present load, plus the KV tokens
// that explain the difference in step time by the step model.
type Counterfactual struct {
	Policy     string  `json:"policy"`
	MostTokens int64   `json:"most_tokens"`
	SavedMs    float64 `json:"saved_ms"` // by how much steps under this policy are longer than now; below 0: shorter
}

// Decision says to which engines one request went, and why.
type Decision struct {
	ID      string  `json:"id"` // id of the request; GET /decisions?id= has the whole receipt
	AtMs    int64   `json:"at_ms"`
	Model   string  `json:"model"`
	Prompt  int     `json:"prompt_tokens"`
	Prefill string  `json:"prefill"` // prefill engine; empty: none yet, or the rank prefills itself
	Rank    string  `json:"rank"`    // rank that generates the answer; empty: none yet
	WaitMs  float64 `json:"wait_ms"` // time in the pool; up to now while rank is empty
	Outcome string  `json:"outcome"` // empty while it runs
	Why     string  `json:"why"`
}

// History has samples of the last minutes, one every EveryMs, the oldest first. Every
// line has as many values as AtMs; -1: there is no value for this sample.
type History struct {
	Form    int           `json:"form"`
	EveryMs int64         `json:"every_ms"`
	AtMs    []int64       `json:"at_ms"` // Unix time of each sample
	Ranks   []RankLine    `json:"ranks"`
	Lines   []NumbersLine `json:"lines"`
}

// RankLine is the load of a rank over time.
type RankLine struct {
	ID       int32   `json:"id"` // Rank.ID
	KVTokens []int64 `json:"kv_tokens"`
}

// NumbersLine is one value of the whole proxy over time.
type NumbersLine struct {
	Name   string  `json:"name"`
	Values []int64 `json:"values"`
}

// lineNames has the names of all NumbersLines, with their units. requests_per_ks counts requests
// per 1000 s, because values are whole numbers.
var lineNames = [...]string{"pool_entries", "requests_per_ks", "tokens_per_s", "tpot_p50_us", "tpot_p99_us", "ttft_p50_us", "ttft_p99_us"}
