package fit

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"time"
)

// Request is one line of evenkeel's request log, as much of
// it as fits need.
type Request struct {
	Model    string
	Prefill  string // engine that ran the probe
	Arrival  time.Time
	Finished time.Time
	Key      uint64 // keyed hash of the prompt; 0: the log has none
	Outcome  string
	Prompt   int // tokens
	Cached   int // of them found in the prefill engine's cache
	Output   int // tokens
	Attempts int // probes sent; the legs of a fan-out add up
	ProbeBS  int // other probes on the engine when this one was sent
	ProbeMs  float64
}

// RequestLog is a request log, in order of arrival.
type RequestLog struct {
	Requests []Request
	Cut      bool // the last line was not finished
}

// ReadRequestLog reads a request log, gzipped or not.
func ReadRequestLog(path string) (*RequestLog, error) {
	log := &RequestLog{}
	var err error
	log.Cut, err = readLines(path, func(line []byte) error {
		r, err := requestLine(line)
		if err == nil {
			log.Requests = append(log.Requests, r)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(log.Requests) == 0 {
		return nil, errors.New(path + ": no requests; serve --request-log FILE writes the log that fit reads")
	}
	slices.SortStableFunc(log.Requests, func(a, b Request) int { return a.Arrival.Compare(b.Arrival) })
	return log, nil
}

func requestLine(line []byte) (Request, error) {
	var l struct {
		Model     string    `json:"model"`
		PromptKey string    `json:"prompt_key"`
		Arrival   time.Time `json:"arrival"`
		Prefill   string    `json:"prefill"`
		Prompt    *int      `json:"prompt_tokens"`
		Cached    int       `json:"cached_tokens"`
		Output    *int      `json:"output_tokens"`
		ProbeBS   int       `json:"probe_bs"`
		ProbeMs   float64   `json:"probe_ms"`
		TotalMs   float64   `json:"total_ms"`
		Attempts  int       `json:"attempts"`
		Outcome   *string   `json:"outcome"`
	}
	if err := decode(line, &l, "evenkeel's request log"); err != nil {
		return Request{}, err
	}
	switch {
	case l.Outcome == nil || l.Prompt == nil || l.Output == nil || l.Arrival.IsZero():
		return Request{},
			errors.New("not a line of evenkeel's request log: it has arrival, prompt_tokens, output_tokens and outcome; a trace goes to --trace")
	case min(*l.Prompt, *l.Output, l.Cached, l.ProbeBS, l.Attempts) < 0 || min(l.ProbeMs, l.TotalMs) < 0:
		return Request{}, errors.New("a negative number; tokens, attempts and times are counts")
	case max(*l.Prompt, *l.Output) > maxTokens:
		return Request{}, errors.New("more than " + strconv.Itoa(maxTokens) + " tokens in one request")
	}
	r := Request{
		Model: l.Model, Prefill: l.Prefill, Arrival: l.Arrival, Finished: l.Arrival.Add(time.Duration(l.TotalMs * float64(time.Millisecond))),
		Outcome: *l.Outcome, Prompt: *l.Prompt, Cached: l.Cached, Output: *l.Output, Attempts: l.Attempts, ProbeBS: l.ProbeBS, ProbeMs: l.ProbeMs,
	}
	if l.PromptKey != "" {
		key, err := strconv.ParseUint(l.PromptKey, 16, 64)
		if err != nil || len(l.PromptKey) != 16 {
			return Request{}, errors.New("prompt_key is " + strconv.Quote(l.PromptKey) + "; it is 16 hex digits")
		}
		r.Key = key
	}
	return r, nil
}

const maxTokens = 1 << 30

// models are the models of a log, ascending.
func models(requests []Request) []string {
	names := map[string]bool{}
	for _, r := range requests {
		names[r.Model] = true
	}
	return slices.Sorted(maps.Keys(names))
}
