package policytables

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/decode"
)

// Source is a trace that policies are compared on.
type Source struct {
	Name  string // in tables
	Title string
	Flag  string // what `evenkeel simulate --trace` calls it; empty: the command line does not know it
	From  decode.Source

	MeanOutput float64 // tokens
}

// Traces are those of a run.
type Traces struct {
	Real  []*Source
	Drawn []*Source // none beside traces that a user gives
	Code  *Source   // the drawn one of short answers

	Prefixed *Source // the drawn one whose prompts share blocks

	Mooncake, Azure, Azure200 *Source // nil beside traces that a user gives
}

// longAnswers is what the reference keeps of Azure's trace, as the paper cut its
// own.
const longAnswers = 200

// ReadTraces reads a user's files; without any, our own traces.
func ReadTraces(files []string) (*Traces, error) {
	if len(files) > 0 {
		return givenTraces(files)
	}
	azure := trace.Azure()
	s := &Traces{
		Mooncake: ofTrace("mooncake", "Mooncake's conversation trace", "bench/lab/trace/mooncake-conversation.jsonl.gz", trace.Mooncake()),
		Azure:    ofTrace("azure", "Azure's conversation trace of 2023", "bench/lab/trace/azure-2023-conv.csv.gz", azure),
		Azure200: ofTrace("azure >= 200", "the requests of Azure's trace with at least 200 output tokens", "",
			azure.Where(func(r trace.Request) bool { return r.Output >= longAnswers })),
	}
	s.Real = []*Source{s.Mooncake, s.Azure}
	for _, flag := range trace.SynthNames() {
		name := strings.TrimPrefix(flag, trace.SynthPrefix)
		t, err := trace.Synth(name, 12_000, 1)
		if err != nil {
			return nil, err
		}
		d := &Source{Name: flag, Title: "`" + flag + "`", Flag: flag, From: decode.Source{Synth: name}, MeanOutput: t.Summary().Output.Mean}
		if name == trace.Prefixed { // prefill policies run on parts of it, as they do on a real trace
			d.From = decode.Source{Trace: t}
			s.Prefixed = d
			continue
		}
		s.Drawn = append(s.Drawn, d)
		if name == "code" {
			s.Code = d
		}
	}
	return s, nil
}

func ofTrace(name, title, flag string, t *trace.Trace) *Source {
	return &Source{Name: name, Title: title, Flag: flag, From: decode.Source{Trace: t}, MeanOutput: t.Summary().Output.Mean}
}

// givenTraces reads a user's files. Files of the same name are told apart by
// their place in the list.
func givenTraces(files []string) (*Traces, error) {
	s, seen := &Traces{}, map[string]bool{}
	for i, path := range files {
		t, err := trace.Read(path, trace.Options{})
		if err != nil {
			return nil, err
		}
		name := strings.ReplaceAll(filepath.Base(path), "|", "/")
		if seen[name] {
			name = fmt.Sprintf("%s (%d)", name, i+1)
		}
		seen[name] = true
		s.Real = append(s.Real, ofTrace(name, "`"+name+"`", path, t))
	}
	return s, nil
}

// Describe is a line that says what the trace is.
func (s *Source) Describe() string {
	t := s.From.Trace
	if t == nil {
		return fmt.Sprintf("%s: drawn anew for every seed; output tokens: mean %.0f", s.Title, s.MeanOutput)
	}
	m := t.Summary()
	return fmt.Sprintf("%s: %s requests; prompt tokens: mean %s, median %s; output tokens: mean %.0f, median %d, 99 %% below %s",
		s.Title, report.Grouped(float64(m.Requests), 0), report.Grouped(m.Prompt.Mean, 0), report.Grouped(float64(m.Prompt.P50), 0),
		m.Output.Mean, m.Output.P50,
		report.Grouped(float64(m.Output.P99), 0))
}

// Shares says whether prompts of the trace share blocks.
func (s *Source) Shares() bool {
	return slices.ContainsFunc(s.From.Trace.Requests, func(r trace.Request) bool { return len(r.HashIDs) > 0 })
}

// Long are the drawn traces but the one of short answers.
func (s *Traces) Long() []*Source {
	return slices.DeleteFunc(slices.Clone(s.Drawn), func(d *Source) bool { return d == s.Code })
}
