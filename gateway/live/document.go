// Package live shows the present state of a proxy. The page on the admin listener
// and `evenkeel top` read the same document.
//
// GET /live answers with a stream of events. The first event, `history`, has a History: the last
// minutes of the values that are drawn as lines. Then an event `document` follows every second,
// with a Document, and an event `strip` every five seconds, with a Strip. Each Document and each
// Strip is complete, so a reader needs only the latest ones. GET /live?once answers with one
// Document, and GET /live?at= with the Document of a given time in the last 15 minutes. With the
// parameter text, both answer with a page of text.
package live

import (
	"evenkeel/gateway/detect"
	"evenkeel/gateway/watch"
)

// Form is the version of the Document's format. New fields keep the version. The version rises if a
// field is removed or changes its meaning.
const Form = 3

// Document has everything that the page shows at one instant. Names of fields end in their unit:
// _ms, _s, _tokens, _per_s. A _share is between 0 and 1. Lists are never null.
type Document struct {
	Form    int   `json:"form"`
	AtMs    int64 `json:"at_ms"`    // Unix time, by the proxy's clock
	EveryMs int64 `json:"every_ms"` // time between two documents; a page that gets none for three times as long is out of date
	detect.Facts
	Incidents []detect.Incident `json:"incidents"` // lasting incidents, the most harmful first, then those resolved in the last 15 minutes
	Models    []Model           `json:"models"`
	Decisions []Decision        `json:"decisions"` // decisions about the last requests, the latest first
}

// documentOf makes a Document of a snapshot. Its Decisions are empty.
func documentOf(snapshot *watch.Snapshot, version string) Document {
	d := Document{
		Form: Form, AtMs: snapshot.Facts.At.UnixMilli(), EveryMs: detect.SampleInterval.Milliseconds(),
		Facts: snapshot.Facts, Incidents: snapshot.Incidents,
		Models: make([]Model, len(snapshot.Facts.Models)), Decisions: []Decision{},
	}
	d.Proxy.Version = version
	d.ReplaceNilLists()
	for i := range d.Models {
		d.Models[i] = modelOf(&d.Facts.Models[i])
	}
	return d
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
	Outcome string  `json:"outcome"` // how the request ended; empty while it runs
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
	ID       int32   `json:"id"` // ID of the rank, as in Document
	KVTokens []int64 `json:"kv_tokens"`
}

// NumbersLine has the values of one number of the whole proxy at the times in History.AtMs, oldest
// first.
type NumbersLine struct {
	Name   string  `json:"name"`
	Values []int64 `json:"values"`
}

// lineNames has the names of all NumbersLines, with their units. requests_per_ks counts requests
// per 1000 s, because values are whole numbers.
var lineNames = [...]string{"pool_entries", "requests_per_ks", "tokens_per_s", "tpot_p50_us", "tpot_p99_us", "ttft_p50_us", "ttft_p99_us"}
