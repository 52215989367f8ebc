package geo

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"evenkeel/geo/policy"
	"evenkeel/internal/words"
	"evenkeel/prefill"
)

// ProbePath is the path of probes, by which a proxy asks another one for its state.
const ProbePath = "/evenkeel/peer/v1/probe"

const (
	version   = "1.0"
	maxProbe  = 64 << 10 // bytes; a longer question or answer is refused
	maxModels = 256      // an answer with more models is refused
	// maxFree is more than the requests that come between two probes.
	maxFree = 1 << 16
)

// question is the body of a probe. Unknown fields are ignored.
type question struct {
	Version string `json:"v"`
	ID      string `json:"id"`
	Boot    string `json:"boot"`
	Seq     uint64 `json:"seq"`
	SentUs  int64  `json:"t_us"`
}

// answer is the answer to a probe: the state of a proxy. It contains names of models, but no
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
	// Round trips from the sender to its peers, by the peers' ids. If the sender dies, the nearest
	// peer takes the sender's region over.
	RTTMs  map[string]float64      `json:"rtt_ms,omitempty"`
	Models map[string]policy.Offer `json:"models"`
}

// ErrProbe is the error for a wrong answer to a probe.
var ErrProbe = errors.New("the answer to a probe cannot be believed")

// readAnswer reads the answer to a probe. It lowers a too large Free of an offer to maxFree, and
// raises a ProcUs below 0 to 0. An answer with a load below 0 on a prefill engine is refused as a
// whole. All other numbers stay as they came, and the policy later ignores offers with impossible
// numbers.
func readAnswer(text []byte) (answer, error) {
	var a answer
	if len(text) > maxProbe {
		return a, fmt.Errorf("%w: over %d bytes", ErrProbe, maxProbe)
	}
	if err := json.Unmarshal(text, &a); err != nil {
		return a, fmt.Errorf("%w: %w", ErrProbe, err)
	}
	// Both go into headers of later requests to the peer.
	namesAreValid := ValidName(a.ID) && ValidName(a.Boot)
	if !namesAreValid || len(a.Models) > maxModels {
		return a, fmt.Errorf("%w: its id, boot or number of models", ErrProbe)
	}
	for _, name := range slices.Concat(slices.Collect(maps.Keys(a.Models)), a.Decodes) {
		if !words.IsName(name) {
			return a, fmt.Errorf("%w: %.40q is no name of a model; a name has 1 to %d bytes, all of printable characters", ErrProbe, name,
				words.MaxName)
		}
	}
	for name, o := range a.Models {
		o.Free = min(o.Free, maxFree)
		a.Models[name] = o
	}
	for _, load := range a.Prefill {
		// In the sum over all proxies, a negative load would hide the load of the others.
		if load.Unanswered < 0 || load.NewTokens < 0 || load.KVTokens < 0 {
			return a, fmt.Errorf("%w: its load on a prefill engine is below 0", ErrProbe)
		}
	}
	a.ProcUs = max(0, a.ProcUs)
	return a, nil
}

// major is the major number of a version; -1: the version is invalid.
func major(v string) int {
	first, _, _ := strings.Cut(v, ".")
	n, err := strconv.Atoi(first)
	if err != nil {
		return -1
	}
	return n
}

// Tenure is the part of an answer that lists the regions or decode groups that a proxy owns.
type Tenure struct {
	Epochs map[string]int64 `json:"epochs,omitempty"` // by region: the epoch of the lease that the sender holds or has read last
	Seen   map[string]int64 `json:"seen,omitempty"`   // by region or group: the highest epoch that the sender has seen
	Lent   map[string]int   `json:"lent,omitempty"`   // by region that was handed back: requests that the sender still runs there

	// The fields below are only used by siblings.
	Groups  map[string]int64         `json:"groups,omitempty"`  // by decode group that the sender owns: the epoch of its lease
	Decodes []string                 `json:"decodes,omitempty"` // models of the decode groups that the sender owns
	Prefill map[string]prefill.Share `json:"prefill,omitempty"` // by prefill engine: the sender's share of the engine's load
}

// ProbeReport is the part of a peer's answer to a probe that the caller of New gets.
type ProbeReport struct {
	Peer   string // the peer's id, by its answer
	Region string // the peer's region, by its entry of geo.peers
	Tenure
	RTTMs map[string]float64 // round trips to the peer's own peers, by id
}
