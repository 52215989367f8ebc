package testbed

import (
	"fmt"
	"strings"
)

// PeersKey is a file of keys with which proxies sign what they send to each other.
const PeersKey = "a 0123456789abcdef0123456789abcdef\n"

// Engines is the part of a config file that lists engines, each by what stands in
// its braces.
func Engines(prefill, decode []string) string {
	return "engines:\n" + listed("prefill", prefill) + listed("decode", decode)
}

// Aggregated is the same part for engines that prefill and decode.
func Aggregated(list []string) string { return "engines:\n" + listed("aggregated", list) }

func listed(role string, list []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %s:\n", role)
	for _, e := range list {
		fmt.Fprintf(&b, "    - {%s}\n", e)
	}
	return b.String()
}

// EnginesAt is what stands in the braces of engines at these URLs, the same behind each.
func EnginesAt(urls []string, format string, args ...any) (list []string) {
	for _, u := range urls {
		list = append(list, fmt.Sprintf("url: %q", u)+fmt.Sprintf(format, args...))
	}
	return list
}
