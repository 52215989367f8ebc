package prefill

import "strconv"

// Disaggregation configures whether decode ranks compute short prompts themselves, if their profile
// allows it.
type Disaggregation struct {
	Mode            string `yaml:"mode"`
	ThresholdTokens string `yaml:"threshold_tokens"`          // new tokens up to which a decode rank may compute a prompt itself, or auto
	MaxLocalTokens  int    `yaml:"max_local_tokens_per_rank"` // most prompt tokens that a decode rank may have to compute at a time
}

// The values of Mode: prefill engines compute every prompt, or decode ranks may compute short ones.
const (
	DisaggregateAlways      = "always"
	DisaggregateConditional = "conditional"
)

// DefaultLocalThreshold is in new prompt tokens.
const DefaultLocalThreshold = 256

// AutoThreshold follows the load of a rank.
const AutoThreshold = "auto"

// Threshold is ThresholdTokens as a number; 0 for auto.
func (d *Disaggregation) Threshold() int {
	n, err := strconv.Atoi(d.ThresholdTokens)
	if err != nil {
		return 0
	}
	return n
}
