package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Later is a part of the file that this version does nothing with. With the
// values that turn it off it may be written down, so that one file serves this
// version and the next; anything else is refused rather than ignored.
type Later map[string]any

var laterParts = []struct {
	path string
	what string
	part func(*Config) Later
	off  map[string]string // what each key may say
}{
	{"$.geo.ownership", "taking over another region's engines", func(c *Config) Later { return c.Geo.Ownership }, map[string]string{"engine": "off"}},
}

func (c *Config) checkLater(bad report) {
	for _, l := range laterParts {
		for key, value := range l.part(c) {
			if off, ok := l.off[key]; !ok || fmt.Sprint(value) != off {
				bad(l.path+"."+key, "%s is not in this version; leave %s out, or write {%s}", l.what, trimRoot(l.path), offText(l.off))
			}
		}
	}
}

// offText writes the harmless values as YAML, such as `mode: off`.
func offText(off map[string]string) string {
	var items []string
	for _, key := range slices.Sorted(maps.Keys(off)) {
		value := off[key]
		if value == "" {
			value = `""`
		}
		items = append(items, key+": "+value)
	}
	return strings.Join(items, ", ")
}
