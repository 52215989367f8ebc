package gateway_test

import ()

// keeps are engines of vllm-ascend that run without the recompute scheduler.
func keeps(o options) options {
	o.profile.GivesBack = new(false)
	return o
}
