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

// ProbePath is where a dispatcher asks another how it is.
const ProbePath = "/evenkeel/peer/v1/probe"

const (
	version    = "1.0"
	maxProbe   = 64 << 10 // bytes of a question or an answer; a longer one is none
	maxModels  = 256      // of an answer
	maxFreeFor = 1 << 16  // places that are believed: nobody sends more between two probes
)

// question is what a probe asks; fields that are not known are ignored.
type question struct {
	Version string `json:"v"`
	ID      string `json:"id"`
	Boot    string `json:"boot"`
	Seq     uint64 `json:"seq"`
	SentUs  int64  `json:"t_us"`
}

// answer is what a dispatcher says of itself. It names models, never
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
	RTTMs  map[string]float64      `json:"rtt_ms,omitempty"` // to its peers: who is nearest takes its region over
	Models map[string]policy.Offer `json:"models"`
}

// ErrProbe is an answer to a probe that cannot be believed.
var ErrProbe = errors.New("the answer to a probe cannot be believed")

// readAnswer reads an answer. Numbers that no region can have are left for the
// policy to refuse, those that are only too large are cut.
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

// major is the first number of a version, -1 for none.
func major(v string) int {
	first, _, _ := strings.Cut(v, ".")
	n, err := strconv.Atoi(first)
	if err != nil {
		return -1
	}
	return n
}

// Tenure is what a dispatcher says in its probes of what it owns.
type Tenure struct {
	Epochs map[string]int64 `json:"epochs,omitempty"`
	Seen   map[string]int64 `json:"seen,omitempty"` // highest epochs that it has seen or heard of, of regions or groups
	Lent   map[string]int   `json:"lent,omitempty"` // requests it still runs on engines that it has handed back

	// To siblings.
	Groups  map[string]int64         `json:"groups,omitempty"`  // epochs of the decode groups that it admits to
	Decodes []string                 `json:"decodes,omitempty"` // models of these
	Prefill map[string]prefill.Share `json:"prefill,omitempty"` // what it has on prefill engines
}

// ProbeReport is what a peer's probe said.
type ProbeReport struct {
	Peer, Region string
	Tenure
	RTTMs map[string]float64 // to its own peers
}
