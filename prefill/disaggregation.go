package prefill

import "strconv"

// Disaggregation configures whether prefill engines compute every prompt, or decode ranks compute short prompts themselves
// if their profile allows it.
type Disaggregation struct {
	Mode            string `yaml:"mode"`
	ThresholdTokens string `yaml:"threshold_tokens"`          // new tokens up to which a decode rank may compute a prompt itself, or auto
	MaxLocalTokens  int    `yaml:"max_local_tokens_per_rank"` // most prompt tokens that a decode rank may have to compute at a time
}

// The values of Mode: prefill engines compute every prompt, or decode ranks may compute short prompts themselves.
const (
	DisaggregateAlways      = "always"
	DisaggregateConditional = "conditional"
)

// DefaultLocalThreshold is the default of ThresholdTokens, in new prompt tokens.
const DefaultLocalThreshold = 256

// AutoThreshold is the value of ThresholdTokens for a threshold that follows the load of a rank.
const AutoThreshold = "auto"

// Threshold is ThresholdTokens as a number of tokens; 0 if it is no number, such as auto.
func (d *Disaggregation) Threshold() int {
	n, err := strconv.Atoi(d.ThresholdTokens)
	if err != nil {
		return 0
	}
	return n
}
