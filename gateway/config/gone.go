package config

import (
	"slices"

	"github.com/goccy/go-yaml/ast"
)

// gone are the keys that became constants, each with its value. A file that still has one is
// read as if it had not, and its user is told the value that counts.
var gone = map[string]string{
	"$.advice.calm":                   "10m",
	"$.advice.window":                 "1m",
	"$.bind.confirm":                  "100ms",
	"$.bind.grace":                    "5s",
	"$.dispatch.twin_share":           "0.01",
	"$.limits.client_backlog_bytes":   "262144",
	"$.limits.client_lag":             "5m",
	"$.prefill.calibration.half_life": "500",
	"$.prefill.hotspot.class_tokens":  "[512, 4096]",
	"$.prefill.hotspot.max_classes":   "256",
	"$.prefill.hotspot.max_filter":    "1m",
	"$.prefill.hotspot.min_requests":  "20",
	"$.prefill.hotspot.window":        "1m",
	"$.prefill.index.block_bytes":     "256",
	"$.prefill.index.speculative_ttl": "2s",
	"$.prefill.scrape.misses":         "3",
}

// dropGone takes the keys that are gone out of a mapping, and notes where they were.
func (s *source) dropGone(n *ast.MappingNode, path string) {
	n.Values = slices.DeleteFunc(n.Values, func(v *ast.MappingValueNode) bool {
		at := path + "." + v.Key.GetToken().Value
		value, is := gone[at]
		if is {
			s.gone = append(s.gone, s.atToken(v.Key.GetToken(), at, "this key is gone and has no effect, its value is always %s: delete it, because the next release refuses it", value))
		}
		return is
	})
}
