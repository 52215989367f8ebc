package config

import (
	"slices"
	"strings"

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
			s.gone = append(s.gone, s.atToken(v.Key.GetToken(), at,
				"this key is gone and has no effect, its value is always %s: delete it, because the next release refuses it", value))
		}
		return is
	})
}

// setting is a key of geo that is a setting of geo.policy now.
type setting struct {
	at         *Error
	key, value string
}

// dropMoved takes geo.tau and geo.cost out of geo, and notes what they said.
func (s *source) dropMoved(n *ast.MappingNode, path string) {
	if path != "$.geo" {
		return
	}
	note := func(v *ast.MappingValueNode, path string) {
		key := v.Key.GetToken()
		s.moved = append(s.moved, setting{s.atToken(key, path+"."+key.Value, ""), key.Value, v.Value.GetToken().Value})
	}
	n.Values = slices.DeleteFunc(n.Values, func(v *ast.MappingValueNode) bool {
		switch v.Key.GetToken().Value {
		case "tau":
			note(v, path)
			return true
		case "cost":
			if costs, ok := v.Value.(*ast.MappingNode); ok {
				for _, cost := range costs.Values {
					note(cost, path+".cost")
				}
			}
			return true
		}
		return false
	})
}

// moved says for each of those what to write instead: the policy with all settings that it takes.
func (c *Config) moved() (found problems) {
	settings := c.Geo.Settings()
	text, taken := c.Geo.Policy, map[string]bool{}
	name, _, _ := strings.Cut(text, ":")
	for _, m := range c.source.moved {
		separator := ":"
		if strings.Contains(text, ":") {
			separator = ","
		}
		more := text + separator + m.key + "=" + m.value
		if _, err := settings.Parse(more); err == nil && !(name == "gorgo" && m.key == "load") { // gorgo never looked at this key
			text, taken[m.key] = more, true
		}
	}
	line := text
	if p, err := settings.Parse(text); err == nil {
		line = p.String()
	}
	for _, m := range c.source.moved {
		e := *m.at
		switch {
		case taken[m.key] && line != c.Geo.Policy:
			e.Msg = "this key is gone, it is a setting of the policy now: delete it, and write geo.policy: \"" + line + "\""
		case taken[m.key]:
			e.Msg = "this key is gone, and the policy " + name + " has this value without it: delete it"
		default:
			e.Msg = "this key is gone, and the policy " + name + " makes nothing of it: delete it"
		}
		found = append(found, &e)
	}
	return found
}
