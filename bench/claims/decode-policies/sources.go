package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/decode"
)

// source is a trace that policies are compared on.
type source struct {
	name  string // in tables
	title string
	flag  string // what `evenkeel simulate --trace` calls it; empty: it cannot
	from  decode.Source

	mean float64 // output tokens
}

// bookSources are the traces of a run.
type bookSources struct {
	real  []*source
	drawn []*source // none beside traces that a user gave
	code  *source   // the drawn one of short answers

	prefixed *source // the drawn one whose prompts share blocks

	moon, azure, azure200 *source // nil beside traces that a user gave
}

// longAnswers is what the reference keeps of Azure's trace, as the paper cut its
// own.
const longAnswers = 200

func newSources(paths []string) (*bookSources, error) {
	if len(paths) > 0 {
		return givenSources(paths)
	}
	azure := trace.Azure()
	s := &bookSources{
		moon:  ofTrace("mooncake", "Mooncake's conversation trace", "bench/lab/trace/mooncake-conversation.jsonl.gz", trace.Mooncake()),
		azure: ofTrace("azure", "Azure's conversation trace of 2023", "bench/lab/trace/azure-2023-conv.csv.gz", azure),
		azure200: ofTrace("azure >= 200", "the requests of Azure's trace with at least 200 output tokens", "",
			azure.Where(func(r trace.Request) bool { return r.Output >= longAnswers })),
	}
	s.real = []*source{s.moon, s.azure}
	for _, name := range trace.SynthNames() {
		t, err := trace.Synth(name, 12_000, 1)
		if err != nil {
			return nil, err
		}
		flag := trace.SynthPrefix + name
		d := &source{name: flag, title: "`" + flag + "`", flag: flag, from: decode.Source{Synth: name}, mean: t.Summary().Output.Mean}
		if name == trace.Prefixed { // of the prefill tables
			d.from = decode.Source{Trace: t}
			s.prefixed = d
			continue
		}
		s.drawn = append(s.drawn, d)
		if name == "code" {
			s.code = d
		}
	}
	return s, nil
}

func ofTrace(name, title, flag string, t *trace.Trace) *source {
	return &source{name: name, title: title, flag: flag, from: decode.Source{Trace: t}, mean: t.Summary().Output.Mean}
}

// givenSources reads a user's files. Files of the same name are told apart by
// their place in the list.
func givenSources(paths []string) (*bookSources, error) {
	s, seen := &bookSources{}, map[string]bool{}
	for i, path := range paths {
		t, err := trace.Read(path, trace.Options{})
		if err != nil {
			return nil, err
		}
		name := strings.ReplaceAll(filepath.Base(path), "|", "/")
		if seen[name] {
			name = fmt.Sprintf("%s (%d)", name, i+1)
		}
		seen[name] = true
		s.real = append(s.real, ofTrace(name, "`"+name+"`", path, t))
	}
	return s, nil
}

// describe is a line of what the trace is.
func (s *source) describe() string {
	t := s.from.Trace
	if t == nil {
		return fmt.Sprintf("%s: drawn anew for every seed; output tokens: mean %.0f", s.title, s.mean)
	}
	m := t.Summary()
	return fmt.Sprintf("%s: %s requests; prompt tokens: mean %s, median %s; output tokens: mean %.0f, median %d, 99 %% below %s",
		s.title, report.Grouped(float64(m.Requests), 0), report.Grouped(m.Prompt.Mean, 0), report.Grouped(float64(m.Prompt.P50), 0), m.Output.Mean, m.Output.P50,
		report.Grouped(float64(m.Output.P99), 0))
}

// long are the drawn traces but the one of short answers.
func (s *bookSources) long() []*source {
	return slices.DeleteFunc(slices.Clone(s.drawn), func(d *source) bool { return d == s.code })
}
