// Package live shows a proxy as it is now: one document that is the same for
// the page on the admin listener and for `evenkeel top`, sent once a second to
// those who watch, and the last minutes of what is worth seeing as a line.
//
// Who reads the stream: GET /live answers with events. The first is `history`,
// a History; from then on one `document` a second, a Document, whole each time,
// so that a reader keeps the last one and nothing else, and every five seconds a
// `strip`, a Strip, whole each time, too. GET /live?once answers with one Document,
// GET /live?at= with the Document of a moment of the last 15 minutes. With text, both answer with a page of text.
package live

import (
	"evenkeel/dispatcher/verdict"
	"evenkeel/gateway/detect"
)

// Form is the number of this form of a Document. Fields may be added under it;
// one that changes its meaning or goes makes another.
const Form = 2

// Document is everything the page shows at one instant. Names end in their unit:
// _ms, _s, _tokens, _per_s; a _share is of 1. Lists are never null.
type Document struct {
	Form    int   `json:"form"`
	AtMs    int64 `json:"at_ms"`    // Unix, by the proxy's clock
	EveryMs int64 `json:"every_ms"` // between two documents; after three of them without one, what is shown is old
	detect.Facts
	Incidents []detect.Incident `json:"incidents"` // what is wrong, by cause: those that last, the most harmful first, then those that were resolved in the last 15 minutes
	Models    []Model           `json:"models"`
	Decisions []Decision        `json:"decisions"` // the last ones, latest first
}

// Model is one board: the ranks that serve a model and the pool in front of them. A model has a board for its decode ranks, and
// one for its ranks that prefill and decode.
type Model struct {
	detect.Model
	Groups []Group `json:"groups"`
}

// Group is the ranks that step together, or all of a model that have no barrier.
type Group struct {
	detect.Group
	Rounds          *Rounds          `json:"rounds,omitempty"` // nil where the ranks do not prefill
	Twin            Twin             `json:"twin"`
	Counterfactuals []Counterfactual `json:"ghosts"` // where other policies would have the line, the lowest first; empty while there is no verdict that claims a difference
}

// Rounds is how a group that prefills and decodes gets its prompts. A round of the last second is one by which Sent grew since the
// document before, and it went to the ranks whose Prompts grew.
type Rounds struct {
	Sent         uint64  `json:"sent"`          // so far; policies that know no rounds send none
	RanksFilled  float64 `json:"ranks_filled"`  // that had a prompt to compute when a round was sent, in the mean since the start
	PrefillShare float64 `json:"prefill_share"` // of all steps since the start, those in which a rank computed a prompt
	EmptyShare   float64 `json:"empty_share"`   // of the ranks, in the latter: those that computed none
	HeldS        float64 `json:"held_s"`        // for how long the first of the held entries is held; 0: none is
	MaxHoldS     float64 `json:"max_hold_s"`    // the policy holds no request longer than this
	Says         string  `json:"says"`          // the same in words
}

// Twin is what the last minutes of a group would have been under other policies, in words and in numbers.
type Twin struct {
	Says    []string      `json:"says"`              // a sentence for each policy of dispatch.twin; empty while there is no verdict
	Note    string        `json:"note"`              // which minutes were replayed, and how far the replay is from what was; or why there is no verdict; empty without barrier
	Verdict *verdict.Twin `json:"verdict,omitempty"` // nil while there is none
}

// Counterfactual is where the fullest rank would stand under a policy that the twin replayed,
// by the step model: as much higher as its steps are longer.
type Counterfactual struct {
	Policy     string  `json:"policy"`
	MostTokens int64   `json:"most_tokens"`
	SavedMs    float64 `json:"saved_ms"` // how much longer its steps are; below 0: shorter
}

// Decision is where one request went, and why in short.
type Decision struct {
	ID      string  `json:"id"` // of the request; GET /decisions?id= has all of it
	AtMs    int64   `json:"at_ms"`
	Model   string  `json:"model"`
	Prompt  int     `json:"prompt_tokens"`
	Prefill string  `json:"prefill"` // engine; empty: none, or the rank does both
	Rank    string  `json:"rank"`    // where it is answered; empty: none
	WaitMs  float64 `json:"wait_ms"` // time in the pool; up to now while rank is empty
	Outcome string  `json:"outcome"` // empty while it runs
	Why     string  `json:"why"`
}

// History is the last minutes, one sample every EveryMs, oldest first. Every
// line has as many values as AtMs; -1 stands where there was nothing.
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

// NumbersLine is one of Lines over time.
type NumbersLine struct {
	Name   string  `json:"name"`
	Values []int64 `json:"values"`
}

// lineNames are the names of NumbersLine, with their units. requests_per_ks are requests
// in 1000 s: a whole number says enough.
var lineNames = [...]string{"pool_entries", "requests_per_ks", "tokens_per_s", "tpot_p50_us", "tpot_p99_us", "ttft_p50_us", "ttft_p99_us"}
