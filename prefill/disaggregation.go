package prefill

import "strconv"

// Disaggregation is whether every prompt is computed by a prefill engine, or
// short ones by decode ranks whose profile allows it.
type Disaggregation struct {
	Mode            string `yaml:"mode"`
	ThresholdTokens string `yaml:"threshold_tokens"`          // new tokens up to which a rank may compute a prompt itself, or auto
	MaxLocalTokens  int    `yaml:"max_local_tokens_per_rank"` // prompt tokens that one rank may have to compute at once
}

// The modes.
const (
	DisaggregateAlways      = "always"
	DisaggregateConditional = "conditional"
)

// DefaultLocalThreshold is how many tokens a decode rank may compute unless told
// otherwise.
const DefaultLocalThreshold = 256

// AutoThreshold is a threshold that follows what a rank has to do.
const AutoThreshold = "auto"

// Threshold is the number written; 0 for auto.
func (d *Disaggregation) Threshold() int {
	n, err := strconv.Atoi(d.ThresholdTokens)
	if err != nil {
		return 0
	}
	return n
}
