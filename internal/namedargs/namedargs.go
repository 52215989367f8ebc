// Package namedargs reads and writes the notation for a policy and its settings, which is used in
// the config file, in flags and on the admin listener: `name`, `name:key=value,key=value` or
// `name:preset,key=value`.
package namedargs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"evenkeel/internal/spelling"
)

// Setting is a key and its value, as text that is not checked yet.
type Setting struct{ Key, Value string }

func (s Setting) String() string { return s.Key + "=" + s.Value }

// Parse splits a text into a name, which must be in names, and settings. A preset is a part of
// the name, as in br0:paper.
func Parse(text string, names []string) (name string, set []Setting, err error) {
	items := strings.Split(strings.TrimSpace(text), ",")
	name, first, colon := strings.Cut(items[0], ":")
	items = items[1:]
	hasPresets := slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, name+":") })
	switch {
	case colon && hasPresets && !strings.Contains(first, "="): // the name of a preset comes after the colon
		name += ":" + first
	case colon: // the first setting comes after the colon
		items = append([]string{first}, items...)
	}
	if !slices.Contains(names, name) {
		return "", nil, fmt.Errorf("unknown policy %q%s; there are %s", name, spelling.Hint(name, names), strings.Join(names, ", "))
	}
	for _, item := range items {
		key, value, assigns := strings.Cut(item, "=")
		switch {
		case !assigns:
			return "", nil, fmt.Errorf("policy %s: %q is no setting; write key=value", name, item)
		case slices.ContainsFunc(set, func(s Setting) bool { return s.Key == key }):
			return "", nil, fmt.Errorf("policy %s: %s is set twice", name, key)
		}
		set = append(set, Setting{key, value})
	}
	return name, set, nil
}

// Apply reads the settings of a policy into v. After an error, v may have some of the settings.
func Apply[T any](name string, keys []Key[T], v *T, set ...Setting) error {
	for _, s := range set {
		k := find(keys, s.Key)
		if k == nil {
			names := namesOf(keys)
			return fmt.Errorf("policy %s: unknown key %q%s; it takes %s", name, s.Key, spelling.Hint(s.Key, names),
				cmp.Or(strings.Join(names, ", "), "none"))
		}
		if !k.Read(v, s.Value) {
			return fmt.Errorf("policy %s: %s: want %s", name, s, k.Must)
		}
	}
	return nil
}

// Text returns a text from which Parse and Apply make these values: the name, and the settings
// that differ from the defaults, in the order of the keys.
func Text[T any](name string, keys []Key[T], v, defaults *T) string {
	text, separator := name, ":"
	if strings.Contains(name, ":") { // the name has a preset after its colon
		separator = ","
	}
	for i := range keys {
		if value := keys[i].Show(v); value != keys[i].Show(defaults) {
			text += separator + keys[i].Name + "=" + value
			separator = ","
		}
	}
	return text
}

// Has says whether a policy with these keys has a setting with this name.
func Has[T any](keys []Key[T], name string) bool { return find(keys, name) != nil }

// find returns the key with this name; nil: there is none.
func find[T any](keys []Key[T], name string) *Key[T] {
	for i := range keys {
		if keys[i].Name == name {
			return &keys[i]
		}
	}
	return nil
}

// namesOf returns the names of the keys, in their order, for error messages.
func namesOf[T any](keys []Key[T]) []string {
	names := make([]string, len(keys))
	for i := range keys {
		names[i] = keys[i].Name
	}
	return names
}

// List splits a list of policies at its commas. An item that has `=` without a `:` before it is a
// setting of the policy before it: "jsq,br0:window=4,theta=0" has two policies.
func List(list string) []string {
	var texts []string
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		before, _, assigns := strings.Cut(item, "=")
		if assigns && !strings.Contains(before, ":") && len(texts) > 0 {
			texts[len(texts)-1] += "," + item
		} else {
			texts = append(texts, item)
		}
	}
	return texts
}
