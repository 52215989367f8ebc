// Package trace reads request traces: when requests arrived, how long their
// prompts and answers were, and, where known, which blocks prompts share.
//
// Two formats are read, gzipped or not: CSV with a header, such as Azure's (TIMESTAMP,
// ContextTokens, GeneratedTokens) or BurstGPT's, and a JSON object a line, such as
// Mooncake's (timestamp in ms, input_length, output_length, hash_ids) or evenkeel's
// request log. names.go has the names that are known. A file is read whole or not at
// all: whatever is not understood is an error with file and line.
package trace

import (
	"fmt"
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// Request is one request of a trace.
type Request struct {
	At      time.Duration // after the first request of the trace
	Prompt  int           // tokens
	Output  int           // tokens, at least 1
	HashIDs []uint64      // one a block of BlockTokens, equal for equal prefixes; nil: unknown
	Key     uint64        // which prompt it is, where a synthetic trace knows; 0: unknown, as in both formats
}

// BlockTokens is how many prompt tokens a hash id stands for; the last block
// of a prompt may be shorter.
const BlockTokens = 512

// Trace is what a file held (or Synth drew), in order of arrival.
type Trace struct {
	Requests []Request
	Format   Format    // AzureCSV, MooncakeJSONL or Synthetic
	Start    time.Time // of the first request; zero when the file's clock is no date

	NoOutput  int  // rows left out because they generated no token
	NoPrompt  int  // rows left out because they had no prompt
	CutHashes int  // requests that had more hash ids than blocks; the ids beyond were dropped
	Unsorted  bool // rows were out of order and were sorted; equal times kept their order
	Cut       bool // there was more than Options.Max allowed
	Slow      bool // plain numbers were read as seconds, and more than a minute lies between two requests in the mean
}

// Notes says in a sentence each what was changed on reading, for a report.
func (t *Trace) Notes() []string {
	var notes []string
	if t.NoOutput > 0 {
		notes = append(notes, fmt.Sprintf("%d rows without output tokens were left out", t.NoOutput))
	}
	if t.NoPrompt > 0 {
		notes = append(notes, fmt.Sprintf("%d rows without prompt tokens were left out", t.NoPrompt))
	}
	if t.CutHashes > 0 {
		notes = append(notes,
			fmt.Sprintf("%d requests had more hash ids than blocks of %d tokens; the ids beyond were dropped", t.CutHashes, BlockTokens))
	}
	if t.Unsorted {
		notes = append(notes, "rows were not in order of arrival and were sorted")
	}
	if t.Slow {
		notes = append(notes, "times that are plain numbers were read as seconds, which makes more than a minute between two requests; if they "+
			"are milliseconds, call the column timestamp_ms")
	}
	if t.Cut {
		notes = append(notes, fmt.Sprintf("only the first %d requests were read", len(t.Requests)))
	}
	return notes
}

// Where returns a trace of the requests that keep takes, at their own times.
func (t *Trace) Where(keep func(Request) bool) *Trace {
	out := &Trace{Format: t.Format, Start: t.Start}
	for _, r := range t.Requests {
		if keep(r) {
			out.Requests = append(out.Requests, r)
		}
	}
	return out
}

// Summary describes a trace in numbers.
type Summary struct {
	Requests       int
	Duration       time.Duration // from the first arrival to the last
	Prompt, Output Stats
}

// Stats describe a number of tokens. Percentiles are nearest rank: a value that occurred.
type Stats struct {
	Mean               float64
	P50, P90, P99, Max int
}

// Summary computes the summary; all zero for no requests.
func (t *Trace) Summary() Summary {
	if len(t.Requests) == 0 {
		return Summary{}
	}
	return Summary{
		Requests: len(t.Requests),
		Duration: t.Requests[len(t.Requests)-1].At,
		Prompt:   statsOf(t.Requests, func(r Request) int { return r.Prompt }),
		Output:   statsOf(t.Requests, func(r Request) int { return r.Output }),
	}
}

func statsOf(rs []Request, tokens func(Request) int) Stats {
	values := make([]float64, len(rs))
	for i, r := range rs {
		values[i] = float64(tokens(r))
	}
	slices.Sort(values)
	rank := func(p float64) int { return int(stats.Percentile(values, p)) }
	return Stats{Mean: stats.Mean(values), P50: rank(0.50), P90: rank(0.90), P99: rank(0.99), Max: rank(1)}
}

func (s Summary) String() string {
	return fmt.Sprintf("%d requests in %v; prompt tokens mean %.0f p50 %d p90 %d p99 %d max %d; output tokens mean %.0f p50 %d p90 %d p99 %d "+
		"max %d",
		s.Requests, s.Duration.Round(time.Millisecond), s.Prompt.Mean, s.Prompt.P50, s.Prompt.P90, s.Prompt.P99, s.Prompt.Max,
		s.Output.Mean, s.Output.P50, s.Output.P90, s.Output.P99, s.Output.Max)
}

// Resident is the mean over decode steps of what a running request holds, in KV
// tokens.
func Resident(requests []Request) float64 {
	outputs, held := 0.0, 0.0
	for _, r := range requests {
		s, o := float64(r.Prompt), float64(r.Output)
		outputs += o
		held += o*s + o*(o-1)/2
	}
	return held / outputs
}
