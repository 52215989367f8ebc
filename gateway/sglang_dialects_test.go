package gateway_test

import (
	"evenkeel/bench/lab/refengine"
)

// rooms are engines of SGLang that tell how much of a prompt was cached.
func rooms(o options) options {
	if o.prefill == nil {
		o.prefill = []refengine.Config{{PrefixCache: 4096, PromptTokensDetails: true}}
	}
	if o.decode == nil {
		o.decode = []refengine.Config{{DPSize: 2, DPMode: "internal", PromptTokensDetails: true}}
	}
	return o
}
