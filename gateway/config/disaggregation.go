package config

import (
	"slices"

	"evenkeel/prefill"
)

// checkDisaggregation checks prefill.disaggregation. The prompt tokens that a decode rank may
// compute at once must fit into one of its steps, because all ranks of its group wait for the
// longest step.
func (c *Config) checkDisaggregation(bad report) {
	const path = "$.prefill.disaggregation"
	d := &c.Prefill.Disaggregation
	if d.Mode != prefill.DisaggregateAlways && d.Mode != prefill.DisaggregateConditional {
		bad(path+".mode", "%q is not a mode; write always, or conditional to have decode ranks compute short prompts", d.Mode)
	}
	if d.ThresholdTokens != prefill.AutoThreshold && d.Threshold() < 1 {
		bad(path+".threshold_tokens", "%q is no number of tokens; write 1 or more, or auto", d.ThresholdTokens)
	}
	if d.MaxLocalTokens < max(1, d.Threshold()) {
		bad(path+".max_local_tokens_per_rank", "%d is less than one prompt of threshold_tokens %s; write twice that", d.MaxLocalTokens,
			d.ThresholdTokens)
	}
	mayPrefill := func(e Engine) bool { return c.Profiles[e.Profile].AllowLocalPrefill }
	// Without any decode engine in the file, discovery may find one that may prefill.
	nonePrefills := len(c.Engines.Decode) > 0 && !slices.ContainsFunc(c.Engines.Decode, mayPrefill)
	if d.Mode == prefill.DisaggregateConditional && nonePrefills {
		bad(path+".mode", "no decode engine has a profile with allow_local_prefill: true, so nothing would be computed there; set it, or write "+
			"mode: always")
	}
	checked := map[string]bool{} // the profiles that are checked already, because each is reported once
	for _, e := range c.Engines.Decode {
		p := c.Profiles[e.Profile]
		stepTokens := p.MaxBatchedTokens // 0: unknown
		tooMuchForStep := stepTokens > 0 && stepTokens < d.MaxLocalTokens
		if !checked[e.Profile] && p.AllowLocalPrefill && tooMuchForStep {
			bad("$.profiles."+e.Profile+".allow_local_prefill", "its engines compute %d tokens per step (max_num_batched_tokens) and may get %d "+
				"(prefill.disaggregation.max_local_tokens_per_rank), so decode would wait for several steps; lower the latter, start the engines with "+
				"more, or write false",
				stepTokens, d.MaxLocalTokens)
		}
		checked[e.Profile] = true
	}
}
