package geo

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"evenkeel/geo/policy"
	"evenkeel/prefill"
)

// ProbePath is the path of a probe, with which a dispatcher asks another for its state.
const ProbePath = "/evenkeel/peer/v1/probe"

const (
	version    = "1.0"
	maxProbe   = 64 << 10 // bytes of a question or an answer; a longer one is refused
	maxModels  = 256      // models of an answer; an answer with more is refused
	maxFreeFor = 1 << 16  // free places that are believed: fewer requests than that come between two probes
)

// question is the body of a probe; fields that this version does not know are ignored.
type question struct {
	Version string `json:"v"`
	ID      string `json:"id"`
	Boot    string `json:"boot"`
	Seq     uint64 `json:"seq"`
	SentUs  int64  `json:"t_us"`
}

// answer is what a dispatcher reports of itself. It names models, never
// prompts, tenants or sessions.
type answer struct {
	Version  string  `json:"v"`
	ID       string  `json:"id"`
	Region   string  `json:"region"`
	Boot     string  `json:"boot"`
	Seq      uint64  `json:"seq"`
	ProcUs   float64 `json:"proc_us"`
	Draining bool    `json:"draining"`
	Tenure
	RTTMs  map[string]float64      `json:"rtt_ms,omitempty"` // to its peers: the nearest peer takes over its region
	Models map[string]policy.Offer `json:"models"`
}

// ErrProbe says that the answer to a probe cannot be believed.
var ErrProbe = errors.New("the answer to a probe cannot be believed")

// readAnswer reads an answer. The policy refuses impossible numbers later;
// numbers that are only too large are reduced to the limit here.
func readAnswer(text []byte) (answer, error) {
	var a answer
	if len(text) > maxProbe {
		return a, fmt.Errorf("%w: over %d bytes", ErrProbe, maxProbe)
	}
	if err := json.Unmarshal(text, &a); err != nil {
		return a, fmt.Errorf("%w: %w", ErrProbe, err)
	}
	if !ValidName(a.ID) || !ValidName(a.Boot) || len(a.Models) > maxModels {
		return a, fmt.Errorf("%w: its id, boot or number of models", ErrProbe)
	}
	for name, o := range a.Models {
		if len(name) > maxModelName {
			return a, fmt.Errorf("%w: a model's name over %d bytes", ErrProbe, maxModelName)
		}
		o.Free = min(o.Free, maxFreeFor)
		a.Models[name] = o
	}
	a.ProcUs = max(0, a.ProcUs)
	return a, nil
}

const maxModelName = 512

// major is the first number of a version; -1: there is none.
func major(v string) int {
	first, _, _ := strings.Cut(v, ".")
	n, err := strconv.Atoi(first)
	if err != nil {
		return -1
	}
	return n
}

// Tenure is the part of an answer that says what a dispatcher owns.
type Tenure struct {
	Epochs map[string]int64 `json:"epochs,omitempty"`
	Seen   map[string]int64 `json:"seen,omitempty"` // by region or group: the highest epochs that it knows of
	Lent   map[string]int   `json:"lent,omitempty"` // requests that it still runs on engines which it has handed back

	// For siblings only.
	Groups  map[string]int64         `json:"groups,omitempty"`  // epochs of the decode groups that it admits to
	Decodes []string                 `json:"decodes,omitempty"` // the models of these groups
	Prefill map[string]prefill.Share `json:"prefill,omitempty"` // its share of the load of prefill engines
}

// ProbeReport is what a peer's answer to a probe said.
type ProbeReport struct {
	Peer, Region string
	Tenure
	RTTMs map[string]float64 // to its own peers
}
