package gateway_test

import ()

// asked are the requests that decode engines, or ranks that do both, and prefill engines had so far.
func (c *cluster) asked() (decode, prefill int64) {
	for _, e := range c.decode {
		decode += e.Stats().Requests
	}
	for _, e := range c.prefill {
		prefill += e.Stats().Requests
	}
	return decode, prefill
}
